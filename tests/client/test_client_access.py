"""The way to the arena: finding it, losing it, finding the next one."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_side import KV, OWN, Connect, FarSide
from google.protobuf.timestamp_pb2 import Timestamp
from interrupts import Interrupted, is_interrupted

from ctxcache.client import Client, SessionRows, grpc_access
from ctxcache.client.access import PROBE, ClockPair
from ctxcache.client.arena import map_arena
from ctxcache.client.grpc_access import SURE_FOR_NS, GrpcAccess
from ctxcache.client.rows import LeasedRows
from ctxcache.client.socket_access import UNREAD_LIMIT, SocketAccess
from ctxcache.errors import CacheError, DeadlineExceeded, LeaseNotFound, Unavailable
from ctxcache.settings.config import Settings
from ctxcache.v1 import arena_pb2
from ctxcache.v1.arena_pb2 import Operation, Reserve
from ctxcache.wire.frames import FrameKind, FrameReader, encode_frame

NAME = "sessions/a"
SOON_S = 10.0
ID = b"0123456789abcdef"


@pytest.fixture
def arena(tmp_path: Path) -> arena_pb2.Arena:
    """An arena file that is as the server says."""
    path = tmp_path / "arena"
    path.write_bytes(ID.ljust(8192, b"\0"))
    return arena_pb2.Arena(arena_id=ID, path=str(path), size_bytes=8192, may_write=True)


def test_the_servers_arena_is_mapped_both_ways(arena: arena_pb2.Arena) -> None:
    """Readers see what a writer of the same host writes, and cannot write themselves."""
    mapped = map_arena(arena)

    assert mapped is not None
    writable = mapped.writable()
    assert writable is not None
    writable[100] = 7

    assert mapped.readable[100] == 7
    assert not mapped.readable.flags.writeable


def test_clients_of_one_process_share_a_mapping(arena: arena_pb2.Arena) -> None:
    """Of the same rights, while one of them has it, and while it is that very arena. A child maps anew."""
    mapped = map_arena(arena)
    assert mapped is not None
    assert map_arena(arena) is mapped
    reader = arena_pb2.Arena()
    reader.CopyFrom(arena)
    reader.may_write = False
    assert map_arena(reader) not in (None, mapped)

    child = os.fork()
    if not child:
        os._exit(map_arena(arena) in (None, mapped))
    assert os.waitpid(child, 0)[1] == 0

    writable = mapped.writable()
    assert writable is not None
    writable[0] ^= 1
    assert map_arena(arena) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": "/nonexistent/arena"},
        {"path": "/dev/zero"},
        {"path": ""},
        {"size_bytes": 4096},
        {"size_bytes": 0},
        {"arena_id": b"another arena id"},
        {"arena_id": b""},
    ],
)
def test_a_file_that_is_not_the_arena_is_not_mapped(arena: arena_pb2.Arena, wrong: dict[str, Any]) -> None:
    """A path that exists here too, on another host's word, is nothing to read from."""
    for field, value in wrong.items():
        setattr(arena, field, value)

    assert map_arena(arena) is None


def test_a_fifo_in_the_arenas_place_does_not_block(arena: arena_pb2.Arena) -> None:
    """Opening a FIFO waits for its other end unless it is told not to."""
    Path(arena.path).unlink()
    os.mkfifo(arena.path)

    assert map_arena(arena) is None


def test_an_arena_that_may_only_be_read_is_not_written(arena: arena_pb2.Arena) -> None:
    """A reader keeps its mapping where a writer gets none."""
    mapped = map_arena(arena)
    Path(arena.path).unlink()

    assert mapped is not None
    assert mapped.writable() is None
    assert mapped.readable[:16].tobytes() == ID


def test_an_arena_that_is_not_here_means_streams(connect: Connect, far_side: FarSide) -> None:
    """The file exists but holds another run's arena: rows come by stream instead."""
    far_side.add(NAME, 5)
    far_side.arena[:16] = 0

    with connect().sessions.open(NAME, OWN).read() as rows:
        assert not rows.is_local
        np.testing.assert_array_equal(rows.array(KV), far_side.rows[NAME][KV])


