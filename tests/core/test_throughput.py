"""Throughput: bytes over busy time, whatever overlaps."""

import pytest

from ctxcache.core.observations import DEFAULT_BYTES_PER_S, Throughput


def play(throughput: Throughput, *events: tuple[float, int | None]) -> None:
    """Begin (no size) or end an arrival at a time."""
    for now_s, size_bytes in events:
        if size_bytes is None:
            throughput.begun(now_s)
        else:
            throughput.ended(now_s, size_bytes)


def test_before_anything_was_measured_there_is_a_default() -> None:
    """And nothing takes no time."""
    assert Throughput().bytes_per_s == DEFAULT_BYTES_PER_S
    assert Throughput().time_s(0) == 0


def test_it_follows_what_arrives() -> None:
    """Within some seconds of busy time; then back, when it is faster again."""
    throughput = Throughput()
    for i in range(60):
        play(throughput, (float(i), None), (i + 1.0, 50_000_000))
    assert throughput.bytes_per_s == pytest.approx(50e6, rel=0.02)
    for i in range(60, 120):
        play(throughput, (float(i), None), (i + 1.0, 2_000_000_000))
    assert throughput.time_s(4_000_000_000) == pytest.approx(2, rel=0.02)


def test_idle_time_is_none() -> None:
    """A store that nobody reads from is not slow."""
    busy, idle = Throughput(), Throughput()
    for i in range(30):
        play(busy, (float(i), None), (i + 1.0, 10**8))
        play(idle, (i * 100.0, None), (i * 100 + 1.0, 10**8))
    assert idle.bytes_per_s == pytest.approx(busy.bytes_per_s)


def test_what_overlaps_is_busy_once() -> None:
    """Two at a time bring twice as much."""
    throughput = Throughput()
    for i in range(60):
        play(throughput, (float(i), None), (float(i), None), (i + 1.0, 10**8), (i + 1.0, 10**8))
    assert throughput.bytes_per_s == pytest.approx(2e8, rel=0.02)


def test_failures_bring_nothing_and_never_a_rate_of_nothing() -> None:
    """Nor does a clock that stands still, or goes back."""
    throughput = Throughput()
    for i in range(1000):
        play(throughput, (i * 10.0, None), (i * 10 + 10.0, 0))
    assert 0 < throughput.bytes_per_s < 100
    play(throughput, (5.0, None), (5.0, 10**9), (1.0, None), (0.0, 10**9))
    assert throughput.bytes_per_s > 0


def test_while_a_read_hangs_times_stay_such_as_can_be_told() -> None:
    """The longest span of protobuf's Duration is 10,000 years."""
    throughput = Throughput()
    throughput.begun(0.0)
    for now_s in (200.0, 3600.0, 86400.0):
        throughput.begun(now_s)
        assert 1e6 < throughput.time_s(10 << 40) < 315_576_000_000
