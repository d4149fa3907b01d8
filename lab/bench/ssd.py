"""One session over a Cache in this process: what the rows of SSD measure, and what no row does.

    python -m lab.bench.ssd --directory /var/tmp/ctxcache-bench --what paths

Several paths, one token per durable commit, memory of huge pages. Every function here measures one
thing once and returns seconds. Worst case: a disk whose speed drifts within a round, which the spread
shows.
"""

import argparse
import asyncio
import json
import mmap
import os
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from ctxcache.cache import Cache
from ctxcache.cache.leases import ReadRequest
from ctxcache.cache.reservations import Reservation
from ctxcache.core.ledger.session import DEFAULT_TTL_NS, Expiration
from ctxcache.core.ledger.work import Work
from ctxcache.core.limits import Limits
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.format.checksums import rows_checksum
from ctxcache.format.layout import ALIGN_BYTES, SegmentLayout, Slot, align
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from ctxcache.runtime.clock import SystemClock
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.tiers.base import DeviceTier, MappedTier
from ctxcache.storage.tiers.dram import DramArena
from ctxcache.storage.tiers.segments_file import SsdPath
from ctxcache.storage.tiers.ssd import SsdFiles
from lab.bench.device import MIB, ThrottledTier
from lab.bench.row import bench_model

TENANT = "bench"
SESSION = "measured"


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's streams: `layer_count` layers of one kind with `row_bytes` per token."""

    layer_count: int
    row_bytes: int

    def model(self) -> ModelSpec:
        """A model with these streams."""
        streams = tuple(
            StreamSpec(Stream(i, StateKind.KV), self.row_bytes, DType.FLOAT16)
            for i in range(self.layer_count)
        )
        return bench_model(str(self), self.layer_count, streams)


SHAPES = {"small": Shape(30, 1152), "8b": Shape(32, 4096), "wide": Shape(32, 8192), "tiny": Shape(1, 256)}
"""Segments of 2, 8 and 16 MiB: SmolLM2's hidden states, K/V of an 8B model with and without grouped heads;
24 KiB, to have many of."""


