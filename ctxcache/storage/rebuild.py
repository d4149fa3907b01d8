"""Rebuilding: metadata made anew from the catalog and from what the SSD files really hold.

The catalog says which sessions there are and which header each of their segments has; a scan says where
such headers are. A segment comes back when its header is the recorded one and every chunk matches: torn,
older, foreign and damaged slots are none of that. A session ends before the first segment that does not
come back. Deleted and expired sessions stay gone, as far as the catalog knows. No server may run.
Worst case: no catalog either, and nothing is rebuilt or changed. The old metadata is kept beside the new in
any case, and so is a catalog that could be read in part alone: the next run begins another.
"""

import fcntl
import logging
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ctxcache.errors import DataDirectoryUnusable, NothingToRebuild
from ctxcache.format.layout import SEGMENTS_FILE, Slot
from ctxcache.runtime.files import DIRECTORY_MODE, sync_directory
from ctxcache.storage.data_directory import METADATA, DataDirectory, check_not_restoring
from ctxcache.storage.metadata import records
from ctxcache.storage.metadata.base import SegmentRecord, SessionRecord
from ctxcache.storage.metadata.catalog import CATALOG, CatalogContents, Entry, read_catalog
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.metadata.shortages import check_room_to_open
from ctxcache.storage.metadata.witness import Witness
from ctxcache.storage.scan import ScannedSegment, is_whole, scan
from ctxcache.storage.ssd_directories import (
    forget_unreadable,
    in_order,
    instance_id_of,
    number_of,
    write_down,
)

