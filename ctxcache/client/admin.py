"""Calls for operators. Worst case: one deadline per call."""

from collections.abc import Generator, Iterator
from datetime import timedelta

from grpc_health.v1 import health_pb2

from ctxcache.client.convert import duration as duration_to_wire
from ctxcache.client.messages import (
    read_activity,
    read_backup_part,
    read_collected_fleet,
    read_drain_status,
    read_engine_use,
    read_fleet_view,
    read_held_lease,
    read_injected_fault,
    read_miss_report,
    read_published_sessions,
    read_recording_part,
    read_session_info,
    read_setting_value,
    read_settings_reload,
    read_store_stats,
    read_tenant_stats,
    read_tier_stats,
    read_verify_progress,
)
from ctxcache.client.types import (
    Activity,
    BackupPart,
    CollectedFleet,
    DrainStatus,
    EngineUse,
    FleetView,
    HeldLease,
    InjectedFault,
    InjectedFaultKind,
    MissReport,
    PublishedSessions,
    RecordingPart,
    SessionInfo,
    SettingsReload,
    SettingValue,
    StoreStats,
    TenantStats,
    TierStats,
    VerifyProgress,
)
from ctxcache.client.wire import Wire
from ctxcache.v1 import admin_pb2, faults_pb2, operations_pb2, recording_pb2


