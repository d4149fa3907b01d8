"""A hold: what keeps other sessions' bytes out of the slots that a lease or a reservation names.

It lasts while its stream lives and its deadline has not passed, and it cannot be got back. Worst
case: it ends during a copy; the check after the copy says so, and the copy must not be used.
"""

import time
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.client.access import AccessStream
from ctxcache.errors import CacheError
from ctxcache.v1.arena_pb2 import Operation, OperationResult


@dataclass(frozen=True, slots=True)
class ClockPair:
    """One instant on both clocks: what the server's times are compared with, and what never jumps."""

    wall_ns: int
    monotonic_ns: int

    @classmethod
    def now(cls) -> "ClockPair":
        """Read both clocks."""
        return cls(time.time_ns(), time.monotonic_ns())

    def deadline_ns(self, expire_time: Timestamp) -> int:
        """Return `expire_time`, told between this moment and now, on the monotonic clock; both are this host's.

        The earlier of what then and now say: somebody may have set the wall clock in between.
        """
        now = ClockPair.now()
        ahead_ns = max(self.wall_ns - self.monotonic_ns, now.wall_ns - now.monotonic_ns)
        return expire_time.ToNanoseconds() - ahead_ns


@dataclass(slots=True)
class Hold:
    """A lease or reservation. `ended` is what to raise once it protects nothing any more."""

    stream: AccessStream
    deadline_ns: int
    release_operation: Operation
    ended: CacheError
    is_released: bool = False

    def check(self) -> None:
        """Raise `ended` unless the stream holds it for certain and the deadline has not passed."""
        if not self.stream.still_holds():
            raise type(self.ended)(**self.ended.facts)
        self.check_known()

    def check_known(self) -> None:
        """Raise `ended` when that is plain without asking the system: cheaper, and no proof of the contrary."""
        is_gone = self.is_released or (self.stream.is_in_doubt and not self.stream.still_holds())
        if is_gone or time.monotonic_ns() >= self.deadline_ns:
            raise type(self.ended)(**self.ended.facts)

    def release_soon(self) -> None:
        """Give it back without waiting, once: later operations on the stream come after it."""
        if not self.is_released:
            self.is_released = True
            self.stream.send([self.release_operation])

    def release(self) -> None:
        """Give it back and wait until it is. Raises LeaseNotFound, ReservationNotFound, Unavailable."""
        self.is_released = True
        self.stream.carry_out(self.release_operation)


def acquire(stream: AccessStream, operation: Operation) -> tuple[ClockPair, OperationResult]:
    """Carry out an acquiring operation, and say when it was sent. Raises the operation's error."""
    sent = ClockPair.now()
    return sent, stream.carry_out(operation)
