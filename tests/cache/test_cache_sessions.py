"""Sessions: names, times, room for many, and what upkeep does without being asked."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
from cache_rig import MODEL, SEGMENT_TOKENS, SLOT_BYTES, TENANT, DiskRig, MemoryRig, Token, Writer, expected
from fakes import Operation

from ctxcache.cache.reservations import Reservation
from ctxcache.core.ledger.session import Expiration, Session
from ctxcache.errors import (
    CapacityExceeded,
    GenerationMismatch,
    PositionsNotRelocatable,
    SessionAlreadyExists,
    SessionNotFound,
    TokenRangeOutOfBounds,
    TooManyRequests,
    WriteInProgress,
)
from ctxcache.format.streams import TOKENS
from ctxcache.server.upkeep import Upkeep
from ctxcache.storage.metadata.base import Changes


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


async def page(rig: MemoryRig, after: str, limit: int, *, model_id: str = "") -> list[str]:
    """Names on a page."""
    found: list[str] = []
    async for view in rig.cache.sessions.list(TENANT, after=after, model_id=model_id):
        if len(found) == limit:
            break
        found.append(view.name.removeprefix("sessions/"))
    return found


async def test_sessions_are_listed_by_name_page_by_page(rig: MemoryRig) -> None:
    """Every session appears once, in order, whatever order they were created in, and gone ones do not."""
    for name in ("c", "a", "e", "B", "d", "b"):
        await rig.create(name)
    await rig.delete("e")

    assert [await page(rig, *where) for where in (("", 2), ("a", 2), ("c", 9))] == [
        ["B", "a"],
        ["b", "c"],
        ["d"],
    ]
    assert await page(rig, "", 9, model_id=MODEL.model_id) == ["B", "a", "b", "c", "d"]
    assert await page(rig, "", 9, model_id="other") == []
    assert [view async for view in rig.cache.sessions.list("other", after="", model_id="")] == []


async def test_a_name_can_be_used_again_once_its_session_is_over(rig: MemoryRig, writer: Writer) -> None:
    """An expired session is replaced by a new one, which has nothing of it."""
    first = await rig.create("a", ttl_s=10)
    await rig.append("a", writer.make(100), is_durable=True)
    with pytest.raises(SessionAlreadyExists):
        await rig.create("a")
    rig.clock.advance(seconds=10)
    second = await rig.create("a")
    await rig.check()

    assert first.uid != second.uid
    assert second.token_count == rig.cache.ledger.below.used_bytes == 0
    await rig.crash()
    assert rig.token_count("a") == 0
    assert rig.cache.ledger.session_count == 1


async def test_a_name_that_was_given_up_is_its_new_sessions_after_a_crash(rig: MemoryRig) -> None:
    """The record of a session that was given up goes with the new one's commit: never two under one name."""
    await rig.create("a")
    rig.cache.sessions._departures.remove_unrecorded(rig.cache.ledger.find(TENANT, "a"))
    made = await rig.create("a")

    await rig.crash()

    assert rig.cache.ledger.session_count == 1
    assert rig.cache.ledger.find(TENANT, "a").view().uid == made.uid


