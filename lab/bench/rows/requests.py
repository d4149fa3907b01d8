"""Requests: what each call costs the server, with one client and with many, and at a million tokens.

A figure is CPU seconds of the server for one request, by the kernel's clock of its process: what the clients
take is not in it. Beside gRPC's calls stands a bare grpc.aio server that echoes a message of the same kind;
beside one that makes a durable record it writes and syncs the message first.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle

import numpy as np

import ctxcache
from ctxcache.client import Client
from ctxcache.client.sessions import SessionHandle
from ctxcache.client.types import Durability
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.streams import TOKENS
from lab.bench.bare_grpc import far_side
from lab.bench.bare_leases import bare_leases
from lab.bench.contexts import Contexts, access, contexts
from lab.bench.row import Place, Row, Sides, WrongBytes, at_most
from lab.bench.rows.calls import process_seconds
from lab.routes import route_options

CLIENT_COUNTS = (1, 8, 64)
LOOKED_UP = 100
SESSIONS_BY_TURNS = 64
LAYERS_LOOKED_UP = 80
SATURATING = 16
"""Connections that always have a request under way."""
MILLION, AT_ONCE = 1 << 20, 1 << 16
US = 1e-6
Setup = Callable[[Place], AbstractContextManager[Sides]]
Call = Callable[[Client, Contexts], Callable[[], object]]
"""Makes what one client calls over and over."""


def _lease(client: Client, c: Contexts) -> Callable[[], object]:
    handle = client.sessions.open(c.sessions[0], c.model)

    def lease() -> None:
        with handle.read() as rows:
            if rows.token_count != c.sessions[0].token_count:
                raise WrongBytes("a lease of other tokens")

    return lease


def _append(client: Client, c: Contexts) -> Callable[[], object]:
    handle = client.sessions.create(c.model, id=f"appended{os.urandom(8).hex()}", layout=c.out)
    one = {stream: rows[:1] for stream, rows in c.rows[0].items()}
    return lambda: handle.append(one)


def _append_by_writer(client: Client, c: Contexts) -> Callable[[], object]:
    """As an engine appends what it decodes: room for a segment at a time, a commit for each token."""
    handle = client.sessions.create(c.model, id=f"written{os.urandom(8).hex()}", layout=c.out)
    one = {stream: rows[:1] for stream, rows in c.rows[0].items()}
    writers = [handle.writer(SEGMENT_TOKENS)]

    def append() -> None:
        writer = writers[-1]
        row = writer.session.token_count - writer.write_offset
        for stream, rows in one.items():
            writer.write(stream, row, rows)
        writer.commit(writer.session.token_count + 1, keep_open=True)
        if row + 1 == SEGMENT_TOKENS:
            writers[-1] = handle.writer(SEGMENT_TOKENS)

    return append


def _get(client: Client, c: Contexts) -> Callable[[], object]:
    return partial(client.sessions.get, c.sessions[0].name)


def _look_up(client: Client, c: Contexts) -> Callable[[], object]:
    query = [(c.sessions[0].name, c.model.fingerprint)]

    def look_up() -> None:
        (found,) = client.sessions.lookup(query)
        if found.token_count != c.sessions[0].token_count:
            raise WrongBytes("another session was found")

    return look_up


def _create(client: Client, c: Contexts) -> Callable[[], object]:
    return lambda: client.sessions.create(c.model, id=f"made{os.urandom(8).hex()}", layout=c.out)


def repeat(calls: Sequence[Callable[[], object]], each_count: int) -> None:
    """Let every client make its calls, side by side. Raises the first failure."""
    failures: list[BaseException] = []

    def work(call: Callable[[], object]) -> None:
        try:
            for _ in range(each_count):
                call()
        except BaseException as error:  # noqa: BLE001  # for the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in calls[1:]]
    for thread in threads:
        thread.start()
    work(calls[0])
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def spent(pid: int, calls: Sequence[Callable[[], object]], count: int, notes: dict[str, object]) -> float:
    """CPU seconds of a process for one of about `count` calls by these clients."""
    each_count = max(count // len(calls), 1)
    before, begun = process_seconds(pid), time.perf_counter()
    repeat(calls, each_count)
    made = each_count * len(calls)
    notes["requests a second"] = round(made / (time.perf_counter() - begun))
    return (process_seconds(pid) - before) / made


ECHO_BYTES, RECORD_BYTES = 64, 512
"""Bytes that a bare server echoes and writes: a session's record and a commit's, as they are kept."""
BESIDE = {"": "-", "Echo": "an echo by bare grpc.aio", "Record": "a record synced by bare grpc.aio"}


def called(call: Call, ways: tuple[str, ...], client_count: int, *, beside: str) -> Setup:
    """A row's setup: so many clients make a call over and over, `beside` one of BESIDE."""

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        way = access(*ways)
        scale = replace(place.scale, context_count=2, layer_count=4, row_bytes=256, token_count=512)
        count = 8 * place.scale.call_count
        with contexts(replace(place, scale=scale), way, room_bytes=64 << 20) as c, ExitStack() as stack:
            target = c.server.target(place.transport)
            clients = [
                stack.enter_context(ctxcache.connect(target, **route_options(way)))
                for _ in range(client_count)
            ]
            calls = [call(client, c) for client in clients]
            notes: dict[str, object] = {"access": way, "clients": client_count}
            repeat(calls, 3)
            if not beside:
                yield Sides(lambda _: spent(c.server.pid, calls, count, notes), None, notes)
                return
            far = stack.enter_context(
                far_side(1, 8, client_count=client_count, records=place.directory / "records")
            )
            if beside == "Record":
                theirs = [partial(record, bytes(RECORD_BYTES)) for record in far.records]
            else:
                theirs = [partial(echo, bytes(ECHO_BYTES)) for echo in far.echoes]
            repeat(theirs, 3)
            yield Sides(
                lambda _: spent(c.server.pid, calls, count, notes),
                lambda _: spent(far.pid, theirs, count, {}),
                notes,
            )

    return setup


