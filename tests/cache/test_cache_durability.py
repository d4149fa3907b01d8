"""Tokens acknowledged as durable are there after a power cut, and nothing wrong is beside them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from cache_rig import SEGMENT_TOKENS, SLOT_BYTES, TENANT, DiskRig, MemoryRig, Rig, Writer, expected
from fakes import Operation

from ctxcache.errors import CapacityExceeded, SessionNotFound, TierFailure
from ctxcache.server.upkeep import Upkeep


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


async def refused_record(rig: MemoryRig, session_id: str) -> None:
    """Flush a session. Its rows are written, and its record is refused."""
    count = rig.ssd.counts[Operation.SYNC]
    gate = rig.ssd.hold(Operation.SYNC)
    flushing = asyncio.ensure_future(rig.flush(session_id))
    await rig.reached(Operation.SYNC, count + 1)
    rig.metadata.fail("no")
    gate.set()
    with pytest.raises(TierFailure):
        await flushing


async def test_tokens_committed_during_a_flush_are_not_taken_for_older_ones(
    rig: MemoryRig, writer: Writer
) -> None:
    """Rows that came while a flush waited never stand in for those that are appended after a crash."""
    rig.arena_segments = 12
    await rig.restart()
    await rig.create("a")
    first = writer.make(8 * SEGMENT_TOKENS + 5)
    await rig.append("a", first)
    gate = rig.ssd.hold(Operation.WRITE)
    flushing = asyncio.ensure_future(rig.flush("a"))
    await rig.reached(Operation.WRITE)
    await rig.append("a", writer.make(20))
    gate.set()
    await flushing
    await rig.check()
    await rig.crash()
    kept = rig.token_count("a")
    assert await rig.read("a") == expected(first[:kept])
    after = writer.make(30)
    await rig.append("a", after)

    assert kept == len(first)
    assert await rig.read("a") == expected([*first, *after])


async def test_a_record_names_only_what_is_on_disk(rig: MemoryRig, writer: Writer) -> None:
    """Written down for another reason, a session ends where its last flush ended, with nothing behind."""
    await rig.create("a")
    await rig.append("a", writer.make(100), is_durable=True)
    await rig.append("a", writer.make(100))
    await rig.cache.sessions.update(TENANT, "a", expiration=None, is_pinned=True)
    (record,) = rig.metadata.sessions()
    recorded = {segment.segment_id for segment in rig.metadata.segments()}

    assert (record.log_end, record.live) == (100, ((0, 100),))
    assert set(record.segment_ids) == recorded


async def test_what_is_written_behind_is_durable_to_where_it_was_written(
    rig: MemoryRig, writer: Writer
) -> None:
    """A growing tail that is left counts as durable nowhere: not to callers, not in the record."""
    await rig.create("a")
    for count in (SEGMENT_TOKENS, 10):
        await rig.append("a", writer.make(count))
    await rig.cache.flushing.flush(rig.cache.ledger.find(TENANT, "a"), is_tail_left=True)
    (record,) = rig.metadata.sessions()

    assert rig.cache.sessions.get(TENANT, "a").durable_token_count == SEGMENT_TOKENS
    assert record.log_end == SEGMENT_TOKENS


async def test_rows_that_were_dropped_while_they_were_written_are_not_recorded(
    rig: MemoryRig, writer: Writer
) -> None:
    """A truncation beside a flush: its segments' slots go back, and no record names them."""
    await rig.create("a")
    tokens = writer.make(3 * SEGMENT_TOKENS)
    await rig.append("a", tokens)
    gate = rig.ssd.hold(Operation.WRITE)
    flushing = asyncio.ensure_future(rig.flush("a"))
    await rig.reached(Operation.WRITE)
    await rig.truncate("a", (SEGMENT_TOKENS, 3 * SEGMENT_TOKENS))
    gate.set()
    await flushing
    await rig.check()

    listed = {segment.segment_id for segment in rig.cache.ledger.find(TENANT, "a").segments}
    assert {segment.segment_id for segment in rig.metadata.segments()} == listed
    assert await rig.read("a") == expected(tokens[:SEGMENT_TOKENS])


