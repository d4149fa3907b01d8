"""Large requests of one tenant are carried out a little at a time: between two pieces others have their turn.

The count is of lines of Python between two turns of the event loop, where every slice is over at once:
what is left is what cannot be put off. So it is the same on every machine, however busy.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import expensive_calls as calls
import grpc
import pytest
from service_rig import Client, refused, settings_in

from ctxcache.server.server import Server
from ctxcache.service import convert, fairness
from ctxcache.settings.config import Settings
from ctxcache.v1 import model_pb2, session_pb2

LINES_LIMIT = 32_000
"""A millisecond or two.

The most are those of a lease that is the first of its layout, and of a fork of 1,024 segments.
"""
SESSIONS = 48
Code = grpc.StatusCode


@contextmanager
def longest() -> Iterator[list[int]]:
    """The most lines of Python that one callback of the event loop took meanwhile, the test's own too."""
    lines, most, known = 0, [0], asyncio.Handle._run

    def trace(_: FrameType, event: str, __: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    def run(handle: asyncio.Handle) -> None:
        nonlocal lines
        lines = 0
        sys.settrace(trace)
        try:
            known(handle)
        finally:
            sys.settrace(None)
            most[0] = max(most[0], lines)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.Handle, "_run", run)
        patch.setattr(fairness, "SLICE_NS", 0)
        yield most


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A server with room for rows of many streams."""
    return settings_in(tmp_path, arena_size_bytes=64 << 20, ssd_size_bytes=64 << 20)


@pytest.fixture
async def facts(client: Client) -> calls.Facts:
    """The largest models that there may be, and sessions with the longest layouts."""
    large = calls.large_model("large")
    found = [
        await client.models.RegisterModel(model_pb2.RegisterModelRequest(model=model))
        for model in (large, calls.small_model(), *map(calls.large_model, "ab"))
    ]
    every_other = calls.layout(calls.RANGES)
    for number in range(SESSIONS):
        await client.sessions.CreateSession(
            session_pb2.CreateSessionRequest(
                session_id=f"s{number}", model="models/large", layout=every_other
            )
        )
    for name, layout in (("all", calls.everything()), ("long", ())):
        model = "models/large" if layout else "models/small"
        await client.sessions.CreateSession(
            session_pb2.CreateSessionRequest(session_id=name, model=model, layout=layout)
        )
    append = calls.append_messages("long", found[1].fingerprint, 16 * calls.DROPS)
    await client.send(append)
    return calls.Facts(found[0].fingerprint, found[1].fingerprint)


async def test_no_request_takes_the_loop_for_long(client: Client, facts: calls.Facts) -> None:
    """Whatever a tenant asks for, others have their turn after so many lines; its answers have a size."""
    found: dict[str, int] = {}
    for name in calls.ATTACKS.keys() - {"too_large"}:
        requests = calls.ATTACKS[name](facts)
        with longest() as most:
            sizes = [len(answer) for call in requests[:4] async for answer in _answers(client, *call)]
        assert max(sizes) <= calls.ANSWER_BYTES
        found[name] = most[0]

    assert {name: lines for name, lines in found.items() if not 0 < lines < LINES_LIMIT} == {}


async def test_work_in_one_go_would_be_noticed(
    client: Client, facts: calls.Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the test above means nothing."""
    monkeypatch.setattr(fairness.LoopSlice, "is_over", property(lambda _: False))
    with longest() as most:
        for call in calls.ATTACKS["lookup"](facts):
            assert [len(answer) async for answer in _answers(client, *call)]

    assert most[0] > LINES_LIMIT


