"""Requests that are not whole.

How many may come at a time, of whom, and what a refused caller is told that still sends.
"""

import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]  # no py.typed
from grpc_health.v1.health import SERVICE_NAME
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse
from raw_http2 import RawClient, message
from service_rig import Client, chunks, refused

from ctxcache.errors import DeadlineExceeded, TooManyRequests
from ctxcache.server.listening import MESSAGE_LIMIT_BYTES
from ctxcache.server.server import SERVICES, Server
from ctxcache.service import arrivals as arriving
from ctxcache.service.arrivals import SMALL_BYTES, Arrivals, Incoming
from ctxcache.service.health import SERVICE_NAMES
from ctxcache.v1 import session_pb2

Code = grpc.StatusCode
APPEND, GET = "/ctxcache.v1.SessionService/AppendSession", "/ctxcache.v1.SessionService/GetSession"
HOST = "ipv4:10.0.0.1:5000"
RUBBISH = b"\xff\xff\xff\xff"


class Sending:
    """An rpc's context, as far as reading goes: a caller that sends what it is told to."""

    def __init__(self) -> None:
        self.is_asked = asyncio.Event()
        self._said: asyncio.Queue[object] = asyncio.Queue()
        self._is_said = asyncio.Event()

    def say(self, *messages: object) -> None:
        """The next bytes."""
        for item in messages:
            self._said.put_nowait(item)
        self._is_said.set()

    async def read(self) -> object:
        """See grpc.aio.ServicerContext."""
        self.is_asked.set()
        while self._said.empty():
            self._is_said.clear()
            await self._is_said.wait()
        return self._said.get_nowait()


def incoming(sending: Sending) -> Incoming:
    """As the edge sees it."""
    context: Any = sending
    return Incoming(context)


def receive(arrivals: Arrivals, sending: Sending, host: str = HOST) -> "asyncio.Task[bytes | None]":
    """Begin to."""
    return asyncio.get_running_loop().create_task(arrivals.receive(incoming(sending), lambda: host))


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_no_more_arrive_at_a_time_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are not even asked for their messages before one of those is whole."""
    monkeypatch.setattr(arriving, "PATIENCE_S", 60)
    arrivals = Arrivals(2)
    callers = [Sending() for _ in range(4)]
    receiving = [receive(arrivals, caller) for caller in callers]
    await settle()

    assert [caller.is_asked.is_set() for caller in callers] == [True, True, False, False]
    callers[1].say(b"one")
    assert await receiving[1] == b"one"
    await settle()
    assert [caller.is_asked.is_set() for caller in callers] == [True, True, True, False]
    for caller, task in zip(callers, receiving, strict=True):
        caller.say(b"rest")
        await task


async def test_a_message_that_does_not_come_gives_way_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before somebody waits: a slow caller that is in nobody's way may be slow."""
    monkeypatch.setattr(arriving, "PATIENCE_S", 0)
    arrivals = Arrivals(1)
    never, whole = Sending(), Sending()
    stuck = receive(arrivals, never)
    await settle()
    assert not stuck.done()

    whole.say(b"whole")
    assert await receive(arrivals, whole) == b"whole"
    with pytest.raises(DeadlineExceeded, match="the rest of the request"):
        await stuck


