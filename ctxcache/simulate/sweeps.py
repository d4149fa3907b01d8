"""The sweeps by name: the paper's Figures 13 and 21 to 25, and two that size a machine for any trace.

Each varies what its figure varies and leaves the rest of the load as it was told.
"""

from collections.abc import Sequence
from dataclasses import replace

from ctxcache.simulate import paper
from ctxcache.simulate.census import Census
from ctxcache.simulate.load import Load, Overflow
from ctxcache.simulate.models import MODELS
from ctxcache.simulate.study import ALL_POLICIES, Capacity
from ctxcache.simulate.sweep import Panel, Run, Sweep

CAPACITY_RATIOS = (0.02, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0)
SESSION_RATES = (0.5, 1.0, 1.5, 2.0)
READ_GB_PER_S = (1, 2.5, 5, 10, 20)
MULTIPLES = (0.1, 0.25, 0.5, 0.75, 1.0)
MODEL_NAMES = tuple(paper.MODEL_HITS)

HITS = Panel(
    "all_hit_rate", "hits of all turns", parts=(("all_dram_hit_rate", "in DRAM"), ("all_ssd_hit_rate", "on SSD")),
    ceiling="later_turn_share",
)  # fmt: skip
ALL_HITS = Panel("all_hit_rate", "hits of all turns", ceiling="later_turn_share")
GPU_HOURS = Panel("gpu_s", "GPU hours of prefill", is_share=False, unit=3600.0)
LATER_HITS = Panel("hit_rate", "hits of later turns")


_NAMES = {Overflow.DECOUPLED: "truncated, still valid", Overflow.INVALIDATE: "invalidated"}


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e12:g} TB" if size_bytes >= paper.TB else f"{size_bytes / 2**30:g} GiB"


def _policies(load: Load, policies: Sequence[str], _: Census) -> list[Run]:
    return [
        Run(
            f"{_size(load.dram_bytes)} + {_size(ssd_bytes)}", policy, policy, replace(load, ssd_bytes=ssd_bytes),
            paper=paper.POLICIES.get((ssd_bytes, policy), {}),
        )
        for ssd_bytes in (paper.SMALL_SSD_BYTES, paper.LARGE_SSD_BYTES)
        for policy in policies
    ]  # fmt: skip


def _models(load: Load, policies: Sequence[str], _: Census) -> list[Run]:
    return [
        Run(
            model, policy, policy, MODELS[model].served(load),
            paper={"all_hit_rate": paper.MODEL_HITS[model]} if policy == "look-ahead" else {},
        )
        for model in MODEL_NAMES
        for policy in policies
    ]  # fmt: skip


def _overflow(load: Load, policies: Sequence[str], _: Census) -> list[Run]:
    """The paper's two ways: what it reached with one, less what it lost by the other."""
    lost = {
        Overflow.DECOUPLED: dict.fromkeys(MODEL_NAMES, 0.0),
        Overflow.INVALIDATE: paper.LOST_BY_INVALIDATION,
    }
    return [
        Run(
            model, _NAMES[overflow], policies[0], replace(MODELS[model].served(load), overflow=overflow),
            paper={"all_hit_rate": paper.MODEL_HITS[model] - lost[overflow][model]},
        )
        for model in MODEL_NAMES
        for overflow in Overflow
    ]  # fmt: skip


def _tiers(load: Load, policies: Sequence[str], _: Census) -> list[Run]:
    hbm_and_dram = paper.HBM_BYTES + load.dram_bytes
    tiers = (
        ("HBM", paper.HBM_BYTES, 0, dict.fromkeys(MODEL_NAMES, 0.0)),
        ("HBM + DRAM", hbm_and_dram, 0, paper.HBM_AND_DRAM),
        ("HBM + DRAM + SSD", hbm_and_dram, load.ssd_bytes, paper.MODEL_HITS),
    )
    return [
        Run(
            model, tier, policies[0],
            replace(MODELS[model].served(load), dram_bytes=dram_bytes, ssd_bytes=ssd_bytes),
            paper={"all_hit_rate": known[model]},
        )
        for model in MODEL_NAMES
        for tier, dram_bytes, ssd_bytes, known in tiers
    ]  # fmt: skip


