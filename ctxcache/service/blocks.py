"""BlockService, and the same operations for local clients: an engine's own bytes, by keys.

    PutBlocks    header ──► room ──► bytes in place, added up ──► committed ──► answer
    ReadBlocks   lease ──► header ──► bytes, each message verified ──► released
    SubscribeBlocks   what is there ──► what changes, newest state by key, until the caller goes

Worst case: a stream that ends early gives its room back, and nothing is put.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from google.protobuf.duration_pb2 import Duration
from xxhash import xxh3_64

from ctxcache.cache import Cache
from ctxcache.cache.block_news import BlockNews
from ctxcache.cache.blocks import BlockState, FoundBlock, Room, Wanted, WrittenPart
from ctxcache.cache.state import Pace
from ctxcache.cache.token_leases import TOKEN_BYTES, TOKEN_TTL_LIMIT_NS, Held, TokenLease
from ctxcache.core.ledger.session import Expiration, Session, block_model
from ctxcache.core.prefix.keys import (
    KEY_BYTES,
    TAG_LIMIT_BYTES,
    Part,
    check_key,
    check_parts,
    check_sizes,
    space_of,
)
from ctxcache.errors import ChecksumMismatch, Draining, InvalidArgument, TooManyRequests
from ctxcache.format.checksums import wire_checksum
from ctxcache.service import validate
from ctxcache.service.admission import Admission
from ctxcache.service.callers import Context, current
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.v1 import block_pb2, block_pb2_grpc, session_pb2

KEYS_LIMIT = 4096
PARTS_LIMIT = 4096
"""Most parts of all blocks of one message together."""
KEYS_PER_LOOK = 256
"""Keys that are looked for before others may have their turn."""
KEYS_HELD_AT_ONCE = 32
"""Keys that are looked for, and their blocks held, before others may have their turn."""
CHUNK_BYTES_LIMIT = 2 << 20
MESSAGE_BYTES = 1 << 20
SECOND_NS = 10**9
DEFAULT_LEASE_NS = 60 * SECOND_NS
ANSWERS_KEPT = 256
"""Encoded answers that say the same of all keys, at most 3 KiB each."""
SPACES_KEPT = 256
"""Spaces that are kept ready: an engine has one or two."""
_WRITERS = itertools.count(-1, -1)
"""Numbers of streams that put blocks. No local client has one of them."""
_STATES = {
    BlockState.MISS: session_pb2.LOOKUP_STATE_MISS,
    BlockState.HIT: session_pb2.LOOKUP_STATE_HIT,
    BlockState.PENDING: session_pb2.LOOKUP_STATE_PENDING,
}


class Space(NamedTuple):
    """A space's fingerprint (32 bytes), how many parts its blocks have, and the model that owns them."""

    fingerprint: bytes
    part_count: int
    model: str


class Asked(NamedTuple):
    """Room that is asked for, validated."""

    space: Space
    wanted: list[Wanted]
    expiration: Expiration | None


