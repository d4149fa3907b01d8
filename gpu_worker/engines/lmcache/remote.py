"""LMCache's remote storage on the store: for an engine that has LMCache inside, without LMCache's server.

    engine ──► LMCache's host memory ◄──RemoteConnector──► store

A chunk is its blocks, and a small one at their end, its head, that says how it is shaped: each continues the
one before, so that the store keeps a head no longer than what it is the head of. LMCache's loop waits for
nothing: threads ask the store. Where it does not answer, nothing is found and nothing is stored.
"""

import asyncio
import builtins
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from ctxcache.client import BlockSpace, Client
from ctxcache.client.types import LookupState
from gpu_worker.engines.link import LinkState
from gpu_worker.engines.lmcache import (
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
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.memory_management import MemoryObj

log = logging.getLogger(__name__)

FACTORY = ("module_path", "class_name")
"""Settings of the plugin that LMCache itself reads."""
# A chunk in the store, each block continuing the one before it:
#
#     block 0 ◄── block 1 ◄── head: shapes, types, format, length
#
# Look-ups ask for heads alone. A block that is evicted takes what continues it along, so that a head is a
# promise of all blocks before it.
HEAD = b"head"
Result = TypeVar("Result")


class CtxcacheRemote(ConnectorAdapter):  # type: ignore[misc]  # untyped package
    """Makes the connector, for the plugin named `ctxcache`, or `ctxcache.` and more."""

    def __init__(self) -> None:
        # LMCache 0.5.6 finds a plugin's adapter by this scheme.
        super().__init__("plugin://ctxcache")

    def create_connector(self, context: ConnectorContext) -> "CtxcacheConnector":
        """See ConnectorAdapter. Raises Refused."""
        return CtxcacheConnector(context)


class CtxcacheConnector(RemoteConnector):  # type: ignore[misc]  # untyped package
    """The connector. Thread-safe; its coroutines wait for `timeout_s` a call at most, and raise nothing."""

    def __init__(self, context: ConnectorContext) -> None:
        """Settings are those of the plugin in LMCache's `extra_config`. Raises Refused."""
        super().__init__(context.config, context.metadata)
        where = f"remote_storage_plugin.{context.plugin_name}"
        given = {
            name.removeprefix(f"{where}."): value
            for name, value in (context.config.extra_config or {}).items()
            if name.startswith(f"{where}.")
        }
        self._settings = ChunkSettings.of({k: v for k, v in given.items() if k not in FACTORY}, where)
        self._model_name = str(context.metadata.model_name)
        # Chunks are loaded into LMCache's own memory, which it then hands out.
        self._memory = context.local_cpu_backend
        self._link = self._settings.link()
        self._threads = ThreadPoolExecutor(2 * THREADS, "ctxcache-lmcache-remote")
        self._waiting_stores = 0
        """Owned by LMCache's loop."""

    # -- is it there ----------------------------------------------------------------------------------

    def exists_sync(self, key: "CacheEngineKey") -> bool:
        """Whether a chunk is there."""
        return self.batched_contains([key]) == 1

    async def exists(self, key: "CacheEngineKey") -> bool:
        """Whether a chunk is there."""
        return await self._in_thread(lambda: self.exists_sync(key))

    def support_batched_contains(self) -> bool:
        """It does."""
        return True

    def batched_contains(self, keys: "Sequence[CacheEngineKey]") -> int:
        """How many of the first chunks are there."""

        def look_up(client: Client, weights: Weights) -> int:
            found = client.blocks.look_up(self._space(weights), [_head(key) for key in keys])
            are_there = [one.state is LookupState.HIT for one in found]
            return are_there.index(False) if False in are_there else len(are_there)

        return self._link.call(look_up, 0)

    async def batched_async_contains(
        self,
        lookup_id: str,
        keys: "Sequence[CacheEngineKey]",
        pin: bool = False,  # noqa: FBT001, FBT002  LMCache's signature
    ) -> int:
        """How many of the first chunks are there. LMCache unpins no remote chunk, so that none is pinned."""
        del lookup_id, pin
        return await self._in_thread(lambda: self.batched_contains(keys))

    # -- chunks ---------------------------------------------------------------------------------------

    async def get(self, key: "CacheEngineKey") -> "MemoryObj | None":
        """Load a chunk, verified; None where it is not there whole."""
        (chunk,) = await self.batched_get([key])
        return chunk

    def support_batched_get(self) -> bool:
        """It does."""
        return True

    async def batched_get(self, keys: "Sequence[CacheEngineKey]") -> "Sequence[MemoryObj | None]":
        """Load chunks; None for each that is not there whole."""
        return await self._in_thread(lambda: self._load(keys))

    async def put(self, key: "CacheEngineKey", memory_obj: "MemoryObj") -> None:
        """Store a chunk."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        """It does."""
        return True

    async def batched_put(self, keys: "Sequence[CacheEngineKey]", memory_objs: "Sequence[MemoryObj]") -> None:
        """Store chunks; where too many wait, or the store does not take them, they are not there later."""
        if self._waiting_stores >= MOST_STORES:
            log.debug("%d chunks are not stored: %d puts wait", len(keys), self._waiting_stores)
            return
        # Each holds LMCache's memory until it ends: behind a slow store they would take all of it.
        self._waiting_stores += 1
        try:
            await self._in_thread(lambda: self._store(keys, memory_objs))
        finally:
            self._waiting_stores -= 1

    def remove_sync(self, key: "CacheEngineKey") -> bool:
        """Delete a chunk's head, without which it is not there; whether it was."""

        def delete(client: Client, weights: Weights) -> bool:
            return client.blocks.delete(self._space(weights), [_head(key)]) == 1

        return self._link.call(delete, otherwise=False)

    # -- the rest -------------------------------------------------------------------------------------

    def support_ping(self) -> bool:
        """It does."""
        return True

    async def ping(self) -> int:
        """0 while the store can be used."""
        return 0 if self._link.state is LinkState.READY else 1

    def wait_until_linked(self, timeout_s: float) -> bool:
        """Wait until the store can be used, or never will be, or the time is over; whether it can be."""
        return self._link.wait(timeout_s) is LinkState.READY

    async def close(self) -> None:
        """Wait for what runs, leave out what waits, end the client."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._link.close()

    async def list(self) -> "builtins.list[str]":
        """Nothing: keys are kept as hashes."""
        return []

    # -- work of the threads --------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _store(self, keys: "Sequence[CacheEngineKey]", chunks: "Sequence[MemoryObj]") -> None:
        settings = self._settings

        def put(client: Client, weights: Weights) -> None:
            weights.register(client, self._model_name)
            blocks: dict[bytes, Bytes] = {}
            parents: dict[bytes, bytes] = {}
            for key, chunk in zip(keys, chunks, strict=True):
                data = bytes_of(chunk)
                shape = RemoteMetadata(
                    data.nbytes, chunk.get_shapes(), chunk.get_dtypes(), chunk.get_memory_format()
                )
                head = np.frombuffer(shape.serialize(), np.uint8)
                own = cut(_block_keys(key, data.nbytes), data) | {_head(key): head}
                # `own` is in order: blocks first, the head last.
                parents |= {child: parent for parent, child in pairwise(own)}
                blocks |= own
            client.blocks.put(
                self._space(weights),
                blocks,
                parents=parents,
                ttl_s=settings.ttl_s,
                durability=settings.level,
            )

        self._link.call(put, None)

    def _load(self, keys: "Sequence[CacheEngineKey]") -> "Sequence[MemoryObj | None]":
        rooms: dict[int, MemoryObj] = {}

        def load(client: Client, weights: Weights) -> "Sequence[MemoryObj | None]":
            space = self._space(weights)
            for i, head in enumerate(client.blocks.load(space, [_head(key) for key in keys])):
                room = None if head is None else self._room_for(head[0].tobytes())
                if room is not None:
                    rooms[i] = room
            own: list[tuple[int, bytes, Bytes]] = []
            for i, room in rooms.items():
                data = bytes_of(room)
                own += [
                    (i, key, block) for key, block in cut(_block_keys(keys[i], data.nbytes), data).items()
                ]
            loaded = client.blocks.load(space, [key for _, key, _ in own], [block for _, _, block in own])
            # Of each room its own, also where two are of one key.
            lacking = {i for (i, _, _), one in zip(own, loaded, strict=True) if one is None}
            return [rooms.pop(i) if i in rooms and i not in lacking else None for i in range(len(keys))]

        try:
            return self._link.call(load, [None] * len(keys))
        finally:
            for room in rooms.values():
                room.ref_count_down()

    def _room_for(self, head: bytes) -> "MemoryObj | None":
        """Memory of LMCache for a chunk; None where there is none, or the head is of another layout."""
        if len(head) != self.remote_metadata_bytes:
            return None
        shape = RemoteMetadata.deserialize(head)
        room = self._memory.allocate(shape.shapes, shape.dtypes, shape.fmt)
        # The head is of another configuration: its blocks would not fit the room.
        if room is not None and bytes_of(room).nbytes != shape.length:
            room.ref_count_down()
            return None
        return room

    def _space(self, weights: Weights) -> BlockSpace:
        return space_of(self._model_name, weights, tag="lmcache remote chunk")


def _head(key: "CacheEngineKey") -> bytes:
    (head,) = BlockKeys(key.to_string(), 1).of(HEAD)
    return head


def _block_keys(key: "CacheEngineKey", size_bytes: int) -> list[bytes]:
    return BlockKeys(key.to_string(), size_bytes).of(b"")