async def test_a_message_has_to_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nobody waits."""
    monkeypatch.setattr(arriving, "ARRIVAL_TIMEOUT_S", 0)
    with pytest.raises(DeadlineExceeded):
        await receive(Arrivals(1), Sending())


async def test_one_host_does_not_take_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of those that wait may be its own; one more is refused, and another host's is not."""
    monkeypatch.setattr(arriving, "PATIENCE_S", 60)
    monkeypatch.setattr(arriving, "WAITING_LIMIT", 4)
    arrivals = Arrivals(1)
    crowd = [receive(arrivals, Sending()) for _ in range(3)]
    await settle()

    with pytest.raises(TooManyRequests):
        await receive(arrivals, Sending())
    other = receive(arrivals, Sending(), "ipv4:10.0.0.2:1")
    await settle()
    assert not other.done()
    for task in (*crowd, other):
        task.cancel()
    await asyncio.gather(*crowd, other, return_exceptions=True)
    late = Sending()
    late.say(b"late")
    assert await receive(arrivals, late) == b"late"


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_read_goes_on_where_its_wait_has_ended(*, is_cancelled: bool) -> None:
    """It is the same read: gRPC has one at a time, and writes the message into that."""
    sending = Sending()
    coming = incoming(sending)
    waiting = asyncio.create_task(coming.next())
    await settle()
    if is_cancelled:
        waiting.cancel()
    else:
        coming.give_way()
    with pytest.raises(asyncio.CancelledError if is_cancelled else TimeoutError):
        await waiting

    sending.is_asked.clear()
    going_on = asyncio.create_task(coming.next())
    await settle()
    sending.say(b"late")
    assert await going_on == b"late"
    assert not sending.is_asked.is_set()


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_message_that_has_come_is_not_lost(*, is_cancelled: bool) -> None:
    """Its reader is to give way, or is cancelled, before it has heard of it."""
    sending = Sending()
    coming = incoming(sending)
    waiting = asyncio.create_task(coming.next())
    await settle()
    sending.say(b"whole")
    if is_cancelled:
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        waiting = asyncio.create_task(coming.next())
    else:
        coming.give_way()
    assert await waiting == b"whole"


async def test_a_read_that_fails_fails_its_waiter() -> None:
    """With its own error, and the next read is another one."""

    class Failing(Sending):
        async def read(self) -> object:
            await asyncio.sleep(0)
            failed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(failed.set_exception, ConnectionResetError())
            try:
                return await failed
            except ConnectionResetError as error:
                raise LookupError from error

    coming = incoming(Failing())
    for _ in range(2):
        with pytest.raises(LookupError):
            await coming.next()


async def test_a_refused_request_is_read_on_for_a_bounded_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, and until its caller falls silent."""
    monkeypatch.setattr(arriving, "DISCARD_BYTES", 10)
    endless = Sending()
    endless.say(*[b"12345"] * 3)
    await incoming(endless).discard()
    assert endless._said.qsize() == 1
    monkeypatch.setattr(arriving, "SILENCE_S", 0)
    await incoming(Sending()).discard()


async def test_a_caller_is_told_why_after_it_has_sent(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An append that is refused at its header: the answer waits for the rest, which is thrown away."""
    for name in ("SILENCE_S", "DISCARD_TIMEOUT_S"):
        monkeypatch.setattr(arriving, name, 60, raising=False)
    await client.create("a")
    await client.append("a", 1, 0, 10)
    raw = await RawClient.open(server.addresses[0])
    raw.begin(1, APPEND)
    raw.say(1, message(client.header("a", 9).SerializeToString()))
    for stream in (3, 5):
        raw.begin(stream, GET)
        raw.say(
            stream,
            message(session_pb2.GetSessionRequest(name="sessions/a").SerializeToString()),
            is_last=True,
        )
        await raw.until_ended(stream)
    assert 1 not in raw.ended

    for item in chunks(1, 10, 20):
        raw.say(1, message(item.SerializeToString()))
    raw.say(1, is_last=True)
    assert b"the append starts at 9" in await raw.until_ended(1)
    assert server.cache.appends.reservation_count == 0
    raw.writer.close()


async def test_a_caller_that_waits_is_told_why(client: Client, server: Server) -> None:
    """One that has not said all, and sends nothing more."""
    await client.create("a")
    raw = await RawClient.open(server.addresses[0])
    raw.begin(1, APPEND)
    raw.say(1, message(client.header("a", 9).SerializeToString()))

    async with asyncio.timeout(30):
        assert b"the append starts at 9" in await raw.until_ended(1)
    raw.writer.close()


async def test_nothing_of_a_request_is_taken_beyond_the_first_window(client: Client, server: Server) -> None:
    """Before it is asked for.

    And nothing more than a chunk's size of any, which is refused when it begins.
    """
    raw = await RawClient.open(server.addresses[0])
    raw.begin(1, GET)
    first = raw.room(1)
    raw.say(1, message(b"", size_bytes=64 << 20))
    last = await raw.until_ended(1)

    assert first <= SMALL_BYTES
    assert b"grpc-status" in last
    # gRPC refuses it by its length; one below 1.82 leaves that to our own time for the rest of it.
    assert b"larger than max" in last or b"the rest of the request" in last
    raw.writer.close()


