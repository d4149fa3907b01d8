"""A conversation goes on wherever it lands: real stores, each a process, and one bucket."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import grpc
import numpy as np
import pytest

from ctxcache.cli.tables import REASONS
from ctxcache.client import OPAQUE, TOKENS, Durability, ModelSpec
from ctxcache.core.fleet.heads import Head, Name, Secret
from ctxcache.errors import CacheError, SessionMoved, SessionNotFound
from ctxcache.v1 import peer_pb2, peer_pb2_grpc
from tests.fleet.stores import BEAT_S, Stores, User, rows_of


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Two stores."""
    with Stores(tmp_path, 2) as both:
        yield both


def published(stores: Stores, user: User, number: int) -> None:
    """Wait until another store can know of the session."""
    deadline = time.monotonic() + 10
    while user.found(number) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_turn_finds_elsewhere_what_an_earlier_one_stored(stores: Stores) -> None:
    """Every row moves, whichever store a turn lands at."""
    user = User(stores, "alice")
    user.turn(0, 1000)
    published(stores, user, 1)
    for turn in range(6):
        assert user.turn(turn % 2) == 1000 + 70 * turn
    assert user.computed == 0


def test_the_former_store_lists_and_finds_it_no_more(stores: Stores) -> None:
    """A session has one place: its name is listed where it goes on."""
    user = User(stores, "alice")
    user.turn(0)
    published(stores, user, 1)
    assert [session.name for session in stores.clients[0].sessions.list()] == []
    assert [session.name for session in stores.clients[1].sessions.list()] == [user.name]
    # An operator is told where it went, in words.
    assert REASONS[stores.clients[0].admin.why_miss(user.name).reason].startswith("goes on at another host")


def test_a_writer_of_the_former_store_is_cut_off(stores: Stores) -> None:
    """A handle that was opened before the session moved continues nothing behind its new owner's tokens."""
    user = User(stores, "alice")
    user.turn(0, 100)
    client, model = stores.clients[0], stores.models[0]
    stale = client.sessions.open(client.sessions.get(user.name), model)
    published(stores, user, 1)
    user.turn(1)
    tokens, rows = rows_of("alice", 100, 5, take=9)
    with pytest.raises(CacheError):
        stale.append({TOKENS: tokens, OPAQUE: rows})
    assert user.found(1) == 170
    assert user.found(0) == 170


def test_an_answer_names_the_session_that_was_asked_for(stores: Stores) -> None:
    """Also where another store takes the session over before the answer is made."""
    name, wrong, is_over = "sessions/alice", list[str](), threading.Event()

    def use(number: int) -> None:
        client, model = stores.clients[number], stores.models[number]
        while not is_over.is_set():
            with contextlib.suppress(CacheError):
                session = client.sessions.create(model, id="alice", exist_ok=True)
                tokens, rows = rows_of("alice", session.info.token_count, 5)
                infos = [session.info, session.append({TOKENS: tokens, OPAQUE: rows})]
                infos += [session.keep_first(0), session.flush()]
                wrong.extend(info.name for info in infos if info.name != name)

    with ThreadPoolExecutor(4) as threads:
        uses = [threads.submit(use, number % 2) for number in range(4)]
        time.sleep(4)
        is_over.set()
    for each in uses:
        each.result()
    assert not wrong


def test_a_session_that_is_written_stays_where_it_is(stores: Stores) -> None:
    """Another store's turn is told that the session has moved: it computes, and saves nothing."""
    user = User(stores, "alice")
    user.turn(0)
    published_elsewhere = User(stores, "bob")
    published_elsewhere.turn(0)
    published(stores, published_elsewhere, 1)
    client, model = stores.clients[0], stores.models[0]
    session = client.sessions.open(client.sessions.get(user.name), model)
    with session.writer(10), pytest.raises(SessionMoved):
        stores.clients[1].sessions.get(user.name)
    assert user.found(1) == 70


def test_what_is_deleted_at_one_store_is_gone_at_all(stores: Stores) -> None:
    """Neither the former owner nor the present one finds it by its name, and a new one is another session."""
    user = User(stores, "alice")
    user.turn(0)
    published(stores, user, 1)
    user.delete(1)
    time.sleep(0.3)
    for number in (0, 1):
        with pytest.raises(SessionNotFound):
            stores.clients[number].sessions.get(user.name)
    user.turn(0, 30)
    published(stores, user, 1)
    assert user.found(1) == 30


def test_a_session_is_told_to_its_own_tenant_alone(stores: Stores) -> None:
    """The uid of another tenant's session, or of a guest of it, names nothing, and changes nothing."""
    user = User(stores, "alice")
    user.turn(0)
    published(stores, user, 1)
    secret = Secret(b"a secret of this fleet of stores")
    head_path = Path(stores.bucket.removeprefix("file://")) / secret.head_path(Name("default", "alice"))

    def ask(number: int, tenant: str, head: Head) -> int:
        request = peer_pb2.YieldSessionRequest(
            tenant=tenant, session_id="alice", uid=head.uid, term=head.term
        )
        with grpc.insecure_channel(stores.processes[number].target) as channel:
            return peer_pb2_grpc.PeerServiceStub(channel).YieldSession(request).session.token_count

    first = secret.read_head(head_path.read_bytes())
    with pytest.raises(grpc.RpcError, match="sessions/alice"):
        ask(1, "another", first)
    assert user.turn(0) == 70
    # Store 1 has a guest of it now.
    with pytest.raises(grpc.RpcError, match="sessions/alice"):
        ask(1, "another", first)
    assert ask(1, "default", first) == 70


