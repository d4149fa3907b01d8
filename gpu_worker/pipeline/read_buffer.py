"""The read buffer: how much must be restored when the engine starts, so that it never waits for a layer.

CachedAttention's S = B (T_load L_hist - T_pref L_new), section 3.2.1 of arXiv:2403.19708, layer by layer and for
layers that are not alike. Pure. Worst case: prefill that is faster than predicted, which then waits at its layers.
"""

from dataclasses import dataclass
from itertools import accumulate

from gpu_worker.planning.planner import Plan
from gpu_worker.planning.timeline import Step, Timeline, simulate


@dataclass(frozen=True, slots=True)
class Lead:
    """The engine starts at `start_s` of the restore; `layer_count` layers, of `size_bytes`, are usable by then."""

    start_s: float
    layer_count: int
    size_bytes: float


def lead(plan: Plan) -> Lead:
    """The earliest start after which no layer is late, if all goes as planned; one layer at least."""
    timeline, pass_s = alone(plan), pass_seconds(plan)
    restored_s = [timeline.restored_s(layer) for layer in range(len(plan.layers))]
    before_s = accumulate(pass_s[:-1], initial=0.0)
    start_s = max(there_s - spent_s for there_s, spent_s in zip(restored_s, before_s, strict=True))
    start_s = max(start_s, restored_s[0])
    count = sum(there_s <= start_s for there_s in restored_s)
    size_bytes = sum(piece.size_bytes for pieces in plan.layers[:count] for piece in pieces)
    return Lead(start_s, count, size_bytes)


def alone(plan: Plan) -> Timeline:
    """When each layer is usable while no new tokens pass."""
    return simulate(
        Step(layer, "restore", piece.read_s, piece.copy_s, piece.device_s)
        for layer, pieces in enumerate(plan.layers)
        for piece in pieces
    )


def pass_seconds(plan: Plan) -> list[float]:
    """The new tokens' seconds in each layer."""
    request = plan.request
    begin, end = request.history, request.history + request.new_tokens
    return [request.profile.recompute_s(layer, begin, end) for layer in request.model.layers]
