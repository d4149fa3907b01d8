"""Reasons: why a layer comes back the way it does, in a sentence. Worst case: a sentence that says less."""

from ctxcache.format.streams import StateKind
from gpu_worker.plan import Method
from gpu_worker.planning.loss import LOSSES_NATS
from gpu_worker.planning.option import Piece
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


def _split(pieces: tuple[Piece, ...]) -> str:
    first, second = (piece.method.value if piece.method else "nothing" for piece in pieces[:2])
    return f"{first} before token {pieces[0].end:,} and {second} from there on, so that both streams end together"


def _whole(plan: Plan, layer: int, shape: LayerShape, piece: Piece) -> str:
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