async def test_slots_of_records_that_could_not_be_changed_stay_taken(rig: MemoryRig, writer: Writer) -> None:
    """A deletion, or a tail's new place, that was not written down.

    The old record may be read after the next start.
    """
    await rig.create("tail")
    await rig.append("tail", writer.make(10), is_durable=True)
    await rig.create("a")
    await rig.append("a", writer.make(SEGMENT_TOKENS), is_durable=True)
    await rig.append("tail", writer.make(10))
    named = {segment.slot for segment in rig.metadata.segments()}
    gate = rig.ssd.hold(Operation.SYNC)
    flushing = asyncio.ensure_future(rig.flush("tail"))
    await rig.reached(Operation.SYNC, 3)
    rig.metadata.fail("the log is gone")
    gate.set()
    with pytest.raises(TierFailure):
        await flushing
    used_bytes = rig.cache.ledger.below.used_bytes
    with pytest.raises(TierFailure):
        await rig.cache.departures.remove([rig.cache.ledger.find(TENANT, "a")])

    assert rig.cache.ledger.below.stranded.keys() >= named
    assert rig.cache.ledger.below.used_bytes == used_bytes


async def test_nothing_is_recorded_of_what_was_deleted(rig: MemoryRig, writer: Writer) -> None:
    """Neither the session nor any of its segments, whose slots are others' by then."""
    await rig.create("a")
    await rig.append("a", writer.make(3 * SEGMENT_TOKENS), is_durable=True)
    await rig.truncate("a", (2 * SEGMENT_TOKENS, 3 * SEGMENT_TOKENS))
    assert len(list(rig.metadata.segments())) == 2
    await rig.delete("a")

    assert not [*rig.metadata.sessions(), *rig.metadata.segments()]


async def test_a_session_that_was_given_up_is_not_written_down_again(rig: MemoryRig, writer: Writer) -> None:
    """A change comes between two departures whose records go together: the second one's stays away."""
    for name in ("a", "b"):
        await rig.create(name)
        await rig.append(name, writer.make(10))

    async def give_up(name: str) -> None:
        rig.cache.ssd_room.give_up(rig.cache.ledger.find(TENANT, name))

    pinning = rig.cache.sessions.update(TENANT, "b", expiration=None, is_pinned=True)
    await asyncio.gather(give_up("a"), pinning, give_up("b"))
    await rig.check()
    await rig.restart()

    assert not rig.names()


class Refusing:
    """A database of which every write after the first so many is refused by the device."""

    def __init__(self, database: Any, taken_count: int) -> None:
        self._database, self._left_count = database, taken_count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def write(self, batch: Any) -> None:
        """See Rdict."""
        if not self._left_count:
            raise OSError("IO error: While appending to file: Input/output error")
        self._left_count -= 1
        self._database.write(batch)


async def _delete(rig: Rig) -> None:
    await rig.delete("a")


async def _evict(rig: Rig) -> None:
    await rig.cache.sessions.evict(TENANT, "a")


@pytest.mark.parametrize("taken_count", [0, 1, 2])
@pytest.mark.parametrize("depart", [_delete, _evict])
async def test_a_session_that_goes_while_it_is_truncated_is_never_cut_further(
    disk_rig: DiskRig, writer: Writer, depart: Callable[[Rig], Awaitable[None]], taken_count: int
) -> None:
    """Both changes are on their way at once, and the device refuses one: a crash leaves whole changes."""
    tokens = writer.make(4 * SEGMENT_TOKENS)
    await disk_rig.create("a")
    await disk_rig.append("a", tokens, is_durable=True)
    # The middle goes: whatever then misses a segment loses what is behind it as well.
    dropped = (SEGMENT_TOKENS, 2 * SEGMENT_TOKENS)
    database: Any = disk_rig.metadata
    database.database = Refusing(database.database, taken_count)
    truncated, departed = await asyncio.gather(
        disk_rig.truncate("a", dropped), depart(disk_rig), return_exceptions=True
    )
    await disk_rig.crash()

    kept = await disk_rig.read("a") if disk_rig.names() else None
    left = expected(tokens[: dropped[0]] + tokens[dropped[1] :])
    assert kept == {0: expected(tokens), 1: left, 2: None}[taken_count]
    # The log is synced behind each write: the first change is durable when the second one is refused.
    refused = tuple(isinstance(answer, TierFailure) for answer in (truncated, departed))
    assert refused == (taken_count < 1, taken_count < 2)
    assert not disk_rig.cache.state.counters.corrupt_segment_count
    await disk_rig.check()


