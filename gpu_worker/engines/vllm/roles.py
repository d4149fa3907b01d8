"""A connector's role, and its place among the connectors of one engine."""

from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config import get_current_vllm_config_or_none

from gpu_worker.engines.link import Refused

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig


class Role(NamedTuple):
    """vLLM's `kv_role`."""

    loads: bool
    saves: bool


def transfer_of(config: "VllmConfig") -> "KVTransferConfig":
    """The connector's own part of the configuration. Raises Refused."""
    if config.kv_transfer_config is None or not config.kv_transfer_config.engine_id:
        raise Refused("a connector needs kv_transfer_config, with an engine_id")
    return config.kv_transfer_config


def role_of(config: "VllmConfig") -> Role:
    """Whether the engine loads from the store, and saves to it."""
    transfer = transfer_of(config)
    return Role(loads=transfer.is_kv_consumer, saves=transfer.is_kv_producer)


def is_alone(config: "VllmConfig") -> bool:
    """Whether the engine has no other connector. Call it on a worker's side, see `check_outer`."""
    outer = get_current_vllm_config_or_none()
    return outer is not None and outer.kv_transfer_config is transfer_of(config)


# Behind MultiConnector a connector has a configuration of its own, and vLLM goes by the outer one:
#
#     outer   kv_connector MultiConnector, kv_role, kv_load_failure_policy     what the scheduler does
#     own     kv_connector CtxcacheConnector, kv_role, kv_connector_extra_config
def check_outer(
    config: "VllmConfig", others: Collection[str], *, by: Callable[[dict[str, Any]], object]
) -> None:
    """Raise Refused where connectors of one engine do not go together.

    Call it on a worker's side, where vLLM tells its whole configuration. `others`: connectors of which there
    may be one for each value of `by`, which reads a connector's `kv_connector_extra_config`.
    """
    outer, own = get_current_vllm_config_or_none(), transfer_of(config)
    if outer is None or outer.kv_transfer_config is None or outer.kv_transfer_config is own:
        return
    transfer = transfer_of(outer)
    beside = f'beside "kv_connector":"{transfer.kv_connector}"'
    if transfer.kv_load_failure_policy != "recompute":
        problem = "a request whose rows do not come would fail"
        raise Refused(f'{problem}: add "kv_load_failure_policy":"recompute" {beside}')
    if own.is_kv_consumer and not transfer.is_kv_consumer:
        # A step under way may still write to the blocks of an ended request. vLLM keeps them back from loads
        # until it has ended, but only for consumers.
        problem = f"{own.kv_connector} loads, and vLLM would give it blocks that a step still writes"
        raise Refused(f'{problem}: say "kv_role":"kv_both" {beside}')
    children = transfer.kv_connector_extra_config.get("connectors", [])
    alike = [
        by(one.get("kv_connector_extra_config", {})) for one in children if one["kv_connector"] in others
    ]
    if twice := [one for one, count in Counter(alike).items() if count > 1]:
        raise Refused(f"{' and '.join(sorted(others))} of one engine twice for {twice[0]}: leave one out")
