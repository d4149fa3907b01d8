"""Two local readers at once, in processes of their own, beside two processes that copy memory."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from ctxcache.bench.children import Child, child
from ctxcache.bench.contexts import access, contexts
from ctxcache.bench.row import Place, Row, Sides
from ctxcache.bench.statistics import at_least

READER_COUNT = 2


@contextmanager
def _readers(place: Place) -> Iterator[Sides]:
    way = access("local-socket", "local")
    with contexts(place, way) as c, ExitStack() as stack:
        target = c.server.target(place.transport)
        reading, copying = (
            [stack.enter_context(child(kind, target, way, place.scale)) for _ in range(READER_COUNT)]
            for kind in ("read", "copy")
        )
        yield Sides(
            lambda _: _together(reading), lambda _: _together(copying),
            {"access": way, "readers": READER_COUNT, "bytes a round": READER_COUNT * place.scale.walk_bytes},
        )  # fmt: skip


def _together(children: Sequence[Child]) -> float:
    """Seconds until all have moved their bytes; what they moved is checked after."""
    begin_ns = time.perf_counter_ns()
    for one in children:
        one.start()
    for one in children:
        one.wait()
    taken = (time.perf_counter_ns() - begin_ns) / 1e9
    for one in children:
        one.wait()
    return taken


ROWS = (
    Row(
        "two-readers", "two local readers at once", "two processes copying memory", at_least(0.9), _readers
    ),
)  # fmt: skip
