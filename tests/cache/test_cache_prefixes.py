"""Sessions are found by their tokens, and share equal ones: one copy, whichever sessions come and go."""

import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
from cache_rig import (
    FINGERPRINT,
    SEGMENT_TOKENS,
    SLOT_BYTES,
    STREAMS,
    TENANT,
    DiskRig,
    MemoryRig,
    Token,
    Writer,
    expected,
    rows_of,
)
from fakes import Operation

from ctxcache.cache.prefixes import Found, Match, Shortfall
from ctxcache.cache.state import Call, Listening
from ctxcache.core.ledger.keyed import Keyed
from ctxcache.core.limits import DEFAULT_WATERMARKS
from ctxcache.core.prefix.keys import scope_of
from ctxcache.errors import InvalidArgument, ModelFingerprintMismatch, WriteInProgress
from ctxcache.format.streams import TOKENS, ranges_of

PROMPT_TOKENS = 1024
CHATS = 1000
MISS = Match()


@pytest.fixture
def writer() -> Writer:
    """One who writes into every session."""
    return Writer(1)


async def adopted(rig: MemoryRig | DiskRig, name: str, tokens: list[Token]) -> int:
    """A new session that begins with as much of the tokens as is there, and has all of them."""
    await rig.create(name)
    count = await rig.adopt(name, tokens)
    if count < len(tokens):
        await rig.append(name, tokens[count:])
    return count


async def test_what_was_appended_is_found_by_its_tokens(rig: MemoryRig, writer: Writer) -> None:
    """Whole runs of 64 from the first token on, as soon as committed; pending until they are on SSD."""
    tokens = writer.make(2 * SEGMENT_TOKENS + 10)
    await rig.create("a")
    assert await rig.match(tokens) == MISS
    await rig.append("a", tokens[:70])
    assert await rig.match(tokens) == Match(Found.PENDING, 64, 64, Shortfall.NOT_STORED)
    await rig.append("a", tokens[70:], is_durable=True)
    assert await rig.match(tokens) == Match(Found.HIT, 128, 128, Shortfall.SHORT)
    other = Match(Found.HIT, 64, 64, Shortfall.NOT_STORED)
    assert await rig.match([*tokens[:100], *writer.make(100)]) == other
    assert await rig.match(tokens[1:]) == MISS
    assert await rig.match(tokens[:63]) == Match(shortfall=Shortfall.SHORT)
    await rig.demote("a")
    assert await rig.match(tokens[:128]) == Match(Found.HIT, 128, 0, None, missing_bytes=2 * SLOT_BYTES)
    await rig.check()


async def test_tokens_that_come_one_by_one_are_found(rig: MemoryRig, writer: Writer) -> None:
    """As a decoding engine appends them."""
    tokens = writer.make(SEGMENT_TOKENS + 1)
    await rig.create("a")
    for i, token in enumerate(tokens):
        assert (await rig.match(tokens)).token_count == i // SEGMENT_TOKENS * SEGMENT_TOKENS
        await rig.append("a", [token])
    assert (await rig.match(tokens)).token_count == SEGMENT_TOKENS


@pytest.mark.parametrize("is_crash", [False, True])
async def test_keys_are_there_after_a_restart_without_a_read(
    tmp_path: Path, writer: Writer, *, is_crash: bool
) -> None:
    """They are in the records: no row is read, and what is appended behind them goes on."""
    rig = MemoryRig(tmp_path)
    await rig.open()
    tokens = writer.make(3 * SEGMENT_TOKENS)
    await rig.create("a")
    await rig.append("a", tokens[: 2 * SEGMENT_TOKENS], is_durable=True)
    read_count = 0 if is_crash else rig.ssd.counts[Operation.READ]
    await (rig.crash() if is_crash else rig.restart())
    found = await rig.match(tokens)
    assert found == Match(Found.HIT, 128, 0, Shortfall.NOT_STORED, missing_bytes=2 * SLOT_BYTES)
    assert rig.ssd.counts[Operation.READ] == read_count
    await rig.append("a", tokens[2 * SEGMENT_TOKENS :])
    assert (await rig.match(tokens)).token_count == 3 * SEGMENT_TOKENS
    await rig.create("b")
    assert await rig.adopt("b", tokens) == 3 * SEGMENT_TOKENS
    assert await rig.read("b") == expected(tokens)
    await rig.check()
    await rig.close()


