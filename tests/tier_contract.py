"""The contract of a tier, as tests: every implementation of Tier runs them all.

    class TestMyTier(TierContract):
        @pytest.fixture
        def tier(self): ...

Knows no implementation. Worst case: a tier that passes and still loses bytes; what only a device
can show (a refused sync, a full disk) is for the implementation's own tests.
"""

import asyncio
import mmap
from typing import Protocol

import pytest

from ctxcache.format.layout import ALIGN_BYTES, Slot
from ctxcache.storage.tiers.base import Tier

SMALLEST_CAPACITY_BYTES = 48 << 20
"""The least bytes of every path of the tier under test."""
_LARGE_BYTES = (9 << 20) + ALIGN_BYTES
"""More than two pieces of 4 MiB, and no multiple of one."""


class PlacedTier(Tier, Protocol):
    """A tier that says where its first slot may begin."""

    @property
    def first_offset_bytes(self) -> int:
        """Slots lie at or after this offset of every path."""


def buffer(size_bytes: int, *, seed: int | None = None) -> memoryview:
    """Aligned memory as callers of a tier hand it over: zeros, or bytes that spell their place."""
    memory = memoryview(mmap.mmap(-1, size_bytes))
    if seed is not None:
        words = memory.cast("I")
        for page in range(0, size_bytes // 4, ALIGN_BYTES // 4):
            words[page] = seed
            words[page + 1] = page
    return memory


class TierContract:
    """The contract of every tier. A subclass provides the fixture `tier`, its paths of 48 MiB or more."""

    async def test_a_read_returns_what_was_written(self, tier: PlacedTier) -> None:
        """Bytes come back as they went in, from every path."""
        for index in range(len(tier.paths)):
            slot = Slot(index, tier.first_offset_bytes, 1 << 20)
            data = buffer(slot.size_bytes, seed=index + 1)
            await tier.write(slot, 0, data)
            into = buffer(slot.size_bytes)
            await tier.read(slot, 0, into)

            assert into == data

    async def test_a_transfer_of_many_pieces_is_whole(self, tier: PlacedTier) -> None:
        """A slot larger than one device operation is transferred completely, its odd end included."""
        slot = Slot(0, tier.first_offset_bytes + ALIGN_BYTES, _LARGE_BYTES)
        data, into = buffer(_LARGE_BYTES, seed=1), buffer(_LARGE_BYTES)
        await tier.write(slot, 0, data)
        await tier.read(slot, 0, into)

        assert into == data

    async def test_a_part_of_a_slot_is_read_alone(self, tier: PlacedTier) -> None:
        """A read may begin and end inside a slot."""
        slot = Slot(0, tier.first_offset_bytes, 16 * ALIGN_BYTES)
        data, into = buffer(slot.size_bytes, seed=1), buffer(3 * ALIGN_BYTES)
        await tier.write(slot, 0, data)
        await tier.read(slot, 5 * ALIGN_BYTES, into)

        assert into == data[5 * ALIGN_BYTES : 8 * ALIGN_BYTES]

    async def test_a_part_of_a_slot_is_written_alone(self, tier: PlacedTier) -> None:
        """A write inside a slot leaves the rest of it as it was."""
        slot = Slot(0, tier.first_offset_bytes, 4 * ALIGN_BYTES)
        data, part, into = (
            buffer(4 * ALIGN_BYTES, seed=1),
            buffer(ALIGN_BYTES, seed=2),
            buffer(4 * ALIGN_BYTES),
        )
        await tier.write(slot, 0, data)
        await tier.write(slot, 2 * ALIGN_BYTES, part)
        await tier.read(slot, 0, into)

        assert into[: 2 * ALIGN_BYTES] == data[: 2 * ALIGN_BYTES]
        assert into[2 * ALIGN_BYTES : 3 * ALIGN_BYTES] == part
        assert into[3 * ALIGN_BYTES :] == data[3 * ALIGN_BYTES :]

    async def test_pieces_are_all_that_moves(self, tier: PlacedTier) -> None:
        """With pieces, a transfer touches those ranges and no other byte, and tells of each once."""
        slot = Slot(0, tier.first_offset_bytes, 8 * ALIGN_BYTES)
        old, new, into = (buffer(slot.size_bytes, seed=i) for i in (1, 2, 3))
        pieces = [(0, ALIGN_BYTES), (3 * ALIGN_BYTES, 5 * ALIGN_BYTES)]
        seen: dict[tuple[int, int], bytes] = {}
        await tier.write(slot, 0, old)
        await tier.write(slot, 0, new, pieces=pieces)
        await tier.read(slot, 0, whole := buffer(slot.size_bytes))
        await tier.read(
            slot, 0, into, pieces=pieces, then=lambda a, b: seen.update({(a, b): bytes(into[a:b])})
        )
        mixed, part = bytearray(old), bytearray(buffer(slot.size_bytes, seed=3))
        for begin, end in pieces:
            mixed[begin:end] = part[begin:end] = new[begin:end]

        assert whole == mixed
        assert into == part
        assert seen == {(begin, end): bytes(new[begin:end]) for begin, end in pieces}

    async def test_what_a_reader_of_pieces_raises_is_raised(self, tier: PlacedTier) -> None:
        """A failing `then` fails its read, once, and the tier goes on."""
        slot = Slot(0, tier.first_offset_bytes, 4 << 20)
        await tier.write(slot, 0, buffer(slot.size_bytes, seed=1))

        def then(begin: int, end: int) -> None:
            raise KeyError(begin, end)

        with pytest.raises(KeyError):
            await tier.read(slot, 0, buffer(slot.size_bytes), then=then)
        await tier.read(slot, 0, into := buffer(slot.size_bytes))

        assert into == buffer(slot.size_bytes, seed=1)

    async def test_neighbours_are_left_alone(self, tier: PlacedTier) -> None:
        """A write ends where its slot ends, also when the neighbours are written at the same time."""
        slots = [Slot(0, tier.first_offset_bytes + i * (5 << 20), 5 << 20) for i in range(6)]
        data = [buffer(slot.size_bytes, seed=i + 1) for i, slot in enumerate(slots)]
        await asyncio.gather(*(tier.write(slot, 0, bytes_) for slot, bytes_ in zip(slots, data, strict=True)))
        into = [buffer(slot.size_bytes) for slot in slots]
        await asyncio.gather(*(tier.read(slot, 0, bytes_) for slot, bytes_ in zip(slots, into, strict=True)))

        assert into == data

    async def test_paths_do_not_share_bytes(self, tier: PlacedTier) -> None:
        """The same offset of two paths is two places."""
        slots = [Slot(index, tier.first_offset_bytes, ALIGN_BYTES) for index in range(len(tier.paths))]
        for slot in slots:
            await tier.write(slot, 0, buffer(ALIGN_BYTES, seed=slot.path_index + 1))

        for slot in slots:
            into = buffer(ALIGN_BYTES)
            await tier.read(slot, 0, into)
            assert into == buffer(ALIGN_BYTES, seed=slot.path_index + 1)

    async def test_unaligned_memory_is_taken(self, tier: PlacedTier) -> None:
        """A buffer at an odd address costs a copy and nothing else."""
        slot = Slot(0, tier.first_offset_bytes, _LARGE_BYTES)
        data, into = memoryview(bytearray(_LARGE_BYTES + 1))[1:], memoryview(bytearray(_LARGE_BYTES + 1))[1:]
        data[:] = buffer(_LARGE_BYTES, seed=7)
        await tier.write(slot, 0, data)
        await tier.read(slot, 0, into)

        assert into == data

    async def test_read_only_memory_is_written(self, tier: PlacedTier) -> None:
        """A write does not ask for more than to read its buffer."""
        slot = Slot(0, tier.first_offset_bytes, ALIGN_BYTES)
        data, into = bytes(buffer(ALIGN_BYTES, seed=3)), buffer(ALIGN_BYTES)
        await tier.write(slot, 0, memoryview(data))
        await tier.read(slot, 0, into)

        assert into == data

    async def test_the_last_slot_of_a_path_is_usable(self, tier: PlacedTier) -> None:
        """Capacity is counted to the last byte."""
        slot = Slot(0, tier.capacities_bytes[0] - ALIGN_BYTES, ALIGN_BYTES)
        data, into = buffer(ALIGN_BYTES, seed=4), buffer(ALIGN_BYTES)
        await tier.write(slot, 0, data)
        await tier.read(slot, 0, into)

        assert into == data

    @pytest.mark.parametrize("begin", [-ALIGN_BYTES, ALIGN_BYTES])
    async def test_a_range_outside_the_slot_is_refused(self, tier: PlacedTier, begin: int) -> None:
        """A stray range is a bug of the caller and never reaches another slot."""
        slot = Slot(0, tier.first_offset_bytes + ALIGN_BYTES, ALIGN_BYTES)
        with pytest.raises(ValueError, match="not in"):
            await tier.write(slot, begin, buffer(ALIGN_BYTES))
        with pytest.raises(ValueError, match="not in"):
            await tier.read(slot, begin, buffer(ALIGN_BYTES))

    async def test_a_slot_outside_the_path_is_refused(self, tier: PlacedTier) -> None:
        """A slot past the end, or before the first, is not read as something else."""
        past = Slot(0, tier.capacities_bytes[0], ALIGN_BYTES)
        before = Slot(0, tier.first_offset_bytes - ALIGN_BYTES, ALIGN_BYTES)
        for slot in (past, before):
            with pytest.raises(ValueError, match="not in"):
                await tier.read(slot, 0, buffer(ALIGN_BYTES))

    async def test_an_unaligned_range_is_refused(self, tier: PlacedTier) -> None:
        """Offsets and sizes are multiples of 4 KiB; anything else is a bug of the caller."""
        slot = Slot(0, tier.first_offset_bytes, 2 * ALIGN_BYTES)
        with pytest.raises(ValueError, match="aligned"):
            await tier.read(slot, 512, buffer(ALIGN_BYTES))
        with pytest.raises(ValueError, match="aligned"):
            await tier.write(slot, 0, buffer(ALIGN_BYTES)[:100])

    async def test_sync_takes_any_paths(self, tier: PlacedTier) -> None:
        """None, one or all paths can be synced, and many callers may ask at once."""
        every = range(len(tier.paths))
        await tier.sync([])
        await tier.sync([0])
        await asyncio.gather(*(tier.sync(every) for _ in range(8)))

    async def test_a_cancelled_read_is_done_with_its_memory(self, tier: PlacedTier) -> None:
        """Once a cancelled read has raised, the buffer is the caller's again: nobody writes to it."""
        slot = Slot(0, tier.first_offset_bytes, 32 << 20)
        await tier.write(slot, 0, buffer(slot.size_bytes, seed=5))
        into = buffer(slot.size_bytes)
        reading = asyncio.ensure_future(tier.read(slot, 0, into))
        asyncio.get_running_loop().call_soon(reading.cancel)  # after the first step of the read
        await asyncio.wait([reading])
        into[:] = bytes(slot.size_bytes)
        tier.close()  # waits for any thread that is still at it

        assert into == bytes(slot.size_bytes)

    async def test_close_can_be_called_twice(self, tier: PlacedTier) -> None:
        """Closing a closed tier does nothing."""
        tier.close()
        tier.close()
