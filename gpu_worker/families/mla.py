"""DeepSeek-V3 with multi-head latent attention: a row is the latent and one small rotary part.

The engine caches the normed latent as keys and the rotated part as values, one head each, and
expands them to heads at every step. Only the rotary part depends on positions. Worst case: none
beyond the kind itself, LATENT rows are about a twelfth of HIDDEN rows.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ctxcache.format.streams import StateKind
from gpu_worker.families.adapter import (
    ONE_ROPE,
    Adapter,
    DecoderLayer,
    HalfShape,
    Halves,
    LatentProjection,
    Rope,
    norm_name,
    one_table,
    rope_name,
    rotate,
    rotate_interleaved,
)


def build(model: PreTrainedModel) -> Adapter:
    """Describe one model; raises UnsupportedArchitecture for length-dependent rotary angles."""
    config = model.config
    # Any: transformers types submodules as Tensor | Module, their attributes not at all.
    base: Any = model.base_model
    latent, rotary = HalfShape(1, config.kv_lora_rank), HalfShape(1, config.qk_rope_head_dim)
    return Adapter(
        model=model,
        base=base,
        layers=tuple(
            DecoderLayer(
                block,
                block.input_layernorm,
                LatentProjection(
                    block.self_attn.kv_a_proj_with_mqa, block.self_attn.kv_a_layernorm, latent, rotary
                ),
                ONE_ROPE,
                window=None,
            )
            for block in base.layers
        ),
        kind=StateKind.LATENT,
        key=latent,
        value=rotary,
        embed_halves=_embed_interleaved if config.rope_interleave else _embed,
        rotary=one_table(base.rotary_emb),
        norm_name=norm_name("rmsnorm", base.layers[0].input_layernorm),
        rope_name=rope_name(model, "interleaved" if config.rope_interleave else "halves"),
    )


def _embed(first: Tensor, second: Tensor, rope: Rope | None) -> Halves:
    return first, second if rope is None else rotate(second, rope)


def _embed_interleaved(first: Tensor, second: Tensor, rope: Rope | None) -> Halves:
    return first, second if rope is None else rotate_interleaved(second, rope)
