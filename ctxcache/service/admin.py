"""AdminService: what operators look at and change.

Stats, tenants, settings, leases, paths, the drain, faults on purpose.

Answers from what is there; changes the cache through its own use cases and the server through `Controls`.
"""

import asyncio
import errno
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ctxcache.archive.backup import Backup, Copied
from ctxcache.cache import Cache
from ctxcache.cache.leases import NEVER_NS, Lease
from ctxcache.cache.scrubbing import Scrubbed
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.history import Event, Happened, Miss
from ctxcache.core.placement.shares import Share
from ctxcache.core.savings import Savings
from ctxcache.errors import CacheError, FaultsNotEnabled, FleetNotFound, InvalidArgument
from ctxcache.service import convert, validate
from ctxcache.service.activity import activity
from ctxcache.service.admission import Doors, RpcTimes
from ctxcache.service.callers import Context, current
from ctxcache.service.recorder import recorded
from ctxcache.storage.injection import (
    COUNT_LIMIT,
    DELAY_LIMIT_NS,
    DURATION_LIMIT_NS,
    Fault,
    FaultKind,
    Faults,
)
from ctxcache.storage.tiers.base import Tier, TierRefusal
from ctxcache.v1 import admin_pb2, admin_pb2_grpc, faults_pb2, operations_pb2, recording_pb2, session_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class About:
    """The server's facts about itself."""

    version: str
    start_time_ns: int
    data_directory: str
    listen_addresses: tuple[str, ...]
    arena_prefaulted_bytes: Callable[[], int]
    placement_policy: str
    savings: Savings


RECORD_DEFAULT_NS = 3600 * 10**9
RECORD_LIMIT_NS = 7 * 86400 * 10**9


class ReloadedSettings(Protocol):
    """The outcome of reading settings again."""

    @property
    def changed(self) -> Sequence[str]:
        """Names of settings that have another value now."""

    @property
    def pending(self) -> Sequence[str]:
        """Names of settings that wait for a restart."""


REPORT_INTERVAL_S = 0.2
ACTIVITY_LIMIT, ACTIVITY_DEFAULT = 100, 10
DEFAULT_GRACE_S, LEAST_GRACE_S = 24 * 3600, 3600


class FleetControls(Protocol):
    """What an operator asks of a fleet."""

    async def describe(self) -> operations_pb2.Fleet:
        """All that is known of it. Raises Unavailable."""

    def publish_all(self, *, has_rows: bool) -> AsyncGenerator[operations_pb2.PublishSessionsResponse]:
        """Have the bucket know of every session that is here; yields how far it is."""

    def collect(
        self, *, grace_s: float, is_dry_run: bool
    ) -> AsyncGenerator[operations_pb2.CollectFleetResponse]:
        """Remove what no head names, or say what would be. Raises Unavailable."""


@dataclass(frozen=True, slots=True)
class Controls:
    """The parts of the server that are not the cache's.

    `cut_off` ends a local client; `hold_path` keeps an SSD path, by its number, from writes.

    `faults` is None in a server that was not started for faults.
    """

    doors: Doors
    times: RpcTimes
    cut_off: Callable[[int], Awaitable[bool]]
    hold_path: Callable[[int, bool], None]
    faults: Faults | None = None
    fleet: FleetControls | None = None
    """None in a store that is alone."""


