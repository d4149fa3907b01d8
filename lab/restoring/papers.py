"""The papers' own machines, and what they say that no worker asks: for comparison with the planner.

HCache's testbed as a profile, and CachedAttention's read buffer. The schedules that the planner falls back on
are in `gpu_worker/planning/baselines.py`. Worst case: a model that the papers did not measure, which is a
KeyError.
"""

from collections.abc import Mapping

from gpu_worker.planning.datasheets import known_model
from gpu_worker.planning.profile import Link, Profile

HCACHE_BUS_BYTES_PER_S = 26e9
"""The rate of a PCIe 4.0 x16 bus (CachedAttention, section 2.4); four PM9A3 saturate it (HCache, 6.2.2)."""
HCACHE_BALANCE_BYTES_PER_S: Mapping[str, float] = {"llama-2-7b": 24e9, "llama-2-13b": 21e9, "opt-30b": 37e9}
"""Storage bandwidth at which copying hidden states takes as long as projecting them (HCache, 6.1.3)."""


def hcache_profile(model: str, *, ssd_bytes_per_s: float = HCACHE_BUS_BYTES_PER_S) -> Profile:
    """HCache's A100 machine for one of its three models, from the figures that it prints.

    The rate of projections follows from the bandwidth at which they take as long as their copy;
    recomputation is counted at the same rate. Raises KeyError.
    """
    layer = known_model(model).layers[0]
    flops_per_s = layer.project_flops * HCACHE_BALANCE_BYTES_PER_S[model] / layer.hidden_row_bytes
    link = Link(ssd_bytes_per_s)
    return Profile(
        name=f"hcache testbed, {model}",
        copy=link,
        ssd=link,
        remote=link,
        is_direct=True,
        gemm_flops_per_s=flops_per_s,
        attention_flops_per_s=flops_per_s,
    )


def read_buffer_bytes(
    *, bytes_per_s: float, load_s: float, history_tokens: int, prefill_s: float, new_tokens: int
) -> float:
    """CachedAttention's buffer ahead of the engine, S = B (T_load L_hist - T_pref L_new), and not below 0.

    `load_s` and `prefill_s` are per token, through all layers. So many bytes must be there when the
    engine starts, or it will wait for a layer.
    """
    return max(0.0, bytes_per_s * (load_s * history_tokens - prefill_s * new_tokens))
