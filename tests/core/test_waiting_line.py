"""The waiting line: who gets the next room, whatever is used and whoever waits."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxcache.core.limits import LENGTH, RoomRequest, WaitingLine
from ctxcache.core.placement.shares import EVERYONE, NO_SHARES, Share, Shares
from ctxcache.errors import TooManyRequests

CAPACITY_BYTES = 100
EQUAL = Shares(are_tenants_known=True)
TENANTS = ("a", "b", "c", "d")


@st.composite
def _shares(draw: st.DrawFn) -> Shares:
    """Equal shares, or some that are configured, up to all of the budget."""
    left, by_tenant = 100, {}
    for name in draw(st.lists(st.sampled_from(TENANTS), unique=True)):
        percent = draw(st.integers(0, left))
        left -= percent
        by_tenant[name] = Share(percent / 100)
    return Shares(by_tenant, are_tenants_known=True)


ASKED = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 40)), max_size=30)
USED = st.dictionaries(st.sampled_from(TENANTS), st.integers(1, CAPACITY_BYTES))


def _above_bytes(shares: Shares, request: RoomRequest, used: dict[str, int], there: set[str]) -> int:
    """How far above its share a tenant would be with what it asks for."""
    had = dict.fromkeys(there, 0) | used
    own_bytes = shares.guaranteed_bytes(request.account, had, CAPACITY_BYTES)
    return had[request.account] + request.needed_bytes - own_bytes


@given(_shares(), USED, ASKED)
def test_a_request_within_its_share_goes_before_all_that_are_not(
    shares: Shares, used: dict[str, int], asked: list[tuple[str, int]]
) -> None:
    """The first that came of one tenant's, and of tenants within their shares.

    The one that is least above, among those above.
    """
    line = WaitingLine("room", shares, used)
    waiting = [line.join(tenant, needed_bytes) for tenant, needed_bytes in asked]
    there = {request.account for request in waiting}
    while waiting:
        first = line.first(CAPACITY_BYTES)
        assert first is not None
        heads = [next(r for r in waiting if r.account == account) for account in sorted(there)]
        within = [r for r in heads if _above_bytes(shares, r, used, there) <= 0]
        if within:
            assert first is min(within, key=waiting.index)
        else:
            above = {r: _above_bytes(shares, r, used, there) - r.needed_bytes for r in heads}
            assert first is min(heads, key=lambda r: (above[r], waiting.index(r)))
        line.leave(first)
        waiting.remove(first)
        there = {request.account for request in waiting}
    assert line.first(CAPACITY_BYTES) is None


class _Budget:
    """A budget whose room is given as the line says, and comes back in the order in which it was given."""

    def __init__(self, shares: Shares) -> None:
        self.used: Counter[str] = Counter()
        self.given: list[RoomRequest] = []
        self.line = WaitingLine("room", shares, self.used)

    def give(self) -> list[RoomRequest]:
        """Give room for as long as the first request fits; returns what was given."""
        given = []
        while (first := self.line.first(CAPACITY_BYTES)) and self._fits(first):
            self.line.leave(first)
            self.used[first.account] += first.needed_bytes
            given.append(first)
        self.given += given
        return given

    def _fits(self, request: RoomRequest) -> bool:
        return self.used.total() + request.needed_bytes <= CAPACITY_BYTES

    def take_back(self) -> None:
        """The oldest of what was given is written."""
        oldest = self.given.pop(0)
        self.used[oldest.account] -= oldest.needed_bytes
        self.used += Counter()


@settings(max_examples=200)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(1, 8))
def test_a_flood_takes_nothing_while_another_is_within_its_share(
    flood_bytes: int, small_bytes: int, small_count: int
) -> None:
    """Between the coming of a small request and its grant the flood gets no more than its own share."""
    budget = _Budget(EQUAL)
    for _ in range(20):
        budget.line.join("flood", flood_bytes)
    budget.give()
    for _ in range(small_count):
        small = budget.line.join("quiet", small_bytes)
        given = budget.give()
        while small not in given:
            budget.line.join("flood", flood_bytes)
            budget.take_back()
            given += budget.give()
        passed = [request for request in given[: given.index(small)] if request.account == "flood"]
        assert sum(request.needed_bytes for request in passed) <= CAPACITY_BYTES // 2


@settings(max_examples=200)
@given(_shares(), ASKED.filter(bool), st.data())
def test_everybody_is_served_and_the_books_are_right(
    shares: Shares, asked: list[tuple[str, int]], data: st.DataObject
) -> None:
    """Arrivals while others are served, and callers that give up.

    All others get their room, once, and nothing is left.
    """
    budget = _Budget(shares)
    left, waiting = list(asked), list[RoomRequest]()
    served, gone = list[RoomRequest](), list[RoomRequest]()
    while left or len(budget.line):
        coming_count: int = data.draw(st.integers(0, 4))
        coming = left[:coming_count]
        left = left[len(coming) :]
        waiting += [budget.line.join(*one) for one in coming]
        gives_up: bool = data.draw(st.sampled_from([True, False, False, False]))
        if waiting and gives_up:
            gone.append(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
            budget.line.leave(gone[-1])
        given = budget.give()
        served += given
        waiting = [request for request in waiting if request not in given]
        assert budget.used.total() <= CAPACITY_BYTES
        if budget.given:
            budget.take_back()
        elif not len(budget.line) and left:
            waiting.append(budget.line.join(*left.pop(0)))
    assert Counter(r.needed_bytes for r in [*served, *gone]) == Counter(size for _, size in asked)
    assert budget.line.first(CAPACITY_BYTES) is None


def test_one_tenant_is_served_in_the_order_of_coming() -> None:
    """A small request waits behind a large one of its tenant; all do where tenants are not told apart."""
    line = WaitingLine("room", NO_SHARES, {"x": 90, "y": 1})
    large, small = line.join("x", 50), line.join("y", 1)
    assert (large.account, small.account) == (EVERYONE, EVERYONE)
    assert line.first(CAPACITY_BYTES) is large
    line.leave(large)
    assert line.first(CAPACITY_BYTES) is small


def test_a_request_larger_than_a_share_keeps_only_its_own_tenant_waiting() -> None:
    """Another tenant that is within its share goes before it, as often as it comes."""
    line = WaitingLine("room", EQUAL, {"a": 10})
    large, behind, other = line.join("a", 80), line.join("a", 1), line.join("b", 1)
    assert line.first(CAPACITY_BYTES) is other
    line.leave(other)
    assert line.first(CAPACITY_BYTES) is large
    line.leave(large)
    assert line.first(CAPACITY_BYTES) is behind


@pytest.mark.parametrize(("shares", "own_limit"), [(NO_SHARES, LENGTH), (EQUAL, 171)])
def test_no_more_wait_than_may(shares: Shares, own_limit: int) -> None:
    """One tenant leaves places for others; a place is free again when its request leaves."""
    line = WaitingLine("room", shares, {})
    waiting = [line.join("flood", 1) for _ in range(own_limit)]
    with pytest.raises(TooManyRequests):
        line.join("flood", 1)
    if own_limit < LENGTH:
        line.leave(line.join("quiet", 1))
    line.leave(waiting.pop())
    line.join("flood", 1)