_NUMBERS = {kind: faults_pb2.FaultKind.Value(f"FAULT_KIND_{kind.name}") for kind in FaultKind}
_KINDS = {number: kind for kind, number in _NUMBERS.items()}


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """See proto/ctxcache/v1/admin.proto."""

    def __init__(
        self,
        cache: Cache,
        about: About,
        settings: Callable[[], Iterable[tuple[str, str, bool]]],
        reload: Callable[[], ReloadedSettings],
        controls: Controls,
    ) -> None:
        """`settings`: each one's name, value as JSON, and whether it changes while the server runs."""
        self._cache, self._controls = cache, controls
        self._backup = Backup(cache)
        self._about = about
        self._settings = settings
        self._reload = reload

    # -- what there is, and why --------------------------------------------------------------------------

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: Context) -> admin_pb2.Stats:
        """See the proto."""
        state, counters, ledger = self._cache.state, self._cache.state.counters, self._cache.ledger
        quarantined = self._cache.ledger.below.quarantined
        return admin_pb2.Stats(
            version=self._about.version,
            start_time=convert.timestamp(self._about.start_time_ns),
            data_directory=self._about.data_directory,
            listen_addresses=self._about.listen_addresses,
            session_count=ledger.session_count,
            model_count=len(state.models),
            segment_count=ledger.segment_count,
            lease_count=self._cache.leases.lease_count,
            reservation_count=self._cache.appends.reservation_count,
            tiers=self._tiers(),
            quarantined_slot_count=len(quarantined),
            quarantined_bytes=sum(slot.size_bytes for slot in quarantined),
            dirty_bytes=ledger.unwritten.due_bytes,
            spared_bytes=ledger.unwritten.dirty_bytes - ledger.unwritten.due_bytes,
            single_copy_segment_count=len(ledger.copies.single),
            arena_prefaulted_bytes=self._about.arena_prefaulted_bytes(),
            saved_prefill_seconds=self._about.savings.prefill_s(counters.read_token_count),
            saved_dollars=self._about.savings.dollars(counters.read_token_count),
            **{name: getattr(counters, name) for name in counters.__slots__},
            **asdict(ledger.placement.prefetched),
        )

    async def ListTenants(
        self,
        request: admin_pb2.ListTenantsRequest,
        context: Context,
    ) -> admin_pb2.ListTenantsResponse:
        """See the proto."""
        limit = validate.page_size(request.page_size)
        after = validate.page_token(request.page_token)
        # Names are sorted anew at each page: a name that comes meanwhile is on its page, or was before it.
        names = sorted(name for name in self._cache.ledger.tenants() if name > after)[: limit + 1]
        return admin_pb2.ListTenantsResponse(
            tenants=[self._tenant(name) for name in names[:limit]],
            next_page_token=validate.next_page_token(names, limit),
        )

    async def WhyMiss(self, request: admin_pb2.WhyMissRequest, context: Context) -> admin_pb2.WhyMissResponse:
        """See the proto."""
        tenant, state = validate.tenant(request.tenant) or current().tenant, self._cache.state
        ledger = self._cache.ledger
        misses: Sequence[Miss] = ()
        if request.trace_id:
            misses = state.journal.requests.of(
                tenant, validate.trace_id(request.trace_id, besides=request.name)
            )
        answer = admin_pb2.WhyMissResponse(
            tenant=tenant,
            remembered_since=convert.timestamp(self._about.start_time_ns),
            trace_id=request.trace_id,
            misses=[_miss(miss) for miss in misses],
        )
        if request.trace_id and not misses:
            return answer
        session_id = misses[-1].session_id if misses else validate.session_id(request.name)
        happened = state.journal.history.of(tenant, session_id)
        answer.name = f"sessions/{session_id}"
        session = ledger.named(tenant, session_id)
        if session is not None and not session.has_expired(state.clock.now_ns()):
            # Notes about a session are reckoned late, so that they come before its history is told.
            ledger.lost.reckon(session)
            happened = state.journal.history.of(tenant, session_id)
            answer.is_there, answer.token_count = True, session.token_count
            answer.durable_token_count = session.durable_token_count
            answer.reason = _EVENTS[happened[-1].event] if happened else admin_pb2.MISS_EVENT_UNSPECIFIED
            if session.withheld:
                answer.reason = admin_pb2.MISS_EVENT_DEVICE_LOST
                answer.withheld_token_count = ledger.lost.withheld[session.uid]
                answer.lost_paths.extend(ledger.lost.paths.values())
        else:
            # An expired session is cleared away a moment later.
            end = state.journal.history.end_of(tenant, session_id) if session is None else Event.EXPIRED
            answer.reason = _EVENTS[end] if end else admin_pb2.MISS_EVENT_UNSPECIFIED
        answer.happenings.extend(_happening(event) for event in happened)
        return answer

    async def GetSettings(
        self,
        request: admin_pb2.GetSettingsRequest,
        context: Context,
    ) -> admin_pb2.Settings:
        """See the proto."""
        return admin_pb2.Settings(
            settings=[
                admin_pb2.Setting(name=name, value_json=value, can_reload=can_reload)
                for name, value, can_reload in self._settings()
            ]
        )

    async def ReloadSettings(
        self,
        request: admin_pb2.ReloadSettingsRequest,
        context: Context,
    ) -> admin_pb2.ReloadSettingsResponse:
        """See the proto."""
        found = self._reload()
        return admin_pb2.ReloadSettingsResponse(changed=found.changed, pending=found.pending)

    async def UpdateTenant(
        self,
        request: operations_pb2.UpdateTenantRequest,
        context: Context,
    ) -> admin_pb2.TenantUse:
        """See the proto."""
        self._change_share(request)
        return self._tenant(request.tenant)

    async def UpdatePath(
        self,
        request: operations_pb2.UpdatePathRequest,
        context: Context,
    ) -> admin_pb2.TierStats:
        """See the proto."""
        index = self._hold_path(request)
        return list(self._ssd_paths())[index]

    async def DemoteSession(
        self, request: admin_pb2.DemoteSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        view = await self._cache.sessions.demote(current().tenant, validate.session_id(request.name))
        return convert.session_message(view, self._cache.state.clock)

    async def Verify(
        self,
        request: admin_pb2.VerifyRequest,
        context: Context,
    ) -> AsyncIterator[admin_pb2.VerifyResponse]:
        """See the proto."""
        rate = validate.within(request.bytes_per_second, 0, (1 << 63) - 1, "bytes_per_second")
        scrubbing = self._cache.scrubbing
        if request.release:
            released, _ = await scrubbing.release()
            yield admin_pb2.VerifyResponse(released_slot_count=released)
        async with aclosing(scrubbing.run(bytes_per_second=rate)) as reports:
            async for report in reports:
                yield verify_message(report)

    async def Backup(
        self,
        request: operations_pb2.BackupRequest,
        context: Context,
    ) -> AsyncIterator[operations_pb2.BackupResponse]:
        """See the proto."""
        rate = validate.within(request.bytes_per_second, 0, (1 << 63) - 1, "bytes_per_second")
        clock, turns = self._cache.state.clock, self._controls.doors.admissions.streams.turns
        began_ns, sent_bytes = clock.monotonic_ns(), 0
        copied: Copied | None = None
        async with aclosing(self._backup.run(f"ctxcache {self._about.version}")) as pieces:
            async for data, copied in pieces:
                yield _backup_message(data, copied)
                sent_bytes += len(data)
                # The bytes count since the beginning: a client that was slow for a while may catch up, and no
                # second is over the rate for long.
                wait_ns = began_ns + (sent_bytes * 10**9 // rate if rate else 0) - clock.monotonic_ns()
                # Others have their turn also where there is nothing to wait for.
                await asyncio.sleep(max(wait_ns, 0) / 10**9)
                if turns:
                    await turns.take()
        if copied:
            took_s = (clock.monotonic_ns() - began_ns) / 10**9
            log.info(
                "backup_made sessions=%d segments=%d bytes=%d left_out=%d duration_s=%.3f",
                copied.session_count,
                copied.segment_count,
                sent_bytes,
                copied.left_out_session_count,
                took_s,
            )

    async def Record(
        self,
        request: recording_pb2.RecordRequest,
        context: Context,
    ) -> AsyncIterator[recording_pb2.RecordResponse]:
        """See the proto."""
        duration_ns = RECORD_DEFAULT_NS
        if request.HasField("duration"):
            duration_ns = validate.within(request.duration.ToNanoseconds(), 1, RECORD_LIMIT_NS, "duration")
        cache, operators = self._cache, self._controls.doors.admissions.operators
        store = recording_pb2.RecordedStore(
            version=self._about.version,
            start_time=convert.timestamp(cache.state.clock.wall_ns()),
            dram_bytes=cache.ledger.memory.capacity_bytes,
            ssd_bytes=cache.ledger.below.capacity_bytes,
            session_count=cache.ledger.session_count,
            placement_policy=self._about.placement_policy,
        )
        parts = recorded(cache, store, duration_ns=duration_ns, is_over=lambda: operators.is_draining)
        async with aclosing(parts):
            async for part in parts:
                yield part

    def _tenant(self, tenant: str) -> admin_pb2.TenantUse:
        ledger = self._cache.ledger
        use, own = ledger.usage.of(tenant), ledger.quotas.own(tenant)
        retained_bytes, pinned_bytes = self._cache.placement.retaining.used_bytes(tenant)
        return admin_pb2.TenantUse(
            tenant=tenant,
            session_count=len(ledger.names.ids(tenant)),
            dram_bytes=use.memory_bytes,
            ssd_bytes=use.durable_bytes,
            kept_bytes=use.kept_bytes,
            guaranteed_dram_bytes=own.memory_bytes,
            guaranteed_ssd_bytes=own.durable_bytes,
            limit_bytes=own.limit_bytes,
            retained_bytes=retained_bytes,
            pinned_bytes=pinned_bytes,
            read_token_count=self._cache.state.read_tokens[tenant],
            appended_token_count=self._cache.state.appended_tokens[tenant],
        )

    def _tiers(self) -> list[admin_pb2.TierStats]:
        cache, ledger = self._cache, self._cache.ledger
        return [
            *_tier(session_pb2.TIER_DRAM, cache.arena, cache.arena.refusals, ledger.memory),
            *self._ssd_paths(),
        ]

    def _ssd_paths(self) -> Iterator[admin_pb2.TierStats]:
        cache = self._cache
        tiers = _tier(session_pb2.TIER_SSD, cache.ssd, cache.devices.refusals, cache.ledger.below)
        for tier, written_bytes in zip(tiers, cache.ssd.written_bytes, strict=True):
            tier.written_bytes = written_bytes
            yield tier

    # -- what runs: leases, engines, the drain -----------------------------------------------------------

    async def GetActivity(
        self,
        request: operations_pb2.GetActivityRequest,
        context: Context,
    ) -> operations_pb2.Activity:
        """See the proto."""
        limit = validate.within(request.limit, 0, 2**31 - 1, "limit") or ACTIVITY_DEFAULT
        controls = self._controls
        answer = activity(self._cache, controls.doors.admissions, controls.times, min(limit, ACTIVITY_LIMIT))
        if controls.faults and (active := controls.faults.active()):
            answer.problems.append(f"devices fail on purpose: {len(active)} faults are injected")
        return answer

    async def ListLeases(
        self,
        request: operations_pb2.ListLeasesRequest,
        context: Context,
    ) -> operations_pb2.ListLeasesResponse:
        """See the proto."""
        limit, after = validate.page_size(request.page_size), _number(validate.page_token(request.page_token))
        tenant = validate.tenant(request.tenant)
        leases = [
            lease
            for lease in self._cache.leases.leases()
            if lease.lease_id > after and tenant in ("", lease.view.tenant)
        ][: limit + 1]
        return operations_pb2.ListLeasesResponse(
            leases=[self._lease(lease) for lease in leases[:limit]],
            next_page_token=validate.next_page_token([str(lease.lease_id) for lease in leases], limit),
        )

    async def RevokeLease(
        self,
        request: operations_pb2.RevokeLeaseRequest,
        context: Context,
    ) -> operations_pb2.RevokeLeaseResponse:
        """See the proto."""
        reading = self._cache.leases
        lease = reading.lease(request.lease_id)
        if lease.client.number is None:
            # A stream's lease ends with the stream; taking it away midway would break the rows that are being
            # sent.
            if lease.deadline_ns == NEVER_NS:
                raise InvalidArgument(field="lease_id", problem="its rows are on their way; try again")
            reading.release(lease.lease_id)
            return operations_pb2.RevokeLeaseResponse(ended_lease_count=1)
        # A local client reads without asking, so a single lease cannot be taken back from it: the whole
        # connection ends, and it learns that at its next check.
        ended = [one.lease_id for one in reading.leases() if one.client == lease.client]
        if not await self._controls.cut_off(lease.client.number):
            problem = "its holder is connected by gRPC and could not know in time; it ends when it expires"
            raise InvalidArgument(field="lease_id", problem=problem)
        return operations_pb2.RevokeLeaseResponse(
            ended_lease_count=sum(not reading.is_held(lease_id) for lease_id in ended)
        )

    async def EvictSession(
        self, request: operations_pb2.EvictSessionRequest, context: Context
    ) -> operations_pb2.EvictSessionResponse:
        """See the proto."""
        await self._cache.sessions.evict(current().tenant, validate.session_id(request.name))
        return operations_pb2.EvictSessionResponse()

    async def DeleteModel(
        self, request: operations_pb2.DeleteModelRequest, context: Context
    ) -> operations_pb2.DeleteModelResponse:
        """See the proto."""
        await self._cache.models.delete(current().tenant, validate.model_id(request.name))
        return operations_pb2.DeleteModelResponse()

    async def Drain(
        self,
        request: operations_pb2.DrainRequest,
        context: Context,
    ) -> AsyncIterator[operations_pb2.DrainStatus]:
        """See the proto."""
        # The doors close first: calls that begin now would have to be waited for.
        self._controls.doors.close()
        problem, flush = "", asyncio.ensure_future(self._cache.flush_due())
        try:
            while True:
                status = self._drained(problem)
                yield status
                # The server's end has its own patience, and flushes by itself.
                if status.is_done or self._controls.doors.is_over:
                    return
                # Two things are looked at: what clients still hold, five times a second, and the flush, when
                # it has ended.
                await asyncio.wait({flush}, timeout=REPORT_INTERVAL_S)
                if flush.done():
                    problem = await _problem_of(flush)
                    # Appends under way may still write, and a device that refuses must not be asked without a
                    # pause.
                    await asyncio.sleep(REPORT_INTERVAL_S)
                    flush = asyncio.ensure_future(self._cache.flush_due())
        finally:
            flush.cancel()
            with suppress(asyncio.CancelledError, CacheError):
                await flush

    async def Undrain(
        self,
        request: operations_pb2.UndrainRequest,
        context: Context,
    ) -> operations_pb2.UndrainResponse:
        """See the proto."""
        self._controls.doors.open()
        return operations_pb2.UndrainResponse()

    async def GetFleet(
        self, request: operations_pb2.GetFleetRequest, context: Context
    ) -> operations_pb2.Fleet:
        """See the proto."""
        return await self._fleet().describe()

    async def PublishSessions(
        self, request: operations_pb2.PublishSessionsRequest, context: Context
    ) -> AsyncIterator[operations_pb2.PublishSessionsResponse]:
        """See the proto."""
        async with aclosing(self._fleet().publish_all(has_rows=request.has_rows)) as published:
            async for so_far in published:
                yield so_far

    async def CollectFleet(
        self, request: operations_pb2.CollectFleetRequest, context: Context
    ) -> AsyncIterator[operations_pb2.CollectFleetResponse]:
        """See the proto."""
        fleet, grace_s = self._fleet(), DEFAULT_GRACE_S
        if request.HasField("grace"):
            grace_s = validate.within(
                request.grace.seconds, LEAST_GRACE_S, validate.LATEST_NS // 10**9, "grace"
            )
        async with aclosing(fleet.collect(grace_s=grace_s, is_dry_run=request.is_dry_run)) as collected:
            async for so_far in collected:
                yield so_far

    def _fleet(self) -> FleetControls:
        if self._controls.fleet is None:
            raise FleetNotFound
        return self._controls.fleet

    async def ListEngines(
        self,
        request: operations_pb2.ListEnginesRequest,
        context: Context,
    ) -> operations_pb2.ListEnginesResponse:
        """See the proto."""
        limit, after = validate.page_size(request.page_size), validate.page_token(request.page_token)
        queues = self._cache.queues
        by_name = {f"{queue.tenant}/{queue.engine}": queue for queue in queues.by_name().values()}
        names = sorted(name for name in by_name if name > after)[: limit + 1]
        return operations_pb2.ListEnginesResponse(
            engines=[
                operations_pb2.EngineUse(
                    tenant=queue.tenant,
                    engine=queue.engine,
                    waiting_count=queues.job_count(queue),
                    session_count=len(queue.names),
                    is_connected=queue.lost_until_ns is None,
                )
                for queue in map(by_name.__getitem__, names[:limit])
            ],
            next_page_token=validate.next_page_token(names, limit),
        )

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
        # A server without any path that takes writes would refuse all appends that are to be durable.
        if request.resting and not set(range(len(ssd.paths))) - self._cache.devices.refusals.keys() - {index}:
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
            lease_id=lease.lease_id,
            tenant=lease.view.tenant,
            session=lease.view.name,
            token_begin=lease.begin,
            token_end=lease.end,
            pinned_bytes=sum(lease.pinned.values()),
            client=lease.client.number,
        )
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
            lease_count=cache.leases.lease_count,
            reservation_count=cache.appends.reservation_count,
            dirty_bytes=ledger.unwritten.due_bytes,
            spared_bytes=ledger.unwritten.dirty_bytes - ledger.unwritten.due_bytes,
            problem=problem,
        )
        status.is_done = not (
            status.running_rpc_count
            or status.local_client_count
            or status.lease_count
            or status.reservation_count
            or status.dirty_bytes
        )
        return status

    # -- faults, in a server that was started for them ---------------------------------------------------

    async def InjectFault(
        self,
        request: faults_pb2.InjectFaultRequest,
        context: Context,
    ) -> faults_pb2.Fault:
        """See the proto."""
        faults = self._faults()
        kind = _KINDS.get(request.kind)
        if kind is None:
            raise InvalidArgument(field="kind", problem=f"{request.kind} is no kind of fault")
        if request.path and not kind.is_of_ssd:
            raise InvalidArgument(field="path", problem="it is of no SSD path")
        duration_ns = validate.within(request.duration.ToNanoseconds(), 1, DURATION_LIMIT_NS, "duration")
        fault = Fault(
            kind=kind,
            left_count=validate.within(request.count, 1, COUNT_LIMIT, "count"),
            end_ns=faults.clock.monotonic_ns() + duration_ns,
            path_index=self._path_index(request.path) if request.path else None,
            delay_ns=_delay_ns(request, kind),
            error_number=_error_number(request.error_number, kind),
        )
        return self._fault(faults, faults.inject(fault))

    async def ListFaults(
        self,
        request: faults_pb2.ListFaultsRequest,
        context: Context,
    ) -> faults_pb2.ListFaultsResponse:
        """See the proto."""
        faults = self._faults()
        limit, after = validate.page_size(request.page_size), _number(validate.page_token(request.page_token))
        listed = [fault for fault in faults.active() if fault.fault_id > after][: limit + 1]
        return faults_pb2.ListFaultsResponse(
            faults=[self._fault(faults, fault) for fault in listed[:limit]],
            next_page_token=validate.next_page_token([str(fault.fault_id) for fault in listed], limit),
        )

    async def ClearFaults(
        self,
        request: faults_pb2.ClearFaultsRequest,
        context: Context,
    ) -> faults_pb2.ClearFaultsResponse:
        """See the proto."""
        return faults_pb2.ClearFaultsResponse(cleared_fault_count=self._faults().clear())

    def _faults(self) -> Faults:
        """Raises FaultsNotEnabled."""
        if self._controls.faults is None:
            raise FaultsNotEnabled
        return self._controls.faults

    def _fault(self, faults: Faults, fault: Fault) -> faults_pb2.Fault:
        return faults_pb2.Fault(
            fault_id=fault.fault_id,
            kind=_NUMBERS[fault.kind],
            error_number=fault.error_number,
            path="" if fault.path_index is None else self._cache.ssd.paths[fault.path_index],
            delay=convert.duration(fault.delay_ns) if fault.kind.is_delay else None,
            left_count=fault.left_count,
            left_duration=convert.duration(max(fault.end_ns - faults.clock.monotonic_ns(), 0)),
        )


