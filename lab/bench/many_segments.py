"""A data directory with many segments, made in a minute: true records, and slots that are mostly holes.

    python -m lab.bench.many_segments DIRECTORY --segments 1000000 --session-segments 1
    python -m lab.bench.many_segments DIRECTORY --segments 100000 --start

With `--start` a server opens it, and its start and memory are printed.

Sessions of 64 segments each, if not told otherwise. The first and the last have their bytes on SSD, whole, so
that they can be read and checked; the slots of all others are holes. Worst case: no space, and the directory
is useless.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import (
    SEGMENTS_FILE,
    SegmentHeader,
    SegmentIdentity,
    SegmentLayout,
    Slot,
    header_checksum,
)
from ctxcache.storage.data_directory import DataDirectory
from ctxcache.storage.metadata.base import Changes, ModelRecord, SegmentRecord, SessionRecord
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from lab.bench.contexts import Bytes, by_stream, content, layout_of, model_of
from lab.bench.row import Scale
from lab.bench.server import serving

SESSION_SEGMENTS = 64
ROW_BYTES = 64
TENANT = "default"
_TTL_NS = 30 * 86400 * 10**9
_BATCH_SESSIONS = 256
_ARENA_BYTES = 256 << 20


def shape_of(session_segments: int) -> Scale:
    """A session of so many segments."""
    return Scale(1, 1, session_segments * 64, ROW_BYTES, call_count=0, segment_count=0)


@dataclass(frozen=True, slots=True)
class Made:
    """The result of the making. `ssd_bytes` is the size to serve it with."""

    session_count: int
    segment_count: int
    ssd_bytes: int
    session_segments: int

    @property
    def shape(self) -> Scale:
        """The scale of each session."""
        return shape_of(self.session_segments)

    def data(self, session: int) -> Bytes:
        """The rows of session `session`, flat; only of the first and the last."""
        return content(session, self.shape.context_bytes)


def session_name(session: int) -> str:
    """The name of session number `session`."""
    return f"sessions/many{session}"


def make(
    directory: Path, segment_count: int, *, tenant: str = TENANT, session_segments: int = SESSION_SEGMENTS
) -> Made:
    """Make such a directory; `segment_count` is rounded up to whole sessions."""
    session_count = -(-segment_count // session_segments)
    layout, segment_count = layout_of(shape_of(session_segments)), session_count * session_segments
    made = Made(session_count, segment_count, segment_count * layout.size_bytes, session_segments)
    with DataDirectory.open(directory) as place:
        (directory / "ssd").mkdir(exist_ok=True)
        metadata = RocksDbMetadata(place.metadata_path)
        try:
            asyncio.run(_Maker(directory, metadata, layout, made, tenant).make())
        finally:
            metadata.close()
        place.begin_run()
    return made


class _Maker:
    def __init__(
        self, directory: Path, metadata: RocksDbMetadata, layout: SegmentLayout, made: Made, tenant: str
    ) -> None:
        self._path = directory / "ssd" / SEGMENTS_FILE
        self._metadata, self._layout, self._made, self._tenant = metadata, layout, made, tenant
        self._model = model_of(made.shape)
        self._fingerprint = self._model.fingerprint()
        self._now_ns = time.time_ns()

    async def make(self) -> None:
        """Write the file, then the records."""
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, self._made.ssd_bytes)
            await self._commit(Changes(models=[ModelRecord(self._tenant, self._model, self._now_ns)]))
            for begin in range(0, self._made.session_count, _BATCH_SESSIONS):
                await self._commit(self._batch(fd, begin))
            os.fsync(fd)
        finally:
            os.close(fd)

    async def _commit(self, changes: Changes) -> None:
        await self._metadata.commit(changes, is_durable=False)

    def _batch(self, fd: int, begin: int) -> Changes:
        changes = Changes()
        for session in range(begin, min(begin + _BATCH_SESSIONS, self._made.session_count)):
            is_whole = session in (0, self._made.session_count - 1)
            segments = list(self._segments(session, fd if is_whole else None))
            changes.segments += segments
            changes.sessions.append(self._session(session, [record.segment_id for record in segments]))
        return changes

    def _segments(self, session: int, fd: int | None) -> Iterator[SegmentRecord]:
        data = self._made.data(session) if fd is not None else None
        for number in range(self._made.session_segments):
            segment_id = session * self._made.session_segments + number + 1
            offset_bytes = (segment_id - 1) * self._layout.size_bytes
            checksum = self._write(fd, segment_id, number, data) if data is not None and fd is not None else 0
            slot = Slot(0, offset_bytes, self._layout.size_bytes)
            yield SegmentRecord(segment_id, self._identity(session, number), slot, checksum)

    def _identity(self, session: int, number: int) -> SegmentIdentity:
        tokens = self._layout.segment_tokens
        uid = _uid(session)
        return SegmentIdentity(self._tenant, uid, 1, number * tokens, tokens, self._fingerprint)

    def _write(self, fd: int, segment_id: int, number: int, data: Bytes) -> int:
        """Write a slot; returns its header's checksum."""
        tokens = self._layout.segment_tokens
        rows = by_stream(self._made.shape, data)
        chunks = [rows[spec.stream][number * tokens : (number + 1) * tokens] for spec in self._layout.specs]
        identity = self._identity((segment_id - 1) // self._made.session_segments, number)
        checksums = tuple(
            chunk_checksum(identity.seed(), spec.stream, chunk.data)
            for spec, chunk in zip(self._layout.specs, chunks, strict=True)
        )
        encoded = SegmentHeader(segment_id, identity, self._layout, checksums).encode()
        slot_bytes = (segment_id - 1) * self._layout.size_bytes
        os.pwrite(fd, encoded.ljust(self._layout.header_bytes, b"\0"), slot_bytes)
        for offset, chunk in zip(self._layout.offsets, chunks, strict=True):
            os.pwrite(fd, chunk.tobytes(), slot_bytes + offset)
        return header_checksum(encoded)

    def _session(self, session: int, segment_ids: Sequence[int]) -> SessionRecord:
        tokens = self._made.shape.token_count
        return SessionRecord(
            uid=_uid(session),
            tenant=self._tenant,
            session_id=session_name(session).removeprefix("sessions/"),
            model_id=self._model.model_id,
            layout=tuple(spec.stream for spec in self._layout.specs),
            generation=2,
            segment_ids=tuple(segment_ids),
            live=((0, tokens),),
            log_end=tokens,
            create_time_ns=self._now_ns,
            access_time_ns=self._now_ns,
            expire_time_ns=self._now_ns + _TTL_NS,
            ttl_ns=_TTL_NS,
            is_pinned=False,
        )


def _uid(session: int) -> bytes:
    # In no order of the sessions, as the store's own are.
    return blake2b(session.to_bytes(8, "big"), digest_size=16).digest()


def started(directory: Path, ssd_bytes: int) -> str:
    """Open it with a server of its own; what that took."""
    begin_s = time.monotonic()
    with serving(directory, arena_bytes=_ARENA_BYTES, ssd_bytes=ssd_bytes) as server:
        start_s = time.monotonic() - begin_s
        times = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        status = Path(f"/proc/{server.pid}/status").read_text().split()
    cpu_s = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    memory_mib = int(status[status.index("RssAnon:") + 1]) >> 10
    return f"start {start_s:.1f} s, {cpu_s:.1f} s of CPU, {memory_mib} MiB of the process's own memory"


def main() -> int:
    """Make one from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--segments", type=int, default=1_000_000)
    parser.add_argument("--session-segments", type=int, default=SESSION_SEGMENTS)
    parser.add_argument("--start", action="store_true", help="open it, and print what that takes")
    options = parser.parse_args()
    begin_s = time.monotonic()
    made = make(options.directory, options.segments, session_segments=options.session_segments)
    sys.stdout.write(
        f"{made.segment_count} segments of {made.session_count} sessions in {time.monotonic() - begin_s:.0f}"
        f" s; serve with --data-directory {options.directory} --ssd-size-bytes {made.ssd_bytes}\n"
    )
    if options.start:
        sys.stdout.write(started(options.directory, made.ssd_bytes) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
