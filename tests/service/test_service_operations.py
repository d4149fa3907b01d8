"""Operators' calls to a running server."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import FakeClock
from grpc_health.v1 import health_pb2, health_pb2_grpc
from service_rig import Access, Client, SocketWay, refused, settings_in, until

from ctxcache.core.placement.shares import Share
from ctxcache.errors import TierFailure
from ctxcache.server.server import Server
from ctxcache.service.callers import TENANT_HEADER
from ctxcache.settings.config import Settings
from ctxcache.v1 import admin_pb2, arena_pb2, model_pb2, session_pb2
from ctxcache.v1 import operations_pb2 as ops

Code = grpc.StatusCode
FOR_OTHER = ((TENANT_HEADER, "other"),)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A small server with two SSD paths, and a share for one tenant."""
    return settings_in(
        tmp_path,
        ssd_directories=(tmp_path / "one", tmp_path / "two"),
        tenant_shares={"default": Share(0.5)},
    )


def lease_of(client: Client, name: str) -> arena_pb2.AcquireLease:
    """Ask for a lease on all of a session."""
    return arena_pb2.AcquireLease(session=f"sessions/{name}", model_fingerprint=client.fingerprint)


async def stored(client: Client, name: str = "a") -> None:
    """A session with tokens that only DRAM has."""
    await client.create(name)
    await client.append(name, 1, 0, 8)


async def test_leases_are_listed_and_can_be_taken_back(
    client: Client, connect: Callable[[], Awaitable[Access]]
) -> None:
    """A client that holds one by the control socket is cut off, with all that it holds.

    By gRPC it could not know, and keeps it.
    """
    await stored(client)
    access = await connect()
    held = [(await access.one(acquire_lease=lease_of(client, "a"))).lease.lease_id for _ in range(2)]

    page = await client.admin.ListLeases(ops.ListLeasesRequest(page_size=1))
    (rest,) = (await client.admin.ListLeases(ops.ListLeasesRequest(page_token=page.next_page_token))).leases
    (first,) = page.leases

    assert [first.lease_id, rest.lease_id] == held
    assert (first.tenant, first.session, first.token_begin, first.token_end) == (
        "default",
        "sessions/a",
        0,
        8,
    )
    assert first.pinned_bytes > 0
    assert first.client == rest.client > 0
    assert not (await client.admin.ListLeases(ops.ListLeasesRequest(tenant="other"))).leases
    revoke = ops.RevokeLeaseRequest(lease_id=held[0])
    if not isinstance(access, SocketWay):
        await refused(client.admin.RevokeLease(revoke), Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert (await client.stats()).lease_count == 2
        return
    assert (await client.admin.RevokeLease(revoke)).ended_lease_count == 2
    assert (await client.stats()).lease_count == 0
    with pytest.raises(asyncio.IncompleteReadError):
        await access.read()
    await refused(client.admin.RevokeLease(revoke), Code.NOT_FOUND, "LEASE_NOT_FOUND")


async def test_a_bad_page_of_leases_is_refused(client: Client) -> None:
    """As of every list."""
    for request in (
        ops.ListLeasesRequest(page_size=-1),
        ops.ListLeasesRequest(page_token="after:x"),  # noqa: S106
    ):
        await refused(client.admin.ListLeases(request), Code.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_a_drain_writes_everything_and_ends_with_an_undrain(server: Server, client: Client) -> None:
    """Health says no, clients are refused, operators are answered; afterwards all is as before."""
    health: Any = health_pb2_grpc.HealthStub(client.channel)

    async def answer() -> int:
        return int((await health.Check(health_pb2.HealthCheckRequest())).status)

    await stored(client)
    statuses = [status async for status in client.admin.Drain(ops.DrainRequest())]

    assert statuses[-1].is_done
    assert statuses[-1].dirty_bytes == 0 == (await client.stats()).dirty_bytes
    assert server.cache.ledger.names.sessions["default", "a"].durable_token_count == 8
    assert await answer() == health_pb2.HealthCheckResponse.NOT_SERVING
    await refused(client.create("b"), Code.UNAVAILABLE, "DRAINING")
    assert not (await client.admin.GetActivity(ops.GetActivityRequest())).is_ready
    await client.admin.Undrain(ops.UndrainRequest())
    assert await answer() == health_pb2.HealthCheckResponse.SERVING
    await client.create("b")
    assert (await client.admin.GetActivity(ops.GetActivityRequest())).is_ready


async def test_a_drain_waits_for_who_holds_something(
    client: Client, connect: Callable[[], Awaitable[Access]]
) -> None:
    """A local client ends what it has begun, begins nothing, and is let go of.

    After the undrain it may come again.
    """
    await stored(client)
    access = await connect()
    lease_id = (await access.one(acquire_lease=lease_of(client, "a"))).lease.lease_id
    drain = client.admin.Drain(ops.DrainRequest())

    status = await drain.read()
    assert (status.lease_count, status.local_client_count, status.is_done) == (1, 1, False)
    error = (await access.one(acquire_lease=lease_of(client, "a"))).error
    assert (error.code, error.reason) == (Code.UNAVAILABLE.value[0], "DRAINING")
    await access.one(release_lease=arena_pb2.ReleaseLease(lease_id=lease_id))
    while not status.is_done:
        status = await drain.read()
    await client.admin.Undrain(ops.UndrainRequest())
    again = await connect()
    assert (await again.one(acquire_lease=lease_of(client, "a"))).lease.lease_id > lease_id


async def test_a_drain_survives_the_call(server: Server, client: Client) -> None:
    """The caller that waits for it may stop waiting."""
    drain = client.admin.Drain(ops.DrainRequest())
    await drain.read()
    drain.cancel()

    await until(lambda: not server.admissions.operators.running_count)
    await refused(client.create("b"), Code.UNAVAILABLE, "DRAINING")


async def test_an_evicted_session_is_missed_as_such(client: Client) -> None:
    """A pinned one too: an operator knows better. One that is written stays."""
    await stored(client)
    await client.sessions.UpdateSession(session_pb2.UpdateSessionRequest(name="sessions/a", is_pinned=True))
    await client.admin.EvictSession(ops.EvictSessionRequest(name="sessions/a"))
    missed = await client.admin.WhyMiss(admin_pb2.WhyMissRequest(name="sessions/a"))

    assert missed.reason == admin_pb2.MISS_EVENT_EVICTED
    assert missed.happenings[-1].detail == "an operator's request"
    assert (await client.stats()).evicted_session_count == 1
    again = client.admin.EvictSession(ops.EvictSessionRequest(name="sessions/a"))
    await refused(again, Code.NOT_FOUND, "SESSION_NOT_FOUND")


async def test_a_model_goes_when_no_session_is_of_it(client: Client) -> None:
    """And can be registered anew."""
    delete = ops.DeleteModelRequest(name="models/tiny")
    await stored(client)
    await refused(client.admin.DeleteModel(delete), Code.FAILED_PRECONDITION, "MODEL_IN_USE")
    await client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name="sessions/a"))

    await client.admin.DeleteModel(delete)
    assert not (await client.models.ListModels(model_pb2.ListModelsRequest())).models
    await refused(client.admin.DeleteModel(delete), Code.NOT_FOUND, "MODEL_NOT_FOUND")
    await client.register()
    await client.create("a")


