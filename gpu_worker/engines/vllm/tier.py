"""vLLM's own offloading, with the store behind its host memory: chunks of all ranks, as they lie there.

    GPU ◄──vLLM──► host memory ◄──CtxcacheTier──► store
    store ──SubscribeBlocks──► thread ──► OffloadingEvent ──► vLLM: BlockStored, BlockRemoved ──► ZMQ

vLLM's connector moves blocks between GPU and host memory, for any model and any parallelism that it knows.
A chunk that left host memory is found again in the store: by this engine, after a restart, and by any other
engine of the same model, settings and layout. The store is asked by threads; where it does not answer, or
does not have a chunk, prompts are computed.

`StoreEvents` tells vLLM's publisher of chunks that this engine has saved or found, for it knows the tokens of
no others: stored when the store has the chunk, removed when it was evicted, deleted or has expired there.
Where the link breaks, the next subscription says what is still there. vLLM publishes with its steps: an
engine without a request is woken for one. Memory: some 200 bytes for each such chunk.
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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import LookupState
from ctxcache.errors import CacheError
from gpu_worker.engines.link import LOOKUP_PART, Bringing, LinkState, Refused, StoreLink, StoreSettings
from gpu_worker.engines.spaces import model_of
from gpu_worker.engines.vllm.engine_blocks import layout_of
from gpu_worker.engines.vllm.pass_rows import model_with
from gpu_worker.engines.vllm.plan import BlockLayout, hear_layouts
from gpu_worker.engines.vllm.roles import Role, check_outer, role_of, transfer_of
from gpu_worker.engines.vllm.said import check_parameters
from gpu_worker.engines.vllm.settings import (
    POPULATE_S,
    WHERE,
    directory_of,
    engine_facts,
    weights_digest,
)
from gpu_worker.engines.vllm.weights import WeightsName, first_version
from gpu_worker.model.weights import Sample, WeightsWatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request
import gc

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from ctxcache.client.blocks import BlockSubscription
from gpu_worker.engines.link import PAUSE_S

OWNER = "ctxcache"
"""The tier that events name."""


# A chunk is told to vLLM's publisher when both are so: this engine has met it, and the store has it.
#
#     met, there, not told    ──► BlockStored
#     told, not there         ──► BlockRemoved, and forgotten
#     there, never met        nothing: its tokens are not known here
#     met, not there          nothing, until the store has it
class StoreEvents:
    """Events of the chunks that the engine has met. Thread-safe. Close it."""

    def __init__(self, link: StoreLink[BlockSpace]) -> None:
        self._link = link
        self._lock = threading.Lock()
        """Over all that follows."""
        self._met: dict[bytes, OffloadKey] = {}
        """Chunks that were saved or found, by their keys in the store."""
        self._there: set[bytes] = set()
        """Keys of the space that the store has, met or not."""
        self._told: set[bytes] = set()
        """Keys that were told as stored, and not as removed since."""
        self._waiting: list[OffloadingEvent] = []
        self._subscription: BlockSubscription | None = None
        # vLLM gives a connector neither the engine nor its publisher; later it hides what lives from `gc`.
        self._engines = [one for one in gc.get_objects() if issubclass(type(one), EngineCoreProc)]
        """The engine of this process, where it waits for requests of others."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ctxcache-kv-events", daemon=True)
        self._thread.start()

    def met(self, keys: Iterable[tuple[bytes, OffloadKey]]) -> None:
        """These chunks are saved, or were found: they are told from now on."""
        with self._lock:
            new = dict(keys)
            self._met.update(new)
            self._settle(new)

    @property
    def has_news(self) -> bool:
        """Whether there are events to take."""
        return bool(self._waiting)

    def take(self) -> list[OffloadingEvent]:
        """Events since the last call."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            return waiting

    def begin_anew(self) -> None:
        """Chunks are looked for elsewhere from now on: hear of those that are there."""
        with self._lock:
            if self._subscription is not None:
                self._subscription.close()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        with self._lock:
            if self._subscription is not None:
                self._subscription.close()
        self._thread.join()

    def _follow(self) -> None:
        while not self._closed.is_set():
            used = self._link.use()
            if used is None:
                if self._link.state is LinkState.REFUSED:
                    return
                self._closed.wait(PAUSE_S)
                continue
            client, space = used
            try:
                with client.blocks.subscribe(space) as subscription:
                    self._hear(subscription)
            except CacheError as error:
                self._link.failed(error)
                self._closed.wait(PAUSE_S)

    def _hear(self, subscription: BlockSubscription) -> None:
        with self._lock:
            self._subscription = None if self._closed.is_set() else subscription
            if self._subscription is None:
                return
        # A new subscription tells all that is there, then `is_current`:
        # what it has not told by then was lost meanwhile.
        confirmed: set[bytes] | None = set()
        try:
            for news in subscription:
                with self._lock:
                    keys = {change.key for change in news.changes}
                    there = {change.key for change in news.changes if change.state is LookupState.HIT}
                    self._there.difference_update(keys)
                    self._there |= there
                    if confirmed is not None:
                        confirmed.difference_update(keys)
                        confirmed |= there
                    if confirmed is not None and news.is_current:
                        # Chunks that only the subscription before this one told of are gone.
                        keys |= self._there - confirmed
                        self._there, confirmed = confirmed, None
                    self._settle(keys)
        finally:
            with self._lock:
                self._subscription = None

    def _settle(self, keys: Iterable[bytes]) -> None:
        """Tell what changed of these."""
        stored = [key for key in keys if key in self._there and key in self._met and key not in self._told]
        removed = [key for key in keys if key in self._told and key not in self._there]
        for some, is_removed in ((stored, False), (removed, True)):
            if some:
                event = OffloadingEvent(
                    keys=[self._met[key] for key in some],
                    medium=Medium.STORAGE,
                    removed=is_removed,
                    ownership=OWNER,
                    removal_expected=not is_removed,
                )
                self._waiting.append(event)
        if stored or removed:
            self._wake()
        self._told.update(stored)
        self._told.difference_update(removed)
        for key in removed:
            del self._met[key]

    def _wake(self) -> None:
        """Let an idle engine make a step: it finds that its connector has work.

        One that lives in its caller's process makes steps for requests alone, and is nobody's server.
        """
        for engine in self._engines:
            engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


log = logging.getLogger(__name__)

MOST_CHUNK_BYTES = 16 << 20
"""As large as a block of the store may be."""
HOST_BYTES = 4 << 30
"""Host memory that vLLM is given where its configuration does not say."""
READERS = 2
WRITERS = 2
SLOWEST_BYTES_PER_S = 20e6
"""A load that is slower, from when it is asked for on, is given up: prompts are computed faster."""
MOST_STORES = 64
"""Jobs of saving that may wait; more are dropped, which is a miss later."""
PATIENCE_S = 0.01
"""How long a step that computes nothing may wait for a job or a look-up."""
OFFLOADING = ("OffloadingConnector", "CtxcacheOffloadingConnector")
"""Connectors whose host memory is one file, by the engine's id: each would write over the other's chunks."""


class CtxcacheOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector with the store as its tier behind host memory."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        transfer = transfer_of(vllm_config)
        if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
            problem = "scales that vLLM computes at its start are not saved"
            raise Refused(f"{problem}: leave --calculate-kv-scales out")
        if vllm_config.lora_config is not None:
            problem = "vLLM tells chunks of LoRA adapters apart by the adapters' names alone"
            raise Refused(f"{problem}: another adapter of the same name would be served their bytes")
        if role is KVConnectorRole.WORKER:
            check_outer(vllm_config, OFFLOADING, by=lambda _extra: "their host memory")
        extra = transfer.kv_connector_extra_config
        # vLLM's own settings stand beside these.
        # Checked here, where the field's name can be told; the
        # tier reads them again in the scheduler's process.
        given = {name: extra[name] for name in StoreSettings.names() if name in extra}
        StoreSettings.of(given, WHERE)
        # A configuration that is used twice has the tier in it already.
        others = [
            tier for tier in extra.get("secondary_tiers", []) if tier.get("type") != CtxcacheTier.__name__
        ]
        transfer.kv_connector_extra_config = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": HOST_BYTES,
            # Where vLLM publishes KV events at all, they say which tokens a chunk is of.
            "self_describing_kv_events": True,
            **extra,
            "secondary_tiers": [
                *others,
                {
                    "type": CtxcacheTier.__name__,
                    "module_path": __name__,
                    # vLLM gives a tier neither the model nor its
                    # settings: they go with its own configuration.
                    "engine": engine_facts(vllm_config),
                    "directory": str(directory_of(vllm_config)),
                    "role": role_of(vllm_config),
                    **given,
                },
            ],
        }
        # Tokens that cannot be loaded are computed: a store's failure must never be a request's.
        transfer.kv_load_failure_policy = "recompute"
        self._role_of_engine = role_of(vllm_config)
        self._modules: Mapping[str, Any] = vllm_config.compilation_config.static_forward_context
        self._own_layout: Future[BlockLayout] = Future()
        given_version = str(given.get("weights_version", ""))
        super().__init__(vllm_config, role, kv_cache_config)
        self._weights: WeightsName | None = None
        """On the scheduler's side."""
        if role is KVConnectorRole.SCHEDULER:
            self._weights = WeightsName(vllm_config, given_version, self._renewed)
            if self._weights.version is None:
                self._renewed()
        self._version = first_version(vllm_config, given_version)
        """Of the weights, as the last step had it, on a worker's side."""
        self._watch: WeightsWatch | None = None
        self._sample: Sample | None = None
        """On a worker's side, behind the pass of the last step."""

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See OffloadingConnector; besides, describe the caches to the scheduler."""
        super().register_kv_caches(kv_caches)
        self._watch = WeightsWatch(model_with(self._modules[next(iter(kv_caches))]))
        self._own_layout.set_result(layout_of(kv_caches, self._kv_cache_config, self._modules))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The worker's message to the scheduler about its blocks."""
        return self._own_layout.result()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The scheduler's side of that message, for each rank of pipeline and tensor parallelism."""
        for tier in self._tiers():
            hear_layouts(tier.layouts, metadata)

    def on_new_request(self, request: "Request") -> None:
        """See OffloadingConnector, which reads what callers say."""
        check_parameters(request)
        self._scheduler_weights().look()
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See OffloadingConnector. A producer loads nothing, from host memory neither."""
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count and not self._role_of_engine.loads:
            return 0, False
        return count, is_async

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        """See OffloadingConnector. A step that computes nothing gives its time to the tier's threads."""
        weights = self._scheduler_weights()
        weights.look()
        meta = super().build_connector_meta(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            weights.computed()
        else:
            for tier in self._tiers():
                tier.give_way()
        assert isinstance(meta, OffloadingConnectorMetadata)  # noqa: S101  by which the connector itself goes
        return NamedPlan(**_fields(meta), weights=weights.version)

    # -- weights that are changed in place ------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Empty host memory, and let what comes be of other weights; whether nothing of old ones is left."""
        super().reset_cache()
        manager = self._kv_cache_manager
        # Once more: vLLM resets connectors also where its own cache was in use, and stays as it is.
        is_empty = manager is not None and manager.reset_prefix_cache()
        self._scheduler_weights().reset(is_empty=is_empty)
        return is_empty

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins, on a worker's side."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, NamedPlan) and connector_metadata.weights != self._version:
            self._version, self._sample = connector_metadata.weights, None
            if self._watch is not None:
                self._watch.mark()

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata | None:
        """See OffloadingConnector; besides, say so where the weights are not those any more."""
        meta = super().build_connector_worker_meta()
        if self._watch is None or self._version is None:
            return meta
        before, self._sample = self._sample, self._watch.sample()
        # What is in host memory by now was computed before this sample. Where nothing has come there, the
        # device need not be waited for: the step before this one is looked at.
        sample = self._sample if meta is not None or self._sample.is_known else before
        changed = None if sample is None or sample.is_equal() else self._version
        if meta is None and changed is None:
            return None
        # Also where nothing changed: of two ranks' reports the first one puts them together.
        return NamedReport(**_fields(meta or OffloadingWorkerMetadata()), changed=changed)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See OffloadingConnector."""
        report = connector_output.kv_connector_worker_meta
        # First: chunks that have come to host memory go to the store with what follows.
        if isinstance(report, NamedReport) and report.changed is not None:
            self._scheduler_weights().changed(report.changed)
        super().update_connector_output(connector_output)

    def _renewed(self) -> None:
        version = self._scheduler_weights().version
        for tier in self._tiers():
            tier.renew(version)

    def _scheduler_weights(self) -> WeightsName:
        if self._weights is None:
            raise TypeError("asked of a worker's connector")
        return self._weights

    def wait_until_linked(self, timeout_s: float) -> bool:
        """Wait until the store can be used, or never will be, or the time is over; whether it can be."""
        return all(tier.link.wait(timeout_s) is LinkState.READY for tier in self._tiers())

    def _tiers(self) -> "list[CtxcacheTier]":
        """The store's tier, on the scheduler's side."""
        manager = self.connector_scheduler.manager if self.connector_scheduler is not None else None
        return [tier for tier in getattr(manager, "secondary_tiers", []) if isinstance(tier, CtxcacheTier)]


@dataclass
class NamedPlan(OffloadingConnectorMetadata):
    """A step's transfers, and the version of the weights. See `WeightsName`."""

    weights: str | None = ""


@dataclass
class NamedReport(OffloadingWorkerMetadata):
    """A step's transfers that ended, and the version of weights that are not loaded any more."""

    changed: str | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "NamedReport":
        """Both reports in one."""
        both = super().aggregate(other)
        changed = other.changed if isinstance(other, NamedReport) else None
        return NamedReport(**_fields(both), changed=changed if self.changed is None else self.changed)


def _fields(one: "OffloadingConnectorMetadata | OffloadingWorkerMetadata") -> dict[str, Any]:
    """A message's own fields, for one that says more."""
    return {field.name: getattr(one, field.name) for field in fields(one)}


# A chunk between vLLM's host memory and the store:
#
#     scheduler's thread   submit_store, submit_load, lookup        answers at once
#     store threads (2)    put: chunks in host memory ──► store     host memory is read in place
#     load threads (2)     load: store ──► host memory              verified in the copy
#     vLLM's thread        look-ups of a step, in one message
#
# vLLM keeps a chunk's place in host memory until the job that names it has ended. A load ends for it when the
# store stops answering: its thread may still wait, and writes to no place any more.
class CtxcacheTier(SecondaryTierManager):
    """The tier. Its methods run in the scheduler's process, and wait for nothing but `drain_jobs`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        engine: str = "",
        directory: str = "",
        role: Sequence[bool] = (True, True),
        **extra: Any,
    ) -> None:
        """`engine`, `directory`, `role`: what computes the chunks, its model's files, what it is to do."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if not engine:
            problem = "a tier does not see which model and settings its chunks are of"
            raise Refused(f"{problem}: use kv_connector CtxcacheOffloadingConnector, which says so")
        # At the start, with the remedy: later each save would fail, and the log alone would say so.
        if self.block_size_bytes > MOST_CHUNK_BYTES:
            problem = f"chunks have {self.block_size_bytes} bytes, at most {MOST_CHUNK_BYTES} are stored"
            raise Refused(f"{problem}: lower kv_connector_extra_config.blocks_per_chunk, or --block-size")
        self._settings = StoreSettings.of(extra, WHERE)
        self._engine, self._directory = engine, Path(directory)
        # No copy: rows of this array are vLLM's chunks.
        self._chunks: npt.NDArray[np.uint8] = np.asarray(primary_kv_view).view(np.uint8)
        """[chunks, bytes], host memory that vLLM shares with its workers."""
        self._role = Role(*role)
        self.layouts: Future[Mapping[tuple[int, int], BlockLayout]] = Future()
        """How each rank's blocks lie in memory: comes once the engine has its blocks."""
        self._tokens = [
            (group.tokens_per_block, group.layer_names) for group in offloading_spec.config.groups
        ]
        self._chunk_tokens = [
            offloading_spec.blocks_per_chunk * group.tokens_per_block
            for group in offloading_spec.config.groups
        ]
        self._patience = iter([POPULATE_S])
        """How long the link waits for the arena, the first time alone."""
        self._version = self._settings.weights_version
        self.link: StoreLink[BlockSpace] = StoreLink(self._settings.connect, self._space, _ask)
        is_told = offloading_spec.kv_events_config.enable_kv_cache_events
        self._events = StoreEvents(self.link) if is_told else None
        self._progress = threading.Event()
        """Set when a look-up or a job ends."""
        self._lookups = _Lookups(self, tier_type, self._progress)
        self._readers = ThreadPoolExecutor(READERS, "ctxcache-tier-load")
        self._writers = ThreadPoolExecutor(WRITERS, "ctxcache-tier-store")
        self._running: dict[Future[JobResult], TransferJob] = {}
        """Jobs of which vLLM was told no end."""
        self._bringing: dict[Future[JobResult], Bringing] = {}
        """Those of them that write to host memory."""
        self._asked_s: dict[str, float] = {}
        self._waited_s: dict[str, float] = {}
        """By request: when it first waited for a look-up, and how long it was held up by them."""
        self._ended: queue.SimpleQueue[Future[JobResult]] = queue.SimpleQueue()

    # -- look-ups -----------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are kept as they come."""
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
        """Forget what was looked up for it."""
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
            one.state is LookupState.HIT and one.size_bytes == self.block_size_bytes for one in blocks
        ]
        if self._events is not None:
            self._events.met((_key(key), key) for key in itertools.compress(keys, are_there))
        return are_there

    # -- jobs ---------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Save chunks, in a thread."""
        stores = sum(not job.is_promotion for job in self._running.values())
        # A job that failed at once: vLLM gives the place in
        # host memory free, where a waiting one would hold it.
        if stores >= MOST_STORES or self.link.state is not LinkState.READY or not self._role.saves:
            self._begin(job_metadata, Future()).set_result(JobResult(job_metadata.job_id, success=False))
        else:
            self._begin(job_metadata, self._writers.submit(self._store, job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Load chunks, in a thread."""
        bringing = Bringing(f"job {job_metadata.job_id}")
        future = self._readers.submit(self._load, job_metadata, bringing)
        self._bringing[future] = bringing
        self._begin(job_metadata, future)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that ended since the last call, or are given up.

        Chunks that could not be loaded are looked for no more.
        """
        results = []
        while not self._ended.empty():
            future = self._ended.get()
            # vLLM was told the end of a job that was given up.
            if future in self._running:
                results.append(self._told(future, future.result()))
        for future, bringing in list(self._bringing.items()):
            if not future.done() and self._is_late(bringing, self._running[future]):
                # Its thread ends whenever the store lets it; the places in host memory are others' by then.
                bringing.give_up()
                log.info("chunks of job %d come too late", self._running[future].job_id)
                results.append(self._told(future, JobResult(self._running[future].job_id, success=False)))
        return results

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Events of this engine's chunks: stored in the store, and removed from it."""
        return self._events.take() if self._events is not None else ()

    def has_pending_work(self) -> bool:
        """Whether a step is needed although no request asks for one: there are events to publish."""
        return self._events is not None and self._events.has_news

    def give_way(self) -> None:
        """Wait a moment for what is under way: a loop of empty steps would keep the interpreter from it."""
        self._progress.clear()
        loads = (future for future, job in self._running.items() if job.is_promotion)
        is_loading = any(not future.done() for future in loads)
        if self._ended.empty() and (self._lookups.is_asking or is_loading):
            self._progress.wait(PATIENCE_S)

    def renew(self, version: str | None) -> None:
        """The weights have this version from now on; None: they have no name, and the store is not used."""
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
            loaded = set(result.successful_keys or ())
            # vLLM would ask again for what a look-up found, and wait for the same load.
            self._lookups.mark_miss([key for key in job.keys if key not in loaded])
        return result

    def _is_late(self, bringing: Bringing, job: TransferJob) -> bool:
        waited_s = time.monotonic() - bringing.begun_s
        size_bytes = len(job.keys) * self.block_size_bytes
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

    def _begin(self, job: TransferJob, future: "Future[JobResult]") -> "Future[JobResult]":
        self._running[future] = job
        future.add_done_callback(self._end)
        return future

    def _end(self, future: "Future[JobResult]") -> None:
        self._ended.put(future)
        self._progress.set()

    def _store(self, job: TransferJob) -> JobResult:
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

    def _load(self, job: TransferJob, bringing: Bringing) -> JobResult:
        def load(client: Client, space: BlockSpace) -> Collection[OffloadKey]:
            keys = list(map(_key, job.keys))
            # Host memory in front of the store is the cache of what an engine uses again.
            loaded = client.blocks.load(
                space, keys, self._rows(job), writing=bringing.writing, past_dram=True
            )
            return [key for key, one in zip(job.keys, loaded, strict=True) if one is not None]

        return self._carried_out(job, load, bringing)

    def _carried_out(
        self,
        job: TransferJob,
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
                # The link has heard of a load that was given up. The store may be back by now.
                if bringing is None or not bringing.is_given_up:
                    self.link.failed(error)
            except Exception:
                # The job has to end: vLLM waits for it, and computes what it did not bring.
                log.exception("chunks of job %d", job.job_id)
        return JobResult(
            job.job_id,
            success=len(done) == len(job.keys),
            # Loads may succeed in part; vLLM takes a save as a whole.
            successful_keys=tuple(done) if job.is_promotion and done else None,
            transfer_time=time.perf_counter() - began_s,
            transfer_bytes=len(done) * self.block_size_bytes,
        )

    def _rows(self, job: TransferJob) -> list[npt.NDArray[np.uint8]]:
        return [self._chunks[chunk] for chunk in job.chunk_ids]

    # -- the store ----------------------------------------------------------------------------------------

    def _space(self, client: Client) -> BlockSpace:
        """Where the engine's chunks are looked for: what their bytes depend on is in it."""
        # While the engine starts, and not with the first prompt.
        client.map_arena(is_written=True)
        # The layout comes from the workers, once they have their blocks: until then nothing is looked up.
        layouts = [layout.description for _, layout in sorted(self.layouts.result().items())]
        facts = json.dumps([self._engine, self._tokens, layouts])
        weights, version = weights_digest(self._directory), self._version
        name = self._directory.resolve().name
        model = client.models.register(model_of(name, "vllm-chunks", weights, facts, version=version))
        client.map_arena(is_written=True, timeout_s=next(self._patience, 0))
        return BlockSpace(
            model.spec.fingerprint(), layout_tag=f"vllm chunks of {self.block_size_bytes} bytes"
        )


class _Lookups(AsyncLookupManager):
    """vLLM's own thread that asks for the keys of a step, and keeps answers while requests live."""

    def __init__(self, tier: CtxcacheTier, tier_type: str, progress: threading.Event) -> None:
        self._tier, self._progress = tier, progress
        self._is_busy = False
        super().__init__(tier_type=tier_type)

    @property
    def is_asking(self) -> bool:
        """Whether keys are asked for, or wait for it."""
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
    """A key of 32 bytes for vLLM's, which is a block's hash, of whatever length, and its group."""
    return hashlib.sha256(key).digest()


def _ask(client: Client, space: BlockSpace) -> None:
    """A question that a store answers at once."""
    client.blocks.look_up(space, [bytes(32)])


def chain_of(job: TransferJob, chunk_tokens: Sequence[int]) -> dict[bytes, bytes | None]:
    """The job's chunks in their order, each with the one right before it, which is kept at least as long.

    `chunk_tokens`: of each group.
    """
    places = []
    for key in job.keys:
        position = job.req_context.get_offload_key_position(key)
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
