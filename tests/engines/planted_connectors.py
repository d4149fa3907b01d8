"""Connectors with a bug planted, which harnesses have to find."""

from typing import Any

from gpu_worker.engines.vllm.connector import CtxcacheConnector


class BlocksKept(CtxcacheConnector):
    """Says of every request that its blocks are still read, and never that this is over."""

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the class."""
        super().request_finished(request, block_ids)
        return True, None
