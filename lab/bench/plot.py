"""The picture: every row's ratio and its spread beside its goal. Needs matplotlib, of the extra `bench`.

Worst case: a path that cannot be written raises OSError.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lab.bench.run import Result

# Okabe and Ito's, told apart by any eye.
_MET, _MISSED = "#0072B2", "#D55E00"
_DPI = 150


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw the rows that have a ratio."""
    shown = [(result, result.ratio) for result in results if result.ratio is not None][::-1]
    figure = Figure(figsize=(9, 1.2 + 0.32 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for place, (result, ratio) in enumerate(shown):
        color = _MET if result.is_met else _MISSED
        axes.plot([ratio.p10, ratio.p90], [place, place], color=color, linewidth=2)
        axes.plot([ratio.median], [place], "o", color=color)
        axes.plot([float(result.goal.split()[1])], [place], "|", color="black", markersize=14)
    axes.set_yticks(range(len(shown)), [f"{r.name} ({r.goal})" for r, _ in shown], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("ratio in the same run: median, p10 to p90; the bar is the goal")
    axes.grid(visible=True, axis="x", alpha=0.3)
    figure.savefig(path, dpi=_DPI)
