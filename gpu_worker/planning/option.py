"""Options: the ways in which one layer can come back, with the time each takes on each stream.

Knows shapes, holdings and profiles. Worst case: a layer without any, which must be recomputed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import le

from ctxcache.format.packing import LOSSY_KINDS
from ctxcache.format.streams import TOKEN_ROW_BYTES, StateKind
from gpu_worker.planning.block import NOTHING, StreamBlock, step
from gpu_worker.planning.holding import SPLIT_TOKENS, EngineAbilities, LayerHolding
from gpu_worker.planning.plan import Method
from gpu_worker.planning.profile import Profile, StatePlace
from gpu_worker.planning.shape import LayerKind, LayerShape

_SPLIT_KINDS = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.LATENT)
_FEW_OPTIONS = 2
"""So few options are all kept: the papers' options are then always there to be compared with."""


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """Tokens [begin, end) of one layer by one method. No method: the layer has nothing to restore."""

    method: Method | None
    begin: int
    end: int
    size_bytes: float = 0.0
    read_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0
    gather_s: float = 0.0
    snapshot_tokens: int = 0
    """Tokens behind which a snapshot of the layer's state stands, from which the layer goes on."""

    @property
    def device_s(self) -> float:
        """Seconds on the computing stream: gathering what other ranks read, then computing."""
        return self.gather_s + self.compute_s

    def block(self, behind_s: float) -> StreamBlock:
        """Its effect on the streams, followed by the new tokens' pass through the layer."""
        return step(read_s=self.read_s, copy_s=self.copy_s, compute_s=self.device_s + behind_s)


@dataclass(frozen=True, slots=True)
class Option:
    """One way for a layer, as the pieces that it consists of, in their order."""

    pieces: tuple[LayerPiece, ...]

    @property
    def method(self) -> Method | None:
        """The method of the largest piece."""
        return max(self.pieces, key=lambda piece: piece.end - piece.begin).method

    def block(self, behind_s: float) -> StreamBlock:
        """Its effect on the streams, followed by the new tokens' pass through the layer."""
        block = NOTHING
        for piece in self.pieces[:-1]:
            block = block.then(piece.block(0.0))
        return block.then(self.pieces[-1].block(behind_s))


@dataclass(frozen=True, slots=True)
# The ways of a layer whose first needed token is `begin`, of T tokens:
#
#     options    [ ── one method ──────────── )      begin .. T
#     splits     [ hidden ── cut ── K and V ── )      the projection hides the copy behind it (KVPR)
#     frontier   [ recomputed ─ cut ─ rows ─── )      only right behind layers that are recomputed whole
#     recompute  [ over the token ids ──────── )      0 .. T
class LayerOptions:
    """All ways for one layer."""

    options: tuple[Option, ...]
    splits: tuple[Option, ...]
    frontier: tuple[Option, ...]
    """Splits of which a part is recomputed: the layers before must be recomputed."""
    recompute: LayerPiece | None


def layer_options(
    layer: LayerShape, holding: LayerHolding, history: int, profile: Profile, engine: EngineAbilities
) -> LayerOptions:
    """Return the ways to bring back one layer of `history` tokens."""
    recompute = _recomputed(layer, 0, history, profile) if engine.can_recompute else None
    if layer.kind is LayerKind.SHARED or not history:
        # A piece of no tokens, so that each layer has one: timelines and explanations need no exception.
        nothing = Option((LayerPiece(None, history, history),))
        return LayerOptions((nothing,), (), (), recompute)
    maker = _Maker.of(layer, holding, history, profile, engine)
    begin = layer.needed_from(history)
    whole = [maker.whole(method, begin, history) for method in maker.methods]
    whole.append(maker.from_snapshot(history))
    options = tuple(
        Option((piece,)) for piece in _worth_a_look([piece for piece in whole if piece is not None])
    )
    splits: tuple[Option, ...] = ()
    frontier: tuple[Option, ...] = ()
    if engine.can_split and layer.kind in _SPLIT_KINDS:
        cuts = _cuts(begin, history, engine.split_count)
        # Both kinds over all tokens: a cut may be anywhere.
        if maker.hidden(begin, history) and maker.rows(begin, history):
            splits = tuple(maker.split(begin, cut) for cut in cuts)
        if recompute is not None:
            frontier = tuple(option for cut in cuts for option in maker.recomputed_until(cut))
    return LayerOptions(options, splits, frontier, recompute)


