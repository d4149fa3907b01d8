"""A handle: the session's facts as it last knew them, behind which it appends, and its caller's own model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from far_side import HIDDEN, KV, OWN, SPEC, make_rows
from live_server import LiveServer, serving, settings_in

import ctxcache
from ctxcache.client import OPAQUE, Client, ModelSpec
from ctxcache.client.sessions import SessionHandle
from ctxcache.client.types import Durability, hours
from ctxcache.errors import (
    GenerationMismatch,
    InvalidArgument,
    ModelFingerprintMismatch,
    SessionAlreadyExists,
    SessionNotFound,
    WriteOffsetMismatch,
)
from ctxcache.format.streams import TOKENS, Stream
from lab.routes import Route, route_options

MIB = 1 << 20
ROUTES: tuple[Route, ...] = ("local-socket", "local-grpc", "bulk", "grpc")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that has the model."""
    place = tmp_path_factory.mktemp("handles")
    sizes = {"arena_size_bytes": 16 * MIB, "ssd_size_bytes": 16 * MIB}
    with serving(settings_in(place, bulk_listen="127.0.0.1:0", **sizes)) as started:
        with ctxcache.connect(started.target) as cache:
            cache.models.register(SPEC)
        yield started


@pytest.fixture(params=ROUTES)
def cache(request: pytest.FixtureRequest, server: LiveServer) -> Iterator[Client]:
    """A client of each route."""
    with ctxcache.connect(server.target, **route_options(request.param)) as opened:
        yield opened


@pytest.fixture
def name() -> str:
    """An id that no other test takes."""
    return f"handle-{uuid4().hex}"


def test_a_session_is_written_and_read_by_its_handle(cache: Client, name: str) -> None:
    """The design's own lines: create, append, read one stream; the layout is all that the model has."""
    chat = cache.sessions.create(OWN, id=name, ttl=hours(1))
    chat.append(make_rows(40), durability=Durability.DISK)
    chat.append(make_rows(30, first=40))

    with chat.read(streams=[HIDDEN]) as rows:
        np.testing.assert_array_equal(rows.array(HIDDEN), make_rows(70)[HIDDEN])
    assert chat.info.token_count == 70
    assert chat.info.generation == cache.sessions.get(f"sessions/{name}").generation


def test_a_session_that_is_there_is_returned_where_it_may_be(cache: Client, name: str) -> None:
    """With its tokens and its own expiry; nobody else's call makes a session of another name."""
    first = cache.sessions.create(OWN, id=name, ttl=hours(1), exist_ok=True)
    first.append(make_rows(40))
    again = cache.sessions.create(OWN, id=name, ttl=hours(2), exist_ok=True)
    again.append(make_rows(30, first=40))

    assert (again.info.uid, again.info.token_count, again.info.ttl) == (first.info.uid, 70, hours(1))
    with again.read(streams=[HIDDEN]) as rows:
        np.testing.assert_array_equal(rows.array(HIDDEN), make_rows(70)[HIDDEN])
    with pytest.raises(SessionAlreadyExists):
        cache.sessions.create(OWN, id=name)
    again.delete()
    assert cache.sessions.create(OWN, id=name, exist_ok=True).info.token_count == 0


def test_a_session_that_goes_meanwhile_is_made_anew(server: LiveServer, name: str) -> None:
    """Each caller gets a session while other callers delete it."""

    def make_and_delete(_caller: int) -> None:
        with ctxcache.connect(server.target) as cache:
            for _ in range(200):
                session = cache.sessions.create(OWN, id=name, exist_ok=True)
                with suppress(SessionNotFound):
                    session.delete()

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(make_and_delete, range(3)))