class BlockService(block_pb2_grpc.BlockServiceServicer):
    """See proto/ctxcache/v1/block.proto."""

    def __init__(self, cache: Cache, turns: Turns, admission: Admission) -> None:
        """`turns` bound work that takes long. `admission` is that of subscriptions."""
        self._cache, self._turns, self._admission = cache, turns, admission

    async def LookupBlocks(
        self, request: block_pb2.LookupBlocksRequest, context: Context
    ) -> block_pb2.LookupBlocksResponse:
        """See the proto."""
        return await look_up(self._cache, request, current().tenant, None, LoopSlice(self._turns))

    async def PutBlocks(
        self, request_iterator: AsyncIterator[block_pb2.PutBlocksRequest], context: Context
    ) -> block_pb2.PutBlocksResponse:
        """See the proto."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("message") != "header":
            raise InvalidArgument(field="header", problem="the first message must be the header")
        header, pace = first.header, LoopSlice(self._turns)
        # Each stream gets a number below 0: writers are told apart by numbers, and local clients have those
        # above 0.
        asked, blocks, writer = _asked(header.blocks), self._cache.blocks, next(_WRITERS)
        is_durable = validate.is_durable(header.durability, "header.durability")
        tenant = current().tenant
        rooms = await blocks.reserve(
            tenant,
            asked.space.fingerprint,
            asked.wanted,
            None,
            writer=writer,
            model=asked.space.model,
            expiration=asked.expiration,
            pace=pace,
        )
        arriving = _Arriving(self._cache, asked.wanted, rooms, writer)
        try:
            async for request in request_iterator:
                if request.WhichOneof("message") != "bytes":
                    raise InvalidArgument(field="message", problem="only bytes follow the header")
                arriving.take(request.bytes)
            await blocks.commit(arriving.written(), writer=writer, pace=pace)
        # Parts that were not committed are let go, whatever happened.
        finally:
            arriving.release()
        keys = [one.key for one in asked.wanted]
        # Blocks that were there already count too: the caller asked for all of them to be durable.
        if is_durable:
            await blocks.flush(blocks.there(tenant, asked.space.fingerprint, keys))
        states = [found.state for found in blocks.look_up(tenant, asked.space.fingerprint, keys)]
        return block_pb2.PutBlocksResponse(
            states=map(_STATES.__getitem__, states),
            put_count=sum(room.reservation_id != 0 for room in rooms),
        )

    async def LeaseBlocks(
        self, request: block_pb2.LeaseBlocksRequest, context: Context
    ) -> block_pb2.BlockLease:
        """See the proto."""
        tenant = current().tenant
        leased = await lease(self._cache, request, tenant, None, LoopSlice(self._turns))
        return lease_message(self._cache, leased)

    async def ReleaseBlocks(
        self, request: block_pb2.ReleaseBlocksRequest, context: Context
    ) -> block_pb2.ReleaseBlocksResponse:
        """See the proto."""
        release(self._cache, request, current().tenant)
        return block_pb2.ReleaseBlocksResponse()

    def ReadBlocks(
        self, request: block_pb2.ReadBlocksRequest, context: Context
    ) -> AsyncGenerator[block_pb2.ReadBlocksResponse]:
        """See the proto."""
        return self._messages(request.blocks, current().tenant)

    async def DeleteBlocks(
        self, request: block_pb2.DeleteBlocksRequest, context: Context
    ) -> block_pb2.DeleteBlocksResponse:
        """See the proto."""
        return await delete(self._cache, request, current().tenant)

    async def SubscribeBlocks(
        self, request: block_pb2.SubscribeBlocksRequest, context: Context
    ) -> AsyncGenerator[block_pb2.BlockNews]:
        """See the proto."""
        subscriptions, limit = self._cache.blocks.subscriptions, self._admission.limit // 2
        # Subscriptions get half of the engines' places: they must not keep queues out.
        space, tenant = _space(request.space), current().tenant
        own_count = subscriptions.count_of(tenant)
        if self._cache.state.limits.bound(limit).is_reached(len(subscriptions), own_count):
            raise TooManyRequests(what="subscriptions", limit=limit)
        news = subscriptions.begin(tenant, space.fingerprint)
        drained = asyncio.ensure_future(self._admission.drained())
        pace = LoopSlice(self._turns)
        try:
            # The subscription comes before the first news: changes in between are told twice, and none is
            # missed.
            for _ in subscriptions.present(news):
                if pace.is_over:
                    await pace.rest()
            yield _told(self._cache, news)
            while True:
                # Each round has its own waiter, for the event may have been set before it was waited for.
                waiting = asyncio.ensure_future(news.has_news.wait())
                try:
                    await asyncio.wait({waiting, drained}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    # The waiter is cancelled when the caller goes, too: it would wait for news of nobody.
                    waiting.cancel()
                if drained.done():
                    raise Draining
                yield _told(self._cache, news)
        finally:
            drained.cancel()
            # A subscription follows thousands of blocks; letting go of them takes slices too.
            await self._let_go(subscriptions.end(news), pace)

    async def _let_go(self, steps: Iterator[None], pace: LoopSlice) -> None:
        try:
            for _ in steps:
                if pace.is_over:
                    await pace.rest()
        finally:
            # The clean-up runs to its end even when it is cut off.
            for _ in steps:
                continue

    async def _messages(
        self, request: block_pb2.LeaseBlocksRequest, tenant: str
    ) -> AsyncGenerator[block_pb2.ReadBlocksResponse]:
        blocks, leases = self._cache.blocks, self._cache.leases
        if request.leave_on_ssd:
            raise InvalidArgument(field="leave_on_ssd", problem="is for a lease")
        leased = await lease(self._cache, request, tenant, None, LoopSlice(self._turns))
        try:
            held = leased.blocks or ()
            sizes = [block_pb2.BlockSizes(part_bytes=_sizes(leased_block)) for leased_block in held]
            yield block_pb2.ReadBlocksResponse(header=block_pb2.ReadBlocksHeader(blocks=sizes))
            for block, leased_block in enumerate(held):
                for part in range(len(_sizes(leased_block))):
                    if leased_block is None:
                        break
                    begin_bytes = 0
                    # Before bytes are looked at and before each message: a slow reader's lease may have
                    # ended, and the block may have left memory.
                    leases.check(leased_block.lease, leased.ttl_ns)
                    for data, checksum in await blocks.summed(leased_block, part, MESSAGE_BYTES):
                        leases.check(leased_block.lease, leased.ttl_ns)
                        message = block_pb2.BlockBytes(
                            block=block,
                            part=part,
                            begin_bytes=begin_bytes,
                            data=bytes(data),
                            checksum=checksum,
                        )
                        begin_bytes += len(data)
                        yield block_pb2.ReadBlocksResponse(bytes=message)
        finally:
            if not request.token:
                # The lease behind a token belongs to whoever made it.
                self._cache.tokens.let_go(leased)


class _Arriving:
    """The bytes of a stream's blocks, of those that there is room for."""

    def __init__(self, cache: Cache, wanted: Sequence[Wanted], rooms: Sequence[Room], writer: int) -> None:
        self._blocks, self._wanted, self._rooms, self._writer = cache.blocks, wanted, rooms, writer
        self._hashers: dict[tuple[int, int], xxh3_64] = {}
        self._arrived_bytes: dict[tuple[int, int], int] = {}

    def take(self, given: block_pb2.BlockBytes) -> None:
        """Put bytes where they belong. Raises InvalidArgument, ChecksumMismatch, ReservationNotFound."""
        number = validate.within(given.block, 0, len(self._wanted) - 1, "bytes.block")
        if given.part not in self._wanted[number].parts:
            raise InvalidArgument(field="bytes.part", problem=f"{given.part} is none of the header's")
        validate.within(len(given.data), 1, CHUNK_BYTES_LIMIT, "bytes.data")
        room, place = self._rooms[number], (number, given.part)
        # A block that is there already, or that another writer has, is no error: its bytes are passed over.
        if not room.reservation_id:
            return
        arrived_bytes = self._arrived_bytes.get(place, 0)
        # The bytes of a part come in order, so that one hasher sums them.
        if given.begin_bytes != arrived_bytes:
            problem = f"{given.begin_bytes} is not where the part goes on, at {arrived_bytes}"
            raise InvalidArgument(field="bytes.begin_bytes", problem=problem)
        # The bytes are verified before they are placed: bytes that changed on the way never reach the arena.
        if wire_checksum(given.data) != given.checksum:
            raise ChecksumMismatch(field="bytes.data")
        data = memoryview(given.data)
        self._blocks.place(room.reservation_id, given.part, arrived_bytes, data, writer=self._writer)
        self._hashers.setdefault(place, xxh3_64()).update(data)
        self._arrived_bytes[place] = arrived_bytes + len(data)

    def written(self) -> list[WrittenPart]:
        """All parts that there was room for. Raises InvalidArgument where some lack bytes."""
        parts: list[WrittenPart] = []
        for number, (wanted, room) in enumerate(zip(self._wanted, self._rooms, strict=True)):
            for part in wanted.parts if room.reservation_id else ():
                arrived_bytes = self._arrived_bytes.get((number, part), 0)
                if arrived_bytes < wanted.part_bytes[part]:
                    problem = (
                        f"block {number}, part {part}: {arrived_bytes} of {wanted.part_bytes[part]} B came"
                    )
                    raise InvalidArgument(field="bytes", problem=problem)
                parts.append(WrittenPart(room.reservation_id, part, self._hashers[number, part].intdigest()))
        return parts

    def release(self) -> None:
        """Give back the room that was not committed."""
        for room in self._rooms:
            if room.reservation_id:
                self._blocks.withdraw(room.reservation_id, self._writer, is_abandoned=False)


