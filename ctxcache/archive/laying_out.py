"""An archive laid out as a new store.

A data directory, and SSD directories, such that a server starts on them.

FORMAT is written last: before that no server takes any of it, and the same command begins it anew in the same
place. All that was written is read back before. The new store continues no other: it has an id of its own,
and generations that the store it comes from will not reach. Worst case: there is no room, or the archive is
damaged; nothing that starts is left.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

from ctxcache.archive.contents import STRETCH, ArchivedSession
from ctxcache.archive.frames import ROWS, ArchiveFrameReader, Source
from ctxcache.archive.reader import ArchiveContents, Rows, Stretch, split, survey
from ctxcache.core import ranges
from ctxcache.core.prefix.keys import BLOCK_BYTES, BLOCK_TOKENS, NO_PARENT, TOKEN_BYTES, scope_of
from ctxcache.errors import CapacityExceeded, CorruptSegment, DataDirectoryUnusable
from ctxcache.format.checksums import chunk_checksum
from ctxcache.format.layout import (
    LONG_SLOT_BYTES,
    SEGMENTS_FILE,
    SegmentHeader,
    SegmentIdentity,
    SegmentLayout,
    Slot,
    align,
    header_checksum,
)
from ctxcache.format.streams import TOKENS, StreamSpec, ranges_of
from ctxcache.runtime.files import claim_directory, sync_directory
from ctxcache.settings.sizes import ssd_bytes
from ctxcache.storage.data_directory import FreshDirectory
from ctxcache.storage.metadata import records
from ctxcache.storage.metadata.base import ModelRecord, SegmentRecord, SessionRecord
from ctxcache.storage.metadata.catalog import Entry
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.scan import header_at, is_whole
from ctxcache.storage.ssd_directories import DEVICE, PATHS, in_order, instance_id_of, write_down

Step = Callable[[str, int, int], None]
"""Called with what is being done, how many bytes of it are done, and of how many."""
# The crash count is the upper part of a generation. With a random jump no generation of the new store is one
# of the old store's, unless that one crashes 65,536 times; two stores of one backup differ from each other.
LEAST_JUMP, JUMPS = 1 << 16, 1 << 20
"""Crashes that a restored store seems to have had more than its source.

Two stores of the same backup differ as well.
"""
_MADE_HERE = {DEVICE, SEGMENTS_FILE, f"{DEVICE}.partial"}
_MAY_PRECEDE = {"lost+found"}


@dataclass(frozen=True, slots=True)
class Restored:
    """The sessions and segments of an archive.

    Tokens are live ones, by session; expired sessions were left out.
    """

    session_count: int
    token_count: int
    segment_count: int
    model_count: int
    expired_session_count: int
    segment_bytes: int
    created_by: str
    create_time_ns: int


@dataclass(frozen=True, slots=True)
class _Laid:
    """A segment that is to be made.

    Rows `[row_begin, row_begin + row_count)` of a frame, written by `session`.
    """

    segment_id: int
    session: ArchivedSession
    begin: int
    row_begin: int
    row_count: int
    layout: SegmentLayout

    @property
    def identity(self) -> SegmentIdentity:
        """The identity that the segment's checksums are bound to."""
        session = self.session
        return SegmentIdentity(
            session.model.tenant,
            session.uid,
            session.generation,
            self.begin,
            self.row_count,
            session.model.fingerprint,
        )


