"""Faults on purpose.

Their effects are those that docs/operations.md tells of devices that fail by themselves.
"""

import asyncio
import errno
import logging
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import FakeClock
from hung_device import HungDevice
from service_rig import Client, GrpcWay, all_rows, refused, settings_in

from ctxcache.errors import TierFailure
from ctxcache.server.server import Server
from ctxcache.settings.config import Settings
from ctxcache.storage.metadata import catalog
from ctxcache.storage.metadata.catalog import read_catalog
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.tiers.ssd import SsdFiles
from ctxcache.v1 import admin_pb2, arena_pb2, session_pb2
from ctxcache.v1 import faults_pb2 as wire
from ctxcache.v1 import operations_pb2 as ops

Code = grpc.StatusCode
READ_DELAY, WRITE_DELAY = wire.FAULT_KIND_SSD_READ_DELAY, wire.FAULT_KIND_SSD_WRITE_DELAY
READ_ERROR, WRITE_ERROR = wire.FAULT_KIND_SSD_READ_ERROR, wire.FAULT_KIND_SSD_WRITE_ERROR
BIT_FLIP, COMMIT_DELAY = wire.FAULT_KIND_SSD_READ_BIT_FLIP, wire.FAULT_KIND_COMMIT_DELAY
DELAY_S = 0.05
RELEASED_AFTER_S = 20.0
TOKENS = 8


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A server for tests, with two SSD paths."""
    return settings_in(tmp_path, ssd_directories=(tmp_path / "one", tmp_path / "two"), fault_injection=True)


def request(kind: wire.FaultKind.ValueType, **changes: Any) -> wire.InjectFaultRequest:
    """A fault that strikes once within a minute, with changes; `delay_s` and `duration_s` are spans."""
    made = wire.InjectFaultRequest(kind=kind, count=changes.pop("count", 1))
    made.duration.FromNanoseconds(round(changes.pop("duration_s", 60) * 10**9))
    if "delay_s" in changes:
        made.delay.FromNanoseconds(round(changes.pop("delay_s") * 10**9))
    made.MergeFrom(wire.InjectFaultRequest(**changes))
    return made


async def inject(client: Client, kind: wire.FaultKind.ValueType, **changes: Any) -> wire.Fault:
    """Inject it."""
    return await client.admin.InjectFault(request(kind, **changes))  # type: ignore[no-any-return]


async def faults(client: Client) -> list[wire.Fault]:
    """Those that may strike yet."""
    return list((await client.admin.ListFaults(wire.ListFaultsRequest())).faults)


async def on_ssd(client: Client, name: str, tag: int) -> None:
    """A session that SSD alone has."""
    await client.create(name)
    await client.append(name, tag, 0, TOKENS)
    await demote(client, name)


async def demote(client: Client, name: str) -> session_pb2.Session:
    """Take it out of memory."""
    return await client.admin.DemoteSession(  # type: ignore[no-any-return]
        admin_pb2.DemoteSessionRequest(name=f"sessions/{name}")
    )


async def states(client: Client) -> list[str]:
    """States of the SSD paths."""
    tiers = [tier for tier in (await client.stats()).tiers if tier.tier == session_pb2.TIER_SSD]
    return [admin_pb2.PathState.Name(tier.state).removeprefix("PATH_STATE_") for tier in tiers]


async def test_nobody_injects_anything_unless_the_server_was_started_for_it(settings: Settings) -> None:
    """Nothing is in the way of the real places then."""
    server = await Server.start(settings.model_copy(update={"fault_injection": False}))
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        for call in (
            client.admin.InjectFault(request(BIT_FLIP)),
            client.admin.ListFaults(wire.ListFaultsRequest()),
            client.admin.ClearFaults(wire.ClearFaultsRequest()),
        ):
            await refused(call, Code.FAILED_PRECONDITION, "FAULTS_NOT_ENABLED")
        assert type(server.storage.ssd) is SsdFiles
        assert type(server.storage.metadata) is RocksDbMetadata
        assert not (await client.admin.GetActivity(ops.GetActivityRequest())).problems
    await server.stop()


async def test_a_server_for_faults_says_so(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """At its start, and while there are any to whom asks what goes on."""
    with caplog.at_level(logging.WARNING):
        server = await Server.start(settings)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        assert not (await client.admin.GetActivity(ops.GetActivityRequest())).problems
        await inject(client, BIT_FLIP)
        activity = await client.admin.GetActivity(ops.GetActivityRequest())
    await server.stop()

    assert [record.getMessage().split()[0] for record in caplog.records] == ["fault_injection_on"]
    assert list(activity.problems) == ["devices fail on purpose: 1 faults are injected"]


async def test_reads_that_fail_are_told_and_fence_the_path(server: Server, client: Client) -> None:
    """With the path and why.

    After three the path takes no writes, and once they end its rows are read as before.
    """
    await on_ssd(client, "a", 1)
    slot = server.cache.ledger.names.sessions["default", "a"].segments[0].durable
    assert slot
    await inject(client, READ_ERROR, error_number=errno.EIO, count=100)
    for _ in range(3):
        facts = await refused(
            client.sessions.ReadSession(client.read_request("a")), Code.UNAVAILABLE, "TIER_FAILURE"
        )
        assert facts["path"] == server.storage.ssd.paths[slot.path_index]
        assert "Input/output error (injected)" in facts["problem"]

    assert (await states(client))[slot.path_index] == "FENCED"
    await client.admin.ClearFaults(wire.ClearFaultsRequest())
    assert (await states(client))[slot.path_index] == "FENCED"
    assert await client.read_rows("a") == all_rows(1, TOKENS)


async def test_a_device_that_hangs_is_lost_and_its_callers_are_answered(settings: Settings) -> None:
    """As one that says EIO: look-ups are right at once, others go on, and it is back when it has answered."""
    server = await Server.start(settings.model_copy(update={"ssd_hang_after_s": 1.0}))
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        for tag, name in enumerate(("a", "b")):
            await on_ssd(client, name, tag)
        sessions = [server.cache.ledger.names.sessions["default", name] for name in ("a", "b")]
        homes = [
            session.segments[0].durable.path_index for session in sessions if session.segments[0].durable
        ]
        hung = homes[0]
        path = server.storage.ssd.paths[hung]
        await inject(client, READ_DELAY, delay_s=4, path=path, count=100)
        facts = await refused(
            client.sessions.ReadSession(client.read_request("a")), Code.UNAVAILABLE, "TIER_FAILURE"
        )
        found = await client.get("a")
        elsewhere = await client.read_rows("b")
        state = (await states(client))[hung]
        await client.admin.ClearFaults(wire.ClearFaultsRequest())
        while (await states(client))[hung] != "OPEN":  # noqa: ASYNC110  # the device's own thread ends it
            await asyncio.sleep(0.05)
        # Its thread says so first, and then the loop hears of it: what lies there is found from then on.
        while not (await client.get("a")).token_count:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.05)
        back = await client.read_rows("a")
    await server.stop()

    assert sorted(homes) == [0, 1]
    assert facts == {"path": path, "problem": "an operation has not come back for 1 s"}
    assert (found.token_count, state) == (0, "LOST")
    assert elsewhere == all_rows(1, TOKENS)
    assert back == all_rows(0, TOKENS)


async def test_a_catalog_that_hangs_stops_nobody_else(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first SSD directory, which is a device of its own, answers nothing.

    A commit waits, for a bounded while, and all else is answered.
    """
    monkeypatch.setattr(catalog, "_device", str)
    server = await Server.start(settings.model_copy(update={"ssd_hang_after_s": 1.0}))
    directory = settings.ssd_directories[0] / "catalog"
    device = HungDevice(str(directory / "00000001.log"), ("write",))
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        await client.append("a", 1, 0, TOKENS)
        with device.hung(monkeypatch):
            # Where the event loop waits for the device, nothing else could let it go.
            release = threading.Timer(RELEASED_AFTER_S, device.answer)
            release.start()
            waiting = asyncio.create_task(client.create("b"))
            await asyncio.to_thread(device.came.wait)
            found = await client.get("a")
            rows = await client.read_rows("a")
            way = GrpcWay(client.arena.Access())
            lease = arena_pb2.AcquireLease(session="sessions/a", model_fingerprint=client.fingerprint)
            leased = await way.one(acquire_lease=lease)
            assert device.is_hung, "the event loop waited for the device"
            assert not waiting.done()
            await waiting
            # The catalog is lost by now: nobody waits for it any more.
            await client.create("c")
            assert device.is_hung, "a commit waited for what is lost"
            release.cancel()
            await way.finish()
        count = 0
        while not (directory / "00000002.base").exists():
            count += 1
            await client.create(f"d{count}")
    await server.stop()

    assert (found.token_count, rows) == (TOKENS, all_rows(1, TOKENS))
    assert leased.HasField("lease"), leased
    instance_id = server.storage.directory.instance_id
    contents = read_catalog(directory, instance_id)
    store = RocksDbMetadata(server.storage.directory.metadata_path)
    kept = dict(store.raw())
    store.close()
    assert contents.problems == []
    assert contents.records == kept


