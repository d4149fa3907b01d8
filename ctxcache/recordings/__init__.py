"""Recordings of a live store's requests: files of JSON lines, and how they are written.

docs/recording.md has the format, and `simulate.recorded` reads it. Worst case: a full device, which is an
OSError, and the lines written before it stay.
"""

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TextIO

from ctxcache.archive.frames import refusals_of_file
from ctxcache.client.convert import document
from ctxcache.client.types import RecordedCall, RecordingPart
from ctxcache.errors import FileAlreadyExists, FileUnusable
from ctxcache.runtime.files import open_private
from ctxcache.simulate.recorded import FORMAT, VERSION

# These numbers stand for names: 64 bits, which JSON readers would round.
HASHES = frozenset(("session", "tenant", "source"))
CALL_FIELDS = tuple(
    (field.name, field.default is None)
    for field in fields(RecordedCall)
    if field.name not in ("at_ns", "kind")
)
"""Fields of a call's line, and whether each may be left out."""


@dataclass(slots=True)
class RecordedFile:
    """The contents of a file so far."""

    call_count: int = 0
    lost_count: int = 0
    elapsed_s: float = 0.0


def values_of(call: RecordedCall) -> dict[str, object]:
    """The fields of a call's line, without zeros that tell nothing."""
    values: dict[str, object] = {
        "at_ms": round(call.at_ns / 10**6, 3),
        "call": call.kind.name.lower(),
        "session": "",
        "tenant": "",
        "session_tokens": call.session_tokens,
    }
    for name, is_optional in CALL_FIELDS:
        value = getattr(call, name)
        # An optional field that is told is written, even where it is 0.
        if value is None or not (value or is_optional):
            continue
        if name in HASHES:
            values[name] = f"{value:016x}"
        else:
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


class Lines:
    """Turns parts into lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.written = RecordedFile()

    def write(self, part: RecordingPart) -> None:
        """Write all of a part."""
        if part.store is not None:
            self._line({"format": FORMAT, "version": VERSION, "store": document(part.store)})
        for layout in part.layouts:
            streams = [[same.row_bytes, same.count] for same in layout.streams]
            self._line({**document(replace(layout, streams=())), "streams": streams})
        for call in part.calls:
            self._line(values_of(call))
        written = self.written
        written.call_count += len(part.calls)
        if part.elapsed_ns is not None:
            written.elapsed_s = part.elapsed_ns / 10**9
        if part.lost_count:
            written.lost_count += part.lost_count
            self._line({"lost": part.lost_count, "at_ms": round(written.elapsed_s * 1000, 3)})

    def end(self) -> None:
        """Write the mark of a whole recording. A recording that was cut off has none."""
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
    # Errors of writes are included: an error that names no file would be told as standard output's.
    with refusals_of_file(str(path)), os.fdopen(opened, "wb") as raw:
        # The compression is fast: a recording is written beside a server.
        file = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=3) if path.suffix == ".gz" else raw
        with file, io.TextIOWrapper(file, encoding="utf-8") as text:
            yield text


def write(parts: Iterable[RecordingPart], file: TextIO) -> Iterator[RecordedFile]:
    """Write every part; yields after each. A caller that stops ends the recording, a failure cuts it off."""
    lines = Lines(file)
    is_cut_off = False
    try:
        for part in parts:
            lines.write(part)
            # A part that was yielded is in the file, even if this process ends.
            file.flush()
            yield lines.written
    except Exception:
        is_cut_off = True
        raise
    finally:
        if not is_cut_off:
            lines.end()
