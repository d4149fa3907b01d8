"""The read buffer: how much must be restored when the engine starts, so that it never waits for a layer.

CachedAttention's S = B (T_load L_hist - T_pref L_new), section 3.2.1 of arXiv:2403.19708, layer by layer and for
layers that are not alike. Pure. Worst case: prefill that is faster than predicted, which then waits at its layers.
"""

from dataclasses import dataclass
from itertools import accumulate

from gpu_worker.planning.planner import Plan
from gpu_worker.planning.timeline import Step, simulate


@dataclass(frozen=True, slots=True)
class Lead:
    """The engine starts at `start_s` of the restore; `layer_count` layers, of `size_bytes`, are usable by then."""

    start_s: float
    layer_count: int
    size_bytes: float


def lead(plan: Plan) -> Lead:
    """The earliest start after which no layer is late, if all goes as planned; one layer at least."""
    timeline = simulate(
        Step(layer, "restore", piece.read_s, piece.copy_s, piece.compute_s)
        for layer, pieces in enumerate(plan.layers)
        for piece in pieces
    )
    restored_s = [timeline.restored_s(layer) for layer in range(len(plan.layers))]
    request = plan.request
    begin, end = request.history, request.history + request.new_tokens
    pass_s = [request.profile.recompute_s(layer, begin, end) for layer in request.model.layers]
    before_s = accumulate(pass_s[:-1], initial=0.0)
    start_s = max(there_s - spent_s for there_s, spent_s in zip(restored_s, before_s, strict=True))
    start_s = max(start_s, restored_s[0])
    count = sum(there_s <= start_s for there_s in restored_s)
    size_bytes = sum(piece.size_bytes for pieces in plan.layers[:count] for piece in pieces)
    return Lead(start_s, count, size_bytes)
