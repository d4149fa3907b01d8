"""The picture of a sweep: ours as bars or lines, the paper's as hollow marks.

Needs matplotlib, of the extra `bench`.

Worst case: a path that cannot be written raises OSError.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.placement.sweeps import Panel, Sweep, SweepRow

# Okabe and Ito's, told apart by any eye; a series that is known has the same one in every picture.
_COLORS = {
    "lru": "#56B4E9",
    "fifo": "#999999",
    "look-ahead": "#0072B2",
    "value": "#E69F00",
    "belady": "#000000",
}
_OTHERS = ("#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#0072B2")
_MARKERS = "osD^vP*Xh"
_STYLE: dict[Any, Any] = {  # matplotlib's names of them are a type of 400 words
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "svg.hashsalt": "ctxcache",
    "svg.fonttype": "path",
}
_CEILING: dict[str, Any] = {"color": "#222222", "linestyle": (0, (4, 3)), "linewidth": 1.1, "zorder": 2}
BOUND = "belady"
_DPI = 110
_HEIGHT, _LEGEND_WIDTH = 4.6, 1.9
_BARS_WIDTH = 0.82


def plot(sweep: Sweep, rows: Sequence[SweepRow], caption: str, path: Path) -> None:
    """Draw every panel of the sweep side by side, with a caption below."""
    with mpl.rc_context(_STYLE):
        count = len(sweep.panels)
        figure = Figure(
            figsize=(_LEGEND_WIDTH + _panel_width(sweep, rows) * count, _HEIGHT), layout="constrained"
        )
        FigureCanvasAgg(figure)
        source = f"   (CachedAttention's {sweep.source})" if sweep.source else ""
        figure.suptitle(f"{sweep.title}{source}", x=0.01, ha="left", fontsize=13, fontweight="bold")
        colors = _colors(list(dict.fromkeys(row.run.series for row in rows)))
        for panel, axes in zip(sweep.panels, figure.subplots(1, count, squeeze=False)[0], strict=True):
            (_lines if sweep.is_lines else _bars)(axes, panel, rows, colors)
            _finish(axes, panel, sweep)
        _legend(figure, sweep, rows, colors)
        figure.supxlabel(caption.replace("; live", ";\nlive"), fontsize=8, color="#555555", x=0.01, ha="left")
        # Same rows, same bytes: no date in the file.
        figure.savefig(
            path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None}
        )


def _panel_width(sweep: Sweep, rows: Sequence[SweepRow]) -> float:
    return 6.2 if sweep.is_lines else min(max(4.6, 1.0 + 0.42 * len(rows)), 9.5)


def _colors(series: Sequence[str]) -> dict[str, str]:
    spare = iter(_OTHERS * len(series))
    return {name: _COLORS.get(name) or next(spare) for name in series}


def _bars(axes: Axes, panel: Panel, rows: Sequence[SweepRow], colors: dict[str, str]) -> None:
    """One group per place along the axis, one bar per series, DRAM's part solid and SSD's pale."""
    groups = list(dict.fromkeys(row.run.x for row in rows))
    width = _BARS_WIDTH / len(colors)
    for row in rows:
        place = groups.index(row.run.x) + (list(colors).index(row.run.series) - (len(colors) - 1) / 2) * width
        color, base = colors[row.run.series], 0.0
        for depth, part in (
            enumerate(name for name, _ in panel.parts) if panel.parts else enumerate([panel.figure])
        ):
            size = row.number(part) / panel.unit
            axes.bar(
                place, size, width * 0.92, bottom=base, color=color, alpha=0.4 if depth else 1.0, linewidth=0
            )
            base += size
        text = f"{base:.0%}" if panel.is_share else f"{base:.2f}"
        known = row.run.paper.get(panel.figure)
        axes.annotate(
            text,
            (place - (0.1 * width if known is not None else 0), base),
            (0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
        if known is not None:
            axes.add_line(_paper([place + 0.27 * width], [known]))
    if panel.ceiling:
        for place, group in enumerate(groups):
            most = max(row.number(panel.ceiling) for row in rows if row.run.x == group)
            axes.hlines(most, place - 0.45, place + 0.45, **_CEILING)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    axes.tick_params(axis="x", length=0)


def _lines(axes: Axes, panel: Panel, rows: Sequence[SweepRow], colors: dict[str, str]) -> None:
    for (series, color), marker in zip(colors.items(), _MARKERS * len(colors), strict=False):
        ours = [row for row in rows if row.run.series == series]
        xs = [float(row.run.x) for row in ours]
        ys = [row.number(panel.figure) / panel.unit for row in ours]
        axes.plot(xs, ys, **_stroke(series, color, marker))
        known = [
            (float(row.run.x), row.run.paper[panel.figure]) for row in ours if panel.figure in row.run.paper
        ]
        if known:
            axes.add_line(_paper(*zip(*known, strict=True), color=color))
    if panel.ceiling:
        first = [row for row in rows if row.run.series == rows[0].run.series]
        axes.plot(
            [float(row.run.x) for row in first], [row.number(panel.ceiling) for row in first], **_CEILING
        )
    places = sorted({float(row.run.x) for row in rows})
    if places[-1] > 12 * places[0]:
        axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()


def _stroke(series: str, color: str, marker: str) -> dict[str, Any]:
    """How a series' line looks: a bound is a broad pale band, which hides nothing that reaches it."""
    if series == BOUND:
        return {"color": color, "linewidth": 9, "alpha": 0.18, "solid_capstyle": "round", "zorder": 1}
    return {"color": color, "marker": marker, "markersize": 5, "linewidth": 1.6}


def _paper(xs: Sequence[float], ys: Sequence[float], *, color: str | None = None) -> Line2D:
    """The paper's values: hollow, joined by dots where they have a color."""
    return Line2D(
        xs,
        ys,
        linestyle=":" if color else "none",
        color=color,
        marker="D",
        markersize=6,
        markerfacecolor="white",
        markeredgecolor="#222222",
        markeredgewidth=1.4,
        label="the paper's",
        zorder=4,
        clip_on=False,
    )


def _finish(axes: Axes, panel: Panel, sweep: Sweep) -> None:
    axes.set_title(panel.title)
    axes.set_xlabel(sweep.x_title)
    axes.grid(visible=True, axis="y", alpha=0.3, linewidth=0.7)
    axes.set_axisbelow(True)
    if panel.is_share:
        axes.set_ylim(0, 1.06)
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0], ["0", "20 %", "40 %", "60 %", "80 %", "100 %"])
    else:
        axes.set_ylim(bottom=0)


def _legend(figure: Figure, sweep: Sweep, rows: Sequence[SweepRow], colors: dict[str, str]) -> None:
    """Name every series, what pale means, and whose the hollow marks are."""
    marks: list[Patch | Line2D] = []
    for (series, color), marker in zip(colors.items(), _MARKERS * len(colors), strict=False):
        label = f"{series} (bound)" if series == BOUND else series
        marks.append(
            Line2D([], [], label=label, **_stroke(series, color, marker))
            if sweep.is_lines
            else Patch(color=color, label=label)
        )
    parts = sweep.panels[0].parts
    if parts and not sweep.is_lines:
        marks += [
            Patch(color="#555555", label=parts[0][1]),
            Patch(color="#555555", alpha=0.4, label=parts[1][1]),
        ]
    if sweep.panels[0].ceiling:
        marks.append(Line2D([], [], label="turns that have history", **_CEILING))
    if any(row.run.paper for row in rows):
        marks.append(_paper([], []))
    figure.legend(handles=marks, loc="outside right center", frameon=False, fontsize=9)
