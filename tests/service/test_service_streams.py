"""AppendSession and ReadSession: every promise of the proto, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from bulk_stubs import BulkSessions
from fakes import FakeClock
from google.protobuf.duration_pb2 import Duration
from integrity import check_integrity
from service_rig import (
    KV,
    STREAMS,
    TOKENS,
    Client,
    all_rows,
    chunk,
    chunks,
    commit,
    ranges,
    refused,
    rows,
    until,
)

from ctxcache.cache.appends import RESERVATION_LIFETIME_NS
from ctxcache.cache.held_rows import Rows
from ctxcache.cache.leases import LEASE_LIFETIME_NS
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.work import at_work
from ctxcache.errors import DeadlineExceeded
from ctxcache.format.checksums import rows_checksum
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from ctxcache.server.server import Server
from ctxcache.service import rows as rows_module
from ctxcache.service.fairness import Turns
from ctxcache.service.rows import chunk_message, packed
from ctxcache.service.sessions import SessionService
from ctxcache.settings.config import Settings
from ctxcache.v1 import model_pb2, session_pb2
from ctxcache.v1.session_pb2 import AppendSessionRequest, TokenRange

Code = grpc.StatusCode


@pytest.fixture(params=["grpc", "bulk"])
async def client(request: pytest.FixtureRequest, client: Client) -> Client:
    """A client whose rows travel by either way: every promise of this file holds for both."""
    if request.param == "bulk":
        client.sessions = BulkSessions(client.channel, client.sessions)
    return client


class Sender:
    """Messages that are sent when the test says so."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[AppendSessionRequest | None] = asyncio.Queue()

    def send(self, *messages: AppendSessionRequest) -> None:
        """Send these."""
        for message in messages:
            self._queue.put_nowait(message)

    def end(self) -> None:
        """Nothing more comes."""
        self._queue.put_nowait(None)

    async def messages(self) -> AsyncIterator[AppendSessionRequest]:
        """The messages of the stream."""
        while (message := await self._queue.get()) is not None:
            yield message


async def test_appended_rows_are_read_back(client: Client) -> None:
    """Rows come back as they went in, in layer order, tokens ascending, whatever order they came in."""
    await client.create("a")
    messages = [client.header("a", 0)]
    for begin, end in ((0, 50), (50, 130)):
        messages += reversed(chunks(1, begin, end))
    session = await client.send([*messages, commit(130, is_durable=True)])
    header, found = await client.read("a")

    assert (session.token_count, session.durable_token_count) == (130, 130)
    assert (header.session.generation, header.range.begin, header.range.end) == (session.generation, 0, 130)
    assert list(header.streams) == ranges(*STREAMS)
    layers = [item.stream.layer for item in found]
    assert layers == sorted(layers)
    assert await client.read_rows("a") == all_rows(1, 130)


async def test_some_streams_and_some_tokens_can_be_read(client: Client) -> None:
    """A reader gets the streams it names in layer order, and the tokens of its range."""
    await client.create("a")
    await client.append("a", 1, 0, 200)
    header, found = await client.read("a", streams=ranges(KV, TOKENS), range=TokenRange(begin=60, end=150))

    assert list(header.streams) == ranges(TOKENS, KV)
    by_layer = {layer: b"".join(c.data for c in found if c.stream.layer == layer) for layer in (-1, 1)}
    assert by_layer == {-1: rows(1, 60, 150, TOKENS), 1: rows(1, 60, 150, KV)}
    assert [c.token_begin for c in found] == [60, 60]
    assert (await client.read("a", range=TokenRange()))[1] == []


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"range": TokenRange(begin=0, end=11)}, Code.OUT_OF_RANGE, "TOKEN_RANGE_OUT_OF_BOUNDS"),
        ({"range": TokenRange(begin=-1, end=1)}, Code.OUT_OF_RANGE, "TOKEN_RANGE_OUT_OF_BOUNDS"),
        ({"range": TokenRange(begin=5, end=4)}, Code.OUT_OF_RANGE, "TOKEN_RANGE_OUT_OF_BOUNDS"),
        ({"model_fingerprint": bytes(32)}, Code.FAILED_PRECONDITION, "MODEL_FINGERPRINT_MISMATCH"),
        ({"model_fingerprint": b""}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"model_fingerprint": bytes(33)}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (
            {"streams": ranges(model_pb2.StreamName(layer=1, kind=model_pb2.STATE_KIND_HIDDEN))},
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        ({"streams": ranges(KV, KV)}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"if_generation_match": 7}, Code.ABORTED, "GENERATION_MISMATCH"),
    ],
)
async def test_a_read_that_cannot_be_is_refused(
    client: Client, server: Server, changes: dict[str, Any], code: Code, reason: str
) -> None:
    """Nothing is sent and nothing stays held."""
    await client.create("a")
    await client.append("a", 1, 0, 10)
    await refused(client.sessions.ReadSession(client.read_request("a", **changes)), code, reason)

    assert server.cache.leases.lease_count == 0


