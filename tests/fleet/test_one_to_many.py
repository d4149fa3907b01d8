"""From one store to a fleet: what a store kept while it was alone is found by others of its fleet.

docs/fleet.md, From one node to many, is what is done here.
"""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from ctxcache.cli.main import app
from ctxcache.errors import Draining
from tests.fleet.stores import Stores, User
from tests.fleet.test_stores import published
from tests.server_process import ServerProcess

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
PLACE = "unix:/run/ctxcache/ctxcache.sock"


@contextmanager
def _alone(directory: Path) -> Iterator[Stores]:
    """A store without a bucket, over the data directory of a fleet's first."""
    stores = Stores(directory, 0)
    stores.processes.append(ServerProcess(directory / "store0"))
    with stores:
        yield stores
        assert stores.processes[0].terminate() == 0


@pytest.fixture
def users(tmp_path: Path) -> list[User]:
    """Three users of a store that was alone."""
    with _alone(tmp_path) as alone:
        found = [User(alone, f"user{number}") for number in range(3)]
        for user in found:
            user.turn(0, 300)
            user.turn(0)
    return found


@pytest.fixture
def stores(tmp_path: Path, users: list[User]) -> Iterator[Stores]:
    """That store again, which has been told of a bucket, and a second one."""
    with Stores(tmp_path, 2) as both:
        for user in users:
            user.go_over_to(both)
        yield both


def test_each_session_has_a_head_from_its_next_use_on(stores: Stores, users: list[User]) -> None:
    """Used once where it is, it is found elsewhere, every row; what was not used has no head yet."""
    alice, bob, _ = users
    assert alice.turn(0) == 370
    published(stores, alice, 1)
    assert [alice.turn(1), alice.turn(0)] == [440, 510]
    facts = stores.clients[0].admin.fleet()
    assert (facts.owned_session_count, facts.private_session_count) == (1, 0)
    assert bob.turn(0) == 370


def test_a_turn_that_comes_before_it_is_computed(stores: Stores, users: list[User]) -> None:
    """The page says so: elsewhere nobody can know of a session without a head. Nothing wrong is found."""
    alice = users[0]
    assert alice.turn(1) == 0
    deadline = time.monotonic() + 10
    while not stores.clients[1].admin.fleet().owned_session_count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert alice.turn(0) == 440


def test_the_pages_lines_give_all_of_them_heads(stores: Stores, users: list[User]) -> None:
    """After them, turns may land anywhere."""
    _type_the_pages_lines(stores.processes[0])
    for user in users:
        published(stores, user, 1)
    assert [user.turn(1) for user in users] == [370] * 3
    assert all(user.computed == 0 for user in users)


def test_the_way_back_is_open(tmp_path: Path, stores: Stores, users: list[User]) -> None:
    """Without the bucket a store has again what is at it, and nothing else."""
    _type_the_pages_lines(stores.processes[0])
    published(stores, users[0], 1)
    with ExitStack() as held:
        held.callback(stores.__exit__, None, None, None)
        assert stores.processes[0].terminate() == 0
    with _alone(tmp_path) as alone:
        for user in users:
            user.go_over_to(alone)
        assert [user.found(0) for user in users] == [0, 370, 370]


def test_a_store_that_goes_for_good_leaves_its_sessions(stores: Stores, users: list[User]) -> None:
    """With their rows in the bucket they are found at once, though nobody is there to be asked."""
    left = _said(stores.processes[0], "leave")
    assert (left["session_count"], left["published_count"], left["failed_count"]) == (3, 3, 0)
    assert not stores.clients[0].admin.health()
    # One comes while the store drains, and may still be asked; the others when it has gone.
    assert users[0].turn(1) == 370
    assert stores.processes[0].terminate() == 0
    assert [user.turn(1) for user in users[1:]] == [370] * 2
    assert all(user.computed == 0 for user in users)


def test_what_is_added_while_a_store_leaves_comes_along(stores: Stores, users: list[User]) -> None:
    """Every turn that was answered until the store took no more work is in the bucket."""
    user, answered = users[2], [370]

    def talk() -> None:
        while True:
            try:
                user.turn(0)
            except Draining:
                return
            answered[0] = len(user.tokens)

    with ThreadPoolExecutor(1) as threads:
        talking = threads.submit(talk)
        while answered[0] == 370:
            time.sleep(0.01)
        assert _said(stores.processes[0], "leave")["failed_count"] == 0
        talking.result(30)
    assert stores.processes[0].terminate() == 0
    assert user.found(1) >= answered[0] > 370


def _type_the_pages_lines(store: ServerProcess) -> None:
    (line,) = re.findall(r"-- (ctxcache --target \S+ fleet publish)`", PAGE.read_text())
    assert PLACE in line
    assert _said(store, "publish")["published_count"] == 3


def _said(store: ServerProcess, command: str) -> dict[str, Any]:
    target = ("--target", store.unix_target)
    shown = CliRunner().invoke(app, [*target, "--output", "json", "fleet", command])
    assert shown.exit_code == 0, shown.output
    return cast("dict[str, Any]", json.loads(shown.output))
