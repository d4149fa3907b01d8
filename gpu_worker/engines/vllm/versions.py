"""All in which the versions of vLLM differ that are served; `tried.py` has which those are.

Each row of DIFFERENCES is something that vLLM has from one version on, and what follows stands in for it on
an earlier version. Other modules ask by a row's name, and know no version. Worst case: a version that nobody
tried, which has changed one of these parts. It starts with a warning.
"""

import gc
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import vllm.version

from gpu_worker.engines import tried
from gpu_worker.engines.link import Refused
from gpu_worker.engines.tried import TRIED, numbers_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.request import Request


class Difference(NamedTuple):
    """Something that vLLM has from one version on."""

    since: tuple[int, int]
    part: str
    """Its name in vLLM: `module:name`, or `module:class.attribute`."""
    without: str = ""
    """What users of an earlier version notice; empty for nothing."""


_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOAD = "vllm.v1.kv_offload"
DIFFERENCES = {
    "session ids": Difference(
        (0, 28),
        "vllm.v1.engine:EngineCoreRequest.session_id",
        "`kv_transfer_params.session_id` alone names a conversation",
    ),
    "hints": Difference(
        (0, 31), "vllm.v1.kv_hints:KvHintsEnvelope", "hints come by `kv_transfer_params.kv_hints` alone"
    ),
    "transfer results": Difference(
        (0, 30),
        f"{_CONNECTOR}.base:KVConnectorTransferResults",
        "CtxcacheConnector refuses windows beside full attention; CtxcacheOffloadingConnector serves them",
    ),
    "manager": Difference((0, 30), f"{_CONNECTOR}.base:KVConnectorBase_V1.bind_kv_cache_manager"),
    "places of chunks": Difference(
        (0, 31),
        f"{_OFFLOAD}.base:ReqContext.get_offload_key_position",
        "a chunk in the store does not keep the chunk before it",
    ),
    "owners of events": Difference(
        (0, 29), f"{_OFFLOAD}.base:OffloadingEvent.ownership", "KV events tell nothing of the store"
    ),
    "chunk ids": Difference((0, 30), f"{_OFFLOAD}.tiering.base:TransferJob.chunk_ids"),
    "parts of jobs": Difference(
        (0, 28),
        f"{_OFFLOAD}.tiering.base:JobResult.successful_keys",
        "where one chunk of a load is missing, all of them are computed",
    ),
    "bytes of jobs": Difference((0, 31), f"{_OFFLOAD}.tiering.base:JobResult.transfer_bytes"),
    "marked misses": Difference((0, 28), f"{_OFFLOAD}.tiering.async_lookup:AsyncLookupManager.mark_miss"),
    "backpressure": Difference((0, 31), f"{_OFFLOAD}.tiering.backpressure:BackpressureDetector"),
    "media": Difference((0, 27), f"{_OFFLOAD}.base:Medium"),
}


def check_version(version: str) -> None:
    """Raise Refused for a version that cannot work."""
    if (numbers := numbers_of(version)) and numbers < numbers_of(TRIED["vLLM"][0]):
        names = ", ".join(TRIED["vLLM"])
        raise Refused(f"vLLM {version} is not served: {TRIED['vLLM'][0]} and later are, tried with {names}")


def warn_if_untried() -> None:
    """Warn once where the installed version was not run."""
    tried.warn_if_untried("vLLM", vllm.version.__version__)


# Before any other module of vLLM is imported: a version that lacks one gets a sentence, no ImportError.
check_version(vllm.version.__version__)


def has(name: str) -> bool:
    """Whether this vLLM has what a row of DIFFERENCES names."""
    numbers = numbers_of(vllm.version.__version__)
    return not numbers or numbers >= DIFFERENCES[name].since


# -- a request's words ---------------------------------------------------------------------------------------


def session_id_of(request: "Request") -> Any:
    """The conversation that a request names in vLLM's own field, of whatever type."""
    return request.session_id if has("session ids") else None


def hints_in(request: "Request") -> Any:
    """The hints that a request brings in vLLM's own field."""
    return request.kv_hints if has("hints") else None


# -- connectors ----------------------------------------------------------------------------------------------

if has("manager"):

    class KeepsManager:
        """A connector that gets the manager of the engine's blocks."""

else:

    class KeepsManager:  # type: ignore[no-redef]
        """A connector that finds the manager of the engine's blocks, of which vLLM gives it the pool."""

        _kv_cache_manager: "KVCacheManager | None" = None

        def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
            """Take the pool, and the manager that has made it."""
            super().bind_gpu_block_pool(gpu_block_pool)  # type: ignore[misc]
            self.bind_kv_cache_manager(_manager_of(gpu_block_pool))

        def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
            """Take the manager."""
            self._kv_cache_manager = kv_cache_manager


