"""SSD reads and durable saves of one context, beside O_DIRECT on the same disk.

First in this process, over a Cache, with the same memory as destination of both. Then of a running server as
its client sees them: the device alone fills, and is filled from, the memory in the server's arena where the
session lies, since the memory makes a difference. Last: reads into an arena of 2 MiB pages beside one of 4
KiB pages, two servers with the same context on the same disk. Worst case: a disk without O_DIRECT, or no huge
pages that are reserved; both are a NoPeer.
"""

import asyncio
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ctxcache.client.types import Durability
from ctxcache.core.ledger.segment import Segment
from ctxcache.format.layout import ALIGN_BYTES, Slot
from ctxcache.runtime.memory import HUGE_PAGE_BYTES
from ctxcache.storage.tiers.shared_memory import free_huge_bytes
from lab.bench.contexts import (
    Bytes,
    Contexts,
    access,
    arena_bytes_of,
    check,
    content,
    contexts,
    copy_out,
    seconds,
    slots_bytes,
)
from lab.bench.device import Device, Way, best_way
from lab.bench.row import NoPeer, Place, Row, Side, Sides, at_least
from lab.bench.ssd import Rig, Shape, opened, promote, save


@contextmanager
def _rig(place: Place) -> Iterator[tuple[asyncio.Runner, Rig, Device]]:
    scale = place.scale
    shape = Shape(scale.layer_count, scale.row_bytes)
    with asyncio.Runner() as runner:
        context = opened(place.directory / "cache", shape, slots_bytes(scale, 1))
        rig = runner.run(context.__aenter__())
        try:
            with opened_device(place, rig.size_bytes) as device:
                yield runner, rig, device
        finally:
            runner.run(context.__aexit__(None, None, None))


@contextmanager
def opened_device(place: Place, size_bytes: int) -> Iterator[Device]:
    """The disk alone. Raises NoPeer where it cannot be had."""
    try:
        device = Device(place.directory, size_bytes)
    except OSError as error:
        raise NoPeer(f"no O_DIRECT in {place.directory}: choose --directory on a disk ({error})") from error
    with device:
        yield device


def _sources(rig: Rig) -> list[Bytes]:
    """Two contents, so that what was there before never passes for what should be there."""
    return [content(owner, rig.size_bytes) for owner in range(2)]


def _memory(rig: Rig) -> memoryview:
    return rig.cache.arena.view(Slot(0, ALIGN_BYTES, rig.size_bytes))


def _verify(rig: Rig, source: Bytes, what: str) -> None:
    """Check the rows in the arena, in the order in which `save` lays them."""
    (session,) = rig.cache.ledger.sessions()
    read = 0
    for segment in session.segments:
        read += _verify_segment(rig, segment, source[read:], what)


def _verify_segment(rig: Rig, segment: Segment, source: Bytes, what: str) -> int:
    if segment.memory is None:
        raise RuntimeError("a segment that was read is not in DRAM")
    view, read = rig.cache.arena.view(segment.memory), 0
    for spec in rig.layout.specs:
        found = np.frombuffer(view[rig.layout.rows(spec.stream, 0, segment.row_count)], np.uint8)
        check(found, source[read : read + found.nbytes], what)
        read += found.nbytes
    return read


def _verify_device(found: memoryview, source: Bytes, what: str) -> None:
    check(np.frombuffer(found, np.uint8), source, what)


@contextmanager
def _reading(place: Place) -> Iterator[Sides]:
    with _rig(place) as (runner, rig, device):
        first, second = _sources(rig)
        raw = np.frombuffer(_memory(rig), np.uint8)
        raw[:] = second
        device.write(_memory(rig), Way(2, 4 << 20))
        way = best_way(lambda chosen: device.read(_memory(rig), chosen))
        runner.run(save(rig, first.data))

        def ours(_: int) -> float:
            taken = runner.run(promote(rig))
            _verify(rig, first, "read from SSD")
            return taken

        def beside(_: int) -> float:
            runner.run(_demote(rig))
            taken = device.read(_memory(rig), way)
            _verify_device(_memory(rig), second, "O_DIRECT read")
            return taken

        yield Sides(ours, beside, _notes(rig, way))