@pytest.mark.parametrize(
    ("held", "asked", "words"),
    [
        ([HIDDEN], [KV], f"it has {HIDDEN}, and lacks {KV}$"),
        ([HIDDEN], None, f"it lacks .*{KV}"),
        ([HIDDEN, KV], [HIDDEN], f"it has {KV}$"),
        ([], [HIDDEN], f"it lacks {HIDDEN}$"),
    ],
)
def test_a_session_of_another_layout_is_not_returned(
    cache: Client, name: str, held: list[Stream], asked: list[Stream] | None, words: str
) -> None:
    """Rows of the caller's layout could not be appended; the error says what differs."""
    cache.sessions.create(OWN, id=name, layout=held)
    assert cache.sessions.create(OWN, id=name, layout=held, exist_ok=True).info.token_count == 0
    with pytest.raises(SessionAlreadyExists, match=f"{name} already exists with another layout: {words}"):
        cache.sessions.create(OWN, id=name, layout=asked, exist_ok=True)


def test_a_session_of_another_model_or_salt_is_not_returned(cache: Client, name: str) -> None:
    """Its rows are not the caller's: it stays as it is."""
    kept = cache.sessions.create(OWN, id=name, salt=b"one user").append(make_rows(40))
    other = cache.models.register(ModelSpec.opaque("other", row_bytes=8))
    with pytest.raises(ModelFingerprintMismatch):
        cache.sessions.create(other, id=name, salt=b"one user", exist_ok=True)
    with pytest.raises(SessionAlreadyExists, match=f"sessions/{name} already exists with another salt"):
        cache.sessions.create(OWN, id=name, exist_ok=True)

    assert cache.sessions.get(f"sessions/{name}").generation == kept.generation


def test_rows_of_the_callers_own_are_a_model(cache: Client, name: str) -> None:
    """Each id has a fingerprint of its own, the same in every version: else rows would be lost."""
    spec = ModelSpec.opaque("notes", row_bytes=24)
    assert spec.fingerprint().hex() == "832eebdf200d97f69454d89112b8a5532c633360b5413f5cf516de0eee07094f"
    assert len({ModelSpec.opaque(one, row_bytes=size).fingerprint() for one in "ab" for size in (8, 24)}) == 4
    rows = np.random.default_rng(1).integers(0, 256, (40, 24), np.uint8)
    notes = cache.sessions.create(cache.models.register(spec), id=name)
    notes.append({TOKENS: np.arange(40, dtype="<i4"), OPAQUE: rows})
    assert cache.models.get("models/notes").spec == spec

    notes.keep_recent(10, sink_token_count=2)

    with notes.read() as read:
        np.testing.assert_array_equal(read.array(OPAQUE), np.concatenate([rows[:2], rows[30:]]))
    with pytest.raises(InvalidArgument, match="row_bytes"):
        cache.models.register(ModelSpec.opaque("none", row_bytes=0))


def test_a_condition_on_a_session_that_is_gone_holds_of_no_other(cache: Client, name: str) -> None:
    """One of its name with as many changes and tokens has other rows: nothing is put behind them, or read."""
    before = cache.sessions.create(OWN, id=name)
    generation = before.append(make_rows(40)).generation
    before.delete()
    other = cache.sessions.create(OWN, id=name).append(make_rows(40, first=7))
    with pytest.raises(GenerationMismatch):
        before.append(make_rows(5, first=40), if_generation_match=generation)
    with pytest.raises(GenerationMismatch), before.read(if_generation_match=generation) as rows:
        rows.array(HIDDEN)
    with pytest.raises(GenerationMismatch):
        before.keep_first(10, if_generation_match=generation)
    found = cache.sessions.get(other.name)
    assert (found.uid, found.token_count) == (other.uid, other.token_count)


def _append(chat: SessionHandle, rows: dict[Stream, Any], *, by_writer: bool) -> None:
    if not by_writer:
        chat.append(rows)
        return
    with chat.writer(len(rows[HIDDEN])) as writer:
        for stream, array in rows.items():
            writer.write(stream, 0, array)
        writer.commit()


