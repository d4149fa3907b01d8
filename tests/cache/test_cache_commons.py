"""What sessions have in common stays when they give way, for as long as it is worth more than they are."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cache_rig import SEGMENT_TOKENS, TENANT, DiskRig, MemoryRig, Token, Writer, expected

from ctxcache.core.ledger.session import NAMELESS_TTL_NS, Expiration, Session
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.core.placement.order import Key
from ctxcache.core.placement.policy import Facts

PROMPT, OWN = 4 * SEGMENT_TOKENS, 2 * SEGMENT_TOKENS


class PrefixesLast(LeastRecentlyUsed, ranks_holders=True):
    """LRU, in which every session leaves before every prefix; notes what it hears of prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[tuple[int, int]] = []
        self.turns: list[tuple[bytes, int, int]] = []
        self.continued_names: list[bytes] = []

    def idle(self, uid: bytes, facts: Facts, now_s: float) -> None:
        """See Policy."""
        super().idle(uid, facts, now_s)
        tokens = round(facts.size_bytes / facts.token_bytes)
        if facts.is_prefix:
            self.uses.append((tokens, facts.turn_count))
        else:
            self.turns.append((uid, facts.turn_count, tokens))

    def continued(self, uid: bytes) -> None:
        """See Policy."""
        self.continued_names.append(uid)

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        rank = super().rank(uid)
        return None if rank is None else (uid.startswith(b"prefix "), *rank)


@pytest.fixture
def policy() -> PrefixesLast:
    """That of the stores of this file."""
    return PrefixesLast()


@pytest.fixture
async def rig(tmp_path: Path, policy: PrefixesLast) -> AsyncIterator[DiskRig]:
    """A store of 24 segments of SSD, and 16 of memory."""
    made = DiskRig(tmp_path, arena_segments=16, ssd_segments=(24,), make_policy=lambda: policy)
    await made.open()
    yield made
    await made.close()


async def chat(rig: MemoryRig | DiskRig, name: str, prompt: list[Token], own: list[Token]) -> int:
    """A session of a prompt and an end of its own, durable; returns how much of it was there."""
    await rig.create(name)
    count = await rig.adopt(name, [*prompt, *own])
    await rig.append(name, [*prompt, *own][count:], is_durable=True)
    return count


async def fill(rig: DiskRig, writer: Writer, count: int) -> None:
    """Sessions that have nothing in common with others, each of six segments."""
    for number in range(count):
        name = f"other {writer.made} {number}"
        await rig.create(name)
        await rig.append(name, writer.make(PROMPT + OWN), is_durable=True)


def known(rig: DiskRig, name: str) -> Session:
    """The session of that name."""
    session = rig.cache.ledger.named(TENANT, name)
    assert session is not None
    return session


def hidden(rig: DiskRig) -> list[str]:
    """Sessions that no client can ask for."""
    return [name for name in rig.names() if name.startswith("~")]


async def test_a_prompt_that_two_began_with_stays_without_a_name_and_is_found(
    rig: DiskRig, policy: PrefixesLast
) -> None:
    """Their own ends leave, and their names; its rows are those that were written, also after a restart."""
    writer = Writer(1)
    prompt, ends = writer.make(PROMPT), [writer.make(OWN) for _ in range(2)]
    assert await chat(rig, "a", prompt, ends[0]) == 0
    assert await chat(rig, "b", prompt, ends[1]) == PROMPT
    assert policy.uses == [(PROMPT, 1)]
    await fill(rig, writer, 5)

    assert not rig.names() & {"a", "b"}
    assert len(hidden(rig)) == 1
    assert (await rig.match([*prompt, *ends[1]])).token_count == PROMPT
    await rig.check()
    await rig.restart()
    assert await chat(rig, "c", prompt, writer.make(OWN)) == PROMPT
    assert await rig.read("c", 0, PROMPT) == expected(prompt)
    await rig.check()


