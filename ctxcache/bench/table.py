"""The table, for people and for documents: path, ours, beside, ratio, goal. Knows no measurement."""

from collections.abc import Sequence

from ctxcache.bench.noise import NOISY_CORES
from ctxcache.bench.results import MEASURED, Result
from ctxcache.bench.statistics import Spread

TITLES = ("path", "ours", "beside", "ratio [p10-p90]", "goal", "met")


def cells(result: Result) -> tuple[str, str, str, str, str, str]:
    """One line of the table."""
    if result.status != MEASURED or result.ratio is None:
        return (result.path, "-", result.beside_what, f"{result.status}: {result.problem}", result.goal, "-")
    beside = f"{_figure(result, result.beside)} {result.beside_what}" if result.beside else result.beside_what
    return (
        result.path, _figure(result, result.ours), beside, _ratio(result.ratio), result.goal,
        "yes" if result.is_met else "NO",
    )  # fmt: skip


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
        return f"{middle / gigabytes:.2f} CPU s/GB" if isinstance(gigabytes, float) else f"{middle:.3f} CPU s"
    return _duration(middle)


def _duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.2f} {unit}"
    return f"{seconds * 1e6:.0f} us"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.3g} [{spread.p10:.3g}-{spread.p90:.3g}]"
