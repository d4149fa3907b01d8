"""Models by name, and machines by their datasheets: what `worker plan` plans for where nothing was measured.

Peaks are the vendors' (dense fp16/bf16, HCache Table 2 where it has them). The shares that are reached
are estimates: 0.65 of the peak in projections and recomputation (HCache's balance bandwidths say 0.63 and
0.69 on an A100), half of that in attention, 0.8 of a bus (CachedAttention: 26 of 32 GB/s). Worst case: a
checkpoint of the same name with other sizes, or an estimate that is off for a machine; `ctxcache worker
profile` measures both.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import cycle, islice

from ctxcache.errors import InvalidArgument
from gpu_worker.planning.profile import Link, Profile
from gpu_worker.planning.shape import (
    PLAIN_MATRICES,
    LayerShape,
    ModelShape,
    attention_layer,
    latent_layer,
    linear_layer,
)

# Weights that one token passes, per layer: experts that it is not sent to cost it nothing.
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
        # One row has the latent and the rotary part.
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


_GEMM_SHARE = 0.65
_ATTENTION_SHARE = 0.32
_BUS_SHARE = 0.8125
_GPU_LAYER_OVERHEAD_S = 20e-6
_GPU_TRANSFER_LATENCY_S = 10e-6
_SSD_LATENCY_S = 100e-6
_REMOTE = Link(12.5e9, 200e-6)
"""A 100 Gbit/s network."""
PM9A3_BYTES_PER_S = 6.9e9
"""One of HCache's SSDs."""
NVLINK = Link(200e9, 20e-6)
"""The rate at which one of several GPUs receives, an estimate: a third of an A100's NVLink."""
HOST_GATHER = Link(1e9, 300e-6)
"""That rate between processes of a host without GPUs."""


def _gpu(
    name: str, tera_flops: float, memory_gb_per_s: float, bus_gb_per_s: float, ssd_count: int = 4
) -> Profile:
    peak = tera_flops * 1e12
    return Profile(
        name=name,
        copy=Link(bus_gb_per_s * 1e9 * _BUS_SHARE, _GPU_TRANSFER_LATENCY_S),
        ssd=Link(ssd_count * PM9A3_BYTES_PER_S, _SSD_LATENCY_S),
        remote=_REMOTE,
        gemm_flops_per_s=peak * _GEMM_SHARE,
        attention_flops_per_s=peak * _ATTENTION_SHARE,
        memory_bytes_per_s=memory_gb_per_s * 1e9,
        layer_overhead_s=_GPU_LAYER_OVERHEAD_S,
        is_direct=True,
    )


_CPU = Profile(
    name="cpu",
    copy=Link(5e9, 1e-6),
    ssd=Link(1.2e9, _SSD_LATENCY_S),
    remote=Link(1e9, 500e-6),
    gemm_flops_per_s=1e11,
    attention_flops_per_s=3e10,
    memory_bytes_per_s=1e10,
    layer_overhead_s=100e-6,
)
"""Two cores, fp32."""

_PROFILES = {
    profile.name: profile
    for profile in (
        _gpu("a100-40gb", 312, 1555, 32),
        _gpu("a30", 165, 933, 32),
        _gpu("rtx-4090", 330, 1008, 32),
        _gpu("l20", 120, 864, 32),
        _gpu("h800", 990, 3350, 64),
        _gpu("h100", 989, 3350, 64),
        _gpu("h200", 989, 4800, 64),
        _CPU,
    )
}
PROFILE_NAMES = tuple(_PROFILES)


def known_profile(name: str, *, ssd_count: int | None = None, gpu_count: int = 1) -> Profile:
    """Return a profile of `PROFILE_NAMES`, of `gpu_count` devices that share the work (tensor parallel).

    `ssd_count` is that of all SSDs, 4 where it is not given. Raises KeyError, InvalidArgument.
    """
    if gpu_count < 1 or (ssd_count is not None and ssd_count < 1):
        raise InvalidArgument(field="gpu_count, ssd_count", problem="must be at least 1")
    profile = _PROFILES[name]
    ssd = profile.ssd if ssd_count is None else Link(ssd_count * PM9A3_BYTES_PER_S, profile.ssd.latency_s)
    # SSDs are not multiplied: all devices read from the same ones.
    return replace(profile, ssd=ssd).shared_by(gpu_count)
