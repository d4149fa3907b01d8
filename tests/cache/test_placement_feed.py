"""Events of sessions that a policy hears, and how often it is asked: the rest is the policy's own."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cache_rig import LAYOUT, SEGMENT_TOKENS, SLOT_BYTES, TENANT, MemoryRig, Writer

from ctxcache.core.ledger import feed
from ctxcache.core.ledger.rankings import Evictable, Verdict
from ctxcache.core.ledger.session import Expiration
from ctxcache.core.placement import look_ahead, order, returns, value
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Capacities, Facts, Level, Ranked
from ctxcache.core.placement.served import RANKED

Told = tuple[str, str, tuple[object, ...]]


@dataclass
class Noted(LeastRecentlyUsed, ranks_holders=False):
    """Least recently used, with notes of what it was told."""

    told: list[Told] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def _note(self, what: str, uid: bytes, *facts: object) -> None:
        self.told.append((what, uid.decode().partition("\0")[2], facts))

    def arrived(self, uid: bytes, now_s: float) -> None:
        """See Policy."""
        self._note("arrived", uid, now_s)

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        self._note("idle", uid, facts.size_bytes // SLOT_BYTES, facts.turn_count, facts.appended_bytes)

    def recalled(self, uid: bytes, facts: Facts, idle_s: float, *, is_watched: bool = True) -> None:
        """See Policy."""
        super().idle(uid, facts, 0)
        self._numbers[uid] = -idle_s
        self._note("recalled" if is_watched else "woken", uid, facts.turn_count, idle_s)

    def placed(self, uid: bytes, tier: Level) -> None:
        """See Policy."""
        super().placed(uid, tier)
        self._note("placed", uid, tier)

    def evicted(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._note("evicted", uid)

    def ended(self, uid: bytes) -> None:
        """See Policy."""
        super().evicted(uid)
        self._note("ended", uid)

    def since(self) -> list[Told]:
        """The notes since the last call."""
        notes, self.told = self.told, []
        return notes


def policy_of(rig: MemoryRig) -> Noted:
    """The policy of a rig over one that notes."""
    policy = rig.cache.placement.policy
    assert isinstance(policy, Noted)
    return policy


@pytest.fixture
async def noted(tmp_path: Path) -> MemoryRig:
    """A cache over a policy that notes, with eight segments of SSD."""
    rig = MemoryRig(tmp_path, 6, (8,), make_policy=Noted)
    await rig.open()
    return rig


def appended(token_count: int) -> int:
    """Bytes of so many tokens, padding included."""
    return token_count * LAYOUT.size_bytes // SEGMENT_TOKENS


async def test_a_turn_is_what_lies_between_the_first_access_and_the_last_release(noted: MemoryRig) -> None:
    """A lease that is held over the append makes one turn.

    A read alone is a rest of its own, with nothing appended.
    """
    writer, policy = Writer(1), policy_of(noted)
    await noted.create("a")
    noted.cache.sessions.lookup(TENANT, "a", bytes(32))
    assert policy.since() == [("arrived", "a", (0.0,))]

    await noted.append("a", writer.make(100))
    assert policy.since() == [
        ("arrived", "a", (0.0,)),
        ("idle", "a", (2, 1, appended(100))),
        ("placed", "a", (Level.MEMORY,)),
    ]
    noted.clock.advance(seconds=5)
    lease = await noted.acquire("a")
    await noted.append("a", writer.make(10))
    assert policy.since() == [("arrived", "a", (5.0,))]
    noted.cache.leases.release(lease.lease_id)
    assert policy.since() == [("idle", "a", (2, 2, appended(10)))]
    await noted.read("a")
    await noted.cache.sessions.update(TENANT, "a", expiration=Expiration(10**12), is_pinned=None)
    assert [note for note in policy.since() if note[0] == "idle"] == [("idle", "a", (2, 2, 0))] * 2
    await noted.demote("a")
    assert policy.since() == [("placed", "a", (Level.BELOW,))]
    await noted.read("a")
    assert ("placed", "a", (Level.MEMORY,)) in policy.since()
    await noted.delete("a")
    assert policy.since() == [("ended", "a", ())]


async def test_commits_of_an_open_reservation_are_told_once(noted: MemoryRig) -> None:
    """A session that decodes is in use: the policy hears of all of it when the reservation ends."""
    await noted.create("a")
    reservation = await noted.reserve("a", 128)
    noted.place(reservation, 0, Writer(1).make(128))
    policy_of(noted).since()
    for token_count in range(1, 101):
        noted.cache.appends.commit_in_memory(reservation, token_count, keep_open=True)
    assert not policy_of(noted).since()
    noted.cache.appends.release(reservation)
    assert policy_of(noted).since()[0] == ("idle", "a", (2, 1, appended(100)))


async def test_an_evicted_session_made_anew_goes_on_where_it_was(noted: MemoryRig) -> None:
    """Its turns count on and what it had before is no news, though it is written again as a whole."""
    writer, policy = Writer(1), policy_of(noted)
    await noted.create("a")
    await noted.append("a", writer.make(64), is_durable=True)
    await noted.append("a", writer.make(64), is_durable=True)
    for name in ("b", "c"):
        await noted.create(name)
        await noted.append(name, writer.make(256), is_durable=True)
    assert ("evicted", "a", ()) in policy.since()

    await noted.create("a")
    await noted.append("a", writer.make(150))
    assert [facts for what, _, facts in policy.since() if what == "idle"] == [(3, 3, appended(22))]
    await noted.delete("a")
    await noted.create("a")
    await noted.append("a", writer.make(1))
    assert [facts for what, _, facts in policy.since() if what == "idle"] == [(1, 1, appended(1))]


async def test_after_a_start_sessions_are_told_in_the_order_of_their_accesses(noted: MemoryRig) -> None:
    """With the time for which they were idle; the coldest is the first to leave."""
    writer = Writer(1)
    for name in ("c", "a", "b"):
        await noted.create(name)
        await noted.append(name, writer.make(64), is_durable=True)
        noted.clock.advance(seconds=10)
    await noted.read("c")
    noted.clock.advance(seconds=100)
    noted.last_used = 3
    await noted.restart()

    told = [note for note in policy_of(noted).since() if note[0] == "recalled"]
    assert told == [
        ("recalled", "a", (1, 120.0)),
        ("recalled", "b", (1, 110.0)),
        ("recalled", "c", (1, 100.0)),
    ]
    ranks = noted.cache.placement.rank
    uids = [noted.cache.ledger.find(TENANT, name).uid for name in ("a", "b", "c")]
    assert sorted(uids, key=lambda uid: ranks(uid) or ()) == uids
    await noted.close()


async def test_a_session_that_is_forked_while_it_is_leased_is_known_to_leave_dram(noted: MemoryRig) -> None:
    """Shared segments leave DRAM as its own did: the policy hears that it is on SSD only."""
    await noted.create("a")
    await noted.append("a", Writer(1).make(128), is_durable=True)
    lease = await noted.acquire("a", 0, 1)
    await noted.fork("a", "b")
    policy_of(noted).since()
    await noted.demote("b")

    assert sorted(policy_of(noted).since()) == [
        ("placed", "a", (Level.BELOW,)),
        ("placed", "b", (Level.BELOW,)),
    ]
    await noted.check()
    noted.cache.leases.release(lease.lease_id)


async def test_a_rest_of_a_session_that_nobody_looked_at_asks_for_no_rank(
    noted: MemoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank rises, which rankings find when it comes up.

    One that was looked up while in use has fallen since.
    """
    await noted.create("a")
    await noted.append("a", Writer(1).make(64), is_durable=True)
    looks: list[bytes] = []
    rank = policy_of(noted).rank

    def counted(uid: bytes) -> Key | None:
        looks.append(uid)
        return rank(uid)

    monkeypatch.setattr(policy_of(noted), "rank", counted)
    for _ in range(10):
        noted.cache.leases.release((await noted.acquire("a")).lease_id)
    assert not looks
    lease = await noted.acquire("a")
    assert noted.cache.ledger.evictable.first(lambda _: Verdict.LEAVES)
    noted.cache.leases.release(lease.lease_id)
    assert looks
    await noted.check()


