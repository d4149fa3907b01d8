"""Calls that move no rows: what they send, and what comes back when they fail."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from far_side import LAYOUT, OWN, SPEC, Connect, FarSide
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

import ctxcache
from ctxcache.client import Client
from ctxcache.client.convert import model_from_wire, model_to_wire, ranges_to_wire
from ctxcache.client.types import seconds
from ctxcache.errors import DeadlineExceeded, InvalidArgument, SessionNotFound, Unavailable
from ctxcache.v1 import admin_pb2, model_pb2, session_pb2

NAME = "sessions/a"
NOON = datetime(2030, 1, 2, 12, tzinfo=UTC)


class Recorder(grpc.GenericRpcHandler):
    """Keeps unary calls and answers with an empty message, a registration with the fingerprint."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bytes]] = []
        self.looked_up_at_once = 0
        """Results in an answer to look-ups."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Record a call of any method."""
        method = handler_call_details.method.rpartition("/")[2]
        return grpc.unary_unary_rpc_method_handler(lambda request, _: self._record(method, request))

    def _record(self, method: str, request: bytes) -> bytes:
        self.calls.append((method, request))
        if method == "RegisterModel":
            return model_pb2.Model(name=OWN.name, fingerprint=OWN.fingerprint).SerializeToString()
        if method == "LookupSessions":
            queries = session_pb2.LookupSessionsRequest.FromString(request).queries
            results = [session_pb2.LookupResult(name=q.name) for q in queries[: self.looked_up_at_once]]
            return session_pb2.LookupSessionsResponse(results=results).SerializeToString()
        return b""


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[tuple[Recorder, Client]]:
    """A recorder and a client of it."""
    handler = Recorder()
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    with ctxcache.connect(f"unix:{tmp_path}/socket") as client:
        yield handler, client
    server.stop(None).wait()


def _noon() -> Timestamp:
    stamp = Timestamp()
    stamp.FromDatetime(NOON)
    return stamp


CALLS: list[tuple[Callable[[Client], object], str, Message]] = [
    (
        lambda c: c.sessions.create(OWN, id="a", layout=LAYOUT, ttl=seconds(1.5), is_pinned=True),
        "CreateSession",
        session_pb2.CreateSessionRequest(
            model="models/tiny",
            session_id="a",
            layout=ranges_to_wire(LAYOUT),
            ttl=Duration(seconds=1, nanos=500_000_000),
            is_pinned=True,
        ),
    ),
    (
        lambda c: c.sessions.create(OWN, layout=(), expire_time=NOON),
        "CreateSession",
        session_pb2.CreateSessionRequest(model="models/tiny", expire_time=_noon()),
    ),
    (
        lambda c: c.sessions.create(OWN),
        "CreateSession",
        session_pb2.CreateSessionRequest(
            model="models/tiny", layout=ranges_to_wire(spec.stream for spec in SPEC.streams)
        ),
    ),
    (lambda c: c.sessions.open(NAME).update(), "UpdateSession", session_pb2.UpdateSessionRequest(name=NAME)),
    (
        lambda c: c.sessions.open(NAME).update(is_pinned=False, ttl=seconds(60)),
        "UpdateSession",
        session_pb2.UpdateSessionRequest(name=NAME, is_pinned=False, ttl=Duration(seconds=60)),
    ),
    (
        lambda c: c.sessions.open(NAME).keep_recent(10),
        "TruncateSession",
        session_pb2.TruncateSessionRequest(name=NAME, keep_recent=session_pb2.KeepRecent(token_count=10)),
    ),
    (
        lambda c: c.sessions.open(NAME).keep_recent(10, sink_token_count=0, if_generation_match=3),
        "TruncateSession",
        session_pb2.TruncateSessionRequest(
            name=NAME,
            keep_recent=session_pb2.KeepRecent(token_count=10, sink_token_count=0),
            if_generation_match=3,
        ),
    ),
    (
        lambda c: c.sessions.open(NAME).keep_first(0),
        "TruncateSession",
        session_pb2.TruncateSessionRequest(name=NAME, keep_first=0),
    ),
    (
        lambda c: c.sessions.open(NAME).drop_ranges([(4, 8), (10, 12)]),
        "TruncateSession",
        session_pb2.TruncateSessionRequest(
            name=NAME,
            drop=session_pb2.DropRanges(
                ranges=[session_pb2.TokenRange(begin=4, end=8), session_pb2.TokenRange(begin=10, end=12)]
            ),
        ),
    ),
    (
        lambda c: c.sessions.open(NAME).fork(id="b", token_count=0, if_generation_match=2),
        "ForkSession",
        session_pb2.ForkSessionRequest(name=NAME, session_id="b", token_count=0, if_generation_match=2),
    ),
    (lambda c: c.sessions.open(NAME).flush(), "FlushSession", session_pb2.FlushSessionRequest(name=NAME)),
    (
        lambda c: c.sessions.open(NAME).delete(if_generation_match=0),
        "DeleteSession",
        session_pb2.DeleteSessionRequest(name=NAME, if_generation_match=0),
    ),
    (lambda c: c.admin.demote_session(NAME), "DemoteSession", admin_pb2.DemoteSessionRequest(name=NAME)),
    (lambda c: c.admin.stats(), "GetStats", admin_pb2.GetStatsRequest()),
    (
        lambda c: c.models.register(SPEC),
        "RegisterModel",
        model_pb2.RegisterModelRequest(model=model_to_wire(SPEC)),
    ),
    (
        lambda c: list(c.sessions.list("models/m", page_size=7)),
        "ListSessions",
        session_pb2.ListSessionsRequest(model="models/m", page_size=7),
    ),
]


