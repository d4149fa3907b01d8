"""What docs/coming_from.md tells vLLM's users to write, given to vLLM's parser and to an engine.

Run by `make engines`, in an environment that has vLLM.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lab.engines.vllm_process import VllmEngine
from tests.engines.coming_from_page import DEFAULT_TARGET, commands
from tests.engines.vllm_small import model, plain, store
from tests.engines.vllm_tier import CHUNK_BYTES, FOUND, prompt_of, wait_for_blocks
from tests.server_process import ServerProcess

__all__ = ["model", "plain", "store"]

COUNT = 16
LINES = commands("vllm serve MODEL ")


def parsed(words: list[str]) -> argparse.Namespace:
    """The arguments as vLLM's own parser reads them."""
    read: argparse.Namespace = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    return read


def connector_of(line: list[str]) -> str:
    """The connector that a line names."""
    name: str = json.loads(line[line.index("--kv-transfer-config") + 1])["kv_connector"]
    return name


def test_the_page_goes_from_each_connector_to_ours() -> None:
    """Every line is one that vLLM takes."""
    names = [parsed(line).kv_transfer_config.kv_connector for line in LINES]
    assert names == [
        "LMCacheMPConnector",
        "CtxcacheConnector",
        "OffloadingConnector",
        "CtxcacheOffloadingConnector",
    ]


@pytest.mark.parametrize("line", [LINES[1], LINES[3]], ids=connector_of)
def test_another_engine_finds_what_one_has_computed(
    line: list[str], model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """With the page's settings, and a copying worker where vLLM refuses to offload from a CPU."""
    transfer: dict[str, Any] = json.loads(line[line.index("--kv-transfer-config") + 1])
    # Beside vLLM's own settings nobody refuses a name that is misspelt.
    assert transfer["kv_connector_extra_config"].pop("target") == DEFAULT_TARGET
    transfer["kv_connector_extra_config"]["target"] = store.target
    if "cpu_bytes_to_use" in transfer["kv_connector_extra_config"]:
        transfer["kv_connector_extra_config"] |= {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "lab.engines.offload_on_cpu",
            "cpu_bytes_to_use": 1024 * CHUNK_BYTES,
        }
    options: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 48}
    expected = plain.turn(prompt_of(1), None, COUNT).token_ids
    for found_count in (0, FOUND):
        with VllmEngine(model, None, tmp_path / "log", kv_transfer_config=transfer, **options) as engine:
            reply = engine.turn(prompt_of(1), "alice", COUNT)
            assert (reply.token_ids, reply.cached_count) == (expected, found_count)
            if connector_of(line) == "CtxcacheOffloadingConnector":
                wait_for_blocks(store, FOUND // 32)


def test_vllms_own_size_takes_the_place_of_a_named_connector(model: Path) -> None:
    """`--kv-offloading-size` beside our connector is vLLM's: the page says to leave it out."""
    args = parsed(["--model", str(model), *LINES[3], "--kv-offloading-size", "1"])
    config = EngineArgs.from_cli_args(args).create_engine_config()
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.kv_connector == "OffloadingConnector"
