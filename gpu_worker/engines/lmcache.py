"""LMCache's chunks in the store: an adapter of its second tier (L2), named as a plugin.

    engine ──► LMCache's host memory (L1) ◄──CtxcacheL2──► store

A chunk has whatever size LMCache gives it; the store's blocks have 16 MiB at most, so that a larger chunk is
several, and is there only where all of them are. Threads carry out what LMCache submits, and say so on its
event descriptors. Where the store does not answer, nothing is found and nothing is stored, and nobody waits
for longer than one call may take.
"""

import hashlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import LookupState
from ctxcache.errors import CacheError
from gpu_worker.engines.link import LinkState, StoreLink
from gpu_worker.engines.settings import Refused, StoreSettings
from gpu_worker.model_spec import digest_checkpoint

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

log = logging.getLogger(__name__)

MOST_BLOCK_BYTES = 16 << 20
THREADS = 2
"""For each of storing and loading; one looks up."""
MOST_STORES = 64
"""Tasks of storing that may wait; more fail, which is a miss later."""
Result = TypeVar("Result")
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class L2Settings(StoreSettings):
    """The fields of `adapter_params`."""

    model_directory: str | None = None
    """The model's files: where it is given, other weights under the same name find nothing."""


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
        """`params`: the fields of L2Settings. Raises Refused."""
        del l1_memory_desc
        super().__init__()
        self._settings = L2Settings.of(params, "adapter_params")
        directory = self._settings.model_directory
        if directory is not None and not Path(directory).is_dir():
            raise Refused(f"adapter_params.model_directory: {directory} is no directory")
        self._link: StoreLink[bytes] = StoreLink(self._settings.connect, self._weights)
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
            return self._stores.submit(lambda: failed, failed)
        return self._stores.submit(lambda: self._store(keys, objects), failed)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Tasks of storing that ended."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: "list[ObjectKey]", group_layout_descs: "dict[int, MemoryLayoutDesc]"
    ) -> int:
        """Look chunks up. Nothing is locked: one that is evicted before its load is a miss then."""
        sizes = [_layout_bytes(group_layout_descs.get(key.object_group_id)) for key in keys]
        return self._lookups.submit(lambda: _bitmap(self._look_up(keys, sizes)), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """A look-up's result, once."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: "list[ObjectKey]") -> None:
        """Nothing: nothing is locked."""

    def submit_load_task(self, keys: "list[ObjectKey]", objects: "list[MemoryObj]") -> int:
        """Load chunks, verified."""
        return self._loads.submit(lambda: _bitmap(self._load(keys, objects)), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """A load's result, once."""
        return self._loads.take(task_id)

    def delete(self, keys: "list[ObjectKey]") -> None:
        """Delete chunks of one block each. Of larger ones the store lets go as of what nobody asks for."""
        used = self._link.use()
        if used is None:
            return
        client, weights = used
        for space, places in _by_space(keys, weights).items():
            self._call(
                lambda space=space, places=places: client.blocks.delete(  # type: ignore[misc]
                    space, [_block_key(keys[i], 1, 0) for i in places]
                )
            )

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
        self._link.close()

    # -- work of the threads ------------------------------------------------------------------------------

    def _store(self, keys: "Sequence[ObjectKey]", objects: "Sequence[MemoryObj]") -> L2StoreResult:
        size_bytes = 0
        used = self._link.use()
        is_good = used is not None
        if used is not None:
            client, weights = used
            for space, places in _by_space(keys, weights).items():
                blocks: dict[bytes, Bytes] = {}
                for i in places:
                    blocks |= _blocks(keys[i], _bytes_of(objects[i]))
                size_bytes += sum(block.nbytes for block in blocks.values())
                is_good = is_good and self._put(client, space, blocks)
        if is_good:
            self._notify_keys_stored(list(keys), [_bytes_of(one).nbytes for one in objects])
        return L2StoreResult(success=is_good, bytes_transferred=size_bytes)

    def _put(self, client: Client, space: BlockSpace, blocks: Mapping[bytes, Bytes]) -> bool:
        settings = self._settings
        return self._call(
            lambda: client.blocks.put(space, blocks, ttl_s=settings.ttl_s, durability=settings.level)
        )

    def _look_up(self, keys: "Sequence[ObjectKey]", sizes: Sequence[int]) -> list[bool]:
        found = [False] * len(keys)
        used = self._link.use()
        if used is None:
            return found
        client, weights = used
        for space, places in _by_space(keys, weights).items():
            names = {i: _block_keys(keys[i], sizes[i]) for i in places}
            wanted = list(itertools.chain.from_iterable(names.values()))

            def ask(space: BlockSpace = space, wanted: list[bytes] = wanted) -> list[bytes]:
                answers = client.blocks.look_up(space, wanted)
                return [key for key, one in zip(wanted, answers, strict=True) if one.state is LookupState.HIT]

            there: set[bytes] = set()
            self._call(lambda ask=ask, there=there: there.update(ask()))  # type: ignore[misc]
            for i, blocks in names.items():
                found[i] = there.issuperset(blocks)
        return found

    def _load(self, keys: "Sequence[ObjectKey]", objects: "Sequence[MemoryObj]") -> list[bool]:
        found = [False] * len(keys)
        used = self._link.use()
        if used is None:
            return found
        client, weights = used
        for space, places in _by_space(keys, weights).items():
            blocks: dict[bytes, Bytes] = {}
            names = {}
            for i in places:
                own = _blocks(keys[i], _bytes_of(objects[i]))
                names[i] = list(own)
                blocks |= own

            there: set[bytes] = set()

            def load(
                space: BlockSpace = space, blocks: dict[bytes, Bytes] = blocks, there: set[bytes] = there
            ) -> None:
                loaded = client.blocks.load(space, list(blocks), list(blocks.values()))
                there.update(key for key, one in zip(blocks, loaded, strict=True) if one is not None)

            self._call(load)
            for i, own_names in names.items():
                found[i] = there.issuperset(own_names)
        self._notify_keys_accessed([key for key, is_found in zip(keys, found, strict=True) if is_found])
        return found

    def _call(self, work: Callable[[], object]) -> bool:
        """Whether a call of the store went well; a failure is told to the link."""
        try:
            work()
        except CacheError as error:
            self._link.failed(error)
            return False
        return True

    # -- the store ----------------------------------------------------------------------------------------

    def _weights(self, client: Client) -> bytes:
        """The digest of the model's files; empty where the settings do not say where they are."""
        del client
        directory = self._settings.model_directory
        return b"" if directory is None else digest_checkpoint(Path(directory)).encode()


def _by_space(keys: "Sequence[ObjectKey]", weights: bytes) -> dict[BlockSpace, list[int]]:
    """The numbers of the keys that are looked for in each space: a model's, and of one salt."""
    spaces: dict[tuple[str, str], list[int]] = {}
    for i, key in enumerate(keys):
        spaces.setdefault((key.model_name, key.cache_salt), []).append(i)
    return {
        BlockSpace(
            hashlib.sha256(b"%s\0%s" % (name.encode(), weights)).digest(),
            layout_tag="lmcache chunk",
            salt=hashlib.sha256(salt.encode()).digest() if salt else b"",
        ): places
        for (name, salt), places in spaces.items()
    }


def _block_key(key: "ObjectKey", count: int, number: int) -> bytes:
    """The key of one of a chunk's blocks: another one where the chunk has another number of them."""
    facts = f"{key.kv_rank} {key.object_group_id} {count} {number} ".encode()
    return hashlib.sha256(facts + key.chunk_hash).digest()


def _block_keys(key: "ObjectKey", size_bytes: int) -> list[bytes]:
    count = max(-(-size_bytes // MOST_BLOCK_BYTES), 1)
    return [_block_key(key, count, number) for number in range(count)]


def _blocks(key: "ObjectKey", data: Bytes) -> dict[bytes, Bytes]:
    """A chunk's blocks, sharing its memory."""
    names = _block_keys(key, data.nbytes)
    return {name: data[i * MOST_BLOCK_BYTES : (i + 1) * MOST_BLOCK_BYTES] for i, name in enumerate(names)}


def _bytes_of(chunk: "MemoryObj") -> Bytes:
    return np.frombuffer(chunk.byte_array, np.uint8)


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
