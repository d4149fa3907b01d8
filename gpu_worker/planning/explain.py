"""Explanations: a plan as rows for a table and as one JSON document. Worst case: none, it is words."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from gpu_worker.planning.assignment import PREFILL
from gpu_worker.planning.loss import loss_nats
from gpu_worker.planning.option import Piece
from gpu_worker.planning.planner import Plan
from gpu_worker.planning.reasons import reason

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Row:
    """Layers [begin, end) that come back alike."""

    begin: int
    end: int
    method: str
    size_bytes: float
    read_s: float
    copy_s: float
    compute_s: float
    restored_s: float
    """When the last of them is usable."""
    reason: str


def rows(plan: Plan) -> list[Row]:
    """Return the plan's layers, those that are alike in one row."""
    by_layer = [(_method(pieces), reason(plan, layer)) for layer, pieces in enumerate(plan.layers)]
    found = []
    for _, group in groupby(range(len(plan.layers)), key=lambda layer: by_layer[layer]):
        layers = list(group)
        pieces = [piece for layer in layers for piece in plan.layers[layer]]
        found.append(
            Row(
                begin=layers[0],
                end=layers[-1] + 1,
                method=by_layer[layers[0]][0],
                size_bytes=sum(piece.size_bytes for piece in pieces),
                read_s=sum(piece.read_s for piece in pieces),
                copy_s=sum(piece.copy_s for piece in pieces),
                compute_s=sum(piece.device_s for piece in pieces),
                restored_s=max(plan.timeline.restored_s(layer, besides=PREFILL) for layer in layers),
                reason=by_layer[layers[0]][1],
            )
        )
    return found


def bottleneck(plan: Plan) -> str:
    """Name the stream that works most: making it faster makes the plan faster."""
    busy_s = plan.timeline.busy_s
    return max(busy_s, key=lambda stream: busy_s[stream])


def document(plan: Plan, others_s: Mapping[str, float]) -> dict[str, object]:
    """Return everything about a plan as JSON values; seconds, bytes and tokens."""
    request = plan.request
    return {
        "format": FORMAT,
        "model": request.model.name,
        "profile": {"name": request.profile.name, "is_measured": request.profile.is_measured},
        "history_tokens": request.history,
        "new_tokens": request.new_tokens,
        "end_s": plan.end_s,
        "restored_s": plan.restored_s,
        "bound_s": plan.bound_s,
        "is_exact": plan.is_exact,
        "loss_nats": loss_nats(method.kind for method in plan.methods if method is not None),
        "busy_s": plan.timeline.busy_s,
        "others_s": dict(others_s),
        "layers": [
            {"layer": layer, "reason": reason(plan, layer), "pieces": list(_pieces(pieces))}
            for layer, pieces in enumerate(plan.layers)
        ],
    }


def _pieces(pieces: tuple[Piece, ...]) -> Iterator[dict[str, object]]:
    for piece in pieces:
        yield {
            "method": piece.method.value if piece.method else None,
            "begin": piece.begin,
            "end": piece.end,
            "bytes": piece.size_bytes,
            "read_s": piece.read_s,
            "copy_s": piece.copy_s,
            "compute_s": piece.device_s,
        }


def _method(pieces: tuple[Piece, ...]) -> str:
    names = [piece.method.value if piece.method else "-" for piece in pieces]
    if len(pieces) == 1:
        return names[0]
    return f"{names[0]} to {pieces[0].end}, {names[1]}"