async def test_what_grpc_refuses_itself_has_no_reason(client: Client, server: Server) -> None:
    """By its length alone, as docs/clients.md says; one byte less is ours to refuse, with a reason."""
    assert MESSAGE_LIMIT_BYTES == 2_162_688
    for size_bytes in (MESSAGE_LIMIT_BYTES + 1, MESSAGE_LIMIT_BYTES):
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = client.channel.unary_unary(GET)
        call = method(bytes(size_bytes), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        found = (
            caught.value.code(),
            "grpc-status-details-bin" in dict(tuple(caught.value.trailing_metadata() or ())),
        )
        is_ours = size_bytes == MESSAGE_LIMIT_BYTES
        assert found == (Code.INVALID_ARGUMENT if is_ours else Code.RESOURCE_EXHAUSTED, is_ours)


async def test_a_small_call_is_small(client: Client) -> None:
    """One byte more is refused, whatever it says."""
    name = "sessions/" + "a" * SMALL_BYTES
    facts = await refused(client.get(name), Code.INVALID_ARGUMENT, "INVALID_FIELD")
    assert facts == {"field": "request", "problem": f"is larger than {SMALL_BYTES} bytes"}


async def test_what_cannot_be_read_is_refused_by_every_service(
    client: Client, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """With a reason, and without a word in the log: health and reflection, old and new, included."""
    methods = {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        *(f"/{name}/ServerReflectionInfo" for name in SERVICE_NAMES),
        GET,
        APPEND,
        "/ctxcache.v1.AdminService/GetStats",
        "/ctxcache.v1.HintService/Hint",
    }
    assert len({method.split("/")[1] for method in methods} & {*SERVICES, SERVICE_NAME, *SERVICE_NAMES}) == 6
    with caplog.at_level(logging.WARNING):
        for method in sorted(methods):
            for said in ([RUBBISH], []):
                stream: Any = client.channel.stream_stream(method)
                call = stream(said, timeout=30)
                if not said and "Reflection" in method:
                    assert await call.read() == grpc.aio.EOF
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                encoded = dict(tuple(caught.value.trailing_metadata() or ())).get(
                    "grpc-status-details-bin", b""
                )
                info = error_details_pb2.ErrorInfo()
                status_pb2.Status.FromString(encoded).details[0].Unpack(info)
                found = (caught.value.code(), info.reason, caught.value.details())
                assert found[:2] == (Code.INVALID_ARGUMENT, "INVALID_FIELD"), (method, found)
    assert caplog.records == []


async def test_both_versions_of_reflection_tell_the_same(client: Client) -> None:
    """They tell of each service, themselves included; an unknown one is NOT_FOUND within the stream."""
    asked = [
        ServerReflectionRequest(list_services=""),
        ServerReflectionRequest(file_containing_symbol="grpc.reflection.v1.ServerReflection"),
        ServerReflectionRequest(file_containing_symbol="ctxcache.v1.SessionService"),
        ServerReflectionRequest(file_by_filename="nothing"),
        ServerReflectionRequest(
            file_containing_extension={"containing_type": "ctxcache.v1.Session", "extension_number": -1}
        ),
        ServerReflectionRequest(),
    ]
    found = []
    for name in SERVICE_NAMES:
        stream: Any = client.channel.stream_stream(
            f"/{name}/ServerReflectionInfo",
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,
        )
        found.append([answer async for answer in stream(asked)])

    assert found[0] == found[1]
    listed, own, ours, *others = found[0]
    names = {service.name for service in listed.list_services_response.service}
    assert names == {*SERVICES, SERVICE_NAME, *SERVICE_NAMES}
    assert b"grpc.reflection.v1" in own.file_descriptor_response.file_descriptor_proto[0]
    assert ours.file_descriptor_response.file_descriptor_proto
    codes = [answer.error_response.error_code for answer in others]
    assert codes[0] == Code.NOT_FOUND.value[0]
    assert codes[2] == Code.INVALID_ARGUMENT.value[0]
    assert codes[1] in {Code.NOT_FOUND.value[0], Code.INVALID_ARGUMENT.value[0]}
