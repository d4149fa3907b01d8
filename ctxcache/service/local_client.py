"""Local clients: what a process on this host holds of the arena, and the operations on it.

A local client has two doors, and `LocalClient` is behind both. For a client, another client's holds do not
exist.

    ArenaService.Access    a gRPC stream; here below
    control socket         frames over a Unix socket, a tenth of the cost; `control_socket.py`

The stream stays because the socket does not serve every client: a caller that a certificate identifies has no
certificate on a Unix socket, and languages without SCM_RIGHTS cannot take the socket's descriptors.

    a lease          acquired ──► held ──release, expiry, end of the client──► over
    a reservation    reserved ──► open ──commit without keep_open, release, expiry──► over
                                    └── end of the client ──► abandoned: kept from others for a minute

Owned by the event loop.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from ctxcache.cache import Cache
from ctxcache.cache.leases import Lease, ReadRequest
from ctxcache.cache.reservations import Reservation
from ctxcache.core.ledger.work import Work, at_work
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    Draining,
    InvalidArgument,
    LeaseNotFound,
    PermissionDenied,
    ReservationNotFound,
)
from ctxcache.runtime.spans import TRACE_PARENT
from ctxcache.service import blocks, convert, prefixes, validate
from ctxcache.service.admission import OK, Admission
from ctxcache.service.callers import Context, current
from ctxcache.service.convert import EncodedAnswer
from ctxcache.service.fairness import TENANT, LoopSlice, Turns
from ctxcache.service.whereabouts import ALONE, Whereabouts
from ctxcache.v1 import arena_pb2, arena_pb2_grpc, block_pb2, session_pb2

M = TypeVar("M", bound=Message)
T = TypeVar("T")
# Two ways to answer a request, with the same answers and errors:
#
#     at once        one operation that needs no wait: no task, no lock     `answer_at_once`
#     carried out    a batch, or an operation that may wait, in a task      `carry_out`
#
# The first changes nothing where it cannot finish.
OPERATIONS_LIMIT = 1024
RESERVE_LIMIT = 1 << 20
COMMITS_LIMIT = 1 << 16
LOOK_INTERVAL_S = 0.5
"""How often a drain looks whether a silent client's holds have ended by themselves."""
PIECES_PER_PAUSE = 16
"""Pieces of a lease in one part of an answer, after which others may have their turn."""
SUMS_AT_ONCE = 1024
"""Checksums in the answer to a lease that is made at once: a quarter of a millisecond. Others have their turn
while a longer answer is made.
"""
LEAST_PRUNED = 64
"""With fewer leases and reservations, ended ones are not looked for."""
_AWAITED = frozenset((session_pb2.DURABILITY_DISK, session_pb2.DURABILITY_SHARED))
_AT_ONCE = frozenset(
    {
        "acquire_lease",
        "release_lease",
        "reserve",
        "release_reservation",
        "lookup_blocks",
        "release_blocks",
        "mark_written",
        "commit",
    }
)
"""Operations that may be done without waiting."""
_BY_KEYS = frozenset(
    {
        "match_prefix",
        "adopt_prefix",
        "lookup_blocks",
        "reserve_blocks",
        "commit_blocks",
        "lease_blocks",
        "delete_blocks",
    }
)
"""Operations on sessions and blocks that are found by keys."""
_OPTIONAL = frozenset({"range", "if_generation_match"})
"""Optional fields of AcquireLease."""
_CLIENTS = itertools.count(1)


