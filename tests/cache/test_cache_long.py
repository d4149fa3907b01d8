"""Segments of more than 64 tokens: what one append fills lies in few of them.

All that may happen to a session happens in the middle of one here.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from cache_rig import KV, SLOT_BYTES, TENANT, DiskRig, Writer, expected

from ctxcache.core.ledger.segment import Segment
from ctxcache.core.limits import DEFAULT_WATERMARKS
from ctxcache.errors import CorruptSegment

ARENA_SEGMENTS = 160


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[DiskRig]:
    """Over files and a database; half of the arena may be one segment."""
    made = DiskRig(tmp_path, arena_segments=ARENA_SEGMENTS, ssd_segments=(400,))
    made.watermarks = replace(DEFAULT_WATERMARKS, longest=0.5)
    await made.open()
    await made.create("a")
    yield made
    await made.check()
    await made.close()


def segments_of(rig: DiskRig, session_id: str) -> list[Segment]:
    """Those that a session lists."""
    return list(rig.cache.ledger.find(TENANT, session_id).segments)


def lengths_of(rig: DiskRig, session_id: str) -> list[tuple[int, int]]:
    """Rows that each of its segments has, and has room for."""
    return [(one.row_count, one.layout.segment_tokens) for one in segments_of(rig, session_id)]


async def test_an_append_fills_long_segments_and_a_tail_that_grows(rig: DiskRig, writer: Writer) -> None:
    """Each is as long as what is left fills; what grows on is always of 64 tokens."""
    tokens = writer.make(5010)
    await rig.append("a", tokens, is_coming=True)
    assert lengths_of(rig, "a") == [(4096, 4096), (512, 512), (256, 256), (128, 128), (18, 64)]

    tokens += (more := writer.make(30))
    await rig.append("a", more)
    assert lengths_of(rig, "a")[-1] == (48, 64)
    assert await rig.read("a") == expected(tokens)
    assert await rig.read("a", 4000, 4700) == expected(tokens[4000:4700])


async def test_without_a_word_of_what_comes_all_segments_are_short(rig: DiskRig, writer: Writer) -> None:
    """Room that may never be filled is room for 64 tokens."""
    await rig.append("a", writer.make(300))
    assert lengths_of(rig, "a") == [(64, 64)] * 4 + [(44, 64)]


async def test_a_start_finds_them_as_they_were(rig: DiskRig, writer: Writer) -> None:
    """After an end in order, and after a crash of what was durable."""
    tokens = writer.make(1500)
    await rig.append("a", tokens, is_durable=True, is_coming=True)
    before = lengths_of(rig, "a")
    for restart in (rig.restart, rig.crash):
        await restart()
        assert lengths_of(rig, "a") == before
        assert await rig.read("a") == expected(tokens)


async def test_forks_and_cuts_end_in_the_middle_of_one(rig: DiskRig, writer: Writer) -> None:
    """A fork, a cut of the oldest, one of the newest, and what is appended behind each of them."""
    tokens = writer.make(1024)
    await rig.append("a", tokens, is_coming=True)
    assert lengths_of(rig, "a") == [(1024, 1024)]
    await rig.fork("a", "b", 700)
    behind = writer.make(200)
    await rig.append("b", behind, is_coming=True)
    await rig.truncate("a", (4, 500))
    await rig.cache.sessions.keep_first(TENANT, "a", None, 300)
    more = writer.make(10)
    await rig.append("a", more)

    a = [*tokens[:4], *tokens[500:796], *more]
    b = [*tokens[:700], *behind]
    for _ in range(2):
        assert await rig.read("a") == expected(a)
        assert await rig.read("b") == expected(b)
        assert await rig.read("b", 690, 710) == expected(b[690:710])
        await rig.restart()
    shared = segments_of(rig, "a")[0]
    assert shared is segments_of(rig, "b")[0]
    await rig.delete("a")
    assert await rig.read("b") == expected(b)


async def test_they_are_found_by_every_64_of_their_tokens(rig: DiskRig, writer: Writer) -> None:
    """A prompt that parts in the middle of one shares it up to there."""
    tokens = writer.make(1000)
    await rig.append("a", tokens, is_durable=True, is_coming=True)
    for begun_anew in (False, True):
        if begun_anew:
            await rig.restart()
        for count in (64, 130, 511, 640, 1000):
            found = await rig.match([*tokens[:count], *writer.make(70)])
            assert found.token_count == count - count % 64
    await rig.create("b")
    other = [*tokens[:330], *writer.make(100)]
    assert await rig.adopt("b", other) == 320
    await rig.append("b", other[320:])
    assert await rig.read("b") == expected(other)
    assert segments_of(rig, "b")[0] is segments_of(rig, "a")[0]


async def test_one_that_was_not_filled_grows_no_more(rig: DiskRig, writer: Writer) -> None:
    """It would be written whole for every token that is made durable behind it."""
    reservation = await rig.reserve("a", 512, is_coming=True)
    tokens = writer.make(100)
    rig.place(reservation, 0, tokens)
    await rig.cache.appends.commit(reservation, 100, is_durable=True, keep_open=False)
    assert lengths_of(rig, "a") == [(100, 512)]
    tokens += (more := writer.make(1))
    await rig.append("a", more, is_durable=True)
    assert lengths_of(rig, "a") == [(100, 512), (1, 64)]
    await rig.crash()
    assert await rig.read("a") == expected(tokens)


async def test_where_no_room_is_in_one_piece_they_are_short(rig: DiskRig, writer: Writer) -> None:
    """Little more leaves memory than what the rows take."""
    # One of three slots is held, one is free, and one is clean: free room lies in pieces of one.
    names = [f"s{i}" for i in range(ARENA_SEGMENTS)]
    for name in names:
        await rig.create(name)
        await rig.append(name, writer.make(64), is_durable=True)
    leases = [await rig.acquire(name) for name in names[::3]]
    for name in names[1::3]:
        await rig.demote(name)
    tokens = writer.make(640)
    await rig.append("a", tokens, is_coming=True)
    assert {room for _, room in lengths_of(rig, "a")} == {64}
    dropped = [name for name in names[2::3] if not segments_of(rig, name)[0].memory]
    assert len(dropped) <= 2 * 640 // 64
    assert await rig.read("a") == expected(tokens)
    for lease in leases:
        rig.cache.leases.release(lease.lease_id)
    tokens += (more := writer.make(640))
    await rig.append("a", more, is_coming=True)
    assert await rig.read("a") == expected(tokens)


async def test_a_bad_byte_cuts_the_session_before_the_one_it_is_in(rig: DiskRig, writer: Writer) -> None:
    """Rows before it stay; no row of it is served."""
    tokens = writer.make(128 + 1024)
    await rig.append("a", tokens[:128], is_durable=True, is_coming=True)
    await rig.append("a", tokens[128:], is_durable=True, is_coming=True)
    await rig.demote("a")
    segment = segments_of(rig, "a")[1]
    assert segment.durable is not None
    at = segment.durable.offset_bytes + segment.layout.rows(KV, 900, 901).start
    with rig.segments_file().open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes((byte[0] ^ 1,)))
    with pytest.raises(CorruptSegment):
        await rig.read("a")
    assert rig.token_count("a") == 128
    assert await rig.read("a") == expected(tokens[:128])


async def test_a_lease_of_some_tokens_pins_what_they_lie_in(rig: DiskRig, writer: Writer) -> None:
    """The books count slots of every length."""
    await rig.append("a", writer.make(1000), is_durable=True, is_coming=True)
    await rig.demote("a")
    lease = await rig.acquire("a", 600, 700)
    segments = segments_of(rig, "a")
    held = {one.segment_id: one.size_bytes for one in segments if one.memory}
    assert dict(lease.pinned) == held
    assert [one.layout.segment_tokens for one in segments if one.memory] == [256]
    assert sum(held.values()) < 4 * SLOT_BYTES
    rig.cache.leases.release(lease.lease_id)
