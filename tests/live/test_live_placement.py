"""The running store does what the simulator says.

Real calls, bytes and files against the same load simulated.
"""

from dataclasses import replace
from pathlib import Path

import pytest

import ctxcache
from ctxcache.core.placement.policy import Level
from ctxcache.simulate.load import TraceHint
from tests.live.compare import Setting, Sizes, differences, live, live_here, simulated
from tests.live.engine import SLOT_BYTES, TOKEN_BYTES
from tests.live.load import Shape, make_turns
from tests.live.running import RunningServer
from tests.live.scheduler import Scheduler

SMALL, LARGE = Sizes(64, 256), Sizes(128, 384)
QUICK = Shape(session_count=50)
SATURATED = Shape(session_count=60, most_turns=6, most_segments=3, spacing_s=0.5, gap_s=10)
ONE_SHOT = Shape(session_count=200, once_share=0.7, most_turns=10, most_segments=3, spacing_s=1.0, gap_s=20)
QUEUED = Shape(session_count=70, most_turns=6, most_segments=3, spacing_s=2.0)
LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("policy", "sizes"),
    [
        pytest.param("lru", SMALL, marks=LONG),
        ("lru", LARGE),
        pytest.param("look-ahead", SMALL, marks=LONG),
        ("value", SMALL),
        pytest.param("value", LARGE, marks=LONG),
    ],
)
def test_every_turn_finds_what_it_finds_in_the_simulator(policy: str, sizes: Sizes, tmp_path: Path) -> None:
    """Hits in DRAM and on SSD, misses and evictions are the simulator's, but for one in a hundred."""
    turns, setting = make_turns(QUICK), Setting(sizes, policy)
    running, expected = live_here(turns, setting, tmp_path / "data"), simulated(turns, setting)

    assert len(differences(running, expected)) <= len(turns) / 100
    assert min(running.counts().values()) > len(turns) / 50
    # Or nothing would tell one policy from another.
    assert differences(running, simulated(turns, Setting(sizes, "fifo")))


@pytest.mark.parametrize(
    ("policy", "slot_count", "spacing_s"),
    [("value", None, 0.5), pytest.param("look-ahead", 3, 1.0, marks=LONG)],
)
def test_one_shot_sessions_do_not_reach_an_ssd_that_is_full_of_better_ones(
    policy: str, slot_count: int | None, spacing_s: float, tmp_path: Path
) -> None:
    """They leave from memory, never written.

    SSD is written what the simulator says, which is less than came.
    """
    turns, setting = (
        make_turns(replace(ONE_SHOT, spacing_s=spacing_s)),
        Setting(Sizes(64, 128), policy, slot_count),
    )
    with (
        RunningServer(setting.settings(tmp_path / "data")) as server,
        ctxcache.connect(server.target) as client,
    ):
        with client.hints.engine_queue("engine") as queue:
            running, _ = live(turns, setting, server, client, Scheduler(client, queue))
        stats = client.admin.stats()
    expected = simulated(turns, setting)

    assert len(differences(running, expected)) <= len(turns) / 100
    assert abs(running.written_bytes / expected.written_bytes - 1) < 0.01
    unwritten_bytes = stats.appended_token_count * TOKEN_BYTES - running.written_bytes
    assert unwritten_bytes >= stats.unadmitted_session_count * SLOT_BYTES
    assert stats.unadmitted_session_count >= 10


def test_turns_beside_one_another_find_the_same_too(tmp_path: Path) -> None:
    """Three turns at a time, each with its lease, and others waiting for them."""
    turns, setting = make_turns(QUEUED), Setting(Sizes(96, 384), "lru", slot_count=3)
    running, expected = live_here(turns, setting, tmp_path / "data"), simulated(turns, setting)

    assert expected.tally.longest_queue > 1
    assert not differences(running, expected)
    assert running.counts() == expected.counts()


@pytest.mark.parametrize("policy", ["look-ahead", "value"])
def test_turns_that_waited_in_the_queue_find_their_sessions_in_dram(policy: str, tmp_path: Path) -> None:
    """The queue goes over a real stream: what it foresees is there, and all is as the simulator says."""
    turns, setting = make_turns(SATURATED), Setting(Sizes(96, 384), policy, slot_count=2)
    running, expected = live_here(turns, setting, tmp_path / "data"), simulated(turns, setting)

    assert not differences(running, expected)
    hits = [tier for (_, tier), wait_s in zip(running.found, running.waits_s, strict=True) if tier and wait_s]
    assert len(hits) > len(turns) / 2
    assert hits.count(Level.MEMORY) >= 0.99 * len(hits)


@pytest.mark.parametrize("slot_count", [pytest.param(None, marks=LONG), 2])
def test_hints_of_returns_and_ends_do_what_they_do_in_the_simulator(
    slot_count: int | None, tmp_path: Path
) -> None:
    """Said after each turn, by calls; beside a queue, too."""
    setting = Setting(Sizes(64, 256), "value", slot_count, hints=frozenset(TraceHint))
    turns = make_turns(QUEUED)
    running, expected = live_here(turns, setting, tmp_path / "data"), simulated(turns, setting)

    assert len(differences(running, expected)) <= len(turns) / 100
    assert differences(running, simulated(turns, replace(setting, hints=frozenset())))