if has("transfer results"):

    class TellsLoads:
        """A connector that says by `transfer_results` what became of loads."""

else:

    class TellsLoads:  # type: ignore[no-redef]
        """A connector whose loads vLLM hears of by `get_finished`, and by the blocks of those that failed."""

        _failed_blocks: frozenset[int] = frozenset()

        def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
            """Loads that ended, whether they failed or not."""
            loaded: set[str] = self.get_transfer_results(finished_req_ids)  # type: ignore[attr-defined]
            self._failed_blocks = self.take_failed_blocks()  # type: ignore[attr-defined]
            return None, loaded

        def get_block_ids_with_load_errors(self) -> set[int]:
            """Blocks of the loads that failed, of those that `get_finished` told last."""
            return set(self._failed_blocks)


def transfer_results(loaded: set[str], failed: set[str]) -> Any:
    """The result of a connector's `get_transfer_results`: loads that ended, and those that failed."""
    if not has("transfer results"):
        return loaded
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: PLC0415  not on every version
        KVConnectorTransferResults,
    )

    return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)


def check_groups(count: int) -> None:
    """Raise Refused for caches whose failed loads vLLM could not take back. `count`: kinds of cache."""
    if count > 1 and not has("transfer results"):
        since = ".".join(map(str, DIFFERENCES["transfer results"].since))
        problem = f"vLLM {vllm.version.__version__} fails where a load of several kinds of K/V cache fails"
        raise Refused(f"{problem}: take CtxcacheOffloadingConnector, or vLLM {since}")


def _manager_of(pool: "BlockPool") -> "KVCacheManager":
    from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: PLC0415  late, since it is heavy

    # Ask for the type, not by `isinstance`: some objects do work of their own to answer that.
    managers = [one for one in gc.get_objects() if issubclass(type(one), KVCacheManager)]
    (manager,) = [one for one in managers if one.block_pool is pool]
    return manager


class LayerByLayer:
    """A connector whose caches vLLM registers layer by layer. Earlier versions may make one of all layers."""

    prefer_cross_layer_blocks = False


# -- the tier ------------------------------------------------------------------------------------------------


def storage_medium() -> Any:
    """The tier's medium, as vLLM names it; None in versions that ask for none."""
    if not has("media"):
        return None
    from vllm.v1.kv_offload.base import Medium  # noqa: PLC0415  a part of offloading

    return Medium.STORAGE


def job_result(job_id: int, *, success: bool, **told: Any) -> Any:
    """A JobResult. `told`: further fields of it, of which an earlier version has a part."""
    from vllm.v1.kv_offload.tiering.base import JobResult  # noqa: PLC0415  a part of offloading

    known = {
        "successful_keys": has("parts of jobs"),
        "transfer_time": has("parts of jobs"),
        "transfer_bytes": has("bytes of jobs"),
    }
    return JobResult(job_id, success=success, **{name: value for name, value in told.items() if known[name]})


def loaded_of(result: Any) -> set["OffloadKey"]:
    """The chunks that a JobResult says were loaded though the job failed."""
    return set(result.successful_keys or ()) if has("parts of jobs") else set()


def backpressure(detector: Any) -> tuple[Any, ...]:
    """The last argument of a tier's base class, where it takes one."""
    return (detector,) if has("backpressure") else ()


def place_tier(tier: type) -> str:
    """Let vLLM find a tier by the name that this returns: earlier versions import none by its module."""
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory  # noqa: PLC0415  a part of offloading

    # It refuses a name that it knows by an error.
    with suppress(ValueError):
        SecondaryTierFactory.register_tier(tier.__name__, tier.__module__, tier.__name__)
    return tier.__name__


def chunks_of(job: Any) -> Any:
    """The places of a job's chunks in host memory."""
    return job.chunk_ids if has("chunk ids") else job.block_ids


def place_of(context: "ReqContext", key: "OffloadKey") -> int | None:
    """The tokens of a request's prompt up to the end of a chunk; None where that is not known."""
    return context.get_offload_key_position(key) if has("places of chunks") else None


def mark_misses(lookups: Any, keys: Collection["OffloadKey"]) -> None:
    """Let later look-ups of these chunks be misses. `lookups`: an AsyncLookupManager."""
    if has("marked misses"):
        lookups.mark_miss(keys)
        return
    for key in keys:
        state = lookups._lookup_state.get(key)  # noqa: SLF001  there is no other way
        if state is not None:
            state.result = False