async def test_what_is_cut_is_not_found(rig: MemoryRig, writer: Writer) -> None:
    """Rows behind a cut were computed with tokens that are gone; what lies before it is found as before."""
    tokens = writer.make(3 * SEGMENT_TOKENS)
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    await rig.truncate("a", (100, 110))
    assert (await rig.match(tokens)).token_count == 64
    await rig.append("a", writer.make(100))
    await rig.cache.prefixes.forget_gone()
    assert len(rig.cache.ledger.keyed.index) == 1
    await rig.truncate("a", (0, 1))
    assert await rig.match(tokens) == MISS
    await rig.cache.prefixes.forget_gone()
    assert len(rig.cache.ledger.keyed.index) == 0
    await rig.check()


async def test_a_fork_goes_on_being_found_when_its_source_is_cut(rig: MemoryRig, writer: Writer) -> None:
    """The segment is named as long as one session holds all before it."""
    tokens = writer.make(2 * SEGMENT_TOKENS)
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    await rig.fork("a", "b")
    await rig.truncate("a", (0, 1))
    assert (await rig.match(tokens)).token_count == 128
    await rig.truncate("b", (127, 128))
    # The segment is listed by both, so that its key stays, and nobody holds all before it.
    assert await rig.match(tokens) == Match(Found.HIT, 64, 64, Shortfall.CUT)
    await rig.delete("b")
    assert await rig.match(tokens) == Match(shortfall=Shortfall.CUT)
    await rig.check()


async def test_equal_state_that_was_stored_twice_is_found_when_one_is_gone(
    rig: MemoryRig, writer: Writer
) -> None:
    """Both are known under the key."""
    tokens = writer.make(SEGMENT_TOKENS)
    for name in ("a", "b", "c"):
        await rig.create(name)
        await rig.append(name, tokens, is_durable=True)
    for name in ("b", "c", "a"):
        assert (await rig.match(tokens)).token_count == 64
        await rig.delete(name)
    assert await rig.match(tokens) == MISS


async def test_an_adoption_goes_on_in_the_middle_of_a_segment(rig: MemoryRig, writer: Writer) -> None:
    """The source's segments do not begin at multiples of 64: what is behind these tokens stays its own."""
    tokens, own = writer.make(4 * SEGMENT_TOKENS), writer.make(2 * SEGMENT_TOKENS)
    await rig.create("a")
    await rig.append("a", tokens[:100], is_durable=True)
    await rig.demote("a")
    await rig.read("a")
    # Its tail takes no rows any more: the next segment begins at 100.
    await rig.append("a", tokens[100:], is_durable=True)
    assert [s.begin for s in rig.cache.ledger.find(TENANT, "a").segments] == [0, 64, 100, 164, 228]
    whole = [*tokens[:128], *own]
    assert await adopted(rig, "b", whole) == 128
    assert await rig.read("a") == expected(tokens)
    assert await rig.read("b") == expected(whole)
    assert (await rig.match(whole)).token_count == len(whole)
    assert (await rig.match(tokens)).token_count == len(tokens)
    await rig.flush("b")
    await rig.demote("b")
    assert await rig.read("b") == expected(whole)
    await rig.delete("a")
    assert await rig.read("b") == expected(whole)
    assert (await rig.match(tokens)).token_count == 128
    await rig.restart()
    assert await rig.read("b") == expected(whole)
    assert (await rig.match(whole)).token_count == len(whole)
    await rig.check()


