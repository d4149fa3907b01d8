"""The models and sessions of an archive, one after the other, in memory of one frame. Knows no store.

Worst case: frames that are whole by themselves and make no sense together, which is FileDamaged.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxcache.archive.contents import (
    FRAME_NUMBER,
    STRETCH,
    TOTALS,
    ArchivedModel,
    ArchivedSession,
    Origin,
    decode_archived_model,
    decode_origin,
    decode_session,
)
from ctxcache.archive.frames import (
    END,
    MADE,
    MODEL,
    ROWS,
    SAME,
    SESSION,
    VOID,
    ArchiveFrame,
    ArchiveFrameReader,
    Source,
)
from ctxcache.core import ranges
from ctxcache.errors import FileDamaged
from ctxcache.format.streams import Stream, StreamSpec

Rows = Mapping[Stream, npt.NDArray[np.uint8]]
SESSION_LIMIT, MODEL_LIMIT = 1 << 24, 1 << 16
"""Most sessions and models of one file: readers keep the names of all sessions, and all models."""


class Stretch(NamedTuple):
    """Positions `[begin, end)` of a session.

    Their rows are the first of the `row_count` rows in frame `number`.
    """

    number: int
    begin: int
    end: int
    row_count: int


class _Kept(NamedTuple):
    """A frame of rows that later sessions may refer to."""

    file_begin: int
    model: ArchivedModel
    layout: tuple[Stream, ...]
    begin: int
    row_count: int


# A session is read as it comes, one frame in memory at a time:
#
#     SESS ──► described ──► ROWS, ROWS, SAME, … ──► its last position    whole
#                                             └────► VOID                 given up: nothing of it counts
#
# A receiver of rows must therefore be able to forget them; an import fills a session under another name.
class SessionInFile:
    """One session. `is_void` is known when its stretches have been read: its exporter gave it up midway."""

    def __init__(
        self,
        described: ArchivedSession,
        stretches: Iterator[tuple[Stretch, memoryview | None] | None],
        again: Callable[[Stretch], memoryview],
    ) -> None:
        self.described = described
        self.is_void = False
        self._stretches, self._again = stretches, again

    def stretches(self) -> Iterator[Stretch]:
        """Iterate over the places of its rows, once."""
        for stretch, _ in self._steps():
            yield stretch

    def rows(self) -> Iterator[Rows]:
        """Iterate over its tokens' rows, once.

        Uint8 [tokens, row_bytes] per stream, valid until the next are asked for.
        """
        described = self.described
        for stretch, payload in self._steps():
            whole = split(
                described.specs, stretch.row_count, self._again(stretch) if payload is None else payload
            )
            live = ranges.clip(described.live, stretch.begin, stretch.end)
            yield {stream: _picked(part, live, stretch.begin) for stream, part in whole.items()}

    def _steps(self) -> Iterator[tuple[Stretch, memoryview | None]]:
        # A void step comes at the end, if at all, and is never handed out.
        for step in self._stretches:
            if step is None:
                self.is_void = True
            else:
                yield step


class ArchiveReader:
    """Reads a file from its beginning. Every method raises FileDamaged, FormatTooNew, FileUnusable."""

    def __init__(self, source: Source) -> None:
        self._reader = ArchiveFrameReader(source)
        self._frames = self._reader.frames()
        self._kept: dict[int, _Kept] = {}
        """By frame number; empty for a pipe, which cannot be read again."""
        self.models: list[ArchivedModel] = []
        """Those read so far, in their order."""
        frame = next(self._frames)
        if frame.tag != MADE:
            raise self._damage(f"it begins with {frame.tag!r}")
        try:
            self.origin: Origin = decode_origin(bytes(frame.payload))
        except ValueError as error:
            raise self._damage(f"its first frame: {error}") from error

    @property
    def at_bytes(self) -> int:
        """How many bytes have been read."""
        return self._reader.at_bytes

    @property
    def file_id(self) -> bytes:
        """The file's identity: no other file has it."""
        return self._reader.file_id

    @property
    def begin_time_ns(self) -> int:
        """When the export began, by its exporter's clock: Unix time."""
        return self._reader.begin_time_ns

    def sessions(self) -> Iterator[SessionInFile]:
        """Iterate over the sessions, passing over unread rows. The file is whole when this ends."""
        names: set[tuple[str, str]] = set()
        token_count = 0
        for frame in self._frames:
            if frame.tag == MODEL:
                self._add_model(frame)
                continue
            if frame.tag == END:
                # Both counts must be right: a file that lost a whole session still has an END with more.
                is_size_right = len(frame.payload) == TOTALS.size
                if not is_size_right or TOTALS.unpack(frame.payload) != (len(names), token_count):
                    raise self._damage("its end counts other sessions than are in it")
                return
            session = self._begin(frame)
            yield session
            # Unread rows of this session are passed over: frames come in one order only.
            for _ in session.stretches():
                pass
            if not session.is_void:
                described = session.described
                name = described.model.tenant, described.session_id
                if name in names or len(names) >= SESSION_LIMIT:
                    raise self._damage(f"{described.session_id} is there twice, or there are too many")
                names.add(name)
                token_count += described.token_count

    def _add_model(self, frame: ArchiveFrame) -> None:
        if len(self.models) >= MODEL_LIMIT:
            raise self._damage("it has too many models")
        try:
            self.models.append(decode_archived_model(bytes(frame.payload)))
        except ValueError as error:
            raise self._damage(f"the model at byte {frame.begin}: {error}") from error

    def _begin(self, frame: ArchiveFrame) -> SessionInFile:
        if frame.tag != SESSION:
            raise self._damage(f"a session is expected at byte {frame.begin}, not {frame.tag!r}")
        try:
            described = decode_session(bytes(frame.payload), self.models)
        except ValueError as error:
            raise self._damage(f"the session at byte {frame.begin}: {error}") from error
        return SessionInFile(described, self._stretches(described), self._again)

    def _stretches(self, described: ArchivedSession) -> Iterator[tuple[Stretch, memoryview | None] | None]:
        """The places of a session's rows, with rows that follow here; None where the session is given up."""
        # The rows end at the last live position. Dropped positions have no rows.
        at, end = 0, described.live[-1][1] if described.live else 0
        while at < end:
            frame = next(self._frames)
            if frame.tag == VOID and not frame.payload:
                yield None
                return
            stretch = self._stretch(described, frame)
            is_new = stretch is not None and stretch.number == frame.number
            if stretch is None or stretch.begin < at or not self._is_next(described, at, stretch):
                problem = (
                    f"rows of {described.session_id} from position {at} are expected at byte {frame.begin}"
                )
                raise self._damage(problem)
            # Only the places of rows are kept, never rows.
            if is_new and not self._reader.is_pipe:
                self._kept[stretch.number] = _Kept(
                    frame.begin, described.model, described.layout, stretch.begin, stretch.row_count
                )
            yield stretch, frame.payload[STRETCH.size :] if is_new else None
            at = stretch.end

    def _stretch(self, described: ArchivedSession, frame: ArchiveFrame) -> Stretch | None:
        """The stretch that a frame describes; None where it describes none."""
        if len(frame.payload) < STRETCH.size:
            return None
        begin, count = STRETCH.unpack_from(frame.payload)
        if frame.tag == ROWS:
            row_count, rest = divmod(len(frame.payload) - STRETCH.size, described.token_bytes)
            return None if rest else Stretch(frame.number, begin, begin + count, row_count)
        if frame.tag != SAME or len(frame.payload) != STRETCH.size + FRAME_NUMBER.size:
            return None
        (number,) = FRAME_NUMBER.unpack_from(frame.payload, STRETCH.size)
        # `again` raises the refusal for a pipe, of which no place is kept.
        if self._reader.is_pipe:
            self._reader.again(number, 0)
        kept = self._kept.get(number)
        # The same rows mean the same model, streams and position. Any other frame is one of other rows.
        is_it = kept and (kept.model, kept.layout, kept.begin) == (described.model, described.layout, begin)
        return Stretch(number, begin, begin + count, kept.row_count) if kept and is_it else None

    def _is_next(self, described: ArchivedSession, at: int, stretch: Stretch) -> bool:
        """Whether a stretch goes on at `at`: it has tokens of the session, and leaves none out before it."""
        return (
            1 <= stretch.end - stretch.begin <= stretch.row_count
            and stretch.end <= described.log_end
            and not ranges.clip(described.live, at, stretch.begin)
            and bool(ranges.clip(described.live, stretch.begin, stretch.end))
        )

    def _again(self, stretch: Stretch) -> memoryview:
        return self._reader.again(stretch.number, self._kept[stretch.number].file_begin)[STRETCH.size :]

    def _damage(self, problem: str) -> FileDamaged:
        return self._reader.damage(problem)


