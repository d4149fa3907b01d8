"""LMCache's remote storage on a real store, by LMCache's own backend, memory and plugin loader.

Run by `make engines`, in an environment that has LMCache.
"""

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector import ConnectorContext
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

import ctxcache
from gpu_worker.engines.link import Refused
from gpu_worker.engines.lmcache.remote import CtxcacheRemote
from tests.engines.engine_names import check_names
from tests.engines.tls_store import tls_store
from tests.server_process import ServerProcess

LINK_S = 20.0
WAIT_S = 30.0
CHUNK_TOKENS = 64
LAYERS, WIDTH = 4, 128
DTYPE = torch.bfloat16


class Lmcache:
    """An engine's remote storage as LMCache makes it of a configuration."""

    def __init__(self, loop: asyncio.AbstractEventLoop, target: str, name: str, **params: Any) -> None:
        own = {"module_path": "ctxcache.engines.lmcache", "class_name": "CtxcacheRemote"}
        own |= {"target": target, **params}
        self.config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=0.25,
            remote_storage_plugins=[name],
            extra_config={f"remote_storage_plugin.{name}.{key}": value for key, value in own.items()},
        )
        shape = (LAYERS, 2, CHUNK_TOKENS, 1, WIDTH)
        self.metadata = LMCacheMetadata("tiny", 1, 1, 0, 0, DTYPE, shape, chunk_size=CHUNK_TOKENS)
        self.memory = LocalCPUBackend(self.config, self.metadata, dst_device="cpu")
        self.backend = RemoteBackend(
            self.config, self.metadata, loop, self.memory, dst_device="cpu", plugin_name=name
        )

    def chunk(self, number: int, token_count: int = CHUNK_TOKENS) -> MemoryObj:
        """A chunk in LMCache's memory: other numbers for each."""
        shape = torch.Size([2, LAYERS, token_count, WIDTH])
        chunk = self.memory.allocate(shape, DTYPE, MemoryFormat.KV_2LTD)
        assert chunk is not None
        chunk.tensor.copy_(values_of(number, token_count))
        return chunk

    def store(self, chunks: dict[CacheEngineKey, MemoryObj]) -> None:
        """Store them as an engine does, and wait until LMCache holds them no more."""
        ended = threading.Semaphore(0)
        self.backend.batched_submit_put_task(
            list(chunks), list(chunks.values()), on_complete_callback=lambda _key: ended.release()
        )
        for chunk in chunks.values():
            assert ended.acquire(timeout=WAIT_S)
            chunk.ref_count_down()

    def load(self, *keys: CacheEngineKey) -> list[torch.Tensor | None]:
        """Load chunks; None for each that is not there."""
        loaded = []
        for chunk in self.backend.batched_get_blocking(list(keys)):
            loaded.append(None if chunk is None else chunk.tensor.clone())
            if chunk is not None:
                chunk.ref_count_down()
        return loaded


def key_of(number: int, *, model: str = "tiny", rank: int = 0, dtype: torch.dtype = DTYPE) -> CacheEngineKey:
    """A chunk's key."""
    return CacheEngineKey(model, 1, rank, number + 1, dtype)


def values_of(number: int, token_count: int = CHUNK_TOKENS) -> torch.Tensor:
    """The values of a chunk."""
    draw = torch.Generator().manual_seed(number)
    return torch.randn(2, LAYERS, token_count, WIDTH, generator=draw).to(DTYPE)


def are_equal(found: torch.Tensor | None, number: int, token_count: int = CHUNK_TOKENS) -> bool:
    """Whether it is that chunk."""
    return found is not None and torch.equal(found, values_of(number, token_count))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store that a test may do anything to."""
    with ServerProcess(tmp_path / "data", "--arena-size-bytes", str(128 << 20)) as server:
        yield server


@contextmanager
def lmcache(target: str, name: str = "ctxcache", **params: Any) -> Iterator[Lmcache]:
    """LMCache, with its loop in a thread, and linked."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made = Lmcache(loop, target, name, **params)
    connector = made.backend.connection.getWrappedConnector()
    try:
        assert connector.wait_until_linked(LINK_S)
        yield made
    finally:
        made.backend.close()
        made.memory.memory_allocator.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_chunks_come_back_in_another_process_of_the_same_model(store: ServerProcess) -> None:
    """Whole ones and a short one, each in its shape; under another rank or type nothing is there."""
    with lmcache(store.target) as first:
        chunks = {key_of(number): first.chunk(number) for number in range(6)}
        chunks[key_of(6)] = first.chunk(6, token_count=17)
        first.store(chunks)
    with lmcache(store.target, "ctxcache.second") as second:
        assert second.backend.batched_contains([*chunks, key_of(7)]) == 7
        assert second.backend.contains(key_of(3))
        found = second.load(*chunks, key_of(7))
        assert [are_equal(one, i) for i, one in enumerate(found[:6])] == [True] * 6
        assert are_equal(found[6], 6, 17)
        assert found[7] is None
        assert [are_equal(one, 1) for one in second.load(key_of(1), key_of(1))] == [True] * 2
        others = [key_of(1, model="other"), key_of(1, rank=1), key_of(1, dtype=torch.float16)]
        assert second.load(*others) == [None] * 3
        assert not any(map(second.backend.contains, others))


