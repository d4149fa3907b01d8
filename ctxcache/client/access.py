"""Operations on the server's arena: what carries them, and what they hold.

    `socket_access.py`   the control socket: no thread between the caller and the server
    `grpc_access.py`     a gRPC stream: one daemon thread receives

Knows nothing of what the operations are for. A hold lasts while its stream lives and its deadline has not
passed; it cannot be got back. Worst case: the server dies. Every waiter gets its error at once, a thread that
only looks at views learns it with its next `check`, and everything held is gone.
"""

import math
import time
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.client.arena import MappedArena, SlotLayout
from ctxcache.errors import CacheError, DeadlineExceeded, Unavailable
from ctxcache.v1.arena_pb2 import (
    AccessResponse,
    Operation,
    OperationError,
    OperationResult,
    ReleaseLease,
    ReleaseReservation,
)
from ctxcache.v1.block_pb2 import ReleaseBlocksRequest
from ctxcache.wire.status import from_parts

# Ends a lease that never exists: an operation that changes nothing, and whose answer proves the way. Asked
# before an attachment is trusted, and where a gRPC stream was silent.
PROBE = Operation(release_lease=ReleaseLease(lease_id=0))


class AccessStream(ABC):
    """Batches of operations to one server. Thread-safe; once broken it stays broken."""

    tenant = ""
    """The tenant of the caller, as the server said over the control socket; empty elsewhere."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s

    @property
    @abstractmethod
    def is_broken(self) -> bool:
        """Whether the way has ended, and with it everything acquired on it."""

    @property
    def is_worth_a_try(self) -> bool:
        """Whether it lives, or did a moment ago: what has happened since is told by the next call."""
        return not self.is_broken

    @property
    @abstractmethod
    def is_in_doubt(self) -> bool:
        """Whether it may have ended: a break was noticed, or too little was heard of late. Costs nothing."""

    @abstractmethod
    def still_holds(self) -> bool:
        """Whether what was acquired on it and not given back is held for certain; may ask the server."""

    @abstractmethod
    def exchange(self, batch: list[Operation]) -> AccessResponse:
        """Send a batch and wait for its answer. Raises DeadlineExceeded, Unavailable, or why it was ended."""

    @abstractmethod
    def send(self, operations: Iterable[Operation]) -> None:
        """Carry out operations without waiting for results; on a broken way they have no object."""

    @abstractmethod
    def close(self) -> None:
        """End it, and with it everything that is held."""

    def call(self, operations: Iterable[Operation]) -> list[OperationResult]:
        """Carry out a batch; a failed operation is a result. Raises DeadlineExceeded, Unavailable."""
        batch = list(operations)
        results = list(self.exchange(batch).results)
        # Results have no names: the i-th is the i-th operation's, and a missing one would shift all behind
        # it.
        if len(results) != len(batch):
            raise CacheError(f"{self.target}: {len(results)} results for {len(batch)} operations")
        return results

    def carry_out(self, operation: Operation) -> OperationResult:
        """Carry out one operation. Raises its error as the server raised it."""
        (result,) = self.call([operation])
        if result.HasField("error"):
            raise self.error_of(result.error)
        return result

    def ask(self, operation: bytes) -> bytes:
        """Carry out one encoded operation; returns an encoded AccessResponse without its number.

        Callers of many small operations know answers again that they have read before. Raises
        DeadlineExceeded, Unavailable; the operation's own error is in the answer.
        """
        return unnumbered(self.exchange([Operation.FromString(operation)]))

    @abstractmethod
    def begin(self, operation: bytes) -> "Begun":
        """As `ask`, without waiting for the answer. Raises DeadlineExceeded, Unavailable."""

    def error_of(self, failed: OperationError) -> CacheError:
        """Rebuild the error that the server raised."""
        return from_parts(failed.code, failed.reason, failed.message, failed.metadata, target=self.target)


class Begun:
    """An operation that was sent. Its answer is waited for, or given up, by one thread at a time."""

    def __init__(
        self, wait: Callable[[float], bytes], give_up: Callable[[], None], deadline_s: float
    ) -> None:
        """`wait` until that time of the monotonic clock raises DeadlineExceeded, and may be called again.

        `give_up`: what the answer holds is given back.
        """
        self._wait, self.give_up, self._deadline_s = wait, give_up, deadline_s

    def answer(self, within_s: float = math.inf) -> bytes | None:
        """The encoded answer; None, and the operation goes on, where it takes longer. Raises as `ask`."""
        end_s = time.monotonic() + within_s
        try:
            return self._wait(min(end_s, self._deadline_s))
        except DeadlineExceeded:
            if end_s < self._deadline_s:
                return None
            self.give_up()
            raise
        except BaseException:
            self.give_up()
            raise


def unnumbered(response: AccessResponse) -> bytes:
    """The encoded answer without the number of its request, which is the stream's own."""
    response.request_id = 0
    return response.SerializeToString()