async def test_shares_change_while_it_runs(client: Client) -> None:
    """Only a tenant that has one gets another; nothing changes where the new one could not be."""
    use = await client.admin.UpdateTenant(
        ops.UpdateTenantRequest(tenant="default", guaranteed=0.25, limit=0.75)
    )
    kept = await client.admin.UpdateTenant(ops.UpdateTenantRequest(tenant="default", limit=0.5))

    assert (use.guaranteed_ssd_bytes, use.limit_bytes) == (1 << 20, 3 << 20)
    assert (kept.guaranteed_ssd_bytes, kept.limit_bytes) == (1 << 20, 2 << 20)
    for request in (
        ops.UpdateTenantRequest(tenant="nobody", limit=0.5),
        ops.UpdateTenantRequest(tenant="default", guaranteed=0.8),
    ):
        await refused(client.admin.UpdateTenant(request), Code.INVALID_ARGUMENT, "INVALID_FIELD")
    (listed,) = (await client.admin.ListTenants(admin_pb2.ListTenantsRequest())).tenants
    assert listed == kept


async def test_a_path_rests_and_is_opened(server: Server, client: Client) -> None:
    """Rows are written elsewhere meanwhile; the last path stays open."""
    one, two = server.cache.ssd.paths
    rested = await client.admin.UpdatePath(ops.UpdatePathRequest(path=str(Path(one).parent), resting=True))
    await stored(client)
    await client.sessions.FlushSession(session_pb2.FlushSessionRequest(name="sessions/a"))
    tiers = {tier.path: tier for tier in (await client.stats()).tiers}
    activity = await client.admin.GetActivity(ops.GetActivityRequest())

    assert (rested.path, rested.state) == (one, admin_pb2.PATH_STATE_RESTING)
    assert "an operator took it out of use" in rested.problem
    assert tiers[one].used_bytes == 0 < tiers[two].used_bytes
    assert tiers[one].largest_free_bytes == tiers[one].capacity_bytes > tiers[two].largest_free_bytes
    assert tiers[one].written_bytes == 0 < tiers[two].written_bytes <= tiers[two].used_bytes
    assert any(one in problem for problem in activity.problems)
    for path in (two, "/nowhere"):
        request = ops.UpdatePathRequest(path=path, resting=True)
        await refused(client.admin.UpdatePath(request), Code.INVALID_ARGUMENT, "INVALID_FIELD")
    opened = await client.admin.UpdatePath(ops.UpdatePathRequest(path=one))
    assert (opened.state, opened.problem) == (admin_pb2.PATH_STATE_OPEN, "")


