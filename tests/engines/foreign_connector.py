"""A connector of somebody else, with a handshake of its own, as Nixl's has one. It moves nothing."""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    SupportsHMA,
)

NIXLS = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_engine_id",
    "remote_request_id",
    "remote_num_tokens",
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

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks are free. Whoever goes on with the request is told what Nixl tells."""
        del block_ids
        is_prefill = (request.kv_transfer_params or {}).get("do_remote_decode")
        return False, dict.fromkeys(NIXLS, 1) if is_prefill else None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """See request_finished."""
        return self.request_finished(request, block_ids)