@pytest.mark.parametrize(("call", "method", "expected"), CALLS)
def test_a_call_sends_its_arguments(
    recorder: tuple[Recorder, Client], call: Callable[[Client], object], method: str, expected: Message
) -> None:
    """Each argument lands in its field, and what was not said stays unset."""
    handler, client = recorder

    call(client)

    assert handler.calls == [(method, expected.SerializeToString())]


def test_a_lookup_of_many_sessions_is_sent_in_batches(recorder: tuple[Recorder, Client]) -> None:
    """The contract allows 1000 queries per call; the caller need not know."""
    handler, client = recorder

    client.sessions.lookup((f"sessions/{number}", bytes(32)) for number in range(1001))

    sizes = [len(session_pb2.LookupSessionsRequest.FromString(sent).queries) for _, sent in handler.calls]
    assert sizes == [1000, 1]


def test_look_ups_that_are_answered_in_part_are_asked_again(recorder: tuple[Recorder, Client]) -> None:
    """A large answer ends early; the caller has all results, in its order."""
    handler, client = recorder
    handler.looked_up_at_once = 400

    found = client.sessions.lookup((f"sessions/{number}", bytes(32)) for number in range(1300))

    assert [one.name for one in found] == [f"sessions/{number}" for number in range(1300)]
    sizes = [len(session_pb2.LookupSessionsRequest.FromString(sent).queries) for _, sent in handler.calls]
    assert sizes == [1000, 900, 500, 100]


def test_a_server_that_does_not_serve_is_not_healthy(recorder: tuple[Recorder, Client]) -> None:
    """Only SERVING counts."""
    _, client = recorder

    assert client.admin.health() is False


def test_a_list_goes_on_to_the_last_page(connect: Connect) -> None:
    """Pages are an affair of the wire."""
    assert [model.name for model in connect().models.list()] == ["models/0", "models/1", "models/2"]


def test_a_model_survives_the_wire() -> None:
    """A registered model has the same fingerprint when it comes back."""
    assert model_from_wire(model_to_wire(SPEC)) == SPEC


@pytest.mark.parametrize("count", [float("nan"), float("inf"), 1e30])
def test_a_span_that_is_no_span_is_refused(count: float) -> None:
    """A number of seconds that no clock can count is refused where it is named."""
    with pytest.raises(InvalidArgument):
        seconds(count)


@pytest.mark.parametrize(
    "options",
    [
        {"ttl": seconds(1), "expire_time": NOON},
        {"expire_time": NOON.replace(tzinfo=None)},
    ],
)
def test_an_expiry_that_makes_no_sense_is_refused(
    recorder: tuple[Recorder, Client], options: dict[str, Any]
) -> None:
    """A time without a zone, or two times at once, is refused before anything is sent."""
    handler, client = recorder

    with pytest.raises(InvalidArgument):
        client.sessions.create(OWN, **options)
    assert not handler.calls


def test_the_servers_error_is_the_callers(connect: Connect) -> None:
    """Class and facts arrive as they were raised."""
    with pytest.raises(SessionNotFound) as caught:
        connect().sessions.get("sessions/none")

    assert caught.value.session == "sessions/none"


def test_nobody_listening_is_unavailable(tmp_path: Path) -> None:
    """A target without a server fails at once instead of hanging."""
    with ctxcache.connect(f"unix:{tmp_path}/nobody") as client, pytest.raises(Unavailable):
        client.sessions.get(NAME)


def test_a_closed_client_is_unavailable(connect: Connect) -> None:
    """Using a client after its end is an error of ours like any other."""
    client = connect()
    client.close()

    with pytest.raises(Unavailable):
        client.sessions.get(NAME)


def test_a_server_that_never_answers_costs_the_deadline(connect: Connect, far_side: FarSide) -> None:
    """A call on the access stream ends by itself, too."""
    far_side.add(NAME, 3)
    far_side.stalls = True

    with pytest.raises(DeadlineExceeded):
        connect(timeout_s=0.2).sessions.open(NAME, OWN).read()


def test_an_unknown_kind_of_access_is_refused() -> None:
    """A typo does not silently mean `auto`."""
    with pytest.raises(InvalidArgument):
        ctxcache.connect(access="remot")  # type: ignore[arg-type]  # the typo