async def test_no_generation_comes_again_after_a_crash(rig: MemoryRig, writer: Writer) -> None:
    """Commits that the crash took back had generations too.

    Those that come are above all of them, after each crash.
    """
    await rig.create("a")
    await rig.append("a", writer.make(10), is_durable=True)
    seen = []
    for _ in range(3):
        seen.append((await rig.append("a", writer.make(10))).generation)
        rig.crash_count += 1
        await rig.crash()
        seen.append(rig.cache.sessions.get(TENANT, "a").generation)

    assert seen == sorted(set(seen))


async def test_who_stops_waiting_for_a_device_leaves_nothing_behind(rig: MemoryRig, writer: Writer) -> None:
    """However often a flush is asked for and given up: one is under way, and one waits for it, for all."""
    await rig.create("a")
    await rig.append("a", writer.make(5))
    gate = rig.ssd.hold(Operation.WRITE)
    first = asyncio.ensure_future(rig.flush("a"))
    await rig.reached(Operation.WRITE)
    await rig.append("a", writer.make(5))
    for _ in range(20):
        asked = asyncio.ensure_future(rig.flush("a"))
        await asyncio.sleep(0)
        asked.cancel()
    last = asyncio.ensure_future(rig.flush("a"))
    await asyncio.sleep(0)
    assert rig.cache.flushing.flush_count == 2
    gate.set()

    assert (await first).durable_token_count >= 5
    assert (await last).durable_token_count == 10


async def test_what_is_written_behind_never_ends_inside_a_commit(rig: MemoryRig, writer: Writer) -> None:
    """A commit of more than the segments it fills comes back whole after a crash, or not at all."""
    tokens = writer.make(SEGMENT_TOKENS + 10)
    await rig.create("a")
    await rig.append("a", tokens)
    await Upkeep(rig.cache).turn()
    await rig.crash()

    assert rig.token_count("a") in (0, len(tokens))


async def test_a_fork_of_a_session_emptied_before_its_flush_ends(rig: MemoryRig, writer: Writer) -> None:
    """Tokens dropped before they were durable leave nothing to wait for."""
    await rig.create("a")
    await rig.append("a", writer.make(10))
    await rig.truncate("a", (0, 10))

    view = await asyncio.wait_for(rig.fork("a", "b"), 10)
    assert view.token_count == 0


async def test_a_flush_after_a_refused_record_is_refused_too(rig: MemoryRig, writer: Writer) -> None:
    """Durability is never acknowledged because an earlier attempt got half-way."""
    await rig.create("a")
    await rig.append("a", writer.make(10))
    await refused_record(rig, "a")
    with pytest.raises(TierFailure):
        await rig.flush("a")

    assert rig.cache.sessions.get("acme", "a").durable_token_count == 0
    await rig.check()


async def test_a_refused_record_keeps_the_older_copy_until_a_restart(rig: MemoryRig, writer: Writer) -> None:
    """While nobody knows which record is on disk, the slots of both stay taken."""
    await rig.create("a")
    tokens = writer.make(10)
    await rig.append("a", tokens, is_durable=True)
    await rig.append("a", writer.make(10))
    await refused_record(rig, "a")
    await rig.check()
    assert rig.cache.ledger.below.used_bytes == 2 * SLOT_BYTES
    await rig.crash()

    assert await rig.read("a") == expected(tokens)
    await rig.check()


