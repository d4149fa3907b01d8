"""Laying a backup out: a new data directory, and SSD directories, such that a server starts on them.

FORMAT is written last: before that no server takes any of it, and it can be begun anew where it was begun. What was
written is read back before. The new store is nobody's continuation: it has an id of its own, and generations that the
one it comes from will not reach. Worst case: there is no room, or the backup is damaged; nothing that starts is left.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ctxcache.backup.contents import Contents, Step, images, survey
from ctxcache.data_directory import FreshDirectory
from ctxcache.errors import CapacityExceeded, CorruptSegment, DataDirectoryUnusable
from ctxcache.facts_file import sync_directory
from ctxcache.format.layout import align
from ctxcache.format.slot import Slot
from ctxcache.metadata import records
from ctxcache.metadata.base import SegmentRecord, SessionRecord
from ctxcache.metadata.catalog_contents import Entry
from ctxcache.metadata.rocksdb import RocksDbMetadata
from ctxcache.privacy import claim_directory
from ctxcache.scan import header_at, is_whole
from ctxcache.sizes import ssd_bytes
from ctxcache.ssd_directories import DEVICE, PATHS, SEGMENTS, in_order, instance_id_of, write_down

LEAST_JUMP, JUMPS = 1 << 16, 1 << 20
"""Crashes that a restored store seems to have had more than its source: two of the same backup differ as well."""
_MADE_HERE = {DEVICE, SEGMENTS, f"{DEVICE}.partial"}
_MAY_PRECEDE = {"lost+found"}


@dataclass(frozen=True, slots=True)
class Restored:
    """What a backup brings. Tokens are live ones, by session; expired sessions were left out."""

    session_count: int
    token_count: int
    segment_count: int
    model_count: int
    expired_session_count: int
    segment_bytes: int
    created_by: str
    create_time_ns: int


def look(archive: Path, *, now_ns: int, step: Step) -> Restored:
    """Verify a backup; what it would bring now. Raises FileDamaged, FormatTooNew, CorruptMetadata, FileUnusable."""
    return _selected(survey(archive, step), now_ns)[1]


def lay_out(
    archive: Path, data_directory: Path, ssd_directories: Sequence[Path], *, ssd_size_bytes: int, now_ns: int,
    created_by: str, step: Step,
) -> Restored:  # fmt: skip
    """Verify a backup and make a store of it; `ssd_size_bytes` of each SSD file, 0 is a size that fits.

    Raises as `look` does, and DataDirectoryUnusable, CapacityExceeded, CorruptSegment, TierFailure.
    """
    contents = survey(archive, step)
    sessions, found = _selected(contents, now_ns)
    wanted = {segment_id for session in sessions for segment_id in session.segment_ids}
    sizes = {contents.segments[i].offset: contents.segments[i].size_bytes for i in wanted}
    with FreshDirectory.begin(data_directory) as directory, _refusals(data_directory):
        if directory.metadata_path.exists():
            shutil.rmtree(directory.metadata_path)
        (data_directory / PATHS).unlink(missing_ok=True)
        for path in ssd_directories:
            _empty(path, directory.instance_id)
        ordered = in_order(data_directory, directory.instance_id, ssd_directories)
        write_down(data_directory, directory.instance_id, ordered)
        slots, file_bytes = _places(sizes, ordered, ssd_size_bytes)
        with _files(ordered, file_bytes) as fds:
            segments = list(_write(archive, slots, fds, step))
        for i, record in enumerate(segments):
            step("verifying", i, len(segments))
            _check(ordered, record)
        _write_metadata(directory.metadata_path, chain(_records(contents, sessions), map(_entry, segments)))
        step("finishing", 1, 1)
        jump = LEAST_JUMP + secrets.randbelow(JUMPS)
        directory.finish(crash_count=contents.crash_count + jump, created_by=created_by)
    return found


def _selected(contents: Contents, now_ns: int) -> tuple[list[SessionRecord], Restored]:
    sessions = [s for s in contents.sessions.values() if s.expire_time_ns > now_ns]
    wanted = {segment_id for session in sessions for segment_id in session.segment_ids}
    restored = Restored(
        session_count=len(sessions),
        token_count=sum(end - begin for session in sessions for begin, end in session.live),
        segment_count=len(wanted),
        model_count=len(contents.models),
        expired_session_count=len(contents.sessions) - len(sessions),
        segment_bytes=sum(contents.segments[i].size_bytes for i in wanted),
        created_by=contents.created_by,
        create_time_ns=contents.create_time_ns,
    )
    return sessions, restored


def _empty(path: Path, instance_id: str) -> None:
    """Make an SSD directory, or empty one that this was begun with. Raises DataDirectoryUnusable, OSError."""
    claim_directory(path)
    found = {entry.name for entry in path.iterdir()} - _MAY_PRECEDE
    is_ours = instance_id_of(path) == instance_id or found <= {f"{DEVICE}.partial"}
    if found - _MADE_HERE or not is_ours:
        problem = f"it is not empty ({min(found)} is in it): name a new one"
        raise DataDirectoryUnusable(path=str(path), problem=problem)
    # What says whose it is goes last.
    for name in (SEGMENTS, DEVICE):
        (path / name).unlink(missing_ok=True)


def _places(
    sizes: dict[int, int], directories: Sequence[Path], ssd_size_bytes: int
) -> tuple[dict[int, Slot], list[int]]:
    """A slot for each segment, by where it is in the archive, and the size of each file. Raises CapacityExceeded."""
    free = [shutil.disk_usage(path).free for path in directories]
    room = [align(ssd_size_bytes) or free_bytes for free_bytes in free]
    left, ends, slots = list(room), [0] * len(directories), {}
    for offset, size_bytes in sorted(sizes.items()):
        number = max(range(len(left)), key=left.__getitem__)
        slots[offset] = Slot(number, ends[number], size_bytes)
        ends[number] += size_bytes
        left[number] -= size_bytes
    if min(left) < 0:
        raise CapacityExceeded(
            tier="SSD", needed_bytes=sum(sizes.values()), free_bytes=sum(room), limit_bytes=sum(room)
        )
    wanted = [align(ssd_size_bytes) or ssd_bytes(path, SEGMENTS) for path in directories]
    return slots, [max(end, size_bytes) for end, size_bytes in zip(ends, wanted, strict=True)]


@contextmanager
def _files(directories: Sequence[Path], file_bytes: Sequence[int]) -> Iterator[list[int]]:
    """The files of segments, new, all of their blocks allocated; on disk at the end."""
    with ExitStack() as opened:
        fds = []
        for directory, size_bytes in zip(directories, file_bytes, strict=True):
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fds.append(os.open(directory / SEGMENTS, flags, mode=0o600))
            opened.callback(os.close, fds[-1])
            # No server, whichever data directory it has.
            fcntl.flock(fds[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fds[-1], 0, size_bytes)
        yield fds
        for fd, directory in zip(fds, directories, strict=True):
            os.fsync(fd)
            # What is read back comes from the device.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            sync_directory(directory)


def _write(archive: Path, slots: dict[int, Slot], fds: Sequence[int], step: Step) -> Iterator[SegmentRecord]:
    size_bytes = archive.stat().st_size
    for image in images(archive):
        step("writing", image.offset, size_bytes)
        slot = slots.get(image.offset)
        if slot is not None:
            _write_all(fds[slot.path_index], image.slot, slot.offset_bytes)
            yield SegmentRecord(image.header.segment_id, image.header.identity, slot, image.header_checksum)


def _write_all(fd: int, data: bytearray, offset_bytes: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset_bytes)
        view, offset_bytes = view[written:], offset_bytes + written


def _check(directories: Sequence[Path], record: SegmentRecord) -> None:
    path = directories[record.slot.path_index] / SEGMENTS
    found = header_at(path, record.slot.offset_bytes)
    if not (found and found.header_checksum == record.header_checksum and is_whole(path, found)):
        problem = f"{path} gives back other bytes than were written"
        raise CorruptSegment(segment_id=record.segment_id, problem=problem)


def _records(contents: Contents, sessions: Iterable[SessionRecord]) -> Iterator[Entry]:
    for model in contents.models.values():
        yield records.model_key(model.tenant, model.spec.model_id), records.encode_model(model)
    for session in sessions:
        yield records.session_key(session.uid), records.encode_session(session)


def _entry(record: SegmentRecord) -> Entry:
    return records.segment_key(record.segment_id), records.encode_segment(record)


def _write_metadata(path: Path, entries: Iterable[Entry]) -> None:
    store = RocksDbMetadata(path)
    try:
        store.restore(entries, 1)
    finally:
        store.close()
    sync_directory(path.parent)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise DataDirectoryUnusable(path=str(path), problem=f"{error.strerror}{where}") from error
