"""A store of the tests' own, for whatever saves to one and restores from it."""

from collections.abc import Iterator

import pytest
import torch
from server_process import ServerProcess

import ctxcache
from ctxcache.client import Client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server in a process of its own, shared by a module's tests."""
    torch.set_num_threads(1)
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    """A client of it."""
    with ctxcache.connect(server.target) as connected:
        yield connected