def test_who_wants_only_the_arena_is_told_that_it_is_not_here(connect: Connect, far_side: FarSide) -> None:
    """`local` never falls back in silence."""
    far_side.add(NAME, 5)
    far_side.arena[:16] = 0

    with pytest.raises(Unavailable):
        connect(access="local").sessions.open(NAME, OWN).read()


def test_a_broken_stream_fails_its_waiters_at_once(connect: Connect, far_side: FarSide) -> None:
    """No caller waits out the deadline of an answer that cannot come."""
    session = far_side.add(NAME, 5)
    client = connect(access="local", timeout_s=120.0)
    client.sessions.open(session, OWN).read().close()
    far_side.stalls = True

    with ThreadPoolExecutor(3) as threads:
        waiters = [threads.submit(client.sessions.open(session, OWN).read) for _ in range(3)]
        assert far_side.is_stalled.wait(SOON_S)
        far_side.break_streams()
        failures = [type(waiter.exception(SOON_S)) for waiter in waiters]

    far_side.let_go_on()
    assert failures == [Unavailable] * 3


def test_closing_a_client_fails_its_waiters(connect: Connect, far_side: FarSide) -> None:
    """A thread that waits on a client is not left behind when another closes it."""
    session = far_side.add(NAME, 5)
    client = connect(access="local", timeout_s=120.0)
    client.sessions.open(session, OWN).read().close()
    far_side.stalls = True

    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(client.sessions.open(session, OWN).read)
        assert far_side.is_stalled.wait(SOON_S)
        client.close()
        failure = waiter.exception(SOON_S)

    far_side.let_go_on()
    assert isinstance(failure, Unavailable)


def test_a_restarted_server_is_found_again(connect: Connect, far_side: FarSide) -> None:
    """The next call after the break maps the new arena; old views stay readable memory."""
    far_side.add(NAME, 5)
    client = connect(access="local")
    before = client.sessions.open(NAME, OWN).read()
    view = before.pieces(KV)[0]

    far_side.stop()
    far_side.start()
    rows = _read_again(client)

    assert rows.is_local
    np.testing.assert_array_equal(rows.array(KV), far_side.rows[NAME][KV])
    assert view.nbytes == 4 * 16
    with pytest.raises(CacheError):
        before.array(KV)


def test_a_lease_that_comes_too_late_is_given_back(connect: Connect, far_side: FarSide) -> None:
    """A caller that gave up holds nothing on the server."""
    session = far_side.add(NAME, 5)
    client = connect(access="local")
    with client.sessions.open(session, OWN).read() as rows:
        assert isinstance(rows, LeasedRows)
        rows.hold.stream.timeout_s = 0.5
    far_side.stalls = True

    with pytest.raises(DeadlineExceeded):
        client.sessions.open(session, OWN).read()
    far_side.let_go_on()

    assert all(far_side.released.acquire(timeout=SOON_S) for _ in range(2))


def _read_again(client: Client) -> SessionRows:
    # The first call may still meet the broken connection; it fails at once instead of hanging.
    try:
        return client.sessions.open(NAME, OWN).read()
    except Unavailable:
        return client.sessions.open(NAME, OWN).read()


