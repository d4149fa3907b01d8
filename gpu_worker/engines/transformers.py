"""transformers with a context store: every turn restores its session, continues it, and saves it.

The engine keeps no state between turns. A turn looks its session up, restores the store's part, prefills the
new tokens (while later layers are still restored, where a planner decides), generates, and hands every row
over as it is computed; background threads commit them. A session that is missing, short or damaged is a miss
with a reason, and the history that the caller gives is prefilled again. When a restore fails while the model
runs on its cache, the pass ends with the reason and the cache is thrown away. Worst case: a full prefill.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import NamedTuple

from transformers import Cache, DynamicCache, PreTrainedModel

from ctxcache.client import Client
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.client.wire import Closing, span
from ctxcache.errors import (
    CacheError,
    InvalidArgument,
    ModelFingerprintMismatch,
    PositionsNotRelocatable,
    SessionMoved,
    SessionNotFound,
)
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import LOSSY_KINDS
from ctxcache.format.streams import TOKENS
from gpu_worker.engines import names
from gpu_worker.engines.precedence import precedence_of
from gpu_worker.engines.reasons import Reasons
from gpu_worker.engines.renderings import KEPT, MOST_KEPT, PLACE_TOKENS, Renderings
from gpu_worker.engines.transformers_host import HostCaches
from gpu_worker.engines.transformers_restoring import SessionRestorer
from gpu_worker.engines.transformers_sessions import DAMAGED, MISSES, cut, emptied, stand_in, tokens_of
from gpu_worker.engines.transformers_turns import FAST, Rerendered, Start, Steps, Taking, Turn
from gpu_worker.errors import IncompleteRestore, RestoreFailed
from gpu_worker.families import Adapter
from gpu_worker.families.generation import (
    PREFILL_PIECE_TOKENS,
    SINK_TOKENS,
    Capture,
    Stops,
    common_prefix,
    fit,
    prefill,
    stream_greedy,
)
from gpu_worker.forms.snapshots import GRAIN_TOKENS, Snapshot, Snapshots
from gpu_worker.model.probe import probe_of
from gpu_worker.model.proof import adapt
from gpu_worker.model.unchanged import Unchanged
from gpu_worker.pipeline.pipeline import PipelineSettings
from gpu_worker.pipeline.planned import Choice, Chooser, ReturnCost, Wanted
from gpu_worker.planning.ahead import AheadCounts, AheadTally
from gpu_worker.planning.layout import Return
from gpu_worker.planning.plan import RestorePlan
from gpu_worker.planning.profile import Profile, StatePlace
from gpu_worker.saving import Slice
from gpu_worker.saving.aging import RENT_S_PER_GB_HOUR, THAW_S, Aging
from gpu_worker.saving.per_layout import Savers

log = logging.getLogger(__name__)

RESTORE_TIMEOUT_S = 60.0
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


class _Pace(NamedTuple):
    """How a pass ahead goes on; see `rerendered`."""

    step_tokens: int
    is_worth: Callable[[int, int], bool]
    goes_on: Callable[[], bool]


class _GivesWay(Exception):
    """A turn waits: the pass ahead ends between two of its steps."""


def context_window(model: PreTrainedModel) -> int:
    """The most tokens that a model's settings allow. Raises InvalidArgument where they name no length."""
    config = model.config.get_text_config(decoder=True)
    window = next(
        (size for name in _CONTEXT_NAMES if isinstance(size := getattr(config, name, None), int)), None
    )
    if not window:
        raise InvalidArgument(field="window", problem=f"{type(model).__name__} says no length of its context")
    return window


def _name_of(session_id: str) -> str:
    """The resource name of a session by the caller's name for it. Raises InvalidArgument."""
    return f"sessions/{names.session_id(session_id)}"


