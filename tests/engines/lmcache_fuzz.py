"""Fuzz of LMCache's second tier and remote storage: whatever keys, salts and layouts come, all is answered.

Run by `make engines`; see `hostile` for a long run.
"""

import asyncio
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

import ctxcache
import gpu_worker.engines.lmcache as shared
from gpu_worker.engines.lmcache.l2 import CtxcacheL2
from tests.engines import lmcache_l2, lmcache_remote
from tests.engines.hostile import COUNT, Hostile
from tests.server_process import ServerProcess

Key = TypeVar("Key")
TASK_S = 30.0
TYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
SIZES = (0, 1, 7, 4096, 192 << 10)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store."""
    with ServerProcess(tmp_path / "data", "--arena-size-bytes", str(128 << 20)) as server:
        yield server


def raised(work: Callable[[], Any], problems: list[str], what: str) -> Any:
    """The result of a call, which must raise nothing."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001  it is what is looked for
        problems.append(f"{what}: {error!r}")
        return None


def taken(make: Callable[[], Key]) -> Key:
    """A key that LMCache itself takes."""
    while True:
        with suppress(ValueError):
            return make()


class L2Fuzz:
    """Calls of the second tier in any order."""

    def __init__(self, adapter: CtxcacheL2, seed: int) -> None:
        self.adapter, self.hostile, self.draw = adapter, (made := Hostile(seed)), made.draw
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self, count: int) -> None:
        """So many calls."""
        calls = (self._store, self._look_up, self._load, self._delete)
        for _ in range(count):
            call = self.draw.choice(calls)
            self.counts[call.__name__] += 1
            keys = [self._key() for _ in range(self.draw.randrange(4))]
            raised(partial(call, keys), self.problems, f"{call.__name__} {keys!r}"[:500])

    def _key(self) -> ObjectKey:
        number = self.draw.choice((0, 1, -1, 7, 2**31, 2**63, 2**70))
        chunk = self.draw.choice((b"", b"a", self.draw.randbytes(32), bytes(64)))
        group, text = self.draw.choice((0, 1, 2**40)), self.hostile.text
        return taken(lambda: ObjectKey(chunk, text(), number, group, text()))

    def _memory(self, keys: list[ObjectKey]) -> list[Any]:
        return [lmcache_l2.chunk_of(bytearray(self.draw.choice(SIZES[1:]))) for _ in keys]

    def _layouts(self) -> dict[int, MemoryLayoutDesc]:
        sizes, count = (0, 1, 64, -1, 4096), self.draw.randrange(3)
        shapes = [
            torch.Size([self.draw.choice(sizes) for _ in range(self.draw.randrange(4))]) for _ in range(count)
        ]
        types = [self.draw.choice(TYPES) for _ in range(count)]
        return {self.draw.choice((0, 1, -1)): MemoryLayoutDesc(shapes, types)}

    def _answered(self, number: int, descriptor: int, take: Callable[[], Any]) -> None:
        for _ in range(100):
            if take() is not None:
                return
            assert select.select([descriptor], [], [], TASK_S)[0], "a task is not answered"
            os.eventfd_read(descriptor)
        raise AssertionError(f"task {number} is not answered")

    def _store(self, keys: list[ObjectKey]) -> None:
        number = self.adapter.submit_store_task(keys, self._memory(keys))
        ended: dict[int, Any] = {}

        def take() -> Any:
            ended.update(self.adapter.pop_completed_store_tasks())
            return ended.get(number)

        self._answered(number, self.adapter.get_store_event_fd(), take)

    def _look_up(self, keys: list[ObjectKey]) -> None:
        number = self.adapter.submit_lookup_and_lock_task(keys, self._layouts())
        take = self.adapter.query_lookup_and_lock_result
        self._answered(number, self.adapter.get_lookup_and_lock_event_fd(), lambda: take(number))
        self.adapter.submit_unlock(keys)

    def _load(self, keys: list[ObjectKey]) -> None:
        number = self.adapter.submit_load_task(keys, self._memory(keys))
        self._answered(
            number, self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(number)
        )

    def _delete(self, keys: list[ObjectKey]) -> None:
        self.adapter.delete(keys)


