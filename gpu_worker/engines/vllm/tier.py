"""The store as vLLM's tier behind host memory: chunks of all ranks, as they lie there.

A chunk that left host memory is found again in the store: by this engine, after a restart, and by any other
engine of the same model, settings and layout. The store is asked by threads; where it does not answer, or
does not have a chunk, prompts are computed.
"""

import hashlib
import itertools
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import LookupState
from ctxcache.errors import CacheError
from gpu_worker.engines.link import LOOKUP_PART, Bringing, LinkState, Refused, StoreLink, StoreSettings
from gpu_worker.engines.spaces import model_of
from gpu_worker.engines.vllm.plan import BlockLayout
from gpu_worker.engines.vllm.roles import Role
from gpu_worker.engines.vllm.settings import (
    POPULATE_S,
    WHERE,
    weights_digest,
)
from gpu_worker.engines.vllm.tier_events import StoreEvents
from gpu_worker.engines.vllm.versions import (
    backpressure,
    chunks_of,
    has,
    job_result,
    loaded_of,
    mark_misses,
    place_of,
    storage_medium,
)

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.base import TransferJob

log = logging.getLogger(__name__)

MOST_CHUNK_BYTES = 16 << 20
"""The store's bound of a block."""
READERS = 2
WRITERS = 2
SLOWEST_BYTES_PER_S = 20e6
"""A load that is slower, measured from its request, is given up: computing the prompt is faster."""
MOST_STORES = 64
"""The most save jobs that wait. A further one fails, which is a miss later."""
PATIENCE_S = 0.01
"""How long a step that computes nothing may wait for a job or a look-up."""


