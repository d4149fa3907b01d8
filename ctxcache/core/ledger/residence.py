"""Residence: how much of a session lies in each tier.

A segment that one session lists is counted in that session's residence. A segment that forks share is
counted in no residence: its kin notes that something changed, and counting again is left to the next look.
So a move costs the same however many sessions list the segment. Worst case: a session's segments are
counted anew at every look, while what it shares keeps moving.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from ctxcache.format.layout import Slot


class Amounts(NamedTuple):
    """How much of a session lies in each tier."""

    memory_count: int = 0
    """Segments in memory."""
    memory_bytes: int = 0
    durable_bytes: int = 0


class Counted(Protocol):
    """The counted amounts of a segment."""

    @property
    def home(self) -> "Residence | Kin | None":
        """The owner that counts the segment."""

    @property
    def memory(self) -> Slot | None:
        """The segment's slot in memory."""

    @property
    def durable_bytes(self) -> int:
        """Bytes of all slots below."""


# Forks share segments, and each segment is counted in one place:
#
#     session A   [a0] [a1] [a2] [a3]       a3: residence of A
#     session B   [a0] [a1] [a2]    [b3]    b3: residence of B
#                 └─ kin of A and B ─┘
#
# A move of a0 changes one number of the kin, not one number for each of a thousand forks. The sessions count
# the shared segments again when they are asked, and only if the kin's `change_count` is another.
class Kin:
    """A session, its forks and theirs: the sessions that may share segments. Owned by the ledger.

    `uid` is no session's. `uids` are the sessions', in the order of their last accesses, each with its
    residence.
    """

    __slots__ = ("change_count", "into", "uid", "uids")

    def __init__(self, first: "Residence") -> None:
        self.uid = first.uid + b"+"
        self.uids = OrderedDict({first.uid: first})
        self.change_count = 0
        self.into: Kin | None = None
        """The kin that it has become a part of."""

    def root(self) -> "Kin":
        """The kin that this one has become a part of, or itself."""
        kin = self
        while kin.into is not None:
            kin = kin.into
        return kin

    @property
    def last_uid(self) -> bytes:
        """The session accessed last."""
        return next(reversed(self.uids))

    def accessed(self, uid: bytes) -> None:
        """Note the access of one of the sessions."""
        self.uids.move_to_end(uid)

    def add(self, *_: int) -> None:
        """Note that a shared segment came, moved or went."""
        self.root().change_count += 1

    def merge(self, other: "Kin") -> "Kin":
        """Make one kin of two, as records may turn out to mean; returns it."""
        # The smaller kin joins the larger, so that a session changes its kin a logarithmic number of times.
        smaller, larger = sorted((self, other), key=lambda kin: len(kin.uids))
        if smaller is not larger:
            smaller.into = larger
            for residence in smaller.uids.values():
                residence.kin = larger
            larger.uids.update(smaller.uids)
            # The count is one more than the sum: a count of either kin is outdated, whatever its number was.
            larger.change_count += smaller.change_count + 1
        return larger


# The caller counts in parts and awaits between them. `change_count` is that of the beginning: a move
# meanwhile makes the count outdated instead of wrong.
class Count:
    """The amounts of some shared segments, counted a part at a time.

    They hold while the kin does not change.
    """

    def __init__(self, kin: Kin, besides: "Residence | None" = None) -> None:
        """`besides`: segments that this residence counts already are left out."""
        self._besides = besides
        self.change_count = kin.change_count
        self._memory_count = self._memory_bytes = self._durable_bytes = 0

    def add(self, segments: Iterable[Counted]) -> None:
        """Count these segments. Forks of long sessions have thousands."""
        for segment in segments:
            if self._besides is not None and segment.home is self._besides:
                continue
            if memory := segment.memory:
                self._memory_count += 1
                self._memory_bytes += memory.size_bytes
            self._durable_bytes += segment.durable_bytes

    def amounts(self) -> Amounts:
        """The amounts."""
        return Amounts(self._memory_count, self._memory_bytes, self._durable_bytes)


class Residence:
    """How much of one session lies in each tier."""

    __slots__ = (
        "_counted",
        "_durable_bytes",
        "_memory_bytes",
        "_memory_count",
        "_shared",
        "kin",
        "uid",
    )

    def __init__(self, uid: bytes) -> None:
        self.uid = uid
        self.kin: Kin | None = None
        """The sessions that may share segments with this one; None before its first fork."""
        self._memory_count = self._memory_bytes = self._durable_bytes = 0
        self._shared = Amounts()
        self._counted = -1
        """The number of the kin's changes at which the shared segments were counted."""

    def add(self, memory_count: int, memory_bytes: int, durable_bytes: int) -> None:
        """Count the bytes of a segment that only this session lists; negative when it goes."""
        self._memory_count += memory_count
        self._memory_bytes += memory_bytes
        self._durable_bytes += durable_bytes

    def found_kin(self) -> None:
        """Make a kin that the session's forks can join."""
        if self.kin is None:
            self.kin = Kin(self)

    def count_anew(self) -> None:
        """Note that the session lists other shared segments than before."""
        self._counted = -1

    def take_count(self, counted: "Count") -> None:
        """Take the count of all shared segments. It is of no matter if a segment has moved since."""
        # `counted.change_count` is that of the count's begin. The kin's present number would hide later
        # moves.
        self._shared, self._counted = counted.amounts(), counted.change_count

    def share_with(self, home: "Residence | Kin") -> Kin:
        """Become kin to the sessions that list a segment; returns the kin of all."""
        theirs = home.root() if isinstance(home, Kin) else home.kin or self.kin or Kin(home)
        kin = theirs if self.kin is None else self.kin.merge(theirs)
        self.join(kin)
        if isinstance(home, Residence):
            home.join(kin)
        return kin

    def join(self, kin: Kin) -> None:
        """Become one of the sessions that may share segments."""
        self.kin = kin
        kin.uids[self.uid] = self

    def memory_count(self, segments: Iterable[Counted]) -> int:
        """How many of these segments of the session are in memory."""
        return self._memory_count if self.kin is None else self.amounts(segments).memory_count

    def amounts(self, segments: Iterable[Counted]) -> Amounts:
        """How much of the session, whose segments these are, lies in each tier."""
        own = Amounts(self._memory_count, self._memory_bytes, self._durable_bytes)
        if self.kin is None:
            return own
        if self._counted != self.kin.change_count:
            counted = Count(self.kin, self)
            counted.add(segments)
            self.take_count(counted)
        return Amounts(*(a + b for a, b in zip(own, self._shared, strict=True)))