async def _demote(rig: Rig) -> None:
    session = next(iter(rig.cache.ledger.sessions()))
    await rig.cache.sessions.demote(session.tenant, session.session_id)


@contextmanager
def _saving(place: Place) -> Iterator[Sides]:
    with _rig(place) as (runner, rig, device):
        sources = _sources(rig)
        way = best_way(lambda chosen: device.write(_memory(rig), chosen))

        def ours(number: int) -> float:
            source = sources[number % 2]
            taken = runner.run(save(rig, source.data))
            # Only bytes that the disk gives back count.
            runner.run(promote(rig))
            _verify(rig, source, "saved to SSD")
            return taken

        def beside(number: int) -> float:
            runner.run(_demote(rig))
            np.frombuffer(_memory(rig), np.uint8)[:] = sources[number % 2]
            taken = device.write(_memory(rig), way)
            device.read(_memory(rig), way)
            _verify_device(_memory(rig), sources[number % 2], "O_DIRECT write")
            return taken

        yield Sides(ours, beside, _notes(rig, way))


def _notes(rig: Rig, way: Way) -> dict[str, object]:
    return {"best O_DIRECT": str(way), "bytes a round": rig.size_bytes}


NAME = "sessions/measured"


@dataclass(frozen=True, slots=True)
class _Served:
    """A server without sessions, the device, and what of the arena the next session will lie in."""

    contexts: Contexts
    device: Device
    memory: memoryview

    @property
    def raw(self) -> Bytes:
        """The memory as an array."""
        return np.frombuffer(self.memory, np.uint8)

    def demote(self) -> None:
        """Leave the arena to the device."""
        self.contexts.client.admin.demote_session(NAME)

    def save(self, index: int) -> float:
        """Append a context, durable before the answer; seconds."""
        session = self.contexts.create(NAME.removeprefix("sessions/"))
        c = self.contexts
        return seconds(
            lambda: c.client.sessions.open(session, c.model).append(c.rows[index], durability=Durability.DISK)
        )

    def delete(self) -> None:
        """Make room for the next one."""
        self.contexts.client.sessions.open(NAME).delete()

    def promote(self) -> float:
        """Lease all of a demoted session: seconds until its rows are in the arena, verified."""
        return seconds(lambda: self.contexts.client.sessions.open(NAME, self.contexts.model).read().close())

    def verify(self, index: int, what: str) -> None:
        """Check what the server has."""
        with self.contexts.client.sessions.open(NAME, self.contexts.model).read() as rows:
            copy_out(rows, self.contexts.out)
        self.contexts.verify(index, what)

    def notes(self, way: Way) -> dict[str, object]:
        """Facts to print with the row."""
        return {"best O_DIRECT": str(way), "bytes a round": len(self.memory)}


@contextmanager
def _served(place: Place) -> Iterator[_Served]:
    place = replace(place, scale=replace(place.scale, context_count=2))
    size_bytes = slots_bytes(place.scale, 1)
    with (
        contexts(place, access("local-socket", "local"), is_filled=False) as c,
        opened_device(place, size_bytes) as device,
        Path(c.server.ready["arena"]["path"]).open("r+b") as file,
    ):
        arena = memoryview(mmap.mmap(file.fileno(), ALIGN_BYTES + size_bytes))
        yield _Served(c, device, arena[ALIGN_BYTES:])


