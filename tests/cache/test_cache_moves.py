"""Segments on their way.

Staged ahead of their commit, promoted one behind the other, cut off in the middle.
"""

import asyncio
import itertools
import threading
from collections.abc import Awaitable
from contextlib import suppress

import pytest
from cache_rig import LAYOUT, SEGMENT_TOKENS, SLOT_BYTES, TENANT, MemoryRig, Token, Writer, expected
from fakes import Operation
from hypothesis import given
from hypothesis import strategies as st

from ctxcache.cache import segments as segment_io
from ctxcache.cache.reservations import Reservation
from ctxcache.cache.segments import _pieces
from ctxcache.core.ledger.segment import Segment
from ctxcache.errors import CorruptSegment, InvalidArgument, ReservationNotFound, TierFailure, TooManyRequests
from ctxcache.format.layout import ALIGN_BYTES, SegmentLayout, align, header_checksum
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from ctxcache.server.upkeep import Upkeep


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


async def written(rig: MemoryRig, writer: Writer, count: int) -> tuple[Reservation, list[Token]]:
    """A reservation in a new session `a`, every row in place."""
    await rig.create("a")
    reservation = await rig.reserve("a", count)
    tokens = writer.make(count)
    rig.place(reservation, 0, tokens)
    return reservation, tokens


async def demoted(rig: MemoryRig, writer: Writer, segment_count: int) -> list[Token]:
    """A session `a` that is only on SSD."""
    await rig.create("a")
    tokens = writer.make(segment_count * SEGMENT_TOKENS)
    await rig.append("a", tokens)
    await rig.demote("a")
    return tokens


def segments(rig: MemoryRig) -> list[Segment]:
    """The segments that session `a` lists."""
    return rig.cache.ledger.find(TENANT, "a").segments


async def test_what_is_marked_is_written_once_and_before_its_commit(rig: MemoryRig, writer: Writer) -> None:
    """Full segments are on SSD when the commit comes, which writes only what is left."""
    reservation, tokens = await written(rig, writer, 2 * SEGMENT_TOKENS + 5)
    rig.cache.appends.mark_written(reservation, len(tokens))
    await rig.reached(Operation.WRITE, 2)
    await rig.check()
    assert rig.token_count("a") == 0
    view = await rig.cache.appends.commit(reservation, len(tokens), is_durable=True, keep_open=False)

    assert view.durable_token_count == len(tokens)
    assert rig.ssd.counts[Operation.WRITE] == 3
    await rig.crash()
    assert await rig.read("a") == expected(tokens)


async def test_what_is_marked_and_not_committed_is_gone_after_a_crash(rig: MemoryRig, writer: Writer) -> None:
    """Staged bytes have no record: nothing of them is visible, and their slots are free."""
    reservation, tokens = await written(rig, writer, 2 * SEGMENT_TOKENS)
    rig.cache.appends.mark_written(reservation, len(tokens))
    await rig.reached(Operation.WRITE, 2)
    await rig.crash()

    assert rig.token_count("a") == 0
    assert rig.cache.ledger.below.used_bytes == 0


@pytest.mark.parametrize("is_abandoned", [False, True])
@pytest.mark.parametrize("is_under_way", [False, True])
async def test_a_released_reservation_gives_staged_slots_back(
    rig: MemoryRig, writer: Writer, *, is_abandoned: bool, is_under_way: bool
) -> None:
    """Also when the device is still at it; an abandoned one's memory waits for its grace."""
    reservation, tokens = await written(rig, writer, 2 * SEGMENT_TOKENS)
    gate = rig.ssd.hold(Operation.WRITE)
    rig.cache.appends.mark_written(reservation, len(tokens))
    await rig.reached(Operation.WRITE, 2)
    if not is_under_way:
        gate.set()
        await rig.cache.drain()
    rig.cache.appends.release(reservation, is_abandoned=is_abandoned)
    gate.set()
    await rig.check()
    rig.clock.advance(seconds=61)
    rig.cache.appends.end_overdue()
    await rig.check()

    assert rig.cache.ledger.below.used_bytes == 0
    assert rig.cache.ledger.memory.used_bytes == 0