# A chunk between vLLM's host memory and the store:
#
#     scheduler's thread   submit_store, submit_load, lookup        answers at once
#     store threads (2)    put: chunks in host memory ──► store     host memory is read in place
#     load threads (2)     load: store ──► host memory              verified in the copy
#     vLLM's thread        look-ups of a step, in one message
#
# vLLM keeps a chunk's place in host memory until the job that names it has ended. When the store stops
# answering, a load is given up: vLLM is told its end, and its thread writes to no place any more.
class CtxcacheTier(SecondaryTierManager):
    """The tier. Its methods run in the scheduler's process, and wait for nothing but `drain_jobs`."""

    medium: ClassVar[Any] = storage_medium()

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        engine: str = "",
        directory: str = "",
        role: Sequence[bool] = (True, True),
        **extra: Any,
    ) -> None:
        """`engine`: facts of the engine that computes the chunks. `directory`: its model's files.

        `role`: whether it loads and saves.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, *backpressure(backpressure_detector))
        # No copy: rows of this array are vLLM's chunks.
        self._chunks: npt.NDArray[np.uint8] = np.asarray(primary_kv_view).view(np.uint8)
        """[chunks, bytes], host memory that vLLM shares with its workers."""
        self._chunk_bytes: int = self._chunks.strides[0]
        if not engine:
            problem = "a tier does not see which model and settings its chunks are of"
            raise Refused(f"{problem}: use kv_connector CtxcacheOffloadingConnector, which says so")
        # Refused at the start with the remedy: later each save would fail, and only the log would tell.
        if self._chunk_bytes > MOST_CHUNK_BYTES:
            problem = f"chunks have {self._chunk_bytes} bytes, at most {MOST_CHUNK_BYTES} are stored"
            raise Refused(f"{problem}: lower kv_connector_extra_config.blocks_per_chunk, or --block-size")
        self._settings = StoreSettings.of(extra, WHERE)
        self._engine, self._directory = engine, Path(directory)
        self._role = Role(*role)
        self.layouts: Future[Mapping[tuple[int, int], BlockLayout]] = Future()
        """How each rank's blocks lie in memory; known when the engine has its blocks."""
        self._tokens = [
            (group.tokens_per_block, group.layer_names) for group in offloading_spec.config.groups
        ]
        self._chunk_tokens = [
            offloading_spec.blocks_per_chunk * group.tokens_per_block
            for group in offloading_spec.config.groups
        ]
        self._patience = iter([POPULATE_S])
        """How long the link waits for the arena. Only the first link waits."""
        self._version = self._settings.weights_version
        self.link: StoreLink[BlockSpace] = StoreLink(self._settings.connect, self._space, _ask)
        is_told = offloading_spec.kv_events_config.enable_kv_cache_events and has("owners of events")
        self._events = StoreEvents(self.link) if is_told else None
        self._progress = threading.Event()
        """Set when a look-up or a job ends."""
        self._lookups = _Lookups(self, tier_type, self._progress)
        self._readers = ThreadPoolExecutor(READERS, "ctxcache-tier-load")
        self._writers = ThreadPoolExecutor(WRITERS, "ctxcache-tier-store")
        self._running: dict[Future[JobResult], TransferJob] = {}
        """Jobs whose end vLLM has not been told."""
        self._bringing: dict[Future[JobResult], Bringing] = {}
        """The running jobs that write to host memory."""
        self._asked_s: dict[str, float] = {}
        """When each request first waited for a look-up."""
        self._waited_s: dict[str, float] = {}
        """How long look-ups have held up each request."""
        self._ended: queue.SimpleQueue[Future[JobResult]] = queue.SimpleQueue()

    # -- look-ups -----------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """See SecondaryTierManager. No request needs preparation."""
        del req_context
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Whether a chunk is there; RETRY while a thread asks."""
        if not self._role.loads:
            return LookupResult.MISS
        is_there = self._lookups.lookup(key, req_context)
        if is_there is None and self._is_awaited(req_context.req_id):
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask for what the step looked up, in one message."""
        del context
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request's look-ups."""
        self._lookups.cleanup(req_context.req_id)
        self._asked_s.pop(req_context.req_id, None)
        self._waited_s.pop(req_context.req_id, None)

    def are_there(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Whether each chunk is there, of this size. Asks the store."""
        used = self.link.use()
        if used is None:
            return [False] * len(keys)
        client, space = used
        try:
            blocks = client.blocks.look_up(space, list(map(_key, keys)))
        except CacheError as error:
            self.link.failed(error)
            return [False] * len(keys)
        are_there = [
            block.state is LookupState.HIT and block.size_bytes == self._chunk_bytes for block in blocks
        ]
        if self._events is not None:
            self._events.met((_key(key), key) for key in itertools.compress(keys, are_there))
        return are_there

    # -- jobs ---------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: "TransferJob") -> None:
        """Save chunks, in a thread."""
        stores = sum(not job.is_promotion for job in self._running.values())
        # A job that fails at once frees its place in host memory, which a waiting job would hold.
        if stores >= MOST_STORES or self.link.state is not LinkState.READY or not self._role.saves:
            self._begin(job_metadata, Future()).set_result(job_result(job_metadata.job_id, success=False))
        else:
            self._begin(job_metadata, self._writers.submit(self._store, job_metadata))

    def submit_load(self, job_metadata: "TransferJob") -> None:
        """Load chunks, in a thread."""
        bringing = Bringing(f"job {job_metadata.job_id}")
        future = self._readers.submit(self._load, job_metadata, bringing)
        self._bringing[future] = bringing
        self._begin(job_metadata, future)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call, and loads that are given up now.

        Later look-ups of chunks that could not be loaded are misses.
        """
        results = []
        while not self._ended.empty():
            future = self._ended.get()
            # vLLM was told the end of a job that was given up.
            if future in self._running:
                results.append(self._told(future, future.result()))
        for future, bringing in list(self._bringing.items()):
            if not future.done() and self._is_late(bringing, self._running[future]):
                # The job's thread may end later. The places in host memory are other chunks' by then.
                bringing.give_up()
                log.info("chunks of job %d come too late", self._running[future].job_id)
                results.append(self._told(future, job_result(self._running[future].job_id, success=False)))
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events of this engine's chunks: stored in the store, and removed from it."""
        return self._events.take() if self._events is not None else ()

    def has_pending_work(self) -> bool:
        """Whether a step is needed although no request asks for one: there are events to publish."""
        return self._events is not None and self._events.has_news

    def give_way(self) -> None:
        """Wait a moment for jobs and look-ups. A loop of empty steps would keep the interpreter from them."""
        self._progress.clear()
        loads = (future for future, job in self._running.items() if job.is_promotion)
        is_loading = any(not future.done() for future in loads)
        if self._ended.empty() and (self._lookups.is_asking or is_loading):
            self._progress.wait(PATIENCE_S)

    def renew(self, version: str | None) -> None:
        """Go on with weights of this version. None: they have no name, and the store is not used."""
        self._version = version or ""
        self.link.renew(is_wanted=version is not None)
        if self._events is not None:
            self._events.begin_anew()

    def drain_jobs(self) -> None:
        """Wait until no job touches host memory."""
        wait(list(self._running))

    def shutdown(self) -> None:
        """End threads and the client."""
        for pool in (self._readers, self._writers):
            pool.shutdown(cancel_futures=True)
        self._lookups.shutdown()
        if self._events is not None:
            self._events.close()
        # vLLM unmaps its host memory next.
        self._chunks = np.empty((0, 0), np.uint8)
        self.layouts.cancel()
        self.link.close()

    def _told(self, future: "Future[JobResult]", result: JobResult) -> JobResult:
        """Forget a job, whose result vLLM is told."""
        job = self._running.pop(future)
        if self._bringing.pop(future, None) is not None and not result.success:
            loaded = loaded_of(result)
            # Without this vLLM would ask for the chunks again, and wait for the same load.
            mark_misses(self._lookups, [key for key in job.keys if key not in loaded])
        return result

    def _is_late(self, bringing: Bringing, job: "TransferJob") -> bool:
        waited_s = time.monotonic() - bringing.begun_s
        size_bytes = len(job.keys) * self._chunk_bytes
        if waited_s > self._settings.timeout_s + size_bytes / SLOWEST_BYTES_PER_S:
            return True
        answer_s = self._settings.answer_after_s(self._waited_s.get(job.req_context.req_id, 0))
        return not self.link.answers(bringing.begun_s, answer_s)

    def _is_awaited(self, request_id: str) -> bool:
        """Whether a request may wait longer for its look-up."""
        now_s = time.monotonic()
        asked_s = self._asked_s.setdefault(request_id, now_s)
        if now_s - asked_s >= LOOKUP_PART * self._settings.timeout_s:
            return False
        self._waited_s[request_id] = now_s - asked_s
        return self.link.answers(asked_s, self._settings.answer_s)

    def _begin(self, job: "TransferJob", future: "Future[JobResult]") -> "Future[JobResult]":
        self._running[future] = job
        future.add_done_callback(self._end)
        return future

    def _end(self, future: "Future[JobResult]") -> None:
        self._ended.put(future)
        self._progress.set()

    def _store(self, job: "TransferJob") -> JobResult:
        def put(client: Client, space: BlockSpace) -> Collection[OffloadKey]:
            rows = dict(zip(map(_key, job.keys), self._rows(job), strict=True))
            chain = chain_of(job, self._chunk_tokens)
            client.blocks.put(
                space,
                # A chunk that continues another comes after it.
                {key: rows[key] for key in chain},
                parents={key: parent for key, parent in chain.items() if parent is not None},
                ttl_s=self._settings.ttl_s,
                durability=self._settings.level,
            )
            if self._events is not None:
                self._events.met((_key(key), key) for key in job.keys)
            return list(job.keys)

        return self._carried_out(job, put)

    def _load(self, job: "TransferJob", bringing: Bringing) -> JobResult:
        def load(client: Client, space: BlockSpace) -> Collection[OffloadKey]:
            keys = list(map(_key, job.keys))
            # Host memory in front of the store is the cache of what an engine uses again.
            loaded = client.blocks.load(
                space, keys, self._rows(job), writing=bringing.writing, past_dram=True
            )
            return [key for key, parts in zip(job.keys, loaded, strict=True) if parts is not None]

        return self._carried_out(job, load, bringing)

    def _carried_out(
        self,
        job: "TransferJob",
        call: Callable[[Client, BlockSpace], Collection[OffloadKey]],
        bringing: Bringing | None = None,
    ) -> JobResult:
        began_s = time.perf_counter()
        used = self.link.use()
        done: Collection[OffloadKey] = ()
        if used is not None:
            try:
                done = call(*used)
            except CacheError as error:
                # The link was told when a load was given up. The store may be back by now.
                if bringing is None or not bringing.is_given_up:
                    self.link.failed(error)
            except Exception:
                # The job has to end: vLLM waits for it, and computes the chunks that it did not bring.
                log.exception("chunks of job %d", job.job_id)
        return job_result(
            job.job_id,
            success=len(done) == len(job.keys),
            # Loads may succeed in part; vLLM takes a save as a whole.
            successful_keys=tuple(done) if job.is_promotion and done else None,
            transfer_time=time.perf_counter() - began_s,
            transfer_bytes=len(done) * self._chunk_bytes,
        )

    def _rows(self, job: "TransferJob") -> list[npt.NDArray[np.uint8]]:
        return [self._chunks[chunk] for chunk in chunks_of(job)]

    # -- the store ----------------------------------------------------------------------------------------

    def _space(self, client: Client) -> BlockSpace:
        """The space of the engine's chunks. It names everything that their bytes depend on."""
        # Mapped while the engine starts, and not with the first prompt.
        client.map_arena(is_written=True)
        # The layout comes from the workers, once they have their blocks: until then nothing is looked up.
        layouts = [layout.description for _, layout in sorted(self.layouts.result().items())]
        facts = json.dumps([self._engine, self._tokens, layouts])
        weights, version = weights_digest(self._directory), self._version
        name = self._directory.resolve().name
        model = client.models.register(model_of(name, "vllm-chunks", weights, facts, version=version))
        client.map_arena(is_written=True, timeout_s=next(self._patience, 0))
        return BlockSpace(model.spec.fingerprint(), layout_tag=f"vllm chunks of {self._chunk_bytes} bytes")


class _Lookups(AsyncLookupManager):
    """vLLM's own thread that asks for the keys of a step. It keeps the answers while requests live."""

    def __init__(self, tier: CtxcacheTier, tier_type: str, progress: threading.Event) -> None:
        self._tier, self._progress = tier, progress
        self._is_busy = False
        super().__init__(tier_type=tier_type)

    @property
    def is_asking(self) -> bool:
        """Whether a question is under way or queued."""
        return self._is_busy or not self._lookup_queue.empty()

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """See CtxcacheTier.are_there."""
        del req_context
        self._is_busy = True
        try:
            return self._tier.are_there(keys)
        finally:
            self._is_busy = False
            self._progress.set()


def _key(key: OffloadKey) -> bytes:
    """A key of 32 bytes for vLLM's key: a block's hash, of any length, and its group."""
    return hashlib.sha256(key).digest()


def _ask(client: Client, space: BlockSpace) -> None:
    """A question that a store answers at once."""
    client.blocks.look_up(space, [bytes(32)])


def chain_of(job: "TransferJob", chunk_tokens: Sequence[int]) -> dict[bytes, bytes | None]:
    """The keys of a job's chunks in their order, each with that of the chunk right before it.

    The store keeps the chunk before at least as long. `chunk_tokens`: tokens of a chunk, by group.
    """
    places = []
    for key in job.keys:
        position = place_of(job.req_context, key)
        places.append((get_offload_group_idx(key), -1 if position is None else position, _key(key)))
    # Chunks of one job and group, by the tokens of the prompt up to their ends. What continues a chunk that
    # is not in the job names none: another one's life must not hang on it.
    #
    #     128 ◄── 160 ◄── 192      288 ◄── 320
    chain: dict[bytes, bytes | None] = {}
    before: tuple[int, int, bytes] | None = None
    for group, position, key in sorted(places):
        is_next = before is not None and before[:2] == (group, position - chunk_tokens[group])
        chain[key] = before[2] if before is not None and is_next else None
        before = (group, position, key)
    return chain
