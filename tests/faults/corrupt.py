"""Corruption: bytes on disk are flipped, cut, deleted, misplaced and rolled back; none may pass for right.

    python -m tests.faults.corrupt --flips 10000 --misplacements 2000 --metadata-faults 600 --refusals 1000

Every read then returns right bytes or DATA_LOSS; no acknowledged token goes missing unless a start
refuses, a counter or the log says so; what a start refuses is as it was (`refusals.py`), and is rebuilt.
Real files, RocksDB and the parts that a server is made of, in this process. Worst case: damage that no part
of the store can see, such as all its directories put back together to an earlier day.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path

from ctxcache.cache import Cache
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.work import at_work
from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable, FormatTooNew
from ctxcache.storage.metadata import records
from ctxcache.storage.rebuild import rebuild
from tests.faults.corrupt_store import (
    LAYOUT,
    Image,
    judge,
    make_image,
    new_arena,
    new_cache,
    open_metadata,
    open_ssd,
)
from tests.faults.harness import Harness, Report, progress
from tests.faults.plants.corrupt import PATCHES
from tests.faults.refusals import Refusals
from tests.memory_metadata import MemoryMetadata

PAGE = 4096
REFUSALS = (CorruptMetadata, DataDirectoryUnusable, FormatTooNew)
REBUILT_ONE_IN = 5
KINDS = (
    "*.sst",
    "*.log",
    "MANIFEST-*",
    "CURRENT",
    "OPTIONS-*",
    "IDENTITY",
    "FORMAT",
    "RUNS",
    "LOCK",
    "PATHS",
    "DEVICE",
    "WITNESS",
)


class Segments:
    """Damages the SSD files under a cache, one damage at a time."""

    def __init__(self, image: Image, rng: random.Random, report: Report) -> None:
        self._image, self._random, self._report = image, rng, report
        self._arena, self._ssd = new_arena(), open_ssd(image.home)
        self._records = MemoryMetadata()
        self._fds = [os.open(path, os.O_RDWR) for path in self._ssd.paths]
        self._places: list[tuple[int, int]] = []
        self._segments: list[Segment] = []

    async def begin(self) -> None:
        """Read the records, and where segments lie, outdated ones included."""
        directory, store = open_metadata(self._image.home)
        self._records.current.models = {(m.tenant, m.spec.model_id): m for m in store.models()}
        self._records.current.sessions = {s.uid: s for s in store.sessions()}
        self._records.current.segments = {s.segment_id: s for s in store.segments()}
        store.close()
        directory.close()
        cache = await self._open()
        self._segments = [s for s in cache.ledger.segments() if s.durable]
        self._records.sync()
        for path, fd in enumerate(self._fds):
            pages = range(0, os.fstat(fd).st_size, PAGE)
            self._places += [(path, at) for at in pages if os.pread(fd, 8, at) == b"CTXCSEG\0"]

    def close(self) -> None:
        """Give up the files."""
        for fd in self._fds:
            os.close(fd)
        self._ssd.close()
        self._arena.close()

    async def flip(self) -> None:
        """One bit of a segment: header, rows, or padding."""
        segment, fd, at = self._pick()
        where = self._random.choice((self._random.randrange(512), self._random.randrange(LAYOUT.size_bytes)))
        await self._try("flip", segment, {(fd, at + where): self._flipped(fd, at + where)})

    async def misplace(self) -> None:
        """Bytes from elsewhere in a segment's place: of another one, an older one, the other one's too."""
        segment, fd, at = self._pick()
        path, other_at = self._random.choice([p for p in self._places if (self._fds[p[0]], p[1]) != (fd, at)])
        other = self._fds[path]
        size, begin = LAYOUT.size_bytes, 0
        if self._random.random() < 0.3:
            size, begin = PAGE, self._random.randrange(LAYOUT.size_bytes // PAGE) * PAGE
        changes = {(fd, at + begin): os.pread(other, size, other_at + begin)}
        if self._random.random() < 0.5:
            changes[other, other_at + begin] = os.pread(fd, size, at + begin)
        await self._try("misplacement", segment, changes)

    async def tear(self) -> None:
        """A part of a segment that was never written, or is what an earlier copy of the file has."""
        segment, fd, at = self._pick()
        begin = self._random.randrange(LAYOUT.size_bytes // PAGE) * PAGE
        size = LAYOUT.size_bytes - begin
        older = self._image.older / f"ssd{self._fds.index(fd)}" / "segments.dat"
        with older.open("rb") as file:
            old = os.pread(file.fileno(), size, at + begin)
        await self._try("tear", segment, {(fd, at + begin): self._random.choice((old, bytes(size)))})

    async def roll_back(self) -> None:
        """A whole file as it was before."""
        for i, fd in enumerate(self._fds):
            old = (self._image.older / f"ssd{i}" / "segments.dat").read_bytes()
            await self._try("rolled_back_file", None, {(fd, 0): old})
            await self._try("rolled_back_file", None, {(fd, 0): bytes(len(old))})

    def _pick(self) -> tuple[Segment, int, int]:
        segment = self._random.choice(self._segments)
        assert segment.durable is not None
        return segment, self._fds[segment.durable.path_index], segment.durable.offset_bytes

    def _flipped(self, fd: int, at: int) -> bytes:
        return bytes([os.pread(fd, 1, at)[0] ^ 1 << self._random.randrange(8)])

    async def _try(self, kind: str, segment: Segment | None, changes: dict[tuple[int, int], bytes]) -> None:
        kept = {(fd, at): os.pread(fd, len(data), at) for (fd, at), data in changes.items()}
        for (fd, at), data in changes.items():
            os.pwrite(fd, data, at)
        try:
            cache = await self._open()
            names = list(self._image.sessions)
            if segment:
                (there,) = (s for s in cache.ledger.segments() if s.segment_id == segment.segment_id)
                listers = cache.ledger.names.listers(there)
                touched = [(s.tenant, s.session_id) for s in listers]
                names = [*touched, self._random.choice(names)]
            broken, refused = await judge(cache, self._image.sessions, names)
            await cache.drain()
            self._report.count(f"{kind}_count")
            self._report.count("data_loss_count", refused)
            for sentence in broken:
                self._report.find(f"{kind}: {sentence}")
        finally:
            for (fd, at), data in kept.items():
                os.pwrite(fd, data, at)

    async def _open(self) -> Cache:
        copy = MemoryMetadata()
        current = self._records.current
        copy.current = type(current)(dict(current.models), dict(current.sessions), dict(current.segments))
        cache = new_cache(self._arena, self._ssd, copy)
        await cache.open()
        return cache


class Records:
    """Damages everything but the SSD files, each time in a fresh copy."""

    def __init__(self, image: Image, rng: random.Random, report: Report) -> None:
        self._image, self._random, self._report = image, rng, report
        self._arena = new_arena()
        self._home = image.home.parent / "copy"

    def close(self) -> None:
        """Give up the arena."""
        self._arena.close()

    async def one(self, number: int) -> None:
        """Damage a copy in one way, open it, read everything; rebuild what was refused, every so often."""
        self._copy()
        damage = self._random.choice(
            (self._flip, self._flip, self._flip, self._cut, self._delete, self._older, self._lose_record)
        )
        told = damage()
        log = _Log()
        with log:
            opened = await self._open()
        self._report.count("metadata_fault_count")
        if opened is None:
            self._report.count("refused_start_count")
            if number % REBUILT_ONE_IN == 0:
                await self._rebuild(told)
            return
        broken, reported = opened
        if broken and not (reported or log.has_errors):
            self._report.find(f"{told}: {broken[0]}")
        for sentence in broken:
            if "WRONG" in sentence:
                self._report.find(f"{told}: {sentence}")

    async def _open(self) -> tuple[list[str], bool] | None:
        """The damage, and whether it was counted; None when the start was refused."""
        try:
            directory, store = open_metadata(self._home)
        except REFUSALS:
            return None
        ssd = open_ssd(self._home)
        try:
            cache = new_cache(self._arena, ssd, store, crash_count=directory.crash_count)
            await cache.open()
            broken, _ = await judge(cache, self._image.sessions, list(self._image.sessions))
            extra = {(s.tenant, s.session_id) for s in cache.ledger.sessions()} - set(self._image.sessions)
            broken += [f"{name} is back" for name in extra]
            await cache.drain()
        except REFUSALS:
            return None
        else:
            return broken, cache.state.counters.corrupt_segment_count > 0
        finally:
            ssd.close()
            with contextlib.suppress(Exception):
                store.close()
            directory.close()

    async def _rebuild(self, told: str) -> None:
        homes = [self._home / "ssd0", self._home / "ssd1"]
        try:
            found = rebuild(self._home / "data", homes, created_by="test", is_dry_run=False)
        except REFUSALS as error:
            if not told.endswith(("DEVICE", "FORMAT")):
                self._report.find(f"{told}: cannot be rebuilt: {error}")
            return
        opened = await self._open()
        self._report.count("rebuilt_count")
        if opened is None or (opened[0] and found.is_complete):
            self._report.find(f"{told}: rebuilt, and then {opened}")

    def _copy(self) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        shutil.copytree(self._image.home, self._home, copy_function=_link_or_copy)

    def _pick(self) -> Path:
        kind = self._random.choice(KINDS)
        found = [path for path in self._home.rglob(kind) if "catalog" not in path.parts]
        return self._random.choice(sorted(found)) if found else self._pick()

    def _flip(self) -> str:
        path = self._pick()
        raw = bytearray(path.read_bytes())
        if raw:
            raw[self._random.randrange(len(raw))] ^= 1 << self._random.randrange(8)
            path.write_bytes(raw)
        return f"flip in {path.name}"

    def _cut(self) -> str:
        path = self._pick()
        with path.open("r+b") as file:
            file.truncate(self._random.randrange(path.stat().st_size + 1))
        return f"cut {path.name}"

    def _delete(self) -> str:
        path = self._pick()
        path.unlink()
        return f"deleted {path.name}"

    def _older(self) -> str:
        """An older copy of the metadata, or of one file of it."""
        if self._random.random() < 0.5:
            shutil.rmtree(self._home / "data" / "metadata")
            shutil.copytree(self._image.older / "data" / "metadata", self._home / "data" / "metadata")
            return "older metadata"
        path = self._pick()
        old = self._image.older / path.relative_to(self._home)
        if old.exists():
            shutil.copyfile(old, path)
        return f"older {path.name}"

    def _lose_record(self) -> str:
        """A session's record gone or outdated, with its segments': as if a table had been left out."""
        directory, store = open_metadata(self._home)
        store.begin()
        session = self._random.choice(list(store.sessions()))
        if self._random.random() < 0.5:
            store.database.delete(records.session_key(session.uid))
            for segment_id in session.segment_ids:
                store.database.delete(records.segment_key(segment_id))
        else:
            older = replace(session, segment_ids=(), live=(), log_end=0)
            store.database.put(records.session_key(session.uid), records.encode_session(older))
        store.close()
        directory.close()
        return "lost record"


class _Log(logging.Handler):
    """Whether an error was logged meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.has_errors = False

    def emit(self, _: logging.LogRecord) -> None:
        """Note it."""
        self.has_errors = True

    def __enter__(self) -> None:
        logging.getLogger("ctxcache").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ctxcache").removeHandler(self)


