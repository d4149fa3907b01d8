"""What is in the bucket outlives its host: real stores, each a process, and one bucket."""

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from ctxcache.client import OPAQUE, TOKENS, Durability, connect
from ctxcache.errors import FleetNotFound, SessionMoved, SessionNotFound
from ctxcache.format.streams import Stream
from tests.fleet.stores import BEAT_S, SPEC, Stores, User
from tests.server_process import ServerProcess


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Two stores, which share what they are asked to."""
    with Stores(tmp_path, 2) as both:
        yield both


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Stores]:
    """Two stores, which share every session."""
    with Stores(tmp_path, 2, "--fleet-share", "all") as both:
        yield both


def objects(stores: Stores) -> list[Path]:
    """What the bucket has of sessions."""
    directory = Path(stores.bucket.removeprefix("file://")) / "v1/o"
    return [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".new"]


def await_objects(stores: Stores, count: int) -> None:
    """Wait until the bucket has so many objects."""
    deadline = time.monotonic() + 20
    while len(objects(stores)) != count:
        assert time.monotonic() < deadline, objects(stores)
        time.sleep(0.05)


SHARED = Durability.SHARED


def test_what_was_acknowledged_as_shared_outlives_its_host(stores: Stores) -> None:
    """Every row is found elsewhere, at once; what came behind it and was not asked for is computed."""
    user = User(stores, "alice")
    user.turn(0, 1000, durability=SHARED)
    user.turn(0, 30)
    stores.processes[0].kill9()
    assert user.turn(1, may_be_outdated=True) == 1000
    stores.restart(0)
    assert user.turn(0) == 1100


def test_turns_go_on_in_what_the_bucket_has(stores: Stores) -> None:
    """A host after the other is lost behind its turn: nothing is computed twice."""
    user = User(stores, "alice")
    for turn in range(6):
        number = turn % 2
        assert user.turn(number, 300, durability=SHARED) == 300 * turn
        stores.processes[number].kill9()
        if turn:
            stores.restart(1 - number)
    assert user.computed == 0


def test_every_session_is_shared_behind_its_turns(sharing: Stores) -> None:
    """Nobody has to ask: a second after a turn the bucket has it."""
    user = User(sharing, "alice")
    user.turn(0, 1000)
    deadline = time.monotonic() + 20
    while sharing.clients[0].admin.fleet().unshared_session_count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    sharing.processes[0].kill9()
    assert user.turn(1) == 1000


@pytest.mark.parametrize("cents", [500, 1])
def test_by_price_a_session_is_shared_where_computing_costs_more(cents: int, tmp_path: Path) -> None:
    """A thousand tokens at 5 $ an hour cost more than a PUT; at a cent, less than a GET.

    What is asked for is put whatever it costs.
    """
    given = ("--fleet-share", "worth", "--engine-cents-per-hour", str(cents))
    with Stores(tmp_path, 2, *given) as stores:
        user = User(stores, "alice")
        user.turn(0, 1000)
        deadline = time.monotonic() + 20
        while stores.clients[0].admin.fleet().unshared_session_count:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert bool(objects(stores)) is (cents > 1)
        user.turn(0, 1000, durability=SHARED)
        stores.processes[0].kill9()
        assert user.turn(1) == 2000


def test_small_turns_leave_few_objects(sharing: Stores) -> None:
    """What is small is put again with what comes behind it, and what no head names goes."""
    user = User(sharing, "alice")
    for _ in range(4):
        user.turn(0)
        user.turn(0, durability=SHARED)
        await_objects(sharing, 2)
    assert user.found(0) == 8 * 70


def test_nothing_is_put_that_nobody_asked_for(stores: Stores) -> None:
    """A session that moves, and one that was shared once, are not shared with every turn from then on."""
    moved, asked = User(stores, "moved"), User(stores, "asked")
    moved.turn(0, 500)
    asked.turn(0, 500, durability=SHARED)
    before = set(objects(stores))
    assert moved.turn(1) == 500
    assert moved.turn(0) == 570
    asked.turn(0)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        assert set(objects(stores)) == before
        time.sleep(0.1)
    assert all(not client.admin.fleet().unshared_session_count for client in stores.clients)


def test_large_sessions_are_several_objects(stores: Stores) -> None:
    """They come back whole, in their order."""
    user = User(stores, "alice")
    for _ in range(4):
        user.turn(0, 20_000, durability=SHARED)
    assert len(objects(stores)) >= 6
    stores.processes[0].kill9()
    assert user.turn(1) == 80_000


def test_a_session_that_moves_while_it_is_shared_is_said_to_have_moved(tmp_path: Path) -> None:
    """Its writer hears of that, and of no fault of its own."""
    with Stores(tmp_path, 2, "--fleet-share-bytes-per-s", "8MiB") as stores, ThreadPoolExecutor(1) as thread:
        user = User(stores, "alice")
        user.turn(0)
        while not user.found(1):
            time.sleep(BEAT_S)
        user.found(0)
        before = len(objects(stores))
        sharing = thread.submit(user.turn, 0, 40_000, durability=SHARED)
        while len(objects(stores)) == before:
            time.sleep(0.01)
        assert stores.clients[1].sessions.get(user.name).token_count == 40_070
        with pytest.raises(SessionMoved):
            sharing.result()


def test_what_leaves_the_ssd_is_not_lost(stores: Stores) -> None:
    """An evicted session comes back from the bucket at the same host."""
    user = User(stores, "alice")
    user.turn(0, 500, durability=SHARED)
    stores.clients[0].admin.evict_session(user.name)
    assert user.turn(0) == 500


def test_a_truncation_reaches_the_bucket(stores: Stores) -> None:
    """Tokens that were dropped do not come back with it; those before them do."""
    user = User(stores, "alice")
    user.turn(0, 500, durability=SHARED)
    before = set(objects(stores))
    session = stores.clients[0].sessions.open(user.name)
    session.keep_first(200)
    deadline = time.monotonic() + 20
    while set(objects(stores)) & before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stores.processes[0].kill9()
    client, model = stores.clients[1], stores.models[1]
    with client.sessions.open(client.sessions.get(user.name), model).read() as read:
        assert read.token_count == 200
        assert np.array_equal(read.array(TOKENS).view(np.int32).reshape(-1), user.tokens[:200])


def test_a_drop_in_the_middle_reaches_the_bucket(stores: Stores) -> None:
    """What lies behind a gap comes back behind it, and is found by no other prompt."""
    user = User(stores, "alice")
    user.turn(0, 500, durability=SHARED)
    stores.clients[0].sessions.open(user.name).drop_ranges([(100, 150)])
    user.tokens = np.delete(user.tokens, range(100, 150))
    user.rows = np.delete(user.rows, range(100, 150), axis=0)
    assert user.turn(0, 20, durability=SHARED) == 450
    stores.processes[0].kill9()
    assert user.turn(1, 40, durability=SHARED) == 470
    info = stores.clients[1].sessions.get(user.name)
    assert info.whole_token_count == 100
    stores.restart(0)
    stores.processes[1].kill9()
    assert user.turn(0) == 510


def test_a_deletion_removes_every_object(stores: Stores) -> None:
    """No name, no row and no token is left, and no host brings the session back."""
    user = User(stores, "alice")
    user.turn(0, 5000, durability=SHARED)
    assert objects(stores)
    user.delete(0)
    await_objects(stores, 0)
    for number in (0, 1):
        with pytest.raises(SessionNotFound):
            stores.clients[number].sessions.get(user.name)


def test_an_expired_session_is_not_brought_back(stores: Stores) -> None:
    """Its time goes on in the bucket, by the bucket's own clock."""
    client, model = stores.clients[0], stores.models[0]
    session = client.sessions.create(model, id="alice", ttl=timedelta(seconds=2))
    tokens, rows = np.arange(100, dtype=np.int32), np.zeros((100, 512), np.uint8)
    session.append({TOKENS: tokens, OPAQUE: rows}, durability=SHARED)
    stores.processes[0].kill9()
    time.sleep(3)
    with pytest.raises(SessionNotFound):
        stores.clients[1].sessions.get("sessions/alice")


