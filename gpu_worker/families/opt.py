"""OPT: layer norm, separate projections with bias, positions learned and added at the embedding.

Knows transformers' OPT modules. Worst case: positions are part of every saved row, so tokens before
kept ones cannot be dropped.
"""

from typing import Any

from transformers import PreTrainedModel

from ctxcache.format.streams import StateKind
from gpu_worker.families.adapter import (
    ONE_ROPE,
    Adapter,
    DecoderLayer,
    HalfShape,
    SeparateProjection,
    embed_rotated,
    norm_name,
)


def build(model: PreTrainedModel) -> Adapter:
    """Describe one model."""
    config = model.config
    # Any: transformers types submodules as Tensor | Module, their attributes not at all.
    decoder: Any = model.base_model.decoder
    half = HalfShape(config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    norms = [block.self_attn_layer_norm if config.do_layer_norm_before else None for block in decoder.layers]
    return Adapter(
        model=model,
        base=decoder,
        layers=tuple(
            DecoderLayer(
                block,
                norm,
                SeparateProjection(block.self_attn.k_proj, block.self_attn.v_proj, half, half),
                ONE_ROPE,
                window=None,
            )
            for block, norm in zip(decoder.layers, norms, strict=True)
        ),
        kind=StateKind.KV,
        key=half,
        value=half,
        embed_halves=embed_rotated(),
        rotary=None,
        norm_name=norm_name("layernorm", norms[0]),
        rope_name=f"learned {config.max_position_embeddings}",
    )
