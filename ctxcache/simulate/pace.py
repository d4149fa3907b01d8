"""A trace whose sessions begin more or less often, while each keeps its own pace: think times stay.

Memory: an entry per session, and the turns that are held back until those before them have come.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path

from ctxcache.simulate.trace import Pace, Trace, Turn


class PacedTrace(Trace):
    """Sessions begin `sessions_times` as fast; a turn keeps its distance to its session's first."""

    def __init__(
        self,
        path: Path,
        *,
        arrivals_times: float = 1.0,
        pace: Pace | None = None,
        sessions_times: float = 1.0,
    ) -> None:
        super().__init__(path, arrivals_times=arrivals_times, pace=pace)
        self._sessions_times = sessions_times

    def paced(self, sessions_times: float) -> "PacedTrace":
        """The same trace, with sessions that begin so many times as fast."""
        return PacedTrace(
            self.path, arrivals_times=self._arrivals_times, pace=self._pace, sessions_times=sessions_times
        )

    def __iter__(self) -> Iterator[Turn]:
        """Every turn, in order of its new arrival. Raises InvalidTrace."""
        if self._sessions_times == 1:
            yield from super().__iter__()
            return
        begins_s: dict[bytes, float] = {}
        held: list[tuple[float, int, Turn]] = []
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
