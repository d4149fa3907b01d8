"""transformers with a context store, several sessions at a time: restored, computed together, and saved.

Restores of all sessions begin at once, in the order and by the ways that `planning/together.py` decides: one
is read while another one is projected. A session's new tokens go through the model as soon as it is whole,
side by side with those of others, a pass of `PASS_TOKENS` at most, those that generate first. Each keeps a
cache of its own, and is saved as it goes. The engine's passes take turns with layers that restores recompute:
there is one model. Sessions of different layouts are captured differently, and go one layout after the other.
A session that cannot be leased beside the others, or whose restore fails, is tried again alone, behind them.
Worst case: each session's restored cache is copied once, and while they generate all of them are in memory.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from transformers import PreTrainedModel

from ctxcache.client import Client
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CacheError, InvalidArgument
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import Stream
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_packed import ATTENTION, PackedModel, SequenceCache, Work
from gpu_worker.engines.transformers_restoring import Restoring
from gpu_worker.engines.transformers_sessions import DAMAGED, MISSES
from gpu_worker.engines.transformers_turns import Start, Turn
from gpu_worker.errors import RestoreFailed
from gpu_worker.families.adapter import Adapter, refuse
from gpu_worker.families.generation import Capture, end_token_ids, prefill
from gpu_worker.pipeline.planned import Choice, Wanted
from gpu_worker.planning.plan import RestorePlan
from gpu_worker.saving import Saver, Slice

# Sessions A, B, C of one batch:
#
#     lanes    [ restore A ][ restore B ........ ][ restore C ]
#     passes                [ A: prefill ][ A: decode ][ A ][ A + B: prefill ][ A + B ][ A + B + C ] ...
#
# A pass and a layer that a restore recomputes take turns with the model (`_TurnsOfModel`).
PASS_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One session's turn in a batch; the fields are `turn`'s arguments."""

    session_id: str
    new_token_ids: Sequence[int]
    max_new_tokens: int
    history: Sequence[int] | None = None
    eos_token_ids: Collection[int] | None = None
    labels: Mapping[str, str] | None = None


@dataclass(slots=True, eq=False)
class _Waiting:
    """A session's turn before its first pass. Without `start` its restore is not under way."""

    request: TurnRequest
    turn: Turn
    session: SessionInfo
    known: list[int] | None
    start: Start | None = None
    failed: tuple[Start, CacheError] | None = None
    """A failed restore, and its error."""

    @property
    def wanted(self) -> Wanted:
        """The tokens to restore and to compute, if the session is as it was looked up."""
        count = self.session.token_count
        beyond = 0 if self.known is None else max(0, len(self.known) - count)
        streams = frozenset(self.session.streams())
        return Wanted(streams, count, beyond + len(self.request.new_token_ids))

    @property
    def restoring(self) -> Restoring | None:
        """The turn's restore, where there is one."""
        return self.start.restoring if self.start else None

    @property
    def is_ready(self) -> bool:
        """Whether a wait for the restore would wait for nothing, or for no other restore."""
        restoring = self.restoring
        # A restore that failed is ready as well: waiting for it returns at once.
        return restoring is None or restoring.restoration.is_whole or restoring.restoration.error is not None

    def is_restored(self) -> bool:
        """Wait for the restore. False where it failed, and is over."""
        start, restoring = self.start, self.restoring
        if start is None or restoring is None:
            return start is not None
        try:
            restoring.restoration.wait_all()
        except CacheError as error:
            if not restoring.is_failed_by(error):
                raise
            self.start, self.failed = None, (start, error)
            return False
        return True

    def end(self) -> None:
        """Give the lease back. A restore that is not whole writes no more rows."""
        restoring = self.failed[0].restoring if self.failed else self.restoring
        if restoring is not None:
            restoring.end()


class _TurnsOfModel:
    """Passes through one model by several threads, in the order in which they ask."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = self._serving = 0

    def __enter__(self) -> None:
        with self._changed:
            # Numbered tickets: a thread that asks again and again cannot starve another one.
            mine, self._next = self._next, self._next + 1
            self._changed.wait_for(lambda: self._serving == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._serving += 1
            self._changed.notify_all()


@dataclass(slots=True, eq=False)
class _Running:
    """A session's turn in the batch: `waiting` tokens have not gone through the model."""

    request: TurnRequest
    turn: Turn
    start: Start
    cache: SequenceCache
    saved_count: int
    """Tokens of the session before the cache's own."""
    waiting: deque[int]
    ends: Collection[int]
    is_answered: bool = False

    @property
    def name(self) -> str:
        return self.start.session.name


