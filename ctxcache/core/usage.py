"""Usage: how many bytes each tenant has where, counted as its segments come, move and go.

A segment counts once for its tenant however many forks list it, from the moment it has a slot, reserved
ones too. Worst case: an entry per tenant there ever was, and as many as callers' credentials name.
"""

from collections.abc import Iterable

from ctxcache.core.placement.shares import Shares


class Use:
    """Bytes of slots that one tenant has. Owned by the event loop.

    `ssd_bytes` count what is on its way there; `kept_bytes` count each segment once, wherever it lies.
    """

    __slots__ = ("_tenant", "_usage", "dram_bytes", "kept_bytes", "ssd_bytes")

    def __init__(self, usage: "Usage | None" = None, tenant: str = "") -> None:
        """`usage`: where the tenants that have something are listed."""
        self._usage, self._tenant = usage, tenant
        self.dram_bytes = self.ssd_bytes = self.kept_bytes = 0

    def add(self, dram_bytes: int, ssd_bytes: int, kept_bytes: int) -> None:
        """So much came; negative when it went."""
        self.dram_bytes += dram_bytes
        self.ssd_bytes += ssd_bytes
        self.kept_bytes += kept_bytes
        if self._usage is not None:
            for listed, size_bytes in (
                (self._usage.in_dram, self.dram_bytes),
                (self._usage.on_ssd, self.ssd_bytes),
                (self._usage.kept, self.kept_bytes),
            ):
                if size_bytes:
                    listed[self._tenant] = size_bytes
                else:
                    listed.pop(self._tenant, None)


class Usage:
    """The use of every tenant. Owned by the event loop.

    `in_dram`, `on_ssd` and `kept`: bytes of each tenant that has any there. To be looked at, not changed.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self.in_dram: dict[str, int] = {}
        self.on_ssd: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self._tenants: dict[str, Use] = {}

    def of(self, tenant: str) -> Use:
        """A tenant's use, to be counted on."""
        use = self._tenants.get(tenant)
        if use is None:
            use = self._tenants[tenant] = Use(self, tenant)
        return use

    def tenants(self) -> Iterable[str]:
        """Those that had anything since the start, or have a configured share, by name."""
        return sorted({*self._tenants, *self.shares.by_tenant})
