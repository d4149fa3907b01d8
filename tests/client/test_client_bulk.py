"""The client's ways to rows over sockets, against a real server.

The same rows, errors and mending by each.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from far_side import HIDDEN, KV, LAYOUT, OWN, ROW_SIZES, SPEC, Connect, FarSide, make_rows
from server_process import ServerProcess

import ctxcache
from ctxcache.client import Client, bulk_rows
from ctxcache.client.bulk_rows import Connection
from ctxcache.client.types import Durability
from ctxcache.errors import (
    CacheError,
    GenerationMismatch,
    InvalidArgument,
    SessionNotFound,
    Unavailable,
    WriteOffsetMismatch,
)
from ctxcache.format.streams import TOKENS
from ctxcache.wire.framed_socket import SocketFrameKind
from lab.routes import route_options

NAME = "sessions/a"
TOKEN_COUNT = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server process."""
    with ServerProcess(tmp_path_factory.mktemp("server") / "data") as process:
        yield process


@pytest.fixture(params=["tcp-bulk", "unix-bulk", "tcp-grpc", "tcp-remote"])
def client(request: pytest.FixtureRequest, server: ServerProcess) -> Iterator[Client]:
    """A client by each way, and a session `a` that is empty."""
    transport, access = request.param.split("-")
    target = server.target if transport == "tcp" else server.unix_target
    with ctxcache.connect(target, **route_options(access)) as client:
        client.models.register(SPEC)
        client.sessions.create(OWN, id="a", layout=LAYOUT)
        yield client
        client.sessions.open(NAME).delete()


def append(client: Client, begin: int, end: int) -> None:
    """Append rows of these tokens."""
    client.sessions.open(NAME, OWN).append(make_rows(end - begin, first=begin), durability=Durability.DISK)


def check_rows(client: Client, token_count: int) -> None:
    """Fail unless every stream has its rows."""
    expected = make_rows(token_count)
    with client.sessions.open(NAME, OWN).read() as rows:
        assert not rows.is_local
        for stream in LAYOUT:
            np.testing.assert_array_equal(rows.array(stream), expected[stream])


def test_rows_come_back_as_they_went_in(client: Client) -> None:
    """In pieces, into buffers, in ranges: by every way."""
    append(client, 0, 70)
    append(client, 70, TOKEN_COUNT)
    expected = make_rows(TOKEN_COUNT)
    check_rows(client, TOKEN_COUNT)

    with client.sessions.open(NAME, OWN).read(begin=3, end=150, streams=[KV, TOKENS]) as rows:
        assert rows.streams == (TOKENS, KV)
        out = np.empty((147, ROW_SIZES[KV]), np.uint8)
        assert rows.array(KV, out=out) is out
        np.testing.assert_array_equal(out, expected[KV][3:150])
        np.testing.assert_array_equal(rows.array(TOKENS), expected[TOKENS][3:150])
    with client.sessions.open(NAME, OWN).read() as rows:
        assert not any(piece.rows.flags.writeable for piece in rows.chunks())


def test_rows_longer_than_a_piece_come_back(client: Client) -> None:
    """Many frames of many parts."""
    token_count = 40_000
    rows = make_rows(token_count)
    client.sessions.open(NAME, OWN).append(rows)
    with client.sessions.open(NAME, OWN).read() as found:
        for stream in LAYOUT:
            np.testing.assert_array_equal(found.array(stream), rows[stream])


def test_a_writer_commits_in_parts(client: Client) -> None:
    """Layer by layer, the rest of the room kept."""
    rows = make_rows(100)
    with client.sessions.open(NAME, OWN).writer(100) as writer:
        for begin, end in ((0, 60), (60, 100)):
            for stream in LAYOUT:
                writer.write(stream, begin, rows[stream][begin:end])
            writer.commit(end, keep_open=True)

    check_rows(client, 100)


