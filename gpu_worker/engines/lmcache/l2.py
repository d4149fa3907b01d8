"""LMCache's chunks in the store: an adapter of its second tier (L2), named as a plugin.

    engine ──► LMCache's host memory (L1) ◄──CtxcacheL2──► store

Threads carry out what LMCache submits, and say so on its event descriptors. Chunks that a look-up finds in
the store's memory are leased until LMCache unlocks them. Where the store does not answer, nothing is found
and nothing is stored, and nobody waits for longer than one call may take.
"""

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from ctxcache.client import BlockSpace, Client
from ctxcache.client.blocks import LeasedBlocks
from ctxcache.client.types import LookupState
from ctxcache.errors import CapacityExceeded, InvalidArgument, TooManyRequests
from gpu_worker.engines.link import LinkState
from gpu_worker.engines.lmcache import (
    MOST_STORES,
    THREADS,
    Bytes,
    ChunkSettings,
    block_keys,
    bytes_of,
    cut,
    space_of,
)

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

log = logging.getLogger(__name__)

LOCK_S = 60.0
"""How long a chunk that was looked up is held at most."""
MOST_LOCKS = 256
"""Look-ups whose chunks are held; beyond, the oldest one's are let go."""
TAG = "lmcache chunk"
Result = TypeVar("Result")


