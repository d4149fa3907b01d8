"""A store that lies, drips or answers with anything at all: others lose its session, and nothing else."""

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

import grpc
import numpy as np
import pytest

from ctxcache.client import OPAQUE, TOKENS, Durability
from ctxcache.core.fleet.heads import Head, Name, NodeRecord, Secret, node_path
from ctxcache.core.prefix.keys import scope_of
from ctxcache.errors import CacheError, SessionNotFound
from ctxcache.format.streams import ranges_of
from ctxcache.v1 import peer_pb2, peer_pb2_grpc
from ctxcache.wire.framed_socket import SocketFrameKind
from tests.fleet.bucket_proxy import PeerProxy
from tests.fleet.stores import SPEC, Stores, User, rows_of

UID = "a" * 32
HEADER = struct.Struct("<BBHIQ")
LONGEST_S = 12.0
"""So long a user waits for a store that drips, at most."""
Lie = Callable[[peer_pb2.YieldSessionResponse], None]


class Liar(peer_pb2_grpc.PeerServiceServicer):
    """Answers as an honest store did, but for a lie; its bulk channel sends what `drip` does."""

    def __init__(self, request: peer_pb2.YieldSessionRequest, answer: peer_pb2.YieldSessionResponse) -> None:
        """`answer`: of the honest store, to this request."""
        self.answer = answer
        self.request = request
        self.lie: Lie = lambda _: None
        self.drip: Callable[[socket.socket], None] = lambda _: None
        self.lend: Callable[[peer_pb2.LendPrefixRequest], peer_pb2.LendPrefixResponse] | None = None
        self._server = grpc.server(ThreadPoolExecutor(4))
        peer_pb2_grpc.add_PeerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self._server.start()
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._server.stop(0)
        self._listening.close()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            try:
                self.drip(connection)
            except OSError:
                return

    def YieldSession(  # noqa: N802  the proto's
        self,
        request: peer_pb2.YieldSessionRequest,  # noqa: ARG002  the proto's
        context: grpc.ServicerContext,  # noqa: ARG002  the proto's
    ) -> peer_pb2.YieldSessionResponse:
        """See the proto."""
        answer = peer_pb2.YieldSessionResponse()
        answer.CopyFrom(self.answer)
        answer.ticket.tcp_port = self._listening.getsockname()[1]
        self.lie(answer)
        return answer

    def FindEnded(  # noqa: N802  the proto's
        self,
        request: peer_pb2.FindEndedRequest,
        context: grpc.ServicerContext,  # noqa: ARG002  the proto's
    ) -> peer_pb2.FindEndedResponse:
        """Every session has ended."""
        return peer_pb2.FindEndedResponse(paths=request.paths)

    def LendPrefix(  # noqa: N802  the proto's
        self, request: peer_pb2.LendPrefixRequest, context: grpc.ServicerContext
    ) -> peer_pb2.LendPrefixResponse:
        """What it says of a session it says of a prefix, too, unless it has other words for that."""
        if self.lend is not None:
            return self.lend(request)
        told = self.YieldSession(peer_pb2.YieldSessionRequest(), context)
        lent = peer_pb2.LendPrefixResponse(remaining=told.remaining, ticket=told.ticket)
        if told.HasField("session"):
            lent.session.CopyFrom(told.session)
        return lent


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    """Two honest ones, whose engines are so slow that any prefix is worth its way."""
    with Stores(tmp_path, 2, "--prefill-tokens-per-s", "1000") as both:
        yield both


@pytest.fixture
def liar(stores: Stores) -> Iterator[Liar]:
    """A third one, which has seen how an honest one answers."""
    user = User(stores, "model")
    user.turn(0, 3000)
    deadline, entry = time.monotonic() + 10, None
    secret = Secret(b"a secret of this fleet of stores")
    place = Path(stores.bucket.removeprefix("file://")) / secret.head_path(Name("default", "model"))
    while entry is None:
        assert time.monotonic() < deadline
        entry = place if place.exists() else None
    head = secret.read_head(place.read_bytes())
    with grpc.insecure_channel(head.address) as channel:
        request = peer_pb2.YieldSessionRequest(
            tenant="default", session_id="model", uid=head.uid, term=head.term
        )
        answer = peer_pb2_grpc.PeerServiceStub(channel).YieldSession(request)
    with Liar(request, answer) as one:
        yield one


