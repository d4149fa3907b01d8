"""Kin: how much of a session lies where, kept up to date as its segments come, move and go.

A segment that one session lists is counted in that session's residence. A segment that forks share is counted
in no session's residence: its kin notes that something changed, and counting again is left to the next look.
So a move costs the same however many sessions list the segment. Worst case: a session's segments are counted
anew at every look, while what it shares keeps moving.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from ctxcache.format.slot import Slot


class Amounts(NamedTuple):
    """How much lies where."""

    memory_count: int = 0
    """Segments in memory."""
    memory_bytes: int = 0
    durable_bytes: int = 0


class Counted(Protocol):
    """What is counted: a segment."""

    @property
    def home(self) -> "Residence | Kin | None":
        """Where it is counted."""

    @property
    def memory(self) -> Slot | None:
        """Where it lies in memory."""

    @property
    def durable(self) -> Slot | None:
        """Where it lies below."""


class Kin:
    """A session, its forks and theirs: the sessions that may share segments. Owned by the ledger.

    `uid` is no session's. `uids` are the sessions', in the order of their last accesses.
    """

    __slots__ = ("change_count", "into", "uid", "uids")

    def __init__(self, uid: bytes) -> None:
        self.uid = uid + b"+"
        self.uids = OrderedDict({uid: None})
        self.change_count = 0
        self.into: Kin | None = None
        """The kin that it has become a part of."""

    def root(self) -> "Kin":
        """The kin that it has become a part of, or itself."""
        kin = self
        while kin.into is not None:
            kin = kin.into
        return kin

    @property
    def last_uid(self) -> bytes:
        """The session accessed last."""
        return next(reversed(self.uids))

    def accessed(self, uid: bytes) -> None:
        """One of the sessions is accessed."""
        self.uids.move_to_end(uid)

    def add(self, *_: int) -> None:
        """A shared segment came, moved or went."""
        self.root().change_count += 1

    def merge(self, other: "Kin") -> "Kin":
        """Make one of two, which is what records may turn out to be when they are read; returns it."""
        smaller, larger = sorted((self, other), key=lambda kin: len(kin.uids))
        if smaller is not larger:
            smaller.into = larger
            larger.uids.update(smaller.uids)
            larger.change_count += smaller.change_count + 1
        return larger


class Count:
    """How much of some shared segments lies where, counted a part at a time; true while their kin does not change."""

    def __init__(self, kin: Kin, besides: "Residence | None" = None) -> None:
        """`besides`: what is counted there already is left out."""
        self._besides = besides
        self.change_count = kin.change_count
        self._memory_count = self._memory_bytes = self._durable_bytes = 0

    def add(self, segments: Iterable[Counted]) -> None:
        """Count these. Forks of long sessions have thousands."""
        for segment in segments:
            if self._besides is not None and segment.home is self._besides:
                continue
            if memory := segment.memory:
                self._memory_count += 1
                self._memory_bytes += memory.size_bytes
            if durable := segment.durable:
                self._durable_bytes += durable.size_bytes

    def amounts(self) -> Amounts:
        """What was counted."""
        return Amounts(self._memory_count, self._memory_bytes, self._durable_bytes)


class Residence:
    """How much of one session lies where."""

    __slots__ = (
        "_counted", "_durable_bytes", "_kin", "_memory_bytes", "_memory_count", "_shared", "uid",
    )  # fmt: skip

    def __init__(self, uid: bytes) -> None:
        self.uid = uid
        self._kin: Kin | None = None
        self._memory_count = self._memory_bytes = self._durable_bytes = 0
        self._shared = Amounts()
        self._counted = -1
        """The number of the kin's changes at which the shared segments were counted."""

    @property
    def kin(self) -> Kin | None:
        """The sessions that may share segments with this one; None before its first fork."""
        return self._kin and self._kin.root()

    def add(self, memory_count: int, memory_bytes: int, durable_bytes: int) -> None:
        """Count what a segment takes that no other session lists; negative when it leaves there."""
        self._memory_count += memory_count
        self._memory_bytes += memory_bytes
        self._durable_bytes += durable_bytes

    def found_kin(self) -> None:
        """Let there be kin for its forks to join."""
        if self._kin is None:
            self._kin = Kin(self.uid)

    def is_kin(self, home: "Residence | Kin | None") -> bool:
        """Whether what is counted there is counted with the session's kin."""
        return self._kin is not None and home is self._kin and self._kin.into is None

    def count_anew(self) -> None:
        """The session lists other shared segments than before."""
        self._counted = -1

    def take_count(self, counted: "Count") -> None:
        """All that it shares was counted; of no matter if something of it has moved since."""
        self._shared, self._counted = counted.amounts(), counted.change_count

    def share_with(self, home: "Residence | Kin") -> Kin:
        """Become kin to the sessions that list a segment; returns the kin of all."""
        theirs = home.root() if isinstance(home, Kin) else home.kin or self.kin or Kin(home.uid)
        mine = self.kin
        kin = theirs if mine is None else mine.merge(theirs)
        self.join(kin)
        if isinstance(home, Residence):
            home.join(kin)
        return kin

    def join(self, kin: Kin) -> None:
        """Become one of the sessions that may share segments."""
        self._kin = kin
        kin.uids[self.uid] = None

    def memory_count(self, segments: Iterable[Counted]) -> int:
        """How many of the session's segments, which these are, are in memory."""
        return self._memory_count if self._kin is None else self.amounts(segments).memory_count

    def amounts(self, segments: Iterable[Counted]) -> Amounts:
        """How much of the session, whose segments these are, lies where."""
        kin, own = self.kin, Amounts(self._memory_count, self._memory_bytes, self._durable_bytes)
        if kin is None:
            return own
        if self._counted != kin.change_count:
            counted = Count(kin, self)
            counted.add(segments)
            self.take_count(counted)
        return Amounts(*(a + b for a, b in zip(own, self._shared, strict=True)))
