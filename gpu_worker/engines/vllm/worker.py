"""The worker's side: restores state into the engine's blocks, and saves what the engine computes.

`engine_blocks.py`, `pass_rows.py` and `hidden_rows.py` know what the state is; threads of the saver commit
it. Steps come from vLLM's worker thread. An engine that has no request left makes no step: where the
scheduler is in this process, it says itself that a request ended. Loads run in threads of their own, between
steps. Worst case: a store that does not answer holds up the request that restores from it, for `timeout_s`; a
slow store does for `restore_timeout_s`. Then the load is given up, and writes to no block any more.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.logger import init_logger

from ctxcache.client import SessionRows
from ctxcache.client.types import HintAction
from ctxcache.errors import CacheError, CorruptSegment, DeadlineExceeded, SessionNotFound
from ctxcache.format.streams import TOKENS, Stream
from gpu_worker.engines.link import Bringing
from gpu_worker.engines.renderings import Renderings
from gpu_worker.engines.vllm.counts import Misses
from gpu_worker.engines.vllm.engine_blocks import EngineBlocks
from gpu_worker.engines.vllm.hidden_rows import HiddenRows
from gpu_worker.engines.vllm.hints import HintTeller
from gpu_worker.engines.vllm.pass_rows import KvRows, model_with
from gpu_worker.engines.vllm.plan import BlockLayout, BlockLoad, BlockSave, Opened, StepPlan, Writing
from gpu_worker.engines.vllm.roles import is_alone, transfer_of
from gpu_worker.engines.vllm.settings import ConnectorSettings, SavedState, link_for, streams_of, unit_tokens
from gpu_worker.engines.vllm.weights import first_version
from gpu_worker.errors import ModelChanged
from gpu_worker.model.weights import WeightsWatch
from gpu_worker.saving import Saver

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger("vllm.ctxcache")

# Threads of a worker, for one conversation:
#
#     vLLM's thread      begin_step ─ load ─ pass (rows captured) ─ save ─ take_loaded, take_saved
#     ctxcache-load      store ──► blocks that no step uses yet
#     ctxcache-copy      blocks ──► staging, on a CPU; ended before the next step begins
#     save threads       staging ──► store
#     ctxcache-saved     waits for the saver, then take_saved tells the scheduler
LOAD_THREADS = 2


class EngineState(Protocol):
    """One kind of an engine's state: saved, and put back.

    vLLM's worker thread uses it within steps. Other threads call `load`, with blocks that no step uses. On a
    CPU another thread calls `save`, which has ended when the next step begins.
    """

    @property
    def device(self) -> torch.device:
        """Where the caches are."""

    def follow(self, saver: Saver) -> None:
        """Save by `saver` from now on."""

    def opened(self, name: str, token_count: int) -> None:
        """Save what is computed of a session behind its first tokens."""

    def own(self, name: str, block_ids: Iterable[int]) -> None:
        """A session's request writes to these blocks too."""

    def disown(self, name: str) -> None:
        """A session's request has no block any more."""

    def closed(self, name: str) -> None:
        """Save nothing of a session from now on."""

    def parts(self, item: BlockLoad) -> Mapping[int, Sequence[int]]:
        """Layers by the token from which on their rows are needed: windows need the last ones alone."""

    def load(
        self, rows: SessionRows, streams: Mapping[int, Stream], item: BlockLoad, writing: Writing
    ) -> None:
        """Write rows of these layers into the request's blocks, within `writing` alone."""

    def save(self, saves: Iterable[BlockSave]) -> None:
        """A step was computed that filled these blocks."""

    def renewed(self) -> None:
        """The model has other weights: make anew what was made of the old weights."""


class Loading(Bringing):
    """A restore that is under way. Once it is given up, the engine computes its blocks itself."""

    def __init__(self, item: BlockLoad, opened: Opened | None, check: Callable[[], None]) -> None:
        super().__init__(item.sessions[0].name)
        self.item, self.check = item, check
        self.opened = opened
        """The session that its request is saved into."""
        self.future: Future[bool] = Future()
        """Whether the blocks hold the rows."""


