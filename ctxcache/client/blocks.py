"""Blocks: an engine's own bytes, put and loaded by its keys. The calls of BlockService.

    put      room for what is absent ──► bytes copied and added up in one pass ──► committed
    load     lease ──► bytes copied and compared in one pass ──► released

On the server's host bytes are written and read in the arena, and only keys and places go over the control
socket. Worst case: one deadline per call. A put or load of much is several calls, each of which is done or
not.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, Self

import numpy as np

from ctxcache.client.access import AccessStream, ArenaAttachment, Hold
from ctxcache.client.arena import Bytes, MappedArena
from ctxcache.client.block_bytes import Array, BlockData, PartMemory, Writing, check_sizes, parts_of
from ctxcache.client.block_files import BlockFiles
from ctxcache.client.block_leases import BAD, LeasedBlocks, lease_blocks, memory_for
from ctxcache.client.block_lookups import KEYS_PER_CALL, STATES, HoldingLookUp, blocks_of, look_up
from ctxcache.client.convert import checked_token, durability_to_wire, space_to_wire, ttl_to_wire
from ctxcache.client.futures import Completions
from ctxcache.client.routes import RowRoutes
from ctxcache.client.streamed_rows import draw_end
from ctxcache.client.types import BlockChange, BlockNews, BlockSpace, Durability, FoundBlock
from ctxcache.client.wire import Wire, trace_metadata
from ctxcache.errors import CacheError, ChecksumMismatch, DeadlineExceeded, InvalidArgument
from ctxcache.format.checksums import wire_checksum
from ctxcache.v1 import arena_pb2, block_pb2
from ctxcache.v1.arena_pb2 import Operation, ReleaseReservation

# Bounds of a call. Held bytes cannot be given up for others, so that a call holds a part of the arena.
PARTS_PER_CALL = 4096
"""The most parts of one call: the server's own bound."""
BYTES_PER_CALL = 64 << 20
"""The most bytes of blocks that one call holds."""
ARENA_SHARE = 8
"""One call holds no more than the arena divided by this."""
MESSAGE_BYTES = 1 << 20
"""The most bytes of a block in one message of a stream."""
MOST_BLOCK_BYTES = 16 << 20
"""The size that is assumed of a block of unknown size."""


class _New(NamedTuple):
    """A block to be put: the bytes of this caller's parts, and the sizes of all its parts."""

    key: bytes
    parent: bytes
    data: list[PartMemory]
    part_bytes: Sequence[int]