async def test_a_name_that_is_deleted_and_used_again_in_one_turn_has_one_record(
    rig: MemoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever commits a crash leaves of those in order, no two sessions have the name."""
    old = await rig.create("a")
    commit, commits = rig.metadata.commit, list[Changes]()

    def noting(changes: Changes, *, is_durable: bool) -> Coroutine[Any, Any, None]:
        commits.append(changes)
        return commit(changes, is_durable=is_durable)

    monkeypatch.setattr(rig.metadata, "commit", noting)
    sessions = rig.cache.sessions
    _, made, _ = await asyncio.gather(
        sessions.delete(TENANT, "a", None), rig.create("a"), sessions.save_access_times()
    )

    there = {old.uid}
    for changes in commits:
        there |= {record.uid for record in changes.sessions}
        there -= {*changes.deleted_session_uids}
        assert len(there) <= 1
    assert there == {made.uid}


async def test_sessions_and_models_are_bounded(rig: MemoryRig) -> None:
    """Creating without end is refused, also by fork."""
    rig.limits = replace(rig.limits, session_count=2, model_count=1)
    await rig.restart()
    await rig.create("a")
    await rig.create("b")
    for attempt in (rig.create("c"), rig.fork("a", "c"), rig.cache.models.register("other", MODEL)):
        with pytest.raises(TooManyRequests):
            await attempt
    await rig.check()


@pytest.mark.parametrize("step_s", [-7200, 7200])
async def test_a_session_lives_as_long_whoever_sets_the_clock(rig: MemoryRig, step_s: int) -> None:
    """Two hours forwards end nobody, two hours back keep nobody."""
    await rig.create("a", ttl_s=60)
    rig.clock.jump(to_ns=rig.clock.now_ns() + step_s * 10**9)
    rig.clock.advance(seconds=59)
    await rig.cache.sessions.expire_due()
    is_there = rig.names()
    rig.clock.advance(seconds=1)
    await rig.cache.sessions.expire_due()

    assert is_there == {"a"}
    assert not rig.cache.ledger.session_count


async def test_touching_a_session_for_ever_takes_no_room(rig: MemoryRig) -> None:
    """Expiry keeps a bounded number of entries per session."""
    await rig.create("a")
    for _ in range(500):
        rig.clock.advance(seconds=1)
        await rig.cache.sessions.update(TENANT, "a", expiration=Expiration(10**18), is_pinned=None)
        await rig.create("b")
        await rig.delete("b")

    assert rig.cache.ledger.expiry.entry_count < 100


async def test_a_lookup_changes_nothing(rig: MemoryRig, writer: Writer) -> None:
    """Asking does not keep a session alive, put it behind others or bring anything into DRAM."""
    await rig.create("a", ttl_s=10)
    await rig.append("a", writer.make(100), is_durable=True)
    await rig.demote("a")
    await rig.create("b", ttl_s=100)
    before = rig.cache.sessions.get(TENANT, "a")
    found = rig.cache.sessions.lookup(TENANT, "a", MODEL.fingerprint())
    order = sorted(
        (s.uid for s in rig.cache.ledger.sessions()), key=lambda uid: rig.cache.placement.rank(uid) or ()
    )

    assert (found.reason, found.dram_token_count, found.layout) == ("", 0, before.layout)
    assert (found.generation, found.token_count, found.expire_time_ns) == (
        before.generation,
        before.token_count,
        before.expire_time_ns,
    )
    assert [rig.cache.ledger.names.by_uid[uid].session_id for uid in order] == ["a", "b"]
    rig.clock.advance(seconds=10)
    missed = rig.cache.sessions.lookup(TENANT, "a", MODEL.fingerprint())
    assert (missed.reason, missed.layout) == ("SESSION_NOT_FOUND", None)
    assert rig.cache.sessions.lookup(TENANT, "b", bytes(32)).reason == "MODEL_FINGERPRINT_MISMATCH"
    assert rig.cache.sessions.lookup(TENANT, "b", MODEL.fingerprint()).reason == "EMPTY"


async def test_a_change_that_was_meant_for_another_generation_is_refused(
    rig: MemoryRig, writer: Writer
) -> None:
    """Truncation, fork and deletion change nothing when the session has changed since the caller saw it."""
    await rig.create("a")
    tokens = writer.make(20)
    seen = (await rig.append("a", tokens[:10])).generation
    await rig.append("a", tokens[10:])
    sessions = rig.cache.sessions
    for change in (
        sessions.drop(TENANT, "a", seen, ((0, 5),)),
        sessions.keep_first(TENANT, "a", seen, 5),
        sessions.fork(TENANT, "a", "b", seen, token_count=None, expiration=None),
        sessions.delete(TENANT, "a", seen),
    ):
        with pytest.raises(GenerationMismatch):
            await change

    assert rig.names() == {"a"}
    assert await rig.read("a") == expected(tokens)


async def test_tokens_appended_after_a_truncation_are_read_where_they_are(
    disk_rig: DiskRig, writer: Writer
) -> None:
    """Whichever were dropped, in whichever range they are read, before a restart and after it."""
    dropped = {"middle": (10, 30), "newest": (70, 100), "first": (0, 64)}
    tokens: dict[str, list[Token]] = {}
    for name, (begin, end) in dropped.items():
        await disk_rig.create(name)
        written, appended = writer.make(100), writer.make(150)
        await disk_rig.append(name, written)
        await disk_rig.truncate(name, (begin, end))
        await disk_rig.append(name, appended, is_durable=True)
        tokens[name] = [*written[:begin], *written[end:], *appended]

    for is_again in (False, True):
        if is_again:
            await disk_rig.restart()
        for name, expected_tokens in tokens.items():
            for begin in range(0, len(expected_tokens), 40):
                end = min(begin + 55, len(expected_tokens))
                assert await disk_rig.read(name, begin, end) == expected(expected_tokens[begin:end])


async def test_truncation_is_checked_before_anything_changes(rig: MemoryRig, writer: Writer) -> None:
    """A range that is not there drops nothing, also beside one that is."""
    await rig.create("a")
    tokens = writer.make(100)
    await rig.append("a", tokens)
    generation = rig.cache.sessions.get(TENANT, "a").generation
    for dropped in (((0, 1), (90, 101)), ((-1, 5),), ((5, 4),)):
        with pytest.raises(TokenRangeOutOfBounds):
            await rig.truncate("a", *dropped)
    with pytest.raises(TokenRangeOutOfBounds):
        await rig.cache.sessions.keep_first(TENANT, "a", None, 101)
    await rig.truncate("a", (7, 7))

    assert rig.cache.sessions.get(TENANT, "a").generation == generation
    assert await rig.read("a") == expected(tokens)


async def test_keeping_recent_tokens_keeps_the_sinks(rig: MemoryRig, writer: Writer) -> None:
    """The first few and the newest stay; keeping as many as there are changes nothing."""
    await rig.create("a")
    tokens = writer.make(200)
    await rig.append("a", tokens)
    keep = rig.cache.sessions.keep_recent
    same = await keep(TENANT, "a", None, recent_count=196, sink_count=4)
    view = await keep(TENANT, "a", None, recent_count=50, sink_count=4)

    assert (view.generation, view.token_count) == (same.generation + 1, 54)
    assert await rig.read("a") == expected(tokens[:4] + tokens[150:])


async def test_absolute_positions_lose_only_their_end(rig: MemoryRig, writer: Writer) -> None:
    """Where state depends on positions, tokens before kept ones stay."""
    fixed = type(MODEL)(**{name: getattr(MODEL, name) for name in MODEL.__slots__} | {
        "model_id": "fixed", "is_relocatable": False,
    })  # fmt: skip
    await rig.cache.models.register(TENANT, fixed)
    await rig.cache.sessions.create(
        TENANT, "a", model_id="fixed", layout=(), expiration=None, is_pinned=False
    )
    reservation = await rig.cache.appends.reserve(
        TENANT, "a", fingerprint=fixed.fingerprint(), write_offset=0, generation=None, token_count=10
    )
    rig.cache.appends.place(reservation, TOKENS, 0, memoryview(bytes(40)))
    await rig.cache.appends.commit(reservation, 10, is_durable=False, keep_open=False)
    with pytest.raises(PositionsNotRelocatable):
        await rig.truncate("a", (2, 5))

    assert (await rig.truncate("a", (8, 10), (5, 9))).token_count == 5


async def test_a_session_ends_before_the_first_of_its_bad_segments(rig: MemoryRig, writer: Writer) -> None:
    """Found together, or each by itself: what is behind a gap is of no use, to forks neither."""
    await rig.create("a")
    tokens = writer.make(4 * SEGMENT_TOKENS)
    await rig.append("a", tokens, is_durable=True)
    await rig.fork("a", "fork")
    _, second, _, fourth = rig.cache.ledger.find(TENANT, "a").segments
    await rig.cache.mending.quarantine({fourth, second})

    for name in ("a", "fork"):
        assert await rig.read(name) == expected(tokens[:SEGMENT_TOKENS])
    assert rig.cache.state.counters.corrupt_segment_count == 2


async def test_pinned_sessions_are_never_evicted(rig: MemoryRig, writer: Writer) -> None:
    """When all that is on SSD is pinned, a flush is refused; once it is not, the coldest goes."""
    rig.ssd_segments = (2, 2)
    rig.__post_init__()
    await rig.open()
    for name in ("a", "b"):
        await rig.create(name, is_pinned=True)
        await rig.append(name, writer.make(2 * SEGMENT_TOKENS), is_durable=True)
    await rig.create("c")
    tokens = writer.make(SEGMENT_TOKENS)
    with pytest.raises(CapacityExceeded):
        await rig.append("c", tokens, is_durable=True)
    await rig.check()

    assert rig.token_count("c") == SEGMENT_TOKENS
    await rig.cache.sessions.update(TENANT, "b", expiration=None, is_pinned=False)
    await rig.flush("c")
    assert rig.names() == {"a", "c"}
    assert rig.cache.state.counters.evicted_session_count == 1


async def test_a_session_being_written_is_not_evicted(rig: MemoryRig, writer: Writer) -> None:
    """Eviction takes nothing from under a writer."""
    rig.ssd_segments = (1, 1)
    rig.__post_init__()
    await rig.open()
    await rig.create("a")
    await rig.append("a", writer.make(2 * SEGMENT_TOKENS), is_durable=True)
    reservation = await rig.reserve("a", 1)
    await rig.create("b")
    with pytest.raises(CapacityExceeded):
        await rig.append("b", writer.make(1), is_durable=True)
    rig.cache.appends.release(reservation)
    await rig.flush("b")
    await rig.check()

    assert rig.names() == {"b"}


async def test_an_expired_session_waits_for_its_writer(rig: MemoryRig) -> None:
    """The session cannot be reached, and its room comes back when the writer is done."""
    await rig.create("a", ttl_s=10)
    reservation = await rig.reserve("a", 1)
    rig.clock.advance(seconds=10)
    await rig.cache.sessions.expire_due()
    with pytest.raises(SessionNotFound):
        rig.token_count("a")
    rig.cache.appends.release(reservation)
    await rig.cache.sessions.expire_due()
    await rig.check()

    assert not rig.cache.ledger.session_count
    assert rig.cache.state.counters.expired_session_count == 1


async def test_a_fork_that_has_to_wait_is_checked_again(rig: MemoryRig, writer: Writer) -> None:
    """A change made while the source became durable is not overlooked."""
    await rig.create("a")
    await rig.append("a", writer.make(10))
    gate = rig.ssd.hold(Operation.WRITE)
    forking = asyncio.ensure_future(rig.fork("a", "b"))
    await rig.reached(Operation.WRITE)
    reservation = await rig.reserve("a", 1)
    gate.set()
    with pytest.raises(WriteInProgress):
        await forking
    rig.cache.appends.release(reservation)
    await rig.check()

    assert rig.names() == {"a"}


async def test_a_fork_does_not_wait_for_a_writer_that_goes_on(
    rig: MemoryRig, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that grows faster than it can be made durable is refused, not waited for."""
    await rig.create("a")
    await rig.append("a", writer.make(10))
    flush, open_now = rig.cache.flushing.flush, list[Reservation]()

    async def flush_and_write(session: Session) -> None:
        await flush(session)
        if not open_now:
            open_now.append(await rig.reserve("a", 50))
            rig.place(open_now[0], session.token_count, writer.make(50))
        await rig.cache.appends.commit(open_now[0], session.token_count + 1, is_durable=False, keep_open=True)

    monkeypatch.setattr(rig.cache.flushing, "flush", flush_and_write)
    with pytest.raises(WriteInProgress):
        await asyncio.wait_for(rig.fork("a", "b"), 10)


async def test_forks_and_their_source_go_on_independently(rig: MemoryRig, writer: Writer) -> None:
    """Each appends, drops and ends without a trace in the other."""
    await rig.create("a")
    tokens = writer.make(100)
    await rig.append("a", tokens)
    await rig.fork("a", "b", 80)
    mine, theirs = writer.make(70), writer.make(70)
    await rig.append("a", mine)
    await rig.append("b", theirs)
    await rig.truncate("b", (0, 10))
    await rig.delete("a")
    await rig.check()
    await rig.flush("b")
    await rig.crash()

    assert await rig.read("b") == expected([*tokens[10:80], *theirs])


# -- upkeep ---------------------------------------------------------------------------------------------


async def test_upkeep_writes_full_segments_and_leaves_growing_ones(rig: MemoryRig, writer: Writer) -> None:
    """A tail that still grows would be written again and again."""
    for name, count in (("full", SEGMENT_TOKENS), ("growing", 10)):
        await rig.create(name)
        await rig.append(name, writer.make(count))
    await Upkeep(rig.cache).turn()

    names = ("full", "growing")
    assert [rig.cache.sessions.get(TENANT, name).durable_token_count for name in names] == [SEGMENT_TOKENS, 0]


async def test_upkeep_goes_on_past_a_session_it_cannot_write(rig: MemoryRig, writer: Writer) -> None:
    """One refused write keeps no other session from being written."""
    for name in ("a", "b", "c"):
        await rig.create(name)
        await rig.append(name, writer.make(SEGMENT_TOKENS))
    rig.ssd.fail(Operation.WRITE)
    await Upkeep(rig.cache).turn()
    sessions = list(rig.cache.ledger.sessions())
    durable = [session.durable_end for session in sessions]
    await Upkeep(rig.cache).turn()

    assert sorted(durable) == [0, SEGMENT_TOKENS, SEGMENT_TOKENS]
    assert [session.durable_end for session in sessions] == [SEGMENT_TOKENS] * 3


async def test_upkeep_keeps_room_free(rig: MemoryRig, writer: Writer) -> None:
    """Something of the arena is free after a turn, so that the next writer need not wait."""
    await rig.create("a")
    await rig.append("a", writer.make(6 * SEGMENT_TOKENS))
    assert rig.cache.ledger.memory.free_bytes < SLOT_BYTES
    await Upkeep(rig.cache).turn()

    assert rig.cache.ledger.memory.free_bytes >= SLOT_BYTES


async def test_a_slow_device_delays_no_deadline(rig: MemoryRig, writer: Writer) -> None:
    """Sessions expire and reservations end while a flush is stuck."""
    await rig.create("slow")
    await rig.append("slow", writer.make(SEGMENT_TOKENS))
    await rig.create("a", ttl_s=10)
    gate = rig.ssd.hold(Operation.WRITE)
    running = asyncio.ensure_future(Upkeep(rig.cache, interval_s=0).run())
    await rig.reached(Operation.WRITE)
    rig.clock.advance(seconds=10)
    while rig.cache.ledger.session_count == 2:  # noqa: ASYNC110  # until upkeep comes round
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    gate.set()

    assert running.cancelled()
    await rig.check()


async def test_records_that_are_read_again_delay_no_deadline(
    rig: MemoryRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their device may hang anew while RocksDB replays its log: sessions expire meanwhile."""
    asked = asyncio.Event()

    async def reopen() -> bool:
        asked.set()
        return await asyncio.Future()

    await rig.create("a", ttl_s=10)
    monkeypatch.setattr(rig.metadata, "reopen", reopen)
    running = asyncio.ensure_future(Upkeep(rig.cache, interval_s=0).run())
    async with asyncio.timeout(60):
        await asked.wait()
        rig.clock.advance(seconds=10)
        while rig.cache.ledger.session_count:  # noqa: ASYNC110  # until upkeep comes round
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])

    assert running.cancelled()


async def test_upkeep_survives_its_own_bugs(rig: MemoryRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that breaks is logged; the others go on."""
    await rig.create("a", ttl_s=10)
    monkeypatch.setattr(rig.cache.appends, "end_overdue", lambda: 1 // 0)
    rig.clock.advance(seconds=10)
    await Upkeep(rig.cache).turn()

    assert not rig.cache.ledger.session_count