_EVENTS = {event: admin_pb2.MissEvent.Value(f"MISS_EVENT_{event.name}") for event in Event}


def _happening(happened: Happened) -> admin_pb2.SessionHappening:
    return admin_pb2.SessionHappening(
        event=_EVENTS[happened.event],
        first_time=convert.timestamp(happened.first_time_ns),
        last_time=convert.timestamp(happened.time_ns),
        count=happened.count,
        detail=happened.detail,
        token_count=happened.token_count,
        trace_id=happened.trace_id,
    )


def _miss(miss: Miss) -> admin_pb2.RequestMiss:
    return admin_pb2.RequestMiss(
        session=f"sessions/{miss.session_id}",
        access=miss.by,
        result=miss.result,
        time=convert.timestamp(miss.time_ns),
        count=miss.count,
    )


def verify_message(report: Scrubbed) -> admin_pb2.VerifyResponse:
    """The report of a pass."""
    return admin_pb2.VerifyResponse(
        segment_count=report.segment_count,
        checked_segment_count=report.checked_segment_count,
        checked_bytes=report.checked_bytes,
        record_count=report.record_count,
        bad=[
            admin_pb2.BadSegment(
                segment_id=bad.segment_id,
                tenant=bad.tenant,
                sessions=bad.sessions,
                position_begin=bad.begin,
                position_end=bad.end,
                path=bad.path,
                offset_bytes=bad.offset_bytes,
                problem=bad.problem,
                tier=session_pb2.TIER_DRAM if bad.is_in_dram else session_pb2.TIER_SSD,
                is_mended=bad.is_mended,
            )
            for bad in report.bad
        ],
    )


