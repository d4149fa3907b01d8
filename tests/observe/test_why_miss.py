"""why-miss: what the store says of a session that is not as it was."""

import json
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from observed import fetch, load, observed
from scraped import parsed
from service_rig import Client, GrpcWay, until

from ctxcache.server.server import Server
from ctxcache.v1 import admin_pb2, arena_pb2, hints_pb2, hints_pb2_grpc, session_pb2
from ctxcache.v1.admin_pb2 import MissEvent


async def _why(client: Client, session_id: str, **facts: str) -> admin_pb2.WhyMissResponse:
    request = admin_pb2.WhyMissRequest(name=f"sessions/{session_id}", **facts)
    return await client.admin.WhyMiss(request)  # type: ignore[no-any-return]


def _events(answer: admin_pb2.WhyMissResponse) -> list[str]:
    return [MissEvent.Name(one.event).removeprefix("MISS_EVENT_") for one in answer.happenings]


async def test_what_was_evicted_says_for_whom(tmp_path: Path) -> None:
    """With the tokens that went, and when."""
    async with observed(tmp_path) as (_, client, clock):
        deleted = await load(client, clock)
        answers = [await _why(client, f"s{i}") for i in range(24) if i != deleted]
        gone = [answer for answer in answers if not answer.is_there]

    assert gone
    for answer in gone:
        assert answer.reason == MissEvent.MISS_EVENT_EVICTED
        (one,) = answer.happenings
        assert one.token_count == 130
        assert one.detail.startswith("room on SSD for sessions/s")
        assert answer.tenant == "default"


async def test_what_was_computed_in_vain_is_told(tmp_path: Path) -> None:
    """Added up in the tenant's metric and on its line of the status page; why-miss says it of the session."""
    told = hints_pb2.AheadHint(computed_token_count=900, used_token_count=600, wasted_token_count=70)
    action = hints_pb2.HintAction(session="sessions/edited", ahead=told)
    async with observed(tmp_path, metrics_listen="127.0.0.1:0") as (server, client, _):
        await client.create("edited")
        hints = hints_pb2_grpc.HintServiceStub(client.channel)
        for _ in range(2):
            await hints.Hint(hints_pb2.HintRequest(actions=[action]))
        answer = await _why(client, "edited")
        _, text = await fetch(server, "/metrics")
        _, status = await fetch(server, "/status.json")

    (one,) = answer.happenings
    assert _events(answer) == ["COMPUTED_IN_VAIN"]
    assert (answer.is_there, one.token_count, one.count) == (True, 70, 2)
    tokens = parsed(text)["ctxcache_tenant_ahead_tokens_total"]
    assert {dict(labels)["what"]: value for labels, value in tokens.items()} == {
        "computed": 1800, "used": 1200, "wasted": 140,
    }  # fmt: skip
    (tenant,) = json.loads(status)["tenants"]
    assert (tenant["ahead_token_count"], tenant["ahead_used_token_count"]) == (1800, 1200)


async def test_each_way_to_lose_something(tmp_path: Path) -> None:
    """Deleted, expired, truncated, another model, never stored."""
    async with observed(tmp_path) as (_, client, clock):
        await client.create("gone")
        await client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name="sessions/gone"))
        await client.create("short", ttl=Duration(seconds=1))
        await client.create("cut")
        await client.append("cut", 1, 0, 10)
        await client.sessions.TruncateSession(
            session_pb2.TruncateSessionRequest(name="sessions/cut", keep_first=4)
        )
        for _ in range(3):
            query = session_pb2.LookupQuery(name="sessions/cut", model_fingerprint=b"x" * 32)
            await client.sessions.LookupSessions(session_pb2.LookupSessionsRequest(queries=[query]))
        clock.advance(seconds=2)
        gone, short, cut, never = [await _why(client, name) for name in ("gone", "short", "cut", "never")]

    assert (gone.is_there, gone.reason) == (False, MissEvent.MISS_EVENT_DELETED)
    assert (short.is_there, short.reason) == (False, MissEvent.MISS_EVENT_EXPIRED)
    assert (cut.is_there, cut.token_count) == (True, 4)
    assert _events(cut) == ["TRUNCATED", "FINGERPRINT_MISMATCH"]
    assert (cut.happenings[0].token_count, cut.happenings[1].count) == (6, 3)
    assert (never.is_there, never.reason, list(never.happenings)) == (
        False,
        MissEvent.MISS_EVENT_UNSPECIFIED,
        [],
    )
    assert never.HasField("remembered_since")


async def test_refused_readers_and_writers_are_remembered(tmp_path: Path) -> None:
    """A lease that is not released, a write for which there is no room."""
    async with observed(tmp_path, room_wait_s=0) as (server, client, clock):
        await client.create("one")
        await client.append("one", 1, 0, 64)
        way = GrpcWay(client.arena.Access())
        acquire = arena_pb2.AcquireLease(session="sessions/one", model_fingerprint=client.fingerprint)
        await way.one(acquire_lease=acquire)
        clock.advance(seconds=301)
        await until(lambda: _is_idle(server))
        reserve = arena_pb2.Reserve(
            session="sessions/one", model_fingerprint=client.fingerprint, write_offset=64, token_count=1 << 20
        )
        refused = await way.one(reserve=reserve)
        answer = await _why(client, "one")
        way.die()

    assert refused.error.reason == "CAPACITY_EXCEEDED"
    assert _events(answer) == ["TIMEOUT", "QUOTA"]
    assert answer.happenings[1].detail == "write: CAPACITY_EXCEEDED"