# -- operations, whichever door they come by ------------------------------------------------------------


async def look_up(
    cache: Cache, request: block_pb2.LookupBlocksRequest, tenant: str, client: int | None, pace: Pace
) -> block_pb2.LookupBlocksResponse:
    """See the proto. Held blocks count in the share of `client`. Raises InvalidArgument."""
    look = _LookUp(cache, request, tenant, client)
    try:
        for begin in range(0, len(look.keys), KEYS_PER_LOOK):
            if begin and pace.is_over:
                await pace.rest()
            look.add(look.keys[begin : begin + KEYS_PER_LOOK])
    except BaseException:
        look.let_go()
        raise
    return look.answer()


def look_up_at_once(
    cache: Cache, request: block_pb2.LookupBlocksRequest, tenant: str, client: int
) -> block_pb2.LookupBlocksResponse | None:
    """As `look_up`, without waiting. None, and nothing is done, for many keys. Raises InvalidArgument."""
    if len(request.keys) > (KEYS_HELD_AT_ONCE if request.HasField("hold") else KEYS_PER_LOOK):
        return None
    look = _LookUp(cache, request, tenant, client)
    look.add(look.keys)
    return look.answer()


class _LookUp:
    """The answer to a look-up, made part by part, and the blocks that it holds."""

    def __init__(
        self, cache: Cache, request: block_pb2.LookupBlocksRequest, tenant: str, client: int | None
    ) -> None:
        """Raises InvalidArgument."""
        self._cache, self._tenant, self._client = cache, tenant, client
        self._space, self.keys = _space(request.space).fingerprint, _keys(request.keys)
        self._ttl_ns = _hold_ns(request)
        self._response = block_pb2.LookupBlocksResponse()
        self._held: list[Held | None] = []

    def add(self, keys: list[bytes]) -> None:
        """Add the answer for the next keys, and hold their blocks where that is asked for."""
        blocks = self._cache.blocks
        _tell(blocks.look_up(self._tenant, self._space, keys), self._response)
        if self._ttl_ns:
            self._held += blocks.hold_at_hand(self._tenant, self._space, keys, self._client)

    def let_go(self) -> None:
        """End the leases."""
        self._cache.leases.let_go(one.lease for one in self._held if one)

    def answer(self) -> block_pb2.LookupBlocksResponse:
        """The answer to all keys. A token names the held blocks from here on."""
        if any(self._held):
            named = self._cache.tokens.hold(self._tenant, self._held, self._ttl_ns)
            self._response.token = named.token
            self._response.expire_time.FromNanoseconds(_expire_ns(self._cache, named.deadline_ns))
        return self._response