def again(failure: CacheError) -> CacheError:
    """Copy an error: one exception raised in several threads would collect all their tracebacks."""
    # Copied by class and facts, so that a caller may catch each thread's error by its class.
    return type(failure)(str(failure), **failure.facts)


def as_break(failure: CacheError, target: str) -> CacheError:
    """Say of a failure without a class of its own that the server cannot be reached."""
    return Unavailable(target=target, problem=str(failure)) if type(failure) is CacheError else failure


def releases(response: AccessResponse) -> Iterator[Operation]:
    """The operations that give back all that an answer holds; its caller is not there any more."""
    # Every result that holds something has its line here; one that is left out holds it until the way ends.
    for result in response.results:
        if result.HasField("lease"):
            yield Operation(release_lease=ReleaseLease(lease_id=result.lease.lease_id))
        if result.HasField("reservation"):
            release = ReleaseReservation(reservation_id=result.reservation.reservation_id)
            yield Operation(release_reservation=release)
        if result.HasField("leased_blocks") and result.leased_blocks.token:
            yield Operation(release_blocks=ReleaseBlocksRequest(token=result.leased_blocks.token))
        if result.HasField("found_blocks") and result.found_blocks.token:
            yield Operation(release_blocks=ReleaseBlocksRequest(token=result.found_blocks.token))
        # Blocks that were there before the put have no room and no reservation.
        for room in result.reserved_blocks.rooms:
            if room.reservation_id:
                release = ReleaseReservation(reservation_id=room.reservation_id)
                yield Operation(release_reservation=release)


# An `expire_time` is of the server's wall clock, and a hold is compared with the monotonic one. Both are read
# before the request goes out:
#
#     sent ────── request ──────► server: now + ttl = expire_time
#       │                                        │
#       └ wall minus monotonic, here             ▼
#         and once more at the answer     the deadline, by the larger difference
#                                         (a clock that was set makes a hold shorter, never longer)
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
        """Return `expire_time`, told between this moment and now, on this host's monotonic clock.

        The earlier of what then and now say: somebody may have set the wall clock in between.
        """
        now = ClockPair.now()
        ahead_ns = max(self.wall_ns - self.monotonic_ns, now.wall_ns - now.monotonic_ns)
        return expire_time.ToNanoseconds() - ahead_ns