async def test_a_segment_committed_short_of_its_mark_is_written_anew(rig: MemoryRig, writer: Writer) -> None:
    """Rows that come in the place of marked ones that were never committed are the ones that are kept."""
    reservation, tokens = await written(rig, writer, SEGMENT_TOKENS)
    rig.cache.appends.mark_written(reservation, SEGMENT_TOKENS)
    await rig.reached(Operation.WRITE)
    await rig.cache.appends.commit(reservation, 40, is_durable=False, keep_open=False)
    others = writer.make(SEGMENT_TOKENS - 40)
    await rig.append("a", others, is_durable=True)
    await rig.check()
    await rig.crash()

    assert await rig.read("a") == expected([*tokens[:40], *others])


@pytest.mark.parametrize("reserved_count", [10, SEGMENT_TOKENS])
async def test_a_segment_is_staged_by_the_commit_that_fills_it_and_by_none_before(
    rig: MemoryRig, writer: Writer, reserved_count: int
) -> None:
    """A commit of ten rows stages nothing, whether ten or all rows of the segment are reserved."""
    reservation, tokens = await written(rig, writer, reserved_count)
    await rig.cache.appends.commit(reservation, 10, is_durable=False, keep_open=True)
    segment = reservation.session.segments[-1]
    assert not rig.cache.staging.is_under_way(segment)
    if reserved_count == SEGMENT_TOKENS:
        await rig.cache.appends.commit(reservation, SEGMENT_TOKENS, is_durable=False, keep_open=True)
        assert rig.cache.staging.is_under_way(segment)
    await rig.cache.drain()
    await rig.check()
    assert await rig.read("a") == expected(tokens)


async def test_a_flush_while_a_marked_segment_is_short_leaves_it_staged(
    rig: MemoryRig, writer: Writer
) -> None:
    """A durable commit of some of its rows and one of all of them are both right."""
    reservation, tokens = await written(rig, writer, SEGMENT_TOKENS)
    rig.cache.appends.mark_written(reservation, SEGMENT_TOKENS)
    await rig.cache.appends.commit(reservation, 10, is_durable=True, keep_open=True)
    await rig.check()
    await rig.cache.appends.commit(reservation, SEGMENT_TOKENS, is_durable=True, keep_open=False)
    await rig.check()
    await rig.crash()

    assert await rig.read("a") == expected(tokens)


@pytest.mark.parametrize("is_staged", [False, True])
async def test_rows_marked_and_left_are_not_recorded_by_a_flush_of_fewer(
    rig: MemoryRig, writer: Writer, *, is_staged: bool
) -> None:
    """A durable commit of ten rows records ten, whatever was marked behind them, on SSD already or not."""
    reservation, tokens = await written(rig, writer, SEGMENT_TOKENS)
    rig.cache.appends.mark_written(reservation, SEGMENT_TOKENS)
    if is_staged:
        await rig.cache.drain()
    await rig.cache.appends.commit(reservation, 10, is_durable=True, keep_open=True)
    (record,) = rig.metadata.segments()
    assert record.identity.token_count == 10
    await rig.check()
    rig.cache.appends.release(reservation)
    others = writer.make(SEGMENT_TOKENS - 10)
    await rig.append("a", others, is_durable=True)
    await rig.check()
    await rig.crash()

    assert await rig.read("a") == expected([*tokens[:10], *others])