@pytest.mark.parametrize("is_fixed", [False, True])
async def test_what_stays_has_no_label_and_ends_an_hour_behind_its_last_use(
    rig: DiskRig, *, is_fixed: bool
) -> None:
    """Nobody could delete it by a name or a label; its session would have stayed for a day."""
    writer = Writer(1)
    prompt = writer.make(PROMPT)
    for name in "ab":
        await chat(rig, name, prompt, writer.make(OWN))
        now_ns = rig.clock.now_ns()
        day_ns = 24 * NAMELESS_TTL_NS
        await rig.cache.sessions.update(
            TENANT,
            name,
            expiration=Expiration(None, now_ns + day_ns) if is_fixed else Expiration(day_ns),
            is_pinned=False,
        )
        known(rig, name).labels = (("user", "4711"),)
    await fill(rig, writer, 5)
    await rig.restart()
    (kept,) = [known(rig, name) for name in hidden(rig)]
    assert kept.labels == ()
    rig.clock.advance(seconds=NAMELESS_TTL_NS // 10**9 - 1)
    assert (await rig.match(prompt)).token_count == PROMPT
    rig.clock.advance(seconds=2)
    assert (await rig.match(prompt)).token_count == 0
    await rig.check()


async def test_what_was_given_up_and_is_computed_again_is_a_prefix_from_then_on(
    rig: DiskRig, policy: PrefixesLast
) -> None:
    """Nobody asked for it while it was there. The second time it stays."""
    writer = Writer(1)
    prompt = writer.make(PROMPT)
    assert await chat(rig, "a", prompt, writer.make(OWN)) == 0
    await fill(rig, writer, 5)
    assert not policy.uses
    assert not hidden(rig)
    assert await chat(rig, "b", prompt, writer.make(OWN)) == 0
    assert policy.uses == [(PROMPT, 1)]
    await fill(rig, writer, 5)

    assert await chat(rig, "c", prompt, writer.make(OWN)) == PROMPT
    assert policy.uses == [(PROMPT, 1), (PROMPT, 2)]
    await rig.check()


async def test_a_session_that_computes_its_own_again_has_nothing_in_common(
    rig: DiskRig, policy: PrefixesLast
) -> None:
    """It was given up, and goes on under its name."""
    writer = Writer(1)
    prompt = writer.make(PROMPT)
    await chat(rig, "a", prompt, [])
    await fill(rig, writer, 5)
    assert await chat(rig, "a", prompt, writer.make(OWN)) == 0

    assert not policy.uses


async def test_an_adoption_is_a_part_of_its_turn_and_no_return_of_its_source(
    rig: DiskRig, policy: PrefixesLast
) -> None:
    """One turn of all tokens; going on where another session ended is told of that one."""
    writer = Writer(1)
    prompt = writer.make(PROMPT)
    await chat(rig, "a", prompt, [])
    await chat(rig, "b", prompt, writer.make(OWN))

    names = [uid.split(b"\0")[1] for uid, _, _ in policy.turns]
    assert names == [b"a", b"b", b"b"]
    assert policy.turns[-1][1:] == (1, PROMPT + OWN)
    assert [name.split(b"\0")[1] for name in policy.continued_names] == [b"a"]


async def test_of_a_prefix_within_another_the_shorter_one_stays_longer(rig: DiskRig) -> None:
    """The session of no name is cut once more, when it gives way itself."""
    writer = Writer(1)
    system, tools = writer.make(2 * SEGMENT_TOKENS), writer.make(2 * SEGMENT_TOKENS)
    await chat(rig, "a", [*system, *tools], writer.make(OWN))
    await chat(rig, "b", [*system, *tools], writer.make(OWN))
    await chat(rig, "c", system, writer.make(OWN))
    await fill(rig, writer, 6)
    assert (await rig.match([*system, *tools])).token_count == PROMPT
    for name in hidden(rig):
        session = rig.cache.ledger.named(rig.tenant, name)
        assert session is not None
        await rig.cache.sessions._ssd_room._evict(session, "a test")

    assert (await rig.match([*system, *tools])).token_count in (0, 2 * SEGMENT_TOKENS)
    await rig.check()


async def test_what_is_deleted_or_expires_stays_for_nobody(rig: DiskRig) -> None:
    """It was given up for nothing: its owners, or their time, ended it."""
    writer = Writer(1)
    prompt = writer.make(PROMPT)
    await chat(rig, "a", prompt, writer.make(OWN))
    await chat(rig, "b", prompt, writer.make(OWN))
    await rig.delete("a")
    await rig.delete("b")

    assert (await rig.match(prompt)).token_count == 0
    assert rig.cache.ledger.commons.is_empty
    await chat(rig, "c", prompt, writer.make(OWN))
    await chat(rig, "d", prompt, writer.make(OWN))
    await fill(rig, writer, 5)
    assert hidden(rig)
    rig.clock.advance(ns=3601 * 10**9)
    await rig.cache.sessions.expire_due()
    assert not rig.names()
    assert rig.cache.ledger.commons.is_empty


async def test_a_prompt_is_found_among_thousands_of_others_that_begin_like_it(tmp_path: Path) -> None:
    """Two hundred sessions have the system prompt, and one of them the document behind it."""
    made = DiskRig(tmp_path, arena_segments=64, ssd_segments=(700,), make_policy=PrefixesLast)
    await made.open()
    writer = Writer(1)
    system, document = writer.make(SEGMENT_TOKENS), writer.make(2 * SEGMENT_TOKENS)
    await chat(made, "first", [*system, *document], [])
    for number in range(200):
        await chat(made, f"chat {number}", system, writer.make(SEGMENT_TOKENS))

    assert await chat(made, "asks", [*system, *document], []) == 3 * SEGMENT_TOKENS
    await made.check()
    await made.close()


async def test_a_session_that_goes_on_at_another_host_counts_as_returned(
    rig: DiskRig, policy: PrefixesLast
) -> None:
    """Here it has ended; one that gets its name again has not returned once more."""
    writer = Writer(1)
    await chat(rig, "a", writer.make(PROMPT), [])
    session = rig.cache.ledger.find(rig.tenant, "a")
    ended = rig.cache.sessions.retire(session, session.expire_time_ns)
    await rig.cache.sessions.renamed(session, ended)
    rig.cache.sessions.restore(session, "a", session.expiration, is_pinned=False)
    await rig.cache.sessions.renamed(session)

    assert [name.split(b"\0")[1] for name in policy.continued_names] == [b"a"]
