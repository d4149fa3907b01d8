"""Hints and queues of the typed client, against a real server."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_side import LAYOUT, OWN, SPEC, make_rows
from live_server import LiveServer, serving_small

import ctxcache
from ctxcache.client import Client, EngineQueue, QueuedJob
from ctxcache.client import engine_queue as engine_queue_module
from ctxcache.client.types import (
    Durability,
    HintAction,
    HintKind,
    HintOutcome,
    SessionChange,
    SessionEvent,
    seconds,
)
from ctxcache.errors import (
    DeadlineExceeded,
    EngineTakenOver,
    InvalidArgument,
    TooManyRequests,
    Unavailable,
)
from ctxcache.server.server import Server

JOBS = 2000
A, B = "sessions/a", "sessions/b"
Publish = Callable[..., EngineQueue]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    """A small server."""
    with serving_small(tmp_path, max_engine_jobs=JOBS, max_engines=2, engine_grace_s=20) as made:
        yield made


@pytest.fixture
def client(live: LiveServer) -> Iterator[Client]:
    """A client, and sessions a and b on disk."""
    with ctxcache.connect(live.target, timeout_s=10) as made:
        made.models.register(SPEC)
        for name in ("a", "b"):
            made.sessions.create(OWN, id=name, layout=LAYOUT)
            made.sessions.open(f"sessions/{name}", OWN).append(make_rows(10), durability=Durability.DISK)
        yield made


@pytest.fixture
def publish(client: Client) -> Iterator[Publish]:
    """Open queues, closed at the end."""
    with contextlib.ExitStack() as queues:
        yield lambda engine="engine", **facts: queues.enter_context(
            client.hints.engine_queue(engine, **facts)
        )


def queue_threads() -> list[threading.Thread]:
    """The threads of queues that are open in this process."""
    return [thread for thread in threading.enumerate() if thread.name == "ctxcache-queue"]


def job(number: int, session: str = A, **facts: Any) -> QueuedJob:
    """A job at a position, unless it has a start."""
    place = {} if "start_in_s" in facts else {"position": float(number)}
    return QueuedJob(f"job-{number}", session, **(place | facts))


def job_ids(server: Server, engine: str = "engine") -> set[str]:
    """The jobs of the queue as the server has them."""
    queue = server.cache.queues.by_name().get(f"default\0{engine}")
    return set(server.cache.queues.job_ids(queue)) if queue else set()


def test_a_queue_is_published_and_heard_of(live: LiveServer, client: Client, publish: Publish) -> None:
    """Jobs come and go; what becomes of their sessions comes back."""
    queue = publish()
    queue.put(job(1), job(2, B))
    queue.flush()
    events: dict[str, SessionEvent] = {}
    while len(events) < 2:
        events |= {event.session: event for event in queue.take()}
    put = live.ask(job_ids)
    queue.started("job-1")
    queue.cancelled("job-2", "nobody")
    queue.flush()

    assert put == {"job-1", "job-2"}
    readiness = events[A].readiness
    assert readiness is not None
    assert readiness.token_count == 10
    assert live.ask(job_ids) == set()


def test_events_are_iterated_over_until_the_queue_is_closed(client: Client, publish: Publish) -> None:
    """Demotion and promotion, seen by a thread that waits for them."""
    queue = publish()
    seen: list[SessionEvent] = []
    is_seen = threading.Condition()

    def watch() -> None:
        for event in queue:
            with is_seen:
                seen.append(event)
                is_seen.notify_all()

    def wait_for(change: int) -> None:
        with is_seen:
            assert is_seen.wait_for(lambda: any(change in event.changes for event in seen), 10)

    watching = threading.Thread(target=watch)
    watching.start()
    queue.put(job(1))
    queue.flush()
    client.hints.demote(A)
    wait_for(SessionChange.DEMOTED)
    with client.sessions.open(A, OWN).read() as rows:
        assert rows.token_count == 10
    wait_for(SessionChange.PROMOTED)
    queue.close()
    watching.join(10)

    assert not watching.is_alive()


def test_nothing_to_take_is_no_error(publish: Publish) -> None:
    """In the time that was given."""
    assert publish().take(timeout_s=0) == []


def test_closing_withdraws_the_queue(live: LiveServer, client: Client) -> None:
    """At once; afterwards the queue says that it is closed."""
    with client.hints.engine_queue("engine") as queue:
        queue.put(job(1))
        queue.flush()
        assert live.ask(job_ids) == {"job-1"}

    live.until(lambda server: server.cache.queues.engine_count == 0)
    queue.take()
    for call in (lambda: queue.put(job(2)), queue.take, queue.flush, lambda: queue.started("job-1")):
        with pytest.raises(Unavailable, match="closed"):
            call()


def test_closing_the_client_closes_its_queues(live: LiveServer) -> None:
    """Without a thread left behind."""
    made = ctxcache.connect(live.target, timeout_s=10)
    queue = made.hints.engine_queue("engine")
    queue.flush()
    made.close()

    assert not queue_threads()
    live.until(lambda server: server.cache.queues.engine_count == 0)


def test_a_snapshot_is_the_whole_queue(live: LiveServer, publish: Publish) -> None:
    """A queue of more jobs than a message has."""
    queue = publish()
    queue.put(job(-1))
    queue.replace(job(i) for i in range(JOBS))
    queue.flush()

    assert live.ask(job_ids) == {f"job-{i}" for i in range(JOBS)}


def test_a_restarted_server_is_told_the_queue_again(
    live: LiveServer, client: Client, publish: Publish
) -> None:
    """Without anybody's doing; changes of the meantime included, and none waits."""
    queue = publish()
    queue.put(job(1), job(2, B))
    queue.flush()
    live.stop()
    queue.put(job(3))
    queue.started("job-1")
    live.start()
    queue.flush()

    assert live.ask(job_ids) == {"job-2", "job-3"}


