"""Writers: what was committed is there, what was not never was, and no room is lost on the way."""

import asyncio
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, TENANT, DiskRig, MemoryRig, Writer, expected
from fakes import Operation

from ctxcache.cache.appends import GRACE_NS, RESERVATION_LIFETIME_NS
from ctxcache.cache.reservations import Reservation
from ctxcache.core.ledger.session import Expiration, SessionView
from ctxcache.core.placement.shares import Share, Shares
from ctxcache.errors import (
    CapacityExceeded,
    CorruptSegment,
    GenerationMismatch,
    InvalidArgument,
    ModelFingerprintMismatch,
    ReservationNotFound,
    SessionNotFound,
    WriteInProgress,
    WriteOffsetMismatch,
)
from ctxcache.format.checksums import Rows, Tally
from ctxcache.format.streams import Stream
from ctxcache.server.upkeep import Upkeep
from ctxcache.storage.metadata.base import Changes

RESERVATION_S = RESERVATION_LIFETIME_NS / 10**9
GRACE_S = GRACE_NS / 10**9


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


async def commit(
    rig: MemoryRig, reservation: Reservation, token_count: int, *, keep_open: bool = False
) -> SessionView:
    """Commit in memory."""
    return await rig.cache.appends.commit(reservation, token_count, is_durable=False, keep_open=keep_open)


async def test_commits_in_parts_let_go_of_what_is_full(rig: MemoryRig, writer: Writer) -> None:
    """A reservation kept open holds only the segments that are still written."""
    await rig.create("a")
    tokens = writer.make(200)
    reservation = await rig.reserve("a", 200)
    rig.place(reservation, 0, tokens)
    held = []
    for end in (10, 64, 65, 130, 200):
        await commit(rig, reservation, end, keep_open=True)
        held.append(rig.cache.appends.held_count)
        await rig.check()

    assert held == [4, 3, 3, 2, 1]
    assert await rig.read("a") == expected(tokens)


async def test_one_token_at_a_time_takes_no_more_than_all_at_once(rig: MemoryRig, writer: Writer) -> None:
    """Room asked for in crumbs is kept in as few pieces as there are segments."""
    await rig.create("a")
    reservation = await rig.reserve("a", 0)
    tokens = writer.make(300)
    for i, token in enumerate(tokens):
        await rig.cache.appends.extend(reservation, 1)
        rig.place(reservation, i, [token])

    assert len(reservation.runs) == 5
    await commit(rig, reservation, 300)
    assert await rig.read("a") == expected(tokens)
    await rig.check()


