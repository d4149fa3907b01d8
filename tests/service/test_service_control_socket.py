"""The control socket by itself: framing, greeting, limits, ends. Its operations are tested with Access."""

import asyncio
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fakes import FakeClock
from integrity import check_integrity
from service_rig import Access, Client, SocketWay, all_rows, until
from xxhash import xxh3_64_intdigest

from ctxcache.errors import AddressUnusable
from ctxcache.identity import parse_rules
from ctxcache.server.server import Server
from ctxcache.service import fairness
from ctxcache.service.local_client import LocalClient
from ctxcache.settings.config import Settings
from ctxcache.v1 import admin_pb2, arena_pb2, session_pb2

SUM_OF_ZEROS = xxh3_64_intdigest(bytes(4 + 96 + 160))
"""The checksum of a token whose rows nobody wrote."""

Code = grpc.StatusCode
INVALID = (Code.INVALID_ARGUMENT, "INVALID_FIELD")
HELLO = arena_pb2.ControlHello(protocol_version=1).SerializeToString()


@pytest.fixture
def path(server: Server) -> str:
    """Where the server listens."""
    return server.control_socket


@pytest.fixture
async def way(path: str, client: Client) -> AsyncIterator[SocketWay]:
    """A greeted connection; a session `a` of 100 tokens is there."""
    await client.create("a")
    await client.append("a", 1, 0, 100)
    opened = await SocketWay.open(path)
    yield opened
    opened.die()


def _mode(path: str) -> int | None:
    """Permissions of a file; None where there is none."""
    return Path(path).stat().st_mode & 0o777 if Path(path).exists() else None


def _open_to_everybody(path: Path) -> None:
    path.chmod(0o666)
    for directory in path.parents:
        if directory.is_relative_to(tempfile.gettempdir()) and directory != Path(tempfile.gettempdir()):
            directory.chmod(0o711)


async def raw(path: str) -> SocketWay:
    """A connection that has said nothing yet."""
    return SocketWay(*await asyncio.open_unix_connection(path))


def lease_of(client: Client, **changes: Any) -> arena_pb2.Operation:
    """Ask for a lease on the session."""
    facts: dict[str, Any] = {"session": "sessions/a", "model_fingerprint": client.fingerprint}
    return arena_pb2.Operation(acquire_lease=arena_pb2.AcquireLease(**(facts | changes)))


def batch(request_id: int, *operations: arena_pb2.Operation) -> bytes:
    """A batch in its frame."""
    message = arena_pb2.AccessRequest(request_id=request_id, operations=operations).SerializeToString()
    return struct.pack("<IB", len(message), 2) + message


async def test_the_greeting_hands_over_the_arena(path: str, server: Server, client: Client) -> None:
    """The descriptor comes with the welcome's first byte, and leads to the memory that GetArena speaks of."""
    arena = await client.arena.GetArena(arena_pb2.GetArenaRequest())
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plain:
        plain.setblocking(False)  # noqa: FBT003  # the library's own
        await loop.sock_connect(plain, path)
        await loop.sock_sendall(plain, struct.pack("<IB", len(HELLO), 1) + HELLO)
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(plain, 1 << 16, 4)
                break
            except BlockingIOError:
                await asyncio.sleep(0.01)
    length, kind = struct.unpack_from("<IB", data)
    welcome = arena_pb2.ControlWelcome.FromString(data[5:])
    head = os.pread(fds[0], 16, 0)
    os.close(fds[0])

    assert (kind, length, len(fds)) == (1, len(data) - 5, 1)
    assert (welcome.protocol_version, welcome.arena, welcome.message_limit_bytes) == (1, arena, 4 << 20)
    assert head == arena.arena_id
    assert _mode(path) == 0o600


async def test_frames_may_come_in_any_portions(way: SocketWay, client: Client) -> None:
    """Where one write ends means nothing: byte by byte, and many at once, are the same stream."""
    for byte in batch(1, lease_of(client)):
        way.writer.write(bytes([byte]))
        await way.writer.drain()
    way.writer.write(
        batch(2, lease_of(client)) + batch(3, arena_pb2.Operation()) + batch(4, lease_of(client))
    )
    answers = [await way.read() for _ in range(4)]

    assert [answer and answer.request_id for answer in answers] == [1, 2, 3, 4]
    assert [answer and answer.results[0].WhichOneof("result") for answer in answers] == [
        "lease",
        "lease",
        "error",
        "lease",
    ]


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([(1, arena_pb2.ControlHello(protocol_version=2).SerializeToString())], "protocol_version"),
        ([(1, b"\xff\xff")], "request"),
        ([(2, b"")], "frame"),
        ([(3, b"")], "frame"),
        ([(1, HELLO), (1, HELLO)], "frame"),
        ([(1, HELLO), (77, b"")], "frame"),
        ([(1, HELLO), (2, b"\xff\xff")], "request"),
        ([(1, HELLO), (2, b"")], "operations"),
    ],
)
async def test_what_is_no_conversation_ends_it(
    path: str, server: Server, frames: list[tuple[int, bytes]], field: str
) -> None:
    """Each has its status, and nothing stays behind."""
    way = await raw(path)
    for kind, message in frames:
        way.write_frame(kind, message)

    assert (await way.ended(*INVALID))["field"] == field
    await until(lambda: not server.control.connections)


