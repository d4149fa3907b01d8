"""LMCache's chunks in the store: an adapter of its second tier (L2), named as a plugin.

    engine ──► LMCache's host memory (L1) ◄──CtxcacheL2──► store

Threads carry out what LMCache submits, and say so on its event descriptors; a look-up that is answered
within a moment is over when it was submitted. Chunks that it finds in the store's memory are leased
until LMCache unlocks them. Where the store does not answer, nothing is found and nothing is stored, and
nobody waits for longer than one call may take.
"""

import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from ctxcache.client import BlockSpace, Client
from ctxcache.client.block_lookups import HoldingLookUp
from ctxcache.client.types import FoundBlock, LookupState
from ctxcache.errors import InvalidArgument
from gpu_worker.engines.link import LinkState
from gpu_worker.engines.lmcache import (
    MOST_BLOCK_BYTES,
    MOST_STORES,
    THREADS,
    BlockKeys,
    Bytes,
    ChunkSettings,
    Weights,
    bytes_of,
    cut,
    space_of,
)

if TYPE_CHECKING:
    import torch
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryObj

    from ctxcache.client.access import Hold

log = logging.getLogger(__name__)

START_S = 2.0
"""How long LMCache's start waits for the store."""
LOCK_S = 60.0
"""How long a looked-up chunk is held at most."""
MOST_LOCKS = 256
"""Look-ups whose chunks are held. With one more the oldest look-up's chunks are let go."""
MOST_CHUNK_BYTES = 1 << 30
"""A larger chunk counts as missing: the names of all its blocks, in each way, would take too long to make."""
MOST_GROUPS = 4096
"""Groups of chunks, by model and rank, whose layouts are known."""
SOON_S = 0.001
"""How long LMCache's loop itself waits for a look-up's answer: most take less than a change of threads."""
TAG = "lmcache chunk"
Ways = list[list[bytes]]
"""The keys of a chunk's blocks, in each way in which the chunk may be stored."""
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
        """Tasks that were submitted and have not ended."""
        return self._waiting_count

    def submit(self, work: Callable[[], Result], otherwise: Result) -> int:
        """Begin a task, whose result is `otherwise` if it fails. Returns its number."""
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

    def ended(self, result: Result) -> int:
        """The number of a task that is over already."""
        number = next(self._numbers)
        with self._lock:
            self._tell(number, result)
        return number

    def take(self, number: int) -> Result | None:
        """The result of a task, once; None while it goes on."""
        with self._lock:
            return self._ended.pop(number, None)

    def take_all(self) -> dict[int, Result]:
        """The results that were not taken."""
        with self._lock:
            ended, self._ended = self._ended, {}
            return ended

    def close(self) -> None:
        """Wait for running tasks, drop waiting ones, close the descriptor."""
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            # The lock is held: a task that ends now must not write to a closed descriptor, or another's by
            # then.
            self._is_closed = True
            os.close(self.descriptor)

    def _end(self, number: int, done: "Future[Result]", otherwise: Result) -> None:
        is_result = not done.cancelled() and done.exception() is None
        if not done.cancelled() and (error := done.exception()) is not None:
            # The task ends all the same, for LMCache waits for it.
            log.error("a task of the context store", exc_info=error)
        with self._lock:
            self._waiting_count -= 1
            self._tell(number, done.result() if is_result else otherwise)

    def _tell(self, number: int, result: Result) -> None:
        self._ended[number] = result
        if not self._is_closed:
            os.eventfd_write(self.descriptor, 1)


