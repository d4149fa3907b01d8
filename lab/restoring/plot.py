"""The pictures of lab/studies/restore.py and skew.py: time to first token over history, and over skew.

Knows matplotlib. Worst case: it is not installed, a ModuleNotFoundError.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_worker.planning.baselines import HIDDEN, KV, NAIVE_HYBRID, RECOMPUTE
from lab.restoring.figures import HIDDEN_INT8, LEAD, PLANNED

Row = Mapping[str, Any]
# Okabe and Ito's, told apart by any eye; places differ in mark and line besides.
COLORS = {
    RECOMPUTE: "#000000",
    KV: "#0072B2",
    HIDDEN: "#D55E00",
    HIDDEN_INT8: "#CC79A7",
    NAIVE_HYBRID: "#999999",
    PLANNED: "#009E73",
}
_STYLES = {"": ("o", "-"), "dram": ("o", "-"), "ssd": ("s", "--")}
_PANEL_INCHES = (6.4, 4.8)
_DPI = 150


def plot(rows: Sequence[Row], path: Path) -> None:
    """Write the picture as PNG. Raises OSError."""
    # Not there on every machine that measures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    models = list(dict.fromkeys(row["model"] for row in rows if row["what"] == "restore"))
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * len(models), height + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        own = [row for row in rows if row["what"] == "restore" and row["model"] == model]
        lengths = sorted({row["history"] for row in own})
        for (method, place), points in series(own).items():
            mark, line = _STYLES[place]
            x, middle = [point[0] for point in points], [point[1] for point in points]
            spans = [[point[1] - point[2] for point in points], [point[3] - point[1] for point in points]]
            label = method if not place else f"{method}, {place.upper()}"
            axes.errorbar(
                x,
                middle,
                yerr=spans,
                label=label,
                color=COLORS[method],
                marker=mark,
                linestyle=line,
                capsize=3,
            )
        axes.set_title(f"{model}, {own[0]['layers']} layers, {own[0]['dtype']}", fontsize=10)
        axes.set_xlabel("tokens of history")
        axes.set_ylabel("seconds to first token")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
    device = next((row["device"] for row in rows if row["what"] == "restore"), "")
    figure.suptitle(
        f"Time to first token behind a restored history, the engine starting at its lead\n{device}",
        fontsize=11,
    )
    figure.savefig(path, dpi=_DPI, format="png")


def series(rows: Sequence[Row]) -> Mapping[tuple[str, str], list[tuple[int, float, float, float]]]:
    """(history, median, low, high) in seconds by method and place, of right cases."""
    found: dict[tuple[str, str], list[tuple[int, float, float, float]]] = defaultdict(list)
    for row in rows:
        if row["method"] in COLORS and row["start"] in ("", LEAD) and not row["problem"]:
            ttft = row["ttft_s"]
            found[row["method"], row["place"]].append(
                (row["history"], ttft["median"], ttft["low"], ttft["high"])
            )
    order = list(COLORS)
    return {key: sorted(found[key]) for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))}


_SKEW_PANEL_INCHES = (6.0, 4.6)


def plot_skew(rows: Sequence[Row], path: Path) -> None:
    """Write the picture as PNG; red rows are left out. Raises OSError."""
    # Not there on every machine that measures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    found = [row for row in rows if row["what"] == "skew" and not row["problem"]]
    models = list(dict.fromkeys(row["model"] for row in found))
    width, height = _SKEW_PANEL_INCHES
    figure = Figure(figsize=(width * max(len(models), 1), height), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, model in zip(figure.subplots(1, max(len(models), 1), squeeze=False)[0], models, strict=False):
        own = [row for row in found if row["model"] == model]
        for method in dict.fromkeys(row["method"] for row in own):
            points = sorted((row["skew"], row["mean_ttft_s"]) for row in own if row["method"] == method)
            middle = [each["median"] for _, each in points]
            spans = [
                [each["median"] - each["low"] for _, each in points],
                [each["high"] - each["median"] for _, each in points],
            ]
            axes.errorbar(
                [skew for skew, _ in points],
                middle,
                yerr=spans,
                label=method,
                color=COLORS[method],
                marker="o",
                capsize=3,
                linestyle="--" if method == "planned" else "-",
            )
        hits = {row["skew"]: row["hit_rate"]["median"] for row in own}
        axes.set_xticks(
            sorted(hits), [f"{skew:g}\n{hits[skew]:.0%} hits" for skew in sorted(hits)], fontsize=8
        )
        one = own[0]
        axes.set_title(
            f"{model}, {one['history']:,} tokens, {one['kept']} of {one['sessions']} kept", fontsize=9
        )
        axes.set_xlabel("skew")
        axes.set_ylabel("mean seconds to first token")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=8, frameon=False)
    figure.suptitle(
        f"Caches of the last sessions kept in front of the store\n{found[0]['device'] if found else ''}",
        fontsize=10,
    )
    figure.savefig(path, dpi=_DPI, format="png")