def _tell(blocks: Sequence[FoundBlock], response: block_pb2.LookupBlocksResponse) -> None:
    """Append the answers of these blocks."""
    # Sizes are added up once for each layout, not for each key.
    sums = {sizes: sum(sizes) for sizes in {block.part_bytes for block in blocks}}
    response.states.extend([_STATES[block.state] for block in blocks])
    response.size_bytes.extend([sums[block.part_bytes] for block in blocks])
    response.are_in_dram.extend([block.is_in_memory for block in blocks])


def _expire_ns(cache: Cache, deadline_ns: int) -> int:
    """When a lease ends by itself, on the wall clock."""
    clock = cache.state.clock
    return clock.wall_ns() + deadline_ns - clock.monotonic_ns()


async def reserve(
    cache: Cache, request: block_pb2.ReserveBlocks, tenant: str, client: int, pace: Pace
) -> block_pb2.ReservedBlocks:
    """See the proto. Raises as `Blocks.reserve` does."""
    asked, is_durable = _asked(request), validate.is_durable(request.durability)
    rooms = await cache.blocks.reserve(
        tenant,
        asked.space.fingerprint,
        asked.wanted,
        client,
        writer=client,
        model=asked.space.model,
        expiration=asked.expiration,
        pace=pace,
    )
    if is_durable:
        keys = [one.key for one, room in zip(asked.wanted, rooms, strict=True) if not room.reservation_id]
        # Blocks without room are there already, and have no commit that could be waited for.
        try:
            await cache.blocks.flush(cache.blocks.there(tenant, asked.space.fingerprint, keys))
        except BaseException:
            cache.blocks.give_back(asked.wanted, rooms, client)
            raise
    return block_pb2.ReservedBlocks(
        rooms=[
            block_pb2.BlockRoom(
                state=_STATES[room.state],
                reservation_id=room.reservation_id,
                offset_bytes=room.offsets_bytes,
            )
            for room in rooms
        ]
    )


