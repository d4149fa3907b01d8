"""The access stream: batches of arena operations over one long-lived call.

Knows nothing of what the operations are for. One daemon thread receives; its state is guarded by
`_lock`. The queue of requests is bounded by the callers that wait, plus one release per answer.
Worst case: the stream breaks, every waiter gets its error at once, and all that was held is gone.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue

import grpc

from ctxcache.client.wire import Wire
from ctxcache.errors import CacheError, DeadlineExceeded, Unavailable
from ctxcache.status import from_parts, from_rpc_error
from ctxcache.v1.arena_pb2 import (
    AccessRequest,
    AccessResponse,
    Operation,
    OperationResult,
    ReleaseLease,
    ReleaseReservation,
)

_JOIN_TIMEOUT_S = 5.0


class AccessStream:
    """One Access call. Thread-safe; once broken it stays broken."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self._request_ids = itertools.count(1)
        self._waiting: dict[int, Future[AccessResponse]] = {}
        self._failure: CacheError | None = None
        self._requests: SimpleQueue[AccessRequest | None] = SimpleQueue()
        with wire.errors():
            self._call = wire.arena.Access(iter(self._requests.get, None))
        self._thread = threading.Thread(target=self._receive, name="ctxcache-access", daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether the stream has ended, and with it everything acquired on it."""
        return self._failure is not None

    def call(self, operations: Iterable[Operation]) -> list[OperationResult]:
        """Carry out a batch; a failed operation is a result. Raises DeadlineExceeded, Unavailable."""
        batch = list(operations)
        request_id, answer = self._submit(batch)
        try:
            results = list(answer.result(self._wire.timeout_s).results)
        except TimeoutError as error:
            self._abandon(request_id, answer)
            raise DeadlineExceeded(target=self._wire.target, timeout_s=f"{self._wire.timeout_s:g}") from error
        except BaseException:
            self._abandon(request_id, answer)
            raise
        if len(results) != len(batch):
            raise CacheError(f"{self._wire.target}: {len(results)} results for {len(batch)} operations")
        return results

    def carry_out(self, operation: Operation) -> OperationResult:
        """Carry out one operation. Raises its error as the server raised it."""
        (result,) = self.call([operation])
        if result.HasField("error"):
            failed = result.error
            raise from_parts(
                failed.code, failed.reason, failed.message, failed.metadata, target=self._wire.target
            )
        return result

    def send(self, operations: Iterable[Operation]) -> None:
        """Carry out operations without waiting for results; on a broken stream they have no object."""
        batch = list(operations)
        with self._lock:
            if batch and self._failure is None:
                self._requests.put(AccessRequest(request_id=next(self._request_ids), operations=batch))

    def close(self) -> None:
        """End the stream and its thread."""
        self._break(Unavailable(target=self._wire.target, problem="the client is closed"))
        self._call.cancel()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _submit(self, batch: list[Operation]) -> tuple[int, Future[AccessResponse]]:
        answer: Future[AccessResponse] = Future()
        with self._lock:
            if self._failure is not None:
                raise _again(self._failure)
            request_id = next(self._request_ids)
            self._waiting[request_id] = answer
            self._requests.put(AccessRequest(request_id=request_id, operations=batch))
        return request_id, answer

    def _abandon(self, request_id: int, answer: Future[AccessResponse]) -> None:
        with self._lock:
            self._waiting.pop(request_id, None)
        if answer.done() and answer.exception() is None:
            self.send(_releases(answer.result()))

    def _receive(self) -> None:
        failure: CacheError = Unavailable(target=self._wire.target, problem="the access stream ended")
        try:
            for response in self._call:
                self._deliver(response)
        except grpc.RpcError as error:
            failure = from_rpc_error(error, self._wire.target)
        finally:
            self._break(failure)
            self._call.cancel()

    def _deliver(self, response: AccessResponse) -> None:
        with self._lock:
            answer = self._waiting.pop(response.request_id, None)
            if answer is not None:
                answer.set_result(response)
        if answer is None:
            # Its caller gave up waiting: what the late answer holds would be held by nobody.
            self.send(_releases(response))

    def _break(self, failure: CacheError) -> None:
        if type(failure) is CacheError:
            failure = Unavailable(target=self._wire.target, problem=str(failure))
        with self._lock:
            self._failure = self._failure or failure
            waiting, self._waiting = self._waiting, {}
            # Ends the thread in which gRPC draws requests.
            self._requests.put(None)
        for answer in waiting.values():
            answer.set_exception(_again(self._failure))


def _again(failure: CacheError) -> CacheError:
    # One exception raised in several threads would collect all their tracebacks.
    return type(failure)(str(failure), **failure.facts)


def _releases(response: AccessResponse) -> Iterator[Operation]:
    for result in response.results:
        if result.HasField("lease"):
            yield Operation(release_lease=ReleaseLease(lease_id=result.lease.lease_id))
        if result.HasField("reservation"):
            release = ReleaseReservation(reservation_id=result.reservation.reservation_id)
            yield Operation(release_reservation=release)
