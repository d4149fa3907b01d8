"""When an imported session of absolute expiry ends."""

from datetime import UTC, datetime, timedelta

import pytest

from ctxcache.archive.transfer import end_of_life

NOW = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (NOW - HOUR, NOW + HOUR, NOW + HOUR),
        (NOW - 3 * HOUR, NOW - HOUR, NOW + 2 * HOUR),
        (NOW - HOUR, NOW + SECOND, NOW + HOUR + SECOND),
        (NOW - 2 * HOUR, NOW - 2 * HOUR + SECOND, NOW + 60 * SECOND),
        (NOW - HOUR, NOW - 2 * HOUR, NOW + 60 * SECOND),
    ],
    ids=["to come", "past", "about to end", "nearly ended at the export", "ended at the export"],
)
def test_an_end_that_is_past_is_based_anew(begin: datetime, end: datetime, expected: datetime) -> None:
    """As it was where it is to come; else with the time that it had left, a minute at least."""
    assert end_of_life(_ns(end), _ns(begin), NOW) == expected


def _ns(instant: datetime) -> int:
    return round(instant.timestamp()) * 10**9
