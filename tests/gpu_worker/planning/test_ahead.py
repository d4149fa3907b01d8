"""Which pass ahead is next, when, and what became of its tokens: by hand-made cases and by a plain model."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxcache.errors import InvalidArgument
from gpu_worker.planning.ahead import GAVE_WAY, GONE_S, AheadCounts, AheadQueue, AheadTally


def _order(queue: AheadQueue[list[int]]) -> list[str]:
    """Who is taken, in turn, where no pass takes time."""
    taken = []
    while (offer := queue.take(0.0)) is not None:
        taken.append(offer.session_id)
    return taken


def test_who_is_expected_goes_first_and_then_the_latest() -> None:
    """The soonest before others; one offer for a conversation, which is the newest."""
    queue = AheadQueue[list[int]]()
    for name, return_s in (("old", math.inf), ("later", 90.0), ("soon", 30.0), ("new", math.inf)):
        queue.offer(name, [1], return_s)
    queue.offer("old", [1, 2])
    offers = {name: queue.take(0.0) for name in ("soon", "later", "old", "new")}
    assert {name: offer and offer.session_id for name, offer in offers.items()} == {
        name: name for name in offers
    }
    assert offers["old"] is not None
    assert offers["old"].work == [1, 2]
    assert (queue.take(0.0), queue.due_s()) == (None, math.inf)


def test_beyond_so_many_the_least_urgent_goes() -> None:
    """Also where that is the one that came just now."""
    queue = AheadQueue[list[int]](most_waiting=2)
    for name, return_s in (("a", 10.0), ("b", math.inf), ("c", 20.0), ("d", 30.0)):
        queue.offer(name, [1], return_s)
    assert _order(queue) == ["a", "c"]


def test_passes_take_their_share_of_the_time() -> None:
    """A pass is followed by a pause; whatever they take, the sum is within the share."""
    queue = AheadQueue[list[int]](share=0.25)
    now_s, busy_s = 0.0, 0.0
    for number in range(50):
        queue.offer(str(number), [1])
        now_s = max(now_s, queue.due_s())
        assert queue.take(now_s - 1e-6) is None or number == 0
        queue.take(now_s)
        took_s = 0.1 + number % 7
        now_s += took_s
        busy_s += took_s
        queue.ended("in place", now_s)
    assert busy_s / (now_s + took_s * 3) == pytest.approx(0.25)


def test_a_conversation_that_is_back_is_not_computed_for_its_former_rendering() -> None:
    """Neither what waits nor what gave way for it; a newer offer outlives the one that is put back."""
    queue = AheadQueue[list[int]]()
    queue.offer("a", [1])
    queue.turn_begins("a", 0.0)
    assert queue.take(0.0) is None
    for is_back, is_offered, left in ((0, 0, [1]), (0, 1, [2]), (1, 0, None), (1, 1, [2])):
        queue.offer("a", [1])
        assert queue.take(0.0) is not None
        assert not queue.is_idle
        if is_back:
            queue.turn_begins("a", 0.0)
        if is_offered:
            queue.offer("a", [2])
        queue.ended(GAVE_WAY, 0.0)
        offer = queue.take(0.0)
        assert (offer and offer.work) == left
        queue.ended("in place", 0.0)
        assert queue.is_idle


def test_what_costs_more_than_it_is_likely_to_spare_is_left() -> None:
    """A chance of return that is learned, and what a user's second is worth."""
    queue = AheadQueue[list[int]](worth=4.0)
    assert queue.is_worth(100, 163)
    assert not queue.is_worth(10, 63)
    for number in range(60):
        queue.turn_begins(f"once-{number}", 10.0)
    # They may still return.
    assert queue.chance == 1.0
    queue.turn_begins("later", 10.0 + 2 * GONE_S)
    assert queue.chance == 8 / 68
    assert not queue.is_worth(100, 163)
    for number in range(200):
        queue.turn_begins("later", 10.0 + 2 * GONE_S + number)
    assert queue.is_worth(100, 163)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"share": share} for share in (0, -0.1, 1.1, math.nan)),
        *({"worth": worth} for worth in (0, -1, math.inf, math.nan)),
        {"most_waiting": 0},
    ],
)
def test_settings_that_are_none_are_refused(wrong: dict[str, Any]) -> None:
    """By their names."""
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        AheadQueue(**wrong)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("held"), st.sampled_from("ab"), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("returned"), st.sampled_from("ab"), st.integers(0, 12), st.just(0)),
        st.tuples(st.just("dropped"), st.just("a"), st.integers(0, 9), st.just(0)),
    ),
    max_size=20,
)


@given(EVENTS)
def test_every_token_is_used_wasted_or_waits(events: list[tuple[str, str, int, int]]) -> None:
    """By a model that has a set of token numbers for each session."""
    tally, held = AheadTally(), {"a": set[int](), "b": set[int]()}
    computed = used = wasted = 0
    for what, name, number, count in events:
        if what == "held":
            tally.held(name, number, number + count)
            kept = {token for token in held[name] if token < number}
            # What a pass goes on from is one run with what it adds.
            wasted += len(held[name]) - len(kept)
            start = number - len(kept)
            held[name] = set(range(start, number + count))
            computed += count
        elif what == "returned":
            there = {token for token in held[name] if token < number}
            assert tally.returned(name, number) == len(there)
            used += len(there)
            wasted += len(held[name]) - len(there)
            held[name] = set()
        else:
            tally.dropped(number)
            computed, wasted = computed + number, wasted + number
    assert tally.counts == AheadCounts(computed, used, wasted)
    assert computed == used + wasted + len(held["a"]) + len(held["b"])
