"""The meaning of the figures of lab/studies/restore.py: limits, ratios and the papers' rows. Pure.

A ratio is taken within a round, then the median over rounds. Worst case: a row that was not measured, whose
ratios are left out.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ctxcache.format.streams import StateKind
from gpu_worker.planning.baselines import HCACHE, HIDDEN, KV, KVPR, NAIVE_HYBRID, RECOMPUTE, MethodCounts
from gpu_worker.planning.datasheets import known_model
from gpu_worker.planning.plan import Method
from gpu_worker.planning.planner import Plan
from gpu_worker.planning.profile import StatePlace

WIDE_KINDS = (StateKind.HIDDEN, StateKind.KV)
PLANNED, HIDDEN_INT8 = "planned", "hidden int8"
WHOLE, FIRST, LEAD = "whole", "first layer", "lead"
"""When the engine starts.

Behind the last layer, behind the first one, or as early as no layer will be late.
"""
VERIFIED = "verified"
Row = Mapping[str, Any]
"""One line of the results; Any: it is JSON."""
Key = tuple[str, str, str]
"""(method, place, start) of a row."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's limits, measured in the same run. No SSD: infinite."""

    copy_bytes_per_s: float
    ssd_bytes_per_s: float
    flops_per_s: float
    checksum_bytes_per_s: float
    host_copy_bytes_per_s: float
    """One thread's copy in memory: what brings rows from the arena into pinned buffers."""


@dataclass(frozen=True, slots=True)
class Work:
    """The bytes and operations of a plan."""

    copied_bytes: float
    ssd_bytes: float
    flops: float

    @classmethod
    def of(cls, plan: Plan, place: StatePlace) -> "Work":
        """Count a plan whose rows lie in `place`."""
        size_bytes = flops = 0.0
        for layer, pieces in zip(plan.request.model.layers, plan.layers, strict=True):
            for piece in pieces:
                tokens = piece.end - piece.begin
                if piece.method is Method.TOKENS:
                    flops += tokens * layer.linear_flops
                    flops += layer.pair_count(piece.begin, piece.end) * layer.attention_flops
                    continue
                size_bytes += piece.size_bytes
                if piece.method is not None and piece.method.unpacked is Method.HIDDEN:
                    flops += tokens * layer.project_flops
        return cls(size_bytes, size_bytes if place is StatePlace.SSD else 0.0, flops)

    def limit_s(self, ceilings: Ceilings) -> tuple[float, str]:
        """Seconds that no restore of it is below, and what says so."""
        return max(
            (self.copied_bytes / ceilings.copy_bytes_per_s, "copy"),
            (self.ssd_bytes / ceilings.ssd_bytes_per_s, "SSD"),
            (self.flops / ceilings.flops_per_s, "FLOPs"),
        )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) == 1:
        return {"median": values[0], "low": values[0], "high": values[0]}
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": statistics.median(values), "low": low, "high": high}


def ratio(values: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """How many times as large `values` are as `others`, round by round."""
    return spread([value / other for value, other in zip(values, others, strict=True)])


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A row of the papers' results: `value` of one case over that of another."""

    row: str
    what: str
    value: str
    over: Key
    under: Key
    paper: str = ""


def _dram(method: str, start: str = WHOLE) -> Key:
    return (method, StatePlace.DRAM.value, start)


_RECOMPUTED: Key = (RECOMPUTE, "", "")
_COMPARISONS = (
    _Comparison("D1", "TTFT, K/V over hidden", "ttft_s", _dram(KV, LEAD), _dram(HIDDEN, LEAD), "1.27-1.93"),
    _Comparison("D1", "TTFT, recompute over hidden", "ttft_s", _RECOMPUTED, _dram(HIDDEN, LEAD), "2.21-5.73"),
    _Comparison("D1", "TTFT, K/V over planned", "ttft_s", _dram(KV, LEAD), _dram(PLANNED, LEAD)),
    _Comparison("D1", "TTFT, recompute over planned", "ttft_s", _RECOMPUTED, _dram(PLANNED, LEAD)),
    _Comparison("D2", "restore speed, hidden over K/V", "restore_s", _dram(KV), _dram(HIDDEN), "1.33-2.66"),
    _Comparison("D5", "hidden only over scheduled", "restore_s", _dram(HIDDEN), _dram(HCACHE), "1.35-1.64"),
    _Comparison(
        "D5", "naive hybrid over scheduled", "restore_s", _dram(NAIVE_HYBRID), _dram(HCACHE), "1.28-1.42"
    ),
    _Comparison("D5", "naive hybrid over planned", "restore_s", _dram(NAIVE_HYBRID), _dram(PLANNED)),
    _Comparison("D5", "hidden only over planned", "restore_s", _dram(HIDDEN), _dram(PLANNED)),
    _Comparison("D6", "by tokens over by layers", "restore_s", _dram(KVPR), _dram(HCACHE), "1.07-1.12"),
    _Comparison(
        "D14", "K/V, TTFT from the first layer over whole", "ttft_s", _dram(KV, FIRST), _dram(KV), "0.65"
    ),
    _Comparison("D14", "K/V, TTFT from the lead over whole", "ttft_s", _dram(KV, LEAD), _dram(KV), "0.39"),
    _Comparison(
        "D14", "hidden, TTFT from the first layer over whole", "ttft_s", _dram(HIDDEN, FIRST), _dram(HIDDEN)
    ),
    _Comparison("D14", "hidden, TTFT from the lead over whole", "ttft_s", _dram(HIDDEN, LEAD), _dram(HIDDEN)),
    _Comparison("integrity", "K/V verified again", "restore_s", _dram(KV, VERIFIED), _dram(KV), "goal 1.05"),
    _Comparison(
        "integrity", "hidden verified again", "restore_s", _dram(HIDDEN, VERIFIED), _dram(HIDDEN), "goal 1.05"
    ),
)


def key_of(row: Row) -> Key:
    """Which case a row is of."""
    return (row["method"], row["place"], row["start"])


def compared(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The papers' rows as far as they were measured, without those that are red.

    `rows` are of one model and length.
    """
    known = {key_of(row): row for row in rows if not row["problem"]}
    for each in _COMPARISONS:
        if each.over in known and each.under in known:
            found = ratio(known[each.over]["rounds"][each.value], known[each.under]["rounds"][each.value])
            # Two names for one plan are one measurement: their ratio says nothing.
            if known[each.over]["case"] != known[each.under]["case"]:
                yield {"row": each.row, "figure": each.what, "ratio": found, "paper": each.paper}


# HCache, Table 3: what is not listed is recomputed.
_SCHEDULES = {
    "llama-2-7b": MethodCounts(0, 31, 1),
    "llama-2-13b": MethodCounts(0, 36, 4),
    "opt-30b": MethodCounts(8, 40, 0),
}


def storage(model: str) -> dict[str, Any]:
    """D3: bytes per token by what is kept of every layer; `scheduled`: as the paper's schedules have it.

    Raises KeyError.
    """
    layers = known_model(model).layers
    found: dict[str, Any] = {"model": model}
    kinds = {"kv": StateKind.KV, "hidden": StateKind.HIDDEN, "hidden_int8": StateKind.HIDDEN_INT8}
    for name, kind in kinds.items():
        found[name] = sum(layer.row_bytes(kind) for layer in layers)
    if model in _SCHEDULES:
        own = _SCHEDULES[model]
        hidden, kv = (layers[0].row_bytes(kind) for kind in WIDE_KINDS)
        found["scheduled"] = own.hidden * hidden + own.kv * kv
    return found