def test_errors_are_the_servers_own(client: Client) -> None:
    """Class and facts are the same by every way, and the client goes on."""
    append(client, 0, 10)
    stale = client.sessions.get(NAME)
    append(client, 10, 20)
    with pytest.raises(WriteOffsetMismatch) as caught:
        client.sessions.open(stale, OWN).append(make_rows(5))
    with pytest.raises(GenerationMismatch):
        client.sessions.open(NAME, OWN).append(make_rows(5), if_generation_match=1)
    with pytest.raises(GenerationMismatch):
        client.sessions.open(NAME, OWN).read(if_generation_match=1)
    with pytest.raises(SessionNotFound):
        client.sessions.open("sessions/none", OWN).read()

    assert caught.value.facts["token_count"] == 20
    check_rows(client, 20)


def test_an_append_that_fails_early_stops_early(client: Client) -> None:
    """The error comes while rows are still on their way, and the connection is in step afterwards."""
    append(client, 0, 10)
    stale = client.sessions.get(NAME)
    append(client, 10, 20)
    for _ in range(3):
        with pytest.raises(WriteOffsetMismatch):
            client.sessions.open(stale, OWN).append(make_rows(100_000))

    check_rows(client, 20)


def test_a_read_that_is_left_costs_only_its_connection(client: Client) -> None:
    """The next one is as whole as ever."""
    client.sessions.open(NAME, OWN).append(make_rows(40_000))
    for _ in range(3):
        with client.sessions.open(NAME, OWN).read() as rows:
            next(rows.chunks())
    with client.sessions.open(NAME, OWN).read(begin=0, end=7) as rows:
        np.testing.assert_array_equal(rows.array(HIDDEN), make_rows(7)[HIDDEN])


def test_a_closed_client_says_so(server: ServerProcess) -> None:
    """Whatever way it would have taken."""
    for access in ("bulk", "grpc"):
        client = ctxcache.connect(server.target, **route_options(access))
        client.models.register(SPEC)
        session = client.sessions.create(OWN, layout=LAYOUT)
        client.close()
        with pytest.raises(Unavailable):
            session.read()


# -- the bulk channel alone ------------------------------------------------------------------------


@pytest.fixture
def bulk(server: ServerProcess) -> Iterator[Client]:
    """A client of the bulk channel and a session of many messages."""
    with ctxcache.connect(server.target, access="remote", transport="socket") as client:
        client.models.register(SPEC)
        client.sessions.create(OWN, id="a", layout=LAYOUT)
        client.sessions.open(NAME, OWN).append(make_rows(60_000), durability=Durability.DISK)
        yield client
        client.sessions.open(NAME).delete()


def break_connections(client: Client) -> None:
    """Break what is in use, as a network would."""
    for connection in list(client.routes.bulk.in_use):
        connection.shut()


@pytest.mark.parametrize("piece_count", [0, 1, 2, 3])
def test_a_broken_read_goes_on_where_it_broke(bulk: Client, piece_count: int) -> None:
    """On another connection, and nothing that arrived is lost or comes twice."""
    expected = make_rows(60_000)
    with bulk.sessions.open(NAME, OWN).read() as rows:
        pieces = rows.chunks()
        arrived = [next(pieces) for _ in range(piece_count)]
        break_connections(bulk)
        arrived += list(pieces)

    for stream in LAYOUT:
        parts = [piece.rows for piece in arrived if piece.stream == stream]
        np.testing.assert_array_equal(np.concatenate(parts), expected[stream])


def test_a_buffer_is_whole_after_a_break(bulk: Client) -> None:
    """A half-received chunk is received again."""
    expected = make_rows(60_000)
    with bulk.sessions.open(NAME, OWN).read() as rows:
        rows.array(TOKENS, out=np.empty(expected[TOKENS].shape, np.uint8))
        break_connections(bulk)
        np.testing.assert_array_equal(
            rows.array(KV, out=np.empty(expected[KV].shape, np.uint8)), expected[KV]
        )


