"""Calls for operators, as methods. Worst case: one deadline per call."""

from collections.abc import Generator, Iterator

from grpc_health.v1 import health_pb2

from ctxcache.client.convert import duration
from ctxcache.client.wire import Wire
from ctxcache.v1 import admin_pb2, faults_pb2, operations_pb2, recording_pb2, session_pb2


class AdminCalls:
    """The rpcs of AdminService, and the health check."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def stats(self) -> admin_pb2.Stats:
        """Return what the server holds and has done."""
        return self._wire.call(self._wire.admin.GetStats, admin_pb2.GetStatsRequest())

    def list_tenants(self, *, page_size: int = 0) -> Iterator[admin_pb2.TenantUse]:
        """Yield what each tenant has, by name. Raises InvalidArgument."""
        request = admin_pb2.ListTenantsRequest(page_size=page_size)
        while True:
            page = self._wire.call(self._wire.admin.ListTenants, request)
            yield from page.tenants
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def why_miss(self, name: str = "", *, tenant: str = "", trace_id: str = "") -> admin_pb2.WhyMissResponse:
        """Return why a session is not there, or has less than was stored; or what a request missed.

        Either by the session's name, or by the W3C trace id of a request. Raises InvalidArgument.
        """
        request = admin_pb2.WhyMissRequest(name=name, tenant=tenant, trace_id=trace_id)
        return self._wire.call(self._wire.admin.WhyMiss, request)

    def settings(self) -> admin_pb2.Settings:
        """Every setting that the server runs with."""
        return self._wire.call(self._wire.admin.GetSettings, admin_pb2.GetSettingsRequest())

    def reload_settings(self) -> admin_pb2.ReloadSettingsResponse:
        """Have the server read its settings again. Raises InvalidConfiguration; then nothing has changed."""
        return self._wire.call(self._wire.admin.ReloadSettings, admin_pb2.ReloadSettingsRequest())

    def activity(self, *, limit: int = 0) -> operations_pb2.Activity:
        """What goes on; `limit` sessions and tenants at most."""
        return self._wire.call(self._wire.admin.GetActivity, operations_pb2.GetActivityRequest(limit=limit))

    def list_leases(self, *, tenant: str = "", page_size: int = 0) -> Iterator[operations_pb2.HeldLease]:
        """Yield who holds what in DRAM, the oldest first. Raises InvalidArgument."""
        request = operations_pb2.ListLeasesRequest(tenant=tenant, page_size=page_size)
        while True:
            page = self._wire.call(self._wire.admin.ListLeases, request)
            yield from page.leases
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def revoke_lease(self, lease_id: int) -> operations_pb2.RevokeLeaseResponse:
        """End a lease, and a local client's others too. Raises LeaseNotFound, InvalidArgument."""
        request = operations_pb2.RevokeLeaseRequest(lease_id=lease_id)
        return self._wire.call(self._wire.admin.RevokeLease, request)

    def list_engines(self, *, page_size: int = 0) -> Iterator[operations_pb2.EngineUse]:
        """Yield the engines that publish their queues. Raises InvalidArgument."""
        request = operations_pb2.ListEnginesRequest(page_size=page_size)
        while True:
            page = self._wire.call(self._wire.admin.ListEngines, request)
            yield from page.engines
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
    ) -> admin_pb2.TenantUse:
        """Change a tenant's share. Raises InvalidArgument."""
        request = operations_pb2.UpdateTenantRequest(tenant=tenant, guaranteed=guaranteed, limit=limit)
        return self._wire.call(self._wire.admin.UpdateTenant, request)

    def update_path(self, path: str, *, resting: bool) -> admin_pb2.TierStats:
        """Take an SSD path out of use, or back. Raises InvalidArgument."""
        request = operations_pb2.UpdatePathRequest(path=path, resting=resting)
        return self._wire.call(self._wire.admin.UpdatePath, request)

    def drain(self) -> Iterator[operations_pb2.DrainStatus]:
        """Have the server take no more work; yields how far it is until nothing is left, without a deadline."""
        with self._wire.errors():
            yield from self._wire.admin.Drain(operations_pb2.DrainRequest())

    def record(self, duration_s: float | None = None) -> Generator[recording_pb2.RecordResponse]:
        """Yield what the server is asked, without content, until then; an hour unless said otherwise.

        Whoever ends the iteration ends the recording. Raises TooManyRequests, InvalidArgument.
        """
        request = recording_pb2.RecordRequest(duration=duration(duration_s))
        with self._wire.errors():
            call = self._wire.admin.Record(request)
            try:
                yield from call
            finally:
                call.cancel()

    def inject_fault(
        self, kind: str, *, count: int, duration_s: float, path: str = "", delay_s: float | None = None,
        error_number: int = 0,
    ) -> faults_pb2.Fault:  # fmt: skip
        """Let a device fail so often and so long, as FaultKind says without its prefix. See the proto.

        Raises FaultsNotEnabled, InvalidArgument, TooManyRequests.
        """
        request = faults_pb2.InjectFaultRequest(
            kind=faults_pb2.FaultKind.Value(f"FAULT_KIND_{kind}"), path=path, delay=duration(delay_s),
            error_number=error_number, count=count, duration=duration(duration_s),
        )  # fmt: skip
        return self._wire.call(self._wire.admin.InjectFault, request)

    def list_faults(self) -> Iterator[faults_pb2.Fault]:
        """Yield the faults that may strike yet. Raises FaultsNotEnabled."""
        yield from self._wire.call(self._wire.admin.ListFaults, faults_pb2.ListFaultsRequest()).faults

    def clear_faults(self) -> int:
        """Let none strike any more; returns how many would have. Raises FaultsNotEnabled."""
        answer = self._wire.call(self._wire.admin.ClearFaults, faults_pb2.ClearFaultsRequest())
        return answer.cleared_fault_count

    def undrain(self) -> None:
        """Have the server take work again."""
        self._wire.call(self._wire.admin.Undrain, operations_pb2.UndrainRequest())

    def demote_session(self, name: str) -> session_pb2.Session:
        """Make a session durable and take it out of DRAM. Raises SessionNotFound, CapacityExceeded."""
        request = admin_pb2.DemoteSessionRequest(name=name)
        return self._wire.call(self._wire.admin.DemoteSession, request)

    def verify(
        self, *, bytes_per_second: int = 0, release: bool = False
    ) -> Iterator[admin_pb2.VerifyResponse]:
        """Verify every record and segment; yields how far it is, without a deadline. See the proto.

        Raises TooManyRequests, CorruptMetadata.
        """
        request = admin_pb2.VerifyRequest(bytes_per_second=bytes_per_second, release=release)
        with self._wire.errors():
            yield from self._wire.admin.Verify(request)

    def backup(self, *, bytes_per_second: int = 0) -> Iterator[operations_pb2.BackupResponse]:
        """Yield the bytes of a backup, and how far it is, without a deadline. See the proto.

        Raises TooManyRequests, TierFailure.
        """
        request = operations_pb2.BackupRequest(bytes_per_second=bytes_per_second)
        with self._wire.errors():
            call = self._wire.admin.Backup(request)
            try:
                yield from call
            finally:
                # Left in the middle, it would go on.
                call.cancel()

    def health(self) -> bool:
        """Say whether the server takes work: false while it starts or drains. Raises Unavailable."""
        answer = self._wire.call(self._wire.check_health, health_pb2.HealthCheckRequest())
        return answer.status == health_pb2.HealthCheckResponse.SERVING
