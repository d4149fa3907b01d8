"""The scheduler's side: looks sessions up, and says step by step what to restore and what to save.

vLLM's scheduler thread alone calls it. Look-ups run in threads of their own. Worst case: a request waits
`timeout_s` in all for a store that does not answer. Its load has what the look-up left of that time.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from ctxcache.client import CallerModel, Client, QueuedJob
from ctxcache.client.types import HintAction
from gpu_worker.engines.link import LOOKUP_PART
from gpu_worker.engines.vllm.counts import Misses
from gpu_worker.engines.vllm.handover import NO_TOKEN, HandOver
from gpu_worker.engines.vllm.hints import HintTeller, WaitingQueue
from gpu_worker.engines.vllm.lookup import Asked, Coming, Lookup
from gpu_worker.engines.vllm.plan import (
    ABSENT,
    BlockIds,
    BlockLayout,
    BlockLoad,
    BlockSave,
    Finished,
    Opened,
    StepPlan,
    StepReport,
)
from gpu_worker.engines.vllm.roles import role_of, transfer_of
from gpu_worker.engines.vllm.said import Said, read
from gpu_worker.engines.vllm.settings import (
    ConnectorSettings,
    SavedState,
    layer_caches,
    link_for,
    unit_tokens,
)
from gpu_worker.engines.vllm.weights import WeightsName
from gpu_worker.engines.vllm.worker import WORKERS, worker_key

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.ctxcache")

# A request with a session, on the scheduler's side:
#
#     arrived ─► look-up in a thread ─► matched: n tokens ─► allocated: blocks ─► step: load, then save
#        │          │                      │ 0: computed             │
#        │          │ nothing found        │                        └ preempted: lost_blocks, resumed anew
#        │          └► computed at once; its session is made meanwhile, and a later step saves its blocks
#        │ the conversation's former request is being saved: asked again until SAVE_WAIT_S, while the
#        │ store answers
#        │ another engine still saves it: looked up again until `restore_timeout_s`, while more comes
#        └
#
#     finished ─► the worker saves to the end ─► reported by all ranks ─► the next request of it may begin
LOOKUP_THREADS = 4
LOOKUP_PATIENCE_S = 0.005
"""How long a step of the scheduler waits for threads, in all: about as long as most look-ups take."""
LATE_ANSWER_TOKENS = 16
"""The shortest answer, in tokens, during which a session is surely made."""
KEYED_TOKENS = 64
"""The shortest prefix, in tokens, that the store finds."""
PRIORITY_STEP = 1 << 40
"""Places between two of vLLM's priorities: more than requests that arrive while one waits."""
SAVE_WAIT_S = 5.0
"""How long a conversation's next request waits for the one before it to be saved, while the store answers."""
ASK_PAUSE_S = 0.002
"""Between two look-ups of what another engine still saves. It grows with the wait, to ASK_PAUSE_LIMIT_S."""
ASK_PAUSE_LIMIT_S = 0.05
ASK_PAUSE_PART = 0.05
"""The pause's part of the wait."""


@dataclass(slots=True)
class Followed:
    """A request that is restored and saved, from its arrival to its end."""

    request: "Request"
    asked: Asked
    session_name: str
    """Empty until the look-up has made a session, where the request names none."""
    since_s: float
    """When the present wait began: first for the saves of the request before it, then for its look-up."""
    place: int
    """Place among requests that wait: a smaller place is sooner."""
    lookup: "Future[Opened | Coming | None] | None" = None
    """Each rank's session; None where a rank's session is not usable."""
    answered: "Future[None]" = field(default_factory=Future)
    """Done with the look-up, or when it finds nothing and has yet to make the session."""
    waited_s: float = 0.0
    """How long the look-up has held the request up."""
    coming: Coming | None = None
    """What another engine had saved of it at the last look-up, where it still saves."""
    coming_since_s: float = 0.0
    """When it was first found coming."""
    came_s: float = 0.0
    """When more of it had last come."""
    asked_s: float = 0.0
    """When it was last found coming."""
    is_open: bool = False
    """Whether the worker was told to save it."""
    load_begin: int = 0
    """The first token that is not in the engine's own cache."""
    saved_end: int = 0
    """Tokens of the prompt that the session has, and tokens that the worker was told to save."""
    is_prefill: bool = False
    """Whether another engine goes on with it."""

    @property
    def opened(self) -> Opened | None:
        """Its sessions; None while they are not known, and where none is usable."""
        found = self.lookup.result() if self.lookup is not None and self.lookup.done() else None
        return found if isinstance(found, Opened) else None


