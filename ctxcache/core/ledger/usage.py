"""Usage: how many bytes each tenant has in each tier, and the quotas that follow from it.

A segment counts once however many forks list it, from the moment it has a slot, reserved segments too. Quotas
decide by that whose sessions make room for whom. Where tenants are not told apart every answer of the quotas
is None: the placement alone decides. Shares of memory leave out the room that is kept free. Knows bytes and
tenants, and no segment. Worst case: an entry per tenant there ever was, as many as callers' credentials name,
and a look at each that has something.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ctxcache.core.placement.shares import Shares
from ctxcache.errors import CapacityExceeded


# Bytes of one tenant, by the question that they answer:
#
#     memory_bytes    slots in memory, reserved ones too          whose segments leave memory
#     durable_bytes   slots below, and those staged for a flush   whose sessions leave the store
#     kept_bytes      each segment once, times its copies         whether the tenant is within its limit
#
# `kept_bytes` counts rows before they are written, for a session over its tenant's limit must be refused
# while it is still in memory, not when its flush finds no room.
class TenantUse:
    """Bytes of slots that one tenant has. Owned by the ledger.

    `durable_bytes` include slots of a flush under way. `kept_bytes` count each segment once, wherever it
    lies.
    """

    __slots__ = ("_tenant", "_usage", "durable_bytes", "kept_bytes", "memory_bytes")

    def __init__(self, usage: "Usage", tenant: str) -> None:
        self._usage, self._tenant = usage, tenant
        self.memory_bytes = self.durable_bytes = self.kept_bytes = 0

    def add(self, memory_bytes: int, durable_bytes: int, kept_bytes: int) -> None:
        """Add so many bytes; negative when they go."""
        self.memory_bytes += memory_bytes
        self.durable_bytes += durable_bytes
        self.kept_bytes += kept_bytes
        for listed, size_bytes in (
            (self._usage.in_memory, self.memory_bytes),
            (self._usage.below, self.durable_bytes),
            (self._usage.kept, self.kept_bytes),
        ):
            # Tenants without bytes are not listed: the quotas walk these dicts at each look for room.
            if size_bytes:
                listed[self._tenant] = size_bytes
            else:
                listed.pop(self._tenant, None)


class Usage:
    """The use of every tenant. Owned by the ledger.

    `in_memory`, `below` and `kept`: bytes of each tenant that has any there. Callers only read them.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.in_memory: dict[str, int] = {}
        self.below: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self._tenants: dict[str, TenantUse] = {}

    def of(self, tenant: str) -> TenantUse:
        """A tenant's use, which the caller may change."""
        use = self._tenants.get(tenant)
        if use is None:
            use = self._tenants[tenant] = TenantUse(self, tenant)
        return use

    def tenants(self) -> Iterable[str]:
        """The tenants that had anything since the start, or have a configured share, by name."""
        return sorted({*self._tenants, *self.shares.by_tenant})


class Own(NamedTuple):
    """The bytes guaranteed to a tenant, and the most it may keep; None: what the tier below has."""

    memory_bytes: int
    durable_bytes: int
    limit_bytes: int | None


class Quotas:
    """The tenants' shares of both tiers. Owned by the ledger."""

    def __init__(self, usage: Usage, below_bytes: int, filled_bytes: Callable[[], int]) -> None:
        """`filled_bytes`: the bytes that segments may take of memory while the wanted room stays free."""
        self._usage = usage
        self._shares = usage.shares
        self._below_bytes = below_bytes
        self._filled_bytes = filled_bytes

    def below(self, tenant: str, size_bytes: int) -> Sequence[str] | None:
        """The accounts whose sessions leave the tier below for this tenant, in the order of asking."""
        if not self._shares:
            return None
        return self._shares.whose(tenant, size_bytes, self._usage.below, self._below_bytes)

    def in_memory(self, tenant: str | None, size_bytes: int) -> Sequence[str] | None:
        """The tenants whose segments leave memory for a segment of this tenant.

        None: to keep some room free.
        """
        if not self._shares:
            return None
        return self._shares.whose(tenant, size_bytes, self._usage.in_memory, self._filled_bytes())

    def own(self, tenant: str) -> Own:
        """The bytes of the tenant, as long as the present tenants stay."""
        if not self._shares:
            return Own(0, 0, None)
        guaranteed_bytes = self._shares.guaranteed_bytes
        return Own(
            guaranteed_bytes(tenant, self._usage.in_memory, self._filled_bytes()),
            guaranteed_bytes(tenant, self._usage.below, self._below_bytes),
            self._limit_bytes(tenant),
        )

    def over_share(self, tenant: str) -> str | None:
        """The tenant if it has more below, or on its way there, than its guarantee."""
        if not self._shares:
            return None
        guaranteed_bytes = self._shares.guaranteed_bytes(tenant, self._usage.kept, self._below_bytes)
        return tenant if self._usage.of(tenant).kept_bytes > guaranteed_bytes else None

    def excess_bytes(self, tenant: str, size_bytes: int) -> int:
        """How far so many bytes more would take the tenant over its limit, with all of it written."""
        limit_bytes = self._limit_bytes(tenant)
        return 0 if limit_bytes is None else self._usage.of(tenant).kept_bytes + size_bytes - limit_bytes

    def is_limited(self, tenant: str) -> bool:
        """Whether anything but the capacity bounds what the tenant may have."""
        return tenant in self._shares.by_tenant and self._limit_bytes(tenant) is not None

    def check(self, tenant: str, needed_bytes: int) -> None:
        """Raise CapacityExceeded unless the tenant may have so much for one session."""
        limit_bytes = self._limit_bytes(tenant)
        if limit_bytes is not None and needed_bytes > limit_bytes:
            raise self.refusal(tenant, needed_bytes)

    def refusal(self, tenant: str, needed_bytes: int) -> CapacityExceeded:
        """The error for a tenant at its limit with nothing that may go."""
        limit_bytes = self._limit_bytes(tenant) or 0
        return CapacityExceeded(
            f"quota of tenant {tenant}: {needed_bytes} B needed of {limit_bytes} B on SSD, and none of its"
            " sessions may go",
            tier="SSD",
            tenant=tenant,
            needed_bytes=needed_bytes,
            limit_bytes=limit_bytes,
            free_bytes=max(limit_bytes - self._usage.of(tenant).kept_bytes, 0),
        )

    def _limit_bytes(self, tenant: str) -> int | None:
        return self._shares.limit_bytes(tenant, self._below_bytes)
