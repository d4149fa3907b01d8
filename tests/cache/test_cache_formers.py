"""Former renderings of a conversation are found by their tokens, and end with its session."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cache_rig import (
    MODEL,
    SEGMENT_TOKENS,
    TENANT,
    UNLIMITED,
    MemoryRig,
    Rig,
    Token,
    Writer,
    expected,
)
from test_cache_replacing import failing

from ctxcache.core.history import Event
from ctxcache.core.ledger.session import NAMELESS_TTL_NS, Expiration, Session, SessionView
from ctxcache.errors import ModelInUse, SessionNotFound, TierFailure, TooManyRequests

COUNT = 3 * SEGMENT_TOKENS
CUT = SEGMENT_TOKENS
OLD = Writer(1).make(COUNT)


def rendering(tag: int) -> list[Token]:
    """Tokens of the edited conversation: its beginning, and others behind it."""
    return [*OLD[:CUT], *Writer(tag).make(2 * SEGMENT_TOKENS)]


async def begun(rig: Rig, name: str = "chat", *, is_pinned: bool = False, ttl_s: int = 3600) -> None:
    """A conversation of the old tokens."""
    await rig.create(name, is_pinned=is_pinned, ttl_s=ttl_s)
    await rig.append(name, OLD, is_durable=True)


async def edited(rig: Rig, tokens: list[Token], name: str = "chat", *, former_count: int = 3) -> SessionView:
    """The conversation has these tokens from here on, as an engine brings that about."""
    rig.clock.advance(seconds=1)
    await rig.create("staged")
    count = await rig.adopt("staged", tokens)
    await rig.append("staged", tokens[count:])
    view = await rig.cache.sessions.fork(
        TENANT, "staged", name, None, token_count=None, expiration=None, is_rewrite=True,
        replaces=rig.cache.sessions.get(TENANT, name).generation, former_count=former_count,
    )  # fmt: skip
    await rig.delete("staged")
    return view


async def found(rig: Rig, tokens: list[Token]) -> int:
    """How many of these are found by their keys."""
    return (await rig.match(tokens)).token_count


async def listed(rig: Rig) -> list[str]:
    """The names that a client sees."""
    return [view.name async for view in rig.cache.sessions.list(TENANT, after="", model_id="")]


def used_bytes(rig: Rig) -> int:
    """Bytes of SSD slots that are taken."""
    return rig.cache.ledger.below.capacity_bytes - rig.cache.ledger.below.free_bytes


async def test_what_was_before_is_found_by_its_tokens_alone(rig: MemoryRig) -> None:
    """No name, no count, another session begins with it, also after a crash; the new one reads as itself."""
    await begun(rig, is_pinned=True, ttl_s=777)
    new = rendering(2)
    view = await edited(rig, new)

    assert (view.is_pinned, view.ttl_ns) == (True, 777 * 10**9)
    for _ in range(2):
        assert await listed(rig) == ["sessions/chat"]
        assert rig.cache.ledger.names.own_count(TENANT) == 1
        assert (await found(rig, OLD), await found(rig, new)) == (COUNT, COUNT)
        assert await rig.read("chat") == expected(new)
        await rig.create("undone")
        assert await rig.adopt("undone", OLD) == COUNT
        assert await rig.read("undone") == expected(OLD)
        await rig.delete("undone")
        await rig.check()
        await rig.crash()
    former = formers(rig)[0]
    assert (former.is_pinned, former.expiration.ttl_ns) == (False, 777 * 10**9)


def formers(rig: Rig, name: str = "chat") -> list[Session]:
    """Former renderings of a session, the one last used last."""
    return rig.cache.ledger.with_formers(rig.cache.ledger.find(TENANT, name))[1:]


async def deleted(rig: Rig) -> None:
    """By its user."""
    await rig.delete("chat")


async def evicted(rig: Rig) -> None:
    """For the room of others."""
    await rig.cache.sessions.evict(TENANT, "chat")


async def expired(rig: Rig) -> None:
    """Because its user shortened its time."""
    await rig.cache.sessions.update(TENANT, "chat", expiration=Expiration(10**9), is_pinned=None)
    rig.clock.advance(seconds=1)
    # Upkeep comes later: what has expired is found no more.
    assert await found(rig, OLD) == 0
    await rig.cache.sessions.expire_due()


async def made_anew(rig: Rig) -> None:
    """Another conversation gets the name of one that has expired."""
    await rig.cache.sessions.update(TENANT, "chat", expiration=Expiration(10**9), is_pinned=None)
    rig.clock.advance(seconds=1)
    await rig.create("chat")
    assert await found(rig, OLD) == 0
    await rig.delete("chat")


async def forgotten(rig: Rig) -> None:
    """With all of its model."""
    done = await rig.cache.forgetting.forget(TENANT, MODEL.model_id, MODEL.weights_digest, is_trial=False)
    assert (done.session_count, done.token_count) == (3, 3 * COUNT)


ENDS: list[Callable[[Rig], Awaitable[None]]] = [deleted, evicted, expired, made_anew, forgotten]


@pytest.mark.parametrize("is_asleep", [False, True], ids=["known", "asleep"])
@pytest.mark.parametrize("end", ENDS)
async def test_nothing_of_it_outlives_its_session(
    rig: MemoryRig, end: Callable[[Rig], Awaitable[None]], *, is_asleep: bool
) -> None:
    """Whatever ends the session: no token is found, no byte is taken, and the model can go."""
    await begun(rig)
    for tag in (2, 3):
        await edited(rig, rendering(tag))
    assert len(formers(rig)) == 2
    if is_asleep:
        await rig.restart()
    with pytest.raises(ModelInUse):
        await rig.cache.models.delete(TENANT, MODEL.model_id)
    await end(rig)

    for _ in range(2):
        with pytest.raises(SessionNotFound):
            rig.cache.sessions.get(TENANT, "chat")
        assert (used_bytes(rig), rig.cache.ledger.session_count) == (0, 0)
        if end is not forgotten:
            assert [await found(rig, tokens) for tokens in (OLD, rendering(2), rendering(3))] == [0, 0, 0]
        await rig.check()
        await rig.crash()
    await rig.cache.models.delete(TENANT, MODEL.model_id)


@pytest.mark.parametrize("commit", ["lost", "written"])
async def test_a_crash_in_a_deletion_leaves_all_or_nothing(
    rig: MemoryRig, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the conversation without what it was, nor what it was without the conversation."""
    await begun(rig)
    new = rendering(2)
    await edited(rig, new)
    is_written = commit == "written"
    with failing(rig, is_written=is_written, monkeypatch=monkeypatch), pytest.raises(TierFailure):
        await rig.delete("chat")
    assert (await found(rig, OLD), await found(rig, new)) == (0, 0)
    await rig.crash()

    there = 0 if is_written else COUNT
    assert (await found(rig, OLD), await found(rig, new)) == (there, there)
    assert len(rig.names()) == (0 if is_written else 2)
    await rig.check()


