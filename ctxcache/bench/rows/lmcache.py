"""A context restored into paged KV, and saved, beside LMCache's server in shared-memory mode.

Ours is timed as LMCache's benchmark times itself: from the request until every row is in its page.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import numpy as np

from ctxcache.bench.content import Bytes, check, warm
from ctxcache.bench.contexts import Contexts, contexts, seconds
from ctxcache.bench.lmcache_peer import BLOCK_TOKENS, REQUESTS, lmcache
from ctxcache.bench.row import Place, Row, Side, Sides
from ctxcache.bench.statistics import at_least
from ctxcache.format.streams import TOKENS, Stream


class Pages:
    """Paged KV of an engine: per layer [blocks, tokens of a block, row_bytes], half of the blocks a context's."""

    def __init__(self, c: Contexts) -> None:
        self._layers: dict[Stream, Bytes] = {}
        self._table: list[int] = []
        for stream, rows in c.rows[0].items():
            if stream != TOKENS:
                count = -(-len(rows) // BLOCK_TOKENS)
                # A block table of a busy engine: no two neighbours.
                self._table = list(np.random.default_rng(5).permutation(2 * count)[:count])
                flat = warm(2 * count * BLOCK_TOKENS * rows.shape[1])
                self._layers[stream] = flat.reshape(2 * count, BLOCK_TOKENS, rows.shape[1])

    def fill(self, c: Contexts, index: int) -> None:
        """Lease a context and put every row into its page, straight from the arena."""
        with c.client.read(c.sessions[index], c.model) as reading:
            for stream, pages in self._layers.items():
                begin = 0
                for rows in reading.pieces(stream):
                    count = len(rows) // BLOCK_TOKENS
                    pages[self._table[begin : begin + count]] = rows.reshape(count, BLOCK_TOKENS, -1)
                    begin += count
            reading.check()

    def verify(self, c: Contexts, index: int) -> None:
        """Check every page. Raises WrongBytes."""
        for stream, pages in self._layers.items():
            check(pages[self._table].reshape(c.rows[index][stream].shape), c.rows[index][stream], "a page")


def _retrieving(c: Contexts) -> Side:
    pages = Pages(c)

    def once(index: int) -> float:
        took_s = seconds(lambda: pages.fill(c, index))
        pages.verify(c, index)
        return took_s

    return lambda _: median(once(i % len(c.data)) for i in range(REQUESTS))


def _storing(c: Contexts) -> Side:
    def once(index: int) -> float:
        session = c.create("saved")
        took_s = seconds(lambda: c.client.append(session, c.model, c.rows[index]))
        with c.client.read(session.name, c.model) as rows:
            for stream, expected in c.rows[index].items():
                check(np.concatenate(rows.pieces(stream)), expected, "what was saved")
        c.client.delete_session(session.name)
        return took_s

    return lambda _: median(once(i % len(c.data)) for i in range(REQUESTS))


@contextmanager
def beside(what: str, place: Place) -> Iterator[Sides]:
    """Both servers run; in turn each moves as many contexts as LMCache's benchmark does in one run."""
    with lmcache(place) as peer, contexts(place, "local-socket") as c:
        ours = (_storing if what == "store" else _retrieving)(c)
        notes: dict[str, object] = {"bytes a round": place.scale.context_bytes, "requests a round": REQUESTS}
        yield Sides(ours, lambda _: peer.medians()[what != "store"], notes)


ROWS = (
    Row("lmcache-retrieve", "local read, scattered into pages", "LMCache retrieve, shared memory", at_least(2), partial(beside, "retrieve")),
    Row("lmcache-store", "local save", "LMCache store, shared memory", at_least(3), partial(beside, "store")),
)  # fmt: skip