class TransformersBatchEngine(TransformersEngine):
    """A TransformersEngine that can also take several turns at a time."""

    def __init__(
        self,
        model: PreTrainedModel | Adapter,
        client: Client,
        spec: ModelSpec,
        plan: RestorePlan | None = None,
        **settings: Any,
    ) -> None:
        """See TransformersEngine. Raises UnsupportedArchitecture, too, where sequences cannot be packed.

        A cache on the host holds one sequence: InvalidArgument(field="holds_on_host").
        """
        if settings.get("holds_on_host"):
            raise InvalidArgument(field="holds_on_host", problem="such a cache holds one sequence at a time")
        loaded = model.model if isinstance(model, Adapter) else model
        self._model_turns, self._own_attention = _TurnsOfModel(), _attention_of(loaded)
        super().__init__(model, client, spec, plan, **settings)
        try:
            with _keeping_attention(loaded):
                self._packed = PackedModel(loaded)
            self._check_shapes()
        except BaseException:
            self.close()
            raise

    def turns(self, requests: Sequence[TurnRequest]) -> list[Turn]:
        """Continue several sessions together; each turn is as `turn` gives it alone.

        `first_token_ns` counts from the common begin. Raises what `turn` raises, and
        InvalidArgument(field="session_id") for a session that is named twice; then nothing was computed.
        """
        names = [request.session_id for request in requests]
        if len(set(names)) != len(names):
            raise InvalidArgument(field="session_id", problem="a session has one turn at a time")
        if any(not request.new_token_ids for request in requests):
            raise InvalidArgument(field="token_ids", problem="at least one token is needed to continue")
        begin_ns = perf_counter_ns()
        with self._turn_of(*names):
            return self._turns(requests, begin_ns)

    def _turns(self, requests: Sequence[TurnRequest], begin_ns: int) -> list[Turn]:
        batch = [self._look_up(request) for request in requests]
        chosen = self._chooser.choose_together([queued.wanted for queued in batch], place=self._place)
        batch = [batch[index] for index, _ in chosen]
        with ExitStack() as ending, _keeping_attention(self._model):
            # All restores begin at once, in the order of the plan, which the pipeline keeps.
            for place, (queued, (_, choice)) in enumerate(zip(batch, chosen, strict=True)):
                ending.callback(queued.end)
                self._try_to_begin(queued, choice, behind_count=place)
            # Sessions that are restored alone come last.
            waiting = sorted(batch, key=lambda queued: queued.start is None)
            while waiting:
                layout = frozenset(waiting[0].session.streams())
                # Hooks capture one set of streams from a pass, so that a pass has sessions of one layout.
                of_layout = deque(
                    queued for queued in waiting if frozenset(queued.session.streams()) == layout
                )
                waiting = [queued for queued in waiting if queued not in of_layout]
                self._run(of_layout, batch, layout, begin_ns)
        by_request = {id(queued.request): queued.turn for queued in batch}
        return [by_request[id(request)] for request in requests]

    def _check_shapes(self) -> None:
        """Raise UnsupportedArchitecture where transformers caches something else than attention looks at."""
        cache = self._empty_cache()
        prefill(self._model, cache, [0, 0])
        for layer, (heads, key_size, value_size) in self._packed.layer_shapes.items():
            # Any: a layer without keys is refused, too.
            held: Any = cache.layers[layer]
            keys: Any = getattr(held, "keys", None)
            values: Any = getattr(held, "values", None)
            are_there = keys is not None and values is not None
            found = (keys.shape[1], keys.shape[3], values.shape[3]) if are_there else None
            if found != (heads, key_size, value_size):
                raise refuse(self._model, "its cache holds other state than its attention looks at")

    def _look_up(self, request: TurnRequest) -> _Waiting:
        turn = Turn()
        count = len(request.new_token_ids) + request.max_new_tokens
        session, known = self._fit(request.session_id, request.history, count, turn, request.labels)
        return _Waiting(request, turn, session, known)

    def _try_to_begin(self, queued: _Waiting, choice: Choice, *, behind_count: int) -> None:
        """Begin a restore, or leave it for when no other one is under way."""
        if not queued.session.token_count:
            queued.start = Start(queued.session, [], self._empty_cache())
            return
        # A miss here may be for room that others' leases take: a second miss is told.
        with suppress(*MISSES):
            queued.start = self._begin(
                queued.session, queued.known, queued.wanted, choice, behind_count=behind_count
            )

    def _started(self, queued: _Waiting, begin_ns: int) -> _Running:
        """The turn of a session that is restored or computed."""
        request, turn = queued.request, queued.turn
        start = queued.start or self._restored_alone(queued)
        start.note_times(turn)
        turn.restore_ns = perf_counter_ns() - begin_ns
        missing = start.note(turn, queued.known, len(request.new_token_ids))
        turn.ahead_token_count = self._ahead.returned(start.session.name, start.reused_count)
        if start.is_missing:
            # The store has these tokens: they are computed, and not saved again.
            with self._recomputing():
                prefill(self._model, start.cache, start.saved)
        waiting = [*missing, *request.new_token_ids]
        capacity = len(start.saved) + len(waiting) + request.max_new_tokens
        ends = request.eos_token_ids
        return _Running(
            request,
            turn,
            start,
            SequenceCache.continuing(start.cache, len(start.saved), capacity),
            start.session.token_count - len(start.saved),
            deque(waiting),
            end_token_ids(self._model) if ends is None else ends,
            is_answered=not request.max_new_tokens,
        )

    def _restored_alone(self, queued: _Waiting) -> Start:
        """Restore a session as `turn` does, and wait until it is whole: nothing else is under way."""
        if queued.failed is not None:
            start, error = queued.failed
            self._miss(start.session.name, queued.turn, error)
            if queued.known is None or not isinstance(error, DAMAGED):
                return self._missed(start.session, start.saved, error)
            queued.session = self._open(queued.session.name, queued.turn, queued.session.labels)
        begun = self._restore(queued.session, queued.known, queued.wanted.new_tokens, queued.turn)
        queued.start, queued.failed = begun, None
        if queued.is_restored():
            return begun
        _, error = queued.failed or (begun, RestoreFailed(problem="no restore was begun"))
        self._miss(begun.session.name, queued.turn, error)
        return self._missed(begun.session, begun.saved, error)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """A pass that is not packed, by any thread."""
        with self._model_turns:
            # The packed attention knows its own passes only; a plain one would be refused.
            self._attend_by(self._own_attention)
            yield

    def _attend_by(self, attention: str) -> None:
        """Set how the model attends. The caller has the model's turn."""
        if _attention_of(self._model) != attention:
            self._model.set_attn_implementation(attention)

    def _run(
        self, waiting: deque[_Waiting], batch: Sequence[_Waiting], layout: frozenset[Stream], begin_ns: int
    ) -> None:
        """Run the turns of the sessions of one layout, each from when it is restored."""
        saver = self._savers.of(layout)
        running: list[_Running] = []
        try:
            with Capture(self._adapter, layout, saver.put, is_on_host=False):
                while waiting or any(active.waiting for active in running):
                    # A session that is not ready is waited for only where nobody else has tokens to compute.
                    while waiting and (waiting[0].is_ready or not any(active.waiting for active in running)):
                        queued = waiting.popleft()
                        if queued.start is not None and not queued.is_restored():
                            # The session goes behind the others: its leases need the room that theirs take.
                            waiting.append(queued)
                            continue
                        # Leases of other sessions go back first: the session may lack the room that they
                        # take.
                        if queued.start is None:
                            _wait_for_all(batch)
                        started = self._started(queued, begin_ns)
                        saver.open(started.start.session)
                        running.append(started)
                    if all(queued.is_ready for queued in batch):
                        # No session is being restored any more: leases go back before the replies are long.
                        _wait_for_all(batch)
                    self._pass(_chosen(running), saver, begin_ns)
        finally:
            for each in running:
                saver.finish(each.name, durability=self._durability)

    def _pass(self, chosen: Sequence[tuple[_Running, list[int]]], saver: Saver, begin_ns: int) -> None:
        slices = [
            Slice(active.name, active.saved_count + active.cache.token_count, len(ids))
            for active, ids in chosen
        ]
        tokens = [token for _, ids in chosen for token in ids]
        # The model's turn is held: the saver files captured rows under the announced pass.
        with self._model_turns, saver.passing(slices, tokens):
            self._attend_by(ATTENTION)
            logits = self._packed.step([Work(active.cache, ids) for active, ids in chosen])
        for (active, _), token in zip(chosen, logits.argmax(dim=-1).tolist(), strict=True):
            _take(active, token, begin_ns)


