"""Operations on the server's arena: what carries them, and what they hold.

    control socket   a plain socket, and no thread between the caller and the server
    gRPC stream      one daemon thread receives

Knows nothing of what the operations are for. A hold lasts while its stream lives and its deadline has not
passed; it cannot be got back.

On the socket, the thread that waits for an answer reads for all others: one lock guards the state, one sender
at a time keeps frames whole, and unread answers are bounded. A gRPC stream's queue is bounded by the callers
that wait, plus one release per answer. Worst case: the server dies. Every waiter gets its error at once, a
thread that only looks at views learns it with its next `check`, and everything held is gone.
"""

import itertools
import math
import os
import select
import socket
import struct
import threading
import time
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import status_pb2  # type: ignore[import-untyped]  # no py.typed

from ctxcache.client.arena import MappedArena, SlotLayout
from ctxcache.client.forks import end_in_children, of_parent
from ctxcache.client.wire import ANSWER_LIMIT_BYTES, Wire, trace_parent
from ctxcache.errors import CacheError, DeadlineExceeded, InvalidArgument, Unavailable
from ctxcache.v1.arena_pb2 import (
    AccessRequest,
    AccessResponse,
    Arena,
    ControlHello,
    ControlWelcome,
    Operation,
    OperationError,
    OperationResult,
    ReleaseLease,
    ReleaseReservation,
)
from ctxcache.v1.block_pb2 import ReleaseBlocksRequest
from ctxcache.wire.frames import (
    LENGTH_DELIMITED,
    NUMBER,
    PROTOCOL_VERSION,
    Frame,
    FrameKind,
    FrameReader,
    encode_frame,
    varint,
)
from ctxcache.wire.status import from_parts, from_rpc_error, from_status

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
        return _unnumbered(self.exchange([Operation.FromString(operation)]))

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


def _unnumbered(response: AccessResponse) -> bytes:
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


# Threads and their work:
#
#     caller ── put ──► SimpleQueue ── drawn by a thread of gRPC's ──► server
#       ▲                                                                │
#       └── Future ◄── `ctxcache-access`, the one that receives ◄────────┘
class GrpcAccess(AccessStream):
    """One Access call."""

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire.target, wire.timeout_s)
        self._lock = threading.Lock()
        self._request_ids = itertools.count(1)
        self._waiting: dict[int, _Asked] = {}
        # Nothing is sure before the first answer, so the first use of a hold asks.
        self._sure_until_ns = 0
        self._failure: CacheError | None = None
        self._requests: SimpleQueue[AccessRequest | None] = SimpleQueue()
        with wire.errors():
            self._call = wire.arena.Access(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._receive, name="ctxcache-access", daemon=True)
        self._thread.start()
        end_in_children(self)

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
        # An answer proves the moment it was asked for: where it came late, another one is asked for.
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

    def begin(self, operation: bytes) -> Begun:
        """See AccessStream."""
        request_id, answer = self._submit([Operation.FromString(operation)])

        def wait(deadline_s: float) -> bytes:
            try:
                return _unnumbered(answer.result(max(deadline_s - time.monotonic(), 0)))
            except TimeoutError as error:
                raise self._too_late() from error

        return Begun(wait, partial(self._abandon, request_id, answer), time.monotonic() + self.timeout_s)

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

    def forked(self) -> None:
        """See Shared."""
        self._lock = threading.Lock()
        self._failure = of_parent(self.target)

    def _probe(self) -> None:
        try:
            self.exchange([PROBE])
        except CacheError as error:
            self._end(error)

    def _submit(self, batch: list[Operation]) -> tuple[int, Future[AccessResponse]]:
        answer: Future[AccessResponse] = Future()
        # One lock from the look at `_failure` to the entry: a request entered behind the break would wait out
        # its deadline.
        with self._lock:
            if self._failure is not None:
                raise again(self._failure)
            request_id = next(self._request_ids)
            # Noted before it is queued: the receiving thread may have the answer before this one goes on.
            self._waiting[request_id] = _Asked(answer, time.monotonic_ns())
            request = AccessRequest(request_id=request_id, operations=batch, trace_parent=trace_parent())
            self._requests.put(request)
        return request_id, answer

    def _abandon(self, request_id: int, answer: Future[AccessResponse]) -> None:
        with self._lock:
            self._waiting.pop(request_id, None)
        # It came after all, between the deadline and here: nobody else gives back what it holds.
        if answer.done() and answer.exception() is None:
            self.send(releases(answer.result()))

    def _receive(self) -> None:
        # gRPC ends the iteration without an error as well: then `failure` is what it began with.
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
                # From when it was asked: the answer may have been long on its way.
                self._sure_until_ns = max(self._sure_until_ns, asked.sent_ns + SURE_FOR_NS)
                asked.answer.set_result(response)
        if asked is None:
            # Its caller gave up waiting: what the late answer holds would be held by nobody.
            self.send(releases(response))

    def _end(self, failure: CacheError) -> None:
        # First every waiter has its error, then the call is cancelled: the cancellation is nobody's reason.
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