async def test_what_is_being_written_is_adopted_in_whole_segments(rig: MemoryRig, writer: Writer) -> None:
    """The writer goes on, and nobody waits for it."""
    tokens = writer.make(3 * SEGMENT_TOKENS)
    await rig.create("a")
    reservation = await rig.reserve("a", len(tokens))
    rig.place(reservation, 0, tokens)
    rig.cache.appends.commit_in_memory(reservation, 100, keep_open=True)
    await rig.create("b")
    assert await rig.adopt("b", tokens) == 64
    await rig.cache.appends.commit(reservation, len(tokens), is_durable=True, keep_open=False)
    assert await rig.read("a") == expected(tokens)
    assert await rig.read("b") == expected(tokens[:64])
    await rig.check()


async def test_only_a_session_that_never_had_tokens_adopts(rig: MemoryRig, writer: Writer) -> None:
    """Nothing is changed by a refusal."""
    tokens = writer.make(SEGMENT_TOKENS)
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    with pytest.raises(InvalidArgument, match="has or had tokens"):
        await rig.adopt("a", tokens)
    await rig.create("b")
    with pytest.raises(ModelFingerprintMismatch):
        await rig.cache.prefixes.adopt(TENANT, "b", bytes(32), None, rows_of(tokens, TOKENS))
    reservation = await rig.reserve("b", 1)
    with pytest.raises(WriteInProgress):
        await rig.adopt("b", tokens)
    rig.cache.appends.release(reservation)
    assert await rig.adopt("b", tokens) == 64
    await rig.truncate("b", (0, 64))
    with pytest.raises(InvalidArgument, match="has or had tokens"):
        await rig.adopt("b", tokens)
    await rig.check()


async def test_keys_that_do_not_follow_each_other_are_not_believed(rig: MemoryRig, writer: Writer) -> None:
    """A key is of tokens at its place, behind those of the keys before."""
    tokens, others = writer.make(3 * SEGMENT_TOKENS), writer.make(SEGMENT_TOKENS)
    for name, appended in (("a", tokens), ("b", others)):
        await rig.create(name)
        await rig.append(name, appended, is_durable=True)
    keyed, layout = rig.cache.ledger.keyed, ranges_of(STREAMS)
    own, other = (
        [
            key
            for segment in rig.cache.ledger.find(TENANT, name).segments
            for key in keyed.keys_of(segment, 64)
        ]
        for name in ("a", "b")
    )
    for given, count in (
        (own, 192),
        (own[1:], 0),
        ([*other, own[1], own[2]], 0),
        ([own[0], *other, own[2]], 64),
        ([own[0], own[2]], 64),
    ):
        found = await rig.cache.prefixes.match(TENANT, "tiny", layout, given)
        assert found.token_count == count, given


async def test_a_wrong_key_ends_what_is_found(rig: MemoryRig, writer: Writer) -> None:
    """Whichever it is: in segments of one key, in one of many, and in the part of one that a fork shows."""
    tokens, others, layout = writer.make(320), writer.make(320), ranges_of(STREAMS)
    for name in ("a", "c"):
        await rig.create(name)
    await rig.append("a", tokens[:90])
    await rig.append("a", tokens[90:200])
    await rig.append("a", tokens[200:], is_coming=True)
    await rig.append("c", others, is_coming=True)
    await rig.fork("c", "d", 192)
    await rig.delete("c")
    scope = scope_of(TENANT, FINGERPRINT, tuple(layout))
    for asked, most in ((tokens, 5), (others, 3)):
        own = list(scope.keys(rows_of(asked, TOKENS)))
        for wrong, count in product(range(6), range(1, 6)):
            given = [bytes([9]) * 32 if number == wrong else key for number, key in enumerate(own[:count])]
            found = await rig.cache.prefixes.match(TENANT, "tiny", layout, given)
            assert found.token_count == 64 * min(wrong, count, most), (wrong, count)
        found = await rig.cache.prefixes.match(TENANT, "tiny", layout, own[:most], token_count=64 * most + 63)
        assert (found.token_count, found.shortfall) == (64 * most, Shortfall.SHORT)


