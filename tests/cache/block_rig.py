"""Blocks as a client puts and reads them, over a cache under test."""

import hashlib
import random
from collections.abc import Sequence

from cache_rig import SLOT_BYTES, DiskRig, Rig

from ctxcache.cache.blocks import BlockState, Room, Wanted, WrittenPart
from ctxcache.core.ledger.session import block_id
from ctxcache.core.prefix.keys import Part, space_of
from ctxcache.format.checksums import rows_checksum
from ctxcache.format.layout import block_layout

WHOLE = (Part(0, 2, 0),)
SPACE = space_of(bytes(32), b"tiny", b"", WHOLE)
OTHER_SPACE = space_of(bytes(32), b"tiny", b"salt", WHOLE)
SIZE_BYTES = SLOT_BYTES - block_layout((1,)).header_bytes
WRITER, SECOND_WRITER = 1, 2
SECOND_NS = 10**9


def key_of(number: int) -> bytes:
    """A key of 32 bytes."""
    return hashlib.sha256(number.to_bytes(4, "little")).digest()


def data_of(number: int, size_bytes: int = SIZE_BYTES) -> bytes:
    """The bytes of a block, others for each."""
    return random.Random(number).randbytes(size_bytes)


def wanted(number: int, size_bytes: int = SIZE_BYTES, parent: int | None = None) -> Wanted:
    """A block of one part."""
    return Wanted(key_of(number), (size_bytes,), (0,), None if parent is None else key_of(parent))


async def reserved(rig: Rig, *asked: Wanted, writer: int = WRITER, space: bytes = SPACE) -> list[Room]:
    """Room for these blocks."""
    return await rig.cache.blocks.reserve(rig.tenant, space, asked, None, writer=writer)


def write(rig: Rig, room: Room, part: int, data: bytes, writer: int = WRITER) -> WrittenPart:
    """Put a part in its place; what is to be committed."""
    rig.cache.blocks.place(room.reservation_id, part, 0, memoryview(data), writer=writer)
    return WrittenPart(room.reservation_id, part, rows_checksum(data))


async def put(
    rig: Rig,
    *numbers: int,
    is_durable: bool = False,
    parent: int | None = None,
    space: bytes = SPACE,
    size_bytes: int = SIZE_BYTES,
) -> int:
    """Put blocks if they are absent; returns how many were."""
    asked = [wanted(number, size_bytes, parent) for number in numbers]
    rooms = await reserved(rig, *asked, space=space)
    written = [
        write(rig, room, 0, data_of(number, size_bytes))
        for room, number in zip(rooms, numbers, strict=True)
        if room.reservation_id
    ]
    blocks = await rig.cache.blocks.commit(written, writer=WRITER)
    if is_durable:
        await rig.cache.blocks.flush(blocks)
    return len(written)


async def load(rig: Rig, *numbers: int, space: bytes = SPACE) -> list[bytes | None]:
    """The bytes of blocks, as a lease shows them; None for those that are not there."""
    blocks = rig.cache.blocks
    found = await blocks.lease(rig.tenant, space, list(map(key_of, numbers)), None, ttl_ns=SECOND_NS)
    loaded: list[bytes | None] = []
    for held in found.blocks or ():
        if held is None:
            loaded.append(None)
            continue
        segment = held.segment
        assert segment.memory is not None
        assert segment in [piece.segment for piece in held.lease.pieces]
        view, layout = rig.arena.view(segment.memory), segment.layout
        parts = [bytes(view[layout.rows(spec.stream, 0, 1)]) for spec in layout.specs]
        assert [rows_checksum(part) for part in parts] == list(segment.settled.values)
        loaded.append(b"".join(parts))
    if any(found.leases):
        rig.cache.tokens.release(rig.tenant, found.token)
    return loaded


async def spoil(rig: DiskRig, number: int) -> None:
    """Let other bytes than were put stand in the file of a block, which is not in memory any more."""
    block = rig.cache.ledger.find(rig.tenant, block_id(SPACE, key_of(number)))
    [segment] = block.segments
    await rig.cache.flushing.demote(block)
    assert segment.durable is not None
    with rig.segments_file(segment.durable.path_index).open("r+b") as file:
        file.seek(segment.durable.offset_bytes + block.layout.offsets[0] + 5)
        file.write(b"?????")


def look(rig: Rig, *numbers: int, space: bytes = SPACE) -> list[BlockState]:
    """The state of each block."""
    return [one.state for one in rig.cache.blocks.look_up(rig.tenant, space, map(key_of, numbers))]


def everything(numbers: Sequence[int]) -> list[bytes | None]:
    """The bytes that a load of these brings when all are there."""
    return [data_of(number) for number in numbers]