def _backup_message(data: bytes, copied: Copied) -> operations_pb2.BackupResponse:
    return operations_pb2.BackupResponse(
        data=data,
        session_count=copied.session_count,
        total_session_count=copied.total_session_count,
        copied_bytes=copied.bytes,
        total_bytes=copied.total_bytes,
        segment_count=copied.segment_count,
        token_count=copied.token_count,
        unwritten_token_count=copied.unwritten_token_count,
        left_out_session_count=copied.left_out_session_count,
    )


def _tier(
    number: session_pb2.Tier.ValueType,
    tier: Tier,
    refusals: Mapping[int, TierRefusal],
    slots: SlotAllocator,
) -> Iterator[admin_pb2.TierStats]:
    for i, path in enumerate(tier.paths):
        refusal = refusals.get(i)
        yield admin_pb2.TierStats(
            tier=number,
            path=path,
            capacity_bytes=tier.capacities_bytes[i],
            used_bytes=slots.used_bytes_by_path[i],
            segment_count=slots.slot_count_by_path[i],
            state=_state(refusal),
            problem=refusal.problem if refusal else "",
            largest_free_bytes=slots.largest_free_bytes_by_path[i],
        )


def _state(refusal: TierRefusal | None) -> admin_pb2.PathState.ValueType:
    if refusal is None:
        return admin_pb2.PATH_STATE_OPEN
    return admin_pb2.PathState.Value(f"PATH_STATE_{refusal.state.upper()}")


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


def _delay_ns(request: faults_pb2.InjectFaultRequest, kind: FaultKind) -> int:
    if kind.is_delay:
        return validate.within(request.delay.ToNanoseconds(), 1, DELAY_LIMIT_NS, "delay")
    if request.HasField("delay"):
        raise InvalidArgument(field="delay", problem="it is of delays")
    return 0


def _error_number(number: int, kind: FaultKind) -> int:
    if kind.is_error and number not in errno.errorcode:
        raise InvalidArgument(field="error_number", problem=f"{number} is no error number")
    if number and not kind.is_error:
        raise InvalidArgument(field="error_number", problem="it is of errors")
    return number