async def test_a_session_that_could_not_be_created_is_not_there(rig: MemoryRig) -> None:
    """Creation is durable or it did not happen."""
    rig.metadata.fail("no")
    with pytest.raises(TierFailure):
        await rig.create("a")

    assert not rig.names()


async def test_a_delete_that_was_refused_gives_no_slot_on_ssd_back(rig: MemoryRig, writer: Writer) -> None:
    """A record that may still be there must not point at another's bytes."""
    await rig.create("a")
    tokens = writer.make(100)
    await rig.append("a", tokens, is_durable=True)
    rig.metadata.fail("no")
    with pytest.raises(TierFailure):
        await rig.delete("a")
    await rig.check()
    await rig.crash()

    assert await rig.read("a") == expected(tokens)


@pytest.mark.parametrize("is_held", [True, False])
async def test_a_slot_whose_record_is_gone_after_all_is_given_back_once(
    rig: MemoryRig, writer: Writer, *, is_held: bool
) -> None:
    """Records are looked at again after a removal that failed; a reader still has the rows, or is done."""
    await rig.create("a")
    tokens = writer.make(SEGMENT_TOKENS)
    await rig.append("a", tokens, is_durable=True)
    lease = await rig.acquire("a")
    rig.metadata.fail("no")
    with pytest.raises(TierFailure):
        await rig.cache.departures.remove([rig.cache.ledger.find(TENANT, "a")])
    if not is_held:
        rig.cache.leases.release(lease.lease_id)
    below = rig.cache.ledger.below
    assert (below.used_bytes, len(below.stranded)) == (SLOT_BYTES, 1)

    rig.cache.ledger.unstranded(set(below.stranded))
    assert (below.used_bytes, len(below.stranded)) == (SLOT_BYTES * is_held, 0)
    if is_held:
        assert rig.leased(lease) == expected(tokens)
        rig.cache.leases.release(lease.lease_id)
    await rig.check()
    assert below.used_bytes == 0


@pytest.mark.parametrize("operation", [Operation.WRITE, Operation.SYNC])
async def test_a_refused_write_is_an_error_and_nothing_else(
    rig: MemoryRig, writer: Writer, operation: Operation
) -> None:
    """With no other path, the tokens stay in memory, the space adds up, and what was durable stays so."""
    rig.ssd.fence(1)
    await rig.create("a")
    tokens = writer.make(100)
    await rig.append("a", tokens[:30], is_durable=True)
    rig.ssd.fail(operation)
    with pytest.raises(TierFailure):
        await rig.append("a", tokens[30:], is_durable=True)
    await rig.check()

    assert rig.cache.sessions.get("acme", "a").durable_token_count == 30
    assert await rig.read("a") == expected(tokens)
    await rig.crash()
    assert await rig.read("a") == expected(tokens[:30])


async def test_a_refused_write_is_made_good_by_the_next(rig: MemoryRig, writer: Writer) -> None:
    """A write that failed once is tried again with everything it had."""
    await rig.create("a")
    tokens = writer.make(200)
    await rig.append("a", tokens)
    rig.ssd.fail(Operation.WRITE, nth=2)
    with pytest.raises(TierFailure):
        await rig.flush("a")
    await rig.flush("a")
    await rig.crash()

    assert await rig.read("a") == expected(tokens)


async def test_sessions_that_cannot_be_flushed_do_not_keep_others_from_it(
    rig: MemoryRig, writer: Writer
) -> None:
    """An end in order saves all it can and then says what it could not."""
    kept = {}
    for name in ("a", "b", "c"):
        await rig.create(name)
        kept[name] = writer.make(10)
        await rig.append(name, kept[name])
    rig.ssd.fail(Operation.WRITE, nth=1)
    with pytest.raises(TierFailure):
        await rig.close()
    await rig.open()

    left = [name for name in kept if rig.token_count(name)]
    assert len(left) == 2
    for name in left:
        assert await rig.read(name) == expected(kept[name])