# -- over the control socket -------------------------------------------------------------------------

_ONE_OPERATION = bytes((AccessRequest.OPERATIONS_FIELD_NUMBER << 3 | LENGTH_DELIMITED,))
"""The beginning of an encoded operation in a request, before its length."""
LIVES_FOR_S = 0.01
"""How long a server that answered is taken to be there without a look at the socket."""
SOON_S = 0.001
"""How long the kernel waits for an answer by itself. A longer wait is a poll, which knows its deadline."""
UNREAD_LIMIT = 64
"""Answers that nobody waits for, at a time: then one is waited for, which brings those before it."""
_READ_BYTES = 1 << 16
_FOREVER_S = 3600.0
_NUMBER_END = 11
"""Where the longest number of an answer ends."""
_TIMEVAL = struct.Struct("@ll")
_GONE = select.POLLHUP | select.POLLERR | select.POLLRDHUP


# Threads and locks. No thread of its own stands between a caller and the server: whoever waits first reads,
# for all others as well, and hands the reading on when it has its answer.
#
#     thread A   _submit ──► _wait: nobody reads ──► _read ──► answer of B ──► `_answers`, notify all
#     thread B   _submit ──► _wait: A reads ──► sleeps on `_changed` ────────► takes its answer
#     `ctxcache-late`   reads only while an answer is owed whose caller gave up
#
#     `_lock`      the state below; `_changed` is its condition
#     sender       the thread whose frame goes out: whole frames, numbered in the order in which they are sent
#     reader       the thread that takes answers
#
# A signal's handler may raise wherever Python is called: who was sender or reader lays that down with a plain
# store, which nothing interrupts. So is `_lock` taken by itself: a Condition's own `with` is Python.
#
# A frame that goes out:
#
#     | u32 length | u8 kind = ACCESS | 0x08 | varint number | operations … | trace_parent |
#                                      └ NUMBER first: an answer's is read without its message being parsed
#
# The life of a request, by who waits for its answer:
#
#    awaited ──── answered ────► taken by its caller
#       │ its caller gives up
#       ▼
#    overdue ──── answered ────► what the answer holds is given back
#
#    unread  ──── answered ────► counted off: a release, for which nobody waits
class SocketAccess(AccessStream):
    """Operations over a greeted control socket; `reader` holds bytes that came behind the greeting."""

    def __init__(self, connection: socket.socket, reader: FrameReader, target: str, timeout_s: float) -> None:
        super().__init__(target, timeout_s)
        # One call receives most answers: it blocks for a moment. A longer wait is a poll.
        connection.settimeout(None)
        # `settimeout` would make Python poll before each call; with SO_RCVTIMEO one call waits and receives.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(0, int(SOON_S * 1e6)))
        self._socket = connection
        self._reader = reader
        self._last_id = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._is_sending = self._is_reading = False
        self._awaited: set[int] = set()
        self._overdue: set[int] = set()
        """Requests whose callers gave up: what their late answers hold is given back."""
        # Answers that another thread has read, until their callers take them.
        self._answers: dict[int, _Answer] = {}
        self._heard_s = -LIVES_FOR_S
        self._unread_count = 0
        self._drainer: threading.Thread | None = None
        self._failure: CacheError | None = None
        # A poll object refuses two threads at a time, so each thread has its own.
        self._polls = threading.local()
        end_in_children(self)

    @property
    def is_broken(self) -> bool:
        """See AccessStream."""
        if self._failure is None and self._has_event(_GONE, 0):
            self._break(Unavailable(target=self.target, problem="the server closed the control socket"))
        return self._failure is not None

    @property
    def is_worth_a_try(self) -> bool:
        """See AccessStream. Spares a small operation one of its three calls of the kernel."""
        is_lately = time.monotonic() - self._heard_s < LIVES_FOR_S
        return self._failure is None if is_lately else not self.is_broken

    @property
    def is_in_doubt(self) -> bool:
        """See AccessStream. The server lets go of nothing while the socket is open, whatever is heard."""
        return self._failure is not None

    def still_holds(self) -> bool:
        """See AccessStream."""
        return not self.is_broken

    def exchange(self, batch: list[Operation]) -> AccessResponse:
        """See AccessStream."""
        request = AccessRequest(operations=batch, trace_parent=trace_parent())
        return self._read_answer(self._exchange(request.SerializeToString()).message)

    def ask(self, operation: bytes) -> bytes:
        """See AccessStream. Neither the request nor the answer is made into a message here."""
        answer = self._exchange(_one_operation(operation))
        return answer.message[answer.begin :]

    def begin(self, operation: bytes) -> Begun:
        """See AccessStream."""
        end_s = time.monotonic() + self.timeout_s
        request_id = self._submit(_one_operation(operation), end_s, is_awaited=True)

        def wait(deadline_s: float) -> bytes:
            answer = self._wait(request_id, deadline_s)
            return answer.message[answer.begin :]

        return Begun(wait, partial(self._abandon, request_id), end_s)

    def send(self, operations: Iterable[Operation]) -> None:
        """See AccessStream."""
        batch = list(operations)
        if not batch or self._failure is not None:
            return
        try:
            # A sender that never reads would fill the socket: the server stops taking requests from one that
            # takes no answers. Answers come in order, so that waiting for this one has read all before it.
            if self._unread_count >= UNREAD_LIMIT:
                self.exchange(batch)
            else:
                self._send(batch)
        except CacheError:
            # Broken: what was to be given back is gone with the connection.
            return

    def close(self) -> None:
        """See AccessStream."""
        self._break(Unavailable(target=self.target, problem="the client is closed"))

    def forked(self) -> None:
        """See Shared."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._failure = of_parent(self.target)
        # The copy alone: a shutdown would end the parent's.
        self._socket.close()

    # -- sending -------------------------------------------------------------------------------

    def _exchange(self, request: bytes) -> "_Answer":
        """Send an encoded request without its number; returns the encoded answer."""
        deadline_s = time.monotonic() + self.timeout_s
        request_id = self._submit(request, deadline_s, is_awaited=True)
        try:
            return self._wait(request_id, deadline_s)
        except CacheError:
            self._abandon(request_id)
            raise
        except BaseException as error:
            # A signal's: an answer may be lost that was taken, ours or one that another thread waits for.
            self._break(self._gone(error))
            raise

    def _send(self, batch: list[Operation]) -> None:
        """Send a batch for whose answer nobody waits."""
        request = AccessRequest(operations=batch, trace_parent=trace_parent())
        self._submit(request.SerializeToString(), time.monotonic() + self.timeout_s, is_awaited=False)

    def _submit(self, request: bytes, deadline_s: float, *, is_awaited: bool) -> int:
        is_sender = False
        try:
            with self._lock:
                self._wait_to_send(deadline_s)
                is_sender = self._is_sending = True
                self._last_id = request_id = self._last_id + 1
                # Before it is sent: another thread may read the answer at once.
                if is_awaited:
                    self._awaited.add(request_id)
                else:
                    self._unread_count += 1
            message = NUMBER + varint(request_id) + request
            self._send_all(encode_frame(FrameKind.ACCESS, message), deadline_s)
            self._is_sending = False
            self._wake()
        except BaseException:
            if is_sender:
                # Any error, a signal's too: half a frame may be out.
                self._is_sending = False
                self._break(Unavailable(target=self.target, problem="a request was interrupted"))
            raise
        return request_id

    def _wait_to_send(self, deadline_s: float) -> None:
        """Under the lock, until nobody sends. Raises DeadlineExceeded, Unavailable."""
        # Part of the deadline: another sender may be in the middle of a frame that the server does not take.
        while self._is_sending and self._failure is None:
            if not self._changed.wait(max(deadline_s - time.monotonic(), 0)):
                raise self._too_late()
        if self._failure is not None:
            raise again(self._failure)

    def _send_all(self, data: bytes, deadline_s: float) -> None:
        rest = memoryview(data)
        while rest:
            try:
                # Never blocks in the kernel: a wait for room has the caller's deadline, and SO_RCVTIMEO is
                # not for sending.
                rest = rest[self._socket.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if not self._has_event(select.POLLOUT, deadline_s - time.monotonic()):
                    # Half a frame may be out: nothing can follow it.
                    self._break(Unavailable(target=self.target, problem="the server takes no requests"))
                    raise self._too_late() from None
            except OSError as error:
                self._break(self._gone(error))
                raise again(self._gone(error)) from error

    # -- receiving -----------------------------------------------------------------------------

    def _read_answer(self, answer: bytes) -> AccessResponse:
        """Raises Unavailable: what cannot be read may hold what nobody gives back."""
        try:
            return AccessResponse.FromString(answer)
        except DecodeError as error:
            self._break(self._gone(error))
            raise again(self._gone(error)) from error

    def _wait(self, request_id: int, deadline_s: float) -> "_Answer":
        while True:
            # A loop of two steps: whoever finds that nobody reads does so once, and looks again under the
            # lock.
            is_reader, late = False, None
            try:
                with self._lock:
                    if request_id in self._answers:
                        return self._answers.pop(request_id)
                    if self._failure is not None:
                        raise again(self._failure)
                    if not self._is_reading:
                        is_reader = self._is_reading = True
                    # Another thread reads, for this one too.
                    elif not self._changed.wait(max(deadline_s - time.monotonic(), 0)):
                        raise self._too_late()
                if is_reader:
                    late = self._read(deadline_s)
            finally:
                if is_reader:
                    self._is_reading = False
                    self._wake()
            # Outside of the reader's turn: sending may wait for room, and another thread can read meanwhile.
            if late is not None:
                self._give_back(late)

    def _read(self, deadline_s: float) -> "_Answer | None":
        """Take what comes next, as the only one who does; returns an answer for which nobody waits.

        Raises DeadlineExceeded.
        """
        try:
            # A frame may have come whole with the last one, so bytes already here are looked at first.
            while (frame := self._reader.next()) is None:
                if not self._receive():
                    self._wait_for_bytes(deadline_s)
            self._heard_s = time.monotonic()
            return self._take(frame)
        except (OSError, InvalidArgument, DecodeError) as error:
            self._break(self._gone(error))
            return None

    def _wake(self) -> None:
        """Let threads that wait look again: one finds its answer, or sends, or reads from here on."""
        try:
            with self._lock:
                self._changed.notify_all()
        except BaseException:
            # A signal's: nobody else wakes them.
            with self._lock:
                self._changed.notify_all()
            raise

    def _wait_for_bytes(self, deadline_s: float) -> None:
        if not self._has_event(select.POLLIN, deadline_s - time.monotonic()):
            raise self._too_late()

    def _receive(self) -> bool:
        """Take what has come, or comes within a moment; whether anything did."""
        try:
            data = self._socket.recv(_READ_BYTES)
            self._reader.feed(data)
        except BlockingIOError:
            return False
        except BaseException as error:
            # Any error, a signal's too: bytes may be lost, and nothing could be read behind them.
            self._break(self._gone(error))
            raise
        if not data:
            raise ConnectionResetError("the server closed the control socket")
        return True

    def _take(self, frame: Frame) -> "_Answer | None":
        """Hand an answer to whom it is for; returns one that came too late."""
        if frame.kind != FrameKind.ACCESS:
            self._break(_why_ended(frame, self.target))
            return None
        answer = _numbered(frame.message)
        request_id = answer.request_id
        with self._lock:
            is_overdue = request_id in self._overdue
            if request_id in self._awaited:
                self._awaited.discard(request_id)
                self._answers[request_id] = answer
            elif is_overdue:
                self._overdue.discard(request_id)
            else:
                # A number that nobody knows is of a request for which nobody waits: releases are only
                # counted.
                self._unread_count -= 1
        return answer if is_overdue else None

    def _give_back(self, answer: "_Answer") -> None:
        """Release what nobody waited for. Waits for no answer: whoever is here may be needed to read them."""
        with suppress(CacheError):
            batch = list(releases(self._read_answer(answer.message)))
            if batch:
                self._send(batch)

    def _abandon(self, request_id: int) -> None:
        """See that what a late answer holds is given back, by a thread that waits for it."""
        with self._lock:
            answer = self._answers.pop(request_id, None)
            # Only while it is owed: a request whose frame was not sent whole has broken the way, and nothing
            # is held then.
            if answer is None and request_id in self._awaited and self._failure is None:
                self._awaited.discard(request_id)
                self._overdue.add(request_id)
                if self._drainer is None:
                    self._drainer = threading.Thread(target=self._drain, name="ctxcache-late", daemon=True)
                    self._drainer.start()
        if answer is not None:
            self._give_back(answer)

    def _drain(self) -> None:
        while True:
            with self._lock:
                if not self._overdue or self._failure is not None:
                    # No answer is owed: the next one that is begins a thread of its own.
                    self._drainer = None
                    return
                is_reader = not self._is_reading
                if is_reader:
                    self._is_reading = True
                else:
                    self._changed.wait(_FOREVER_S)
            if is_reader:
                late = None
                try:
                    late = self._read(time.monotonic() + _FOREVER_S)
                except DeadlineExceeded:
                    continue
                finally:
                    self._is_reading = False
                    self._wake()
                if late is not None:
                    self._give_back(late)

    # -- ends ----------------------------------------------------------------------------------

    def _break(self, failure: CacheError) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = as_break(failure, self.target)
            self._changed.notify_all()
        # Wakes whoever reads; closed with the last reference, so that no descriptor is used again under it.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _has_event(self, events: int, timeout_s: float) -> bool:
        # One for each thread and sort of event: making one costs as much as asking it.
        polls = vars(self._polls)
        poll = polls.get(str(events))
        if poll is None:
            poll = polls[str(events)] = select.poll()
            poll.register(self._socket, events)
        return bool(poll.poll(max(timeout_s, 0) * 1000))

    def _gone(self, error: BaseException) -> Unavailable:
        return Unavailable(target=self.target, problem=f"control socket: {error}")

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(target=self.target, timeout_s=f"{self.timeout_s:g}")


def _one_operation(operation: bytes) -> bytes:
    """The encoded request of one operation, without its number."""
    # The number is of field 1 and is added in front; fields of a protobuf message may come in any order
    # and in several encoded pieces, so that a trace is appended likewise.
    request = _ONE_OPERATION + varint(len(operation)) + operation
    if parent := trace_parent():
        request += AccessRequest(trace_parent=parent).SerializeToString()
    return request


class _Answer(NamedTuple):
    """An encoded answer to the request of that number, of which the results begin at `begin`."""

    request_id: int
    message: bytes
    begin: int


# | 0x08 | 1 to 10 bytes of varint | results … |
#          └ 7 bits each, low ones first; the eighth bit: more follow
def _numbered(answer: bytes) -> _Answer:
    """Raises InvalidArgument where it begins with no number."""
    number = shift = 0
    if answer[:1] == NUMBER:
        for end, byte in enumerate(answer[1:_NUMBER_END], 2):
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return _Answer(number, answer, end)
    raise InvalidArgument(field="frame", problem="is an answer without a number")


def _why_ended(frame: Frame, target: str) -> CacheError:
    status = status_pb2.Status.FromString(frame.message) if frame.kind == FrameKind.END else None
    if status is None or not status.code:
        return Unavailable(target=target, problem="the server ended the control socket")
    return from_status(status, target)


_PEER_CREDENTIALS = struct.Struct("3i")
_GREETING_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Control:
    """A greeted control socket: the arena, its descriptors (the caller closes them), and the operations.

    `fds`: one for reading, and where this process may write one for that.
    """

    arena: Arena
    fds: list[int]
    stream: SocketAccess


def connect_control(path: str, target: str, timeout_s: float, token: str = "") -> Control | None:
    """Connect and greet; None where no socket of a trusted server is.

    `token`: as whom, empty for this process' user. Raises what the server refuses with (TooManyRequests,
    Draining,
    Unauthenticated, PermissionDenied), DeadlineExceeded, Unavailable.
    """
    # The descriptors come with the bytes of the welcome, and only there (SCM_RIGHTS). In order:
    #
    #     connect ──► whose process is it? ──► HELLO(version, token) ──► HELLO(arena) + 1 or 2 descriptors
    #                                                                └─► END(why not)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            return None
        if not _is_trusted(connection):
            connection.close()
            return None
        return _greet(connection, target, timeout_s, token)
    except BaseException:
        connection.close()
        raise


def _greet(connection: socket.socket, target: str, timeout_s: float, token: str) -> Control:
    with ExitStack() as received:
        reader = FrameReader(ANSWER_LIMIT_BYTES)
        fds: list[int] = []
        # Descriptors that came belong to this process from then on, whatever the greeting turns out to be.
        received.callback(_close, fds)
        try:
            hello = ControlHello(protocol_version=PROTOCOL_VERSION, token=token, asks_to_write=True)
            frame = _first_frame(connection, hello, reader, fds, time.monotonic() + timeout_s)
            welcome = _welcomed(frame, fds, target)
        except TimeoutError as error:
            raise DeadlineExceeded(target=target, timeout_s=f"{timeout_s:g}") from error
        except (OSError, InvalidArgument, DecodeError) as error:
            raise Unavailable(target=target, problem=f"control socket: {error}") from error
        received.pop_all()
    stream = SocketAccess(connection, reader, target, timeout_s)
    stream.tenant = welcome.tenant
    return Control(welcome.arena, fds, stream)


def _welcomed(frame: Frame, fds: list[int], target: str) -> ControlWelcome:
    if frame.kind == FrameKind.END:
        raise from_status(status_pb2.Status.FromString(frame.message), target)
    welcome = ControlWelcome.FromString(frame.message)
    is_understood = frame.kind == FrameKind.HELLO and welcome.protocol_version == PROTOCOL_VERSION
    # Two descriptors where writing is allowed, one where it is not: another count is another protocol.
    if not is_understood or len(fds) != 1 + welcome.arena.may_write:
        raise Unavailable(target=target, problem="its control socket answers with another greeting")
    return welcome


def _first_frame(
    connection: socket.socket, hello: ControlHello, reader: FrameReader, fds: list[int], deadline_s: float
) -> Frame:
    # Refused before the hello: why is there to be read all the same.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(encode_frame(FrameKind.HELLO, hello.SerializeToString()))
    while (frame := reader.next()) is None:
        connection.settimeout(max(deadline_s - time.monotonic(), 0.001))
        # Room for four, though two are expected: a cut list of descriptors would pass for a shorter one.
        data, received, _, _ = socket.recv_fds(connection, _GREETING_READ_BYTES, 4)
        fds += received
        if not data:
            raise ConnectionResetError("it was closed")
        reader.feed(data)
    return frame


def _is_trusted(connection: socket.socket) -> bool:
    # By the kernel's word: anybody may have put a socket at that path.
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return _PEER_CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


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
