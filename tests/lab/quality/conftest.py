"""A store of the tests' own, for whatever saves to one and restores from it."""

from collections.abc import Iterator

import pytest
import torch
from server_process import ServerProcess

import ctxcache
from ctxcache.client import Client


@pytest.fixture
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a real server in a process of its own."""
    torch.set_num_threads(1)
    with (
        ServerProcess(tmp_path_factory.mktemp("store") / "data") as running,
        ctxcache.connect(running.target) as connected,
    ):
        yield connected
