"""The bulk channel's own promises; those of its reads and appends are in test_service_streams.py."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from bulk_stubs import (
    APPEND,
    APPENDED,
    CHUNK,
    COMMIT,
    END,
    FINISH,
    HELLO,
    READ,
    READ_HEADER,
    Connection,
    as_frame,
)
from fakes import FakeClock
from google.protobuf.duration_pb2 import Duration
from integrity import check_integrity
from service_rig import KV, STREAMS, Client, all_rows, chunk, chunks, commit, info_of, ranges, rows, until
from xxhash import xxh3_64_intdigest

from ctxcache.cache.appends import GRACE_NS, RESERVATION_LIFETIME_NS
from ctxcache.server.server import Server
from ctxcache.service import bulk, bulk_connection
from ctxcache.service.bulk_connection import TICKET_LIFETIME_NS, TICKET_LIMIT
from ctxcache.settings.config import Settings
from ctxcache.v1 import bulk_pb2, bulk_pb2_grpc, session_pb2
from ctxcache.wire import framed_socket

Code = grpc.StatusCode
PATIENCE_S = 30.0
RUBBISH = b"\xff\xff\xff\xff"


@pytest.fixture
async def connection(client: Client) -> AsyncIterator[Connection]:
    """A connection that has said hello."""
    made = await Connection.open(client.channel)
    yield made
    made.close()


async def refused(connection: Connection, code: Code, reason: str) -> dict[str, str]:
    """Fail unless the next frame is that error; returns its facts."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await connection.receive()
    found, facts, _ = info_of(caught.value)
    assert (caught.value.code(), found) == (code, reason)
    return facts


async def ticket_of(client: Client) -> bulk_pb2.BulkTicket:
    """A fresh ticket."""
    stub: Any = bulk_pb2_grpc.BulkServiceStub(client.channel)
    return await stub.OpenBulk(bulk_pb2.OpenBulkRequest())  # type: ignore[no-any-return]


async def append(
    connection: Connection, client: Client, tag: int, begin: int, end: int
) -> session_pb2.Session:
    """Append tokens of session `a`."""
    await connection.send(APPEND, client.header("a", begin).header.SerializeToString())
    for message in [*chunks(tag, begin, end), commit(end)]:
        await connection.send(*as_frame(message, is_first=False))
    await connection.send(FINISH)
    kind, answer, _ = await connection.receive()
    assert kind == APPENDED
    return session_pb2.AppendSessionResponse.FromString(answer).session


async def read(connection: Connection, client: Client) -> dict[int, bytes]:
    """Session `a`'s rows, by layer."""
    await connection.send(READ, client.read_request("a").SerializeToString())
    assert (await connection.receive())[0] == READ_HEADER
    found = dict.fromkeys([stream.layer for stream in STREAMS], b"")
    while (frame := await connection.receive())[0] == CHUNK:
        found[bulk_pb2.BulkChunk.FromString(frame[1]).stream.layer] += frame[2]
    assert frame[0] == END
    return found


# -- tickets ---------------------------------------------------------------------------------------


