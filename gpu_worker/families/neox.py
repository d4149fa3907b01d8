"""GPT-NeoX and Pythia: layer norm with bias, one fused projection laid out head by head, partial rotary.

Knows transformers' GPTNeoX modules. Worst case: hidden restore computes Q as well, because K and V
of a head lie between the queries of two heads.
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
)


def build(model: PreTrainedModel) -> Adapter:
    """Describe one model; raises UnsupportedArchitecture for length-dependent rotary angles."""
    # Any: transformers types submodules as Tensor | Module, their attributes not at all.
    base: Any = model.base_model
    half = HalfShape(model.config.num_attention_heads, base.layers[0].attention.head_size)
    return Adapter(
        model=model,
        base=base,
        layers=tuple(
            DecoderLayer(
                block,
                block.input_layernorm,
                _projection(block.attention.query_key_value, half),
                ONE_ROPE,
                window=None,
            )
            for block in base.layers
        ),
        kind=StateKind.KV,
        key=half,
        value=half,
        embed_halves=embed_rotated(),
        rotary=one_table(base.rotary_emb),
        norm_name=norm_name("layernorm", base.layers[0].input_layernorm),
        rope_name=rope_name(model),
    )


def _projection(qkv: Any, half: HalfShape) -> FusedProjection:
    # Any: as above. The output is [1, T, H, (Q, K, V) of one head].
    def split(out: Tensor) -> Halves:
        heads = out.reshape(-1, half.head_count, 3, half.head_size)
        return heads[:, :, 1], heads[:, :, 2]

    return FusedProjection(qkv, split)