class LocalClient:
    """One client's leases and reservations, and the operations on them. `end` it when the client is gone."""

    def __init__(
        self,
        cache: Cache,
        tenant: str,
        turns: Turns,
        admission: Admission,
        *,
        may_write: bool,
        answer_limit_bytes: int,
        batch_limit_bytes: int,
        whereabouts: Whereabouts,
    ) -> None:
        """`turns` bound batches that take long. `admission` says when nothing more may be held.

        `may_write`: the client may reserve room, in which others' bytes still lie. Locations of a lease
        beyond `answer_limit_bytes` are refused. So are the operations of a batch behind results of more than
        `batch_limit_bytes`.
        """
        self._may_write = may_write
        self._answer_limit_bytes, self._batch_limit_bytes = answer_limit_bytes, batch_limit_bytes
        self._cache = cache
        self._whereabouts = whereabouts
        self._turns = turns
        self._tenant = tenant
        self._admission = admission
        # The number is unique in the process: budgets, the journal and operators name clients by it.
        self.client = next(_CLIENTS)
        self._leases: set[int] = set()
        self._reservations: set[int] = set()
        self._puts: set[int] = set()
        """Reservations of blocks, which may have other writers besides."""
        self._tokens: set[bytes] = set()
        """Tokens of block leases that end with this client."""
        self._prune_count = LEAST_PRUNED

    def answer_at_once(self, message: bytes) -> bytes | arena_pb2.AccessRequest:
        """Answer an encoded request of one operation that needs not wait.

        Returns the request, with nothing done, where it may have to wait. `carry_out` then has the same
        answers and errors. Raises InvalidArgument.
        """
        request = parsed(arena_pb2.AccessRequest.FromString, message)
        # A span needs a context of its own, which only a task has.
        if len(request.operations) != 1 or self._cache.state.spans.is_on:
            return request
        operation = request.operations[0]
        kind = operation.WhichOneof("operation")
        if kind not in _AT_ONCE:
            return request
        # The connection's trace parent belongs to an earlier request.
        TRACE_PARENT.set(request.trace_parent)
        response = arena_pb2.AccessResponse(request_id=request.request_id)
        result, end = response.results.add(), OK
        try:
            with Work():
                is_done = self._do_at_once(kind, operation, result)
        except CacheError as error:
            is_done, end = True, _refuse(result, error)
        # Nothing was done: `carry_out` begins from the start.
        if not is_done:
            return request
        self._cache.state.seen.operations[kind, end] += 1
        return response.SerializeToString()

    def _own_token(self, token: bytes) -> None:
        """Release this token's lease when the client ends. Ignores an empty token."""
        if token:
            self._tokens.add(token)
            self._prune_if_many()

    async def carry_out(self, request: arena_pb2.AccessRequest) -> bytes:
        """Do a batch; an operation's failure is its result. Raises InvalidArgument when it is no batch.

        Returns an encoded AccessResponse.
        """
        TENANT.set(self._tenant)
        TRACE_PARENT.set(request.trace_parent)
        spans = self._cache.state.spans
        if spans.is_on and request.trace_parent:
            with spans.local(request.trace_parent, len(request.operations)):
                return await at_work(self._carry_out(request))
        return await at_work(self._carry_out(request))

    async def _carry_out(self, request: arena_pb2.AccessRequest) -> bytes:
        response = arena_pb2.AccessResponse(request_id=request.request_id)
        # The answer to one operation is not encoded twice.
        if len(request.operations) == 1:
            await self._do(request.operations[0], response.results.add())
            return response.SerializeToString()
        validate.within(len(request.operations), 1, OPERATIONS_LIMIT, "operations")
        # A batch pauses between operations, and its answer ends at a number of bytes: a client asks again for
        # the rest.
        part, answer = LoopSlice(self._turns), EncodedAnswer()
        answer.add(response)
        for operation in request.operations:
            if part.is_over:
                await part.rest()
            one = arena_pb2.AccessResponse()
            await self._do(operation, one.results.add(), before_bytes=answer.size_bytes)
            answer.add(one)
        return answer.encoded()

    async def _do(
        self,
        operation: arena_pb2.Operation,
        result: arena_pb2.OperationResult,
        *,
        before_bytes: int = 0,
    ) -> None:
        """Do an operation, and write its result. `before_bytes` of the answer are made already."""
        kind, end = operation.WhichOneof("operation"), OK
        try:
            # Operations behind too large an answer are refused one by one, each with its result.
            if before_bytes > self._batch_limit_bytes:
                raise convert.too_large(before_bytes, self._batch_limit_bytes)
            match kind:
                case "acquire_lease":
                    await self._acquire(operation.acquire_lease, result.lease)
                case "recheck_lease":
                    await self._recheck(operation.recheck_lease.lease_id)
                    result.rechecked.SetInParent()
                case "reserve":
                    await self._come(operation.reserve.session)
                    reserved = await self._reserved(operation.reserve, self._cache.appends.reserve)
                    self._fill_reserved(operation.reserve, reserved, result.reservation)
                case "commit" if operation.commit.durability in _AWAITED:
                    _, is_shared = validate.durability(operation.commit.durability, self._whereabouts)
                    reservation = self._commit_in_memory(operation.commit)
                    await self._make_durable(reservation, is_shared=is_shared)
                    self._fill_committed(result, reservation)
                case "commit_many":
                    await self._commit_many(operation.commit_many, result.committed_many)
                case _ if kind in _BY_KEYS:
                    await self._do_by_keys(kind, operation, result)
                case _:
                    if not self._do_at_once(kind, operation, result):
                        raise InvalidArgument(field="operation", problem="is required")
        except CacheError as error:
            end = _refuse(result, error)
        self._cache.state.seen.operations[kind or "none", end] += 1

    async def _do_prefix(self, operation: arena_pb2.Operation, result: arena_pb2.OperationResult) -> None:
        # Nothing begins in a drain, and what is held goes on.
        if self._admission.is_draining:
            raise Draining
        cache, tenant, pace = self._cache, self._tenant, LoopSlice(self._turns)
        if operation.HasField("match_prefix"):
            matched = await prefixes.match(cache, operation.match_prefix, tenant, pace, self._whereabouts)
            result.matched.CopyFrom(matched)
        else:
            result.adopted.CopyFrom(
                await prefixes.adopt(cache, operation.adopt_prefix, tenant, pace, self._whereabouts)
            )

    async def _do_by_keys(
        self, kind: str, operation: arena_pb2.Operation, result: arena_pb2.OperationResult
    ) -> None:
        if kind.endswith("_prefix"):
            await self._do_prefix(operation, result)
            return
        cache, tenant, pace = self._cache, self._tenant, LoopSlice(self._turns)
        match kind:
            case "commit_blocks":
                commit = operation.commit_blocks
                try:
                    committed = await blocks.commit(cache, commit, self.client, pace)
                finally:
                    # Puts that ended are not owned any more, whatever the operation's result.
                    self._puts = {i for i in self._puts if cache.blocks.is_open(i)}
                result.committed_blocks.CopyFrom(committed)
                return
            case "delete_blocks":
                result.deleted_blocks.CopyFrom(await blocks.delete(cache, operation.delete_blocks, tenant))
                return
            case "lookup_blocks":
                await self._look_up(operation.lookup_blocks, result)
                return
        if self._admission.is_draining:
            raise Draining
        match kind:
            case "lease_blocks":
                asked = operation.lease_blocks
                leased = await blocks.lease(cache, asked, tenant, self.client, pace)
                # A token that other connections may use does not end with this one.
                if any(leased.leases) and not asked.token and not asked.outlives_connection:
                    self._own_token(leased.token)
                result.leased_blocks.CopyFrom(blocks.lease_message(cache, leased))
            case "reserve_blocks":
                # Blocks are put through shared memory: a client that may not write has no use of room.
                if not self._may_write:
                    raise self._read_only()
                room = await blocks.reserve(cache, operation.reserve_blocks, tenant, self.client, pace)
                self._puts |= {one.reservation_id for one in room.rooms if one.reservation_id}
                result.reserved_blocks.CopyFrom(room)

    async def _look_up(
        self, request: block_pb2.LookupBlocksRequest, result: arena_pb2.OperationResult
    ) -> None:
        # Look-ups go on in a drain, and no hold begins.
        if self._admission.is_draining and request.HasField("hold"):
            raise Draining
        pace = LoopSlice(self._turns)
        found = await blocks.look_up(self._cache, request, self._tenant, self.client, pace)
        self._own_token(found.token)
        result.found_blocks.CopyFrom(found)

    def _look_up_at_once(
        self, request: block_pb2.LookupBlocksRequest, result: arena_pb2.OperationResult
    ) -> bool:
        """See `_look_up`. False, and nothing is done, for more keys than take a moment."""
        if self._admission.is_draining and request.HasField("hold"):
            raise Draining
        answer = blocks.look_up_at_once(self._cache, request, self._tenant, self.client)
        if answer is None:
            return False
        self._own_token(answer.token)
        result.found_blocks.CopyFrom(answer)
        return True

    def check_empty(self) -> None:
        """Raise Draining unless the client still holds something."""
        self._prune()
        if not (self._leases or self._reservations or self._puts or self._tokens):
            raise Draining

    def end(self, *, is_abandoned: bool) -> None:
        """End everything that the client still holds.

        `is_abandoned`: nobody can say that the client has stopped writing.
        """
        with Work():
            self._end(is_abandoned=is_abandoned)

    def _end(self, *, is_abandoned: bool) -> None:
        # A lease that ended by itself is no error here.
        for lease_id in self._leases:
            with suppress(LeaseNotFound):
                self._cache.leases.release(lease_id)
        for reservation_id in self._reservations:
            with suppress(ReservationNotFound):
                reservation = self._cache.appends.get(reservation_id)
                # The process of an abandoned client may be alive and still write.
                self._cache.appends.release(reservation, is_abandoned=is_abandoned)
        for reservation_id in self._puts:
            self._cache.blocks.withdraw(reservation_id, self.client, is_abandoned=is_abandoned)
        for token in self._tokens:
            with suppress(LeaseNotFound):
                self._cache.tokens.release(self._tenant, token)
        self._leases.clear()
        self._reservations.clear()
        self._puts.clear()
        self._tokens.clear()

    def _do_at_once(
        self, kind: str | None, operation: arena_pb2.Operation, result: arena_pb2.OperationResult
    ) -> bool:
        """Do an operation that does not wait. False, and nothing is done, for one that may have to."""
        match kind:
            case "acquire_lease" if self._is_here(operation.acquire_lease.session):
                return self._acquire_at_once(operation.acquire_lease, result.lease)
            case "lookup_blocks":
                return self._look_up_at_once(operation.lookup_blocks, result)
            case "release_lease":
                self._release_lease(operation.release_lease.lease_id)
                result.released.SetInParent()
            case "release_blocks":
                blocks.release(self._cache, operation.release_blocks, self._tenant)
                self._tokens.discard(operation.release_blocks.token)
                result.released.SetInParent()
            case "release_reservation":
                self._release_reservation(operation.release_reservation.reservation_id)
                result.released.SetInParent()
            case "reserve" if self._is_here(operation.reserve.session):
                reserved = self._reserved(operation.reserve, self._cache.appends.reserve_at_once)
                if reserved is None:
                    return False
                self._fill_reserved(operation.reserve, reserved, result.reservation)
            case "mark_written":
                mark = operation.mark_written
                reservation = self._own(mark.reservation_id)
                self._cache.appends.mark_written(reservation, mark.token_count, mark.checksums)
                result.marked.SetInParent()
            case "commit" if operation.commit.durability not in _AWAITED:
                validate.is_durable(operation.commit.durability)
                self._fill_committed(result, self._commit_in_memory(operation.commit))
            case _:
                return False
        return True

    def _is_here(self, name: str) -> bool:
        """Whether nothing has to be waited for until the session of this name is here or known not to be."""
        return self._whereabouts.is_here(self._tenant, name.removeprefix("sessions/"))

    async def _come(self, name: str) -> None:
        """See Whereabouts. Raises InvalidArgument, SessionMoved."""
        await self._whereabouts.come(self._tenant, validate.session_id(name, "session"))

    def _prune_if_many(self) -> None:
        """Forget holds that have ended, once twice as many are owned as after the last time."""
        # The cost is amortised: each look costs as much as was owned, and comes after as much has been added.
        if len(self._leases) + len(self._reservations) + len(self._tokens) >= self._prune_count:
            self._prune()
            held_count = len(self._leases) + len(self._reservations) + len(self._tokens)
            self._prune_count = max(2 * held_count, LEAST_PRUNED)

    def _prune(self) -> None:
        self._leases = {i for i in self._leases if self._cache.leases.is_held(i)}
        self._reservations = {i for i in self._reservations if self._cache.appends.is_open(i)}
        self._puts = {i for i in self._puts if self._cache.blocks.is_open(i)}
        self._tokens = {token for token in self._tokens if self._cache.tokens.is_held(token)}

    async def _acquire(self, request: arena_pb2.AcquireLease, message: arena_pb2.Lease) -> None:
        if request.token:
            lease = await self._acquire_by_token(request)
        else:
            asked = self._asked(request)
            await self._come(request.session)
            lease = await self._cache.leases.acquire(asked)
        self._grant(request, lease, message)
        if request.is_brief:
            return
        part: LoopSlice | None = None
        for begin in range(0, len(lease.pieces), PIECES_PER_PAUSE):
            if begin:
                # Long answers are made in slices.
                part = part or LoopSlice(self._turns)
                if part.is_over:
                    await part.rest()
            convert.fill_segments(message, lease, begin, begin + PIECES_PER_PAUSE)

    def _acquire_at_once(self, request: arena_pb2.AcquireLease, message: arena_pb2.Lease) -> bool:
        """Lease rows that are in DRAM. False where they are not, and where the answer takes long to make."""
        # These requests may have to wait, or take long.
        if request.token or request.leave_on_ssd:
            return False
        # Thousands of sums in one turn would hold up everybody: such an answer is made in a task.
        lease = self._cache.leases.acquire_at_once(self._asked(request), sum_limit=SUMS_AT_ONCE)
        if lease is None:
            return False
        self._grant(request, lease, message)
        if not request.is_brief:
            convert.fill_segments(message, lease, 0, len(lease.pieces))
        return True

    async def _acquire_by_token(self, request: arena_pb2.AcquireLease) -> Lease:
        if self._admission.is_draining:
            raise Draining
        for name in ("session", "range", "if_generation_match", "leave_on_ssd"):
            is_there = request.HasField(name) if name in _OPTIONAL else bool(getattr(request, name))  # type: ignore[arg-type]  # their names
            if is_there:
                raise InvalidArgument(field=name, problem="comes with a token, which says it")
        token, leases = blocks.lease_token(request.token), self._cache.leases
        fingerprint = validate.fingerprint(request.model_fingerprint)
        held = partial(self._cache.tokens.prefix, self._tenant, token, fingerprint)
        return await leases.again(held, self._tenant, self.client)

    def _asked(self, request: arena_pb2.AcquireLease) -> ReadRequest:
        if self._admission.is_draining:
            raise Draining
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
            # A brief answer has no sums, so that none has to be made.
            is_summed=not request.is_brief,
            streams_else=request.streams_else,
        )

    def _grant(self, request: arena_pb2.AcquireLease, lease: Lease, message: arena_pb2.Lease) -> None:
        """Own a lease and fill in its answer.

        Raises CapacityExceeded, and ends the lease, where its locations are too many.
        """
        self._leases.add(lease.lease_id)
        self._prune_if_many()
        try:
            convert.fill_lease(
                message,
                lease,
                self._cache.state.clock,
                is_brief=request.is_brief,
                limit_bytes=self._answer_limit_bytes,
            )
        except CapacityExceeded:
            # The client cannot be told where the rows are, so that holding them is of no use.
            self._release_lease(lease.lease_id)
            raise

    def _release_lease(self, lease_id: int) -> None:
        if lease_id not in self._leases:
            raise LeaseNotFound(lease_id=lease_id)
        self._leases.discard(lease_id)
        self._cache.leases.release(lease_id)

    async def _recheck(self, lease_id: int) -> None:
        if lease_id not in self._leases:
            raise LeaseNotFound(lease_id=lease_id)
        await self._cache.leases.recheck(lease_id)

    def _reserved(self, request: arena_pb2.Reserve, reserve: Callable[..., T]) -> T:
        """Room for a writer, by one of the two ways that `Appends` has to reserve it."""
        if self._admission.is_draining:
            raise Draining
        if not self._may_write:
            raise self._read_only()
        return reserve(
            self._tenant,
            validate.session_id(request.session, "session"),
            fingerprint=validate.fingerprint(request.model_fingerprint),
            write_offset=request.write_offset,
            generation=request.if_generation_match if request.HasField("if_generation_match") else None,
            token_count=validate.within(request.token_count, 1, RESERVE_LIMIT, "token_count"),
            coming_count=request.token_count if request.is_all_coming else 0,
            contents=validate.contents(request.contents, request.write_offset, "contents")
            if request.contents
            else (),
            client=self.client,
        )

    def _fill_reserved(
        self, request: arena_pb2.Reserve, reservation: Reservation, message: arena_pb2.Reservation
    ) -> None:
        """Own a reservation and fill in its answer."""
        self._reservations.add(reservation.reservation_id)
        self._prune_if_many()
        convert.fill_reservation(message, reservation, self._cache.state.clock, is_brief=request.is_brief)

    def _read_only(self) -> PermissionDenied:
        problem = "may not write in place here: append by stream"
        return PermissionDenied(subject=f"tenant {self._tenant}", problem=problem)

    def _commit_in_memory(self, request: arena_pb2.CommitReservation) -> Reservation:
        reservation = self._own(request.reservation_id)
        try:
            self._cache.appends.commit_in_memory(
                reservation, request.token_count, keep_open=request.keep_open, checksums=request.checksums
            )
        finally:
            # A refused commit may have ended the reservation, for instance if its session has expired.
            self._forget_if_ended(request.reservation_id)
        return reservation

    def _fill_committed(self, result: arena_pb2.OperationResult, reservation: Reservation) -> None:
        convert.fill_session(result.committed, reservation.session.view(), self._cache.state.clock)

    async def _commit_many(
        self, request: arena_pb2.CommitReservations, message: arena_pb2.CommittedReservations
    ) -> None:
        part = LoopSlice(self._turns)
        # The batch is validated as a whole before the first commit: a refused batch has committed nothing.
        is_durable, is_shared = self._durability_of(request)
        generations, committed = list[int](), list[tuple[int, Reservation]]()
        failures: dict[int, CacheError] = {}
        keep_open, commit_in_memory = request.keep_open, self._cache.appends.commit_in_memory
        triples = zip(request.reservation_ids, request.token_counts, request.checksums, strict=True)
        # A failed commit does not keep the others from being committed, which are of other sessions.
        for index, (reservation_id, token_count, checksum) in enumerate(triples):
            if part.is_over:
                await part.rest()
            try:
                reservation = self._own(reservation_id)
                commit_in_memory(
                    reservation, token_count, keep_open=keep_open, checksums=(checksum,), is_joint=True
                )
            except CacheError as error:
                failures[index] = error
                generations.append(0)
            else:
                committed.append((index, reservation))
                generations.append(reservation.session.generation)
            if not keep_open or index in failures:
                self._forget_if_ended(reservation_id)
        # All flushes run together, since they share syncs.
        if is_durable:
            await asyncio.gather(*(self._flush(failures, *one, is_shared=is_shared) for one in committed))
        message.generations.extend(generations)
        for index in sorted(failures):
            if part.is_over:
                await part.rest()
            convert.fill_error(message.failures.add(index=index).error, failures[index])

    async def _flush(
        self, failures: dict[int, CacheError], index: int, reservation: Reservation, *, is_shared: bool
    ) -> None:
        """Make one of several commits durable, or note why it is not."""
        try:
            await self._make_durable(reservation, is_shared=is_shared)
        except CacheError as error:
            failures[index] = error

    async def _make_durable(self, reservation: Reservation, *, is_shared: bool) -> None:
        await self._cache.appends.flush(reservation)
        if is_shared:
            session_id = reservation.session.name.removeprefix("sessions/")
            await self._whereabouts.share(self._tenant, session_id)

    def _durability_of(self, request: arena_pb2.CommitReservations) -> tuple[bool, bool]:
        """What several commits wait for. Raises InvalidArgument where they do not fit together."""
        count = validate.within(len(request.reservation_ids), 1, COMMITS_LIMIT, "reservation_ids")
        for name, found in (("token_counts", request.token_counts), ("checksums", request.checksums)):
            if len(found) != count:
                raise InvalidArgument(field=name, problem=f"{count} expected")
        if len(set(request.reservation_ids)) != count:
            raise InvalidArgument(field="reservation_ids", problem="names one twice")
        return validate.durability(request.durability, self._whereabouts)

    def _own(self, reservation_id: int) -> Reservation:
        # The reservation is this client's, and open.
        if reservation_id not in self._reservations:
            raise ReservationNotFound(reservation_id=reservation_id)
        return self._cache.appends.get(reservation_id)

    def _forget_if_ended(self, reservation_id: int) -> None:
        if not self._cache.appends.is_open(reservation_id):
            self._reservations.discard(reservation_id)

    def _release_reservation(self, reservation_id: int) -> None:
        # A block's reservation may have other writers: only this writer's part is let go.
        if reservation_id in self._puts:
            self._cache.blocks.withdraw(reservation_id, self.client, is_abandoned=False)
            self._puts.discard(reservation_id)
            return
        reservation = self._own(reservation_id)
        self._cache.appends.release(reservation)
        self._reservations.discard(reservation_id)


