"""Tenant shares: whose sessions make room for whom. Decisions over counted bytes; nothing is scanned or kept.

A guaranteed share is not touched by another's need. A tenant with a configured share is guaranteed that. The
tenants without one are guaranteed equal parts of what is left, as many as have something or need room now.
A share that is not in use is anyone's, until its owner comes: the tenant furthest above its share gives way
first. Worst case: one look at each tenant that has something.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EVERYONE = ""
"""The one account of all where tenants are not told apart; no tenant's name."""
ROUNDING = 1e-9
"""How far a sum of shares may be above 1 because of how fractions are written."""


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's part of a tier: at least `guaranteed` when the tenant needs it, never more than `limit`."""

    guaranteed: float = 0.0
    limit: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.guaranteed <= self.limit <= 1 or not self.limit:
            raise ValueError(
                f"a share of {self.guaranteed:g} within a limit of {self.limit:g}: "
                "0 <= share <= limit <= 1 must hold, and the limit be above 0"
            )


class Shares:
    """The shares of all tenants. False where tenants are not told apart: then all have one account."""

    def __init__(
        self, by_tenant: Mapping[str, Share] | None = None, *, are_tenants_known: bool = False
    ) -> None:
        """Configured shares tell tenants apart too.

        Raises ValueError when more than everything is guaranteed, or the tenant has no name.
        """
        self.by_tenant = _checked(by_tenant or {})
        self._are_divided = are_tenants_known or bool(self.by_tenant)

    def __bool__(self) -> bool:
        return self._are_divided

    def become(self, by_tenant: Mapping[str, Share]) -> None:
        """Change the configured shares.

        Raises ValueError where the constructor would, or where tenants are not told apart. Nothing has
        changed then.
        """
        changed = _checked(by_tenant)
        if changed and not self._are_divided:
            raise ValueError("tenants are not told apart; that is settled at the start")
        self.by_tenant = changed

    def account(self, tenant: str) -> str:
        """Where a tenant's bytes are counted."""
        return tenant if self._are_divided else EVERYONE

    def guaranteed_bytes(self, account: str, used_bytes: Mapping[str, int], capacity_bytes: int) -> int:
        """The account's bytes that no other account's need touches while these accounts hold bytes."""
        if not self._are_divided:
            return capacity_bytes
        share = self.by_tenant.get(account)
        # The guarantee holds although others have more for now: they give it back when it is asked for.
        if share is not None:
            return int(share.guaranteed * capacity_bytes)
        return self._equal_bytes(used_bytes, account, capacity_bytes)

    def limit_bytes(self, account: str, capacity_bytes: int) -> int | None:
        """The most that the account may have; None where the capacity alone bounds it."""
        share = self.by_tenant.get(account)
        return None if share is None or share.limit == 1 else int(share.limit * capacity_bytes)

    def whose(
        self, needing: str | None, needed_bytes: int, used_bytes: Mapping[str, int], capacity_bytes: int
    ) -> Sequence[str]:
        """The accounts whose sessions make room, in the order in which they are to be asked.

        The account furthest above its share comes first, its need counted in. So all that want more than is
        guaranteed to them come to have as much more as each other. An account at or below its share is not
        asked for another; for its own need an account gives up its own, at the last. `needing` None: room
        is made for nobody in particular. `used_bytes` are of those that have something, and of no others.
        """
        # With 100 bytes, "a" configured to 40, and b, c, d present: equal parts of the other 60 are 20 each.
        #
        #     used       a 50   b 30   c 15   d 5          needing c, 10 more
        #     over       a +10  b +10  c +5                ► asked in order: a, b, c; d is within its share
        equal_bytes = self._equal_bytes(used_bytes, needing, capacity_bytes)
        over = {account: size - equal_bytes for account, size in used_bytes.items() if size > equal_bytes}
        # Those whose sums are other ones are few.
        others = self.by_tenant.keys() | ({needing} if needing is not None else set())
        for account in others & used_bytes.keys():
            share = self.by_tenant.get(account)
            own_bytes = equal_bytes if share is None else int(share.guaranteed * capacity_bytes)
            over[account] = used_bytes[account] - own_bytes + (needed_bytes if account == needing else 0)
            if over[account] <= 0:
                del over[account]
        # The needing account comes first of equals: it rather gives up its own.
        asked = sorted(over, key=lambda account: (-over[account], account != needing, account))
        if needing is not None and needing not in over:
            asked.append(needing)
        return asked

    def _equal_bytes(self, used_bytes: Mapping[str, int], besides: str | None, capacity_bytes: int) -> int:
        """The part of each that has no configured share; `used_bytes` are of those that have something."""
        count = len(used_bytes) - sum(name in used_bytes for name in self.by_tenant)
        # One that needs room counts as present, though it has nothing yet.
        if besides is not None and besides not in self.by_tenant and besides not in used_bytes:
            count += 1
        guaranteed_bytes = sum(int(share.guaranteed * capacity_bytes) for share in self.by_tenant.values())
        return max(capacity_bytes - guaranteed_bytes, 0) // max(count, 1)


def _checked(by_tenant: Mapping[str, Share]) -> dict[str, Share]:
    if EVERYONE in by_tenant:
        raise ValueError("a share for a tenant without a name")
    # `fsum`, because ten shares of 0.1 are to be 1.
    total = math.fsum(share.guaranteed for share in by_tenant.values())
    if total > 1 + ROUNDING:
        raise ValueError(f"{total:g} of everything is guaranteed")
    return dict(by_tenant)


NO_SHARES = Shares()
"""One account for all, in which the placement policy decides alone."""
