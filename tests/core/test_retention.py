"""Retention: budgets, classes and times, whatever is asked."""

from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core.ledger.retaining import TOP_PRIORITY, Grant, Grants, Retention
from ctxcache.core.placement.shares import Share, Shares

SHARES = Shares({"a": Share(2 / 3), "b": Share(1 / 3)})
BUDGETS = {"a": 100, "b": 50}
"""Their parts of what may be granted."""
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "ask", "ask", "release", "resized", "expire")),
        st.integers(0, 9),
        st.integers(0, 60),
        st.integers(0, 4),
        st.integers(0, 30),
    ),
    max_size=80,
)


def _account(uid: bytes) -> str:
    return "ab"[uid[0] % 2]


def _grants(fallen: list[bytes] | None = None) -> Grants:
    heard: list[bytes] = [] if fallen is None else fallen
    return Grants(150, SHARES, _account, heard.append)


@given(STEPS)
def test_budgets_hold_and_lower_priorities_alone_make_way(
    steps: list[tuple[str, int, int, int, int]],
) -> None:
    """No account has more than its budget.

    A session that lost a grant which it did not give back was lower, or its time was over.
    """
    fallen: list[bytes] = []
    grants, now_s = _grants(fallen), 0.0
    held: dict[bytes, tuple[int, float, int]] = {}
    for act, number, size_bytes, priority, wait_s in steps:
        uid = bytes([number])
        levels = {other: grants.level(other) for other in held}
        fallen.clear()
        if act == "ask":
            granted = grants.ask(uid, size_bytes, now_s + wait_s, priority, now_s)
            if granted:
                assert granted == Grant(size_bytes, now_s + wait_s)
                held[uid] = (size_bytes, now_s + wait_s, priority)
                assert all(levels[lost] - 1 < priority for lost in fallen if lost != uid)
            else:
                assert not fallen
        elif act == "release":
            grants.release(uid)
            held.pop(uid, None)
        elif act == "resized":
            grants.resized(uid, size_bytes, now_s)
            if uid in grants:
                held[uid] = (max(size_bytes, held[uid][0]), *held[uid][1:])
            assert all(levels[lost] < levels[uid] for lost in fallen if lost != uid)
        else:
            now_s += wait_s
            grants.expire(now_s)
            assert all(held[lost][1] <= now_s for lost in fallen)
            assert all(held[other][1] > now_s for other in held if other in grants)
        held = {other: what for other, what in held.items() if other in grants}

        # Each session that fell to a lower class was told of.
        assert {other for other, level in levels.items() if grants.level(other) < level} <= set(fallen)
        for account, limit_bytes in BUDGETS.items():
            sizes = [size for other, (size, _, _) in held.items() if _account(other) == account]
            assert grants.used_bytes(account) == sum(sizes) <= limit_bytes
        assert len(grants) == len(held)
        assert all(grants.level(other) == rank + 1 for other, (_, _, rank) in held.items())


@given(STEPS)
def test_the_same_requests_get_the_same_answers(steps: list[tuple[str, int, int, int, int]]) -> None:
    """No answer depends on anything but what was asked before."""

    def play() -> list[Grant | None]:
        grants, answers = _grants(), []
        for _, number, size_bytes, priority, wait_s in steps:
            grants.expire(number)
            answers.append(grants.ask(bytes([number]), size_bytes, number + wait_s, priority, number))
        return answers

    assert play() == play()


def test_a_refused_request_leaves_what_was_granted() -> None:
    """Asking for more than there is room for costs nobody anything."""
    grants = _grants()
    assert grants.ask(b"\0", 60, 10, 1, 0)
    assert grants.ask(b"\2", 40, 10, 2, 0)

    assert grants.ask(b"\0", 70, 10, 1, 0) is None
    assert grants.ask(b"\4", 70, 10, 2, 0) is None
    assert (grants.level(b"\0"), grants.level(b"\2"), grants.level(b"\4")) == (2, 3, 0)


def test_growth_counts_against_the_budget_or_costs_the_class() -> None:
    """The growth of a session is granted from free bytes, then from lower grants.

    Else it is as others are.
    """
    fallen: list[bytes] = []
    grants = _grants(fallen)
    grants.ask(b"\0", 40, 10, 1, 0)
    grants.ask(b"\2", 40, 10, 0, 0)

    grants.resized(b"\0", 60, 1)
    assert grants.used_bytes("a") == 100
    grants.resized(b"\0", 90, 2)
    assert (grants.used_bytes("a"), fallen) == (90, [b"\2"])
    grants.resized(b"\0", 101, 3)
    assert (grants.used_bytes("a"), fallen) == (0, [b"\2", b"\0"])


def test_priorities_beyond_the_range_are_the_nearest() -> None:
    """No number displaces more than the highest priority does."""
    grants = _grants()
    grants.ask(b"\0", 100, 10, 10**9, 0)
    assert grants.ask(b"\2", 100, 10, 10**12, 0) is None
    assert grants.level(b"\0") == TOP_PRIORITY + 1
    grants.ask(b"\1", 1, 10, -5, 0)
    assert grants.level(b"\1") == 1


def test_a_pin_counts_in_both_tiers_and_a_retention_in_the_store_alone() -> None:
    """A session that is pinned in DRAM must not leave the store first.

    No grant lasts longer than the longest time.
    """
    retention = Retention(_grants(), _grants(), longest_s=100)
    assert retention.retain(b"r", 10, 1e9, 3, 5) == Grant(10, 105)
    assert retention.pin(b"p", 10, 20, 4, 5) == Grant(10, 20)

    assert (retention.store_level(b"r"), retention.memory_level(b"r")) == (4, 0)
    assert (retention.store_level(b"p"), retention.memory_level(b"p")) == (5, 5)
    retention.expire(20)
    assert (retention.store_level(b"r"), retention.store_level(b"p")) == (4, 0)
    retention.release(b"r")
    assert retention.store_level(b"r") == 0


def test_one_that_comes_later_finds_its_equal_share() -> None:
    """Alone an account may be granted the whole budget.

    Its lowest grants end as others ask, down to its share.
    """
    fallen: list[bytes] = []
    grants = Grants(90, Shares(are_tenants_known=True), lambda uid: uid[:1].decode(), fallen.append)
    for number in range(3):
        assert grants.ask(b"a%d" % number, 30, 10, number, 0)
    assert grants.ask(b"b0", 40, 10, 0, 0)
    assert fallen == [b"a0", b"a1"]
    assert grants.ask(b"b1", 10, 10, 0, 0) is None

    assert grants.ask(b"c0", 30, 10, 0, 0)
    assert (grants.used_bytes("a"), grants.used_bytes("b"), grants.used_bytes("c")) == (30, 0, 30)