@dataclass(slots=True)
class Rig:
    """A cache over a real arena, real files and a real database, and one session's rows."""

    cache: Cache
    model: ModelSpec
    layout: SegmentLayout
    token_count: int
    session: str = SESSION

    @property
    def size_bytes(self) -> int:
        """The bytes that the session takes in slots."""
        return -(-self.token_count // self.layout.segment_tokens) * self.layout.size_bytes

    async def create(self) -> None:
        """The empty session, in the place of an earlier one."""
        if self.cache.ledger.named(TENANT, self.session):
            await self.cache.sessions.delete(TENANT, self.session, None)
        await self.cache.sessions.create(
            TENANT,
            self.session,
            model_id=self.model.model_id,
            layout=self.layout.outline.ranges,
            expiration=Expiration(DEFAULT_TTL_NS),
            is_pinned=False,
        )


@asynccontextmanager
async def opened(
    directory: Path,
    shape: Shape,
    session_bytes: int,
    *,
    path_count: int = 1,
    wrap: Callable[[DeviceTier], DeviceTier] = lambda tier: tier,
    make_arena: Callable[[int], MappedTier] | None = None,
) -> AsyncIterator[Rig]:
    """A rig whose arena has room for the session and no more; what it wrote is removed at the end.

    So the session always lies in the same memory, which is the device's too when it is measured alone: how
    fast a device fills memory depends on which memory it is.
    """
    model = shape.model()
    layout = SegmentLayout(model.resolve(tuple(spec.stream for spec in model.streams)))
    token_count = session_bytes // layout.size_bytes * layout.segment_tokens
    room_bytes = 2 * align(session_bytes)
    async with AsyncExitStack() as stack:
        stack.enter_context(Work())
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        arena = (make_arena or _arena)(token_count // layout.segment_tokens * layout.size_bytes + ALIGN_BYTES)
        stack.callback(arena.close)
        paths = [SsdPath(str(directory / f"ssd{i}"), room_bytes) for i in range(path_count)]
        ssd = wrap(SsdFiles(paths))
        stack.callback(ssd.close)
        metadata = RocksDbMetadata(directory / "metadata")
        stack.callback(metadata.close)
        cache = Cache(
            arena=arena,
            ssd=ssd,
            metadata=metadata,
            clock=SystemClock(),
            policy=LeastRecentlyUsed(),
            default_expiration=Expiration(DEFAULT_TTL_NS),
            limits=Limits(lease_share=1, reservation_share=1, client_share=1),
        )
        await cache.open()
        stack.push_async_callback(cache.close)
        if isinstance(arena, DramArena):
            await asyncio.to_thread(arena.prefault().wait)
        await cache.models.register(TENANT, model)
        yield Rig(cache, model, layout, token_count)


def _arena(size_bytes: int) -> DramArena:
    path = f"/dev/shm/ctxcache-bench-{uuid.uuid4().hex}.arena"  # noqa: S108  # shared memory is what it is for
    return DramArena(path, size_bytes)


async def save(rig: Rig, source: memoryview) -> float:
    """Reserve, copy rows into the arena, commit durable; seconds. The session is new each time."""
    await rig.create()
    begin = time.perf_counter()
    reservation = await _reserved(rig, 0, rig.token_count)
    loop = asyncio.get_running_loop()

    def mark(token_count: int, checksums: Sequence[int]) -> None:
        loop.call_soon_threadsafe(rig.cache.appends.mark_written, reservation, token_count, checksums)

    checksums = await asyncio.to_thread(_copy, rig, reservation, source, mark)
    await rig.cache.appends.commit(
        reservation, rig.token_count, is_durable=True, keep_open=False, checksums=checksums
    )
    return time.perf_counter() - begin


async def _reserved(rig: Rig, write_offset: int, token_count: int) -> Reservation:
    return await rig.cache.appends.reserve(
        TENANT,
        rig.session,
        fingerprint=rig.model.fingerprint(),
        write_offset=write_offset,
        generation=None,
        token_count=token_count,
    )


def _copy(
    rig: Rig, reservation: Reservation, source: memoryview, mark: Callable[[int, Sequence[int]], None]
) -> list[int]:
    """A client's work in its own process: every row once, segment after segment, each added up."""
    read = 0
    checksums: list[int] = []
    for run in list(reservation.runs):
        slot = run.segment.memory
        if slot is None:
            raise RuntimeError("a reserved segment is not in DRAM")
        view = rig.cache.arena.view(slot)
        for spec in rig.layout.specs:
            rows = rig.layout.rows(spec.stream, run.row_begin, run.row_end)
            target = np.frombuffer(view[rows], np.uint8)
            part = source[read : read + target.nbytes]
            checksums.append(rows_checksum(part))
            np.copyto(target, np.frombuffer(part, np.uint8))
            read += target.nbytes
        mark(run.token_end, checksums[-len(rig.layout.specs) :])
    return checksums


async def promote(rig: Rig) -> float:
    """Lease all of a session that is only on SSD; seconds until its rows are in the arena, verified."""
    await rig.cache.sessions.demote(TENANT, rig.session)
    request = ReadRequest(TENANT, rig.session, rig.model.fingerprint(), None)
    begin = time.perf_counter()
    lease = await rig.cache.leases.acquire(request)
    taken = time.perf_counter() - begin
    rig.cache.leases.release(lease.lease_id)
    return taken


def summary(limit: Sequence[float], ours: Sequence[float], size_bytes: int) -> dict[str, object]:
    """Median ratio of the rounds with its quartiles, and both speeds in GB/s."""
    ratios = [a / b for a, b in zip(limit, ours, strict=True)]
    low, middle, high = quantiles(ratios, n=4)
    return {
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "limit_gbps": round(size_bytes / median(limit) / 1e9, 2),
        "ours_gbps": round(size_bytes / median(ours) / 1e9, 2),
        "rounds": len(ratios),
    }


async def paths_add_up(
    directory: Path, shape: Shape, session_bytes: int, *, path_bps: float = 100e6, round_count: int = 3
) -> dict[str, object]:
    """Promotions and saves over 1, 2 and 4 throttled paths, of one session and of one for each path.

    Speeds of all of them together, as multiples of one session's on one path.
    """
    times: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for path_count, session_count in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 4)):
        reads, saves = times[path_count, session_count] = ([], [])
        # Twice what the sessions take: writers beside each other keep below the bound of what is dirty.
        async with opened(
            directory / "cache",
            shape,
            2 * session_count * session_bytes,
            path_count=path_count,
            wrap=lambda tier: ThrottledTier(tier, path_bps),
        ) as rig:
            token_count = rig.token_count // session_count // 2
            rigs = [replace(rig, token_count=token_count, session=f"s{i}") for i in range(session_count)]
            source = memoryview(mmap.mmap(-1, rigs[0].size_bytes))
            for _ in range(round_count):
                saves.append(max(await asyncio.gather(*(save(each, source) for each in rigs))))
                reads.append(max(await asyncio.gather(*(promote(each) for each in rigs))))
    one_read, one_save = (median(one) for one in times[1, 1])

    def speeds(one_s: float, index: int, *, is_single: bool) -> dict[int, float]:
        chosen = {key: median(took[index]) for key, took in times.items() if (key[1] == 1) == is_single}
        return {paths: round(sessions * one_s / took, 2) for (paths, sessions), took in chosen.items()}

    return {
        "path_mbps": round(path_bps / 1e6),
        "read_one": speeds(one_read, 0, is_single=True),
        "read_all": speeds(one_read, 0, is_single=False),
        "save_one": speeds(one_save, 1, is_single=True),
        "save_all": speeds(one_save, 1, is_single=False),
    }