@pytest.mark.parametrize("token_count", [7, 60_000])
def test_rows_that_changed_on_the_way_are_received_again(
    bulk: Client, monkeypatch: pytest.MonkeyPatch, token_count: int
) -> None:
    """One flipped bit is enough, in one part or the first of many; what it is in is not handed out."""
    fill = Connection._fill
    flipped: list[Connection] = []

    def fill_and_flip(connection: Connection, place: memoryview, *limits: float, **ends: bool) -> int:
        count = fill(connection, place, *limits, **ends)
        # Data has a deadline of its own; headers and messages have none.
        if limits and not flipped:
            place[-1] ^= 1
            flipped.append(connection)
        return count

    monkeypatch.setattr(Connection, "_fill", fill_and_flip)
    with bulk.sessions.open(NAME, OWN).read(end=token_count) as rows:
        for stream in LAYOUT:
            np.testing.assert_array_equal(rows.array(stream), make_rows(token_count)[stream])

    assert flipped
    assert flipped[0] not in bulk.routes.bulk.idle


def test_a_kept_connection_that_ended_is_not_used_again(bulk: Client) -> None:
    """The next request opens another one and never notices."""
    with bulk.sessions.open(NAME, OWN).read(end=3) as rows:
        rows.array(KV)
    assert bulk.routes.bulk.idle
    for connection in bulk.routes.bulk.idle:
        connection.shut()

    assert bulk.sessions.open(NAME, OWN).append(make_rows(2)).token_count == 60_002


def test_a_connection_is_used_again(bulk: Client) -> None:
    """One ticket and one connection for many requests."""
    for _ in range(5):
        with bulk.sessions.open(NAME, OWN).read(end=3) as rows:
            for stream in LAYOUT:
                rows.array(stream)
        bulk.sessions.open(NAME, OWN).append(make_rows(1))

    assert len(bulk.routes.bulk.idle) == 1
    assert not bulk.routes.bulk.in_use


def kept(client: Client) -> Connection:
    """The one connection that is kept for the next request."""
    [connection] = client.routes.bulk.idle
    return connection


@pytest.mark.parametrize(("idle_s", "is_same"), [(100, True), (119, False), (1000, False)])
def test_a_connection_that_the_server_is_about_to_end_is_not_used(
    bulk: Client, monkeypatch: pytest.MonkeyPatch, idle_s: float, *, is_same: bool
) -> None:
    """It says how long it waits for the next request; what is on its way then would be lost."""
    bulk.sessions.open(NAME, OWN).append(make_rows(1))
    before, now_s = kept(bulk), time.monotonic()
    monkeypatch.setattr(bulk_rows, "time", SimpleNamespace(monotonic=lambda: now_s + idle_s))
    bulk.sessions.open(NAME, OWN).append(make_rows(1))

    assert (kept(bulk) is before) is is_same


def ends_unnoticed(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, after: SocketFrameKind | None
) -> None:
    """Lose what is sent on it, and let its end be seen after that frame; None: when the first one is sent."""
    send, wait, has_ended = connection.send, connection.wait, after is None

    def sends(kind: SocketFrameKind, *parts: Any) -> None:
        nonlocal has_ended
        if has_ended:
            connection.shut()
            send(kind, *parts)
        if kind is after:
            has_ended = True
            connection._socket.shutdown(socket.SHUT_RD)

    monkeypatch.setattr(connection, "send", sends)
    monkeypatch.setattr(connection, "wait", lambda timeout_s: has_ended and wait(timeout_s))


@pytest.mark.parametrize("after", [None, SocketFrameKind.READ])
def test_a_read_on_a_kept_connection_that_had_ended_begins_again(
    bulk: Client, monkeypatch: pytest.MonkeyPatch, after: SocketFrameKind | None
) -> None:
    """The server closes an idle connection at the very moment of a request: nobody has noticed yet."""
    bulk.sessions.open(NAME, OWN).append(make_rows(1))
    ends_unnoticed(kept(bulk), monkeypatch, after)

    with bulk.sessions.open(NAME, OWN).read(end=3) as rows:
        np.testing.assert_array_equal(rows.array(KV), make_rows(3)[KV])


