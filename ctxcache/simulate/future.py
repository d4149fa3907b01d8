"""What lies ahead in a trace: next arrivals and the live footprint. Reads the trace once before the replay.

Memory: 8 bytes a turn, and an entry per session. Needed for Belady, for hints and for capacities given as
multiples of the footprint, for nothing else.
"""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from ctxcache.simulate.trace import Turn


@dataclass(frozen=True, slots=True)
class Future:
    """`next_arrivals_s` by turn, infinity for a session's last; the most tokens ever held for later turns."""

    next_arrivals_s: "array[float]"
    peak_live_tokens: int


def look(turns: Iterable[Turn]) -> Future:
    """Read the whole trace."""
    next_arrivals_s, sizes, released = array("d"), array("q"), array("q")
    last: dict[bytes, int] = {}
    for index, turn in enumerate(turns):
        before = last.get(turn.session)
        held_tokens = 0
        next_arrivals_s.append(math.inf)
        if before is not None:
            next_arrivals_s[before] = turn.arrival_s
            held_tokens = sizes[before]
        history_tokens = held_tokens if turn.history_tokens is None else turn.history_tokens
        released.append(held_tokens)
        sizes.append(history_tokens + turn.input_tokens + turn.output_tokens)
        last[turn.session] = index
    return Future(next_arrivals_s, _peak(next_arrivals_s, sizes, released))


def _peak(next_arrivals_s: "array[float]", sizes: "array[int]", released: "array[int]") -> int:
    """A turn ends what its predecessor left; what it leaves itself is live if another follows."""
    live_tokens = peak_tokens = 0
    for next_s, size_tokens, released_tokens in zip(next_arrivals_s, sizes, released, strict=True):
        live_tokens += (size_tokens if next_s < math.inf else 0) - released_tokens
        peak_tokens = max(peak_tokens, live_tokens)
    return peak_tokens
