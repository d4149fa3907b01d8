"""Operations on the server's arena over its control socket.

The thread that waits for an answer reads for all others: one lock guards the state, one sender at a time
keeps frames whole, and unread answers are bounded.
"""

import select
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from google.protobuf.message import DecodeError
from google.rpc import status_pb2  # type: ignore[import-untyped]  # no py.typed

from ctxcache.client.access import AccessStream, Begun, again, as_break, releases
from ctxcache.client.process_forks import end_in_children, of_parent
from ctxcache.client.wire import trace_parent
from ctxcache.errors import CacheError, DeadlineExceeded, InvalidArgument, Unavailable
from ctxcache.v1.arena_pb2 import (
    AccessRequest,
    AccessResponse,
    Operation,
)
from ctxcache.wire.frames import (
    LENGTH_DELIMITED,
    NUMBER,
    Frame,
    FrameKind,
    FrameReader,
    encode_frame,
    varint,
)
from ctxcache.wire.status import from_status

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