async def into_huge_pages(
    directory: Path, *, size_bytes: int = 64 * MIB, round_count: int = 15
) -> dict[str, object]:
    """The tier's reads into memory of 2 MiB pages beside the same into shared memory of 4 KiB pages.

    Needs `size_bytes` of reserved huge pages (vm.nr_hugepages), or raises OSError.
    """
    ssd = SsdFiles([SsdPath(str(directory / "ssd"), size_bytes)])
    arena = _arena(size_bytes + ALIGN_BYTES)
    fd = os.memfd_create("ctxcache-bench", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    os.ftruncate(fd, size_bytes)
    huge = mmap.mmap(fd, size_bytes)
    os.close(fd)
    slot, step = Slot(0, 0, size_bytes), 4 * MIB
    buffers = {
        "4 KiB": arena.view(Slot(0, ALIGN_BYTES, size_bytes)),
        "2 MiB": memoryview(huge),
    }
    times: dict[str, list[float]] = {name: [] for name in buffers}
    try:
        for buffer in buffers.values():
            np.frombuffer(buffer, np.uint8)[:] = 1
        await ssd.write(slot, 0, buffers["4 KiB"])
        for _ in range(round_count):
            for name, buffer in buffers.items():
                begin = time.perf_counter()
                parts = range(0, size_bytes, step)
                await asyncio.gather(*(ssd.read(slot, at, buffer[at : at + step]) for at in parts))
                times[name].append(time.perf_counter() - begin)
    finally:
        ssd.close()
        arena.close()
        shutil.rmtree(directory / "ssd")
    return summary(times["4 KiB"], times["2 MiB"], size_bytes)


async def small_flushes(
    directory: Path, shape: Shape, *, behind_count: int = 0, round_count: int = 128
) -> dict[str, object]:
    """One token per durable commit, as a decoding engine at worst: latency, and bytes written per new byte.

    `behind_count` segments are there already: the session's record grows with them.
    """
    segment_bytes = 2 * 64 * shape.layer_count * shape.row_bytes
    async with opened(directory / "cache", shape, 8 * MIB + (1 + behind_count) * segment_bytes) as rig:
        await rig.create()
        behind = behind_count * rig.layout.segment_tokens
        if behind:
            reservation = await _reserved(rig, 0, behind)
            zeros = memoryview(mmap.mmap(-1, behind * rig.layout.token_bytes))
            checksums = _copy(rig, reservation, zeros, lambda *_: None)
            await rig.cache.appends.commit(
                reservation, behind, is_durable=True, keep_open=False, checksums=checksums
            )
        source = memoryview(mmap.mmap(-1, rig.layout.size_bytes))
        taken, before = [], _written_bytes()
        for index in range(round_count):
            begin = time.perf_counter()
            reservation = await _reserved(rig, behind + index, 1)
            checksums = _copy(rig, reservation, source, lambda *_: None)
            await rig.cache.appends.commit(
                reservation, behind + index + 1, is_durable=True, keep_open=False, checksums=checksums
            )
            taken.append(time.perf_counter() - begin)
        written = _written_bytes() - before
    new_bytes = round_count * rig.layout.token_bytes
    return {
        "segment_bytes": rig.layout.size_bytes,
        "token_bytes": rig.layout.token_bytes,
        "p50_ms": round(median(taken) * 1e3, 2),
        "p90_ms": round(quantiles(taken, n=10)[-1] * 1e3, 2),
        "written_per_new_byte": round(written / new_bytes, 1),
        "of_whole_segments": round(rig.layout.size_bytes / rig.layout.token_bytes, 1),
    }


def _written_bytes() -> int:
    """Bytes that this process has had written to disks so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["write_bytes"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line of JSON, of `paths` and `tails` one per shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="on the disk to measure; emptied")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["small", "8b", "wide"])
    parser.add_argument("--behind", type=int, default=0, help="segments there already, for tails")
    parser.add_argument("--what", choices=["paths", "tails", "pages"], required=True)
    options = parser.parse_args(arguments)
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.what == "pages":
        sys.stdout.write(json.dumps(asyncio.run(into_huge_pages(options.directory))) + "\n")
        return 0
    for name in options.shapes:
        shape = SHAPES[name]
        work = (
            paths_add_up(options.directory, shape, 64 * MIB)
            if options.what == "paths"
            else small_flushes(options.directory, shape, behind_count=options.behind)
        )
        sys.stdout.write(json.dumps({"shape": name, **asyncio.run(work)}) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
