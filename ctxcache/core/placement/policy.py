"""The interface of a placement policy: it hears events about sessions, ranks them, and names those that come.

A session is placed whole. A policy moves nothing and reads no clock: `now_s` comes with the event.
Worst case of a bad policy: misses. Capacities and pins are the ledger's, not the policy's.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ctxcache.core.placement.order import Accepts, Key


class Level(enum.Enum):
    """A place with a capacity."""

    MEMORY = "dram"
    BELOW = "ssd"

    # Policies are asked for hashes of this at every placement.
    # Enum's own hashes the name anew, in Python.
    __hash__ = object.__hash__


class Facts(NamedTuple):
    """The known facts of a session at the end of a turn.

    `appended_bytes` came in the turn, asked or answered; of those `answer_bytes` as far as is known were the
    answer's. A token of its model takes `token_bytes`.
    """

    size_bytes: int
    turn_count: int
    appended_bytes: int
    token_bytes: float
    answer_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Capacities:
    """How much each tier takes."""

    memory_bytes: int
    below_bytes: int

    @property
    def total_bytes(self) -> int:
        """Both tiers together: a session lies in one of them."""
        return self.memory_bytes + self.below_bytes


# One session, as a policy hears of it:
#
#     arrived ──► idle ──► placed(MEMORY) ──► placed(BELOW) ──► evicted ──► arrived ──► ...
#        ▲          │                                             (a miss; its name goes on)
#        └──────────┘ next turn                       ended: it will not return
class Policy:
    """A policy that hears everything and ignores it; subclasses override what they need.

    Owned by whoever owns the ledger.
    """

    def arrived(self, uid: bytes, now_s: float) -> None:
        """A turn of the session begins; it may be new, or have been evicted."""

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """The turn is over. Called before the session is placed, and for one that is not kept, too."""

    def recalled(self, uid: bytes, facts: Facts, idle_s: float, *, is_watched: bool = True) -> None:  # noqa: ARG002
        """The store was opened with it, idle for that long: it was used before all that was used since.

        Those that are watched come first, who is idle for longest before others; the others come when they
        come. Whether one that is not watched returns teaches nothing: those that do not may never be told.
        """
        self.idle(uid, facts, 0.0)

    def slept(self, uid: bytes) -> float:
        """Forget a session of which nobody knows when it returns; `recalled` tells of it again.

        Returns the `idle_s` that is to be told then: less than 0, the further the later its last use was.
        """
        self.ended(uid)
        return 0.0

    def resized(self, uid: bytes, facts: Facts) -> None:
        """The session takes so much from now on; nobody used it."""

    def lessons(self) -> dict[str, object]:
        """The learned state that is worth keeping over restarts, as JSON values; nothing by default."""
        return {}

    def relearn(self, lessons: Mapping[str, Any], age_s: float) -> None:
        """Go on from the `lessons` of an earlier run, that long ago; called before anything else.

        Raises ValueError, KeyError, TypeError where they are of another kind, and has learned nothing then.
        """

    def passed(self, now_s: float) -> None:
        """Time passes; called now and then, so that what grows old does so a little at a time."""

    def placed(self, uid: bytes, tier: Level) -> None:
        """The session lies in `tier` from now on."""

    def evicted(self, uid: bytes) -> None:
        """The session left the store; it may return as a miss."""

    def ended(self, uid: bytes) -> None:
        """The session was deleted or expired and will not return under this name."""

    def hinted(self, uid: bytes, order: float) -> None:
        """A job of the session waits in the scheduler's queue; a lower `order` starts earlier."""

    def withdrawn(self, uid: bytes) -> None:
        """The session's job waits no longer: it starts, or it was cancelled, or the queue was lost."""

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """The client says when the idle session returns; None: never."""

    def gives_way(self, uid: bytes, comer: bytes) -> bool:  # noqa: ARG002  the default ignores them
        """Whether this session may leave the tier below for `comer` to be written there."""
        return True

    def prefetch(self, accepts: Accepts = lambda _: True) -> bytes | None:  # noqa: ARG002
        """Which session below is to be promoted ahead of its turn, of those that `accepts` takes."""
        return None

    def is_needed_soon(self, uid: bytes, fetched: bytes) -> bool:  # noqa: ARG002  the default ignores them
        """Whether a prefetch of `fetched` must not push this session out of memory."""
        return False


# Admission. The tier below takes every session that fits into its free room. Beyond that, a session stays in
# memory alone if it is worth less than the sessions that would have to leave for it, and is evicted from
# there: the device is neither worn nor emptied for such a session. A crash loses it, which no caller was
# promised.


class Candidate(NamedTuple):
    """One that would leave the tier below; `gives_way`: it is worth less than what comes in its place."""

    gives_way: bool
    size_bytes: int


def is_worth_writing(size_bytes: int, free_bytes: int, leaving: Iterable[Candidate]) -> bool:
    """Whether a session of so many bytes is to be written below.

    `leaving`: the sessions that may leave for it, the first to leave first; read as far as needed. Where they
    free too little, the writer finds that out.
    """
    # Free room is enough: nothing leaves, and nobody is asked.
    for each in leaving if size_bytes > free_bytes else ():
        # In their order: the first that is worth more ends the question, whatever stands behind it.
        if not each.gives_way:
            return False
        free_bytes += each.size_bytes
        if size_bytes <= free_bytes:
            break
    return True


# Ranked policies. The store places by these: it asks for ranks one by one, and is told which fell.

Fallen = Callable[[bytes], None]


class Ranked(Policy):
    """A policy by whose ranks sessions leave, the lowest first, the store or memory."""

    def __init__(self) -> None:
        self._fallen: Fallen = lambda _: None

    def rank(self, uid: bytes) -> Key | None:
        """Where the session stands now: the lowest leaves first.

        None for one that was never idle, or left.
        """
        raise NotImplementedError

    # A session without a rank has no claim.
    def gives_way(self, uid: bytes, comer: bytes) -> bool:
        """See Policy: it does if it is worth less."""
        rank, comers_rank = self.rank(uid), self.rank(comer)
        return rank is None or comers_rank is None or rank < comers_rank

    def watch(self, fallen: Fallen) -> None:
        """Let `fallen` hear of every session whose rank may have fallen. A rise needs no word."""
        self._fallen = fallen
