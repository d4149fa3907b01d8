"""What one local client holds: its leases and reservations, and the operations on them.

Knows no transport: the stream of ArenaService and the control socket both end in one of these. What
it does not own does not exist for it. Owned by the event loop.
"""

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass

from ctxcache.cache import Cache
from ctxcache.cache.appends import Reservation
from ctxcache.cache.leases import Lease, ReadRequest
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    Draining,
    InvalidArgument,
    LeaseNotFound,
    PermissionDenied,
    ReservationNotFound,
)
from ctxcache.runtime.spans import named_by
from ctxcache.service import convert, validate
from ctxcache.service.admission import Admission
from ctxcache.service.answers import Answer
from ctxcache.service.rpc_times import OK
from ctxcache.service.turns import Slice, Turns
from ctxcache.v1 import arena_pb2
from ctxcache.wire.status import code_of, message_of, wire_facts

OPERATIONS_LIMIT = 1024
RESERVE_LIMIT = 1 << 20
COMMITS_LIMIT = 1 << 16
LOOK_INTERVAL_S = 0.5
"""How often one looks, in a drain, whether what a silent client holds has ended by itself."""
_CLIENTS = itertools.count(1)


class Holder:
    """One client's leases and reservations. `end` it when the client is gone."""

    def __init__(
        self, cache: Cache, tenant: str, turns: Turns, admission: Admission, *, may_write: bool,
        answer_limit_bytes: int,
    ) -> None:  # fmt: skip
        """`turns`: in which holders carry out batches that take long. `admission`: says when no more is to be held.

        `may_write`: it may reserve room, in which others' bytes still lie. Locations of a lease beyond
        `answer_limit_bytes` are refused, and so is what follows in a batch whose results have as many.
        """
        self._may_write = may_write
        self._answer_limit_bytes = answer_limit_bytes
        self._cache = cache
        self._turns = turns
        self._tenant = tenant
        self._admission = admission
        self.client = next(_CLIENTS)
        self._leases: set[int] = set()
        self._reservations: set[int] = set()

    def carry_out_at_once(self, request: arena_pb2.AccessRequest) -> bytes | None:
        """Do a batch of one operation that needs not wait. None, and nothing is done, where it may have to.

        The answer and the errors are those of `carry_out`.
        """
        # A span needs a context of its own, which is a task's.
        if len(request.operations) != 1 or self._cache.state.spans.is_on:
            return None
        named_by(lambda: request.trace_parent)
        response, operation = arena_pb2.AccessResponse(request_id=request.request_id), request.operations[0]
        result = response.results.add()
        kind = operation.WhichOneof("operation")
        try:
            if kind == "acquire_lease":
                is_done = self._acquire_at_once(operation.acquire_lease, result)
            else:
                is_done = self._do_at_once(kind, operation, result)
        except CacheError as error:
            self._refuse(kind, result, error)
        else:
            if not is_done:
                return None
            self._count(kind, OK)
        return response.SerializeToString()

    async def carry_out(self, request: arena_pb2.AccessRequest) -> bytes:
        """Do a batch; an operation's failure is its result. Raises InvalidArgument when it is no batch.

        Returns an encoded AccessResponse.
        """
        # The connection's trace parent belongs to an earlier request.
        named_by(lambda: request.trace_parent)
        spans = self._cache.state.spans
        if not (spans.is_on and request.trace_parent):
            return await self._carry_out(request)
        with spans.local(request.trace_parent, len(request.operations)):
            return await self._carry_out(request)

    async def _carry_out(self, request: arena_pb2.AccessRequest) -> bytes:
        validate.within(len(request.operations), 1, OPERATIONS_LIMIT, "operations")
        response, part = arena_pb2.AccessResponse(request_id=request.request_id), Slice(self._turns)
        if len(request.operations) == 1:
            await self._result(request.operations[0], response, part, before_bytes=0)
            return response.SerializeToString()
        answer = Answer()
        answer.add(response)
        for operation in request.operations:
            if part.is_over:
                await part.rest()
            one = arena_pb2.AccessResponse()
            await self._result(operation, one, part, before_bytes=answer.size_bytes)
            answer.add(one)
        return answer.encoded()

    async def _result(
        self,
        operation: arena_pb2.Operation,
        response: arena_pb2.AccessResponse,
        part: Slice,
        *,
        before_bytes: int,
    ) -> None:
        """Add the result of an operation to a response, of which so many bytes are made already."""
        result = response.results.add()
        kind = operation.WhichOneof("operation")
        try:
            self._check_answer(before_bytes)
            await self._do(kind, operation, result, part)
        except CacheError as error:
            self._refuse(kind, result, error)
        else:
            self._count(kind, OK)

    def _refuse(self, kind: str | None, result: arena_pb2.OperationResult, error: CacheError) -> None:
        result.Clear()
        fill_error(result.error, error)
        self._count(kind, error.reason)

    def _count(self, kind: str | None, end: str) -> None:
        self._cache.state.seen.operations[kind or "none", end] += 1

    def check_empty(self) -> None:
        """Raise Draining unless something is still held."""
        self._prune()
        if not self._leases and not self._reservations:
            raise Draining

    def end(self, *, is_abandoned: bool) -> None:
        """End everything that is still held. `is_abandoned`: nobody can say that the client has stopped writing."""
        for lease_id in self._leases:
            with suppress(LeaseNotFound):
                self._cache.leases.release(lease_id)
        for reservation_id in self._reservations:
            with suppress(ReservationNotFound):
                reservation = self._cache.appends.get(reservation_id)
                self._cache.appends.release(reservation, is_abandoned=is_abandoned)
        self._leases.clear()
        self._reservations.clear()

    async def _do(
        self, kind: str | None, operation: arena_pb2.Operation, result: arena_pb2.OperationResult, part: Slice
    ) -> None:
        if self._do_at_once(kind, operation, result):
            return
        match kind:
            case "acquire_lease":
                await self._acquire(operation.acquire_lease, result.lease, part)
            case "recheck_lease":
                await self._recheck(operation.recheck_lease.lease_id)
                result.rechecked.SetInParent()
            case "reserve":
                await self._reserve(operation.reserve, result.reservation)
            case "commit":
                await self._commit_durably(operation.commit, result)
            case "commit_many":
                await self._commit_many(operation.commit_many, result.committed_many, part)
            case _:
                raise InvalidArgument(field="operation", problem="is required")

    def _do_at_once(
        self, kind: str | None, operation: arena_pb2.Operation, result: arena_pb2.OperationResult
    ) -> bool:
        """Do an operation that never waits. False, and nothing is done, for one that may."""
        match kind:
            case "release_lease":
                self._release_lease(operation.release_lease.lease_id)
                result.released.SetInParent()
            case "release_reservation":
                self._release_reservation(operation.release_reservation.reservation_id)
                result.released.SetInParent()
            case "mark_written":
                mark = operation.mark_written
                reservation = self._own(mark.reservation_id)
                self._cache.appends.mark_written(reservation, mark.token_count, mark.checksums)
                result.marked.SetInParent()
            case "commit" if not validate.is_durable(operation.commit.durability):
                self._fill_committed(result, self._commit_in_memory(operation.commit))
            case _:
                return False
        return True

    def _prune(self) -> None:
        """Forget what ended by itself."""
        self._leases = {i for i in self._leases if self._cache.leases.is_held(i)}
        self._reservations = {i for i in self._reservations if self._cache.appends.is_open(i)}

    async def _acquire(self, request: arena_pb2.AcquireLease, message: arena_pb2.Lease, part: Slice) -> None:
        lease = await self._cache.leases.acquire(self._asked(request))
        self._grant(request, lease, message)
        if not request.is_brief:
            for _ in convert.fill_segments(message, lease):
                if part.is_over:
                    await part.rest()

    def _acquire_at_once(self, request: arena_pb2.AcquireLease, result: arena_pb2.OperationResult) -> bool:
        """Lease rows that are in DRAM, briefly: a full answer may take long to make. False where that is not so."""
        lease = self._cache.leases.acquire_resident(self._asked(request)) if request.is_brief else None
        if lease is None:
            return False
        self._grant(request, lease, result.lease)
        return True

    def _asked(self, request: arena_pb2.AcquireLease) -> ReadRequest:
        self._check_open()
        if request.leave_on_ssd and request.is_brief:
            raise InvalidArgument(field="leave_on_ssd", problem="needs an answer that is not brief")
        has_range = request.HasField("range")
        return ReadRequest(
            self._tenant,
            validate.session_id(request.session, "session"),
            validate.fingerprint(request.model_fingerprint),
            request.if_generation_match if request.HasField("if_generation_match") else None,
            request.range.begin if has_range else 0,
            request.range.end if has_range else None,
            self.client,
            leaves_on_ssd=request.leave_on_ssd,
            is_summed=not request.is_brief,
        )

    def _grant(self, request: arena_pb2.AcquireLease, lease: Lease, message: arena_pb2.Lease) -> None:
        """Own a lease and answer with it. Raises CapacityExceeded, and ends it, where its locations are too many."""
        self._leases.add(lease.lease_id)
        if len(self._leases) > self._cache.leases.lease_count:
            self._prune()
        try:
            self._check_answer(convert.lease_bytes(lease, is_brief=request.is_brief))
        except CapacityExceeded:
            self._release_lease(lease.lease_id)
            raise
        convert.fill_lease(message, lease, self._cache.state.clock, is_brief=request.is_brief)

    def _check_answer(self, size_bytes: int) -> None:
        """Raise CapacityExceeded when an answer has, or would have, more than it may."""
        if size_bytes > self._answer_limit_bytes:
            raise CapacityExceeded(
                f"{size_bytes} B of locations are more than an answer may hold, {self._answer_limit_bytes} B",
                needed_bytes=size_bytes, limit_bytes=self._answer_limit_bytes,
            )  # fmt: skip

    def _check_open(self) -> None:
        if self._admission.is_draining:
            raise Draining

    def _release_lease(self, lease_id: int) -> None:
        if lease_id not in self._leases:
            raise LeaseNotFound(lease_id=lease_id)
        self._leases.discard(lease_id)
        self._cache.leases.release(lease_id)

    async def _recheck(self, lease_id: int) -> None:
        if lease_id not in self._leases:
            raise LeaseNotFound(lease_id=lease_id)
        await self._cache.leases.recheck(lease_id)

    async def _reserve(self, request: arena_pb2.Reserve, message: arena_pb2.Reservation) -> None:
        self._check_open()
        if not self._may_write:
            problem = "may not write in place here: append by stream"
            raise PermissionDenied(subject=f"tenant {self._tenant}", problem=problem)
        reservation = await self._cache.appends.reserve(
            self._tenant,
            validate.session_id(request.session, "session"),
            fingerprint=validate.fingerprint(request.model_fingerprint),
            write_offset=request.write_offset,
            generation=request.if_generation_match if request.HasField("if_generation_match") else None,
            token_count=validate.within(request.token_count, 1, RESERVE_LIMIT, "token_count"),
            client=self.client,
        )
        self._reservations.add(reservation.reservation_id)
        if len(self._reservations) > self._cache.appends.reservation_count:
            self._prune()
        expire_time_ns = convert.wall_time_ns(self._cache.state.clock, reservation.deadline_ns)
        convert.fill_reservation(message, reservation, expire_time_ns, is_brief=request.is_brief)

    def _commit_in_memory(self, request: arena_pb2.CommitReservation) -> Reservation:
        reservation = self._own(request.reservation_id)
        try:
            self._cache.appends.commit_in_memory(
                reservation, request.token_count, keep_open=request.keep_open, checksums=request.checksums
            )
        finally:
            self._forget_if_ended(request.reservation_id)
        return reservation

    async def _commit_durably(
        self, request: arena_pb2.CommitReservation, result: arena_pb2.OperationResult
    ) -> None:
        reservation = self._commit_in_memory(request)
        await self._cache.appends.flush(reservation)
        self._fill_committed(result, reservation)

    def _fill_committed(self, result: arena_pb2.OperationResult, reservation: Reservation) -> None:
        convert.fill_session(result.committed, reservation.session.view(), self._cache.state.clock)

    async def _commit_many(
        self, request: arena_pb2.CommitReservations, message: arena_pb2.CommittedReservations, part: Slice
    ) -> None:
        count = validate.within(len(request.reservation_ids), 1, COMMITS_LIMIT, "reservation_ids")
        if len(request.token_counts) != count:
            raise InvalidArgument(field="token_counts", problem=f"{count} expected")
        if len(request.checksums) != count:
            raise InvalidArgument(field="checksums", problem=f"{count} expected")
        is_durable = validate.is_durable(request.durability)
        if len(set(request.reservation_ids)) != count:
            raise InvalidArgument(field="reservation_ids", problem="names one twice")
        triples = zip(request.reservation_ids, request.token_counts, request.checksums, strict=True)
        outcomes = []
        for reservation_id, token_count, checksum in triples:
            if part.is_over:
                await part.rest()
            outcomes.append(
                self._commit_one(reservation_id, token_count, checksum, keep_open=request.keep_open)
            )
        if is_durable:
            await asyncio.gather(*map(self._flush, outcomes))
        message.generations.extend(one.generation for one in outcomes)
        for index, outcome in enumerate(outcomes):
            if outcome.error is not None:
                if part.is_over:
                    await part.rest()
                fill_error(message.failures.add(index=index).error, outcome.error)

    def _commit_one(
        self, reservation_id: int, token_count: int, checksum: int, *, keep_open: bool
    ) -> "_Outcome":
        try:
            reservation = self._own(reservation_id)
            self._cache.appends.commit_in_memory(
                reservation, token_count, keep_open=keep_open, checksums=(checksum,), is_joint=True
            )
        except CacheError as error:
            return _Outcome(error=error)
        finally:
            self._forget_if_ended(reservation_id)
        return _Outcome(reservation, reservation.session.generation)

    async def _flush(self, outcome: "_Outcome") -> None:
        if outcome.reservation is not None:
            try:
                await self._cache.appends.flush(outcome.reservation)
            except CacheError as error:
                outcome.error = error

    def _own(self, reservation_id: int) -> Reservation:
        if reservation_id not in self._reservations:
            raise ReservationNotFound(reservation_id=reservation_id)
        return self._cache.appends.get(reservation_id)

    def _forget_if_ended(self, reservation_id: int) -> None:
        if not self._cache.appends.is_open(reservation_id):
            self._reservations.discard(reservation_id)

    def _release_reservation(self, reservation_id: int) -> None:
        reservation = self._own(reservation_id)
        self._cache.appends.release(reservation)
        self._reservations.discard(reservation_id)


@dataclass(slots=True)
class _Outcome:
    """What came of one of several commits. `generation`: of its session afterwards, 0 when nothing became visible."""

    reservation: Reservation | None = None
    generation: int = 0
    error: CacheError | None = None


def fill_error(message: arena_pb2.OperationError, error: CacheError) -> None:
    """Put an error into the message that carries one operation's."""
    message.code, message.reason, message.message = code_of(error).value[0], error.reason, message_of(error)
    message.metadata.update(wire_facts(error))
