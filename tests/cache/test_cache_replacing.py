"""A fork takes another session's place in one durable step, and upkeep that reads is no user."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from cache_rig import (
    FINGERPRINT,
    KV,
    MODEL,
    SEGMENT_TOKENS,
    STREAMS,
    TENANT,
    MemoryRig,
    Token,
    Writer,
    expected,
    rows_of,
)
from fakes import Operation
from memory_metadata import MemoryMetadata

from ctxcache.core.ledger.session import Expiration, SessionView
from ctxcache.errors import (
    CacheError,
    GenerationMismatch,
    InvalidArgument,
    ModelFingerprintMismatch,
    SessionInUse,
    SessionNotFound,
    TierFailure,
    WriteInProgress,
)
from ctxcache.format.streams import TOKENS, Content, Stream, ranges_of
from ctxcache.storage.metadata.base import Changes

COUNT = 2 * SEGMENT_TOKENS + 9
SMALL = (TOKENS, KV)


@pytest.fixture
def tokens() -> list[Token]:
    """The tokens of both."""
    return Writer(1).make(COUNT)


async def staged(
    rig: MemoryRig,
    name: str,
    tokens: Sequence[Token],
    *,
    salt: bytes = b"",
    contents: Sequence[Content] = (),
    model_id: str = MODEL.model_id,
    fingerprint: bytes = FINGERPRINT,
) -> SessionView:
    """A session of these tokens that stores one stream beside them."""
    await rig.cache.sessions.create(
        TENANT, name, model_id=model_id, layout=ranges_of((KV,)), expiration=Expiration(600 * 10**9),
        is_pinned=False, salt=salt,
    )  # fmt: skip
    reservation = await rig.cache.appends.reserve(
        TENANT, name, fingerprint=fingerprint, write_offset=0, generation=None, token_count=len(tokens),
        coming_count=0, contents=contents,
    )  # fmt: skip
    for stream in SMALL:
        rig.cache.appends.place(reservation, stream, 0, memoryview(rows_of(tokens, stream)))
    return await rig.cache.appends.commit(reservation, len(tokens), is_durable=False, keep_open=False)


async def put_in_place(
    rig: MemoryRig, source: str, name: str, generation: int | None = None, *, is_rewrite: bool = False
) -> SessionView:
    """Have the source's fork take that session's place."""
    at = rig.cache.sessions.get(TENANT, name).generation if generation is None else generation
    return await rig.cache.sessions.fork(
        TENANT, source, name, None, token_count=None, expiration=None, replaces=at, is_rewrite=is_rewrite
    )


async def read(rig: MemoryRig, name: str, *, is_quiet: bool = False) -> dict[Stream, bytes]:
    """All rows that a session has."""
    found: dict[Stream, bytes] = {}
    request = replace(rig.request(name), is_quiet=is_quiet)
    async with rig.cache.leases.stream(request, ()) as (_, streams, rows):
        found = dict.fromkeys(streams, b"")
        async for item in rows:
            found[item.stream] += bytes(item.data)
    return found


def small(tokens: Sequence[Token]) -> dict[Stream, bytes]:
    """The rows of the smaller form."""
    return {stream: rows_of(tokens, stream) for stream in SMALL}


async def test_a_session_goes_on_in_another_form(rig: MemoryRig, tokens: list[Token]) -> None:
    """Other streams; the same name, times, pin and tokens; what it had is given back; writers go on."""
    before = await rig.create("chat", is_pinned=True, ttl_s=777)
    await rig.append("chat", tokens, is_durable=True)
    held_bytes = rig.cache.sessions.get(TENANT, "chat").durable_bytes
    rig.clock.advance(seconds=50)
    before = rig.cache.sessions.get(TENANT, "chat")
    await staged(rig, "staged", tokens)
    rig.clock.advance(seconds=50)
    view = await put_in_place(rig, "staged", "chat")

    assert await read(rig, "chat", is_quiet=True) == small(tokens)
    assert (view.uid != before.uid, view.generation) == (True, before.generation + 1)
    kept = ("name", "create_time_ns", "access_time_ns", "expire_time_ns", "is_pinned", "token_count")
    assert [getattr(view, name) for name in kept] == [getattr(before, name) for name in kept]
    await rig.delete("staged")
    await rig.check()
    used = rig.cache.ledger.below.capacity_bytes - rig.cache.ledger.below.free_bytes
    assert used == rig.cache.sessions.get(TENANT, "chat").durable_bytes < held_bytes
    await rig.crash()
    assert (rig.names(), await read(rig, "chat")) == ({"chat"}, small(tokens))
    await rig.check()


async def test_a_form_that_cannot_take_the_place_changes_nothing(rig: MemoryRig, tokens: list[Token]) -> None:
    """No such name, another generation, salt, model or length, lost tokens, a user: each its reason."""
    other = replace(MODEL, model_id="other", revision="2")
    await rig.cache.models.register(TENANT, other)
    await rig.create("chat")
    await rig.append("chat", tokens, is_durable=True)
    await staged(rig, "staged", tokens)
    await staged(rig, "salted", tokens, salt=b"s")
    await staged(rig, "short", tokens[:-1])
    await staged(rig, "seen", tokens, contents=[Content(0, 5, bytes(32))])
    await staged(rig, "foreign", tokens, model_id="other", fingerprint=other.fingerprint())
    await staged(rig, "twin", Writer(3).make(COUNT))
    await staged(rig, "tail", [*tokens[:-1], Writer(3).make(COUNT)[-1]])
    await rig.create("cut")
    await rig.append("cut", Writer(2).make(COUNT + 5))
    await rig.truncate("cut", (0, 5))
    before = rig.cache.sessions.get(TENANT, "chat")
    wrong: list[tuple[type[CacheError], str, str, int | None, str]] = [
        (SessionNotFound, "staged", "nobody", 1, ""),
        (GenerationMismatch, "staged", "chat", before.generation + 1, ""),
        (InvalidArgument, "salted", "chat", None, "another salt"),
        (InvalidArgument, "short", "chat", None, f"has {COUNT} tokens, and {COUNT - 1}"),
        (InvalidArgument, "seen", "chat", None, "other contents"),
        (InvalidArgument, "twin", "chat", None, "other token ids than the source, from token 0 on"),
        (InvalidArgument, "tail", "chat", None, f"from token {COUNT - 1} on"),
        (InvalidArgument, "staged", "cut", None, "tokens that were dropped"),
        (InvalidArgument, "staged", "staged", None, "the source itself"),
        (ModelFingerprintMismatch, "foreign", "chat", None, ""),
    ]
    for error, source, name, generation, problem in wrong:
        with pytest.raises(error, match=problem or None):
            await put_in_place(rig, source, name, generation)
    await rig.demote("chat")
    with pytest.raises(InvalidArgument, match="other token ids"):
        await put_in_place(rig, "twin", "chat")
    session = rig.cache.ledger.find(TENANT, "chat")
    for error, begin, end in users(rig, session.uid):
        handle = await begin()
        with pytest.raises(error):
            await put_in_place(rig, "staged", "chat")
        end(handle)
    await rig.check()
    assert rig.cache.sessions.get(TENANT, "chat").generation == before.generation
    assert await read(rig, "chat") == expected(tokens)
    await put_in_place(rig, "staged", "chat")
    assert await read(rig, "chat") == small(tokens)


async def test_an_edited_conversation_takes_its_session_s_place(rig: MemoryRig) -> None:
    """Other and fewer tokens, some of them the old ones; the new ones are found, and go on being found."""
    old = Writer(1).make(3 * SEGMENT_TOKENS)
    kept = old[: SEGMENT_TOKENS + 10]
    new = [*kept, *Writer(2).make(5)]
    later = [*new, *Writer(3).make(2 * SEGMENT_TOKENS)]
    await rig.create("chat", ttl_s=777)
    await rig.append("chat", old[:40], is_durable=True)
    await rig.demote("chat")
    await rig.read("chat")
    # Its tail takes no rows any more: what is adopted ends in the midst of the next segment.
    await rig.append("chat", old[40:], is_durable=True)
    before = rig.cache.sessions.get(TENANT, "chat")
    await rig.create("edited")
    adopted_count = await rig.adopt("edited", new)
    assert adopted_count == SEGMENT_TOKENS
    await rig.append("edited", new[adopted_count:])
    view = await put_in_place(rig, "edited", "chat", is_rewrite=True)

    assert (view.name, view.token_count, view.generation) == (before.name, len(new), before.generation + 1)
    assert (view.expire_time_ns, view.access_time_ns) == (before.expire_time_ns, before.access_time_ns)
    await rig.delete("edited")
    await rig.crash()
    assert (rig.names(), await read(rig, "chat")) == ({"chat"}, expected(new))
    await rig.append("chat", later[len(new) :], is_durable=True)
    assert (await rig.match(later)).token_count == len(later) // 64 * 64
    assert rig.cache.ledger.find(TENANT, "chat").whole_token_count == len(later)
    assert await read(rig, "chat") == expected(later)
    await rig.check()


async def test_an_edit_is_refused_where_the_session_is_another_one(
    rig: MemoryRig, tokens: list[Token]
) -> None:
    """Another generation, salt or model, or a user: the conversation stays as it is."""
    other = replace(MODEL, model_id="other", revision="2")
    await rig.cache.models.register(TENANT, other)
    await rig.create("chat")
    await rig.append("chat", tokens, is_durable=True)
    await staged(rig, "edited", Writer(3).make(COUNT + 7))
    await staged(rig, "salted", tokens, salt=b"s")
    await staged(rig, "foreign", tokens, model_id="other", fingerprint=other.fingerprint())
    session = rig.cache.ledger.find(TENANT, "chat")
    wrong: list[tuple[type[CacheError], str, int | None]] = [
        (GenerationMismatch, "edited", session.generation - 1),
        (InvalidArgument, "salted", None),
        (ModelFingerprintMismatch, "foreign", None),
    ]
    for refused, source, generation in wrong:
        with pytest.raises(refused):
            await put_in_place(rig, source, "chat", generation, is_rewrite=True)
    for error, begin, end in users(rig, session.uid):
        handle = await begin()
        with pytest.raises(error):
            await put_in_place(rig, "edited", "chat", is_rewrite=True)
        end(handle)
    await rig.check()
    assert await read(rig, "chat") == expected(tokens)


def users(
    rig: MemoryRig, uid: bytes
) -> Iterator[tuple[type[CacheError], Callable[[], Awaitable[Any]], Callable[[Any], object]]]:
    """Ways in which a session is used, and how each ends. Any: what one of them gave."""
    leases, appends, placement = rig.cache.leases, rig.cache.appends, rig.cache.ledger.placement
    session = rig.cache.ledger.get(uid)
    assert session is not None

    async def wait_for_it() -> None:
        placement.hinted(session, 1e9)

    yield WriteInProgress, lambda: rig.reserve("chat", 5), appends.release
    yield SessionInUse, lambda: rig.acquire("chat"), lambda one: leases.release(one.lease_id)
    yield SessionInUse, wait_for_it, lambda _: placement.withdrawn(session)


@pytest.mark.parametrize(
    ("change", "error", "token_count"),
    [
        ("append", GenerationMismatch, COUNT + 5),
        ("cut", GenerationMismatch, COUNT - 1),
        ("delete", SessionNotFound, 0),
        ("write", WriteInProgress, COUNT),
        ("read", SessionInUse, COUNT),
        ("await", SessionInUse, COUNT),
    ],
)
async def test_what_others_do_while_the_source_is_flushed_is_seen(
    rig: MemoryRig, tokens: list[Token], change: str, error: type[CacheError], token_count: int
) -> None:
    """Rows that were acknowledged meanwhile stay, and who reads or waits by then is not disturbed."""
    await rig.create("chat")
    await rig.append("chat", tokens, is_durable=True)
    await staged(rig, "staged", tokens)
    session, more = rig.cache.ledger.find(TENANT, "chat"), Writer(2).make(5)
    write, lease, wait = (begin for _, begin, _ in users(rig, session.uid))
    changes: dict[str, Callable[[], Awaitable[object]]] = {
        "append": lambda: rig.append("chat", more),
        "cut": lambda: rig.truncate("chat", (0, 1)),
        "delete": lambda: rig.delete("chat"),
        "write": write,
        "read": lease,
        "await": wait,
    }
    write_count = rig.ssd.counts[Operation.WRITE]
    gate = rig.ssd.hold(Operation.WRITE)
    putting = asyncio.create_task(put_in_place(rig, "staged", "chat"))
    await rig.reached(Operation.WRITE, write_count + 1)
    await changes[change]()
    gate.set()

    with pytest.raises(error):
        await putting
    assert rig.names() == ({"chat", "staged"} if token_count else {"staged"})
    if token_count:
        left = (tokens + more)[token_count < COUNT :][:token_count]
        assert await read(rig, "chat", is_quiet=True) == expected(left)


async def test_rows_that_are_held_outlive_the_form(rig: MemoryRig, tokens: list[Token]) -> None:
    """A quiet reader is no user: it reads what it began to read, and then its bytes are given back."""
    await rig.create("chat")
    await rig.append("chat", tokens, is_durable=True)
    await staged(rig, "staged", tokens)
    found = dict.fromkeys(STREAMS, b"")
    quiet = replace(rig.request("chat"), is_quiet=True)
    async with rig.cache.leases.stream(quiet, ()) as (_, _, rows):
        first = await anext(rows)
        found[first.stream] += bytes(first.data)
        await put_in_place(rig, "staged", "chat")
        async for item in rows:
            found[item.stream] += bytes(item.data)
    assert found == expected(tokens)
    await rig.check()


@contextmanager
def failing(rig: MemoryRig, *, is_written: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The next commit that takes a record away fails, written or not."""
    commit = MemoryMetadata.commit

    async def fail(written: Coroutine[Any, Any, None] | None) -> None:
        if written is not None:
            await written
        raise TierFailure(path="metadata", problem="the process is killed here")

    def commit_some(self: MemoryMetadata, changes: Changes, *, is_durable: bool) -> Coroutine[Any, Any, None]:
        is_last = bool(changes.deleted_session_uids)
        written = commit(self, changes, is_durable=is_durable) if is_written or not is_last else None
        return fail(written) if is_last or written is None else written

    with monkeypatch.context() as patch:
        patch.setattr(type(rig.metadata), "commit", commit_some)
        yield


