"""Forks share what their source has, and cost what one session costs, however many there are."""

import gc
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, TENANT, MemoryRig, Token, Writer, counted_lines, expected

from ctxcache.cache import sessions
from ctxcache.core.ledger.rankings import Evictable, Verdict
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import SessionView
from ctxcache.errors import (
    CacheError,
    GenerationMismatch,
    SessionAlreadyExists,
    SessionNotFound,
    TokenRangeOutOfBounds,
    WriteInProgress,
)
from ctxcache.storage.metadata.base import Changes

FORKS = 200


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


async def forked(rig: MemoryRig, writer: Writer, count: int) -> Segment:
    """A source of two segments with so many forks; returns its first segment."""
    if "source" not in rig.names():
        await rig.create("source")
        await rig.append("source", writer.make(2 * SEGMENT_TOKENS), is_durable=True)
    for _ in range(count):
        await rig.fork("source", f"fork{len(rig.names()):06}")
    return rig.cache.ledger.find(TENANT, "source").segments[0]


async def lines_of_moves(rig: MemoryRig) -> list[int]:
    """The cost of promoting and reading, of leaving DRAM, and of deleting."""
    await rig.demote("source")
    lines = []
    name = max(rig.names() - {"source"})
    for step in (rig.read(name), rig.demote("source"), rig.delete(name)):
        with counted_lines() as counts:
            await step
        lines.append(counts[0])
    return lines


def size_bytes(segment: Segment) -> int:
    """The memory that a segment keeps for itself: what it refers to, one step deep."""
    return sum(sys.getsizeof(item) for item in gc.get_referents(segment) if not isinstance(item, type))


async def test_source_and_forks_go_on_apart(rig: MemoryRig, writer: Writer) -> None:
    """A tail that is shared takes rows of neither any more, also when all of them write at once."""
    shared = writer.make(SEGMENT_TOKENS + 10)
    await rig.create("source")
    await rig.append("source", shared)
    await rig.fork("source", "fork")
    await rig.fork("source", "part", SEGMENT_TOKENS + 3)
    await rig.fork("fork", "again")
    contents = {"source": shared, "fork": shared, "part": shared[: SEGMENT_TOKENS + 3], "again": shared}
    for _ in range(2):
        reservations = {name: await rig.reserve(name, 5) for name in contents}
        for name, reservation in reservations.items():
            own = writer.make(5)
            rig.place(reservation, len(contents[name]), own)
            contents[name] = [*contents[name], *own]
        for name, reservation in reservations.items():
            await rig.cache.appends.commit(
                reservation, len(contents[name]), is_durable=False, keep_open=False
            )

    assert {name: await rig.read(name) for name in contents} == {n: expected(t) for n, t in contents.items()}
    for name in contents:
        await rig.demote(name)
    assert {name: await rig.read(name) for name in contents} == {n: expected(t) for n, t in contents.items()}
    await rig.check()


