"""vLLM's OffloadingConnector with the store as a tier behind its host memory (`tier.py`).

    GPU ◄──vLLM──► host memory ◄──CtxcacheTier──► store

vLLM's connector moves blocks between GPU and host memory, for any model and any parallelism that it knows.
The tier is in the scheduler's process, and vLLM tells it neither the model nor its settings. This connector
does, and has it told which weights the chunks are of. Worst case: a configuration whose chunks could be
another model's, or another version's. It is refused at the start with its remedy.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gpu_worker.engines.vllm.versions import KeepsManager, LayerByLayer, has, place_tier, warn_if_untried

# isort: split
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

from gpu_worker.engines.link import LinkState, Refused, StoreSettings, check_names
from gpu_worker.engines.vllm.engine_blocks import layout_of
from gpu_worker.engines.vllm.pass_rows import model_with
from gpu_worker.engines.vllm.plan import BlockLayout, hear_layouts
from gpu_worker.engines.vllm.roles import check_outer, role_of, transfer_of
from gpu_worker.engines.vllm.said import check_parameters
from gpu_worker.engines.vllm.settings import WHERE, directory_of, engine_facts
from gpu_worker.engines.vllm.tier import CtxcacheTier
from gpu_worker.engines.vllm.weights import WeightsName, first_version
from gpu_worker.model.weights import Sample, WeightsWatch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

HOST_BYTES = 4 << 30
"""Host memory that vLLM gets where its configuration names no size."""
OFFLOADING = ("OffloadingConnector", "CtxcacheOffloadingConnector")
"""Connectors whose host memory is one file, by the engine's id: each would write over the other's chunks."""

VLLM_SETTINGS = (
    "backpressure",
    "block_size",
    "blocks_per_chunk",
    "cache_policy_module_path",
    "canonical_layout",
    "cpu_bytes_to_use",
    "eviction_policy",
    "max_tracker_size",
    "offload_prompt_only",
    "secondary_tiers",
    "self_describing_kv_events",
    "spec_module_path",
    "spec_name",
    "store_threshold",
    "sync_load_budget_bytes",
    "tier_poll_interval_s",
)
"""The settings that some version of vLLM reads of the same place; any other is nobody's, and is refused."""


class CtxcacheOffloadingConnector(KeepsManager, LayerByLayer, OffloadingConnector):
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
        if role is KVConnectorRole.SCHEDULER:
            warn_if_untried()
        else:
            check_outer(vllm_config, OFFLOADING, by=lambda _extra: "their host memory")
        extra = transfer.kv_connector_extra_config
        # vLLM's own settings stand beside ours. Ours are checked here, where an error can name the field; the
        # tier reads them again in the scheduler's process.
        check_names(extra, (*StoreSettings.names(), *VLLM_SETTINGS), WHERE)
        given = {name: extra[name] for name in StoreSettings.names() if name in extra}
        StoreSettings.of(given, WHERE)
        # A configuration that is used twice has the tier in it already.
        others = [
            tier for tier in extra.get("secondary_tiers", []) if tier.get("type") != CtxcacheTier.__name__
        ]
        transfer.kv_connector_extra_config = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": HOST_BYTES,
            # Has an effect only where vLLM publishes KV events: these name a chunk's tokens.
            "self_describing_kv_events": has("owners of events"),
            **extra,
            "secondary_tiers": [
                *others,
                {
                    "type": place_tier(CtxcacheTier),
                    # vLLM gives a tier neither the model nor its settings: they are in its configuration.
                    "engine": engine_facts(vllm_config),
                    "directory": str(directory_of(vllm_config, vllm_config.model_config.model)),
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
        """On the scheduler's side; None in a worker."""
        if role is KVConnectorRole.SCHEDULER:
            self._weights = WeightsName(vllm_config, given_version, self._renewed)
            if self._weights.version is None:
                self._renewed()
        self._version = first_version(vllm_config, given_version)
        """The weights' version in the last step, on a worker's side."""
        self._watch: WeightsWatch | None = None
        self._sample: Sample | None = None
        """The weights behind the pass of the last step, on a worker's side."""

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
        """Take the workers' messages, one for each rank of pipeline and tensor parallelism."""
        for tier in self._tiers():
            hear_layouts(tier.layouts, metadata)

    def on_new_request(self, request: "Request") -> None:
        """See OffloadingConnector, which reads the callers' parameters."""
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
        """Empty host memory; later chunks are of other weights. Returns whether vLLM's cache is empty too."""
        super().reset_cache()
        manager = self._kv_cache_manager
        # vLLM resets connectors also where its own cache is in use and was not reset.
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
        # The rows in host memory were computed before this sample. Where no rows have come, the sample of the
        # step before serves, for which the device need not be waited for.
        sample = self._sample if meta is not None or self._sample.is_known else before
        changed = None if sample is None or sample.is_equal() else self._version
        if meta is None and changed is None:
            return None
        # A NamedReport also where the weights are the same: the first rank's report aggregates the others.
        return NamedReport(**_fields(meta or OffloadingWorkerMetadata()), changed=changed)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """See OffloadingConnector."""
        report = connector_output.kv_connector_worker_meta
        # Before `super`, which has the store take the chunks that have come to host memory.
        if isinstance(report, NamedReport) and report.changed is not None:
            self._scheduler_weights().changed(report.changed)
        super().update_connector_output(connector_output)

    def _renewed(self) -> None:
        version = self._scheduler_weights().version
        for tier in self._tiers():
            tier.renew(version)

    def _scheduler_weights(self) -> WeightsName:
        if self._weights is None:
            raise TypeError("a worker's connector has no name of the weights")
        return self._weights

    def wait_until_linked(self, timeout_s: float) -> bool:
        """Wait until the store can be used, or is known not to be. Returns whether it can be used."""
        return all(tier.link.wait(timeout_s) is LinkState.READY for tier in self._tiers())

    def _tiers(self) -> "list[CtxcacheTier]":
        """The store's tier, on the scheduler's side."""
        manager = self.connector_scheduler.manager if self.connector_scheduler is not None else None
        return [tier for tier in getattr(manager, "secondary_tiers", []) if isinstance(tier, CtxcacheTier)]


@dataclass
class NamedPlan(OffloadingConnectorMetadata):
    """A step's transfers. `weights`: the version of the weights, see `WeightsName`."""

    weights: str | None = ""


@dataclass
class NamedReport(OffloadingWorkerMetadata):
    """A step's transfers that ended. `changed`: a version of weights that are not loaded any more."""

    changed: str | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "NamedReport":
        """Both reports in one."""
        both = super().aggregate(other)
        changed = other.changed if isinstance(other, NamedReport) else None
        return NamedReport(**_fields(both), changed=changed if self.changed is None else self.changed)


def _fields(message: "OffloadingConnectorMetadata | OffloadingWorkerMetadata") -> dict[str, Any]:
    """A message's fields by name, to make a message of a wider class."""
    return {field.name: getattr(message, field.name) for field in fields(message)}
