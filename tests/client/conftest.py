"""A far side and clients of it."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from far_side import Connect, FarSide

import ctxcache
from ctxcache.client import Client


@pytest.fixture(params=["grpc", "socket"])
def far_side(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FarSide]:
    """A far side that listens on a Unix socket, and takes local operations by gRPC or on a control socket."""
    side = FarSide(tmp_path, has_control_socket=request.param == "socket")
    yield side
    side.stop()


@pytest.fixture
def connect(far_side: FarSide) -> Iterator[Connect]:
    """Make clients, closed at the end."""
    with ExitStack() as clients:
        yield lambda **options: clients.enter_context(ctxcache.connect(far_side.target, **options))


@pytest.fixture(params=["local", "remote"])
def client(request: pytest.FixtureRequest, connect: Connect) -> Client:
    """A client by each way that rows can travel."""
    return connect(access=request.param)
