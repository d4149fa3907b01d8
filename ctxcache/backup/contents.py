"""What a backup has: records and segments, all of them verified as they are read.

Worst case: bytes that are not what was written, or do not fit together, which is a FileDamaged.
"""

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ctxcache.core import ranges
from ctxcache.errors import CorruptSegment, FileDamaged
from ctxcache.format.archive import Frame, Kind, image_ranges, read_frames, unpack_record
from ctxcache.format.header import SegmentHeader, decode_header, header_checksum
from ctxcache.format.identity import SegmentIdentity, chunk_checksum
from ctxcache.format.streams import StreamSpec
from ctxcache.metadata import records
from ctxcache.metadata.base import ModelRecord, SessionRecord
from ctxcache.portable.files import refusals_of_file

Step = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and of how many."""


class Image(NamedTuple):
    """A segment: where in the archive it begins, and a slot's bytes."""

    offset: int
    header: SegmentHeader
    header_checksum: int
    slot: bytearray


class Kept(NamedTuple):
    """What is remembered of a segment."""

    offset: int
    identity: SegmentIdentity
    specs: tuple[StreamSpec, ...]
    size_bytes: int


@dataclass(slots=True)
class Contents:
    """What a backup has. Sessions by uid, models by tenant and id, segments by id: the last of each counts."""

    created_by: str = ""
    create_time_ns: int = 0
    crash_count: int = 0
    models: dict[tuple[str, str], ModelRecord] = field(default_factory=dict)
    sessions: dict[bytes, SessionRecord] = field(default_factory=dict)
    segments: dict[int, Kept] = field(default_factory=dict)


def survey(path: Path, step: Step) -> Contents:
    """Read and verify all of a backup. Raises FileDamaged, FormatTooNew, CorruptMetadata, FileUnusable."""
    contents = Contents()
    with _opened(path) as file, _parsed(path):
        size_bytes = path.stat().st_size
        frames = read_frames(file, str(path))
        for frame in frames:
            step("checking", frame.offset, size_bytes)
            match frame.kind:
                case Kind.FACTS:
                    facts = json.loads(frame.payload)
                    contents.created_by = str(facts["created_by"])
                    contents.create_time_ns = int(facts["create_time_ns"])
                    contents.crash_count = int(facts["crash_count"])
                case Kind.MODEL:
                    model = records.decode_model(*unpack_record(frame.payload))
                    contents.models[model.tenant, model.spec.model_id] = model
                case Kind.SESSION:
                    session = records.decode_session(*unpack_record(frame.payload))
                    contents.sessions[session.uid] = session
                case Kind.SEGMENT:
                    offset, header, _, _ = _image(path, frame, frames)
                    kept = Kept(offset, header.identity, header.layout.specs, header.layout.size_bytes)
                    contents.segments[header.segment_id] = kept
                case Kind.ROWS:
                    raise FileDamaged(path=str(path), problem=f"rows of nobody at byte {frame.offset}")
                case Kind.END:
                    if json.loads(frame.payload)["session_count"] != len(contents.sessions):
                        raise FileDamaged(path=str(path), problem="not all of its sessions are in it")
    for session in contents.sessions.values():
        _check(path, session, contents)
    return contents


def images(path: Path) -> Iterator[Image]:
    """Every segment of a backup, in its order. Raises FileDamaged, FormatTooNew, FileUnusable."""
    with _opened(path) as file, _parsed(path):
        frames = read_frames(file, str(path))
        for frame in frames:
            if frame.kind == Kind.SEGMENT:
                yield _image(path, frame, frames)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    with refusals_of_file(str(path)), path.open("rb") as file:
        yield file


@contextmanager
def _parsed(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise FileDamaged(path=str(path), problem=f"it does not parse: {error!r}") from error


def _image(path: Path, first: Frame, frames: Iterator[Frame]) -> Image:
    try:
        header = decode_header(first.payload)
    except CorruptSegment as error:
        raise FileDamaged(path=str(path), problem=f"{error} at byte {first.offset}") from error
    layout, row_count = header.layout, header.identity.token_count
    slot = bytearray(layout.size_bytes)
    head, *chunks = image_ranges(layout, row_count)
    slot[slice(*head)] = first.payload
    rest = memoryview(b"")
    for begin, end in chunks:
        at = begin
        while at < end:
            rest = rest or memoryview(_rows(path, first, next(frames)))
            part = rest[: end - at]
            slot[at : at + len(part)] = part
            at, rest = at + len(part), rest[len(part) :]
    seed, view = header.identity.seed(), memoryview(slot)
    found = tuple(
        chunk_checksum(seed, spec.stream, view[begin:end])
        for spec, (begin, end) in zip(layout.specs, chunks, strict=True)
    )
    if rest or found != header.checksums:
        problem = f"segment {header.segment_id} at byte {first.offset} is not what was written"
        raise FileDamaged(path=str(path), problem=problem)
    return Image(first.offset, header, header_checksum(first.payload), slot)


def _rows(path: Path, first: Frame, frame: Frame) -> bytes:
    if frame.kind != Kind.ROWS or not frame.payload:
        raise FileDamaged(path=str(path), problem=f"the segment at byte {first.offset} has too few rows")
    return frame.payload


def _check(path: Path, session: SessionRecord, contents: Contents) -> None:
    """Whether all that a session is made of is there."""
    model = contents.models.get((session.tenant, session.model_id))
    held = [contents.segments[i] for i in session.segment_ids if i in contents.segments]
    if model is not None:
        specs, fingerprint = model.spec.resolve(session.layout), model.spec.fingerprint()
        own = [
            (one.identity.begin, one.identity.begin + one.identity.token_count)
            for one in held
            if one.specs == specs and one.identity.model_fingerprint == fingerprint
        ]
        if len(own) == len(session.segment_ids) and not ranges.subtract(session.live, ranges.normalise(own)):
            return
    raise FileDamaged(path=str(path), problem=f"not all of sessions/{session.session_id} is in it")
