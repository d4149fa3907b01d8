"""What docs/coming_from.md tells SGLang's users to write, given to SGLang's parser and factory.

Run by `make engines`, in an environment that has SGLang.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.server_args import ServerArgs

from tests.engines.coming_from_page import commands
from tests.engines.sglang_hicache import KvPool, backend_on, fill, keys_of
from tests.server_process import ServerProcess

BEFORE, AFTER = commands("python -m sglang.launch_server ")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


def parsed(words: list[str]) -> argparse.Namespace:
    """The arguments as SGLang's own parser reads them."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(words)


def test_pages_go_by_the_line_of_the_page_and_back(store: ServerProcess, tmp_path: Path) -> None:
    """To files, then to the store, then back: the files are found again, the store is as it was."""
    files, ours = parsed(BEFORE), parsed(AFTER)
    assert (files.enable_hierarchical_cache, ours.enable_hierarchical_cache) == (True, True)
    pool = KvPool(ours.hicache_mem_layout)
    fill(pool, 0, 1)
    facts = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    config = HiCacheStorageConfig(
        **facts,
        model_name="tiny",
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        extra_config=None,
    )
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path / "files")):
        before = StorageBackendFactory.create_backend(files.hicache_storage_backend, config, pool)
        before.register_mem_pool_host(pool)
        pages = [pool.page(number).flatten() for number in (0, 1)]
        assert before.batch_set(keys_of(0, 1), pages)
        assert before.batch_exists(keys_of(0, 1)) == 2

        given = json.loads(ours.hicache_storage_backend_extra_config) | {"target": store.target}
        assert ours.hicache_storage_backend == "dynamic"
        backend = backend_on(store.target, pool, extra=given)
        assert backend.batch_exists(keys_of(0)) == 0
        assert backend.batch_set_v1(keys_of(0, 1), pool.indices(0, 1)) == [True] * 2
        assert backend.batch_get_v1(keys_of(0, 1), pool.indices(4, 5)) == [True] * 2
        assert torch.equal(pool.page(5), pool.page(1))
        backend.close()

        again = StorageBackendFactory.create_backend(files.hicache_storage_backend, config, pool)
        again.register_mem_pool_host(pool)
        assert again.batch_exists(keys_of(0, 1)) == 2
