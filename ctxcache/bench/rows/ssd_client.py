"""SSD reads and durable saves of a running server as its client sees them, beside O_DIRECT on the same disk.

The device alone fills, and is filled from, the memory in the server's arena where the session lies: which
memory it is makes a difference. Worst case: a disk without O_DIRECT, which is a NoPeer.
"""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ctxcache.bench.content import Bytes, check, content
from ctxcache.bench.contexts import Contexts, access, contexts, copy_out, seconds, slots_bytes
from ctxcache.bench.device import Device, Way, best_way
from ctxcache.bench.row import Place, Row, Sides
from ctxcache.bench.rows.ssd import opened_device
from ctxcache.bench.statistics import at_least
from ctxcache.format.layout import ALIGN_BYTES
from ctxcache.v1.session_pb2 import DURABILITY_DISK

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
        self.contexts.client.demote_session(NAME)

    def save(self, index: int) -> float:
        """Append a context, durable before the answer; seconds."""
        session = self.contexts.create(NAME.removeprefix("sessions/"))
        c = self.contexts
        return seconds(lambda: c.client.append(session, c.model, c.rows[index], durability=DURABILITY_DISK))

    def delete(self) -> None:
        """Make room for the next one."""
        self.contexts.client.delete_session(NAME)

    def promote(self) -> float:
        """Lease all of a demoted session: seconds until its rows are in the arena, verified."""
        return seconds(lambda: self.contexts.client.read(NAME, self.contexts.model).close())

    def verify(self, index: int, what: str) -> None:
        """Check what the server has."""
        with self.contexts.client.read(NAME, self.contexts.model) as rows:
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
def _reading(place: Place) -> Iterator[Sides]:
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
def _saving(place: Place) -> Iterator[Sides]:
    with _served(place) as served:
        sources = [content(2 + owner, len(served.memory)) for owner in range(2)]
        way = best_way(lambda chosen: served.device.write(served.memory, chosen))

        def ours(number: int) -> float:
            taken = served.save(number % 2)
            # What counts is what the disk gives back.
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


ROWS = (
    Row(
        "ssd-client-read", "SSD read by a client's lease", "O_DIRECT read, best depth and size", at_least(0.9),
        _reading,
    ),
    Row(
        "ssd-client-save", "SSD save by a client, durable", "O_DIRECT write + one fdatasync", at_least(0.9),
        _saving,
    ),
)  # fmt: skip