def test_fuzz_of_the_second_tier(store: ServerProcess) -> None:
    """A chunk of before is there afterwards as it was, or went for room; the next one is kept."""
    adapter = CtxcacheL2({"target": store.target})
    try:
        assert adapter.wait_until_linked(TASK_S)
        canary = lmcache_l2.data_of(1)
        assert lmcache_l2.stored(adapter, {lmcache_l2.key_of(1, salt="a\ud800"): canary})
        fuzz = L2Fuzz(adapter, 1)
        fuzz.run(COUNT)
        assert fuzz.problems == [], "\n".join(fuzz.problems[:20])
        key = lmcache_l2.key_of(1, salt="a\ud800")
        if lmcache_l2.loaded(adapter, [key]) != [bytes(canary)]:
            assert lmcache_l2.loaded(adapter, [key]) == [None]
            with ctxcache.connect(store.target) as client:
                assert client.admin.stats().evicted_session_count
        caught_up(
            lambda: (
                lmcache_l2.stored(adapter, {key: canary})
                and lmcache_l2.loaded(adapter, [key]) == [bytes(canary)]
            )
        )
    finally:
        adapter.close()


def test_fuzz_of_the_remote_storage(store: ServerProcess) -> None:
    """As an engine's own loop calls it."""
    with lmcache_remote.lmcache(store.target) as made:
        connector = made.backend.connection.getWrappedConnector()
        problems = remote_problems(made, connector, COUNT)
        assert problems == [], "\n".join(problems[:20])
        key = lmcache_remote.key_of(1)

        def is_kept() -> bool:
            made.store({key: made.chunk(1)})
            return lmcache_remote.are_equal(made.load(key)[0], 1)

        caught_up(is_kept)


def caught_up(is_served: Callable[[], bool]) -> None:
    """Wait until the store serves. A call that was answered too late lets its link rest for seconds."""
    deadline = time.monotonic() + TASK_S
    while not is_served():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def remote_problems(made: lmcache_remote.Lmcache, connector: Any, count: int) -> list[str]:
    """Calls of the connector in any order; what was wrong."""
    hostile, problems = Hostile(2), list[str]()
    draw = hostile.draw

    def key() -> CacheEngineKey:
        number, dtype = draw.choice((0, 1, -1, 2**31, 2**64, 2**300)), draw.choice(TYPES)
        tags = None if draw.random() < 0.5 else {f"lmcache.tag.{hostile.text()}": hostile.text()}
        rank = draw.choice((0, -1, 2**40))
        return taken(lambda: CacheEngineKey(hostile.text(), 1, rank, number, dtype, tags))

    def waited(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, made.backend.loop).result(TASK_S)

    def calls_of(keys: list[CacheEngineKey], chunks: list[Any]) -> dict[str, Callable[[], Any]]:
        return {
            "exists": lambda: waited(connector.exists(keys[0])),
            "contains": lambda: connector.batched_contains(keys),
            "async_contains": lambda: waited(connector.batched_async_contains("x", keys)),
            "get": lambda: waited(connector.get(keys[0])),
            "batched_get": lambda: waited(connector.batched_get(keys)),
            "put": lambda: waited(connector.batched_put(keys, chunks)),
            "fewer": lambda: waited(connector.batched_put(keys, chunks[1:])),
            "remove": lambda: connector.remove_sync(keys[0]),
        }

    for _ in range(count):
        keys = [key() for _ in range(draw.randrange(1, 4))]
        chunks = [made.chunk(i, draw.choice((1, 7, 64))) for i in range(len(keys))]
        calls = calls_of(keys, chunks)
        name = draw.choice(list(calls))
        result = raised(calls[name], problems, f"{name} {keys!r}"[:500])
        for chunk in result if name == "batched_get" and result else [result] if name == "get" else []:
            if chunk is not None:
                chunk.ref_count_down()
        for chunk in chunks:
            chunk.ref_count_down()
    return problems


def test_fuzz_finds_a_guard_that_is_missing(store: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as they come: one that cannot be encoded raises, where nobody catches it."""
    monkeypatch.setattr(shared, "_encoded", lambda name: name.encode())
    monkeypatch.setattr("gpu_worker.engines.link.StoreLink.tried", lambda _link, work, _otherwise: work())
    adapter = CtxcacheL2({"target": store.target})
    try:
        assert adapter.wait_until_linked(TASK_S)
        fuzz = L2Fuzz(adapter, 1)
        fuzz.run(300)
        assert fuzz.problems
    finally:
        adapter.close()
    with lmcache_remote.lmcache(store.target) as made:
        assert remote_problems(made, made.backend.connection.getWrappedConnector(), 300)
