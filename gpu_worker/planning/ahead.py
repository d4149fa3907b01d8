"""Which edited conversation is computed next, ahead of its turn, and what became of what was. Pure.

A pass ahead computes tokens in idle time that a user would wait for. It is worth its cost where

    chance of return x tokens spared x worth of a user's second  >  tokens to compute

The chance is the share of conversations that returned within an hour, of those of which it is known. Those
that are expected back go first, the soonest before others; then the one that was offered last. A pass is
followed by a pause, so that passes take at most their share of the time. Worst case: nobody returns, and the
share was spent for nothing until the chance has been learned.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from ctxcache.errors import InvalidArgument

GAVE_WAY = "gave way"
"""The outcome of a pass that a turn interrupted."""
SHARE = 0.5
"""The most of an engine's time that passes ahead take."""
MOST_WAITING = 64
WORTH = 4.0
"""How much more a second of a user's waiting is worth than one of the machine that nobody waits for."""
GONE_S = 3600.0
"""A conversation that was away for so long is taken not to return."""
_PRIOR_COUNT = 8
"""Returns that are taken to have been seen before the first one was."""
_MOST_KNOWN = 4096
"""Conversations of which it is known that they had a turn, or tokens ahead of one."""


Work = TypeVar("Work")


@dataclass(frozen=True, slots=True)
class Offer(Generic[Work]):
    """A pass that a conversation may need: `work` says which. `return_s`: when it is expected back."""

    session_id: str
    work: Work
    return_s: float
    number: int
    """By which offers are told apart: later ones have higher numbers."""

    @property
    def urgency(self) -> tuple[float, int]:
        """Greater for what is to be computed sooner."""
        return -self.return_s, self.number


_urgency = attrgetter("urgency")


class AheadQueue(Generic[Work]):
    """What waits to be computed. One offer for a conversation, the latest. Times are of any one clock."""

    def __init__(
        self, *, share: float = SHARE, most_waiting: int = MOST_WAITING, worth: float = WORTH
    ) -> None:
        """Raises InvalidArgument(field="share" | "most_waiting" | "worth")."""
        if not 0 < share <= 1:
            raise InvalidArgument(field="share", problem=f"{share} is no share of the time")
        if most_waiting < 1:
            raise InvalidArgument(field="most_waiting", problem=f"{most_waiting} is no number of passes")
        if not 0 < worth < math.inf:
            raise InvalidArgument(field="worth", problem=f"{worth} is no ratio of two seconds")
        self._share, self._most, self._worth = share, most_waiting, worth
        self._offers: dict[str, Offer[Work]] = {}
        self._offer_count = 0
        self._away_since_s: OrderedDict[str, float] = OrderedDict()
        self._returned_count = self._gone_count = 0
        self._free_s = -math.inf
        self._passing: Offer[Work] | None = None
        """The offer whose pass runs."""
        self._begin_s, self._is_back = -math.inf, False
        """When that pass began, and whether its conversation had a turn since."""

    def __len__(self) -> int:
        return len(self._offers)

    def offer(self, session_id: str, work: Work, return_s: float = math.inf) -> None:
        """A conversation's turn has ended. Where too many wait, the least urgent goes."""
        self._offer_count += 1
        self._offers[session_id] = Offer(session_id, work, return_s, self._offer_count)
        if len(self._offers) > self._most:
            del self._offers[min(self._offers.values(), key=_urgency).session_id]

    def turn_begins(self, session_id: str, now_s: float) -> None:
        """A conversation is back: what was offered is its former rendering."""
        self._offers.pop(session_id, None)
        self._is_back |= self._passing is not None and self._passing.session_id == session_id
        self._returned_count += self._away_since_s.pop(session_id, None) is not None
        self._away_since_s[session_id] = now_s
        # One that is away for a short time may still return: it counts neither way.
        while (
            len(self._away_since_s) > _MOST_KNOWN or next(iter(self._away_since_s.values())) < now_s - GONE_S
        ):
            self._away_since_s.popitem(last=False)
            self._gone_count += 1

    @property
    def chance(self) -> float:
        """How likely a conversation returns, within (0, 1]: 1 until some did not."""
        returned = self._returned_count + _PRIOR_COUNT
        return returned / (returned + self._gone_count)

    def is_worth(self, spared_count: int, cost_count: int) -> bool:
        """Whether a pass pays that spares a turn so many tokens and computes so many."""
        return self.chance * self._worth * spared_count > cost_count

    def due_s(self) -> float:
        """When the next pass may begin; never where nothing waits."""
        return self._free_s if self._offers else math.inf

    def take(self, now_s: float) -> Offer[Work] | None:
        """Begin a pass: take the next offer, where its time has come."""
        if self.due_s() > now_s:
            return None
        offer = self._offers.pop(max(self._offers.values(), key=_urgency).session_id)
        self._passing, self._begin_s, self._is_back = offer, now_s, False
        return offer

    def ended(self, outcome: str, now_s: float) -> None:
        """The pass that was begun has ended now; `outcome`: in few words.

        One that gave way goes on later, unless its conversation is back or has a newer offer.
        """
        offer, self._passing = self._passing, None
        self._free_s = now_s + (now_s - self._begin_s) * (1 - self._share) / self._share
        if offer is not None and outcome == GAVE_WAY and not self._is_back:
            self._offers.setdefault(offer.session_id, offer)

    @property
    def unfinished_count(self) -> int:
        """Passes that wait or run."""
        return len(self._offers) + (self._passing is not None)

    @property
    def is_idle(self) -> bool:
        """Whether no pass runs, and none waits."""
        return not self.unfinished_count


@dataclass(frozen=True, slots=True)
class AheadCounts:
    """Tokens computed ahead; of these, those that turns began with, and those that no turn will."""

    computed_token_count: int = 0
    used_token_count: int = 0
    wasted_token_count: int = 0


@dataclass(slots=True)
class AheadTally:
    """Counts what became of tokens that were computed ahead. Bounded."""

    counts: AheadCounts = field(default_factory=AheadCounts)
    _held: OrderedDict[str, tuple[int, int]] = field(default_factory=OrderedDict)
    """By session, which of its tokens were computed ahead of its next turn: begin and end."""

    def dropped(self, token_count: int) -> None:
        """So many tokens were computed, and are nobody's."""
        self._add(computed=token_count, wasted=token_count)

    def held(self, session: str, begin: int, end: int) -> None:
        """A session's tokens `[begin, end)` were computed: what it held before is used up to `begin`."""
        old_begin, old_end = self._held.pop(session, (begin, begin))
        kept = max(min(old_end, begin) - old_begin, 0)
        self._add(computed=end - begin, wasted=old_end - old_begin - kept)
        if begin < end or kept:
            self._held[session] = (begin - kept, end)
        while len(self._held) > _MOST_KNOWN:
            _, (old_begin, old_end) = self._held.popitem(last=False)
            self._add(wasted=old_end - old_begin)

    def returned(self, session: str, reused_count: int) -> int:
        """A turn began with so many tokens of its session. Returns how many of them were computed ahead."""
        begin, end = self._held.pop(session, (0, 0))
        used = max(min(end, reused_count) - begin, 0)
        self._add(used=used, wasted=end - begin - used)
        return used

    def _add(self, computed: int = 0, used: int = 0, wasted: int = 0) -> None:
        counts = self.counts
        self.counts = AheadCounts(
            counts.computed_token_count + computed,
            counts.used_token_count + used,
            counts.wasted_token_count + wasted,
        )
