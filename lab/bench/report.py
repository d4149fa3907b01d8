"""The table, for people and for documents: path, ours, beside, ratio, goal. Knows no measurement.

    ctxcache bench --json > lab/results/DATE-bench.json
    python -m lab.bench.report lab/results/DATE-bench.json lab/notes/bench.md

The second command puts a run's table into a document, between its two marks. Worst case: a document without
the marks, or a result of another schema, and nothing is changed.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from lab.bench.machine import NOISY_CORES
from lab.bench.row import Spread
from lab.bench.run import MEASURED, Result, Run

TITLES = ("path", "ours", "beside", "ratio [p10-p90]", "goal", "met")


def cells(result: Result) -> tuple[str, str, str, str, str, str]:
    """One line of the table."""
    if result.status != MEASURED or result.ratio is None:
        return (result.path, "-", result.beside_what, f"{result.status}: {result.problem}", result.goal, "-")
    beside = f"{_figure(result, result.beside)} {result.beside_what}" if result.beside else result.beside_what
    return (
        result.path,
        _figure(result, result.ours),
        beside,
        _ratio(result.ratio),
        result.goal,
        "yes" if result.is_met else "NO",
    )


def markdown(results: Sequence[Result]) -> str:
    """The table as Markdown."""
    lines = ["| " + " | ".join(TITLES) + " |", "|" + "---|" * len(TITLES)]
    lines += ["| " + " | ".join(cells(result)) + " |" for result in results]
    return "\n".join(lines) + "\n"


def remarks(results: Sequence[Result]) -> list[str]:
    """Facts beside the figures, and which rows ran while others used the machine."""
    lines = []
    for result in results:
        facts = [f"{name} {value}" for name, value in result.notes.items()]
        if result.foreign_cores > NOISY_CORES:
            facts.append(f"NOISY: others kept {result.foreign_cores:.2f} cores busy")
        if facts:
            lines.append(f"{result.name}: " + "; ".join(facts))
    return lines


def _figure(result: Result, values: Sequence[float]) -> str:
    middle = Spread.of(values).median
    if result.bytes_a_round:
        return f"{result.bytes_a_round / middle / 1e9:.2f} GB/s"
    if result.unit == "CPU s":
        gigabytes = result.notes.get("gigabytes a round")
        return (
            f"{middle / gigabytes:.2f} CPU s/GB"
            if isinstance(gigabytes, float)
            else f"{_duration(middle)} of CPU"
        )
    return _duration(middle)


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.0f} us"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.3g} [{spread.p10:.3g}-{spread.p90:.3g}]"


BEGIN, END = "<!-- bench: begin -->\n", "<!-- bench: end -->\n"


def filled(document: str, run: Run, result: str) -> str:
    """The document with the run's table in place of the one before. Raises ValueError without the marks."""
    head, begin, rest = document.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{BEGIN.strip()} and {END.strip()} are not in the document")
    return f"{head}{begin}{section(run, result)}{end}{tail}"


def section(run: Run, result: str) -> str:
    """The table, where it was taken, and what has to be known of its rows."""
    taken = (
        f"`{run.command}` on {run.date[:10]}: {run.machine['cpu']}, {run.machine['core_count']} cores, "
        f"{run.machine['disk']}, Linux {run.machine['kernel']}; load at start {run.load_at_start[0]}; "
        f"{run.round_count} rounds; all rounds in `{result}`."
    )
    warning = " Sizes are tiny: these figures mean nothing." if run.is_quick else ""
    # The result file has every fact of every row; a document has those that put a figure in doubt, or say how
    # much of a goal can be had.
    told = ("NOISY", "a bare socket", "a bare echo")
    doubts = "".join(f"* {line}\n" for line in remarks(run.rows) if any(each in line for each in told))
    return f"\n{taken}{warning}\n\n{markdown(run.rows)}\n{doubts}"


def main(arguments: list[str]) -> int:
    """Fill the document, named second, from the result file that is named first."""
    if len(arguments) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    result, document = arguments
    run = Run.from_json(Path(result).read_text())
    Path(document).write_text(filled(Path(document).read_text(), run, result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
