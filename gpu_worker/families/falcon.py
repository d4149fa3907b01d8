"""Falcon: layer norm, one fused projection in three layouts, rotary over the whole head.

Rows hold each KV head once; where the engine repeats KV heads in its cache (new decoder
architecture), restore does the same. ALiBi variants are refused: their bias is no part of a row.
Worst case: hidden restore computes all query heads to get one KV head (multi-query).
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
    refuse,
    rope_name,
)


def build(model: PreTrainedModel) -> Adapter:
    """Describe one model; raises UnsupportedArchitecture for ALiBi and length-dependent angles."""
    config = model.config
    if config.alibi:
        raise refuse(model, "ALiBi positions are not supported")
    # Any: transformers types submodules as Tensor | Module, their attributes not at all.
    base: Any = model.base_model
    attention = base.h[0].self_attention
    half = HalfShape(_kv_head_count(config), attention.head_dim)
    group_count = config.num_attention_heads // half.head_count if config.new_decoder_architecture else 1
    return Adapter(
        model=model,
        base=base,
        layers=tuple(
            DecoderLayer(block, _norm(block), _projection(block.self_attention, half), ONE_ROPE, window=None)
            for block in base.h
        ),
        kind=StateKind.KV,
        key=half,
        value=half,
        embed_halves=embed_rotated(group_count),
        rotary=one_table(base.rotary_emb),
        norm_name=norm_name("layernorm", _norm(base.h[0])),
        rope_name=rope_name(model),
    )


def _kv_head_count(config: Any) -> int:
    # Any: as above.
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _norm(block: Any) -> Any:
    # Any: as above. The norm before attention has its own name where the MLP has one beside it.
    has_two = block.config.new_decoder_architecture and block.config.num_ln_in_parallel_attn == 2
    return block.ln_attn if has_two else block.input_layernorm


def _projection(attention: Any, half: HalfShape) -> FusedProjection:
    # Any: as above. Queries of a group come first in it, then one K and one V; with as many KV
    # heads as queries a group is one head, with multi-query the whole row is one group.
    def split(out: Tensor) -> Halves:
        groups = out.reshape(out.shape[-2], half.head_count, -1, half.head_size)
        return groups[:, :, -2], groups[:, :, -1]

    return FusedProjection(attention.query_key_value, split)
