"""Writing: parts of a recording as lines of JSON, in the format of docs/recording.md.

Worst case: the device is full, which is an OSError; what was written up to then stays.
"""

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.archive.files import refusals_of_file
from ctxcache.errors import FileAlreadyExists, FileUnusable
from ctxcache.runtime.files import open_private
from ctxcache.simulate.recorded import FORMAT, VERSION
from ctxcache.v1 import recording_pb2

PREFIX = "RECORDED_KIND_"
HASHES = frozenset(("session", "tenant", "source"))


@dataclass(slots=True)
class Written:
    """What is in a file by now."""

    call_count: int = 0
    lost_count: int = 0
    elapsed_s: float = 0.0


def values_of(call: recording_pb2.RecordedCall) -> dict[str, object]:
    """The fields of a call's line; what is 0 and says nothing is left out."""
    found: dict[str, object] = {
        "at_ms": round(call.at_ns / 10**6, 3),
        "call": recording_pb2.RecordedKind.Name(call.kind).removeprefix(PREFIX).lower(),
        "session": "",
        "tenant": "",
        "session_tokens": call.session_tokens,
    }
    for field, value in call.ListFields():
        if field.name in HASHES:
            found[field.name] = f"{value:016x}"
        elif field.name not in ("at_ns", "kind"):
            found[field.name] = list(value) if field.is_repeated else value
    return found


class Lines:
    """Turns parts into lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.written = Written()

    def write(self, part: recording_pb2.RecordResponse) -> None:
        """Write all of a part."""
        if part.HasField("store"):
            self._line({"format": FORMAT, "version": VERSION, "store": _plain(part.store)})
        for layout in part.layouts:
            streams = [[same.row_bytes, same.count] for same in layout.streams]
            self._line({**_plain(layout), "streams": streams})
        for call in part.calls:
            self._line(values_of(call))
        written = self.written
        written.call_count += len(part.calls)
        if part.HasField("elapsed"):
            written.elapsed_s = part.elapsed.ToNanoseconds() / 10**9
        if part.lost_count:
            written.lost_count += part.lost_count
            self._line({"lost": part.lost_count, "at_ms": round(written.elapsed_s * 1000, 3)})

    def end(self) -> None:
        """Write what tells a whole recording from one that was cut off."""
        written = self.written
        self._line(
            {
                "end": True,
                "calls": written.call_count,
                "lost_calls": written.lost_count,
                "elapsed_ms": round(written.elapsed_s * 1000, 3),
            }
        )

    def _line(self, values: dict[str, object]) -> None:
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")


@contextmanager
def created(path: Path) -> Iterator[TextIO]:
    """Make a new file; its text is gzipped where its name ends in `.gz`.

    Raises FileAlreadyExists, FileUnusable, FileFull.
    """
    try:
        with refusals_of_file(str(path)):
            opened = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileUnusable as error:
        if isinstance(error.__cause__, FileExistsError):
            raise FileAlreadyExists(path=str(path)) from error
        raise
    with os.fdopen(opened, "wb") as raw:
        # Fast: a recording is written beside a server.
        file = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3) if path.suffix == ".gz" else raw
        with file, io.TextIOWrapper(file, encoding="utf-8") as text:
            yield text


def write(parts: Iterable[recording_pb2.RecordResponse], file: TextIO) -> Iterator[Written]:
    """Write every part; yields after each, and ends the recording whatever ends the parts."""
    lines = Lines(file)
    try:
        for part in parts:
            lines.write(part)
            # What is told is there, whatever becomes of this process.
            file.flush()
            yield lines.written
    finally:
        lines.end()


def _plain(message: Message) -> dict[str, object]:
    values: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if not field.is_repeated:
            values[field.name] = value.ToJsonString() if isinstance(value, Timestamp) else value
    return values