@dataclass(slots=True)
class _Plan:
    """The sessions that have not expired, and their segments, by their rows' frame and place in it."""

    copies_limit: int
    """As many copies as the store has SSD directories: others would be lacking for ever."""
    sessions: list[SessionRecord] = field(default_factory=list)
    segments: dict[int, dict[int, _Laid]] = field(default_factory=dict)
    segment_count: int = 0
    segment_bytes: int = 0
    keyed: dict[int, tuple[ArchivedSession, int]] = field(default_factory=dict)
    """The session that gives a segment its keys, by segment id, and the previous segment there, or 0.

    Of several sessions that list the segment, it is the one with the most whole tokens.
    """

    def add(self, session: ArchivedSession, stretches: Iterable[Stretch], layout: SegmentLayout) -> None:
        """Take a session. It shares rows that an earlier session brought."""
        laid = [segment for stretch in stretches for segment in self._segments(session, stretch, layout)]
        listed = [segment.segment_id for segment in laid]
        # Only segments of whole tokens have keys. The first segment behind a drop ends the chain.
        for previous, segment in pairwise([None, *laid]):
            if segment is None or segment.begin >= session.whole_token_count:
                break
            known = self.keyed.get(segment.segment_id)
            if known is None or known[0].whole_token_count < session.whole_token_count:
                self.keyed[segment.segment_id] = session, previous.segment_id if previous else 0
        self.sessions.append(
            SessionRecord(
                uid=session.uid,
                tenant=session.model.tenant,
                session_id=session.session_id,
                model_id=session.model.spec.model_id,
                layout=session.layout,
                generation=session.generation,
                segment_ids=tuple(listed),
                live=session.live,
                log_end=session.log_end,
                create_time_ns=session.create_time_ns,
                access_time_ns=session.access_time_ns,
                expire_time_ns=session.expire_time_ns,
                ttl_ns=session.ttl_ns or None,
                is_pinned=session.is_pinned,
                salt=session.salt,
                labels=session.labels,
                copies=min(session.copies, self.copies_limit),
                contents=session.contents,
            )
        )

    def _segments(self, session: ArchivedSession, stretch: Stretch, layout: SegmentLayout) -> Iterator[_Laid]:
        """The segments of a frame that have tokens of the session.

        A frame of a store's own is one segment as it was there.
        """
        known = self.segments.setdefault(stretch.number, {})
        row_end = 0
        while stretch.begin + row_end < stretch.end:
            # The cuts follow the frame's rows, whatever of them a session has: sessions of a frame share
            # segments.
            row, left_count = row_end, stretch.row_count - row_end
            segment_layout = layout.filled_by(left_count, LONG_SLOT_BYTES)
            row_end += min(segment_layout.segment_tokens, left_count)
            begin = stretch.begin + row
            if not ranges.clip(session.live, begin, min(stretch.begin + row_end, stretch.end)):
                continue
            # The frame's row is the key: two sessions that share the frame must name the same segment.
            if row not in known:
                self.segment_count += 1
                self.segment_bytes += segment_layout.size_bytes
                known[row] = _Laid(self.segment_count, session, begin, row, row_end - row, segment_layout)
            yield known[row]


class _Chain(NamedTuple):
    """A segment's keys, of which the first is of the tokens up to `first`, and what continues them.

    `parent` is the last key, or the one before the segment. `rest` has the ids of the tokens behind the last
    64, which end at `end`.
    """

    keys: tuple[bytes, ...]
    first: int
    parent: bytes
    rest: bytes
    end: int

    def at(self, position: int) -> tuple[bytes, bytes] | None:
        """The parent of the keys from `position` on, and the ids in between; None where that is not known."""
        if position == self.end:
            return self.parent, self.rest
        number, rest = divmod(position - self.first, BLOCK_TOKENS)
        return (self.keys[number], b"") if not rest and 0 <= number < len(self.keys) else None


def _chain(segment: _Laid, plan: _Plan, chains: Mapping[int, _Chain], rows: Rows) -> _Chain | None:
    """The keys of a segment's tokens; None where the tokens before them are not known, or were dropped.

    The keys are those of `core/prefix/keys.py` and the server. Only the search by tokens depends on them.
    """
    session, previous_id = plan.keyed.get(segment.segment_id, (segment.session, 0))
    end = min(segment.begin + segment.row_count, session.whole_token_count)
    if segment.begin >= end:
        return None
    previous = chains.get(previous_id)
    before = (NO_PARENT, b"") if not segment.begin else previous.at(segment.begin) if previous else None
    if before is None:
        # An unknown chain is no error: such tokens are not found by their ids, and all else works.
        return None
    parent, rest = before
    token_ids = rest + rows[TOKENS][segment.row_begin : segment.row_begin + end - segment.begin].tobytes()
    first = segment.begin - len(rest) // TOKEN_BYTES
    model, layout = session.model, tuple(ranges_of(session.layout))
    scope = scope_of(model.tenant, model.fingerprint, layout, session.salt)
    keys = tuple(scope.keys(token_ids, parent, session.contents, first))
    rest = token_ids[len(keys) * BLOCK_BYTES :]
    return _Chain(keys, first + BLOCK_TOKENS, keys[-1] if keys else parent, rest, end)


def look(source: Source, *, now_ns: int, step: Step) -> Restored:
    """Verify an archive, and tell what it would bring now. Raises FileDamaged, FormatTooNew, FileUnusable."""
    contents = _survey(source, step)
    return _restored(contents, _plan(contents, now_ns))


