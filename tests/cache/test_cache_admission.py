"""Admission.

Sessions that SSD has no room for, and that are worth less than those there, are not written unasked.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, MemoryRig, Token, Writer, expected

from ctxcache.core.limits import Watermarks
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.shares import NO_SHARES, Share, Shares
from ctxcache.errors import CapacityExceeded
from ctxcache.server.upkeep import Upkeep

ARENA_SEGMENTS, SSD_SEGMENTS = 32, 16
MARKS = Watermarks(low=2 / 32, high=4 / 32, dirty=4 / 32, dirty_limit=10 / 32, writer_wait_s=0)


class Worth(LeastRecentlyUsed, ranks_holders=True):
    """A session is worth the number that its name ends with, or what somebody has said since."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[str, float] = {}
        self.dear: set[str] = set()
        """Sessions whose hits save less than the wear of writing them."""

    def is_worth_wear(self, uid: bytes) -> bool:
        """See Policy."""
        return uid.decode().rpartition("\0")[2] not in self.dear

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        rank = super().rank(uid)
        name = uid.decode().rpartition("\0")[2]
        return rank and (self.said.get(name, float(name.rpartition("-")[2])), *rank)

    def say(self, name: str, worth: float) -> None:
        """It is worth this from now on."""
        self.said[name] = worth
        self._fallen(f"acme\0{name}".encode())


@dataclass(slots=True)
class House:
    """A cache whose SSD is full of sessions worth 5, four segments each."""

    rig: MemoryRig
    policy: Worth
    writer: Writer = field(default_factory=lambda: Writer(1))
    tokens: dict[str, list[Token]] = field(default_factory=dict)

    async def write(self, name: str, segment_count: int, *, is_durable: bool = False) -> None:
        """A turn of a session, made if it is not there, and what happens unasked after it."""
        if name not in self.rig.names():
            await self.rig.create(name)
            self.tokens[name] = []
        tokens = self.writer.make(segment_count * SEGMENT_TOKENS)
        await self.rig.append(name, tokens, is_durable=is_durable)
        self.tokens[name] += tokens
        await self.turn()

    async def turn(self) -> None:
        """The background steps."""
        await Upkeep(self.rig.cache).turn()
        await self.rig.check()

    async def check(self, name: str) -> None:
        """All of the session is there, byte for byte."""
        assert await self.rig.read(name) == expected(self.tokens[name])

    def is_on_ssd(self, name: str) -> bool:
        """Whether a crash would cost none of it."""
        return self.rig.cache.sessions.get(self.rig.tenant, name).durable_token_count == len(
            self.tokens[name]
        )

    @property
    def unadmitted_count(self) -> int:
        """Sessions that left without having been written."""
        return self.rig.cache.state.counters.unadmitted_session_count