def test_a_broken_stream_comes_back_under_its_name(live: LiveServer, publish: Publish) -> None:
    """And takes over what it had."""
    queue = publish()
    queue.put(job(1))
    queue.flush()
    link = queue._link
    assert link.call is not None
    link.call.cancel()
    queue.put(job(2))
    with queue._changed:
        assert queue._changed.wait_for(lambda: queue._link is not link, 10)
    queue.flush()

    assert live.ask(job_ids) == {"job-1", "job-2"}
    assert live.ask(lambda server: server.cache.queues.engine_count) == 1


def test_another_of_the_same_name_ends_the_first(live: LiveServer, publish: Publish) -> None:
    """Which does not come back: they would drive each other out for ever."""
    first = publish()
    first.put(job(1))
    first.flush()
    (its_thread,) = queue_threads()
    second = publish()
    second.put(job(2))
    second.flush()
    its_thread.join(10)
    first.take()
    with pytest.raises(EngineTakenOver):
        first.take()
    with pytest.raises(EngineTakenOver):
        first.put(job(3))

    assert not its_thread.is_alive()
    assert live.ask(job_ids) == {"job-2"}


def test_missing_sessions_are_named_until_their_jobs_are_put_again(client: Client, publish: Publish) -> None:
    """Or gone."""
    queue = publish()
    queue.put(job(1, "sessions/c"), job(2, "sessions/d"), job(3))
    queue.flush()
    missing = dict(queue.missing)
    client.sessions.create(OWN, id="c", layout=LAYOUT)
    queue.put(job(1, "sessions/c"))
    queue.started("job-2")
    queue.flush()

    assert missing == {"job-1": "SESSION_NOT_FOUND", "job-2": "SESSION_NOT_FOUND"}
    assert dict(queue.missing) == {}


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"job_id": ""}, "job_id"),
        ({"job_id": "x" * 129}, "job_id"),
        ({"session": "a"}, "session"),
        ({"position": None}, "position"),
        ({"position": 1.0, "start_in_s": 1.0}, "position"),
        ({"position": float("inf")}, "position"),
        ({"position": None, "start_in_s": -1.0}, "start_in_s"),
        ({"position": None, "start_in_s": float("nan")}, "start_in_s"),
        ({"deadline_in_s": 1e9}, "deadline_in_s"),
        ({"priority": 101}, "priority"),
        ({"priority": 0.5}, "priority"),
        ({"new_token_count": -1}, "new_token_count"),
        ({"new_token_count": 1.5}, "new_token_count"),
    ],
)
def test_a_bad_job_is_refused_before_it_is_sent(
    live: LiveServer, publish: Publish, facts: dict[str, Any], field: str
) -> None:
    """The good one beside it too, and the queue goes on."""
    queue = publish()
    good: dict[str, Any] = {"job_id": "bad", "session": A, "position": 1.0}
    bad = QueuedJob(**(good | facts))
    with pytest.raises(InvalidArgument) as caught:
        queue.put(job(1), bad)
    with pytest.raises(InvalidArgument):
        queue.replace([job(1), bad])
    queue.put(job(2))
    queue.flush()

    assert caught.value.field == field
    assert live.ask(job_ids) == {"job-2"}


