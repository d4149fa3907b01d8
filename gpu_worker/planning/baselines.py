"""Baselines: what the papers, and what no planner at all, would do with the same layers.

The planner falls back on these where its search was cut short, and `worker plan` shows them beside its
answer. The closed forms are schedules by formula, for like layers and sums instead of a pipeline: HCache
(arXiv:2410.05004, section 4.1.2) and KVPR (arXiv:2411.17089, equation 10). Layers that are not alike
count as the average layer. `lab/notes/planner.md` says when the formulas are optimal. Worst case: a baseline
that the store or the engine does not allow, which is left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from gpu_worker.planning.assignment import Assignment
from gpu_worker.planning.option import LayerOptions, LayerPiece, Option
from gpu_worker.planning.plan import Method


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One layer's times in seconds, in HCache's words IO_H, IO_KV, C_H and C_Token."""

    hidden_io_s: float
    kv_io_s: float
    hidden_compute_s: float
    token_compute_s: float


@dataclass(frozen=True, slots=True)
class MethodCounts:
    """How many layers by each method: recomputed ones first, K/V last."""

    recomputed: int
    hidden: int
    kv: int


def hcache_schedule(layer_count: int, times: LayerTimes) -> MethodCounts:
    """HCache's bubble-free schedule, in both branches, rounded as in the paper.

    Projection slower than its copy: K/V of the last layers fills the copying stream,
    L_H = ceil(N IO_KV / (IO_KV + C_H - IO_H)). Otherwise recomputation of the first layers fills the
    computing one, L_H = ceil(N C_Token / (C_Token + IO_H - C_H)).
    """
    # HCache section 4.1.2, for N like layers, L_H of them from hidden states:
    #
    #     C_H > IO_H    the device is busier than the bus: K and V of the last L_O layers load meanwhile
    #                   L_H C_H = L_H IO_H + L_O IO_KV
    #     else          the bus is busier: the first L_O layers are recomputed meanwhile
    #                   L_O C_Token + L_H C_H = L_H IO_H
    #
    # Both have L_H = N other / (other + |C_H - IO_H|), with `other` IO_KV or C_Token.
    surplus_s = times.hidden_compute_s - times.hidden_io_s
    other_s = times.kv_io_s if surplus_s > 0 else times.token_compute_s
    hidden = (
        _ceil(layer_count * other_s / (other_s + abs(surplus_s))) if other_s + abs(surplus_s) else layer_count
    )
    others = layer_count - hidden
    return MethodCounts(0, hidden, others) if surplus_s > 0 else MethodCounts(others, hidden, 0)


def naive_hybrid_schedule(layer_count: int, times: LayerTimes) -> MethodCounts:
    """Recomputation and K/V without hidden states: whole layers whose slower side is the least.

    HCache section 6.3.1 compares with this; the balance is r C_Token = (N - r) IO_KV.
    """
    total_s = times.token_compute_s + times.kv_io_s
    balance = layer_count * times.kv_io_s / total_s if total_s else 0
    # The balance is between two whole numbers of layers, and the better one is beside it.
    near = {math.floor(balance), min(layer_count, math.ceil(balance))}
    best = min(near, key=lambda r: max(r * times.token_compute_s, (layer_count - r) * times.kv_io_s))
    return MethodCounts(best, 0, layer_count - best)


def kvpr_split(
    token_count: int,
    *,
    activation_s: float,
    recompute_s: float,
    kv_s: float,
    transfers_activations: bool = True,
) -> int:
    """KVPR's split l: tokens [0, l) from activations, the rest as K/V. Seconds are per token.

    Minimises l x + max(l g, (s' - l) k), equation 10. Where K/V is more than an activation (k > x), the
    sum falls up to where both sides of the max are equal, l = s' k / (g + k), and rises behind; elsewhere
    l = 0 is best. `transfers_activations` false drops the first term (the row-by-row schedule).
    """
    x = activation_s if transfers_activations else 0.0
    # 0 is looked at too: where activations cost more than they save (k <= x), the sum rises from the start.
    balance = token_count * kv_s / (recompute_s + kv_s)
    candidates = (0, math.floor(balance), math.ceil(balance))
    return min(candidates, key=lambda split: kvpr_time_s(token_count, split, x, recompute_s, kv_s))


def kvpr_time_s(token_count: int, split: int, activation_s: float, recompute_s: float, kv_s: float) -> float:
    """Equation 10: one layer's time for a split."""
    return split * activation_s + max(split * recompute_s, (token_count - split) * kv_s)


def _ceil(layers: float) -> int:
    # A ratio that is whole but for rounding is that number.
    return math.ceil(round(layers, 9))


