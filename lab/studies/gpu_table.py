#!/usr/bin/env python3
"""The results of lab/gpu.sh as one table: what was measured, its goal, and whether it is met.

    python -m lab.studies.gpu_table FILE...

A file that is missing or was cut off, as those of a step that took too long are, is read as far as it goes.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_worker.planning.baselines import HIDDEN, KV
from lab.restoring.figures import HIDDEN_INT8, PLANNED, WHOLE
from lab.restoring.table import Row, storage_cells

_TIMED_OUT = (124, 137)
_MOST_SHARE = 1.1
"""A figure that is this much faster than its limit is no result: the limit was not one."""
_MOST_VERIFYING = 0.05
_COPY_GOALS = {"kv": 0.9, "hidden": 0.85}
_MOST_SAVING = 0.01


@dataclass(frozen=True, slots=True)
class Line:
    """One figure. `is_met`: None where there is no goal."""

    step: str
    figure: str
    here: str
    goal: str = ""
    is_met: bool | None = None


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """All rows of the files, as far as they are whole; `saving` and `kernels` rows say no `step`."""
    rows = []
    for path in paths:
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                rows.append({"file": path.stem, **found})
    return rows


def lines(rows: Sequence[Row]) -> Iterator[Line]:
    """The table's lines: steps, ceilings, kernels, saving, restores, and those past the store."""
    for row in rows:
        if row.get("what") == "step":
            status = row["status"]
            said = (
                "ended at its limit"
                if status in _TIMED_OUT
                else f"failed with {status}"
                if status
                else "done"
            )
            yield Line(
                row["step"], "the step", f"{said}, {row['seconds']} s", f"<= {row['limit_s']} s", not status
            )
    yield from _kernels([row for row in rows if "way" in row and "median_s" in row])
    yield from _pipeline([row for row in rows if "share_of_copy" in row])
    for row in rows:
        if row.get("way") in ("two-stage", "direct", "replayed"):
            yield _saving(row)
    yield from _restores(rows)
    yield from _direct(rows)
    yield from _decoding([row for row in rows if "over_copied" in row])


def _pipeline(rows: Sequence[Row]) -> Iterator[Line]:
    plain: dict[str, float] = {}
    for row in rows:
        rows_of, share, took = row["rows"], row["share_of_copy"], row["wall_us"]
        if not row["is_verified"]:
            plain[rows_of] = took
            goal = _COPY_GOALS[rows_of]
            figure = f"{rows_of} out of the arena, a batch of 64 MiB"
            yield Line(
                "pipeline", figure, f"{took:.0f} us, {share:.2f} of the copy", f">= {goal}", share >= goal
            )
        elif rows_of in plain:
            over = took / plain[rows_of]
            yield Line(
                "pipeline",
                f"{rows_of}, verified again",
                f"{over:.2f}x",
                "goal 1.05",
                over <= 1 + _MOST_VERIFYING,
            )


def _saving(row: Row) -> Line:
    over, way = row["over_none"]["median"], row["way"]
    figure = f"D4, D7: {row['model']}, batch {row['batch']}, {way}: time between tokens"
    if way == "direct":
        return Line("saving", figure, f"{over:+.1%}")
    if not row.get("is_right", True):
        return Line("saving", figure, "other rows than eager ones", "<= +1 %", is_met=False)
    if not row.get("is_captured", True):
        return Line("saving", figure, f"{over:+.1%}, not captured")
    return Line("saving", figure, f"{over:+.1%}", "<= +1 %", over <= _MOST_SAVING)


def _kernels(rows: Sequence[Row]) -> Iterator[Line]:
    for what, group in groupby(rows, key=lambda row: row["what"]):
        ways = {row["way"]: row for row in group}
        if what == "limit":
            for way, row in ways.items():
                rate = (
                    f"{row['teraflops']:.1f} TFLOP/s"
                    if row["teraflops"]
                    else f"{row['gigabytes_per_s']:.1f} GB/s"
                )
                yield Line("kernels", way, rate)
        alone = ways.get("product alone")
        if alone and "fused" in ways:
            share = alone["median_s"] / ways["fused"]["median_s"]
            yield Line(
                "kernels", f"{what}: the product alone over all", f"{share:.2f}", ">= 0.95", share >= 0.95
            )
        separate = ways.get("separate")
        if separate and "fused" in ways:
            times = separate["median_s"] / ways["fused"]["median_s"]
            yield Line("kernels", f"{what}: separate over fused", f"{times:.2f}x", ">= 1.3x", times >= 1.3)
        if "two streams" in ways:
            share = ways["two streams"]["share_of_limit"]
            yield Line("kernels", f"{what}: of the limit", f"{share:.2f}", ">= 0.85", share >= 0.85)