def parsed(parse: Callable[[bytes], M], message: bytes) -> M:
    """A message from its bytes. Raises InvalidArgument."""
    try:
        return parse(message)
    except DecodeError as error:
        raise InvalidArgument(field="request", problem="is not a message of this rpc") from error


def _refuse(result: arena_pb2.OperationResult, error: CacheError) -> str:
    """Make an error the result of an operation; returns its reason."""
    result.Clear()
    convert.fill_error(result.error, error)
    return error.reason


# -- the door over gRPC ------------------------------------------------------------------------------


class ArenaService(arena_pb2_grpc.ArenaServiceServicer):
    """See proto/ctxcache/v1/arena.proto."""

    def __init__(
        self,
        cache: Cache,
        arena: arena_pb2.Arena,
        admission: Admission,
        turns: Turns,
        *,
        is_sealed: bool,
        whereabouts: Whereabouts = ALONE,
    ) -> None:
        """`turns` bound local clients' work that takes long.

        `is_sealed`: no client writes to the arena.
        """
        self._is_sealed, self._whereabouts = is_sealed, whereabouts
        self._cache = cache
        self._turns = turns
        self._admission = admission
        self._arena = arena

    async def GetArena(self, request: arena_pb2.GetArenaRequest, context: Context) -> arena_pb2.Arena:
        """See the proto."""
        if current().grant.has_shared_memory:
            found = arena_pb2.Arena(may_write=self._may_write())
            found.MergeFrom(self._arena)
            return found
        return arena_pb2.Arena(arena_id=self._arena.arena_id, size_bytes=self._arena.size_bytes)

    async def Access(  # type: ignore[override]  # answers are encoded already
        self, request_iterator: AsyncIterator[arena_pb2.AccessRequest], context: Context
    ) -> AsyncIterator[bytes]:
        """See the proto."""
        # A reserved slot holds others' bytes, which would be committed unseen.
        current().check_shared_memory()
        client = LocalClient(
            self._cache,
            current().tenant,
            self._turns,
            self._admission,
            may_write=self._may_write(),
            answer_limit_bytes=convert.ANSWER_LIMIT_BYTES,
            batch_limit_bytes=min(convert.ANSWER_LIMIT_BYTES, convert.PAGE_LIMIT_BYTES),
            whereabouts=self._whereabouts,
        )
        try:
            async with aclosing(self._until_drained(request_iterator, client)) as requests:
                async for request in requests:
                    yield await client.carry_out(request)
        finally:
            # A killed client looks like one that has sent all: its requests end first.
            client.end(is_abandoned=True)

    def _may_write(self) -> bool:
        return current().grant.writes_in_place and not self._is_sealed

    # Two futures are looked at: the drain, and the next request. A stream that holds something goes on in a
    # drain.
    async def _until_drained(
        self, requests: AsyncIterator[arena_pb2.AccessRequest], client: LocalClient
    ) -> AsyncGenerator[arena_pb2.AccessRequest]:
        """The requests; when the server drains, raises Draining as soon as the stream holds nothing."""
        drained = asyncio.ensure_future(self._admission.drained())
        coming = asyncio.ensure_future(anext(requests, None))
        try:
            while True:
                await asyncio.wait({drained, coming}, return_when=asyncio.FIRST_COMPLETED)
                # The leases of a silent client may end by themselves.
                while self._admission.is_draining and not coming.done():
                    client.check_empty()
                    await asyncio.wait({coming}, timeout=LOOK_INTERVAL_S)
                if not coming.done():
                    # The server takes work again.
                    drained = asyncio.ensure_future(self._admission.drained())
                    continue
                request = coming.result()
                if request is None:
                    return
                yield request
                coming = asyncio.ensure_future(anext(requests, None))
        finally:
            drained.cancel()
            coming.cancel()
