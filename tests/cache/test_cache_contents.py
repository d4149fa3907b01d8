"""Salt and contents, which keys are made with, and the lease of a match.

Leases that any connection may use.
"""

from pathlib import Path

import pytest
from cache_rig import (
    FINGERPRINT,
    MODEL,
    SLOT_BYTES,
    STREAMS,
    TENANT,
    MemoryRig,
    Token,
    Writer,
    expected,
    rows_of,
)

from ctxcache.cache.leases import SECOND_NS, Lease, ReadRequest
from ctxcache.cache.token_leases import TokenLease
from ctxcache.errors import InvalidArgument, LeaseNotFound, ModelFingerprintMismatch
from ctxcache.format.streams import CONTENTS_LIMIT, TOKENS, Content, ranges_of

CAT, DOG = b"c" * 32, b"d" * 32
PICTURE = (Content(100, 130, CAT),)


@pytest.fixture
def tokens() -> list[Token]:
    """Four runs of 64, and some more."""
    return Writer(1).make(270)


async def found(rig: MemoryRig, tokens: list[Token], *contents: Content, salt: bytes = b"") -> int:
    """How many of the tokens are found."""
    return (await rig.match(tokens, contents=contents, salt=salt)).token_count


async def test_two_pictures_behind_equal_ids_are_told_apart(rig: MemoryRig, tokens: list[Token]) -> None:
    """From the run of 64 on that the first token of the picture is in."""
    await rig.create("a")
    await rig.append("a", tokens, contents=PICTURE, is_durable=True)
    assert await found(rig, tokens, *PICTURE) == 256
    assert await found(rig, tokens, Content(100, 130, DOG)) == 64
    assert await found(rig, tokens, Content(100, 131, CAT)) == 128
    assert await found(rig, tokens) == 64
    await rig.create("b")
    assert await rig.adopt("b", tokens, contents=PICTURE) == 256
    assert await rig.read("b") == expected(tokens[:256])
    view = rig.cache.sessions.get(TENANT, "b")
    assert view.contents == PICTURE, "the adopter goes on with what lies behind the tokens"
    await rig.check()


@pytest.mark.parametrize("is_crash", [False, True])
async def test_a_picture_may_come_in_parts_with_a_restart_between(
    tmp_path: Path, tokens: list[Token], *, is_crash: bool
) -> None:
    """A run of 64 gets its key when it is full; what lies behind its first tokens was told before."""
    rig = MemoryRig(tmp_path)
    await rig.open()
    await rig.create("a", salt=b"user")
    await rig.append("a", tokens[:110], contents=[Content(100, 110, CAT)], is_durable=True)
    await (rig.crash() if is_crash else rig.restart())
    await rig.read("a")
    await rig.acquire("a")
    # A content that goes on behind an append's end is told again with the next one.
    await rig.append("a", tokens[110:120], contents=[Content(110, 130, CAT)])
    for i in range(120, 130):
        await rig.append("a", tokens[i : i + 1], contents=[Content(i, 130, CAT)])
    await rig.append("a", tokens[130:])
    assert await found(rig, tokens, *PICTURE, salt=b"user") == 256
    assert await found(rig, tokens, salt=b"user") == 64
    assert await found(rig, tokens, *PICTURE) == 0
    assert rig.cache.sessions.get(TENANT, "a").contents == PICTURE
    await rig.check()
    await rig.close()


async def test_what_was_not_committed_is_not_behind_the_tokens(rig: MemoryRig, tokens: list[Token]) -> None:
    """A writer that gives up leaves nothing of what it told, and another one may tell something else."""
    await rig.create("a")
    reservation = await rig.reserve("a", 130, contents=PICTURE)
    rig.place(reservation, 0, tokens[:104])
    await rig.cache.appends.commit(reservation, 104, is_durable=False, keep_open=True)
    rig.cache.appends.release(reservation)
    assert rig.cache.sessions.get(TENANT, "a").contents == (Content(100, 104, CAT),)
    await rig.append("a", tokens[104:128], contents=[Content(104, 128, DOG)])
    assert await found(rig, tokens, Content(100, 104, CAT), Content(104, 128, DOG)) == 128
    assert await found(rig, tokens, *PICTURE) == 64