async def test_keys_are_found_within_their_scope_alone(rig: MemoryRig, writer: Writer) -> None:
    """Another tenant that has the very keys finds nothing."""
    tokens = writer.make(SEGMENT_TOKENS)
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    [segment] = rig.cache.ledger.find(TENANT, "a").segments
    keys = rig.cache.ledger.keyed.keys_of(segment, 64)
    match = rig.cache.prefixes.match
    await rig.cache.models.register("other", rig.cache.state.model(TENANT, "tiny").spec)
    layout = segment.layout.outline.ranges
    assert (await match(TENANT, "tiny", layout, keys)).token_count == 64
    assert (await match(TENANT, "tiny", layout, [keys[0], keys[0]])).token_count == 64
    assert (await match(TENANT, "tiny", layout[:-1], keys)) == MISS
    assert (await match("other", "tiny", layout, keys)) == MISS
    assert (await match("other", "tiny", layout, rows_of(tokens, TOKENS))) == MISS
    assert segment.model_fingerprint == FINGERPRINT


@pytest.mark.parametrize("make_rig", [MemoryRig, DiskRig])
async def test_a_thousand_chats_hold_one_prompt_once(
    tmp_path: Path, writer: Writer, make_rig: Callable[..., MemoryRig | DiskRig]
) -> None:
    """In both tiers; whoever goes, and whatever happens to the server, the others read on."""
    slots = PROMPT_TOKENS // SEGMENT_TOKENS
    rig = make_rig(tmp_path, arena_segments=2 * slots, ssd_segments=(2 * slots,))
    await rig.open()
    prompt = writer.make(PROMPT_TOKENS)
    for i in range(CHATS):
        assert await adopted(rig, f"s{i}", prompt) == (PROMPT_TOKENS if i else 0)
    ledger = rig.cache.ledger
    assert ledger.memory.used_bytes <= 1.05 * slots * SLOT_BYTES
    assert ledger.below.used_bytes <= 1.05 * slots * SLOT_BYTES
    assert rig.cache.prefixes.counts.adopted_bytes == (CHATS - 1) * slots * SLOT_BYTES
    [most] = await rig.cache.prefixes.most_shared(TENANT, 10)
    assert (most.token_count, most.session_count) == (PROMPT_TOKENS, CHATS)
    assert most.saved_bytes == (CHATS - 1) * slots * SLOT_BYTES
    for i in range(0, CHATS, 3):
        await rig.delete(f"s{i}")
    await rig.cache.sessions.evict(TENANT, "s1")
    await rig.truncate("s2", (0, 100))
    await rig.cache.sessions.keep_first(TENANT, "s4", None, 100)
    assert await rig.read("s5") == expected(prompt)
    assert await rig.read("s2") == expected(prompt[100:])
    await rig.demote("s5")
    assert ledger.memory.used_bytes == 0
    await rig.crash()
    ledger = rig.cache.ledger
    assert ledger.below.used_bytes <= 1.05 * slots * SLOT_BYTES
    assert await rig.read("s998") == expected(prompt)
    assert (await rig.match(prompt)).token_count == PROMPT_TOKENS
    rig.clock.advance(seconds=1800)
    await rig.cache.sessions.update(TENANT, "s998", expiration=None, is_pinned=None)
    rig.clock.advance(seconds=2000)
    await rig.cache.sessions.expire_due()
    assert rig.names() == {"s998"}
    assert await rig.read("s998") == expected(prompt)
    await rig.check()
    await rig.delete("s998")
    assert ledger.below.used_bytes == ledger.memory.used_bytes == 0
    assert isinstance(ledger.keyed, Keyed)
    await rig.cache.prefixes.forget_gone()
    assert len(ledger.keyed.index) == 0
    await rig.close()


TRIES = 5_000
"""Tries of each of two kinds."""
PROMPTS = 250
"""Prompts of each kind: the slot of the index that a prompt meets is chance, and must not be one's alone."""
SEED = 11


