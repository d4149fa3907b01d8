"""transformers with a context store: every turn restores its session, continues it, and saves it.

The engine keeps nothing between turns. A turn looks its session up, restores what the store has,
prefills what is new, generates, and hands every row over as it is computed; background threads
commit them. A session that is missing, short or damaged is a miss with a reason, and what the
caller knows of the history is prefilled again. Worst case: a full prefill.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from ctxcache.client import Client, SessionRows
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    CorruptSegment,
    LeaseNotFound,
    ModelFingerprintMismatch,
    PositionsNotRelocatable,
    SessionNotFound,
    TierFailure,
)
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.v1 import session_pb2
from gpu_worker.capture import Capture
from gpu_worker.conversation import SINK_TOKENS, common_prefix, fit
from gpu_worker.families import adapt
from gpu_worker.generation import prefill, stream_greedy
from gpu_worker.plan import RestorePlan
from gpu_worker.restore import restore_cache
from gpu_worker.rows import in_batches, token_ids_of, unpack_rows
from gpu_worker.saving import Saver, Slice

# What a read may answer for state that cannot be had: a miss, never a failed turn.
_MISSES = (SessionNotFound, CorruptSegment, CapacityExceeded, TierFailure, LeaseNotFound)


@dataclass(slots=True)
class Turn:
    """What one turn did. Times in nanoseconds from its begin.

    `miss_reason` says why the store had less than it should: the reason of the error that a read
    met, that truncation met, or that stopped an earlier turn's saves. Empty for a hit.
    `history_token_count` tokens came before the turn, after `dropped_token_count` were truncated;
    `reused_token_count` of them were restored, and `prefilled_token_count` were computed.
    """

    token_ids: list[int] = field(default_factory=list)
    history_token_count: int = 0
    dropped_token_count: int = 0
    reused_token_count: int = 0
    prefilled_token_count: int = 0
    restore_ns: int = 0
    first_token_ns: int = 0
    miss_reason: str = ""


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a turn starts from: a session that holds `reused`, and a cache that holds its KV."""

    session: session_pb2.Session
    reused: list[int]
    cache: Cache


