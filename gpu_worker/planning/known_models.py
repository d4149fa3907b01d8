"""Shapes of models by name: those of the papers, and those that are measured here.

Worst case: a checkpoint of the same name with other sizes; `worker profile` takes them from the model.
"""

from collections.abc import Callable, Mapping
from itertools import cycle, islice

from gpu_worker.planning.shape import (
    PLAIN_MATRICES,
    LayerShape,
    ModelShape,
    attention_layer,
    latent_layer,
    linear_layer,
)

_DEEPSEEK_ACTIVE_WEIGHTS = 37e9 / 61
_QWEN3_NEXT_ACTIVE_WEIGHTS = 3e9 / 48


def _heads(count: int, kv_count: int, size: int = 128) -> dict[str, int]:
    return {"head_count": count, "kv_head_count": kv_count, "head_size": size}


def _llama(
    hidden: int, count: int, kv_count: int, ffn: int, *, size: int = 128
) -> Callable[[int], LayerShape]:
    return lambda element_bytes: attention_layer(
        hidden_size=hidden, **_heads(count, kv_count, size), ffn_size=ffn, element_bytes=element_bytes
    )


def _opt(hidden: int, count: int) -> Callable[[int], LayerShape]:
    return lambda element_bytes: attention_layer(
        hidden_size=hidden,
        **_heads(count, count),
        ffn_size=4 * hidden,
        ffn_matrix_count=PLAIN_MATRICES,
        element_bytes=element_bytes,
    )


def _gemma3(window: int | None) -> Callable[[int], LayerShape]:
    return lambda element_bytes: attention_layer(
        hidden_size=640, **_heads(4, 1, 256), ffn_size=2048, window=window, element_bytes=element_bytes
    )


def _deepseek(element_bytes: int) -> LayerShape:
    return latent_layer(
        hidden_size=7168, latent_size=512 + 64, head_count=128, head_size=160,
        linear_flops=2 * _DEEPSEEK_ACTIVE_WEIGHTS, element_bytes=element_bytes,
    )  # fmt: skip


def _qwen3_next_full(element_bytes: int) -> LayerShape:
    return attention_layer(
        hidden_size=2048, **_heads(16, 2, 256), ffn_size=5632, element_bytes=element_bytes
    )  # fmt: skip


def _qwen3_next_linear(element_bytes: int) -> LayerShape:
    # The state: 32 heads of 128 x 128 in fp32. To update it: q, k, v and the gates, then one rank-1 step.
    state_elements = 32 * 128 * 128
    return linear_layer(
        hidden_size=2048, state_bytes=4 * state_elements,
        project_flops=2 * 2048 * 8192 + 6 * state_elements,
        linear_flops=2 * _QWEN3_NEXT_ACTIVE_WEIGHTS, element_bytes=element_bytes,
    )  # fmt: skip


_Pattern = tuple[int, tuple[Callable[[int], LayerShape], ...]]

_MODELS: Mapping[str, _Pattern] = {
    "llama-2-7b": (32, (_llama(4096, 32, 32, 11008),)),
    "llama-2-13b": (40, (_llama(5120, 40, 40, 13824),)),
    "opt-6.7b": (32, (_opt(4096, 32),)),
    "opt-13b": (40, (_opt(5120, 40),)),
    "opt-30b": (48, (_opt(7168, 56),)),
    "llama-3-8b": (32, (_llama(4096, 32, 8, 14336),)),
    "llama-3-70b": (80, (_llama(8192, 64, 8, 28672),)),
    "qwen2.5-7b": (28, (_llama(3584, 28, 4, 18944),)),
    "qwen2.5-14b": (48, (_llama(5120, 40, 8, 13824),)),
    "qwen3-next-80b": (48, (_qwen3_next_linear,) * 3 + (_qwen3_next_full,)),
    "gemma-3-270m": (18, (_gemma3(512),) * 5 + (_gemma3(None),)),
    "deepseek-v3": (61, (_deepseek,)),
    "smollm2-135m": (30, (_llama(576, 9, 3, 1536, size=64),)),
    "smollm2-135m-mha": (30, (_llama(576, 9, 9, 1536, size=64),)),
    "stories15m": (6, (_llama(288, 6, 6, 768, size=48),)),
}  # fmt: skip

MODEL_NAMES = tuple(_MODELS)


def known_model(name: str, *, element_bytes: int = 2) -> ModelShape:
    """Return a model of `MODEL_NAMES`, with elements of so many bytes. Raises KeyError."""
    layer_count, pattern = _MODELS[name]
    layers = [make(element_bytes) for make in pattern]
    return ModelShape(name, tuple(islice(cycle(layers), layer_count)))
