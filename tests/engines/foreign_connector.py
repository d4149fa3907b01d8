"""A connector of somebody else, with a handshake of its own, as Nixl's has one. It moves nothing."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass(frozen=True)
class ForeignHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # untyped package
    """Nothing that anybody else understands."""

    port: int = 1


class ForeignConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # untyped package
    """See the module."""

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        """The message that MultiConnector hands on to all."""
        return ForeignHandshake()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """None."""
        del request, num_computed_tokens
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing."""
        del scheduler_output
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Blocks are free."""
        del request, block_ids
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Blocks are free."""
        del request, block_ids
        return False, None