async def test_forks_have_salt_and_contents_of_what_they_share(rig: MemoryRig, tokens: list[Token]) -> None:
    """And go on from there, each by itself."""
    await rig.create("a", salt=b"user")
    await rig.append("a", tokens, contents=PICTURE, is_durable=True)
    await rig.fork("a", "b", 128)
    view = rig.cache.sessions.get(TENANT, "b")
    assert (view.salt, view.contents) == (b"user", (Content(100, 128, CAT),))
    await rig.append("b", tokens[128:192], contents=[Content(128, 140, DOG)])
    parted = (Content(100, 128, CAT), Content(128, 140, DOG))
    assert await found(rig, tokens, *parted, salt=b"user") == 192
    await rig.delete("a")
    assert await found(rig, tokens, *PICTURE, salt=b"user") == 128
    assert await found(rig, tokens, *parted) == 0


async def test_contents_behind_a_cut_are_forgotten(rig: MemoryRig, tokens: list[Token]) -> None:
    """Tokens behind the cut have no keys, so that nothing needs to be known of them.

    Tokens before the cut are still found.
    """
    await rig.create("a")
    await rig.append("a", tokens, contents=[Content(3, 5, DOG), *PICTURE], is_durable=True)
    await rig.truncate("a", (110, 120))
    view = rig.cache.sessions.get(TENANT, "a")
    assert (view.contents, view.whole_token_count) == ((Content(3, 5, DOG), Content(100, 110, CAT)), 110)
    assert await found(rig, tokens, Content(3, 5, DOG), *PICTURE) == 64
    await rig.append("a", tokens[:10], contents=[Content(260, 265, CAT)])
    assert rig.cache.sessions.get(TENANT, "a").contents == view.contents
    await rig.truncate("a", (0, 1))
    assert rig.cache.sessions.get(TENANT, "a").contents == ()


async def test_only_sessions_of_one_salt_share(rig: MemoryRig, tokens: list[Token]) -> None:
    """Neither tokens nor keys lead from one salt to another."""
    await rig.create("a", salt=b"user 1")
    await rig.append("a", tokens, is_durable=True)
    for salt, count in ((b"user 1", 256), (b"user 2", 0), (b"", 0)):
        name = f"adopter-{salt.decode().replace(' ', '-')}x"
        await rig.create(name, salt=salt)
        assert await found(rig, tokens, salt=salt) == count
        assert await rig.adopt(name, tokens) == count
    source = rig.cache.ledger.find(TENANT, "a")
    keyed = rig.cache.ledger.keyed
    keys = [key for segment in source.segments for key in keyed.keys_of(segment, segment.row_count)]
    layout = ranges_of(STREAMS)
    assert (await rig.cache.prefixes.match(TENANT, MODEL.model_id, layout, keys)).token_count == 256
    await rig.create("by-keys", salt=b"user 2")
    adopted = await rig.cache.prefixes.adopt(TENANT, "by-keys", FINGERPRINT, None, keys)
    assert adopted.token_count == 0, "what is appended behind them would be of another salt than they are"


async def test_a_session_has_a_bounded_number_of_contents(rig: MemoryRig, tokens: list[Token]) -> None:
    """More are refused before anything is reserved."""
    await rig.create("a")
    each = [Content(i, i + 1, bytes([i % 2]) * 32) for i in range(200)]
    await rig.append("a", tokens[:200], contents=each)
    more = [Content(200 + i, 201 + i, bytes([i % 2]) * 32) for i in range(CONTENTS_LIMIT - 199)]
    with pytest.raises(InvalidArgument, match=f"would have {CONTENTS_LIMIT + 1}"):
        await rig.append("a", tokens[200:], contents=more)
    assert rig.token_count("a") == 200
    assert not rig.cache.appends.reservation_count


