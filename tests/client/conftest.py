"""A far side and clients of it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from far_side import FarSide

from ctxcache.client import Client


@pytest.fixture
def far_side(tmp_path) -> Iterator[FarSide]:
    """A far side that listens on a Unix socket."""
    side = FarSide(tmp_path)
    yield side
    side.stop()


@pytest.fixture
def connect(far_side) -> Iterator[Callable[..., Client]]:
    """Make clients, closed at the end."""
    with ExitStack() as clients:
        yield lambda **options: clients.enter_context(Client(far_side.target, **options))


@pytest.fixture(params=["local", "remote"])
def client(request, connect) -> Client:
    """A client by each way that rows can travel."""
    return connect(access=request.param)
