"""Small calls: beside bulk traffic, appends while decoding, and looking a long session up."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import numpy as np

from ctxcache.bench.children import Child, child
from ctxcache.bench.content import Bytes, check, content
from ctxcache.bench.contexts import Contexts, access, by_stream, contexts, model_of, seconds, slots_bytes
from ctxcache.bench.row import Place, Row, Scale, Side, Sides, WrongBytes
from ctxcache.bench.rows import local, remote
from ctxcache.bench.statistics import at_most, percentile
from ctxcache.client.decode_batch import DecodeBatch
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.streams import Stream

Rows = dict[Stream, Bytes]
DECODING_COUNT = 64
LONG_TOKENS = 128 << 10
_SETTLE_S = 0.05


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


def beside_bulk(ways: tuple[str, ...], percent: float) -> Callable[[Place], AbstractContextManager[Sides]]:
    """A row's setup: GetSession while another process reads by this access, and while it is stopped."""

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        way = access(*ways)
        with contexts(place, access("remote")) as c:
            target = c.server.target(place.transport)
            with child("read", target, way, place.scale) as mover:
                traffic = _Traffic(mover)
                yield Sides(
                    _asking(c, traffic, signal.SIGCONT, percent, place.scale.call_count),
                    _asking(c, traffic, signal.SIGSTOP, percent, place.scale.call_count),
                    {"traffic": way, "calls a round": place.scale.call_count},
                )  # fmt: skip
                os.kill(mover.process.pid, signal.SIGCONT)

    return setup


def _asking(c: Contexts, traffic: _Traffic, number: int, percent: float, call_count: int) -> Side:
    name = c.sessions[0].name

    def call() -> None:
        if c.client.get_session(name).token_count != c.sessions[0].token_count:
            raise WrongBytes("GetSession answered with another session")

    def side(_: int) -> float:
        traffic.let(number)
        before = c.client.stats().read_token_count
        taken = timed_calls(call, call_count, percent)
        moved = c.client.stats().read_token_count - before
        if traffic.failure is not None:
            raise traffic.failure
        if number == signal.SIGCONT and not moved and traffic.walk_count == 0:
            raise WrongBytes("nothing moved beside the calls")
        return taken

    return side


@contextmanager
def _decoding(place: Place) -> Iterator[Sides]:
    way, scale = access("local-socket"), place.scale
    one = replace(scale, token_count=SEGMENT_TOKENS)
    room_bytes = slots_bytes(one, 2 * DECODING_COUNT)
    with contexts(place, way, is_filled=False, room_bytes=room_bytes) as c:
        names = [c.create(f"decode{index}").name for index in range(DECODING_COUNT)]
        steps = [_step(one, owner) for owner in range(2)]
        copied = {stream: np.ones_like(rows) for stream, rows in steps[0].items()}
        with c.client.decode_batch(names, c.model) as batch:

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
                "access": way, "messages a step": "one for all sessions", "bytes a step": _bytes(steps[0])
            }  # fmt: skip
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
        with c.client.read(name, c.model, begin=int(token_count) - 1, end=int(token_count)) as rows:
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
            (found,) = c.client.lookup([(c.sessions[0].name, fingerprint)])
            if found.token_count != token_count:
                raise WrongBytes(f"{found.token_count} tokens found of {token_count}")

        def empty() -> None:
            if not c.client.health():
                raise WrongBytes("the server says it does not serve")

        yield Sides(
            lambda _: timed_calls(look_up, scale.call_count, 50),
            lambda _: timed_calls(empty, scale.call_count, 50),
            {"tokens": token_count, "empty call": "grpc.health.v1 Check"},
        )


def _beside_bulk_rows() -> Iterator[Row]:
    kinds = (("grpc", "gRPC reads", remote.GRPC), ("bulk", "bulk channel reads", remote.BULK),
             ("local", "local reads", (*local.SOCKET, *local.GRPC)))  # fmt: skip
    for kind, title, ways in kinds:
        for percent, bound in ((50, 1.5), (99, 3.0)):
            yield Row(
                f"control-{kind}-p{percent}", f"GetSession p{percent} while {title} move", "the same, idle server",
                at_most(bound), beside_bulk(ways, percent), is_moving=False,
            )  # fmt: skip


ROWS = (
    *_beside_bulk_rows(),
    Row(
        "decode-append", "decode step: 64 sessions x 1 token x all layers", "the rows copied in memory",
        at_most(2), _decoding, is_moving=False,
    ),
    Row(
        "lookup-128k", "session lookup at 128k tokens, p50", "an empty unary RPC, p50", at_most(1.5), _looking_up,
        is_moving=False,
    ),
)  # fmt: skip
