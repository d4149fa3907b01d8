"""HintService.Schedule over a real server.

Queues, their merging, their loss, and what is told of sessions.
"""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from fakes import FakeClock
from hint_rig import Engine, job, seconds
from service_rig import KV, Client, ranges, refused, until

from ctxcache.core.ledger.work import Work, at_work
from ctxcache.core.placement.schedule import Job
from ctxcache.server.server import Server
from ctxcache.service import fairness
from ctxcache.settings.config import Settings
from ctxcache.v1 import admin_pb2, hints_pb2, session_pb2

Code = grpc.StatusCode
SLOT_BYTES = 28672
JOBS = 32


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """Few engines and few jobs, and a policy that gives up sessions whose job waits."""
    return settings.model_copy(
        update={"max_engines": 3, "max_engine_jobs": JOBS, "engine_grace_s": 20, "placement_policy": "lru"}
    )


@pytest.fixture
async def connect(client: Client) -> AsyncIterator[Callable[[], Engine]]:
    """Open streams, broken off at the end."""
    opened: list[Engine] = []

    def open_one() -> Engine:
        opened.append(Engine(client.channel))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.call.cancel()


@pytest.fixture
async def engine(connect: Callable[[], Engine]) -> Engine:
    """A stream that has said hello."""
    made = connect()
    await made.hello()
    return made


def starts_in_s(server: Server, name: str = "a") -> float | None:
    """When the store expects the session's next job."""
    cache = server.cache
    return cache.queues.starts_in_s(cache.ledger.names.sessions["default", name])


async def demote(client: Client, name: str) -> None:
    """Take a session out of DRAM."""
    await client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name=f"sessions/{name}"))


async def lost(server: Server, count: int = 1) -> None:
    """Wait until so many engines have lost their stream."""
    queues = server.cache.queues.by_name()
    await until(lambda: sum(q.lost_until_ns is not None for q in queues.values()) == count)


async def test_a_hello_is_answered_with_what_is_granted(connect: Callable[[], Engine]) -> None:
    """Grace within the limit, and how many jobs there may be."""
    engines = [connect() for _ in range(3)]
    answers = [
        await engines[0].hello("one"),
        await engines[1].hello("two", grace=seconds(5)),
        await engines[2].hello("three", grace=seconds(500)),
    ]

    assert [answer.grace.seconds for answer in answers] == [20, 5, 20]
    assert {answer.job_limit for answer in answers} == {JOBS}
    assert {answer.job_count for answer in answers} == {0}


async def test_a_job_tells_where_the_state_is(client: Client, engine: Engine) -> None:
    """Layers that the session stores, in DRAM; after a demotion on SSD, with what has to come; then back."""
    await client.create("a")
    await client.append("a", 1, 0, 100, is_durable=True)
    answer = await engine.put(job(1))
    first = await engine.event()
    await demote(client, "a")
    second = await engine.event()
    await client.read("a")
    third = await engine.event()

    assert (answer.job_count, list(answer.missing)) == (1, [])
    assert (first.readiness.token_count, first.readiness.missing_bytes) == (100, 0)
    assert first.readiness.ready_in.ToNanoseconds() == 0
    assert [(run.layer_begin, run.layer_end, run.state) for run in first.readiness.layers] == [
        (0, 2, hints_pb2.LAYER_STATE_DRAM)
    ]
    assert list(first.changes) == []
    assert list(second.changes) == [hints_pb2.SESSION_CHANGE_DEMOTED]
    assert second.readiness.missing_bytes == 2 * SLOT_BYTES
    assert second.readiness.ready_in.ToNanoseconds() > 0
    assert second.readiness.layers[0].state == hints_pb2.LAYER_STATE_SSD
    assert list(third.changes) == [hints_pb2.SESSION_CHANGE_PROMOTED]
    assert third.readiness == first.readiness