@pytest.mark.parametrize("far_side", ["grpc"], indirect=True)
def test_a_client_that_was_frozen_asks_before_it_believes_its_lease(
    connect: Connect, far_side: FarSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server gave it up long ago, and the thread that will hear of it has not run yet."""
    far_side.add(NAME, 5)
    rows = connect(access="local", timeout_s=1.0).sessions.open(NAME, OWN).read()
    assert isinstance(rows, LeasedRows)
    stream = rows.hold.stream
    assert isinstance(stream, GrpcAccess)
    thawed = threading.Event()
    monkeypatch.setattr(stream, "_deliver", lambda _: thawed.wait())
    stream.send([PROBE])
    far_side.break_streams()
    stream.sure_until_ns = 0
    with pytest.raises(LeaseNotFound):
        rows.array(KV)
    thawed.set()


@pytest.mark.parametrize("far_side", ["grpc"], indirect=True)
def test_a_lease_that_was_not_used_for_long_is_good_once_the_server_says_so(
    connect: Connect, far_side: FarSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One question, and no more until the answer is old again."""
    monkeypatch.setattr(grpc_access, "SURE_FOR_NS", 10**12)
    far_side.add(NAME, 5)
    rows = connect(access="local").sessions.open(NAME, OWN).read()
    assert isinstance(rows, LeasedRows)
    stream = rows.hold.stream
    assert isinstance(stream, GrpcAccess)
    stream.sure_until_ns = 0
    before = len(far_side.operations)
    for _ in range(3):
        np.testing.assert_array_equal(rows.array(KV), far_side.rows[NAME][KV])

    assert far_side.operations[before:] == ["release_lease"]


def test_an_answer_is_no_proof_for_longer_than_a_server_waits_for_a_ping() -> None:
    """The most hurried server that can be configured gives a client up after half its keep-alive time."""
    least_s = min(rule.ge for rule in Settings.model_fields["keepalive_s"].metadata if hasattr(rule, "ge"))
    assert least_s / 2 * 1e9 > SURE_FOR_NS


def test_a_caller_interrupted_in_the_middle_of_a_request_breaks_the_way() -> None:
    """Half a frame is out: the next one would be taken for the rest of it."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    ours, theirs = socket.socketpair()
    access = SocketAccess(ours, FrameReader(), "unix:here", timeout_s=30)
    reserve = Operation(reserve=Reserve(session="s" * (1 << 20)))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            access.exchange([reserve])
        assert access.is_broken
        with pytest.raises(Unavailable):
            access.exchange([reserve])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        access.close()
        theirs.close()


def test_a_caller_interrupted_in_the_middle_of_an_answer_breaks_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of it is lost: what follows would be taken for something else."""

    def interrupt(_: bytes) -> None:
        raise Interrupted

    ours, theirs = socket.socketpair()
    reader, asked = FrameReader(), FrameReader()
    access = SocketAccess(ours, reader, "unix:here", timeout_s=30)
    monkeypatch.setattr(reader, "feed", interrupt)
    with ThreadPoolExecutor(1) as threads:
        answering = threads.submit(_answer, theirs, asked, 1)
        with pytest.raises(Interrupted):
            access.exchange([PROBE])
        answering.result(SOON_S)
    with pytest.raises(Unavailable):
        access.exchange([PROBE])
    access.close()
    theirs.close()


def test_a_caller_interrupted_anywhere_leaves_the_way_to_others() -> None:
    """A signal's handler may raise at each call of Python and behind each one of C.

    A later caller is answered, or told that the way is broken: nobody waits for a reader that is not there.
    """
    left = range(1, 400)
    for at in left:
        ours, theirs = socket.socketpair()
        answering = threading.Thread(target=_answer_all, args=(theirs,), daemon=True)
        answering.start()
        access = SocketAccess(ours, FrameReader(), "unix:here", timeout_s=SOON_S)
        access.exchange([PROBE])
        is_over = not is_interrupted(partial(access.exchange, [PROBE]), at)
        with ThreadPoolExecutor(1) as threads, suppress(Unavailable):
            assert threads.submit(access.exchange, [PROBE]).result(2 * SOON_S).request_id >= 2
        access.close()
        answering.join(SOON_S)
        theirs.close()
        if is_over:
            break
    assert 20 < at < left[-1]


def _answer_all(connection: socket.socket) -> None:
    asked = FrameReader()
    with suppress(OSError):
        while data := connection.recv(1 << 16):
            asked.feed(data)
            while (frame := asked.next()) is not None:
                request = arena_pb2.AccessRequest.FromString(frame.message)
                results = [arena_pb2.OperationResult()]
                answer = arena_pb2.AccessResponse(request_id=request.request_id, results=results)
                connection.sendall(encode_frame(FrameKind.ACCESS, answer.SerializeToString()))


@pytest.mark.parametrize("answer", [b"", b"\x12\x00", b"\x08", b"\x08" + b"\x80" * 10 + b"\x01"])
def test_an_answer_to_no_request_breaks_the_way(answer: bytes) -> None:
    """The lease in an answer that cannot be read could never be given back."""
    ours, theirs = socket.socketpair()
    access = SocketAccess(ours, FrameReader(), "unix:here", timeout_s=30)
    theirs.sendall(encode_frame(FrameKind.ACCESS, answer))
    with pytest.raises(Unavailable, match="without a number"):
        access.exchange([PROBE])
    assert access.is_broken
    assert not access.is_worth_a_try
    theirs.close()


def test_an_answer_that_cannot_be_read_breaks_the_way() -> None:
    """Its number alone is right."""
    ours, theirs = socket.socketpair()
    access = SocketAccess(ours, FrameReader(), "unix:here", timeout_s=30)
    theirs.sendall(encode_frame(FrameKind.ACCESS, b"\x08\x01\xff"))
    with pytest.raises(Unavailable):
        access.exchange([PROBE])
    assert access.is_broken
    theirs.close()


def test_a_late_answer_holds_nobody_up() -> None:
    """The next reader gives the late lease back, and does not wait for an answer to that."""
    ours, theirs = socket.socketpair()
    access = SocketAccess(ours, FrameReader(), "unix:here", timeout_s=1.0)
    asked = FrameReader()
    with pytest.raises(DeadlineExceeded):
        access.exchange([PROBE])
    for _ in range(UNREAD_LIMIT):
        access.send([PROBE])
    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(access.exchange, [PROBE])
        # Late is the first answer; those behind it come at once.
        for number in range(1, UNREAD_LIMIT + 3):
            _answer(theirs, asked, number)

        assert waiter.result(SOON_S).request_id == UNREAD_LIMIT + 2
        released = _next_request(theirs, asked)
    assert released.operations[0].release_lease.lease_id == 1
    access.close()
    theirs.close()


def _answer(connection: socket.socket, asked: FrameReader, request_id: int) -> None:
    request = _next_request(connection, asked)
    assert request.request_id == request_id
    result = arena_pb2.OperationResult(lease=arena_pb2.Lease(lease_id=request_id))
    answer = arena_pb2.AccessResponse(request_id=request_id, results=[result])
    connection.sendall(encode_frame(FrameKind.ACCESS, answer.SerializeToString()))


def _next_request(connection: socket.socket, asked: FrameReader) -> arena_pb2.AccessRequest:
    while (frame := asked.next()) is None:
        asked.feed(connection.recv(1 << 16))
    return arena_pb2.AccessRequest.FromString(frame.message)


def test_whoever_waits_for_another_to_attach_waits_no_longer_than_its_deadline(
    connect: Connect, far_side: FarSide
) -> None:
    """One thread is at it and hears nothing.

    Those behind it are not kept for its sake and then for their own.
    """
    far_side.add(NAME, 5)
    client = connect(access="local")
    client.sessions.get(NAME)
    local = client.routes.local
    local._wire.timeout_s = 0.3
    local.is_connecting = True
    with ThreadPoolExecutor(1) as threads:
        waiter = threads.submit(client.sessions.open(NAME, OWN).read)
        assert isinstance(waiter.exception(SOON_S), DeadlineExceeded)
    local.is_connecting = False


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_clock_that_is_set_while_a_lease_is_acquired_makes_it_no_longer(
    hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says by the new time when it ends.

    Reckoned from the old one that would be an hour too late.
    """
    sent = ClockPair.now()
    set_ns = time.time_ns() + hours * 3600 * 10**9
    monkeypatch.setattr(time, "time_ns", lambda: set_ns)
    told = Timestamp()
    told.FromNanoseconds(set_ns + 300 * 10**9)
    deadline_ns = sent.deadline_ns(told)

    assert deadline_ns <= time.monotonic_ns() + 300 * 10**9