def has(stores: Stores, liar: Liar, session_id: str) -> None:
    """A head says that the liar has it."""
    secret = Secret(b"a secret of this fleet of stores")
    place = Path(stores.bucket.removeprefix("file://")) / secret.head_path(Name("default", session_id))
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(secret.write(Head(UID, "liar", "i", liar.address, 1, "0" * 16)))


def frame(kind: int, message: bytes = b"", data_bytes: int = 0) -> bytes:
    """A frame up to its data."""
    return HEADER.pack(kind, 0, 0, len(message), data_bytes) + message


def slowly(connection: socket.socket, rest: bytes) -> None:
    """A byte now and then, for ever."""
    for byte in rest * 10_000:
        connection.sendall(bytes([byte]))
        time.sleep(0.5)


def wrong_rows(stores: Stores, liar: Liar, number: int, *, mode: str) -> tuple[int, bool]:
    """A session comes over such a wire: how many tokens are found, and whether one of them is wrong."""
    session_id = f"{mode}{number}"
    with PeerProxy() as wire, grpc.insecure_channel(stores.processes[0].target) as honest:
        wire.mode = mode

        def tell(answer: peer_pb2.YieldSessionResponse) -> None:
            answer.CopyFrom(peer_pb2_grpc.PeerServiceStub(honest).YieldSession(liar.request))
            wire.target_port, answer.ticket.tcp_port = answer.ticket.tcp_port, wire.port

        liar.lie = tell
        has(stores, liar, session_id)
        client, model = stores.clients[number], stores.models[number]
        try:
            session = client.sessions.open(client.sessions.get(f"sessions/{session_id}"), model)
        except SessionNotFound:
            return 0, False
        count = session.info.token_count
        if not count:
            return 0, False
        with session.read() as read:
            tokens, rows = rows_of("model", 0, count, 1)
            is_right = np.array_equal(read.array(TOKENS).view(np.int32).reshape(-1), tokens)
            return count, not (is_right and np.array_equal(read.array(OPAQUE), rows))


def test_bits_that_flip_on_the_way_are_never_rows(stores: Stores, liar: Liar) -> None:
    """A store that does not look at the sums shows wrong rows over the same wire."""
    careless = stores.add(plants=["peer_sums_off"])
    assert wrong_rows(stores, liar, 1, mode="pass") == (3000, False)
    assert wrong_rows(stores, liar, 1, mode="flip") == (0, False)
    assert wrong_rows(stores, liar, careless, mode="flip") == (3000, True)


@pytest.mark.parametrize("mode", ["slow", "break"])
def test_what_a_store_does_not_bring_comes_out_of_the_bucket(stores: Stores, liar: Liar, mode: str) -> None:
    """A store that is late or breaks off is ended, and the objects of the same rows are read."""
    user = User(stores, "shared")
    for count in (9000, 9000):
        user.turn(0, count, durability=Durability.SHARED)
    secret = Secret(b"a secret of this fleet of stores")
    place = Path(stores.bucket.removeprefix("file://")) / secret.head_path(Name("default", "shared"))
    head = secret.read_head(place.read_bytes())
    with PeerProxy() as wire, grpc.insecure_channel(stores.processes[0].target) as honest:
        wire.mode = mode

        def tell(answer: peer_pb2.YieldSessionResponse) -> None:
            request = peer_pb2.YieldSessionRequest(
                tenant="default", session_id="shared", uid=head.uid, term=head.term
            )
            answer.CopyFrom(peer_pb2_grpc.PeerServiceStub(honest).YieldSession(request))
            wire.target_port, answer.ticket.tcp_port = answer.ticket.tcp_port, wire.port

        liar.lie = tell
        place.write_bytes(secret.write(replace(head, node="liar", address=liar.address)))
        assert user.found(1) == 18000
        assert 0 < wire.back_bytes < user.rows.nbytes