async def test_a_ticket_is_good_for_one_connection(client: Client) -> None:
    """A ticket that was seen on its way cannot be used again."""
    ticket = (await ticket_of(client)).ticket
    first = await Connection.open(client.channel, ticket=ticket)
    await first.receive()
    second = await Connection.open(client.channel, ticket=ticket)

    await refused(second, Code.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert await second.is_ended()
    first.close()


@pytest.mark.parametrize("change", [b"", b"short", bytes(32), bytes(33)])
async def test_a_ticket_that_was_not_issued_is_refused(client: Client, change: bytes) -> None:
    """Nothing is answered but that, and the connection ends."""
    connection = await Connection.open(client.channel, ticket=change)

    await refused(connection, Code.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert await connection.is_ended()


async def test_a_ticket_with_a_wrong_secret_is_used_up(client: Client) -> None:
    """There is one guess."""
    ticket = (await ticket_of(client)).ticket
    for guess in (ticket[:-1] + bytes([ticket[-1] ^ 1]), ticket):
        connection = await Connection.open(client.channel, ticket=guess)
        await refused(connection, Code.UNAUTHENTICATED, "UNAUTHENTICATED")


async def test_a_ticket_ends(client: Client, clock: FakeClock) -> None:
    """One that was not used in time is good for nothing."""
    ticket = await ticket_of(client)
    assert ticket.expire_time.ToNanoseconds() == clock.now_ns() + TICKET_LIFETIME_NS
    clock.advance(ns=TICKET_LIFETIME_NS)
    connection = await Connection.open(client.channel, ticket=ticket.ticket)

    await refused(connection, Code.UNAUTHENTICATED, "UNAUTHENTICATED")


async def test_tickets_that_wait_are_bounded(client: Client, clock: FakeClock) -> None:
    """A client that asks and never comes fills no memory; when they end there is room again."""
    for _ in range(TICKET_LIMIT):
        await ticket_of(client)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ticket_of(client)
    clock.advance(ns=TICKET_LIFETIME_NS)

    assert info_of(caught.value)[0] == "TOO_MANY_REQUESTS"
    assert (await ticket_of(client)).ticket


# -- connections -----------------------------------------------------------------------------------


async def test_one_connection_serves_many_requests(client: Client, connection: Connection) -> None:
    """Appends and reads follow one another, those that fail among them."""
    await client.create("a")
    await append(connection, client, 1, 0, 70)
    assert await read(connection, client) == all_rows(1, 70)

    await connection.send(READ, client.read_request("none").SerializeToString())
    await refused(connection, Code.NOT_FOUND, "SESSION_NOT_FOUND")
    await connection.send(APPEND, client.header("a", 3).header.SerializeToString())
    for message in chunks(1, 3, 100):
        await connection.send(*as_frame(message, is_first=False))
    await connection.send(FINISH)
    await refused(connection, Code.ABORTED, "WRITE_OFFSET_MISMATCH")

    assert (await append(connection, client, 1, 70, 100)).token_count == 100
    assert await read(connection, client) == all_rows(1, 100)


@pytest.mark.parametrize("kind", [HELLO, COMMIT, FINISH, END])
async def test_a_frame_that_is_no_request_is_refused(
    client: Client, connection: Connection, kind: int
) -> None:
    """A client that is out of step is told so."""
    await connection.send(kind)

    facts = await refused(connection, Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert facts["field"] == "frame"


async def test_messages_that_cannot_be_read_are_refused(client: Client, connection: Connection) -> None:
    """In every frame that has one."""
    await client.create("a")
    await connection.send(READ, RUBBISH)
    await refused(connection, Code.INVALID_ARGUMENT, "INVALID_FIELD")
    await connection.send(APPEND, RUBBISH)
    await connection.send(FINISH)
    await refused(connection, Code.INVALID_ARGUMENT, "INVALID_FIELD")
    for kind in (CHUNK, COMMIT):
        await connection.send(APPEND, client.header("a", 0).header.SerializeToString())
        await connection.send(kind, RUBBISH)
        await connection.send(FINISH)
        await refused(connection, Code.INVALID_ARGUMENT, "INVALID_FIELD")

    assert (await append(connection, client, 1, 0, 3)).token_count == 3


@pytest.mark.parametrize(
    "header",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x07" + bytes(15),
        b"\x02\x01" + bytes(14),
        b"\x02\x00\x01" + bytes(13),
        b"\x02\x00\x00\x00" + b"\xff" * 4 + bytes(8),
        b"\x04" + bytes(7) + b"\xff" * 8,
    ],
)
async def test_what_is_no_frame_ends_the_connection(
    client: Client, connection: Connection, header: bytes
) -> None:
    """There is no way back into step; nothing is reserved for sizes that somebody claims."""
    await connection.send_bytes(header)

    assert await connection.is_ended()


async def test_connections_are_bounded(client: Client, server: Server, settings: Settings) -> None:
    """One too many is closed at once, and there is room when another ends."""
    opened = [await Connection.open(client.channel) for _ in range(settings.max_bulk_connections)]
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await Connection.open(client.channel)
    opened.pop().close()
    await until(lambda: server.bulk.connection_count < settings.max_bulk_connections)
    opened.append(await Connection.open(client.channel))

    for connection in opened:
        connection.close()


def has_reservations(server: Server, count: int) -> bool:
    """Whether so many appends are open."""
    return server.cache.appends.reservation_count == count


async def test_who_says_nothing_gives_way(server: Server, settings: Settings, client: Client) -> None:
    """A crowd that never says who it is keeps nobody out who does."""
    address = ("127.0.0.1", server.bulk.tcp_port)
    silent = [await asyncio.open_connection(*address) for _ in range(settings.max_bulk_connections)]
    await until(lambda: server.bulk.connection_count == settings.max_bulk_connections)
    connection = await Connection.open(client.channel)

    assert await silent[0][0].read() == b""
    connection.close()
    for _, writer in silent:
        writer.close()
    await until(lambda: server.bulk.connection_count == 0)


async def test_transfers_count_as_streams(client: Client, server: Server, settings: Settings) -> None:
    """The bound on what runs at a time holds for both ways together."""
    await client.create("a")
    opened = []
    for number in range(settings.max_concurrent_streams):
        await client.create(f"s{number}")
        connection = await Connection.open(client.channel)
        await connection.send(APPEND, client.header(f"s{number}", 0).header.SerializeToString())
        opened.append(connection)
        await until(partial(has_reservations, server, number + 1))
    extra = opened[0]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.append("a", 1, 0, 1)
    assert info_of(caught.value)[0] == "TOO_MANY_REQUESTS"
    assert (await client.get("a")).token_count == 0

    for connection in opened:
        await connection.send(FINISH)
        await connection.receive()
    assert (await client.get("a")).name == "sessions/a"
    assert extra is opened[0]
    for connection in opened:
        connection.close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers have a fifth of a second to move."""
    monkeypatch.setattr(framed_socket, "PIECE_TIMEOUT_S", 0.2)


async def test_a_writer_that_stalls_in_a_chunk_is_cut(hurried: None, client: Client, server: Server) -> None:
    """Its room is free again, and none of its rows are visible."""
    connection = await Connection.open(client.channel)
    await client.create("a")
    await connection.send(APPEND, client.header("a", 0).header.SerializeToString())
    kind, message, data = as_frame(chunks(1, 0, 60)[2], is_first=False)
    await connection.send(kind, message, data)
    half = chunk(1, 0, 60, STREAMS[0])
    kind, message, data = as_frame(session_pb2.AppendSessionRequest(chunk=half), is_first=False)
    whole = framed_socket._HEADER.pack(kind, 0, 0, len(message), len(data)) + message + data
    await connection.send_bytes(whole[:-5])

    assert await connection.is_ended()
    await until(lambda: server.cache.appends.reservation_count == 0)
    assert (await client.get("a")).token_count == 0


async def test_a_writer_that_falls_silent_keeps_no_room(
    client: Client, server: Server, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lent room is the reservation's alone again long before that ends.

    When the writer goes on it is lent anew.
    """
    monkeypatch.setattr(bulk_connection, "RENEW_INTERVAL_S", 0.1)
    await client.create("a")
    await connection.send(APPEND, client.header("a", 0).header.SerializeToString())
    first, *others = chunks(1, 0, 60)
    await connection.send(*as_frame(first, is_first=False))
    await until(lambda: server.cache.appends.held_count == 1)
    [segment] = server.cache.appends.held()
    await until(lambda: segment.hold_count == 1)
    for message in [*others, commit(60)]:
        await connection.send(*as_frame(message, is_first=False))
    await connection.send(FINISH)

    assert (await connection.receive())[0] == APPENDED
    assert await client.read_rows("a") == all_rows(1, 60)


async def test_a_reader_that_takes_nothing_is_cut(hurried: None, client: Client, server: Server) -> None:
    """It cannot hold rows in memory for ever."""
    await client.create("a")
    for begin in range(0, 1280, 640):
        await client.append("a", 1, begin, begin + 640)
    connection = await Connection.open(client.channel)
    for _ in range(40):
        await connection.send(READ, client.read_request("a").SerializeToString())

    await until(lambda: server.bulk.connection_count == 0)
    assert server.cache.leases.lease_count == 0
    connection.close()


@pytest.mark.parametrize("sent_share", [0.0, 0.3, 0.7, 1.0])
async def test_a_writer_that_goes_away_leaves_nothing(
    client: Client, server: Server, sent_share: float
) -> None:
    """Wherever it broke: no reservation, no token, and the session can be written at once."""
    await client.create("a")
    connection = await Connection.open(client.channel)
    frames = [client.header("a", 0), *chunks(1, 0, 100)]
    stream = b""
    for number, message in enumerate(frames):
        kind, encoded, data = as_frame(message, is_first=number == 0)
        stream += framed_socket._HEADER.pack(kind, 0, 0, len(encoded), len(data)) + encoded + data
    await connection.send_bytes(stream[: int(len(stream) * sent_share)])
    connection.close()
    await until(lambda: server.bulk.connection_count == 0)

    assert (await client.get("a")).token_count == 0
    await server.cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(server.cache) == []
    await client.append("a", 1, 0, 20)
    assert await client.read_rows("a") == all_rows(1, 20)


async def test_rows_that_arrive_late_never_land_in_another_sessions_slots(
    client: Client, server: Server, clock: FakeClock
) -> None:
    """A chunk was half received when its reservation ended and others took all the room there was."""
    await client.create("late", ttl=Duration(seconds=10**6))
    connection = await Connection.open(client.channel)
    await connection.send(APPEND, client.header("late", 0).header.SerializeToString())
    for message in chunks(9, 0, 128)[:2]:
        await connection.send(*as_frame(message, is_first=False))
    kind, encoded, data = as_frame(chunks(9, 0, 128)[2], is_first=False)
    header = framed_socket._HEADER.pack(kind, 0, 0, len(encoded), len(data))
    await connection.send_bytes(header + encoded + data[: len(data) // 2])
    await until(lambda: server.cache.appends.held_count == 2)
    clock.advance(ns=RESERVATION_LIFETIME_NS)
    server.cache.appends.end_overdue()
    clock.advance(ns=GRACE_NS)
    server.cache.appends.end_overdue()
    names = [f"s{number}" for number in range(10)]
    for number, name in enumerate(names):
        await client.create(name)
        await client.append(name, number, 0, 128)
    await connection.send_bytes(data[len(data) // 2 :])
    await connection.send(*as_frame(commit(128), is_first=False))
    await connection.send(FINISH)

    facts = await refused(connection, Code.ABORTED, "WRITE_OFFSET_MISMATCH")
    assert int(facts["token_count"]) == 0
    for number, name in enumerate(names):
        assert await client.read_rows(name) == all_rows(number, 128)
    connection.close()


# -- parts -----------------------------------------------------------------------------------------


def in_parts(sizes: list[int], **changes: Any) -> tuple[bytes, bytes]:
    """Ten rows of KV as a CHUNK frame in parts of these sizes, and the rows."""
    data, begin, checksums = rows(1, 0, 10, KV), 0, []
    for size in sizes:
        checksums.append(xxh3_64_intdigest(data[begin : begin + size]))
        begin += size
    facts: dict[str, Any] = {"stream": KV, "part_sizes": sizes, "checksums": checksums}
    return bulk_pb2.BulkChunk(**(facts | changes)).SerializeToString(), data


async def test_parts_of_any_size_are_verified(client: Client, connection: Connection) -> None:
    """Parts need not be rows."""
    await client.create("a")
    await connection.send(APPEND, client.header("a", 0).header.SerializeToString())
    for message in chunks(1, 0, 10)[:2]:
        await connection.send(*as_frame(message, is_first=False))
    await connection.send(CHUNK, *in_parts([1, 159, 1000, 440]))
    await connection.send(*as_frame(commit(10), is_first=False))
    await connection.send(FINISH)

    assert (await connection.receive())[0] == APPENDED
    assert await client.read_rows("a") == all_rows(1, 10)


@pytest.mark.parametrize(
    ("sizes", "changes", "reason"),
    [
        ([1600], {"checksums": [1]}, "CHECKSUM_MISMATCH"),
        ([800, 800], {"checksums": [1, 0]}, "CHECKSUM_MISMATCH"),
        ([1599], {}, "INVALID_FIELD"),
        ([1600, 1], {}, "INVALID_FIELD"),
        ([1600, 0], {}, "INVALID_FIELD"),
        ([1601, -1], {}, "INVALID_FIELD"),
        ([], {}, "INVALID_FIELD"),
        ([1] * 513, {}, "INVALID_FIELD"),
        ([1600], {"checksums": []}, "INVALID_FIELD"),
        ([1600], {"checksums": [1, 2]}, "INVALID_FIELD"),
    ],
)
async def test_parts_that_do_not_fit_are_refused(
    client: Client, connection: Connection, sizes: list[int], changes: dict[str, Any], reason: str
) -> None:
    """Nothing is placed outside the chunk, and the connection goes on."""
    await client.create("a")
    await connection.send(APPEND, client.header("a", 0).header.SerializeToString())
    await connection.send(CHUNK, *in_parts(sizes, **changes))
    await connection.send(FINISH)

    await refused(connection, Code.INVALID_ARGUMENT, reason)
    assert (await append(connection, client, 1, 0, 3)).token_count == 3


@pytest.mark.parametrize("wrong", range(3))
async def test_each_part_of_a_chunk_is_verified(client: Client, connection: Connection, wrong: int) -> None:
    """Also where those behind it are right: nothing is committed, and the connection goes on."""
    await client.create("a")
    await connection.send(APPEND, client.header("a", 0).header.SerializeToString())
    for message in chunks(1, 0, 10)[:2]:
        await connection.send(*as_frame(message, is_first=False))
    encoded, data = in_parts([160, 1000, 440])
    chunk = bulk_pb2.BulkChunk.FromString(encoded)
    chunk.checksums[wrong] ^= 1
    await connection.send(CHUNK, chunk.SerializeToString(), data)
    await connection.send(*as_frame(commit(10), is_first=False))
    await connection.send(FINISH)

    await refused(connection, Code.INVALID_ARGUMENT, "CHECKSUM_MISMATCH")
    assert (await append(connection, client, 1, 0, 3)).token_count == 3


async def test_damage_in_the_arena_is_noticed_by_the_reader(client: Client, server: Server) -> None:
    """The reader verifies by the checksums that the chunks had when they were stored."""
    await client.create("a")
    await client.append("a", 1, 0, 64, is_durable=True)
    segment = server.cache.ledger.names.sessions["default", "a"].segments[0]
    connection = await Connection.open(client.channel)
    await connection.send(READ, client.read_request("a", streams=ranges(KV)).SerializeToString())
    await connection.receive()
    _, message, data = await connection.receive()
    sent = bulk_pb2.BulkChunk.FromString(message)
    connection.close()

    assert list(sent.checksums) == [segment.settled.values[2]]
    assert xxh3_64_intdigest(data) == segment.settled.values[2]


# -- the end ---------------------------------------------------------------------------------------


async def test_a_server_that_stops_ends_idle_connections_and_finishes_what_runs(
    settings: Settings, clock: FakeClock
) -> None:
    """An append under way is acknowledged; whoever waits is not waited for."""
    server = await Server.start(settings, clock)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        idle, busy = await Connection.open(channel), await Connection.open(channel)
        await busy.send(APPEND, client.header("a", 0).header.SerializeToString())
        await until(lambda: server.cache.appends.reservation_count == 1)
        stopping = asyncio.ensure_future(server.stop())
        assert await idle.is_ended()
        for message in [*chunks(1, 0, 10), commit(10)]:
            await busy.send(*as_frame(message, is_first=False))
        await busy.send(FINISH)
        kind, answer, _ = await busy.receive()
        assert await busy.is_ended()
        await stopping

    assert kind == APPENDED
    assert session_pb2.AppendSessionResponse.FromString(answer).session.token_count == 10


async def test_what_does_not_finish_in_time_is_cut(settings: Settings, clock: FakeClock) -> None:
    """A writer that never ends does not keep the server from stopping."""
    server = await Server.start(settings.model_copy(update={"drain_timeout_s": 0.1}), clock)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        busy = await Connection.open(channel)
        await busy.send(APPEND, client.header("a", 0).header.SerializeToString())
        await until(lambda: server.cache.appends.reservation_count == 1)
        await server.stop()

        assert await busy.is_ended()
    await server.cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(server.cache) == []


async def test_the_channel_can_be_left_out(settings: Settings, clock: FakeClock) -> None:
    """Then no ticket is given, and nothing listens."""
    server = await Server.start(settings.model_copy(update={"bulk_listen": ""}), clock)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        assert await ticket_of(Client(channel)) == bulk_pb2.BulkTicket()
    assert server.bulk_addresses == ()
    await server.stop()


async def test_a_unix_socket_has_a_bulk_socket_beside_it(
    settings: Settings, clock: FakeClock, tmp_path: Path
) -> None:
    """The same frames; the file goes with the server."""
    path = tmp_path / "socket"
    server = await Server.start(settings.model_copy(update={"listen": "", "unix_socket": str(path)}), clock)
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        connection = await Connection.open(channel)
        await append(connection, client, 1, 0, 70)
        assert await read(connection, client) == all_rows(1, 70)
        connection.close()
    assert server.bulk_addresses == (f"unix:{path}.bulk",)
    await server.stop()
    assert not path.with_name("socket.bulk").exists()


async def test_a_server_without_descriptors_pauses(
    client: Client, server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not ask for the same connection again and again, and takes it when it can."""
    monkeypatch.setattr(bulk, "ACCEPT_PAUSE_S", 0.1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ticket = await ticket_of(client)
    with socket.socket() as waiting:
        resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, hard))
        try:
            waiting.connect(("127.0.0.1", ticket.tcp_port))
            for _ in range(50):
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: server.bulk.connection_count == 1)

    assert sum("bulk_accept_failed" in record.getMessage() for record in caplog.records) == 1


def no_thread(*_: object) -> None:
    """As CPython does when the system has none."""
    raise RuntimeError("can't start new thread")


def mute_thread(*_: object) -> None:
    """As CPython does when a thread finds no memory for its first call."""


@pytest.mark.parametrize("starter", [no_thread, mute_thread])
async def test_a_server_without_threads_closes_the_connection(
    client: Client,
    server: Server,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    starter: Callable[..., None],
) -> None:
    """A new connection is not left waiting, counts for nothing, and the next one is served."""
    ticket = await ticket_of(client)
    with monkeypatch.context() as limited:
        limited.setattr(bulk, "start_new_thread", starter)
        limited.setattr(bulk, "BEGIN_TIMEOUT_S", 0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", ticket.tcp_port)
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
    writer.close()
    assert server.bulk.connection_count == 0
    assert sum("bulk_accept_failed" in record.getMessage() for record in caplog.records) == 1
    await client.create("a")
    connection = await Connection.open(client.channel)
    assert (await append(connection, client, 1, 0, 3)).token_count == 3
    connection.close()
