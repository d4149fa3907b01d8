"""CPU seconds of both ends per path, beside those of a copy of the same bytes."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from ctxcache.bench.contexts import Contexts, access, contexts, copy_out
from ctxcache.bench.row import Place, Row, Sides
from ctxcache.bench.rows import local, remote
from ctxcache.bench.statistics import at_most

Move = Callable[[Contexts, int], object]


def process_seconds(pid: int) -> float:
    """CPU that all threads of a process have used, by the kernel's clock of that process."""
    # CPUCLOCK_SCHED of linux/posix-timers.h: Python names these clocks only for its own threads.
    return time.clock_gettime_ns((~pid << 3) | 2) / 1e9


def opened(ways: tuple[str, ...], move: Move) -> Callable[[Place], AbstractContextManager[Sides]]:
    """A row's setup; `move` brings context `index` to the destination."""

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        way = access(*ways)
        with contexts(place, way) as c:
            notes: dict[str, object] = {"access": way, "gigabytes a round": place.scale.walk_bytes / 1e9}
            yield Sides(
                lambda _: c.walk(lambda index: _spent(c, move, index)),
                lambda _: c.walk(lambda index: _spent(c, _copy, index)),
                notes,
            )

    return setup


def _spent(c: Contexts, move: Move, index: int) -> float:
    ours, server = time.process_time(), process_seconds(c.server.pid)
    move(c, index)
    taken = time.process_time() - ours + process_seconds(c.server.pid) - server
    c.verify(index, "what was moved")
    return taken


def _copy(c: Contexts, index: int) -> None:
    np.copyto(c.whole, c.data[index])


def _read(c: Contexts, index: int) -> None:
    with c.client.read(c.sessions[index], c.model) as rows:
        copy_out(rows, c.out)


def _row(name: str, title: str, ways: tuple[str, ...], bound: float) -> Row:
    path = f"CPU s per GB, both ends, {title}"
    return Row(name, path, "a copy", at_most(bound), opened(ways, _read), unit="CPU s")


ROWS = (
    _row("cpu-local", "local read", (*local.SOCKET, *local.GRPC), 1.3),
    _row("cpu-bulk", "bulk channel read", remote.BULK, 3),
    _row("cpu-grpc", "gRPC read", remote.GRPC, 8),
)