async def test_time_does_not_tell_what_another_tenant_has(tmp_path: Path, writer: Writer) -> None:
    """A tenant that asks for another one's prompts, and for some that nobody has, cannot tell them apart.

    Ten thousand looks, in an order drawn by chance. The share of pairs in which the first kind takes longer
    is a half, whatever the machine does meanwhile, for it does it to both. In the control a tenant asks for
    its own.
    """
    rig = MemoryRig(tmp_path, arena_segments=2 * PROMPTS, ssd_segments=(2 * PROMPTS,))
    await rig.open()
    known, unknown = ([writer.make(SEGMENT_TOKENS) for _ in range(PROMPTS)] for _ in range(2))
    for i, prompt in enumerate(known):
        await rig.create(f"s{i}")
        await rig.append(f"s{i}", prompt)
    await rig.cache.models.register("other", rig.cache.state.model(TENANT, "tiny").spec)
    layout = ranges_of(STREAMS)

    async def seen_by(tenant: str, *, by_keys: bool = False) -> float:
        draws = [(is_known, i % PROMPTS) for i in range(TRIES) for is_known in (True, False)]
        random.Random(SEED).shuffle(draws)
        scope = scope_of(tenant, FINGERPRINT, tuple(layout))
        prompts = {
            is_known: [
                list(scope.keys(ids)) if by_keys else ids for ids in (rows_of(one, TOKENS) for one in those)
            ]
            for is_known, those in ((True, known), (False, unknown))
        }
        took: dict[bool, list[int]] = {True: [], False: []}
        for is_known, number in draws:
            asked = prompts[is_known][number]
            begun_ns = time.perf_counter_ns()
            await rig.cache.prefixes.match(tenant, "tiny", layout, asked)
            took[is_known].append(time.perf_counter_ns() - begun_ns)
        return area_under_curve(took[True], took[False])

    assert abs(await seen_by("other") - 0.5) <= 0.05
    assert abs(await seen_by("other", by_keys=True) - 0.5) <= 0.05
    # The control: beside a busy machine the difference is less plain, and plain enough.
    assert await seen_by(TENANT) >= 0.7
    await rig.close()


def area_under_curve(positive: list[int], negative: list[int]) -> float:
    """How often one of the first is larger than one of the second; ties count half."""
    negative = sorted(negative)
    wins = sum(bisect_left(negative, one) + bisect_right(negative, one) for one in positive)
    return wins / (2 * len(positive) * len(negative))


async def test_an_adoption_is_recorded_as_a_fork(rig: MemoryRig, writer: Writer) -> None:
    """The fork is of a session that was opened before: from whom, how much, and for how long it lives."""
    tokens = writer.make(SEGMENT_TOKENS)
    listening = rig.cache.state.journal.listening = Listening()
    for name in ("a", "b"):
        await rig.create(name)
    opened, _ = listening.take()
    assert [(one.call, one.facts["ttl_ms"]) for one in opened] == [(Call.OPEN, 3_600_000)] * 2
    await rig.append("a", tokens, is_durable=True)
    listening = rig.cache.state.journal.listening = Listening()
    assert await rig.adopt("b", tokens) == 64
    heard, _ = listening.take()
    assert [(one.call, one.name, one.session_tokens) for one in heard] == [(Call.FORK, "sessions/b", 64)]
    expected_facts = {"source": "sessions/a", "tokens": 64, "ttl_ms": 3_600_000, "is_pinned": False}
    assert dict(heard[0].facts) == expected_facts


@dataclass
class Meddling:
    """A pace that rests a few times; in the last rest others do something."""

    others: Callable[[], Awaitable[object]]
    rests_left: int

    @property
    def is_over(self) -> bool:
        """See Pace."""
        return self.rests_left > 0

    async def rest(self) -> None:
        """See Pace."""
        self.rests_left -= 1
        if not self.rests_left:
            await self.others()