async def test_one_read_that_fails_is_made_good_by_the_next(client: Client) -> None:
    """Rows that cannot be brought to memory are read without: nobody notices."""
    await on_ssd(client, "a", 1)
    await inject(client, READ_ERROR, error_number=errno.EIO)

    assert await client.read_rows("a") == all_rows(1, TOKENS)
    assert await faults(client) == []
    assert await states(client) == ["OPEN", "OPEN"]


@pytest.mark.parametrize(("number", "state"), [(errno.EIO, "FENCED"), (errno.ENOSPC, "RESTING")])
async def test_a_write_that_fails_goes_to_another_path(client: Client, number: int, state: str) -> None:
    """The path is out of use, for good or for a while; nobody notices, nothing is lost."""
    await inject(client, WRITE_ERROR, error_number=number)
    await on_ssd(client, "a", 1)

    assert sorted(await states(client)) == sorted(["OPEN", state])
    assert await client.read_rows("a") == all_rows(1, TOKENS)


async def test_when_no_path_takes_writes_flushes_say_so(settings: Settings) -> None:
    """Rows in memory are read; the end of the server says what is lost."""
    server = await Server.start(settings)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        await client.append("a", 1, 0, TOKENS)
        await inject(client, WRITE_ERROR, error_number=errno.EIO, count=2)
        await refused(demote(client, "a"), Code.UNAVAILABLE, "TIER_FAILURE")

        assert await states(client) == ["FENCED", "FENCED"]
        assert await client.read_rows("a") == all_rows(1, TOKENS)
    with pytest.raises(TierFailure, match="injected"):
        await server.stop()


