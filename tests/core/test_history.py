"""History: what is remembered of sessions, and how much of it."""

from ctxcache.core.history import EVENTS_LIMIT, MISSES_LIMIT, Event, History, Miss, Requests
from ctxcache.core.observations import Histogram


def test_the_last_end_explains_a_miss() -> None:
    """Other events are no reason for a session not to be there."""
    history = History()
    history.note("t", "s", Event.EVICTED, time_ns=1)
    history.note("t", "s", Event.QUOTA, time_ns=2)

    assert history.end_of("t", "s") is Event.EVICTED
    assert history.end_of("t", "other") is None
    assert history.end_of("u", "s") is None


def test_what_repeats_is_counted_once() -> None:
    """An engine that asks with the wrong model all day does not push out why the session went."""
    history = History()
    history.note("t", "s", Event.EVICTED, time_ns=1, detail="room", token_count=5)
    for time_ns in range(2, 100):
        history.note("t", "s", Event.FINGERPRINT_MISMATCH, time_ns=time_ns)

    first, second = history.of("t", "s")
    assert (first.event, first.token_count) == (Event.EVICTED, 5)
    assert (second.first_time_ns, second.time_ns, second.count) == (2, 99, 98)


def test_it_is_bounded() -> None:
    """By sessions, whose longest forgotten goes first, and by events of each."""
    history = History(sessions_limit=2)
    for i in range(2 * EVENTS_LIMIT):
        history.note("t", "a", Event.TRUNCATED if i % 2 else Event.QUOTA, time_ns=i)
    history.note("t", "b", Event.EXPIRED, time_ns=50)
    history.note("t", "a", Event.EXPIRED, time_ns=51)
    history.note("t", "c", Event.EXPIRED, time_ns=52)

    assert len(history) == 2
    assert len(history.of("t", "a")) == EVENTS_LIMIT
    assert history.of("t", "b") == ()


def test_a_histogram_counts_a_bound_below_it() -> None:
    """As Prometheus has it; what is negative is nothing."""
    histogram = Histogram((1.0, 2.0))
    for value in (-1.0, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)

    assert (histogram.counts, histogram.count, histogram.total) == ([2, 2, 1], 5, 13.5)


def test_what_requests_missed_is_bounded_too() -> None:
    """By requests, the longest silent of which is forgotten, and by misses of each.

    One that repeats is counted.
    """
    requests = Requests(requests_limit=2)
    for trace in ("a", "b", "a", "c"):
        requests.note("t", trace, Miss("s", "lookup", "evicted", 1))
    for i in range(MISSES_LIMIT + 3):
        requests.note("t", "c", Miss(f"s{i}", "lookup", "evicted", i))

    assert len(requests) == 2
    assert [one.count for one in requests.of("t", "a")] == [2]
    assert not requests.of("t", "b")
    assert not requests.of("u", "a")
    assert [one.time_ns for one in requests.of("t", "c")] == list(range(3, MISSES_LIMIT + 3))
