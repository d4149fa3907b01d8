"""A cache over an arena and a place for its segments that can be closed, crashed and opened again.

Every row spells who wrote it, which stream it is of and the how-manieth token it was, so that any
foreign byte is recognised.
"""

import asyncio
import os
import struct
import sys
import uuid
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fakes import FakeClock, MemoryTier, Operation
from integrity import check_integrity
from memory_metadata import MemoryMetadata

from ctxcache.cache import Cache
from ctxcache.cache.leases import Lease, ReadRequest
from ctxcache.cache.prefixes import Match
from ctxcache.cache.reservations import Reservation
from ctxcache.core.ledger.ledger import MANY_SEGMENTS
from ctxcache.core.ledger.session import DEFAULT_TTL_NS, Expiration, SessionView
from ctxcache.core.ledger.work import current_work
from ctxcache.core.limits import DEFAULT_WATERMARKS, Limits, Watermarks
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.core.placement.policy import Ranked
from ctxcache.core.placement.shares import NO_SHARES, Shares
from ctxcache.format.layout import ALIGN_BYTES, SegmentLayout
from ctxcache.format.streams import TOKENS, Content, DType, StateKind, Stream, StreamSpec, ranges_of
from ctxcache.storage.metadata.base import Changes, MetadataStore
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.tiers.base import DeviceTier
from ctxcache.storage.tiers.dram import DramArena
from ctxcache.storage.tiers.segments_file import SsdPath
from ctxcache.storage.tiers.ssd import SsdFiles
from tests.model_specs import small_model

TENANT = "acme"
HIDDEN = Stream(0, StateKind.HIDDEN)
KV = Stream(1, StateKind.KV)
STREAMS = (TOKENS, HIDDEN, KV)
MODEL = small_model(
    StreamSpec(HIDDEN, 96, DType.FLOAT16),
    StreamSpec(KV, 160, DType.FLOAT16),
    weights_digest="w",
    tokenizer_digest="t",
    layer_count=2,
    hidden_size=48,
    head_size=40,
)
FINGERPRINT = MODEL.fingerprint()
LAYOUT = SegmentLayout(MODEL.resolve(STREAMS))
SLOT_BYTES = LAYOUT.size_bytes
SEGMENT_TOKENS = LAYOUT.segment_tokens


UNLIMITED = Limits(lease_share=1, reservation_share=1, client_share=1, room_wait_ns=0)
"""No shares: what an arena of a few segments would round to nothing."""


@dataclass(frozen=True, slots=True, order=True)
class Token:
    """The `number`-th token that writer `tag` ever wrote."""

    tag: int
    number: int


@dataclass(slots=True)
class Writer:
    """Makes tokens, each another one."""

    tag: int
    made: int = 0

    def make(self, count: int) -> list[Token]:
        """The next `count` tokens."""
        self.made += count
        return [Token(self.tag, number) for number in range(self.made - count, self.made)]


def rows_of(tokens: Sequence[Token], stream: Stream) -> bytes:
    """One stream's rows of the tokens, each token's another one."""
    # Machines and storms make millions of rows.
    pack = struct.Struct("<HH").pack
    words = [pack(token.tag, token.number) for token in tokens]
    if stream == TOKENS:
        return b"".join(words)
    row_bytes, layer = LAYOUT.row_bytes(stream), struct.pack("<i", stream.layer)
    return b"".join([((word + layer) * row_bytes)[:row_bytes] for word in words])


