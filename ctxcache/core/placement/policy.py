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

    The turn added `appended_bytes`, input and answer. Of these `answer_bytes` are the answer's, as far as is
    known. A token of the session's model takes `token_bytes`. `is_prefix`: it is no session, but a prefix
    that sessions have in common; its turns are the requests that began with it, and add nothing.
    """

    size_bytes: int
    turn_count: int
    appended_bytes: int
    token_bytes: float
    answer_bytes: int = 0
    is_prefix: bool = False


@dataclass(frozen=True, slots=True)
class Capacities:
    """The room of the store.

    A server's SSD also holds copies of what memory holds. `below_bytes` is its room besides these copies.
    """

    memory_bytes: int
    below_bytes: int

    @property
    def total_bytes(self) -> int:
        """The room for sessions, each counted once."""
        return self.memory_bytes + self.below_bytes


# One session, as a policy hears of it:
#
#     arrived ──► idle ──► placed(MEMORY) ──► placed(BELOW) ──► evicted ──► arrived ──► ...
#        ▲          │                                             (a miss; its name goes on)
#        └──────────┘ next turn                       ended: it will not return
class Policy:
    """A policy that ignores every event; subclasses override what they need. The ledger owns it."""

    ranks_holders: bool = False
    """Whether `ctxcache simulate --blocks` tells it of sessions and common prefixes, instead of blocks."""

    def arrived(self, uid: bytes, now_s: float) -> None:
        """A turn of the session begins. The session may be new, or have been evicted before."""

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """The turn is over. The call comes before `placed`, and also where the session is not kept."""

    def recalled(self, uid: bytes, facts: Facts, idle_s: float, *, is_watched: bool = True) -> None:  # noqa: ARG002
        """The store has had the session since before the policy knew it: from an earlier run, or asleep.

        `idle_s` says when the session was last used. At 0 and above: so many seconds before the store was
        opened. Below 0: what `slept` returned, which orders uses since then and is no time. A store that is
        opened tells of the watched sessions first, the longest idle before others. The other sessions follow
        when somebody needs them. Their returns teach nothing, because a session that stays away may never be
        told.
        """
        self.idle(uid, facts, 0.0)

    def slept(self, uid: bytes) -> float:
        """Forget the session, which is dormant from here on. `recalled` tells of it when it wakes.

        Returns the `idle_s` of that call. It is below 0 for a session that was used since the start, and the
        lower, the later the last use was. No dormant session is ranked, see `Ranked`.
        """
        self.ended(uid)
        return 0.0

    def resized(self, uid: bytes, facts: Facts) -> None:
        """The session has another size from now on. This is no use of it, and `appended_bytes` is 0."""

    def lessons(self) -> dict[str, object]:
        """The policy's lessons for after a restart, as JSON values; none by default."""
        return {}

    def relearn(self, lessons: Mapping[str, Any], age_s: float) -> None:
        """Go on from the `lessons` of a run that ended `age_s` ago; called before anything else.

        Raises ValueError, KeyError, TypeError where the lessons are of another kind. The policy has learned
        nothing then.
        """

    def passed(self, now_s: float) -> None:
        """Time passes. Called often, so that what grows old does so a little at a time."""

    def placed(self, uid: bytes, tier: Level) -> None:
        """The session lies in `tier` from now on: in memory only if all of it does."""

    def evicted(self, uid: bytes) -> None:
        """The session left the store; it may return as a miss."""

    def continued(self, uid: bytes) -> None:
        """Another session begins with all that this one had: it goes on under another name."""

    def ended(self, uid: bytes) -> None:
        """The session was deleted or expired and will not return under this name."""

    def hinted(self, uid: bytes, order: float) -> None:
        """A job of the session waits in the scheduler's queue; a lower `order` starts earlier."""

    def withdrawn(self, uid: bytes) -> None:
        """The session's job waits no longer: it starts, it was cancelled, or the queue was lost."""

    def expected(self, uid: bytes, return_s: float | None) -> None:
        """The client says when the idle session returns; None: never."""

    def backed(self, uid: bytes) -> None:
        """A bucket has all of the session as it is now: a miss costs what fetching it from there costs."""

    def gives_way(self, uid: bytes, comer: bytes) -> bool:  # noqa: ARG002  the default ignores them
        """Whether `uid` may leave SSD so that `comer` is written there."""
        return True

    def chance(self, uid: bytes) -> float:  # noqa: ARG002  the default knows nothing of returns
        """How likely the session returns within what is learned, two hours; 1 where nothing is learned."""
        return 1.0

    def is_worth_wear(self, uid: bytes) -> bool:  # noqa: ARG002  the default knows no prices
        """Whether what the session's hits are expected to save is worth the wear of writing it below."""
        return True

    def prefetch(self, accepts: Accepts = lambda _: True) -> bytes | None:  # noqa: ARG002
        """The session below that is to be promoted ahead of its turn, of those that `accepts` takes."""
        return None

    def is_needed_soon(self, uid: bytes, fetched: bytes) -> bool:  # noqa: ARG002  the default ignores them
        """Whether a prefetch of `fetched` must not push this session out of memory."""
        return False


