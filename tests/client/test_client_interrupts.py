"""Signals: a handler that raises costs no lease and no reservation, wherever it comes."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from far_side import HIDDEN, LAYOUT, OWN, SPEC, make_rows
from interrupts import is_interrupted
from server_process import ServerProcess

import ctxcache
from ctxcache.client import BlockSpace, Client

NAME = "sessions/a"
SPACE, KEYS = BlockSpace(bytes(32), layout_tag="interrupts"), [bytes([number]) * 32 for number in range(2)]
SOON_S = 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a session of 70 tokens."""
    with ServerProcess(tmp_path_factory.mktemp("interrupts") / "data") as server:
        with ctxcache.connect(server.target) as client:
            client.models.register(SPEC)
            client.sessions.create(OWN, id="a", layout=LAYOUT)
            client.sessions.open(NAME, OWN).append(make_rows(70))
            client.blocks.put(SPACE, {key: np.full(4096, 7, np.uint8) for key in KEYS})
        yield server


def read(client: Client) -> None:
    """Lease the session's rows and look at them."""
    with client.sessions.open(NAME, OWN).read() as rows:
        rows.pieces(HIDDEN)


def write(client: Client) -> None:
    """Reserve room, and leave it."""
    with client.sessions.open(NAME, OWN).writer(8):
        pass


def load(client: Client) -> None:
    """Lease blocks and copy them."""
    client.blocks.load(SPACE, KEYS)


def hold(client: Client) -> None:
    """Look blocks up and hold them."""
    _, holds = client.blocks.look_up_and_hold(SPACE, KEYS)
    for one in holds:
        one.release_soon()


def decode(client: Client) -> None:
    """Reserve room for steps of a batch, and commit none."""
    with client.sessions.decode_batch([NAME], OWN):
        pass


def put(client: Client) -> None:
    """Put a block that is there no more behind it."""
    client.blocks.put(SPACE, {bytes([9]) * 32: np.zeros(4096, np.uint8)})
    client.blocks.delete(SPACE, [bytes([9]) * 32])


@pytest.mark.parametrize("run", [read, write, load, hold, put, decode])
def test_a_caller_interrupted_anywhere_leaves_nothing_held(
    server: ServerProcess, run: Callable[[Client], None]
) -> None:
    """Its lease would keep rows in DRAM, and its reservation other writers away, for as long as a minute."""
    left = range(1, 4000)
    with (
        ctxcache.connect(server.target, access="local", transport="socket") as client,
        ctxcache.connect(server.target) as beside,
    ):
        run(client)
        for at in left:
            is_over = not is_interrupted(lambda: run(client), at)
            until_nothing_is_held(beside)
            if is_over:
                break
        run(client)
    assert 100 < at < left[-1]


def until_nothing_is_held(beside: Client) -> None:
    """Wait until the server knows of no lease and no reservation."""
    deadline_s = time.monotonic() + SOON_S
    while (stats := beside.admin.stats()).lease_count or stats.reservation_count:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
