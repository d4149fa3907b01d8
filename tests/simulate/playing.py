"""Small loads that are played by hand.

A token is 10 B, a turn 100 tokens long, unless a test says otherwise.
"""

from collections.abc import Sequence
from dataclasses import replace

from ctxcache.simulate.load import Load
from ctxcache.simulate.replay import Replay
from ctxcache.simulate.tally import HitTally
from ctxcache.simulate.trace import TraceTurn
from lab.placement.policies import POLICIES

LOAD = Load(token_bytes=10, dram_bytes=10_000, ssd_bytes=90_000, buffer_share=0.0)
ROOMY = replace(LOAD, dram_bytes=10**12, ssd_bytes=10**12)


def turn(session: str, arrival_s: float, tokens: int = 100, output_tokens: int = 0) -> TraceTurn:
    """A turn of a trace that says neither history nor number."""
    return TraceTurn(session.encode(), arrival_s, tokens, output_tokens, None, None)


def played(load: Load, turns: Sequence[TraceTurn], name: str = "lru") -> HitTally:
    """The tally of a policy."""
    return Replay(load, lambda capacities, _: POLICIES[name](capacities)).run(turns)