def test_more_jobs_than_the_server_takes_are_refused(live: LiveServer, publish: Publish) -> None:
    """As soon as its limit is known; the queue is as it was."""
    queue = publish()
    queue.flush()
    queue.put(*(job(i) for i in range(JOBS)))
    with pytest.raises(TooManyRequests) as caught:
        queue.put(job(JOBS))
    with pytest.raises(TooManyRequests):
        queue.replace(job(i) for i in range(JOBS + 1))
    queue.put(job(0, B))
    queue.flush()

    assert caught.value.limit == JOBS
    assert len(live.ask(job_ids)) == JOBS


def test_a_queue_too_long_for_the_server_ends(live: LiveServer, publish: Publish) -> None:
    """Where it was made before the server said how much it takes."""
    live.stop()
    queue = publish()
    queue.replace(job(i) for i in range(JOBS + 1))
    live.start()
    with pytest.raises(InvalidArgument) as caught:
        queue.flush()

    assert caught.value.field == "jobs"


def test_a_bad_hello_ends_the_queue(publish: Publish) -> None:
    """A further try would not change it."""
    for facts, field in (
        ({"engine": "../x"}, "hello.engine"),
        ({"engine": "x", "model_fingerprint": b"short"}, "hello.model_fingerprint"),
    ):
        queue = publish(**facts)
        with pytest.raises(InvalidArgument) as caught:
            queue.flush()
        assert caught.value.field == field


def test_an_engine_too_many_comes_when_there_is_room(live: LiveServer, publish: Publish) -> None:
    """It tries again by itself."""
    first, second, third = publish("one"), publish("two"), None
    first.flush()
    second.flush()
    third = publish("three")
    with pytest.raises(DeadlineExceeded):
        third.flush(timeout_s=0.05)
    first.close()
    third.flush()

    assert live.ask(lambda server: sorted(q.engine for q in server.cache.queues.by_name().values())) == [
        "three",
        "two",
    ]


def test_a_server_that_is_away_hangs_nobody(tmp_path: Path) -> None:
    """Neither the caller nor the end."""
    with (
        ctxcache.connect(f"unix:{tmp_path}/nobody", timeout_s=0.2) as made,
        made.hints.engine_queue("engine") as queue,
    ):
        queue.put(job(1))
        queue.started("job-1")
        assert queue.take() == []
        with pytest.raises(DeadlineExceeded):
            queue.flush()


def test_a_server_that_says_nothing_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hello without an answer is given up after the deadline, and tried again."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        with ctxcache.connect(f"unix:{tmp_path}/socket", timeout_s=0.2) as made:
            queue = made.hints.engine_queue("engine")
            (its_thread,) = queue_threads()
            first = queue._link
            with queue._changed:
                assert queue._changed.wait_for(lambda: queue._link is not first, 10)
            queue.close()
            its_thread.join(10)
            assert not its_thread.is_alive()


def test_events_that_nobody_takes_are_bounded(
    client: Client, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest of each session, and of so many sessions."""
    monkeypatch.setattr(engine_queue_module, "EVENTS_LIMIT", 1)
    queue = publish()
    for _ in range(3):
        queue.put(job(1), job(2, B))
        queue.flush()
        client.hints.demote(A)
        client.hints.prefetch(A)

    assert len(queue.take(timeout_s=0)) <= 1


def test_hints_are_answered(client: Client) -> None:
    """Each verb, and a batch."""
    accepted = HintOutcome.ACCEPTED
    results = [
        client.hints.share(A),
        client.hints.share(A, token_count=5),
        client.hints.demote(A),
        client.hints.prefetch(A, token_count=5, ttl=seconds(5)),
        client.hints.prefetch(A, budget_bytes=1 << 20),
        client.hints.pin(A, ttl=seconds(60), priority=5),
        client.hints.retain(A, ttl=seconds(60), budget_bytes=1 << 17),
        client.hints.expect(A, seconds(30)),
        client.hints.expect(A, None),
        client.hints.release(A),
    ]
    batch = client.hints.give([HintAction(HintKind.DEMOTE, "sessions/nobody", action_id="x")])

    assert [result.outcome for result in results] == [accepted] * len(results)
    assert (batch[0].action_id, batch[0].outcome) == ("x", HintOutcome.MISSING)
    with pytest.raises(InvalidArgument):
        client.hints.pin(A, ttl=seconds(0))
    with client.sessions.open(A, OWN).read() as rows:
        for stream, expected in make_rows(10).items():
            assert np.array_equal(np.concatenate(list(rows.pieces(stream))), expected)
