"""When sessions are due, and which leaves first."""

from hypothesis import given
from hypothesis import strategies as st

from ctxcache.core.eviction import SLACK, LeastRecentlyUsed, Ranking
from ctxcache.core.expiry import Expiration, ExpiryQueue


def test_a_sliding_expiry_moves_with_every_access() -> None:
    """The time to live counts from the last access."""
    assert Expiration(10).after_access(5) == 15


def test_an_absolute_expiry_stays() -> None:
    """No access moves an instant."""
    assert Expiration(None, 7).after_access(5) == 7


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-20, 40), st.integers(0, 10)), max_size=60))
def test_due_sessions_are_found_once_their_time_has_come(steps: list[tuple[int, int, int]]) -> None:
    """Whatever times sessions are given, earlier or later, each is due when its time holds, and not before."""
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


def coldest_first(policy: LeastRecentlyUsed) -> list[bytes]:
    """The sessions that the policy knows, of those that these tests have."""
    ranks = {
        policy.rank(uid): uid for uid in map(bytes.fromhex, ("00", "01", "02", "03", "04", "61", "62", "63"))
    }
    return [ranks[rank] for rank in sorted(rank for rank in ranks if rank is not None)]


def test_the_session_unused_for_longest_leaves_first() -> None:
    """An access puts a session behind all others; one that is gone is no candidate."""
    policy = LeastRecentlyUsed()
    for uid in (b"a", b"b", b"c", b"a"):
        policy.touch(uid)
    policy.forget(b"b")

    assert coldest_first(policy) == [b"c", b"a"]


@given(st.lists(st.tuples(st.sampled_from(["touch", "forget", "add", "discard"]), st.integers(0, 4))))
def test_a_ranking_has_the_order_of_the_policy(steps: list[tuple[str, int]]) -> None:
    """Whatever is accessed, added and taken out, the first one is the coldest of those that are in and known."""
    policy = LeastRecentlyUsed()
    ranking, members = Ranking(policy.rank), set[bytes]()
    for step, number in steps:
        uid = bytes([number])
        if step in ("touch", "forget"):
            getattr(policy, step)(uid)
        else:
            getattr(ranking, step)(uid)
        known = set(coldest_first(policy))
        members = (members | ({uid} & known if step == "add" else set())) & known
        members -= {uid} if step == "discard" else set()
        if step == "forget":
            ranking.discard(uid)
        coldest = [u for u in coldest_first(policy) if u in members]

        assert ranking.first() == (coldest[0] if coldest else None)
        assert ranking.first(coldest[1:].__contains__) == (coldest[1] if len(coldest) > 1 else None)
        assert ranking.first() == (coldest[0] if coldest else None)


def test_a_ranking_takes_no_more_room_for_what_comes_and_goes() -> None:
    """Sessions that enter and leave without end leave nothing behind."""
    policy = LeastRecentlyUsed()
    ranking = Ranking(policy.rank)
    for _ in range(1000):
        policy.touch(b"a")
        ranking.add(b"a")
        ranking.discard(b"a")

    assert len(ranking._heap) <= SLACK + 2