def _more_tokens(answer: peer_pb2.YieldSessionResponse) -> None:
    answer.session.token_count = answer.session.whole_token_count = 2**40


LIES: dict[str, Lie] = {
    "another tenant": lambda a: setattr(a.session, "tenant", "other"),
    "a user's session": lambda a: setattr(a.session, "name", "sessions/model"),
    "no port": lambda a: setattr(a.ticket, "tcp_port", 0),
    "a port beyond all": lambda a: setattr(a.ticket, "tcp_port", 70_000),
    "a closed port": lambda a: setattr(a.ticket, "tcp_port", 1),
    "fewer than none": lambda a: setattr(a.session, "token_count", -1),
    "more whole than all": lambda a: setattr(a.session, "whole_token_count", 2**40),
    "no model": lambda a: a.ClearField("model"),
    "no session": lambda a: a.ClearField("session"),
    "nothing": lambda a: a.Clear(),
    "another model": lambda a: setattr(a.session, "model_fingerprint", b"x" * 32),
    "a name that is none": lambda a: setattr(a.model, "name", "models/\u2603"),
    "a layout of nothing": lambda a: a.session.ClearField("layout"),
    "for ever": lambda a: setattr(a.remaining, "seconds", 315_576_000_000),
    "long ago": lambda a: setattr(a.remaining, "seconds", -5),
    "a ttl beyond all": lambda a: setattr(a.session.ttl, "seconds", 315_576_000_000),
    "many labels": lambda a: a.session.labels.update({f"l{i}": "x" * 500 for i in range(200)}),
    "very many copies": lambda a: setattr(a.session, "copies", 2**30),
    "fewer copies": lambda a: setattr(a.session, "copies", -(2**30)),
    "much salt": lambda a: setattr(a.session, "salt", b"x" * (1 << 20)),
    "more tokens than fit": _more_tokens,
}


def test_no_lie_about_a_session_costs_more_than_the_session(stores: Stores, liar: Liar) -> None:
    """Each is an absent or an empty session at once; the store's own ones are what they were."""
    own = User(stores, "own")
    own.turn(1)
    for number, (what, lie) in enumerate(LIES.items()):
        liar.lie = lie
        has(stores, liar, f"s{number}")
        begun = time.monotonic()
        try:
            session = stores.clients[1].sessions.get(f"sessions/s{number}")
            found = session.token_count
            # Empty, of the layout and the salt that it was said to have.
            stores.clients[1].sessions.open(session).delete()
        except SessionNotFound:
            found = 0
        assert found == 0, what
        assert time.monotonic() - begun < LONGEST_S, what
        fresh = User(stores, f"s{number}")
        fresh.turn(1, 10)
        assert fresh.found(1) == 10, what
    assert own.found(1) == 70


def is_a_store(stores: Stores, liar: Liar) -> None:
    """The liar has said where it is, as stores do."""
    place = Path(stores.bucket.removeprefix("file://")) / node_path("liar")
    secret = Secret(b"a secret of this fleet of stores")
    place.write_bytes(secret.write(NodeRecord("liar", "i", liar.address, 1, "0" * 16)))


def test_no_lie_about_a_prefix_costs_more_than_the_prefix(stores: Stores, liar: Liar) -> None:
    """The prompt is computed, and the next one is asked for like the first."""
    is_a_store(stores, liar)
    client, model = stores.clients[1], stores.models[1]
    for number, (what, lie) in enumerate({"no lie": lambda _: None, **LIES}.items()):
        liar.lie = lie
        tokens, rows = rows_of(f"prompt {number}", 0, 3000)
        begun = time.monotonic()
        assert client.prefixes.match(model, tokens, source=liar.address).token_count == 0, what
        assert time.monotonic() - begun < LONGEST_S, what
        client.sessions.create(model).append({TOKENS: tokens, OPAQUE: rows})
        assert client.prefixes.match(model, tokens, source=liar.address).token_count == 2944, what


