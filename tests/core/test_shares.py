"""Shares: who is asked for room, whatever is used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core.placement.shares import REST, Share, Shares

CAPACITY_BYTES = 1000
NAMES = ("a", "b", "c")


@st.composite
def _shares(draw: st.DrawFn) -> Shares:
    """Shares of some tenants, up to all of the capacity."""
    left, by_tenant = 100, {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        percent = draw(st.integers(0, left))
        left -= percent
        by_tenant[name] = Share(percent / 100, draw(st.integers(max(percent, 1), 100)) / 100)
    return Shares(by_tenant)


USED = st.fixed_dictionaries({name: st.integers(0, CAPACITY_BYTES) for name in (*NAMES, REST)})


@given(_shares(), st.sampled_from((*NAMES, REST)), st.integers(1, 200), USED)
def test_nobody_within_its_share_is_asked_for_another(
    shares: Shares, needing: str, needed_bytes: int, used_bytes: dict[str, int]
) -> None:
    """Whoever is asked is above its share, or asks himself; each at most once."""
    needing = shares.account(needing)
    asked = shares.whose(needing, needed_bytes, used_bytes, CAPACITY_BYTES)

    assert len(set(asked)) == len(asked)
    assert needing in asked
    for account in asked:
        over = used_bytes[account] > shares.guaranteed_bytes(account, CAPACITY_BYTES)
        assert over or account == needing


@given(_shares(), st.sampled_from((*NAMES, REST)), st.integers(1, 200), USED)
def test_whoever_is_furthest_above_its_share_is_asked_first(
    shares: Shares, needing: str, needed_bytes: int, used_bytes: dict[str, int]
) -> None:
    """The order falls by what each would be above its share; nobody above it is left out."""
    needing = shares.account(needing)
    asked = shares.whose(needing, needed_bytes, used_bytes, CAPACITY_BYTES)

    wanted = {
        account: used_bytes[account] + needed_bytes * (account == needing)
        - shares.guaranteed_bytes(account, CAPACITY_BYTES)
        for account in shares.accounts
    }  # fmt: skip
    over = [wanted[account] for account in asked]
    assert over == sorted(over, reverse=True)
    assert {account for account in wanted if wanted[account] > 0} | {needing} == set(asked)


@given(_shares(), st.sampled_from((*NAMES, REST)), st.integers(1, 200), USED)
def test_a_need_within_the_share_finds_room_in_a_full_store(
    shares: Shares, needing: str, needed_bytes: int, used_bytes: dict[str, int]
) -> None:
    """Where everything is taken and the share is not used up, somebody else is asked first."""
    needing = shares.account(needing)
    used = {account: used_bytes[account] for account in shares.accounts}
    is_full = sum(used.values()) + needed_bytes > CAPACITY_BYTES
    if not is_full or used[needing] + needed_bytes > shares.guaranteed_bytes(needing, CAPACITY_BYTES):
        return
    asked = shares.whose(needing, needed_bytes, used, CAPACITY_BYTES)
    assert asked[0] != needing
    assert used[asked[0]] > shares.guaranteed_bytes(asked[0], CAPACITY_BYTES)


@given(_shares())
def test_a_budget_that_is_divided_is_never_more_than_there_is(shares: Shares) -> None:
    """The parts of all accounts add up to the whole, each within its limit."""
    parts = [shares.own_bytes(account, CAPACITY_BYTES) for account in shares.accounts]
    assert sum(parts) == CAPACITY_BYTES
    assert min(parts) >= 0


def test_two_that_want_more_than_their_shares_come_to_have_as_much_more() -> None:
    """Whoever came first does not keep what is guaranteed to nobody."""
    shares = Shares({"a": Share(0.2), "b": Share(0.3)})
    used = {"a": 1000, "b": 0, REST: 0}
    for _ in range(2000):
        for needing in ("b", "a"):
            if sum(used.values()) == CAPACITY_BYTES:
                victim = next(x for x in shares.whose(needing, 1, used, CAPACITY_BYTES) if used[x])
                used[victim] -= 1
            used[needing] += 1
    assert abs((used["a"] - 200) - (used["b"] - 300)) <= 2


def test_nobody_in_particular_takes_from_those_above_their_shares_alone() -> None:
    """Room that is made ahead of need costs nobody what is guaranteed."""
    shares = Shares({"a": Share(0.5), "b": Share(0.2)})
    assert shares.whose(None, 10, {"a": 500, "b": 250, REST: 100}, CAPACITY_BYTES) == [REST, "b"]
    assert shares.whose(None, 10, {"a": 500, "b": 200}, CAPACITY_BYTES) == []


def test_without_shares_there_is_one_account() -> None:
    """Nothing is divided then."""
    shares = Shares()
    assert not shares
    assert shares.accounts == (REST,)
    assert shares.account("anyone") == REST
    assert shares.limit_bytes(REST, CAPACITY_BYTES) is None
    assert shares.own_bytes(REST, CAPACITY_BYTES) == CAPACITY_BYTES


@pytest.mark.parametrize(
    ("guaranteed", "limit"), [(-0.1, 1), (0.5, 0.4), (0, 0), (0.1, 1.1), (float("nan"), 1)]
)
def test_a_share_outside_its_bounds_is_refused(guaranteed: float, limit: float) -> None:
    """What cannot be given is not promised."""
    with pytest.raises(ValueError, match="share"):
        Share(guaranteed, limit)


def test_more_than_everything_is_not_guaranteed() -> None:
    """Shares that add up to the whole are fine however they are written; more is refused."""
    Shares({"a": Share(0.7), "b": Share(0.2), "c": Share(0.1)})
    with pytest.raises(ValueError, match=r"1\.1 of everything"):
        Shares({"a": Share(0.7), "b": Share(0.4)})
    with pytest.raises(ValueError, match="without a name"):
        Shares({REST: Share(0.1)})