async def test_a_greedy_tenant_waits_while_others_are_answered(
    client: Client, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call begins when no call of another is under way; a call of another begins at once."""
    await client.create("a")
    monkeypatch.setattr(fairness, "NEW_NS", 10**12)
    monkeypatch.setattr(fairness, "PATIENCE_NS", 10**18)
    monkeypatch.setattr(fairness.Usage, "is_greedy", lambda _, tenant: tenant == "default")
    turns, request = server.local_turns, session_pb2.GetSessionRequest(name="sessions/a")
    assert turns.newcomers is not None
    other = turns.newcomers.come(time.monotonic_ns())

    greedy = asyncio.ensure_future(client.get("a"))
    async with asyncio.timeout(30):
        while "default" not in turns.waiting:  # noqa: ASYNC110  # an event for it would be the test's alone
            await asyncio.sleep(0)
        for_other = (("ctxcache-tenant", "other"),)
        await refused(
            client.sessions.GetSession(request, metadata=for_other), Code.NOT_FOUND, "SESSION_NOT_FOUND"
        )
        assert not greedy.done()
        turns.newcomers.leave(other)
        assert (await greedy).name == "sessions/a"


async def test_bulk_work_knows_when_the_last_rpc_came(client: Client, server: Server) -> None:
    """While there are rpcs of one answer or of many, gRPC's threads get the processor between two pieces."""
    newcomers = server.local_turns.newcomers
    assert newcomers is not None
    await client.create("a")
    for call in (client.get("a"), client.read("a")):
        newcomers.called_ns = 0
        await call

        assert newcomers.called_ns > 0


async def test_look_ups_end_where_their_answer_would_grow_too_large(
    client: Client, facts: calls.Facts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first queries are answered, one at least; the caller asks for the rest."""
    queries = [
        session_pb2.LookupQuery(name=f"sessions/s{i}", model_fingerprint=facts.large) for i in range(9)
    ]
    request = session_pb2.LookupSessionsRequest(queries=queries)
    whole = await client.sessions.LookupSessions(request)
    monkeypatch.setattr(convert, "PAGE_LIMIT_BYTES", whole.ByteSize() // 2)
    part = await client.sessions.LookupSessions(request)

    assert len(whole.results) == len(queries)
    assert 0 < len(part.results) < len(queries)
    assert [one.name for one in part.results] == [one.name for one in queries[: len(part.results)]]
    monkeypatch.setattr(convert, "PAGE_LIMIT_BYTES", 0)
    assert len((await client.sessions.LookupSessions(request)).results) == 1


async def _answers(client: Client, method: str, request: bytes) -> AsyncIterator[bytes]:
    """The server's encoded answers."""
    channel: Any = client.channel
    if method.endswith(("/Access", "/Schedule")):
        async for answer in channel.stream_stream(method)(iter(calls.messages_of(request))):
            yield answer
    elif method.endswith("/ReadSession"):
        async for answer in channel.unary_stream(method)(request):
            yield answer
    else:
        yield await channel.unary_unary(method)(request)


async def test_pages_end_where_they_would_grow_too_large(client: Client, facts: calls.Facts) -> None:
    """All models and sessions are listed once, on pages that stock clients can take."""
    models: list[str] = []
    token, pages = "", 0
    while token or not pages:
        request = model_pb2.ListModelsRequest(page_size=1000, page_token=token)
        page = await client.models.ListModels(request)
        assert page.ByteSize() <= calls.ANSWER_BYTES
        models += [model.name for model in page.models]
        token, pages = page.next_page_token, pages + 1
    assert models == sorted({f"models/{name}" for name in ("a", "b", "large", "small", "tiny")})


async def test_a_page_is_cut_by_bytes(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry at least, however large it is; tokens go on where a page ended."""
    for number in range(9):
        await client.create(f"s{number}")
    size = (await client.get("s0")).ByteSize() + 8
    for limit_bytes, per_page in ((1, 1), (2 * size, 2), (100 * size, 9)):
        monkeypatch.setattr(convert, "PAGE_LIMIT_BYTES", limit_bytes)
        found: list[list[str]] = []
        token = ""
        while token or not found:
            request = session_pb2.ListSessionsRequest(page_size=100, page_token=token)
            page = await client.sessions.ListSessions(request)
            found.append([session.name for session in page.sessions])
            token = page.next_page_token
        assert max(map(len, found)) == per_page
        assert list(chain.from_iterable(found)) == [f"sessions/s{number}" for number in range(9)]


async def test_what_is_beyond_a_bound_names_it(client: Client) -> None:
    """Streams of a model, layers, ranges of a layout and of a read, queries."""
    one_more = calls.large_model("large")
    kind = model_pb2.STATE_KIND_LATENT
    extra = model_pb2.StreamRange(kind=kind, layer_begin=0, layer_end=1)
    one_more.streams.add(streams=extra, row_bytes=1, dtype=model_pb2.DTYPE_INT8)
    deep = calls.large_model("deep")
    deep.layer_count = 4097
    model = client.models.RegisterModel
    create, read = client.sessions.CreateSession, client.sessions.ReadSession
    ranges = calls.layout(calls.RANGES + 1)
    queries = [session_pb2.LookupQuery(name="sessions/a", model_fingerprint=client.fingerprint)] * 1001
    attempts = [
        (model(model_pb2.RegisterModelRequest(model=one_more)), "model.streams", "4096"),
        (model(model_pb2.RegisterModelRequest(model=deep)), "model.layer_count", "4096"),
        (create(session_pb2.CreateSessionRequest(model="models/tiny", layout=ranges)), "layout", "256"),
        (read(client.read_request("a", streams=ranges)), "streams", "256"),
        (
            client.sessions.LookupSessions(session_pb2.LookupSessionsRequest(queries=queries)),
            "queries",
            "1000",
        ),
    ]
    for call, field, limit in attempts:
        found = await refused(call, Code.INVALID_ARGUMENT, "INVALID_FIELD")
        assert found["field"] == field
        assert limit in found["problem"]


async def test_streams_of_all_models_are_bounded(client: Client, server: Server) -> None:
    """However many models: what one tenant may register is said, with a delay after which to come again."""
    limits = server.cache.state.limits
    server.cache.state.limits = replace(limits, model_stream_count=4098)
    register = client.models.RegisterModel
    await register(model_pb2.RegisterModelRequest(model=calls.large_model("large")))
    again = model_pb2.RegisterModelRequest(model=calls.small_model())
    found = await refused(register(again), Code.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS")
    assert found["limit"] == "4098"
