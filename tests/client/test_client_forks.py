"""A client in a process that forks: parent and child have one connection, which is the parent's."""

import hashlib
import os
from collections.abc import Callable
from datetime import timedelta

import grpc
import numpy as np
import pytest
from server_process import ServerProcess

import ctxcache
from ctxcache.client import BlockSpace, QueuedJob
from ctxcache.client.routes import Access, Transport
from ctxcache.client.socket_access import SocketAccess
from ctxcache.errors import CacheError, Unavailable

BLOCK_BYTES = 50_000
CALL_COUNT = 200


CANNOT_FORK = tuple(map(int, grpc.__version__.split(".")[:2])) < (1, 80)
"""An older gRPC connects to nobody in a child whose parent has used it, and may lose its parent's streams."""


def key_of(name: str, number: int) -> bytes:
    """A key of 32 bytes."""
    return hashlib.sha256(f"{name} {number}".encode()).digest()


def said_in_child(work: Callable[[], object]) -> str:
    """The result of work in a forked child, or the error that it raised."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            try:
                said = repr(work())
            except CacheError as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
        finally:
            # Nothing of the test run is this process's to end.
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize(
    ("access", "transport"),
    [
        ("local", "socket"),
        pytest.param("local", "grpc", marks=pytest.mark.skipif(CANNOT_FORK, reason="gRPC below 1.80")),
        ("remote", "socket"),
        ("remote", "grpc"),
    ],
)
def test_a_child_calls_nobody_and_its_parent_goes_on(
    running_server: ServerProcess, access: Access, transport: Transport
) -> None:
    """Each would read the other's answers: a parent would get rows that its child asked for."""
    space = BlockSpace(model_fingerprint=bytes(32), layout_tag=f"forks {access} {transport}")
    with ctxcache.connect(running_server.target, timeout_s=5, access=access, transport=transport) as client:
        client.blocks.put(space, {key_of("block", n): np.full(BLOCK_BYTES, n, np.uint8) for n in range(2)})
        client.blocks.load(space, [key_of("block", 0)])
        calls: list[Callable[[], object]] = [
            lambda: client.blocks.load(space, [key_of("block", 0)]),
            lambda: client.blocks.load_async(space, [key_of("block", 0)]).result(),
            lambda: client.sessions.get("sessions/nobody"),
            lambda: list(client.sessions.list()),
        ]
        for call in calls:
            assert said_in_child(call).startswith(Unavailable.__name__)
        # A child that closes what it has ends nothing of its parent's.
        assert said_in_child(client.close) == "None"
        for _ in range(CALL_COUNT):
            [found] = client.blocks.load(space, [key_of("block", 1)]) or [None]
            assert found is not None
            assert found[0].tobytes() == bytes([1]) * BLOCK_BYTES


def test_a_child_that_dies_in_the_middle_of_a_call_leaves_its_parent_no_answer(
    running_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer would be taken for that of the parent's next call, which has the same number."""
    space = BlockSpace(model_fingerprint=bytes(32), layout_tag="forks in the middle")
    with ctxcache.connect(running_server.target, timeout_s=5, access="local") as client:
        client.blocks.put(space, {key_of("middle", n): np.full(BLOCK_BYTES, n, np.uint8) for n in range(2)})
        assert client.blocks.load(space, [key_of("middle", 1)])[0] is not None

        def dies() -> None:
            monkeypatch.setattr(SocketAccess, "_wait", lambda *_: os._exit(0))
            client.blocks.load(space, [key_of("middle", 0)])

        said_in_child(dies)
        [found] = client.blocks.load(space, [key_of("middle", 1)])
        assert found is not None
        assert found[0].tobytes() == bytes([1]) * BLOCK_BYTES


def test_a_child_publishes_nothing_and_withdraws_nothing(running_server: ServerProcess) -> None:
    """The queue of an engine is its process's alone."""
    with (
        ctxcache.connect(running_server.target, timeout_s=5) as client,
        client.hints.engine_queue("forks", grace=timedelta(seconds=1)) as queue,
    ):
        job = QueuedJob("job", "sessions/nobody", position=1)
        queue.flush()
        assert said_in_child(lambda: queue.put(job)).startswith(Unavailable.__name__)
        assert said_in_child(queue.close) == "None"
        queue.put(job)
        queue.flush()
        assert dict(queue.missing) == {"job": "SESSION_NOT_FOUND"}


@pytest.mark.skipif(CANNOT_FORK, reason="gRPC below 1.80")
def test_a_child_that_connects_anew_is_served(running_server: ServerProcess) -> None:
    """As any other process is."""
    space = BlockSpace(model_fingerprint=bytes(32), layout_tag="forks anew")
    with ctxcache.connect(running_server.target, timeout_s=5) as client:
        client.blocks.put(space, {key_of("anew", 0): np.ones(BLOCK_BYTES, np.uint8)})

        def anew() -> int:
            with ctxcache.connect(running_server.target, timeout_s=5) as own:
                return sum(one is not None for one in own.blocks.load(space, [key_of("anew", 0)]))

        assert said_in_child(anew) == "1"
