"""Reading and saving through shared memory, beside one thread that copies the same bytes and adds them up.

Every byte is verified by its reader and added up by its writer, so that a copy alone is no limit of theirs.
Handing over by the control socket stands beside an exchange of its messages' bytes, by a client that leaves
verifying to its caller; verified, beside one pass of the checksum.
"""

import itertools
import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
from xxhash import xxh3_64_intdigest

from ctxcache.client.client import Verify
from ctxcache.client.rows import SessionRows
from lab.bench import bare_socket
from lab.bench.contexts import Bytes, Contexts, access, check, contexts, seconds
from lab.bench.row import Place, Row, Side, Sides, at_least, at_most

GRPC = ("local-grpc", "local")
SOCKET = ("local-socket",)


def copying(c: Contexts) -> Side:
    """One thread copies every context into the same warm memory."""

    def step(index: int) -> float:
        taken = seconds(lambda: np.copyto(c.whole, c.data[index]))
        c.verify(index, "copy")
        return taken

    return lambda _: c.walk(step)


def reading_summed(c: Contexts) -> Side:
    """As `copying`, added up in the same pass, out of shared memory in pages as small as the arena's."""
    shared = _shared(c)

    def step(index: int) -> float:
        taken = seconds(lambda: _copy_summed(c.whole, shared[index]))
        c.verify(index, "copy")
        return taken

    return lambda _: c.walk(step)


def saving_summed(c: Contexts) -> Side:
    """As `reading_summed`, into shared memory: each context into another one's place, as each save is."""
    shared = _shared(c)
    count = itertools.count(1)

    def walk() -> float:
        shift = next(count)

        def step(index: int) -> float:
            place = shared[(index + shift) % len(shared)]
            taken = seconds(lambda: _copy_summed(place, c.data[index]))
            check(place, c.data[index], "copy")
            return taken

        return c.walk(step)

    return lambda _: walk()


def _copy_summed(target: Bytes, source: Bytes) -> None:
    for begin in range(0, source.size, PIECE_BYTES):
        piece = target[begin : begin + PIECE_BYTES]
        np.copyto(piece, source[begin : begin + PIECE_BYTES])
        xxh3_64_intdigest(piece.data)


def hashing(c: Contexts) -> Side:
    """One thread makes the checksum of every context, in shared memory."""
    shared = _shared(c)
    return lambda _: c.walk(lambda index: seconds(lambda: xxh3_64_intdigest(shared[index].data)))


def _shared(c: Contexts) -> list[Bytes]:
    found = []
    for flat in c.data:
        place = np.frombuffer(mmap.mmap(-1, flat.size), np.uint8)
        np.copyto(place, flat)
        found.append(place)
    return found


@contextmanager
def handed_over(place: Place) -> Iterator[Sides]:
    """The setup of the control socket's row: hand-over moves no bytes, and a copy says nothing of it."""
    way = access(*SOCKET)
    with (
        contexts(place, way, verify="never") as c,
        bare_socket.exchanging(REQUEST_BYTES, ANSWER_BYTES) as exchange,
    ):

        def step(index: int) -> float:
            taken = seconds(exchange)
            # As ours: the caches are full of the context's bytes when the next one is asked for.
            np.copyto(c.whole, c.data[index])
            c.verify(index, "copy")
            return taken

        notes: dict[str, object] = {"access": way, "bytes a round": 0}
        yield Sides(handing_over(c), lambda _: c.walk(step), notes)


def reading(c: Contexts) -> Side:
    """Read every context into warm memory: lease it, copy it out, release."""

    def step(index: int) -> float:
        taken = seconds(lambda: c.read(index))
        c.verify(index, "what was read")
        return taken

    return lambda _: c.walk(step)


def handing_over(c: Contexts) -> Side:
    """Lease every context, make views of all its rows, release. Checked under a second lease."""

    def views(rows: SessionRows) -> None:
        for stream in rows.streams:
            rows.pieces(stream)

    def acquire(index: int) -> None:
        with c.client.sessions.open(c.sessions[index], c.model).read() as rows:
            views(rows)

    def step(index: int) -> float:
        taken = seconds(lambda: acquire(index))
        c.read(index)
        c.verify(index, "what is handed over")
        return taken

    return lambda _: c.walk(step)


def saving(c: Contexts) -> Side:
    """Reserve, copy, commit into DRAM, into a new session each time; read back and deleted after."""

    def step(index: int) -> float:
        session = c.create("saved")
        taken = seconds(lambda: c.client.sessions.open(session, c.model).append(c.rows[index]))
        with c.client.sessions.open(session.name, c.model).read() as rows:
            for stream, expected in c.rows[index].items():
                check(np.concatenate(rows.pieces(stream)), expected, "what was saved")
        c.client.sessions.open(session.name).delete()
        return taken

    return lambda _: c.walk(step)


def opened(
    ways: tuple[str, ...],
    ours: Callable[[Contexts], Side],
    beside: Callable[[Contexts], Side] = copying,
    verify: Verify = "always",
) -> Callable[[Place], AbstractContextManager[Sides]]:
    """A row's setup: a server, contexts, a client of this access."""

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        way = access(*ways)
        with contexts(place, way, verify=verify) as c:
            yield Sides(ours(c), beside(c), {"access": way})

    return setup


PIECE_BYTES = 256 << 10
"""The rows of a stream in a segment of 64 tokens: they have a checksum, and fit into the second cache."""
REQUEST_BYTES, ANSWER_BYTES = 128, 1024
"""A lease of 64 MiB: what asks for it, and session, layout and runs of its segments."""
_COPY = "memory copy, one thread"
_COPY_SUMMED = "copy and checksum in one pass, one thread"
ROWS = (
    Row(
        "local-handover-grpc",
        "local read, handed over; gRPC lease stream",
        _COPY,
        at_most(0.06),
        opened(GRPC, handing_over, verify="never"),
    ),
    Row(
        "local-handover-socket",
        "local read, handed over; control socket",
        "bare exchange of as many bytes, Unix socket",
        at_most(3),
        handed_over,
        is_moving=False,
    ),
    Row(
        "local-verified-socket",
        "local read, handed over and verified; control socket",
        "its checksum by one thread",
        at_least(0.85),
        opened(SOCKET, handing_over, hashing),
    ),
    Row(
        "local-read-grpc",
        "local read, copied out; gRPC lease stream",
        _COPY_SUMMED,
        at_least(0.75),
        opened(GRPC, reading, reading_summed),
    ),
    Row(
        "local-read-socket",
        "local read, copied out; control socket",
        _COPY_SUMMED,
        at_least(0.85),
        opened(SOCKET, reading, reading_summed),
    ),
    Row(
        "local-save-grpc",
        "local save; gRPC lease stream",
        _COPY_SUMMED,
        at_least(0.75),
        opened(GRPC, saving, saving_summed),
    ),
    Row(
        "local-save-socket",
        "local save; control socket",
        _COPY_SUMMED,
        at_least(0.85),
        opened(SOCKET, saving, saving_summed),
    ),
)