async def test_a_deleted_session_gives_staged_slots_back(rig: MemoryRig, writer: Writer) -> None:
    """Committed, on SSD and in no record yet: deletion frees it like the rest."""
    reservation, _ = await written(rig, writer, 2 * SEGMENT_TOKENS)
    await rig.cache.appends.commit(reservation, SEGMENT_TOKENS, is_durable=False, keep_open=True)
    await rig.cache.drain()
    rig.cache.appends.release(reservation)
    assert rig.cache.ledger.below.used_bytes == SLOT_BYTES
    await rig.delete("a")
    await rig.check()

    assert rig.cache.ledger.below.used_bytes == 0


async def test_a_refused_staging_is_made_good_by_the_flush(rig: MemoryRig, writer: Writer) -> None:
    """A caller that asked for nothing hears of no failure; who asks for durability gets it."""
    reservation, tokens = await written(rig, writer, 2 * SEGMENT_TOKENS)
    rig.ssd.fail(Operation.WRITE)
    rig.cache.appends.mark_written(reservation, len(tokens))
    await rig.check()
    await rig.cache.appends.commit(reservation, len(tokens), is_durable=True, keep_open=False)
    await rig.check()
    await rig.crash()

    assert await rig.read("a") == expected(tokens)


async def test_what_was_staged_before_a_refused_sync_is_written_again(rig: MemoryRig, writer: Writer) -> None:
    """Bytes that a path may have lost are not taken as durable.

    They go to another one, and their slot back.
    """
    reservation, tokens = await written(rig, writer, 2 * SEGMENT_TOKENS)
    rig.cache.appends.mark_written(reservation, len(tokens))
    await rig.cache.drain()
    rig.ssd.fail(Operation.SYNC)
    await rig.cache.appends.commit(reservation, len(tokens), is_durable=True, keep_open=False)
    await rig.check()
    (refused,) = rig.ssd.refusals

    assert all(segment.durable and segment.durable.path_index != refused for segment in segments(rig))
    await rig.crash()
    assert await rig.read("a") == expected(tokens)


async def test_a_mark_makes_nobody_leave(rig: MemoryRig, writer: Writer) -> None:
    """Staged slots are the first to go for a flush, and evict no session themselves."""
    rig.ssd = type(rig.ssd)([3 * SLOT_BYTES])
    await rig.restart()
    await rig.create("kept")
    kept = writer.make(2 * SEGMENT_TOKENS)
    await rig.append("kept", kept, is_durable=True)
    reservation, tokens = await written(rig, writer, 3 * SEGMENT_TOKENS)
    rig.cache.appends.mark_written(reservation, len(tokens))
    await rig.check()
    assert rig.names() == {"kept", "a"}
    await rig.append("kept", kept[:SEGMENT_TOKENS], is_durable=True)
    await rig.check()

    assert rig.names() == {"kept", "a"}


async def test_what_is_being_staged_goes_before_a_session_does(rig: MemoryRig, writer: Writer) -> None:
    """A flush without room waits for a staged slot that the device still writes to, and evicts nobody."""
    rig.ssd = type(rig.ssd)([3 * SLOT_BYTES])
    await rig.restart()
    for name in ("cold", "kept"):
        await rig.create(name)
        await rig.append(name, writer.make(SEGMENT_TOKENS), is_durable=True)
    await rig.create("new")
    reservation, tokens = await written(rig, writer, 1 * SEGMENT_TOKENS)
    gate = rig.ssd.hold(Operation.WRITE)
    rig.cache.appends.mark_written(reservation, len(tokens))
    await rig.reached(Operation.WRITE, 1)
    appending = asyncio.ensure_future(rig.append("new", more := writer.make(5), is_durable=True))
    for _ in range(5):
        await asyncio.sleep(0)
    gate.set()
    await appending
    await rig.check()

    assert rig.names() == {"cold", "kept", "new", "a"}
    assert await rig.read("new") == expected(more)


