"""Puts a run's table into a document, between its two marks.

    ctxcache bench --json > benchmarks/results/DATE-bench.json
    python -m ctxcache.bench.document benchmarks/results/DATE-bench.json docs/performance.md

Worst case: a document without the marks, or a result of another schema, and nothing is changed.
"""

import sys
from pathlib import Path

from ctxcache.bench.results import Run
from ctxcache.bench.table import markdown, remarks

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
    notes = "\n".join(f"* {line}" for line in remarks(run.rows))
    return f"\n{taken}{warning}\n\n{markdown(run.rows)}\n{notes}\n\n"


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
