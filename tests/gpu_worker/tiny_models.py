"""Tiny random models of every supported family, hot enough that greedy text is diverse."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY_SIZE = 97
LAYER_COUNT = 3
WINDOW = 24

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": LAYER_COUNT,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GATED: Mapping[str, Any] = {
    **_COMMON,
    "intermediate_size": 96,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]
_NEW_FALCON: Mapping[str, Any] = {
    "new_decoder_architecture": True,
    "num_kv_heads": 2,
    "bias": True,
    "alibi": False,
}

CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GATED),
    "llama-biased-scaled": lambda: LlamaConfig(**_GATED, attention_bias=True, rope_parameters=_LLAMA3_ROPE),
    "mistral-sliding": lambda: MistralConfig(**_GATED, sliding_window=WINDOW, head_dim=16),
    "qwen2": lambda: Qwen2Config(**_GATED),
    "qwen2-windows": lambda: Qwen2Config(
        **_GATED, use_sliding_window=True, sliding_window=WINDOW, layer_types=_HYBRID
    ),
    "qwen3": lambda: Qwen3Config(**_GATED, head_dim=24),
    "gemma2": lambda: Gemma2Config(**_GATED, head_dim=16, sliding_window=WINDOW, layer_types=_HYBRID),
    "gemma3": lambda: Gemma3TextConfig(**_GATED, head_dim=16, sliding_window=WINDOW, layer_types=_HYBRID),
    "phi3": lambda: Phi3Config(
        **_GATED, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "neox": lambda: GPTNeoXConfig(
        **_COMMON,
        intermediate_size=96,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ),
    "falcon-multi-query": lambda: FalconConfig(**_COMMON, alibi=False, multi_query=True),
    "falcon-multi-head": lambda: FalconConfig(**_COMMON, alibi=False, multi_query=False, parallel_attn=False),
    "falcon-new": lambda: FalconConfig(**_COMMON, **_NEW_FALCON),
    "falcon-new-one-norm": lambda: FalconConfig(**_COMMON, **_NEW_FALCON, num_ln_in_parallel_attn=1),
    "opt": lambda: OPTConfig(**_COMMON, ffn_dim=96, word_embed_proj_dim=64, max_position_embeddings=512),
    "opt-norm-after": lambda: OPTConfig(
        **_COMMON, ffn_dim=96, word_embed_proj_dim=32, max_position_embeddings=512, do_layer_norm_before=False
    ),
    "gpt2": lambda: GPT2Config(**_COMMON, n_positions=512),
    "deepseek": lambda: DeepseekV3Config(**_mla()),
    "deepseek-halves": lambda: DeepseekV3Config(**_mla(), rope_interleave=False),
}
SINKS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "gpt-oss": lambda: GptOssConfig(
        **_GATED,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_HYBRID,
    ),
}
"""Families with learned sinks, which no adapter describes: they can be packed, not saved."""
ROPE_FAMILIES = [name for name in CONFIGS if name not in ("opt", "opt-norm-after", "gpt2")]


def _mla() -> dict[str, Any]:
    return {
        **_GATED,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 24,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }


def build(
    name: str, *, dtype: torch.dtype = torch.float32, layer_count: int = LAYER_COUNT
) -> PreTrainedModel:
    """The tiny model `name`, the same one on every call."""
    config = {**CONFIGS, **SINKS}[name]()
    config.num_hidden_layers = layer_count
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layer_count]
    model: PreTrainedModel = heat(random_model(config)).to(dtype)  # type: ignore[arg-type]
    return model


def random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of the configured family in fp32, as transformers initializes it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model


def _scale(name: str) -> float:
    # Embeddings must stand out from what every token shares (biases, the mean of an activation that
    # is not gated), or all text is alike.
    if any(part in name for part in ("4h_to_h", "fc2", "mlp.c_proj")):
        return 0.4
    return 8.0 if any(part in name for part in ("emb", "wte", "wpe")) else 1.6


def heat(model: PreTrainedModel) -> PreTrainedModel:
    """Random weights of a size that keeps activations large; norms and biases random too."""
    generator = torch.Generator().manual_seed(24)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_gain = "norm" in name or "ln_" in name
            if parameter.ndim > 1:
                parameter.copy_(noise * _scale(name) / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise * 0.1 + float(is_gain and name.endswith("weight")))
    model.train(mode=False)
    return model