async def commit(
    cache: Cache, request: block_pb2.CommitBlocks, client: int, pace: Pace
) -> block_pb2.CommittedBlocks:
    """See the proto. Raises as `Blocks.commit` and `Blocks.flush` do."""
    count = validate.within(len(request.reservation_ids), 1, PARTS_LIMIT, "reservation_ids")
    if len(request.parts) != count:
        raise InvalidArgument(field="parts", problem=f"{count} expected")
    if len(request.checksums) != count:
        raise InvalidArgument(field="checksums", problem=f"{count} expected")
    is_durable = validate.is_durable(request.durability)
    parts = zip(request.reservation_ids, request.parts, request.checksums, strict=True)
    blocks = await cache.blocks.commit(list(itertools.starmap(WrittenPart, parts)), writer=client, pace=pace)
    if is_durable:
        await cache.blocks.flush(blocks)
    return block_pb2.CommittedBlocks(states=[_STATES[_state(block)] for block in blocks])


async def lease(
    cache: Cache, request: block_pb2.LeaseBlocksRequest, tenant: str, client: int | None, pace: Pace
) -> TokenLease:
    """See the proto. Raises as `Blocks.lease` and `Blocks.leased` do."""
    if request.token:
        if request.keys or request.HasField("space"):
            raise InvalidArgument(field="token", problem="comes with keys or a space")
        return cache.blocks.leased(tenant, lease_token(request.token))
    space, keys = _space(request.space), _keys(request.keys)
    _check_part_count(len(keys) * space.part_count)
    ttl_ns = lease_ttl_ns(request.ttl, "ttl") if request.HasField("ttl") else DEFAULT_LEASE_NS
    return await cache.blocks.lease(
        tenant,
        space.fingerprint,
        keys,
        client,
        ttl_ns=ttl_ns,
        is_rechecked=request.recheck,
        leaves_on_ssd=request.leave_on_ssd,
        pace=pace,
    )


def lease_message(cache: Cache, leased: TokenLease) -> block_pb2.BlockLease:
    """A lease as its holder sees it."""
    message = block_pb2.BlockLease(blocks=map(_location, leased.blocks or ()))
    if leased.leases:
        message.token = leased.token
        message.expire_time.FromNanoseconds(_expire_ns(cache, leased.deadline_ns))
    return message


def release(cache: Cache, request: block_pb2.ReleaseBlocksRequest, tenant: str) -> None:
    """See the proto. Raises LeaseNotFound, InvalidArgument."""
    cache.tokens.release(tenant, lease_token(request.token))


async def delete(
    cache: Cache, request: block_pb2.DeleteBlocksRequest, tenant: str
) -> block_pb2.DeleteBlocksResponse:
    """See the proto. Raises as `Blocks.delete` does."""
    space, keys = _space(request.space), _keys(request.keys)
    count = await cache.blocks.delete(tenant, space.fingerprint, keys)
    return block_pb2.DeleteBlocksResponse(deleted_count=count)


# -- messages -------------------------------------------------------------------------------------------


def _location(block: Held | None) -> block_pb2.BlockLocation:
    if block is None:
        return block_pb2.BlockLocation()
    segment = block.segment
    on_ssd = block.lease.on_ssd.get(segment.segment_id)
    if on_ssd is not None:
        return block_pb2.BlockLocation(
            offset_bytes=[on_ssd.offset_bytes + offset for offset in segment.layout.offsets],
            part_bytes=_sizes(block),
            path_index=on_ssd.path_index,
            header_checksum=segment.header_checksum,
        )
    slot = segment.memory
    if slot is None:
        return block_pb2.BlockLocation()
    return block_pb2.BlockLocation(
        offset_bytes=[slot.offset_bytes + offset for offset in segment.layout.offsets],
        part_bytes=_sizes(block),
        # The writer's checksums, by which the reader verifies.
        checksums=segment.settled.values,
    )


def _told(cache: Cache, news: BlockNews) -> block_pb2.BlockNews:
    """The next part of a subscriber's news, as the blocks are now."""
    keys = news.take(KEYS_PER_LOOK)
    blocks = cache.blocks.look_up(news.tenant, news.space, keys)
    is_hit = [block.state is BlockState.HIT for block in blocks]
    parents = [cache.blocks.parent(news.tenant, news.space, key) for key in keys]
    return block_pb2.BlockNews(
        keys=keys,
        # Parts that other writers write are not there yet.
        states=[_STATES[BlockState.HIT if hit else BlockState.MISS] for hit in is_hit],
        size_bytes=[sum(block.part_bytes) if hit else 0 for block, hit in zip(blocks, is_hit, strict=True)],
        are_in_dram=[hit and block.is_in_memory for block, hit in zip(blocks, is_hit, strict=True)],
        parent_keys=[parent if hit and parent else b"" for parent, hit in zip(parents, is_hit, strict=True)],
        is_current=not news.has_news.is_set(),
    )