# The sources, in the order in which they are believed:
#
#     catalog   which sessions there are, and the header checksum of each segment
#     scan      at which places headers with that checksum are
#     chunks    whether every byte there is what the header says
#     witness   whether the catalog itself ends too early
Place = tuple[int, ScannedSegment]
"""The number of a directory, and the place in its file."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Rebuilt:
    """The outcome of a rebuild. Tokens are live ones; `lost_token_count` of sessions that end earlier now."""

    session_count: int = 0
    token_count: int = 0
    lost_token_count: int = 0
    segment_count: int = 0
    lost_segment_count: int = 0
    unlisted_segment_count: int = 0
    """Whole headers that no session lists: of deleted sessions, and earlier copies of segments that grew."""
    commit: int = 0
    """The catalog's last commit."""
    missing_commit_count: int = 0
    """Commits that were on disk and are not in the catalog."""
    scanned_bytes: int = 0
    scan_duration_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether every durable token is there."""
        return not (self.lost_token_count or self.missing_commit_count or self.problems)


def rebuild(
    data_directory: Path, ssd_directories: Sequence[Path], *, created_by: str, is_dry_run: bool
) -> Rebuilt:
    """Make the metadata anew. With `is_dry_run` only tell the outcome.

    A refusal changes nothing. Raises NothingToRebuild, DataDirectoryUnusable, FormatTooNew,
    CapacityExceeded.
    """
    try:
        # A running server holds its SSD files, whichever data directory it has.
        with _claimed(ssd_directories):
            # Numbers come from the directories, before PATHS is needed.
            given = _numbered(ssd_directories)
            owners = [*map(instance_id_of, given), DataDirectory.instance_id_at(data_directory)]
            # The SSD directories come first, since the data directory may be lost.
            instance_id = next(filter(None, owners), None)
            if instance_id is None and not data_directory.is_dir():
                problem = "there is no data directory to make metadata for"
                raise DataDirectoryUnusable(path=str(data_directory), problem=problem)
            if instance_id is None:
                problem = "no SSD directory says whose it is, so there is nothing to make metadata from"
                raise NothingToRebuild(where=str(data_directory), problem=problem)
            # Another store's directories would get this store's sessions.
            if owners[-1] not in (None, instance_id):
                problem = f"the SSD directories belong to another data directory ({instance_id})"
                raise DataDirectoryUnusable(path=str(data_directory), problem=problem)
            if is_dry_run:
                return _collect(given, instance_id, _read(given, instance_id))[0]
            return _replace(data_directory, given, instance_id, created_by)
    except OSError as error:
        raise DataDirectoryUnusable(
            path=str(data_directory), problem=f"{error.strerror}: {error.filename}"
        ) from error


@contextmanager
def _claimed(directories: Sequence[Path]) -> Iterator[None]:
    """Keep servers away, whichever data directory they have. Raises DataDirectoryUnusable."""
    with ExitStack() as files:
        for path in (directory / SEGMENTS_FILE for directory in directories):
            if path.exists():
                file = files.enter_context(path.open("rb"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    problem = f"another server holds {path}"
                    raise DataDirectoryUnusable(path=str(path.parent), problem=problem) from error
        yield


def _replace(data_directory: Path, given: Sequence[Path], instance_id: str, created_by: str) -> Rebuilt:
    # All refusals come first. The scan is the last of them, for it may take an hour.
    check_not_restoring(data_directory)
    if data_directory.is_dir():
        check_room_to_open(data_directory)
    ordered = in_order(data_directory, instance_id, given, is_mended=True)
    contents = _read(ordered, instance_id)
    result, entries = _collect(ordered, instance_id, contents)
    # Clients saw generations of commits that are gone.
    generations = (s.generation for s in _sessions(contents.records))
    # The next generations lie above those of all records, since no generation may stand for two contents.
    crash_count = (max(generations, default=0) >> records.GENERATION_BITS) + 1
    DataDirectory.mend(
        data_directory, instance_id=instance_id, crash_count=crash_count, created_by=created_by
    )
    with DataDirectory.open(data_directory) as directory:
        forget_unreadable(data_directory, ordered)
        write_down(data_directory, instance_id, ordered)
        fresh = data_directory / f"{METADATA}.rebuilt"
        # An earlier rebuild may have left half-done files.
        shutil.rmtree(fresh, ignore_errors=True)
        store = RocksDbMetadata(fresh)
        # The number lies behind the witnessed commits: else the next start would take this metadata for an
        # old copy.
        store.restore(entries, result.commit + result.missing_commit_count + 1)
        store.close()
        # Lost commits had generations: those of the next run begin above them.
        directory.begin_run()
        if contents.problems:
            # The next run begins another catalog, and removes this one's files. The links keep them.
            _link_all(ordered[0] / CATALOG, _free_name(ordered[0] / CATALOG))
        # Damaged metadata is kept under another name, for those who want to look into it.
        if directory.metadata_path.exists():
            directory.metadata_path.rename(_free_name(directory.metadata_path))
        # The metadata is whole and closed before it gets its name: a crash in between begins a rebuild anew.
        fresh.rename(directory.metadata_path)
        sync_directory(data_directory)
    return result


def _read(directories: Sequence[Path], instance_id: str) -> CatalogContents:
    contents = read_catalog(directories[0] / CATALOG, instance_id)
    # An unreadable catalog must not pass for that of an empty store.
    if not contents.records and contents.problems:
        raise NothingToRebuild(where=str(directories[0] / CATALOG), problem="; ".join(contents.problems))
    return contents


def _collect(
    directories: Sequence[Path], instance_id: str, contents: CatalogContents
) -> tuple[Rebuilt, list[Entry]]:
    witness = Witness(directories, instance_id)
    result = Rebuilt(
        commit=contents.sequence,
        missing_commit_count=max(witness.sequence - contents.sequence, 0),
        problems=contents.problems,
    )
    places = _scan(directories, result)
    kept = dict(_segments(contents, directories, places, result))
    sessions = list(_sessions(contents.records))
    listed = {segment_id for session in sessions for segment_id in session.segment_ids}
    # No record names these places: deleted segments, and earlier copies of tails that grew.
    result.unlisted_segment_count = sum(map(len, places.values())) - sum(
        len(record.places) for record in kept.values()
    )
    for session in sessions:
        _count(session, kept, result)
    result.segment_count = len(kept)
    others = [(k, v) for k, v in contents.records.items() if not k.startswith(records.SEGMENT_PREFIX)]
    # Only listed segments come back: the next start would remove the record of another.
    segments = [
        (records.segment_key(i), records.encode_segment(kept[i])) for i in sorted(listed & kept.keys())
    ]
    return result, [*others, *segments]


def _scan(directories: Sequence[Path], result: Rebuilt) -> Mapping[int, list[Place]]:
    """The places of each header by its checksum: a segment that was written twice has several places."""
    began_s = time.monotonic()
    places = defaultdict[int, list[Place]](list)
    for number, directory in enumerate(directories):
        path = directory / SEGMENTS_FILE
        if not path.exists():
            result.problems.append(f"{path} is gone")
            continue
        result.scanned_bytes += path.stat().st_size
        for found in scan(path):
            places[found.header_checksum].append((number, found))
    result.scan_duration_s = round(time.monotonic() - began_s, 3)
    return places


def _segments(
    contents: CatalogContents, directories: Sequence[Path], places: Mapping[int, list[Place]], result: Rebuilt
) -> Iterator[tuple[int, SegmentRecord]]:
    """The recorded segments that are there, each at its real place."""
    for key, value in contents.records.items():
        if not key.startswith(records.SEGMENT_PREFIX):
            continue
        record = records.decode_segment(key, value)
        found = _slots(record, directories, places.get(record.header_checksum, ()))
        if found:
            yield record.segment_id, record._replace(slot=found[0], copy=found[1] if found[1:] else None)
        else:
            log.error("segment_not_found segment=%d", record.segment_id)
            result.lost_segment_count += 1


def _slots(record: SegmentRecord, directories: Sequence[Path], places: Iterable[Place]) -> list[Slot]:
    """The whole segment's places: the recorded ones that are there, or else one other place.

    Other places were given back, and may hold any bytes by now.
    """
    recorded = [(slot.path_index, slot.offset_bytes) for slot in record.places]
    whole: list[Slot] = []
    # Recorded places come first: another copy counts only where none of them is whole.
    for number, scanned in sorted(
        places, key=lambda place: (place[0], place[1].offset_bytes) not in recorded
    ):
        is_recorded = (number, scanned.offset_bytes) in recorded
        if (
            (is_recorded or not whole)
            and scanned.header.segment_id == record.segment_id
            and scanned.header.identity == record.identity
            and is_whole(directories[number] / SEGMENTS_FILE, scanned)
        ):
            whole.append(Slot(number, scanned.offset_bytes, record.slot.size_bytes))
    return whole


def _sessions(contents: Mapping[bytes, bytes]) -> Iterator[SessionRecord]:
    return (
        records.decode_session(key, value)
        for key, value in contents.items()
        if key.startswith(records.SESSION_PREFIX)
    )


def _count(session: SessionRecord, kept: Mapping[int, SegmentRecord], result: Rebuilt) -> None:
    lost = session.log_end
    identities = [kept[i].identity for i in session.segment_ids if i in kept]
    for begin, end in session.live:
        position = begin
        for identity in sorted(identities, key=lambda i: i.begin):
            # Segments may overlap where the newest tokens were dropped and written anew.
            if identity.begin <= position < identity.begin + identity.token_count:
                position = min(identity.begin + identity.token_count, end)
        if position < end:
            lost = min(lost, position)
    tokens = sum(end - begin for begin, end in session.live)
    held = sum(max(min(end, lost) - begin, 0) for begin, end in session.live)
    result.session_count += 1
    result.token_count += held
    result.lost_token_count += tokens - held


def _numbered(directories: Sequence[Path]) -> tuple[Path, ...]:
    """The directories by their numbers, or as given where they have none."""
    numbers = [(number_of(path), i) for i, path in enumerate(directories)]
    order = sorted((i if number is None else number, i) for number, i in numbers)
    return tuple(directories[i] for _, i in order)


def _link_all(directory: Path, kept: Path) -> None:
    """Give the files of a directory a second name, which costs no room."""
    kept.mkdir(mode=DIRECTORY_MODE)
    for path in directory.iterdir():
        (kept / path.name).hardlink_to(path)


def _free_name(path: Path) -> Path:
    """A free name beside `path`, for a damaged directory."""
    return next(
        free
        for i in range(1, 1 << 16)
        if not os.path.lexists(free := path.with_name(f"{path.name}.damaged-{i}"))
    )
