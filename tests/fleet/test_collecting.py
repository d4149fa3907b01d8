"""What no head names goes from the bucket, and what one names never does."""

import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ctxcache.cli.main import app
from ctxcache.client import OPAQUE, TOKENS, Durability
from ctxcache.client.types import CollectedFleet
from ctxcache.core.fleet.heads import Name, Secret
from ctxcache.errors import InvalidArgument, SessionNotFound, Unavailable
from ctxcache.fleet.collecting import DYING
from tests.fleet.stores import Stores, User
from tests.fleet.test_sharing import objects

SHARED = Durability.SHARED
DAY_S = 86_400


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Two stores, which share what they are asked to."""
    with Stores(tmp_path, 2, "--default-ttl-s", str(30 * DAY_S)) as both:
        yield both


def collected(stores: Stores, number: int, *, is_dry_run: bool = False) -> CollectedFleet:
    """All that a collection found."""
    return list(stores.clients[number].admin.collect_fleet(is_dry_run=is_dry_run))[-1]


def aged(path: Path, age_s: float) -> None:
    """The bucket has had it for so long."""
    then = time.time() - age_s
    os.utime(path, (then, then))


def left_behind(stores: Stores, age_s: float) -> list[Path]:
    """An object in every session's folder that no head names: its store has died while it shared."""
    folders = {path.parent for path in objects(stores)}
    made = [folder / "0123456789abcdef0123456789abcdef" for folder in folders]
    for path in made:
        path.write_bytes(b"left behind")
        aged(path, age_s)
    return made


def test_what_no_head_names_goes_and_nothing_else(stores: Stores) -> None:
    """However old an object is: the sessions come back whole."""
    users = [User(stores, f"user{number}") for number in range(6)]
    for user in users:
        user.turn(0, 500, durability=SHARED)
    named = objects(stores)
    for path in named:
        aged(path, 3 * DAY_S)
    old = left_behind(stores, 2 * DAY_S)
    told = collected(stores, 1, is_dry_run=True)
    found = told.shared_session_count, told.garbage_object_count, told.expired_session_count
    assert found == (6, 6, 0)
    assert all(path.exists() for path in old)
    assert collected(stores, 1).garbage_object_count == 6
    assert set(objects(stores)) == set(named)
    # Its owner goes on, and what it puts is named by its head.
    assert [user.turn(0, durability=SHARED) for user in users] == [500] * 6
    stores.processes[0].kill9()
    assert [user.turn(1) for user in users] == [570] * 6


def test_what_is_young_is_left_alone(stores: Stores) -> None:
    """A store may be about to name it."""
    User(stores, "alice").turn(0, 100, durability=SHARED)
    young = left_behind(stores, DAY_S - 3600)
    assert collected(stores, 0).garbage_object_count == 0
    assert all(path.exists() for path in young)


def test_sessions_that_expired_with_a_lost_host_end(stores: Stores) -> None:
    """Neither rows nor a name are left of them, and nobody brings them back."""
    client, model = stores.clients[0], stores.models[0]
    session = client.sessions.create(model, id="alice", ttl=timedelta(hours=1))
    tokens, rows = np.arange(100, dtype=np.int32), np.zeros((100, 512), np.uint8)
    session.append({TOKENS: tokens, OPAQUE: rows}, durability=SHARED)
    stores.processes[0].kill9()
    put = objects(stores)
    for path in put:
        aged(path, 2 * DAY_S)
    records = files(stores, "n")
    for path in records:
        aged(path, 2 * DAY_S)
    # The one that looks says that it is there at each beat.
    deadline = time.monotonic() + 20
    while all(path.stat().st_mtime < time.time() - DAY_S for path in records):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    told = collected(stores, 1)
    assert (told.expired_session_count, told.garbage_object_count) == (1, len(put))
    assert objects(stores) == []
    with pytest.raises(SessionNotFound):
        stores.clients[1].sessions.get("sessions/alice")


def test_an_unreadable_session_is_told_and_left(stores: Stores) -> None:
    """What cannot be read may be a session of somebody."""
    user = User(stores, "alice")
    user.turn(0, 100, durability=SHARED)
    for path in objects(stores):
        path.write_bytes(b"something else")
        aged(path, 2 * DAY_S)
    told = collected(stores, 1)
    assert len(told.problems) == 1
    assert told.garbage_object_count == 0
    assert len(objects(stores)) == 2


def test_a_grace_that_is_too_short_is_refused(stores: Stores) -> None:
    """A store that shares a large session needs some time."""
    with pytest.raises(InvalidArgument, match="grace"):
        list(stores.clients[0].admin.collect_fleet(grace=timedelta(minutes=5)))


def test_an_operator_is_told(stores: Stores) -> None:
    """In a table and as JSON."""
    User(stores, "alice").turn(0, 100, durability=SHARED)
    left_behind(stores, 2 * DAY_S)
    target = ("--target", stores.processes[0].target)
    shown = CliRunner().invoke(app, [*target, "fleet", "collect", "--dry-run"])
    assert "named by nothing  1 object, 11 B" in shown.output
    shown = CliRunner().invoke(app, [*target, "--output", "json", "fleet", "collect"])
    assert json.loads(shown.output)["garbage_object_count"] == 1


def test_what_the_bucket_knows_of_prefixes_goes_after_a_day(stores: Stores) -> None:
    """A holder promises nothing: a prompt that nobody computes any more leaves nothing behind."""
    for number in range(3):
        User(stores, f"user{number}").turn(0, 1100)
    directory = Path(stores.bucket.removeprefix("file://")) / "v1/p"
    deadline, holders = time.monotonic() + 20, list[Path]()
    while len(holders) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        holders = [path for path in directory.rglob("*") if path.is_file() and path.suffix != ".new"]
    for path in holders[:2]:
        aged(path, 2 * DAY_S)
    assert collected(stores, 1, is_dry_run=True).garbage_object_count == 2
    assert all(path.exists() for path in holders)
    assert collected(stores, 1).garbage_object_count == 2
    assert [path.exists() for path in holders] == [False, False, True]