@pytest.mark.parametrize("commit", ["lost", "written"])
async def test_a_crash_in_an_edit_leaves_the_one_or_both(
    rig: MemoryRig, commit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the commit the conversation is as it was; behind it the new one, and what it was."""
    await begun(rig)
    await edited(rig, rendering(2), former_count=1)
    new = rendering(3)
    is_written = commit == "written"
    # One former rendering goes for the one that comes: its record is taken away in the same commit.
    with failing(rig, is_written=is_written, monkeypatch=monkeypatch), pytest.raises(TierFailure):
        await edited(rig, new, former_count=1)
    await rig.crash()

    assert await rig.read("chat") == expected(new if is_written else rendering(2))
    assert await found(rig, OLD) == (CUT if is_written else COUNT)
    assert await found(rig, rendering(2)) == COUNT
    assert len(formers(rig)) == 1
    await rig.check()


async def test_so_many_stay_as_the_edit_says(rig: MemoryRig) -> None:
    """Those used least recently go; none stays of which the new rendering has all that is found by a key."""
    await begun(rig)
    renderings = [OLD, *(rendering(tag) for tag in range(2, 7))]
    for tokens in renderings[1:5]:
        await edited(rig, tokens, former_count=2)
    assert [await found(rig, tokens) for tokens in renderings[:5]] == [CUT, CUT, COUNT, COUNT, COUNT]
    # Back to what it was: the conversation has it, and no one else needs to.
    await edited(rig, renderings[3], former_count=2)
    assert [await found(rig, tokens) for tokens in renderings[2:5]] == [COUNT] * 3
    assert len(formers(rig)) == 2
    # It only grew: what it was is a part of what it is.
    await edited(rig, [*renderings[3], *Writer(9).make(5)], former_count=2)
    assert len(formers(rig)) == 2
    await edited(rig, renderings[5], former_count=0)
    assert formers(rig) == []
    assert [await found(rig, tokens) for tokens in renderings[2:5]] == [CUT] * 3
    await rig.check()


async def test_another_form_of_the_conversation_leaves_them_alone(rig: MemoryRig) -> None:
    """A session that is kept in smaller rows is the same conversation, with the same past."""
    await begun(rig)
    new = rendering(2)
    await edited(rig, new)
    await rig.fork("chat", "twin")
    at = rig.cache.sessions.get(TENANT, "chat").generation
    await rig.cache.sessions.fork(
        TENANT, "twin", "chat", None, token_count=None, expiration=None, replaces=at
    )
    assert (len(formers(rig)), await found(rig, OLD)) == (1, COUNT)


async def test_an_operator_is_told_of_the_edit(rig: MemoryRig) -> None:
    """An edit ahead of its turn and a cut by its turn are different lines of a session's history."""
    await begun(rig)
    await edited(rig, rendering(2))
    await rig.truncate("chat", (9, COUNT))
    told = [(one.event, one.detail) for one in rig.cache.state.journal.history.of(TENANT, "chat")]
    assert set(told) == {
        (Event.DELETED, f"replaced by an edit of {COUNT} tokens"),
        (Event.TRUNCATED, "by request"),
    }


async def test_it_ends_an_hour_after_its_last_use(rig: MemoryRig) -> None:
    """Its conversation stays, however long that lives."""
    await begun(rig, ttl_s=86400)
    await edited(rig, rendering(2))
    rig.clock.advance(seconds=NAMELESS_TTL_NS // 10**9 - 1)
    assert await found(rig, OLD) == COUNT
    rig.clock.advance(seconds=1)
    assert await found(rig, OLD) == CUT
    await rig.cache.sessions.expire_due()
    assert (await listed(rig), formers(rig)) == (["sessions/chat"], [])
    await rig.check()


async def test_a_read_of_it_goes_on_where_its_conversation_ends(rig: MemoryRig) -> None:
    """Rows that are held outlive the session, and are given back then."""
    await begun(rig)
    await edited(rig, rendering(2))
    former = formers(rig)[0]
    lease = await rig.cache.leases.acquire(replace(rig.request(former.session_id), end=COUNT))
    await rig.delete("chat")
    assert rig.leased(lease) == expected(OLD)
    rig.cache.leases.release(lease.lease_id)
    await rig.check()
    assert used_bytes(rig) == 0


async def test_rows_that_memory_alone_has_are_written_later(rig: MemoryRig) -> None:
    """What was not durable when it became a former rendering is after a flush, under its new id."""
    await begun(rig)
    more = Writer(8).make(SEGMENT_TOKENS)
    await rig.append("chat", more)
    await edited(rig, rendering(2))
    former = formers(rig)[0]
    assert former.durable_end < former.log_end
    await rig.flush(former.session_id)
    await rig.crash()
    assert await found(rig, [*OLD, *more]) == COUNT + SEGMENT_TOKENS


async def test_a_conversation_in_memory_alone_takes_them_along(rig: MemoryRig) -> None:
    """It is given up without a wait, for no record names a byte of it; records name theirs."""
    await begun(rig)
    await rig.create("empty")
    at = rig.cache.sessions.get(TENANT, "chat").generation
    await rig.cache.sessions.fork(
        TENANT, "empty", "chat", None, token_count=None, expiration=None, replaces=at, is_rewrite=True,
        former_count=3,
    )  # fmt: skip
    await rig.append("chat", Writer(5).make(9))
    assert await found(rig, OLD) == COUNT
    rig.cache.ssd_room.give_up(rig.cache.ledger.find(TENANT, "chat"))
    assert await found(rig, OLD) == 0
    await rig.check()
    assert used_bytes(rig) == 0
    await rig.crash()
    assert (await listed(rig), rig.names()) == (["sessions/empty"], {"empty"})


async def test_a_tenant_s_count_of_sessions_is_that_of_names(tmp_path: Path) -> None:
    """Edits make no session; the bytes that they leave are the tenant's."""
    rig = MemoryRig(tmp_path, limits=replace(UNLIMITED, session_count=2))
    await rig.open()
    await begun(rig)
    before = rig.cache.ledger.usage.of(TENANT).durable_bytes
    for tag in range(2, 6):
        await edited(rig, rendering(tag))
    await rig.create("other")
    with pytest.raises(TooManyRequests):
        await rig.create("one too many")
    assert rig.cache.ledger.usage.of(TENANT).durable_bytes > before
    await rig.close()


async def test_a_deletion_behind_an_edit_that_is_under_way_leaves_nothing(rig: MemoryRig) -> None:
    """The edit is in memory, and its record is not there yet."""
    await begun(rig)
    await rig.create("staged")
    await rig.append("staged", rendering(2), is_durable=True)
    at = rig.cache.sessions.get(TENANT, "chat").generation
    with rig.slow_commits():
        edit = asyncio.create_task(
            rig.cache.sessions.fork(
                TENANT, "staged", "chat", None, token_count=None, expiration=None, replaces=at,
                is_rewrite=True, former_count=3,
            )
        )  # fmt: skip
        while not formers(rig):  # noqa: ASYNC110  # the edit is made in one step
            await asyncio.sleep(0)
        deletion = asyncio.create_task(rig.delete("chat"))
        await asyncio.sleep(0)
    await asyncio.gather(edit, deletion)
    for _ in range(2):
        # Of the beginning the edit's source has a copy of its own.
        assert (await listed(rig), await found(rig, OLD)) == (["sessions/staged"], CUT)
        await rig.check()
        await rig.crash()
