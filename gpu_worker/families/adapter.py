"""Adapters: one model's layers, positions and row shapes in a family-independent form.

Knows torch modules and transformers' configuration and cache classes, not the store. An adapter holds
references into the model and nothing of its own. Worst case: a model that is edited after its adapter was
built; build the adapter again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, cat, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ctxcache.format.packing import unpacked
from ctxcache.format.streams import StateKind
from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.caches import Recurrence
from gpu_worker.families.positions import Embed, Rope
from gpu_worker.families.projections import HalfShape, HalfShapes, Halves, NoRows, Projection

# The shapes of a layer's state on its way, where [H, C] and [H_v, C_v] are the two HalfShapes:
#
#     hidden  [T, D]              the layer's input, saved as HIDDEN
#        │ normed
#     x       [1, T, D]           what attention takes
#        │ projection
#     halves  [T, H, C]           K before positions  │  MLA: the latent, H = 1
#             [T, H_v, C_v]       V                   │       the rotary part, H_v = 1
#        │ pack: one row [T, H * C + H_v * C_v], saved as KV or LATENT; unpack is a view
#        │ embed: positions turn K (MLA: the rotary part)
#     cache   [1, H, T, C], [1, H_v, T, C_v]      as transformers keeps it
#
# Rows are from before positions: a session that loses its first tokens is moved by other angles alone.


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer: where its input arrives, and the way from it to the engine's cache."""

    block: nn.Module
    norm: nn.Module | None
    projection: Projection
    rope_key: str
    """Which of the model's position tables this layer uses; layers of one type share one."""
    window: int | None
    """Tokens a sliding-window layer attends to; None where it attends to all."""
    recurrence: Recurrence | None = None
    """A layer that keeps state beside rows of tokens, or instead of them."""
    halves: HalfShapes | None = None
    """Shapes of its halves, where layers differ."""
    index_size: int = 0
    """Elements of an index key, which are the last ones of its second half."""

    @property
    def has_rows(self) -> bool:
        """Whether the layer keeps keys and values."""
        return not isinstance(self.projection, NoRows)

    @property
    def device(self) -> torch.device:
        """Where the layer's weights are."""
        return next(self.block.parameters()).device

    def project(self, hidden: Tensor) -> Halves:
        """Layer input [T, D] -> halves [T, H, C], [T, H, C_v] before positions."""
        return self.projection.project(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Layer input [T, D] -> what attention or the mixer takes, [1, T, D]."""
        x = hidden.unsqueeze(0)
        return x if self.norm is None else self.norm.forward(x)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A model as restore and capture need it; built by `adapt`.

    `kind` is what a projected row is (KV or LATENT), `key` and `value` the shapes of its halves,
    `norm_name` and `rope_name` the canonical strings of the fingerprint.
    """

    model: PreTrainedModel
    base: nn.Module
    """The module whose forward pass runs all layers, and which the model with its head calls."""
    layers: tuple[DecoderLayer, ...]
    kind: StateKind
    key: HalfShape
    value: HalfShape
    embed_halves: Embed
    rotary: Callable[[Tensor, Tensor], Mapping[str, Rope]] | None
    """(something of the model's dtype and device, positions [1, T]) -> tables; None: learned positions."""
    norm_name: str
    rope_name: str
    is_half_split: bool = True
    """Whether positions enter K as `rotate` has it, which is what the kernels know."""
    refused: Mapping[StateKind, str] = field(default_factory=dict)
    """Kinds of state that this model cannot be restored by, with the reason."""
    has_token_inputs: bool = False
    """Whether token ids and their positions alone give layer 0's input, as the loaded model has shown."""
    snapshot_problem: str = ""
    """Why states do not go on from a kept copy; empty where they do, and where there are none."""

    @property
    def kinds(self) -> tuple[StateKind, ...]:
        """The kinds of wide rows that layers can be saved by; recurrent layers only by their inputs."""
        return tuple(kind for kind in (StateKind.HIDDEN, self.kind) if kind not in self.refused)

    def kinds_of(self, layer: int) -> tuple[StateKind, ...]:
        """The kinds of wide rows that this layer can be saved by; empty where it keeps nothing."""
        # A state follows from inputs only: K and V of the same layer would not bring it back.
        if self.layers[layer].recurrence is not None:
            return (StateKind.HIDDEN,)
        return self.kinds if self.layers[layer].has_rows else ()

    def kind_of(self, layer: int, kind: StateKind) -> StateKind | None:
        """The kind by which a layer is restored where others are by `kind`; a recurrent layer by its inputs.

        None for a layer that keeps nothing.
        """
        kinds = self.kinds_of(layer)
        return kind if kind in kinds else next(iter(kinds), None)

    def halves_of(self, layer: int) -> HalfShapes:
        """Shapes of the halves of a layer's row."""
        return self.layers[layer].halves or (self.key, self.value)

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer keeps recurrent or convolution state."""
        return any(layer.recurrence is not None for layer in self.layers)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """The layers that keep recurrent or convolution state."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.recurrence is not None)

    @property
    def is_stepwise(self) -> bool:
        """Whether a pass behind others takes one token at a time."""
        return any(layer.recurrence is not None and layer.recurrence.is_stepwise for layer in self.layers)

    @property
    def architecture(self) -> str:
        """The model's class name."""
        return type(self.model).__name__

    @property
    def is_relocatable(self) -> bool:
        """False where positions enter at the embedding, or a layer's state has taken all tokens in."""
        return self.rotary is not None and not self.is_recurrent

    @property
    def hidden_size(self) -> int:
        """Elements of a HIDDEN row, D."""
        return int(self.model.config.get_text_config(decoder=True).hidden_size)

    @property
    def row_size(self) -> int:
        """Elements of a row of the model's own kind, where layers do not differ."""
        return self.key.size + self.value.size

    @property
    def is_uniform(self) -> bool:
        """Whether all layers keep rows, of one size, and nothing else of a token."""
        return all(each.has_rows and each.halves is None and not each.index_size for each in self.layers)

    def element_count(self, kind: StateKind, layer: int) -> int | None:
        """Elements of a layer's row of `kind`, before packing; None for a kind that it does not have."""
        wide = unpacked(kind)
        if wide not in self.kinds_of(layer):
            return None
        return (
            self.hidden_size if wide is StateKind.HIDDEN else sum(half.size for half in self.halves_of(layer))
        )

    def ropes(self, positions: Tensor) -> Mapping[str, Rope]:
        """Position tables for positions [T], by `rope_key`; empty where positions are learned."""
        if self.rotary is None:
            return {}
        device = self.layers[0].device
        # A rotary module reads only the type and the device of this tensor, by which it rounds its tables.
        example = torch.empty(0, dtype=self.model.dtype, device=device)
        return self.rotary(example, positions.to(device).unsqueeze(0))

    def pack(self, first: Tensor, second: Tensor) -> Tensor:
        """Halves [T, H, C], [T, H, C_v] -> rows [T, row_size], a copy."""
        return cat((first.flatten(1), second.flatten(1)), dim=1)

    def unpack(self, rows: Tensor, layer: int) -> Halves:
        """A layer's rows [T, row_size] -> halves [T, H, C], [T, H, C_v], views."""
        key, value = self.halves_of(layer)
        return key.heads(rows[:, : key.size]), value.heads(rows[:, key.size :])

    def embed(self, halves: Halves, rope: Rope | None) -> Halves:
        """Halves -> keys and values as the engine caches them, [1, H, T, C], [1, H, T, C_v]."""
        # [T, H, C] -> [1, H, T, C], a view; the embedding decides whether anything is copied.
        first, second = (half.transpose(0, 1).unsqueeze(0) for half in halves)
        return self.embed_halves(first, second, rope)


def windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer in tokens, as the engine's own cache sets it up."""
    return tuple(getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers)


def refuse(model: PreTrainedModel, problem: str) -> UnsupportedArchitecture:
    """The error to raise for a setting of a family that is not supported."""
    return UnsupportedArchitecture(architecture=type(model).__name__, problem=problem)
