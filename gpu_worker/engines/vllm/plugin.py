"""The start-up hook of vLLM, by the entry point `vllm.general_plugins`: it learns the connectors' names."""

import logging
from contextlib import suppress

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

CONNECTORS = ("CtxcacheConnector", "CtxcacheOffloadingConnector")
MODULE = "ctxcache.engines.vllm"


def register() -> None:
    """Register the connectors, unless this process has done so. Our log lines go where vLLM's go."""
    logging.getLogger("gpu_worker").parent = logging.getLogger("vllm")
    # vLLM loads plugins once in each process, and may do so again: it refuses a second time by an error.
    for name in CONNECTORS:
        with suppress(ValueError):
            KVConnectorFactory.register_connector(name, MODULE, name)
