"""Which fault strikes: by kind and path, as often and as long as it was asked for."""

from collections.abc import Callable

import pytest
from fakes import FakeClock

from ctxcache.errors import TooManyRequests
from ctxcache.storage.injection import FAULT_LIMIT, Fault, FaultKind, Faults

READ, WRITE = FaultKind.SSD_READ_ERROR, FaultKind.SSD_WRITE_ERROR
S = 10**9


@pytest.fixture
def clock() -> FakeClock:
    """Stands still."""
    return FakeClock()


@pytest.fixture
def faults(clock: FakeClock) -> Faults:
    """None yet."""
    return Faults(clock)


def fault(kind: FaultKind = READ, *, count: int = 1, end_ns: int = S, path_index: int | None = None) -> Fault:
    """One to inject."""
    return Fault(kind=kind, left_count=count, end_ns=end_ns, path_index=path_index)


def test_a_fault_strikes_as_often_as_it_was_asked_for(faults: Faults) -> None:
    """And then no more."""
    faults.inject(fault(count=3))

    assert [one.left_count for _ in range(3) if (one := faults.strike(READ))] == [3, 2, 1]
    assert faults.strike(READ) is None
    assert faults.active() == []


def test_a_fault_strikes_as_long_as_it_was_asked_for(faults: Faults, clock: FakeClock) -> None:
    """However seldom it has."""
    faults.inject(fault(count=100))
    clock.advance(ns=S - 1)
    assert faults.strike(READ)
    clock.advance(ns=1)

    assert faults.strike(READ) is None
    assert faults.active() == []
    assert faults.clear() == 0


def test_a_fault_strikes_its_kind_and_path_alone(faults: Faults) -> None:
    """The oldest that fits; one without a path, every path."""
    second = faults.inject(fault(path_index=1))
    every = faults.inject(fault(count=2))

    assert faults.strike(WRITE, 1) is None
    assert [faults.strike(READ, 0), faults.strike(READ, 1)] == [every, second]
    assert [one.left_count for one in faults.active()] == [1]


def test_cleared_faults_strike_no_more(faults: Faults) -> None:
    """Their numbers are not used again."""
    first = [faults.inject(fault(kind)) for kind in FaultKind]

    assert faults.clear() == len(FaultKind)
    assert not any(faults.strike(kind) for kind in FaultKind)
    assert faults.inject(fault()).fault_id == first[-1].fault_id + 1


def test_there_are_never_more_than_a_few(faults: Faults, clock: FakeClock) -> None:
    """A fault that is over makes room."""
    inject: Callable[[], object] = lambda: faults.inject(fault(end_ns=clock.monotonic_ns() + S))  # noqa: E731
    for _ in range(FAULT_LIMIT):
        inject()
    with pytest.raises(TooManyRequests):
        inject()
    clock.advance(seconds=1)

    inject()