async def test_a_queued_session_is_promoted_ahead_of_its_turn(client: Client, settings: Settings) -> None:
    """By a policy that looks ahead: nobody reads, and the engine hears that it is ready."""
    ahead = settings.model_copy(
        update={"placement_policy": "look-ahead", "data_directory": settings.data_directory / "ahead"}
    )
    server = await Server.start(ahead, FakeClock())
    try:
        async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
            other = Client(channel)
            await other.register()
            await other.create("a")
            await other.append("a", 1, 0, 100, is_durable=True)
            await demote(other, "a")
            engine = Engine(channel)
            await engine.hello()
            await engine.put(job(1))
            while (event := await engine.event()).readiness.missing_bytes:
                pass
            assert await engine.finish() == 1
    finally:
        await server.stop()

    assert hints_pb2.SESSION_CHANGE_PROMOTED in event.changes
    assert event.readiness.layers[0].state == hints_pb2.LAYER_STATE_DRAM


async def test_layers_that_are_not_stored_are_missing(client: Client, engine: Engine) -> None:
    """A session that keeps one layer of two."""
    request = session_pb2.CreateSessionRequest(session_id="a", model="models/tiny", layout=ranges(KV))
    await client.sessions.CreateSession(request)
    await engine.put(job(1))
    event = await engine.event()

    assert [(run.layer_begin, run.layer_end, run.state) for run in event.readiness.layers] == [
        (0, 1, hints_pb2.LAYER_STATE_MISSING),
        (1, 2, hints_pb2.LAYER_STATE_DRAM),
    ]


async def test_expired_and_deleted_sessions_are_told(
    client: Client, engine: Engine, clock: FakeClock
) -> None:
    """With no readiness, since nothing is there."""
    await client.create("a", ttl=seconds(60))
    await client.create("b")
    await engine.put(job(1), job(2, "b"))
    await engine.event("a")
    await engine.event("b")
    await client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name="sessions/b"))
    deleted = await engine.event("b")
    clock.advance(seconds=61)
    expired = await engine.event("a")

    for event in (deleted, expired):
        assert list(event.changes) == [hints_pb2.SESSION_CHANGE_EXPIRED]
        assert event.readiness == hints_pb2.Readiness()
        assert not event.readiness.HasField("ready_in")
    assert (await engine.gone(1, 2)).job_count == 0


async def test_evicted_sessions_are_told(client: Client, engine: Engine) -> None:
    """The engine hears of each of its sessions that is given up for others."""
    await client.create("a")
    await client.append("a", 1, 0, 100, is_durable=True)
    await engine.put(job(1))
    await engine.event()
    for number in range(40):
        await client.create(f"other-{number}")
        await client.append(f"other-{number}", 1, 0, 320, is_durable=True)
    changes = [hints_pb2.SESSION_CHANGE_DEMOTED, hints_pb2.SESSION_CHANGE_EVICTED]
    event = await engine.event()
    if list(event.changes) == changes[:1]:
        event = await engine.event()

    assert hints_pb2.SESSION_CHANGE_EVICTED in event.changes
    assert event.readiness.token_count == 0


async def test_jobs_of_sessions_that_are_not_there_are_named(client: Client, engine: Engine) -> None:
    """They keep their places, and are looked up again when they are put again."""
    await client.create("a")
    answer = await engine.put(job(1, "nobody"), job(2), job(3, "nobody"))
    missing = [(item.job_id, item.reason) for item in answer.missing]
    await client.create("nobody")
    again = await engine.put(job(3, "nobody"))

    assert missing == [("job-1", "SESSION_NOT_FOUND"), ("job-3", "SESSION_NOT_FOUND")]
    assert (answer.job_count, again.job_count, list(again.missing)) == (3, 3, [])


async def test_another_models_sessions_are_missing(client: Client, connect: Callable[[], Engine]) -> None:
    """For an engine that says which model it runs."""
    await client.create("a")
    mine, other = connect(), connect()
    await mine.hello("mine", model_fingerprint=client.fingerprint)
    await other.hello("other", model_fingerprint=bytes(32))

    assert not (await mine.put(job(1))).missing
    assert [m.reason for m in (await other.put(job(1))).missing] == ["MODEL_FINGERPRINT_MISMATCH"]


