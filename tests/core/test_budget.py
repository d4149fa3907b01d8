"""The budget counts what is pinned once for everyone and once per client, whoever pins what when."""

from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core.limits import Budget, Pinner

NOBODY, ONE, TWO = Pinner("t"), Pinner("t", 1), Pinner("t", 2)
SIZES = {segment_id: 10 + segment_id for segment_id in range(6)}
Held = list[tuple[Pinner, dict[int, int]]]

PINS = st.tuples(st.sampled_from([NOBODY, ONE, TWO]), st.sets(st.sampled_from(sorted(SIZES)), max_size=4))


def sizes_of(segment_ids: set[int]) -> dict[int, int]:
    """Bytes by segment id."""
    return {segment_id: SIZES[segment_id] for segment_id in segment_ids}


def pinned_bytes(held: Held, client: Pinner) -> int:
    """The pinned bytes, counted anew."""
    ids = {i for owner, sizes in held if client.number is None or owner == client for i in sizes}
    return sum(SIZES[i] for i in ids)


@given(st.lists(st.tuples(PINS, st.booleans()), max_size=30))
def test_a_budget_is_what_is_held(steps: list[tuple[tuple[Pinner, set[int]], bool]]) -> None:
    """After any pins and unpins, used bytes are those of the distinct segments held, within every limit."""
    budget = Budget(limit_bytes=60, client_limit_bytes=35)
    held: Held = []
    for (client, segment_ids), is_release in steps:
        sizes = sizes_of(segment_ids)
        if is_release and held:
            budget.unpin(*held.pop(0))
        elif budget.fits(client, sizes):
            budget.pin(client, sizes)
            held.append((client, sizes))

        assert [budget.used_by(c) for c in (NOBODY, ONE, TWO)] == [
            pinned_bytes(held, c) for c in (NOBODY, ONE, TWO)
        ]
        assert budget.used_bytes <= 60
        assert max(budget.used_by(ONE), budget.used_by(TWO)) <= 35
    for item in held:
        budget.unpin(*item)

    assert (budget.used_bytes, set(budget.pinned()), budget.used_by(ONE)) == (0, set(), 0)


def test_room_is_refused_only_for_what_is_not_pinned_yet() -> None:
    """Many readers of one prefix take no more room than one."""
    budget = Budget(limit_bytes=25, client_limit_bytes=25)
    budget.pin(ONE, sizes_of({0, 1}))

    assert budget.fits(TWO, sizes_of({0, 1}))
    assert not budget.fits(TWO, sizes_of({0, 1, 2}))