# The order of what is written, and what a crash at each step leaves (the same command begins anew):
#
#     RESTORING                a directory that no server takes, and that knows its own id
#     SSD directories emptied  only what this id has made, or new ones
#     PATHS                    which directory is which
#     segments                 written, synced, dropped from the cache, read back and verified
#     metadata                 RocksDB, with every record
#     RUNS, FORMAT             from here on a server starts; RESTORING goes
def lay_out(
    source: Source,
    data_directory: Path,
    ssd_directories: Sequence[Path],
    *,
    ssd_size_bytes: int,
    now_ns: int,
    created_by: str,
    step: Step,
) -> Restored:
    """Verify an archive and make a store of it; `ssd_size_bytes` of each SSD file, 0 is a size that fits.

    Raises as `look` does, and DataDirectoryUnusable, CapacityExceeded, CorruptSegment, TierFailure.
    """
    contents = _survey(source, step)
    plan = _plan(contents, now_ns, copies_limit=len(ssd_directories))
    with FreshDirectory.begin(data_directory) as directory, _refusals(data_directory):
        if directory.metadata_path.exists():
            shutil.rmtree(directory.metadata_path)
        (data_directory / PATHS).unlink(missing_ok=True)
        for path in ssd_directories:
            _empty(path, directory.instance_id)
        ordered = in_order(data_directory, directory.instance_id, ssd_directories)
        write_down(data_directory, directory.instance_id, ordered)
        laid = [one for of_frame in plan.segments.values() for one in of_frame.values()]
        slots, file_bytes = _places(laid, ordered, ssd_size_bytes)
        with _files(ordered, file_bytes) as fds:
            segments = list(_write(source, contents.file_id, plan, slots, fds, step))
        for i, record in enumerate(segments):
            step("verifying", i, len(segments))
            _check(ordered, record)
        _write_metadata(directory.metadata_path, chain(_records(contents, plan), map(_entry, segments)))
        step("finishing", 1, 1)
        jump = LEAST_JUMP + secrets.randbelow(JUMPS)
        directory.finish(crash_count=_crash_count(contents) + jump, created_by=created_by)
    return _restored(contents, plan)