async def test_a_mark_outside_the_reservation_is_refused(rig: MemoryRig, writer: Writer) -> None:
    """Bad input gets an error and changes nothing."""
    reservation, tokens = await written(rig, writer, SEGMENT_TOKENS)
    for token_count in (-1, SEGMENT_TOKENS + 1):
        with pytest.raises(InvalidArgument):
            rig.cache.appends.mark_written(reservation, token_count)
    rig.cache.appends.release(reservation)
    with pytest.raises(ReservationNotFound):
        rig.cache.appends.mark_written(reservation, len(tokens))

    assert rig.ssd.counts[Operation.WRITE] == 0


async def test_an_open_commit_sends_full_segments_on_their_way(rig: MemoryRig, writer: Writer) -> None:
    """A writer that goes on does not wait for upkeep."""
    reservation, tokens = await written(rig, writer, 2 * SEGMENT_TOKENS)
    await rig.cache.appends.commit(reservation, SEGMENT_TOKENS + 3, is_durable=False, keep_open=True)
    await rig.reached(Operation.WRITE)
    await rig.check()
    await rig.cache.appends.commit(reservation, len(tokens), is_durable=True, keep_open=False)

    assert rig.ssd.counts[Operation.WRITE] == 2


async def test_upkeep_leaves_a_growing_tail(rig: MemoryRig, writer: Writer) -> None:
    """It would be written again and again; full segments before it are durable."""
    await rig.create("a")
    await rig.append("a", writer.make(2 * SEGMENT_TOKENS))
    await rig.append("a", writer.make(5))
    for _ in range(3):
        await Upkeep(rig.cache).turn()
    view = rig.cache.sessions.get(TENANT, "a")

    assert view.durable_token_count == 2 * SEGMENT_TOKENS
    assert rig.ssd.counts[Operation.WRITE] == 2
    await rig.crash()
    assert rig.token_count("a") == 2 * SEGMENT_TOKENS


async def test_upkeep_never_takes_back_what_was_durable(rig: MemoryRig, writer: Writer) -> None:
    """A tail that was flushed once stays recorded when full segments before it are written behind."""
    await rig.create("a")
    tokens = writer.make(SEGMENT_TOKENS + 9)
    await rig.append("a", tokens[:5], is_durable=True)
    await rig.append("a", tokens[5 : SEGMENT_TOKENS + 5], is_durable=True)
    await rig.append("a", tokens[SEGMENT_TOKENS + 5 :])
    await Upkeep(rig.cache).turn()
    await rig.crash()

    assert await rig.read("a") == expected(tokens[: SEGMENT_TOKENS + 5])


@pytest.mark.parametrize("nth", [1, 3, 5])
async def test_a_promotion_that_fails_in_the_middle_loses_no_slot(
    rig: MemoryRig, writer: Writer, nth: int
) -> None:
    """The reader gets the device's error, the books add up, and the next reader gets the rows."""
    tokens = await demoted(rig, writer, 5)
    rig.ssd.fail(Operation.READ, nth=nth)
    with pytest.raises(TierFailure):
        await rig.acquire("a")
    await rig.check()
    lease = await rig.acquire("a")

    assert rig.leased(lease) == expected(tokens)