async def test_a_flush_of_a_session_deleted_meanwhile_says_so(rig: MemoryRig, writer: Writer) -> None:
    """Those who wait for a flush learn that the session is gone."""
    await rig.create("a")
    await rig.append("a", writer.make(100))
    gate = rig.ssd.hold(Operation.WRITE)
    flushes = [asyncio.ensure_future(rig.flush("a")) for _ in range(3)]
    await rig.reached(Operation.WRITE)
    await rig.delete("a")
    gate.set()
    results = await asyncio.gather(*flushes, return_exceptions=True)

    assert [type(result) for result in results] == [SessionNotFound] * 3
    await rig.check()
    assert rig.cache.ledger.below.used_bytes == 0


async def test_deleting_twice_at_once_finds_nothing_the_second_time(rig: MemoryRig) -> None:
    """One of two deletes wins; a session created again at once is not the one that goes."""
    await rig.create("a")
    results = await asyncio.gather(rig.delete("a"), rig.delete("a"), return_exceptions=True)

    assert results[0] is None
    assert isinstance(results[1], SessionNotFound)
    assert not rig.names()


async def test_nobody_can_write_into_a_session_that_is_being_deleted(rig: MemoryRig) -> None:
    """A session is unreachable from the moment its deletion was accepted."""
    await rig.create("a")
    deleting = asyncio.ensure_future(rig.delete("a"))
    await asyncio.sleep(0)
    with pytest.raises(SessionNotFound):
        await rig.reserve("a", 1)
    await deleting
    await rig.check()


async def test_writers_wait_for_room_that_is_coming(rig: MemoryRig, writer: Writer) -> None:
    """Many writers at once all get room, as long as what is in the arena may leave."""
    await rig.create("old")
    await rig.append("old", writer.make(6 * SEGMENT_TOKENS))
    for i in range(6):
        await rig.create(f"new{i}")
    tokens = [writer.make(SEGMENT_TOKENS) for _ in range(6)]
    gate = rig.ssd.hold(Operation.WRITE)
    first = asyncio.ensure_future(rig.append("new0", tokens[0]))
    await rig.reached(Operation.WRITE)
    others = [asyncio.ensure_future(rig.append(f"new{i}", tokens[i])) for i in range(1, 6)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *others)

    for i in range(6):
        assert await rig.read(f"new{i}") == expected(tokens[i])
    await rig.check()


async def test_a_writer_is_refused_when_all_of_the_arena_is_leased(rig: MemoryRig, writer: Writer) -> None:
    """Leases can take all the room; a writer is then told so at once and waits for nothing."""
    await rig.create("a")
    await rig.append("a", writer.make(6 * SEGMENT_TOKENS))
    lease = await rig.acquire("a")
    await rig.create("b")
    with pytest.raises(CapacityExceeded):
        await asyncio.wait_for(rig.append("b", writer.make(1)), 10)
    rig.cache.leases.release(lease.lease_id)
    await rig.append("b", writer.make(1))
    await rig.check()


async def test_a_victim_that_disappears_is_no_error_of_the_one_who_needs_room(
    rig: MemoryRig, writer: Writer
) -> None:
    """A writer never sees that another session was deleted while it made room."""
    await rig.create("victim")
    await rig.append("victim", writer.make(6 * SEGMENT_TOKENS))
    await rig.create("a")
    gate = rig.ssd.hold(Operation.WRITE)
    tokens = writer.make(3)
    appending = asyncio.ensure_future(rig.append("a", tokens))
    await rig.reached(Operation.WRITE)
    await rig.delete("victim")
    gate.set()
    await appending

    assert await rig.read("a") == expected(tokens)
    await rig.check()


async def test_a_cancelled_truncation_gives_its_slots_back(rig: MemoryRig, writer: Writer) -> None:
    """A caller that stops waiting leaves no unknown slot behind."""
    await rig.create("a")
    await rig.append("a", writer.make(200), is_durable=True)
    with rig.slow_commits():
        truncating = asyncio.ensure_future(rig.truncate("a", (0, 200)))
        await asyncio.sleep(0)
        truncating.cancel()
        await asyncio.wait([truncating])
    await rig.check()

    assert rig.cache.ledger.below.used_bytes == 0


