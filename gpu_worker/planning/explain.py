"""Explanations: a plan as rows for a table and as one JSON document, and why a layer comes back as it does.

Worst case: a sentence that says less.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from ctxcache.format.packing import LOSSES_NATS, loss_nats
from ctxcache.format.streams import StateKind
from gpu_worker.planning.assignment import PREFILL
from gpu_worker.planning.option import LayerPiece
from gpu_worker.planning.plan import Method
from gpu_worker.planning.planner import Plan
from gpu_worker.planning.shape import LayerKind, LayerShape


def reason(plan: Plan, layer: int) -> str:
    """Say why `layer` comes back by its method."""
    shape, pieces = plan.request.model.layers[layer], plan.layers[layer]
    sentence = _split(pieces) if len(pieces) > 1 else _whole(plan, layer, shape, pieces[0])
    needed = plan.request.history - shape.needed_from(plan.request.history)
    if needed < plan.request.history and pieces[0].method not in (Method.TOKENS, None):
        sentence += f"; only the last {needed:,} of {plan.request.history:,} tokens are seen again"
    return sentence


def _split(pieces: tuple[LayerPiece, ...]) -> str:
    first, second = (piece.method.value if piece.method else "nothing" for piece in pieces[:2])
    cut = f"{pieces[0].end:,}"
    return f"{first} before token {cut} and {second} from there on, so that both streams end together"


def _whole(plan: Plan, layer: int, shape: LayerShape, piece: LayerPiece) -> str:
    kinds = {kind for kind, _ in plan.request.holding.layers[layer].kinds}
    if piece.method is None:
        return "nothing to restore: it reads another layer's K/V" if plan.request.history else "no history"
    if piece.method is Method.TOKENS:
        return (
            "computation would wait for the rest's rows: recomputed meanwhile"
            if kinds
            else "nothing of it is held"
        )
    if len(kinds - {StateKind.TOKENS}) == 1 and shape.kind is not LayerKind.LINEAR:
        return f"only {piece.method.value} is held" + (
            "" if piece.method.is_exact else f", {_loss(piece.method)}"
        )
    if not piece.method.is_exact:
        return _packed(shape, piece.method)
    if piece.method is Method.HIDDEN:
        return _hidden(shape)
    return _rows(shape, plan.request.history)


def _hidden(shape: LayerShape) -> str:
    if shape.kind is LayerKind.LINEAR:
        return "its state is rebuilt from its inputs"
    ratio = shape.hidden_row_bytes / shape.kv_row_bytes
    return f"{shape.hidden_row_bytes:,} bytes a token, {ratio:.2f} of its K/V, and a projection that fits"


def _packed(shape: LayerShape, method: Method) -> str:
    size = shape.row_bytes(method.kind)
    return f"{size:,} bytes a token, {size / shape.kv_row_bytes:.2f} of its K/V, {_loss(method)}"


def _loss(method: Method) -> str:
    return f"at a loss of {LOSSES_NATS[method.kind]:.0e} nats a token"


def _rows(shape: LayerShape, history: int) -> str:
    if shape.kind is LayerKind.LINEAR:
        return f"a state of {shape.state_bytes:,} bytes, whatever the history of {history:,} tokens"
    size, ratio = shape.kv_row_bytes, shape.hidden_row_bytes / shape.kv_row_bytes
    if shape.kind is LayerKind.LATENT:
        return f"a latent row of {size:,} bytes, a hidden row is {ratio:.1f} times that"
    if ratio >= 1:
        return f"grouped heads: {size:,} bytes a token of K/V, a hidden row is {ratio:.1f} times that"
    return "projecting it as well would end later: K/V needs none"


FORMAT = 1


@dataclass(frozen=True, slots=True)
class ExplainedRun:
    """Layers [begin, end) that come back alike."""

    begin: int
    end: int
    method: str
    size_bytes: float
    read_s: float
    copy_s: float
    compute_s: float
    restored_s: float
    """When the last of the layers is usable."""
    reason: str


def rows(plan: Plan) -> list[ExplainedRun]:
    """Return the plan's layers, those that are alike in one row."""
    by_layer = [(_method(pieces), reason(plan, layer)) for layer, pieces in enumerate(plan.layers)]
    runs = []
    for _, group in groupby(range(len(plan.layers)), key=lambda layer: by_layer[layer]):
        layers = list(group)
        pieces = [piece for layer in layers for piece in plan.layers[layer]]
        runs.append(
            ExplainedRun(
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
    return runs


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


def _pieces(pieces: tuple[LayerPiece, ...]) -> Iterator[dict[str, object]]:
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


def _method(pieces: tuple[LayerPiece, ...]) -> str:
    names = [piece.method.value if piece.method else "-" for piece in pieces]
    if len(pieces) == 1:
        return names[0]
    return f"{names[0]} to {pieces[0].end}, {names[1]}"
