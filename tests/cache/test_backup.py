"""Backups of a cache: every session as it was durable at one moment, whatever goes on meanwhile."""

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from cache_rig import (
    LAYOUT,
    MODEL,
    SEGMENT_TOKENS,
    SLOT_BYTES,
    STREAMS,
    TENANT,
    DiskRig,
    MemoryRig,
    Rig,
    Token,
    Writer,
    expected,
)
from fakes import Operation

from ctxcache.archive import backup
from ctxcache.archive.backup import Backup, Copied
from ctxcache.archive.contents import STRETCH, TOTALS, ArchivedModel, ArchivedSession, Origin
from ctxcache.archive.frames import (
    END,
    MADE,
    ROWS,
    SAME,
    SESSION,
    VOID,
    ArchiveFrameReader,
    FrameWriter,
    source,
)
from ctxcache.archive.frames import MODEL as MODEL_FRAME
from ctxcache.archive.laying_out import Restored, lay_out
from ctxcache.archive.reader import survey
from ctxcache.errors import TierFailure, TooManyRequests

STORMS = 12
STEPS = 60


@pytest.fixture(autouse=True)
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame is a message, so that there is something between them."""
    monkeypatch.setattr(backup, "AT_ONCE_BYTES", 1 << 10)


def told(_: str, done: int, total: int) -> None:
    """How far it is."""
    assert 0 <= done <= total


async def backed_up(
    rig: Rig,
    path: Path,
    between: Callable[[], Awaitable[None]] | None = None,
    making: Backup | None = None,
) -> Copied:
    """Write a backup, with something done after each of its messages; what was said of it last."""
    said = []
    with path.open("wb") as file:
        async for data, copied in (making or Backup(rig.cache)).run("a test"):
            file.write(data)
            said.append(copied)
            assert not any(segment.hold_count for segment in rig.cache.ledger.segments())
            if between:
                await between()
    return said[-1]


def laid_out(path: Path, directory: Path, rig: Rig) -> Restored:
    """Make a store of it."""
    with source(str(path)) as opened:
        return lay_out(
            opened,
            directory,
            [directory / "ssd0", directory / "ssd1"],
            ssd_size_bytes=64 * SLOT_BYTES,
            now_ns=rig.clock.now_ns(),
            created_by="a test",
            step=told,
        )


async def opened(directory: Path, rig: Rig) -> DiskRig:
    """A cache over what was laid out."""
    other = DiskRig(directory, clock=rig.clock)
    await other.open()
    return other


@pytest.fixture
async def restore(rig: MemoryRig, tmp_path: Path) -> AsyncIterator[Callable[[Path], Awaitable[DiskRig]]]:
    """A function that opens a cache on a backup, with its books checked at the end."""
    made: list[DiskRig] = []

    async def restore(path: Path) -> DiskRig:
        directory = tmp_path / f"restored-{len(made)}"
        laid_out(path, directory, rig)
        made.append(await opened(directory, rig))
        return made[-1]

    yield restore
    for other in made:
        await other.check()
        await other.close()


Restore = Callable[[Path], Awaitable[DiskRig]]


async def stored(rig: Rig, name: str, tokens: list[Token]) -> None:
    """A session that SSD has."""
    await rig.create(name)
    await rig.append(name, tokens, is_durable=True)


async def test_all_of_it_comes_back(rig: MemoryRig, tmp_path: Path, restore: Restore) -> None:
    """Rows, truncations, forks, pins and the instant of expiry; sessions without tokens too."""
    writer = Writer(1)
    tokens, more = writer.make(150), writer.make(70)
    await stored(rig, "a", tokens)
    await rig.truncate("a", (4, 80))
    await rig.fork("a", "b", 40)
    await rig.append("a", more, is_durable=True)
    await rig.create("empty", is_pinned=True)
    before = {name: rig.cache.sessions.get(TENANT, name) for name in ("a", "b", "empty")}
    copied = await backed_up(rig, tmp_path / "it")
    other = await restore(tmp_path / "it")
    after = {name: other.cache.sessions.get(TENANT, name) for name in ("a", "b", "empty")}
    kept = tokens[:4] + tokens[80:]

    assert await other.read("a") == expected(kept + more)
    assert await other.read("b") == expected(kept[:40])
    assert other.names() == {"a", "b", "empty"}
    for name, view in before.items():
        for fact in ("uid", "expire_time_ns", "ttl_ns", "is_pinned", "create_time_ns", "token_count"):
            assert getattr(after[name], fact) == getattr(view, fact), (name, fact)
    assert (copied.session_count, copied.left_out_session_count, copied.unwritten_token_count) == (3, 0, 0)
    # Segments that forks share are in the backup once.
    assert copied.segment_count == rig.cache.ledger.segment_count
    assert copied.bytes == copied.total_bytes


async def test_a_segment_that_is_longer_than_a_frame_comes_back(
    rig: MemoryRig, tmp_path: Path, restore: Restore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are in several frames, each of which forks share."""
    monkeypatch.setattr(backup, "ROWS_LIMIT_BYTES", 20 * LAYOUT.token_bytes)
    tokens, more = Writer(1).make(150), Writer(2).make(30)
    await stored(rig, "a", tokens)
    await rig.fork("a", "b", 50)
    await rig.append("b", more, is_durable=True)
    copied = await backed_up(rig, tmp_path / "it")
    other = await restore(tmp_path / "it")
    with source(str(tmp_path / "it")) as opened_file:
        tags = [frame.tag for frame in ArchiveFrameReader(opened_file).frames()]

    assert await other.read("a") == expected(tokens)
    assert await other.read("b") == expected(tokens[:50] + more)
    assert (tags.count(ROWS), tags.count(SAME)) == (4 + 4 + 2 + 2, 3)
    assert copied.segment_count == rig.cache.ledger.segment_count


