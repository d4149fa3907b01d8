"""Policies by name, as commands and settings know them. Belady is not among them: it knows the future."""

from collections.abc import Callable

from ctxcache.core.placement.baselines import (
    GreedyDualSizeFrequency,
    LeastFrequentlyUsed,
    LeastHitDensity,
    Sieve,
    WindowTinyLfu,
)
from ctxcache.core.placement.classic import (
    AdaptiveReplacement,
    FirstInFirstOut,
    LeastRecentlyUsed,
    S3Fifo,
    TailOptimised,
)
from ctxcache.core.placement.look_ahead import LookAhead
from ctxcache.core.placement.policy import Capacities, Policy, Ranked
from ctxcache.core.placement.value import MISS_COST, MissCost, ReturnValue

GOAL_BYTES = 2 << 30
"""What is recomputed within a goal of a quarter of a second where prefill makes 8 GiB/s: T-LRU's knob."""

RANKED: dict[str, Callable[[Capacities], Ranked]] = {
    "lru": lambda _: LeastRecentlyUsed(),
    "fifo": lambda _: FirstInFirstOut(),
    "t-lru": lambda _: TailOptimised(GOAL_BYTES),
    "look-ahead": LookAhead,
    "value": ReturnValue,
}
"""Those that a server can place by."""

POLICIES: dict[str, Callable[[Capacities], Policy]] = {
    **RANKED,
    "s3-fifo": lambda capacities: S3Fifo(capacities.total_bytes),
    "arc": lambda capacities: AdaptiveReplacement(capacities.total_bytes),
    "lfu": lambda _: LeastFrequentlyUsed(),
    "gdsf": lambda _: GreedyDualSizeFrequency(),
    "lhd": lambda _: LeastHitDensity(),
    "sieve": lambda _: Sieve(),
    "w-tinylfu": lambda capacities: WindowTinyLfu(capacities.total_bytes),
}


def ranked_policy(name: str, capacities: Capacities, miss_cost: MissCost = MISS_COST) -> Ranked:
    """A policy of RANKED; the cost of a miss is for those that weigh it."""
    return ReturnValue(capacities, miss_cost) if name == "value" else RANKED[name](capacities)


def policy_of(name: str, capacities: Capacities, miss_cost: MissCost = MISS_COST) -> Policy:
    """A policy of POLICIES, likewise."""
    return ranked_policy(name, capacities, miss_cost) if name in RANKED else POLICIES[name](capacities)