@contextmanager
def _client_reading(place: Place) -> Iterator[Sides]:
    with _served(place) as served:
        others = content(2, len(served.memory))
        served.raw[:] = others
        served.device.write(served.memory, Way(2, 4 << 20))
        way = best_way(lambda chosen: served.device.read(served.memory, chosen))
        served.save(0)
        served.demote()

        def ours(_: int) -> float:
            taken = served.promote()
            served.verify(0, "read from SSD by a client")
            served.demote()
            return taken

        def beside(_: int) -> float:
            taken = served.device.read(served.memory, way)
            check(served.raw, others, "O_DIRECT read")
            return taken

        yield Sides(ours, beside, served.notes(way))


@contextmanager
def _client_saving(place: Place) -> Iterator[Sides]:
    with _served(place) as served:
        sources = [content(2 + owner, len(served.memory)) for owner in range(2)]
        way = best_way(lambda chosen: served.device.write(served.memory, chosen))

        def ours(number: int) -> float:
            taken = served.save(number % 2)
            # Only bytes that the disk gives back count.
            served.demote()
            served.verify(number % 2, "saved to SSD by a client")
            served.delete()
            return taken

        def beside(number: int) -> float:
            served.raw[:] = sources[number % 2]
            taken = served.device.write(served.memory, way)
            served.device.read(served.memory, way)
            check(served.raw, sources[number % 2], "O_DIRECT write")
            return taken

        yield Sides(ours, beside, served.notes(way))


_CLIENT_ROWS = (
    Row(
        "ssd-client-read",
        "SSD read by a client's lease",
        "O_DIRECT read, best depth and size",
        at_least(0.9),
        _client_reading,
    ),
    Row(
        "ssd-client-save",
        "SSD save by a client, durable",
        "O_DIRECT write + one fdatasync",
        at_least(0.9),
        _client_saving,
    ),
)


_NAME = "sessions/measured"


def _promoting(c: Contexts) -> Side:
    """Lease a demoted context: seconds until its rows are in the arena, verified."""
    c.client.sessions.open(c.create(_NAME.removeprefix("sessions/")), c.model).append(
        c.rows[0], durability=Durability.DISK
    )

    def side(_: int) -> float:
        c.client.admin.demote_session(_NAME)
        taken = seconds(lambda: c.client.sessions.open(_NAME, c.model).read().close())
        with c.client.sessions.open(_NAME, c.model).read() as rows:
            copy_out(rows, c.out)
        c.verify(0, "read from SSD")
        return taken

    return side


@contextmanager
def _reading_into_pages(place: Place) -> Iterator[Sides]:
    scale = replace(place.scale, context_count=1)
    arena_bytes = -(-arena_bytes_of(scale) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    free_bytes = free_huge_bytes()
    if free_bytes < arena_bytes:
        missing = -(-(arena_bytes - free_bytes) // HUGE_PAGE_BYTES)
        raise NoPeer(f"{missing} more huge pages have to be reserved: sysctl vm.nr_hugepages")

    def served(pages: str) -> tuple[Place, tuple[str, ...]]:
        own = replace(place, directory=place.directory / pages, scale=scale)
        return own, ("--arena-huge-pages", pages, "--arena-size-bytes", str(arena_bytes))

    (huge, with_huge), (small, with_small), way = served("on"), served("off"), access("local-socket", "local")
    with (
        contexts(huge, way, is_filled=False, options=with_huge) as ours,
        contexts(small, way, is_filled=False, options=with_small) as beside,
    ):
        yield Sides(_promoting(ours), _promoting(beside), {"bytes a round": scale.context_bytes})


_HUGE_PAGE_ROWS = (
    Row(
        "ssd-huge-pages",
        "SSD read into an arena of 2 MiB pages",
        "into 4 KiB pages",
        at_least(1.4),
        _reading_into_pages,
    ),
)
ROWS = (
    Row("ssd-read", "SSD read into the arena", "O_DIRECT read, best depth and size", at_least(0.9), _reading),
    Row(
        "ssd-save",
        "SSD save, durable, checksummed",
        "O_DIRECT write + one fdatasync",
        at_least(0.9),
        _saving,
    ),
    *_CLIENT_ROWS,
    *_HUGE_PAGE_ROWS,
)
