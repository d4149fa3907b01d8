"""Tenant shares: whose sessions make room for whom. Decisions over counted bytes; nothing is scanned or kept.

A guaranteed share is not touched by another's need. What is guaranteed to nobody, or not used by whom it
is guaranteed to, is anyone's, until its owner comes. Tenants without a share of their own are one account:
among them the placement policy decides alone. Worst case: all accounts are looked at, which are as many as
shares were configured, and one.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

REST = ""
"""The account of all tenants that have no share of their own; no tenant's name."""
ROUNDING = 1e-9
"""How far a sum of shares may be above 1 because of how fractions are written."""


@dataclass(frozen=True, slots=True)
class Share:
    """One tenant's, of a tier's bytes: at least `guaranteed` when it needs them, never more than `limit`."""

    guaranteed: float = 0.0
    limit: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.guaranteed <= self.limit <= 1 or not self.limit:
            raise ValueError(
                f"a share of {self.guaranteed:g} within a limit of {self.limit:g}: "
                "0 <= share <= limit <= 1 must hold, and the limit be above 0"
            )


class Shares:
    """The shares of all tenants that have one. Whose they are never changes."""

    def __init__(self, by_tenant: Mapping[str, Share] | None = None) -> None:
        """Raises ValueError when more than everything is guaranteed, or the tenant has no name."""
        self.by_tenant = _checked(by_tenant or {})

    def __bool__(self) -> bool:
        return bool(self.by_tenant)

    def become(self, by_tenant: Mapping[str, Share]) -> None:
        """Change how large they are. Raises ValueError, and changes nothing, as above, or where they are others' too."""
        changed = _checked(by_tenant)
        if others := changed.keys() ^ self.by_tenant.keys():
            raise ValueError(f"whether {min(others)} has a share of its own is settled at the start")
        self.by_tenant = {name: changed[name] for name in self.by_tenant}

    @property
    def accounts(self) -> Sequence[str]:
        """Those that have a share, in the order given, and the rest."""
        return (*self.by_tenant, REST)

    def account(self, tenant: str) -> str:
        """Where a tenant's bytes are counted."""
        return tenant if tenant in self.by_tenant else REST

    def guaranteed_bytes(self, account: str, capacity_bytes: int) -> int:
        """What no other's need touches; nothing of what the rest has."""
        share = self.by_tenant.get(account)
        return int(share.guaranteed * capacity_bytes) if share else 0

    def limit_bytes(self, account: str, capacity_bytes: int) -> int | None:
        """The most that it may have; None where the capacity alone bounds it."""
        share = self.by_tenant.get(account)
        return None if share is None or share.limit == 1 else int(share.limit * capacity_bytes)

    def own_bytes(self, account: str, capacity_bytes: int) -> int:
        """Its part of a budget that is divided: what is guaranteed to it; to the rest, what is to nobody."""
        if account != REST:
            return self.guaranteed_bytes(account, capacity_bytes)
        return capacity_bytes - sum(self.guaranteed_bytes(name, capacity_bytes) for name in self.by_tenant)

    def whose(
        self, needing: str | None, needed_bytes: int, used_bytes: Mapping[str, int], capacity_bytes: int
    ) -> Sequence[str]:
        """The accounts whose sessions make room, in the order in which they are to be asked.

        Whoever is furthest above its share comes first, what it needs counted in, so that all who want more
        than is guaranteed to them come to have as much more as each other. Nobody at or below its share is
        asked for another; for its own need an account gives up its own, at the last. `needing` None: room
        is made for nobody in particular.
        """
        over = {
            account: used_bytes.get(account, 0)
            + (needed_bytes if account == needing else 0)
            - self.guaranteed_bytes(account, capacity_bytes)
            for account in self.accounts
        }
        asked = [account for account in over if over[account] > 0]
        asked.sort(key=lambda account: (-over[account], account != needing, account))
        if needing is not None and needing not in asked:
            asked.append(needing)
        return asked


def _checked(by_tenant: Mapping[str, Share]) -> dict[str, Share]:
    if REST in by_tenant:
        raise ValueError("a share for a tenant without a name")
    total = math.fsum(share.guaranteed for share in by_tenant.values())
    if total > 1 + ROUNDING:
        raise ValueError(f"{total:g} of everything is guaranteed")
    return dict(by_tenant)


NO_SHARES = Shares()
"""One account for all, in which the placement policy decides alone."""
