"""Rankings of accounts: the order of one ranking, asked account by account."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core.ledger.rankings import Ranking, Rankings, ranking
from ctxcache.core.placement.order import Key

STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "add", "rise", "fall", "discard", "first")),
        st.integers(0, 9),
        st.integers(1, 20),
        st.sampled_from([None, ("a",), ("b", "a"), ("c", "b"), ()]),
    ),
    max_size=80,
)


def _account(uid: bytes) -> str:
    return "abc"[uid[0] % 3]


@given(STEPS)
def test_accounts_are_asked_in_the_order_named(
    steps: list[tuple[str, int, int, Sequence[str] | None]],
) -> None:
    """The lowest accepted one of the first account named that has one; of all, where none is named."""
    ranks: dict[bytes, float] = {}

    def rank(uid: bytes) -> Key | None:
        return (ranks[uid], uid[0]) if uid in ranks else None

    one, many = Ranking(rank), Rankings(rank, _account)
    for what, number, value, among in steps:
        uid = bytes([number])
        if what == "add":
            ranks.setdefault(uid, value)
        elif what in ("rise", "fall") and uid in ranks:
            ranks[uid] += value if what == "rise" else -value
        for order in (one, many):
            if what == "add":
                order.add(uid)
            elif what == "fall":
                order.fell(uid, rank(uid))
            elif what == "discard":
                order.discard(uid)

        assert len(many) == len(one)
        assert (uid in many) == (uid in one)

        def accepts(other: bytes, refused: int = value % 10) -> bool:
            return other[0] != refused

        assert many.first(accepts) == one.first(accepts)
        firsts = [one.first(lambda other, a=a: accepts(other) and _account(other) == a) for a in among or ()]  # type: ignore[misc]
        expected = next((first for first in firsts if first is not None), None)
        assert many.first(accepts, among) == (one.first(accepts) if among is None else expected)


def test_without_accounts_there_is_one_order() -> None:
    """Without configured shares no tenant pays for another."""
    assert type(ranking(lambda _: (0,), None)) is Ranking
