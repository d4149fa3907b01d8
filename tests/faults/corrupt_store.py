"""A store on real files to damage: sessions whose every row is known, in two SSD files and RocksDB.

Everything runs in this process, over the parts that a server is built of, so that thousands of damages
can be tried. Its content is a copy made while the store was open: what a killed process leaves.
"""

import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ctxcache.cache import Cache
from ctxcache.cache.leases import ReadRequest
from ctxcache.core.ledger.session import Expiration
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.errors import CorruptSegment
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS_SPEC, DType, StateKind, Stream, StreamSpec, ranges_of
from ctxcache.runtime.clock import SystemClock
from ctxcache.storage.data_directory import DataDirectory
from ctxcache.storage.metadata.base import MetadataStore
from ctxcache.storage.metadata.catalog import Catalog
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.metadata.witness import Witness
from ctxcache.storage.ssd_directories import in_order, write_down
from ctxcache.storage.tiers.dram import DramArena
from ctxcache.storage.tiers.segments_file import SsdPath
from ctxcache.storage.tiers.ssd import SsdFiles
from tests.faults.rows import rows_of
from tests.model_specs import small_model

SSD_BYTES = 2 << 20
ARENA_BYTES = 1 << 20
YEAR_NS = 365 * 86400 * 10**9
SPECS = (
    StreamSpec(Stream(0, StateKind.HIDDEN), 48, DType.FLOAT16),
    StreamSpec(Stream(1, StateKind.KV), 100, DType.FLOAT16),
)
MODEL = small_model(*SPECS, model_id="m", architecture="a", layer_count=2, hidden_size=24, head_size=25)
STREAMS = (TOKENS_SPEC, *SPECS)
LAYOUT = SegmentLayout(MODEL.resolve(spec.stream for spec in SPECS))
Name = tuple[str, str]
"""Tenant and session id."""
Tokens = list[tuple[int, int]]
"""Each token by its writer and the number it had there."""


@dataclass(frozen=True, slots=True)
class Image:
    """A store as a killed process left it: `home` has `data`, `ssd0` and `ssd1`; `older` an earlier one."""

    home: Path
    older: Path
    sessions: dict[Name, Tokens]


def new_cache(arena: DramArena, ssd: SsdFiles, metadata: MetadataStore, *, crash_count: int = 0) -> Cache:
    """A cache over these; its slots of the arena are all free."""
    return Cache(
        arena=arena, ssd=ssd, metadata=metadata, clock=SystemClock(), policy=LeastRecentlyUsed(),
        default_expiration=Expiration(YEAR_NS), crash_count=crash_count,
    )  # fmt: skip


def new_arena() -> DramArena:
    """An arena of this process alone."""
    path = f"/dev/shm/ctxcache-corrupt-{uuid.uuid4().hex}.arena"  # noqa: S108  # what it is for
    return DramArena(path, ARENA_BYTES)


def open_ssd(home: Path) -> SsdFiles:
    """The SSD files of a store."""
    return SsdFiles([SsdPath(str(home / name), SSD_BYTES) for name in ("ssd0", "ssd1")], threads_per_path=1)


def open_metadata(home: Path, *, with_catalog: bool = False) -> tuple[DataDirectory, RocksDbMetadata]:
    """Open data directory and metadata as a server does."""
    directory = DataDirectory.open(home / "data")
    try:
        ordered = in_order(directory.path, directory.instance_id, [home / "ssd0", home / "ssd1"])
        write_down(directory.path, directory.instance_id, ordered)
        witness = Witness(ordered, directory.instance_id)
        catalog = Catalog(ordered[0] / "catalog", directory.instance_id) if with_catalog else None
        try:
            return directory, RocksDbMetadata(directory.metadata_path, witness=witness, catalog=catalog)
        except BaseException:
            witness.close()
            raise
    except BaseException:
        directory.close()
        raise