@dataclass(slots=True)
class ArchiveContents:
    """The whole sessions of an archive, all verified.

    Sessions in the file's order, with where their rows are.
    """

    origin: Origin
    file_id: bytes
    begin_time_ns: int
    models: list[ArchivedModel]
    sessions: list[tuple[ArchivedSession, list[Stretch]]] = field(default_factory=list)


def survey(source: Source, step: Callable[[int], None]) -> ArchiveContents:
    """Verify all of a file and return its contents. `step` hears how many bytes more have been read.

    Raises as ArchiveReader does.
    """
    reader = ArchiveReader(source)
    contents = ArchiveContents(reader.origin, reader.file_id, reader.begin_time_ns, reader.models)
    at_bytes = 0
    for session in reader.sessions():
        stretches = []
        for stretch in session.stretches():
            stretches.append(stretch)
            step(reader.at_bytes - at_bytes)
            at_bytes = reader.at_bytes
        if not session.is_void:
            contents.sessions.append((session.described, stretches))
    step(reader.at_bytes - at_bytes)
    return contents


def split(specs: tuple[StreamSpec, ...], row_count: int, rows: memoryview) -> Rows:
    """A frame's rows by stream: uint8 [rows, row_bytes]."""
    data, by_stream, begin = np.frombuffer(rows, np.uint8), {}, 0
    for spec in specs:
        end = begin + row_count * spec.row_bytes
        by_stream[spec.stream] = data[begin:end].reshape(row_count, spec.row_bytes)
        begin = end
    return by_stream


def _picked(part: npt.NDArray[np.uint8], live: ranges.Ranges, begin: int) -> npt.NDArray[np.uint8]:
    """The rows of live positions, of rows that begin at position `begin`."""
    parts = [part[low - begin : high - begin] for low, high in live]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