async def test_what_only_memory_has_is_counted(rig: MemoryRig, tmp_path: Path, restore: Restore) -> None:
    """It is not in it: a backup is what a crash at that moment would have left."""
    writer = Writer(1)
    tokens = writer.make(100)
    await stored(rig, "a", tokens)
    await rig.append("a", writer.make(30))
    copied = await backed_up(rig, tmp_path / "it")
    other = await restore(tmp_path / "it")

    assert await other.read("a") == expected(tokens)
    assert (copied.token_count, copied.unwritten_token_count) == (100, 30)


async def test_generations_go_on_where_the_source_will_not_come(rig: MemoryRig, tmp_path: Path) -> None:
    """Nor another store of the same backup: a generation never stands for two contents."""
    await stored(rig, "a", Writer(1).make(10))
    await backed_up(rig, tmp_path / "it")
    runs = []
    for name in ("one", "two"):
        laid_out(tmp_path / "it", tmp_path / name, rig)
        runs.append((tmp_path / name / "RUNS").read_text())
        runs.append((tmp_path / name / "FORMAT").read_text())
    crash_counts = [int(text.split('"crash_count": ')[1].split(",")[0]) for text in runs[::2]]

    assert len(set(runs)) == 4
    assert min(crash_counts) >= 1 << 16


async def test_what_went_meanwhile_is_not_in_it_and_keeps_no_room(
    rig: MemoryRig, tmp_path: Path, restore: Restore
) -> None:
    """Between two messages nothing is held: what is deleted is free at once, and what comes is left out."""
    writer = Writer(1)
    for name in ("first", "gone", "last"):
        await stored(rig, name, writer.make(3 * SEGMENT_TOKENS))
    await rig.create("short", ttl_s=5)
    deleted = asyncio.Event()

    async def between() -> None:
        if not deleted.is_set():
            deleted.set()
            before = rig.cache.ledger.below.free_bytes
            await rig.delete("gone")
            assert rig.cache.ledger.below.free_bytes == before + 3 * SLOT_BYTES
            await rig.create("new")
            rig.clock.advance(seconds=6)

    copied = await backed_up(rig, tmp_path / "it", between)
    other = await restore(tmp_path / "it")

    assert other.names() == {"first", "last"}
    assert copied.left_out_session_count == 0


async def test_what_has_expired_since_is_left_out(rig: MemoryRig, tmp_path: Path) -> None:
    """Its time is absolute: a restore does not bring it back, nor its bytes."""
    await stored(rig, "long", Writer(1).make(10))
    await rig.create("short", ttl_s=5)
    await rig.append("short", Writer(2).make(200), is_durable=True)
    await backed_up(rig, tmp_path / "it")
    rig.clock.advance(seconds=6)
    found = laid_out(tmp_path / "it", tmp_path / "restored", rig)

    assert (found.session_count, found.expired_session_count, found.segment_count) == (1, 1, 1)


async def test_a_tail_is_read_while_no_flush_moves_it(
    rig: MemoryRig, tmp_path: Path, restore: Restore
) -> None:
    """A flush waits for the read of one segment, and not for whoever takes the bytes."""
    writer = Writer(1)
    tokens, more = writer.make(10), writer.make(10)
    await stored(rig, "a", tokens)
    gate = rig.ssd.hold(Operation.READ)
    made = asyncio.create_task(backed_up(rig, tmp_path / "it"))
    await rig.reached(Operation.READ)
    await rig.append("a", more)
    flushed = asyncio.create_task(rig.flush("a"))
    await asyncio.sleep(0)
    writes = rig.ssd.counts[Operation.WRITE]
    gate.set()
    await asyncio.gather(made, flushed)
    other = await restore(tmp_path / "it")

    assert writes == 1
    assert await other.read("a") == expected(tokens)
    assert await rig.read("a") == expected(tokens + more)