def test_a_killed_store_costs_a_miss_and_no_wait(stores: Stores) -> None:
    """The session begins anew elsewhere, at once; the killed store gives its copy up when it is back."""
    user = User(stores, "alice")
    user.turn(0)
    published(stores, user, 1)
    user.turn(1)
    stores.processes[1].kill9()
    begun = time.monotonic()
    assert user.turn(0) == 0
    assert time.monotonic() - begun < 5
    stores.restart(1)
    assert user.found(1) == 210
    assert user.turn(1) == 210


def test_a_restarted_store_has_what_nobody_took(stores: Stores) -> None:
    """A rolling restart costs nothing."""
    user = User(stores, "alice")
    user.turn(0)
    published(stores, user, 1)
    stores.processes[1].terminate()
    stores.restart(1)
    assert user.turn(1) == 70
    assert user.turn(0) == 140


def test_a_frozen_store_wakes_up_and_serves_no_outdated_session(stores: Stores) -> None:
    """What was taken over meanwhile is not continued at the store that slept."""
    user = User(stores, "alice")
    user.turn(0)
    published(stores, user, 1)
    with stores.frozen(1):
        begun = time.monotonic()
        user.turn(0)
        assert time.monotonic() - begun < 10
    time.sleep(4 * BEAT_S)
    assert user.found(1) == 140


def test_truncated_sessions_move_as_they_are(stores: Stores) -> None:
    """What was computed with dropped tokens is not found as if it had been computed without them."""
    user = User(stores, "alice")
    user.turn(0, 300)
    client, model = stores.clients[0], stores.models[0]
    session = client.sessions.open(client.sessions.get(user.name), model)
    before = session.drop_ranges([(100, 150)])
    deadline = time.monotonic() + 10
    while True:
        try:
            moved = stores.clients[1].sessions.get(user.name)
            break
        except SessionNotFound:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert (moved.token_count, moved.whole_token_count) == (250, 100)
    assert before.token_count == 250
    with stores.clients[1].sessions.open(moved, stores.models[1]).read() as read:
        assert (read.array(OPAQUE) == user.rows[[*range(100), *range(150, 300)]]).all()


def test_labels_salt_expiry_and_pins_move_along(stores: Stores) -> None:
    """A session is at its new store what it was at the old one."""
    client, model = stores.clients[0], stores.models[0]
    made = client.sessions.create(
        model, id="alice", ttl=timedelta(hours=2), salt=b"mine", labels={"user": "alice"}, is_pinned=True
    )
    tokens, rows = rows_of("alice", 0, 80)
    made.append({TOKENS: tokens, OPAQUE: rows})
    user = User(stores, "alice")
    user.tokens, user.rows = tokens, rows
    published(stores, user, 1)
    moved = stores.clients[1].sessions.get("sessions/alice")
    assert (moved.salt, dict(moved.labels), moved.is_pinned) == (b"mine", {"user": "alice"}, True)
    assert moved.ttl is not None
    assert moved.ttl.total_seconds() == 7200


def test_a_new_store_joins_and_has_everything(stores: Stores) -> None:
    """Three where there were two: the third finds what the others have."""
    users = [User(stores, f"user{number}") for number in range(4)]
    for number, user in enumerate(users):
        user.turn(number % 2)
    for user in users:
        published(stores, user, 0)
    third = stores.add()
    assert [user.turn(third) for user in users] == [70] * 4


def test_a_session_that_ended_here_is_found_where_it_began_anew(tmp_path: Path) -> None:
    """A store does not answer for a name by what it had once: another one may have begun it anew."""
    # Nothing is heard of the other store in the meantime.
    with Stores(tmp_path, 2, "--fleet-beat-s", "300") as stores:
        user = User(stores, "alice")
        stores.clients[0].sessions.create(stores.models[0], id="alice", ttl=timedelta(seconds=1))
        user.turn(0)
        time.sleep(1.2)
        with pytest.raises(SessionNotFound):
            stores.clients[0].sessions.get(user.name)
        again = User(stores, "alice")
        again.turn(1, 80)
        assert again.turn(0) == 80


