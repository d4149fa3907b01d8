"""The start-up hook of vLLM, by the entry point `vllm.general_plugins`: it learns the connectors' names."""

import logging
from contextlib import suppress

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

CONNECTORS = {
    "CtxcacheConnector": "gpu_worker.engines.vllm.connector",
    "CtxcacheOffloadingConnector": "gpu_worker.engines.vllm.offloading",
}
"""The module of each class."""


def register() -> None:
    """Register the connectors, unless this process has done so. Our log lines go where vLLM's go."""
    logging.getLogger("gpu_worker").parent = logging.getLogger("vllm")
    # vLLM loads plugins once in each process, and may do so again: it refuses a second time by an error.
    for name, module in CONNECTORS.items():
        with suppress(ValueError):
            KVConnectorFactory.register_connector(name, module, name)