async def leased(rig: MemoryRig, tokens: list[Token], ttl_ns: int = SECOND_NS) -> TokenLease | None:
    """The lease of a match."""
    layout = ranges_of(STREAMS)
    match = await rig.cache.prefixes.match(
        rig.tenant, MODEL.model_id, layout, rows_of(tokens, TOKENS), lease_ttl_ns=ttl_ns
    )
    return match.lease


async def used(rig: MemoryRig, token: bytes, tenant: str = TENANT) -> Lease:
    """A lease by a token, as a connection takes it."""
    leases = rig.cache.leases
    return await leases.again(lambda: rig.cache.tokens.prefix(tenant, token, FINGERPRINT), tenant, 7)


async def test_a_match_holds_what_it_found_for_all_of_the_tenant(rig: MemoryRig, tokens: list[Token]) -> None:
    """Whatever becomes of the session; each use is a lease that outlives the token."""
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    await rig.demote("a")
    found = await leased(rig, [*tokens[:200], *Writer(2).make(10)])
    assert found is not None
    assert rig.cache.leases.pins.used_bytes == 3 * SLOT_BYTES
    await rig.delete("a")
    lease = await used(rig, found.token)
    assert rig.leased(lease) == expected(tokens[:192])
    for tenant in ("other", TENANT):
        with pytest.raises(LeaseNotFound):
            await used(rig, found.token if tenant == "other" else bytes(16), tenant)
    with pytest.raises(ModelFingerprintMismatch):
        rig.cache.tokens.prefix(TENANT, found.token, bytes(32))
    with pytest.raises(InvalidArgument, match="is that of a prefix: AcquireLease takes it"):
        rig.cache.blocks.leased(TENANT, found.token)
    rig.clock.advance(seconds=1)
    with pytest.raises(LeaseNotFound):
        await used(rig, found.token)
    rig.cache.leases.end_overdue()
    rig.cache.tokens.forget_ended()
    assert (len(rig.cache.tokens), rig.cache.leases.lease_count) == (0, 1)
    assert rig.leased(lease) == expected(tokens[:192])
    rig.cache.leases.release(lease.lease_id)
    assert rig.cache.leases.pins.used_bytes == 0
    await rig.check()


async def test_tokens_that_ended_are_forgotten_though_an_older_one_lives(
    rig: MemoryRig, tokens: list[Token]
) -> None:
    """As many as there are leases at most, whoever asks how often and releases nothing."""
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    oldest = await leased(rig, tokens, 300 * SECOND_NS)
    for _ in range(50):
        assert await leased(rig, tokens, 1)
        rig.clock.advance(ns=1)
        rig.cache.leases.end_overdue()
        rig.cache.tokens.forget_ended()
    assert oldest is not None
    assert len(rig.cache.tokens) == 1
    rig.cache.tokens.release(TENANT, oldest.token)
    assert await leased(rig, Writer(3).make(64)) is None
    await rig.check()


async def test_what_changes_before_it_is_held_is_not_held(
    tmp_path: Path, tokens: list[Token], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that was cut between the look and the lease has other tokens at these places."""
    rig = MemoryRig(tmp_path)
    await rig.open()
    await rig.create("a")
    await rig.append("a", tokens, is_durable=True)
    acquire, cuts = rig.cache.leases.acquire, [(0, 1)]

    async def late(request: ReadRequest) -> Lease:
        if cuts:
            await rig.truncate("a", cuts.pop())
        return await acquire(request)

    monkeypatch.setattr(rig.cache.leases, "acquire", late)
    assert await leased(rig, tokens) is None
    assert rig.cache.leases.lease_count == 0
    await rig.check()
    await rig.close()
