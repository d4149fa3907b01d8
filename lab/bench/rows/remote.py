"""Reading and saving beside peers: over sockets beside Redis, into paged KV beside LMCache.

A restore into paged KV is timed as LMCache's benchmark times itself: from the request until every row is in
its page.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median

import numpy as np

from ctxcache.format.streams import TOKENS, Stream
from lab.bench import bare_grpc, bare_socket
from lab.bench.contexts import Bytes, Contexts, access, check, contexts, copy_out, seconds, warm
from lab.bench.peers import BLOCK_TOKENS, REQUESTS, RedisClient, lmcache, redis_client, values_of
from lab.bench.row import Place, Row, Scale, Side, Sides, at_least
from lab.bench.rows.local import reading

MIB = 1 << 20
GRPC = ("grpc", "remote")
BULK = ("bulk",)
BARE_NOTE = "a bare socket"
Setup = Callable[[Place], AbstractContextManager[Sides]]


def saving(c: Contexts) -> Side:
    """Append every context to a new session; read back and deleted after."""

    def step(index: int) -> float:
        session = c.create("saved")
        taken = seconds(lambda: c.client.sessions.open(session, c.model).append(c.rows[index]))
        with c.client.sessions.open(session.name, c.model).read() as rows:
            copy_out(rows, c.out)
        c.verify(index, "remote save")
        c.client.sessions.open(session.name).delete()
        return taken

    return lambda _: c.walk(step)


def redis_reading(c: Contexts, redis: RedisClient, value_bytes: int) -> Side:
    """GET every context's values; they come as bytes objects and stay so."""
    names = _names(c, value_bytes)
    for index, flat in enumerate(c.data):
        for name, value in zip(names[index], values_of(flat, value_bytes), strict=True):
            redis.set(name, value)

    def step(index: int) -> float:
        found: list[bytes | None] = []
        taken = seconds(lambda: found.extend(map(redis.get, names[index])))
        for value, expected in zip(found, values_of(c.data[index], value_bytes), strict=True):
            check(np.frombuffer(value or b"", np.uint8), np.frombuffer(expected, np.uint8), "Redis GET")
        return taken

    return lambda _: c.walk(step)


def redis_saving(c: Contexts, redis: RedisClient, value_bytes: int) -> Side:
    """SET every context's values; read back and deleted after."""
    names = _names(c, value_bytes)

    def step(index: int) -> float:
        values = values_of(c.data[index], value_bytes)
        taken = seconds(
            lambda: [redis.set(name, value) for name, value in zip(names[index], values, strict=True)]
        )
        for name, expected in zip(names[index], values, strict=True):
            found = np.frombuffer(redis.get(name) or b"", np.uint8)
            check(found, np.frombuffer(expected, np.uint8), "Redis SET")
        redis.delete(*names[index])
        return taken

    return lambda _: c.walk(step)


def _names(c: Contexts, value_bytes: int) -> list[list[str]]:
    return [
        [f"{owner}:{part}" for part in range(len(values_of(flat, value_bytes)))]
        for owner, flat in enumerate(c.data)
    ]


def beside_redis(ways: tuple[str, ...], value_bytes: int, *, is_read: bool) -> Setup:
    """A row's setup: this access beside Redis with values of this size."""
    ours, beside = (reading, redis_reading) if is_read else (saving, redis_saving)

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        way = access(*ways)
        with (
            contexts(place, way, is_filled=is_read) as c,
            redis_client(place) as redis,
            over_socket(place.scale) if ways == BULK else nullcontext() as bare,
        ):
            notes: dict[str, object] = {"access": way, "transport": place.transport}
            side = beside(c, redis, value_bytes)
            if bare is not None:
                side = with_bare(c, side, bare[0] if is_read else bare[1], notes)
            yield Sides(ours(c), side, notes)

    return setup


def with_bare(c: Contexts, redis: Side, ask: "Ask", notes: dict[str, object]) -> Side:
    """Redis' side, after which a bare socket moves the same bytes: the ratio of the two is noted.

    It is what the channel could reach beside Redis if it did nothing but send.
    """
    ratios: list[float] = []
    moved = [flat.copy() for flat in c.data]

    def side(number: int) -> float:
        taken = redis(number)
        alone = c.walk(lambda index: seconds(partial(ask, index, moved[index])))
        ratios.append(taken / alone)
        notes[BARE_NOTE] = f"{median(ratios):.2f} times Redis"
        return taken

    return side


Ask = Callable[[int, Bytes], None]
Bare = Callable[[Scale], AbstractContextManager[tuple[Ask, Ask]]]
"""The transport alone: reading context i into memory, and saving it there; both wait until it is done."""


