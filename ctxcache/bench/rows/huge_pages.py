"""SSD reads into an arena of 2 MiB pages, beside the same into one of 4 KiB pages.

Two servers with the same context on the same disk. Worst case: no huge pages are reserved, which is a NoPeer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ctxcache.bench.contexts import Contexts, access, arena_bytes_of, contexts, copy_out, seconds
from ctxcache.bench.row import NoPeer, Place, Row, Side, Sides
from ctxcache.bench.statistics import at_least
from ctxcache.tiers.shared_memory import HUGE_PAGE_BYTES, free_huge_bytes
from ctxcache.v1.session_pb2 import DURABILITY_DISK

_NAME = "sessions/measured"


def _promoting(c: Contexts) -> Side:
    """Lease a demoted context: seconds until its rows are in the arena, verified."""
    c.client.append(c.create(_NAME.removeprefix("sessions/")), c.model, c.rows[0], durability=DURABILITY_DISK)

    def side(_: int) -> float:
        c.client.demote_session(_NAME)
        taken = seconds(lambda: c.client.read(_NAME, c.model).close())
        with c.client.read(_NAME, c.model) as rows:
            copy_out(rows, c.out)
        c.verify(0, "read from SSD")
        return taken

    return side


@contextmanager
def _reading(place: Place) -> Iterator[Sides]:
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


ROWS = (
    Row("ssd-huge-pages", "SSD read into an arena of 2 MiB pages", "into 4 KiB pages", at_least(1.4), _reading),
)  # fmt: skip