def test_rows_of_another_prompt_are_not_taken_for_those_asked(stores: Stores, liar: Liar) -> None:
    """They are found by their own tokens, and by no others."""
    is_a_store(stores, liar)
    (asked, _), (other, rows) = rows_of("asked", 0, 2048), rows_of("other", 0, 2048)
    stores.clients[0].sessions.create(stores.models[0]).append({TOKENS: other, OPAQUE: rows})
    layout = [spec.stream for spec in SPEC.streams]
    scope = scope_of("default", stores.models[0].fingerprint, tuple(ranges_of(layout)), b"")
    honest = grpc.insecure_channel(stores.processes[0].target)

    def lend(request: peer_pb2.LendPrefixRequest) -> peer_pb2.LendPrefixResponse:
        del request.keys[:]
        request.keys.extend(scope.keys(other.tobytes()))
        return peer_pb2_grpc.PeerServiceStub(honest).LendPrefix(request)

    liar.lend = lend
    client, model = stores.clients[1], stores.models[1]
    with honest:
        assert client.prefixes.match(model, asked, source=liar.address).token_count == 0
    assert client.admin.fleet().borrowed_token_count == 2048
    assert client.prefixes.match(model, other).token_count == 2048
    session = client.sessions.create(model)
    session.adopt(other)
    with session.read() as read:
        assert np.array_equal(read.array(OPAQUE), rows)


WELCOME = frame(SocketFrameKind.WELCOME)
DRIPS: dict[str, Callable[[socket.socket], None]] = {
    "rubbish": lambda c: c.sendall(b"\xff" * 4096),
    "a byte now and then": lambda c: slowly(c, WELCOME),
    "a chunk that is none": lambda c: c.sendall(
        WELCOME + frame(SocketFrameKind.READ_HEADER) + frame(SocketFrameKind.CHUNK, b"\xff" * 64, 64)
    ),
    "a chunk of nothing": lambda c: c.sendall(
        WELCOME + frame(SocketFrameKind.READ_HEADER) + frame(SocketFrameKind.CHUNK)
    ),
    "an end before it began": lambda c: c.sendall(
        WELCOME + frame(SocketFrameKind.READ_HEADER) + frame(SocketFrameKind.END)
    ),
    "an error that is none": lambda c: c.sendall(WELCOME + frame(SocketFrameKind.ERROR, b"\xff" * 99)),
    "a message now and then": lambda c: slowly(
        c, WELCOME + frame(SocketFrameKind.READ_HEADER, b"\x0a" * 100_000)
    ),
    "nothing at all": lambda _: time.sleep(60),
}


def test_whatever_comes_instead_of_rows_ends_soon(stores: Stores, liar: Liar) -> None:
    """All at once, and beside them a session of an honest store: nobody waits for a store that drips."""
    honest = User(stores, "honest")
    honest.turn(0, 2000)
    took: dict[str, float] = {}
    failures: list[str] = []

    def ask(number: int, what: str) -> None:
        begun = time.monotonic()
        try:
            found = stores.clients[1].sessions.get(f"sessions/d{number}").token_count
            if found:
                failures.append(f"{what}: {found} tokens")
        except SessionNotFound:
            pass
        except Exception as error:  # noqa: BLE001  told by the main thread
            failures.append(f"{what}: {error!r}")
        took[what] = time.monotonic() - begun

    for number, (what, drip) in enumerate(DRIPS.items()):
        liar.drip = drip
        has(stores, liar, f"d{number}")
        thread = threading.Thread(target=ask, args=(number, what))
        thread.start()
        thread.join(LONGEST_S)
        assert not thread.is_alive(), what
    assert failures == []
    assert honest.turn(1) == 2000


def test_a_store_that_is_stopped_while_rows_drip_ends(stores: Stores, liar: Liar) -> None:
    """No thread of an arrival keeps the process."""
    liar.drip = lambda c: slowly(c, WELCOME + frame(SocketFrameKind.READ_HEADER, b"\x0a" * 100_000))

    def ask(number: int) -> None:
        with suppress(CacheError):
            stores.clients[1].sessions.get(f"sessions/e{number}")

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(20)]
    for number, asking in enumerate(threads):
        has(stores, liar, f"e{number}")
        asking.start()
    time.sleep(1)
    begun = time.monotonic()
    stores.processes[1].terminate()
    assert time.monotonic() - begun < 60
    for asking in threads:
        asking.join(5)
