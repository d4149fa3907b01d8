"""GPT-2: layer norm, one fused projection Q, K, V, positions learned and added at the embedding.

Knows transformers' GPT2 modules. Worst case: as OPT, tokens before kept ones cannot be dropped.
Models with cross-attention are refused.
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
    refuse,
)


def build(model: PreTrainedModel) -> Adapter:
    """Describe one model; raises UnsupportedArchitecture for cross-attention."""
    config = model.config
    if config.add_cross_attention:
        raise refuse(model, "cross-attention is not supported")
    # Any: transformers types submodules as Tensor | Module, their attributes not at all.
    base: Any = model.base_model
    half = HalfShape(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    return Adapter(
        model=model,
        base=base,
        layers=tuple(
            DecoderLayer(block, block.ln_1, _projection(block.attn.c_attn, half), ONE_ROPE, window=None)
            for block in base.h
        ),
        kind=StateKind.KV,
        key=half,
        value=half,
        embed_halves=embed_rotated(),
        rotary=None,
        norm_name=norm_name("layernorm", base.h[0].ln_1),
        rope_name=f"learned {config.max_position_embeddings}",
    )


def _projection(qkv: Any, half: HalfShape) -> FusedProjection:
    # Any: as above.
    def split(out: Tensor) -> Halves:
        return half.heads(out[..., half.size : 2 * half.size]), half.heads(out[..., 2 * half.size :])

    return FusedProjection(qkv, split)
