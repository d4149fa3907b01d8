"""The picture: time to first token over history, one panel per model. Knows matplotlib.

Colours are Okabe and Ito's, told apart by any eye; tiers differ in mark and line besides. Worst
case: a path that cannot be written raises OSError.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gpu_worker.planning.plan import Method
from lab.demo.machine import Machine
from lab.demo.results import ModelResult, Source
from lab.demo.subject import METHOD_TITLES
from lab.demo.view import source_words

_COLORS = {
    Method.TOKENS: "#000000",
    Method.KV: "#0072B2",
    Method.LATENT: "#0072B2",
    Method.HIDDEN: "#D55E00",
}
_STYLES = {Source.DRAM: ("o", "-"), Source.SSD: ("s", "--"), Source.MIXED: ("^", ":")}
_PANEL_INCHES = (6.4, 4.8)
_DPI = 150


@dataclass(frozen=True, slots=True)
class _Point:
    length: int
    seconds: float
    lowest: float
    highest: float


def plot(results: Sequence[ModelResult], machine: Machine, path: Path) -> None:
    """Write the picture as PNG."""
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(results), height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    for axes, result in zip(panels, results, strict=True):
        _panel(axes, result)
    figure.suptitle(f"Time to first token after all engine state was dropped\n{machine.title}", fontsize=11)
    figure.savefig(path, dpi=_DPI, format="png")


def _panel(axes: Axes, result: ModelResult) -> None:
    cost = {stored.method: stored.bytes_per_token for stored in result.stored}
    lengths: set[int] = set()
    for (method, source), points in sorted(_series(result).items(), key=_order):
        lengths |= {point.length for point in points}
        _draw(axes, method, source, points, cost[method])
    axes.set_title(f"{result.title}, fp32", fontsize=10)
    axes.set_xlabel("tokens of history")
    axes.set_ylabel("seconds to first token")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_tick_params(labelleft=True)
    axes.set_xticks(sorted(lengths), [f"{length:,}" for length in sorted(lengths)], fontsize=8)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


def _draw(axes: Axes, method: Method, source: Source, points: Sequence[_Point], row_bytes: int) -> None:
    where = "" if method is Method.TOKENS else f" from {source_words(source)}"
    marker, line = _STYLES[source]
    axes.errorbar(
        [point.length for point in points],
        [point.seconds for point in points],
        yerr=[
            [point.seconds - point.lowest for point in points],
            [point.highest - point.seconds for point in points],
        ],
        label=f"{METHOD_TITLES[method]}{where}, {row_bytes:,} B/token",
        color=_COLORS[method],
        marker=marker,
        linestyle=line,
        capsize=3,
    )


def _order(series: tuple[tuple[Method, Source], list[_Point]]) -> tuple[int, str]:
    (method, source), _ = series
    return list(_COLORS).index(method), source.value


def _series(result: ModelResult) -> dict[tuple[Method, Source], list[_Point]]:
    series: dict[tuple[Method, Source], list[_Point]] = defaultdict(list)
    for method, source, point in (*_conversation_points(result), *_history_points(result)):
        # Token ids are so few that their tier makes no difference: one line.
        series[method, Source.DRAM if method is Method.TOKENS else source].append(point)
    return {key: sorted(points, key=lambda point: point.length) for key, points in series.items()}


def _conversation_points(result: ModelResult) -> Iterator[tuple[Method, Source, _Point]]:
    for turn in result.turns:
        for run in turn.restored:
            seconds = run.first_token_ns / 1e9
            if run.source is not Source.NOWHERE:
                yield run.method, run.source, _Point(run.history_token_count, seconds, seconds, seconds)


def _history_points(result: ModelResult) -> Iterator[tuple[Method, Source, _Point]]:
    for point in result.history:
        times = point.first_token
        measured = (times.median_ns / 1e9, times.lowest_ns / 1e9, times.highest_ns / 1e9)
        yield point.method, point.source, _Point(point.history_token_count, *measured)