def _restores(rows: Sequence[Row]) -> Iterator[Line]:
    for row in rows:
        what, subject = row.get("what"), f"{row.get('model')} {row.get('history', '')}"
        if what == "ceilings":
            parts = [
                f"{name} {row[f'{name}_bytes_per_s'] / 1e9:.1f}" for name in ("copy", "host_copy", "ssd")
            ]
            rates = f"{', '.join(parts)} GB/s, product {row['flops_per_s'] / 1e12:.1f} TFLOP/s"
            yield Line("restore", f"{row['model']}, {row['layers']} layers", rates)
        if what == "left out":
            yield Line("restore", subject, "no time left")
        if what == "storage":
            _, kv, hidden, scheduled, packed, *_ = storage_cells(row)
            yield Line(
                "restore",
                f"D3: {row['model']}, KiB a token",
                f"K/V {kv}, hidden {hidden}, scheduled {scheduled}, 8 bits {packed}",
            )
        if what == "compared":
            yield Line(
                "restore",
                f"{row['row']}: {subject}, {row['figure']}",
                f"{row['ratio']['median']:.2f}x",
                row["paper"],
            )
        if what == "restore" and row["problem"]:
            yield Line(
                "restore",
                f"{subject}, {row['method']} {row['place']}",
                row["problem"],
                "as recomputed",
                is_met=False,
            )
        elif (
            what == "restore"
            and row["start"] == WHOLE
            and row["method"] in (HIDDEN, KV, PLANNED, HIDDEN_INT8)
        ):
            yield _share(row, subject)


def _direct(rows: Sequence[Row]) -> Iterator[Line]:
    for row in (row for row in rows if row.get("what") == "direct"):
        subject = f"{row['model']} {row['tokens']}, {row['rows']} from SSD by {row['way']}"
        here = f"{row['median_s'] * 1e3:.1f} ms, {row['of_store']:.2f} of the store's"
        cost = row["verifying"]
        if cost is None:
            yield Line("direct", subject, here)
        else:
            yield Line(
                "direct", subject, f"{here}; verifying {cost:+.1%}", "<= +5 %", cost <= _MOST_VERIFYING
            )


def _decoding(rows: Sequence[Row]) -> Iterator[Line]:
    """A step with a part of each layer projected, over one with K and V copied."""
    for row in rows:
        figure = f"D17: {row['model']} {row['history']}, step with K and V on the host, over copying"
        by_way = {way: median(ratios) for way, ratios in row["over_copied"].items()}
        here = f"{by_way['search']:.2f}, closed form {by_way['closed form']:.2f}"
        is_met = row["is_right"] and by_way["search"] < 1
        yield Line("decoding", figure, here if row["is_right"] else "other tokens", "< 1, paper 0.64", is_met)


def _share(row: Row, subject: str) -> Line:
    share, goal = (
        row["share_of_limit"]["median"],
        0.9 if row["method"] == KV and row["limit_by"] == "copy" else 0.85,
    )
    here = f"{row['restore_s']['median'] * 1e3:.1f} ms, {share:.2f} of the limit by {row['limit_by']}"
    if share > _MOST_SHARE:
        return Line(
            "restore",
            f"{subject}, {row['method']} from {row['place']}",
            here,
            "the ceiling is wrong",
            is_met=False,
        )
    return Line(
        "restore", f"{subject}, {row['method']} from {row['place']}", here, f">= {goal}", share >= goal
    )


def main(arguments: Sequence[str]) -> None:
    """Print."""
    table = Table(box=None, header_style="bold")
    for title in ("step", "figure", "here", "goal or paper", "met"):
        table.add_column(title)
    words: Mapping[bool | None, str] = {None: "", True: "yes", False: "NO"}
    for line in lines(read([Path(each) for each in arguments])):
        table.add_row(line.step, line.figure, line.here, line.goal, words[line.is_met])
    Console(width=160).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