@contextmanager
def over_socket(scale: Scale) -> Iterator[tuple[Ask, Ask]]:
    """A bare Python socket, over TCP."""
    with bare_socket.far_side(scale.context_count, scale.context_bytes) as (connection, _):
        yield partial(bare_socket.ask_read, connection), partial(bare_socket.ask_save, connection)


@contextmanager
def over_grpc(scale: Scale) -> Iterator[tuple[Ask, Ask]]:
    """Bare streams of gRPC, over TCP."""
    with bare_grpc.far_side(scale.context_count, scale.context_bytes) as far:
        yield partial(bare_grpc.ask_read, far), partial(bare_grpc.ask_save, far)


def beside_bare(ways: tuple[str, ...], transport: Bare, what: str, *, is_read: bool) -> Setup:
    """A row's setup: this access beside its transport with nothing around it."""

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        way = access(*ways)
        with (
            contexts(place, way, is_filled=is_read) as c,
            transport(place.scale) as (ask_read, ask_save),
        ):

            def save(index: int) -> float:
                taken = seconds(lambda: ask_save(index, c.data[index]))
                read(index)
                return taken

            def read(index: int) -> float:
                taken = seconds(lambda: ask_read(index, c.whole))
                c.verify(index, what)
                return taken

            c.walk(save)
            ours, bare = (reading, read) if is_read else (saving, save)
            yield Sides(ours(c), lambda _: c.walk(bare), {"access": way})

    return setup


def _redis_rows(kind: str, title: str, ways: tuple[str, ...], bounds: tuple[float, ...]) -> Iterator[Row]:
    for is_read in (True, False):
        verb, command = ("read", "GET") if is_read else ("save", "SET")
        for mib, bound in zip((1, 4, 16), bounds, strict=True):
            yield Row(
                f"{kind}-{verb}-redis-{mib}",
                f"remote {verb}, {title}",
                f"Redis {command}, {mib} MiB values",
                at_least(bound),
                beside_redis(ways, mib * MIB, is_read=is_read),
            )


def _bare_rows(
    kind: str, name: str, title: str, what: str, ways: tuple[str, ...], transport: Bare
) -> Iterator[Row]:
    for verb in ("read", "save"):
        yield Row(
            f"{kind}-{verb}-{name}",
            f"remote {verb}, {title}",
            what,
            at_least(0.85),
            beside_bare(ways, transport, what, is_read=verb == "read"),
        )


class Pages:
    """Paged KV of an engine.

    Per layer [blocks, tokens of a block, row_bytes], half of the blocks a context's.
    """

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
        with c.client.sessions.open(c.sessions[index], c.model).read() as reading:
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
        took_s = seconds(lambda: c.client.sessions.open(session, c.model).append(c.rows[index]))
        with c.client.sessions.open(session.name, c.model).read() as rows:
            for stream, expected in c.rows[index].items():
                check(np.concatenate(rows.pieces(stream)), expected, "what was saved")
        c.client.sessions.open(session.name).delete()
        return took_s

    return lambda _: median(once(i % len(c.data)) for i in range(REQUESTS))


@contextmanager
def beside(what: str, place: Place) -> Iterator[Sides]:
    """Both servers run; in turn each moves as many contexts as LMCache's benchmark does in one run."""
    with lmcache(place) as peer, contexts(place, "local-socket") as c:
        ours = (_storing if what == "store" else _retrieving)(c)
        notes: dict[str, object] = {"bytes a round": place.scale.context_bytes, "requests a round": REQUESTS}
        yield Sides(ours, lambda _: peer.medians()[what != "store"], notes)


_LMCACHE_ROWS = (
    Row(
        "lmcache-retrieve",
        "local read, scattered into pages",
        "LMCache retrieve, shared memory",
        at_least(2),
        partial(beside, "retrieve"),
    ),
    Row("lmcache-store", "local save", "LMCache store, shared memory", at_least(3), partial(beside, "store")),
)
ROWS = (
    *_redis_rows("grpc", "gRPC streams", GRPC, (1.0, 1.3, 1.7)),
    *_bare_rows("grpc", "bare", "gRPC streams", "bare gRPC streams of bytes", GRPC, over_grpc),
    *_bare_rows("bulk", "socket", "bulk channel", "bare Python socket, TCP", BULK, over_socket),
    *_redis_rows("bulk", "bulk channel", BULK, (2.2, 2.2, 2.2)),
    *_LMCACHE_ROWS,
)
