"""The sessions of an export file, one after the other, in memory of one block. Knows no store.

Worst case: frames that are whole by themselves and make no sense together, which is FileDamaged.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ctxcache.format.streams import Stream
from ctxcache.portable.description import Description, decode
from ctxcache.portable.files import Source
from ctxcache.portable.frame_reader import FrameReader
from ctxcache.portable.layout import BLOCK, BLOCK_HEAD, END, SESSION, SESSION_LIMIT, TOTALS, VOID

Rows = Mapping[Stream, npt.NDArray[np.uint8]]


class Found(NamedTuple):
    """A session that is whole in a file, for lists."""

    session_id: str
    model_id: str
    token_count: int
    size_bytes: int


class SessionInFile:
    """One session. `is_void` is known when its blocks have been read: its exporter gave it up midway."""

    def __init__(self, described: Description, blocks: Iterator[Rows | None]) -> None:
        self.described = described
        self.is_void = False
        self._blocks = blocks

    def blocks(self) -> Iterator[Rows]:
        """Iterate over its rows, once: uint8 [tokens, row_bytes] per stream, valid until the next are asked for."""
        for rows in self._blocks:
            if rows is None:
                self.is_void = True
            else:
                yield rows


class SessionReader:
    """Reads a file from its begin. Everything raises FileDamaged, FormatTooNew, FileUnusable."""

    def __init__(self, source: Source) -> None:
        self._reader = FrameReader(source)
        self._frames = self._reader.frames()

    @property
    def at_bytes(self) -> int:
        """How far it has read."""
        return self._reader.at_bytes

    @property
    def begin_time_ns(self) -> int:
        """When the export began, by its exporter's clock."""
        return self._reader.begin_time_ns

    def sessions(self) -> Iterator[SessionInFile]:
        """Iterate over the sessions; what is left of one is passed over. The file is whole when this ends."""
        names: set[str] = set()
        token_count = 0
        for tag, payload in self._frames:
            if tag == END:
                if len(payload) != TOTALS.size or TOTALS.unpack(payload) != (len(names), token_count):
                    raise self._reader.damage("its end speaks of other sessions")
                return
            one = self._begin(tag, payload)
            yield one
            for _ in one.blocks():
                pass
            if not one.is_void:
                if one.described.session_id in names or len(names) >= SESSION_LIMIT:
                    raise self._reader.damage(f"{one.described.session_id} is there twice, or too many are")
                names.add(one.described.session_id)
                token_count += one.described.token_count
        raise self._reader.damage("it was given up on")

    def _begin(self, tag: bytes, payload: memoryview) -> SessionInFile:
        if tag != SESSION:
            raise self._reader.damage(f"a session is expected before byte {self.at_bytes}, not {tag!r}")
        try:
            described = decode(bytes(payload))
        except ValueError as error:
            raise self._reader.damage(f"a session before byte {self.at_bytes}: {error}") from error
        return SessionInFile(described, self._blocks(described))

    def _blocks(self, described: Description) -> Iterator[Rows | None]:
        """None in the place of a block: there are no more of them."""
        at = 0
        while at < described.token_count:
            tag, payload = next(self._frames)
            if tag == VOID and not payload:
                yield None
                return
            count = self._row_count(described, at, tag, payload)
            yield _split(described, count, np.frombuffer(payload, np.uint8, offset=BLOCK_HEAD.size))
            at += count

    def _row_count(self, described: Description, at: int, tag: bytes, payload: memoryview) -> int:
        if tag == BLOCK and len(payload) >= BLOCK_HEAD.size:
            begin, count = BLOCK_HEAD.unpack_from(payload)
            size_bytes = BLOCK_HEAD.size + count * described.token_bytes
            if begin == at and 1 <= count <= described.token_count - at and len(payload) == size_bytes:
                return int(count)
        problem = f"rows of {described.session_id} from token {at} are expected before byte {self.at_bytes}"
        raise self._reader.damage(problem)


def survey(source: Source, step: Callable[[int], None]) -> list[Found]:
    """Verify all of a file: what sessions are whole in it. `step` hears how many bytes more it has read.

    Raises as SessionReader does.
    """
    reader, found, at_bytes = SessionReader(source), [], 0
    for one in reader.sessions():
        for _ in one.blocks():
            step(reader.at_bytes - at_bytes)
            at_bytes = reader.at_bytes
        if not one.is_void:
            described = one.described
            size_bytes = described.token_count * described.token_bytes
            found.append(
                Found(described.session_id, described.model.model_id, described.token_count, size_bytes)
            )
    return found


def _split(described: Description, count: int, rows: npt.NDArray[np.uint8]) -> Rows:
    found, begin = {}, 0
    for spec in described.specs:
        end = begin + count * spec.row_bytes
        found[spec.stream] = rows[begin:end].reshape(count, spec.row_bytes)
        begin = end
    return found
