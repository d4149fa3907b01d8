"""Sessions out of a store and into a file, and out of a file into a store that runs.

Export: some sessions by the client's reads, or all of them as the server sends them. An `Exporter` reads each
session at one generation of one uid, so that a session that changes meanwhile is begun anew and never mixed.
Worst case: the session changes each time, or goes; then its rows are void in the file, and the report says
so.

Import: each session is there whole or not at all. It is filled under a name of its own, made durable, and
forked to the name that was asked for. Worst case: the server or the importer dies, and `importing-…` is left,
which expires two minutes after its last rows.
"""

import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxcache.archive.contents import (
    ENDS_ALL,
    STRETCH,
    TOTALS,
    ArchivedModel,
    ArchivedSession,
    ArchiveOutcome,
    ArchiveStatus,
    ImportWishes,
    OnConflict,
    Origin,
    Step,
)
from ctxcache.archive.frames import (
    END,
    MADE,
    MODEL,
    ROWS,
    SESSION,
    VOID,
    ArchiveFrameReader,
    FrameWriter,
    Source,
    refusals_of_file,
    write_all,
)
from ctxcache.archive.reader import Rows, SessionInFile
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import (
    CacheError,
    FileUnusable,
    GenerationMismatch,
    InvalidArgument,
    LeaseNotFound,
    ModelFingerprintMismatch,
    SessionAlreadyExists,
    SessionNotFound,
)
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.streams import contents_within

ROWS_BYTES = 16 << 20
ATTEMPTS = 3
CHANGED = (GenerationMismatch, ModelFingerprintMismatch, LeaseNotFound)
"""Errors of a read whose session has changed."""


def receive(pieces: Iterable[bytes], fd: int, path: str) -> int:
    """Write a whole file that comes in pieces; returns its size in bytes. Reads it back, but for a pipe.

    Raises FileFull, FileUnusable, FileDamaged, and what `pieces` raises.
    """
    size_bytes = 0
    for piece in pieces:
        write_all(fd, path, piece)
        size_bytes += len(piece)
    # A pipe cannot be read back. Its reader verifies the bytes.
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return size_bytes
    with refusals_of_file(path):
        os.fsync(fd)
        os.lseek(fd, 0, os.SEEK_SET)
    for _ in ArchiveFrameReader(Source(fd, path, size_bytes)).frames():
        pass
    return size_bytes


# A session is read stretch by stretch, each under a lease of its own, at the generation of the first:
#
#     get ──► SESS ──► read, ROWS ──► read, ROWS ──► … ──► exported
#                         │ another generation, or another uid of the name
#                         ▼
#                       VOID ──► from the beginning, three times in all
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
        """Write sessions and the end of the file. Yields each one's outcome. Raises errors that end all."""
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
                # A session of the same name that came meanwhile has a uid of its own. Its generation may be
                # the same.
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

    # The model is written before its first session, whatever becomes of that session.
    def _model(self, session: SessionInfo) -> tuple[int, ArchivedModel]:
        """The session's model and its number in the file, which has it from now on."""
        key = session.model, session.model_fingerprint
        if key not in self._models:
            registered = self._client.models.get(session.model)
            spec = registered.spec
            CallerModel(spec).check(session)
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
                # The positions of a frame follow one another.
                end = whole_count if begin < whole_count else described.token_count
                count = min(stretch, end - begin)
                rows = self._rows(session, described, begin, begin + count)
                # Behind the dropped tokens positions are one further on: the left-out position is the gap.
                position = begin + (begin >= whole_count and described.is_cut)
                self._writer.write(ROWS, STRETCH.pack(position, count), rows)
                self._step(session.name, count, count * token_bytes)
                begin += count
        except ENDS_ALL:
            raise
        except CacheError:
            # The file goes on behind the void session.
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
            # Another session of the same name may have as many tokens.
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
    # Frames are whole segments, so that an import and the layout of a new store cut at the same places.
    count = ROWS_BYTES // token_bytes
    return count - count % SEGMENT_TOKENS if count >= SEGMENT_TOKENS else max(1, count)


def _describe(session: SessionInfo, model: ArchivedModel) -> ArchivedSession:
    # The API numbers live tokens alone, so that their indexes are the positions here. Where tokens were
    # dropped, one position is left out.
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
        copies=session.copies,
        labels=tuple(sorted(session.labels.items())),
        contents=session.contents,
    )