RECOMPUTE, KV, HIDDEN = "recompute", "kv", "hidden"
NAIVE_HYBRID, HCACHE, KVPR = "naive hybrid", "hcache", "kvpr"

SplitAt = Callable[[int, int], Option | None]
"""(layer, tokens from hidden rows) -> the layer split there."""


class _Ways(NamedTuple):
    """The papers' ways back of one layer: hidden states, or rows of any other kind, which count as K/V."""

    hidden: Option | None
    kv: Option | None
    recompute: LayerPiece | None


def baselines(
    layers: Sequence[LayerOptions], history: int, split_at: SplitAt | None
) -> Mapping[str, Assignment]:
    """Return the assignments by name; `split_at` is None where the engine does not split layers."""
    # Papers and operators use these names. A baseline that a layer cannot do is left out.
    ways = _ways(layers)
    assignments = {
        RECOMPUTE: _assignment(ways, MethodCounts(len(layers), 0, 0)),
        KV: _assignment(ways, MethodCounts(0, 0, len(layers))),
        HIDDEN: _assignment(ways, MethodCounts(0, len(layers), 0)),
    }
    times = _times(ways)
    if times is not None and assignments[RECOMPUTE]:
        assignments[NAIVE_HYBRID] = _assignment(ways, naive_hybrid_schedule(len(layers), times))
        assignments[HCACHE] = _assignment(ways, hcache_schedule(len(layers), times))
    if times is not None and split_at is not None and history:
        assignments[KVPR] = _all_split(len(layers), history, split_at, times)
    return {name: assignment for name, assignment in assignments.items() if assignment is not None}


def split_everywhere(
    layers: Sequence[LayerOptions], history: int, split_at: SplitAt | None
) -> Assignment | None:
    """Return every layer split at KVPR's token; None where that cannot be."""
    if split_at is None or not history:
        return None
    times = _times(_ways(layers))
    return None if times is None else _all_split(len(layers), history, split_at, times)


def _ways(layers: Sequence[LayerOptions]) -> list[_Ways]:
    # Compare by identity: like layers are one object, and are looked at once.
    kinds = {id(layer): layer for layer in layers}
    known = {
        key: _Ways(_option(layer, Method.HIDDEN), _option(layer, Method.KV), layer.recompute)
        for key, layer in kinds.items()
    }
    return [known[id(layer)] for layer in layers]


def _option(layer: LayerOptions, method: Method) -> Option | None:
    """The option by that method, where rows of any kind count as K/V.

    A layer's only option serves for both.
    """
    by_method = {option.method: option for option in layer.options}
    is_hidden = method is Method.HIDDEN
    fitting = (each for of, each in by_method.items() if of and (of.unpacked is Method.HIDDEN) == is_hidden)
    return next(
        fitting, layer.options[0] if len(layer.options) == 1 and not layer.options[0].method else None
    )


def _assignment(ways: Sequence[_Ways], schedule: MethodCounts) -> Assignment | None:
    recomputed, kv = schedule.recomputed, schedule.recomputed + schedule.hidden
    if any(way.recompute is None for way in ways[:recomputed]):
        return None
    return _assigned(
        recomputed, [*(way.hidden for way in ways[recomputed:kv]), *(way.kv for way in ways[kv:])]
    )


def _assigned(recomputed_count: int, options: Sequence[Option | None]) -> Assignment | None:
    """None where a layer has no such option."""
    present = tuple(option for option in options if option is not None)
    return Assignment(recomputed_count, present) if len(present) == len(options) else None


def _times(ways: Sequence[_Ways]) -> LayerTimes | None:
    """The average layer; None unless all layers hold both kinds of rows, and one has any to restore.

    Reading and copying count as one stream.
    """
    both = [(way.hidden.pieces[0], way.kv.pieces[0]) for way in ways if way.hidden and way.kv]
    if len(both) < len(ways) or not any(rows.method for _, rows in both):
        return None
    return LayerTimes(
        # The papers have one transfer per layer. Reads and copies
        # overlap here, so that the slower one stands for both.
        hidden_io_s=fmean(max(hidden.read_s, hidden.copy_s) for hidden, _ in both),
        kv_io_s=fmean(max(rows.read_s, rows.copy_s) for _, rows in both),
        hidden_compute_s=fmean(hidden.compute_s for hidden, _ in both),
        token_compute_s=fmean(way.recompute.compute_s if way.recompute else 0.0 for way in ways),
    )


def _all_split(layer_count: int, history: int, split_at: SplitAt, times: LayerTimes) -> Assignment | None:
    split = kvpr_split(
        history,
        activation_s=times.hidden_io_s / history,
        recompute_s=times.hidden_compute_s / history,
        kv_s=times.kv_io_s / history,
    )
    return _assigned(0, [split_at(layer, split) for layer in range(layer_count)])