def test_a_session_whose_model_is_another_one_elsewhere_stays_where_it_is(stores: Stores) -> None:
    """A store that cannot have it leaves it to the one that has."""
    models = [
        client.models.register(ModelSpec.opaque("other", row_bytes=row_bytes))
        for client, row_bytes in zip(stores.clients, (32, 16), strict=True)
    ]
    session = stores.clients[0].sessions.create(models[0], id="alice")
    session.append({TOKENS: np.arange(40, dtype=np.int32), OPAQUE: np.ones((40, 32), np.uint8)})
    bob = User(stores, "bob")
    bob.turn(0)
    published(stores, bob, 1)
    with pytest.raises(SessionNotFound):
        stores.clients[1].sessions.get("sessions/alice")
    assert stores.clients[0].sessions.get("sessions/alice").token_count == 40


def test_a_full_store_takes_no_session_over(tmp_path: Path) -> None:
    """At the limit of sessions it has no place for one: it is not lost where it was."""
    with Stores(tmp_path, 2, "--max-sessions", "2") as stores:
        users = [User(stores, f"user{number}") for number in range(4)]
        for number, user in enumerate(users):
            user.turn(number // 2)
        time.sleep(1)
        assert [user.found(1) for user in users] == [0, 0, 70, 70]
        assert [user.found(0) for user in users] == [70, 70, 0, 0]
        # Guests take no session's place.
        users[0].delete(0)
        assert users[2].found(0) == 70
        assert users[0].turn(1) == 0


def test_what_a_conversation_was_before_an_edit_stays_with_nobody(stores: Stores) -> None:
    """It is found where the conversation is, and ends where that goes on at another store, or is deleted."""
    user = User(stores, "alice")
    user.turn(0, 640)
    before = user.tokens
    edited(stores, 0, user)
    assert (found(stores, 0, before), found(stores, 0, user.tokens)) == (640, 640)
    assert [session.name for session in stores.clients[0].sessions.list()] == [user.name]
    # What the bucket says of a name must not be a former rendering's.
    for number in (1, 0):
        published(stores, user, number)
        user.turn(number)
    assert (found(stores, 0, before), found(stores, 1, before)) == (64, 64)
    # One that never moved has left no guest, whose rows would be found.
    user = User(stores, "bob")
    user.turn(0, 640, durability=Durability.DISK)
    before = user.tokens
    edited(stores, 0, user)
    stores.processes[0].kill9()
    stores.restart(0)
    assert found(stores, 0, before) == 640
    user.delete(0)
    assert found(stores, 0, before) == 0


def edited(stores: Stores, number: int, user: User) -> None:
    """The conversation has other tokens behind its first 64, and what it was is a former rendering."""
    client, model = stores.clients[number], stores.models[number]
    session = client.sessions.open(client.sessions.get(user.name), model)
    user.takes += 1
    tokens, rows = rows_of(user.session_id, 64, len(user.tokens) - 64, user.takes)
    user.tokens = np.concatenate([user.tokens[:64], tokens])
    user.rows = np.concatenate([user.rows[:64], rows])
    staged = client.sessions.create(model)
    staged.append({TOKENS: user.tokens, OPAQUE: user.rows})
    staged.fork(
        id=user.session_id, replaces_generation=session.info.generation, is_rewrite=True, former_count=3
    )
    staged.delete()


def found(stores: Stores, number: int, tokens: np.ndarray) -> int:
    """How many of these tokens some session of a store has."""
    matched = stores.clients[number].prefixes.match(stores.models[number], tokens.tolist())
    return matched.token_count


def test_a_session_that_comes_and_goes_leaves_one_guest(stores: Stores) -> None:
    """Each guest is as large as the session: they are not kept one beside the other."""
    user = User(stores, "alice")
    user.turn(0, 200)
    published(stores, user, 1)
    for turn in range(20):
        assert user.turn(turn % 2, 10) == 200 + 10 * turn
    deadline = time.monotonic() + 10
    while any(client.admin.stats().session_count > 1 for client in stores.clients):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_session_larger_than_the_memory_of_a_store_comes_whole(tmp_path: Path) -> None:
    """It comes as its own store took it: a part at a time, and the rest is on SSD meanwhile."""
    with Stores(tmp_path, 2, "--arena-size-bytes", "16MiB", "--ssd-size-bytes", "128MiB") as stores:
        user = User(stores, "alice")
        for _ in range(10):
            user.turn(0, 6000)
        published(stores, user, 1)
        assert user.found(1) == 60_000
        assert user.turn(0, 10) == 60_000


@pytest.mark.parametrize("limit", ["--max-concurrent-streams", "--max-bulk-connections"])
def test_a_busy_owner_costs_no_rows(tmp_path: Path, limit: str) -> None:
    """Many sessions come at once from a store that may have one stream, or two connections, at a time."""
    with Stores(tmp_path, 2, limit, "2") as stores:
        # As many as come within the time for which a busy store is asked, on a busy machine too.
        users = [User(stores, f"user{number}") for number in range(8)]
        for user in users:
            user.turn(0, 500)
        while stores.clients[0].admin.fleet().private_session_count:
            time.sleep(0.05)
        with ThreadPoolExecutor(8) as pool:
            heard = list(pool.map(lambda user: stores.clients[1].sessions.get(user.name), users))
        assert [session.token_count for session in heard] == [500] * 8
