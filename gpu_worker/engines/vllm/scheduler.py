"""The scheduler's side: looks sessions up, and says step by step what to restore and what to save.

Called by vLLM's scheduler thread alone; look-ups run in threads of their own. Worst case: a store that does
not answer, for which a request waits until its look-up's deadline.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from ctxcache.client import CallerModel, Client
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CacheError, SessionAlreadyExists, SessionNotFound
from ctxcache.format.streams import TOKENS
from gpu_worker.engines.vllm.plan import BlockLoad, Opened, StepPlan, StepReport
from gpu_worker.engines.vllm.settings import ConnectorSettings, kv_streams, link_for
from gpu_worker.rows import token_ids_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.ctxcache")

LOOKUP_THREADS = 4
LOOKUP_PATIENCE_S = 0.005
"""How long one question of the scheduler waits for a look-up: about as long as most of them take."""
KEYED_TOKENS = 64
"""The least prefix that the store finds by its tokens."""
SAVE_WAIT_S = 5.0
"""How long a conversation's next request waits for the saves of the one before it."""


@dataclass(slots=True)
class Followed:
    """A request that is restored and saved, from its arrival to its end."""

    session_name: str
    """Empty for a request that names none, until its look-up has made one."""
    prompt: list[int]
    is_shared: bool
    """Whether it may begin with what other sessions have."""
    deadline_s: float
    lookup: "Future[SessionInfo | None] | None" = None
    """The session as it is when it holds nothing but tokens of the prompt; None where it is not usable."""
    is_open: bool = False
    """Whether the worker was told to save it."""
    load_begin: int = 0
    """The first token that is not in the engine's own cache."""


