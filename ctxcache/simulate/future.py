"""What lies ahead in a trace: when each session comes next. Reads the trace once before the replay.

Memory: 8 bytes a turn, and an entry per session. Needed for Belady, for hints and for capacities given as
multiples of the live footprint, for nothing else.
"""

import math
from array import array
from collections.abc import Iterable

from ctxcache.simulate.trace import Turn


def look(turns: Iterable[Turn]) -> "array[float]":
    """Read the whole trace; returns by turn when its session arrives next, in seconds, infinity for never."""
    next_arrivals_s = array("d")
    last: dict[bytes, int] = {}
    for index, turn in enumerate(turns):
        before = last.get(turn.session)
        next_arrivals_s.append(math.inf)
        if before is not None:
            next_arrivals_s[before] = turn.arrival_s
        last[turn.session] = index
    return next_arrivals_s
