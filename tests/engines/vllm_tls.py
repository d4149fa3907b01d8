"""vLLM beside a store on another host, which speaks TLS and asks for certificates: both connectors."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.engines.vllm_process import VllmEngine
from tests.engines.tls_store import TlsStore, tls_store
from tests.engines.vllm_small import model

__all__ = ["model"]

PROMPT = [(11 * i * i) % 500 + 3 for i in range(97)]
COUNT = 8
UNTRUSTED = "TLS: the server's certificate is signed by nobody whom this client trusts"
OFFLOADING = {
    "spec_name": "TieringOnCpu",
    "spec_module_path": "lab.engines.offload_on_cpu",
    "cpu_bytes_to_use": 64 << 20,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsStore]:
    """The store."""
    with tls_store(tmp_path_factory.mktemp("tls")) as made:
        yield made


@pytest.mark.parametrize("connector", ["CtxcacheConnector", "CtxcacheOffloadingConnector"])
def test_a_conversation_comes_back_by_tls(
    model: Path, store: TlsStore, tmp_path: Path, connector: str
) -> None:
    """In another process of the engine. One that trusts somebody else computes, and says once why."""
    own = {"durability": "disk", **(OFFLOADING if "Off" in connector else {"model_id": "tiny"})}

    def turn(settings: dict[str, str], log: Path) -> tuple[tuple[int, ...], int]:
        transfer = {
            "kv_connector": connector,
            "kv_role": "kv_both",
            "kv_connector_extra_config": own | settings,
        }
        with VllmEngine(model, None, log, kv_transfer_config=transfer, enable_prefix_caching=True) as engine:
            reply = engine.turn(PROMPT, "alice" if "model_id" in own else None, COUNT)
        return reply.token_ids, reply.cached_count

    reply, cached = turn(store.settings, tmp_path / "first")
    assert cached == 0
    assert turn(store.settings, tmp_path / "second") == (reply, 96)
    assert turn(store.wrong, tmp_path / "wrong") == (reply, 0)
    log = (tmp_path / "wrong").read_text()
    # Each side of the connector has a link.
    assert 1 <= log.count(UNTRUSTED) <= 2
