"""The policies that a server can place by. Belady is none of them: it knows the future."""

from functools import partial
from typing import assert_never

from ctxcache.core.placement.baselines import GOAL_BYTES, FirstInFirstOut, LeastRecentlyUsed, TailOptimised
from ctxcache.core.placement.look_ahead import LookAhead
from ctxcache.core.placement.names import POLICY_NAMES, PolicyName
from ctxcache.core.placement.policy import Capacities, Ranked
from ctxcache.core.placement.value import MISS_COST, MissCost, ReturnValue


def ranked_policy(name: PolicyName, capacities: Capacities, miss_cost: MissCost = MISS_COST) -> Ranked:
    """The policy of that name; the cost of a miss is for those that weigh it."""
    match name:
        case "lru":
            return LeastRecentlyUsed()
        case "fifo":
            return FirstInFirstOut()
        case "t-lru":
            return TailOptimised(GOAL_BYTES)
        case "look-ahead":
            return LookAhead(capacities)
        case "value":
            return ReturnValue(capacities, miss_cost)
    assert_never(name)


RANKED: dict[str, partial[Ranked]] = {name: partial(ranked_policy, name) for name in POLICY_NAMES}
"""By name, what makes the policy of capacities and, if it matters, the cost of a miss."""
