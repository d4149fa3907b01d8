"""Rpcs of AdminService that look at and change what runs: leases, paths, shares, the drain."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ctxcache.cache import Cache
from ctxcache.cache.leases import NEVER_NS, Lease
from ctxcache.core.placement.shares import Share
from ctxcache.errors import CacheError, InvalidArgument
from ctxcache.service import convert, validate
from ctxcache.service.activity import activity
from ctxcache.service.doors import Doors
from ctxcache.service.rpc import Context
from ctxcache.service.rpc_times import RpcTimes
from ctxcache.service.tenant import tenant_of
from ctxcache.storage.injection.faults import Faults
from ctxcache.v1 import admin_pb2_grpc, operations_pb2

REPORT_INTERVAL_S = 0.2
ACTIVITY_LIMIT, ACTIVITY_DEFAULT = 100, 10


@dataclass(frozen=True, slots=True)
class Controls:
    """What of the server is not the cache's. `cut_off` a local client; `hold_path` an SSD path, by its number.

    `faults` None: it was not started for faults.
    """

    doors: Doors
    times: RpcTimes
    cut_off: Callable[[int], Awaitable[bool]]
    hold_path: Callable[[int, bool], None]
    faults: Faults | None = None


class OperationRpcs(admin_pb2_grpc.AdminServiceServicer):
    """See proto/ctxcache/v1/admin.proto."""

    def __init__(self, cache: Cache, controls: Controls) -> None:
        self._cache, self._controls = cache, controls

    async def GetActivity(  # noqa: N802
        self,
        request: operations_pb2.GetActivityRequest,
        context: Context,  # noqa: ARG002
    ) -> operations_pb2.Activity:
        """See the proto."""
        limit = validate.within(request.limit, 0, 2**31 - 1, "limit") or ACTIVITY_DEFAULT
        controls = self._controls
        found = activity(self._cache, controls.doors.admissions, controls.times, min(limit, ACTIVITY_LIMIT))
        if controls.faults and (active := controls.faults.active()):
            found.problems.append(f"devices fail on purpose: {len(active)} faults are injected")
        return found

    async def ListLeases(  # noqa: N802
        self,
        request: operations_pb2.ListLeasesRequest,
        context: Context,  # noqa: ARG002
    ) -> operations_pb2.ListLeasesResponse:
        """See the proto."""
        limit, after = validate.page_size(request.page_size), _number(validate.page_token(request.page_token))
        found = [
            lease
            for lease in self._cache.leases.leases()
            if lease.lease_id > after and request.tenant in ("", lease.view.tenant)
        ][: limit + 1]
        return operations_pb2.ListLeasesResponse(
            leases=[self._lease(lease) for lease in found[:limit]],
            next_page_token=validate.next_page_token([str(lease.lease_id) for lease in found], limit),
        )

    async def RevokeLease(  # noqa: N802
        self,
        request: operations_pb2.RevokeLeaseRequest,
        context: Context,  # noqa: ARG002
    ) -> operations_pb2.RevokeLeaseResponse:
        """See the proto."""
        reading = self._cache.leases
        lease = reading.lease(request.lease_id)
        if lease.client.number is None:
            if lease.deadline_ns == NEVER_NS:
                raise InvalidArgument(field="lease_id", problem="its rows are on their way; try again")
            reading.release(lease.lease_id)
            return operations_pb2.RevokeLeaseResponse(ended_lease_count=1)
        ended = [one.lease_id for one in reading.leases() if one.client == lease.client]
        if not await self._controls.cut_off(lease.client.number):
            problem = "its holder is connected by gRPC and could not know in time; it ends when it expires"
            raise InvalidArgument(field="lease_id", problem=problem)
        return operations_pb2.RevokeLeaseResponse(
            ended_lease_count=sum(not reading.is_held(lease_id) for lease_id in ended)
        )

    async def EvictSession(  # noqa: N802
        self, request: operations_pb2.EvictSessionRequest, context: Context
    ) -> operations_pb2.EvictSessionResponse:
        """See the proto."""
        await self._cache.sessions.evict(tenant_of(context), validate.session_id(request.name))
        return operations_pb2.EvictSessionResponse()

    async def DeleteModel(  # noqa: N802
        self, request: operations_pb2.DeleteModelRequest, context: Context
    ) -> operations_pb2.DeleteModelResponse:
        """See the proto."""
        await self._cache.models.delete(tenant_of(context), validate.model_id(request.name))
        return operations_pb2.DeleteModelResponse()

    async def Drain(  # noqa: N802
        self,
        request: operations_pb2.DrainRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[operations_pb2.DrainStatus]:
        """See the proto."""
        self._controls.doors.close()
        problem, flush = "", asyncio.ensure_future(self._cache.flush_due())
        try:
            while True:
                status = self._drained(problem)
                yield status
                # The end has its own patience, and flushes by itself.
                if status.is_done or self._controls.doors.is_over:
                    return
                await asyncio.wait({flush}, timeout=REPORT_INTERVAL_S)
                if flush.done():
                    problem = await _problem_of(flush)
                    # What goes on may write yet, and a device that refuses must not be asked without a pause.
                    await asyncio.sleep(REPORT_INTERVAL_S)
                    flush = asyncio.ensure_future(self._cache.flush_due())
        finally:
            flush.cancel()
            with suppress(asyncio.CancelledError, CacheError):
                await flush

    async def Undrain(  # noqa: N802
        self,
        request: operations_pb2.UndrainRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> operations_pb2.UndrainResponse:
        """See the proto."""
        self._controls.doors.open()
        return operations_pb2.UndrainResponse()

    async def ListEngines(  # noqa: N802
        self,
        request: operations_pb2.ListEnginesRequest,
        context: Context,  # noqa: ARG002
    ) -> operations_pb2.ListEnginesResponse:
        """See the proto."""
        limit, after = validate.page_size(request.page_size), validate.page_token(request.page_token)
        queues = self._cache.queues
        by_name = {f"{queue.tenant}/{queue.engine}": queue for queue in queues.by_name().values()}
        names = sorted(name for name in by_name if name > after)[: limit + 1]
        return operations_pb2.ListEnginesResponse(
            engines=[
                operations_pb2.EngineUse(
                    tenant=queue.tenant, engine=queue.engine, waiting_count=queues.job_count(queue),
                    session_count=len(queue.names), is_connected=queue.lost_until_ns is None,
                )
                for queue in map(by_name.__getitem__, names[:limit])
            ],
            next_page_token=validate.next_page_token(names, limit),
        )  # fmt: skip

    def _change_share(self, request: operations_pb2.UpdateTenantRequest) -> None:
        """Raises InvalidArgument."""
        shares = self._cache.ledger.usage.shares
        before = shares.by_tenant.get(request.tenant)
        if before is None:
            raise InvalidArgument(field="tenant", problem="has no share of its own by the settings")
        try:
            share = Share(
                request.guaranteed if request.HasField("guaranteed") else before.guaranteed,
                request.limit if request.HasField("limit") else before.limit,
            )
            shares.become({**shares.by_tenant, request.tenant: share})
        except ValueError as error:
            raise InvalidArgument(field="guaranteed", problem=str(error)) from error

    def _hold_path(self, request: operations_pb2.UpdatePathRequest) -> int:
        """Returns the path's number. Raises InvalidArgument."""
        ssd, index = self._cache.ssd, self._path_index(request.path)
        if request.resting and not set(range(len(ssd.paths))) - ssd.refusals.keys() - {index}:
            raise InvalidArgument(field="path", problem="no other path would take writes")
        self._controls.hold_path(index, request.resting)
        return index

    def _path_index(self, wanted: str) -> int:
        """The number of an SSD file or of the one in a directory. Raises InvalidArgument."""
        paths = self._cache.ssd.paths
        for i, path in enumerate(paths):
            if wanted in (path, str(Path(path).parent)):
                return i
        raise InvalidArgument(field="path", problem=f"is none of {', '.join(paths)}")

    def _lease(self, lease: Lease) -> operations_pb2.HeldLease:
        clock = self._cache.state.clock
        message = operations_pb2.HeldLease(
            lease_id=lease.lease_id, tenant=lease.view.tenant, session=lease.view.name, token_begin=lease.begin,
            token_end=lease.end, pinned_bytes=sum(lease.pinned.values()), client=lease.client.number,
        )  # fmt: skip
        message.age.FromNanoseconds(int(self._cache.leases.age_s(lease) * 10**9))
        if lease.deadline_ns != NEVER_NS:
            expire_time_ns = convert.wall_time_ns(clock, lease.deadline_ns)
            message.expire_time.CopyFrom(convert.timestamp(expire_time_ns))
        return message

    def _drained(self, problem: str) -> operations_pb2.DrainStatus:
        cache, admissions = self._cache, self._controls.doors.admissions
        ledger = cache.ledger
        status = operations_pb2.DrainStatus(
            running_rpc_count=admissions.calls.running_count + admissions.streams.running_count,
            local_client_count=admissions.local_clients.running_count,
            lease_count=cache.leases.lease_count, reservation_count=cache.appends.reservation_count,
            dirty_bytes=ledger.due_bytes, spared_bytes=ledger.dirty_bytes - ledger.due_bytes,
            problem=problem,
        )  # fmt: skip
        status.is_done = not (
            status.running_rpc_count or status.local_client_count or status.lease_count
            or status.reservation_count or status.dirty_bytes
        )  # fmt: skip
        return status


def _number(page_token: str) -> int:
    try:
        return int(page_token or 0)
    except ValueError:
        raise InvalidArgument(field="page_token", problem="is none of ours") from None


async def _problem_of(flush: asyncio.Future[None]) -> str:
    try:
        await flush
    except CacheError as error:
        return str(error)
    return ""