MONTH_S = 32 * DAY_S


def files(stores: Stores, folder: str) -> list[Path]:
    """Objects of the bucket below a folder."""
    directory = Path(stores.bucket.removeprefix("file://")) / "v1" / folder
    return [path for path in directory.rglob("*") if path.is_file() and path.suffix not in (".new", ".lock")]


def head_of(stores: Stores, user: User) -> Path:
    """Where the bucket has the head of a user's session."""
    secret = Secret((Path(stores.bucket.removeprefix("file://")).parent / "secret").read_bytes().strip())
    return Path(stores.bucket.removeprefix("file://")) / secret.head_path(Name("default", user.session_id))


def await_heads(stores: Stores) -> None:
    """Wait until every session has its head."""
    deadline = time.monotonic() + 20
    while any(client.admin.fleet().private_session_count for client in stores.clients):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_heads_of_sessions_that_are_gone_go_and_no_others(stores: Stores) -> None:
    """After a month, and where their owner says so; a name is free again."""
    alice, bob, carol, dave, erin = (User(stores, name) for name in ("alice", "bob", "carol", "dave", "erin"))
    for user in (alice, bob, carol, erin):
        user.turn(0)
    dave.turn(0, durability=SHARED)
    await_heads(stores)
    alice.delete(0)
    stores.clients[0].sessions.open(bob.name).update(ttl=timedelta(seconds=1))
    deadline = time.monotonic() + 20
    while stores.clients[0].admin.why_miss(bob.name).is_there:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    await_dead(stores, alice)
    for path in files(stores, "s"):
        aged(path, DAY_S)
    assert collected(stores, 1).dead_head_count == 0
    for user in (alice, bob, carol, dave):
        aged(head_of(stores, user), MONTH_S)
    assert collected(stores, 1, is_dry_run=True).dead_head_count == 2
    assert len(files(stores, "s")) == 5
    assert collected(stores, 1).dead_head_count == 2
    assert {head_of(stores, user) for user in (carol, dave, erin)} == set(files(stores, "s"))
    assert not files(stores, "dying")
    for user in (carol, dave, erin):
        assert user.turn(1) == 70
    bob = User(stores, "bob")
    for user in (alice, bob):
        assert user.turn(1) == 0
    await_heads(stores)
    for user in (alice, bob):
        assert user.turn(0) == 70


def await_dead(stores: Stores, user: User) -> None:
    """Wait until a session's head says that it was deleted."""
    deadline = time.monotonic() + 20
    while b'is_deleted\\":true' not in head_of(stores, user).read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_owner_that_does_not_answer_keeps_its_heads(stores: Stores) -> None:
    """It may have the session."""
    user = User(stores, "alice")
    user.turn(0, durability=Durability.DISK)
    await_heads(stores)
    aged(head_of(stores, user), MONTH_S)
    stores.processes[0].kill9()
    assert collected(stores, 1).dead_head_count == 0
    stores.restart(0)
    assert user.turn(0) == 70


def test_a_store_that_was_away_for_a_month_brings_nothing_back(stores: Stores) -> None:
    """What was deleted meanwhile is gone, though nothing says so any more; the rest is as it was."""
    alice, bob = User(stores, "alice"), User(stores, "bob")
    for user in (alice, bob):
        user.turn(0, durability=Durability.DISK)
    await_heads(stores)
    node = stores.clients[0].admin.fleet().node
    stores.processes[0].kill9()
    alice.turn(1, may_be_outdated=True)
    alice.delete(1)
    await_dead(stores, alice)
    record = Path(stores.bucket.removeprefix("file://")) / "v1/n" / node
    for path in (record, head_of(stores, alice)):
        aged(path, MONTH_S)
    told = collected(stores, 1)
    assert (told.away_store_count, told.dead_head_count) == (1, 1)
    assert [each.node for each in stores.clients[1].admin.fleet().nodes] != [node]
    assert len(stores.clients[1].admin.fleet().nodes) == 1
    stores.restart(0)
    assert alice.found(0) == 0
    assert alice.found(1) == 0
    assert bob.turn(0) == 70
    # It has looked at all that it has.
    deadline = time.monotonic() + 30
    while files(stores, "away"):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_name_waits_until_its_dead_head_is_gone(stores: Stores) -> None:
    """A store that stopped before it removed a head has left it marked: the next collection goes on."""
    alice = User(stores, "alice")
    alice.turn(0)
    await_heads(stores)
    alice.delete(0)
    await_dead(stores, alice)
    secret = Secret((Path(stores.bucket.removeprefix("file://")).parent / "secret").read_bytes().strip())
    path = head_of(stores, alice)
    path.write_bytes(secret.write(secret.read_head(path.read_bytes()).dead("0123456789abcdef")))
    listed = Path(stores.bucket.removeprefix("file://")) / DYING / ("0" * 32)
    listed.parent.mkdir(parents=True)
    text = str(path.relative_to(stores.bucket.removeprefix("file://"))).encode()
    listed.write_bytes(secret.signed(str(listed.relative_to(stores.bucket.removeprefix("file://"))), text))
    assert alice.turn(0) == 0
    assert alice.turn(0) == 70
    with pytest.raises(Unavailable):
        alice.turn(0, durability=SHARED)
    collected(stores, 1)
    assert listed.exists()
    aged(listed, 2 * DAY_S)
    collected(stores, 1)
    await_heads(stores)
    assert not listed.exists()
    assert alice.turn(0, durability=SHARED) >= 140