async def test_damage_is_told_with_what_it_cost(tmp_path: Path) -> None:
    """The session ends before it, and says so; the reader's miss counts as corrupt."""
    async with observed(tmp_path) as (server, client, _clock):
        await client.create("one")
        await client.append("one", 1, 0, 128, is_durable=True)
        await client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name="sessions/one"))
        segment = server.cache.ledger.names.sessions["default", "one"].segments[1]
        assert segment.durable is not None
        _damage(
            Path(server.storage.ssd.paths[segment.durable.path_index]), segment.durable.offset_bytes + 4096
        )
        with pytest.raises(grpc.aio.AioRpcError):
            await client.read_rows("one")
        answer = await _why(client, "one")

    assert (answer.is_there, answer.token_count) == (True, 64)
    assert _events(answer) == ["CORRUPT"]
    assert answer.happenings[0].token_count == 64


async def test_it_is_no_access_and_of_one_tenant_alone(tmp_path: Path) -> None:
    """Asking changes nothing; another tenant's session of that name is another one."""
    async with observed(tmp_path) as (_, client, clock):
        await client.create("one")
        before = await client.get("one")
        clock.advance(seconds=5)
        here, elsewhere = await _why(client, "one"), await _why(client, "one", tenant="other")
        after = await client.get("one")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _why(client, "not a name")

    assert before.access_time == after.access_time
    assert (here.is_there, elsewhere.is_there, elsewhere.tenant) == (True, False, "other")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


TRACES = [f"00-{i:032x}-00f067aa0ba902b7-01" for i in range(1, 5)]


async def test_a_request_that_names_its_trace_is_remembered(tmp_path: Path) -> None:
    """Its vain look-ups, and its effects on others."""
    async with observed(tmp_path) as (_, client, _clock):
        await client.create("cut")
        await client.append("cut", 1, 0, 10)
        await client.sessions.TruncateSession(
            session_pb2.TruncateSessionRequest(name="sessions/cut", keep_first=4), metadata=_in(TRACES[0])
        )
        for name in ("never", "never", "other"):
            with pytest.raises(grpc.aio.AioRpcError):
                await client.sessions.GetSession(
                    session_pb2.GetSessionRequest(name=f"sessions/{name}"), metadata=_in(TRACES[1])
                )
        await client.sessions.LookupSessions(
            session_pb2.LookupSessionsRequest(
                queries=[session_pb2.LookupQuery(name="sessions/cut", model_fingerprint=b"x" * 32)]
            ),
            metadata=_in(TRACES[1]),
        )
        cut, looked, nothing = [await _of_request(client, trace) for trace in (*TRACES[:2], TRACES[3])]
        happened = (await _why(client, "cut")).happenings
        elsewhere = await _of_request(client, TRACES[1], tenant="other")

    assert [(one.session, one.access, one.result, one.count) for one in looked.misses] == [
        ("sessions/never", "lookup", "never_stored", 2),
        ("sessions/other", "lookup", "never_stored", 1),
        ("sessions/cut", "lookup", "fingerprint_mismatch", 1),
    ]
    assert (looked.name, looked.is_there, looked.token_count) == ("sessions/cut", True, 4)
    assert [one.trace_id for one in happened] == [_id(TRACES[0]), _id(TRACES[1])]
    for one in (cut, nothing, elsewhere):
        assert (one.name, list(one.misses)) == ("", [])


async def test_a_local_clients_batch_names_a_trace_of_its_own(tmp_path: Path) -> None:
    """One that names none is of no trace, whatever was named before it."""
    async with observed(tmp_path) as (_, client, _clock):
        way = GrpcWay(client.arena.Access())
        acquire = arena_pb2.AcquireLease(session="sessions/gone", model_fingerprint=client.fingerprint)
        operations = [arena_pb2.Operation(acquire_lease=acquire)]
        for number, trace_parent in enumerate((TRACES[2], "")):
            batch = arena_pb2.AccessRequest(
                request_id=number, operations=operations, trace_parent=trace_parent
            )
            await way.write(batch)
            assert await way.read()
        way.die()
        leased = await _of_request(client, TRACES[2])

    assert [(one.session, one.access, one.count) for one in leased.misses] == [("sessions/gone", "read", 1)]


@pytest.mark.parametrize(
    "facts",
    [
        {"trace_id": "1" * 32, "name": "sessions/one"},
        {"trace_id": "1" * 31},
        {"trace_id": TRACES[0]},
        {"trace_id": "G" * 32},
        {},
    ],
)
async def test_what_is_no_trace_is_refused(facts: dict[str, str], tmp_path: Path) -> None:
    """A session and a trace, neither, and what is not a trace's id."""
    async with observed(tmp_path) as (_, client, _clock):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.admin.WhyMiss(admin_pb2.WhyMissRequest(**facts))

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _of_request(client: Client, trace_parent: str, **facts: str) -> admin_pb2.WhyMissResponse:
    request = admin_pb2.WhyMissRequest(trace_id=_id(trace_parent), **facts)
    return await client.admin.WhyMiss(request)  # type: ignore[no-any-return]


def _in(trace_parent: str) -> tuple[tuple[str, str], ...]:
    return (("traceparent", trace_parent),)


def _id(trace_parent: str) -> str:
    return trace_parent.split("-")[1]


def _damage(path: Path, offset_bytes: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        file.write(b"\xff" * 64)


def _is_idle(server: Server) -> bool:
    return server.cache.leases.lease_count == 0
