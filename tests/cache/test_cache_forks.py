"""Forks share what their source has, and cost what one session costs, however many there are."""

import gc
import sys
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, TENANT, MemoryRig, Writer, counted_lines, expected

from ctxcache.core.evictable import Evictable, Verdict
from ctxcache.core.segment import Segment

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
    return rig.cache.state.session(TENANT, "source").segments[0]


async def lines_of_moves(rig: MemoryRig) -> list[int]:
    """What it costs to promote and read, to leave DRAM, and to delete."""
    await rig.demote("source")
    lines = []
    name = max(rig.names() - {"source"})
    for step in (rig.read(name), rig.demote("source"), rig.delete(name)):
        with counted_lines() as counts:
            await step
        lines.append(counts[0])
    return lines


def size_bytes(segment: Segment) -> int:
    """What a segment keeps for itself: what it refers to, one step deep."""
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
            await rig.cache.writing.commit(
                reservation, len(contents[name]), is_durable=False, keep_open=False
            )

    assert {name: await rig.read(name) for name in contents} == {n: expected(t) for n, t in contents.items()}
    for name in contents:
        await rig.demote(name)
    assert {name: await rig.read(name) for name in contents} == {n: expected(t) for n, t in contents.items()}
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
        return view.dram_bytes // SLOT_BYTES, view.ssd_bytes // SLOT_BYTES, found.dram_token_count

    await forked(rig, writer, 0)
    await rig.fork("source", "all")
    await rig.fork("source", "half", SEGMENT_TOKENS)
    await rig.fork("half", "again")
    await rig.append("half", writer.make(3))
    assert [amounts(n) for n in ("source", "all", "half", "again")] == [
        (2, 2, 128), (2, 2, 128), (2, 1, 67), (1, 1, 64),
    ]  # fmt: skip
    await rig.demote("again")
    assert [amounts(n) for n in ("source", "all", "half", "again")] == [
        (1, 2, 64), (1, 2, 64), (1, 1, 3), (0, 1, 0),
    ]  # fmt: skip
    await rig.delete("source")
    await rig.delete("again")
    await rig.read("half")
    assert [amounts(n) for n in ("all", "half")] == [(2, 2, 128), (2, 1, 67)]
    await rig.delete("half")
    await rig.truncate("all", (0, SEGMENT_TOKENS))
    assert amounts("all") == (1, 1, 64)
    await rig.check()


async def test_what_is_shared_is_as_warm_as_its_warmest_session(rig: MemoryRig, writer: Writer) -> None:
    """What an old source and a busy fork share stays in DRAM when room is needed; others go before it."""
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

    assert shared.dram_bytes == 2 * SLOT_BYTES
    assert rig.cache.sessions.get(TENANT, "other").dram_bytes == SLOT_BYTES
    assert await rig.read("source") == expected(tokens)


async def test_what_is_shared_leaves_when_no_one_else_is_left(rig: MemoryRig, writer: Writer) -> None:
    """Sharing is no hold: a new session gets the whole arena, and the newest tokens go first."""
    await rig.create("source")
    await rig.append("source", writer.make(3 * SEGMENT_TOKENS), is_durable=True)
    await rig.fork("source", "fork")
    await rig.create("new")
    await rig.append("new", writer.make(4 * SEGMENT_TOKENS), is_durable=True)
    left = [bool(s.dram) for s in rig.cache.state.session(TENANT, "fork").segments]
    await rig.append("new", writer.make(2 * SEGMENT_TOKENS), is_durable=True)
    await rig.check()

    assert left == [True, True, False]
    assert rig.cache.sessions.get(TENANT, "fork").dram_bytes == 0


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
    rig.cache.reading.release(lease.lease_id)
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