async def test_a_frame_that_is_too_large_ends_it_before_it_has_come(path: str) -> None:
    """Five bytes are enough to refuse what would take memory."""
    way = await raw(path)
    way.writer.write(struct.pack("<IB", (4 << 20) + 1, 1))

    assert (await way.ended(*INVALID))["field"] == "frame"


async def test_leases_end_with_a_client_that_dies_while_its_batch_waits(
    way: SocketWay, client: Client, server: Server
) -> None:
    """Rows that a promotion would have brought are held by no lease."""
    await client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name="sessions/a"))
    for _ in range(5):
        dying = await SocketWay.open(server.control_socket)
        await dying.one()
        dying.writer.write(batch(2, lease_of(client), lease_of(client)))
        await dying.writer.drain()
        dying.die()
    await until(lambda: len(server.control.connections) == 1 and not server.cache.leases.lease_count)

    lease = (await way.send(lease_of(client)))[0].lease
    assert lease.range.end == 100
    assert await client.read_rows("a") == all_rows(1, 100)


async def test_a_batch_that_waits_is_answered_in_its_turn(way: SocketWay, client: Client) -> None:
    """Batches behind a promotion wait for it: answers come in order."""
    await client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name="sessions/a"))
    way.writer.write(batch(1, lease_of(client)) + batch(2, arena_pb2.Operation()))
    answers = [await way.read() for _ in range(2)]

    assert [answer and answer.request_id for answer in answers] == [1, 2]
    assert answers[0] is not None
    assert [segment.token_count for segment in answers[0].results[0].lease.segments] == [64, 36]


async def test_an_end_may_come_right_behind_a_batch(way: SocketWay, client: Client, server: Server) -> None:
    """A client that says all it has to say and closes its side is answered, and has ended in order."""
    await client.admin.DemoteSession(admin_pb2.DemoteSessionRequest(name="sessions/a"))
    await way.one()
    way.writer.write(batch(1, lease_of(client)) + struct.pack("<IB", 0, 3))
    way.writer.write_eof()

    answer = await way.read()
    assert answer is not None
    assert answer.results[0].lease.range.end == 100
    assert await way.read() is None
    await until(lambda: not server.cache.leases.lease_count)


async def test_a_client_that_does_not_read_is_not_served_further(
    way: SocketWay, client: Client, server: Server
) -> None:
    """Answers that nobody takes are bounded; when they are taken, everything is answered."""
    await way.one()
    count = 2000
    (connection,) = server.control.connections
    request = batch(1, *[lease_of(client)] * 50)
    sent = asyncio.ensure_future(_send(way, request * count))
    await until(lambda: connection.is_stalled)
    # What waits to be dealt with, and answers: one batch's may come on top of their limit.
    assert connection.held_bytes < (4 << 20) + (1 << 16) + (1 << 18) + (1 << 18) + (1 << 16)
    way.die()
    sent.cancel()
    await until(lambda: not server.cache.leases.lease_count)


async def _send(way: SocketWay, data: bytes) -> None:
    way.writer.write(data)
    await way.writer.drain()