async def test_two_engines_queues_are_one(
    client: Client, connect: Callable[[], Engine], server: Server
) -> None:
    """The earliest wins; when it is gone, the other engine's job counts."""
    await client.create("a")
    one, two = connect(), connect()
    await one.hello("one")
    await two.hello("two")
    await one.put(job(1, start_in=seconds(50)))
    alone = starts_in_s(server)
    await two.put(job(1, start_in=seconds(20)))
    merged = starts_in_s(server)
    await two.gone(1)
    back = starts_in_s(server)
    await one.gone(1, end=hints_pb2.JOB_END_CANCELLED)

    assert alone == pytest.approx(50, abs=0.01)
    assert merged == pytest.approx(20, abs=0.01)
    assert back == alone
    assert starts_in_s(server) is None


async def test_the_policy_hears_the_merged_order(
    client: Client, engine: Engine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hints, their withdrawal, and again after a turn that was not the job's."""
    heard: list[tuple[str, bytes]] = []
    policy = server.cache.placement.policy
    monkeypatch.setattr(policy, "hinted", lambda name, _: heard.append(("hinted", name)))
    monkeypatch.setattr(policy, "withdrawn", lambda name: heard.append(("withdrawn", name)))
    name = b"default\0a"
    await client.create("a")
    await engine.put(job(1, start_in=seconds(9)))
    hinted = list(heard)
    await client.append("a", 1, 0, 10)
    used = heard[len(hinted) :]
    await engine.gone(1, end=hints_pb2.JOB_END_CANCELLED)

    assert hinted == [("hinted", name)]
    assert used == [("withdrawn", name), ("hinted", name)]
    assert heard[-1] == ("withdrawn", name)
    heard.clear()
    await client.append("a", 1, 10, 20)
    # The session waits in no queue any more: a turn withdraws nothing.
    assert heard == []


async def test_a_snapshot_replaces_the_queue(client: Client, engine: Engine, server: Server) -> None:
    """Jobs that are not in it are gone."""
    for name in ("a", "b", "c"):
        await client.create(name)
    await engine.put(job(1, "a"), job(2, "b"))
    answer = await engine.snapshot(job(2, "b"), job(3, "c"))

    assert answer.job_count == 2
    assert starts_in_s(server, "a") is None
    assert starts_in_s(server, "b") is not None
    assert (await engine.snapshot()).job_count == 0


async def break_off(engine: Engine) -> None:
    """The client cancels."""
    engine.call.cancel()


async def be_wrong(engine: Engine) -> None:
    """The client does not keep to the protocol."""
    await engine.write(sequence=1)
    with pytest.raises(grpc.aio.AioRpcError):
        await engine.drain()


@pytest.mark.parametrize("end", [break_off, be_wrong])
async def test_a_broken_streams_jobs_stay_for_the_grace_period(
    client: Client, engine: Engine, server: Server, clock: FakeClock, end: Any
) -> None:
    """And are withdrawn then, not before."""
    await client.create("a")
    await engine.put(job(1))
    await end(engine)
    await lost(server)
    clock.advance(seconds=19)
    await at_work(server.cache.queues.end_overdue())
    assert starts_in_s(server) is not None

    clock.advance(seconds=1)
    await until(lambda: starts_in_s(server) is None)
    assert server.cache.queues.engine_count == 0


async def test_no_grace_is_none(client: Client, connect: Callable[[], Engine], server: Server) -> None:
    """An engine may ask for its jobs to go with its stream."""
    engine = connect()
    await client.create("a")
    await engine.hello(grace=seconds(0))
    await engine.put(job(1))
    engine.call.cancel()

    await until(lambda: server.cache.queues.engine_count == 0)
    assert starts_in_s(server) is None


async def test_half_close_withdraws_at_once(client: Client, engine: Engine, server: Server) -> None:
    """With how much was withdrawn."""
    await client.create("a")
    await engine.put(job(1), job(2))

    assert await engine.finish() == 2
    assert server.cache.queues.engine_count == 0
    assert starts_in_s(server) is None
    assert server.cache.queues.schedule.is_empty
    assert not server.cache.placement.watched


async def test_a_withdrawal_that_is_cut_off_is_finished_by_upkeep(
    client: Client, engine: Engine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are forgotten some at a time; meanwhile an engine of that name may begin anew."""
    await client.create("a")
    await engine.put(*(job(i) for i in range(JOBS)))
    monkeypatch.setattr("ctxcache.cache.queues.JOBS_PER_SLICE", 5)
    queues = server.cache.queues
    old = queues.by_name()["default\0engine"]
    withdrawal = asyncio.ensure_future(at_work(queues.withdraw(old)))
    await asyncio.sleep(0)
    withdrawal.cancel()
    assert queues.job_count(old) == JOBS - 5
    new = queues.join("default", "engine", grace_ns=None, fingerprint=b"")
    with Work():
        queues.put(new, "a", Job("job-0", None, start_s=server.cache.state.clock.monotonic_ns() / 1e9 + 9))
    await until(lambda: not queues.leaving)

    assert (queues.job_count(old), queues.job_count(new)) == (0, 1)
    assert starts_in_s(server) == pytest.approx(9, abs=0.01)


def _die_with_a_queue(target: str, is_ready: Any) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            engine = Engine(channel)
            await engine.hello("mortal")
            await engine.put(job(1))
            is_ready.set()
            await asyncio.sleep(60)

    asyncio.run(run())


async def test_a_killed_engine_is_no_half_close(client: Client, server: Server) -> None:
    """Its jobs stay for the grace period."""
    await client.create("a")
    context = multiprocessing.get_context("spawn")
    is_ready = context.Event()
    engine = context.Process(target=_die_with_a_queue, args=(server.addresses[0], is_ready), daemon=True)
    engine.start()
    try:
        assert await asyncio.to_thread(is_ready.wait, 30)
    finally:
        os.kill(engine.pid or 0, signal.SIGKILL)
        engine.join()
    await until(lambda: server.cache.queues.engine_count == 0 or _is_lost(server))

    assert starts_in_s(server) is not None


def _is_lost(server: Server) -> bool:
    return any(queue.lost_until_ns is not None for queue in server.cache.queues.by_name().values())


async def test_an_engine_that_comes_back_finds_its_jobs(
    client: Client, connect: Callable[[], Engine], server: Server, clock: FakeClock
) -> None:
    """And is told how their sessions stand; they stay beyond the first grace period."""
    await client.create("a")
    first, second = connect(), connect()
    await first.hello()
    await first.put(job(1))
    first.call.cancel()
    await lost(server)
    clock.advance(seconds=10)
    welcome = await second.hello()
    event = await second.event()
    clock.advance(seconds=100)
    await at_work(server.cache.queues.end_overdue())

    assert welcome.job_count == 1
    assert event.session == "sessions/a"
    assert starts_in_s(server) is not None
    assert (await second.snapshot(job(2))).job_count == 1


async def test_a_second_stream_takes_over(
    client: Client, connect: Callable[[], Engine], server: Server
) -> None:
    """The first may be dead and not known to be: it is told, and what ends it withdraws nothing."""
    await client.create("a")
    first, second = connect(), connect()
    await first.hello()
    await first.put(job(1))
    await second.hello()
    facts = await refused(first.drain(), Code.ABORTED, "ENGINE_TAKEN_OVER")

    assert facts == {"engine": "engine"}
    assert (await second.put(job(2))).job_count == 2
    assert _is_lost(server) is False


async def test_engines_are_bounded(client: Client, connect: Callable[[], Engine], server: Server) -> None:
    """Those in their grace period count too; their room is given when it is over."""
    for name in ("one", "two", "three"):
        await connect().hello(name)
    fourth = connect()
    await fourth.write(hello=hints_pb2.ScheduleHello(engine="four"))
    facts = await refused(fourth.drain(), Code.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")

    assert facts == {"what": "engines", "limit": "3"}
    assert server.cache.queues.engine_count == 3


async def test_jobs_are_bounded(client: Client, engine: Engine, server: Server) -> None:
    """A request beyond the bound is refused whole; the queue is as it was, and the stream goes on."""
    await client.create("a")
    await engine.put(*(job(i) for i in range(JOBS)))
    refusals = [
        await engine.put(job(JOBS)),
        await engine.put(*(job(i) for i in range(1, JOBS + 1))),
        await engine.snapshot(*(job(i) for i in range(JOBS + 1))),
        await engine.put(*(job(i) for i in range(1025))),
    ]
    await engine.write(
        delta=hints_pb2.QueueDelta(
            put=[job(JOBS), job(JOBS + 1)],
            gone=[hints_pb2.JobGone(job_id="job-0", end=hints_pb2.JOB_END_STARTED)],
        )
    )
    refusals.append(await engine.acknowledged())
    moved = await engine.put(*(job(i, position=-i) for i in range(JOBS)))

    reasons = [answer.error.reason for answer in refusals]
    assert reasons == ["TOO_MANY_REQUESTS"] * 3 + ["INVALID_FIELD", "TOO_MANY_REQUESTS"]
    assert {answer.job_count for answer in refusals} == {JOBS}
    assert not moved.HasField("error")
    queue = server.cache.queues.by_name()["default\0engine"]
    assert "job-0" in server.cache.queues.job_ids(queue)


async def test_a_million_jobs_are_refused_within_bounds(
    client: Client, engine: Engine, server: Server
) -> None:
    """A client that never reads refusals either: the server stops reading from it."""
    await client.create("a")
    jobs = [job(i) for i in range(1024)]

    async def flood() -> None:
        for sequence in range(2, 1002):
            request = hints_pb2.ScheduleRequest(sequence=sequence)
            request.delta.put.extend(jobs)
            await engine.call.write(request)

    flooding = asyncio.ensure_future(flood())
    for _ in range(50):
        answer = await engine.acknowledged()
        assert answer.error.reason == "TOO_MANY_REQUESTS"
        assert dict(answer.error.metadata) == {"what": "jobs of an engine", "limit": str(JOBS)}
        assert answer.job_count == 0
    flooding.cancel()
    engine.call.cancel()
    queue = server.cache.queues.by_name()["default\0engine"]

    await lost(server)
    assert (len(queue.names), len(queue.news), len(queue.job_counts)) == (0, 0, 0)
    assert (await client.get("a")).name == "sessions/a"


BAD_JOBS: dict[str, dict[str, Any]] = {
    "job_id": {"job_id": ""},
    "job_id ": {"job_id": "x" * 129},
    "session": {"session": ""},
    "session ": {"session": "models/a"},
    "session  ": {"session": "sessions/../a"},
    "new_token_count": {"new_token_count": -1},
    "position": {"position": float("nan")},
    "position ": {"position": float("-inf")},
    "start_in": {"start_in": seconds(-1)},
    "start_in ": {"start_in": seconds(31 * 86400)},
    "deadline_in": {"deadline_in": seconds(-0.5)},
    "priority": {"priority": 101},
    "priority ": {"priority": -1},
}


@pytest.mark.parametrize("field", BAD_JOBS)
@pytest.mark.parametrize("way", ["delta", "snapshot"])
async def test_a_bad_job_changes_nothing(
    client: Client, engine: Engine, server: Server, field: str, way: str
) -> None:
    """The field is named, the good job beside it is not put, and the stream goes on."""
    await client.create("a")
    await client.create("b")
    await engine.put(job(1))
    bad = job(2, "b", **BAD_JOBS[field])
    put = engine.put if way == "delta" else engine.snapshot
    answer = await put(job(3, "b"), bad)
    prefix = "delta.put[1]" if way == "delta" else "snapshot.jobs[1]"

    assert (answer.error.code, answer.error.reason) == (Code.INVALID_ARGUMENT.value[0], "INVALID_FIELD")
    assert answer.error.metadata["field"].removesuffix(".nanos") == f"{prefix}.{field.strip()}"
    assert answer.job_count == 1
    assert (starts_in_s(server, "a") is None, starts_in_s(server, "b") is None) == (False, True)
    assert (await engine.put(job(2, "b"))).job_count == 2


async def test_bad_deltas_change_nothing(client: Client, engine: Engine, server: Server) -> None:
    """A job twice, an end that is none, a start that is not there."""
    await client.create("a")
    await engine.put(job(1))
    without_start = job(2)
    without_start.ClearField("position")
    fields = []
    for delta in (
        {"put": [job(2), job(2)]},
        {"put": [without_start]},
        {
            "gone": [
                {"job_id": "job-1", "end": "JOB_END_STARTED"},
                {"job_id": "job-1", "end": "JOB_END_STARTED"},
            ]
        },
        {"gone": [{"job_id": "job-1"}]},
        {"gone": [{"job_id": "job-1", "end": 7}]},
        {"gone": [{"job_id": "", "end": "JOB_END_STARTED"}]},
        {"gone": [{"job_id": str(i), "end": "JOB_END_STARTED"} for i in range(1025)]},
    ):
        await engine.write(delta=hints_pb2.QueueDelta(**delta))
        fields.append((await engine.acknowledged()).error.metadata["field"])

    assert fields == [
        "delta.put[1].job_id",
        "delta.put[0].start",
        "delta.gone[1].job_id",
        "delta.gone[0].end",
        "delta.gone[0].end",
        "delta.gone[0].job_id",
        "delta.gone",
    ]
    assert starts_in_s(server) is not None


@pytest.mark.parametrize(
    ("first", "field"),
    [
        ({"delta": hints_pb2.QueueDelta()}, "hello"),
        ({}, "hello"),
        ({"hello": hints_pb2.ScheduleHello()}, "hello.engine"),
        ({"hello": hints_pb2.ScheduleHello(engine="../x")}, "hello.engine"),
        ({"hello": hints_pb2.ScheduleHello(engine="x" * 129)}, "hello.engine"),
        (
            {"hello": hints_pb2.ScheduleHello(engine="x", model_fingerprint=b"short")},
            "hello.model_fingerprint",
        ),
        ({"hello": hints_pb2.ScheduleHello(engine="x", grace=seconds(-1))}, "hello.grace"),
        ({"hello": hints_pb2.ScheduleHello(engine="x"), "sequence": 0}, "sequence"),
    ],
)
async def test_a_bad_hello_ends_the_stream(
    connect: Callable[[], Engine], server: Server, first: dict[str, Any], field: str
) -> None:
    """And is nobody's."""
    engine = connect()
    await engine.write(**first)
    facts = await refused(engine.drain(), Code.INVALID_ARGUMENT, "INVALID_FIELD")

    assert facts["field"] == field
    assert server.cache.queues.engine_count == 0


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"hello": hints_pb2.ScheduleHello(engine="engine")}, "message"),
        ({}, "message"),
        ({"delta": hints_pb2.QueueDelta(), "sequence": 1}, "sequence"),
        ({"delta": hints_pb2.QueueDelta(), "sequence": -5}, "sequence"),
    ],
)
async def test_what_is_no_conversation_ends_the_stream(
    engine: Engine, request_: dict[str, Any], field: str
) -> None:
    """A second hello, nothing, or a number that was there."""
    await engine.write(**request_)

    assert (await refused(engine.drain(), Code.INVALID_ARGUMENT, "INVALID_FIELD"))["field"] == field