def split_option(
    layer: LayerShape,
    holding: LayerHolding,
    history: int,
    profile: Profile,
    engine: EngineAbilities,
    cut: int,
) -> Option | None:
    """Return the layer split at a token: hidden rows before it, K and V behind it.

    None where that cannot be.
    """
    if layer.kind not in _SPLIT_KINDS:
        return None
    maker = _Maker.of(layer, holding, history, profile, engine)
    begin = layer.needed_from(history)
    if maker.hidden(begin, history) is None or maker.rows(begin, history) is None:
        return None
    return maker.split(begin, max(begin, min(cut, history)))


def token_ids_block(place: StatePlace, history: int, profile: Profile) -> StreamBlock:
    """The streams' work until the token ids are on the device."""
    read_s, copy_s = profile.transfer_s({place: history * TOKEN_ROW_BYTES})
    return step(read_s=read_s, copy_s=copy_s)


def _recomputed(layer: LayerShape, begin: int, end: int, profile: Profile) -> LayerPiece:
    return LayerPiece(Method.TOKENS, begin, end, compute_s=profile.recompute_s(layer, begin, end))


def _methods(layer: LayerShape, engine: EngineAbilities) -> tuple[Method, ...]:
    """The methods that are allowed, exact ones first, otherwise those with the smallest rows."""
    kinds = [kind for kind in layer.kinds if kind not in LOSSY_KINDS or kind in engine.lossy_kinds]
    kinds.sort(
        # Among equal times the first kind wins, and is then an exact one.
        key=lambda kind: (kind in LOSSY_KINDS, 0 if kind not in LOSSY_KINDS else layer.row_bytes(kind))
    )
    return tuple(Method[kind.name] for kind in kinds)


def _worth_a_look(pieces: list[LayerPiece]) -> list[LayerPiece]:
    """The pieces without those that another one beats, or equals before them, on every stream."""
    kept: list[LayerPiece] = []
    for i, piece in enumerate(pieces):
        others = (*kept, *pieces[i + 1 :])
        if len(pieces) <= _FEW_OPTIONS or not any(
            _is_no_later(other, piece, is_first=other in kept) for other in others
        ):
            kept.append(piece)
    return kept


def _is_no_later(one: LayerPiece, other: LayerPiece, *, is_first: bool) -> bool:
    ours, theirs = (one.read_s, one.copy_s, one.device_s), (other.read_s, other.copy_s, other.device_s)
    return all(map(le, ours, theirs)) and (is_first or ours != theirs)


