"""transformers with a context store, several sessions at a time: restored, computed together, and saved.

Sessions are restored one after the other; their new tokens then go through the model side by side, a pass of
`PASS_TOKENS` at most, those that generate first. Each keeps a cache of its own, and is saved as it goes.
Sessions of different layouts are captured differently, and go one layout after the other. Worst case: each
session's restored cache is copied once, and while they generate all of them are in memory.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from transformers import PreTrainedModel

from ctxcache.client import Client
from ctxcache.errors import CacheError, InvalidArgument
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import Stream
from gpu_worker.capture import Capture
from gpu_worker.engines.transformers import TransformersEngine, Turn, _Start
from gpu_worker.families.adapter import refuse
from gpu_worker.generation import end_token_ids, prefill
from gpu_worker.packed import ATTENTION, PackedModel, SequenceCache, Work
from gpu_worker.plan import RestorePlan
from gpu_worker.saving import Slice

PASS_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One session's turn in a batch; the fields are `turn`'s arguments."""

    session_id: str
    new_token_ids: Sequence[int]
    max_new_tokens: int
    history: Sequence[int] | None = None
    eos_token_ids: Collection[int] | None = None


@dataclass(slots=True, eq=False)
class _Running:
    """A session's turn in the batch: `waiting` tokens have not gone through the model."""

    request: TurnRequest
    turn: Turn
    start: _Start
    cache: SequenceCache
    saved_count: int
    """Tokens of the session behind which the cache's own end is saved."""
    waiting: deque[int]
    ends: Collection[int]
    is_answered: bool = False
    layout: frozenset[Stream] = field(default_factory=frozenset)

    @property
    def name(self) -> str:
        return self.start.session.name


class TransformersBatchEngine(TransformersEngine):
    """A TransformersEngine that can also take several turns at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        client: Client,
        spec: ModelSpec,
        plan: RestorePlan | None = None,
        **settings: Any,
    ) -> None:
        """See TransformersEngine. Raises UnsupportedArchitecture, too, where sequences cannot be packed."""
        super().__init__(model, client, spec, plan, **settings)
        try:
            with _attention_of(model):
                self._packed = PackedModel(model)
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
        self._unchanged.check()
        begin_ns = perf_counter_ns()
        batch = [self._prepare(request, begin_ns) for request in requests]
        with _attention_of(self._model):
            self._model.set_attn_implementation(ATTENTION)
            for layout in dict.fromkeys(one.layout for one in batch):
                self._run([one for one in batch if one.layout == layout], layout, begin_ns)
        return [one.turn for one in batch]

    def _check_shapes(self) -> None:
        """Raise UnsupportedArchitecture where transformers caches something else than attention looks at."""
        cache = self._empty_cache()
        prefill(self._model, cache, [0, 0])
        for layer, (heads, key_size, value_size) in self._packed.layer_shapes.items():
            # Any: what holds no keys is refused, too.
            held: Any = cache.layers[layer]
            keys: Any = getattr(held, "keys", None)
            values: Any = getattr(held, "values", None)
            are_there = keys is not None and values is not None
            found = (keys.shape[1], keys.shape[3], values.shape[3]) if are_there else None
            if found != (heads, key_size, value_size):
                raise refuse(self._model, "its cache holds other state than its attention looks at")

    def _prepare(self, request: TurnRequest, begin_ns: int) -> _Running:
        turn = Turn()
        new_count = len(request.new_token_ids)
        session, known = self._fit(
            request.session_id, request.history, new_count + request.max_new_tokens, turn
        )
        start = self._restored_whole(self._restore(session, known, new_count, turn), turn)
        turn.restore_ns = perf_counter_ns() - begin_ns
        missing = list(start.lost) if known is None else known[len(start.saved) :]
        turn.history_token_count = len(start.saved) + len(missing)
        turn.reused_token_count = start.reused_count
        turn.prefilled_token_count = turn.history_token_count - start.reused_count + new_count
        if start.is_missing:
            # The store has these tokens: they are computed, and not saved again.
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
            layout=frozenset(start.session.streams()),
        )

    def _restored_whole(self, start: _Start, turn: Turn) -> _Start:
        """Wait until all layers are there; a restore that fails is a miss."""
        restoring = start.restoring
        if restoring is None:
            return start
        try:
            if restoring.is_ahead:
                with restoring:
                    restoring.restoration.wait_all()
        except CacheError as error:
            if not restoring.is_failed_by(error):
                raise
            turn.miss_reason = error.reason
            return self._missed(start.session, start.saved, error)
        turn.restored_ns = restoring.restored_ns
        turn.predicted_ns = int(restoring.choice.predicted_s * 1e9)
        return start

    def _run(self, batch: Sequence[_Running], layout: frozenset[Stream], begin_ns: int) -> None:
        """Pass after pass, until each session's whole turn has gone through the model."""
        saver = self._savers.of(layout)
        opened: list[_Running] = []
        try:
            for one in batch:
                saver.open(one.start.session)
                opened.append(one)
            with Capture(self._adapter, layout, saver.put, is_on_host=False):
                while chosen := _chosen(batch):
                    slices = [
                        Slice(one.name, one.saved_count + one.cache.token_count, len(ids))
                        for one, ids in chosen
                    ]
                    with saver.passing(slices, [token for _, ids in chosen for token in ids]):
                        logits = self._packed.step([Work(one.cache, ids) for one, ids in chosen])
                    for (one, _), token in zip(chosen, logits.argmax(dim=-1).tolist(), strict=True):
                        _take(one, token, begin_ns)
        finally:
            for one in opened:
                saver.finish(one.name, durability=self._durability)


def _chosen(batch: Sequence[_Running]) -> list[tuple[_Running, list[int]]]:
    """The next pass: sessions, and the tokens of each; those with the fewest first."""
    room, chosen = PASS_TOKENS, []
    for one in sorted(batch, key=lambda one: len(one.waiting)):
        count = min(len(one.waiting), room)
        if count:
            chosen.append((one, [one.waiting.popleft() for _ in range(count)]))
            room -= count
    return chosen


def _take(one: _Running, token: int, begin_ns: int) -> None:
    """A session's pass is over: where all of it has been computed, this token is the next of its reply."""
    if one.waiting or one.is_answered:
        return
    turn = one.turn
    turn.first_token_ns = turn.first_token_ns or perf_counter_ns() - begin_ns
    turn.token_ids.append(token)
    # The last one goes through the model, too: then the session holds the whole turn.
    one.waiting.append(token)
    one.is_answered = token in one.ends or len(turn.token_ids) == one.request.max_new_tokens


@contextmanager
def _attention_of(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model's attention may be another one."""
    own = model.config._attn_implementation  # noqa: SLF001  transformers has a way to set it, none to ask
    try:
        yield
    finally:
        model.set_attn_implementation(own)
