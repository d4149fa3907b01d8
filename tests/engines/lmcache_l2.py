"""LMCache's second tier on a real store, driven by LMCache's own bench and through its own interface.

Run by `make engines`, in an environment that has LMCache.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from safetensors.torch import save

import ctxcache
from gpu_worker.engines.link import Refused
from gpu_worker.engines.lmcache.l2 import CtxcacheL2
from lab.engines.l2 import OPERATIONS, adapter_of_store, bench
from tests.engines.tls_store import tls_store
from tests.server_process import ServerProcess

LINK_S = 20.0
TASK_S = 10.0
CHUNK_BYTES = 192 << 10


def chunk_of(data: bytearray) -> TensorMemoryObj:
    """LMCache's memory of one tensor, as its bench has it."""
    shape = torch.Size([len(data)])
    facts = MemoryObjMetadata(shape, torch.uint8, 0, len(data), 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(torch.frombuffer(data, dtype=torch.uint8), facts, None)


def key_of(number: int, *, model: str = "tiny", rank: int = 0, salt: str = "") -> ObjectKey:
    """A chunk's key."""
    return ObjectKey(number.to_bytes(32, "big"), model, rank, 0, salt)


def data_of(number: int, size_bytes: int = CHUNK_BYTES) -> bytearray:
    """Other bytes for each number."""
    return bytearray((number * 31 + i * i) % 251 for i in range(4096)) * (size_bytes // 4096)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store that a test may do anything to."""
    with ServerProcess(tmp_path / "data", "--arena-size-bytes", str(128 << 20)) as server:
        yield server


@pytest.fixture
def adapter(store: ServerProcess) -> Iterator[CtxcacheL2]:
    """The adapter on it."""
    made = CtxcacheL2({"target": store.target})
    assert made.wait_until_linked(LINK_S)
    yield made
    made.close()


def wait_for(descriptor: int) -> None:
    """Wait until an event descriptor is signalled, and reset it as LMCache does."""
    assert select.select([descriptor], [], [], TASK_S)[0]
    os.eventfd_read(descriptor)


def stored(adapter: CtxcacheL2, chunks: dict[ObjectKey, bytearray]) -> bool:
    """Store chunks and wait for the descriptor; whether all went well."""
    return put(adapter, list(chunks), list(map(chunk_of, chunks.values())))


def put(adapter: CtxcacheL2, keys: list[ObjectKey], memory: list[Any]) -> bool:
    """Store memory and wait for the descriptor; whether all went well."""
    task = adapter.submit_store_task(keys, memory)
    wait_for(adapter.get_store_event_fd())
    return bool(adapter.pop_completed_store_tasks()[task].is_successful())


def asked(adapter: CtxcacheL2, keys: list[ObjectKey], size_bytes: int = CHUNK_BYTES) -> list[bool]:
    """Look chunks up and wait for the descriptor."""
    return looked_up(adapter, keys, {0: MemoryLayoutDesc([torch.Size([size_bytes])], [torch.uint8])})


def looked_up(adapter: CtxcacheL2, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> list[bool]:
    """Look chunks of such groups up and wait for the descriptor."""
    task = adapter.submit_lookup_and_lock_task(keys, layouts)
    wait_for(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert found is not None
    adapter.submit_unlock(keys)
    return [found.test(i) for i in range(len(keys))]


def loaded(adapter: CtxcacheL2, keys: list[ObjectKey], size_bytes: int = CHUNK_BYTES) -> list[bytes | None]:
    """Load chunks and wait for the descriptor; their bytes, or None."""
    return got(adapter, keys, [chunk_of(bytearray(size_bytes)) for _ in keys])


def got(adapter: CtxcacheL2, keys: list[ObjectKey], memory: list[Any]) -> list[bytes | None]:
    """Load into memory and wait for the descriptor; its bytes, or None."""
    task = adapter.submit_load_task(keys, memory)
    wait_for(adapter.get_load_event_fd())
    found = adapter.query_load_result(task)
    assert found is not None
    return [bytes(chunk.byte_array) if found.test(i) else None for i, chunk in enumerate(memory)]


def test_a_store_on_another_host_is_reached_by_tls(tmp_path: Path) -> None:
    """An adapter that trusts somebody else stores nothing, and LMCache goes on."""
    with tls_store(tmp_path) as store:
        made, other = CtxcacheL2(store.settings), CtxcacheL2(store.wrong)
        try:
            assert made.wait_until_linked(LINK_S)
            assert stored(made, {key_of(1): data_of(1)})
            assert asked(other, [key_of(1)]) == [False]
            assert asked(made, [key_of(1)]) == [True]
        finally:
            made.close()
            other.close()


@pytest.mark.parametrize("size_kib", [256, 4096])
def test_lmcaches_own_bench_verifies_it(tmp_path: Path, size_kib: int) -> None:
    """Every byte that it stored comes back, by its own comparison, where there is room for all of them."""
    size = str(512 << 20)
    with ServerProcess(tmp_path / "data", "--arena-size-bytes", size, "--ssd-size-bytes", size) as store:
        assert set(bench(adapter_of_store(store.target), size_kib, rounds=1)) == set(OPERATIONS)


def test_what_is_stored_is_found_and_loaded(adapter: CtxcacheL2) -> None:
    """By its whole key: another model, rank or salt has nothing."""
    chunks = {key_of(number): data_of(number) for number in range(8)}
    assert stored(adapter, chunks)
    assert asked(adapter, [*chunks, key_of(9)]) == [True] * 8 + [False]
    assert loaded(adapter, [key_of(9), *chunks]) == [None, *map(bytes, chunks.values())]
    assert loaded(adapter, [key_of(1), key_of(2), key_of(1)]) == [bytes(data_of(i)) for i in (1, 2, 1)]
    others = [key_of(1, model="other"), key_of(1, rank=1), key_of(1, salt="alice")]
    assert asked(adapter, others) == [False] * 3
    assert loaded(adapter, others) == [None] * 3
    assert stored(adapter, {others[2]: data_of(77)})
    assert loaded(adapter, [key_of(1), others[2]]) == [bytes(data_of(1)), bytes(data_of(77))]


def test_a_chunk_larger_than_a_block_is_whole_or_absent(adapter: CtxcacheL2) -> None:
    """One of 40 MiB is three blocks; under another size it is not there."""
    size_bytes = 40 << 20
    assert stored(adapter, {key_of(1): data_of(1, size_bytes)})
    assert asked(adapter, [key_of(1)], size_bytes) == [True]
    assert loaded(adapter, [key_of(1)], size_bytes) == [bytes(data_of(1, size_bytes))]
    assert asked(adapter, [key_of(1)], 8 << 20) == [False]
    assert loaded(adapter, [key_of(1)], 8 << 20) == [None]


def test_a_chunk_of_another_size_is_a_miss(adapter: CtxcacheL2) -> None:
    """Another element type under the same key: nothing is given, and others load on."""
    assert stored(adapter, {key_of(1): data_of(1)})
    assert loaded(adapter, [key_of(1)], 2 * CHUNK_BYTES) == [None]
    assert loaded(adapter, [key_of(1)]) == [bytes(data_of(1))]


def test_another_element_type_of_the_same_size_is_a_miss(store: ServerProcess) -> None:
    """LMCache's keys do not name it: two engines of one model, each with a server of its own on the store."""
    shapes = [torch.Size([2, 4, 256, 64])]
    sixteen = {dtype: MemoryLayoutDesc(shapes, [dtype]) for dtype in (torch.bfloat16, torch.float16)}
    memory = L1MemoryManager(L1MemoryManagerConfig(64 << 20, use_lazy=False, shm_name=""))
    found = {}
    for number, (dtype, layout) in enumerate(sixteen.items()):
        adapter = CtxcacheL2({"target": store.target})
        assert adapter.wait_until_linked(LINK_S)
        _, [filled, empty] = memory.allocate(layout, 2)
        filled.raw_data.fill_(number + 1)
        before = looked_up(adapter, [key_of(1)], {0: layout}), got(adapter, [key_of(1)], [empty])
        assert put(adapter, [key_of(1)], [filled])
        after = looked_up(adapter, [key_of(1)], {0: layout}), got(adapter, [key_of(1)], [empty])
        found[dtype] = before, after
        adapter.close()
        # One that has stored nothing yet goes by what LMCache says of the group.
        again = CtxcacheL2({"target": store.target})
        assert again.wait_until_linked(LINK_S)
        assert looked_up(again, [key_of(1)], {0: layout}) == [True]
        assert looked_up(again, [key_of(1)], {0: MemoryLayoutDesc(shapes, [torch.float32])}) == [False]
        again.close()
        memory.free([filled, empty])
    size_bytes = 2 * shapes[0].numel()
    for number, (before, after) in enumerate(found.values()):
        assert before == ([False], [None])
        assert after == ([True], [bytes([number + 1]) * size_bytes])


def test_compressed_chunks_are_found_by_a_fresh_process(store: ServerProcess) -> None:
    """What LMCache compresses is bytes of whatever size; element types still tell engines apart."""
    shapes = [torch.Size([2, 4, 256, 64])]
    half, brain = ({0: MemoryLayoutDesc(shapes, [dtype])} for dtype in (torch.float16, torch.bfloat16))

    def fresh() -> CtxcacheL2:
        made = CtxcacheL2({"target": store.target})
        assert made.wait_until_linked(LINK_S)
        return made

    first = fresh()
    assert looked_up(first, [key_of(1), key_of(2)], half) == [False, False]
    assert stored(first, {key_of(1): data_of(1), key_of(2): data_of(2, 20 << 20)})
    assert looked_up(first, [key_of(1)], half) == [True]
    first.close()

    second = fresh()
    assert looked_up(second, [key_of(2), key_of(1), key_of(3)], half) == [True, True, False]
    assert loaded(second, [key_of(1)]) == [bytes(data_of(1))]
    assert loaded(second, [key_of(2)], 20 << 20) == [bytes(data_of(2, 20 << 20))]
    # Compressed to another size it is another chunk, and the others are there.
    memory = [chunk_of(bytearray(size_bytes)) for size_bytes in (2 * CHUNK_BYTES, 20 << 20)]
    assert got(second, [key_of(1), key_of(2)], memory) == [None, bytes(data_of(2, 20 << 20))]
    second.close()

    other = fresh()
    assert looked_up(other, [key_of(1)], brain) == [False]
    assert loaded(other, [key_of(1)]) == [None]
    assert stored(other, {key_of(1): data_of(7)})
    assert looked_up(other, [key_of(1)], brain) == [True]
    assert loaded(other, [key_of(1)]) == [bytes(data_of(7))]
    other.close()

    last = fresh()
    assert looked_up(last, [key_of(1)], half) == [True]
    assert loaded(last, [key_of(1)]) == [bytes(data_of(1))]
    last.delete([key_of(1)])
    assert looked_up(last, [key_of(1)], half) == [False]
    last.close()


def test_locks_leave_room_for_loads(tmp_path: Path) -> None:
    """An engine looks up more than the store could hold for it, and loads what it did not look up."""
    sizes = ("--arena-size-bytes", str(64 << 20), "--ssd-size-bytes", str(256 << 20))
    with ServerProcess(tmp_path / "data", *sizes) as store:
        adapter = CtxcacheL2({"target": store.target})
        assert adapter.wait_until_linked(LINK_S)
        keys = [key_of(number) for number in range(12)]
        for key in keys:
            assert stored(adapter, {key: data_of(1, 4 << 20)})
        layout = {0: MemoryLayoutDesc([torch.Size([4 << 20])], [torch.uint8])}
        for key in keys[1:]:
            adapter.submit_lookup_and_lock_task([key], layout)
            wait_for(adapter.get_lookup_and_lock_event_fd())
        assert lease_count(store) > 0
        assert loaded(adapter, keys[:1], 4 << 20) == [bytes(data_of(1, 4 << 20))]
        adapter.close()
        until_no_lease(store)


LOOKS = """
import sys, time
sys.path.insert(0, {directory!r})
from lmcache_l2 import *
adapter = CtxcacheL2({{"target": {target!r}}})
assert adapter.wait_until_linked(LINK_S)
layout = {{0: MemoryLayoutDesc([torch.Size([CHUNK_BYTES])], [torch.uint8])}}
adapter.submit_lookup_and_lock_task([key_of(number) for number in range(8)], layout)
wait_for(adapter.get_lookup_and_lock_event_fd())
print("locked", flush=True)
time.sleep(60)
"""


def test_an_engine_that_is_killed_leaves_no_lock(adapter: CtxcacheL2, store: ServerProcess) -> None:
    """Its locks end with its connection."""
    assert stored(adapter, {key_of(number): data_of(number) for number in range(8)})
    code = LOOKS.format(directory=str(Path(__file__).parent), target=store.target)
    engine = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        assert any(line == "locked\n" for line in engine.stdout)
        assert lease_count(store) == 1
    finally:
        engine.kill()
        engine.wait()
    until_no_lease(store)


def lease_count(store: ServerProcess) -> int:
    """Leases that the store holds."""
    with ctxcache.connect(store.target) as cache:
        return len(list(cache.admin.list_leases()))


def until_no_lease(store: ServerProcess) -> None:
    """Wait until it holds none."""
    deadline_s = time.monotonic() + TASK_S
    while lease_count(store):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_what_was_looked_up_is_not_evicted_until_it_is_unlocked(tmp_path: Path) -> None:
    """Many times as much as the store holds goes through it meanwhile; what nobody looked up goes.

    Of two chunks of one look-up one is unlocked at first: the other stays.
    """
    sizes = ("--arena-size-bytes", str(64 << 20), "--ssd-size-bytes", str(4 << 20))
    with ServerProcess(tmp_path / "data", *sizes) as store:
        adapter = CtxcacheL2({"target": store.target, "timeout_s": TASK_S})
        assert adapter.wait_until_linked(LINK_S)
        layout = {0: MemoryLayoutDesc([torch.Size([CHUNK_BYTES])], [torch.uint8])}
        assert stored(adapter, {key_of(number): data_of(number) for number in (1, 2, 3)})
        adapter.submit_lookup_and_lock_task([key_of(1), key_of(3)], layout)
        wait_for(adapter.get_lookup_and_lock_event_fd())
        adapter.submit_unlock([key_of(3)])
        for other in range(1000, 2000, 50):
            assert stored(adapter, {key_of(number): data_of(0) for number in range(other, other + 50)})
        assert loaded(adapter, [key_of(1), key_of(2)]) == [bytes(data_of(1)), None]
        assert lease_count(store)
        adapter.submit_unlock([key_of(1)])
        # When it leaves is the policy's to say, to which each look-up says that it is of use.
        until_no_lease(store)
        adapter.close()


def test_deleted_chunks_are_gone(adapter: CtxcacheL2) -> None:
    """LMCache's own eviction deletes by key, also what is several blocks."""
    for size_bytes in (CHUNK_BYTES, 40 << 20):
        assert stored(adapter, {key: data_of(1, size_bytes) for key in (key_of(1), key_of(2))})
        adapter.delete([key_of(1)])
        assert asked(adapter, [key_of(1), key_of(2)], size_bytes) == [False, True]


def test_another_process_and_another_start_find_them(adapter: CtxcacheL2, store: ServerProcess) -> None:
    """Chunks that were on disk are there after a kill."""
    durable = CtxcacheL2({"target": store.target, "durability": "disk"})
    assert durable.wait_until_linked(LINK_S)
    assert stored(durable, {key_of(1): data_of(1)})
    durable.close()
    store.kill9()
    # The adapter of before answers without it.
    assert asked(adapter, [key_of(1)]) == [False]
    assert loaded(adapter, [key_of(1)]) == [None]
    assert not stored(adapter, {key_of(2): data_of(2)})
    store.start()
    deadline_s = time.monotonic() + 30
    while loaded(adapter, [key_of(1)]) != [bytes(data_of(1))]:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def test_a_store_that_hangs_is_a_miss(adapter: CtxcacheL2, store: ServerProcess) -> None:
    """Every task ends, and the store is used again when it answers."""
    assert stored(adapter, {key_of(1): data_of(1)})
    store.signal(signal.SIGSTOP)
    try:
        assert asked(adapter, [key_of(1)]) == [False]
        assert loaded(adapter, [key_of(1)]) == [None]
        assert not stored(adapter, {key_of(2): data_of(2)})
    finally:
        store.signal(signal.SIGCONT)
    deadline_s = time.monotonic() + 30
    while loaded(adapter, [key_of(1)]) != [bytes(data_of(1))]:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def test_a_look_up_that_is_not_answered_at_once_is_over_later(store: ServerProcess) -> None:
    """LMCache's loop goes on meanwhile, and submits more."""
    adapter = CtxcacheL2({"target": store.target, "timeout_s": TASK_S})
    assert adapter.wait_until_linked(LINK_S)
    assert stored(adapter, {key_of(1): data_of(1)})
    layout = {0: MemoryLayoutDesc([torch.Size([CHUNK_BYTES])], [torch.uint8])}
    store.signal(signal.SIGSTOP)
    try:
        tasks = [adapter.submit_lookup_and_lock_task([key_of(1), key_of(i)], layout) for i in (2, 3)]
        assert [adapter.query_lookup_and_lock_result(task) for task in tasks] == [None, None]
    finally:
        store.signal(signal.SIGCONT)
    found: dict[int, Bitmap] = {}
    while len(found) < len(tasks):
        wait_for(adapter.get_lookup_and_lock_event_fd())
        found |= {i: one for i in tasks if (one := adapter.query_lookup_and_lock_result(i)) is not None}
    assert [(found[i].test(0), found[i].test(1)) for i in tasks] == [(True, False)] * 2
    assert lease_count(store) == 2
    for _ in tasks:
        adapter.submit_unlock([key_of(1)])
    until_no_lease(store)
    adapter.close()


def test_other_weights_find_nothing(store: ServerProcess, tmp_path: Path) -> None:
    """Where LMCache is told where the model's files are, its name alone does not do."""
    found = []
    for name, fill in (("one", b"1"), ("two", b"2")):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(_safetensors(fill))
        adapter = CtxcacheL2({"target": store.target, "model_directory": str(directory)})
        assert adapter.wait_until_linked(LINK_S)
        found.append(asked(adapter, [key_of(1)]))
        assert stored(adapter, {key_of(1): data_of(1)})
        found.append(asked(adapter, [key_of(1)]))
        adapter.close()
    assert found == [[False], [True], [False], [True]]


def _safetensors(fill: bytes) -> bytes:
    return save({"weight": torch.full((4,), float(fill))})


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"targget": "x"}, "adapter_params.targget: not one of"),
        ({"durability": "tape"}, "adapter_params.durability: .* 'memory' or 'disk', not 'tape'"),
        ({"timeout_s": "fast"}, "adapter_params.timeout_s: .* number, not 'fast'"),
        ({"timeout_s": 0}, "adapter_params.timeout_s: .* greater than 0, not 0"),
        ({"ttl_s": float("inf")}, "adapter_params.ttl_s: .* finite number, not inf"),
        ({"target": 7420}, "adapter_params.target: .* string, not 7420"),
        ({"model_directory": "/nowhere"}, "adapter_params.model_directory: /nowhere is no directory"),
    ],
)
def test_bad_settings_are_refused(params: dict[str, Any], message: str) -> None:
    """With the one that is wrong."""
    with pytest.raises(Refused, match=message):
        CtxcacheL2(params)
