"""Operations on the server's arena: the stream that carries them, by gRPC here, and what they hold.

Knows nothing of what the operations are for. A hold lasts while its stream lives and its deadline has not
passed; it cannot be got back. One daemon thread receives for a stream of gRPC; its state is guarded by a
lock, and its queue is bounded by the callers that wait, plus one release per answer. Worst case: the stream
breaks, every waiter gets its error at once, and everything held is gone.
"""

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.client.wire import Wire, trace_parent
from ctxcache.errors import CacheError, DeadlineExceeded, Unavailable
from ctxcache.v1.arena_pb2 import (
    AccessRequest,
    AccessResponse,
    Operation,
    OperationError,
    OperationResult,
    ReleaseLease,
    ReleaseReservation,
)
from ctxcache.v1.block_pb2 import ReleaseBlocksRequest
from ctxcache.wire.status import from_parts, from_rpc_error

# Ends a lease that never exists: an operation that changes nothing, and whose answer proves the way.
PROBE = Operation(release_lease=ReleaseLease(lease_id=0))


class AccessStream(ABC):
    """Batches of operations to one server. Thread-safe; once broken it stays broken."""

    def __init__(self, target: str, timeout_s: float) -> None:
        self.target = target
        self.timeout_s = timeout_s

    @property
    @abstractmethod
    def is_broken(self) -> bool:
        """Whether the way has ended, and with it everything acquired on it."""

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
        if len(results) != len(batch):
            raise CacheError(f"{self.target}: {len(results)} results for {len(batch)} operations")
        return results

    def carry_out(self, operation: Operation) -> OperationResult:
        """Carry out one operation. Raises its error as the server raised it."""
        (result,) = self.call([operation])
        if result.HasField("error"):
            raise self.error_of(result.error)
        return result

    def error_of(self, failed: OperationError) -> CacheError:
        """Rebuild the error that the server raised."""
        return from_parts(failed.code, failed.reason, failed.message, failed.metadata, target=self.target)


def again(failure: CacheError) -> CacheError:
    """Copy an error: one exception raised in several threads would collect all their tracebacks."""
    return type(failure)(str(failure), **failure.facts)


def as_break(failure: CacheError, target: str) -> CacheError:
    """Say of a failure without a class of its own that the server cannot be reached."""
    return Unavailable(target=target, problem=str(failure)) if type(failure) is CacheError else failure


def releases(response: AccessResponse) -> Iterator[Operation]:
    """The operations that give back all that an answer holds; its caller is not there any more."""
    for result in response.results:
        if result.HasField("lease"):
            yield Operation(release_lease=ReleaseLease(lease_id=result.lease.lease_id))
        if result.HasField("reservation"):
            release = ReleaseReservation(reservation_id=result.reservation.reservation_id)
            yield Operation(release_reservation=release)
        if result.HasField("leased_blocks") and result.leased_blocks.token:
            yield Operation(release_blocks=ReleaseBlocksRequest(token=result.leased_blocks.token))
        for room in result.reserved_blocks.rooms:
            if room.reservation_id:
                release = ReleaseReservation(reservation_id=room.reservation_id)
                yield Operation(release_reservation=release)


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
        """Raise `ended` where that is known without a system call: cheaper, and no proof of a hold."""
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


_JOIN_TIMEOUT_S = 5.0
SURE_FOR_NS = 250_000_000
"""How long an answer proves that the server still knows us, from when it was asked for. A server gives up a
client that answers no ping for half of its `keepalive_s`, half a second at the least; the client itself, if
it was frozen meanwhile, may not have noticed yet.
"""


class _Asked(NamedTuple):
    """A request whose answer somebody waits for."""

    answer: "Future[AccessResponse]"
    sent_ns: int


class GrpcAccess(AccessStream):
    """One Access call."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire.target, wire.timeout_s)
        self._lock = threading.Lock()
        self._request_ids = itertools.count(1)
        self._waiting: dict[int, _Asked] = {}
        self._sure_until_ns = 0
        self._failure: CacheError | None = None
        self._requests: SimpleQueue[AccessRequest | None] = SimpleQueue()
        with wire.errors():
            self._call = wire.arena.Access(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._receive, name="ctxcache-access", daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """See AccessStream. The thread that receives notices it at once."""
        return self._failure is not None

    @property
    def is_in_doubt(self) -> bool:
        """See AccessStream."""
        return self._failure is not None or time.monotonic_ns() >= self._sure_until_ns

    def still_holds(self) -> bool:
        """See AccessStream. Without an answer of late, asks for one, for as long as a call may take."""
        deadline_s = time.monotonic() + self.timeout_s
        while self.is_in_doubt and self._failure is None:
            if time.monotonic() >= deadline_s:
                self._end(self._too_late())
            else:
                self._probe()
        return self._failure is None

    def exchange(self, batch: list[Operation]) -> AccessResponse:
        """See AccessStream."""
        request_id, answer = self._submit(batch)
        try:
            return answer.result(self.timeout_s)
        except TimeoutError as error:
            self._abandon(request_id, answer)
            raise self._too_late() from error
        except BaseException:
            self._abandon(request_id, answer)
            raise

    def send(self, operations: Iterable[Operation]) -> None:
        """See AccessStream."""
        batch = list(operations)
        with self._lock:
            if batch and self._failure is None:
                self._requests.put(AccessRequest(request_id=next(self._request_ids), operations=batch))

    def close(self) -> None:
        """See AccessStream."""
        self._end(Unavailable(target=self.target, problem="the client is closed"))
        self._thread.join(_JOIN_TIMEOUT_S)

    def _probe(self) -> None:
        try:
            self.exchange([PROBE])
        except CacheError as error:
            self._end(error)

    def _submit(self, batch: list[Operation]) -> tuple[int, Future[AccessResponse]]:
        answer: Future[AccessResponse] = Future()
        with self._lock:
            if self._failure is not None:
                raise again(self._failure)
            request_id = next(self._request_ids)
            self._waiting[request_id] = _Asked(answer, time.monotonic_ns())
            request = AccessRequest(request_id=request_id, operations=batch, trace_parent=trace_parent())
            self._requests.put(request)
        return request_id, answer

    def _abandon(self, request_id: int, answer: Future[AccessResponse]) -> None:
        with self._lock:
            self._waiting.pop(request_id, None)
        if answer.done() and answer.exception() is None:
            self.send(releases(answer.result()))

    def _receive(self) -> None:
        failure: CacheError = Unavailable(target=self.target, problem="the access stream ended")
        try:
            for response in self._call:
                self._deliver(response)
        except grpc.RpcError as error:
            failure = from_rpc_error(error, self.target)
        finally:
            self._end(failure)

    def _deliver(self, response: AccessResponse) -> None:
        with self._lock:
            asked = self._waiting.pop(response.request_id, None)
            if asked is not None:
                self._sure_until_ns = max(self._sure_until_ns, asked.sent_ns + SURE_FOR_NS)
                asked.answer.set_result(response)
        if asked is None:
            # Its caller gave up waiting: what the late answer holds would be held by nobody.
            self.send(releases(response))

    def _end(self, failure: CacheError) -> None:
        self._break(failure)
        self._call.cancel()

    def _break(self, failure: CacheError) -> None:
        failure = as_break(failure, self.target)
        with self._lock:
            self._failure = self._failure or failure
            waiting, self._waiting = self._waiting, {}
            # Ends the thread in which gRPC draws requests.
            self._requests.put(None)
        for asked in waiting.values():
            asked.answer.set_exception(again(self._failure))

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(target=self.target, timeout_s=f"{self.timeout_s:g}")