async def test_a_reader_that_goes_away_holds_nothing(client: Client, server: Server) -> None:
    """A cancelled read gives back what it held."""
    await client.create("a")
    await client.append("a", 1, 0, 100)
    call = client.sessions.ReadSession(client.read_request("a"))
    await call.read()
    call.cancel()

    async def is_free() -> bool:
        return server.cache.leases.lease_count == 0

    await until(is_free)
    await server.cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(server.cache) == []


async def test_rows_that_pass_are_copied_into_their_message() -> None:
    """Rows read past DRAM lie in a buffer that the next rows are read into."""
    buffer = bytearray(b"right" * 2)
    layout = SegmentLayout((TOKENS_SPEC, StreamSpec(Stream(0, StateKind.KV), 5, DType.INT8)))

    async def passing() -> AsyncIterator[Rows]:
        for begin in (0, 2):
            yield Rows(layout.specs[1].stream, begin, memoryview(buffer), rows_checksum(buffer))
            buffer[:] = b"wrong" * 2

    async def mend(segment: Segment) -> None:
        raise AssertionError(segment)

    messages = [await chunk_message(message, mend) async for message in packed(passing(), layout, mend)]
    chunk = session_pb2.ReadSessionResponse.FromString(messages[0]).chunk

    assert (chunk.data, chunk.token_begin, len(messages)) == (b"rightrightwrongwrong", 0, 1)


async def test_a_reader_slower_than_its_lease_gets_no_foreign_rows(
    client: Client, server: Server, clock: FakeClock
) -> None:
    """While it took one message, the slots of the next may have gone to somebody else: it is told so."""
    await client.create("a", ttl=Duration(seconds=10**6))
    await client.append("a", 1, 0, 100)
    call = client.sessions.ReadSession(client.read_request("a"))
    await call.read()
    reading = server.cache.leases
    sent = SessionService(server.cache, Turns())._messages(client.read_request("a"), "default")
    await at_work(anext(sent))
    await anext(sent)
    clock.advance(ns=LEASE_LIFETIME_NS)
    reading.end_overdue()

    with pytest.raises(DeadlineExceeded):
        await anext(sent)
    await sent.aclose()
    call.cancel()