def test_the_names_that_users_import_are_the_adapters() -> None:
    """As configurations name them."""
    check_names("lmcache")


def test_a_store_on_another_host_is_reached_by_tls(tmp_path: Path) -> None:
    """By the settings of all plugins."""
    with tls_store(tmp_path) as store:
        with lmcache(**store.settings) as first:
            first.store({key_of(1): first.chunk(1)})
        with lmcache(**store.settings) as second:
            assert are_equal(second.load(key_of(1))[0], 1)


def test_a_version_of_the_weights_is_shared_and_forgotten(store: ServerProcess) -> None:
    """By engines that say the same; others find nothing, and what is forgotten is theirs alone."""
    with lmcache(store.target) as plain, lmcache(store.target, weights_version="run 1, step 3") as first:
        for engine in (plain, first):
            engine.store({key_of(1): engine.chunk(1), key_of(2): engine.chunk(2)})
        with lmcache(store.target, weights_version="run 1, step 3") as second:
            assert second.backend.batched_contains([key_of(1), key_of(2)]) == 2
        with lmcache(store.target, weights_version="run 2, step 3") as other:
            assert not other.backend.contains(key_of(1))
        with ctxcache.connect(store.target) as cache:
            # A block and a head for each chunk.
            assert cache.models.forget("models/tiny", "run 1, step 3").block_count == 4
        assert (plain.backend.contains(key_of(1)), first.backend.contains(key_of(1))) == (True, False)


def test_a_large_chunk_is_whole_or_absent(store: ServerProcess) -> None:
    """A store of 24 MiB; a head is the first that goes."""
    token_count = (24 << 20) // (2 * LAYERS * WIDTH * DTYPE.itemsize)
    with lmcache(store.target) as engine:
        engine.store({key_of(1): engine.chunk(1, token_count)})
        assert are_equal(engine.load(key_of(1))[0], 1, token_count)
        assert engine.backend.remove(key_of(1))
        assert not engine.backend.contains(key_of(1))
        assert engine.load(key_of(1)) == [None]
        assert not engine.backend.remove(key_of(1))


def test_no_memory_of_lmcache_is_left_behind(store: ServerProcess) -> None:
    """After chunks that are there, that are not, and that the store cannot give any more."""
    with lmcache(store.target) as engine:
        engine.store({key_of(number): engine.chunk(number) for number in range(4)})
        before = engine.memory.memory_allocator.pin_allocator.total_allocated_size
        engine.load(key_of(1), key_of(9), key_of(2))
        store.kill9()
        assert engine.load(key_of(1), key_of(2)) == [None, None]
        assert engine.memory.memory_allocator.pin_allocator.total_allocated_size == before == 0


def test_a_store_that_is_killed_or_hangs_is_a_miss(store: ServerProcess) -> None:
    """Chunks on disk are found again when the store is back."""
    with lmcache(store.target, durability="disk") as engine:
        engine.store({key_of(1): engine.chunk(1)})
        for is_killed in (True, False):
            store.kill9() if is_killed else store.signal(signal.SIGSTOP)
            try:
                assert not engine.backend.contains(key_of(1))
                assert engine.load(key_of(1)) == [None]
                engine.store({key_of(2): engine.chunk(2)})
            finally:
                store.start() if is_killed else store.signal(signal.SIGCONT)
            deadline_s = time.monotonic() + WAIT_S
            while not are_equal(engine.load(key_of(1))[0], 1):
                assert time.monotonic() < deadline_s
                time.sleep(0.2)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"timeout_s": 0}, "remote_storage_plugin.ctxcache.timeout_s: .* greater than 0, not 0"),
        ({"targget": "x"}, "remote_storage_plugin.ctxcache.targget: not one of"),
        ({"model_directory": "/nowhere"}, "ctxcache.model_directory: /nowhere is no directory"),
    ],
)
def test_a_setting_that_is_wrong_is_named(params: dict[str, Any], message: str) -> None:
    """LMCache goes on without remote storage then, and logs what the connector says."""
    loop = asyncio.new_event_loop()
    made = Lmcache(loop, "127.0.0.1:1", "ctxcache", **params)
    try:
        assert made.backend.connection is None
        context = ConnectorContext(
            "plugin://ctxcache", loop, made.memory, made.config, made.metadata, plugin_name="ctxcache"
        )
        with pytest.raises(Refused, match=message):
            CtxcacheRemote().create_connector(context)
    finally:
        made.memory.memory_allocator.close()
        loop.close()
