"""Profiles from datasheets, and of the papers' machines.

Peaks are the vendors' (dense fp16/bf16, HCache Table 2 where it has them); what is reached of them is
estimated: 0.65 of the peak in projections and recomputation (HCache's balance bandwidths say 0.63 and
0.69 on an A100), half of that in attention, 0.8 of a bus (CachedAttention: 26 of 32 GB/s).
Worst case: an estimate that is off for your machine; `ctxcache worker profile` measures.
"""

from collections.abc import Mapping
from dataclasses import replace

from ctxcache.errors import InvalidArgument
from gpu_worker.planning.known_models import known_model
from gpu_worker.planning.profile import Link, Profile

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
HCACHE_BUS_BYTES_PER_S = 26e9
"""What a PCIe 4.0 x16 bus carries (CachedAttention, section 2.4); four PM9A3 saturate it (HCache, 6.2.2)."""
HCACHE_BALANCE_BYTES_PER_S: Mapping[str, float] = {"llama-2-7b": 24e9, "llama-2-13b": 21e9, "opt-30b": 37e9}
"""Storage bandwidth at which copying hidden states takes as long as projecting them (HCache, 6.1.3)."""
NVLINK = Link(200e9, 20e-6)
"""What one of several GPUs receives from the others, an estimate: a third of an A100's NVLink."""
HOST_GATHER = Link(1e9, 300e-6)
"""The same between processes of a host without GPUs."""


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
    one = _PROFILES[name]
    ssd = one.ssd if ssd_count is None else Link(ssd_count * PM9A3_BYTES_PER_S, one.ssd.latency_s)
    return replace(one, ssd=ssd).shared_by(gpu_count)


def hcache_profile(model: str, *, ssd_bytes_per_s: float = HCACHE_BUS_BYTES_PER_S) -> Profile:
    """HCache's A100 machine for one of its three models, from the figures that it prints.

    The rate of projections follows from the bandwidth at which they take as long as their copy;
    recomputation is counted at the same rate. Raises KeyError.
    """
    layer = known_model(model).layers[0]
    flops_per_s = layer.project_flops * HCACHE_BALANCE_BYTES_PER_S[model] / layer.hidden_row_bytes
    link = Link(ssd_bytes_per_s)
    return Profile(
        name=f"hcache testbed, {model}", copy=link, ssd=link, remote=link, is_direct=True,
        gemm_flops_per_s=flops_per_s, attention_flops_per_s=flops_per_s,
    )  # fmt: skip
