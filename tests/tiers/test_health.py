"""When a path stops taking writes, and when it takes them again."""

import errno

import pytest
from fakes import FakeClock

from ctxcache.errors import TierFailure
from ctxcache.storage.tiers.base import TierRefusal
from ctxcache.storage.tiers.path_health import READ_FAILURE_LIMIT, REST_NS, PathHealth


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EBADF, None])
def test_a_refused_write_fences(number: int | None) -> None:
    """A device that refuses a write is not asked again, however long one waits."""
    health, clock = _health()
    health.write_failed("write: no", number)
    clock.advance(ns=10 * REST_NS)

    assert health.refusal == TierRefusal("write: no", is_final=True)
    with pytest.raises(TierFailure, match="/ssd: fenced until a restart: write: no"):
        health.check()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN])
def test_what_lacks_room_rests(number: int) -> None:
    """A path without room is tried again after its rest; what it took before may be synced in it."""
    health, clock = _health()
    health.write_failed("write: full", number)
    health.check_fence()
    during = health.refusal
    clock.advance(ns=REST_NS)

    assert during == TierRefusal("write: full", is_final=False)
    assert health.refusal is None
    health.check()


def test_reads_that_fail_in_a_row_fence() -> None:
    """A device whose reads fail one after the other gets no more writes; a success between begins anew."""
    health, _ = _health()
    for _ in range(READ_FAILURE_LIMIT - 1):
        health.read_failed("read: no")
    health.read_succeeded()
    for _ in range(READ_FAILURE_LIMIT - 1):
        health.read_failed("read: no")
    before = health.refusal
    health.read_failed("read: no")

    assert before is None
    assert health.refusal == TierRefusal("3 reads failed in a row, the last: read: no", is_final=True)


def test_the_first_reason_stays() -> None:
    """The reason told of a fenced path is the first one."""
    health, _ = _health()
    health.fence("fdatasync: no")
    health.write_failed("write: full", errno.ENOSPC)

    assert health.refusal == TierRefusal("fdatasync: no", is_final=True)


def _health() -> tuple[PathHealth, FakeClock]:
    clock = FakeClock()
    return PathHealth("/ssd", clock), clock


def test_a_device_is_lost_by_a_probe_and_found_by_one() -> None:
    """Failed reads and writes only raise the doubt; lost is neither final nor forgotten by a rest."""
    health, _ = _health()
    health.write_failed("write: no", errno.EIO)
    doubted = health.is_doubted
    health.lose("probe: no")
    lost = health.refusal
    health.found()

    assert doubted
    assert lost == TierRefusal("probe: no", is_final=True, is_lost=True)
    assert health.refusal == TierRefusal("write: no", is_final=True)
    assert not health.is_doubted


def test_a_refusal_says_since_when() -> None:
    """The time of the first reason, and of a later loss its own; what passes by itself has none."""
    health, clock = _health()
    fenced_ns = clock.wall_ns()
    health.fence("fdatasync: no")
    clock.advance(seconds=5)
    health.fence("again: no")
    fenced = health.refusal
    lost_ns = clock.wall_ns()
    health.lose("probe: no")
    clock.advance(seconds=5)
    health.lose("probe: still no")
    lost = health.refusal
    resting, _ = _health()
    resting.write_failed("write: full", errno.ENOSPC)

    assert fenced is not None
    assert fenced.since_ns == fenced_ns
    assert lost is not None
    assert lost.since_ns == lost_ns
    assert resting.refusal is not None
    assert resting.refusal.since_ns is None