LOCAL, GRPC = ("local-socket", "local"), ("grpc", "remote")
_CALLS: tuple[tuple[str, str, Call, tuple[str, ...], float, str], ...] = (
    ("lease", "lease and release, control socket", _lease, LOCAL, 50 * US, ""),
    ("append", "append of one token, control socket", _append, LOCAL, 200 * US, ""),
    ("append-writer", "a token by an open writer, control socket", _append_by_writer, LOCAL, 85 * US, ""),
    ("create", "CreateSession", _create, GRPC, 2, "Record"),
    ("get", "GetSession", _get, GRPC, 1.6, "Echo"),
    ("look-up", "LookupSessions, one key", _look_up, GRPC, 1.7, "Echo"),
)


@contextmanager
def _many_layers(place: Place) -> Iterator[Sides]:
    """A look-up of many sessions of a model with many layers; the figure is for one of its keys."""
    scale = replace(place.scale, context_count=1, layer_count=LAYERS_LOOKED_UP, token_count=64, row_bytes=64)
    with contexts(replace(place, scale=scale), access(*GRPC), room_bytes=256 << 20) as c:
        names = [c.create(f"looked{i}").name for i in range(LOOKED_UP)]
        query = [(name, c.model.fingerprint) for name in names]

        def look_up() -> None:
            if len(c.client.sessions.lookup(query)) != LOOKED_UP:
                raise WrongBytes("not all were found")

        notes: dict[str, object] = {"keys": LOOKED_UP, "layers": LAYERS_LOOKED_UP}
        repeat([look_up], 3)
        count = place.scale.call_count
        yield Sides(lambda _: spent(c.server.pid, [look_up], count, notes) / LOOKED_UP, None, notes)


@contextmanager
def _by_turns(place: Place) -> Iterator[Sides]:
    """Leases of many sessions by turns."""
    scale = replace(place.scale, context_count=1, layer_count=4, token_count=64, row_bytes=256)
    with contexts(replace(place, scale=scale), access(*LOCAL), room_bytes=64 << 20) as c:
        handles = [
            c.client.sessions.create(c.model, id=f"turn{i}", layout=c.out) for i in range(SESSIONS_BY_TURNS)
        ]
        for handle in handles:
            handle.append(c.rows[0])
        coming = cycle(handles)

        def lease() -> None:
            with next(coming).read() as rows:
                if rows.token_count != scale.token_count:
                    raise WrongBytes("a lease of other tokens")

        notes: dict[str, object] = {"sessions": SESSIONS_BY_TURNS}
        repeat([lease], SESSIONS_BY_TURNS)
        count = 8 * place.scale.call_count
        yield Sides(lambda _: spent(c.server.pid, [lease], count, notes), None, notes)


@contextmanager
def _saturated(place: Place) -> Iterator[Sides]:
    """Leases of one session by connections that never wait for their client; the figure is the server's."""
    scale = replace(place.scale, context_count=1, layer_count=4, row_bytes=256, token_count=512)
    with contexts(replace(place, scale=scale), access(*LOCAL), room_bytes=64 << 20) as c:
        session = c.sessions[0].name
        path = c.server.control_socket
        with bare_leases(path, session, c.model.fingerprint, SATURATING) as leases:
            count = 64 * place.scale.call_count
            leases.take(SATURATING)
            notes: dict[str, object] = {"connections": SATURATING}

            def ours(_: int) -> float:
                before = process_seconds(c.server.pid)
                took_s = leases.take(count)
                notes["leases a second"] = round(count / took_s)
                notes["server's part of a core"] = round((process_seconds(c.server.pid) - before) / took_s, 2)
                return took_s / count

            yield Sides(ours, None, notes)


