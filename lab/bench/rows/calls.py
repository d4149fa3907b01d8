"""Load beside load.

Two local readers at once, CPU seconds per path, and small calls while others move bytes.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from ctxcache.client.decode_batch import DecodeBatch
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.streams import Stream
from lab.bench import bare_grpc
from lab.bench.children import BARE_GRPC, BARE_SOCKET, Child, child
from lab.bench.contexts import (
    Bytes,
    Contexts,
    access,
    by_stream,
    check,
    content,
    contexts,
    model_of,
    seconds,
    slots_bytes,
)
from lab.bench.row import Place, Row, Scale, Side, Sides, WrongBytes, at_least, at_most, percentile
from lab.bench.rows import local, remote

Rows = dict[Stream, Bytes]
DECODING_COUNT = 64
LONG_TOKENS = 128 << 10
_SETTLE_S = 0.05
MOST_TRIES = 40
"""How often the calls of a round are made again while nothing moves beside them."""


def timed_calls(call: Callable[[], object], count: int, percent: float) -> float:
    """A percentile of what single calls take, in seconds."""
    return percentile([seconds(call) for _ in range(count)], percent)


class _Traffic:
    """A process that reads without end, in a round only while it is let."""

    def __init__(self, mover: Child) -> None:
        self._mover = mover
        self.walk_count = 0
        self.failure: WrongBytes | None = None
        threading.Thread(target=self._go_on, daemon=True).start()

    def let(self, number: int) -> None:
        """SIGCONT or SIGSTOP; waits until that shows."""
        os.kill(self._mover.process.pid, number)
        time.sleep(_SETTLE_S)

    def _go_on(self) -> None:
        try:
            while self._mover.process.poll() is None:
                self._mover.start()
                self._mover.wait()
                self._mover.wait()
                self.walk_count += 1
        except (WrongBytes, OSError, ValueError) as error:
            self.failure = error if isinstance(error, WrongBytes) else None


def beside_bulk(
    kind: str, ways: tuple[str, ...], percent: float
) -> Callable[[Place], AbstractContextManager[Sides]]:
    """A row's setup: GetSession while another process reads by this access, and while it is stopped.

    A bare pair of that `kind` is noted beside it, but for local reads, which no transport moves.
    """

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        way = access(*ways)
        with contexts(place, access("remote")) as c:
            target = c.server.target(place.transport)
            with ExitStack() as stack:
                mover = stack.enter_context(child("read", target, way, place.scale))
                traffic, count = _Traffic(mover), place.scale.call_count
                notes: dict[str, object] = {"traffic": way, "calls a round": count}
                idle = _asking(c, traffic, signal.SIGSTOP, percent, count)
                if kind != "local":
                    pair = stack.enter_context(_bare_pair(kind, place.scale))
                    idle = _with_bare(idle, pair, percent, count, notes)
                yield Sides(_asking(c, traffic, signal.SIGCONT, percent, count), idle, notes)
                os.kill(mover.process.pid, signal.SIGCONT)

    return setup


def _asking(c: Contexts, traffic: _Traffic, number: int, percent: float, call_count: int) -> Side:
    name = c.sessions[0].name

    def call() -> None:
        if c.client.sessions.get(name).token_count != c.sessions[0].token_count:
            raise WrongBytes("GetSession answered with another session")

    def side(_: int) -> float:
        traffic.let(number)
        before = c.client.admin.stats().read_token_count
        taken: list[float] = []
        for _ in range(MOST_TRIES):
            taken += [seconds(call) for _ in range(call_count)]
            if traffic.failure is not None:
                raise traffic.failure
            # A mover that checks what it has moved leases nothing meanwhile.
            if number == signal.SIGSTOP or c.client.admin.stats().read_token_count > before:
                return percentile(taken, percent)
        raise WrongBytes("nothing moved beside the calls")

    return side


BARE_NOTE = "a bare echo beside a bare mover"
_BarePair = tuple[Callable[[], object], _Traffic]
"""A call, and the traffic beside it."""


@contextmanager
def _bare_pair(kind: str, scale: Scale) -> Iterator[_BarePair]:
    """An echo by bare grpc.aio, and another process that reads by the transport of that kind alone."""
    # By gRPC the echo's own process moves the bytes, as a store does; a bare socket has one of its own.
    counts = (scale.context_count, scale.context_bytes) if kind == "grpc" else (1, 8)
    name = BARE_GRPC if kind == "grpc" else BARE_SOCKET
    with bare_grpc.far_side(*counts, client_count=1) as far, child(name, far.target, "-", scale) as mover:
        traffic = _Traffic(mover)
        try:
            yield partial(far.echoes[0], bytes(64)), traffic
        finally:
            os.kill(mover.process.pid, signal.SIGCONT)


def _with_bare(
    side: Side, pair: _BarePair, percent: float, call_count: int, notes: dict[str, object]
) -> Side:
    """The idle side, after which the bare pair makes as many calls: what waiting for a core alone costs."""
    ratios: list[float] = []
    call, traffic = pair
    traffic.let(signal.SIGSTOP)

    def beside(number: int) -> float:
        taken = side(number)
        traffic.let(signal.SIGCONT)
        busy = timed_calls(call, call_count, percent)
        traffic.let(signal.SIGSTOP)
        ratios.append(busy / timed_calls(call, call_count, percent))
        notes[BARE_NOTE] = f"{percentile(ratios, 50):.2f} times its idle"
        return taken

    return beside


@contextmanager
def _decoding(place: Place) -> Iterator[Sides]:
    way, scale = access("local-socket"), place.scale
    one = replace(scale, token_count=SEGMENT_TOKENS)
    room_bytes = slots_bytes(one, 2 * DECODING_COUNT)
    with contexts(place, way, is_filled=False, room_bytes=room_bytes) as c:
        names = [c.create(f"decode{index}").name for index in range(DECODING_COUNT)]
        steps = [_step(one, owner) for owner in range(2)]
        copied = {stream: np.ones_like(rows) for stream, rows in steps[0].items()}
        with c.client.sessions.decode_batch(names, c.model) as batch:
            # An engine maps the arena once; first touches would be most of the first steps.
            c.wait_populated()

            def ours(number: int) -> float:
                step = steps[number % 2]
                taken = seconds(lambda: _append_step(batch, step))
                if batch.failures:
                    raise next(iter(batch.failures.values()))
                _verify_step(c, names, batch, step)
                return taken

            def beside(number: int) -> float:
                step = steps[number % 2]
                taken = seconds(lambda: _copy_step(copied, step))
                for stream, rows in step.items():
                    check(copied[stream], rows, "copy")
                return taken

            notes: dict[str, object] = {
                "access": way,
                "messages a step": "one for all sessions",
                "bytes a step": _bytes(steps[0]),
            }
            yield Sides(ours, beside, notes)


def _step(one: Scale, owner: int) -> Rows:
    """A step's rows, [session, row] per stream."""
    flat = content(owner, one.context_bytes)
    return {
        stream: np.ascontiguousarray(rows[:DECODING_COUNT]) for stream, rows in by_stream(one, flat).items()
    }