async def test_what_forks_share_falls_with_the_one_that_is_read(
    noted: MemoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody looked meanwhile.

    It ranks as the one accessed last, which may rank lower than the one before.
    """
    await noted.create("a")
    await noted.append("a", Writer(1).make(64), is_durable=True)
    await noted.fork("a", "b")
    uid = {name: noted.cache.ledger.find(TENANT, name).uid for name in ("a", "b")}
    monkeypatch.setattr(policy_of(noted), "rank", lambda name: (5.0 if name.endswith(b"a") else 3.0,))
    await noted.read("a")
    assert noted.cache.placement.rank(uid["a"]) == (0, 5.0)
    assert noted.cache.ledger.resident._ranking.first()
    await noted.read("b")
    await noted.check()


class Tide(Ranked, ranks_holders=False):
    """Ranks that rise together, as those of a policy that learns may at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.look_count = self.height = 0

    def rank(self, uid: bytes) -> Key | None:  # noqa: ARG002
        """See Ranked."""
        self.look_count += 1
        return (self.height,)


async def test_ranks_that_all_rise_at_once_are_not_all_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making room looks at so many anew and no more, however many sessions there are."""
    monkeypatch.setattr(feed, "LOOKS", 50)
    policy = Tide()
    rig = MemoryRig(tmp_path, 6, (400,), make_policy=lambda: policy)
    await rig.open()
    for number in range(300):
        await rig.create(f"s{number}")
        await rig.append(f"s{number}", Writer(number).make(1), is_durable=True)
    rig.cache.placement.passed()
    before = policy.look_count
    for policy.height in range(1, 11):
        assert rig.cache.ledger.evictable.first(lambda _: Verdict.LEAVES)
    assert policy.look_count - before == 50
    rig.cache.placement.passed()
    assert rig.cache.ledger.evictable.first(lambda _: Verdict.LEAVES)
    assert policy.look_count - before > 50
    await rig.close()


def _names_in(policy: Ranked) -> set[bytes]:
    """The names of sessions anywhere in a policy, however deep."""
    names: set[bytes] = set()
    left: list[object] = [policy]
    seen: list[object] = []
    while left:
        part = left.pop()
        if any(part is other for other in seen):
            continue
        if isinstance(part, bytes):
            names |= {part} if b"\0" in part else set()
        elif isinstance(part, Mapping):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | deque):
            left += part
        elif type(part).__module__.startswith("ctxcache.core.placement."):
            seen.append(part)
            left += [getattr(part, slot) for slot in getattr(part, "__slots__", ())]
            left += getattr(part, "__dict__", {}).values()
    return names


@pytest.mark.parametrize("name", RANKED)
async def test_nothing_is_kept_of_sessions_that_are_gone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hints, ranks and tiers go with the session. `value` learns of evicted ones, of WATCHED at most."""
    for module in (order, look_ahead):
        monkeypatch.setattr(module, "SLACK", 0)
    for module in (returns, value):
        monkeypatch.setattr(module, "WATCHED", 1)
    policy = RANKED[name](Capacities(6 * SLOT_BYTES, 2 * SLOT_BYTES))
    rig = MemoryRig(tmp_path, 6, (8,), make_policy=lambda: policy)
    await rig.open()
    writer = Writer(1)
    for number in range(60):
        await rig.create(f"s{number}")
        session = rig.cache.ledger.find(TENANT, f"s{number}")
        rig.cache.placement.hinted(session, number)
        rig.cache.placement.expected(session, None)
        await rig.append(f"s{number}", writer.make(64), is_durable=True)
        rig.cache.placement.hinted(session, -number)
        if number % 7 == 0:
            await rig.fork(f"s{number}", f"fork of s{number}")
    assert _names_in(policy)
    for session_id in rig.names():
        await rig.delete(session_id)

    assert rig.cache.placement.is_empty
    assert policy.prefetch() is None
    assert len(_names_in(policy)) <= (name == "value")
    await rig.close()


def test_those_that_may_not_leave_are_not_looked_at_again() -> None:
    """All but a thousand of 50,000 sessions are pinned.

    Each is looked at once, however often room is made.
    """
    count = 50_000
    ranks: dict[bytes, Key] = {number.to_bytes(4, "big"): (number,) for number in range(count)}
    movable = {uid for uid in ranks if ranks[uid][0] % (count // 1000) == 0}
    evictable = Evictable(ranks.get)
    for uid in ranks:
        evictable.add(uid)
    judged: list[bytes] = []

    def judge(uid: bytes) -> Verdict:
        judged.append(uid)
        return Verdict.LEAVES if uid in movable else Verdict.NOT_BEFORE_ITS_NEXT_CHANGE

    for number in range(500):
        victim = evictable.first(judge)
        assert victim in movable
        evictable.discard(victim)
        del ranks[victim]
        # Meanwhile others rise and fall, pinned ones too.
        for uid in list(ranks)[number :: count // 10]:
            ranks[uid] = (ranks[uid][0] - 1.5,)
            evictable.fell(uid, ranks[uid])

    assert len(judged) <= count + 500