# -- a million tokens ----------------------------------------------------------------------------------


class Long:
    """A session of a million tokens, and calls about it."""

    def __init__(self, c: Contexts, token_count: int) -> None:
        self._client, self._model, self.token_count = c.client, c.model, token_count
        self._handle = c.client.sessions.create(c.model, id="long", layout=c.out)
        for begin in range(0, token_count, AT_ONCE):
            self._append(min(AT_ONCE, token_count - begin))
        self._handle.flush()
        self._forks: list[SessionHandle] = []
        self._number = 0

    def _append(self, count: int, durability: Durability = Durability.MEMORY) -> None:
        specs = {spec.stream: spec.row_bytes for spec in self._model.spec.streams} | {TOKENS: 4}
        rows = {stream: np.zeros((count, row_bytes), np.uint8) for stream, row_bytes in specs.items()}
        self._handle.append(rows, durability=durability)

    def lease(self) -> None:
        """All of it."""
        with self._handle.read() as rows:
            if rows.token_count < self.token_count:
                raise WrongBytes("a lease of fewer tokens")

    def lease_part(self) -> None:
        """A hundred tokens in the middle."""
        begin = self.token_count // 2
        with self._handle.read(begin=begin, end=begin + 100) as rows:
            if rows.token_count != 100:
                raise WrongBytes("a lease of other tokens")

    def fork(self) -> None:
        """All of it once more."""
        self._number += 1
        self._forks.append(self._handle.fork(id=f"fork{self._number}"))

    def delete_fork(self) -> None:
        """A fork goes."""
        self._forks.pop().delete()

    def append_durable(self) -> None:
        """A token more, on disk."""
        self._append(1, Durability.DISK)


def _long(call: Callable[[Long], None], before: Callable[[Long], None] | None = None) -> Setup:
    """A row's setup: a call about a session of a million tokens; `before` each of them, not counted."""

    @contextmanager
    def setup(place: Place) -> Iterator[Sides]:
        token_count = MILLION if place.scale.segment_count > AT_ONCE else 4096
        scale = replace(place.scale, context_count=1, layer_count=1, row_bytes=16, token_count=1024)
        way = access(*LOCAL)
        room_bytes = 128 * token_count + (16 << 20)
        with contexts(replace(place, scale=scale), way, is_filled=False, room_bytes=room_bytes) as c:
            long = Long(c, token_count)
            notes: dict[str, object] = {
                "tokens": token_count,
                "segments": c.client.admin.stats().segment_count,
            }

            def ours(_: int) -> float:
                if before is not None:
                    before(long)
                return spent(c.server.pid, [lambda: call(long)], 1, notes)

            ours(0)
            yield Sides(ours, None, notes)

    return setup


_LONG: tuple[tuple[str, str, Callable[[Long], None], Callable[[Long], None] | None], ...] = (
    ("lease", "lease and release of 1 M tokens", Long.lease, None),
    ("part", "lease of 100 tokens among 1 M", Long.lease_part, None),
    ("fork", "fork of 1 M tokens", Long.fork, None),
    ("delete", "delete of a fork of 1 M tokens", Long.delete_fork, Long.fork),
    ("append", "durable append of one token to 1 M", Long.append_durable, None),
)
ROWS = (
    *(
        Row(
            f"request-{name}-{client_count}",
            f"{title}; clients: {client_count}",
            BESIDE[beside],
            at_most(bound),
            called(call, ways, client_count, beside=beside),
            unit="CPU s",
            is_moving=False,
        )
        for name, title, call, ways, bound, beside in _CALLS
        for client_count in CLIENT_COUNTS
    ),
    Row(
        "request-look-up-layers",
        f"LookupSessions, {LOOKED_UP} keys, {LAYERS_LOOKED_UP} layers: for each key",
        "-",
        at_most(10 * US),
        _many_layers,
        unit="CPU s",
        is_moving=False,
    ),
    Row(
        "request-lease-full",
        f"lease and release, control socket, {SATURATING} connections that never wait: one takes",
        "-",
        at_most(50 * US),
        _saturated,
        is_moving=False,
    ),
    Row(
        "request-lease-turns",
        f"lease and release of {SESSIONS_BY_TURNS} sessions by turns",
        "-",
        at_most(40 * US),
        _by_turns,
        unit="CPU s",
        is_moving=False,
    ),
    *(
        Row(f"long-{name}", title, "-", at_most(1e-3), _long(call, before), unit="CPU s", is_moving=False)
        for name, title, call, before in _LONG
    ),
)