async def _house(
    directory: Path, marks: Watermarks = MARKS, shares: Shares = NO_SHARES, tenant: str = "acme"
) -> House:
    policy = Worth()
    rig = MemoryRig(
        directory,
        arena_segments=ARENA_SEGMENTS,
        ssd_segments=(SSD_SEGMENTS,),
        watermarks=marks,
        make_policy=lambda: policy,
        shares=shares,
        tenant=tenant,
    )
    await rig.open()
    house = House(rig, policy)
    for number in range(4):
        await house.write(f"good{number}-5", 4, is_durable=True)
    return house


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A full one."""
    made = await _house(tmp_path)
    yield made
    await made.rig.check()
    made.rig.arena.close()


async def test_what_is_worth_less_than_all_of_a_full_ssd_is_not_written(house: House) -> None:
    """It stays in memory and is read from there.

    Nothing on SSD leaves for it, however often it is looked at.
    """
    flushed = house.rig.cache.state.counters.flushed_segment_count
    await house.write("once-1", 3)
    for _ in range(3):
        house.rig.clock.advance(ns=60 * 10**9)
        await house.turn()

    assert house.rig.cache.state.counters.flushed_segment_count == flushed
    assert not house.is_on_ssd("once-1")
    for name in house.tokens:
        await house.check(name)


async def test_what_is_worth_more_is_written(house: House) -> None:
    """The one of least worth leaves for it."""
    await house.write("better-6", 3)

    assert house.is_on_ssd("better-6")
    assert "good0-5" not in house.rig.names()


async def test_nothing_better_leaves_for_what_is_in_between(house: House) -> None:
    """Four segments of less worth would leave for six, but the next four are worth more: all eight stay."""
    house.policy.say("good0-5", 2)
    await house.write("large-3", 6)
    assert not house.is_on_ssd("large-3")
    await house.write("small-3", 4)

    assert house.is_on_ssd("small-3")
    assert house.rig.names() >= {"good1-5", "good2-5", "good3-5", "large-3"} - {"good0-5"}


async def test_ssd_with_free_room_takes_everything(house: House) -> None:
    """Whatever it is worth."""
    await house.rig.delete("good3-5")
    await house.write("once-1", 4)

    assert house.is_on_ssd("once-1")


async def test_from_full_memory_it_leaves_and_what_is_better_stays(house: House) -> None:
    """The coldest of those that were not written goes for each that comes.

    No writer waits, and nothing is refused or written.
    """
    flushed = house.rig.cache.state.counters.flushed_segment_count
    for number in range(40):
        await house.write(f"once{number}-1.{number:02}", 3)

    counters = house.rig.cache.state.counters
    assert counters.flushed_segment_count == flushed
    assert house.unadmitted_count == counters.evicted_session_count > 30
    assert counters.delayed_write_count == 0
    assert all(house.rig.cache.ledger.find("acme", f"good{n}-5").is_in_memory for n in range(4))
    # The last to come are worth most of them.
    assert "once39-1.39" in house.rig.names()


async def test_a_bound_on_dirty_rows_holds_up_nobody_for_what_is_not_written(house: House) -> None:
    """More than writers may fill lies in memory unwritten, and what is to be written finds room at once."""
    for number in range(5):
        await house.write(f"once{number}-1", 3)
    ledger = house.rig.cache.ledger
    assert ledger.unwritten.dirty_bytes > MARKS.limit_bytes(ledger.memory.capacity_bytes)
    await house.write("better-7", 8)

    assert house.is_on_ssd("better-7")
    assert house.rig.cache.state.counters.delayed_write_count == 0


async def test_writers_beside_each_other_need_no_look_in_between(house: House) -> None:
    """A burst finds its room though write-behind never had its turn.

    A session that would be spared goes when its room is wanted.
    """
    for number in range(24):
        name = f"once{number}-1"
        await house.rig.create(name)
        await house.rig.append(name, house.writer.make(3 * SEGMENT_TOKENS))

    await house.rig.check()
    assert house.unadmitted_count > 8
    assert all(f"good{number}-5" in house.rig.names() for number in range(4))


async def test_what_was_promised_to_be_durable_never_leaves_from_memory(tmp_path: Path) -> None:
    """A caller that waited for durability has it, in full, whatever memory needed, and after every crash."""
    for seed in range(6):
        house = await _house(tmp_path / str(seed))
        draw, durable = random.Random(seed), dict[str, int]()
        for number in range(60):
            name = f"s{draw.randrange(12)}-{draw.choice([1, 2, 3])}"
            is_durable = draw.random() < 0.3
            if is_durable:
                house.policy.say(name, 9 + number)
            await house.write(name, draw.randint(1, 2), is_durable=is_durable)
            if is_durable:
                durable[name] = len(house.tokens[name])
                # The session's worth by now does not matter.
                house.policy.say(name, draw.choice([0, 9 + number]))
            before = set(house.rig.names())
            if draw.random() < 0.1:
                await house.rig.crash()
            names = set(house.rig.names())
            assert names == before
            durable = {name: count for name, count in durable.items() if name in names}
            for name in names & house.tokens.keys():
                kept = house.rig.token_count(name)
                assert kept >= durable.get(name, 0)
                house.tokens[name] = house.tokens[name][:kept]
                await house.check(name)
        left = house.rig.cache.state.counters
        assert left.unadmitted_session_count <= left.evicted_session_count
        await house.rig.check()
        house.rig.arena.close()


async def test_a_session_that_ssd_has_some_of_grows_there(house: House) -> None:
    """The growth of a session is written, though the session is worth least of all."""
    await house.rig.delete("good3-5")
    await house.write("grows-1", 4)
    await house.write("grows-1", 2)

    assert house.is_on_ssd("grows-1")
    assert house.unadmitted_count == 0


async def test_room_that_comes_is_taken_when_it_is_looked_at_again(house: House) -> None:
    """After the age at which tails are written."""
    await house.write("once-1", 3)
    await house.rig.delete("good3-5")
    await house.turn()
    assert not house.is_on_ssd("once-1")
    house.rig.clock.advance(ns=MARKS.tail_age_ns)
    await house.turn()

    assert house.is_on_ssd("once-1")


async def test_one_that_has_come_to_be_worth_it_is_written_and_not_given_up(house: House) -> None:
    """Something on SSD is worth less by now; memory needs room, and asks again before it lets go."""
    await house.write("once-1", 3)
    house.policy.say("good0-5", 0.5)
    await house.rig.create("large-9")
    reservation = await house.rig.reserve("large-9", 18 * SEGMENT_TOKENS)
    assert house.rig.cache.state.is_pressed.is_set()
    await house.turn()

    assert house.is_on_ssd("once-1")
    assert house.unadmitted_count == 0
    house.rig.cache.appends.release(reservation)


async def test_a_read_is_a_reason_to_look_again(house: House) -> None:
    """It was worth little, and is worth more after its next turn, which appends nothing."""
    await house.write("once-1", 3)
    house.policy.said["once-1"] = 8
    lease = await house.rig.acquire("once-1")
    house.rig.cache.leases.release(lease.lease_id)
    await house.turn()

    assert house.is_on_ssd("once-1")


async def test_who_is_read_or_written_or_pinned_does_not_leave(house: House) -> None:
    """Memory fills, and neither of them goes; what is pinned is written, too."""
    await house.write("read-1", 2)
    await house.write("written-1", 2)
    await house.write("pinned-1", 2)
    lease = await house.rig.acquire("read-1")
    reservation = await house.rig.reserve("written-1", 1)
    await house.rig.cache.sessions.update("acme", "pinned-1", expiration=None, is_pinned=True)
    for number in range(30):
        await house.write(f"once{number}-2", 3)

    assert {"read-1", "written-1", "pinned-1"} <= house.rig.names()
    assert house.is_on_ssd("pinned-1")
    assert house.rig.leased(lease) == expected(house.tokens["read-1"])
    house.rig.cache.leases.release(lease.lease_id)
    house.rig.cache.appends.release(reservation)


async def test_readers_of_what_is_not_written_hold_up_no_writer(tmp_path: Path) -> None:
    """Each leases one segment of seven; the others may leave memory, if they are written first."""
    house = await _house(tmp_path, replace(MARKS, writer_wait_s=30))
    leases = []
    for name in list(house.tokens):
        await house.rig.demote(name)
    for number in range(4):
        name = f"once{number}-1"
        await house.write(name, 7)
        assert not house.is_on_ssd(name)
        leases.append(await house.rig.acquire(name, 0, 1))
    await house.write("better-9", 6)

    await house.check("better-9")
    assert house.unadmitted_count == 0
    for number, lease in enumerate(leases):
        tokens = house.tokens[f"once{number}-1"]
        assert house.rig.leased(lease) == expected(tokens[:1])
        house.rig.cache.leases.release(lease.lease_id)
    await house.rig.check()
    house.rig.arena.close()


async def test_who_is_retained_is_written(house: House) -> None:
    """A client asked for it to stay."""
    await house.write("once-1", 2)
    uid = house.rig.cache.ledger.find("acme", "once-1").uid
    house.rig.cache.placement.retaining.retain(
        uid, 3 * SLOT_BYTES, house.rig.clock.monotonic_ns() / 1e9 + 60, 1
    )
    await house.write("once-1", 1)

    assert house.is_on_ssd("once-1")


async def test_a_fork_of_one_that_is_not_written_writes_it(house: House) -> None:
    """Somebody waits for that."""
    await house.write("once-1", 2)
    await house.rig.fork("once-1", "fork-1")
    house.tokens["fork-1"] = house.tokens["once-1"]
    await house.turn()

    assert house.is_on_ssd("once-1")
    await house.check("fork-1")


async def test_it_expires_and_is_cut_like_any_other(house: House) -> None:
    """Truncated, then expired: nothing of it is left, and what is to be written is counted right."""
    await house.write("once-1", 3)
    await house.rig.truncate("once-1", (SEGMENT_TOKENS, 3 * SEGMENT_TOKENS))
    house.tokens["once-1"] = house.tokens["once-1"][:SEGMENT_TOKENS]
    await house.turn()
    await house.check("once-1")
    house.rig.clock.advance(ns=3601 * 10**9)
    await house.turn()

    assert house.rig.names() == set()
    assert house.rig.cache.ledger.unwritten.dirty_bytes == 0


async def test_a_clean_stop_keeps_what_there_is_room_for(house: House) -> None:
    """The best first; what does not fit is gone, and whoever was promised durability has it."""
    for name in ("least-1", "more-2", "most-3"):
        await house.write(name, 3)
    await house.rig.delete("good3-5")
    await house.rig.restart()

    assert house.rig.names() == {"good0-5", "good1-5", "good2-5", "most-3"}
    for name in house.rig.names():
        await house.check(name)


async def test_a_crash_leaves_an_empty_session_of_one_that_was_not_written(house: House) -> None:
    """Its creation was durable, its rows were not; of one that left before, nothing."""
    await house.write("left-1", 3)
    for number in range(10):
        await house.write(f"once{number}-2", 3)
    assert "left-1" not in house.rig.names()
    await house.rig.crash()

    assert "left-1" not in house.rig.names()
    assert house.rig.token_count("once9-2") == 0


async def test_a_turn_that_goes_on_is_not_written_before_it_is_known_what_it_is_worth(house: House) -> None:
    """Full segments of a session in use wait until it rests; one that goes on for too long is written."""
    await house.rig.create("slow-1")
    reservation = await house.rig.reserve("slow-1", 4 * SEGMENT_TOKENS)
    tokens = house.writer.make(2 * SEGMENT_TOKENS)
    house.rig.place(reservation, 0, tokens)
    await house.rig.cache.appends.commit(reservation, len(tokens), is_durable=False, keep_open=True)
    house.tokens["slow-1"] = tokens
    await house.turn()
    assert not house.is_on_ssd("slow-1")
    assert "good0-5" in house.rig.names()
    house.rig.clock.advance(ns=MARKS.tail_age_ns)
    await house.turn()

    assert house.is_on_ssd("slow-1")
    house.rig.cache.appends.release(reservation)


async def test_a_tenant_within_its_share_is_written_whatever_others_are_worth(tmp_path: Path) -> None:
    """Half of SSD is b's: the sessions of a that have more than theirs give way, b's own by their worth."""
    shares = Shares({"acme": Share(0.5), "b": Share(0.5)})
    house = await _house(tmp_path, shares=shares)
    house.rig.tenant = "b"
    await house.write("low-1", 4)
    await house.write("high-2", 4)
    assert house.is_on_ssd("low-1")
    assert house.is_on_ssd("high-2")
    await house.write("least-0", 4)

    assert not house.is_on_ssd("least-0")
    assert {"low-1", "high-2"} <= house.rig.names()
    await house.rig.check()
    house.rig.arena.close()


async def test_nobody_of_worth_to_leave_means_a_try_and_a_reason(house: House) -> None:
    """All of SSD is pinned.

    A flush that somebody waits for is refused as ever, and the rows stay readable.
    """
    for number in range(4):
        await house.rig.cache.sessions.update("acme", f"good{number}-5", expiration=None, is_pinned=True)
    await house.write("once-1", 2)
    with pytest.raises(CapacityExceeded):
        await house.rig.flush("once-1")

    await house.check("once-1")


async def test_flushes_beside_admission_race_to_one_end(house: House) -> None:
    """Somebody asks for durability while memory fills: who was answered is on disk."""
    for number in range(8):
        await house.write(f"once{number}-1", 2)
    names = [f"once{number}-1" for number in range(4, 8)]
    results = await asyncio.gather(*map(house.rig.flush, names), house.turn(), return_exceptions=True)
    flushed = [
        name for name, result in zip(names, results, strict=False) if not isinstance(result, Exception)
    ]
    await house.rig.crash()

    there = [name for name in flushed if name in house.rig.names()]
    assert there
    for name in there:
        await house.check(name)


async def test_a_session_does_not_leave_for_its_own_rows(house: House) -> None:
    """The coldest session, which memory alone has, appends more than is free: the next one leaves for it."""
    await house.write("once-0", 3)
    for number, count in enumerate((3, 3, 3, 2)):
        await house.write(f"more{number}-1", count)
    assert house.rig.cache.ledger.memory.free_bytes == 2 * SLOT_BYTES
    more = house.writer.make(3 * SEGMENT_TOKENS)
    await house.rig.append("once-0", more)
    house.tokens["once-0"] += more

    await house.check("once-0")
    assert house.unadmitted_count == 1


async def test_what_is_not_worth_its_wear_is_not_written_where_there_is_room(tmp_path: Path) -> None:
    """Nor where it is better than all that is there; asked for, it is written."""
    policy = Worth()
    policy.dear = {"once-9", "asked-9"}
    rig = MemoryRig(
        tmp_path, arena_segments=32, ssd_segments=(64,), watermarks=MARKS, make_policy=lambda: policy
    )
    await rig.open()
    house = House(rig, policy)
    await house.write("once-9", 3)
    await house.write("good-1", 3)
    await house.write("asked-9", 3, is_durable=True)

    assert not house.is_on_ssd("once-9")
    assert house.is_on_ssd("asked-9")
    for number in range(8):
        await house.write(f"next{number}-1", 3)
    assert "once-9" in rig.names()
    policy.say("once-9", 0)
    for number in range(8):
        await house.write(f"last{number}-1", 3)
    assert "once-9" not in rig.names()
    assert house.unadmitted_count == 1
    assert house.is_on_ssd("good-1")
    await rig.check()
    await rig.cache.drain()
    rig.arena.close()