def _bytes(step: Rows) -> int:
    return sum(rows.nbytes for rows in step.values())


def _append_step(batch: DecodeBatch, step: Rows) -> None:
    for stream, rows in step.items():
        batch.write(stream, rows)
    batch.commit()


def _verify_step(c: Contexts, names: list[str], batch: DecodeBatch, step: Rows) -> None:
    for lane, (name, token_count) in enumerate(zip(names, batch.token_counts, strict=True)):
        with c.client.sessions.open(name, c.model).read(
            begin=int(token_count) - 1, end=int(token_count)
        ) as rows:
            for stream in rows.streams:
                check(np.concatenate(rows.pieces(stream)), step[stream][lane], "a decoded token")


def _copy_step(into: Rows, step: Rows) -> None:
    for stream, rows in step.items():
        np.copyto(into[stream], rows)


@contextmanager
def _looking_up(place: Place) -> Iterator[Sides]:
    scale = place.scale
    token_count = LONG_TOKENS if scale.context_count == 4 else 4096
    long = replace(scale, context_count=1, layer_count=1, token_count=token_count, row_bytes=64)
    with contexts(replace(place, scale=long), access("remote")) as c:
        fingerprint = model_of(long).fingerprint()

        def look_up() -> None:
            (found,) = c.client.sessions.lookup([(c.sessions[0].name, fingerprint)])
            if found.token_count != token_count:
                raise WrongBytes(f"{found.token_count} tokens found of {token_count}")

        def empty() -> None:
            if not c.client.admin.health():
                raise WrongBytes("the server says it does not serve")

        yield Sides(
            lambda _: timed_calls(look_up, scale.call_count, 50),
            lambda _: timed_calls(empty, scale.call_count, 50),
            {"tokens": token_count, "empty call": "grpc.health.v1 Check"},
        )


def _beside_bulk_rows() -> Iterator[Row]:
    kinds = (
        ("grpc", "gRPC reads", remote.GRPC),
        ("bulk", "bulk channel reads", remote.BULK),
        ("local", "local reads", (*local.SOCKET, *local.GRPC)),
    )
    for kind, title, ways in kinds:
        for percent, bound in ((50, 1.5), (99, 3.0)):
            yield Row(
                f"control-{kind}-p{percent}",
                f"GetSession p{percent} while {title} move",
                "the same, idle server",
                at_most(bound),
                beside_bulk(kind, ways, percent),
                is_moving=False,
            )


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
            lambda _: _together(reading),
            lambda _: _together(copying),
            {"access": way, "readers": READER_COUNT, "bytes a round": READER_COUNT * place.scale.walk_bytes},
        )


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


_SEVERAL_ROWS = (
    Row("two-readers", "two local readers at once", "two processes copying memory", at_least(0.9), _readers),
)


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


def _row(name: str, title: str, ways: tuple[str, ...], bound: float) -> Row:
    path = f"CPU s per GB, both ends, {title}"
    return Row(name, path, "a copy", at_most(bound), opened(ways, Contexts.read), unit="CPU s")


_CPU_ROWS = (
    _row("cpu-local", "local read", (*local.SOCKET, *local.GRPC), 1.3),
    _row("cpu-bulk", "bulk channel read", remote.BULK, 3),
    _row("cpu-grpc", "gRPC read", remote.GRPC, 8),
)
ROWS = (
    *_SEVERAL_ROWS,
    *_CPU_ROWS,
    *_beside_bulk_rows(),
    Row(
        "decode-append",
        "decode step: 64 sessions x 1 token x all layers",
        "the rows copied in memory",
        at_most(4),
        _decoding,
        is_moving=False,
    ),
    Row(
        "lookup-128k",
        "session lookup at 128k tokens, p50",
        "an empty unary RPC, p50",
        at_most(1.5),
        _looking_up,
        is_moving=False,
    ),
)