async def test_a_commit_of_many_segments_looks_for_no_sum_by_itself(
    rig: MemoryRig, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that came run by run have just the sums that are needed: one comparison for each stream.

    A commit is one turn of the loop, and a long context has thousands of sums.
    """
    await rig.create("a")
    tokens = writer.make(5 * SEGMENT_TOKENS)
    reservation = await rig.reserve("a", len(tokens))
    rig.place(reservation, 0, tokens)
    looked_for = list[tuple[int, int]]()
    look = Tally.value

    def value(self: Tally, stream: Stream, begin: int, end: int, rows: Rows) -> int:
        looked_for.append((begin, end))
        return look(self, stream, begin, end, rows)

    monkeypatch.setattr(Tally, "value", value)
    await commit(rig, reservation, 3 * SEGMENT_TOKENS, keep_open=True)
    await commit(rig, reservation, len(tokens))

    assert looked_for == []
    assert await rig.read("a") == expected(tokens)
    await rig.check()


async def test_what_cannot_fit_makes_nobody_leave(rig: MemoryRig, writer: Writer) -> None:
    """A reservation that is larger than the arena is refused before anything is taken from DRAM."""
    await rig.create("a")
    await rig.append("a", writer.make(100))
    await rig.create("b")
    with pytest.raises(CapacityExceeded):
        await rig.reserve("b", 7 * SEGMENT_TOKENS)

    assert rig.ssd.counts[Operation.WRITE] == 0
    assert rig.cache.ledger.memory.used_bytes == 2 * SLOT_BYTES


async def test_a_refused_extension_keeps_what_came_before(rig: MemoryRig, writer: Writer) -> None:
    """A writer that ran out of room commits what it has and goes on later."""
    await rig.create("a")
    tokens = writer.make(5 * SEGMENT_TOKENS)
    reservation = await rig.reserve("a", len(tokens))
    rig.place(reservation, 0, tokens)
    with pytest.raises(CapacityExceeded):
        await rig.cache.appends.extend(reservation, 2 * SEGMENT_TOKENS)
    await commit(rig, reservation, len(tokens))
    await rig.check()

    assert await rig.read("a") == expected(tokens)


async def test_a_reservation_ends_by_itself_and_its_slots_wait(rig: MemoryRig, writer: Writer) -> None:
    """A silent writer loses its reservation; its slots go to nobody while it may still be writing."""
    await rig.create("a")
    reservation = await rig.reserve("a", 100)
    rig.clock.advance(seconds=RESERVATION_S)
    rig.cache.appends.end_overdue()
    with pytest.raises(ReservationNotFound):
        await commit(rig, reservation, 100)
    await rig.check()
    kept = rig.cache.ledger.memory.used_bytes
    rig.clock.advance(seconds=GRACE_S)
    rig.cache.appends.end_overdue()
    await rig.check()

    assert (kept, rig.cache.ledger.memory.used_bytes) == (2 * SLOT_BYTES, 0)
    assert rig.token_count("a") == 0


async def test_a_late_commit_shows_nothing_beside_another_writer(rig: MemoryRig, writer: Writer) -> None:
    """Once a reservation has ended its writer can do nothing, whoever writes by then."""
    await rig.create("a")
    late = await rig.reserve("a", 10)
    rig.place(late, 0, Writer(2).make(10))
    rig.clock.advance(seconds=RESERVATION_S)
    rig.cache.appends.end_overdue()
    reservation = await rig.reserve("a", 10)
    for attempt in (commit(rig, late, 10), rig.cache.appends.extend(late, 100)):
        with pytest.raises(ReservationNotFound):
            await attempt
    rig.cache.appends.release(late)
    tokens = writer.make(10)
    rig.place(reservation, 0, tokens)
    await commit(rig, reservation, 10)
    rig.clock.advance(seconds=GRACE_S)
    rig.cache.appends.end_overdue()
    await rig.check()

    assert await rig.read("a") == expected(tokens)


async def test_a_reservation_that_ends_while_room_is_made_takes_none(rig: MemoryRig, writer: Writer) -> None:
    """Room that comes too late goes back."""
    await rig.create("old")
    await rig.append("old", writer.make(6 * SEGMENT_TOKENS))
    await rig.create("a")
    gate = rig.ssd.hold(Operation.WRITE)
    reserving = asyncio.ensure_future(rig.reserve("a", 10))
    await rig.reached(Operation.WRITE)
    rig.clock.advance(seconds=RESERVATION_S)
    rig.cache.appends.end_overdue()
    gate.set()
    with pytest.raises(ReservationNotFound):
        await reserving
    await rig.check()

    assert rig.cache.appends.held_count == 0
    await rig.append("a", writer.make(1))


async def test_a_reservation_that_ends_while_others_leave_for_it_takes_no_room(
    tmp_path: Path, writer: Writer
) -> None:
    """Its tenant's limit made another session go; the place in DRAM that was taken before that goes back."""
    rig = MemoryRig(tmp_path, shares=Shares({TENANT: Share(0.0, 1 / 64)}))
    await rig.open()
    await rig.create("old")
    await rig.append("old", writer.make(2 * SEGMENT_TOKENS), is_durable=True)
    await rig.create("a")
    with rig.slow_commits():
        reserving = asyncio.ensure_future(rig.reserve("a", 10))
        while "old" in rig.names():  # noqa: ASYNC110  # nothing else tells when it goes
            await asyncio.sleep(0)
        rig.clock.advance(seconds=RESERVATION_S)
        rig.cache.appends.end_overdue()
    with pytest.raises(ReservationNotFound):
        await reserving
    await rig.check()

    assert (rig.cache.appends.held_count, rig.cache.ledger.memory.used_bytes) == (0, 0)
    await rig.close()


async def test_a_writer_that_says_it_is_there_keeps_its_reservation(rig: MemoryRig, writer: Writer) -> None:
    """A reservation lives as long as it is renewed."""
    await rig.create("a")
    tokens = writer.make(10)
    reservation = await rig.reserve("a", 10)
    for _ in range(3):
        rig.clock.advance(seconds=RESERVATION_S - 1)
        rig.cache.appends.end_overdue()
        rig.cache.appends.renew(reservation)
    rig.place(reservation, 0, tokens)
    await commit(rig, reservation, 10)

    assert await rig.read("a") == expected(tokens)


async def test_a_cancelled_reservation_gives_everything_back(rig: MemoryRig, writer: Writer) -> None:
    """A writer that stops waiting for room leaves the session free for others."""
    await rig.create("old")
    await rig.append("old", writer.make(6 * SEGMENT_TOKENS))
    await rig.create("a")
    gate = rig.ssd.hold(Operation.WRITE)
    reserving = asyncio.ensure_future(rig.reserve("a", 100))
    await rig.reached(Operation.WRITE)
    reserving.cancel()
    await asyncio.wait([reserving])
    gate.set()
    await rig.check()

    await rig.append("a", writer.make(100))
    assert rig.cache.appends.reservation_count == 0


async def test_releasing_twice_frees_once(rig: MemoryRig) -> None:
    """A reservation that has ended holds nothing that could be given back again."""
    await rig.create("a")
    reservation = await rig.reserve("a", 100)
    rig.cache.appends.release(reservation, is_abandoned=True)
    rig.cache.appends.release(reservation)
    rig.cache.appends.release(reservation, is_abandoned=True)
    await rig.check()
    rig.clock.advance(seconds=GRACE_S)
    rig.cache.appends.end_overdue()
    rig.cache.appends.end_overdue()
    await rig.check()

    assert rig.cache.ledger.memory.used_bytes == 0


async def test_what_an_abandoned_writer_left_is_written_at_the_next_look(
    rig: MemoryRig, writer: Writer
) -> None:
    """Its tail grows no more: there is nothing left to wait for."""
    await rig.create("a")
    tokens = writer.make(10)
    reservation = await rig.reserve("a", 20)
    rig.place(reservation, 0, tokens)
    await commit(rig, reservation, 10, keep_open=True)
    await Upkeep(rig.cache).turn()
    before = rig.cache.sessions.get(TENANT, "a")
    rig.cache.appends.release(reservation, is_abandoned=True)
    await rig.check()
    await Upkeep(rig.cache).turn()
    after = rig.cache.sessions.get(TENANT, "a")

    assert (before.durable_token_count, after.durable_token_count) == (0, 10)
    await rig.crash()
    assert await rig.read("a") == expected(tokens)


async def test_readers_come_and_go_beside_one_writer(rig: MemoryRig, writer: Writer) -> None:
    """No other writer gets in while it writes, and the next one need not wait for readers."""
    await rig.create("a")
    tokens = writer.make(10)
    await rig.append("a", tokens, is_durable=True)
    reservation = await rig.reserve("a", 10)
    leases = []
    for _ in range(2):
        leases.append(await rig.acquire("a"))
        with pytest.raises(WriteInProgress):
            await rig.reserve("a", 10)
    rig.cache.leases.release(leases.pop().lease_id)
    with pytest.raises(WriteInProgress):
        await rig.reserve("a", 10)
    rig.cache.appends.release(reservation)
    after = writer.make(10)
    await rig.append("a", after)

    assert rig.leased(leases[0]) == expected(tokens)
    rig.cache.leases.release(leases.pop().lease_id)
    assert await rig.read("a") == expected([*tokens, *after])
    await rig.check()


async def test_an_abandoned_tail_is_not_written_again(rig: MemoryRig, writer: Writer) -> None:
    """Rows go where no writer that disappeared can reach them."""
    await rig.create("a")
    tokens = writer.make(10)
    await rig.append("a", tokens)
    gone = await rig.reserve("a", 10)
    rig.cache.appends.release(gone, is_abandoned=True)
    reservation = await rig.reserve("a", 10)

    assert reservation.runs[0].segment is not gone.runs[0].segment
    rig.place(reservation, 10, more := writer.make(10))
    rig.place(gone, 10, Writer(2).make(10))
    await commit(rig, reservation, 20)
    assert await rig.read("a") == expected([*tokens, *more])


async def test_a_session_created_again_under_its_writer_is_not_touched(
    rig: MemoryRig, writer: Writer
) -> None:
    """When a session expires under its writer and its name is taken again, the writer cannot commit."""
    await rig.create("a", ttl_s=10)
    await rig.append("a", writer.make(100))
    late = await rig.reserve("a", 10)
    rig.clock.advance(seconds=11)
    await rig.create("a")
    with pytest.raises(ReservationNotFound):
        await commit(rig, late, 110)
    await rig.cache.sessions.save_access_times()
    await rig.check()

    assert rig.token_count("a") == 0


async def test_accesses_are_written_down_once_a_call_however_often_they_come(
    rig: MemoryRig, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session used while its access is written down waits for the next call: upkeep has other steps."""
    for name in ("a", "b"):
        await rig.create(name)
        await rig.append(name, writer.make(1))
    commit_records, written = rig.metadata.commit, list[str]()

    async def commit_while_used(changes: Changes, *, is_durable: bool) -> None:
        written.extend(record.session_id for record in changes.sessions)
        await commit_records(changes, is_durable=is_durable)
        if len(written) < 20:
            await rig.append("a", writer.make(1))

    monkeypatch.setattr(rig.metadata, "commit", commit_while_used)
    await rig.cache.sessions.save_access_times()
    assert sorted(written) == ["a", "b"]
    await rig.cache.sessions.save_access_times()
    assert sorted(written) == ["a", "a", "b"]


async def test_a_segment_is_full_with_its_last_row(rig: MemoryRig) -> None:
    """Marked row by row, each of a reservation's segments is returned once: when all of it is written."""
    await rig.create("a")
    reservation = await rig.reserve("a", 3 * SEGMENT_TOKENS)
    first, second, third = (run.segment for run in reservation.runs)
    marks = (10, SEGMENT_TOKENS + 10, 2 * SEGMENT_TOKENS - 1, 2 * SEGMENT_TOKENS, 3 * SEGMENT_TOKENS)

    assert [reservation.mark(count) for count in marks] == [[], [first], [], [second], [third]]


async def test_rows_are_durable_as_they_are_when_they_are_committed(rig: MemoryRig, writer: Writer) -> None:
    """Bytes in a writer's room beyond a commit or a mark are nowhere on disk."""
    await rig.create("a")
    tokens = writer.make(3 * SEGMENT_TOKENS)
    reservation = await rig.reserve("a", len(tokens))
    rig.place(reservation, 0, tokens[:10])
    await rig.cache.appends.commit(reservation, 10, is_durable=True, keep_open=True)
    (segment,) = rig.metadata.segments()
    assert segment.identity.token_count == 10
    rig.place(reservation, 10, tokens[10 : SEGMENT_TOKENS + 6])
    await rig.mark_written(reservation, SEGMENT_TOKENS + 6)
    await rig.cache.drain()
    rig.place(reservation, SEGMENT_TOKENS + 6, tokens[SEGMENT_TOKENS + 6 :])
    await rig.cache.appends.commit(reservation, len(tokens), is_durable=True, keep_open=False)
    await rig.crash()

    assert await rig.read("a") == expected(tokens)
    await rig.check()


@pytest.mark.parametrize("is_marked", [False, True])
async def test_a_writer_whose_prefix_was_lost_commits_nothing(
    disk_rig: DiskRig, writer: Writer, *, is_marked: bool
) -> None:
    """Damage that is found meanwhile cuts the session.

    Rows behind the gap stay unseen, and their writer is told.
    """
    tokens = writer.make(2 * SEGMENT_TOKENS)
    await disk_rig.create("a")
    await disk_rig.append("a", tokens)
    await disk_rig.demote("a")
    reservation = await disk_rig.reserve("a", SEGMENT_TOKENS + 10)
    disk_rig.place(reservation, 2 * SEGMENT_TOKENS, writer.make(SEGMENT_TOKENS + 10))
    if is_marked:
        await disk_rig.mark_written(reservation, 3 * SEGMENT_TOKENS)
    damaged = disk_rig.cache.ledger.find(TENANT, "a").segments[1].durable
    assert damaged is not None
    with disk_rig.segments_file(damaged.path_index).open("r+b") as file:
        file.seek(damaged.offset_bytes + SLOT_BYTES // 2)
        file.write(bytes(SLOT_BYTES // 4))
    with pytest.raises(CorruptSegment):
        await disk_rig.read("a")
    with pytest.raises(ReservationNotFound):
        await disk_rig.cache.appends.commit(reservation, 3 * SEGMENT_TOKENS, is_durable=True, keep_open=True)
    assert await disk_rig.read("a") == expected(tokens[:SEGMENT_TOKENS])

    more = writer.make(10)
    await disk_rig.append("a", more, is_durable=True)
    await disk_rig.crash()
    assert await disk_rig.read("a") == expected([*tokens[:SEGMENT_TOKENS], *more])
    await disk_rig.check()


@pytest.mark.parametrize("is_durable", [False, True])
async def test_a_commit_does_not_bring_an_expired_session_back(
    rig: MemoryRig, writer: Writer, *, is_durable: bool
) -> None:
    """Others have been told that it is gone: so is its writer, before upkeep came by and after."""
    await rig.create("a", ttl_s=10)
    await rig.append("a", writer.make(5), is_durable=is_durable)
    reservation = await rig.reserve("a", 10)
    rig.place(reservation, 5, writer.make(10))
    rig.clock.advance(seconds=10)
    await rig.cache.sessions.expire_due()
    with pytest.raises(SessionNotFound):
        rig.token_count("a")
    with pytest.raises(SessionNotFound):
        await rig.cache.appends.extend(reservation, 1)
    with pytest.raises(SessionNotFound):
        await rig.cache.appends.commit(reservation, 15, is_durable=is_durable, keep_open=False)
    with pytest.raises(SessionNotFound):
        rig.token_count("a")
    with pytest.raises(ReservationNotFound):
        await commit(rig, reservation, 15)

    await rig.cache.sessions.expire_due()
    assert not rig.cache.ledger.session_count
    await rig.check()
    await rig.crash()
    assert not rig.names()


async def test_each_commit_gives_a_session_its_time_anew(rig: MemoryRig, writer: Writer) -> None:
    """A writer that commits in time goes on for as long as it likes; one with an absolute end does not."""
    end = Expiration(None, rig.clock.now_ns() + 25 * 10**9)
    await rig.create("sliding", ttl_s=10)
    await rig.create("absolute")
    await rig.cache.sessions.update(TENANT, "absolute", expiration=end, is_pinned=None)
    opened = {name: await rig.reserve(name, 30) for name in ("sliding", "absolute")}
    for reservation in opened.values():
        rig.place(reservation, 0, writer.make(30))
    for count in (10, 20):
        rig.clock.advance(seconds=9)
        for reservation in opened.values():
            await rig.cache.appends.commit(reservation, count, is_durable=False, keep_open=True)
    rig.clock.advance(seconds=9)
    await commit(rig, opened["sliding"], 30)
    with pytest.raises(SessionNotFound):
        await commit(rig, opened["absolute"], 30)

    assert rig.token_count("sliding") == 30


async def test_what_a_writer_asks_for_is_checked(rig: MemoryRig, writer: Writer) -> None:
    """Each thing that can be wrong has its own error, and none leaves a reservation."""
    await rig.create("a")
    await rig.append("a", writer.make(10))
    good = {
        "fingerprint": rig.request("a").fingerprint,
        "write_offset": 10,
        "generation": None,
        "token_count": 1,
    }
    for error, changes in (
        (ModelFingerprintMismatch, {"fingerprint": bytes(32)}),
        (GenerationMismatch, {"generation": 99}),
        (WriteOffsetMismatch, {"write_offset": 9}),
        (WriteOffsetMismatch, {"write_offset": 11}),
    ):
        with pytest.raises(error):
            await rig.cache.appends.reserve(TENANT, "a", **(good | changes))  # type: ignore[arg-type]
    with pytest.raises(SessionNotFound):
        await rig.cache.appends.reserve("other", "a", **good)  # type: ignore[arg-type]
    reservation = await rig.reserve("a", 5)
    with pytest.raises(WriteInProgress):
        await rig.reserve("a", 1)
    for token_count in (9, 16):
        with pytest.raises(InvalidArgument):
            await commit(rig, reservation, token_count)
        with pytest.raises(InvalidArgument):
            await rig.mark_written(reservation, token_count)
    for attempt in (rig.truncate("a", (0, 1)), rig.fork("a", "b"), rig.delete("a")):
        with pytest.raises(WriteInProgress):
            await attempt

    assert rig.cache.appends.reservation_count == 1
    await rig.check()
