"""The store's time over restarts: on the same boot, and over another one."""

import time
from pathlib import Path

import pytest

from ctxcache.runtime.clock import BOOT_ID, CLOCK, LONGEST_STOP_NS, StoreClock, boot_ns
from ctxcache.runtime.files import write_facts

SECOND_NS = 10**9
HOUR_NS = 3600 * SECOND_NS
THEN_NS = 1_700_000_000 * SECOND_NS
SLACK_NS = 600 * SECOND_NS
"""A test may take this long."""


def kept(directory: Path, *, boot_id: str, stopped_ns: int, wall_stopped_ns: int) -> None:
    """The files of a run that ended so long ago by the time since boot, and so long ago by the wall clock."""
    facts = {
        "boot_id": boot_id, "boot_ns": boot_ns() - stopped_ns, "time_ns": THEN_NS,
        "wall_ns": time.time_ns() - wall_stopped_ns,
    }  # fmt: skip
    write_facts(directory / CLOCK, facts)


@pytest.mark.parametrize("wall_stopped_ns", [-5 * HOUR_NS, 0, 500 * HOUR_NS])
def test_on_the_same_boot_the_wall_clock_is_not_asked(tmp_path: Path, wall_stopped_ns: int) -> None:
    """A minute is a minute, whatever the wall clock says of it; answers follow the wall clock."""
    boot_id = BOOT_ID.read_text().strip()
    kept(tmp_path, boot_id=boot_id, stopped_ns=60 * SECOND_NS, wall_stopped_ns=wall_stopped_ns)
    clock = StoreClock.open(tmp_path)

    assert 0 <= clock.now_ns() - THEN_NS - 60 * SECOND_NS < SLACK_NS
    assert abs(clock.wall_ns() - time.time_ns()) < SLACK_NS


@pytest.mark.parametrize(
    ("wall_stopped_ns", "passed_ns"),
    [(-2 * HOUR_NS, 0), (3 * HOUR_NS, 3 * HOUR_NS), (24 * 365 * HOUR_NS, LONGEST_STOP_NS)],
)
def test_over_another_boot_a_stop_is_neither_negative_nor_endless(
    tmp_path: Path, wall_stopped_ns: int, passed_ns: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No session's life grows by it, and a clock that is a year ahead costs a day.

    A time that is not believed is told.
    """
    kept(tmp_path, boot_id="another", stopped_ns=0, wall_stopped_ns=wall_stopped_ns)
    clock = StoreClock.open(tmp_path)

    assert 0 <= clock.now_ns() - THEN_NS - passed_ns < SLACK_NS
    assert ("clock_clamped" in caplog.text) == (wall_stopped_ns != passed_ns)


async def test_time_goes_on_from_what_was_kept(tmp_path: Path) -> None:
    """Also that the wall clock is elsewhere."""
    kept(tmp_path, boot_id="another", stopped_ns=0, wall_stopped_ns=0)
    first = StoreClock.open(tmp_path)
    await first.keep()
    second = StoreClock.open(tmp_path)

    before_ns = first.now_ns()
    assert 0 <= second.now_ns() - before_ns < SLACK_NS
    assert abs(second.wall_ahead_ns() - first.wall_ahead_ns()) < SLACK_NS


def test_a_new_store_begins_with_the_wall_clock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And so does one whose note is damaged, which is told."""
    fresh = StoreClock.open(tmp_path)
    (tmp_path / CLOCK).write_text("{")
    damaged = StoreClock.open(tmp_path)

    assert fresh.wall_ahead_ns() == damaged.wall_ahead_ns() == 0
    assert abs(fresh.now_ns() - time.time_ns()) < SLACK_NS
    assert "clock_unreadable" in caplog.text