async def test_another_user_is_refused(path: str, server: Server) -> None:
    """A user that gets past the file's mode is still identified."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    _open_to_everybody(Path(path))
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect(sys.argv[1]); sys.stdout.buffer.write(s.recv(65536))"
    )
    ended = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, complaint = await ended.communicate()

    assert b"UNAUTHENTICATED" in said, complaint
    assert b"user 65534 may not use the arena of user 0" in said
    await until(lambda: not server.control.connections)


@pytest.mark.parametrize(
    ("rules", "kind", "words"),
    [
        ("uid:65534=near:shared-memory", 1, ""),
        ("uid:*=near:shared-memory", 1, ""),
        ("uid:65534=far", 3, "PERMISSION_DENIED"),
        ("uid:65533=near:shared-memory", 3, "UNAUTHENTICATED"),
        ("cn:65534=near:shared-memory", 3, "UNAUTHENTICATED"),
    ],
)
async def test_another_user_is_let_in_as_a_rule_says(
    settings: Settings, clock: FakeClock, rules: str, kind: int, words: str
) -> None:
    """On the kernel's word, and with the arena's descriptor only where shared memory is granted."""
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    server = await Server.start(settings.model_copy(update={"identities": parse_rules(rules)}), clock)
    path = server.control_socket
    is_for_others = _mode(path) == 0o666
    _open_to_everybody(Path(path))
    script = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX);"
        "s.connect(sys.argv[1]); s.settimeout(10); sys.argv[2] and s.sendall(bytes.fromhex(sys.argv[2]));"
        "data, fds, _, _ = socket.recv_fds(s, 65536, 4); print(data[4], len(fds), data[5:])"
    )
    # A user that may not come at all is told so before its first message: unread words would reset the
    # connection.
    hello = "" if words == "UNAUTHENTICATED" else (struct.pack("<IB", len(HELLO), 1) + HELLO).hex()
    ended = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, path, hello, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    said, complaint = [text.decode() for text in await ended.communicate()]
    await server.stop()

    assert said.startswith(f"{kind} {int(kind == 1)} "), complaint
    assert words in said
    assert is_for_others == rules.startswith("uid:")


async def test_what_is_held_is_cut_off_at_the_end_of_the_drain(settings: Settings) -> None:
    """A client that keeps its lease holds the shutdown no longer than its time."""
    server = await Server.start(settings.model_copy(update={"drain_timeout_s": 0.1}))
    async with grpc.aio.insecure_channel(server.addresses[0]) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        await client.append("a", 1, 0, 10)
        way: Access = await SocketWay.open(server.control_socket)
        await way.send(lease_of(client))
        await server.stop()

    await server.cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(server.cache) == []
    assert not server.cache.leases.lease_count
    assert _mode(server.control_socket) is None


async def test_a_socket_that_somebody_listens_to_is_not_taken_away(
    settings: Settings, server: Server, tmp_path: Path, clock: FakeClock
) -> None:
    """A second server with the same path is told; a socket that a killed one left is replaced."""
    path = server.control_socket
    other = {"data_directory": tmp_path / "other", "control_socket": path}
    with pytest.raises(AddressUnusable, match="another process listens"):
        await Server.start(settings.model_copy(update=other), clock)
    left = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(left))
    again = await Server.start(
        settings.model_copy(update={"data_directory": tmp_path / "other", "control_socket": str(left)}), clock
    )
    await (await SocketWay.open(str(left))).one()
    await again.stop()


async def test_many_sessions_are_committed_at_once_each_by_itself(
    client: Client, way: SocketWay, server: Server
) -> None:
    """One reservation that is gone fails alone; the others are committed, durably where asked."""
    reservations = []
    for name in ("b", "c", "d"):
        await client.create(name)
        reserve = arena_pb2.Reserve(
            session=f"sessions/{name}", model_fingerprint=client.fingerprint, token_count=70, is_brief=True
        )
        reservations.append((await way.one(reserve=reserve)).reservation)
    assert [list(r.runs.row_end) for r in reservations] == [[64, 6]] * 3
    ids = [reservations[0].reservation_id, 99, reservations[1].reservation_id, reservations[2].reservation_id]
    commit = arena_pb2.CommitReservations(
        reservation_ids=ids,
        token_counts=[1, 1, 1, 71],
        checksums=[SUM_OF_ZEROS] * 4,
        durability=session_pb2.DURABILITY_DISK,
        keep_open=True,
    )
    result = (await way.one(commit_many=commit)).committed_many
    sessions = [await client.get(name) for name in ("b", "c", "d")]

    assert [session.token_count for session in sessions] == [1, 1, 0]
    assert [session.durable_token_count for session in sessions] == [1, 1, 0]
    assert list(result.generations) == [sessions[0].generation, 0, sessions[1].generation, 0]
    assert [(f.index, f.error.reason) for f in result.failures] == [
        (1, "RESERVATION_NOT_FOUND"),
        (3, "INVALID_FIELD"),
    ]
    ended = arena_pb2.CommitReservations(reservation_ids=ids[:1], token_counts=[2], checksums=[SUM_OF_ZEROS])
    assert list((await way.one(commit_many=ended)).committed_many.generations) == [sessions[0].generation + 1]
    assert server.cache.appends.reservation_count == 2


@pytest.mark.parametrize(
    ("commit", "field"),
    [
        ({}, "reservation_ids"),
        ({"reservation_ids": [2], "token_counts": []}, "token_counts"),
        ({"reservation_ids": [2, 2], "token_counts": [1, 2], "checksums": [1, 2]}, "reservation_ids"),
        ({"reservation_ids": [2], "token_counts": [1]}, "checksums"),
        ({"reservation_ids": [2], "token_counts": [1], "checksums": [1, 2]}, "checksums"),
        ({"reservation_ids": [2], "token_counts": [1], "checksums": [1], "durability": 9}, "durability"),
    ],
)
async def test_commits_that_do_not_fit_together_change_nothing(
    way: SocketWay, client: Client, commit: dict[str, Any], field: str
) -> None:
    """The operation fails as a whole, and names what is wrong."""
    await client.create("b")
    reserve = arena_pb2.Reserve(session="sessions/b", model_fingerprint=client.fingerprint, token_count=5)
    made = (await way.one(reserve=reserve)).reservation
    assert made.reservation_id == 2
    result = await way.one(commit_many=arena_pb2.CommitReservations(**commit))

    assert (result.error.reason, result.error.metadata["field"]) == ("INVALID_FIELD", field)
    assert (await client.get("b")).token_count == 0


async def test_a_brief_lease_says_the_same_in_fewer_words(way: SocketWay, client: Client) -> None:
    """Runs are the segments' rows; layout and session are those of a full answer."""
    asked: dict[str, Any] = {"range": {"begin": 60, "end": 100}}
    results = await way.send(lease_of(client, **asked), lease_of(client, **asked, is_brief=True))
    full, brief = (result.lease for result in results)

    assert [(s.offset_bytes, r.row_begin, r.row_end) for s in full.segments for r in s.rows] == list(
        zip(brief.runs.offset_bytes, brief.runs.row_begin, brief.runs.row_end, strict=True)
    )
    assert (brief.layout, brief.session.layout, not brief.segments) == (
        full.layout,
        full.session.layout,
        True,
    )