UNFINISHED = "importing-"
UNFINISHED_TTL_S = 120.0
SHORTEST_LIFE_S = 60.0
SYNC_BYTES = 128 << 20
"""Bytes that are made durable at a time.

The rest, at the end, takes less time than the unfinished session lives.
"""
GATHERED_BYTES = 1 << 20
_NS_PER_S = 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def present(client: Client, session_id: str) -> SessionInfo | None:
    """The store's session of that id."""
    try:
        return client.sessions.get(f"sessions/{session_id}")
    except SessionNotFound:
        return None


# The store at each step, and what a death there leaves:
#
#     importing-…, ttl 120 s     filled, in the order of the file      expires two minutes after its last rows
#     made durable every 128 MiB                                       likewise
#     fork to the asked name     the session, whole                    both, one of which expires
#     importing-… deleted        the session, whole
class Importer:
    """Imports sessions as they come. `begin_time_ns`: when they were exported. Not thread-safe."""

    def __init__(self, client: Client, wishes: ImportWishes, begin_time_ns: int, step: Step) -> None:
        self._client, self._wishes, self._step = client, wishes, step
        self._begin_time_ns = begin_time_ns
        self._tenant = wishes.tenant

    def take(self, sessions: Iterator[SessionInFile]) -> Iterator[ArchiveOutcome]:
        """Import the wanted sessions. Yields the outcome of each, an error that ends all among them."""
        try:
            for session in sessions:
                described = session.described
                if not self._wishes.wants(described.model.tenant, described.session_id):
                    continue
                self._check_tenant(described)
                outcome = self._one(session)
                if not isinstance(outcome.error, ENDS_ALL):
                    # Whether the session is void stands behind its last rows.
                    for _ in session.stretches():
                        pass
                if not session.is_void:
                    yield outcome
                if isinstance(outcome.error, ENDS_ALL):
                    return
        except ENDS_ALL as error:
            yield ArchiveOutcome("", "", ArchiveStatus.FAILED, error=error)

    def _check_tenant(self, described: ArchivedSession) -> None:
        """Check that all imported sessions are of one tenant: two tenants may have sessions of one name."""
        tenant = described.model.tenant
        self._tenant = tenant if self._tenant is None else self._tenant
        if tenant != self._tenant:
            problem = f"it has sessions of {self._tenant} and of {tenant}: --from-tenant says whose"
            raise FileUnusable(path="the archive", problem=problem)

    def _one(self, session: SessionInFile) -> ArchiveOutcome:
        described, target = session.described, self._wishes.target(session.described.session_id)
        source, name = f"sessions/{described.session_id}", f"sessions/{target}"
        try:
            before = present(self._client, target)
            if before is not None and self._wishes.on_conflict is not OnConflict.REPLACE:
                error = SessionAlreadyExists(session=name)
                is_fine = self._wishes.on_conflict is OnConflict.SKIP
                return ArchiveOutcome(
                    source, name, ArchiveStatus.SKIPPED if is_fine else ArchiveStatus.FAILED, error=error
                )
            # An import that is refused midway deletes its unfinished session. The asked name is untouched.
            self._bring(session, target, before)
        except CacheError as error:
            return ArchiveOutcome(source, name, ArchiveStatus.FAILED, error=error)
        return ArchiveOutcome(
            source, name, ArchiveStatus.IMPORTED, described.token_count, described.size_bytes
        )

    def _bring(self, session: SessionInFile, target: str, before: SessionInfo | None) -> None:
        described = session.described
        is_pinned = described.is_pinned and self._wishes.keeps_pins
        model = self._client.models.register(described.model.spec, described.model.probe)
        unfinished = self._begin(model, described, is_pinned=is_pinned)
        try:
            filled = self._fill(unfinished, model, session, target)
            if not session.is_void:
                self._publish(filled, described, target, before)
                if is_pinned:
                    self._client.sessions.open(f"sessions/{target}").update(is_pinned=True)
        finally:
            # The earlier error counts, and a session that cannot be deleted expires.
            with suppress(CacheError):
                self._client.sessions.open(unfinished.name).delete()

    def _begin(self, model: CallerModel, described: ArchivedSession, *, is_pinned: bool) -> SessionInfo:
        create = partial(
            self._client.sessions.create,
            model,
            id=UNFINISHED + secrets.token_hex(8),
            layout=described.layout,
            ttl=timedelta(seconds=UNFINISHED_TTL_S),
            is_pinned=is_pinned,
            salt=described.salt,
            labels=dict(described.labels),
        )
        # A session with one copy gets as many as the store makes by itself.
        copies = described.copies if described.copies > 1 else 0
        try:
            return create(copies=copies).info
        except InvalidArgument as error:
            if error.facts.get("field") != "copies":
                raise
            # The store has one SSD directory.
            return create().info

    def _fill(
        self, session: SessionInfo, model: CallerModel, archived: SessionInFile, target: str
    ) -> SessionInfo:
        unsynced_bytes = 0
        # A dropped token in the middle is written as zeros, and then dropped, so that the store marks the
        # same tokens as computed with what is gone.
        cut = archived.described.whole_token_count if archived.described.is_cut else None
        for rows in _gathered(_with_gap(archived.rows(), cut)):
            before = session.token_count
            size_bytes = sum(part.nbytes for part in rows.values())
            # The bytes decide, not the session: a long session would else be flushed at its end, for longer
            # than it lives.
            unsynced_bytes += size_bytes
            is_synced = unsynced_bytes >= SYNC_BYTES
            try:
                session = self._client.sessions.open(session, model).append(
                    rows,
                    durability=Durability.DISK if is_synced else Durability.MEMORY,
                    contents=contents_within(
                        archived.described.contents, before, archived.described.whole_token_count
                    ),
                )
            except SessionNotFound as error:
                problem = f"what had come of it was evicted, or nothing came for {UNFINISHED_TTL_S:.0f} s"
                raise SessionNotFound(f"sessions/{target}: {problem}", session=session.name) from error
            if is_synced:
                unsynced_bytes = 0
            self._step(f"sessions/{target}", session.token_count - before, size_bytes)
        if cut is not None:
            session = self._client.sessions.open(session.name).drop_ranges([(cut, cut + 1)])
            self._step(f"sessions/{target}", -1, -archived.described.token_bytes)
        return session

    def _publish(
        self, filled: SessionInfo, described: ArchivedSession, target: str, before: SessionInfo | None
    ) -> None:
        if before is not None:
            # A session that has changed meanwhile is kept: the caller did not know its new tokens.
            with suppress(SessionNotFound):
                self._client.sessions.open(before.name).delete(if_generation_match=before.generation)
        ends: dict[str, Any] = {"ttl": timedelta(microseconds=described.ttl_ns / 1000)}
        if self._wishes.ttl_s is not None:
            ends = {"ttl": timedelta(seconds=self._wishes.ttl_s)}
        elif not described.ttl_ns:
            # The server's clock, as of its last answer.
            now = filled.access_time
            ends = {"expire_time": end_of_life(described.expire_time_ns, self._begin_time_ns, now)}
        self._client.sessions.open(filled.name).fork(id=target, **ends)