# The questions of a thread before and after it touches leased memory:
#
#     check         the server is asked, or the socket is looked at     a proof: after a copy, before a write
#     check_known   flags and clocks of this process alone              cheap: before each view is handed out
@dataclass(slots=True)
class Hold:
    """A lease or reservation. `ended` makes the error to raise once it protects nothing any more."""

    stream: AccessStream
    deadline_ns: int
    release_operation: Operation
    ended: Callable[[], CacheError]
    is_own: bool = True
    """Whether it ends when nobody refers to it any more; not so where its token may be others'."""
    is_released: bool = False

    def check(self) -> None:
        """Raise what `ended` makes unless the stream holds it for certain and the deadline has not passed."""
        # First the way, which may take a while, then the deadline: the second answer is then the newer one.
        if not self.stream.still_holds():
            raise self.ended()
        self.check_known()

    def check_known(self) -> None:
        """Raise what `ended` makes where that needs no system call: cheaper, and no proof of a hold."""
        is_gone = self.is_released or (self.stream.is_in_doubt and not self.stream.still_holds())
        if is_gone or time.monotonic_ns() >= self.deadline_ns:
            raise self.ended()

    def release_soon(self) -> None:
        """Give it back without waiting, once: later operations on the stream come after it."""
        if not self.is_released:
            # Set before it is sent: views taken from now on are refused, though the server has not acted yet.
            self.is_released = True
            try:
                self.stream.send([self.release_operation])
            except BaseException:
                # A signal's: it may not be on its way, and nobody sends it again.
                self.stream.close()
                raise

    def release(self) -> None:
        """Give it back and wait until it is. Raises LeaseNotFound, ReservationNotFound, Unavailable."""
        # First: from here on the room may be another session's.
        self.is_released = True
        try:
            self.stream.carry_out(self.release_operation)
        except CacheError:
            raise
        except BaseException:
            self.stream.close()
            raise

    def __del__(self) -> None:
        # A signal may come between the hold's making and the `with` that would end it.
        if self.is_own and not self.is_released:
            give_back(self.stream, [self.release_operation])


def give_back(stream: AccessStream, operations: list[Operation]) -> None:
    """Have a thread carry out what a finalizer has left to do, which runs in the middle of anything."""
    try:
        # One that takes no lock to start.
        start_new_thread(stream.send, (operations,))
    except RuntimeError:
        # The process ends, and its connection with it; or there is no room for a thread: a deadline remains.
        return


# From the request to a hold, where a handler of a signal may raise:
#
#     request ── answer ── result ── Hold        the way is ended, and with it what nobody knows of
#     Hold ── rows ── `with` ── its end          the hold ends itself
def acquire(
    stream: AccessStream, operation: Operation, hold_of: Callable[[ClockPair, OperationResult], Hold]
) -> tuple[OperationResult, Hold]:
    """Carry out an acquiring operation; its result, and the hold that `hold_of` makes of when it was sent.

    Raises the operation's error.
    """
    try:
        sent = ClockPair.now()
        result = stream.carry_out(operation)
        return result, hold_of(sent, result)
    except CacheError:
        raise
    except BaseException:
        stream.close()
        raise


# -- the arena and the way to it ---------------------------------------------------------------------

K = TypeVar("K")
V = TypeVar("V")
MEMO_LIMIT = 4096
"""Entries of a memo: a few KiB each at most."""


class BoundedMemo(Generic[K, V]):
    """Facts by key that never change, of sessions used before. Forgets all of them when it is full.

    Worst case: a forgotten fact is made again.
    """

    def __init__(self) -> None:
        self._known: dict[K, V] = {}

    def put(self, key: K, value: V) -> V:
        """Remember a fact, and return it."""
        # All at once: no order of use is kept on the way of every call, and a fact that is in use is soon
        # back.
        if len(self._known) >= MEMO_LIMIT:
            self._known.clear()
        self._known[key] = value
        return value

    def get_or_make(self, key: K, make: Callable[[], V]) -> V:
        """The fact of a key, made when it is not known."""
        found = self._known.get(key)
        return self.put(key, make()) if found is None else found


@dataclass(frozen=True, slots=True)
class ArenaAttachment:
    """The arena, and the way on which to acquire parts of it.

    `layouts`: of sessions used on it, by their uid.
    """

    arena: MappedArena
    stream: AccessStream
    layouts: BoundedMemo[str, SlotLayout] = field(default_factory=BoundedMemo)
