"""A load made here, the same for the same seed: people who chat, many of them once."""

import random
from collections.abc import Callable

from ctxcache.simulate.trace import TraceTurn

ONCE_SHARE = 0.3


def make_turns(
    session_count: int, *, sessions_per_s: float, think_s: float = 60.0, seed: int = 1
) -> list[TraceTurn]:
    """Sessions begin at random; who goes on has 2 to 12 turns, each with thought and a length of its own."""
    draw = random.Random(seed)
    found: list[tuple[float, bytes, int, int]] = []
    begin_s = 0.0
    for number in range(session_count):
        begin_s += draw.expovariate(sessions_per_s)
        turn_count = 1 if draw.random() < ONCE_SHARE else draw.randint(2, 12)
        at_s, tokens = begin_s, _lengths(draw)
        for _ in range(turn_count):
            found.append((at_s, b"s%d" % number, tokens(), tokens()))
            at_s += 5.0 + draw.lognormvariate(0, 1.0) * think_s
    return [TraceTurn(uid, at_s, asked, answered, None, None) for at_s, uid, asked, answered in sorted(found)]


def _lengths(draw: random.Random) -> Callable[[], int]:
    """Some people write and are told little, others much, each turn about as much."""
    typical = 150 * draw.lognormvariate(0, 0.8)
    return lambda: int(typical * draw.lognormvariate(0, 0.5)) + 1