async def test_sessions_that_take_each_others_room_are_flushed_one_by_one(
    rig: MemoryRig, writer: Writer
) -> None:
    """At the end, with too little SSD for all, as many as fit are there in full."""
    rig.ssd_segments = (2, 1)
    rig.__post_init__()
    await rig.open()
    tokens = {name: writer.make(2 * SEGMENT_TOKENS) for name in ("a", "b")}
    for name, written in tokens.items():
        await rig.create(name)
        await rig.append(name, written)
    await rig.restart()

    (left,) = rig.names()
    assert await rig.read(left) == expected(tokens[left])


async def test_a_flush_goes_round_a_path_that_fails_under_it(rig: MemoryRig, writer: Writer) -> None:
    """Rows on the failed path are written again on the other, and only then acknowledged."""
    await rig.create("a")
    tokens = writer.make(300)
    await rig.append("a", tokens)
    rig.ssd.fail(Operation.SYNC)
    await rig.flush("a")
    await rig.check()
    [closed] = rig.ssd.refusals
    await rig.append("a", more := writer.make(200), is_durable=True)
    on_ssd = {s.durable.path_index for s in rig.cache.ledger.segments() if s.durable}
    await rig.crash()

    assert on_ssd == {1 - closed}
    assert await rig.read("a") == expected(tokens + more)


async def test_what_was_staged_on_a_failed_path_is_written_elsewhere(rig: MemoryRig, writer: Writer) -> None:
    """Segments written ahead of a flush that can no longer be synced are not counted as written."""
    await rig.create("a")
    tokens = writer.make(300)
    await rig.append("a", tokens)
    session = rig.cache.ledger.find("acme", "a")
    rig.cache.staging.stage(session, session.segments[:4])
    await rig.cache.drain()
    rig.ssd.fence(0)
    await rig.flush("a")
    await rig.check()
    await rig.crash()

    assert await rig.read("a") == expected(tokens)


async def test_without_a_path_memory_goes_on(rig: MemoryRig, writer: Writer) -> None:
    """With every path fenced a flush is refused by name, evicts nobody, and rows in memory are read."""
    await rig.create("a")
    await rig.append("a", tokens := writer.make(100), is_durable=True)
    for index in (0, 1):
        rig.ssd.fence(index)
    await rig.create("b")
    await rig.append("b", others := writer.make(50))
    with pytest.raises(TierFailure, match=r"memory/0: no SSD path takes writes: fenced until a restart"):
        await rig.flush("b")
    await rig.check()

    assert rig.names() == {"a", "b"}
    assert await rig.read("a") == expected(tokens)
    assert await rig.read("b") == expected(others)


async def test_without_a_path_a_full_memory_evicts_the_coldest(rig: MemoryRig, writer: Writer) -> None:
    """While nothing can be flushed, memory is a cache of its own: pinned and leased sessions stay."""
    rig.ssd.fence(0)
    rig.ssd.fence(1)
    await rig.create("pinned", is_pinned=True)
    await rig.append("pinned", writer.make(64))
    await rig.create("leased")
    await rig.append("leased", writer.make(64))
    lease = await rig.acquire("leased")
    for name in ("cold", "warm", "new"):
        await rig.create(name)
        await rig.append(name, writer.make(128))
    await rig.check()
    rig.cache.leases.release(lease.lease_id)

    assert rig.names() == {"pinned", "leased", "warm", "new"}
    assert rig.cache.state.counters.evicted_session_count == 1


async def test_a_flush_evicts_no_more_than_it_needs(rig: MemoryRig, writer: Writer) -> None:
    """Many segments that lack room at once are content with the session whose place is enough for all."""
    rig.ssd_segments, rig.arena_segments = (12,), 12
    rig.__post_init__()
    await rig.open()
    for name in ("cold", "warm", "hot"):
        await rig.create(name)
        await rig.append(name, writer.make(4 * SEGMENT_TOKENS), is_durable=True)
    await rig.create("new")
    await rig.append("new", writer.make(4 * SEGMENT_TOKENS), is_durable=True)
    await rig.check()

    assert rig.names() == {"warm", "hot", "new"}


