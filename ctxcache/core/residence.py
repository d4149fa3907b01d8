"""Residence: how much of a session lies where, kept up to date as its segments come, move and go.

A segment that one session lists is counted in that session's residence. One that forks share is
counted in nobody's: the kin of those that list it take note that something changed, and whoever
wants to know counts again. So a move costs the same however many sessions list the segment. Worst
case: a session's segments are counted anew each time somebody asks, while what it shares keeps moving.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Amounts(NamedTuple):
    """How much lies where."""

    dram_segment_count: int = 0
    dram_bytes: int = 0
    ssd_bytes: int = 0


class Counted(Protocol):
    """What is counted: a segment."""

    @property
    def home(self) -> "Residence | Kin | None":
        """Where it is counted."""

    def amounts(self) -> Amounts:
        """What it takes."""


class Kin:
    """A session, its forks and theirs: whoever may share segments. Owned by the event loop.

    `uid` is no session's. `uids` are the sessions', the one accessed last last.
    """

    __slots__ = ("change_count", "into", "uid", "uids")

    def __init__(self, uid: bytes) -> None:
        self.uid = uid + b"+"
        self.uids = OrderedDict({uid: None})
        self.change_count = 0
        self.into: Kin | None = None
        """What it has become a part of."""

    def root(self) -> "Kin":
        """Itself, or what it has become a part of."""
        kin = self
        while kin.into is not None:
            kin = kin.into
        return kin

    @property
    def last_uid(self) -> bytes:
        """The one accessed last."""
        return next(reversed(self.uids))

    def accessed(self, uid: bytes) -> None:
        """One of them is accessed."""
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


class Residence:
    """How much of one session lies where."""

    __slots__ = ("_counted", "_dram_bytes", "_dram_count", "_kin", "_shared", "_ssd_bytes", "uid")

    def __init__(self, uid: bytes) -> None:
        self.uid = uid
        self._kin: Kin | None = None
        self._dram_count = self._dram_bytes = self._ssd_bytes = 0
        self._shared = Amounts()
        self._counted = -1
        """At which of the kin's changes what is shared was counted."""

    @property
    def kin(self) -> Kin | None:
        """Who may share segments with the session; None before its first fork."""
        return self._kin and self._kin.root()

    def add(self, dram_segment_count: int, dram_bytes: int, ssd_bytes: int) -> None:
        """Count what a segment that no other session lists takes somewhere; negative when it does no more."""
        self._dram_count += dram_segment_count
        self._dram_bytes += dram_bytes
        self._ssd_bytes += ssd_bytes

    def share_with(self, home: "Residence | Kin") -> Kin:
        """Become kin to whoever lists a segment; returns the kin of both."""
        theirs = home.root() if isinstance(home, Kin) else home.kin or self.kin or Kin(home.uid)
        mine = self.kin
        kin = theirs if mine is None else mine.merge(theirs)
        self.join(kin)
        if isinstance(home, Residence):
            home.join(kin)
        return kin

    def join(self, kin: Kin) -> None:
        """Become one of those who may share segments."""
        self._kin = kin
        kin.uids[self.uid] = None

    def dram_segment_count(self, segments: Iterable[Counted]) -> int:
        """How many of the session's segments, which these are, are in DRAM."""
        return self._dram_count if self._kin is None else self.amounts(segments).dram_segment_count

    def amounts(self, segments: Iterable[Counted]) -> Amounts:
        """How much of the session lies where, whose segments these are."""
        kin, own = self.kin, Amounts(self._dram_count, self._dram_bytes, self._ssd_bytes)
        if kin is None:
            return own
        if self._counted != kin.change_count:
            shared = [segment.amounts() for segment in segments if segment.home is not self]
            self._shared = Amounts(*map(sum, zip(*shared, strict=True))) if shared else Amounts()
            self._counted = kin.change_count
        return Amounts(*(a + b for a, b in zip(own, self._shared, strict=True)))