def _with_gap(rows: Iterator[Rows], cut: int | None) -> Iterator[Rows]:
    """The rows, with one more token before token `cut`, which stands for the dropped tokens.

    Rows behind the gap were computed with the dropped tokens, so the remaining tokens must not find them.
    """
    at = 0
    for part in rows:
        count = len(next(iter(part.values())))
        if cut is None or not at <= cut < at + count:
            yield part
        else:
            if cut > at:
                yield {stream: one[: cut - at] for stream, one in part.items()}
            yield {stream: np.zeros((1, one.shape[1]), np.uint8) for stream, one in part.items()}
            yield {stream: one[cut - at :] for stream, one in part.items()}
        at += count


def _gathered(rows: Iterator[Rows]) -> Iterator[Rows]:
    """Rows of small frames put together, so that an append has GATHERED_BYTES of them.

    Larger frames stay as they are.
    """
    parts: list[Rows] = []
    size_bytes = 0
    for part in rows:
        part_bytes = sum(array.nbytes for array in part.values())
        if not parts and part_bytes >= GATHERED_BYTES:
            yield part
            continue
        # A frame's rows are gone once the next frame is asked for.
        parts.append({stream: array.copy() for stream, array in part.items()})
        size_bytes += part_bytes
        if size_bytes >= GATHERED_BYTES:
            yield _joined(parts)
            parts, size_bytes = [], 0
    if parts:
        yield _joined(parts)


def _joined(parts: list[Rows]) -> Rows:
    return {stream: np.concatenate([part[stream] for part in parts]) for stream in parts[0]}


def end_of_life(expire_time_ns: int, begin_time_ns: int, now: datetime) -> datetime:
    """When a session of absolute expiry ends.

    That is its expiry, or, when that is past, as much time as it had left at the export.
    """
    left_s = max((expire_time_ns - begin_time_ns) / _NS_PER_S, SHORTEST_LIFE_S)
    expire_time = _EPOCH + timedelta(microseconds=expire_time_ns // 1000)
    return (
        expire_time
        if expire_time > now + timedelta(seconds=SHORTEST_LIFE_S)
        else now + timedelta(seconds=left_s)
    )
