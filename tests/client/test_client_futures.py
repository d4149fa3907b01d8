"""Futures of the client, as an engine's poll loop uses them, and bytes that are gathered and scattered."""

import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from far_side import LAYOUT, OWN, SPEC, make_rows
from live_server import WAYS, LiveServer, connected, serving_small

import ctxcache
from ctxcache.client import BlockSpace, CallerModel, Client, MemoryRows, Scattered
from ctxcache.client.futures import Completions
from ctxcache.client.types import FoundBlock, LookupState
from ctxcache.errors import InvalidArgument, ModelNotFound, TooManyRequests, Unavailable
from ctxcache.format.streams import TOKENS

SPACE = BlockSpace(model_fingerprint=bytes(32), layout_tag="futures")
KEYS = [bytes([i]) * 32 for i in range(1, 5)]
WAIT_S = 30


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A small server."""
    directory: Path = tmp_path_factory.mktemp("futures")
    with serving_small(directory, arena_size_bytes=8 << 20, ssd_size_bytes=16 << 20) as made:
        yield made


@pytest.fixture(params=WAYS)
def client(request: pytest.FixtureRequest, live: LiveServer) -> Iterator[Client]:
    """A client by each way that a call may take."""
    with connected(live, request.param) as made:
        made.models.register(SPEC)
        made.blocks.delete(SPACE, KEYS)
        yield made


def wait_for(completions: Completions, futures: list[Future[Any]]) -> None:
    """As an engine does: sleep in one poll over all descriptors, then look at what it keeps."""
    poll = select.poll()
    poll.register(completions.fileno(), select.POLLIN)
    while not all(future.done() for future in futures):
        assert poll.poll(WAIT_S * 1000), "nothing was told"
        assert completions.clear() > 0


def test_a_poll_loop_matches_puts_and_loads(client: Client) -> None:
    """One thread carries them out in order; results and errors are the futures'."""
    session = client.sessions.create(OWN, id="a", layout=LAYOUT)
    rows = make_rows(70)
    session.append(rows)
    ids = rows[TOKENS].view("<i4").reshape(-1)
    blocks = {key: np.full(5000, i, np.uint8) for i, key in enumerate(KEYS)}
    into = [np.zeros(5000, np.uint8) for _ in KEYS]

    match = client.prefixes.match_async(OWN, ids, layout=LAYOUT)
    put = client.blocks.put_async(SPACE, blocks)
    load = client.blocks.load_async(SPACE, KEYS, into)
    unknown = client.prefixes.match_async(CallerModel(replace(SPEC, model_id="none")), ids)
    bad = client.blocks.load_async(SPACE, [b"short"])
    wait_for(client.completions, [match, put, load, unknown, bad])

    assert match.result().token_count == 64
    assert put.result() == len(KEYS)
    assert [array[0] for [array] in filter(None, load.result())] == [0, 1, 2, 3]
    assert all((array == i).all() for i, array in enumerate(into))
    assert isinstance(unknown.exception(), ModelNotFound)
    assert isinstance(bad.exception(), InvalidArgument)
    assert not select.select([client.completions.fileno()], [], [], 0)[0], "all was taken"
    session.delete()


@pytest.fixture
def held() -> Iterator[tuple[Completions, threading.Event, Future[None]]]:
    """A thread whose first call waits to be let go."""
    completions, go_on, is_running = Completions("there", limit=2), threading.Event(), threading.Event()

    def call() -> None:
        is_running.set()
        assert go_on.wait(WAIT_S)

    future = completions.submit(call)
    assert is_running.wait(WAIT_S)
    yield completions, go_on, future
    go_on.set()
    completions.close()


def test_what_waits_is_bounded_and_may_be_cancelled(
    held: tuple[Completions, threading.Event, Future[None]],
) -> None:
    """A call more is refused by name; one that was cancelled is never carried out, and told all the same."""
    completions, go_on, running = held
    done: list[int] = []
    first, second = (completions.submit(done.append, i) for i in range(2))
    with pytest.raises(TooManyRequests, match="calls that wait for the client's thread: the limit of 2"):
        completions.submit(done.append, 2)
    assert first.cancel()
    assert not running.cancel()
    go_on.set()
    wait_for(completions, [running, second])
    assert done == [1]
    assert completions.submit(lambda: 7).result(WAIT_S) == 7


def test_a_closed_client_cancels_what_waits(held: tuple[Completions, threading.Event, Future[None]]) -> None:
    """A running call ends by itself.

    Nothing is taken any more, and nothing is left of thread and descriptor.
    """
    completions, go_on, running = held
    waiting = completions.submit(lambda: 1)
    descriptor = completions.fileno()
    completions.stop()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)
    for call in (lambda: completions.submit(lambda: 1), completions.fileno):
        with pytest.raises(Unavailable, match="the client is closed"):
            call()
    go_on.set()
    completions.close()
    assert running.result(0) is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert not [one for one in threading.enumerate() if one.name == "ctxcache-calls" and one.is_alive()]