def _sizes(one: Held | None) -> tuple[int, ...]:
    """Sizes of the parts of a leased block, in bytes."""
    return () if one is None else tuple([spec.row_bytes for spec in one.segment.layout.specs])


def _state(block: Session) -> BlockState:
    if block.is_gone:
        return BlockState.MISS
    return BlockState.HIT if block.token_count else BlockState.PENDING


# -- requests -------------------------------------------------------------------------------------------


def _space(given: block_pb2.BlockSpace) -> Space:
    """Raises InvalidArgument."""
    # Spaces are remembered by their bytes: an engine sends the same space with each request.
    return _space_of(given.SerializeToString())


@lru_cache(SPACES_KEPT)
def _space_of(encoded: bytes) -> Space:
    given = block_pb2.BlockSpace.FromString(encoded)
    fingerprint = validate.fingerprint(given.model_fingerprint, "space.model_fingerprint")
    tag = validate.text(given.layout_tag, TAG_LIMIT_BYTES, "space.layout_tag")
    parts = [Part(part.layer_begin, part.layer_end, part.rank) for part in given.parts]
    check_parts(parts)
    return Space(
        space_of(fingerprint, tag.encode(), validate.salt(given.salt, "space.salt"), parts),
        len(parts),
        block_model(fingerprint),
    )


def _keys(keys: Sequence[bytes]) -> list[bytes]:
    validate.within(len(keys), 1, KEYS_LIMIT, "keys")
    checked = list(keys)
    # All lengths are compared at once. The wrong one is found afterwards.
    if {*map(len, checked)} != {KEY_BYTES}:
        for i, key in enumerate(checked):
            check_key(key, f"keys[{i}]")
    return checked


def _hold_ns(request: block_pb2.LookupBlocksRequest) -> int:
    """For how long a look-up holds what it finds; 0 for one that holds nothing. Raises InvalidArgument."""
    return lease_ttl_ns(request.hold, "hold") if request.HasField("hold") else 0


def lease_ttl_ns(given: Duration, field: str) -> int:
    """For how long a token's leases last. Raises InvalidArgument."""
    ttl_ns = given.seconds * SECOND_NS + given.nanos
    if not 0 < ttl_ns <= TOKEN_TTL_LIMIT_NS:
        problem = f"{ttl_ns} ns are not above 0 and at most {TOKEN_TTL_LIMIT_NS} ns"
        raise InvalidArgument(field=field, problem=problem)
    return ttl_ns


def lease_token(token: bytes) -> bytes:
    """A token's bytes. Raises InvalidArgument."""
    if len(token) != TOKEN_BYTES:
        raise InvalidArgument(field="token", problem=f"{TOKEN_BYTES} bytes expected, {len(token)} given")
    return token


def _check_part_count(count: int) -> None:
    if count > PARTS_LIMIT:
        raise InvalidArgument(field="blocks", problem=f"have {count} parts, more than {PARTS_LIMIT}")


def _asked(request: block_pb2.ReserveBlocks) -> Asked:
    space = _space(request.space)
    validate.within(len(request.blocks), 1, KEYS_LIMIT, "blocks")
    _check_part_count(len(request.blocks) * space.part_count)
    parts = tuple(_parts(request.parts, space.part_count))
    wanted = [
        Wanted(
            check_key(block.key, f"blocks[{i}].key"),
            check_sizes(block.part_bytes, space.part_count, f"blocks[{i}].part_bytes"),
            parts,
            check_key(block.parent_key, f"blocks[{i}].parent_key") if block.parent_key else None,
        )
        for i, block in enumerate(request.blocks)
    ]
    return Asked(space, wanted, validate.sliding(request.ttl) if request.HasField("ttl") else None)


def _parts(given: Iterable[int], part_count: int) -> Iterator[int]:
    parts = list(given)
    if len(set(parts)) < len(parts):
        raise InvalidArgument(field="parts", problem="names one twice")
    # No parts named means all.
    for part in parts or range(part_count):
        yield validate.within(part, 0, part_count - 1, "parts")
