"""Sessions out of a store and into a file, some tokens at a time.

Reads each session at one generation of one uid, so that a session that changes meanwhile is begun anew and never mixed.
Worst case: it changes each time, or goes; then what came of it is void in the file, and that is told.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from ctxcache.client import CallerModel, Client
from ctxcache.client.convert import model_from_wire, probe_from_wire, streams_from_wire
from ctxcache.errors import (
    CacheError,
    GenerationMismatch,
    LeaseNotFound,
    ModelFingerprintMismatch,
    SessionNotFound,
)
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.probe import ModelProbe
from ctxcache.portable.description import Description
from ctxcache.portable.frame_writer import FrameWriter
from ctxcache.portable.layout import BLOCK, BLOCK_HEAD, END, SESSION, TOTALS, VOID
from ctxcache.portable.outcomes import ENDS_ALL, Outcome, Status, Step
from ctxcache.v1.session_pb2 import Session

BLOCK_BYTES = 16 << 20
ATTEMPTS = 3
CHANGED = (GenerationMismatch, ModelFingerprintMismatch, LeaseNotFound)
"""What a reader is told of a session that is not what it was."""
_NS_PER_S = 10**9


class Exporter:
    """Writes sessions as they come. `skips_gone`: a session that is not there is no failure. Not thread-safe."""

    def __init__(self, client: Client, writer: FrameWriter, step: Step, *, skips_gone: bool) -> None:
        self._client, self._writer, self._step = client, writer, step
        self._skips_gone = skips_gone
        self._model: CallerModel | None = None
        self._probe: ModelProbe | None = None
        self._room = np.empty(0, np.uint8)

    def export(self, names: Iterable[str]) -> Iterator[Outcome]:
        """Write sessions and the end of the file; what became of each. Raises what ends all."""
        session_count = token_count = 0
        for name in names:
            outcome = self._one(name)
            session_count += outcome.status is Status.EXPORTED
            token_count += outcome.token_count
            yield outcome
        self._writer.write(END, TOTALS.pack(session_count, token_count))

    def _one(self, name: str) -> Outcome:
        failure: CacheError = SessionNotFound(session=name)
        for _ in range(ATTEMPTS):
            try:
                session = self._client.get_session(name)
                described = self._describe(session)
                self._write(session, described)
            except CHANGED as error:
                failure = error
            except ENDS_ALL:
                raise
            except CacheError as error:
                failure = error
                break
            else:
                size_bytes = described.token_count * described.token_bytes
                return Outcome(name, name, Status.EXPORTED, described.token_count, size_bytes)
        is_fine = self._skips_gone and isinstance(failure, SessionNotFound)
        return Outcome(name, name, Status.SKIPPED if is_fine else Status.FAILED, error=failure)

    def _describe(self, session: Session) -> Description:
        model = self._model
        if model is None or model.fingerprint != session.model_fingerprint:
            registered = self._client.get_model(session.model)
            model = self._model = CallerModel(model_from_wire(registered))
            self._probe = probe_from_wire(registered)
        model.check(session.name, session.model_fingerprint)
        return Description(
            session_id=session.name.removeprefix("sessions/"),
            uid=bytes.fromhex(session.uid),
            generation=session.generation,
            token_count=session.token_count,
            ttl_ns=session.ttl.ToNanoseconds() if session.HasField("ttl") else 0,
            expire_time_ns=session.expire_time.seconds * _NS_PER_S + session.expire_time.nanos,
            is_pinned=session.is_pinned,
            model=model.spec,
            layout=tuple(streams_from_wire(session.layout)),
            probe=self._probe,
        )

    def _write(self, session: Session, described: Description) -> None:
        self._writer.write(SESSION, described.encode())
        block, token_bytes, begin = block_tokens(described.token_bytes), described.token_bytes, 0
        try:
            while begin < described.token_count:
                count = min(block, described.token_count - begin)
                rows = self._rows(session, described, begin, begin + count)
                self._writer.write(BLOCK, BLOCK_HEAD.pack(begin, count), rows)
                self._step(session.name, count, count * token_bytes)
                begin += count
        except ENDS_ALL:
            raise
        except CacheError:
            # The file goes on behind it.
            self._writer.write(VOID)
            self._step(session.name, -begin, -begin * token_bytes)
            raise

    def _rows(self, session: Session, described: Description, begin: int, end: int) -> memoryview:
        """All streams' rows of tokens `[begin, end)`, one stream behind the other."""
        room = self._room_for((end - begin) * described.token_bytes)
        model = CallerModel(described.model)
        with self._client.read(
            session, model, begin=begin, end=end, if_generation_match=session.generation
        ) as rows:
            # Another one of the same name may have come as far.
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


def block_tokens(token_bytes: int) -> int:
    """How many tokens go at a time: whole segments, where one fits."""
    count = BLOCK_BYTES // token_bytes
    return count - count % SEGMENT_TOKENS if count >= SEGMENT_TOKENS else max(1, count)
