"""Admission: who goes to SSD, and in which order it is looked at again."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core.ledger.unwritten import Ages
from ctxcache.core.placement.policy import Candidate, is_worth_writing

LEAVING = st.lists(st.builds(Candidate, st.booleans(), st.integers(0, 40)), max_size=12)


@given(size_bytes=st.integers(0, 100), free_bytes=st.integers(0, 100), leaving=LEAVING)
def test_nothing_better_leaves_and_room_is_never_left_empty(
    size_bytes: int, free_bytes: int, leaving: list[Candidate]
) -> None:
    """Free room is taken.

    Where it does not do, all that would leave are worth less, and no others are looked at.
    """
    looked_at: list[Candidate] = []

    def look() -> Iterator[Candidate]:
        for each in leaving:
            looked_at.append(each)
            yield each

    is_worth = is_worth_writing(size_bytes, free_bytes, look())

    assert is_worth == all(each.gives_way for each in looked_at)
    assert size_bytes > free_bytes or not looked_at
    # One less would not have done.
    before_bytes = free_bytes + sum(each.size_bytes for each in looked_at[:-1])
    assert before_bytes < size_bytes or not looked_at
    if is_worth and looked_at != leaving:
        assert free_bytes + sum(each.size_bytes for each in looked_at) >= size_bytes


@given(steps=st.lists(st.tuples(st.sampled_from("pdt"), st.integers(0, 5), st.integers(0, 50)), max_size=200))
def test_ages_show_each_once_the_oldest_first(steps: list[tuple[str, int, int]]) -> None:
    """As a dictionary that is looked through would."""
    ages, since = Ages(), dict[bytes, int]()
    for step, number, time_ns in steps:
        uid = bytes([number])
        if step == "p":
            ages.put(uid, time_ns)
            since[uid] = time_ns
        elif step == "d":
            ages.discard(uid)
            since.pop(uid, None)
        else:
            due = min(((at, each) for each, at in since.items() if at <= time_ns), default=None)
            assert ages.take(time_ns) == (due and due[1])
            if due:
                del since[due[1]]
        assert all((bytes([n]) in ages) == (bytes([n]) in since) for n in range(6))