async def test_a_fork_is_found_behind_the_token_where_it_parts(rig: MemoryRig, writer: Writer) -> None:
    """Wherever in a segment that is: it goes on there, as if it had computed all of its tokens itself."""
    shared = writer.make(2 * SEGMENT_TOKENS + 30)
    await rig.create("source")
    await rig.append("source", shared, is_durable=True)
    for count in (1, SEGMENT_TOKENS - 1, SEGMENT_TOKENS + 37, len(shared)):
        name = f"fork-{count}"
        await rig.fork("source", name, count)
        # An engine has restored it: keys are made of token ids in memory.
        await rig.read(name)
        tokens = [*shared[:count], *writer.make(2 * SEGMENT_TOKENS)]
        await rig.append(name, tokens[count:], is_durable=True)
        for _ in range(2):
            assert (await rig.match(tokens)).token_count == len(tokens) // 64 * 64
            await rig.create("third")
            assert await rig.adopt("third", tokens) == len(tokens) // 64 * 64
            assert await rig.read("third") == expected(tokens[: len(tokens) // 64 * 64])
            assert await rig.read(name) == expected(tokens)
            await rig.delete("third")
            await rig.check()
            await rig.crash()
    assert await rig.read("source") == expected(shared)


async def test_rows_of_the_source_never_stand_for_those_of_a_fork(rig: MemoryRig, writer: Writer) -> None:
    """The record of the fork's own segment is lost: the source has others at the same positions."""
    shared = writer.make(SEGMENT_TOKENS + 10)
    await rig.create("source")
    await rig.append("source", shared, is_durable=True)
    await rig.fork("source", "fork", SEGMENT_TOKENS + 3)
    await rig.append("fork", writer.make(5), is_durable=True)
    own = rig.cache.ledger.find(rig.tenant, "fork").segments[-1]
    await rig.metadata.commit(Changes(deleted_segment_ids=[own.segment_id]), is_durable=True)
    await rig.crash()

    assert await rig.read("fork") == expected(shared[:SEGMENT_TOKENS])
    assert await rig.read("source") == expected(shared)
    await rig.check()


async def test_a_quiet_fork_is_no_access(rig: MemoryRig, writer: Writer) -> None:
    """What works ahead keeps nobody's session alive, and makes none rank as used."""
    await rig.create("source", ttl_s=100)
    await rig.append("source", writer.make(70), is_durable=True)
    before = rig.cache.sessions.get(rig.tenant, "source")
    rig.clock.advance(seconds=9)
    for is_quiet in (True, False):
        await rig.cache.sessions.fork(
            rig.tenant, "source", "", None, token_count=65, expiration=None, is_quiet=is_quiet
        )
        after = rig.cache.sessions.get(rig.tenant, "source")
        assert (after.expire_time_ns == before.expire_time_ns) is is_quiet
        assert (after.access_time_ns == before.access_time_ns) is is_quiet


async def test_source_and_fork_go_on_apart_after_a_restart(rig: MemoryRig, writer: Writer) -> None:
    """The tail that both list is in memory again, and neither writes into it."""
    await rig.create("source")
    tokens = writer.make(10)
    await rig.append("source", tokens, is_durable=True)
    await rig.fork("source", "fork")
    await rig.restart()
    assert await rig.read("source") == expected(tokens)
    more = {name: writer.make(5) for name in ("source", "fork")}
    for name, own in more.items():
        await rig.append(name, own)

    for name, own in more.items():
        assert await rig.read(name) == expected([*tokens, *own])
    await rig.check()


async def test_a_segment_does_not_grow_with_its_sessions(rig: MemoryRig, writer: Writer) -> None:
    """Two hundred forks more leave it as it is: a list of them would be copied at each one."""
    small = size_bytes(await forked(rig, writer, 2))
    large = size_bytes(await forked(rig, writer, FORKS))

    assert large == small


async def test_a_shared_segment_moves_at_the_price_of_one(rig: MemoryRig, writer: Writer) -> None:
    """Reading, demoting and deleting take the same steps with two hundred forks more."""
    await forked(rig, writer, 3)
    before = await lines_of_moves(rig)
    await forked(rig, writer, FORKS)
    after = await lines_of_moves(rig)

    assert all(0 < b < 1.2 * a for a, b in zip(before, after, strict=True))


async def test_what_forks_have_where_is_exact(rig: MemoryRig, writer: Writer) -> None:
    """Each counts what it shares and what is its own, wherever it went and whoever of them was deleted."""

    def amounts(name: str) -> tuple[int, int, int]:
        view = rig.cache.sessions.get(TENANT, name)
        found = rig.cache.sessions.lookup(TENANT, name, view.model_fingerprint)
        return view.memory_bytes // SLOT_BYTES, view.durable_bytes // SLOT_BYTES, found.dram_token_count

    await forked(rig, writer, 0)
    await rig.fork("source", "all")
    await rig.fork("source", "half", SEGMENT_TOKENS)
    await rig.fork("half", "again")
    await rig.append("half", writer.make(3))
    assert [amounts(n) for n in ("source", "all", "half", "again")] == [
        (2, 2, 128),
        (2, 2, 128),
        (2, 1, 67),
        (1, 1, 64),
    ]
    await rig.demote("again")
    assert [amounts(n) for n in ("source", "all", "half", "again")] == [
        (1, 2, 64),
        (1, 2, 64),
        (1, 1, 3),
        (0, 1, 0),
    ]
    await rig.delete("source")
    await rig.delete("again")
    await rig.read("half")
    assert [amounts(n) for n in ("all", "half")] == [(2, 2, 128), (2, 1, 67)]
    await rig.delete("half")
    await rig.truncate("all", (0, SEGMENT_TOKENS))
    assert amounts("all") == (1, 1, 64)
    await rig.check()


async def test_a_fork_that_is_cut_counts_what_it_still_lists(rig: MemoryRig, writer: Writer) -> None:
    """The segment that it lists no more stays where it is, for its source."""
    await forked(rig, writer, 0)
    whole = await rig.fork("source", "fork")
    cut = await rig.truncate("fork", (SEGMENT_TOKENS, 2 * SEGMENT_TOKENS))

    assert (whole.memory_bytes, whole.durable_bytes) == (2 * SLOT_BYTES, 2 * SLOT_BYTES)
    assert (cut.memory_bytes, cut.durable_bytes) == (SLOT_BYTES, SLOT_BYTES)
    await rig.check()


async def test_what_is_shared_is_as_warm_as_its_warmest_session(rig: MemoryRig, writer: Writer) -> None:
    """Segments that an old source shares with a busy fork stay in DRAM when room is needed.

    Others go before it.
    """
    await rig.create("source")
    tokens = writer.make(2 * SEGMENT_TOKENS)
    await rig.append("source", tokens, is_durable=True)
    await rig.fork("source", "fork")
    await rig.create("other")
    await rig.append("other", writer.make(2 * SEGMENT_TOKENS), is_durable=True)
    await rig.read("fork")
    await rig.create("new")
    await rig.append("new", writer.make(3 * SEGMENT_TOKENS), is_durable=True)
    shared = rig.cache.sessions.get(TENANT, "source")
    await rig.check()

    assert shared.memory_bytes == 2 * SLOT_BYTES
    assert rig.cache.sessions.get(TENANT, "other").memory_bytes == SLOT_BYTES
    assert await rig.read("source") == expected(tokens)


async def test_what_is_shared_leaves_when_no_one_else_is_left(rig: MemoryRig, writer: Writer) -> None:
    """Sharing is no hold: a new session gets the whole arena, and the newest tokens go first."""
    await rig.create("source")
    await rig.append("source", writer.make(3 * SEGMENT_TOKENS), is_durable=True)
    await rig.fork("source", "fork")
    await rig.create("new")
    await rig.append("new", writer.make(4 * SEGMENT_TOKENS), is_durable=True)
    left = [bool(s.memory) for s in rig.cache.ledger.find(TENANT, "fork").segments]
    await rig.append("new", writer.make(2 * SEGMENT_TOKENS), is_durable=True)
    await rig.check()

    assert left == [True, True, False]
    assert rig.cache.sessions.get(TENANT, "fork").memory_bytes == 0


async def test_whose_fork_is_read_leaves_in_its_turn(tmp_path: Path) -> None:
    """A lease keeps the session that is read, not all that share its rows; and the rows stay."""
    rig = MemoryRig(tmp_path, arena_segments=12, ssd_segments=(8,))
    await rig.open()
    rows = Writer(1).make(2 * SEGMENT_TOKENS)
    for name in ("a", "c", "d", "e"):
        await rig.create(name)
        await rig.append(name, rows, is_durable=True)
    await rig.fork("a", "fork", SEGMENT_TOKENS)
    for name in ("c", "d", "e"):
        await rig.read(name)

    lease = await rig.acquire("fork")
    await rig.create("f")
    await rig.append("f", Writer(2).make(SEGMENT_TOKENS), is_durable=True)
    assert rig.names() == {"fork", "c", "d", "e", "f"}
    assert rig.leased(lease) == expected(rows[:SEGMENT_TOKENS])
    rig.cache.leases.release(lease.lease_id)
    assert await rig.read("fork") == expected(rows[:SEGMENT_TOKENS])
    await rig.check()
    rig.arena.close()


def test_who_was_passed_over_comes_up_when_it_rests() -> None:
    """Word of its rank is enough: nobody else has to be gone first."""
    ranks = {b"a": (1.0,), b"b": (2.0,)}
    evictable = Evictable(ranks.get)
    for uid in ranks:
        evictable.add(uid)
    held = {b"a"}

    def judge(uid: bytes) -> Verdict:
        return Verdict.NOT_NOW if uid in held else Verdict.LEAVES

    assert evictable.first(judge) == b"b"
    held.clear()
    evictable.fell(b"a", ranks[b"a"])
    assert evictable.first(judge) == b"a"


class Interrupted:
    """A pace at which others do something at one of the rests, and the books are looked at in all of them."""

    is_over = True

    def __init__(self, rig: MemoryRig, at: int, action: Callable[[], Awaitable[object]]) -> None:
        self._rig, self._at, self._action = rig, at, action
        self.rest_count = 0

    async def rest(self) -> None:
        """Let the others do what they do."""
        self.rest_count += 1
        if self.rest_count == self._at:
            await self._action()
        await self._rig.check()
        assert "fork" not in self._rig.names() or self._rig.token_count("fork") == 1


async def fork_at(
    rig: MemoryRig, pace: Interrupted, generation: int | None = None, count: int | None = None
) -> SessionView:
    """Fork the source at that pace."""
    return await rig.cache.sessions.fork(
        TENANT, "source", "fork", generation, token_count=count, expiration=None, pace=pace
    )


@pytest.fixture
async def source(rig: MemoryRig, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> list[Token]:
    """The tokens of a source of four segments, each of which is a step of a fork."""
    monkeypatch.setattr(sessions, "SEGMENTS_PER_LOOK", 1)
    tokens = writer.make(3 * SEGMENT_TOKENS + 7)
    await rig.create("source")
    await rig.append("source", tokens, is_durable=True)
    return tokens


RESTS = range(1, 9)
"""Four while the segments are made shareable, four while they are counted."""


@pytest.mark.parametrize("at", RESTS)
async def test_a_fork_is_of_the_source_as_it_is_at_the_end(
    rig: MemoryRig, writer: Writer, source: list[Token], at: int
) -> None:
    """Whatever was appended or dropped while it was being made; both go on apart."""
    added, begin, end = writer.make(SEGMENT_TOKENS), SEGMENT_TOKENS // 2, 2 * SEGMENT_TOKENS + 3

    async def change() -> None:
        await rig.append("source", added)
        await rig.truncate("source", (begin, end))

    pace = Interrupted(rig, at, change)
    await fork_at(rig, pace)
    assert pace.rest_count >= len(RESTS)
    left = [*source, *added]
    del left[begin:end]
    assert await rig.read("fork") == await rig.read("source") == expected(left)
    own = writer.make(5)
    await rig.append("fork", own)
    await rig.truncate("source", (0, begin))
    await rig.demote("source")
    await rig.demote("fork")
    assert await rig.read("fork") == expected([*left, *own])
    assert await rig.read("source") == expected(left[begin:])
    await rig.check()


@pytest.mark.parametrize("at", RESTS)
async def test_what_moves_while_a_fork_is_made_is_counted(
    rig: MemoryRig, source: list[Token], at: int
) -> None:
    """Segments that leave DRAM in between are where they are, for the source and for the fork."""
    await fork_at(rig, Interrupted(rig, at, lambda: rig.demote("source")))
    for name in ("source", "fork"):
        view = rig.cache.sessions.get(TENANT, name)
        assert (view.memory_bytes, view.durable_bytes) == (0, 4 * SLOT_BYTES)
    assert await rig.read("fork") == expected(source)
    await rig.check()


@pytest.mark.parametrize("at", RESTS)
async def test_a_fork_of_what_is_gone_meanwhile_is_refused(
    rig: MemoryRig, writer: Writer, source: list[Token], at: int
) -> None:
    """The source is deleted, or another one has its name: nothing of either comes to light."""
    with pytest.raises(SessionNotFound):
        await fork_at(rig, Interrupted(rig, at, lambda: rig.delete("source")))
    assert rig.names() == set()
    await rig.check()

    tokens, other = writer.make(3 * SEGMENT_TOKENS + 7), writer.make(9)
    assert len(tokens) == len(source)
    await rig.create("source")
    await rig.append("source", tokens, is_durable=True)

    async def make_anew() -> None:
        await rig.delete("source")
        await rig.create("source")
        await rig.append("source", other)

    await fork_at(rig, Interrupted(rig, at, make_anew))
    assert await rig.read("fork") == expected(other)
    await rig.check()


@pytest.mark.parametrize("at", RESTS)
async def test_what_was_checked_is_checked_again_at_the_end(
    rig: MemoryRig, writer: Writer, source: list[Token], at: int
) -> None:
    """A generation, a range, a writer and a name that was free: each is refused as it would be at first."""
    generation = rig.cache.sessions.get(TENANT, "source").generation
    reserved = []

    async def reserve() -> None:
        reserved.append(await rig.reserve("source", 5))

    async def take_the_name() -> None:
        await rig.create("fork")
        await rig.append("fork", writer.make(1))

    count = len(source)
    refused: list[tuple[type[CacheError], Callable[[], Awaitable[object]], int | None, int | None]] = [
        (GenerationMismatch, lambda: rig.append("source", writer.make(1)), generation, None),
        (TokenRangeOutOfBounds, lambda: rig.truncate("source", (0, 9)), None, count),
        (WriteInProgress, reserve, None, None),
        (SessionAlreadyExists, take_the_name, None, None),
    ]
    for error, action, expected_generation, kept in refused:
        with pytest.raises(error):
            await fork_at(rig, Interrupted(rig, at, action), expected_generation, kept)
        for reservation in reserved:
            rig.cache.appends.release(reservation)
        reserved.clear()
        await rig.check()
    assert rig.token_count("fork") == 1
    assert rig.token_count("source") == count + 1 - 9


LINES_PER_SEGMENT = 30
"""Lines of Python that a fork takes for each segment in the one step that makes it visible."""


async def test_a_long_fork_is_made_in_steps(rig: MemoryRig, writer: Writer, source: list[Token]) -> None:
    """Its steps are as long as those of a short one, and the last takes hardly more for a segment more."""

    async def lines_of(name: str) -> tuple[int, int]:
        """The most between two rests, and those after the last one."""
        most = 0

        class Watching:
            is_over = True

            async def rest(self) -> None:
                nonlocal most
                most, counts[0] = max(most, counts[0]), 0

        with counted_lines() as counts:
            await rig.cache.sessions.fork(
                TENANT, "source", name, None, token_count=None, expiration=None, pace=Watching()
            )
        return most, counts[0]

    await lines_of("first")
    short = await lines_of("short")
    for _ in range(8):
        await rig.append("source", writer.make(4 * SEGMENT_TOKENS), is_durable=True)
    long = await lines_of("long")
    assert 0 < long[0] < 1.5 * short[0]
    assert 0 < long[1] - short[1] < 32 * LINES_PER_SEGMENT
