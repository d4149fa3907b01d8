"""SSD reads and durable saves of one context, beside O_DIRECT on the same disk. In this process, over a Cache.

The destination is the same memory for both. Worst case: a disk without O_DIRECT, which is a NoPeer.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ctxcache.bench.content import Bytes, check, content
from ctxcache.bench.contexts import slots_bytes
from ctxcache.bench.device import Device, Way, best_way
from ctxcache.bench.row import NoPeer, Place, Row, Sides
from ctxcache.bench.ssd import Rig, Shape, opened, promote, save
from ctxcache.bench.statistics import at_least
from ctxcache.core.segment import Segment
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.format.slot import Slot


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
    (session,) = rig.cache.state.sessions.values()
    read = 0
    for segment in session.segments:
        read += _verify_segment(rig, segment, source[read:], what)


def _verify_segment(rig: Rig, segment: Segment, source: Bytes, what: str) -> int:
    if segment.dram is None:
        raise RuntimeError("a segment that was read is not in DRAM")
    view, read = rig.cache.arena.view(segment.dram), 0
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
    session = next(iter(rig.cache.state.sessions.values()))
    await rig.cache.sessions.demote(session.tenant, session.session_id)


@contextmanager
def _saving(place: Place) -> Iterator[Sides]:
    with _rig(place) as (runner, rig, device):
        sources = _sources(rig)
        way = best_way(lambda chosen: device.write(_memory(rig), chosen))

        def ours(number: int) -> float:
            source = sources[number % 2]
            taken = runner.run(save(rig, source.data))
            # What counts is what the disk gives back.
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


ROWS = (
    Row("ssd-read", "SSD read into the arena", "O_DIRECT read, best depth and size", at_least(0.9), _reading),
    Row(
        "ssd-save", "SSD save, durable, checksummed", "O_DIRECT write + one fdatasync", at_least(0.9),
        _saving,
    ),
)  # fmt: skip
