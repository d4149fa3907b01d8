"""Usage: how many bytes each tenant has where, counted as its segments come, move and go.

A segment counts once for its tenant however many forks list it, from the moment it has a slot, reserved
segments too. Worst case: an entry per tenant there ever was, and as many as callers' credentials name.
"""

from collections.abc import Iterable

from ctxcache.core.placement.shares import Shares


class TenantUse:
    """Bytes of slots that one tenant has. Owned by the ledger.

    `durable_bytes` count what is on its way below; `kept_bytes` count each segment once, wherever it lies.
    """

    __slots__ = ("_tenant", "_usage", "durable_bytes", "kept_bytes", "memory_bytes")

    def __init__(self, usage: "Usage", tenant: str) -> None:
        self._usage, self._tenant = usage, tenant
        self.memory_bytes = self.durable_bytes = self.kept_bytes = 0

    def add(self, memory_bytes: int, durable_bytes: int, kept_bytes: int) -> None:
        """So much came; negative when it went."""
        self.memory_bytes += memory_bytes
        self.durable_bytes += durable_bytes
        self.kept_bytes += kept_bytes
        for listed, size_bytes in (
            (self._usage.in_memory, self.memory_bytes),
            (self._usage.below, self.durable_bytes),
            (self._usage.kept, self.kept_bytes),
        ):
            if size_bytes:
                listed[self._tenant] = size_bytes
            else:
                listed.pop(self._tenant, None)


class Usage:
    """The use of every tenant. Owned by the ledger.

    `in_memory`, `below` and `kept`: bytes of each tenant that has any there. To be looked at, not changed.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.in_memory: dict[str, int] = {}
        self.below: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self._tenants: dict[str, TenantUse] = {}

    def of(self, tenant: str) -> TenantUse:
        """A tenant's use, to be counted on."""
        use = self._tenants.get(tenant)
        if use is None:
            use = self._tenants[tenant] = TenantUse(self, tenant)
        return use

    def tenants(self) -> Iterable[str]:
        """Those that had anything since the start, or have a configured share, by name."""
        return sorted({*self._tenants, *self.shares.by_tenant})
