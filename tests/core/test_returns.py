"""Learned return times, hints about them, and the bounded work of one call."""

import itertools
import json
import random
from collections.abc import Callable

import pytest

from ctxcache.core.placement.policy import Facts
from ctxcache.core.placement.returns import AGED_AT_ONCE, AGES_S, LENGTHS_S, ReturnTimes, gittins_indices

COUNT = 5000


def test_an_hour_without_a_call_is_caught_up_with_some_sessions_at_a_time() -> None:
    """Each is ranked anew once, but for those of the first call, however many bins it passed."""
    aged: list[bytes] = []
    returns = ReturnTimes(aged.append)
    uids = [number.to_bytes(2, "big") for number in range(COUNT)]
    for number, uid in enumerate(uids):
        returns.advance(number / COUNT)
        returns.idle(uid, Facts(1000, 1, 1000, 1), returns.now_s)
    aged.clear()
    for call in range(1, COUNT // AGED_AT_ONCE + 3):
        returns.advance(3000.0)
        assert len(aged) <= call * AGED_AT_ONCE
    assert set(aged) == set(uids)
    assert len(aged) <= COUNT + AGED_AT_ONCE
    assert len({returns.index_per_s(uid) for uid in uids}) == 1
    returns.advance(3000.0)
    assert len(aged) <= COUNT + AGED_AT_ONCE


def test_those_that_are_away_for_too_long_are_forgotten_some_at_a_time() -> None:
    """A session that is not watched any more promises nothing; a call forgets so many at most."""
    returns = ReturnTimes(lambda _: None)
    uids = [number.to_bytes(2, "big") for number in range(2 * AGED_AT_ONCE)]
    for uid in uids:
        returns.idle(uid, Facts(1000, 1, 1000, 1), returns.now_s)
    watched = [len(uids)]
    for call in range(7):
        returns.advance(10_000.0 + call)
        watched.append(sum(returns.index_per_s(uid) > 0 for uid in uids))
    assert all(before - after <= AGED_AT_ONCE for before, after in itertools.pairwise(watched))
    assert watched[-1] == 0


def _rest(returns: ReturnTimes, uid: bytes, turn_count: int = 1) -> None:
    returns.idle(uid, Facts(1000, turn_count, 1000, 1), returns.now_s)


def _learn(returns: ReturnTimes, count: int = 1024, away_s: float = 8.0) -> None:
    """Sessions rest, and return when they have been away for so long."""
    for number in range(count):
        now_s = returns.now_s
        _rest(returns, b"before %d" % number)
        returns.advance(now_s + away_s)
        returns.began(b"before %d" % number, returns.now_s)


def test_an_age_that_nobody_has_reached_promises_no_more_than_the_last_that_somebody_has() -> None:
    """Else what is idle for long would be kept for newcomers, until the load is as old as it."""
    returns = ReturnTimes(lambda _: None)
    for number in range(2048):
        returns.advance(0.1 * number)
        _rest(returns, b"%d" % number)
    oldest, youngest = returns.index_per_s(b"0"), returns.index_per_s(b"2047")

    assert 0 <= oldest < youngest


def _index_after(then: Callable[[ReturnTimes, bytes], None]) -> float:
    """A session's promise when jobs of 512 others came a second after their turns."""
    returns = ReturnTimes(lambda _: None)
    for number in range(512):
        uid = b"%d" % number
        _rest(returns, uid)
        returns.advance(returns.now_s + 1)
        returns.queued(uid)
        then(returns, uid)
    _rest(returns, b"asked")
    return returns.index_per_s(b"asked")


def test_a_job_that_waits_is_a_return_before_its_turn_begins() -> None:
    """Waits may be as long as the load is old. A job that was taken back was no return."""
    waiting = _index_after(lambda _returns, _uid: None)
    served = _index_after(lambda returns, uid: returns.began(uid, returns.now_s))
    withdrawn = _index_after(ReturnTimes.unqueued)

    assert served / 3 < waiting <= served
    assert waiting > 2 * withdrawn


def test_what_clients_say_is_over_promises_what_others_of_which_they_said_so_did() -> None:
    """It is believed at first; and hints that nobody can have found out yet are no proof that it is true."""
    returns = ReturnTimes(lambda _: None)
    _learn(returns)
    _rest(returns, b"over")
    returns.said(b"over", is_over=True)
    assert returns.index_per_s(b"over") == 0

    for number in range(1024):
        _rest(returns, b"liar %d" % number)
        returns.said(b"liar %d" % number, is_over=True)
        returns.advance(returns.now_s + 8)
        returns.began(b"liar %d" % number, returns.now_s)
    for number in range(512):
        _rest(returns, b"fresh %d" % number)
        returns.said(b"fresh %d" % number, is_over=True)
    _rest(returns, b"loyal")
    assert returns.index_per_s(b"fresh 511") > 0.8 * returns.index_per_s(b"loyal")

    returns.said(b"loyal", is_over=True)
    returns.said(b"loyal", is_over=False)
    assert returns.index_per_s(b"loyal") >= returns.index_per_s(b"fresh 511")


def test_who_returns_leaves_nothing_to_be_walked_by_later_calls() -> None:
    """However often a session rests, one entry of it is kept."""
    returns = ReturnTimes(lambda _: None)
    for number in range(1000):
        _rest(returns, b"often")
        if number % 2:
            returns.queued(b"often")
            returns.unqueued(b"often")
            returns.queued(b"often")
        returns.began(b"often", returns.now_s)
    _rest(returns, b"often")

    assert sum(map(len, returns._bins)) == 1


def _indices(returns: ReturnTimes) -> list[float]:
    """A session's promise at some idle times, for a class that was seen and for one that was not."""
    found = []
    for turn_count in (1, 5):
        uid = b"asked %d" % turn_count
        _rest(returns, uid, turn_count)
        for age_s in (0, 3, 30, 1200):
            returns.advance(returns.now_s + age_s)
            found.append(returns.index_per_s(uid))
        returns.ended(uid)
    return found


def test_a_later_run_goes_on_from_what_was_counted() -> None:
    """By way of JSON, as it is kept."""
    first, fresh, second = (ReturnTimes(lambda _: None) for _ in range(3))
    _learn(first)
    second.recount(json.loads(json.dumps(first.counts())), 0.0)

    assert second.counts() == first.counts()
    assert _indices(second) == pytest.approx(_indices(first), rel=0.1)
    assert _indices(second) != pytest.approx(_indices(fresh), rel=0.1)


def test_sessions_that_were_counted_before_a_restart_are_not_counted_again() -> None:
    """Nor are those left out that came into the next bin meanwhile.

    The counts are those of a run that went on.
    """
    whole, first, second = (ReturnTimes(lambda _: None) for _ in range(3))
    for number in range(100):
        for returns in (whole, first):
            returns.advance(float(number))
            _rest(returns, b"%d" % number)
    # Kept at 99 s, gone on from at 119 s, which is 7 s on the clock of the next run.
    second.recount(first.counts(), 20.0)
    second.advance(7.0)
    for number in range(100):
        second.recalled(b"%d" % number, 119.0 - number)
    for returns, now_s in ((whole, 119.0), (second, 7.0)):
        for _ in range(10):
            returns.advance(now_s + 300)
        returns.began(b"50", returns.now_s)

    (away, came), (whole_away, whole_came) = _root(second), _root(whole)
    assert came == whole_came
    # A session that passed a bin shorter than the time between is counted nowhere.
    first_bin = AGES_S.index(70)
    assert away[first_bin:] == whole_away[first_bin:]
    assert sum(away) < sum(whole_away)


def _root(returns: ReturnTimes) -> list[list[float]]:
    """How many were away, and how many came, of those of whom nothing was said."""
    classes = returns.counts()["classes"]
    assert isinstance(classes, dict)
    away_and_came: list[list[float]] = classes["0"]
    return away_and_came


@pytest.mark.parametrize(
    "changed",
    [
        {"ages_s": [0, 1]},
        {"classes": {"7": [[], []]}},
        {"classes": {"0.a": [[], []]}},
        {"classes": []},
        {"classes": {"0": [[1.0] * (len(AGES_S) - 1), [1.0] * len(AGES_S)]}},
        {"classes": {"0": [[-1.0] * len(AGES_S), [1.0] * len(AGES_S)]}},
        {"classes": {"0": [[1.0] * len(AGES_S)]}},
        {"wait_s": -1},
        {"queued_share": "many"},
        {"wait_s": None},
    ],
)
def test_counts_of_another_kind_are_refused_and_change_nothing(changed: dict[str, object]) -> None:
    """Whatever is wrong with them."""
    known, returns = ReturnTimes(lambda _: None), ReturnTimes(lambda _: None)
    _learn(known, 100)
    before = returns.counts()
    good = {**before, "classes": known.counts()["classes"]}
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        returns.recount({**good, **changed}, 0.0)
    assert returns.counts() == before
    returns.recount(good, 0.0)
    assert returns.counts() == good


def _slow_index(hazards: list[float], first: int, wait_s: float) -> float:
    away, came, kept_s, best = 1.0, 0.0, 0.0, 0.0
    for number in range(first, len(AGES_S)):
        now = away * hazards[number]
        kept_s += LENGTHS_S[number] * (away - now / 2)
        came += now
        away -= now
        best = max(best, came / (kept_s + came * wait_s))
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_index_of_each_bin_is_the_best_rate_of_all_horizons(seed: int) -> None:
    """As found by trying each; also where nobody ever returns, or returns in one bin only."""
    chance = random.Random(seed)
    hazards = [chance.random() ** 3 * 0.95 if chance.random() < 0.7 else 0.0 for _ in AGES_S]
    wait_s = chance.choice([0.0, 3.0, 500.0])
    for known in (hazards, [0.0] * len(AGES_S), [0.0] * 9 + [0.5] + [0.0] * (len(AGES_S) - 10)):
        expected = [_slow_index(known, first, wait_s) for first in range(len(AGES_S))]
        assert gittins_indices(known, wait_s) == pytest.approx(expected)


def test_who_was_quick_to_return_promises_more_than_who_was_slow() -> None:
    """Both rest for the same turn; the time that each was away before tells them apart."""
    returns = ReturnTimes(lambda _: None)
    for number in range(600):
        is_quick = number % 2 == 0
        uid = b"%d" % number
        _rest(returns, uid, 2)
        for turn_count in range(3, 5):
            returns.advance(returns.now_s + (3.0 if is_quick else 200.0))
            returns.began(uid, returns.now_s)
            _rest(returns, uid, turn_count)
        returns.advance(returns.now_s + 3.0)
        if is_quick:
            returns.began(uid, returns.now_s)
        else:
            returns.advance(returns.now_s + 600.0)
    found = []
    for gap_s in (3.0, 200.0):
        uid = b"asked after %d" % gap_s
        _rest(returns, uid, 3)
        returns.advance(returns.now_s + gap_s)
        returns.began(uid, returns.now_s)
        _rest(returns, uid, 4)
        found.append(returns.index_per_s(uid))

    assert found[0] > 1.5 * found[1]
