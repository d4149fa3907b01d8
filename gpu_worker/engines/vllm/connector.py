"""The connector: what vLLM calls, on its scheduler's side or on a worker's, and who answers."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from gpu_worker.engines.vllm.versions import (
    KeepsManager,
    TellsLoads,
    check_groups,
    transfer_results,
    warn_if_untried,
)

# isort: split
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from gpu_worker.engines.link import LinkState
from gpu_worker.engines.vllm.counts import ConnectorCounts, ConnectorMetrics
from gpu_worker.engines.vllm.plan import StepPlan, StepReport, hear_layouts
from gpu_worker.engines.vllm.roles import check_outer
from gpu_worker.engines.vllm.scheduler import SchedulerSide
from gpu_worker.engines.vllm.settings import WHERE, ConnectorSettings, SavedState, check_engine
from gpu_worker.engines.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

PATIENCE_S = 0.01
"""How long a step without work waits for rows: steps in a loop keep the interpreter from loading threads."""


# vLLM makes one connector for each role, and calls it around its steps:
#
#     scheduler   on_new_request ─ get_num_new_matched_tokens (None: ask again) ─ update_state_after_alloc
#                 ─ build_connector_meta ──StepPlan──► workers
#     worker      bind_connector_metadata ─ start_load_kv ─ the pass ─ wait_for_save
#                 ─ get_transfer_results ──StepReport──► scheduler
#
# Loads run between steps: a request is scheduled when its rows are there, and others compute meanwhile.
class CtxcacheConnector(KeepsManager, TellsLoads, KVConnectorBase_V1, SupportsHMA):
    """The connector. `kv_connector_extra_config` takes the fields of ConnectorSettings."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.of(self._kv_transfer_config.kv_connector_extra_config, WHERE)
        check_engine(vllm_config, kv_cache_config, settings)
        check_groups(len(kv_cache_config.kv_cache_groups))
        if role is KVConnectorRole.SCHEDULER:
            warn_if_untried()
        else:
            # Two connectors of one store would write the same sessions, and share one queue of it.
            check_outer(
                vllm_config,
                {type(self).__name__},
                by=lambda extra: extra.get("target", ConnectorSettings().target),
            )
        # Tokens that cannot be restored are computed: a store's failure must never be a request's.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self._saved = settings.saved
        self._side: SchedulerSide | WorkerSide = (
            SchedulerSide(vllm_config, kv_cache_config, settings)
            if role is KVConnectorRole.SCHEDULER
            else WorkerSide(vllm_config, kv_cache_config, settings)
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a miss later, and nothing else."""
        return False

    def wait_until_linked(self, timeout_s: float) -> bool:
        """Whether the store can be used: waits until that is known, or the time is over."""
        return self._side.link.wait(timeout_s) is LinkState.READY

    # -- both, as the engine starts -------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The worker's message to the scheduler about its blocks."""
        if self._saved is not SavedState.BLOCKS:
            return None
        (layout,) = self._worker().layouts.result().values()
        return layout

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Take each rank's message, on the scheduler's side."""
        if self._saved is SavedState.BLOCKS:
            hear_layouts(self._scheduler().layouts, metadata)

    # -- scheduler ----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Take the manager of the engine's blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler().blocks_of = kv_cache_manager.get_blocks
        self._scheduler().empty_cache = kv_cache_manager.reset_prefix_cache

    def on_new_request(self, request: "Request") -> None:
        """See SchedulerSide.arrived."""
        self._scheduler().arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See SchedulerSide.matched. Rows are restored between steps."""
        count = self._scheduler().matched(request, num_computed_tokens)
        # The second value says that loading goes on beside steps:
        # vLLM keeps the request out of steps until it has ended.
        return count, bool(count)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """See SchedulerSide.allocated."""
        self._scheduler().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepPlan:
        """See SchedulerSide.step."""
        return self._scheduler().step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See SchedulerSide.reported."""
        self._scheduler().reported(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerSide.finished. Rows are in staging by now: the blocks are free at once."""
        del block_ids
        return False, self._scheduler().finished(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See request_finished."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool:
        """See SchedulerSide.reset."""
        return self._scheduler().reset()

    def has_pending_push_work(self) -> bool:
        """Whether the engine has to make a step although it has no request."""
        return isinstance(self._side, SchedulerSide) and self._side.has_work()

    # -- worker -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See WorkerSide.attach."""
        self._worker().attach(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepPlan):
            self._worker().begin_step(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Begin to restore what requests wait for."""
        del kwargs, forward_context
        plan = self._get_connector_metadata()
        if isinstance(plan, StepPlan):
            self._worker().load(plan.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: rows are there before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: rows are captured in the pass, and blocks are saved behind it."""

    def wait_for_save(self) -> None:
        """Save the blocks that the step filled."""
        plan = self._get_connector_metadata()
        if isinstance(plan, StepPlan):
            self._worker().save(plan.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """See WorkerSide.take_loaded."""
        del finished_req_ids
        plan = self._get_connector_metadata()
        # A step that has work must not wait for another request's rows.
        is_idle = isinstance(plan, StepPlan) and plan.is_idle
        loaded, failed = self._worker().take_loaded(PATIENCE_S if is_idle else 0)
        return transfer_results(loaded, failed)

    def take_failed_blocks(self) -> frozenset[int]:
        """See WorkerSide.take_failed_blocks."""
        return self._worker().take_failed_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        """Tell the scheduler which sessions are saved, and of weights that changed unannounced."""
        worker = self._worker()
        saved, changed, is_alone = worker.take_saved(), worker.changed_version, worker.take_alone()
        has_news = saved or changed is not None or is_alone
        return StepReport(dict.fromkeys(saved, 1), changed, is_alone) if has_news else None

    # -- what is counted ------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorCounts | None:
        """What was counted since the last call."""
        counts = ConnectorCounts.of(
            hints=self._side.hints.take_counts(), misses=self._side.misses.take_counts()
        )
        return None if counts.is_empty() else counts

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorCounts:
        """One process's counts, as another process reads them."""
        return ConnectorCounts(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        """See ConnectorMetrics."""
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End this side's threads and its link."""
        self._side.close()

    def _scheduler(self) -> SchedulerSide:
        if not isinstance(self._side, SchedulerSide):
            raise TypeError("asked of a worker's connector")
        return self._side

    def _worker(self) -> WorkerSide:
        if not isinstance(self._side, WorkerSide):
            raise TypeError("asked of the scheduler's connector")
        return self._side