async def test_a_tail_that_has_grown_is_copied_again(
    rig: MemoryRig, tmp_path: Path, restore: Restore
) -> None:
    """Where the session lost a segment that was to come, and is begun anew.

    Rows that are in the file are not written again.
    """
    writer = Writer(1)
    tokens, more = writer.make(2 * SEGMENT_TOKENS + 10), writer.make(5)
    await stored(rig, "a", tokens)
    messages = iter(range(100))

    async def between() -> None:
        # While the first segment's rows are on their way.
        if next(messages) == 1:
            await rig.truncate("a", (SEGMENT_TOKENS, 2 * SEGMENT_TOKENS))
            await rig.append("a", more, is_durable=True)

    copied = await backed_up(rig, tmp_path / "it", between)
    other = await restore(tmp_path / "it")
    with source(str(tmp_path / "it")) as opened_file:
        tags = [frame.tag for frame in ArchiveFrameReader(opened_file).frames()]

    assert await other.read("a") == expected(tokens[:SEGMENT_TOKENS] + tokens[2 * SEGMENT_TOKENS :] + more)
    assert tags == [MADE, MODEL_FRAME, SESSION, ROWS, VOID, SESSION, SAME, ROWS, END]
    assert copied.segment_count == 2


async def test_what_is_bad_is_cut_as_a_read_would(tmp_path: Path) -> None:
    """The backup has what is before it."""
    rig = DiskRig(tmp_path / "source")
    await rig.open()
    tokens = Writer(1).make(4 * SEGMENT_TOKENS)
    await stored(rig, "a", tokens)
    bad = rig.cache.ledger.find(TENANT, "a").segments[2]
    assert bad.durable is not None
    with rig.segments_file(bad.durable.path_index).open("r+b") as file:
        file.seek(bad.durable.offset_bytes + LAYOUT.offsets[1])
        file.write(b"\xff")
    copied = await backed_up(rig, tmp_path / "it")
    laid_out(tmp_path / "it", tmp_path / "restored", rig)
    other = await opened(tmp_path / "restored", rig)
    rows = await other.read("a")
    await rig.check()
    await other.check()
    await rig.close()
    await other.close()

    assert rows == expected(tokens[: 2 * SEGMENT_TOKENS])
    assert copied.session_count == 1
    assert len(rig.cache.ledger.below.quarantined) == 1