async def _cancelled(rig: MemoryRig, operation: Operation, work: Awaitable[object]) -> None:
    """Cancel while the device is at it, then let the device go on."""
    gate = rig.ssd.hold(operation)
    task = asyncio.ensure_future(work)
    await rig.reached(operation, rig.ssd.counts[operation] + 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    await rig.check()


async def test_a_promotion_cancelled_in_the_middle_loses_no_slot(rig: MemoryRig, writer: Writer) -> None:
    """Memory that a device still reads from is kept until the device is done."""
    tokens = await demoted(rig, writer, 5)
    await _cancelled(rig, Operation.READ, rig.acquire("a"))
    lease = await rig.acquire("a")

    assert rig.leased(lease) == expected(tokens)


async def test_what_was_promoted_and_dropped_at_once_is_promoted_again(
    rig: MemoryRig, writer: Writer
) -> None:
    """A move that has just ended brings nothing to a reader who comes when its rows have left again."""
    tokens = await demoted(rig, writer, 1)
    gate = rig.ssd.hold(Operation.READ)
    given_up = asyncio.ensure_future(rig.acquire("a"))
    await rig.reached(Operation.READ)
    given_up.cancel()
    await asyncio.wait([given_up])
    await rig.create("b")
    (segment,) = segments(rig)
    gate.set()
    while not segment.memory:  # noqa: ASYNC110  # to be there in the turn of the loop in which it ends
        await asyncio.sleep(0)
    await rig.append("b", writer.make(6 * SEGMENT_TOKENS))
    assert not segment.memory
    lease = await rig.acquire("a")

    assert rig.leased(lease) == expected(tokens)


async def test_a_flush_cancelled_in_the_middle_goes_on(rig: MemoryRig, writer: Writer) -> None:
    """The flush ends unheard, and the rows that it wrote are recorded."""
    await rig.create("a")
    await rig.append("a", writer.make(3 * SEGMENT_TOKENS))
    await _cancelled(rig, Operation.WRITE, rig.flush("a"))

    assert rig.cache.sessions.get(TENANT, "a").durable_token_count == 3 * SEGMENT_TOKENS


async def test_a_flush_that_fails_in_the_middle_writes_everything_again(
    rig: MemoryRig, writer: Writer
) -> None:
    """No slot of the failed attempt stays taken or is recorded."""
    await rig.create("a")
    tokens = writer.make(5 * SEGMENT_TOKENS)
    await rig.append("a", tokens)
    rig.ssd.fail(Operation.WRITE, nth=3)
    with pytest.raises(TierFailure):
        await rig.flush("a")
    await rig.check()
    assert rig.cache.ledger.below.used_bytes == 0
    await rig.flush("a")
    await rig.check()
    await rig.crash()

    assert await rig.read("a") == expected(tokens)


async def test_a_writer_waits_for_what_is_on_its_way(rig: MemoryRig, writer: Writer) -> None:
    """An arena full of segments that are being written makes room as soon as they are durable."""
    await rig.create("a")
    reservation = await rig.reserve("a", 6 * SEGMENT_TOKENS)
    rig.place(reservation, 0, writer.make(6 * SEGMENT_TOKENS))
    gate = rig.ssd.hold(Operation.WRITE)
    await rig.cache.appends.commit(reservation, 5 * SEGMENT_TOKENS, is_durable=False, keep_open=True)
    rig.cache.appends.release(reservation)
    await rig.create("b")
    reserving = asyncio.ensure_future(rig.reserve("b", 3 * SEGMENT_TOKENS))
    await rig.reached(Operation.WRITE)
    gate.set()

    rig.cache.appends.release(await reserving)
    await rig.check()


async def test_room_that_nobody_can_make_is_refused(rig: MemoryRig, writer: Writer) -> None:
    """Segments under a lease stay, marked or not."""
    reservation, _ = await written(rig, writer, 6 * SEGMENT_TOKENS)
    rig.cache.appends.mark_written(reservation, 6 * SEGMENT_TOKENS)
    await rig.create("b")
    with pytest.raises(TooManyRequests):
        await rig.reserve("b", 1)
    rig.cache.appends.release(reservation)
    await rig.check()


@given(
    row_bytes=st.lists(st.sampled_from([2, 96, 1152, 4096, 8192, 32768]), min_size=1, max_size=40),
    row_count=st.integers(1, 64),
)
def test_pieces_hold_every_row_and_no_chunk_is_cut(row_bytes: list[int], row_count: int) -> None:
    """Ranges are in order, apart, page-aligned; header and rows lie in one of them each."""
    specs = tuple(
        StreamSpec(Stream(i, StateKind.KV), size, DType.FLOAT16) for i, size in enumerate(row_bytes)
    )
    layout = SegmentLayout(specs)
    pieces = _pieces(layout, row_count)
    wanted = [(0, layout.header_bytes)]
    wanted += [(o, o + s.row_bytes * row_count) for o, s in zip(layout.offsets, specs, strict=True)]

    assert all(a < b <= c < d for (a, b), (c, d) in itertools.pairwise(pieces))
    assert all(begin % ALIGN_BYTES == end % ALIGN_BYTES == 0 for begin, end in pieces)
    assert all(any(a <= begin and end <= b for a, b in pieces) for begin, end in wanted)
    assert pieces[-1][1] <= layout.size_bytes


def test_a_short_segment_moves_few_bytes() -> None:
    """One row of each of 32 layers is a page each, not 8 MiB."""
    specs = tuple(StreamSpec(Stream(i, StateKind.KV), 4096, DType.FLOAT16) for i in range(32))
    layout = SegmentLayout(specs)

    assert sum(end - begin for begin, end in _pieces(layout, 1)) == layout.header_bytes + 32 * ALIGN_BYTES
    assert sum(end - begin for begin, end in _pieces(layout, 64)) == layout.size_bytes
    assert align(LAYOUT.size_bytes) == LAYOUT.size_bytes


async def test_what_was_marked_before_does_not_touch_what_is_marked_now(
    rig: MemoryRig, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer gives its marked rows up, another one takes their place while they are still being sealed."""
    begun, may_go, seal = threading.Event(), threading.Event(), header_checksum

    def sealed(header: bytes) -> int:
        if not begun.is_set():
            begun.set()
            may_go.wait()
        return seal(header)

    await rig.create("a")
    kept, given_up, others = (
        writer.make(40),
        writer.make(SEGMENT_TOKENS - 40),
        writer.make(SEGMENT_TOKENS - 40),
    )
    await rig.append("a", kept)
    monkeypatch.setattr(segment_io, "header_checksum", sealed)
    gate = rig.ssd.hold(Operation.WRITE)
    for tokens in (given_up, others):
        reservation = await rig.reserve("a", len(tokens))
        rig.place(reservation, len(kept), tokens)
        rig.cache.appends.mark_written(reservation, SEGMENT_TOKENS)
        if tokens is given_up:
            await asyncio.to_thread(begun.wait)
            rig.cache.appends.release(reservation)
    for may_come in (1, 2):
        with suppress(TimeoutError):
            await asyncio.wait_for(rig.reached(Operation.WRITE, may_come), 0.2)
        may_go.set()
    gate.set()
    await rig.cache.appends.commit(reservation, SEGMENT_TOKENS, is_durable=True, keep_open=False)
    await rig.demote("a")

    assert await rig.read("a") == expected([*kept, *others])
    await rig.check()


async def test_rows_that_memory_loses_while_they_are_flushed_are_not_recorded(
    rig: MemoryRig, writer: Writer
) -> None:
    """Their copy on SSD is more than the segment has by then.

    A later read brings only the remaining rows.
    """
    await rig.create("a")
    tokens = writer.make(30)
    await rig.append("a", tokens[:10], is_durable=True)
    await rig.append("a", tokens[10:])
    (segment,) = segments(rig)
    count, gate = rig.ssd.counts[Operation.SYNC], rig.ssd.hold(Operation.SYNC)
    flushing = asyncio.ensure_future(rig.flush("a"))
    await rig.reached(Operation.SYNC, count + 1)
    assert segment.memory is not None
    rows = segment.layout.rows(segment.layout.specs[0].stream, 25, 26)
    view = rig.arena.view(segment.memory)
    view[rows.start] ^= 4
    with pytest.raises(CorruptSegment):
        await rig.cache.mending.verify(segment)
    gate.set()
    await flushing

    assert (segment.row_count, segment.durable_row_count) == (10, 10)
    await rig.check()
    await rig.demote("a")
    assert await rig.read("a") == expected(tokens[:10])
    await rig.restart()
    assert await rig.read("a") == expected(tokens[:10])