def _link_or_copy(source: str, target: str) -> None:
    """The SSD files are not damaged here: one copy is enough for all."""
    (os.link if source.endswith("segments.dat") else shutil.copyfile)(source, target)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("ctxcache")
    kept = logger.propagate
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
    try:
        yield
    finally:
        logger.propagate = kept


async def _run(chosen: argparse.Namespace, report: Report, home: Path) -> None:
    rng = random.Random(chosen.seed)
    image = await make_image(home)
    with PATCHES[chosen.control]() if chosen.control else contextlib.nullcontext():
        segments, damaged = Segments(image, rng, report), Records(image, rng, report)
        try:
            await segments.begin()
            for count, step in (
                (chosen.flips, segments.flip),
                (chosen.misplacements, segments.misplace),
                (chosen.misplacements // 4, segments.tear),
            ):
                await _repeat(count, step)
            if chosen.flips:
                await segments.roll_back()
        finally:
            segments.close()
        try:
            for number in range(chosen.metadata_faults):
                await damaged.one(number)
                progress(number + 1, chosen.metadata_faults, "metadata faults")
        finally:
            damaged.close()
        if chosen.refusals:
            await Refusals(image, rng, report).run(chosen.refusals)


async def _repeat(count: int, step: Callable[[], Coroutine[None, None, None]]) -> None:
    for number in range(count):
        await step()
        progress(number + 1, count, step.__name__)


def run(chosen: argparse.Namespace, report: Report) -> None:
    """See the module's docstring."""
    with tempfile.TemporaryDirectory(prefix="ctxcache-corrupt-") as home, _quiet():
        asyncio.run(at_work(_run(chosen, report, Path(home))))


def options(parser: argparse.ArgumentParser) -> None:
    """How much to damage."""
    parser.add_argument("--flips", type=int, default=300, help="bits flipped in segments (default 300)")
    parser.add_argument("--misplacements", type=int, default=100, help="bytes put elsewhere (default 100)")
    parser.add_argument(
        "--metadata-faults", type=int, default=40, help="damages to everything else (default 40)"
    )
    parser.add_argument(
        "--refusals", type=int, default=40, help="files damaged to see a refusal change nothing (default 40)"
    )


HARNESS = Harness(
    name="corrupt",
    description="Bytes on disk are damaged and misplaced; none may pass for right.",
    run=run,
    controls={name: patch.__doc__ or "" for name, patch in PATCHES.items()},
    options=options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
