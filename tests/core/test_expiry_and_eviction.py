"""When sessions are due, and which leaves first."""

from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core.ledger.rankings import SLACK, Ranking
from ctxcache.core.ledger.session import Expiration, ExpiryQueue
from ctxcache.core.placement.order import Key


def test_a_sliding_expiry_moves_with_every_access() -> None:
    """The time to live counts from the last access."""
    assert Expiration(10).after_access(5) == 15


def test_an_absolute_expiry_stays() -> None:
    """No access moves an instant."""
    assert Expiration(None, 7).after_access(5) == 7


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-20, 40), st.integers(0, 10)), max_size=60))
def test_due_sessions_are_found_once_their_time_has_come(steps: list[tuple[int, int, int]]) -> None:
    """Whatever times sessions are given, each is due when its time holds, and not before."""
    queue, times, now = ExpiryQueue(), dict[bytes, int](), 0
    for number, ahead, passed in steps:
        uid = bytes([number])
        times[uid] = now + ahead
        queue.schedule(uid, times[uid])
        now += passed
        due = queue.due(now, times.get)
        assert sorted(due) == sorted(uid for uid, time in times.items() if time <= now)
        for gone in due:
            del times[gone]


def test_a_session_touched_without_end_takes_no_more_room() -> None:
    """The queue holds one entry per session, however often it is scheduled later."""
    queue = ExpiryQueue()
    for time in range(1000):
        queue.schedule(b"a", 10**9 + time)

    assert queue.entry_count == 1


def test_a_session_that_is_not_gone_yet_is_due_again() -> None:
    """A due session that was put off comes up when it is scheduled again."""
    queue = ExpiryQueue()
    queue.schedule(b"a", 5)
    assert queue.due(10, {b"a": 5}.get) == [b"a"]
    queue.schedule(b"a", 10)

    assert queue.due(10, {b"a": 5}.get) == [b"a"]


def test_many_sessions_due_at_once_are_found_in_one_pass() -> None:
    """A hundred thousand sessions that end together cost no square of that."""
    queue = ExpiryQueue()
    uids = [number.to_bytes(4, "big") for number in range(100_000)]
    for uid in uids:
        queue.schedule(uid, 5)

    assert sorted(queue.due(5, lambda _: 5)) == uids


class Ranks(dict[bytes, Key]):
    """Where sessions stand, as tests say."""

    def coldest_first(self) -> list[bytes]:
        """All of them."""
        return sorted(self, key=lambda uid: (self[uid], uid))


@given(
    st.lists(
        st.tuples(st.sampled_from(["rank", "forget", "add", "discard"]), st.integers(0, 4), st.integers(0, 9))
    )
)
def test_a_ranking_has_the_order_of_the_ranks(steps: list[tuple[str, int, int]]) -> None:
    """Whatever rises, falls, comes and goes, the first is the coldest of those that are in and known."""
    ranks, members = Ranks(), set[bytes]()
    ranking = Ranking(ranks.get)
    for step, number, value in steps:
        uid = bytes([number])
        if step == "rank":
            before = ranks.get(uid)
            ranks[uid] = (value,)
            if before is not None and ranks[uid] < before:
                ranking.fell(uid, ranks[uid])
        elif step == "forget":
            ranks.pop(uid, None)
            ranking.discard(uid)
        else:
            getattr(ranking, step)(uid)
        members = (members | ({uid} if step == "add" else set())) & set(ranks)
        members -= {uid} if step == "discard" else set()
        coldest = [u for u in ranks.coldest_first() if u in members]

        assert ranking.first() == (coldest[0] if coldest else None)
        assert ranking.first(coldest[1:].__contains__) == (coldest[1] if len(coldest) > 1 else None)
        assert ranking.first() == (coldest[0] if coldest else None)


def test_a_ranking_takes_no_more_room_for_what_comes_and_goes() -> None:
    """Sessions that enter, fall and leave without end leave nothing behind."""
    ranks = Ranks()
    ranking = Ranking(ranks.get)
    for number in range(1000):
        ranks[b"a"] = (-number,)
        ranking.fell(b"a", ranks[b"a"])
        ranking.add(b"a")
        ranks[b"a"] = (-number - 0.5,)
        ranking.fell(b"a", ranks[b"a"])
        if number % 2:
            ranking.discard(b"a")

    assert ranking.entry_count <= SLACK + 2