# One task, between LMCache's loop and a thread:
#
#     loop      submit ──► number                       eventfd readable ──► take(number)
#     thread               work ──► _ended[number] ──► eventfd_write
#
# Every number is answered, by `otherwise` where work fails: LMCache waits for each.
class _Tasks(Generic[Result]):
    """Tasks of one sort: carried out by threads, their ends told by an event descriptor. Thread-safe."""

    def __init__(self, name: str, thread_count: int) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = ThreadPoolExecutor(thread_count, f"ctxcache-lmcache-{name}")
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting_count = 0
        self._ended: dict[int, Result] = {}
        self._is_closed = False

    @property
    def waiting_count(self) -> int:
        """Tasks that were submitted and did not end."""
        return self._waiting_count

    def submit(self, work: Callable[[], Result], otherwise: Result) -> int:
        """Begin a task, whose result is `otherwise` if it fails; its number."""
        number = next(self._numbers)
        with self._lock:
            self._waiting_count += 1
        try:
            future = self._threads.submit(work)
        # The pool is closed: the task ends at once, with nothing found.
        except RuntimeError:
            future = Future()
            future.set_result(otherwise)
        future.add_done_callback(lambda done: self._end(number, done, otherwise))
        return number

    def take(self, number: int) -> Result | None:
        """The result of a task, once; None while it goes on."""
        with self._lock:
            return self._ended.pop(number, None)

    def take_all(self) -> dict[int, Result]:
        """The results that nobody has taken."""
        with self._lock:
            ended, self._ended = self._ended, {}
            return ended

    def close(self) -> None:
        """Wait for what runs, leave out what waits, close the descriptor."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            # Under the lock: a task that ends now must not write
            # to a descriptor that is closed, or another's by then.
            self._is_closed = True
            os.close(self.descriptor)

    def _end(self, number: int, done: "Future[Result]", otherwise: Result) -> None:
        is_result = not done.cancelled() and done.exception() is None
        if not done.cancelled() and (error := done.exception()) is not None:
            # The task has to end: LMCache waits for it.
            log.error("a task of the context store", exc_info=error)
        with self._lock:
            self._waiting_count -= 1
            self._ended[number] = done.result() if is_result else otherwise
            if not self._is_closed:
                os.eventfd_write(self.descriptor, 1)


class CtxcacheL2(L2AdapterInterface):  # type: ignore[misc]  # untyped package
    """The adapter. Thread-safe; nothing but `close` waits."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """`params`: the fields of ChunkSettings. Raises Refused."""
        del l1_memory_desc
        super().__init__()
        self._settings = ChunkSettings.of(params, "adapter_params")
        self._link = self._settings.link()
        self._locks = _Locks()
        self._stores: _Tasks[L2StoreResult] = _Tasks("store", THREADS)
        self._lookups: _Tasks[Bitmap] = _Tasks("lookup", 1)
        self._loads: _Tasks[Bitmap] = _Tasks("load", THREADS)

    # -- events -------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        """Signalled when storing ends."""
        return self._stores.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        """Signalled when a look-up ends."""
        return self._lookups.descriptor

    def get_load_event_fd(self) -> int:
        """Signalled when a load ends."""
        return self._loads.descriptor

    # -- tasks --------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: "list[ObjectKey]", objects: "list[MemoryObj]") -> int:
        """Store chunks."""
        failed = L2StoreResult(success=False, bytes_transferred=0)
        if self._stores.waiting_count >= MOST_STORES:
            # A number all the same, since LMCache waits for one.
            return self._stores.submit(lambda: failed, failed)
        return self._stores.submit(lambda: self._store(keys, objects), failed)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Tasks of storing that ended."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: "list[ObjectKey]", group_layout_descs: "dict[int, MemoryLayoutDesc]"
    ) -> int:
        """Look chunks up, and hold those in the store's memory until they are unlocked."""
        # The size gives the number of blocks, and with it their keys.
        sizes = [_layout_bytes(group_layout_descs.get(key.object_group_id)) for key in keys]
        return self._lookups.submit(lambda: _bitmap(self._look_up(keys, sizes)), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """A look-up's result, once."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: "list[ObjectKey]") -> None:
        """Let chunks go."""
        self._locks.give_back(keys)

    def submit_load_task(self, keys: "list[ObjectKey]", objects: "list[MemoryObj]") -> int:
        """Load chunks, verified."""
        return self._loads.submit(lambda: _bitmap(self._load(keys, objects)), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """A load's result, once."""
        return self._loads.take(task_id)

    def delete(self, keys: "list[ObjectKey]") -> None:
        """Delete chunks of one block each. Of larger ones the store lets go as of what nobody asks for."""

        def delete(client: Client, weights: bytes) -> None:
            for space, places in _by_space(keys, weights).items():
                client.blocks.delete(space, [_block_keys(keys[i], 1)[0] for i in places])

        self._link.call(delete, None)

    def report_status(self) -> dict[str, Any]:
        """Whether the store can be used."""
        return {"is_healthy": self._link.state is LinkState.READY, "link": self._link.state.value}

    def wait_until_linked(self, timeout_s: float) -> bool:
        """Wait until the store can be used, or never will be, or the time is over; whether it can be."""
        return self._link.wait(timeout_s) is LinkState.READY

    def close(self) -> None:
        """End threads, descriptors, and the client."""
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._locks.close()
        self._link.close()

    # -- work of the threads ------------------------------------------------------------------------------

    def _store(self, keys: "Sequence[ObjectKey]", objects: "Sequence[MemoryObj]") -> L2StoreResult:
        settings = self._settings

        def store(client: Client, weights: bytes) -> int:
            size_bytes = 0
            for space, places in _by_space(keys, weights).items():
                blocks = _merged(_blocks(keys[i], objects[i]) for i in places)
                client.blocks.put(space, blocks, ttl_s=settings.ttl_s, durability=settings.level)
                size_bytes += sum(block.nbytes for block in blocks.values())
            return size_bytes

        size_bytes = self._link.call(store, None)
        if size_bytes is None:
            return L2StoreResult(success=False, bytes_transferred=0)
        self._notify_keys_stored(list(keys), [bytes_of(one).nbytes for one in objects])
        return L2StoreResult(success=True, bytes_transferred=size_bytes)

    def _look_up(self, keys: "Sequence[ObjectKey]", sizes: Sequence[int]) -> list[bool]:
        def look_up(client: Client, weights: bytes) -> list[bool]:
            found = [False] * len(keys)
            for space, places in _by_space(keys, weights).items():
                names = {i: _block_keys(keys[i], sizes[i]) for i in places}
                wanted = list(itertools.chain.from_iterable(names.values()))
                answers = dict(zip(wanted, client.blocks.look_up(space, wanted), strict=True))
                there = {key for key, one in answers.items() if one.state is LookupState.HIT}
                for i, blocks in names.items():
                    found[i] = there.issuperset(blocks)
                held = [i for i in places if found[i] and all(answers[key].is_in_dram for key in names[i])]
                blocks = [key for i in held for key in names[i]]
                self._locks.hold(client, space, blocks, [keys[i] for i in held])
            return found

        return self._link.call(look_up, [False] * len(keys))

    def _load(self, keys: "Sequence[ObjectKey]", objects: "Sequence[MemoryObj]") -> list[bool]:
        def load(client: Client, weights: bytes) -> list[bool]:
            found = [False] * len(keys)
            for space, places in _by_space(keys, weights).items():
                # Of each chunk its own, also where two have one key: each is memory that is handed out.
                own = [(i, key, block) for i in places for key, block in _blocks(keys[i], objects[i]).items()]
                loaded = client.blocks.load(space, [key for _, key, _ in own], [block for _, _, block in own])
                lacking = {i for (i, _, _), one in zip(own, loaded, strict=True) if one is None}
                for i in places:
                    found[i] = i not in lacking
            return found

        found = self._link.call(load, [False] * len(keys))
        self._notify_keys_accessed([key for key, is_found in zip(keys, found, strict=True) if is_found])
        return found


class _Locks:
    """Leases of chunks that were looked up, until each is unlocked, or `LOCK_S` are over. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Over what follows. Leases are released without waiting."""
        self._held: dict[LeasedBlocks, list[ObjectKey]] = {}
        """Keys that are still to be unlocked, oldest lease first."""

    def hold(
        self, client: Client, space: BlockSpace, blocks: Sequence[bytes], keys: "Sequence[ObjectKey]"
    ) -> None:
        """Lease blocks for the chunks of `keys`, where the store has room for leases, and is on this host."""
        if not blocks:
            return
        try:
            lease = client.blocks.lease(space, blocks, ttl_s=LOCK_S)
        except (CapacityExceeded, InvalidArgument, TooManyRequests):
            # They were found all the same: one that is evicted before its load is a miss then.
            return
        with self._lock:
            self._held[lease] = list(keys)
            while len(self._held) > MOST_LOCKS:
                oldest = next(iter(self._held))
                del self._held[oldest]
                # The oldest look-up is likeliest to be of no use any more.
                oldest.release()

    def give_back(self, keys: "Sequence[ObjectKey]") -> None:
        """One look-up of each of these needs it no more."""
        with self._lock:
            for key in keys:
                # The oldest one: two look-ups of a chunk hold it twice, and each unlock lets one go.
                lease = next((lease for lease, held in self._held.items() if key in held), None)
                if lease is None:
                    continue
                self._held[lease].remove(key)
                if not self._held[lease]:
                    del self._held[lease]
                    lease.release()

    def close(self) -> None:
        """Release all."""
        with self._lock:
            for lease in self._held:
                lease.release()
            self._held.clear()


def _by_space(keys: "Sequence[ObjectKey]", weights: bytes) -> dict[BlockSpace, list[int]]:
    """The numbers of the keys that are looked for in each space: a model's, and of one salt."""
    spaces: dict[tuple[str, str], list[int]] = {}
    for i, key in enumerate(keys):
        spaces.setdefault((key.model_name, key.cache_salt), []).append(i)
    return {space_of(name, weights, tag=TAG, salt=salt): places for (name, salt), places in spaces.items()}


def _block_keys(key: "ObjectKey", size_bytes: int) -> list[bytes]:
    return block_keys(f"{key.kv_rank} {key.object_group_id}", key.chunk_hash, size_bytes)


def _blocks(key: "ObjectKey", chunk: "MemoryObj") -> dict[bytes, Bytes]:
    """A chunk's blocks, sharing its memory."""
    data = bytes_of(chunk)
    return cut(_block_keys(key, data.nbytes), data)


def _merged(several: Iterable[Mapping[bytes, Bytes]]) -> dict[bytes, Bytes]:
    return {key: block for blocks in several for key, block in blocks.items()}


def _layout_bytes(layout: "MemoryLayoutDesc | None") -> int:
    """The size of a chunk by what LMCache says of its group."""
    if layout is None:
        return 0
    return sum(
        shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )


def _bitmap(found: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(found))
    for i, is_found in enumerate(found):
        if is_found:
            bitmap.set(i)
    return bitmap