@pytest.mark.parametrize("way", ["append", "writer"])
def test_an_append_goes_behind_no_other_session_of_as_many_tokens(cache: Client, name: str, way: str) -> None:
    """Without a condition of the caller's: the handle knows which content its rows follow."""
    before = cache.sessions.create(OWN, id=name)
    before.append(make_rows(40))
    before.delete()
    other = cache.sessions.create(OWN, id=name).append(make_rows(40, first=7))
    with pytest.raises(GenerationMismatch):
        _append(before, make_rows(5, first=40), by_writer=way == "writer")
    assert cache.sessions.get(other.name).token_count == 40
    before.refresh()
    before.append(make_rows(5, first=47))
    with before.read() as found:
        np.testing.assert_array_equal(found.array(HIDDEN), make_rows(45, first=7)[HIDDEN])


def test_a_read_by_what_a_handle_knew_is_of_what_is_there(cache: Client, name: str) -> None:
    """A session of the same name that stores other streams is read as it is."""
    before = cache.sessions.create(OWN, id=name, layout=[])
    before.append({TOKENS: make_rows(40)[TOKENS]})
    before.delete()
    cache.sessions.create(OWN, id=name).append(make_rows(30, first=7))
    with before.read() as found:
        np.testing.assert_array_equal(found.array(HIDDEN), make_rows(30, first=7)[HIDDEN])
    with before.read(streams=[HIDDEN], begin=3, end=20) as found:
        np.testing.assert_array_equal(found.array(HIDDEN), make_rows(17, first=10)[HIDDEN])


def test_an_append_goes_behind_what_the_handles_writer_committed(cache: Client, name: str) -> None:
    """Even if the facts were looked at while the writer was open, and in parts."""
    chat = cache.sessions.create(OWN, id=name)
    with chat.writer(20) as writer:
        for stream, rows in make_rows(20).items():
            writer.write(stream, 0, rows)
        assert chat.info.token_count == 0
        writer.commit(8, keep_open=True)
        assert chat.info.token_count == 8
        writer.commit()
    chat.append(make_rows(10, first=20))

    with chat.read() as found:
        np.testing.assert_array_equal(found.array(HIDDEN), make_rows(30)[HIDDEN])


def test_an_append_behind_another_writer_is_refused_until_refreshed(cache: Client, name: str) -> None:
    """Nothing is appended to a session that is not as the handle knows it."""
    chat = cache.sessions.create(OWN, id=name)
    cache.sessions.open(chat.name, OWN).append(make_rows(5))

    with pytest.raises(WriteOffsetMismatch):
        chat.append(make_rows(5))
    assert chat.refresh().token_count == 5
    assert chat.append(make_rows(5, first=5)).token_count == 10


def test_a_read_to_the_end_reads_what_others_appended(cache: Client, name: str) -> None:
    """The end is the session's now, not the one that the handle knows."""
    chat = cache.sessions.create(OWN, id=name)
    chat.append(make_rows(5))
    cache.sessions.open(chat.name, OWN).append(make_rows(5, first=5))

    with chat.read(begin=2) as rows:
        assert (rows.begin, rows.end) == (2, 10)
        np.testing.assert_array_equal(rows.array(HIDDEN), make_rows(10)[HIDDEN][2:])


def test_a_quiet_read_is_no_access(cache: Client, name: str) -> None:
    """The rows of any other read, by every route; and the session's facts are as they were."""
    chat = cache.sessions.create(OWN, id=name)
    # On disk, so that no write in the background changes the facts.
    chat.append(make_rows(70), durability=Durability.DISK)
    before = chat.refresh()
    with chat.read(streams=[HIDDEN], begin=3, end=68, is_quiet=True) as rows:
        assert not rows.is_local
        np.testing.assert_array_equal(rows.array(HIDDEN), make_rows(70)[HIDDEN][3:68])
    assert chat.refresh() == before
    with pytest.raises(GenerationMismatch):
        chat.read(if_generation_match=before.generation + 1, is_quiet=True)
    with chat.read(streams=[HIDDEN]) as rows:
        rows.array(HIDDEN)
    assert chat.refresh().access_time_ns != before.access_time_ns


