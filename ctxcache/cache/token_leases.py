"""Token leases: leases that any connection of a tenant may use by their token.

a prefix is found, blocks are looked up ──► held, named by a token ──► released, or over with its time
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ctxcache.cache.leases import LEASE_LIFETIME_NS, Lease, Leases
from ctxcache.cache.state import State
from ctxcache.core.ledger.segment import Segment
from ctxcache.errors import InvalidArgument, LeaseNotFound, ModelFingerprintMismatch

TOKEN_BYTES = 16
TOKENS_DRAWN = 64
"""Tokens that are drawn together."""
TOKEN_TTL_LIMIT_NS = LEASE_LIFETIME_NS
"""The longest time for which a token holds rows."""


class Held(NamedTuple):
    """A block, and the lease that holds it. The lease may hold other blocks as well."""

    lease: Lease
    segment: Segment


@dataclass(frozen=True, slots=True, eq=False)
class TokenLease:
    """The leases behind a token.

    A prefix has one lease. Blocks have one for all that were in DRAM, and others. `blocks`: in the order of
    the keys, None for blocks that are not there. None for a prefix.
    """

    token: bytes
    tenant: str
    leases: tuple[Lease, ...]
    blocks: tuple[Held | None, ...] | None
    deadline_ns: int
    ttl_ns: int
    """How long the leases last from when they were named."""


class TokenLeases:
    """Leases that any connection of the tenant may use by their token. Owned by the event loop."""

    def __init__(self, state: State, leases: Leases) -> None:
        self._state, self._leases = state, leases
        self._held: dict[bytes, TokenLease] = {}
        self._unused: list[bytes] = []
        """Tokens that were drawn."""

    def __len__(self) -> int:
        """How many tokens are known."""
        return len(self._held)

    def hold_prefix(self, tenant: str, lease: Lease, *, ttl_ns: int) -> TokenLease:
        """Name the lease of a prefix by a new token for so long."""
        return self._hold(tenant, (lease,), None, ttl_ns)

    def hold(self, tenant: str, blocks: Sequence[Held | None], ttl_ns: int) -> TokenLease:
        """Name held blocks by a new token for so long. A token without leases is forgotten."""
        leases = dict.fromkeys([block.lease for block in blocks if block is not None])
        return self._hold(tenant, tuple(leases), tuple(blocks), ttl_ns)

    def _hold(
        self, tenant: str, leases: tuple[Lease, ...], blocks: tuple[Held | None, ...] | None, ttl_ns: int
    ) -> TokenLease:
        # A token's time is bounded like a lease's: it must not hold rows for ever.
        ttl_ns = min(ttl_ns, TOKEN_TTL_LIMIT_NS)
        deadline_ns = self._state.clock.monotonic_ns() + ttl_ns
        for lease in leases:
            lease.deadline_ns = deadline_ns
        named = TokenLease(self._draw(), tenant, leases, blocks, deadline_ns, ttl_ns)
        # A token without leases would only fill the table.
        if leases:
            self._held[named.token] = named
        return named

    def _draw(self) -> bytes:
        if not self._unused:
            # Tokens are drawn many at a time: each draw gives up the interpreter, which another thread may
            # keep for a while.
            drawn = secrets.token_bytes(TOKENS_DRAWN * TOKEN_BYTES)
            self._unused = [drawn[begin : begin + TOKEN_BYTES] for begin in range(0, len(drawn), TOKEN_BYTES)]
        return self._unused.pop()

    def find(self, tenant: str, token: bytes) -> TokenLease:
        """The leases behind a token of the tenant, for any of its connections. Raises LeaseNotFound."""
        token_lease = self._held.get(token)
        # Unknown, ended and foreign tokens have one answer, which tells a tenant nothing of another.
        if token_lease is None or token_lease.tenant != tenant or not self._is_held(token_lease):
            raise LeaseNotFound(lease_id=token.hex())
        return token_lease

    def prefix(self, tenant: str, token: bytes, fingerprint: bytes) -> Lease:
        """The rows of a prefix that a token names.

        Raises LeaseNotFound, InvalidArgument (it names blocks), ModelFingerprintMismatch.
        """
        token_lease = self.find(tenant, token)
        if token_lease.blocks is not None:
            raise InvalidArgument(field="token", problem="is that of blocks: LeaseBlocks takes it")
        [lease] = token_lease.leases
        if lease.view.model_fingerprint != fingerprint:
            raise ModelFingerprintMismatch(
                subject="the leased prefix",
                model=f"models/{lease.view.model_id}",
                wanted="the caller's model",
                actual=lease.view.model_fingerprint.hex(),
                expected=fingerprint.hex(),
            )
        return lease

    def is_held(self, token: bytes) -> bool:
        """Whether a token's leases have not ended."""
        found = self._held.get(token)
        return found is not None and self._is_held(found)

    def release(self, tenant: str, token: bytes) -> None:
        """End a token's leases. Raises LeaseNotFound."""
        self.let_go(self.find(tenant, token))

    def let_go(self, token_lease: TokenLease) -> None:
        """End a token's leases, if they have not ended."""
        # The token goes first: `release` may find that a lease ended by itself.
        self._held.pop(token_lease.token, None)
        self._leases.let_go(token_lease.leases)

    def forget_ended(self) -> None:
        """Forget tokens whose leases have ended by themselves."""
        for found in [one for one in self._held.values() if not self._is_held(one)]:
            self.let_go(found)

    def _is_held(self, found: TokenLease) -> bool:
        is_in_time = self._state.clock.monotonic_ns() < found.deadline_ns
        return is_in_time and all(self._leases.is_held(one.lease_id) for one in found.leases)