@dataclass(slots=True)
class Rig:
    """The cache under test. `ssd` and `metadata` are what it was opened over last."""

    directory: Path
    arena_segments: int = 6
    ssd_segments: tuple[int, ...] = (64, 64)
    clock: FakeClock = field(default_factory=FakeClock)
    watermarks: Watermarks = DEFAULT_WATERMARKS
    limits: Limits = UNLIMITED
    shares: Shares = NO_SHARES
    tenant: str = TENANT
    """The calling tenant."""
    make_policy: Callable[[], Ranked] = LeastRecentlyUsed
    many_segments: int = MANY_SEGMENTS
    """From how many segments on a session's short ones are joined."""
    copies: int = 1
    """How many SSD paths have each segment, unless a session says otherwise."""
    crash_count: int = 0
    """How many crashes the cache is told of."""
    last_used: int = 1
    """How many sessions are known after a start. Few: tests are to find out what others are worth."""
    cache: Cache = field(init=False)
    arena: DramArena = field(init=False)

    async def open(self) -> None:
        """Start, or start again."""
        if hasattr(self, "arena"):
            self.cache.io.close()
            self.arena.close()
        path = f"/dev/shm/ctxcache-test-{uuid.uuid4().hex}.arena"  # noqa: S108  # shared memory is what it is for
        self.arena = DramArena(path, ALIGN_BYTES + self.arena_segments * SLOT_BYTES)
        ssd, metadata = self._open_stores()
        self.cache = Cache(
            arena=self.arena, ssd=ssd, metadata=metadata, clock=self.clock,
            policy=self.make_policy(), default_expiration=Expiration(DEFAULT_TTL_NS), limits=self.limits,
            watermarks=self.watermarks, shares=self.shares, crash_count=self.crash_count, copies=self.copies,
        )  # fmt: skip
        self.cache.ledger.many_segments = self.many_segments
        await self.cache.open(self.last_used)
        for tenant in {self.tenant, *self.shares.by_tenant}:
            await self.cache.models.register(tenant, MODEL)

    def _open_stores(self) -> tuple[DeviceTier, MetadataStore]:
        raise NotImplementedError

    # -- the verbs of a client -------------------------------------------------------------------

    async def create(
        self,
        session_id: str,
        *,
        is_pinned: bool = False,
        ttl_s: int = 3600,
        salt: bytes = b"",
        copies: int = 0,
    ) -> SessionView:
        """A new session that stores every stream."""
        return await self.cache.sessions.create(
            self.tenant, session_id, model_id=MODEL.model_id, layout=ranges_of(STREAMS),
            expiration=Expiration(ttl_s * 10**9), is_pinned=is_pinned, salt=salt, copies=copies,
        )  # fmt: skip

    async def mark(self, session_id: str, copies: int) -> SessionView:
        """Ask for so many copies of a session on SSD."""
        return await self.cache.sessions.update(
            self.tenant, session_id, expiration=None, is_pinned=None, copies=copies
        )

    def token_count(self, session_id: str) -> int:
        """Tokens that are visible."""
        return self.cache.sessions.get(self.tenant, session_id).token_count

    async def reserve(
        self,
        session_id: str,
        token_count: int,
        *,
        is_coming: bool = False,
        contents: Sequence[Content] = (),
    ) -> Reservation:
        """Room at the session's end; in long segments too where all of it is said to be coming."""
        return await self.cache.appends.reserve(
            self.tenant, session_id, fingerprint=FINGERPRINT, write_offset=self.token_count(session_id),
            generation=None, token_count=token_count, coming_count=token_count if is_coming else 0,
            contents=contents,
        )  # fmt: skip

    def place(self, reservation: Reservation, token_begin: int, tokens: Sequence[Token]) -> None:
        """Write every stream's rows."""
        for stream in STREAMS:
            data = memoryview(rows_of(tokens, stream))
            self.cache.appends.place(reservation, stream, token_begin, data)

    async def mark_written(self, reservation: Reservation, token_count: int) -> None:
        """Say that rows will not change any more."""
        self.cache.appends.mark_written(reservation, token_count)

    async def append(
        self,
        session_id: str,
        tokens: Sequence[Token],
        *,
        is_durable: bool = False,
        is_coming: bool = False,
        contents: Sequence[Content] = (),
    ) -> SessionView:
        """Reserve, write and commit in one go."""
        reservation = await self.reserve(session_id, len(tokens), is_coming=is_coming, contents=contents)
        begin = reservation.committed
        self.place(reservation, begin, tokens)
        return await self.cache.appends.commit(
            reservation, begin + len(tokens), is_durable=is_durable, keep_open=False
        )

    def request(self, session_id: str, begin: int = 0, end: int | None = None) -> ReadRequest:
        """A reader's request."""
        return ReadRequest(self.tenant, session_id, FINGERPRINT, None, begin, end)

    async def read(self, session_id: str, begin: int = 0, end: int | None = None) -> dict[Stream, bytes]:
        """Every stream's rows, as a stream brings them."""
        found = dict.fromkeys(STREAMS, b"")
        async with self.cache.leases.stream(self.request(session_id, begin, end), ()) as (_, _, rows):
            async for item in rows:
                found[item.stream] += bytes(item.data)
        return found

    async def acquire(self, session_id: str, begin: int = 0, end: int | None = None) -> Lease:
        """A lease."""
        return await self.cache.leases.acquire(self.request(session_id, begin, end))

    def leased(self, lease: Lease) -> dict[Stream, bytes]:
        """The rows that a client sees in the arena through a lease."""
        found = dict.fromkeys(STREAMS, b"")
        for piece in lease.pieces:
            if piece.segment.memory is None:
                raise AssertionError("a leased segment is not in DRAM")
            view = self.arena.view(piece.segment.memory)
            for stream in STREAMS:
                rows = piece.segment.layout.rows(stream, piece.row_begin, piece.row_end)
                found[stream] += bytes(view[rows])
        return found

    async def truncate(self, session_id: str, *dropped: tuple[int, int]) -> SessionView:
        """Drop tokens by index."""
        return await self.cache.sessions.drop(self.tenant, session_id, None, dropped)

    async def fork(self, session_id: str, new_id: str, token_count: int | None = None) -> SessionView:
        """A session that shares the first tokens."""
        return await self.cache.sessions.fork(
            self.tenant, session_id, new_id, None, token_count=token_count, expiration=None
        )

    async def match(
        self, tokens: Sequence[Token], *, salt: bytes = b"", contents: Sequence[Content] = ()
    ) -> Match:
        """The longest prefix of these that sessions have."""
        return await self.cache.prefixes.match(
            self.tenant,
            MODEL.model_id,
            ranges_of(STREAMS),
            rows_of(tokens, TOKENS),
            salt=salt,
            contents=contents,
        )

    async def adopt(
        self, session_id: str, tokens: Sequence[Token], *, contents: Sequence[Content] = ()
    ) -> int:
        """Let an empty session begin with as many of these as are there; returns how many."""
        adopted = await self.cache.prefixes.adopt(
            self.tenant, session_id, FINGERPRINT, None, rows_of(tokens, TOKENS), contents=contents
        )
        return adopted.token_count

    async def flush(self, session_id: str) -> SessionView:
        """Make it durable."""
        return await self.cache.sessions.flush(self.tenant, session_id)

    async def demote(self, session_id: str) -> SessionView:
        """Make it durable, and take it out of DRAM."""
        return await self.cache.sessions.demote(self.tenant, session_id)

    async def delete(self, session_id: str) -> None:
        """Delete it."""
        await self.cache.sessions.delete(self.tenant, session_id, None)

    def names(self) -> set[str]:
        """Sessions that are there."""
        now_ns = self.cache.state.clock.now_ns()
        ledger = self.cache.ledger
        there = [ledger.glance(self.tenant, name) for name in ledger.names.ids(self.tenant)]
        return {session.session_id for session in there if session and session.expire_time_ns > now_ns}

    async def let_go(self) -> None:
        """Let no move go on, and let the test be at work on nothing."""
        await self.cache.drain()
        current_work()._let_go()

    async def check(self) -> None:
        """Fail unless the books add up, once nothing moves."""
        await self.cache.drain()
        problems = check_integrity(self.cache)
        if problems:
            raise AssertionError("; ".join(problems))