@pytest.mark.parametrize("rest", range(1, 5))
@pytest.mark.parametrize("change", ["cut", "cut and written", "deleted"])
async def test_what_becomes_of_a_source_while_it_is_adopted_is_seen(
    rig: MemoryRig, writer: Writer, change: str, rest: int
) -> None:
    """Tokens that it has no more are not adopted, at whichever moment they go."""
    tokens, others = writer.make(3 * SEGMENT_TOKENS), writer.make(3 * SEGMENT_TOKENS)
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    await rig.create("b")

    async def meddle() -> None:
        if change == "deleted":
            await rig.delete("a")
            return
        await rig.cache.sessions.keep_first(TENANT, "a", None, SEGMENT_TOKENS + 1)
        if change == "cut and written":
            await rig.append("a", others, is_durable=True)

    pace = Meddling(meddle, rest)
    adopted = await rig.cache.prefixes.adopt(
        TENANT, "b", FINGERPRINT, None, rows_of(tokens, TOKENS), pace=pace
    )
    # It may be done before so many rests.
    left_count = 0 if change == "deleted" else SEGMENT_TOKENS
    assert adopted.token_count == (len(tokens) if pace.is_over else left_count)
    assert await rig.read("b") == expected(tokens[: adopted.token_count])
    await rig.check()


async def test_a_segment_that_is_being_filled_is_not_adopted(tmp_path: Path, writer: Writer) -> None:
    """However many keys it has: its writer goes on in it, and who adopted would close it."""
    watermarks = replace(DEFAULT_WATERMARKS, longest=0.2)
    rig = MemoryRig(tmp_path, arena_segments=60, ssd_segments=(400,), watermarks=watermarks)
    await rig.open()
    tokens = writer.make(8 * SEGMENT_TOKENS)
    await rig.create("a")
    reservation = await rig.reserve("a", len(tokens), is_coming=True)
    assert len(reservation.runs) == 1
    rig.place(reservation, 0, tokens)
    rig.cache.appends.commit_in_memory(reservation, 5 * SEGMENT_TOKENS, keep_open=True)
    await rig.create("b")
    assert await rig.adopt("b", tokens) == 0
    await rig.cache.appends.commit(reservation, len(tokens), is_durable=True, keep_open=False)
    [segment] = rig.cache.ledger.find(TENANT, "a").segments
    assert segment.row_count == len(tokens)
    assert await rig.adopt("b", tokens) == len(tokens)
    assert await rig.read("b") == expected(tokens)
    await rig.check()
    await rig.close()


async def test_what_comes_behind_a_dropped_token_has_no_keys(rig: MemoryRig, writer: Writer) -> None:
    """Its ids are those of a prompt, and its rows are not."""
    tokens, more = writer.make(10), writer.make(2 * SEGMENT_TOKENS)
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    await rig.truncate("a", (0, 1))
    await rig.append("a", more, is_durable=True)
    for _ in range(2):
        assert await rig.match([*tokens[1:], *more]) == MISS
        assert len(rig.cache.ledger.keyed.index) == 0
        await rig.crash()


async def test_tokens_that_a_crash_took_are_not_found(rig: MemoryRig, writer: Writer) -> None:
    """Others lie there now, in the same session."""
    tokens, others = writer.make(2 * SEGMENT_TOKENS), writer.make(SEGMENT_TOKENS)
    await rig.create("a")
    await rig.append("a", tokens[:100], is_durable=True)
    await rig.append("a", tokens[100:])
    await rig.crash()
    assert (await rig.match(tokens)).token_count == SEGMENT_TOKENS
    written = [*tokens[:100], *others]
    # Keys go on behind a short segment that is in memory.
    await rig.read("a")
    await rig.append("a", others, is_durable=True)
    for _ in range(2):
        assert (await rig.match(tokens)).token_count == SEGMENT_TOKENS
        assert (await rig.match(written)).token_count == 2 * SEGMENT_TOKENS
        await rig.crash()
    assert await rig.read("a") == expected(written)
