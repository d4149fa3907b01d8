"""In which order format 1 had its SSD directories: found in what lies there, for it noted none.

They get their numbers for good when a directory is upgraded, so a wrong order would cost every session
its tokens. Reads, and changes nothing. Worst case: nothing recorded lies anywhere, which says nothing
about the order and is left to those who read the segments.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from ctxcache.errors import DataDirectoryUnusable
from ctxcache.metadata.base import SegmentRecord
from ctxcache.metadata.rocksdb import RocksDbMetadata
from ctxcache.scan import header_at
from ctxcache.ssd_directories import SEGMENTS

SAMPLE_COUNT = 64
"""Segments that are looked for, of each directory."""


def check_first_order(metadata_path: Path, directories: Sequence[Path]) -> None:
    """Raise DataDirectoryUnusable when what is recorded at one number lies in the directory of another.

    Also CorruptMetadata. Costs a pass over the segments' records, and a header per sample and directory.
    """
    if not metadata_path.exists():
        return
    for number, sample in sorted(_samples(metadata_path).items()):
        try:
            holders = [i for i, path in enumerate(directories) if _holds(path, sample)]
        except OSError as error:
            problem = f"{error.strerror}: {error.filename}"
            raise DataDirectoryUnusable(path=str(metadata_path.parent), problem=problem) from error
        if holders and number not in holders:
            problem = (
                f"it was SSD directory number {number} and is named as number {holders[0]}: name all SSD"
                " directories in the order in which they were named before this version, with --ssd-directories"
            )
            raise DataDirectoryUnusable(path=str(directories[holders[0]]), problem=problem)


def _samples(metadata_path: Path) -> Mapping[int, Sequence[SegmentRecord]]:
    """Some segments of each directory, by its number."""
    samples = defaultdict[int, list[SegmentRecord]](list)
    store = RocksDbMetadata(metadata_path)
    try:
        for record in store.segments():
            sample = samples[record.slot.path_index]
            if len(sample) < SAMPLE_COUNT:
                sample.append(record)
    finally:
        store.close()
    return samples


def _holds(directory: Path, sample: Sequence[SegmentRecord]) -> bool:
    """Whether any of the segments is there where it is recorded."""
    found = ((record, header_at(directory / SEGMENTS, record.slot.offset_bytes)) for record in sample)
    return any(
        at and at.header.segment_id == record.segment_id and at.header_checksum == record.header_checksum
        for record, at in found
    )