def test_a_descriptor_that_is_asked_for_late_tells_what_has_ended() -> None:
    """Calls submitted before the first poll are not missed; a call's own failure ends nothing else."""
    completions = Completions()

    def fail() -> None:
        raise ValueError("its own")

    failed, good = completions.submit(fail), completions.submit(lambda: 3)
    assert good.result(WAIT_S) == 3
    with pytest.raises(ValueError, match="its own"):
        failed.result(WAIT_S)
    wait_for(completions, [completions.submit(lambda: 0)])
    completions.close()


LAYERS, PAGES, TOKENS_OF_PAGE, ROW_BYTES, STRIDE = 3, 4, 16, 96, 128


def pool(fill: int = -1) -> np.ndarray:
    """Pages of some layers, whose rows have room behind them that belongs to nobody: uint8."""
    shape = (LAYERS, PAGES, TOKENS_OF_PAGE, STRIDE)
    if fill >= 0:
        return np.full(shape, fill, np.uint8)
    return np.random.default_rng(1).integers(0, 250, shape, np.uint8)


def pages_of(memory: np.ndarray, page: int) -> Scattered:
    """A page of every layer, by address and stride."""
    return Scattered(
        [
            MemoryRows(memory[layer, page].ctypes.data, TOKENS_OF_PAGE, ROW_BYTES, STRIDE)
            for layer in range(LAYERS)
        ]
    )


def found(client: Client, into: list[Any] | None = None) -> list[Any]:
    """The arrays of the second key, which is there."""
    [arrays] = client.blocks.load(SPACE, KEYS[1:2], into)
    assert arrays is not None
    return list(arrays)


def test_pages_of_many_layers_are_one_block(client: Client) -> None:
    """Gathered by address and stride into one part, and scattered back; what lies between is left alone."""
    source, target = pool(), pool(255)
    client.blocks.put(SPACE, {key: pages_of(source, page) for page, key in enumerate(KEYS)})
    size_bytes = LAYERS * TOKENS_OF_PAGE * ROW_BYTES
    assert client.blocks.look_up(SPACE, KEYS[:1]) in (
        [FoundBlock(LookupState.HIT, size_bytes, is_in_dram=in_dram)] for in_dram in (True, False)
    )
    loaded = client.blocks.load(SPACE, KEYS, into=[pages_of(target, page) for page in range(PAGES)])

    assert [len(arrays or ()) for arrays in loaded] == [LAYERS] * PAGES
    np.testing.assert_array_equal(target[..., :ROW_BYTES], source[..., :ROW_BYTES])
    assert (target[..., ROW_BYTES:] == 255).all()
    [plain] = found(client)
    assert plain.tobytes() == source[:, 1, :, :ROW_BYTES].tobytes()
    mixed = Scattered([bytearray(ROW_BYTES), np.zeros((size_bytes - ROW_BYTES) // 4, np.float32)])
    [head, rest] = found(client, [mixed])
    assert head.tobytes() + rest.tobytes() == plain.tobytes()


def calls_of(work: Callable[[], object]) -> int:
    """How many calls of Python and of C functions it makes in this thread."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_rows_are_not_looped_over(live: LiveServer) -> None:
    """A hundred times as many rows take as many calls."""
    counts = []
    with ctxcache.connect(live.target, timeout_s=10) as client:
        client.blocks.delete(SPACE, KEYS)
        for key, row_count in zip(KEYS, (20, 20, 2000), strict=False):
            memory = np.ones((row_count, STRIDE), np.uint8)
            rows = Scattered([MemoryRows(memory.ctypes.data, row_count, ROW_BYTES, STRIDE)])
            put = calls_of(lambda key=key, rows=rows: client.blocks.put(SPACE, {key: rows}))  # type: ignore[misc]  # bound here
            load = calls_of(lambda key=key, rows=rows: client.blocks.load(SPACE, [key], into=[rows]))  # type: ignore[misc]
            counts.append(put + load)
        client.blocks.delete(SPACE, KEYS)
    # The first finds nothing attached yet.
    assert counts[2] <= counts[1] + 20


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (MemoryRows(0, 1, 1), "rows: .* are no rows in memory"),
        (MemoryRows(4096, 0, 1), "rows: .* are no rows in memory"),
        (MemoryRows(4096, 2, 8, 7), "rows: .* are no rows in memory"),
        (Scattered([b"readonly"]), "is not memory that may be written to"),
        (Scattered([bytearray(2), bytearray(2)]), r"\[4\] B given, \[8\] B expected"),
        (np.array([None]), "objects are not bytes"),
    ],
)
def test_memory_that_is_none_is_refused(client: Client, data: Any, problem: str) -> None:
    """Before anything is copied."""
    client.blocks.put(SPACE, {KEYS[0]: b"12345678"})
    with pytest.raises(InvalidArgument, match=problem):
        client.blocks.load(SPACE, KEYS[:1], into=[data])