@pytest.mark.parametrize("after", [None, SocketFrameKind.APPEND, SocketFrameKind.CHUNK])
def test_an_append_on_a_kept_connection_that_had_ended_begins_again(
    bulk: Client, monkeypatch: pytest.MonkeyPatch, after: SocketFrameKind | None
) -> None:
    """No commit had asked for any of it to be visible."""
    bulk.sessions.open(NAME, OWN).append(make_rows(1))
    ends_unnoticed(kept(bulk), monkeypatch, after)

    assert bulk.sessions.open(NAME, OWN).append(make_rows(2)).token_count == 60_003


def test_an_append_whose_commit_was_sent_is_not_repeated(
    bulk: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have carried it out: whoever asked for it has to look."""
    bulk.sessions.open(NAME, OWN).append(make_rows(1))
    ends_unnoticed(kept(bulk), monkeypatch, SocketFrameKind.FINISH)
    monkeypatch.setattr(bulk.routes.bulk, "connect", lambda: pytest.fail("it was asked again"))
    with pytest.raises(Unavailable):
        bulk.sessions.open(NAME, OWN).append(make_rows(2))


def test_a_client_that_closes_meanwhile_leaves_no_connection(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was just being opened carries nothing for a closed client."""
    with ctxcache.connect(server.target, access="remote", transport="socket") as client:
        channel, made = client.routes.bulk, []
        connect = channel.connect

        def connects() -> Connection:
            made.append(connect())
            channel.close()
            return made[0]

        monkeypatch.setattr(channel, "connect", connects)
        with pytest.raises(Unavailable, match="closed"):
            channel.take()

    assert made[0]._socket.fileno() == -1
    assert not channel.in_use


def test_without_a_bulk_channel_rows_travel_by_grpc(tmp_path: Path) -> None:
    """Unless only the bulk channel would do: then that is an error, not silence."""
    with ServerProcess(tmp_path / "data", "--bulk-listen", "") as process:
        with ctxcache.connect(process.target, access="remote") as client:
            client.models.register(SPEC)
            client.sessions.create(OWN, id="a", layout=LAYOUT)
            append(client, 0, 10)
            check_rows(client, 10)
        with (
            ctxcache.connect(process.target, access="remote", transport="socket") as client,
            pytest.raises(Unavailable),
        ):
            client.sessions.open(NAME, OWN).read()


def test_a_full_bulk_channel_leaves_grpc(tmp_path: Path) -> None:
    """A server that takes no more connections is still a server."""
    with (
        ServerProcess(tmp_path / "data", "--max-bulk-connections", "1") as process,
        ctxcache.connect(process.target, access="remote", transport="socket") as first,
        ctxcache.connect(process.target, access="remote") as second,
    ):
        first.models.register(SPEC)
        first.sessions.create(OWN, id="a", layout=LAYOUT)
        append(first, 0, 10)
        check_rows(second, 10)


def test_a_server_of_an_earlier_version_is_read_by_grpc(connect: Connect, far_side: FarSide) -> None:
    """It knows no bulk channel, which is no error."""
    far_side.add(NAME, 5)
    with connect(access="remote").sessions.open(NAME, OWN).read() as rows:
        np.testing.assert_array_equal(rows.array(KV), far_side.rows[NAME][KV])
    with pytest.raises(CacheError):
        connect(access="remote", transport="socket").sessions.open(NAME, OWN).read()


def test_an_access_that_does_not_exist_is_refused() -> None:
    """A typing error does not become a slow way."""
    with pytest.raises(InvalidArgument):
        ctxcache.connect(access="bulky")  # type: ignore[arg-type]  # on purpose
