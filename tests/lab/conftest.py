"""Helpers of other folders' tests are found by name: the command line's, the simulator's, and tiny models."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from server_process import ServerProcess

import ctxcache
from ctxcache.client import Client

for folder in ("cli", "gpu_worker", "simulate"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a real server in a process of its own."""
    torch.set_num_threads(1)
    with (
        ServerProcess(tmp_path_factory.mktemp("store") / "data") as running,
        ctxcache.connect(running.target) as connected,
    ):
        yield connected