async def test_a_flush_waits_for_room_that_a_deletion_makes(rig: MemoryRig, writer: Writer) -> None:
    """While a session is on its way out nobody else goes for the room that it leaves."""
    rig.ssd_segments = (2,)
    rig.__post_init__()
    await rig.open()
    for name in ("cold", "gone"):
        await rig.create(name)
        await rig.append(name, writer.make(SEGMENT_TOKENS), is_durable=True)
    await rig.create("new")
    with rig.slow_commits():
        deleting = asyncio.ensure_future(rig.delete("gone"))
        await asyncio.sleep(0)
        appending = asyncio.ensure_future(rig.append("new", writer.make(5), is_durable=True))
        for _ in range(5):
            await asyncio.sleep(0)
    await asyncio.gather(deleting, appending)
    await rig.check()

    assert rig.names() == {"cold", "new"}


async def test_writers_without_a_path_evict_no_more_than_they_need(rig: MemoryRig, writer: Writer) -> None:
    """Several that lack room at once wait for one to go before they look for the next."""
    rig.ssd.fence(0)
    rig.ssd.fence(1)
    for name, segment_count in (("cold", 3), ("warm", 3)):
        await rig.create(name)
        await rig.append(name, writer.make(segment_count * SEGMENT_TOKENS))
    news = ("new0", "new1", "new2")
    for name in news:
        await rig.create(name)
    with rig.slow_commits():
        appending = [asyncio.ensure_future(rig.append(name, writer.make(5))) for name in news]
        await asyncio.sleep(0)
    await asyncio.gather(*appending)
    await rig.check()

    assert rig.names() == {"warm", *news}


@pytest.mark.parametrize("is_path", [False, True])
async def test_streams_go_on_where_writes_are_refused(
    rig: MemoryRig, writer: Writer, *, is_path: bool
) -> None:
    """Rows on SSD are read though memory is full of segments that can neither be written nor leave."""
    await rig.create("a")
    await rig.append("a", tokens := writer.make(100))
    await rig.demote("a")
    await rig.create("pinned", is_pinned=True)
    await rig.append("pinned", writer.make(6 * SEGMENT_TOKENS))
    if is_path:
        rig.ssd.fence(0)
        rig.ssd.fence(1)
    else:
        rig.metadata.fail("no")

    assert await rig.read("a") == expected(tokens)
    await rig.check()


async def test_full_metadata_refuses_before_anything_changes(rig: MemoryRig, writer: Writer) -> None:
    """Without room for records nothing that grows is begun; reads, deletion and truncation go on."""
    await rig.create("a")
    await rig.create("b")
    tokens = writer.make(200)
    await rig.append("a", tokens, is_durable=True)
    rig.metadata.is_full = True
    await rig.append("a", more := writer.make(100))
    for call in (rig.create("c"), rig.flush("a"), rig.fork("a", "c"), rig.demote("a")):
        with pytest.raises(CapacityExceeded, match="metadata"):
            await call
    await rig.delete("b")
    assert await rig.read("a") == expected(tokens + more)
    await rig.truncate("a", (0, 10))
    await rig.check()

    rig.metadata.is_full = False
    await rig.flush("a")
    await rig.crash()
    assert await rig.read("a") == expected((tokens + more)[10:])


async def test_refused_metadata_changes_nothing_in_memory(rig: MemoryRig, writer: Writer) -> None:
    """Once records cannot be kept, a change is refused before it is made, and nobody is evicted for it."""
    await rig.create("a")
    tokens = writer.make(200)
    await rig.append("a", tokens)
    rig.metadata.fail("no")
    for call in (rig.truncate("a", (0, 10)), rig.delete("a"), rig.flush("a"), rig.create("b")):
        with pytest.raises(TierFailure):
            await call

    assert rig.names() == {"a"}
    assert await rig.read("a") == expected(tokens)
