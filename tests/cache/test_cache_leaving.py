"""A session that has begun to leave DRAM goes on: half a session hastens no turn that waits for all of it."""

from dataclasses import dataclass, field

import pytest
from cache_rig import SEGMENT_TOKENS, TENANT, MemoryRig, Writer

from ctxcache.core.placement.order import Key


@dataclass
class Order:
    """Ranks of sessions that a test sets; whoever is not named ranks high."""

    rig: MemoryRig
    ranks: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rig.cache.placement.policy.rank = self.rank  # type: ignore[method-assign]

    def rank(self, uid: bytes) -> Key | None:
        """See Ranked."""
        return (self.ranks.get(uid.decode().partition("\0")[2], 9),)

    def set(self, **ranks: int) -> None:
        """Let these have other ranks."""
        self.ranks |= ranks
        for session_id in ranks:
            self.rig.cache.placement.policy._fallen(f"{TENANT}\0{session_id}".encode())


@pytest.fixture
async def order(rig: MemoryRig) -> Order:
    """Session `a` leaves before `b`; they fill the arena with three segments each."""
    order, writer = Order(rig), Writer(1)
    order.set(a=1, b=2)
    for session_id in ("a", "b"):
        await rig.create(session_id)
        await rig.append(session_id, writer.make(3 * SEGMENT_TOKENS))
        await rig.flush(session_id)
    return order


async def _fill(rig: MemoryRig, session_id: str, segment_count: int) -> None:
    await rig.create(session_id)
    await rig.append(session_id, Writer(2).make(segment_count * SEGMENT_TOKENS))
    await rig.flush(session_id)


def _in_dram(rig: MemoryRig, session_id: str) -> int:
    return sum(s.memory is not None for s in rig.cache.ledger.find(TENANT, session_id).segments)


async def test_what_began_to_leave_goes_before_what_is_worth_less_by_now(
    rig: MemoryRig, order: Order
) -> None:
    """`a` lost a segment; though it ranks above `b` then, its others go before any of `b`."""
    await _fill(rig, "c", 1)
    order.set(a=5)
    await _fill(rig, "d", 2)

    assert (_in_dram(rig, "a"), _in_dram(rig, "b")) == (0, 3)


async def test_what_is_used_again_is_as_any_other(rig: MemoryRig, order: Order) -> None:
    """Read in full since, `a` is no more one that leaves."""
    await _fill(rig, "c", 1)
    await rig.delete("c")
    rig.cache.leases.release((await rig.acquire("a")).lease_id)
    order.set(a=5)
    await _fill(rig, "d", 2)

    assert (_in_dram(rig, "a"), _in_dram(rig, "b")) == (3, 1)
