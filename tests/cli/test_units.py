"""Sizes, times and ranges as people read and write them."""

from datetime import UTC, datetime, timedelta

import pytest

from ctxcache.cli import units
from ctxcache.settings.knobs.knob import parse_duration_s

NOW = datetime(2030, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("size_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1288490189, "1.2 GiB"),
        (1 << 50, "1.0 PiB"),
        (1 << 60, "1024.0 PiB"),
    ],
)
def test_sizes_are_binary_with_one_digit(size_bytes: int, shown: str) -> None:
    """Sizes grow by 1024; bytes are whole."""
    assert units.human_size(size_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "now"),
        (3599, "in 59 min"),
        (3600, "in 1 h"),
        (-200, "3 min ago"),
        (86400 * 3, "in 3 d"),
        (-1, "1 s ago"),
    ],
)
def test_times_are_relative(seconds: float, shown: str) -> None:
    """A time is as far away as its largest whole unit."""
    assert units.human_time(NOW + timedelta(seconds=seconds), NOW) == shown


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("500ms", 0.5),
        ("15min", 900),
        ("15m", 900),
        ("2h", 7200),
        ("1h30m", 5400),
        ("0.5h", 1800),
        ("7d", 604800),
    ],
)
def test_durations_parse(text: str, seconds: float) -> None:
    """A duration is numbers with units, seconds without."""
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "2 h", "-2h", "2y", "1h-30m"])
def test_other_durations_are_refused(text: str) -> None:
    """A text that is not a duration as a whole is refused."""
    with pytest.raises(ValueError, match="is not a time such as"):
        parse_duration_s(text)


def test_instants_need_an_offset() -> None:
    """An instant without its offset could be any of a day's."""
    assert units.parse_instant("2030-01-31T13:00:00+01:00") == NOW
    with pytest.raises(ValueError, match="append Z"):
        units.parse_instant("2030-01-31T13:00:00")
    with pytest.raises(ValueError, match="is not a time such as"):
        units.parse_instant("tomorrow")


def test_ranges_exclude_their_end() -> None:
    """A range may be empty but not backwards."""
    assert units.parse_range("10:20") == (10, 20)
    assert units.parse_range("5:5") == (5, 5)
    for text in ("20:10", "10", "10:", ":10", "-1:5"):
        with pytest.raises(ValueError, match="is not a token range"):
            units.parse_range(text)
