"""The papers' closed forms: schedules by formula, for like layers and sums instead of a pipeline.

HCache (arXiv:2410.05004, section 4.1.2), KVPR (arXiv:2411.17089, equation 10), CachedAttention
(arXiv:2403.19708, section 3.2.1). The planner's own search includes what they choose; they are here to
be compared with, and `docs/planner.md` says when they are optimal.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One layer's times in seconds, in HCache's words IO_H, IO_KV, C_H and C_Token."""

    hidden_io_s: float
    kv_io_s: float
    hidden_compute_s: float
    token_compute_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """How many layers by each method: recomputed ones first, K/V last."""

    recomputed: int
    hidden: int
    kv: int


def hcache_schedule(layer_count: int, times: LayerTimes) -> Schedule:
    """HCache's bubble-free schedule, in both branches, rounded as in the paper.

    Projection slower than its copy: K/V of the last layers fills the copying stream,
    L_H = ceil(N IO_KV / (IO_KV + C_H - IO_H)). Otherwise recomputation of the first layers fills the
    computing one, L_H = ceil(N C_Token / (C_Token + IO_H - C_H)).
    """
    surplus_s = times.hidden_compute_s - times.hidden_io_s
    other_s = times.kv_io_s if surplus_s > 0 else times.token_compute_s
    hidden = (
        _ceil(layer_count * other_s / (other_s + abs(surplus_s))) if other_s + abs(surplus_s) else layer_count
    )
    others = layer_count - hidden
    return Schedule(0, hidden, others) if surplus_s > 0 else Schedule(others, hidden, 0)


def naive_hybrid_schedule(layer_count: int, times: LayerTimes) -> Schedule:
    """Recomputation and K/V without hidden states: whole layers whose slower side is the least.

    HCache section 6.3.1 compares with this; the balance is r C_Token = (N - r) IO_KV.
    """
    total_s = times.token_compute_s + times.kv_io_s
    balance = layer_count * times.kv_io_s / total_s if total_s else 0
    near = {math.floor(balance), min(layer_count, math.ceil(balance))}
    best = min(near, key=lambda r: max(r * times.token_compute_s, (layer_count - r) * times.kv_io_s))
    return Schedule(best, 0, layer_count - best)


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
    balance = token_count * kv_s / (recompute_s + kv_s)
    candidates = (0, math.floor(balance), math.ceil(balance))
    return min(candidates, key=lambda split: kvpr_time_s(token_count, split, x, recompute_s, kv_s))


def kvpr_time_s(token_count: int, split: int, activation_s: float, recompute_s: float, kv_s: float) -> float:
    """Equation 10: one layer's time for a split."""
    return split * activation_s + max(split * recompute_s, (token_count - split) * kv_s)


def read_buffer_bytes(
    *, bytes_per_s: float, load_s: float, history_tokens: int, prefill_s: float, new_tokens: int
) -> float:
    """CachedAttention's buffer ahead of the engine, S = B (T_load L_hist - T_pref L_new); 0 where that is less.

    `load_s` and `prefill_s` are per token, through all layers. So many bytes must be there when the
    engine starts, or it will wait for a layer.
    """
    return max(0.0, bytes_per_s * (load_s * history_tokens - prefill_s * new_tokens))


def _ceil(layers: float) -> int:
    # A ratio that is whole but for rounding is that number.
    return math.ceil(round(layers, 9))
