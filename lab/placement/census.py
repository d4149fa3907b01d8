"""A census of a trace, and the trace with sessions that begin faster, for the papers' sweeps.

A census takes an entry per session, and one per turn of the last TTL. A `PacedTrace` takes an entry per
session, and the turns that it holds back until earlier turns have come.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from ctxcache.simulate.rows import TraceTurn
from ctxcache.simulate.trace import ArrivalPace, Trace


@dataclass(frozen=True, slots=True)
class Census:
    """`distinct_sessions` is the most that had a turn within `ttl_s`: the paper's DSpUT.

    `begin_span_s` lies between the first turns of the first and the last session. `live_bytes` is the live
    footprint, 0 where no sweep needs it; SSD is scaled as if it were `as_if_bytes`, where that is not 0.
    """

    turn_count: int
    session_count: int
    begin_span_s: float
    longest_tokens: int
    distinct_sessions: int
    ttl_s: float
    live_bytes: int = 0
    as_if_bytes: int = 0

    @property
    def sessions_per_s(self) -> float:
        """How often sessions begin."""
        return self.session_count / max(self.begin_span_s, 1.0)

    def cache_bytes(self, context_tokens: int | None, token_bytes: int) -> int:
        """The bytes that all those sessions need with full windows: the paper's CCpUT. No window.

        That of the longest.
        """
        return self.distinct_sessions * (context_tokens or self.longest_tokens) * token_bytes

    def sentence(self) -> str:
        """Say it to people."""
        text = (
            f"{self.turn_count} turns of {self.session_count} sessions, {self.sessions_per_s:.3g} beginning "
            f"a second; at most {self.distinct_sessions} of them within {self.ttl_s / 3600:.3g} h"
        )
        if self.live_bytes:
            text += f"; live state peaks at {self.live_bytes / 1e12:.3g} TB"
        return text + (f", SSD scaled as if at {self.as_if_bytes / 1e12:.3g} TB" if self.as_if_bytes else "")


def count(turns: Iterable[TraceTurn], ttl_s: float) -> Census:
    """Read the whole trace."""
    recent: deque[tuple[float, bytes]] = deque()
    recent_turns: Counter[bytes] = Counter()
    sizes: dict[bytes, int] = {}
    turn_count = longest_tokens = most = 0
    first_s, latest_s = math.inf, 0.0
    for turn in turns:
        turn_count += 1
        # Arrivals of first turns alone: the pace at which sessions begin.
        if turn.session not in sizes:
            latest_s = turn.arrival_s
            first_s = min(first_s, latest_s)
        held_tokens = sizes.get(turn.session, 0) if turn.history_tokens is None else turn.history_tokens
        sizes[turn.session] = held_tokens + turn.input_tokens + turn.output_tokens
        longest_tokens = max(longest_tokens, sizes[turn.session])
        recent.append((turn.arrival_s, turn.session))
        recent_turns[turn.session] += 1
        while recent[0][0] <= turn.arrival_s - ttl_s:
            _, gone = recent.popleft()
            recent_turns[gone] -= 1
            if not recent_turns[gone]:
                del recent_turns[gone]
        most = max(most, len(recent_turns))
    return Census(turn_count, len(sizes), latest_s - first_s, longest_tokens, most, ttl_s)


class PacedTrace(Trace):
    """Sessions begin `sessions_times` as fast; a turn keeps its distance to its session's first."""

    def __init__(
        self,
        path: Path,
        *,
        arrivals_times: float = 1.0,
        pace: ArrivalPace | None = None,
        sessions_times: float = 1.0,
    ) -> None:
        super().__init__(path, arrivals_times=arrivals_times, pace=pace)
        self._sessions_times = sessions_times

    def paced(self, sessions_times: float) -> "PacedTrace":
        """The same trace, with sessions that begin so many times as fast."""
        return PacedTrace(
            self.path, arrivals_times=self._arrivals_times, pace=self._pace, sessions_times=sessions_times
        )

    def __iter__(self) -> Iterator[TraceTurn]:
        """Every turn, in order of its new arrival. Raises InvalidTrace."""
        if self._sessions_times == 1:
            yield from super().__iter__()
            return
        begins_s: dict[bytes, float] = {}
        held: list[tuple[float, int, TraceTurn]] = []
        for number, turn in enumerate(super().__iter__()):
            begin_s = begins_s.setdefault(turn.session, turn.arrival_s)
            arrival_s = begin_s / self._sessions_times + (turn.arrival_s - begin_s)
            heappush(held, (arrival_s, number, turn._replace(arrival_s=arrival_s)))
            # Sessions still to begin come no earlier than the quotient, turns still to come than the arrival.
            sure_s = min(turn.arrival_s, turn.arrival_s / self._sessions_times)
            while held and held[0][0] <= sure_s:
                yield heappop(held)[2]
        while held:
            yield heappop(held)[2]
