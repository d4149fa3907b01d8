"""The picture of benchmarks/skew.py: mean time to first token over skew, a panel for each model. Knows matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.restoring.plot import COLORS
from benchmarks.restoring.rounds import Row

_PANEL_INCHES = (6.0, 4.6)
_DPI = 150


def plot_skew(rows: Sequence[Row], path: Path) -> None:
    """Write the picture as PNG; red rows are left out. Raises OSError."""
    # Not there on every machine that measures.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    found = [row for row in rows if row["what"] == "skew" and not row["problem"]]
    models = list(dict.fromkeys(row["model"] for row in found))
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * max(len(models), 1), height), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, model in zip(figure.subplots(1, max(len(models), 1), squeeze=False)[0], models, strict=False):
        own = [row for row in found if row["model"] == model]
        for method in dict.fromkeys(row["method"] for row in own):
            points = sorted((row["skew"], row["mean_ttft_s"]) for row in own if row["method"] == method)
            middle = [each["median"] for _, each in points]
            spans = [[each["median"] - each["low"] for _, each in points], [each["high"] - each["median"] for _, each in points]]  # fmt: skip
            axes.errorbar(
                [skew for skew, _ in points], middle, yerr=spans, label=method, color=COLORS[method],
                marker="o", capsize=3, linestyle="--" if method == "planned" else "-",
            )  # fmt: skip
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
    figure.suptitle(f"Caches of the last sessions kept in front of the store\n{found[0]['device'] if found else ''}", fontsize=10)  # fmt: skip
    figure.savefig(path, dpi=_DPI, format="png")