class WorkerSide:
    """The connector's part in a worker."""

    def __init__(
        self, config: "VllmConfig", kv_cache_config: "KVCacheConfig", settings: ConnectorSettings
    ) -> None:
        self._config, self._kv_cache_config, self._settings = config, kv_cache_config, settings
        self._durability = settings.level
        patient = replace(settings, timeout_s=settings.restore_timeout_s)
        self.layouts: Future[Mapping[int, BlockLayout]] = Future()
        """How this rank's blocks lie in memory, where they are what is saved."""
        self._version = first_version(config, settings.weights_version)
        """The weights' version at the last step. Used by vLLM's worker thread."""
        self.changed_version: str | None = None
        """The version of weights that are not loaded any more; None while no change was noticed."""
        self._watch: WeightsWatch | None = None
        self.link = link_for(config, patient, self.layouts, lambda: self._version)
        self._rank = config.parallel_config.rank
        self.is_alone = is_alone(config)
        """Whether the engine has no other connector."""
        self._has_told_alone = False
        self._names: dict[str, str] = {}
        """This rank's sessions, by the names that messages give them."""
        self.hints = HintTeller(self.link)
        self.misses = Misses(logger)
        self._state: EngineState | None = None
        self._saver: Saver | None = None
        self._waiters = ThreadPoolExecutor(2, "ctxcache-saved")
        self._endings: dict[str, Future[CacheError | None]] = {}
        self._not_saved: set[str] = set()
        self._open: dict[str, Opened] = {}
        """Sessions that are being saved, by name. Owned by `_lock`."""
        self._loaders = ThreadPoolExecutor(LOAD_THREADS, "ctxcache-load")
        self._copier = ThreadPoolExecutor(1, "ctxcache-copy")
        self._copying: list[Future[None]] = []
        """Copies out of blocks that no step may write to before they have ended. Owned by `_lock`."""
        self._loading: dict[str, Loading] = {}
        """By request. Used by vLLM's worker thread."""
        self._failed_blocks: set[int] = set()
        """See `take_failed_blocks`. Used by vLLM's worker thread."""
        self._lock = threading.RLock()
        """Over the sessions that are saved: the scheduler's thread may end a save."""
        WORKERS[worker_key(config, settings)] = self

    def attach(self, caches: Mapping[str, Tensor]) -> None:
        """Take the engine's caches, by layer. Raises Refused."""
        modules = self._config.compilation_config.static_forward_context
        self._watch = WeightsWatch(model_with(modules[next(iter(caches))]))
        if self._settings.saved.is_portable:
            rows = KvRows if self._settings.saved is SavedState.KV else HiddenRows
            self._state = rows(modules, caches, self._config, self._kv_cache_config.num_blocks)
        else:
            self._state = blocks = EngineBlocks(caches, self._kv_cache_config, modules)
            self.layouts.set_result({self._rank: blocks.layout})

    def begin_step(self, plan: StepPlan) -> None:
        """Take over what the scheduler has planned."""
        with self._lock:
            state = self._state
            self._settle()
            for name, hints in plan.finished:
                self.finish(name, hints)
            if plan.weights != self._version:
                self._begin_anew(plan.weights)
            if state is None:
                return
            for name in plan.lost_blocks:
                state.disown(self._own(name))
            for opened in plan.opened:
                self._begin(state, opened)
            for name, block_ids in plan.blocks:
                state.own(self._own(name), block_ids)

    def finish(self, name: str, hints: Sequence[HintAction] = ()) -> None:
        """The request of a session ended: save the session to its end, then tell these hints.

        Called by any thread.
        """
        with self._lock:
            self._end(name)
            ending = self._endings.get(name)
            own = self._own(name)
        if ending is not None and hints:
            ending.add_done_callback(lambda _ending: self.hints.tell(hints, own))
        # Ranks that share one session would tell the store the same hint each.
        elif self._rank == 0 or own != name:
            self.hints.tell(hints, own)

    def ending_of(self, name: str) -> Future[CacheError | None] | None:
        """Done when an ended request's session is saved; None where none ended, or the result was taken."""
        with self._lock:
            return self._endings.get(name)

    def load(self, loads: Iterable[BlockLoad]) -> None:
        """Begin to restore state into blocks, in threads of its own."""
        for item in loads:
            loading = Loading(item, self._open.get(item.sessions[0].name), self._witness())
            self._loading[item.request_id] = loading
            loading.future = self._loaders.submit(self._load, loading, self._written_so_far())

    def take_loaded(self, patience_s: float) -> tuple[set[str], set[str]]:
        """Requests whose loads ended since the last call or were given up, and those of them that failed.

        Waits for the first while none has ended, at most `patience_s`.
        """
        if self._loading and patience_s:
            wait([loading.future for loading in self._loading.values()], patience_s, FIRST_COMPLETED)
        ended: set[str] = set()
        failed: set[str] = set()
        for request_id, loading in list(self._loading.items()):
            is_done = loading.future.done()
            if not is_done and not self._is_late(loading):
                continue
            del self._loading[request_id]
            ended.add(request_id)
            if not is_done:
                self._give_up(loading)
            if not is_done or not loading.future.result():
                failed.add(request_id)
                self._failed_blocks |= self._blocks_of(loading.item)
        return ended, failed

    def take_failed_blocks(self) -> frozenset[int]:
        """Blocks of the loads that failed since the last call, in an engine with one kind of cache."""
        blocks, self._failed_blocks = frozenset(self._failed_blocks), set()
        return blocks

    def save(self, saves: Iterable[BlockSave]) -> None:
        """Save what the step has computed. On a CPU a thread copies it, until the next step begins."""
        with self._lock:
            items = [item._replace(session_name=self._own(item.session_name)) for item in saves]
            state = self._state
            if state is None or not items:
                return
            if state.device.type == "cpu":
                self._copying.append(self._copier.submit(state.save, items))
            else:
                state.save(items)

    def take_saved(self) -> set[str]:
        """Sessions whose saves ended since the last call."""
        with self._lock:
            saved = {name for name, ending in self._endings.items() if ending.done()}
            for name in saved:
                failure = self._endings.pop(name).result()
                own = self._names.pop(name, name)
                if failure is not None:
                    self.misses.tell(own, "not saved to its end", failure)
            saved |= self._not_saved
            self._not_saved = set()
        return saved

    def take_alone(self) -> bool:
        """`is_alone`, at the first call; False from then on."""
        is_told, self._has_told_alone = self._has_told_alone, True
        return self.is_alone and not is_told

    def close(self) -> None:
        """Save what is still in staging, then end the threads and the connection."""
        # The order matters: loads and copies use blocks, waiters wait for the saver's end, and the link waits
        # for the layouts, which may never come.
        self._loaders.shutdown(cancel_futures=True)
        with self._lock:
            self._settle()
        self._copier.shutdown()
        if self._saver is not None:
            self._saver.close()
        self._waiters.shutdown()
        self.hints.close()
        self.layouts.cancel()
        self.link.close()

    def _blocks_of(self, item: BlockLoad) -> set[int]:
        tokens = unit_tokens(self._kv_cache_config)
        return set(item.block_ids[0][item.begin // tokens :])

    def _is_late(self, loading: Loading) -> bool:
        if time.monotonic() - loading.begun_s > self._settings.restore_timeout_s:
            return True
        return not self.link.answers(loading.begun_s, loading.item.answer_s)

    def _give_up(self, loading: Loading) -> None:
        """Leave a load to its thread, which ends whenever the store lets it."""
        loading.give_up()
        if self._state is not None and self._state.device.type == "cuda":
            # Copies that were begun may still write to blocks.
            torch.cuda.synchronize(self._state.device)
        # Shorter than `restore_timeout_s` where the store has answered nothing at all.
        waited_s = time.monotonic() - loading.begun_s
        late = DeadlineExceeded(target="its rows", timeout_s=f"{waited_s:.1f}")
        self.misses.tell(loading.item.sessions[self._rank].name, "not restored", late)
        self._forsake(loading)

    def _forsake(self, loading: Loading) -> None:
        """Save no more of a request whose load failed: the store has other rows of these tokens, or none."""
        name = loading.item.sessions[0].name
        with self._lock:
            # Where the request is gone, the session may be another request's by now.
            if self._open.get(name) is loading.opened:
                self.finish(name)

    def _load(self, loading: Loading, written: torch.cuda.Event | None) -> bool:
        """Whether the blocks hold the rows by now."""
        item = loading.item
        try:
            with torch.inference_mode(), self._behind(written):
                self._restore(loading)
            loading.check()
        except ModelChanged as error:
            self.misses.tell(item.sessions[self._rank].name, "not restored", error)
        except CacheError as error:
            self.misses.tell(item.sessions[self._rank].name, "not restored", error)
            # The link has heard of a load that was given up. The store may be back by now.
            if not loading.is_given_up:
                self.link.failed(error)
            if isinstance(error, CorruptSegment):
                self._waiters.submit(self._have_cut, item.sessions[self._rank].name)
        except Exception as error:
            # Any error of a device or a model: the request goes on without the store.
            logger.exception("%s is computed again", item.sessions[self._rank].name)
            self.misses.tell(item.sessions[self._rank].name, "not restored", error)
        else:
            return True
        self._forsake(loading)
        return False

    def _have_cut(self, name: str) -> None:
        """Have the store check all of a damaged session, so that its next turn finds the whole part."""
        use, token_count = self.link.use(), None
        while use is not None:
            client, model = use
            try:
                session = client.sessions.get(name)
                # The store did not shorten the session at the last try, and would not at the next.
                if not session.token_count or session.token_count == token_count:
                    return
                token_count = session.token_count
                with client.sessions.open(session, model).read(streams=[TOKENS]):
                    return
            except CorruptSegment:
                continue
            except CacheError as error:
                self.misses.tell(name, "not mended", error)
                return

    def _restore(self, loading: Loading) -> None:
        item = loading.item
        use, session = self.link.use(), item.sessions[self._rank]
        if use is None or self._state is None:
            raise SessionNotFound(session=session.name)
        client, model = use
        streams = streams_of(model, self._settings.saved)
        handle = client.sessions.open(session, model)
        for begin, layers in self._state.parts(item).items():
            needed = {layer: streams[layer] for layer in layers}
            with handle.read(
                streams=[*needed.values()],
                begin=begin,
                end=item.end,
                if_generation_match=session.generation,
            ) as rows:
                self._state.load(rows, needed, item, loading.writing)

    def _written_so_far(self) -> torch.cuda.Event | None:
        """A mark behind what the engine has begun: requests that are gone may still write to their blocks."""
        if self._state is None or self._state.device.type != "cuda":
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._state.device))
        return mark

    @contextmanager
    def _behind(self, written: torch.cuda.Event | None) -> Iterator[None]:
        """Begin the device's work in this context behind the mark, and wait for its end."""
        if written is None or self._state is None:
            yield
            return
        stream = torch.cuda.Stream(self._state.device)  # type: ignore[no-untyped-call]
        stream.wait_event(written)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def _begin_anew(self, version: str | None) -> None:
        """With the lock held: the weights have another name, or none, so work under the old name ends."""
        for name in list(self._open):
            self.finish(name)
        saver, self._saver = self._saver, None
        if saver is not None:
            self._waiters.submit(saver.close)
        self._version = version
        self.changed_version = None
        if self._watch is not None and self._state is not None:
            self._watch.mark()
            self._state.renewed()
        self.link.renew(is_wanted=version is not None)

    def _witness(self) -> Callable[[], None]:
        """A check that raises ModelChanged once the weights are not those of the present version."""
        watch, version = self._watch, self._version
        sample = None if watch is None or version is None else watch.sample()

        def check() -> None:
            if sample is not None and sample.is_equal():
                return
            if version is not None and version == self._version:
                self.changed_version = version
            raise ModelChanged(
                model="the model", field="weights", described=version or "nameless", found="others"
            )

        return check

    def _begin(self, state: EngineState, opened: Opened) -> None:
        session = opened.sessions[self._rank]
        saver = self._usable_saver(state)
        try:
            if saver is None:
                raise SessionNotFound(session=session.name)
            is_portable = self._settings.saved.is_portable
            unit = 1 if is_portable else unit_tokens(self._kv_cache_config)
            saver.open(session, ahead=opened.ahead[self._rank], unit_tokens=unit)
        except CacheError as error:
            self.misses.tell(session.name, "not saved", error)
            self._not_saved.add(opened.name)
            return
        self._open[opened.name] = opened
        self._names[opened.name] = session.name
        state.opened(session.name, opened.token_count)

    def _own(self, name: str) -> str:
        """This rank's session, by the name that messages give it."""
        return self._names.get(name, name)

    def _usable_saver(self, state: EngineState) -> Saver | None:
        use = self.link.use() if self.changed_version is None else None
        if use is not None and self._saver is None:
            client, model = use
            streams = streams_of(model, self._settings.saved)
            # A session keeps its tokens behind the first that differs, for a switch back.
            cutting = Renderings(client, model, kept=self._settings.renderings).cut
            self._saver = Saver(
                client, model, streams, device=state.device, witness=self._witness, cutting=cutting
            )
            state.follow(self._saver)
        return self._saver if use is not None else None

    def _end(self, name: str) -> None:
        if name not in self._open or self._saver is None or self._state is None:
            return
        del self._open[name]
        own = self._own(name)
        self._settle()
        self._state.closed(own)
        self._saver.finish(own, durability=self._durability)
        self._endings[name] = self._waiters.submit(self._wait_for, self._saver, own)

    def _settle(self) -> None:
        """Wait for copies, with the lock held: afterwards the engine may write to its blocks."""
        for copy in self._copying:
            copy.result()
        self._copying.clear()

    @staticmethod
    def _wait_for(saver: Saver, name: str) -> CacheError | None:
        try:
            return saver.wait(name)
        except CacheError as error:
            return error


def worker_key(config: "VllmConfig", settings: ConnectorSettings) -> tuple[str, str]:
    """The engine and the store that a connector's two sides are for: an engine may have several stores."""
    return str(transfer_of(config).engine_id), settings.target


WORKERS: "WeakValueDictionary[tuple[str, str], WorkerSide]" = WeakValueDictionary()
"""The workers of this process."""