@pytest.mark.parametrize("commit", ["lost", "written"])
@pytest.mark.parametrize("is_rewrite", [False, True], ids=["form", "edit"])
async def test_a_crash_leaves_the_one_or_the_other(
    rig: MemoryRig, tokens: list[Token], commit: str, *, is_rewrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the commit the old form, behind it the new one, whole; the store itself goes on with the new."""
    await rig.create("chat")
    await rig.append("chat", tokens, is_durable=True)
    other = Writer(3).make(COUNT - 5) if is_rewrite else tokens
    await staged(rig, "staged", other)
    await rig.flush("staged")
    is_written = commit == "written"
    with failing(rig, is_written=is_written, monkeypatch=monkeypatch), pytest.raises(TierFailure):
        await put_in_place(rig, "staged", "chat", is_rewrite=is_rewrite)
    assert await read(rig, "chat", is_quiet=True) == small(other)
    await rig.crash()

    assert rig.names() == {"chat", "staged"}
    assert await read(rig, "chat") == (small(other) if is_written else expected(tokens))
    assert await read(rig, "staged") == small(other)
    await rig.check()


async def test_upkeep_is_no_return(rig: MemoryRig, tokens: list[Token]) -> None:
    """Neither what reads quietly nor what takes the place makes a session look used; a read does."""
    for name in ("old", "new"):
        await rig.create(name)
        await rig.append(name, tokens, is_durable=True)
        rig.clock.advance(seconds=1)
    await staged(rig, "staged", tokens)
    seen = rig.cache.sessions.get(TENANT, "old")
    hits = rig.cache.state.counters.read_token_count
    assert await read(rig, "old", is_quiet=True) == expected(tokens)
    assert rig.cache.sessions.get(TENANT, "old") == seen
    assert rig.cache.state.counters.read_token_count == hits
    await put_in_place(rig, "staged", "old")

    def is_older() -> bool:
        ranks = [rig.cache.ledger.placement.rank(uid_of(rig, name)) for name in ("old", "new")]
        old, new = ranks
        assert old is not None
        assert new is not None
        return old < new

    assert is_older()
    assert rig.cache.sessions.get(TENANT, "old").access_time_ns == seen.access_time_ns
    await read(rig, "old")
    assert not is_older()
    await rig.check()


def uid_of(rig: MemoryRig, name: str) -> bytes:
    """The uid of a session that is there."""
    return rig.cache.ledger.find(TENANT, name).uid


async def test_a_quiet_read_brings_nothing_into_memory(rig: MemoryRig, tokens: list[Token]) -> None:
    """An ordinary one does."""
    await rig.create("chat")
    await rig.append("chat", tokens, is_durable=True)
    await rig.demote("chat")
    assert await read(rig, "chat", is_quiet=True) == expected(tokens)
    assert rig.cache.sessions.get(TENANT, "chat").memory_bytes == 0
    assert await read(rig, "chat") == expected(tokens)
    assert rig.cache.sessions.get(TENANT, "chat").memory_bytes > 0