class BlockCalls:
    """The calls about blocks."""

    def __init__(self, wire: Wire, routes: RowRoutes, completions: Completions) -> None:
        self._wire, self._routes, self._completions = wire, routes, completions
        self._files = BlockFiles()
        self._arena_bytes = 0
        """The arena's size, of a store on another host; 0 until the store was asked."""

    def look_up(self, space: BlockSpace, keys: Sequence[bytes]) -> list[FoundBlock]:
        """The block under each key. Counts as no access. Raises InvalidArgument."""
        answers: list[FoundBlock] = []
        for begin in range(0, len(keys), KEYS_PER_CALL):
            some = keys[begin : begin + KEYS_PER_CALL]
            attachment = self._routes.attach()
            if attachment is None:
                asked = block_pb2.LookupBlocksRequest(space=space_to_wire(space), keys=some)
                answers += blocks_of(self._wire.call(self._wire.blocks.LookupBlocks, asked))
            else:
                answers += look_up(attachment.stream, space, some)
        return answers

    def look_up_and_hold(
        self, space: BlockSpace, keys: Sequence[bytes], *, ttl_s: float = 60
    ) -> tuple[list[FoundBlock], list[Hold]]:
        """As `look_up`. Besides, blocks in DRAM are held there for `ttl_s`, at most 300.

        Nothing is brought to DRAM and nothing is waited for. The first blocks are held, as many as leave half
        of what this client may lease free, and none where the store is elsewhere. A held block counts as
        accessed. The hold ends with this connection: release it with `release_soon`. Raises InvalidArgument.
        """
        attachment = self._routes.attach()
        if attachment is None:
            return self.look_up(space, keys), []
        try:
            return HoldingLookUp(attachment.stream, space, keys, ttl_s).result()
        except CacheError:
            raise
        except BaseException:
            # After a signal the hold may be in an answer that nobody has.
            attachment.stream.close()
            raise

    def begin_to_look_up_and_hold(
        self, space: BlockSpace, keys: Sequence[bytes], *, ttl_s: float = 60
    ) -> "HoldingLookUp | None":
        """As `look_up_and_hold`, without waiting for the answer.

        None, and nothing is done, where the store is elsewhere or this client is not connected now. Raises
        InvalidArgument, Unavailable, DeadlineExceeded (the store takes no requests).
        """
        attachment = self._routes.attached()
        return None if attachment is None else HoldingLookUp(attachment.stream, space, keys, ttl_s)

    def put(
        self,
        space: BlockSpace,
        blocks: Mapping[bytes, BlockData],
        *,
        parents: Mapping[bytes, bytes] | None = None,
        parts: Sequence[int] = (),
        part_bytes: Sequence[int] = (),
        ttl_s: float | None = None,
        durability: Durability = Durability.MEMORY,
    ) -> int:
        """Put the blocks that are absent, in the order given; returns how many this call wrote.

        `parents`: of some of the blocks, the key of the block that they continue. `parts`: numbers of the
        space's parts that are given, by default all; then `part_bytes` are the sizes of all of them. `ttl_s`:
        how long a block is kept after its last access. Raises InvalidArgument, CapacityExceeded,
        TooManyRequests, TierFailure; blocks before the failed one may be there.
        """
        numbers = list(parts) or list(range(len(space.parts)))
        if part_bytes and len(part_bytes) != len(space.parts):
            raise InvalidArgument(field="part_bytes", problem=f"{len(space.parts)} expected")
        if len(numbers) < len(space.parts) and not part_bytes:
            raise InvalidArgument(field="part_bytes", problem="sizes of the other parts are needed")
        parents = parents or {}
        new = [
            _new(key, parents.get(key, b""), data, numbers, part_bytes or None)
            for key, data in blocks.items()
        ]
        ttl = None if ttl_s is None else ttl_to_wire(ttl_s)
        attachment = self._routes.attach()
        arena = None if attachment is None else attachment.arena.writable()
        put_count = 0
        for some in _by_size(new, len(space.parts), self._most_bytes(attachment)):
            request = block_pb2.ReserveBlocks(
                space=space_to_wire(space),
                blocks=[
                    block_pb2.NewBlock(key=block.key, parent_key=block.parent, part_bytes=block.part_bytes)
                    for block in some
                ],
                parts=numbers,
                ttl=ttl,
                durability=durability_to_wire(durability),
            )
            if attachment is None or arena is None:
                put_count += self._put_by_stream(request, some, numbers, durability)
            else:
                put_count += _put_inmemory_for(attachment.stream, arena, request, some, durability)
        return put_count

    def put_async(
        self,
        space: BlockSpace,
        blocks: Mapping[bytes, BlockData],
        *,
        parents: Mapping[bytes, bytes] | None = None,
        parts: Sequence[int] = (),
        part_bytes: Sequence[int] = (),
        ttl_s: float | None = None,
        durability: Durability = Durability.MEMORY,
    ) -> Future[int]:
        """As `put`, on the client's thread. The bytes must not change until the future has ended.

        Raises TooManyRequests, Unavailable; what `put` raises is the future's.
        """
        return self._completions.submit(
            self.put,
            space,
            blocks,
            parents=parents,
            parts=parts,
            part_bytes=part_bytes,
            ttl_s=ttl_s,
            durability=durability,
        )

    def load_async(
        self, space: BlockSpace, keys: Sequence[bytes], into: Sequence[BlockData] | None = None
    ) -> Future[list[list[Array] | None]]:
        """As `load`, on the client's thread. `into` holds the rows once the future has ended.

        Raises TooManyRequests, Unavailable; what `load` raises is the future's.
        """
        return self._completions.submit(self.load, space, keys, into)

    def load(
        self,
        space: BlockSpace,
        keys: Sequence[bytes],
        into: Sequence[BlockData] | None = None,
        *,
        writing: Writing = nullcontext,
        past_dram: bool = False,
    ) -> list[list[Array] | None]:
        """The bytes of each block, by part; None where no block is there. Verified. Counts as an access.

        `into`: for each key, arrays for the bytes of its parts, of any shape and strides, writable buffers,
        `MemoryRows` or `Scattered`, whose arrays are returned in their order; by default new ones are made.
        `writing`: entered around the copy of each block, by a caller that may take `into` back meanwhile; an
        error that it raises ends the load, and writes no more. `past_dram`: blocks on SSD alone are read from
        the server's files where this process can, and come to DRAM only when they are read again: for a
        caller that is a cache itself. Raises InvalidArgument (a block has another size), CapacityExceeded,
        TooManyRequests, TierFailure.
        """
        if into is not None and len(into) != len(keys):
            raise InvalidArgument(field="into", problem=f"{len(keys)} expected")
        targets: list[list[PartMemory] | None] = [None] * len(keys)
        if into is not None:
            targets = [parts_of(parts, "into", is_written=True) for parts in into]
        blocks: list[list[Array] | None] = []
        most_count = max(PARTS_PER_CALL // max(len(space.parts), 1), 1)
        attachment = self._routes.attach()
        most_bytes = self._most_bytes(attachment)
        # Blocks are held only while they are moved: a part of the keys at a time, as many as the bound
        # allows. The first block tells the size, if `into` does not.
        count = 1
        for target in targets[:1]:
            if target is not None:
                count = max(most_bytes // max(sum(parts.nbytes for parts in target), 1), 1)
        while len(blocks) < len(keys):
            part = slice(len(blocks), len(blocks) + min(count, most_count))
            if attachment is None:
                loaded = self._load_by_stream(space, keys[part], targets[part], writing)
            else:
                loaded = self._load_inmemory_for(
                    space, keys[part], targets[part], attachment, writing, past_dram=past_dram
                )
            blocks += loaded
            sizes = [sum(array.nbytes for array in parts) for parts in loaded if parts]
            # The largest block seen gives the number. While no block was there, sizes stay unknown and the
            # steps double.
            count = max(most_bytes // max(sizes), 1) if sizes else 2 * count
        return blocks

    def lease(
        self, space: BlockSpace, keys: Sequence[bytes], *, ttl_s: float = 60, outlives_client: bool = False
    ) -> "LeasedBlocks":
        """Hold blocks in DRAM for `ttl_s`, at most 300; a context manager. Counts as an access.

        `outlives_client`: the lease does not end with this connection, for another client that has its token.
        Raises InvalidArgument (also where this process cannot map the arena), CapacityExceeded,
        TooManyRequests, TierFailure.
        """
        request = block_pb2.LeaseBlocksRequest(
            space=space_to_wire(space), keys=keys, ttl=ttl_to_wire(ttl_s), outlives_connection=outlives_client
        )
        return lease_blocks(self._attached(), request)

    def leased(self, token: bytes) -> "LeasedBlocks":
        """The blocks of a lease of this tenant, by its token, from any of its clients.

        Raises LeaseNotFound, InvalidArgument.
        """
        request = block_pb2.LeaseBlocksRequest(token=checked_token(token))
        return lease_blocks(self._attached(), request)

    def delete(self, space: BlockSpace, keys: Sequence[bytes]) -> int:
        """Delete the blocks that are there; returns how many. Raises WriteInProgress, TierFailure."""
        count = 0
        for begin in range(0, len(keys), KEYS_PER_CALL):
            some = keys[begin : begin + KEYS_PER_CALL]
            request = block_pb2.DeleteBlocksRequest(space=space_to_wire(space), keys=some)
            attachment = self._routes.attach()
            if attachment is None:
                answer = self._wire.call(self._wire.blocks.DeleteBlocks, request)
            else:
                answer = attachment.stream.carry_out(Operation(delete_blocks=request)).deleted_blocks
            count += answer.deleted_count
        return count

    def subscribe(self, space: BlockSpace) -> "BlockSubscription":
        """The news of a space: every block that is there, then changes. A context manager, to be iterated.

        Counts as no access. Iterating waits for news, and raises InvalidArgument, TooManyRequests, Draining,
        Unavailable. A new subscription hears of every block again.
        """
        request = block_pb2.SubscribeBlocksRequest(space=space_to_wire(space))
        with self._wire.errors():
            call = self._wire.blocks.SubscribeBlocks(request, metadata=trace_metadata())
        return BlockSubscription(self._wire, call)

    # -- parts -------------------------------------------------------------------------------------

    def _attached(self) -> ArenaAttachment:
        attachment = self._routes.attach()
        if attachment is None:
            raise InvalidArgument(
                field="lease", problem="needs the server's arena, which is not on this host"
            )
        return attachment

    def _most_bytes(self, attachment: ArenaAttachment | None) -> int:
        """The most bytes of blocks that the store holds for one call, by a stream too."""
        if attachment is not None:
            arena_bytes = attachment.arena.readable.size
        else:
            if not self._arena_bytes:
                asked = arena_pb2.GetArenaRequest()
                self._arena_bytes = self._wire.call(self._wire.arena.GetArena, asked).size_bytes
            arena_bytes = self._arena_bytes
        return min(BYTES_PER_CALL, arena_bytes // ARENA_SHARE)

    def _load_inmemory_for(
        self,
        space: BlockSpace,
        keys: Sequence[bytes],
        targets: Sequence[list[PartMemory] | None],
        attachment: ArenaAttachment,
        writing: Writing,
        *,
        past_dram: bool,
    ) -> list[list[Array] | None]:
        request = block_pb2.LeaseBlocksRequest(space=space_to_wire(space), keys=keys)
        request.leave_on_ssd = past_dram and attachment.arena.ssd_files().is_open
        loaded = self._load_some(request, targets, attachment, writing)
        # Blocks that differ are asked for once more. The server then verifies what it has first.
        bad = [i for i, block in enumerate(loaded) if block is BAD]
        if bad:
            some_bad, places_bad = [keys[i] for i in bad], [targets[i] for i in bad]
            request = block_pb2.LeaseBlocksRequest(space=space_to_wire(space), keys=some_bad, recheck=True)
            again = self._load_some(request, places_bad, attachment, writing)
            for i, block in zip(bad, again, strict=True):
                loaded[i] = block
        return [None if block is BAD else block for block in loaded]

    def _load_some(
        self,
        request: block_pb2.LeaseBlocksRequest,
        targets: Sequence[list[PartMemory] | None],
        attachment: ArenaAttachment,
        writing: Writing,
    ) -> list[list[Array] | None]:
        """The loaded parts of each block; `BAD` for one that is not what its writer said."""
        with lease_blocks(attachment, request) as leased:
            loaded = []
            for i, target in enumerate(targets):
                with writing():
                    loaded.append(leased.copied(i, target, is_verified=self._routes.is_verified))
            self._read_left(leased, targets, attachment.arena, loaded, writing)
            # The check comes after the copies: bytes copied after the lease's end may be another block's.
            if any(loaded):
                leased.check()
        return loaded

    def _read_left(
        self,
        leased: "LeasedBlocks",
        targets: Sequence[list[PartMemory] | None],
        arena: MappedArena,
        loaded: list[list[Array] | None],
        writing: Writing,
    ) -> None:
        """Read the blocks that a lease left on SSD, side by side. Raises DeadlineExceeded."""
        left = leased.left_on_ssd()
        if not left:
            return
        lock, is_over = threading.Lock(), False

        # A read of a device that hangs cannot be called back. It may end after this call, and must not write
        # then.
        @contextmanager
        def in_time() -> Iterator[None]:
            with lock:
                if is_over:
                    raise late
                with writing():
                    yield

        # All sizes are checked before the first byte is read.
        places = {i: memory_for(targets[i], block.part_bytes) for i, block in left}

        def read(number: int, block: block_pb2.BlockLocation) -> None:
            is_good = self._files.read(arena.ssd_files(), block, places[number], in_time)
            arrays = [array for part in places[number] for array in part.arrays]
            loaded[number] = arrays if is_good else BAD

        timeout_s = self._wire.bulk_timeout_s(sum(sum(block.part_bytes) for _, block in left))
        late = DeadlineExceeded(target="the SSD tier's files", timeout_s=f"{timeout_s:g}")
        try:
            reads = [partial(read, number, block) for number, block in left]
            is_in_time = arena.ssd_files().spread_within(reads, timeout_s)
        finally:
            with lock:
                is_over = True
        if not is_in_time:
            raise late

    def _put_by_stream(
        self,
        request: block_pb2.ReserveBlocks,
        new: Sequence[_New],
        numbers: Sequence[int],
        durability: Durability,
    ) -> int:
        header = block_pb2.PutBlocksHeader(blocks=request, durability=durability_to_wire(durability))

        def messages() -> Iterator[block_pb2.PutBlocksRequest]:
            yield block_pb2.PutBlocksRequest(header=header)
            for i, block in enumerate(new):
                for part, data in zip(numbers, block.data, strict=True):
                    for begin, run in data.runs(MESSAGE_BYTES):
                        message = block_pb2.BlockBytes(
                            block=i,
                            part=part,
                            begin_bytes=begin,
                            data=run.tobytes(),
                            checksum=wire_checksum(run.data),
                        )
                        yield block_pb2.PutBlocksRequest(bytes=message)

        size_bytes = sum(sum(block.part_bytes) for block in new)
        with self._wire.errors():
            answer = self._wire.blocks.PutBlocks(
                messages(), timeout=self._wire.bulk_timeout_s(size_bytes), metadata=trace_metadata()
            )
        return answer.put_count

    def _load_by_stream(
        self,
        space: BlockSpace,
        keys: Sequence[bytes],
        targets: Sequence[list[PartMemory] | None],
        writing: Writing,
    ) -> list[list[Array] | None]:
        request = block_pb2.ReadBlocksRequest(
            blocks=block_pb2.LeaseBlocksRequest(space=space_to_wire(space), keys=keys)
        )
        # Only the deadline follows from the size that is assumed.
        size_bytes = sum(
            MOST_BLOCK_BYTES if target is None else sum(part.nbytes for part in target) for target in targets
        )
        timeout_s = self._wire.bulk_timeout_s(size_bytes)
        with self._wire.errors():
            call = self._wire.blocks.ReadBlocks(request, timeout=timeout_s, metadata=trace_metadata())
            try:
                return _received(call, targets, writing)
            finally:
                call.cancel()
                draw_end(call)


class BlockSubscription:
    """The news of a space's blocks. A context manager, iterated by one thread; any may close it."""

    def __init__(self, wire: Wire, call: Any) -> None:
        self._wire, self._call = wire, call
        self._is_closed = False

    def __iter__(self) -> Iterator[BlockNews]:
        """Wait for news. Ends when the subscription is closed; raises when the server ends it."""
        try:
            with self._wire.errors():
                for message in self._call:
                    yield _news(message)
        except CacheError:
            if not self._is_closed:
                raise

    def close(self) -> None:
        """End the subscription."""
        self._is_closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        # The call is drawn here and not in `close`, which any thread may call: one thread draws a call.
        draw_end(self._call)


def _put_inmemory_for(
    stream: AccessStream,
    arena: Bytes,
    request: block_pb2.ReserveBlocks,
    new: Sequence[_New],
    durability: Durability,
) -> int:
    # In place, step by step. Rooms come back in the order of the request, 0 for a block that is there
    # already:
    #
    #     reserve ──► room per block ──► copy and add up, part by part ──► commit(parts, checksums)
    #                     │ any error
    #                     ▼
    #                  released without waiting, so that another client can put the same block at once
    rooms: Iterable[block_pb2.BlockRoom] = ()
    commit = block_pb2.CommitBlocks(durability=durability_to_wire(durability))
    numbers = request.parts
    try:
        rooms = stream.carry_out(Operation(reserve_blocks=request)).reserved_blocks.rooms
        for block, room in zip(new, rooms, strict=True):
            if not room.reservation_id:
                continue
            for number, begin, data in zip(numbers, room.offset_bytes, block.data, strict=True):
                checksum = data.copy_in(arena[begin : begin + data.nbytes])
                commit.reservation_ids.append(room.reservation_id)
                commit.parts.append(number)
                commit.checksums.append(checksum)
        if commit.parts:
            stream.carry_out(Operation(commit_blocks=commit))
    except Exception:
        # Committed parts are no reservations any more: nothing has to be released.
        stream.send(
            Operation(release_reservation=ReleaseReservation(reservation_id=room.reservation_id))
            for room in rooms
            if room.reservation_id
        )
        raise
    except BaseException:
        # After a signal the rooms may be in an answer that nobody has.
        stream.close()
        raise
    return sum(room.reservation_id != 0 for room in rooms)


def _received(
    call: Iterable[block_pb2.ReadBlocksResponse],
    targets: Sequence[list[PartMemory] | None],
    writing: Writing,
) -> list[list[Array] | None]:
    """The parts that a stream brings. Raises ChecksumMismatch, InvalidArgument."""
    messages = iter(call)
    first = next(messages, None)
    if first is None or not first.HasField("header"):
        raise CacheError("the read does not start with a header")
    # The sizes in the header make the list, so that later bytes are put where they belong.
    blocks: list[list[Bytes] | None] = []
    for sizes, target in zip(first.header.blocks, targets, strict=True):
        if target is not None and sizes.part_bytes:
            check_sizes(target, sizes.part_bytes)
        blocks.append([np.empty(size_bytes, np.uint8) for size_bytes in sizes.part_bytes] or None)
    for message in messages:
        given = message.bytes
        if wire_checksum(given.data) != given.checksum:
            raise ChecksumMismatch(field=f"block {given.block}, part {given.part}")
        parts = blocks[given.block]
        # A part of a block that is not there has no place.
        if parts is not None:
            end = given.begin_bytes + len(given.data)
            parts[given.part][given.begin_bytes : end] = np.frombuffer(given.data, np.uint8)
    return [
        None if parts is None else _put_into(target, parts, writing)
        for parts, target in zip(blocks, targets, strict=True)
    ]


def _put_into(target: list[PartMemory] | None, parts: Sequence[Bytes], writing: Writing) -> list[Array]:
    if target is None:
        return list(parts)
    with writing():
        for place, part in zip(target, parts, strict=True):
            place.copy_out(part, is_summed=False)
    return [array for place in target for array in place.arrays]


def _new(
    key: bytes,
    parent: bytes,
    data: BlockData,
    numbers: Sequence[int],
    part_bytes: Sequence[int] | None,
) -> _New:
    memory = parts_of(data, "blocks")
    if len(memory) != len(numbers):
        raise InvalidArgument(field="blocks", problem=f"{len(memory)} parts given, {len(numbers)} expected")
    if part_bytes is None:
        # The answer has all parts, in the order in which they are named.
        by_number = {number: part.nbytes for number, part in zip(numbers, memory, strict=True)}
        return _New(key, parent, memory, [by_number[number] for number in sorted(by_number)])
    check_sizes(memory, [part_bytes[number] for number in numbers])
    return _New(key, parent, memory, part_bytes)


def _by_size(new: Sequence[_New], part_count: int, most_bytes: int) -> Iterator[list[_New]]:
    """Blocks in the order given, as many at a time as one call takes."""
    some: list[_New] = []
    size_bytes = 0
    for block in new:
        own_bytes = sum(block.part_bytes)
        if some and (size_bytes + own_bytes > most_bytes or (len(some) + 1) * part_count > PARTS_PER_CALL):
            yield some
            some, size_bytes = [], 0
        some.append(block)
        size_bytes += own_bytes
    if some:
        yield some


def _news(message: block_pb2.BlockNews) -> BlockNews:
    states = map(STATES.__getitem__, message.states)
    facts = zip(
        message.keys, states, message.size_bytes, message.are_in_dram, message.parent_keys, strict=True
    )
    return BlockNews(tuple(starmap(BlockChange, facts)), message.is_current)