def test_a_session_takes_another_s_place(cache: Client, name: str) -> None:
    """By its generation; whoever knew the one that was there appends nothing behind it."""
    chat, other = (cache.sessions.create(OWN, id=f"{name}-{which}") for which in ("one", "two"))
    for each in (chat, other):
        each.append(make_rows(70))
    made = other.fork(id=f"{name}-one", replaces_generation=chat.info.generation)
    with pytest.raises(GenerationMismatch):
        chat.append(make_rows(5), if_generation_match=chat.info.generation)
    assert made.info.generation == chat.info.generation + 1
    made.append(make_rows(5, first=70))
    with made.read(streams=[HIDDEN]) as rows:
        np.testing.assert_array_equal(rows.array(HIDDEN), make_rows(75)[HIDDEN])


def test_an_edited_conversation_takes_its_session_s_place(cache: Client, name: str) -> None:
    """Where the caller says that it is one; twins of other tokens are refused without that."""
    chat, edited = (cache.sessions.create(OWN, id=f"{name}-{which}") for which in ("one", "two"))
    chat.append(make_rows(70))
    edited.append(make_rows(50, first=100))
    with pytest.raises(InvalidArgument):
        edited.fork(id=f"{name}-one", replaces_generation=chat.info.generation)
    made = edited.fork(id=f"{name}-one", replaces_generation=chat.info.generation, is_rewrite=True)
    with made.read(streams=[HIDDEN]) as rows:
        np.testing.assert_array_equal(rows.array(HIDDEN), make_rows(50, first=100)[HIDDEN])


def test_what_changes_the_session_is_known_to_the_handle(cache: Client, name: str) -> None:
    """Truncation, forks, expiry; an append after a cut goes behind the cut."""
    chat = cache.sessions.create(OWN, id=name)
    chat.append(make_rows(60))
    copy = chat.fork(id=f"{name}-copy", token_count=10)
    assert copy.append(make_rows(1, first=10)).token_count == 11
    assert chat.keep_first(50).token_count == chat.info.token_count == 50
    assert chat.drop_ranges([(10, 20)]).token_count == chat.info.token_count == 40
    assert chat.keep_recent(20, sink_token_count=4).token_count == chat.info.token_count == 24
    assert chat.append(make_rows(1)).token_count == 25
    assert chat.update(is_pinned=False, ttl=hours(2)) == chat.info
    assert chat.flush().durable_token_count == chat.info.durable_token_count == 25

    chat.delete()

    with pytest.raises(SessionNotFound):
        chat.refresh()
    with pytest.raises(SessionNotFound):
        chat.append(make_rows(1))


def test_a_transport_is_one_of_the_words() -> None:
    """A typo does not silently mean `auto`, nor does a transport among the kinds of access."""
    with pytest.raises(InvalidArgument, match="transport"):
        ctxcache.connect(transport="sockets")  # type: ignore[arg-type]  # the typo
    with pytest.raises(InvalidArgument, match="access"):
        ctxcache.connect(access="grpc")  # type: ignore[arg-type]  # a transport


@pytest.mark.parametrize("transport", ["socket", "grpc"])
def test_an_open_access_takes_a_transport(server: LiveServer, name: str, transport: str) -> None:
    """`auto` maps the arena, and asks for leases on the transport that was named."""
    with ExitStack() as opened:
        route = route_options(f"local-{transport}")
        cache = opened.enter_context(ctxcache.connect(server.target, transport=route["transport"]))
        chat = cache.sessions.create(OWN, id=name)
        chat.append(make_rows(5))
        with chat.read() as rows:
            assert rows.is_local
            np.testing.assert_array_equal(rows.array(HIDDEN), make_rows(5)[HIDDEN])
