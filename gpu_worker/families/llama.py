"""Llama and its relatives: Mistral, Qwen2, Qwen3, Gemma2, Gemma3.

RMS norm, separate K and V projections (biased in Qwen2), K norm per head in Qwen3 and Gemma3,
rotary over the whole head; Gemma3 has other angles for its sliding layers than for its full ones.
Worst case: hybrid layers, whose windows come from the engine's own cache set-up.
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
    one_table,
    rope_name,
    table_per_type,
    windows,
)

_ONE_PLUS_WEIGHT = ("gemma2", "gemma3_text")
_ROPE_PER_TYPE = ("gemma3_text",)
_NORMED_HEADS_FIRST = ("gemma3_text",)


def build(model: PreTrainedModel) -> Adapter:
    """Describe one model; raises UnsupportedArchitecture for length-dependent rotary angles."""
    config, base = model.config, _base(model)
    half = HalfShape(config.num_key_value_heads, base.layers[0].self_attn.head_dim)
    name = rope_name(model)
    has_types = config.model_type in _ROPE_PER_TYPE
    rope_keys = config.layer_types if has_types else [ONE_ROPE] * len(base.layers)
    return Adapter(
        model=model,
        base=base,
        layers=tuple(
            DecoderLayer(
                block, block.input_layernorm, _projection(block.self_attn, half, config), key, window
            )
            for block, key, window in zip(base.layers, rope_keys, windows(config), strict=True)
        ),
        kind=StateKind.KV,
        key=half,
        value=half,
        embed_halves=embed_rotated(),
        rotary=table_per_type(base.rotary_emb, rope_keys) if has_types else one_table(base.rotary_emb),
        norm_name=norm_name(
            "rmsnorm+1" if config.model_type in _ONE_PLUS_WEIGHT else "rmsnorm",
            base.layers[0].input_layernorm,
        ),
        rope_name=name,
    )


def _base(model: PreTrainedModel) -> Any:
    # Any: transformers types submodules as Tensor | Module, their attributes not at all.
    return model.base_model


def _projection(attention: Any, half: HalfShape, config: Any) -> SeparateProjection:
    # Any: as above.
    return SeparateProjection(
        k_proj=attention.k_proj,
        v_proj=attention.v_proj,
        key=half,
        value=half,
        k_norm=getattr(attention, "k_norm", None),
        is_normed_heads_first=config.model_type in _NORMED_HEADS_FIRST,
    )
