"""Expiry is final: no access brings a session back whose time has come, whatever the caller holds of it."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
from cache_rig import FINGERPRINT, MODEL, STREAMS, TENANT, MemoryRig, Token, Writer, rows_of

from ctxcache.cache.leases import SECOND_NS
from ctxcache.cache.reservations import Reservation
from ctxcache.core.ledger.session import Expiration
from ctxcache.errors import CacheError, SessionNotFound
from ctxcache.format.streams import TOKENS, ranges_of

TTL_S = 10


@dataclass
class Held:
    """What clients got of session `a` before its time came."""

    rig: MemoryRig
    tokens: list[Token]
    token: bytes
    reservation: Reservation

    async def lease_again(self) -> None:
        """Take one more lease by the token of a match."""
        leases, tokens = self.rig.cache.leases, self.rig.cache.tokens
        lease = await leases.again(lambda: tokens.prefix(TENANT, self.token, FINGERPRINT), TENANT, 7)
        leases.release(lease.lease_id)

    async def extend(self) -> None:
        """Ask for more room in an open reservation."""
        await self.rig.cache.appends.extend(self.reservation, 64)

    async def commit(self) -> None:
        """Commit what an open reservation has."""
        self.rig.place(self.reservation, 256, self.tokens[:64])
        await self.rig.cache.appends.commit(self.reservation, 320, is_durable=False, keep_open=True)

    async def update(self) -> None:
        """Ask for a longer life and a second copy."""
        await self.rig.cache.sessions.update(
            TENANT, "a", expiration=Expiration(3600 * SECOND_NS), is_pinned=True, copies=2
        )

    async def match(self) -> None:
        """Look the prefix up, and hold it."""
        rows = rows_of(self.tokens, TOKENS)
        await self.rig.cache.prefixes.match(
            TENANT, MODEL.model_id, ranges_of(STREAMS), rows, lease_ttl_ns=SECOND_NS
        )

    async def adopt(self) -> None:
        """Begin another session with its prefix."""
        await self.rig.create("b")
        await self.rig.adopt("b", self.tokens)

    async def acquire(self) -> None:
        """Read it."""
        await self.rig.acquire("a")

    async def fork(self) -> None:
        """Fork it."""
        await self.rig.fork("a", "c")

    async def cut(self) -> None:
        """Drop its last tokens."""
        await self.rig.truncate("a", (64, 256))

    async def mark_written(self) -> None:
        """Say that reserved rows are final, and renew the reservation."""
        self.rig.place(self.reservation, 256, self.tokens[:64])
        self.rig.cache.appends.mark_written(self.reservation, 320)
        self.rig.cache.appends.renew(self.reservation)


ACTS: list[Callable[[Held], Awaitable[None]]] = [
    Held.lease_again, Held.extend, Held.commit, Held.update, Held.match, Held.adopt,
    Held.acquire, Held.fork, Held.cut, Held.mark_written,
]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
async def test_no_access_brings_back_a_session_whose_time_has_come(
    rig: MemoryRig, act: Callable[[Held], Awaitable[None]]
) -> None:
    """It stays gone for everybody, before upkeep has removed it and after that."""
    tokens = Writer(1).make(256)
    await rig.create("a", ttl_s=TTL_S)
    await rig.append("a", tokens, is_durable=True)
    match = await rig.cache.prefixes.match(
        TENANT, MODEL.model_id, ranges_of(STREAMS), rows_of(tokens, TOKENS), lease_ttl_ns=300 * SECOND_NS
    )
    assert match.lease is not None
    reservation = await rig.reserve("a", 64)
    rig.clock.advance(seconds=TTL_S)
    with suppress(CacheError):
        await act(Held(rig, tokens, match.lease.token, reservation))

    with pytest.raises(SessionNotFound):
        rig.token_count("a")
    rig.cache.appends.release(reservation)
    await rig.cache.sessions.expire_due()
    assert rig.cache.state.counters.expired_session_count == 1
    await rig.check()
