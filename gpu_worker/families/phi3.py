"""Phi-3: Llama with one fused projection, Q then K then V, and possibly partial rotary.

Knows transformers' Phi3 modules. Worst case: long-context variants, whose rotary angles change
with the session's length and which are refused.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ctxcache.format.streams import StateKind
from gpu_worker.families.adapter import (
    ONE_ROPE,
    Adapter,
    DecoderLayer,
    FusedProjection,
    HalfShape,
    Halves,
    embed_rotated,
    norm_name,
    one_table,
    rope_name,
    windows,
)


def build(model: PreTrainedModel) -> Adapter:
    """Describe one model; raises UnsupportedArchitecture for length-dependent rotary angles."""
    # Any: transformers types submodules as Tensor | Module, their attributes not at all.
    base: Any = model.base_model
    half = HalfShape(model.config.num_key_value_heads, base.layers[0].self_attn.head_dim)
    return Adapter(
        model=model,
        base=base,
        layers=tuple(
            DecoderLayer(
                block, block.input_layernorm, _projection(block.self_attn.qkv_proj, half), ONE_ROPE, window
            )
            for block, window in zip(base.layers, windows(model.config), strict=True)
        ),
        kind=StateKind.KV,
        key=half,
        value=half,
        embed_halves=embed_rotated(),
        rotary=one_table(base.rotary_emb),
        norm_name=norm_name("rmsnorm", base.layers[0].input_layernorm),
        rope_name=rope_name(model),
    )


def _projection(qkv: Any, half: HalfShape) -> FusedProjection:
    # Any: as above.
    def split(out: Tensor) -> Halves:
        return half.heads(out[..., -2 * half.size : -half.size]), half.heads(out[..., -half.size :])

    return FusedProjection(qkv, split)