class CtxcacheL2(L2AdapterInterface):  # type: ignore[misc]  # untyped package
    """The adapter. Thread-safe. Only the start, `close` and, for SOON_S, a look-up wait."""

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: object = None) -> None:
        """`params`: the fields of ChunkSettings. Raises Refused."""
        del l1_memory_desc
        super().__init__()
        self._settings = ChunkSettings.of(params, "adapter_params")
        self._link = self._settings.link()
        self._locks, self._layouts = _Locks(), _Layouts()
        self._stores: _Tasks[L2StoreResult] = _Tasks("store", THREADS)
        self._lookups: _Tasks[Bitmap] = _Tasks("lookup", 1)
        self._loads: _Tasks[Bitmap] = _Tasks("load", THREADS)
        # LMCache asks at once, and does not ask again for chunks that it did not find.
        self._link.wait(START_S)

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
            # A refused task has a number too, since LMCache waits for one.
            return self._stores.submit(lambda: failed, failed)
        return self._stores.submit(lambda: self._store(keys, objects), failed)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Tasks of storing that ended."""
        return self._stores.take_all()

    def submit_lookup_and_lock_task(
        self, keys: "list[ObjectKey]", group_layout_descs: "dict[int, MemoryLayoutDesc]"
    ) -> int:
        """Look chunks up, and hold those in the store's memory until they are unlocked."""
        nothing = Bitmap(len(keys))
        names = self._link.tried(
            lambda: self._layouts.names(keys, group_layout_descs), list[Ways]([] for _ in keys)
        )
        begun = self._link.call(partial(self._begin_to_look_up, keys, names), None)
        if begun is None:
            return self._lookups.submit(lambda: _bitmap(self._look_up(keys, names)), nothing)

        def looked() -> Bitmap:
            return _bitmap(self._found(keys, names, *begun.result()))

        def looked_soon() -> Bitmap | None:
            return looked() if begun.is_over(SOON_S) else None

        # Waiting look-ups mean that the store is slow.
        soon = None if self._lookups.waiting_count else self._link.tried(looked_soon, nothing)
        if soon is not None:
            return self._lookups.ended(soon)
        return self._lookups.submit(lambda: self._link.tried(looked, nothing), nothing)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """A look-up's result, once."""
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: "list[ObjectKey]") -> None:
        """Give chunks back."""
        self._locks.give_back(keys)

    def submit_load_task(self, keys: "list[ObjectKey]", objects: "list[MemoryObj]") -> int:
        """Load chunks, verified."""
        return self._loads.submit(lambda: _bitmap(self._load(keys, objects)), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """A load's result, once."""
        return self._loads.take(task_id)

    def delete(self, keys: "list[ObjectKey]") -> None:
        """Delete chunks, of groups of which this process has stored or loaded one.

        The layout of other groups is not known. The store evicts their chunks in time.
        """

        def delete(client: Client, weights: Weights) -> None:
            names = self._layouts.names(keys, {})
            for space, places in _by_space(keys, weights).items():
                client.blocks.delete(space, _names_in([names[i] for i in places]))

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

        def store(client: Client, weights: Weights) -> int:
            size_bytes = 0
            for name in {key.model_name for key in keys}:
                weights.register(client, name)
            for space, places in _by_space(keys, weights).items():
                blocks = _merged(self._blocks(keys[i], objects[i]) for i in places)
                client.blocks.put(space, blocks, ttl_s=settings.ttl_s, durability=settings.level)
                size_bytes += sum(block.nbytes for block in blocks.values())
            return size_bytes

        size_bytes = self._link.call(store, None)
        if size_bytes is None:
            return L2StoreResult(success=False, bytes_transferred=0)
        self._notify_keys_stored(list(keys), [bytes_of(one).nbytes for one in objects])
        return L2StoreResult(success=True, bytes_transferred=size_bytes)

    def _blocks(self, key: "ObjectKey", chunk: "MemoryObj") -> dict[bytes, Bytes]:
        """A chunk's blocks, sharing its memory."""
        data = bytes_of(chunk)
        layout = self._layouts.of_chunk(key, _Layout.of_chunk(chunk, data.nbytes))
        return cut(self._layouts.names_of(key, layout), data)

    def _begin_to_look_up(
        self, keys: "Sequence[ObjectKey]", names: Sequence[Ways], client: Client, weights: Weights
    ) -> HoldingLookUp | None:
        """A look-up of chunks of one space; None where they are of several, or it would have to wait."""
        spaces, wanted = _by_space(keys, weights), _names_in(names)
        if len(spaces) != 1 or not wanted:
            return None
        [space] = spaces
        return client.blocks.begin_to_look_up_and_hold(space, wanted, ttl_s=LOCK_S)

    def _look_up(self, keys: "Sequence[ObjectKey]", names: Sequence[Ways]) -> list[bool]:
        def look_up(client: Client, weights: Weights) -> list[bool]:
            are_there = [False] * len(keys)
            for space, places in _by_space(keys, weights).items():
                some, own = [keys[i] for i in places], [names[i] for i in places]
                wanted = _names_in(own)
                # Chunks of no known layout are not there.
                if wanted:
                    answered = client.blocks.look_up_and_hold(space, wanted, ttl_s=LOCK_S)
                    for i, is_found in zip(places, self._found(some, own, *answered), strict=True):
                        are_there[i] = is_found
            return are_there

        return self._link.call(look_up, [False] * len(keys))

    def _found(
        self,
        keys: "Sequence[ObjectKey]",
        names: Sequence[Ways],
        answered: Sequence[FoundBlock],
        holds: "list[Hold]",
    ) -> list[bool]:
        """Whether each chunk is there, by the answers for its blocks in this order. The holds are kept."""
        blocks = iter([one.state is LookupState.HIT for one in answered])
        # All blocks of each chunk are read, also behind the first missing one.
        found = [True in [False not in [next(blocks) for _ in way] for way in ways] for ways in names]
        self._locks.hold(holds, [key for key, is_found in zip(keys, found, strict=True) if is_found])
        return found

    def _load(self, keys: "Sequence[ObjectKey]", objects: "Sequence[MemoryObj]") -> list[bool]:
        def load(client: Client, weights: Weights) -> list[bool]:
            are_loaded = [False] * len(keys)
            for space, places in _by_space(keys, weights).items():
                # Each chunk is loaded by itself, also where two have one key: each has memory of its own.
                own = [
                    (i, key, block)
                    for i in places
                    for key, block in self._blocks(keys[i], objects[i]).items()
                ]
                loaded = _loaded(client, space, [(key, block) for _, key, block in own])
                lacking = {i for (i, _, _), one in zip(own, loaded, strict=True) if one is None}
                for i in places:
                    are_loaded[i] = i not in lacking
            return are_loaded

        are_loaded = self._link.call(load, [False] * len(keys))
        self._notify_keys_accessed([key for key, is_found in zip(keys, are_loaded, strict=True) if is_found])
        return are_loaded


# LMCache's keys say nothing of element types: two engines of one model, one of bfloat16 and one of float16,
# have the same keys for chunks of the same size. So a chunk's shapes and types are part of its blocks' keys:
#
#     store, load    those of LMCache's memory for the chunk
#     look-up        what LMCache says of the group; where it says nothing, those of the memory of the group
#                    that it stored or loaded last
#
# What LMCache compresses is bytes in memory, of a size that no look-up says. Its blocks' keys have the shapes
# and types of what was compressed, which look-ups say, and its count of blocks: look-ups ask for any.
class _Layout(NamedTuple):
    """How a chunk lies in LMCache's memory."""

    facts: str
    size_bytes: int
    is_plain: bool
    """Whether the chunk is plain bytes, as LMCache's compressed chunks are."""
    is_compressed: bool = False
    """Whether `facts` describe the chunk before compression."""

    @classmethod
    def of_chunk(cls, chunk: "MemoryObj", size_bytes: int) -> Self:
        """The layout of a chunk's memory."""
        try:
            shapes, types = chunk.get_shapes(), chunk.get_dtypes()
        # Memory of one tensor has no lists.
        except AssertionError:
            shapes, types = [chunk.get_shape()], [chunk.get_dtype()]
        return cls(_facts(shapes, types), size_bytes, _is_plain(shapes, types))

    @classmethod
    def of_group(cls, desc: "MemoryLayoutDesc") -> Self:
        """The layout that LMCache tells of a group."""
        sizes = [
            shape.numel() * dtype.itemsize for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True)
        ]
        plain = _is_plain(desc.shapes, desc.dtypes)
        return cls(_facts(desc.shapes, desc.dtypes), sum(sizes), plain)

    def compressed(self, size_bytes: int) -> "_Layout":
        """The layout of a chunk that was compressed to so many bytes."""
        # Chunks of as many blocks are alike, whatever their sizes.
        count = max(-(-size_bytes // MOST_BLOCK_BYTES), 1)
        return _Layout(self.facts, count * MOST_BLOCK_BYTES, is_plain=True, is_compressed=True)


def _facts(shapes: "Sequence[torch.Size]", types: "Sequence[torch.dtype | None]") -> str:
    return str([(str(dtype), *shape) for shape, dtype in zip(shapes, types, strict=True)])


def _is_plain(shapes: "Sequence[torch.Size]", types: "Sequence[torch.dtype | None]") -> bool:
    return [(str(dtype), len(shape)) for shape, dtype in zip(shapes, types, strict=True)] == [
        ("torch.uint8", 1)
    ]


class _Layouts:
    """The layout of each group's chunks: as look-ups say, and of the last in memory. Thread-safe."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int, int], _Layout] = {}
        """Of groups that are more than bytes."""
        self._seen: dict[tuple[str, int, int], _Layout] = {}
        self._names: dict[tuple[int, int, _Layout], BlockKeys] = {}
        """By rank and group."""

    def of_chunk(self, key: "ObjectKey", layout: _Layout) -> _Layout:
        """The layout of a chunk in memory: the compressed one, where its group has shapes and types."""
        told = self._told.get(_group(key))
        if told is not None and layout.is_plain:
            layout = told.compressed(layout.size_bytes)
        _remember(self._seen, key, layout)
        return layout

    def names(self, keys: "Sequence[ObjectKey]", descs: "Mapping[int, MemoryLayoutDesc]") -> list[Ways]:
        """The keys of each chunk's blocks; empty where its group is not known."""
        given_of = {group: _Layout.of_group(desc) for group, desc in descs.items() if desc.shapes}
        return [self._ways(key, given_of.get(key.object_group_id)) for key in keys]

    def _ways(self, key: "ObjectKey", given: _Layout | None) -> Ways:
        if given is not None and not 0 <= given.size_bytes <= MOST_CHUNK_BYTES:
            return []
        if given is not None and given.is_plain:
            return [self.names_of(key, given)]
        if given is not None:
            _remember(self._told, key, given)
        told, seen = self._told.get(_group(key)), self._seen.get(_group(key))
        if told is None or (seen is not None and not seen.is_plain):
            layout = given or seen
            return [] if layout is None else [self.names_of(key, layout)]
        # A compressed chunk has at most one block more than before.
        sizes = range(MOST_BLOCK_BYTES, told.size_bytes + 2 * MOST_BLOCK_BYTES, MOST_BLOCK_BYTES)
        layouts = [told.compressed(size_bytes) for size_bytes in sizes]
        is_known = seen is not None and seen.is_compressed
        return [self.names_of(key, layout) for layout in (layouts if is_known else [told, *layouts])]

    def names_of(self, key: "ObjectKey", layout: _Layout) -> list[bytes]:
        """The keys of the blocks of a chunk of this layout."""
        kind = key.kv_rank, key.object_group_id, layout
        names = self._names.get(kind)
        if names is None:
            if len(self._names) >= MOST_GROUPS:
                self._names.clear()
            compressed = "compressed " if layout.is_compressed else ""
            facts = f"{key.kv_rank} {key.object_group_id} {compressed}{layout.facts}"
            names = self._names[kind] = BlockKeys(facts, layout.size_bytes)
        return names.of(key.chunk_hash)


def _remember(layouts: dict[tuple[str, int, int], _Layout], key: "ObjectKey", layout: _Layout) -> None:
    if len(layouts) >= MOST_GROUPS:
        layouts.clear()
    layouts[_group(key)] = layout


def _group(key: "ObjectKey") -> tuple[str, int, int]:
    return key.model_name, key.kv_rank, key.object_group_id


class _Locks:
    """Leases of chunks that were looked up, until each is unlocked, or `LOCK_S` are over. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Over what follows. Leases are released without waiting."""
        self._held: list[tuple[Counter[ObjectKey], list[Hold]]] = []
        """Of each look-up the keys that are still to be unlocked, and what holds them; the oldest first."""

    def hold(self, holds: "list[Hold]", keys: "Sequence[ObjectKey]") -> None:
        """Keep a look-up's holds for the chunks of `keys`, until they are unlocked."""
        with self._lock:
            # A hold may be of no whole chunk: half of a chunk may be there.
            if not keys:
                _release(holds)
            elif holds:
                self._held.append((Counter(keys), holds))
            while len(self._held) > MOST_LOCKS:
                # The oldest look-up is the likeliest to be out of use.
                _release(self._held.pop(0)[1])

    def give_back(self, keys: "Sequence[ObjectKey]") -> None:
        """End one look-up's hold of each of these chunks."""
        with self._lock:
            left = Counter(keys)
            # The oldest look-up comes first: two look-ups of a chunk hold it twice, and each unlock ends one.
            for waiting, holds in self._held:
                given = waiting & left
                waiting.subtract(given)
                left -= given
                if not waiting.total():
                    _release(holds)
                if not left:
                    break
            self._held = [one for one in self._held if one[0].total()]

    def close(self) -> None:
        """Release all leases."""
        with self._lock:
            for _, holds in self._held:
                _release(holds)
            self._held.clear()


def _release(holds: "list[Hold]") -> None:
    for hold in holds:
        hold.release_soon()


def _by_space(keys: "Sequence[ObjectKey]", weights: Weights) -> dict[BlockSpace, list[int]]:
    """The numbers of the keys of each space. A space is of one model and one salt."""
    spaces: dict[tuple[str, str], list[int]] = {}
    for i, key in enumerate(keys):
        spaces.setdefault((key.model_name, key.cache_salt), []).append(i)
    return {space_of(name, weights, tag=TAG, salt=salt): places for (name, salt), places in spaces.items()}


def _names_in(names: Sequence[Ways]) -> list[bytes]:
    return [name for ways in names for way in ways for name in way]


def _loaded(client: Client, space: BlockSpace, blocks: "Sequence[tuple[bytes, Bytes]]") -> list[Any]:
    """Load blocks; None for each that is not there, or not of its size."""
    keys, memory = [key for key, _ in blocks], [block for _, block in blocks]
    try:
        return list(client.blocks.load(space, keys, memory))
    except InvalidArgument:
        # One block was compressed to another size: the others are loaded.
        found = client.blocks.look_up(space, keys)
    fitting = [i for i, answer in enumerate(found) if answer.size_bytes == memory[i].nbytes]
    loaded: list[Any] = [None] * len(keys)
    some = client.blocks.load(space, [keys[i] for i in fitting], [memory[i] for i in fitting])
    for i, array in zip(fitting, some, strict=True):
        loaded[i] = array
    return loaded


def _merged(several: Iterable[Mapping[bytes, Bytes]]) -> dict[bytes, Bytes]:
    return {key: block for blocks in several for key, block in blocks.items()}


def _bitmap(found: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(found))
    for i, is_found in enumerate(found):
        if is_found:
            bitmap.set(i)
    return bitmap
