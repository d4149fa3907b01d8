"""Sessions out of a store and into a file.

Some by the client's reads, or all of them as the server sends them.

An `Exporter` reads each session at one generation of one uid, so that a session that changes meanwhile is
begun anew and never mixed. Worst case: the session changes each time, or goes; then its rows are void in the
file, and that is told.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from importlib.metadata import version

import numpy as np
import numpy.typing as npt

from ctxcache.archive.contents import STRETCH, TOTALS, ArchivedModel, ArchivedSession, Origin
from ctxcache.archive.files import Source, refusals_of_file
from ctxcache.archive.frames import (
    END,
    MADE,
    MODEL,
    ROWS,
    SESSION,
    VOID,
    ArchiveFrameReader,
    FrameWriter,
    write_all,
)
from ctxcache.archive.outcomes import ENDS_ALL, ArchiveOutcome, ArchiveStatus, Step
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import SessionInfo
from ctxcache.errors import (
    CacheError,
    GenerationMismatch,
    LeaseNotFound,
    ModelFingerprintMismatch,
    SessionNotFound,
)
from ctxcache.format.layout import SEGMENT_TOKENS

ROWS_BYTES = 16 << 20
ATTEMPTS = 3
CHANGED = (GenerationMismatch, ModelFingerprintMismatch, LeaseNotFound)
"""Errors of a read of a session that is no longer what it was."""


def receive(pieces: Iterable[bytes], fd: int, path: str) -> int:
    """Write a whole file that comes in pieces, and read it back unless `fd` is a pipe; how many bytes it has.

    Raises FileFull, FileUnusable, FileDamaged, and what `pieces` raises.
    """
    size_bytes = 0
    for piece in pieces:
        write_all(fd, path, piece)
        size_bytes += len(piece)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return size_bytes
    with refusals_of_file(path):
        os.fsync(fd)
        os.lseek(fd, 0, os.SEEK_SET)
    for _ in ArchiveFrameReader(Source(fd, path, size_bytes)).frames():
        pass
    return size_bytes


class Exporter:
    """Writes sessions as they come. `skips_gone`: a session that is not there is no failure.

    Not thread-safe.
    """

    def __init__(self, client: Client, writer: FrameWriter, step: Step, *, skips_gone: bool) -> None:
        self._client, self._writer, self._step = client, writer, step
        self._skips_gone = skips_gone
        self._models: dict[tuple[str, bytes], tuple[int, ArchivedModel]] = {}
        """Models of the file and their numbers, by name and fingerprint."""
        self._room = np.empty(0, np.uint8)

    def export(self, names: Iterable[str]) -> Iterator[ArchiveOutcome]:
        """Write sessions and the end of the file; what became of each. Raises what ends all."""
        self._writer.write(MADE, Origin(f"ctxcache {version('ctxcache')}").encode())
        session_count = token_count = 0
        for name in names:
            outcome = self._one(name)
            session_count += outcome.status is ArchiveStatus.EXPORTED
            token_count += outcome.token_count
            yield outcome
        self._writer.write(END, TOTALS.pack(session_count, token_count))

    def _one(self, name: str) -> ArchiveOutcome:
        failure: CacheError = SessionNotFound(session=name)
        for _ in range(ATTEMPTS):
            try:
                session = self._client.sessions.get(name)
                number, model = self._model(session)
                described = _describe(session, model)
                self._write(session, described, number)
            except CHANGED as error:
                failure = error
            except ENDS_ALL:
                raise
            except CacheError as error:
                failure = error
                break
            else:
                return ArchiveOutcome(
                    name, name, ArchiveStatus.EXPORTED, described.token_count, described.size_bytes
                )
        is_fine = self._skips_gone and isinstance(failure, SessionNotFound)
        return ArchiveOutcome(
            name, name, ArchiveStatus.SKIPPED if is_fine else ArchiveStatus.FAILED, error=failure
        )

    def _model(self, session: SessionInfo) -> tuple[int, ArchivedModel]:
        """The session's model and its number in the file, which has it from now on."""
        key = session.model, session.model_fingerprint
        if key not in self._models:
            registered = self._client.models.get(session.model)
            spec = registered.spec
            CallerModel(spec).check(session.name, session.model_fingerprint)
            model = ArchivedModel(session.tenant, spec, registered.create_time_ns or 0, registered.probe)
            self._models[key] = len(self._models), model
            self._writer.write(MODEL, model.encode())
        return self._models[key]

    def _write(self, session: SessionInfo, described: ArchivedSession, model_number: int) -> None:
        self._writer.write(SESSION, described.encode(model_number))
        stretch, token_bytes, begin = tokens_at_a_time(described.token_bytes), described.token_bytes, 0
        try:
            while begin < described.token_count:
                whole_count = described.whole_token_count
                # A frame of rows is of positions that follow one another.
                end = whole_count if begin < whole_count else described.token_count
                count = min(stretch, end - begin)
                rows = self._rows(session, described, begin, begin + count)
                position = begin + (begin >= whole_count and described.is_cut)
                self._writer.write(ROWS, STRETCH.pack(position, count), rows)
                self._step(session.name, count, count * token_bytes)
                begin += count
        except ENDS_ALL:
            raise
        except CacheError:
            # The file goes on behind it.
            self._writer.write(VOID)
            self._step(session.name, -begin, -begin * token_bytes)
            raise

    def _rows(self, session: SessionInfo, described: ArchivedSession, begin: int, end: int) -> memoryview:
        """All streams' rows of tokens `[begin, end)`, one stream behind the other."""
        room = self._room_for((end - begin) * described.token_bytes)
        model = CallerModel(described.model.spec)
        with self._client.sessions.open(session, model).read(
            begin=begin, end=end, if_generation_match=session.generation
        ) as rows:
            # Another session of the same name may have come as far.
            if rows.session.uid != session.uid:
                raise GenerationMismatch(f"{session.name} is another session by now")
            at = 0
            for spec in described.specs:
                size_bytes = (end - begin) * spec.row_bytes
                out = room[at : at + size_bytes].reshape(end - begin, spec.row_bytes)
                rows.array(spec.stream, out=out)
                at += size_bytes
        return room.data

    def _room_for(self, size_bytes: int) -> npt.NDArray[np.uint8]:
        if size_bytes > len(self._room):
            self._room = np.empty(size_bytes, np.uint8)
        return self._room[:size_bytes]


def tokens_at_a_time(token_bytes: int) -> int:
    """How many tokens go into one frame: whole segments, where one fits."""
    count = ROWS_BYTES // token_bytes
    return count - count % SEGMENT_TOKENS if count >= SEGMENT_TOKENS else max(1, count)


def _describe(session: SessionInfo, model: ArchivedModel) -> ArchivedSession:
    # The API numbers live tokens alone, so their indexes are the positions here; where some were dropped, one
    # position is left out.
    whole_count, count = session.whole_token_count, session.token_count
    is_cut = whole_count < count
    live = tuple(found for found in ((0, whole_count), (whole_count + 1, count + 1)) if found[0] < found[1])
    live = live if is_cut else live[:1]
    return ArchivedSession(
        session_id=session.name.removeprefix("sessions/"),
        model=model,
        layout=tuple(session.streams()),
        uid=bytes.fromhex(session.uid),
        generation=session.generation,
        live=live,
        log_end=count + is_cut,
        create_time_ns=session.create_time_ns or 0,
        access_time_ns=session.access_time_ns or 0,
        expire_time_ns=session.expire_time_ns or 0,
        ttl_ns=session.ttl_ns or 0,
        is_pinned=session.is_pinned,
        salt=session.salt,
        contents=session.contents,
    )
