"""Plans as text: a summary, and the table that explains them."""

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from gpu_worker.planning.explain import Row, bottleneck, rows
from gpu_worker.planning.planner import Plan

_TITLES = ("layers", "method", ">MB", ">read ms", ">copy ms", ">compute ms", ">there at ms", "why")


def show_plan(plan: Plan) -> None:
    """Print what comes back how, and when it is there."""
    console = _console()
    spans = (f"{row.method}:{_span(row)}" for row in rows(plan))
    console.print(", ".join(spans), soft_wrap=True)
    console.print(_summary(plan), soft_wrap=True)


def show_explanation(plan: Plan, others_s: Mapping[str, float]) -> None:
    """Print every run of layers with its times and reason, the streams' work, and what others would take."""
    console, request = _console(), plan.request
    basis = "measured" if request.profile.is_measured else "datasheet"
    console.print(
        f"{request.model.name} on {request.profile.name} ({basis}): {request.history:,} tokens of history, "
        f"{request.new_tokens:,} new",
        soft_wrap=True,
    )
    table = _table(_TITLES)
    for row in rows(plan):
        times = (row.read_s, row.copy_s, row.compute_s, row.restored_s)
        table.add_row(_span(row), row.method, f"{row.size_bytes / 1e6:,.1f}", *map(_ms, times), row.reason)
    console.print(table)
    console.print(_summary(plan), soft_wrap=True)
    _show_streams(console, plan)
    _show_others(console, plan, others_s)


def _show_streams(console: Console, plan: Plan) -> None:
    table = _table(("stream", ">busy ms", ">idle ms"))
    for stream, busy_s in plan.timeline.busy_s.items():
        table.add_row(stream, _ms(busy_s), _ms(max(0.0, plan.end_s - busy_s)))
    console.print(table)


def _show_others(console: Console, plan: Plan, others_s: Mapping[str, float]) -> None:
    table = _table(("instead", ">ms", ">times"))
    for name, end_s in sorted(others_s.items(), key=lambda item: item[1]):
        table.add_row(name, _ms(end_s), f"{end_s / plan.end_s:.2f}" if plan.end_s else "-")
    console.print(table)


def _summary(plan: Plan) -> str:
    gap = plan.end_s / plan.bound_s - 1 if plan.bound_s else 0.0
    best = "no plan ends earlier" if plan.is_exact else f"within {gap:.1%} of what is possible"
    prefilled = f", prefilled after {_ms(plan.end_s)} ms" if plan.request.new_tokens else ""
    return f"restored after {_ms(plan.restored_s)} ms{prefilled}; {bottleneck(plan)} is busiest; {best}"


def _table(titles: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in titles:
        table.add_column(title.removeprefix(">"), justify="right" if title.startswith(">") else "left")
    return table


def _console() -> Console:
    # In a file nobody's terminal limits the width, and a cut cell says nothing.
    return Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)


def _span(row: Row) -> str:
    return f"{row.begin}" if row.end == row.begin + 1 else f"{row.begin}-{row.end - 1}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"