def test_a_store_that_is_alone_refuses_it(tmp_path: Path) -> None:
    """The request changes nothing."""
    with ServerProcess(tmp_path / "alone") as process, connect(process.target) as client:
        session = client.sessions.create(client.models.register(SPEC))
        rows: dict[Stream, np.ndarray] = {
            TOKENS: np.arange(5, dtype=np.int32),
            OPAQUE: np.zeros((5, 512), np.uint8),
        }
        with pytest.raises(FleetNotFound):
            session.append(rows, durability=SHARED)
        assert client.sessions.get(session.name).token_count == 0


def _copied(first: Path, second: Path, draw: random.Random) -> None:
    first.write_bytes(second.read_bytes())


def _flipped(path: Path, other: Path, draw: random.Random) -> None:
    body = bytearray(path.read_bytes())
    body[draw.randrange(len(body))] ^= 1 << draw.randrange(8)
    path.write_bytes(body)


def _cut(path: Path, other: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _removed(path: Path, other: Path, draw: random.Random) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [_flipped, _cut, _copied, _removed])
def test_damaged_objects_are_never_served(
    stores: Stores, damage: Callable[[Path, Path, random.Random], None]
) -> None:
    """What comes is what was stored, as far as it comes; the rest is computed."""
    draw = random.Random(damage.__name__)
    users = [User(stores, f"user{number}") for number in range(12)]
    for user in users:
        user.turn(0, 3000, durability=SHARED)
        user.turn(0, 6000, durability=SHARED)
    # Nothing is removed any more that a later turn has put again.
    stores.processes[0].kill9()
    paths = objects(stores)
    for path in draw.sample(paths, len(paths) // 2):
        damage(path, draw.choice([other for other in paths if other != path and other.exists()]), draw)
    found = [user.turn(1, durability=SHARED) for user in users]
    assert min(found) < 9000
    assert max(found) == 9000
    # What was damaged is put again: the next loss costs nothing.
    stores.restart(0)
    stores.processes[1].kill9()
    assert [user.turn(0) for user in users] == [9070] * len(users)
