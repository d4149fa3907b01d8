"""ArenaService: leases and reservations of clients on the same host, bound to one stream each."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from ctxcache.cache import Cache
from ctxcache.service.admission import Admission
from ctxcache.service.answers import ANSWER_LIMIT_BYTES
from ctxcache.service.caller import current
from ctxcache.service.holder import LOOK_INTERVAL_S, Holder
from ctxcache.service.rpc import Context
from ctxcache.service.tenant import tenant_of
from ctxcache.service.turns import Turns
from ctxcache.v1 import arena_pb2, arena_pb2_grpc


class ArenaService(arena_pb2_grpc.ArenaServiceServicer):
    """See proto/ctxcache/v1/arena.proto."""

    def __init__(
        self, cache: Cache, arena: arena_pb2.Arena, admission: Admission, turns: Turns, *, is_sealed: bool
    ) -> None:
        """`turns`: in which local clients' work is done that takes long. `is_sealed`: nobody writes to the arena."""
        self._is_sealed = is_sealed
        self._cache = cache
        self._turns = turns
        self._admission = admission
        self._arena = arena

    async def GetArena(self, request: arena_pb2.GetArenaRequest, context: Context) -> arena_pb2.Arena:  # noqa: ARG002, N802
        """See the proto."""
        if current().grant.has_shared_memory:
            found = arena_pb2.Arena(may_write=self._may_write())
            found.MergeFrom(self._arena)
            return found
        return arena_pb2.Arena(arena_id=self._arena.arena_id, size_bytes=self._arena.size_bytes)

    async def Access(  # type: ignore[override]  # noqa: N802  # answers are encoded already
        self, request_iterator: AsyncIterator[arena_pb2.AccessRequest], context: Context
    ) -> AsyncIterator[bytes]:
        """See the proto."""
        # What is reserved has others' bytes in it, and would be committed unseen.
        current().check_shared_memory()
        holder = Holder(
            self._cache, tenant_of(context), self._turns, self._admission, may_write=self._may_write(),
            answer_limit_bytes=ANSWER_LIMIT_BYTES,
        )  # fmt: skip
        try:
            async with aclosing(self._until_drained(request_iterator, holder)) as requests:
                async for request in requests:
                    yield await holder.carry_out(request)
        finally:
            # A client that was killed looks like one that has said all: its requests end first.
            holder.end(is_abandoned=True)

    def _may_write(self) -> bool:
        return current().grant.writes_in_place and not self._is_sealed

    async def _until_drained(
        self, requests: AsyncIterator[arena_pb2.AccessRequest], holder: Holder
    ) -> AsyncGenerator[arena_pb2.AccessRequest]:
        """The requests; when the server drains, raises Draining as soon as the stream holds nothing."""
        drained = asyncio.ensure_future(self._admission.drained())
        coming = asyncio.ensure_future(anext(requests, None))
        try:
            while True:
                await asyncio.wait({drained, coming}, return_when=asyncio.FIRST_COMPLETED)
                while self._admission.is_draining and not coming.done():
                    holder.check_empty()
                    await asyncio.wait({coming}, timeout=LOOK_INTERVAL_S)
                if not coming.done():
                    # Work is taken again.
                    drained = asyncio.ensure_future(self._admission.drained())
                    continue
                request = coming.result()
                if request is None:
                    return
                yield request
                coming = asyncio.ensure_future(anext(requests, None))
        finally:
            drained.cancel()
            coming.cancel()
