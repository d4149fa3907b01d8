"""Learned return times outlive restarts and kills.

Whatever is wrong with it, the server starts.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import ServerProcess
from stored import connected, store_session

from ctxcache.core.placement.policy import Capacities, Facts
from ctxcache.core.placement.value import ReturnValue
from ctxcache.runtime.files import write_facts
from ctxcache.server.upkeep import LESSONS, Lessons

NOW_NS = 10**18
COUNT = 3
OFTEN = (
    "import ctxcache.server.upkeep; ctxcache.server.upkeep.LESSONS_INTERVAL_S = 0.01; from "
    "ctxcache.cli.main import main; main()"
)
"""A server that keeps what it has learned a hundred times a second."""


def _policy() -> ReturnValue:
    return ReturnValue(Capacities(1 << 30, 1 << 40))


def _taught() -> ReturnValue:
    policy = _policy()
    for number in range(100):
        uid = b"%d" % number
        policy.idle(uid, Facts(1000, 1, 1000, 1), 10.0 * number)
        policy.arrived(uid, 10.0 * number + 3)
        policy.ended(uid)
    return policy


@pytest.fixture
def of(tmp_path: Path) -> Iterator[Any]:
    """Make the lessons of a policy, in one directory."""
    made = []

    def make(policy: ReturnValue, name: str = "value") -> Lessons:
        made.append(Lessons(tmp_path, name, policy, lambda: NOW_NS))
        return made[-1]

    yield make
    for lessons in made:
        lessons.close()


async def test_what_was_kept_is_gone_on_from(of: Any, tmp_path: Path) -> None:
    """And what has not changed is not written again."""
    policy, later = _taught(), _policy()
    lessons = of(policy)
    await lessons.keep()
    of(later).recall()
    assert later.lessons() == policy.lessons() != _policy().lessons()

    (tmp_path / LESSONS).unlink()
    await lessons.keep()
    assert not (tmp_path / LESSONS).exists()


async def test_of_another_policy_or_version_nothing_is_learned(of: Any, tmp_path: Path) -> None:
    """Nor is anything said: that is no damage."""
    await of(_taught(), "another").keep()
    for version in (1, 2):
        policy = _policy()
        of(policy).recall()
        assert policy.lessons() == _policy().lessons()
        write_facts(tmp_path / LESSONS, {"version": version + 1, "policy": "value"})


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda _: b"",
        lambda _: b"\xff\xfe",
        lambda _: b"[]",
        lambda _: b"{}",
        lambda data: data.replace(b"100.0", b"101.0", 1),
    ],
)
async def test_what_cannot_be_read_is_learned_anew(
    of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    """A warning says so, and the next turn writes it anew."""
    path = tmp_path / LESSONS
    await of(_taught()).keep()
    path.write_bytes(damage(path.read_bytes()))
    policy = _policy()
    lessons = of(policy)
    lessons.recall()
    assert "lessons_unreadable" in caplog.text
    assert policy.lessons() == _policy().lessons()

    await lessons.keep()
    caplog.clear()
    of(_policy()).recall()
    assert not caplog.text


async def test_a_directory_that_takes_nothing_is_asked_again(
    of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing else comes of it."""
    lessons = of(_taught())
    in_the_way = tmp_path / f"{LESSONS}.partial"
    in_the_way.mkdir()
    await lessons.keep()
    assert "lessons_not_kept" in caplog.text
    in_the_way.rmdir()
    await lessons.keep()
    assert (tmp_path / LESSONS).exists()


def _rests(path: Path) -> float:
    """How many sessions came to rest, as far as the file says."""
    classes = json.loads(path.read_text())["lessons"]["classes"] if path.exists() else {"0": [[0.0]]}
    return float(classes["0"][0][0])


def test_a_killed_server_goes_on_from_what_it_had_learned(tmp_path: Path) -> None:
    """Nothing is left that the next run could learn from: what it has at its end was kept before the kill."""
    path = tmp_path / "data" / LESSONS
    with ServerProcess(tmp_path / "data", program=(sys.executable, "-c", OFTEN)) as server:
        for number in range(COUNT):
            name = store_session(server.target, f"s{number}")
            with connected(server.target) as client:
                client.sessions.open(name).delete()
        deadline_s = time.monotonic() + 30
        while _rests(path) < COUNT and time.monotonic() < deadline_s:
            time.sleep(0.01)
        server.kill9()
        kept = _rests(path)
        server.start()
        assert server.terminate() == 0
    assert _rests(path) == kept >= COUNT