class SchedulerSide:
    """The connector's part beside vLLM's scheduler."""

    def __init__(
        self, config: "VllmConfig", kv_cache_config: "KVCacheConfig", settings: ConnectorSettings
    ) -> None:
        self._settings = settings
        self._role = role_of(config)
        self.misses = Misses(logger)
        self._group_tokens = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
        """Tokens of a block, by group."""
        self._block_tokens = unit_tokens(kv_cache_config)
        """Tokens that are whole blocks in each group."""
        self._unit_tokens = self._block_tokens if settings.saved is SavedState.BLOCKS else 1
        """Sessions are cut after a multiple of so many tokens."""
        self._has_windows = any(
            not isinstance(spec, FullAttentionSpec) for spec, _ in layer_caches(kv_cache_config).values()
        )
        self.blocks_of: Callable[[str], KVCacheBlocks] = _no_blocks
        """A request's blocks as the engine has them now; set once the engine has a manager of blocks."""
        self.empty_cache: Callable[[], bool] = lambda: False
        """Empties the engine's own cache where no request has blocks, and says whether it did. Set with
        `blocks_of`."""
        self.layouts: Future[Mapping[int, BlockLayout]] = Future()
        """How each rank's blocks lie in memory, where they are what is saved."""
        self._models: list[CallerModel] = []
        """Each rank's model to the store, while the link is READY."""
        self.weights = WeightsName(config, settings.weights_version, self._begin_anew)
        self.link = link_for(config, settings, self.layouts, lambda: self.weights.version, self._models)
        self._rank_count = config.parallel_config.world_size
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, "ctxcache-lookup")
        self._followed: dict[str, Followed] = {}
        """By request id."""
        self._saving: dict[str, str] = {}
        """The request that saves each session, until all workers have said that the save ended."""
        self._saved_counts: Counter[str] = Counter()
        """How many ranks have ended the save of each of these sessions."""
        self._plan = StepPlan()
        self._patience_s = LOOKUP_PATIENCE_S
        """How much longer this step may wait for threads."""
        self._is_idle = True
        """Whether the step before this one computed nothing."""
        self._lookup = Lookup(settings, self._role, self._unit_tokens, self.misses)
        self._worker_key = worker_key(config, settings)
        self.hints = HintTeller(self.link)
        self._own_hints: dict[str, tuple[str, list[HintAction]]] = {}
        """Sessions and hints of requests about their own conversations, by request id, until their tokens are
        saved."""
        self._engine_id = transfer_of(config).engine_id
        self._queue = WaitingQueue(f"vllm-{self._engine_id}")
        self._told_alone = False
        """Whether a worker of another process has told that the engine has no other connector."""
        self._has_priorities = config.scheduler_config.policy == "priority"
        self._arrived_count = 0

    def arrived(self, request: "Request") -> None:
        """A request came: begin to look its session up."""
        self._arrived_count += 1
        self.weights.look()
        said = read(request, self.hints, self._settings.labels, self._settings.target)
        if said is None:
            return
        self._hinted(request.request_id, said)
        if not is_plain(request) or self.link.use() is None:
            return
        prompt = list(request.prompt_token_ids or ())
        if min(prompt) < 0:
            # An id that no token has stands for what is not in a block, see NO_TOKEN.
            return
        asked = Asked(
            said.session_name,
            said.salt,
            prompt,
            self._settings.prefixes,
            dict(said.labels),
            said.handed,
            said.source,
        )
        # The store finds no shorter prefix, so a session of its own would be of no use.
        is_of_use = asked.is_shared and len(asked.prompt) >= KEYED_TOKENS
        if not asked.session_name and asked.handed is None and not is_of_use:
            return
        place = self._arrived_count + (request.priority * PRIORITY_STEP if self._has_priorities else 0)
        followed = Followed(
            request,
            asked,
            asked.session_name,
            time.monotonic(),
            place,
            is_prefill=said.is_prefill or not self._role.loads,
        )
        self._followed[request.request_id] = followed
        self._begin_lookup(followed)

    def matched(self, request: "Request", computed_count: int) -> int | None:
        """Tokens beyond the computed ones that can be restored; None while that is not known yet."""
        followed = self._followed.get(request.request_id)
        if followed is None or followed.is_open:
            # The request was preempted, and its saves may still be under way.
            return 0
        if self._is_awaited(followed):
            return None
        lookup = followed.lookup
        if lookup is not None and not lookup.done() and followed.answered.done():
            followed.load_begin = computed_count
            return 0
        opened = followed.opened
        # Where another request of the conversation came first, the worker would hear of no load, and vLLM
        # would wait for one for ever.
        if opened is None or self._is_anothers(opened.name, request.request_id):
            self._leave(request.request_id)
            return 0
        followed.load_begin = computed_count
        if not self._role.loads:
            return 0
        # At least one token is computed: its output is the answer's first.
        prompt_count = len(followed.asked.prompt)
        usable = min(opened.restorable_count, prompt_count - 1)
        if followed.asked.handed is None:
            usable -= usable % self._block_tokens
        return max(0, usable - computed_count)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_count: int) -> None:
        """A request got its blocks. `external_count` tokens are to be restored into them."""
        followed = self._followed.get(request.request_id)
        if followed is not None and not followed.answered.done():
            # A request for its prompt's probabilities, for example, reads no cache: vLLM waits for no answer.
            self._leave(request.request_id)
            return
        opened = self._opened(followed, self._plan) if followed is not None else None
        if followed is None or opened is None:
            return
        if external_count:
            begin = followed.load_begin
            end = _whole(begin + external_count, self._unit_tokens)
            load = BlockLoad(
                request.request_id,
                opened.sessions,
                begin,
                end,
                self._block_ids(blocks, 0, end),
                answer_s=self._settings.answer_after_s(followed.waited_s),
            )
            self._plan.loads.append(load)

    def step(self, output: "SchedulerOutput") -> StepPlan:
        """The worker's tasks of the step that was scheduled."""
        self.weights.look()
        plan, self._plan = self._plan, StepPlan()
        plan.weights = self.weights.version
        if output.total_num_scheduled_tokens:
            self.weights.computed()
        self._patience_s = LOOKUP_PATIENCE_S
        plan.is_idle = self._is_idle = not output.total_num_scheduled_tokens
        for request_id in output.preempted_req_ids or ():
            followed = self._followed.get(request_id)
            if followed is not None and followed.is_open:
                plan.lost_blocks.append(followed.session_name)
        for new in output.scheduled_new_reqs:
            self._scheduled(plan, output, new.req_id, new.num_computed_tokens, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, computed_count, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            self._await_session(request_id)
            self._scheduled(plan, output, request_id, computed_count, block_ids)
        return plan

    def finished(self, request: "Request") -> dict[str, Any] | None:
        """A request ended, for whatever reason. Returns the `kv_transfer_params` of its reply."""
        followed = self._leave(request.request_id)
        name, own_hints = self._own_hints.pop(request.request_id, ("", []))
        hints = tuple(own_hints)
        if followed is not None:
            name = followed.session_name
        if followed is None or not followed.is_open or not self._role.saves:
            self.hints.tell(hints, name)
            return None
        unsent = [opened for opened in self._plan.opened if opened.name == name]
        if unsent or self._saving.get(name) != request.request_id:
            self.hints.tell(hints, name)
        if unsent:
            # The worker has not heard of this session, and never will.
            self._plan.opened.remove(unsent[0])
            self._saving.pop(name, None)
        elif self._saving.get(name) == request.request_id:
            self._tell_worker(Finished(name, hints))
            return self._parameters(followed)
        return None

    def _parameters(self, followed: Followed) -> dict[str, Any] | None:
        """What an engine needs that goes on with a request; None where none does, or nothing was saved."""
        request, count = followed.request, len(followed.asked.prompt)
        if not self._settings.saved.is_portable:
            count = min(count, followed.saved_end)
        if not (followed.is_prefill and is_answered(request) and count):
            return None
        handed = HandOver(followed.session_name, count, self._rank_count, self._lookup.engine_host)
        parameters = handed.parameters(self._settings.target)
        if self._is_alone:
            parameters |= {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_engine_id": self._engine_id,
                "remote_request_id": request.request_id,
                "remote_num_tokens": count,
            }
        return parameters

    @property
    def _is_alone(self) -> bool:
        """Whether the engine has no other connector, as far as a worker has told."""
        worker = WORKERS.get(self._worker_key)
        return worker.is_alone if worker is not None else self._told_alone

    def reported(self, output: "KVConnectorOutput") -> None:
        """Take the worker's report after a step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            if report.changed is not None:
                self.weights.changed(report.changed)
            self._told_alone |= report.is_alone
            self._saved_counts.update(report.saved)
            for name in report.saved:
                if self._saved_counts[name] >= self._rank_count:
                    del self._saved_counts[name]
                    # The request may go on, and is saved no more.
                    self._leave(self._saving.pop(name, ""))

    def reset(self) -> bool:
        """The weights have changed, or will before the next step. Returns whether no old state is left."""
        # vLLM also resets connectors where its own cache was in use and kept its contents: empty it here.
        is_empty = self.empty_cache()
        self.weights.reset(is_empty=is_empty)
        return is_empty

    def has_work(self) -> bool:
        """Whether the worker has to hear of something although nothing is scheduled."""
        return bool(self._plan.finished)

    def close(self) -> None:
        """End the threads and the connection."""
        self._threads.shutdown(cancel_futures=True)
        self._queue.close()
        self.hints.close()
        self.layouts.cancel()
        self.link.close()

    def _begin_anew(self) -> None:
        """The weights have another name, or none: requests followed so far have state of the old weights.

        What was saved of them stays, since no change came before the passes that computed it.
        """
        for request_id in list(self._followed):
            self._leave(request_id)
        for opened in self._plan.opened:
            self._saving.pop(opened.name, None)
        self._plan = StepPlan(finished=self._plan.finished, loads=self._plan.loads)
        for name in self._saving:
            self._tell_worker(Finished(name))
        self.link.renew(is_wanted=self.weights.version is not None)

    def _tell_worker(self, finished: Finished) -> None:
        worker = WORKERS.get(self._worker_key)
        if worker is not None:
            worker.finish(*finished)
        else:
            self._plan.finished.append(finished)

    def _scheduled(
        self,
        plan: StepPlan,
        output: "SchedulerOutput",
        request_id: str,
        computed_count: int,
        added_ids: tuple[list[int], ...] | None,
    ) -> None:
        """A step computes tokens of a request. `added_ids`: the blocks that the request got for it."""
        followed = self._followed.get(request_id)
        if followed is None:
            return
        if not is_plain(followed.request):
            # A later part of the input has pictures: its rows do not follow from the token ids alone.
            self._end_saving(plan, followed)
            return
        if self._opened(followed, plan) is None or not self._role.saves:
            return
        if self._settings.saved.is_portable:
            plan.blocks.append((followed.session_name, tuple(added_ids[0]) if added_ids is not None else ()))
            return
        # The ids of tokens that the step before this one draws may not be known yet.
        filled_count = computed_count + output.num_scheduled_tokens[request_id]
        end = min(filled_count, followed.request.num_tokens) // self._block_tokens * self._block_tokens
        ids = followed.request.all_token_ids
        if filled_count >= len(followed.asked.prompt) and self._hands_over(followed):
            end = _whole(len(followed.asked.prompt), self._block_tokens)
            ids = [*followed.asked.prompt, *[NO_TOKEN] * (end - len(followed.asked.prompt))]
        begin = followed.saved_end // self._block_tokens * self._block_tokens
        if begin < end:
            block_ids = self._block_ids(self.blocks_of(request_id), begin, end)
            counts = [(end - begin) // tokens for tokens in self._group_tokens]
            if any(ABSENT in ids for ids in block_ids) or [*map(len, block_ids)] != counts:
                # The engine's own cache had these tokens, but of a window only the last ones.
                self._end_saving(plan, followed)
                return
            plan.saves.append(BlockSave(followed.session_name, begin, block_ids, tuple(ids[begin:end])))
            followed.saved_end = end

    def _hands_over(self, followed: Followed) -> bool:
        """Whether a request ends with its prompt, and another engine goes on with it."""
        return followed.is_prefill and followed.request.max_tokens == 1

    def _end_saving(self, plan: StepPlan, followed: Followed) -> None:
        """Save no more of a request."""
        self._leave(followed.request.request_id)
        if followed.is_open:
            plan.finished.append(Finished(followed.session_name))

    def _block_ids(self, blocks: "KVCacheBlocks", begin: int, end: int) -> BlockIds:
        """The ids of the blocks of tokens `[begin, end)`, by group. The last one need not be full."""
        return tuple(
            tuple(
                ABSENT if one.is_null else one.block_id
                for one in group[begin // tokens : _whole(end, tokens) // tokens]
            )
            for group, tokens in zip(blocks.blocks, self._group_tokens, strict=True)
        )

    def _await_session(self, request_id: str) -> None:
        """Wait a moment for a session that is being made: the request may end before that."""
        followed = self._followed.get(request_id)
        if followed is None or followed.lookup is None or followed.lookup.done():
            return
        is_patient = time.monotonic() - followed.since_s < self._settings.timeout_s
        if is_patient and self.link.answers(followed.since_s, self._settings.answer_s):
            self._wait_shortly(followed.lookup)

    def _opened(self, followed: Followed, plan: StepPlan) -> Opened | None:
        """The sessions of a request; None while they are looked up, and where the request is not saved.

        The first call that finds them tells the worker of them, in the plan.
        """
        request_id = followed.request.request_id
        opened = followed.opened
        if opened is None or followed.is_open:
            return opened
        followed.session_name = opened.name
        if self._is_anothers(opened.name, request_id):
            self._leave(request_id)
            return None
        followed.is_open = True
        followed.saved_end = opened.token_count
        self._queue.started(request_id)
        if self._role.saves:
            self._saving[opened.name] = request_id
            plan.opened.append(opened)
        return opened

    def _is_anothers(self, session_name: str, request_id: str) -> bool:
        """Whether another request saves this session."""
        return self._saving.get(session_name, request_id) != request_id

    def _is_awaited(self, followed: Followed) -> bool:
        """Whether a request may wait longer for its look-up."""
        waited_s = time.monotonic() - followed.since_s
        if followed.lookup is None:
            # The request before it is being saved.
            if waited_s >= SAVE_WAIT_S or not self.link.answers(followed.since_s, self._settings.answer_s):
                return False
            self._begin_lookup(followed)
            # A save takes as long as many steps: a step that computes does not wait for it.
            if followed.lookup is None and self._is_idle:
                worker = WORKERS.get(self._worker_key)
                saved = worker.ending_of(followed.session_name) if worker is not None else None
                self._wait_shortly(saved or Future())
            return True
        if not followed.answered.done():
            is_patient = waited_s < LOOKUP_PART * self._settings.timeout_s
            if not is_patient or not self.link.answers(followed.since_s, self._settings.answer_s):
                return False
            self._wait_shortly(followed.answered)
            if not followed.answered.done():
                followed.waited_s = time.monotonic() - followed.since_s
                return True
        found = followed.lookup.result() if followed.lookup.done() else None
        return isinstance(found, Coming) and self._is_coming(followed, found)

    def _is_coming(self, followed: Followed, found: Coming) -> bool:
        """Whether a request may wait for what another engine still saves; looks it up again after a pause."""
        now_s = time.monotonic()
        is_anothers = self._is_anothers(followed.session_name, followed.request.request_id)
        if is_anothers or not self.link.answers(followed.since_s, self._settings.answer_s):
            return False
        if followed.coming is None:
            followed.coming_since_s = now_s
        if found is not followed.coming:
            # An open append is a sign of life too: a large piece may take long.
            if followed.coming is None or found.is_being_appended or found != followed.coming:
                followed.came_s = now_s
            followed.coming, followed.asked_s = found, now_s
        waited_s = now_s - followed.coming_since_s
        pause_s = min(max(ASK_PAUSE_S, ASK_PAUSE_PART * waited_s), ASK_PAUSE_LIMIT_S)
        if now_s - followed.asked_s >= pause_s:
            self._begin_lookup(followed)
        elif self._is_idle:
            self._wait_shortly(Future(), pause_s)
        return True

    def _may_wait(self, followed: Followed) -> bool:
        """Whether a request may wait longer for what another engine still saves."""
        if followed.coming is None:
            return True
        now_s = time.monotonic()
        is_quiet = now_s - followed.came_s >= self._settings.timeout_s
        return not is_quiet and now_s - followed.coming_since_s < self._settings.restore_timeout_s

    def _wait_shortly(self, answer: "Future[Any]", limit_s: float = math.inf) -> None:
        """Wait for a thread's answer, while this step may: many requests may wait for a store that hangs."""
        # A loop that asks again and again would keep the interpreter from the threads that look up and save.
        if self._patience_s > 0 and not answer.done():
            begun_s = time.monotonic()
            wait([answer], min(self._patience_s, limit_s))
            self._patience_s -= time.monotonic() - begun_s

    def _leave(self, request_id: str) -> Followed | None:
        """Follow a request no more. Returns what was known of it."""
        followed = self._followed.pop(request_id, None)
        if followed is not None and followed.lookup is not None and not followed.is_open:
            # A look-up that has begun puts the request into the queue as it ends.
            followed.lookup.cancel()
            followed.lookup.add_done_callback(lambda _lookup: self._queue.left(request_id))
        return followed

    def _hinted(self, request_id: str, said: Said) -> None:
        """Tell hints about other conversations at once, and keep those about the request's own."""
        own = [hint for hint in said.hints if not hint.session]
        if own:
            self._own_hints[request_id] = said.session_name, own
        self.hints.tell(hint for hint in said.hints if hint.session)

    def _begin_lookup(self, followed: Followed) -> None:
        if followed.session_name not in self._saving:
            followed.since_s = time.monotonic()
            answered = followed.answered = Future()
            followed.lookup = self._threads.submit(self._look_up, followed)
            # Behind the look-up's own end: who is woken by the answer finds the look-up done.
            followed.lookup.add_done_callback(
                lambda _lookup: None if answered.done() else answered.set_result(None)
            )

    def _look_up(self, followed: Followed) -> Opened | Coming | None:
        """The look-up, as its thread runs it. See `Followed.lookup`."""

        def missed() -> None:
            if not followed.answered.done() and self._can_wait(followed.request):
                followed.answered.set_result(None)

        def look(client: Client, model: CallerModel) -> Opened | Coming | None:
            try:
                opened = self._lookup.find(
                    client,
                    tuple(self._models),
                    followed.asked,
                    missed,
                    may_wait=self._may_wait(followed),
                )
                if isinstance(opened, Opened):
                    beyond = max(0, len(followed.asked.prompt) - opened.token_count)
                    request_id = followed.request.request_id
                    job = QueuedJob(request_id, opened.name, beyond, position=followed.place)
                    self._queue.waits(client, model, job)
            except Exception as error:
                self.misses.tell(followed.session_name or "without a name", "not used", error)
                raise
            return opened

        # A call may raise anything: a request's tokens, id and place come from its caller.
        return self.link.call(look, None)

    def _can_wait(self, request: "Request") -> bool:
        """Whether what a request computes can be saved by a later step than the one that computes it.

        Blocks stay the request's until it ends, but for those that a window leaves behind. Rows are captured
        in the pass, and have to have a session by then.
        """
        is_kept = not self._settings.saved.is_portable and not self._has_windows
        return is_kept and request.max_tokens >= LATE_ANSWER_TOKENS


def _whole(count: int, unit: int) -> int:
    """The least multiple of a unit that is no less."""
    return -(-count // unit) * unit


def is_answered(request: "Request") -> bool:
    """Whether a request that ended has its answer: it was neither aborted nor refused."""
    return request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


def _no_blocks(request_id: str) -> "KVCacheBlocks":
    raise RuntimeError(f"asked for blocks of {request_id} before the engine has any")


def is_plain(request: "Request") -> bool:
    """Whether a prompt's token ids say all that its rows depend on, besides the model."""
    # A prompt with embeddings or pictures has ids as well, which are the same for each picture.
    has_tokens_alone = request.prompt_embeds is None and not request.mm_features
    return bool(request.prompt_token_ids) and has_tokens_alone and request.lora_request is None