async def test_a_wrong_bit_is_corrupt_and_never_returned(client: Client) -> None:
    """The reader is told, and why-miss; other sessions are read.

    The place is right, and given back when it is tested.
    """
    await on_ssd(client, "a", 1)
    await on_ssd(client, "b", 2)
    await inject(client, BIT_FLIP)
    found: list[session_pb2.ReadSessionResponse] = []
    call = client.sessions.ReadSession(client.read_request("a"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        found += [message async for message in call]

    assert caught.value.code() is Code.DATA_LOSS
    assert not [message for message in found if message.HasField("chunk")]
    why = await client.admin.WhyMiss(admin_pb2.WhyMissRequest(name="sessions/a"))
    assert (why.reason, why.token_count) == (admin_pb2.MISS_EVENT_CORRUPT, 0)
    assert await client.read_rows("b") == all_rows(2, TOKENS)
    stats = await client.stats()
    assert (stats.corrupt_segment_count, stats.quarantined_slot_count) == (1, 1)
    verified = [m async for m in client.admin.Verify(admin_pb2.VerifyRequest(release=True))]
    assert verified[0].released_slot_count == 1
    assert not any(message.bad for message in verified)


async def test_a_wrong_bit_is_corrupt_to_who_reads_past_memory_too(client: Client) -> None:
    """Its rows could not be brought there: every read of theirs is verified all the same."""
    await on_ssd(client, "a", 1)
    await inject(client, READ_ERROR, error_number=errno.EIO)
    await inject(client, BIT_FLIP)

    call = client.sessions.ReadSession(client.read_request("a"))
    await refused(call, Code.DATA_LOSS, "CORRUPT_SEGMENT")
    assert await faults(client) == []


@pytest.mark.parametrize("kind", [READ_DELAY, WRITE_DELAY, COMMIT_DELAY])
async def test_a_delay_delays_and_changes_nothing(client: Client, kind: wire.FaultKind.ValueType) -> None:
    """Neither the order of changes nor a byte: two sessions at a time, one of which meets it first."""
    injected = await inject(client, kind, count=2, delay_s=DELAY_S)
    assert injected.delay.ToNanoseconds() == round(DELAY_S * 10**9)
    begin_s = asyncio.get_running_loop().time()
    await asyncio.gather(on_ssd(client, "a", 1), on_ssd(client, "b", 2))
    rows = await asyncio.gather(client.read_rows("a"), client.read_rows("b"))

    assert asyncio.get_running_loop().time() - begin_s >= DELAY_S
    assert list(rows) == [all_rows(1, TOKENS), all_rows(2, TOKENS)]
    assert await faults(client) == []


async def test_a_fault_of_one_path_leaves_the_other_alone(server: Server, client: Client) -> None:
    """By its directory, as of `tier rest`."""
    first = server.storage.ssd.paths[0]
    injected = await inject(
        client, WRITE_ERROR, error_number=errno.EIO, path=str(Path(first).parent), count=100
    )
    for tag in range(4):
        await on_ssd(client, f"s{tag}", tag)

    assert injected.path == first
    assert await states(client) == ["FENCED", "OPEN"]
    assert (await faults(client))[0].left_count == 99


async def test_faults_are_listed_by_pages(client: Client) -> None:
    """The oldest first, each once; a page that is not one of ours is refused."""
    made = [(await inject(client, READ_ERROR, error_number=errno.EIO, count=1)).fault_id for _ in range(5)]
    listed, token = [], ""
    for size in (2, 2, 1):
        page = await client.admin.ListFaults(wire.ListFaultsRequest(page_size=2, page_token=token))
        assert len(page.faults) == size
        listed += [fault.fault_id for fault in page.faults]
        token = page.next_page_token

    assert listed == made
    assert token == ""
    for bad in (wire.ListFaultsRequest(page_size=-1), wire.ListFaultsRequest(page_token="x")):  # noqa: S106
        await refused(client.admin.ListFaults(bad), Code.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_cleared_faults_strike_no_more(client: Client) -> None:
    """All of them, and how many they were is told."""
    await on_ssd(client, "a", 1)
    for kind in (READ_ERROR, WRITE_ERROR):
        await inject(client, kind, error_number=errno.EIO, count=100)

    assert (await client.admin.ClearFaults(wire.ClearFaultsRequest())).cleared_fault_count == 2
    assert await faults(client) == []
    assert await client.read_rows("a") == all_rows(1, TOKENS)
    await on_ssd(client, "b", 2)
    assert await states(client) == ["OPEN", "OPEN"]


async def test_a_restart_ends_faults(settings: Settings, clock: FakeClock) -> None:
    """Rows are there, and a path that was fenced takes writes."""
    for is_first in (True, False):
        server = await Server.start(settings, clock)
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            client = Client(channel)
            await client.register()
            assert await faults(client) == []
            assert await states(client) == ["OPEN", "OPEN"]
            if is_first:
                await on_ssd(client, "a", 1)
                await inject(client, BIT_FLIP, count=100)
                await inject(client, WRITE_ERROR, error_number=errno.EIO)
                await on_ssd(client, "b", 2)
                assert sorted(await states(client)) == ["FENCED", "OPEN"]
            else:
                assert await client.read_rows("a") == all_rows(1, TOKENS)
                assert await client.read_rows("b") == all_rows(2, TOKENS)
        await server.stop()


@pytest.mark.parametrize(
    ("field", "made"),
    [
        ("kind", request(wire.FAULT_KIND_UNSPECIFIED)),
        ("kind", wire.InjectFaultRequest(kind=99, count=1)),  # type: ignore[arg-type]  # none of ours
        ("count", request(BIT_FLIP, count=0)),
        ("count", request(BIT_FLIP, count=10_001)),
        ("duration", request(BIT_FLIP, duration_s=0)),
        ("duration", request(BIT_FLIP, duration_s=3600.1)),
        ("path", request(BIT_FLIP, path="/nowhere")),
        ("path", request(COMMIT_DELAY, delay_s=1, path="/nowhere")),
        ("delay", request(READ_DELAY)),
        ("delay", request(READ_DELAY, delay_s=10.1)),
        ("delay", request(BIT_FLIP, delay_s=1)),
        ("error_number", request(READ_ERROR)),
        ("error_number", request(READ_ERROR, error_number=-5)),
        ("error_number", request(BIT_FLIP, error_number=5)),
    ],
    ids=str,
)
async def test_what_is_no_fault_is_refused(client: Client, field: str, made: wire.InjectFaultRequest) -> None:
    """By the field, and without a bound nothing is injected."""
    facts = await refused(client.admin.InjectFault(made), Code.INVALID_ARGUMENT, "INVALID_FIELD")

    assert facts["field"] == field
    assert await faults(client) == []


async def test_there_are_never_many(client: Client) -> None:
    """The seventeenth is refused, until others are over."""
    for _ in range(16):
        await inject(client, BIT_FLIP)
    call = client.admin.InjectFault(request(BIT_FLIP))
    await refused(call, Code.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
    assert len(await faults(client)) == 16