def _cuts(begin: int, end: int, most: int) -> list[int]:
    """Where a layer may be cut: at segments' borders, `most` of them at even distances."""
    # Borders of segments within (begin, end), evenly thinned to `most`:
    #
    #     begin = 100, end = 700, most = 3:   128, 192, ..., 640 (9 borders)  ──►  128, 320, 512
    first = begin // SPLIT_TOKENS + 1
    count = (end - 1) // SPLIT_TOKENS - first + 1
    stride = max(1, -(-count // max(most, 1)))
    return [SPLIT_TOKENS * border for border in range(first, first + count, stride)]


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes one layer's pieces; None where what they need is not held."""

    layer: LayerShape
    holding: LayerHolding
    history: int
    profile: Profile
    methods: tuple[Method, ...]
    hidden_methods: tuple[Method, ...]
    """Methods from the layer's inputs, the smallest rows first."""
    row_methods: tuple[Method, ...]
    """Methods from K and V or latents, the smallest rows first."""

    @classmethod
    def of(
        cls, layer: LayerShape, holding: LayerHolding, history: int, profile: Profile, engine: EngineAbilities
    ) -> "_Maker":
        held = {kind for kind, _ in holding.kinds}
        methods = tuple(method for method in _methods(layer, engine) if method.kind in held)
        by_size = sorted(methods, key=lambda method: layer.row_bytes(method.kind))
        hidden = tuple(method for method in by_size if method.unpacked is Method.HIDDEN)
        rows = tuple(method for method in by_size if method.unpacked is not Method.HIDDEN)
        return cls(layer, holding, history, profile, methods, hidden, rows)

    def whole(self, method: Method, begin: int, end: int) -> LayerPiece | None:
        """Tokens [begin, end) by one method."""
        layer, profile = self.layer, self.profile
        if layer.kind is LayerKind.LINEAR:
            return self._linear(method, end)
        if method.unpacked is Method.HIDDEN:
            compute_s = profile.project_s(layer, end - begin, method)
        else:
            compute_s = profile.embed_s(layer, end - begin, method)
        return self._piece(method, begin, end, layer.row_bytes(method.kind), compute_s)

    def hidden(self, begin: int, end: int) -> LayerPiece | None:
        """The layer's inputs, by the held method with the smallest rows."""
        return self._first_held(self.hidden_methods, begin, end)

    def rows(self, begin: int, end: int) -> LayerPiece | None:
        """K and V or latents, by the held method with the smallest rows."""
        return self._first_held(self.row_methods, begin, end)

    def _first_held(self, methods: tuple[Method, ...], begin: int, end: int) -> LayerPiece | None:
        pieces = (self.whole(method, begin, end) for method in methods)
        return next((piece for piece in pieces if piece), None)

    def _linear(self, method: Method, end: int) -> LayerPiece | None:
        """A LINEAR layer from all of its inputs, or from its state at the end of the history."""
        if method is Method.HIDDEN:
            compute_s = self.profile.project_s(self.layer, end)
            return self._piece(method, 0, end, self.layer.hidden_row_bytes, compute_s)
        # A state counts as the row of the last token.
        last = self._piece(method, end - 1, end, self.layer.state_bytes, 0.0)
        return last and LayerPiece(
            method, 0, end, last.size_bytes, last.read_s, last.copy_s, 0.0, last.gather_s
        )

    def from_snapshot(self, end: int) -> LayerPiece | None:
        """The copy of a LINEAR layer's state that is held, brought forward over the inputs behind it.

        A layer that has K and V as well needs all of its inputs for these.
        """
        layer, at = self.layer, self.holding.snapshot_tokens
        if layer.kind is not LayerKind.LINEAR or not 0 < at <= end or Method.HIDDEN not in self.methods:
            return None
        # Equal where the layer makes no K and V.
        begin = at if layer.state_flops == layer.project_flops else 0
        sizes = dict(self.holding.sizes(StateKind.HIDDEN, begin, end, layer.hidden_row_bytes) or {})
        if not sizes and begin < end:
            return None
        place = next(iter(sizes), StatePlace.DRAM)
        # The snapshot is assumed to lie where the rows behind it do.
        sizes[place] = sizes.get(place, 0.0) + layer.state_bytes
        # `project_s` is of the state, and of K and V. The state's
        # share of the first `at` tokens is not done again.
        known_s = self.profile.project_s(layer, at) * layer.state_flops / layer.project_flops
        return self._sized(
            LayerPiece(Method.HIDDEN, begin, end, snapshot_tokens=at),
            sizes,
            max(self.profile.project_s(layer, end) - known_s, 0.0),
        )

    def split(self, begin: int, cut: int) -> Option:
        """Hidden rows before the cut, whose projection hides the copy of K and V behind it (KVPR)."""
        pieces = (self.hidden(begin, cut), self.rows(cut, self.history))
        return Option(tuple(piece for piece in pieces if piece is not None and piece.begin < piece.end))

    def recomputed_until(self, cut: int) -> Iterator[Option]:
        """The first tokens recomputed, the rest restored."""
        head = _recomputed(self.layer, 0, cut, self.profile)
        for rest in (self.hidden(cut, self.history), self.rows(cut, self.history)):
            if rest is not None:
                yield Option((head, rest))

    def _piece(
        self, method: Method, begin: int, end: int, row_bytes: int, compute_s: float
    ) -> LayerPiece | None:
        sizes = self.holding.sizes(method.kind, begin, end, row_bytes)
        return None if sizes is None else self._sized(LayerPiece(method, begin, end), sizes, compute_s)

    def _sized(self, piece: LayerPiece, sizes: Mapping[StatePlace, float], compute_s: float) -> LayerPiece:
        """A piece with the time that its bytes and its computation take."""
        read_s, copy_s = self.profile.transfer_s(sizes)
        size_bytes = sum(sizes.values())
        return replace(
            piece,
            size_bytes=size_bytes,
            read_s=read_s,
            copy_s=copy_s,
            compute_s=compute_s,
            gather_s=self.profile.gather_s(size_bytes),
        )