# Admission. The tier below takes every session that fits into its free room. Without free room, a session
# that is worth less than those that would have to leave stays in memory alone, and is evicted from there.
# Such a session neither wears nor empties the device. A crash loses it, and no caller was promised otherwise.


class Candidate(NamedTuple):
    """A session that would leave the tier below. `gives_way`: it is worth less than the one that comes."""

    gives_way: bool
    size_bytes: int


def is_worth_writing(size_bytes: int, free_bytes: int, leaving: Iterable[Candidate]) -> bool:
    """Whether a session of so many bytes is to be written below.

    `leaving` are the sessions that may leave for it, in their order; it is read as far as needed. If all of
    them free too little, the answer is still yes, and the writer fails.
    """
    # Free room is enough: nothing leaves, and nobody is asked.
    for each in leaving if size_bytes > free_bytes else ():
        # The first session that is worth more ends the question: those behind it are worth more too.
        if not each.gives_way:
            return False
        free_bytes += each.size_bytes
        if size_bytes <= free_bytes:
            break
    return True


# Ranked policies. The store places by these: it asks for one rank at a time, and the policy says which fell.

Fallen = Callable[[bytes], None]


class Ranked(Policy):
    """A policy by whose ranks sessions leave, the lowest first: the store, and memory.

    Each class says whether it ranks holders (`class Mine(Ranked, ranks_holders=True)`): True for a policy
    whose ranks need sizes, turns, hints or returns, because a block has none of these; False for a policy by
    the order of uses alone.

    Dormant sessions have no rank, so that a million of them take little memory. They leave in the order of
    their last use, whatever the policy (docs/placement.md, Sleep).
    """

    def __init_subclass__(cls, *, ranks_holders: bool) -> None:
        # Not inherited: a refinement of LRU by sizes would silently replay blocks as LRU does.
        cls.ranks_holders = ranks_holders

    def __init__(self) -> None:
        self._fallen: Fallen = lambda _: None

    def rank(self, uid: bytes) -> Key | None:
        """Where the session stands now: the lowest leaves first.

        None for one that was never idle, or left.
        """
        raise NotImplementedError

    # A session without a rank has no claim.
    def gives_way(self, uid: bytes, comer: bytes) -> bool:
        """See Policy. The session of the lower rank is worth less."""
        rank, comers_rank = self.rank(uid), self.rank(comer)
        return rank is None or comers_rank is None or rank < comers_rank

    def watch(self, fallen: Fallen) -> None:
        """Let `fallen` hear of every session whose rank may have fallen, so that it would leave earlier.

        A session that would leave later need not be told: the store asks again before one goes.
        """
        self._fallen = fallen