class SchedulerSide:
    """Looks sessions up, and says step by step what to restore and what to save."""

    def __init__(self, config: "VllmConfig", settings: ConnectorSettings) -> None:
        self._settings = settings
        self._block_tokens: int = config.cache_config.block_size
        self.link = link_for(config, settings, timeout_s=settings.lookup_timeout_s)
        self._threads = ThreadPoolExecutor(LOOKUP_THREADS, "ctxcache-lookup")
        self._followed: dict[str, Followed] = {}
        """By request id."""
        self._saving: dict[str, str] = {}
        """Sessions that a request saves or did save, until the worker says that it ended: its request."""
        self._plan = StepPlan()

    def arrived(self, request: "Request") -> None:
        """A request came: begin to look its session up."""
        if not is_plain(request) or self.link.use() is None:
            return
        name = session_of(request)
        is_shared = self._settings.prefixes and request.cache_salt is None
        prompt = list(request.prompt_token_ids or ())
        # Less than a run of tokens is never found: a session of its own would be of no use.
        if not name and (not is_shared or len(prompt) < KEYED_TOKENS):
            return
        followed = Followed(name, prompt, is_shared, time.monotonic() + SAVE_WAIT_S)
        self._followed[request.request_id] = followed
        self._begin_lookup(followed)

    def matched(self, request: "Request", computed_count: int) -> int | None:
        """Tokens beyond the computed ones that can be restored; None while that is not known yet."""
        followed = self._followed.get(request.request_id)
        if followed is None:
            return 0
        if followed.lookup is None:
            if time.monotonic() < followed.deadline_s:
                self._begin_lookup(followed)
                return None
            self._leave(request.request_id)
            return 0
        # A thread of this process looks it up, and would have to ask a busy loop for each of its turns.
        wait([followed.lookup], LOOKUP_PATIENCE_S)
        if not followed.lookup.done():
            return None
        session = followed.lookup.result()
        if session is None:
            self._leave(request.request_id)
            return 0
        # At least one token is computed: its output is the answer's first.
        usable = min(session.token_count, len(followed.prompt) - 1) // self._block_tokens * self._block_tokens
        followed.load_begin = computed_count
        return max(0, usable - computed_count)

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external_count: int) -> None:
        """A request got its blocks. `external_count` tokens are to be restored into them."""
        followed = self._followed.get(request.request_id)
        if followed is None or followed.lookup is None:
            return
        session = followed.lookup.result()
        if session is None:
            return
        (block_ids,) = blocks.get_block_ids()
        followed.session_name = session.name
        if not followed.is_open:
            if self._saving.setdefault(session.name, request.request_id) != request.request_id:
                self._leave(request.request_id)
                return
            followed.is_open = True
            self._plan.opened.append(Opened(session, session.token_count))
        if external_count:
            begin = followed.load_begin
            self._plan.loads.append(BlockLoad(session, begin, begin + external_count, tuple(block_ids)))

    def step(self, output: "SchedulerOutput") -> StepPlan:
        """What the worker has to do in the step that was scheduled."""
        plan, self._plan = self._plan, StepPlan()
        for request_id in output.preempted_req_ids or ():
            followed = self._followed.get(request_id)
            if followed is not None and followed.is_open:
                plan.lost_blocks.append(followed.session_name)
        for new in output.scheduled_new_reqs:
            self._tell_blocks(plan, new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            self._tell_blocks(plan, request_id, block_ids)
        return plan

    def finished(self, request: "Request") -> None:
        """A request ended, however it did."""
        followed = self._followed.pop(request.request_id, None)
        if followed is None or not followed.is_open:
            return
        name = followed.session_name
        unsent = [opened for opened in self._plan.opened if opened.session.name == name]
        if unsent:
            # The worker has not heard of it, and never will.
            self._plan.opened.remove(unsent[0])
            self._plan.loads = [load for load in self._plan.loads if load.session.name != name]
            self._saving.pop(name, None)
        elif self._saving.get(name) == request.request_id:
            self._plan.finished.append(name)

    def reported(self, output: "KVConnectorOutput") -> None:
        """What the worker says after a step."""
        report = output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            for name in report.saved:
                self._saving.pop(name, None)

    def has_work(self) -> bool:
        """Whether the worker has to hear of something although nothing is scheduled."""
        return bool(self._plan.finished)

    def close(self) -> None:
        """End the threads and the connection."""
        self._threads.shutdown(cancel_futures=True)
        self.link.close()

    def _tell_blocks(self, plan: StepPlan, request_id: str, block_ids: tuple[list[int], ...] | None) -> None:
        followed = self._followed.get(request_id)
        if followed is not None and followed.is_open and block_ids is not None:
            plan.blocks.append((followed.session_name, tuple(block_ids[0])))

    def _leave(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def _begin_lookup(self, followed: Followed) -> None:
        if followed.session_name not in self._saving:
            followed.lookup = self._threads.submit(self._look_up, followed)

    def _look_up(self, followed: Followed) -> SessionInfo | None:
        """The session, holding nothing but tokens of the prompt; None where there is none to use."""
        use = self.link.use()
        if use is None:
            return None
        client, model = use
        name, prompt = followed.session_name, followed.prompt
        try:
            session = _get_or_create(client, model, name, self._settings)
            if not session.token_count:
                return client.prefixes.adopt(session, model, prompt) if followed.is_shared else session
            with client.sessions.open(session, model).read(streams=[TOKENS]) as rows:
                saved = token_ids_of(rows.array(TOKENS))
            common = _common_count(saved, prompt)
            if common < len(saved):
                return client.sessions.keep_first(name, common, if_generation_match=session.generation)
        except CacheError as error:
            self.link.failed(error)
            logger.info("%s is not used: %s", name or "the store", error)
            return None
        return session


def is_plain(request: "Request") -> bool:
    """Whether a prompt's token ids say all that its rows depend on, besides the model."""
    return bool(request.prompt_token_ids) and request.lora_request is None and not request.mm_features


def session_of(request: "Request") -> str:
    """The name of the session that a request goes on with; empty where it names none."""
    named = request.session_id or (request.kv_transfer_params or {}).get("session_id")
    return f"sessions/{named}" if named else ""


def _get_or_create(client: Client, model: CallerModel, name: str, settings: ConnectorSettings) -> SessionInfo:
    """The session of this name, or a new one; of no name, a new one whose name the store chooses."""
    if not name:
        ttl = timedelta(seconds=settings.unnamed_ttl_s)
        return client.sessions.create(model, layout=kv_streams(model), ttl=ttl).info
    for _attempt in range(2):
        try:
            session = client.sessions.get(name)
        except SessionNotFound:
            session_id = name.removeprefix("sessions/")
            with suppress(SessionAlreadyExists):
                return client.sessions.create(model, id=session_id, layout=kv_streams(model)).info
        else:
            model.check(session.name, session.model_fingerprint)
            return session
    raise SessionNotFound(session=name)


def _common_count(saved: list[int], prompt: list[int]) -> int:
    count = min(len(saved), len(prompt))
    differing = np.flatnonzero(np.array(saved[:count]) != np.array(prompt[:count]))
    return int(differing[0]) if len(differing) else count
