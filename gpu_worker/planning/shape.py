"""Shapes: what planning needs to know of a model. Sizes and operation counts, no weights.

Worst case: a count that leaves something out (a norm, a router); a measured profile does not use them.
"""

import enum
from dataclasses import dataclass

from ctxcache.format.packing import DELTAS, LOSSY_KINDS, MOST_ELEMENTS, PACKINGS, packing_of, unpacked
from ctxcache.format.streams import StateKind

MULTIPLY_ADD_FLOPS = 2
GATED_MATRICES, PLAIN_MATRICES = 3, 2
"""Matrices of a feed-forward part: gate, up, down; or up, down."""


class LayerKind(enum.Enum):
    """The state that a layer keeps for later tokens."""

    FULL = "full"
    """K and V of every token, shared by groups of heads or not."""
    SLIDING = "sliding"
    """K and V of the last tokens only."""
    LATENT = "latent"
    """A compressed row per token, from which K and V are expanded at every step (MLA)."""
    LINEAR = "linear"
    """One state of fixed size, which every token updates."""
    SHARED = "shared"
    """Nothing: it reads another layer's K and V."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One decoder layer.

    Bytes are of one token's row. `project_flops` per token make the K/V (or latent) row from the
    layer's input; `linear_flops` per token are all of the layer's matrices, these included;
    `attention_flops` come on top for each pair of a token and one that it sees.
    """

    kind: LayerKind
    hidden_row_bytes: int
    kv_row_bytes: int
    project_flops: float
    linear_flops: float
    attention_flops: float
    window: int | None = None
    """Tokens that a token of a SLIDING layer sees, itself included."""
    state_bytes: int = 0
    """Size of a LINEAR layer's state."""
    state_flops: float = 0
    """The part of `project_flops` that brings a LINEAR layer's state forward; the rest makes K and V."""
    element_bytes: int = 2
    """Bytes of one element of the rows, before they are packed."""
    is_from_hidden: bool = True
    """Whether the layer comes back from its inputs."""
    has_own_rows: bool = True
    """Whether there is another kind of rows beside its inputs; of a LINEAR layer, its kept state."""
    is_as_cached: bool = False
    """Whether K and V are kept with their positions, as nothing else is known of them."""

    @property
    def own_kind(self) -> StateKind | None:
        """The kind of its own rows, beside its inputs; None where it has none."""
        if self.kind is LayerKind.SHARED or not self.has_own_rows:
            return None
        if self.is_as_cached:
            return StateKind.KV_AS_CACHED
        return StateKind.LATENT if self.kind is LayerKind.LATENT else StateKind.KV

    @property
    def saved_kind(self) -> StateKind | None:
        """The kind to save it by where no other is wished for: its own, or its inputs."""
        return self.own_kind or next(iter(self.kinds), None)

    def row_bytes(self, kind: StateKind) -> int:
        """Bytes of one token's row of a kind.

        Raises ValueError for a packed kind and rows that are not packed.
        """
        wide = self.hidden_row_bytes if unpacked(kind) is StateKind.HIDDEN else self.kv_row_bytes
        return packing_of(kind).row_bytes(wide // self.element_bytes) if kind in LOSSY_KINDS else wide

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """The kinds that it can be saved by, packed ones behind the others."""
        own = self.own_kind
        if self.kind is LayerKind.SHARED:
            return ()
        wide = tuple(kind for kind in (self.is_from_hidden and StateKind.HIDDEN, own) if kind)
        # Latents and states are kept exact: what packing loses in a state would add up.
        if self.kind not in (LayerKind.FULL, LayerKind.SLIDING):
            return wide
        sizes = {kind: _element_count(self, kind) for kind in PACKINGS if PACKINGS[kind].unpacked in wide}
        packed = (kind for kind, size in sizes.items() if 0 < size <= MOST_ELEMENTS and size % 2 == 0)
        size = sizes.get(StateKind.HIDDEN_INT8, 0)
        has_deltas = self.kind is LayerKind.FULL and 0 < size <= MOST_ELEMENTS and size % 8 == 0
        return (*wide, *packed, *(DELTAS if has_deltas else ()))

    def needed_from(self, history: int) -> int:
        """The first of `history` tokens whose row a later token may see."""
        # The next token sees itself and window - 1 before it.
        # One row at least, as engines know no empty layer.
        return 0 if self.window is None else max(0, history - max(self.window - 1, 1))

    def pair_count(self, begin: int, end: int) -> float:
        """Pairs of a token of [begin, end) and one that it sees."""
        # Token t sees t + 1 tokens, itself included: over [begin, end) the sum
        # is (end - begin)(begin + end + 1) / 2. With a window it sees `window`
        # at most: the sum goes as before up to there, and is level behind.
        if self.window is None:
            return (end - begin) * (begin + end + 1) / 2
        full = max(begin, min(end, self.window))
        return (full - begin) * (begin + full + 1) / 2 + (end - full) * self.window


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model: its name and its layers, first to last."""

    name: str
    layers: tuple[LayerShape, ...]
    has_token_inputs: bool = False
    """Whether token ids alone give layer 0's input, so that deltas need no base that is stored."""


def attention_layer(
    *,
    hidden_size: int,
    head_count: int,
    kv_head_count: int,
    head_size: int,
    ffn_size: int,
    element_bytes: int = 2,
    ffn_matrix_count: int = GATED_MATRICES,
    window: int | None = None,
) -> LayerShape:
    """A layer with K and V per token; `ffn_size` is that of all experts that one token passes."""
    kv_size = 2 * kv_head_count * head_size
    project = MULTIPLY_ADD_FLOPS * hidden_size * kv_size
    # Two matrices: queries in, and attention's output back to the model's width.
    queries = 2 * MULTIPLY_ADD_FLOPS * hidden_size * head_count * head_size
    return LayerShape(
        kind=LayerKind.FULL if window is None else LayerKind.SLIDING,
        hidden_row_bytes=hidden_size * element_bytes,
        kv_row_bytes=kv_size * element_bytes,
        project_flops=project,
        linear_flops=project + queries + MULTIPLY_ADD_FLOPS * ffn_matrix_count * hidden_size * ffn_size,
        # Two products for each pair: query by key, and weight by value.
        attention_flops=2 * MULTIPLY_ADD_FLOPS * head_count * head_size,
        window=window,
        element_bytes=element_bytes,
    )


def latent_layer(
    *,
    hidden_size: int,
    latent_size: int,
    head_count: int,
    head_size: int,
    linear_flops: float,
    element_bytes: int = 2,
) -> LayerShape:
    """A layer with a latent row of `latent_size` elements per token (MLA), its rotary part included."""
    return LayerShape(
        kind=LayerKind.LATENT,
        hidden_row_bytes=hidden_size * element_bytes,
        kv_row_bytes=latent_size * element_bytes,
        project_flops=MULTIPLY_ADD_FLOPS * hidden_size * latent_size,
        linear_flops=linear_flops,
        attention_flops=2 * MULTIPLY_ADD_FLOPS * head_count * head_size,
        element_bytes=element_bytes,
    )


def linear_layer(
    *, hidden_size: int, state_bytes: int, project_flops: float, linear_flops: float, element_bytes: int = 2
) -> LayerShape:
    """A layer with linear attention; `project_flops` per token rebuild its state from its inputs."""
    return LayerShape(
        kind=LayerKind.LINEAR,
        hidden_row_bytes=hidden_size * element_bytes,
        kv_row_bytes=0,
        project_flops=project_flops,
        linear_flops=linear_flops,
        attention_flops=0,
        state_bytes=state_bytes,
        state_flops=project_flops,
        element_bytes=element_bytes,
    )


def _element_count(layer: LayerShape, kind: StateKind) -> int:
    return layer.row_bytes(unpacked(kind)) // layer.element_bytes