class TransformersEngine:
    """One model, one store, any number of sessions, one turn at a time. A context manager."""

    def __init__(
        self,
        model: PreTrainedModel,
        client: Client,
        spec: ModelSpec,
        plan: RestorePlan,
        *,
        window: int | None = None,
        sink_count: int = SINK_TOKENS,
        durability: "session_pb2.Durability.ValueType" = session_pb2.DURABILITY_DISK,
    ) -> None:
        """`plan` says what is saved and how it comes back; `window` defaults to the model's context.

        Registers the model. Raises InvalidArgument(field="plan"), ModelFingerprintMismatch, Unavailable.
        """
        plan.check(spec)
        self._adapter = adapt(model)
        self._model, self._client, self._spec, self._plan = model, client, spec, plan
        self._window = window or int(model.config.max_position_embeddings)
        self._sink_count, self._durability = sink_count, durability
        self._registered = client.register_model(spec)
        self._saver = Saver(client, spec.resolve(plan.streams()), device=model.device)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Save what is still in staging, then end the saving threads."""
        self._saver.close()

    def wait(self, session_id: str) -> CacheError | None:
        """Wait until a session is saved; what stopped its saves, if anything did. Raises DeadlineExceeded."""
        return self._saver.wait(f"sessions/{session_id}")

    def turn(
        self,
        session_id: str,
        new_token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        history: Sequence[int] | None = None,
        eos_token_ids: Collection[int] | None = None,
        on_token: Callable[[int], None] = lambda _token: None,
    ) -> Turn:
        """Continue a session by `new_token_ids` and up to `max_new_tokens` generated ones.

        `history` is every token before the new ones, as the caller knows it; where the store has
        less or other, it is prefilled from there. None: the session's own tokens are the history.
        Raises InvalidArgument, ModelFingerprintMismatch, Unavailable, DeadlineExceeded.
        """
        begin_ns = time.perf_counter_ns()
        turn = Turn()
        session, known = self._fit(session_id, history, len(new_token_ids) + max_new_tokens, turn)
        start = self._restore(session, known, turn)
        turn.restore_ns = time.perf_counter_ns() - begin_ns
        missing = [] if known is None else known[len(start.reused) :]
        turn.history_token_count = len(start.reused) + len(missing)
        turn.prefilled_token_count = len(missing) + len(new_token_ids)
        for token in self._generate(start, [*missing, *new_token_ids], max_new_tokens, eos_token_ids):
            turn.first_token_ns = turn.first_token_ns or time.perf_counter_ns() - begin_ns
            turn.token_ids.append(token)
            on_token(token)
        return turn

    # -- before the first token --------------------------------------------------------------------

    def _fit(
        self, session_id: str, history: Sequence[int] | None, new_count: int, turn: Turn
    ) -> tuple[session_pb2.Session, list[int] | None]:
        """The session and the history, both truncated alike where the context window asks for it."""
        failure = self.wait(session_id)
        # Its last turn was not saved whole: with no history given, that is the caller's to notice.
        turn.miss_reason = failure.reason if failure else ""
        session = self._open(session_id)
        if history and not session.token_count:
            turn.miss_reason = turn.miss_reason or SessionNotFound.reason
        history_count = session.token_count if history is None else len(history)
        cut = fit(history_count, new_count, window=self._window, sink_count=self._sink_count)
        if cut is None:
            return session, None if history is None else list(history)
        turn.dropped_token_count = history_count - cut.kept_count
        known = self._tokens(session) if history is None else history
        if session.token_count == history_count:
            session = self._truncate(session, cut.recent_count, turn)
        return session, cut.apply(known)

    def _open(self, session_id: str) -> session_pb2.Session:
        try:
            session = self._client.get_session(f"sessions/{session_id}")
        except SessionNotFound:
            return self._client.create_session(
                self._registered.name, session_id=session_id, layout=self._plan.streams()
            )
        if session.model_fingerprint != self._registered.fingerprint:
            # Reads and appends go by the session's own fingerprint: another model's state would pass.
            raise ModelFingerprintMismatch(
                model=session.name,
                actual=session.model_fingerprint.hex(),
                expected=self._registered.fingerprint.hex(),
            )
        return session

    def _truncate(self, session: session_pb2.Session, recent_count: int, turn: Turn) -> session_pb2.Session:
        try:
            return self._client.keep_recent(
                session.name, recent_count, sink_token_count=self._sink_count,
                if_generation_match=session.generation,
            )  # fmt: skip
        except PositionsNotRelocatable as error:
            turn.miss_reason = error.reason
            return self._client.keep_first(session.name, 0)

    def _tokens(self, session: session_pb2.Session) -> list[int]:
        with self._client.read(session, streams=[TOKENS]) as rows:
            return token_ids_of(rows.array(TOKENS))

    def _restore(self, session: session_pb2.Session, known: Sequence[int] | None, turn: Turn) -> _Start:
        """Restore what the session and the history have in common. A damaged session is tried once more, cut."""
        for _attempt in range(2):
            try:
                start = self._restore_common(session, known)
            except _MISSES as error:
                turn.miss_reason = error.reason
                if known is None:
                    raise
                session = self._open(session.name.removeprefix("sessions/"))
                continue
            turn.reused_token_count = len(start.reused)
            return start
        return _Start(self._client.keep_first(session.name, 0), [], self._empty_cache())

    def _restore_common(self, session: session_pb2.Session, known: Sequence[int] | None) -> _Start:
        if not session.token_count:
            return _Start(session, [], self._empty_cache())
        with self._client.read(session, streams={TOKENS, *self._plan.streams()}) as rows:
            ids = token_ids_of(rows.array(TOKENS))
            common = len(ids) if known is None else common_prefix(ids, known)
            cache = self._restored_cache(rows, ids[:common])
        if common < session.token_count:
            session = self._client.keep_first(session.name, common, if_generation_match=session.generation)
        return _Start(session, ids[:common], cache)

    def _restored_cache(self, rows: SessionRows, ids: Sequence[int]) -> Cache:
        if not ids:
            return self._empty_cache()
        cache = restore_cache(
            self._adapter, self._plan, self._reader(rows),
            positions=torch.arange(len(ids)), token_ids=torch.tensor(ids),
        )  # fmt: skip
        # The cache is a copy; whether it was copied from rows that were still ours is known only now.
        rows.check()
        return cache

    def _reader(self, rows: SessionRows) -> Callable[[Stream, int, int], Iterator[Tensor]]:
        specs = {spec.stream: spec for spec in self._spec.resolve(self._plan.streams())}

        def read(stream: Stream, begin: int, end: int) -> Iterator[Tensor]:
            for batch in in_batches(rows.pieces(stream), begin, end):
                yield unpack_rows(batch.data.cast("B"), specs[stream])

        return read

    def _empty_cache(self) -> Cache:
        return DynamicCache(config=self._model.config)

    # -- generating and saving ---------------------------------------------------------------------

    def _generate(
        self,
        start: _Start,
        token_ids: Sequence[int],
        max_new_tokens: int,
        eos_token_ids: Collection[int] | None,
    ) -> Iterator[int]:
        """Yield tokens; what went through the model is saved on the way, the last one included."""
        saver, session = self._saver, start.session
        end = session.token_count

        def passing(token_ids: Sequence[int]) -> AbstractContextManager[None]:
            nonlocal end
            end += len(token_ids)
            return saver.passing([Slice(session.name, end - len(token_ids), len(token_ids))], token_ids)

        saver.open(session)
        try:
            with Capture(self._adapter, self._plan_state_streams(), saver.put, is_on_host=False):
                pending = list(token_ids)
                for token in stream_greedy(
                    self._model, start.cache, token_ids,
                    max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, around=passing,
                ):  # fmt: skip
                    pending = [token]
                    yield token
                if max_new_tokens:
                    # One more pass, after the caller has its answer: then the session holds the whole turn.
                    prefill(self._model, start.cache, pending, around=passing)
        finally:
            saver.finish(session.name, durability=self._durability)

    def _plan_state_streams(self) -> list[Stream]:
        return [stream for stream in self._plan.streams() if stream != TOKENS]
