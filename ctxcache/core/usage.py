"""Usage: how many bytes each tenant has where, counted as its segments come, move and go.

A segment counts once for its tenant however many forks list it, from the moment it has a slot, reserved
ones too. Tenants without a share of their own are counted together besides. Worst case: an entry per
tenant there ever was, and as many as callers' credentials name.
"""

from collections.abc import Iterable, Mapping

from ctxcache.core.placement.shares import Shares


class Use:
    """Bytes of slots that one tenant, or one account of several, has. Owned by the event loop.

    `ssd_bytes` count what is on its way there; `kept_bytes` count each segment once, wherever it lies.
    """

    __slots__ = ("_account", "dram_bytes", "kept_bytes", "ssd_bytes")

    def __init__(self, account: "Use | None" = None) -> None:
        """`account`: what counts the same bytes, and others'."""
        self._account = account
        self.dram_bytes = self.ssd_bytes = self.kept_bytes = 0

    def add(self, dram_bytes: int, ssd_bytes: int, kept_bytes: int) -> None:
        """So much came; negative when it went."""
        self.dram_bytes += dram_bytes
        self.ssd_bytes += ssd_bytes
        self.kept_bytes += kept_bytes
        if self._account is not None:
            self._account.add(dram_bytes, ssd_bytes, kept_bytes)


class Usage:
    """The use of every tenant, and of every account. Owned by the event loop."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._accounts = {account: Use() for account in shares.accounts}
        self._tenants: dict[str, Use] = {}

    def of(self, tenant: str) -> Use:
        """A tenant's use, to be counted on."""
        use = self._tenants.get(tenant)
        if use is None:
            account = self._accounts[self.shares.account(tenant)] if self.shares else None
            use = self._tenants[tenant] = Use(account)
        return use

    def tenants(self) -> Iterable[str]:
        """Those that had anything since the start, or have a share, by name."""
        return sorted({*self._tenants, *self.shares.by_tenant})

    def by_account(self) -> Mapping[str, Use]:
        """The use of each account, where there are shares."""
        return self._accounts
