"""Return times per class of sessions, learned while serving: how soon keeping a session pays.

Pure, and deterministic: the same events give the same numbers. Sessions are watched past their
eviction, since their return is what is learned; at most WATCHED at once. Worst case: the
load changes within an hour, and what is learned is wrong until the counts have halved.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable

from ctxcache.core.placement.policy import Facts

AGES_S = (0, 4, 10, 20, 40, 70, 110, 160, 230, 330, 480, 700, 1000, 1500, 2400, 3600)
"""Where an idle time passes into the next bin; the last bin is taken to last LAST_BIN_S."""
LAST_BIN_S = 3600
WATCHED = 1 << 17
HALVED_EVERY = 1 << 15
"""Turns after which counts are halved: what was long ago says little."""
REFRESHED_EVERY = 256
PRIOR_COUNT = 12.0
"""How many sessions of a class outweigh what its parent class says."""
MOST_TURNS = 6

SessionClass = tuple[int, ...]


def class_of(facts: Facts) -> SessionClass:
    """Turn count, and the magnitude of the last input: a long one in a late turn seldom has a sequel."""
    return (min(facts.turn_count, MOST_TURNS), facts.appended_bytes.bit_length())


class ReturnTimes:
    """Per class and idle time, how many were still away and how many came back. `aged` hears of each new bin."""

    def __init__(self, aged: Callable[[bytes], None]) -> None:
        self._aged = aged
        self._watched: OrderedDict[bytes, tuple[float, SessionClass]] = OrderedDict()
        self._bins: list[deque[tuple[float, bytes]]] = [deque() for _ in AGES_S]
        self._away: dict[SessionClass, list[float]] = {}
        self._came: dict[SessionClass, list[float]] = {}
        self._indices: dict[SessionClass, list[float]] = {}
        self._turn_count = 0
        self.now_s = 0.0

    def advance(self, now_s: float) -> None:
        """Let time pass: idle sessions grow older. Amortised O(1) per session and bin."""
        self.now_s = max(now_s, self.now_s)
        for number in range(len(AGES_S) - 1):
            waiting = self._bins[number]
            while waiting and waiting[0][0] + AGES_S[number + 1] <= self.now_s:
                since_s, uid = waiting.popleft()
                watched = self._watched.get(uid)
                if watched is not None and watched[0] == since_s:
                    self._count(self._away, watched[1], number + 1)
                    self._bins[number + 1].append((since_s, uid))
                    self._aged(uid)
        self._bound()

    def began(self, uid: bytes) -> None:
        """A turn of the session begins."""
        watched = self._watched.pop(uid, None)
        if watched is not None:
            self._count(self._came, watched[1], self._bin(watched[0]))

    def ended(self, uid: bytes) -> None:
        """The session is gone for good; that it stayed away has been counted."""
        self._watched.pop(uid, None)

    def idle(self, uid: bytes, facts: Facts) -> None:
        """A turn of the session is over."""
        self._watched.pop(uid, None)
        session_class = class_of(facts)
        self._watched[uid] = (self.now_s, session_class)
        self._bins[0].append((self.now_s, uid))
        self._count(self._away, session_class, 0)
        self._turn_count += 1
        if self._turn_count % REFRESHED_EVERY == 0:
            self._indices.clear()
        if self._turn_count % HALVED_EVERY == 0:
            self._halve()

    def recalled(self, uid: bytes, facts: Facts, idle_s: float) -> None:
        """The session has been idle for that long, unseen: it is counted from here on. The oldest come first."""
        since_s, session_class = self.now_s - idle_s, class_of(facts)
        if idle_s >= AGES_S[-1] + LAST_BIN_S:
            return
        number = self._bin(since_s)
        self._watched[uid] = (since_s, session_class)
        self._bins[number].append((since_s, uid))
        self._count(self._away, session_class, number)
        self._bound()

    def index_per_s(self, uid: bytes) -> float:
        """The best rate, in returns per second kept, that keeping the session for some time promises.

        It is the Gittins index of its class at its idle time: max over h of P(return within h) / E[time kept].
        """
        watched = self._watched.get(uid)
        if watched is None:
            return 0.0
        since_s, session_class = watched
        if session_class not in self._indices:
            self._indices[session_class] = self._indices_of(session_class)
        return self._indices[session_class][self._bin(since_s)]

    def _bin(self, since_s: float) -> int:
        return bisect_right(AGES_S, self.now_s - since_s) - 1

    def _count(
        self, counts: dict[SessionClass, list[float]], session_class: SessionClass, number: int
    ) -> None:
        for end in range(len(session_class) + 1):
            counts.setdefault(session_class[:end], [0.0] * len(AGES_S))[number] += 1

    def _hazard(self, session_class: SessionClass, number: int) -> float:
        """How likely one that is in the bin returns in it; few counts lean on the class above."""
        hazard = 0.25
        for end in range(len(session_class) + 1):
            part = session_class[:end]
            came = self._came[part][number] if part in self._came else 0.0
            away = self._away[part][number] if part in self._away else 0.0
            hazard = (
                (came + PRIOR_COUNT * hazard) / (away + PRIOR_COUNT) if end else (came + 0.5) / (away + 2)
            )
        return min(hazard, 0.95)

    def _indices_of(self, session_class: SessionClass) -> list[float]:
        hazards = [self._hazard(session_class, number) for number in range(len(AGES_S))]
        lengths_s = [b - a for a, b in zip(AGES_S, (*AGES_S[1:], AGES_S[-1] + LAST_BIN_S), strict=True)]
        return [_index(hazards[number:], lengths_s[number:]) for number in range(len(AGES_S))]

    def _halve(self) -> None:
        for counts in (self._away, self._came):
            for values in counts.values():
                values[:] = [value / 2 for value in values]

    def _bound(self) -> None:
        """Stop watching who is away for longer than is learned, and the oldest when there are too many."""
        last = self._bins[-1]
        while last and last[0][0] + AGES_S[-1] + LAST_BIN_S <= self.now_s:
            self._unwatch(*last.popleft())
        while len(self._watched) > WATCHED:
            oldest = next(iter(self._watched))
            del self._watched[oldest]

    def _unwatch(self, since_s: float, uid: bytes) -> None:
        watched = self._watched.get(uid)
        if watched is not None and watched[0] == since_s:
            del self._watched[uid]


def _index(hazards: list[float], lengths_s: list[int]) -> float:
    away, came, kept_s, best = 1.0, 0.0, 0.0, 0.0
    for hazard, length_s in zip(hazards, lengths_s, strict=True):
        now = away * hazard
        kept_s += length_s * (away - now / 2)
        came += now
        away -= now
        best = max(best, came / kept_s)
    return best