async def test_who_is_cut_faster_than_copied_is_left_out_and_counted(
    rig: MemoryRig, tmp_path: Path, restore: Restore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in it."""
    monkeypatch.setattr(backup, "PASSES", 1)
    writer = Writer(1)
    for name in ("a", "b"):
        await stored(rig, name, writer.make(5 * SEGMENT_TOKENS))

    async def between() -> None:
        if rig.token_count("a") > SEGMENT_TOKENS:
            await rig.truncate("a", (0, SEGMENT_TOKENS))

    copied = await backed_up(rig, tmp_path / "it", between)
    other = await restore(tmp_path / "it")

    assert other.names() == {"b"}
    assert copied.left_out_session_count == 1


async def test_one_at_a_time_and_its_end_leaves_nothing(rig: MemoryRig, tmp_path: Path) -> None:
    """A reader that stops ends the backup; a device that refuses does too."""
    await stored(rig, "a", Writer(1).make(3 * SEGMENT_TOKENS))
    making = Backup(rig.cache)
    async with aclosing(making.run("a test")) as pieces:
        await anext(pieces)
        with pytest.raises(TooManyRequests):
            await anext(making.run("a test"))
        await anext(pieces)
    rig.ssd.fail(Operation.READ)
    with pytest.raises(TierFailure):
        await backed_up(rig, tmp_path / "failed", making=making)
    await rig.check()
    copied = await backed_up(rig, tmp_path / "it", making=making)

    assert copied.session_count == 1
    with source(str(tmp_path / "it")) as opened:
        assert survey(opened, lambda _: None).origin.created_by == "a test"


async def test_an_archive_of_some_sessions_makes_a_store_too(
    rig: MemoryRig, tmp_path: Path, restore: Restore
) -> None:
    """Its frames are longer than segments: they are cut, and only segments with live tokens are laid out."""
    path, tokens = tmp_path / "archive", Writer(1).make(200)
    model, rows = ArchivedModel(TENANT, MODEL, 0), expected(tokens)
    one = ArchivedSession(
        session_id="a",
        model=model,
        layout=STREAMS,
        uid=b"u" * 16,
        generation=(7 << 32) + 5,
        live=((0, 3), (130, 200)),
        log_end=200,
        create_time_ns=1,
        access_time_ns=2,
        expire_time_ns=rig.clock.now_ns() + 10**12,
        ttl_ns=0,
        is_pinned=True,
    )
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    writer = FrameWriter(fd, str(path), bytes(16), 0)
    writer.write(MADE, Origin("a test", 2).encode())
    writer.write(MODEL_FRAME, model.encode())
    writer.write(SESSION, one.encode(0))
    writer.write(ROWS, STRETCH.pack(0, 200), *(rows[stream] for stream in STREAMS))
    writer.write(END, TOTALS.pack(1, one.token_count))
    os.close(fd)
    found = laid_out(path, tmp_path / "restored-0", rig)
    other = await opened(tmp_path / "restored-0", rig)
    read, session = await other.read("a"), other.cache.ledger.find(TENANT, "a")
    await other.check()
    await other.close()
    crash_count = json.loads((tmp_path / "restored-0" / "RUNS").read_text())["crash_count"]

    assert read == expected(tokens[:3] + tokens[130:])
    assert (found.segment_count, found.token_count, found.created_by) == (3, 73, "a test")
    assert (session.uid, session.log_end, session.is_pinned) == (one.uid, 200, True)
    assert crash_count >= 7 + (1 << 16)


class Storm:
    """Sessions that change at random, and what each of them ever held."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.draw, self.writer = rig, random.Random(seed), Writer(seed)
        self.held: dict[str, list[list[Token]]] = {}
        """By name: its tokens after each change. Names are not used again."""
        self.untouched: dict[str, int] = {}
        """Tokens that SSD had at the beginning, of sessions that lost none since."""

    async def step(self) -> None:
        """Change something."""
        names = sorted(self.rig.names())
        name = self.draw.choice(names) if names else ""
        what = self.draw.choice(("create", "append", "append", "flush", "drop", "fork", "delete", "demote"))
        if what == "create" or not name:
            name = f"s{len(self.held)}"
            await self.rig.create(name)
            self.held[name] = [[]]
            return
        now = self.held[name][-1]
        match what:
            case "append":
                tokens = self.writer.make(self.draw.randrange(1, 90))
                await self.rig.append(name, tokens, is_durable=self.draw.random() < 0.5)
                self.held[name].append(now + tokens)
            case "drop" if now:
                begin = self.draw.randrange(len(now))
                end = self.draw.randrange(begin, len(now)) + 1
                self.untouched.pop(name, None)
                await self.rig.truncate(name, (begin, end))
                self.held[name].append(now[:begin] + now[end:])
            case "fork":
                new = f"s{len(self.held)}"
                count = self.draw.randrange(len(now) + 1)
                self.held[new] = [now[:count]]
                await self.rig.fork(name, new, count)
            case "delete":
                self.untouched.pop(name, None)
                await self.rig.delete(name)
            case "demote":
                await self.rig.demote(name)
            case _:
                await self.rig.flush(name)


@pytest.mark.parametrize("seed", range(STORMS))
async def test_whatever_goes_on_each_is_as_it_was_at_one_moment(seed: int, tmp_path: Path) -> None:
    """A session comes back as it was after one of its changes, cut somewhere; nothing durable misses."""
    rig = MemoryRig(tmp_path, arena_segments=24, ssd_segments=(200, 200))
    await rig.open()
    storm = Storm(rig, seed)
    for _ in range(STEPS):
        await storm.step()
    storm.untouched = {name: rig.cache.sessions.get(TENANT, name).durable_token_count for name in rig.names()}
    copied = await backed_up(rig, tmp_path / "it", storm.step)
    laid_out(tmp_path / "it", tmp_path / "restored", rig)
    other = await opened(tmp_path / "restored", rig)
    names = other.names()
    for name in names:
        rows, count = await other.read(name), other.token_count(name)
        assert any(rows == expected(tokens[:count]) for tokens in storm.held[name] if len(tokens) >= count)
        assert count >= storm.untouched.get(name, 0)
        # It goes on there.
        more = storm.writer.make(70)
        await other.append(name, more, is_durable=True)
        assert await other.read(name, count) == expected(more)
    await other.check()
    await other.close()
    await rig.check()
    await rig.close()

    assert storm.untouched.keys() <= names
    assert copied.left_out_session_count == 0