class AdminCalls:
    """The rpcs of AdminService, and the health check."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def stats(self) -> StoreStats:
        """Return what the server holds and has done."""
        return read_store_stats(self._wire.call(self._wire.admin.GetStats, admin_pb2.GetStatsRequest()))

    def list_tenants(self, *, page_size: int = 0) -> Iterator[TenantStats]:
        """Yield what each tenant has, by name. Raises InvalidArgument."""
        request = admin_pb2.ListTenantsRequest(page_size=page_size)
        while True:
            page = self._wire.call(self._wire.admin.ListTenants, request)
            for one in page.tenants:
                yield read_tenant_stats(one)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def why_miss(self, name: str = "", *, tenant: str = "", trace_id: str = "") -> MissReport:
        """Return why a session is not there, or has less than was stored; or what a request missed.

        Either by the session's name, or by the W3C trace id of a request. Raises InvalidArgument.
        """
        request = admin_pb2.WhyMissRequest(name=name, tenant=tenant, trace_id=trace_id)
        return read_miss_report(self._wire.call(self._wire.admin.WhyMiss, request))

    def fleet(self) -> FleetView:
        """Return what the server says of its fleet. Raises FleetNotFound, Unavailable (the bucket)."""
        return read_fleet_view(self._wire.call(self._wire.admin.GetFleet, operations_pb2.GetFleetRequest()))

    def publish_sessions(self, *, has_rows: bool = False) -> Iterator[PublishedSessions]:
        """Have the fleet's bucket know of every session that is here, without a deadline.

        Yields how far it is, and all of it at last. `has_rows`: it gets their rows, too.
        Raises FleetNotFound.
        """
        request = operations_pb2.PublishSessionsRequest(has_rows=has_rows)
        with self._wire.errors():
            for one in self._wire.admin.PublishSessions(request):
                yield read_published_sessions(one)

    def collect_fleet(
        self, *, is_dry_run: bool = False, grace: timedelta | None = None
    ) -> Iterator[CollectedFleet]:
        """Remove from the bucket what no head names, without a deadline.

        Yields how far it is, and all of it at last. `grace`: how old it has to be, a day by default.
        Raises FleetNotFound, InvalidArgument, Unavailable (the bucket).
        """
        request = operations_pb2.CollectFleetRequest(is_dry_run=is_dry_run, grace=duration_to_wire(grace))
        with self._wire.errors():
            for one in self._wire.admin.CollectFleet(request):
                yield read_collected_fleet(one)

    def settings(self) -> list[SettingValue]:
        """Every setting that the server runs with."""
        answer = self._wire.call(self._wire.admin.GetSettings, admin_pb2.GetSettingsRequest())
        return [read_setting_value(one) for one in answer.settings]

    def reload_settings(self) -> SettingsReload:
        """Have the server read its settings again. Raises InvalidConfiguration; then nothing has changed."""
        return read_settings_reload(
            self._wire.call(self._wire.admin.ReloadSettings, admin_pb2.ReloadSettingsRequest()),
        )

    def activity(self, *, limit: int = 0) -> Activity:
        """The server's activity; `limit` sessions and tenants at most."""
        return read_activity(
            self._wire.call(self._wire.admin.GetActivity, operations_pb2.GetActivityRequest(limit=limit)),
        )

    def list_leases(self, *, tenant: str = "", page_size: int = 0) -> Iterator[HeldLease]:
        """Yield who holds what in DRAM, the oldest first. Raises InvalidArgument."""
        request = operations_pb2.ListLeasesRequest(tenant=tenant, page_size=page_size)
        while True:
            page = self._wire.call(self._wire.admin.ListLeases, request)
            for one in page.leases:
                yield read_held_lease(one)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def revoke_lease(self, lease_id: int) -> int:
        """End a lease, and a local client's others too; returns how many ended.

        Raises LeaseNotFound, InvalidArgument.
        """
        request = operations_pb2.RevokeLeaseRequest(lease_id=lease_id)
        return self._wire.call(self._wire.admin.RevokeLease, request).ended_lease_count

    def list_engines(self, *, page_size: int = 0) -> Iterator[EngineUse]:
        """Yield the engines that publish their queues. Raises InvalidArgument."""
        request = operations_pb2.ListEnginesRequest(page_size=page_size)
        while True:
            page = self._wire.call(self._wire.admin.ListEngines, request)
            for one in page.engines:
                yield read_engine_use(one)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def evict_session(self, name: str) -> None:
        """Give up a session. Raises SessionNotFound, WriteInProgress."""
        self._wire.call(self._wire.admin.EvictSession, operations_pb2.EvictSessionRequest(name=name))

    def delete_model(self, name: str) -> None:
        """Forget a model without sessions. Raises ModelNotFound, InvalidArgument."""
        self._wire.call(self._wire.admin.DeleteModel, operations_pb2.DeleteModelRequest(name=name))

    def update_tenant(
        self, tenant: str, *, guaranteed: float | None = None, limit: float | None = None
    ) -> TenantStats:
        """Change a tenant's share. Raises InvalidArgument."""
        request = operations_pb2.UpdateTenantRequest(tenant=tenant, guaranteed=guaranteed, limit=limit)
        return read_tenant_stats(self._wire.call(self._wire.admin.UpdateTenant, request))

    def update_path(self, path: str, *, resting: bool) -> TierStats:
        """Take an SSD path out of use, or back. Raises InvalidArgument."""
        request = operations_pb2.UpdatePathRequest(path=path, resting=resting)
        return read_tier_stats(self._wire.call(self._wire.admin.UpdatePath, request))

    # Without a deadline, as `verify` and `backup`: they take as long as what is there. A server that dies
    # ends the stream, and keepalive finds a cut cable.
    def drain(self) -> Iterator[DrainStatus]:
        """Have the server take no more work; yields its progress until none is left, with no deadline."""
        with self._wire.errors():
            for one in self._wire.admin.Drain(operations_pb2.DrainRequest()):
                yield read_drain_status(one)

    def record(self, duration: timedelta | None = None) -> Generator[RecordingPart]:
        """Yield what the server is asked, without content, until then; an hour unless said otherwise.

        The recording ends with the iteration. Raises TooManyRequests, InvalidArgument.
        """
        request = recording_pb2.RecordRequest(duration=duration_to_wire(duration))
        with self._wire.errors():
            call = self._wire.admin.Record(request)
            try:
                for one in call:
                    yield read_recording_part(one)
            finally:
                call.cancel()

    def inject_fault(
        self,
        kind: InjectedFaultKind,
        *,
        count: int,
        duration: timedelta,
        path: str = "",
        delay: timedelta | None = None,
        error_number: int = 0,
    ) -> InjectedFault:
        """Let a device fail `count` times within `duration`. `delay` is how much longer a slow device takes.

        Raises FaultsNotEnabled, InvalidArgument, TooManyRequests.
        """
        request = faults_pb2.InjectFaultRequest(
            kind=faults_pb2.FaultKind.ValueType(kind),
            path=path,
            delay=duration_to_wire(delay),
            error_number=error_number,
            count=count,
            duration=duration_to_wire(duration),
        )
        return read_injected_fault(self._wire.call(self._wire.admin.InjectFault, request))

    def list_faults(self, *, page_size: int = 0) -> Iterator[InjectedFault]:
        """Yield faults that may strike yet, oldest first. Raises FaultsNotEnabled, InvalidArgument."""
        request = faults_pb2.ListFaultsRequest(page_size=page_size)
        while True:
            page = self._wire.call(self._wire.admin.ListFaults, request)
            yield from map(read_injected_fault, page.faults)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def clear_faults(self) -> int:
        """Let none strike any more; returns how many would have. Raises FaultsNotEnabled."""
        answer = self._wire.call(self._wire.admin.ClearFaults, faults_pb2.ClearFaultsRequest())
        return answer.cleared_fault_count

    def undrain(self) -> None:
        """Have the server take work again."""
        self._wire.call(self._wire.admin.Undrain, operations_pb2.UndrainRequest())

    def demote_session(self, name: str) -> SessionInfo:
        """Make a session durable and take it out of DRAM. Raises SessionNotFound, CapacityExceeded."""
        request = admin_pb2.DemoteSessionRequest(name=name)
        return read_session_info(self._wire.call(self._wire.admin.DemoteSession, request))

    def verify(self, *, bytes_per_second: int = 0, release: bool = False) -> Iterator[VerifyProgress]:
        """Verify every record and segment; yields how far it is, without a deadline. See the proto.

        Raises TooManyRequests, CorruptMetadata.
        """
        request = admin_pb2.VerifyRequest(bytes_per_second=bytes_per_second, release=release)
        with self._wire.errors():
            for one in self._wire.admin.Verify(request):
                yield read_verify_progress(one)

    def backup(self, *, bytes_per_second: int = 0) -> Iterator[BackupPart]:
        """Yield the bytes of a backup, and how far it is, without a deadline. See the proto.

        Raises TooManyRequests, TierFailure.
        """
        request = operations_pb2.BackupRequest(bytes_per_second=bytes_per_second)
        with self._wire.errors():
            call = self._wire.admin.Backup(request)
            try:
                for one in call:
                    yield read_backup_part(one)
            finally:
                # Left in the middle, it would go on.
                call.cancel()

    def health(self) -> bool:
        """Say whether the server takes work: false while it starts or drains. Raises Unavailable."""
        answer = self._wire.call(self._wire.check_health, health_pb2.HealthCheckRequest())
        return answer.status == health_pb2.HealthCheckResponse.SERVING