def _survey(source: Source, step: Step) -> ArchiveContents:
    size_bytes, done_bytes = source.size_bytes or 0, 0

    def told(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        step("checking", done_bytes, size_bytes)

    os.lseek(source.fd, 0, os.SEEK_SET)
    return survey(source, told)


def _plan(contents: ArchiveContents, now_ns: int, *, copies_limit: int = 2) -> _Plan:
    plan = _Plan(copies_limit)
    layouts: dict[tuple[StreamSpec, ...], SegmentLayout] = {}
    for session, stretches in contents.sessions:
        if session.expire_time_ns > now_ns:
            layout = layouts.setdefault(session.specs, SegmentLayout(session.specs))
            plan.add(session, stretches, layout)
    return plan


def _restored(contents: ArchiveContents, plan: _Plan) -> Restored:
    return Restored(
        session_count=len(plan.sessions),
        token_count=sum(ranges.count(session.live) for session in plan.sessions),
        segment_count=plan.segment_count,
        model_count=len(contents.models),
        expired_session_count=len(contents.sessions) - len(plan.sessions),
        segment_bytes=plan.segment_bytes,
        created_by=contents.origin.created_by,
        create_time_ns=contents.begin_time_ns,
    )


def _crash_count(contents: ArchiveContents) -> int:
    """The crash count is at least that of the archive's store: generations begin with it."""
    highest = max((session.generation for session, _ in contents.sessions), default=0)
    return max(contents.origin.crash_count, highest >> records.GENERATION_BITS)


def _empty(path: Path, instance_id: str) -> None:
    """Make an SSD directory, or empty one of an earlier try. Raises DataDirectoryUnusable, OSError."""
    claim_directory(path)
    entries = {entry.name for entry in path.iterdir()} - _MAY_PRECEDE
    # The directory is empty, or this command began it, or its owner is not written down yet.
    is_ours = instance_id_of(path) == instance_id or entries <= {f"{DEVICE}.partial"}
    if entries - _MADE_HERE or not is_ours:
        problem = f"it is not empty ({min(entries)} is in it): name a new one"
        raise DataDirectoryUnusable(path=str(path), problem=problem)
    # The file that names the owner is renamed last.
    for name in (SEGMENTS_FILE, DEVICE):
        (path / name).unlink(missing_ok=True)


def _places(
    laid: Iterable[_Laid], directories: Sequence[Path], ssd_size_bytes: int
) -> tuple[dict[int, Slot], list[int]]:
    """A slot for each segment, by its id, and the size of each file. Raises CapacityExceeded."""
    free = [shutil.disk_usage(path).free for path in directories]
    room = [align(ssd_size_bytes) or free_bytes for free_bytes in free]
    left, ends, slots = list(room), [0] * len(directories), {}
    for segment in laid:
        size_bytes = segment.layout.size_bytes
        # Each segment goes onto the path with the most room left, so that the files fill alike.
        number = max(range(len(left)), key=left.__getitem__)
        slots[segment.segment_id] = Slot(number, ends[number], size_bytes)
        ends[number] += size_bytes
        left[number] -= size_bytes
    # The end tells: any path below 0 means that the store does not fit.
    if min(left) < 0:
        raise CapacityExceeded(
            tier="SSD", needed_bytes=sum(ends), free_bytes=sum(room), limit_bytes=sum(room)
        )
    wanted = [align(ssd_size_bytes) or ssd_bytes(path, SEGMENTS_FILE) for path in directories]
    return slots, [max(end, size_bytes) for end, size_bytes in zip(ends, wanted, strict=True)]


@contextmanager
def _files(directories: Sequence[Path], file_bytes: Sequence[int]) -> Iterator[list[int]]:
    """The files of segments, new, all of their blocks allocated; on disk at the end."""
    with ExitStack() as opened:
        fds = []
        for directory, size_bytes in zip(directories, file_bytes, strict=True):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fds.append(os.open(directory / SEGMENTS_FILE, flags, mode=0o600))
            opened.callback(os.close, fds[-1])
            # A server with another data directory must not take the file meanwhile.
            fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The blocks are allocated: a write to a sparse file on a full filesystem would fail in the middle
            # of serving.
            os.posix_fallocate(fds[-1], 0, size_bytes)
        yield fds
        for fd, directory in zip(fds, directories, strict=True):
            os.fsync(fd)
            # The pages are dropped, so that the bytes are read back from the device.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            sync_directory(directory)


def _write(
    source: Source, file_id: bytes, plan: _Plan, slots: Mapping[int, Slot], fds: Sequence[int], step: Step
) -> Iterator[SegmentRecord]:
    chains: dict[int, _Chain] = {}
    os.lseek(source.fd, 0, os.SEEK_SET)
    reader = ArchiveFrameReader(source)
    # The file was verified once already. It must be the same file now.
    if reader.file_id != file_id:
        raise reader.damage("another archive took its place while it was read")
    for frame in reader.frames():
        step("writing", reader.at_bytes, source.size_bytes or 0)
        laid = plan.segments.get(frame.number)
        if not laid or frame.tag != ROWS:
            continue
        specs = next(iter(laid.values())).layout.specs
        payload = frame.payload[STRETCH.size :]
        rows = split(specs, len(payload) // sum(spec.row_bytes for spec in specs), payload)
        for segment in laid.values():
            slot = slots[segment.segment_id]
            image, checksum = _image(segment, rows)
            _write_all(fds[slot.path_index], image, slot.offset_bytes)
            chain = _chain(segment, plan, chains, rows)
            if chain is not None:
                chains[segment.segment_id] = chain
            yield SegmentRecord(
                segment.segment_id,
                segment.identity,
                slot,
                checksum,
                keys=chain.keys if chain else (),
                segment_tokens=segment.layout.segment_tokens,
            )


def _image(segment: _Laid, rows: Rows) -> tuple[bytearray, int]:
    """A segment's slot as a store has it, and its header's checksum."""
    layout, identity = segment.layout, segment.identity
    slot, seed, checksums = bytearray(layout.size_bytes), identity.seed(), []
    for spec, begin in zip(layout.specs, layout.offsets, strict=True):
        chunk = rows[spec.stream][segment.row_begin : segment.row_begin + segment.row_count].data.cast("B")
        slot[begin : begin + len(chunk)] = chunk
        checksums.append(chunk_checksum(seed, spec.stream, chunk))
    header = SegmentHeader(segment.segment_id, identity, layout, tuple(checksums)).encode()
    slot[: len(header)] = header
    return slot, header_checksum(header)


def _write_all(fd: int, data: bytearray, offset_bytes: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset_bytes)
        view, offset_bytes = view[written:], offset_bytes + written


def _check(directories: Sequence[Path], record: SegmentRecord) -> None:
    path = directories[record.slot.path_index] / SEGMENTS_FILE
    found = header_at(path, record.slot.offset_bytes)
    # Header and chunks are read as by a server's start.
    if not (found and found.header_checksum == record.header_checksum and is_whole(path, found)):
        problem = f"{path} gives back other bytes than were written"
        raise CorruptSegment(segment_id=record.segment_id, problem=problem)


def _records(contents: ArchiveContents, plan: _Plan) -> Iterator[Entry]:
    for model in contents.models:
        record = ModelRecord(model.tenant, model.spec, model.create_time_ns, model.probe)
        yield records.model_key(model.tenant, model.spec.model_id), records.encode_model(record)
    for session in plan.sessions:
        yield records.session_key(session.uid), records.encode_session(session)


def _entry(record: SegmentRecord) -> Entry:
    return records.segment_key(record.segment_id), records.encode_segment(record)


def _write_metadata(path: Path, entries: Iterable[Entry]) -> None:
    store = RocksDbMetadata(path)
    try:
        store.restore(entries, 1)
    finally:
        store.close()
    # The directory's own entry is durable before FORMAT says that it is whole.
    sync_directory(path.parent)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise DataDirectoryUnusable(path=str(path), problem=f"{error.strerror}{where}") from error
