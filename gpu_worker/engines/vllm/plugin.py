"""What vLLM runs as it starts, by the entry point `vllm.general_plugins`: it learns the connector's name."""

from contextlib import suppress

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

CONNECTOR = "CtxcacheConnector"


def register() -> None:
    """Register the connector, unless this process has done so."""
    # vLLM loads plugins once in each process, and may do so again: it refuses a second time by an error.
    with suppress(ValueError):
        KVConnectorFactory.register_connector(CONNECTOR, "gpu_worker.engines.vllm.connector", CONNECTOR)