async def test_activity_says_what_goes_on(client: Client) -> None:
    """Rpcs with their times, the busiest session and tenant first."""
    await stored(client, "idle")
    await stored(client, "busy")
    for _ in range(5):
        await client.sessions.UpdateSession(session_pb2.UpdateSessionRequest(name="sessions/busy"))
    await refused(client.get("nothing"), Code.NOT_FOUND, "SESSION_NOT_FOUND")
    found = await client.admin.GetActivity(ops.GetActivityRequest(limit=1))
    methods = {method.method: method for method in found.methods}

    (busiest,), (tenant,) = found.sessions, found.tenants
    assert (busiest.name, busiest.tenant, busiest.token_count) == ("sessions/busy", "default", 8)
    assert busiest.access_count >= 6
    assert (tenant.tenant, tenant.session_count) == ("default", 2)
    updates = methods["SessionService/UpdateSession"]
    assert (updates.count, updates.failed_count, sum(updates.bucket_counts)) == (5, 0, 5)
    assert len(updates.bucket_counts) == len(updates.bounds_seconds) + 1
    assert methods["SessionService/GetSession"].failed_count == found.miss_count == 1
    assert found.oldest_dirty_age.ToNanoseconds() >= 0
    assert list(found.problems) == []


async def test_an_operator_acts_for_another_tenant(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """On sessions as they are, never on rows; and it is written down."""
    caplog.set_level(logging.INFO, "ctxcache.audit")
    await stored(client)
    get = session_pb2.GetSessionRequest(name="sessions/a")

    await refused(client.sessions.GetSession(get, metadata=FOR_OTHER), Code.NOT_FOUND, "SESSION_NOT_FOUND")
    listed = await client.sessions.ListSessions(session_pb2.ListSessionsRequest(), metadata=FOR_OTHER)
    rows = session_pb2.LookupSessionsRequest(
        queries=[session_pb2.LookupQuery(name="sessions/a", model_fingerprint=client.fingerprint)]
    )
    (found,) = (await client.sessions.LookupSessions(rows, metadata=FOR_OTHER)).results

    assert not listed.sessions
    assert found.state == session_pb2.LOOKUP_STATE_HIT
    assert (await client.get("a")).token_count == 8
    lines = [record.getMessage() for record in caplog.records if record.name == "ctxcache.audit"]
    assert [("method=GetSession" in line, "tenant=other" in line) for line in lines] == [
        (True, True),
        (False, True),
    ]
    await refused(
        client.sessions.GetSession(get, metadata=((TENANT_HEADER, "/"),)),
        Code.INVALID_ARGUMENT,
        "INVALID_FIELD",
    )


async def test_a_drain_lets_go_of_who_sleeps_over_what_it_held(
    client: Client, connect: Callable[[], Awaitable[Access]], clock: FakeClock
) -> None:
    """Its lease ended some time ago, and with it the client's reason to stay, though it says nothing."""
    await stored(client)
    access = await connect()
    await access.one(acquire_lease=lease_of(client, "a"))
    drain = client.admin.Drain(ops.DrainRequest())
    status = await drain.read()
    assert (status.lease_count, status.is_done) == (1, False)

    clock.advance(seconds=301)
    async with asyncio.timeout(10):
        while not status.is_done:
            status = await drain.read()


async def test_who_holds_something_when_work_is_taken_again_stays(
    client: Client, connect: Callable[[], Awaitable[Access]]
) -> None:
    """Nothing is left of the drain: it gives back, and takes anew, on the same way."""
    await stored(client)
    access = await connect()
    lease_id = (await access.one(acquire_lease=lease_of(client, "a"))).lease.lease_id
    await client.admin.Drain(ops.DrainRequest()).read()
    await client.admin.Undrain(ops.UndrainRequest())

    await access.one(release_lease=arena_pb2.ReleaseLease(lease_id=lease_id))
    assert (await access.one(acquire_lease=lease_of(client, "a"))).lease.lease_id > lease_id


async def test_a_drain_that_gets_nowhere_holds_up_no_end(settings: Settings) -> None:
    """No path takes writes, so that it would never be done; the end does not wait for it as for a client."""
    server = await Server.start(settings.model_copy(update={"drain_timeout_s": 60}))
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await stored(client)
        for file in server.storage.ssd.files:
            file.health.fence("it is broken")
        drain = client.admin.Drain(ops.DrainRequest())
        assert not (await drain.read()).is_done
        async with asyncio.timeout(20):
            with pytest.raises(TierFailure):
                await server.stop()


async def test_a_tenant_that_cannot_be_is_refused(client: Client) -> None:
    """By every call that has it as a field, also where nobody is called so."""
    admin = client.admin
    asked: list[Any] = [
        admin.WhyMiss(admin_pb2.WhyMissRequest(name="sessions/a", tenant="no/body")),
        admin.ListLeases(ops.ListLeasesRequest(tenant="no/body")),
        admin.UpdateTenant(ops.UpdateTenantRequest(tenant="no/body", limit=0.5)),
    ]
    for call in asked:
        await refused(call, Code.INVALID_ARGUMENT, "INVALID_FIELD")
