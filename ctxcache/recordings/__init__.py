"""Recordings of a live store's requests: files of JSON lines, written, read and counted.

docs/recording.md has the format. Memory of a reader: its layouts, and in `sessions_before` an entry per
session. Worst case: InvalidTrace, which names file, line and field; a full device, which is an OSError, and
the lines written before it stay.
"""

import gzip
import io
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TextIO

from ctxcache.archive.frames import refusals_of_file
from ctxcache.client.convert import document
from ctxcache.client.types import RecordedCall, RecordingPart
from ctxcache.errors import FileAlreadyExists, FileUnusable
from ctxcache.runtime.files import open_private
from ctxcache.simulate.recorded import FIELDS, FORMAT, VERSION, Called, called, check_header
from ctxcache.simulate.rows import InvalidTrace, Row, rows_of

DEFAULT_TTL_S = 3600.0
SIZED = frozenset(("open", "append", "fork"))
"""Calls after which a session takes room."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The bytes of a token: bytes of a row, and how many neighbouring streams have such rows."""

    streams: tuple[tuple[int, int], ...]
    segment_bytes: int
    segment_tokens: int


@dataclass(frozen=True, slots=True)
class Before:
    """A session that was there when the recording began, or when it was first heard of."""

    session: str
    layout: int
    tokens: int


@dataclass(slots=True)
class RecordingContents:
    """The contents of a recording."""

    store: Mapping[str, object]
    layouts: dict[int, Layout] = field(default_factory=dict)
    before: list[Before] = field(default_factory=list)
    """In the order in which they were first heard of."""
    call_count: int = 0
    lost_count: int = 0
    elapsed_s: float = 0.0
    ttl_s: float = 0.0
    """The longest that a session was opened with."""
    is_whole: bool = False
    """Whether it has its last line."""
    appended_tokens: Counter[int] = field(default_factory=Counter)
    """By layout."""

    @property
    def token_bytes(self) -> int:
        """The average bytes of an appended token; 1 where none was."""
        size_bytes = sum(
            count * self.layouts[number].segment_bytes // self.layouts[number].segment_tokens
            for number, count in self.appended_tokens.items()
        )
        return max(size_bytes // max(self.appended_tokens.total(), 1), 1)

    def simulate_options(self) -> tuple[str, ...]:
        """Those with which `ctxcache simulate` has this store's sizes."""
        dram_bytes, ssd_bytes = (_whole(self.store.get(name)) for name in ("dram_bytes", "ssd_bytes"))
        said = {
            "--dram": f"{dram_bytes}",
            "--ssd": f"{max(ssd_bytes - dram_bytes, 0)}",
            "--token-bytes": f"{self.token_bytes}",
            "--ttl": f"{self.ttl_s or DEFAULT_TTL_S:g}s",
            "--policies": str(self.store.get("placement_policy", "")),
        }
        return tuple(part for option in said.items() if option[1] for part in option)


def is_recording(path: Path) -> bool:
    """Whether it is one, and no trace of another kind. Raises InvalidTrace where its first line is no row."""
    header = next(rows_of(path), None)
    return header is not None and all(field in header.values for field in FIELDS)


def contents(path: Path) -> RecordingContents:
    """Read all of it once. Raises InvalidTrace."""
    rows = rows_of(path)
    header = next(rows, None)
    if header is None:
        raise InvalidTrace.at(path, 1, None, "no recording")
    check_header(header)
    store = header.values.get("store")
    found = RecordingContents(store if isinstance(store, dict) else {})
    known: set[str] = set()
    for row in rows:
        call = called(row)
        if call is not None:
            if call.count("layout") not in found.layouts and (call.kind in SIZED or "layout" in call.values):
                row.refuse("layout", "none of those that were told before")
            _count(found, call, known)
        elif "layout" in row.values:
            found.layouts[row.count("layout")] = _layout(row)
        elif "lost" in row.values:
            found.lost_count += row.count("lost")
        elif "end" in row.values:
            found.is_whole = True
            found.elapsed_s = max(found.elapsed_s, row.time_ms("elapsed_ms") / 1000)
    return found


def calls(path: Path) -> Iterator[Called]:
    """Every call, in order. Raises InvalidTrace."""
    for row in rows_of(path):
        call = called(row)
        if call is not None:
            yield call


def _count(found: RecordingContents, call: Called, known: set[str]) -> None:
    found.call_count += 1
    found.elapsed_s = max(found.elapsed_s, call.at_s)
    if call.kind == "append":
        found.appended_tokens[call.count("layout")] += call.count("tokens")
    if call.kind == "open":
        found.ttl_s = max(found.ttl_s, call.count("ttl_ms") / 1000)
    if "layout" not in call.values or call.session in known:
        return
    known.add(call.session)
    if call.tokens_before and not call.is_refused:
        found.before.append(Before(call.session, call.count("layout"), call.tokens_before))


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _layout(row: Row) -> Layout:
    streams = row.values.get("streams")
    if not isinstance(streams, list) or not streams:
        row.refuse("streams", "not a list of bytes and counts")
    pairs = []
    for pair in streams:
        if not (isinstance(pair, list) and [type(part) for part in pair] == [int, int] and min(pair) > 0):
            row.refuse("streams", f"{pair!r} is not bytes of a row and a count")
        pairs.append((pair[0], pair[1]))
    return Layout(tuple(pairs), row.count("segment_bytes"), row.count("segment_tokens"))


HASHES = frozenset(("session", "tenant", "source"))
CALL_FIELDS = tuple(
    (field.name, field.default is None)
    for field in fields(RecordedCall)
    if field.name not in ("at_ns", "kind")
)
"""Fields of a call's line, and whether each may be untold."""


@dataclass(slots=True)
class RecordedFile:
    """The contents of a file so far."""

    call_count: int = 0
    lost_count: int = 0
    elapsed_s: float = 0.0


def values_of(call: RecordedCall) -> dict[str, object]:
    """The fields of a call's line; what is 0 and says nothing is left out."""
    found: dict[str, object] = {
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
            found[name] = f"{value:016x}"
        else:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


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


def write(parts: Iterable[RecordingPart], file: TextIO) -> Iterator[RecordedFile]:
    """Write every part; yields after each, and ends the recording whatever ends the parts."""
    lines = Lines(file)
    try:
        for part in parts:
            lines.write(part)
            # A part that was announced is in the file, even if this process ends.
            file.flush()
            yield lines.written
    finally:
        lines.end()