def expected(tokens: Iterable[Token]) -> dict[Stream, bytes]:
    """The rows that a read of these tokens must bring."""
    listed = list(tokens)
    return {stream: rows_of(listed, stream) for stream in STREAMS}


def seeds(count: int) -> range:
    """Those of a test of chance: so many, or what CTXCACHE_STORM_SEEDS says, as `make storms` does."""
    return range(int(os.environ.get("CTXCACHE_STORM_SEEDS", count)))


@contextmanager
def counted_lines() -> Iterator[list[int]]:
    """Lines of Python that run meanwhile, in this thread."""
    counts = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        counts[0] += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counts
    finally:
        sys.settrace(before)


class SlowMetadata(MemoryMetadata):
    """Metadata that holds its answers back while `gate` is there and not set."""

    gate: asyncio.Event | None = None

    def commit(self, changes: Changes, *, is_durable: bool) -> Coroutine[Any, Any, None]:
        """See MetadataStore."""
        # It is there already: whoever waits, waits for the answer alone.
        super().commit(changes, is_durable=is_durable).close()
        return self._answer()

    async def _answer(self) -> None:
        if self.gate:
            await self.gate.wait()


@dataclass(slots=True)
class MemoryRig(Rig):
    """Over stores in memory, where faults are injected and a crash is a power cut."""

    ssd: MemoryTier = field(init=False)
    metadata: MemoryMetadata = field(init=False)

    def __post_init__(self) -> None:
        self.ssd = MemoryTier([count * SLOT_BYTES for count in self.ssd_segments])
        self.metadata = SlowMetadata()

    @contextmanager
    def slow_commits(self) -> Iterator[None]:
        """Commits made meanwhile are answered at the end."""
        if not isinstance(self.metadata, SlowMetadata):
            raise TypeError("only before a crash")
        self.metadata.gate = asyncio.Event()
        try:
            yield
        finally:
            self.metadata.gate.set()

    async def close(self) -> None:
        """End in order."""
        try:
            await self.cache.close()
        finally:
            self.arena.close()
            self.metadata.close()

    async def crash(self) -> None:
        """Lose the power: what was not synced is gone. Opens again."""
        await self.cache.drain()
        self.arena.close()
        self.ssd, self.metadata = self.ssd.crash(), self.metadata.crash()
        await self.open()

    async def restart(self) -> None:
        """End in order and start again."""
        await self.close()
        await self.open()

    async def reached(self, operation: Operation, count: int = 1) -> None:
        """Wait until so many operations of a kind have come to the SSD tier since it was made."""
        while self.ssd.counts[operation] < count:  # noqa: ASYNC110  # threads are under way as well
            await asyncio.sleep(0)

    def _open_stores(self) -> tuple[DeviceTier, MetadataStore]:
        return self.ssd, self.metadata


@dataclass(slots=True)
class DiskRig(Rig):
    """Over real files and a real database, where a crash is the death of the process."""

    ssd: SsdFiles = field(init=False)
    metadata: RocksDbMetadata = field(init=False)

    async def close(self) -> None:
        """End in order."""
        try:
            await self.cache.close()
        finally:
            self._close_files()

    async def crash(self) -> None:
        """Die without flushing. Opens again."""
        await self.cache.drain()
        self._close_files()
        await self.open()

    async def restart(self) -> None:
        """End in order and start again."""
        await self.close()
        await self.open()

    def segments_file(self, path_index: int = 0) -> Path:
        """The file of one SSD path."""
        return Path(self.ssd.paths[path_index])

    def _open_stores(self) -> tuple[DeviceTier, MetadataStore]:
        paths = [
            SsdPath(str(self.directory / f"ssd{i}"), count * SLOT_BYTES)
            for i, count in enumerate(self.ssd_segments)
        ]
        self.ssd = SsdFiles(paths, threads_per_path=1, clock=self.clock)
        self.metadata = RocksDbMetadata(self.directory / "metadata")
        return self.ssd, self.metadata

    def _close_files(self) -> None:
        self.arena.close()
        self.ssd.close()
        self.metadata.close()
