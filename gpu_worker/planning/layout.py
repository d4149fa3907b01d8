"""Layouts: which state of a new session to save, from what its return is expected to cost.

Considers what the planner would choose for each expected return if everything were held, besides one kind
for all layers and nothing but token ids. The least expected seconds win, and of equals the smallest
layout.

A packed kind costs what it cost in the predictions of small real models, of which the worst counts
(docs/worker.md). A layout that packs some layers loses no more than one that packs all by its worst kind.

Pure. Worst case: returns unlike those expected, which are served slower; or a model that takes rounding
worse than those measured, which `lab/studies/quantization.py` measures.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, takewhile

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import DELTAS, LOSSES_NATS, LOSSY_KINDS, loss_nats
from ctxcache.format.streams import TOKEN_ROW_BYTES, TOKENS, StateKind, Stream
from gpu_worker.planning.holding import EngineAbilities, HeldSpan, Holding, LayerHolding
from gpu_worker.planning.plan import Method
from gpu_worker.planning.planner import PlanRequest, plan
from gpu_worker.planning.profile import Profile, StatePlace
from gpu_worker.planning.shape import LayerKind, LayerShape, ModelShape


def kinds_within(bound_nats: float) -> frozenset[StateKind]:
    """Packed kinds that cost no more than a bound on the KL divergence, in nats a token."""
    return frozenset(kind for kind, nats in LOSSES_NATS.items() if nats <= bound_nats)


def allowed_loss(text: str) -> frozenset[StateKind]:
    """Read `1e-3`, or `hidden_int8,kv_int8`. Empty: none. Raises InvalidArgument(field="loss")."""
    try:
        bound_nats = float(text or 0)
    except ValueError:
        return frozenset(_kind(name) for name in text.split(",") if name)
    if not 0 <= bound_nats < float("inf"):
        raise InvalidArgument(field="loss", problem=f"{text} nats are no bound")
    return kinds_within(bound_nats)


def _kind(name: str) -> StateKind:
    known = {kind.name.lower(): kind for kind in LOSSY_KINDS}
    if name not in known:
        raise InvalidArgument(field="loss", problem=f"{name!r} is neither nats nor one of {', '.join(known)}")
    return known[name]


# Chains of deltas over 12 layers, with a base every 4 (B: 8 bits, d: a delta to the layer below):
#
#     layer   0 1 2 3 4 5 6 7 8 9 10 11
#     kind    B d d d B d d d B d d  d
#
# Recomputation may end before a base only. More bases are more bytes, and more places to end at. Where token
# ids give layer 0's input, nothing of it is stored, and the first base takes no bytes.
_BASE = StateKind.HIDDEN_INT8
_BASE_EVERY = (16, 8, 4)
"""Layers between two bases that are looked at, besides one base for all: recomputation may end at each."""

Kinds = tuple[StateKind | None, ...]
"""The saved kind by layer; None: nothing of the layer is saved, since token ids do."""


@dataclass(frozen=True, slots=True)
class Return:
    """How a session is expected to come back: `count` times, at that length, from that place."""

    history: int
    new_tokens: int = 0
    place: StatePlace = StatePlace.DRAM
    count: float = 1.0


@dataclass(frozen=True, slots=True)
class SessionLayout:
    """The kinds to save. `restore_s`: seconds of all expected returns together."""

    kinds: Kinds
    bytes_per_token: float
    restore_s: float

    @property
    def loss_nats(self) -> float:
        """The most that the layout costs in predictions: KL divergence per token; 0 without packed kinds."""
        return loss_nats(kind for kind in self.kinds if kind is not None)

    def streams(self) -> tuple[Stream, ...]:
        """The streams of the session to create; token ids always."""
        kept = (Stream(layer, kind) for layer, kind in enumerate(self.kinds) if kind is not None)
        return (TOKENS, *kept)


@dataclass(frozen=True, slots=True)
class _Case:
    model: ModelShape
    profile: Profile
    engine: EngineAbilities
    returns: Sequence[Return]


def choose_layout(
    model: ModelShape,
    profile: Profile,
    returns: Sequence[Return],
    *,
    engine: EngineAbilities | None = None,
    byte_price_s: float = 0.0,
) -> SessionLayout:
    """Return the layout with the least expected cost.

    `byte_price_s` is how many seconds of restoring one byte of storage is worth, so that state which
    saves little is not kept. Raises InvalidArgument(field="holding") where nothing works.
    """
    # Returns that never happen are left out: planning for them would change nothing.
    case = _Case(model, profile, engine or EngineAbilities(), [back for back in returns if back.count > 0])
    layouts = [layout for kinds in dict.fromkeys(_candidates(case)) if (layout := _layout(case, kinds))]
    if not layouts:
        raise InvalidArgument(field="holding", problem="no layout lets every layer come back")
    # Rent is for the session at its longest: shorter returns read a part of the same rows.
    longest = max((back.history for back in case.returns), default=1)

    def cost(layout: SessionLayout) -> tuple[float, float]:
        size_bytes = layout.bytes_per_token * longest
        return layout.restore_s + byte_price_s * size_bytes, size_bytes

    return min(layouts, key=cost)


SNAPSHOT_GRAIN_TOKENS = 32
"""Snapshots of states are taken at multiples of this, in distances that are powers of two times it."""


def snapshot_every(model: ModelShape, profile: Profile, returns: Sequence[Return]) -> int:
    """Return every how many tokens to take a snapshot of LINEAR layers' states; 0 for never.

    Each return rebuilds the states of half a distance, or of all its tokens without snapshots. Near the
    optimum of Young (1974), sqrt(2 T S / (r c)).
    """
    layers = [layer for layer in model.layers if layer.kind is LayerKind.LINEAR and layer.is_from_hidden]
    wanted = [back for back in returns if back.count > 0 and back.history > 0]
    if not layers or not wanted:
        return 0
    longest = max(back.history for back in wanted)
    state_bytes = sum(layer.state_bytes for layer in layers)
    # Seconds that a distance E between snapshots costs, over all returns of r tokens:
    #
    #     taking       (longest / E) * S          S: one snapshot's bytes to the slowest place
    #     loading      S for each return
    #     rebuilding   half of E on average, from rows: copying or the mixer, whichever is slower
    taking_s = max(sum(profile.transfer_s({back.place: state_bytes})) for back in wanted)

    def rebuilding_s(back: Return, tokens: int) -> float:
        """The slower of transfer and computation, which overlap."""
        size_bytes = sum(layer.hidden_row_bytes for layer in layers) * tokens
        computing_s = sum(
            profile.project_s(layer, tokens) * layer.state_flops / max(layer.project_flops, 1.0)
            for layer in layers
        )
        return max(sum(profile.transfer_s({back.place: size_bytes})), computing_s)

    def cost_s(every: int) -> float:
        if not every:
            return sum(back.count * rebuilding_s(back, back.history) for back in wanted)
        loading_s = taking_s * sum(back.count for back in wanted if back.history >= every)
        back_s = sum(back.count * rebuilding_s(back, min(every // 2, back.history)) for back in wanted)
        return longest // every * taking_s + loading_s + back_s

    # Powers of two times the grain: a distance that changes
    # by a factor of 2 keeps the places of the longer one.
    grains = takewhile(lambda every: every <= longest, (SNAPSHOT_GRAIN_TOKENS << n for n in range(13)))
    return min((0, *grains), key=lambda every: (cost_s(every), every))


def snapshot_every_by_bytes(model: ModelShape) -> int:
    """Return the distance at which snapshots take no more bytes than the rows that they save reading.

    For a machine of which nothing is known. 0 where no layer keeps a state.
    """
    layers = [layer for layer in model.layers if layer.kind is LayerKind.LINEAR]
    row_bytes = sum(layer.hidden_row_bytes for layer in layers)
    state_bytes = sum(layer.state_bytes for layer in layers)
    every = SNAPSHOT_GRAIN_TOKENS
    while row_bytes and every * row_bytes < state_bytes:
        every *= 2
    return every if row_bytes else 0


def kinds_of_form(model: ModelShape, kind: StateKind, held: Kinds) -> Kinds:
    """Return that kind for all layers that have it, and for the others what is held of them.

    A delta kind gets one base in 8 bits below it, or none where token ids give layer 0's input.
    """
    layers = model.layers
    if kind in DELTAS:
        chained = _chains(model, kind, len(layers))
        return tuple(
            one if one in (kind, _BASE, None) else has for one, has in zip(chained, held, strict=True)
        )
    return tuple(kind if kind in layer.kinds else has for layer, has in zip(layers, held, strict=True))


def _candidates(case: _Case) -> Iterator[Kinds]:
    layers = case.model.layers
    # Candidates, each kept where every return can be planned by it:
    #
    #     token ids alone │ one kind for all layers │ chains of deltas │ the planner's choice of two kinds
    if case.engine.can_recompute:
        yield (None,) * len(layers)
    yield tuple(layer.saved_kind for layer in layers)
    for kind in (StateKind.HIDDEN, *_packed(case.engine)):
        yield tuple(_or_rows(layer, kind) for layer in layers)
    model = case.model if case.engine.can_recompute else replace(case.model, has_token_inputs=False)
    for kind in sorted(case.engine.lossy_kinds.intersection(DELTAS)):
        for kinds in (_chains(model, kind, every) for every in (len(layers), *_BASE_EVERY)):
            if _BASE not in kinds or _BASE in case.engine.lossy_kinds:
                yield kinds
    for some in _sets_of_kinds(case.engine):
        held = tuple(tuple(kind for kind in layer.kinds if kind in some) for layer in layers)
        for back in case.returns:
            with suppress(InvalidArgument):
                methods = plan(_request(case, held, back)).methods
                yield tuple(None if method in (None, Method.TOKENS) else method.kind for method in methods)


def _sets_of_kinds(engine: EngineAbilities) -> Iterator[frozenset[StateKind]]:
    """Sets of kinds that may be held together: two each, the best plan hardly needs more (docs/worker.md)."""
    wide = frozenset((StateKind.HIDDEN, StateKind.KV, StateKind.LATENT, StateKind.KV_AS_CACHED))
    yield wide
    for packed in _packed(engine):
        yield frozenset((packed, StateKind.LATENT, StateKind.KV))
        yield frozenset((packed, StateKind.LATENT, StateKind.HIDDEN))
    for pair in combinations(_packed(engine), 2):
        yield frozenset((*pair, StateKind.LATENT))


def _packed(engine: EngineAbilities) -> list[StateKind]:
    """Packed kinds that need no other layer, in their order."""
    return sorted(engine.lossy_kinds.difference(DELTAS))


def _chains(model: ModelShape, kind: StateKind, every: int) -> Kinds:
    """Deltas with a base in 8 bits every so many layers, and behind a layer that has no delta."""
    kinds: list[StateKind | None] = []
    length = 0
    for layer in model.layers:
        if kind not in layer.kinds:
            kinds.append(layer.saved_kind)
            length = 0
        else:
            kinds.append(kind if length % every else _BASE)
            length += 1
    if model.has_token_inputs and kinds[:2] == [_BASE, kind]:
        kinds[0] = None
    return tuple(kinds)


def _layout(case: _Case, kinds: Kinds) -> SessionLayout | None:
    held = tuple(() if kind is None else (kind,) for kind in kinds)
    try:
        restore_s = sum(each.count * plan(_request(case, held, each)).end_s for each in case.returns)
    except InvalidArgument:
        return None
    sizes = (_row_bytes(layer, kind) for layer, kind in zip(case.model.layers, kinds, strict=True))
    return SessionLayout(kinds, TOKEN_ROW_BYTES + sum(sizes), restore_s)


def _request(case: _Case, kinds: Sequence[Sequence[StateKind]], back: Return) -> PlanRequest:
    spans = (HeldSpan(back.place, 0, back.history),)
    holding = Holding(tuple(LayerHolding(tuple((kind, spans) for kind in some)) for some in kinds))
    return PlanRequest(case.model, holding, back.history, case.profile, back.new_tokens, case.engine)


def _or_rows(layer: LayerShape, kind: StateKind) -> StateKind | None:
    return kind if kind in layer.kinds else layer.saved_kind


def _row_bytes(layer: LayerShape, kind: StateKind | None) -> float:
    if kind is None:
        return 0.0
    return layer.row_bytes(kind)
