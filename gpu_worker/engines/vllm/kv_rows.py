"""K before positions and V, row by row: hooks see them in a pass, and put them back with their positions.

K is taken before the rotary embedding turns it, V as attention gets it, by hooks, which eager passes alone
call.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from ctxcache.format.streams import StateKind
from gpu_worker.engines.settings import Refused
from gpu_worker.engines.vllm.pass_rows import AttentionLayer, Halves, PassRows


class KvRows(PassRows):
    """Rows of K and V of an engine whose layers each have a rotary embedding beside their attention."""

    kind = StateKind.KV

    def _listen(self) -> None:
        self._key: Tensor | None = None
        self._rotaries: dict[str, nn.Module] = {}
        for number, layer in enumerate(self._layers):
            rotary = getattr(layer.parent, "rotary_emb", None)
            if not isinstance(rotary, nn.Module):
                kind = type(layer.attention).__name__
                raise Refused(f"layer {layer.name} has no rotary embedding of its own: {kind}")
            self._rotaries[layer.name] = rotary
            layer.attention.register_forward_pre_hook(functools.partial(self._value_comes, number))
        for rotary in dict.fromkeys(self._rotaries.values()):
            rotary.register_forward_pre_hook(self._key_comes)

    def _halves(self, layer: AttentionLayer, rows: Tensor, positions: Tensor) -> Halves:
        key_size = layer.attention.num_kv_heads * layer.attention.head_size
        key = rows[:, :key_size].contiguous()
        turned = self._rotaries[layer.name](positions, key)[0]
        return layer.halves(turned, rows[:, key_size:].contiguous())

    def _key_comes(self, _rotary: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_listening and len(args) > 2 and args[2] is not None:
            # A copy: positions are put into it where it lies.
            self._key = args[2].clone()

    def _value_comes(self, number: int, _attention: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._is_listening or self._key is None:
            return
        key, self._key = self._key, None
        self._emit(number, torch.cat((key.flatten(1), args[2].flatten(1)), dim=1))
