"""The results of lab/studies/restore.py as tables."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, Any]


def show(rows: Sequence[Row], console: Console | None = None) -> None:
    """Print ceilings, times, the papers' rows, and storage."""
    out = console or Console(width=180)
    for row in rows:
        if row["what"] == "ceilings":
            out.print(
                f"{row['model']}, {row['layers']} layers, {row['weights']} weights, {row['dtype']};"
                f" {row['device']}: {_rates(row)}"
            )
        if row["what"] == "left out":
            out.print(f"{row['model']} at {row['history']:,} tokens: no time left")
    times = [row for row in rows if row["what"] == "restore"]
    for (model, history), group in groupby(times, key=lambda row: (row["model"], row["history"])):
        table = _table(
            f"{model}, {history:,} tokens",
            "method",
            "from",
            "engine starts",
            "TTFT ms",
            "planned",
            "restored ms",
            "planned",
            "limit ms",
            "by",
            "of limit",
            "checksums",
            "cache off by",
            "nats",
            "plan",
        )
        for row in group:
            table.add_row(*cells(row))
        out.print(table)
    if found := [row for row in rows if row["what"] == "compared"]:
        table = _table("the papers' rows", "model", "history", "row", "figure", "here", "paper or goal")
        for row in found:
            table.add_row(
                row["model"],
                f"{row['history']:,}",
                row["row"],
                row["figure"],
                _spread(row["ratio"], 1, "x"),
                row["paper"],
            )
        out.print(table)
    if found := [row for row in rows if row["what"] == "storage"]:
        table = _table(
            "D3: KiB a token",
            "model",
            "K/V",
            "hidden",
            "scheduled",
            "8 bits",
            "K/V over scheduled",
            "over 8 bits",
        )
        for row in found:
            table.add_row(*storage_cells(row))
        out.print(table)


def cells(row: Row) -> list[str]:
    """One case of a model and length."""
    head = [row["method"], row["place"] or "-", row["start"] or "-"]
    checks = [f"{row['cache_error']:.1e}", f"{row['kl_nats']:.1e}"]
    if row["problem"]:
        return [*head, *["RED"] * 8, *checks, row["problem"]]
    if "plan" not in row:
        return [*head, _spread(row["ttft_s"], 1e3), *["-"] * 7, *checks, "-"]
    return [
        *head,
        _spread(row["ttft_s"], 1e3),
        f"{row['predicted_ttft_s'] * 1e3:.1f}",
        _spread(row["restore_s"], 1e3),
        f"{row['predicted_restore_s'] * 1e3:.1f}",
        f"{row['limit_s'] * 1e3:.2f}",
        row["limit_by"],
        f"{row['share_of_limit']['median']:.2f}",
        f"{row['checksum_share']:.1%}",
        *checks,
        row["plan"],
    ]


def storage_cells(row: Row) -> list[str]:
    """One model's bytes per token."""
    scheduled = row.get("scheduled")
    return [
        row["model"],
        f"{row['kv'] / 1024:.0f}",
        f"{row['hidden'] / 1024:.0f}",
        "-" if scheduled is None else f"{scheduled / 1024:.0f}",
        f"{row['hidden_int8'] / 1024:.1f}",
        "-" if scheduled is None else f"{row['kv'] / scheduled:.2f}x",
        f"{row['kv'] / row['hidden_int8']:.2f}x",
    ]


def _table(title: str, *titles: str) -> Table:
    table = Table(box=None, header_style="bold", title=title, title_justify="left")
    for index, each in enumerate(titles):
        table.add_column(each, justify="left" if index < 2 or each in ("figure", "plan") else "right")
    return table


def _spread(found: Mapping[str, float], scale: float, unit: str = "") -> str:
    digits = 2 if unit else 1
    low, median, high = (found[name] * scale for name in ("low", "median", "high"))
    return f"{median:.{digits}f}{unit} [{low:.{digits}f}-{high:.{digits}f}]"


def _rates(row: Row) -> str:
    giga = {name: row[f"{name}_bytes_per_s"] / 1e9 for name in ("copy", "host_copy", "ssd", "checksum")}
    parts = [f"{name.replace('_', ' ')} {rate:.1f} GB/s" for name, rate in giga.items()]
    return ", ".join([*parts, f"product {row['flops_per_s'] / 1e12:.2f} TFLOP/s"])