async def test_a_client_that_says_nothing_is_cut_off(
    connect: Callable[[], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream without a hello does not take a place for ever."""
    monkeypatch.setattr("ctxcache.service.hints.HELLO_TIMEOUT_S", 0.01)
    await refused(connect().drain(), Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")


async def test_a_client_that_only_closes_is_told(connect: Callable[[], Engine]) -> None:
    """It never said hello."""
    engine = connect()
    await engine.call.done_writing()
    assert (await refused(engine.drain(), Code.INVALID_ARGUMENT, "INVALID_FIELD"))["field"] == "hello"


async def test_draining_ends_streams(client: Client, engine: Engine, server: Server) -> None:
    """At once, and hellos that wait are refused."""
    await client.create("a")
    await engine.put(job(1))
    await engine.event()
    stopping = asyncio.ensure_future(server.stop())
    await refused(engine.drain(), Code.UNAVAILABLE, "DRAINING")
    await stopping


async def test_events_of_one_session_are_one(client: Client, engine: Engine, server: Server) -> None:
    """A reader that is late finds the newest state, and what happened since.

    Memory is bounded by its jobs.
    """
    await client.create("a")
    await client.append("a", 1, 0, 100, is_durable=True)
    await engine.put(job(1))
    await engine.event()
    queue = server.cache.queues.by_name()["default\0engine"]
    session = server.cache.ledger.names.sessions["default", "a"]
    for _ in range(1000):
        queue.demoted(session.uid)
        queue.promoted(session.uid)
    assert len(queue.news) == 1
    event = await engine.event()

    assert list(event.changes) == [hints_pb2.SESSION_CHANGE_PROMOTED]
    assert event.readiness.missing_bytes == 0


async def test_a_reader_that_takes_nothing_is_not_read_either(
    client: Client, settings: Settings, clock: FakeClock
) -> None:
    """And is cut off after the stall timeout; its jobs stay for the grace period, and memory is bounded."""
    stalling = settings.model_copy(
        update={
            "stall_timeout_s": 0.3,
            "data_directory": settings.data_directory / "2",
            "max_engine_jobs": 4096,
        }
    )
    server = await Server.start(stalling, clock)
    options = [
        ("grpc.http2.lookahead_bytes", 1024),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_send_message_length", -1),
    ]
    try:
        async with grpc.aio.insecure_channel(server.addresses[0], options=options) as channel:
            engine = Engine(channel)
            await engine.hello()
            jobs = [job(i, "nobody", job_id=f"{i:0128}") for i in range(1024)]

            async def flood() -> None:
                for sequence in range(2, 2000):
                    request = hints_pb2.ScheduleRequest(sequence=sequence)
                    request.delta.put.extend(jobs)
                    await engine.call.write(request)

            flooding = asyncio.ensure_future(flood())
            queue = server.cache.queues.by_name()["default\0engine"]
            await until(lambda: queue.lost_until_ns is not None)
            flooding.cancel()
            await asyncio.wait({flooding})
            assert server.cache.queues.job_count(queue) == 1024
    finally:
        await server.stop()


async def test_events_of_many_sessions_leave_turns_to_others(
    monkeypatch: pytest.MonkeyPatch, client: Client, engine: Engine
) -> None:
    """However many sessions a message tells of, it ends when its time is over, and the next one goes on."""
    monkeypatch.setattr(fairness, "SLICE_NS", 0)
    for i in range(8):
        await client.create(f"s{i}")
    await engine.write(delta=hints_pb2.QueueDelta(put=[job(i, f"s{i}") for i in range(8)]))
    told: list[list[str]] = []
    while len(told) < 8:
        response = await engine.read()
        assert response is not None
        if response.HasField("events"):
            told.append([event.session for event in response.events.events])

    assert sorted(told) == [[f"sessions/s{i}"] for i in range(8)]