def _wait_for_all(batch: Sequence[_Waiting]) -> None:
    """Wait until no restore is under way, and give all leases back."""
    for queued in batch:
        queued.is_restored()
    for queued in batch:
        queued.end()


def _chosen(batch: Sequence[_Running]) -> list[tuple[_Running, list[int]]]:
    """The next pass: sessions, and the tokens of each; those with the fewest first."""
    room, chosen = PASS_TOKENS, []
    # Sessions that generate have one token each, and go first: a long prefill takes what room is left.
    for active in sorted(batch, key=lambda active: len(active.waiting)):
        count = min(len(active.waiting), room)
        if count:
            chosen.append((active, [active.waiting.popleft() for _ in range(count)]))
            room -= count
    return chosen


def _take(active: _Running, token: int, begin_ns: int) -> None:
    """End a session's pass. When all its tokens are computed, this token is the next of its reply."""
    # Logits in the middle of a prefill are nobody's next token.
    if active.waiting or active.is_answered:
        return
    turn = active.turn
    turn.first_token_ns = turn.first_token_ns or perf_counter_ns() - begin_ns
    turn.token_ids.append(token)
    # The last token goes through the model, too: then the session holds the whole turn.
    active.waiting.append(token)
    active.is_answered = token in active.ends or len(turn.token_ids) == active.request.max_new_tokens


def _attention_of(model: PreTrainedModel) -> str:
    own: str = model.config._attn_implementation  # noqa: SLF001  transformers has a way to set it, none to ask
    return own


@contextmanager
def _keeping_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model's attention may be another one."""
    before = _attention_of(model)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
