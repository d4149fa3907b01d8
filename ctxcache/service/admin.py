"""AdminService."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Protocol

from ctxcache.cache import Cache
from ctxcache.cache.backup import Copied
from ctxcache.cache.scrubbing import Scrubbed
from ctxcache.core.extents import SlotAllocator
from ctxcache.core.history import Event, Happened, Miss
from ctxcache.service import convert, validate
from ctxcache.service.faults import FaultRpcs
from ctxcache.service.operations import Controls
from ctxcache.service.recorder import recorded
from ctxcache.service.rpc import Context
from ctxcache.service.tenant import tenant_of
from ctxcache.storage.tiers.base import Refusal, Tier
from ctxcache.v1 import admin_pb2, operations_pb2, recording_pb2, session_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class About:
    """What the server knows of itself."""

    version: str
    start_time_ns: int
    data_directory: str
    listen_addresses: tuple[str, ...]
    arena_prefaulted_bytes: Callable[[], int]
    placement_policy: str


RECORD_DEFAULT_NS = 3600 * 10**9
RECORD_LIMIT_NS = 7 * 86400 * 10**9


class Changes(Protocol):
    """What reading settings again came to."""

    @property
    def changed(self) -> Sequence[str]:
        """Names of those that have another value now."""

    @property
    def pending(self) -> Sequence[str]:
        """Names of those that wait for a restart."""


class AdminService(FaultRpcs):
    """See proto/ctxcache/v1/admin.proto."""

    def __init__(
        self, cache: Cache, about: About, settings: Callable[[], Iterable[tuple[str, str, bool]]],
        reload: Callable[[], Changes], controls: Controls,
    ) -> None:  # fmt: skip
        """`settings`: each one's name, value as JSON, and whether it changes while the server runs."""
        super().__init__(cache, controls)
        self._about = about
        self._settings = settings
        self._reload = reload

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: Context) -> admin_pb2.Stats:  # noqa: ARG002, N802
        """See the proto."""
        state, counters, ledger = self._cache.state, self._cache.state.counters, self._cache.ledger
        quarantined = self._cache.ledger.below.quarantined
        return admin_pb2.Stats(
            version=self._about.version,
            start_time=convert.timestamp(self._about.start_time_ns),
            data_directory=self._about.data_directory,
            listen_addresses=self._about.listen_addresses,
            session_count=len(ledger.sessions()),
            model_count=len(state.models),
            segment_count=len(ledger.segments()),
            lease_count=self._cache.leases.lease_count,
            reservation_count=self._cache.appends.reservation_count,
            tiers=self._tiers(),
            quarantined_slot_count=len(quarantined),
            quarantined_bytes=sum(slot.size_bytes for slot in quarantined),
            dirty_bytes=ledger.due_bytes,
            spared_bytes=ledger.dirty_bytes - ledger.due_bytes,
            arena_prefaulted_bytes=self._about.arena_prefaulted_bytes(),
            **{name: getattr(counters, name) for name in counters.__slots__},
            **asdict(ledger.placement.prefetched),
        )

    async def ListTenants(  # noqa: N802
        self,
        request: admin_pb2.ListTenantsRequest,
        context: Context,  # noqa: ARG002
    ) -> admin_pb2.ListTenantsResponse:
        """See the proto."""
        limit = validate.page_size(request.page_size)
        after = validate.page_token(request.page_token)
        names = sorted(name for name in self._cache.ledger.tenants() if name > after)[: limit + 1]
        return admin_pb2.ListTenantsResponse(
            tenants=[self._tenant(name) for name in names[:limit]],
            next_page_token=validate.next_page_token(names, limit),
        )

    async def WhyMiss(  # noqa: N802
        self, request: admin_pb2.WhyMissRequest, context: Context
    ) -> admin_pb2.WhyMissResponse:
        """See the proto."""
        tenant, state = request.tenant or tenant_of(context), self._cache.state
        ledger = self._cache.ledger
        misses: Sequence[Miss] = ()
        if request.trace_id:
            misses = state.journal.requests.of(
                tenant, validate.trace_id(request.trace_id, besides=request.name)
            )
        answer = admin_pb2.WhyMissResponse(
            tenant=tenant, remembered_since=convert.timestamp(self._about.start_time_ns), trace_id=request.trace_id,
            misses=[_miss(one) for one in misses],
        )  # fmt: skip
        if request.trace_id and not misses:
            return answer
        session_id = misses[-1].session_id if misses else validate.session_id(request.name)
        happened = state.journal.history.of(tenant, session_id)
        answer.name = f"sessions/{session_id}"
        session = ledger.named(tenant, session_id)
        if session is not None and session.expire_time_ns > state.clock.now_ns():
            ledger.reckon(session)
            happened = state.journal.history.of(tenant, session_id)
            answer.is_there, answer.token_count = True, session.token_count
            answer.durable_token_count = session.durable_token_count
            answer.reason = _EVENTS[happened[-1].event] if happened else admin_pb2.MISS_EVENT_UNSPECIFIED
            if session.withheld:
                answer.reason = admin_pb2.MISS_EVENT_DEVICE_LOST
                answer.withheld_token_count = ledger.withheld[session.uid]
                answer.lost_paths.extend(ledger.lost.values())
        else:
            # One that is over is cleared away a moment later.
            end = state.journal.history.end_of(tenant, session_id) if session is None else Event.EXPIRED
            answer.reason = _EVENTS[end] if end else admin_pb2.MISS_EVENT_UNSPECIFIED
        answer.happenings.extend(_happening(one) for one in happened)
        return answer

    async def GetSettings(  # noqa: N802
        self,
        request: admin_pb2.GetSettingsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> admin_pb2.Settings:
        """See the proto."""
        return admin_pb2.Settings(
            settings=[
                admin_pb2.Setting(name=name, value_json=value, can_reload=can_reload)
                for name, value, can_reload in self._settings()
            ]
        )

    async def ReloadSettings(  # noqa: N802
        self,
        request: admin_pb2.ReloadSettingsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> admin_pb2.ReloadSettingsResponse:
        """See the proto."""
        found = self._reload()
        return admin_pb2.ReloadSettingsResponse(changed=found.changed, pending=found.pending)

    async def UpdateTenant(  # noqa: N802
        self,
        request: operations_pb2.UpdateTenantRequest,
        context: Context,  # noqa: ARG002
    ) -> admin_pb2.TenantUse:
        """See the proto."""
        self._change_share(request)
        return self._tenant(request.tenant)

    async def UpdatePath(  # noqa: N802
        self,
        request: operations_pb2.UpdatePathRequest,
        context: Context,  # noqa: ARG002
    ) -> admin_pb2.TierStats:
        """See the proto."""
        index = self._hold_path(request)
        return list(_tier(session_pb2.TIER_SSD, self._cache.ssd, self._cache.ledger.below))[index]

    async def DemoteSession(  # noqa: N802
        self, request: admin_pb2.DemoteSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        view = await self._cache.sessions.demote(tenant_of(context), validate.session_id(request.name))
        return convert.session_message(view, self._cache.state.clock)

    async def Verify(  # noqa: N802
        self,
        request: admin_pb2.VerifyRequest,
        context: Context,  # noqa: ARG002
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

    async def Backup(  # noqa: N802
        self,
        request: operations_pb2.BackupRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[operations_pb2.BackupResponse]:
        """See the proto."""
        rate = validate.within(request.bytes_per_second, 0, (1 << 63) - 1, "bytes_per_second")
        clock, turns = self._cache.state.clock, self._controls.doors.admissions.streams.turns
        began_ns, sent_bytes = clock.monotonic_ns(), 0
        copied: Copied | None = None
        async with aclosing(self._cache.backup.run(f"ctxcache {self._about.version}")) as pieces:
            async for data, copied in pieces:
                yield _backup_message(data, copied)
                sent_bytes += len(data)
                wait_ns = began_ns + (sent_bytes * 10**9 // rate if rate else 0) - clock.monotonic_ns()
                await asyncio.sleep(max(wait_ns, 0) / 10**9)
                if turns:
                    await turns.take()
        if copied:
            took_s = (clock.monotonic_ns() - began_ns) / 10**9
            log.info(
                "backup_made sessions=%d segments=%d bytes=%d left_out=%d duration_s=%.3f",
                copied.session_count, copied.segment_count, sent_bytes, copied.left_out_session_count, took_s,
            )  # fmt: skip

    async def Record(  # noqa: N802
        self,
        request: recording_pb2.RecordRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[recording_pb2.RecordResponse]:
        """See the proto."""
        duration_ns = RECORD_DEFAULT_NS
        if request.HasField("duration"):
            duration_ns = validate.within(request.duration.ToNanoseconds(), 1, RECORD_LIMIT_NS, "duration")
        cache, operators = self._cache, self._controls.doors.admissions.operators
        store = recording_pb2.RecordedStore(
            version=self._about.version, start_time=convert.timestamp(cache.state.clock.wall_ns()),
            dram_bytes=cache.ledger.memory.capacity_bytes, ssd_bytes=cache.ledger.below.capacity_bytes,
            session_count=len(cache.ledger.sessions()), placement_policy=self._about.placement_policy,
        )  # fmt: skip
        parts = recorded(cache, store, duration_ns=duration_ns, is_over=lambda: operators.is_draining)
        async with aclosing(parts):
            async for part in parts:
                yield part

    def _tenant(self, tenant: str) -> admin_pb2.TenantUse:
        ledger = self._cache.ledger
        use, own = ledger.usage.of(tenant), ledger.quotas.own(tenant)
        retained_bytes, pinned_bytes = self._cache.placement.retaining.used_bytes(tenant)
        return admin_pb2.TenantUse(
            tenant=tenant, session_count=len(ledger.names(tenant)), dram_bytes=use.memory_bytes,
            ssd_bytes=use.durable_bytes, kept_bytes=use.kept_bytes, guaranteed_dram_bytes=own.memory_bytes,
            guaranteed_ssd_bytes=own.durable_bytes, limit_bytes=own.limit_bytes, retained_bytes=retained_bytes,
            pinned_bytes=pinned_bytes,
        )  # fmt: skip

    def _tiers(self) -> list[admin_pb2.TierStats]:
        cache, ledger = self._cache, self._cache.ledger
        return [
            *_tier(session_pb2.TIER_DRAM, cache.arena, ledger.memory),
            *_tier(session_pb2.TIER_SSD, cache.ssd, ledger.below),
        ]


_EVENTS = {event: admin_pb2.MissEvent.Value(f"MISS_EVENT_{event.name}") for event in Event}


def _happening(one: Happened) -> admin_pb2.SessionHappening:
    return admin_pb2.SessionHappening(
        event=_EVENTS[one.event], first_time=convert.timestamp(one.first_time_ns),
        last_time=convert.timestamp(one.time_ns), count=one.count, detail=one.detail, token_count=one.token_count,
        trace_id=one.trace_id,
    )  # fmt: skip


def _miss(one: Miss) -> admin_pb2.RequestMiss:
    return admin_pb2.RequestMiss(
        session=f"sessions/{one.session_id}", access=one.by, result=one.result,
        time=convert.timestamp(one.time_ns), count=one.count,
    )  # fmt: skip


def verify_message(report: Scrubbed) -> admin_pb2.VerifyResponse:
    """What a pass says of itself."""
    return admin_pb2.VerifyResponse(
        segment_count=report.segment_count,
        checked_segment_count=report.checked_segment_count,
        checked_bytes=report.checked_bytes,
        record_count=report.record_count,
        bad=[
            admin_pb2.BadSegment(
                segment_id=bad.segment_id, tenant=bad.tenant,
                sessions=[f"sessions/{session_id}" for session_id in bad.sessions],
                position_begin=bad.begin, position_end=bad.end, path=bad.path, offset_bytes=bad.offset_bytes,
                problem=bad.problem, tier=session_pb2.TIER_DRAM if bad.is_in_dram else session_pb2.TIER_SSD,
                is_mended=bad.is_mended,
            )
            for bad in report.bad
        ],
    )  # fmt: skip


def _backup_message(data: bytes, copied: Copied) -> operations_pb2.BackupResponse:
    return operations_pb2.BackupResponse(
        data=data, session_count=copied.session_count, total_session_count=copied.total_session_count,
        copied_bytes=copied.bytes, total_bytes=copied.total_bytes, segment_count=copied.segment_count,
        token_count=copied.token_count, unwritten_token_count=copied.unwritten_token_count,
        left_out_session_count=copied.left_out_session_count,
    )  # fmt: skip


def _tier(
    number: session_pb2.Tier.ValueType, tier: Tier, slots: SlotAllocator
) -> Iterator[admin_pb2.TierStats]:
    refusals = tier.refusals
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


def _state(refusal: Refusal | None) -> admin_pb2.PathState.ValueType:
    if refusal is None:
        return admin_pb2.PATH_STATE_OPEN
    return admin_pb2.PathState.Value(f"PATH_STATE_{refusal.state.upper()}")
