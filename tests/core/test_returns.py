"""What is learned of return times: the work of one call is bounded, whatever time has passed."""

import itertools

from ctxcache.core.placement.policy import Facts
from ctxcache.core.placement.returns import AGED_AT_ONCE, ReturnTimes

COUNT = 5000


def test_an_hour_without_a_call_is_caught_up_with_some_sessions_at_a_time() -> None:
    """Each is ranked anew once, but for those of the first call, however many bins it passed."""
    aged: list[bytes] = []
    returns = ReturnTimes(aged.append)
    uids = [number.to_bytes(2, "big") for number in range(COUNT)]
    for number, uid in enumerate(uids):
        returns.advance(number / COUNT)
        returns.idle(uid, Facts(1000, 1, 1000))
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
    """What is not watched any more promises nothing; a call forgets so many at most."""
    returns = ReturnTimes(lambda _: None)
    uids = [number.to_bytes(2, "big") for number in range(2 * AGED_AT_ONCE)]
    for uid in uids:
        returns.idle(uid, Facts(1000, 1, 1000))
    watched = [len(uids)]
    for call in range(7):
        returns.advance(10_000.0 + call)
        watched.append(sum(returns.index_per_s(uid) > 0 for uid in uids))
    assert all(before - after <= AGED_AT_ONCE for before, after in itertools.pairwise(watched))
    assert watched[-1] == 0
