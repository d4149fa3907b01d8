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
from ctxcache.errors import InvalidArgument, SessionNotFound
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
    for path in objects(stores):
        aged(path, 2 * DAY_S)
    for path in (Path(stores.bucket.removeprefix("file://")) / "v1/n").iterdir():
        aged(path, 2 * DAY_S)
    # The one that looks says that it is there at each beat.
    time.sleep(1)
    told = collected(stores, 1)
    assert (told.expired_session_count, told.garbage_object_count) == (1, 2)
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