async def test_a_lease_is_asked_for_before_each_message(
    client: Client, server: Server, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that are cut from rows already looked up end with the lease as well."""
    monkeypatch.setattr(rows_module, "MESSAGE_BYTES", 16 * 4)
    await client.create("a", ttl=Duration(seconds=10**6))
    await client.append("a", 1, 0, 64)
    sent = SessionService(server.cache, Turns())._messages(client.read_request("a"), "default")
    await at_work(anext(sent))
    first = await anext(sent)
    clock.advance(ns=LEASE_LIFETIME_NS)
    server.cache.leases.end_overdue()

    assert isinstance(first, bytes)
    assert len(session_pb2.ReadSessionResponse.FromString(first).chunk.data) == 16 * 4
    with pytest.raises(DeadlineExceeded):
        await anext(sent)


async def test_damaged_rows_are_data_loss(client: Client, server: Server) -> None:
    """The reader is told, the session ends before the damage, and it is counted."""
    await client.create("a")
    await client.append("a", 1, 0, 200, is_durable=True)
    session = server.cache.ledger.names.sessions["default", "a"]
    await at_work(server.cache.flushing.demote(session))
    slot = session.segments[1].durable
    assert slot
    with open(server.storage.ssd.paths[0], "r+b") as file:  # noqa: ASYNC230, PTH123
        file.seek(slot.offset_bytes)
        file.write(b"damage")
    await refused(client.sessions.ReadSession(client.read_request("a")), Code.DATA_LOSS, "CORRUPT_SEGMENT")

    assert (await client.get("a")).token_count == 64
    assert await client.read_rows("a") == all_rows(1, 64)
    assert (await client.stats()).corrupt_segment_count == 1


# -- appends that go wrong ---------------------------------------------------------------------------------


def with_chunk(part: session_pb2.Chunk) -> list[AppendSessionRequest]:
    """One chunk, nothing else."""
    return [AppendSessionRequest(chunk=part)]


@pytest.mark.parametrize(
    ("messages", "code", "reason"),
    [
        (with_chunk(chunk(1, 10, 20, KV, checksum=1)), Code.INVALID_ARGUMENT, "CHECKSUM_MISMATCH"),
        (with_chunk(chunk(1, 11, 20, KV)), Code.ABORTED, "WRITE_OFFSET_MISMATCH"),
        (with_chunk(chunk(1, 9, 20, KV)), Code.ABORTED, "WRITE_OFFSET_MISMATCH"),
        (with_chunk(chunk(1, 10, 20, KV, token_begin=-1)), Code.ABORTED, "WRITE_OFFSET_MISMATCH"),
        (with_chunk(chunk(1, 10, 20, KV, data=b"")), Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (with_chunk(chunk(1, 10, 20, KV, data=bytes(161))), Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (with_chunk(chunk(1, 10, 20, KV, data=bytes(240))), Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (with_chunk(chunk(1, 10, 20, KV, data=bytes(160 * 13108))), Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (
            with_chunk(
                chunk(1, 10, 20, KV, as_stream=model_pb2.StreamName(layer=9, kind=model_pb2.STATE_KIND_KV))
            ),
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        (
            with_chunk(
                chunk(
                    1,
                    10,
                    20,
                    KV,
                    as_stream=model_pb2.StreamName(layer=1, kind=model_pb2.StateKind.ValueType(77)),
                )
            ),
            Code.INVALID_ARGUMENT,
            "INVALID_FIELD",
        ),
        ([AppendSessionRequest()], Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ([commit(11)], Code.FAILED_PRECONDITION, "INCOMPLETE_APPEND"),
        ([*chunks(1, 10, 20)[:2], commit(20)], Code.FAILED_PRECONDITION, "INCOMPLETE_APPEND"),
        ([*chunks(1, 10, 20), commit(21)], Code.FAILED_PRECONDITION, "INCOMPLETE_APPEND"),
        ([*chunks(1, 10, 20), commit(9)], Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        (chunks(1, 10, 20), Code.FAILED_PRECONDITION, "INCOMPLETE_APPEND"),
        (chunks(1, 10, 11), Code.FAILED_PRECONDITION, "INCOMPLETE_APPEND"),
    ],
)
async def test_a_broken_append_shows_nothing(
    client: Client, server: Server, messages: list[AppendSessionRequest], code: Code, reason: str
) -> None:
    """Rows that no good commit covered never were, and the session can be written again at once."""
    await client.create("a")
    before = await client.append("a", 1, 0, 10)
    await refused(client.send([client.header("a", 10), *messages]), code, reason)

    assert (await client.get("a")).generation == before.generation
    assert server.cache.appends.reservation_count == 0
    await client.append("a", 1, 10, 20)
    assert await client.read_rows("a") == all_rows(1, 20)


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"model_fingerprint": bytes(32)}, Code.FAILED_PRECONDITION, "MODEL_FINGERPRINT_MISMATCH"),
        ({"model_fingerprint": b"x"}, Code.INVALID_ARGUMENT, "INVALID_FIELD"),
        ({"write_offset": 9}, Code.ABORTED, "WRITE_OFFSET_MISMATCH"),
        ({"write_offset": 11}, Code.ABORTED, "WRITE_OFFSET_MISMATCH"),
        ({"write_offset": -1}, Code.ABORTED, "WRITE_OFFSET_MISMATCH"),
        ({"if_generation_match": 9}, Code.ABORTED, "GENERATION_MISMATCH"),
    ],
)
async def test_an_append_that_cannot_begin_is_refused(
    client: Client, server: Server, changes: dict[str, Any], code: Code, reason: str
) -> None:
    """The header says everything that must hold."""
    await client.create("a")
    await client.append("a", 1, 0, 10)
    messages = [
        client.header("a", **({"write_offset": 10} | changes)),
        *chunks(1, 10, 20),
        commit(20),
    ]
    await refused(client.send(messages), code, reason)

    assert server.cache.appends.reservation_count == 0


async def test_the_header_comes_first_and_once(client: Client) -> None:
    """A stream without one, with nothing, or with two is refused."""
    made = await client.create("a")
    for messages in ([], [commit(0)], [AppendSessionRequest()], [client.header("a", 0)] * 2):
        await refused(client.send(messages), Code.INVALID_ARGUMENT, "INVALID_FIELD")
    session = await client.send([client.header("a", 0)])

    assert (session.token_count, session.generation) == (0, made.generation)


async def test_two_writers_at_once_are_one_too_many(client: Client, server: Server) -> None:
    """While a stream writes, every other change of the session is told so."""
    await client.create("a")
    await client.append("a", 1, 0, 10)
    sender = Sender()
    sender.send(client.header("a", 10), *chunks(1, 10, 20))
    writing = asyncio.ensure_future(client.send(sender.messages()))

    async def has_begun() -> bool:
        return server.cache.appends.reservation_count == 1

    await until(has_begun)
    name = "sessions/a"
    for call in (
        client.send([client.header("a", 10)]),
        client.sessions.TruncateSession(session_pb2.TruncateSessionRequest(name=name, keep_first=1)),
        client.sessions.ForkSession(session_pb2.ForkSessionRequest(name=name)),
        client.sessions.DeleteSession(session_pb2.DeleteSessionRequest(name=name)),
    ):
        await refused(call, Code.ABORTED, "WRITE_IN_PROGRESS")
    lookup = session_pb2.LookupQuery(name=name, model_fingerprint=client.fingerprint)
    answer = await client.sessions.LookupSessions(session_pb2.LookupSessionsRequest(queries=[lookup]))
    sender.send(commit(20))
    sender.end()

    assert (answer.results[0].state, answer.results[0].token_count) == (session_pb2.LOOKUP_STATE_HIT, 10)
    assert (await writing).token_count == 20


async def test_a_first_append_under_way_is_pending(client: Client, server: Server) -> None:
    """A lookup says that state is being written, so that nobody computes it twice."""
    await client.create("a")
    sender = Sender()
    sender.send(client.header("a", 0))
    writing = asyncio.ensure_future(client.send(sender.messages()))

    async def is_pending() -> bool:
        query = session_pb2.LookupQuery(name="sessions/a", model_fingerprint=client.fingerprint)
        answer = await client.sessions.LookupSessions(session_pb2.LookupSessionsRequest(queries=[query]))
        return bool(answer.results[0].state == session_pb2.LOOKUP_STATE_PENDING)

    await until(is_pending)
    sender.end()
    await writing


async def test_a_stream_that_breaks_leaves_what_its_last_commit_covered(
    client: Client, server: Server
) -> None:
    """The writer asks where to go on, goes on there, and the rows are those of one unbroken append."""
    await client.create("a")
    sender = Sender()
    sender.send(client.header("a", 0), *chunks(1, 0, 70), commit(70), *chunks(1, 70, 100))
    call = client.sessions.AppendSession(sender.messages())

    async def is_committed() -> bool:
        return (await client.get("a")).token_count == 70

    await until(is_committed)
    call.cancel()

    async def is_free() -> bool:
        return server.cache.appends.reservation_count == 0

    await until(is_free)
    assert (await client.get("a")).token_count == 70
    await server.cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(server.cache) == []
    await client.append("a", 1, 70, 100)
    assert await client.read_rows("a") == all_rows(1, 100)


async def test_a_writer_that_was_silent_too_long_learns_where_to_go_on(
    client: Client, server: Server, clock: FakeClock
) -> None:
    """Its reservation has ended, another writer went on, and none of its rows are among the other's."""
    await client.create("a", ttl=Duration(seconds=10**6))
    sender = Sender()
    sender.send(client.header("a", 0), *chunks(2, 0, 10)[:1])
    silent = asyncio.ensure_future(client.send(sender.messages()))

    async def has_begun() -> bool:
        return server.cache.appends.held_count == 1

    await until(has_begun)
    clock.advance(ns=RESERVATION_LIFETIME_NS)
    server.cache.appends.end_overdue()
    await client.append("a", 1, 0, 20)
    sender.send(*chunks(2, 0, 10)[1:], commit(10))
    sender.end()
    facts = await refused(silent, Code.ABORTED, "WRITE_OFFSET_MISMATCH")

    assert int(facts["token_count"]) == 20
    assert await client.read_rows("a") == all_rows(1, 20)


async def test_a_session_can_be_larger_than_the_arena(client: Client) -> None:
    """With commits in parts, a session is bounded by SSD; it is read back past DRAM."""
    await client.create("a")
    messages = [client.header("a", 0)]
    for begin in range(0, 64 * 45, 64):
        messages += [*chunks(1, begin, begin + 64), commit(begin + 64)]
    session = await client.send(messages)

    assert session.token_count == 64 * 45
    assert await client.read_rows("a") == all_rows(1, 64 * 45)


async def test_what_does_not_fit_is_refused_and_the_rest_stays(client: Client, server: Server) -> None:
    """Without commits an append is bounded by the arena; the writer is told, and nothing is lost but that."""
    await client.create("a")
    await client.append("a", 1, 0, 10)
    messages = [client.header("a", 10)]
    for begin in range(10, 64 * 45, 64):
        messages += chunks(1, begin, begin + 64)
    facts = await refused(client.send(messages), Code.RESOURCE_EXHAUSTED, "CAPACITY_EXCEEDED")

    assert facts["tier"] == "DRAM"
    assert await client.read_rows("a") == all_rows(1, 10)
    assert server.cache.appends.reservation_count == 0


async def test_bytes_that_are_no_message_are_an_invalid_argument(client: Client) -> None:
    """A client that sends rubbish is told that it does, on every kind of rpc."""
    rubbish = b"\xff\xff\xff\xff"
    service = "/ctxcache.v1.SessionService"
    unary: Any = client.channel.unary_unary(f"{service}/GetSession")
    many: Any = client.channel.unary_stream(f"{service}/ReadSession")
    append: Any = client.channel.stream_unary(f"{service}/AppendSession")
    access: Any = client.channel.stream_stream("/ctxcache.v1.ArenaService/Access")
    for call in (unary(rubbish), many(rubbish), append([rubbish]), access([rubbish])):
        facts = await refused(call, Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert facts["field"] == "request"
    await client.create("a")
    mixed = append([client.header("a", 0).SerializeToString(), rubbish])
    await refused(mixed, Code.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_sessions_do_not_mix(client: Client) -> None:
    """Many writers and readers at once each see their own rows and nobody else's."""

    async def live(tag: int) -> None:
        name = f"s{tag}"
        await client.create(name)
        count = 0
        for size in (3, 64, 50, 90):
            await client.append(name, tag, count, count + size, is_durable=size == 64)
            count += size
            assert await client.read_rows(name) == all_rows(tag, count)

    await asyncio.gather(*(live(tag) for tag in range(1, 7)))


async def code_at_the_end(call: Any) -> Any:
    """How a stream ends after all that is still to be read of it."""
    with suppress(grpc.aio.AioRpcError):
        while await call.read():
            continue
    return await call.code()


async def test_a_reader_that_takes_nothing_is_cut_off(settings: Settings) -> None:
    """After the stall timeout its lease and its place are somebody else's, whether it reads on or not."""
    changed = settings.model_copy(
        update={
            # A busy machine opens both streams, and is refused a third one, within it.
            "stall_timeout_s": 3,
            "max_concurrent_streams": 2,
            "arena_size_bytes": 64 << 20,
            "ssd_size_bytes": 64 << 20,
        }
    )
    server = await Server.start(changed)
    # A window that does not grow: nothing is taken off the server's hands unread.
    options = [("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(server.addresses[0], options=options) as channel:
        client = Client(channel)
        await client.register()
        await client.create("a")
        for begin in range(0, 30_000, 5000):
            await client.append("a", 1, begin, begin + 5000)
        stuck = client.sessions.ReadSession(client.read_request("a"))
        await stuck.read()
        await client.create("b")
        sender = Sender()
        writing = asyncio.ensure_future(client.send(sender.messages()))
        sender.send(client.header("b", 0))
        await until(lambda: server.cache.appends.reservation_count)
        await refused(client.append("a", 1, 30_000, 30_001), Code.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
        await until(lambda: not server.cache.leases.lease_count)
        # The writer keeps its place: it has its own time, which begins again.
        sender.send(*chunks(1, 0, 10))
        await client.append("a", 1, 30_000, 30_001)
        sender.send(commit(10))
        sender.end()
        await writing
        assert await code_at_the_end(stuck) is Code.DEADLINE_EXCEEDED
    await server.stop()

    await server.cache.drain()  # the books are exact while nothing is being moved
    assert check_integrity(server.cache) == []
