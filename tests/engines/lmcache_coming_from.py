"""What docs/coming_from.md tells LMCache's users to write, given to LMCache itself.

Run by `make engines`, in an environment that has LMCache.
"""

import asyncio
import importlib
import json
import os
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from lab.engines.l2 import LMCACHE
from tests.documents import ROOT
from tests.engines.coming_from_page import DEFAULT_TARGET, commands, settings
from tests.server_process import ServerProcess

LINK_S = 20.0
END_S = 60.0
LINES = commands("lmcache server ")
BEFORE = {"fs": "/mnt/nvme0/lmcache", "memory": "8"}
"""Values of the page that a test replaces: a directory of a device, and sizes in GiB."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


def free_port() -> str:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@contextmanager
def serving(line: list[str], target: str, directory: Path) -> Iterator[dict[str, Any]]:
    """`lmcache server` with the words of the page; what it says of itself once it serves."""
    words = [
        word.replace(DEFAULT_TARGET, target).replace(BEFORE["fs"], str(directory / "lmcache"))
        for word in line
    ]
    words[words.index("--l1-size-gb") + 1] = "0.25"
    port = free_port()
    command = [str(LMCACHE), "server", "--port", free_port(), "--http-port", port, *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LMCACHE_TRACK_USAGE": "false"}
    server = subprocess.Popen(
        command, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert server.stdout is not None
        said: list[str] = []
        for told in server.stdout:
            said.append(told)
            if "Uvicorn running" in told:
                break
        else:
            pytest.fail("".join(said))
        # Nobody may wait for room in the pipe.
        threading.Thread(target=server.stdout.read, daemon=True).start()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=END_S) as answer:
            yield json.load(answer)
    finally:
        server.terminate()
        server.wait(END_S)


@pytest.mark.parametrize("number", range(len(LINES)), ids=["before", "after", "both"])
def test_lmcache_serves_with_the_lines_of_the_page(store: ServerProcess, tmp_path: Path, number: int) -> None:
    """Files, the store, and both: LMCache counts its tiers, and the store's says that it is linked."""
    with serving(LINES[number], store.target, tmp_path) as status:
        tiers = status["storage_manager"]["l2_adapters"]
    kinds = [tier.get("type", "store") for tier in tiers]
    assert kinds == [["FSL2Adapter"], ["store"], ["FSL2Adapter", "store"]][number]
    assert all(tier["is_healthy"] for tier in tiers)
    assert [tier["link"] for tier in tiers if "link" in tier] == ["ready"] * kinds.count("store")


def test_the_adapter_of_the_page_takes_its_settings(store: ServerProcess) -> None:
    """The JSON names a class that is there, and settings that are ours."""
    given = json.loads(LINES[1][LINES[1].index("--l2-adapter") + 1])
    adapter_type = getattr(importlib.import_module(given["module_path"]), given["class_name"])
    adapter = adapter_type(given["adapter_params"] | {"target": store.target})
    assert adapter.wait_until_linked(LINK_S)
    adapter.close()


def test_an_engine_links_with_the_file_of_the_page(store: ServerProcess, tmp_path: Path) -> None:
    """By LMCache's own reader of the file, its loader of plugins and its backend."""
    shown = settings(0)
    shown["extra_config"]["remote_storage_plugin.ctxcache.target"] = store.target
    path = tmp_path / "lmcache.yaml"
    path.write_text(yaml.safe_dump(shown | {"max_local_cpu_size": 0.25}))
    config = LMCacheEngineConfig.from_file(str(path))
    assert (config.remote_url, config.local_disk) == (None, None)
    metadata = LMCacheMetadata("tiny", 1, 1, 0, 0, torch.bfloat16, (4, 2, 256, 1, 128), chunk_size=256)
    memory = LocalCPUBackend(config, metadata, dst_device="cpu")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    [name] = config.remote_storage_plugins
    backend = RemoteBackend(config, metadata, loop, memory, dst_device="cpu", plugin_name=name)
    try:
        assert backend.connection.getWrappedConnector().wait_until_linked(LINK_S)
    finally:
        backend.close()
        memory.memory_allocator.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
