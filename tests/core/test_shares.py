"""Shares: who is asked for room, whatever is used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core.placement.shares import EVERYONE, Share, Shares

CAPACITY_BYTES = 1000
NAMES = ("a", "b", "c")
UNLISTED = ("x", "y", "z")
"""Tenants without a configured share."""
TENANTS = st.sampled_from((*NAMES, *UNLISTED))


@st.composite
def _shares(draw: st.DrawFn) -> Shares:
    """Configured shares of some tenants, up to all of the capacity."""
    left, by_tenant = 100, {}
    for name in draw(st.lists(st.sampled_from(NAMES), unique=True)):
        percent = draw(st.integers(0, left))
        left -= percent
        by_tenant[name] = Share(percent / 100, draw(st.integers(max(percent, 1), 100)) / 100)
    return Shares(by_tenant, are_tenants_known=True)


USED = st.dictionaries(TENANTS, st.integers(1, CAPACITY_BYTES))


def _guaranteed(shares: Shares, tenant: str, needing: str, used: dict[str, int]) -> int:
    """The bytes that the tenant is guaranteed while `needing` is there too."""
    return shares.guaranteed_bytes(tenant, used | {needing: 1}, CAPACITY_BYTES)


@given(_shares(), TENANTS, st.integers(1, 200), USED)
def test_nobody_within_its_share_is_asked_for_another(
    shares: Shares, needing: str, needed_bytes: int, used_bytes: dict[str, int]
) -> None:
    """Every tenant that is asked is above its share, or asks for itself; each at most once."""
    asked = shares.whose(needing, needed_bytes, used_bytes, CAPACITY_BYTES)

    assert len(set(asked)) == len(asked)
    assert needing in asked
    for tenant in set(asked) - {needing}:
        assert used_bytes[tenant] > _guaranteed(shares, tenant, needing, used_bytes)


@given(_shares(), TENANTS, st.integers(1, 200), USED)
def test_whoever_is_furthest_above_its_share_is_asked_first(
    shares: Shares, needing: str, needed_bytes: int, used_bytes: dict[str, int]
) -> None:
    """The order falls by what each would be above its share; no tenant above it is left out.

    A tenant that has nothing yet has nothing to give up: its own turn is the last.
    """
    asked = shares.whose(needing, needed_bytes, used_bytes, CAPACITY_BYTES)

    wanted = {
        tenant: (
            used_bytes.get(tenant, 0)
            + needed_bytes * (tenant == needing)
            - _guaranteed(shares, tenant, needing, used_bytes)
        )
        for tenant in {*used_bytes, needing}
    }
    over = [wanted[tenant] for tenant in asked if tenant in used_bytes]
    assert over == sorted(over, reverse=True)
    assert needing in used_bytes or asked[-1] == needing
    assert {tenant for tenant in used_bytes if wanted[tenant] > 0} | {needing} == set(asked)


@given(_shares(), TENANTS, st.integers(1, 200), USED)
def test_a_need_within_the_share_finds_room_in_a_full_store(
    shares: Shares, needing: str, needed_bytes: int, used_bytes: dict[str, int]
) -> None:
    """Where everything is taken and the share is not used up, another tenant is asked first."""
    guaranteed_bytes = _guaranteed(shares, needing, needing, used_bytes)
    is_full = sum(used_bytes.values()) + needed_bytes > CAPACITY_BYTES
    if not is_full or used_bytes.get(needing, 0) + needed_bytes > guaranteed_bytes:
        return
    asked = shares.whose(needing, needed_bytes, used_bytes, CAPACITY_BYTES)
    assert asked[0] != needing
    assert used_bytes[asked[0]] > _guaranteed(shares, asked[0], needing, used_bytes)


@given(_shares(), USED)
def test_guarantees_are_never_more_than_there_is(shares: Shares, used_bytes: dict[str, int]) -> None:
    """The guarantees of all that have something add up to the whole at most.

    Those without a share have equal ones.
    """
    own = {tenant: shares.guaranteed_bytes(tenant, used_bytes, CAPACITY_BYTES) for tenant in used_bytes}
    assert sum(own.values()) <= CAPACITY_BYTES
    assert len({own[tenant] for tenant in own.keys() - shares.by_tenant.keys()}) <= 1


def _fill(shares: Shares, used: dict[str, int], needing: str) -> None:
    """One more byte, for which one leaves where all is taken."""
    if sum(used.values()) == CAPACITY_BYTES:
        victim = shares.whose(needing, 1, used, CAPACITY_BYTES)[0]
        used[victim] -= 1
        if not used[victim]:
            del used[victim]
    used[needing] = used.get(needing, 0) + 1


@given(st.integers(1, CAPACITY_BYTES // 2))
def test_a_flood_costs_nobody_within_half(kept_bytes: int) -> None:
    """One of two tenants without configured shares floods: the other keeps all that is within half."""
    shares, used = Shares(are_tenants_known=True), {"x": kept_bytes}
    for _ in range(2 * CAPACITY_BYTES):
        _fill(shares, used, "y")
    assert used == {"x": kept_bytes, "y": CAPACITY_BYTES - kept_bytes}


@given(st.permutations(UNLISTED))
def test_those_who_all_want_more_come_to_have_the_same(order: list[str]) -> None:
    """Alone a tenant may have everything; it gives back as others come, one byte for each that they need."""
    shares, used = Shares(are_tenants_known=True), {order[0]: CAPACITY_BYTES}
    for _ in range(CAPACITY_BYTES):
        before = dict(used)
        for needing in order:
            _fill(shares, used, needing)
        assert all(used[tenant] >= min(before.get(tenant, 0), CAPACITY_BYTES // 3) for tenant in order)
    assert max(used.values()) - min(used.values()) <= 2


def test_two_that_want_more_than_their_shares_come_to_have_as_much_more() -> None:
    """The first to come does not keep what is guaranteed to nobody."""
    shares = Shares({"a": Share(0.2), "b": Share(0.3)})
    used = {"a": 1000}
    for _ in range(2000):
        for needing in ("b", "a"):
            _fill(shares, used, needing)
    assert abs((used["a"] - 200) - (used["b"] - 300)) <= 2


def test_those_without_a_configured_share_divide_what_is_left() -> None:
    """A configured share keeps its meaning beside them."""
    shares = Shares({"a": Share(0.4)})
    used = {"a": 1, "x": 1, "y": 1}
    own = [shares.guaranteed_bytes(tenant, used, CAPACITY_BYTES) for tenant in ("a", "x", "y", "z")]
    assert own == [400, 300, 300, 200]


def test_nobody_in_particular_takes_from_those_above_their_shares_alone() -> None:
    """Room that is made ahead of need costs nobody what is guaranteed."""
    shares = Shares({"a": Share(0.5), "b": Share(0.2)})
    assert shares.whose(None, 10, {"a": 500, "b": 250, "x": 350}, CAPACITY_BYTES) == ["b", "x"]
    assert shares.whose(None, 10, {"a": 500, "b": 200}, CAPACITY_BYTES) == []


def test_where_tenants_are_not_told_apart_there_is_one_account() -> None:
    """Nothing is divided then."""
    shares = Shares()
    assert not shares
    assert shares.account("anyone") == EVERYONE
    assert shares.limit_bytes(EVERYONE, CAPACITY_BYTES) is None
    assert shares.guaranteed_bytes(EVERYONE, {EVERYONE: 1}, CAPACITY_BYTES) == CAPACITY_BYTES


@pytest.mark.parametrize(
    ("guaranteed", "limit"), [(-0.1, 1), (0.5, 0.4), (0, 0), (0.1, 1.1), (float("nan"), 1)]
)
def test_a_share_outside_its_bounds_is_refused(guaranteed: float, limit: float) -> None:
    """A share that cannot be given is not promised."""
    with pytest.raises(ValueError, match="share"):
        Share(guaranteed, limit)


def test_more_than_everything_is_not_guaranteed() -> None:
    """Shares that add up to the whole are fine however they are written; more is refused."""
    Shares({"a": Share(0.7), "b": Share(0.2), "c": Share(0.1)})
    with pytest.raises(ValueError, match=r"1\.1 of everything"):
        Shares({"a": Share(0.7), "b": Share(0.4)})
    with pytest.raises(ValueError, match="without a name"):
        Shares({EVERYONE: Share(0.1)})


def test_sizes_and_whose_they_are_change_while_in_use() -> None:
    """A tenant may come to have a configured share, and lose it."""
    shares = Shares({"a": Share(0.2), "b": Share(0.1)})
    shares.become({"b": Share(0.3), "c": Share(0.5)})
    assert shares.guaranteed_bytes("c", {"c": 1}, 100) == 50
    assert shares.guaranteed_bytes("a", {"c": 1}, 100) == 20
    shares.become({})
    assert shares
    assert shares.guaranteed_bytes("a", {"a": 1, "b": 1}, 100) == 50


def test_what_cannot_be_changes_nothing() -> None:
    """More than everything; or shares where tenants are not told apart."""
    shares = Shares({"a": Share(0.2), "b": Share(0.1)})
    with pytest.raises(ValueError, match="is guaranteed"):
        shares.become({"a": Share(0.6), "b": Share(0.5)})
    assert shares.by_tenant == {"a": Share(0.2), "b": Share(0.1)}
    with pytest.raises(ValueError, match="settled at the start"):
        Shares().become({"a": Share(0.2)})
