"""The way of operations to the server and of results back, whichever it is.

Knows nothing of what the operations are for. Worst case: the way breaks, every waiter gets its error
at once, and all that was held is gone.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from ctxcache.errors import CacheError, Unavailable
from ctxcache.v1.arena_pb2 import (
    AccessResponse,
    Operation,
    OperationError,
    OperationResult,
    ReleaseLease,
    ReleaseReservation,
)
from ctxcache.wire.status import from_parts

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
    """What gives back all that an answer holds; its caller is not there any more."""
    for result in response.results:
        if result.HasField("lease"):
            yield Operation(release_lease=ReleaseLease(lease_id=result.lease.lease_id))
        if result.HasField("reservation"):
            release = ReleaseReservation(reservation_id=result.reservation.reservation_id)
            yield Operation(release_reservation=release)