class TransformersEngine(Closing):
    """One model, one store, any number of sessions, one turn at a time. A context manager."""

    def __init__(
        self,
        model: PreTrainedModel | Adapter,
        client: Client,
        spec: ModelSpec,
        plan: RestorePlan | None = None,
        *,
        profile: Profile | None = None,
        expected: Sequence[Return] = (),
        restore_timeout_s: float = RESTORE_TIMEOUT_S,
        settings: PipelineSettings | None = None,
        window: int | None = None,
        sink_count: int = SINK_TOKENS,
        durability: Durability = Durability.DISK,
        snapshot_every: int | None = None,
        holds_on_host: bool = False,
        labels: Mapping[str, str] | None = None,
        renderings: int = KEPT,
    ) -> None:
        """`model`: a loaded one, or what `adapt` made of it since its last change: it is not proven twice.

        `plan` says what is saved and how it comes back; without one, a planner does, from `profile` on.

        `expected`: how sessions are expected back, which decides what is saved of new ones. By default,
        each comes back once with half a window. Packed kinds are used where `spec` lists them: that is how
        a loss is allowed. `window` defaults to the model's context. A restore that takes longer than
        `restore_timeout_s` is a miss. `snapshot_every`: tokens between snapshots of recurrent layers' states,
        a multiple of 32, or 0 for none; by default as the planner says. `holds_on_host`: for contexts whose
        K and V do not fit the device: they stay on the host while a turn is computed (`HostCache`), and
        sessions are saved as layer inputs, which a plan must say. `labels`: of each session that the engine
        makes, beside its turn's own. `renderings`: how many former renderings of an edited conversation
        stay (`rerendered`). Registers the model with a probe, or compares it with the one that is kept.
        Raises InvalidArgument(field="plan" | "snapshot_every" | "renderings"), UnsupportedArchitecture for a
        model that cannot be held so, ModelFingerprintMismatch, ModelProbeMismatch, Unavailable.
        """
        if not 0 <= renderings <= MOST_KEPT:
            raise InvalidArgument(field="renderings", problem=f"{renderings} is no number of renderings")
        if plan is not None:
            plan.check(spec)
        elif profile is None:
            raise InvalidArgument(field="plan", problem="neither a plan nor a profile to plan by")
        # A loaded model proves its rows here: a failure comes before a session is touched.
        self._adapter = model if isinstance(model, Adapter) else adapt(model)
        model = self._adapter.model
        self._model, self._client, self._spec = model, client, spec
        self._window = window or context_window(model)
        packed_kinds = frozenset(stream.stream.kind for stream in spec.streams) & set(LOSSY_KINDS)
        self._chooser = Chooser(self._adapter, plan, profile, lossy_kinds=packed_kinds)
        expected = expected or [Return(self._window // 2)]
        self._layout = self._chooser.layout(expected)
        self._host: HostCaches | None = None
        if holds_on_host:
            self._host = HostCaches(self._adapter)
            if plan is not None and not self._host.streams.issuperset(plan.streams()):
                problem = f"{plan} is not of layer inputs, from which a cache on the host comes back"
                raise InvalidArgument(field="plan", problem=problem)
            self._layout = (TOKENS, *sorted(self._host.streams))
        self._snapshot_every = self._checked_distance(snapshot_every, expected)
        self._restorer = SessionRestorer(
            self._adapter,
            self._chooser,
            timeout_s=restore_timeout_s,
            settings=settings,
            recomputing=self._recomputing,
        )
        self._place = StatePlace.DRAM
        self._misses = Reasons(log)
        self._sink_count, self._durability, self._labels = sink_count, durability, dict(labels or {})
        probe = probe_of(
            self._adapter, spec, lambda ids: prefill(model, DynamicCache(config=model.config), ids)
        )
        self._own = client.models.register(spec, probe)
        # This follows the probe: some modules make tensors at their first pass, which would look like a
        # change.
        self._unchanged = Unchanged(model, spec)
        self._savers = Savers(client, self._own, model.device, self._unchanged.check_weights)
        self._renderings = Renderings(client, self._own, kept=renderings)
        self._precedence = precedence_of(self._adapter.base)
        self._ahead, self._told = AheadTally(), AheadCounts()
        self._told_of = ""
        """The conversation of the last pass ahead, by which the store is told what became of all."""
        self.turn_begins: Callable[[str], None] = lambda _session_id: None
        """Called with a conversation's name where its turn begins, in the turn's thread."""
        self._snapshots: Snapshots | None = None
        if self._snapshot_every:
            self._snapshots = Snapshots(
                client, self._adapter, spec.fingerprint(), check=self._unchanged.check_weights
            )

    def close(self) -> None:
        """Save the staged rows, then end the threads that save and restore."""
        self._tell_ahead()
        if self._host is not None:
            self._host.close()
        # Saving comes first: staged rows are lost with the process, while a restore is only slower.
        self._savers.close()
        self._restorer.close()
        if self._snapshots is not None:
            self._snapshots.wait()

    @property
    def profile(self) -> Profile | None:
        """The machine as the planner knows it by now; None where the plan is the caller's."""
        return self._chooser.profile

    def wait(self, session_id: str) -> CacheError | None:
        """Wait until a session is saved; the error that stopped saves, if any. Raises DeadlineExceeded."""
        failure = self._savers.wait(_name_of(session_id))
        if self._snapshots is not None:
            self._snapshots.wait()
        return failure

    def _checked_distance(self, every: int | None, expected: Sequence[Return]) -> int:
        if every is not None and (every < 0 or every % GRAIN_TOKENS):
            problem = f"{every} is no multiple of {GRAIN_TOKENS}"
            raise InvalidArgument(field="snapshot_every", problem=problem)
        if not self._adapter.is_recurrent or self._adapter.snapshot_problem:
            if every:
                problem = self._adapter.snapshot_problem or "the model keeps no states"
                raise InvalidArgument(field="snapshot_every", problem=problem)
            return 0
        return self._chooser.snapshot_every(expected) if every is None else every

    def cost(self, session_id: str) -> ReturnCost:
        """The cost of bringing a session back now. No rows move, and it counts as no access.

        Of a model that keeps states the token ids are read: snapshots are found by them. Raises
        SessionNotFound, ModelFingerprintMismatch, InvalidArgument(field="profile").
        """
        session = self._client.sessions.get(_name_of(session_id))
        self._own.check(session)
        (known,) = self._client.sessions.lookup([(session.name, session.model_fingerprint)])
        snapshot_tokens = 0
        if self._snapshots is not None and known.token_count:
            handle = self._client.sessions.open(session, self._own)
            with handle.read(streams=[TOKENS], end=known.token_count, is_quiet=True) as rows:
                snapshot_tokens = self._snapshots.latest(rows.token_ids(), session.salt)
        return self._chooser.cost(
            session.streams(),
            known.token_count,
            known.dram_token_count,
            snapshot_tokens=snapshot_tokens,
        )

    def aging(
        self,
        *,
        rent_s_per_gb_hour: float = RENT_S_PER_GB_HOUR,
        thaw_s: float = THAW_S,
        returning: float | None = None,
    ) -> Aging:
        """Make what keeps the model's idle sessions in smaller forms. Use it between turns, in their thread.

        See Aging. Raises InvalidArgument(field="profile" | "rent" | "thaw" | "returning").
        """
        profile = self._chooser.profile
        if profile is None:
            raise InvalidArgument(field="profile", problem="none is known: the plan is the caller's")
        return Aging(
            self._adapter,
            self._client,
            self._own,
            profile,
            self._layout,
            rent_s_per_gb_hour=rent_s_per_gb_hour,
            thaw_s=thaw_s,
            returning=returning,
        )

    def turn(
        self,
        session_id: str,
        new_token_ids: Sequence[int],
        *,
        max_new_tokens: int,
        history: Sequence[int] | None = None,
        eos_token_ids: Collection[int] | None = None,
        on_token: Callable[[int], None] = lambda _token: None,
        labels: Mapping[str, str] | None = None,
    ) -> Turn:
        """Continue a session by `new_token_ids` and up to `max_new_tokens` generated ones.

        A session may have any name: one outside the store's alphabet is known by its digest (`names`).
        `history` is every token before the new ones, as the caller knows it; where the store has
        less or other, it is prefilled from there. None: the session's own tokens are the history. A session
        of another model is a miss without tokens, and stays as it is: nothing of the turn is saved.
        `labels`: what the session gets where this turn makes it, see `sessions.create`.
        Raises InvalidArgument, Unavailable, DeadlineExceeded. Raises
        ModelChanged, with nothing restored or saved, when the model is not what it was when the engine was
        made.
        """
        begin_ns = time.perf_counter_ns()
        turn = Turn()
        new_count = len(new_token_ids) + max_new_tokens
        with self._turn_of(session_id):
            session, known = self._fit(session_id, history, new_count, turn, labels)
            if self._host is not None:
                self._host.begin(max(session.token_count, len(known or ())) + new_count)
            with span("restore", token_count=len(known or ())):
                start = self._restore(session, known, len(new_token_ids), turn)
            turn.restore_ns = time.perf_counter_ns() - begin_ns
            missing = start.note(turn, known, len(new_token_ids))
            turn.ahead_token_count = self._ahead.returned(start.session.name, start.reused_count)
            for token in self._answer(start, [*missing, *new_token_ids], max_new_tokens, eos_token_ids, turn):
                turn.first_token_ns = turn.first_token_ns or time.perf_counter_ns() - begin_ns
                turn.token_ids.append(token)
                on_token(token)
            if self._host is not None:
                self._host.close()
        return turn

    @contextmanager
    def _turn_of(self, *session_ids: str) -> Iterator[None]:
        """Have the model for turns of these conversations; who works ahead gives way."""
        for session_id in session_ids:
            self.turn_begins(session_id)
        with self._precedence.turn():
            self._unchanged.check()
            yield

    # -- ahead of a turn -----------------------------------------------------------------------------

    @property
    def ahead(self) -> AheadCounts:
        """Tokens that `rerendered` computed, and what became of them."""
        return self._ahead.counts

    def rerendered(
        self,
        session_id: str,
        history: Sequence[int],
        *,
        step_tokens: int = PREFILL_PIECE_TOKENS,
        is_worth: Callable[[int, int], bool] = lambda _spared_count, _cost_count: True,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Rerendered:
        """Compute what a conversation's next prompt will begin with, as far as its session has other tokens.

        `history`: token ids of the next rendering. From the first one that differs on they are computed, in
        steps of `step_tokens`. Then they take the session's place at once, and what it had is kept for a
        while as a former rendering, which a turn finds by its tokens. It never makes a session of its
        own: one that is not there, that went on meanwhile or that somebody reads stays as it is. A turn of
        the engine that comes meanwhile waits for one step, and finds what was computed by then. `is_worth`
        is asked with the tokens that a turn would be spared and those that are to be computed; where it
        says no, nothing is done. `goes_on` is asked before each step; where it says no, the pass gives way.
        Only errors of the caller are raised: InvalidArgument, ModelChanged.
        """
        name = _name_of(session_id)
        if step_tokens < 1:
            raise InvalidArgument(field="step_tokens", problem=f"{step_tokens} is no number of tokens")
        if len(history) > self._window:
            problem = f"{len(history)} tokens are more than the context of {self._window}"
            raise InvalidArgument(field="history", problem=problem)
        with self._precedence.ahead():
            self._unchanged.check()
            try:
                done = self._rerender(name, list(history), _Pace(step_tokens, is_worth, goes_on))
            except CacheError as error:
                self._misses.tell(name, f"is not rendered ahead, {error.reason.lower()}", error)
                done = Rerendered(len(history), reason=error.reason)
        self._told_of = name
        self._tell_ahead()
        return done

    def _tell_ahead(self) -> None:
        """Tell the store what became of tokens since the last time: it adds up its tenants' engines."""
        told, counts = self._told, self._ahead.counts
        if counts == told:
            return
        try:
            self._client.hints.ahead(
                self._told_of,
                computed_token_count=counts.computed_token_count - told.computed_token_count,
                used_token_count=counts.used_token_count - told.used_token_count,
                wasted_token_count=counts.wasted_token_count - told.wasted_token_count,
            )
        except CacheError as error:
            # It is told with what comes: a store that is gone has no counts to be added to.
            log.info("ahead_not_told session=%a reason=%s error=%s", self._told_of, error.reason, error)
        else:
            self._told = counts

    def _rerender(self, name: str, history: list[int], pace: _Pace) -> Rerendered:
        self._check_saved(name)
        session = self._client.sessions.get(name)
        self._own.check(session)
        if session.contents:
            raise InvalidArgument(field="session", problem=f"{name} has contents, which no token ids say")
        # A quiet read: nobody returned.
        with self._client.sessions.open(session, self._own).read(streams=[TOKENS], is_quiet=True) as rows:
            session, ids = rows.session, rows.token_ids()
        common = common_prefix(ids, history)
        differing = len(history) - common
        if not differing or not pace.is_worth(differing, differing + PLACE_TOKENS):
            return Rerendered(len(history), common)
        # One pass ahead, and what a crash leaves at each step:
        #
        #     fork, or adopt        a session with the common tokens, which expires
        #     compute, save         a longer one; the conversation is as it was
        #     take its place        one step of the store: the old rendering before it, the new one behind
        #     delete what was made  left over: it expires
        working = self._renderings.begun(session, history, common)
        begin = done = working.token_count
        try:
            if done < len(history):
                done = self._compute_ahead(working, history, pace)
            is_whole = done == len(history)
            if is_whole:
                self._renderings.take_place(working, session)
            else:
                self._renderings.leave(session, working)
        except BaseException:
            self._ahead.dropped(done - begin)
            self._renderings.drop(working)
            raise
        # Tokens before the first that differs were there: they were computed for the sake of those behind.
        again = max(min(common, done) - begin, 0)
        self._ahead.dropped(again)
        self._ahead.held(name, begin + again, done)
        return Rerendered(len(history), common, done - begin, is_in_place=is_whole, gave_way=not is_whole)

    def _compute_ahead(self, working: SessionInfo, history: list[int], pace: _Pace) -> int:
        """Compute the rest of a rendering until a turn waits; how many tokens its session has then."""
        computed_count = 0

        def begins(count: int) -> None:
            nonlocal computed_count
            if self._precedence.is_wanted or not pace.goes_on():
                raise _GivesWay
            computed_count += count

        if self._host is not None:
            self._host.begin(len(history))
        try:
            start = self._restored_ahead(working, history)
            # The store makes it durable where it takes its place.
            steps = Steps(pace.step_tokens, begins, Durability.MEMORY)
            with suppress(_GivesWay):
                for _token in self._generate(start, history[len(start.saved) :], 0, (), steps):
                    pass
            self._check_saved(working.name)
            return self._client.sessions.get(working.name).token_count
        except BaseException:
            self._ahead.dropped(computed_count)
            raise
        finally:
            if self._host is not None:
                self._host.close()

    def _restored_ahead(self, working: SessionInfo, history: list[int]) -> Start:
        turn = Turn()
        start = self._restore_common(working, history, 0, turn)
        # A turn would compute the tokens without their rows. A pass ahead can wait for another time.
        if turn.miss_reason:
            raise RestoreFailed(problem=f"{working.name} does not come back: {turn.miss_reason.lower()}")
        return start

    def _check_saved(self, session_name: str) -> None:
        failure = self._savers.wait(session_name)
        if failure is not None:
            raise failure

    # -- before the first token --------------------------------------------------------------------

    def _fit(
        self,
        session_id: str,
        history: Sequence[int] | None,
        new_count: int,
        turn: Turn,
        labels: Mapping[str, str] | None,
    ) -> tuple[SessionInfo, list[int] | None]:
        """The session and the history, both truncated alike where the context window asks for it."""
        failure = self.wait(session_id)
        # The last turn was not saved whole: without a given history the caller has to notice that.
        if failure is not None:
            self._miss(_name_of(session_id), turn, failure)
        session = self._open(_name_of(session_id), turn, {**self._labels, **(labels or {})})
        if history and not session.token_count and not turn.miss_reason:
            self._miss(session.name, turn, SessionNotFound(session=session.name))
        history_count = session.token_count if history is None else len(history)
        cutting = fit(history_count, new_count, window=self._window, sink_count=self._sink_count)
        if cutting is None:
            return session, None if history is None else list(history)
        turn.dropped_token_count = history_count - cutting.kept_count
        known = tokens_of(self._client, self._own, session) if history is None else history
        # Only a session that holds the whole history is cut in the store. `_begin` cuts another one.
        if session.token_count == history_count:
            session = self._truncate(session, cutting.recent_count, turn)
        return session, cutting.apply(known)

    def _open(self, name: str, turn: Turn, labels: Mapping[str, str]) -> SessionInfo:
        """The session of this resource name, made where there is none.

        Where it is another model's, or another host is writing it, it stays as it is, and the turn goes on
        with a stand-in, as a miss.
        """
        try:
            session = self._client.sessions.get(name)
        except SessionNotFound:
            id_ = name.removeprefix("sessions/")
            return self._client.sessions.create(self._own, id=id_, layout=self._layout, labels=labels).info
        except SessionMoved as error:
            self._miss(name, turn, error)
            return stand_in(SessionInfo(name=name), self._own, (TOKENS, *self._layout))
        try:
            self._own.check(session)
        except ModelFingerprintMismatch as error:
            self._miss(name, turn, error)
            return stand_in(session, self._own, (TOKENS, *self._layout))
        return session

    def _miss(self, name: str, turn: Turn, error: CacheError) -> None:
        """Note why a turn finds less than it should; the log names each reason once for a session."""
        turn.miss_reason = error.reason
        self._misses.tell(name, f"is not restored whole, {error.reason.lower()}", error)

    def _truncate(self, session: SessionInfo, recent_count: int, turn: Turn) -> SessionInfo:
        try:
            return self._client.sessions.open(session.name).keep_recent(
                recent_count,
                sink_token_count=self._sink_count,
                if_generation_match=session.generation,
            )
        # Learned positions, states and cached rows do not fit at other positions.
        except PositionsNotRelocatable as error:
            self._miss(session.name, turn, error)
            return cut(self._client, session, 0)

    def _restore(
        self, session: SessionInfo, known: Sequence[int] | None, new_count: int, turn: Turn
    ) -> Start:
        """Restore what the session and the history have in common.

        A damaged session is tried once more, cut.
        """
        # The store cuts damaged tokens, so that the second attempt restores the rest.
        for _attempt in range(2):
            try:
                return self._restore_common(session, known, new_count, turn)
            except MISSES as error:
                self._miss(session.name, turn, error)
                # Without a history the tokens are lost too: going on would answer another conversation.
                if known is None:
                    raise
                session = self._open(session.name, turn, session.labels)
        return self._nothing_restored(session)

    def _restore_common(
        self, session: SessionInfo, known: Sequence[int] | None, new_count: int, turn: Turn
    ) -> Start:
        if not session.token_count:
            return Start(session, [], self._empty_cache())
        if self._host is not None:
            return self._restore_on_host(self._host, session, known, turn)
        held = frozenset(session.streams())
        choice = self._chooser.choose(held, session.token_count, new_count, place=self._place)
        start = self._begin(session, known, Wanted(held, session.token_count, new_count), choice)
        try:
            if start.restoring is not None:
                start.restoring.wait_for_lead()
        except CacheError as error:
            if known is not None and isinstance(error, DAMAGED):
                raise
            self._miss(start.session.name, turn, error)
            return self._missed(start.session, start.saved, error)
        return start

    def _restore_on_host(
        self, host: HostCaches, session: SessionInfo, known: Sequence[int] | None, turn: Turn
    ) -> Start:
        """As `_restore_common`, into a cache on the host. A session of other rows is computed."""
        begin_ns = time.perf_counter_ns()
        held = frozenset(session.streams())
        streams = held if host.streams <= held else {TOKENS}
        with self._client.sessions.open(session, self._own).read(streams=streams) as rows:
            session = rows.session
            ids = rows.token_ids()
            common = len(ids) if known is None else common_prefix(ids, known)
            session = cut(self._client, session, common)
            cache = host.empty()
            if not common or not host.streams <= held:
                turn.miss_reason = turn.miss_reason or (IncompleteRestore.reason if common else "")
                return Start(session, ids[:common], cache, is_missing=common > 0)
            cache.restore(rows, common)
        host.measure(cache)
        turn.restored_ns = time.perf_counter_ns() - begin_ns
        return Start(session, ids[:common], cache)

    def _begin(
        self,
        session: SessionInfo,
        known: Sequence[int] | None,
        wanted: Wanted,
        choice: Choice,
        *,
        behind_count: int = 0,
        may_part: bool = True,
    ) -> Start:
        """Begin to restore what the session and the history have in common, as chosen for `wanted`.

        `may_part`: where they part, the session goes on in what has most of the history. Raises what a read
        raises. The restore tells a later error.
        """
        rows = self._client.sessions.open(session, self._own).read(streams=choice.streams())
        with ExitStack() as stack:
            stack.enter_context(rows)
            # A read tells where the store is. The plan of the next turn counts with it.
            self._place = StatePlace.DRAM if rows.is_local else StatePlace.REMOTE
            # This is the session as read: others may have changed it since the look-up.
            session = rows.session
            ids = rows.token_ids()
            common = len(ids) if known is None else common_prefix(ids, known)
            missing_count = 0 if known is None else len(known) - common
            if may_part and known is not None and common < len(ids):
                # The lease goes back first: a session that is read gives its place to none.
                stack.close()
                session = self._renderings.parted(session, known, common)
                return self._begin(session, known, wanted, choice, behind_count=behind_count, may_part=False)
            # The cut comes before any append: rows behind the common prefix are another conversation's.
            session = cut(self._client, session, common)
            if not common:
                return Start(session, [], self._empty_cache())
            # The plan was made by the look-up. The read shows the present tokens.
            if missing_count or common != wanted.history:
                # Only streams that were read can be chosen from.
                choice = self._chooser.choose(
                    choice.streams(), common, missing_count + wanted.new_tokens, place=self._place
                )
            snapshot = None
            if self._snapshots is not None:
                new_count = missing_count + wanted.new_tokens
                choice, snapshot = self._from_snapshot(
                    self._snapshots, session, choice, ids[:common], new_count
                )
            restoring = self._restorer.begin(
                rows, choice, ids[:common], behind_count=behind_count, snapshot=snapshot
            )
            stack.pop_all()
        return Start(session, ids[:common], restoring.cache, restoring)

    def _from_snapshot(
        self,
        snapshots: Snapshots,
        session: SessionInfo,
        choice: Choice,
        token_ids: Sequence[int],
        new_count: int,
    ) -> tuple[Choice, Snapshot | None]:
        """The choice with the snapshot that it goes on from; None where there is none that saves time."""
        # A snapshot of more tokens than are restored has seen tokens that were cut.
        snapshot_tokens = snapshots.latest(token_ids, session.salt)
        if not snapshot_tokens:
            return choice, None
        shorter = self._chooser.choose(
            choice.streams(), len(token_ids), new_count, place=self._place, snapshot_tokens=snapshot_tokens
        )
        if not shorter.snapshot_layers:
            return choice, None
        snapshot = snapshots.load(token_ids, snapshot_tokens, shorter.snapshot_layers, session.salt)
        return (choice, None) if snapshot is None else (shorter, snapshot)

    def _missed(self, session: SessionInfo, saved: list[int], error: CacheError) -> Start:
        """Start without rows. The session's tokens are computed; only damaged ones are saved again."""
        if isinstance(error, DAMAGED):
            return self._nothing_restored(session, lost=saved)
        return Start(session, saved, self._empty_cache(), is_missing=True)

    def _nothing_restored(self, session: SessionInfo, lost: Sequence[int] = ()) -> Start:
        return Start(emptied(self._client, self._own, session, lost), [], self._empty_cache(), lost=lost)

    def _empty_cache(self) -> Cache:
        return DynamicCache(config=self._model.config) if self._host is None else self._host.empty()

    def _recomputing(self) -> AbstractContextManager[None]:
        """The context of a restore's passes. One turn at a time waits for them anyway."""
        return nullcontext()

    # -- generating and saving ---------------------------------------------------------------------

    def _answer(
        self,
        start: Start,
        token_ids: Sequence[int],
        max_new_tokens: int,
        eos_token_ids: Collection[int] | None,
        turn: Turn,
    ) -> Iterator[int]:
        """Yield the reply. A restore that fails under the first pass is a miss: everything is prefilled."""
        try:
            yield from self._generate(start, token_ids, max_new_tokens, eos_token_ids)
        except CacheError as error:
            # An error behind the first token is the caller's: tokens that were given out cannot be taken
            # back.
            if start.restoring is None or turn.token_ids or not start.restoring.is_failed_by(error):
                raise
            self._miss(start.session.name, turn, error)
            turn.reused_token_count, turn.snapshot_token_count = 0, 0
            turn.loss_nats = 0.0
            turn.prefilled_token_count += len(start.saved)
            self._savers.wait(start.session.name)  # the pass that broke is a gap
            again = self._missed(start.session, start.saved, error)
            yield from self._generate(again, [*again.lost, *token_ids], max_new_tokens, eos_token_ids)
        start.note_times(turn)

    def _generate(
        self,
        start: Start,
        token_ids: Sequence[int],
        max_new_tokens: int,
        eos_token_ids: Collection[int] | None,
        steps: Steps = FAST,
    ) -> Iterator[int]:
        """Yield the reply. Rows are saved as they are computed, that of the last token included."""
        session = start.session
        layout = frozenset(session.streams())
        saver = self._savers.of(layout)
        end = session.token_count
        states = stops = None
        if self._snapshots is not None:
            states = Taking(self._snapshots, start, self._snapshot_every)
            stops = Stops(end, self._snapshot_every)

        def passing(token_ids: Sequence[int]) -> AbstractContextManager[None]:
            nonlocal end
            steps.begins(len(token_ids))
            end += len(token_ids)
            saved = saver.passing([Slice(session.name, end - len(token_ids), len(token_ids))], token_ids)
            return saved if states is None else states.around(saved, token_ids)

        is_stepwise = self._adapter.is_stepwise
        if start.is_missing:
            prefill(self._model, start.cache, start.saved, is_stepwise=is_stepwise)
        # The generation is fixed: appends by another engine end the saves, and do not mix with them.
        saver.open(session)
        try:
            with ExitStack() as first_pass, Capture(self._adapter, layout, saver.put, is_on_host=False):
                if start.restoring is not None and start.restoring.is_ahead:
                    first_pass.enter_context(start.restoring)
                pending = list(token_ids)
                for token in stream_greedy(
                    self._model,
                    start.cache,
                    token_ids,
                    max_new_tokens=max_new_tokens,
                    eos_token_ids=eos_token_ids,
                    piece_tokens=steps.tokens,
                    around=passing,
                    is_stepwise=is_stepwise,
                    stops=stops,
                ):
                    # The first token is there, and so all layers are: the lease goes back before a long
                    # reply.
                    first_pass.close()
                    # The last yielded token has not gone through the model.
                    pending = [token]
                    yield token
                if max_new_tokens:
                    # One more pass follows when the caller has its answer: then the session holds the whole
                    # turn.
                    prefill(self._model, start.cache, pending, around=passing, is_stepwise=is_stepwise)
                if states is not None:
                    states.ended()
        finally:
            # A turn that broke is finished too: whole tokens before the break are the session's.
            saver.finish(session.name, durability=steps.durability or self._durability)
