"""ArenaService: leases and reservations of clients on the same host, bound to one stream each."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from ctxcache.cache import Cache
from ctxcache.cache.reading import Request
from ctxcache.errors import CacheError, Draining, InvalidArgument, LeaseNotFound, ReservationNotFound
from ctxcache.service import convert, validate
from ctxcache.service.edge import Admission, Context
from ctxcache.service.tenant import tenant_of
from ctxcache.status import code_of, message_of, wire_facts
from ctxcache.v1 import arena_pb2, arena_pb2_grpc

OPERATIONS_LIMIT = 1024
RESERVE_LIMIT = 1 << 20


class ArenaService(arena_pb2_grpc.ArenaServiceServicer):
    """See proto/ctxcache/v1/arena.proto."""

    def __init__(self, cache: Cache, arena_id: bytes, admission: Admission) -> None:
        self._cache = cache
        self._admission = admission
        self._arena = arena_pb2.Arena(
            arena_id=arena_id, path=cache.arena.paths[0], size_bytes=cache.arena.capacities_bytes[0]
        )

    async def GetArena(self, request: arena_pb2.GetArenaRequest, context: Context) -> arena_pb2.Arena:  # noqa: ARG002, N802
        """See the proto."""
        return self._arena

    async def Access(  # noqa: N802
        self, request_iterator: AsyncIterator[arena_pb2.AccessRequest], context: Context
    ) -> AsyncIterator[arena_pb2.AccessResponse]:
        """See the proto."""
        holder = _Holder(self._cache, tenant_of(context))
        is_abandoned = True
        try:
            async with aclosing(self._until_drained(request_iterator, holder)) as requests:
                async for request in requests:
                    validate.within(len(request.operations), 1, OPERATIONS_LIMIT, "operations")
                    results = [await holder.carry_out(operation) for operation in request.operations]
                    yield arena_pb2.AccessResponse(request_id=request.request_id, results=results)
            is_abandoned = False
        finally:
            holder.end(is_abandoned=is_abandoned)

    async def _until_drained(
        self, requests: AsyncIterator[arena_pb2.AccessRequest], holder: "_Holder"
    ) -> AsyncGenerator[arena_pb2.AccessRequest]:
        """The requests; when the server drains, raises Draining as soon as the stream holds nothing."""
        drained = asyncio.ensure_future(self._admission.drained())
        coming = asyncio.ensure_future(anext(requests, None))
        try:
            while True:
                await asyncio.wait({drained, coming}, return_when=asyncio.FIRST_COMPLETED)
                if drained.done() and not coming.done():
                    holder.check_empty()
                    await asyncio.wait({coming})
                request = coming.result()
                if request is None:
                    return
                yield request
                coming = asyncio.ensure_future(anext(requests, None))
        finally:
            drained.cancel()
            coming.cancel()


class _Holder:
    """One stream's leases and reservations. What it does not own does not exist for it."""

    def __init__(self, cache: Cache, tenant: str) -> None:
        self._cache = cache
        self._tenant = tenant
        self._leases: set[int] = set()
        self._reservations: set[int] = set()

    async def carry_out(self, operation: arena_pb2.Operation) -> arena_pb2.OperationResult:
        """Do one operation; a failure is its result."""
        try:
            return await self._do(operation)
        except CacheError as error:
            return arena_pb2.OperationResult(error=_operation_error(error))

    async def _do(self, operation: arena_pb2.Operation) -> arena_pb2.OperationResult:
        match operation.WhichOneof("operation"):
            case "acquire_lease":
                return await self._acquire(operation.acquire_lease)
            case "release_lease":
                return self._release_lease(operation.release_lease.lease_id)
            case "reserve":
                return await self._reserve(operation.reserve)
            case "commit":
                return await self._commit(operation.commit)
            case "release_reservation":
                return self._release_reservation(operation.release_reservation.reservation_id)
        raise InvalidArgument(field="operation", problem="is required")

    def check_empty(self) -> None:
        """Raise Draining unless something is still held."""
        self._prune()
        if not self._leases and not self._reservations:
            raise Draining

    def end(self, *, is_abandoned: bool) -> None:
        """End everything the stream still holds."""
        for lease_id in self._leases:
            self._quietly_release(lease_id)
        for reservation_id in self._reservations:
            try:
                reservation = self._cache.writing.get(reservation_id)
            except ReservationNotFound:
                continue
            self._cache.writing.release(reservation, is_abandoned=is_abandoned)

    def _prune(self) -> None:
        """Forget what ended by itself."""
        self._leases = {i for i in self._leases if self._cache.reading.is_held(i)}
        self._reservations = {i for i in self._reservations if self._cache.writing.is_open(i)}

    def _quietly_release(self, lease_id: int) -> None:
        try:
            self._cache.reading.release(lease_id)
        except LeaseNotFound:
            return

    async def _acquire(self, request: arena_pb2.AcquireLease) -> arena_pb2.OperationResult:
        has_range = request.HasField("range")
        lease = await self._cache.reading.acquire(
            Request(
                self._tenant,
                validate.session_id(request.session, "session"),
                validate.fingerprint(request.model_fingerprint),
                request.if_generation_match if request.HasField("if_generation_match") else None,
                request.range.begin if has_range else 0,
                request.range.end if has_range else None,
            )
        )
        self._leases.add(lease.lease_id)
        if len(self._leases) > self._cache.reading.lease_count:
            self._prune()
        message = convert.lease_message(lease, self._wall_time(lease.deadline_ns))
        return arena_pb2.OperationResult(lease=message)

    def _release_lease(self, lease_id: int) -> arena_pb2.OperationResult:
        if lease_id not in self._leases:
            raise LeaseNotFound(lease_id=lease_id)
        self._leases.discard(lease_id)
        self._cache.reading.release(lease_id)
        return arena_pb2.OperationResult(released=arena_pb2.Released())

    async def _reserve(self, request: arena_pb2.Reserve) -> arena_pb2.OperationResult:
        reservation = await self._cache.writing.reserve(
            self._tenant,
            validate.session_id(request.session, "session"),
            fingerprint=validate.fingerprint(request.model_fingerprint),
            write_offset=request.write_offset,
            generation=request.if_generation_match if request.HasField("if_generation_match") else None,
            token_count=validate.within(request.token_count, 1, RESERVE_LIMIT, "token_count"),
        )
        self._reservations.add(reservation.reservation_id)
        if len(self._reservations) > self._cache.writing.reservation_count:
            self._prune()
        message = convert.reservation_message(reservation, self._wall_time(reservation.deadline_ns))
        return arena_pb2.OperationResult(reservation=message)

    async def _commit(self, request: arena_pb2.CommitReservation) -> arena_pb2.OperationResult:
        if request.reservation_id not in self._reservations:
            raise ReservationNotFound(reservation_id=request.reservation_id)
        try:
            view = await self._cache.writing.commit(
                self._cache.writing.get(request.reservation_id),
                request.token_count,
                is_durable=validate.is_durable(request.durability),
                keep_open=request.keep_open,
            )
        finally:
            if not self._cache.writing.is_open(request.reservation_id):
                self._reservations.discard(request.reservation_id)
        return arena_pb2.OperationResult(committed=convert.session_message(view))

    def _release_reservation(self, reservation_id: int) -> arena_pb2.OperationResult:
        if reservation_id not in self._reservations:
            raise ReservationNotFound(reservation_id=reservation_id)
        self._reservations.discard(reservation_id)
        self._cache.writing.release(self._cache.writing.get(reservation_id))
        return arena_pb2.OperationResult(released=arena_pb2.Released())

    def _wall_time(self, deadline_ns: int) -> int:
        clock = self._cache.state.clock
        return clock.now_ns() + deadline_ns - clock.monotonic_ns()


def _operation_error(error: CacheError) -> arena_pb2.OperationError:
    return arena_pb2.OperationError(
        code=code_of(error).value[0],
        reason=error.reason,
        message=message_of(error),
        metadata=wire_facts(error),
    )