async def test_a_client_that_died_within_a_frame_is_gone(way: SocketWay, server: Server) -> None:
    """Whatever the bytes are that it came to."""
    await way.one()
    whole = arena_pb2.AccessRequest(request_id=1 << 60).SerializeToString() + b"\0\0\0\0\3"
    way.writer.write(struct.pack("<IB", len(whole) + 1, 2) + whole)
    way.writer.write_eof()
    await until(lambda: not server.control.connections)


async def test_a_reservation_may_wait_for_the_disk(way: SocketWay, client: Client, server: Server) -> None:
    """One that comes while too much is dirty is answered when that has been written."""
    await client.create("b")
    marks = server.cache.ledger.watermarks
    server.cache.ledger.watermarks = replace(marks, dirty_limit=0.05)
    reserve = arena_pb2.Reserve(
        session="sessions/b", model_fingerprint=client.fingerprint, write_offset=0, token_count=64
    )
    result = await way.one(reserve=reserve)

    assert result.WhichOneof("result") == "reservation"


async def test_a_batch_that_breaks_when_its_client_dies_holds_nothing(
    way: SocketWay, client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong in it: the connection has ended, and the drain waits for nobody."""

    async def broken(_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError

    await way.one()
    monkeypatch.setattr(server.cache.leases, "acquire", broken)
    way.writer.write(batch(9, lease_of(client), lease_of(client)))
    await way.writer.drain()
    await until(lambda: all(one.is_at_work for one in server.control.connections))
    way.die()
    await until(lambda: not server.control.connections)


async def test_many_requests_at_once_leave_turns_to_others(
    way: SocketWay, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client's operation comes between them; all are answered, in order."""
    monkeypatch.setattr(fairness, "SLICE_NS", 0)
    nothing = arena_pb2.Operation(release_lease=arena_pb2.ReleaseLease(lease_id=0))
    answer, order = LocalClient.answer_at_once, list[LocalClient]()

    def noted(self: LocalClient, message: bytes) -> bytes | arena_pb2.AccessRequest:
        order.append(self)
        return answer(self, message)

    other = await SocketWay.open(path)
    await other.send(nothing)
    monkeypatch.setattr(LocalClient, "answer_at_once", noted)
    way.writer.write(b"".join(batch(number, nothing) for number in range(1000)))
    await other.send(nothing)
    answers = [await way.read() for _ in range(1000)]

    assert [answer and answer.request_id for answer in answers] == list(range(1000))
    assert order.count(order[0]) == 1000
    assert order[-1] is order[0]
    other.die()


async def test_a_client_that_greets_and_goes_is_nobodys_fault(
    path: str, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """The welcome cannot be handed over any more; that is no error of the server's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plain:
        plain.connect(path)
        plain.sendall(struct.pack("<IB", len(HELLO), 1) + HELLO)
    await until(lambda: bool(server.control.connections))
    await until(lambda: not server.control.connections)

    assert not caplog.records
