"""Adapters: one model's layers, positions and row shapes in a family-independent form.

Knows torch modules and transformers' cache classes, not the store. An adapter holds no state of
its own beyond references into the model and lives as long as it. Worst case: it is built for one
configuration and the model is edited afterwards; build it again after any edit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, cat, nn
from transformers import PreTrainedModel

from ctxcache.format.packing import unpacked
from ctxcache.format.streams import StateKind
from gpu_worker.families.projection import HalfShape, Halves, Projection
from gpu_worker.families.rotary import Rope

Embed = Callable[[Tensor, Tensor, Rope | None], Halves]
"""Halves [1, H, T, C], [1, H, T, C_v] before positions -> the engine's keys and values."""


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

    @property
    def device(self) -> torch.device:
        """Where the layer's weights are."""
        return next(self.block.parameters()).device

    def project(self, hidden: Tensor) -> Halves:
        """Layer input [T, D] -> halves [T, H, C], [T, H, C_v] before positions."""
        x = hidden.unsqueeze(0)
        return self.projection.project(x if self.norm is None else self.norm.forward(x))


@dataclass(frozen=True, slots=True)
class Adapter:
    """What restore and capture need of a model; built by `adapt`.

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

    @property
    def architecture(self) -> str:
        """The model's class name."""
        return type(self.model).__name__

    @property
    def is_relocatable(self) -> bool:
        """False where positions enter at the embedding, so that saved state cannot be moved."""
        return self.rotary is not None

    @property
    def hidden_size(self) -> int:
        """Elements of a HIDDEN row, D."""
        return int(self.model.config.hidden_size)

    @property
    def row_size(self) -> int:
        """Elements of a KV or LATENT row."""
        return self.key.size + self.value.size

    def element_count(self, kind: StateKind) -> int | None:
        """Elements of a row of `kind`, or of the kind that it packs; None for one the model does not have."""
        return {StateKind.HIDDEN: self.hidden_size, self.kind: self.row_size}.get(unpacked(kind))

    def ropes(self, positions: Tensor) -> Mapping[str, Rope]:
        """Position tables for positions [T], by `rope_key`; empty where positions are learned."""
        if self.rotary is None:
            return {}
        device = self.layers[0].device
        example = torch.empty(0, dtype=self.model.dtype, device=device)
        return self.rotary(example, positions.to(device).unsqueeze(0))

    def pack(self, first: Tensor, second: Tensor) -> Tensor:
        """Halves [T, H, C], [T, H, C_v] -> rows [T, row_size], a copy."""
        return cat((first.flatten(1), second.flatten(1)), dim=1)

    def unpack(self, rows: Tensor) -> Halves:
        """Rows [T, row_size] -> halves [T, H, C], [T, H, C_v], views."""
        return self.key.heads(rows[:, : self.key.size]), self.value.heads(rows[:, self.key.size :])

    def embed(self, halves: Halves, rope: Rope | None) -> Halves:
        """Halves -> keys and values as the engine caches them, [1, H, T, C], [1, H, T, C_v]."""
        first, second = (half.transpose(0, 1).unsqueeze(0) for half in halves)
        return self.embed_halves(first, second, rope)
