"""The cost of a disturbance to a running store: hits at most, never a byte, and nothing hangs."""

from datetime import timedelta
from pathlib import Path

import ctxcache
from tests.faults.blackhole import Blackhole
from tests.live.compare import Setting, Sizes, differences, live, simulated
from tests.live.failing import FailingServer
from tests.live.killed import KilledServer
from tests.live.load import Shape, make_turns
from tests.live.running import RunningServer
from tests.live.scheduler import LostScheduler

SMALL = Shape(session_count=50)
QUEUED = Shape(session_count=50, most_turns=6, most_segments=3, spacing_s=0.5, gap_s=10)
LOST_AT = 60


def test_a_path_that_fails_costs_hits_alone(tmp_path: Path) -> None:
    """One of two SSD paths takes no writes, then gives no reads either; the other goes on."""
    turns, setting = make_turns(SMALL), Setting(Sizes(64, 256), "lru", path_count=2)
    settings = setting.settings(tmp_path / "data")
    with (
        FailingServer(settings, no_writes_after=60, no_reads_after=64) as server,
        ctxcache.connect(server.target) as client,
    ):
        running, engine = live(turns, setting, server, client, goes_on=True)
    expected = simulated(turns, setting)

    assert set(engine.troubles) == {"TIER_FAILURE"}
    assert running.found[:60] == expected.found[:60]
    late, expected_late = (sum(tier is not None for _, tier in o.found[64:]) for o in (running, expected))
    assert expected_late > late > expected_late / 4


def test_a_lost_queue_is_forgotten(tmp_path: Path) -> None:
    """From its loss on all is as the simulator says without a queue; nothing of it is kept."""
    turns, setting = make_turns(QUEUED), Setting(Sizes(96, 384), "look-ahead", slot_count=2)
    with (
        RunningServer(setting.settings(tmp_path / "data")) as server,
        ctxcache.connect(server.target) as client,
        Blackhole(server.target) as way,
        ctxcache.connect(way.target, timeout_s=5) as far,
    ):

        def cut() -> None:
            way.end()
            server.await_no_queue()

        hints = LostScheduler(
            client, far.hints.engine_queue("engine", grace=timedelta()), at=LOST_AT, cut=cut
        )
        running, _ = live(turns, setting, server, client, hints)

    assert not differences(running, simulated(turns, setting, lost_at=LOST_AT))
    assert differences(running, simulated(turns, setting))


def test_a_kill_costs_nothing_that_was_durable(tmp_path: Path) -> None:
    """Killed between turns, within one, and with rows written: all is found as if nothing had been."""
    turns, setting = make_turns(SMALL), Setting(Sizes(64, 256), "lru")
    with (
        KilledServer(tmp_path / "data", setting, at=(201, 322, 443)) as server,
        ctxcache.connect(server.target) as client,
    ):
        running, engine = live(turns, setting, server, client, goes_on=True, is_durable=True)
    expected = simulated(turns, setting)

    assert server.kill_count == 3
    # A session has another generation after a crash: what was in memory alone had some, too.
    assert set(engine.troubles) <= {"UNAVAILABLE", "RESERVATION_NOT_FOUND", "GENERATION_MISMATCH"}
    hits, expected_hits = ([tier is not None for _, tier in o.found] for o in (running, expected))
    assert hits == expected_hits