class Filler:
    """Fills a cache with sessions, and knows what they hold."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.sessions: dict[Name, Tokens] = {}
        self._writers: dict[Name, int] = {}

    async def create(self, tenant: str, session_id: str) -> None:
        """Make an empty session, and its model if need be."""
        await self._cache.models.register(tenant, MODEL)
        await self._cache.sessions.create(
            tenant,
            session_id,
            model_id="m",
            layout=ranges_of(s.stream for s in SPECS),
            expiration=None,
            is_pinned=False,
        )
        self._own(tenant, session_id, [])

    async def append(self, tenant: str, session_id: str, count: int) -> None:
        """Append durable tokens."""
        held, writer = self.sessions[tenant, session_id], self._writers[tenant, session_id]
        writing = self._cache.appends
        reservation = await writing.reserve(
            tenant, session_id, fingerprint=MODEL.fingerprint(), write_offset=len(held), generation=None,
            token_count=count,
        )  # fmt: skip
        begin = 1000 * len(held)
        for spec in STREAMS:
            rows = rows_of(writer, spec.stream, begin, begin + count, spec.row_bytes)
            writing.place(reservation, spec.stream, len(held), rows.data.cast("B"))
        await writing.commit(reservation, len(held) + count, is_durable=True, keep_open=False)
        held += [(writer, begin + i) for i in range(count)]

    async def drop(self, tenant: str, session_id: str, begin: int, end: int) -> None:
        """Drop tokens."""
        await self._cache.sessions.drop(tenant, session_id, None, ((begin, end),))
        del self.sessions[tenant, session_id][begin:end]

    async def fork(self, tenant: str, session_id: str, new_id: str, count: int) -> None:
        """Fork the first tokens."""
        await self._cache.sessions.fork(tenant, session_id, new_id, None, token_count=count, expiration=None)
        self._own(tenant, new_id, self.sessions[tenant, session_id][:count])

    async def delete(self, tenant: str, session_id: str) -> None:
        """Delete a session; its bytes stay in the file."""
        await self._cache.sessions.delete(tenant, session_id, None)
        del self.sessions[tenant, session_id]

    def _own(self, tenant: str, session_id: str, tokens: Tokens) -> None:
        self.sessions[tenant, session_id] = list(tokens)
        self._writers[tenant, session_id] = len(self._writers) + 1


async def make_image(home: Path) -> Image:
    """Fill a store; copies of it as it was before the last changes, and as it is in the end."""
    arena, live = new_arena(), home / "live"
    for name in ("data", "ssd0", "ssd1"):
        (live / name).mkdir(parents=True)
    ssd = open_ssd(live)
    directory, metadata = open_metadata(live, with_catalog=True)
    cache = new_cache(arena, ssd, metadata)
    try:
        await cache.open()
        directory.begin_run()
        filler = Filler(cache)
        await _begin(filler)
        metadata.database.flush()  # a table of it
        shutil.copytree(live, home / "older")
        await _go_on(filler)
        shutil.copytree(live, home / "image")
    finally:
        ssd.close()
        metadata.close()
        directory.close()
        arena.close()
    return Image(home / "image", home / "older", filler.sessions)


async def _begin(filler: Filler) -> None:
    for tenant, session_id, counts in (
        ("acme", "a", (200,)), ("acme", "b", (20, 30, 60)), ("acme", "gone", (150,)),
        ("other", "a", (130,)), ("other", "e", (150,)),
    ):  # fmt: skip
        await filler.create(tenant, session_id)
        for count in counts:
            await filler.append(tenant, session_id, count)


async def _go_on(filler: Filler) -> None:
    await filler.delete("acme", "gone")
    await filler.append("acme", "b", 40)
    await filler.drop("other", "e", 10, 80)
    await filler.fork("acme", "a", "fork", 100)
    await filler.append("acme", "fork", 30)
    await filler.create("acme", "late")
    await filler.append("acme", "late", 90)


async def judge(cache: Cache, sessions: dict[Name, Tokens], names: Sequence[Name]) -> tuple[list[str], int]:
    """Read sessions; returns what broke a promise, and how many answers were DATA_LOSS.

    Wrong bytes break it, and a session that is shorter than it was when nothing was counted or refused.
    """
    broken, refused = [], 0
    for name in names:
        session = cache.ledger.named(*name)
        if session is None:
            broken.append(f"{name} is gone")
            continue
        got = None
        while got is None:
            before = cache.state.counters.corrupt_segment_count
            try:
                got = await _read(cache, name)
            except CorruptSegment:
                # It ends before the bad segment now; another one may be bad as well.
                refused += 1
                if cache.state.counters.corrupt_segment_count == before:
                    broken.append(f"{name}: corruption is not counted")
                    break
        if got is None:
            continue
        broken += _differences(name, got, sessions[name])
        if session.token_count < len(sessions[name]) and not cache.state.counters.corrupt_segment_count:
            broken.append(
                f"{name}: {session.token_count} of {len(sessions[name])} tokens, and nobody was told"
            )
    return broken, refused


async def _read(cache: Cache, name: Name) -> dict[Stream, bytes]:
    found = {spec.stream: b"" for spec in STREAMS}
    request = ReadRequest(*name, MODEL.fingerprint(), None)
    async with cache.leases.stream(request, ()) as (_, _, rows):
        async for item in rows:
            found[item.stream] += bytes(item.data)
    return found


def _differences(name: Name, got: dict[Stream, bytes], tokens: Tokens) -> list[str]:
    broken = []
    for spec in STREAMS:
        rows = np.frombuffer(got[spec.stream], np.uint8).reshape(-1, spec.row_bytes)
        if not np.array_equal(rows, expected_rows(spec, tokens)[: len(rows)]) or len(rows) > len(tokens):
            broken.append(f"{name}: WRONG BYTES in {spec.stream}")
    return broken


_EXPECTED: dict[tuple[StreamSpec, tuple[tuple[int, int], ...]], npt.NDArray[np.uint8]] = {}


def expected_rows(spec: StreamSpec, tokens: Tokens) -> npt.NDArray[np.uint8]:
    """The rows of one stream that these tokens have, [n, row_bytes]."""
    key = spec, tuple(tokens)
    if key not in _EXPECTED:
        rows = [rows_of(writer, spec.stream, n, n + 1, spec.row_bytes) for writer, n in tokens]
        _EXPECTED[key] = np.concatenate([np.zeros((0, spec.row_bytes), np.uint8), *rows])
    return _EXPECTED[key]