def _capacity(load: Load, policies: Sequence[str], census: Census) -> list[Run]:
    needed_bytes = census.cache_bytes(load.context_tokens, load.token_bytes)
    return [
        Run(
            ratio, policy, policy, _with_total(load, int(ratio * needed_bytes)),
            paper={"hit_rate": paper.CAPACITY[ratio]}
            if policy == "look-ahead" and ratio in paper.CAPACITY
            else {},
        )
        for policy in policies
        for ratio in CAPACITY_RATIOS
    ]  # fmt: skip


def _with_total(load: Load, total_bytes: int) -> Load:
    dram_bytes = min(load.dram_bytes, total_bytes)
    return replace(load, dram_bytes=dram_bytes, ssd_bytes=total_bytes - dram_bytes)


def _arrivals(load: Load, policies: Sequence[str], census: Census) -> list[Run]:
    usual = census.sessions_per_s
    return [
        Run(
            rate, policy, policy, load, sessions_times=rate / usual,
            paper={"all_hit_rate": paper.ARRIVALS[rate]}
            if policy == "look-ahead" and rate in paper.ARRIVALS
            else {},
        )
        for policy in policies
        for rate in SESSION_RATES
    ]  # fmt: skip


def _reads(load: Load, policies: Sequence[str], _: Census) -> list[Run]:
    return [
        Run(gb_per_s, policy, policy, replace(load, ssd_read_bytes_per_s=gb_per_s * 1e9))
        for policy in policies
        for gb_per_s in READ_GB_PER_S
    ]


def _footprint(load: Load, policies: Sequence[str], census: Census) -> list[Run]:
    return [
        Run(multiple, policy, policy, Capacity(multiple).of(load, census.live_bytes))
        for policy in policies
        for multiple in MULTIPLES
    ]


_QUEUE_POLICIES = ("fifo", "lru", "look-ahead", "value", "belady")
_FEW_POLICIES = ("lru", "look-ahead", "value", "belady")
_ALL = (
    Sweep(
        "models", "Hit rate by model", "Figure 13", "model", (HITS,), ("look-ahead", "value"),
        paper.LOAD, _models,
    ),
    Sweep(
        "policies", "Policies", "Figure 21", "DRAM + SSD", (HITS, GPU_HOURS), _QUEUE_POLICIES, paper.LOAD, _policies,
    ),
    Sweep(
        "overflow", "When a context window overflows", "Figure 22", "model", (HITS, GPU_HOURS), ("look-ahead",),
        paper.LOAD, _overflow,
    ),
    Sweep(
        "capacity", "Capacity for the sessions of a TTL", "Figure 23", "RCC / CCpUT", (LATER_HITS,),
        _FEW_POLICIES, replace(paper.LOAD, ttl_s=3600.0), _capacity, is_lines=True, is_sized=False,
    ),
    Sweep(
        "tiers", "What each tier adds", "Figure 24", "model", (HITS,), ("look-ahead",), paper.LOAD, _tiers,
    ),
    Sweep(
        "arrivals", "How often sessions begin", "Figure 25", "sessions a second", (ALL_HITS,),
        _FEW_POLICIES, paper.LOAD, _arrivals, is_lines=True,
    ),
    Sweep(
        "reads", "Bandwidth of SSD reads", "", "GB/s read from SSD",
        (Panel("dram_share_of_hits", "hits that were in DRAM"),), ("look-ahead", "value"),
        paper.LOAD, _reads, is_lines=True,
    ),
    Sweep(
        "footprint", "Capacity as a multiple of the live footprint", "", "capacity / live footprint", (LATER_HITS,),
        ALL_POLICIES, Load(), _footprint, is_lines=True, is_sized=False, is_of_footprint=True,
    ),
)  # fmt: skip
SWEEPS = {sweep.name: sweep for sweep in _ALL}
