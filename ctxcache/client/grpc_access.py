"""Operations on the server's arena over one gRPC stream; a daemon thread receives the answers.

The queue is bounded by the callers that wait, plus one release per answer.
"""

import itertools
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import grpc

from ctxcache.client.access import PROBE, AccessStream, Begun, again, as_break, releases, unnumbered
from ctxcache.client.process_forks import end_in_children, of_parent
from ctxcache.client.wire import Wire, trace_parent
from ctxcache.errors import CacheError, DeadlineExceeded, Unavailable
from ctxcache.v1.arena_pb2 import (
    AccessRequest,
    AccessResponse,
    Operation,
)
from ctxcache.wire.status import from_rpc_error

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
        self.sure_until_ns = 0
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
        return self._failure is not None or time.monotonic_ns() >= self.sure_until_ns

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
                return unnumbered(answer.result(max(deadline_s - time.monotonic(), 0)))
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
                self.sure_until_ns = max(self.sure_until_ns, asked.sent_ns + SURE_FOR_NS)
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
