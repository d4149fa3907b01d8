"""A far side and clients of it."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from far_side import Connect, FarSide

from ctxcache.client import Client


@pytest.fixture
def far_side(tmp_path: Path) -> Iterator[FarSide]:
    """A far side that listens on a Unix socket."""
    side = FarSide(tmp_path)
    yield side
    side.stop()


@pytest.fixture
def connect(far_side: FarSide) -> Iterator[Connect]:
    """Make clients, closed at the end."""
    with ExitStack() as clients:
        yield lambda **options: clients.enter_context(Client(far_side.target, **options))


@pytest.fixture(params=["local", "remote"])
def client(request: pytest.FixtureRequest, connect: Connect) -> Client:
    """A client by each way that rows can travel."""
    return connect(access=request.param)
