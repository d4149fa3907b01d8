"""Schedulers and clients that lie, for a stated share of what they say. Pure, and the same in each replay."""

import enum
import zlib
from dataclasses import dataclass

from ctxcache.simulate.trace import Turn


class Lie(enum.Enum):
    """What can be false: a job's place, a job that never comes, one that is not told, a client's hint."""

    ORDER = "order"
    PHANTOM = "phantom"
    MISSING = "missing"
    HINT = "hint"


@dataclass(frozen=True, slots=True)
class Liar:
    """Lies of these kinds about a share of the turns."""

    share: float
    kinds: frozenset[Lie]

    def tells(self, kind: Lie, turn: Turn) -> bool:
        """Whether it lies in this way at this turn."""
        if not self.share or kind not in self.kinds:
            return False
        return zlib.crc32(b"%s at %d" % (turn.session, int(turn.arrival_s * 1000))) < self.share * 2**32

    def order(self, turn: Turn, order: int) -> float | None:
        """The place that a job of that place is given; None where nothing is said of it."""
        if self.tells(Lie.MISSING, turn):
            return None
        if self.tells(Lie.ORDER, turn):
            return float(zlib.crc32(b"place " + turn.session) % (2 * order))
        return float(order)

    def return_s(self, turn: Turn, now_s: float, next_s: float) -> float:
        """When a session is said to return: ten times too late or too early."""
        if not self.tells(Lie.HINT, turn):
            return next_s
        return now_s + max(next_s - now_s, 0.0) * (10.0 if zlib.crc32(b"late " + turn.session) % 2 else 0.1)
