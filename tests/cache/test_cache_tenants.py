"""Tenants: what each keeps whatever the others do, over real tiers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
from cache_rig import MODEL, SEGMENT_TOKENS, SLOT_BYTES, DiskRig, MemoryRig, Rig, Token, Writer, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.served import RANKED
from ctxcache.core.placement.shares import Share, Shares
from ctxcache.errors import CapacityExceeded

R = TypeVar("R", bound=Rig)
SHARES = Shares({"a": Share(0.5), "b": Share(0.25), "c": Share(0.0, 0.25)})
"""Tenants are guaranteed 16 and 8 of 32 segments on SSD, and c has 8 at most."""
ALL_OF_IT = Shares({"a": Share(0.5), "d": Share(0.5)})
EQUAL = Shares(are_tenants_known=True)
"""No share is configured."""
ANYONE = "x"
"""A tenant without a share."""


def _rig(kind: type[R], directory: Path, ssd_segment_count: int = 32, shares: Shares = SHARES) -> R:
    return kind(directory, arena_segments=16, ssd_segments=(ssd_segment_count,), shares=shares, tenant="a")


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[DiskRig]:
    """A cache of several tenants over files and a database."""
    rig = _rig(DiskRig, tmp_path)
    await rig.open()
    yield rig
    await rig.check()
    await rig.close()


@pytest.fixture
async def divided(tmp_path: Path) -> AsyncIterator[DiskRig]:
    """All of it is guaranteed to two tenants."""
    rig = _rig(DiskRig, tmp_path, shares=ALL_OF_IT)
    await rig.open()
    yield rig
    await rig.check()
    await rig.close()


async def _store(rig: Rig, tenant: str, name: str, segment_count: int, writer: Writer) -> list[Token]:
    """A durable session of that many segments; returns its tokens."""
    rig.tenant = tenant
    await rig.create(name)
    tokens = writer.make(segment_count * SEGMENT_TOKENS)
    await rig.append(name, tokens, is_durable=True)
    return tokens


async def _check_rows(rig: Rig, tenant: str, stored: dict[str, list[Token]]) -> None:
    rig.tenant = tenant
    for name, tokens in stored.items():
        assert await rig.read(name) == expected(tokens)


def _names(rig: Rig, tenant: str) -> set[str]:
    rig.tenant = tenant
    return rig.names()


def _used(rig: Rig, tenant: str) -> tuple[int, int]:
    """Segments in DRAM and on SSD."""
    use = rig.cache.ledger.usage.of(tenant)
    return use.memory_bytes // SLOT_BYTES, use.durable_bytes // SLOT_BYTES


async def _flood(rig: Rig, tenant: str, session_count: int, tag: int, prefix: str = "flood") -> None:
    for number in range(session_count):
        await _store(rig, tenant, f"{prefix}{number}", 2, Writer(tag))


async def test_a_flood_costs_nobody_what_is_guaranteed(shared: DiskRig) -> None:
    """A tenant that fills its share exactly has all of it after another's flood, and reads its bytes."""
    stored = {f"s{i}": await _store(shared, "a", f"s{i}", 4, Writer(i)) for i in range(4)}
    await _flood(shared, "b", 40, tag=9)
    await shared.cache.models.register(ANYONE, MODEL)
    await _flood(shared, ANYONE, 40, tag=10)

    assert _names(shared, "a") == set(stored)
    assert _used(shared, "a")[1] == 16
    await _check_rows(shared, "a", stored)


@pytest.fixture(params=["lru", "value", "look-ahead"])
async def equal(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[DiskRig]:
    """A cache of tenants that nobody configured a share for, by each placement policy."""
    capacities = Capacities(16 * SLOT_BYTES, 32 * SLOT_BYTES)
    rig = _rig(DiskRig, tmp_path, shares=EQUAL)
    rig.make_policy = lambda: RANKED[request.param](capacities)
    await rig.open()
    for tenant in ("b", "c"):
        await rig.cache.models.register(tenant, MODEL)
    yield rig
    await rig.check()
    await rig.close()


async def test_a_flood_costs_nobody_what_is_within_an_equal_share(equal: DiskRig) -> None:
    """With no share configured.

    Ten times the capacity of one tenant, and another within half of SSD loses nothing.
    """
    stored = {f"s{i}": await _store(equal, "a", f"s{i}", 4, Writer(i)) for i in range(4)}
    await _flood(equal, "b", 160, tag=9)

    assert _names(equal, "a") == set(stored)
    assert (_used(equal, "a")[1], _used(equal, "b")[1]) == (16, 16)
    await _check_rows(equal, "a", stored)


async def test_an_equal_share_of_dram_is_not_read_out_of_it(equal: DiskRig) -> None:
    """Half of what is not kept free of DRAM is the tenant's, however much another reads and writes."""
    await _store(equal, "a", "s", 7, Writer(1))
    await _flood(equal, "b", 40, tag=9)
    equal.tenant = "b"
    for _ in range(3):
        for name in sorted(equal.names()):
            await equal.read(name)

    assert _used(equal, "a")[0] == 7


async def test_what_is_borrowed_is_given_back_as_others_come(equal: DiskRig) -> None:
    """Alone a tenant has everything; a second and a third take no more from it than they need."""
    await _flood(equal, "b", 16, tag=9)
    assert _used(equal, "b")[1] == 32

    await _flood(equal, "a", 3, tag=1)
    assert [_used(equal, tenant)[1] for tenant in ("a", "b")] == [6, 26]
    await _flood(equal, "a", 20, tag=2, prefix="more")
    assert [_used(equal, tenant)[1] for tenant in ("a", "b")] == [16, 16]
    await _flood(equal, "c", 20, tag=3)
    assert sorted(_used(equal, tenant)[1] for tenant in ("a", "b", "c")) == [10, 10, 12]


async def test_who_has_more_than_its_share_gives_way(shared: DiskRig) -> None:
    """Room beyond a share goes as soon as its owner needs it, and no more than that."""
    await _flood(shared, "b", 16, tag=9)
    assert _used(shared, "b")[1] == 32

    stored = {f"s{i}": await _store(shared, "a", f"s{i}", 4, Writer(i)) for i in range(4)}
    assert _used(shared, "b")[1] == 16
    assert _names(shared, "a") == set(stored)
    await _check_rows(shared, "a", stored)


async def test_a_restart_knows_who_has_what(shared: DiskRig) -> None:
    """Shares hold as before, over what was written before."""
    stored = {f"s{i}": await _store(shared, "a", f"s{i}", 4, Writer(i)) for i in range(4)}
    await _flood(shared, "b", 4, tag=9)
    before = {tenant: _used(shared, tenant)[1] for tenant in ("a", "b")}
    shared.tenant = "a"
    await shared.restart()
    assert {tenant: _used(shared, tenant)[1] for tenant in ("a", "b")} == before

    await _flood(shared, "b", 20, tag=10, prefix="again")
    assert _names(shared, "a") == set(stored)
    await _check_rows(shared, "a", stored)


async def test_what_forks_share_counts_once(shared: DiskRig) -> None:
    """Ten forks of a session have as much as it has alone."""
    await _store(shared, "a", "source", 4, Writer(1))
    for number in range(10):
        await shared.fork("source", f"fork{number}")
    assert _used(shared, "a") == (4, 4)

    await shared.delete("source")
    assert _used(shared, "a") == (4, 4)
    for number in range(10):
        await shared.delete(f"fork{number}")
    assert _used(shared, "a") == (0, 0)


async def test_a_guaranteed_share_of_dram_is_not_read_out_of_it(shared: DiskRig) -> None:
    """Another's reads, however many, leave what lies in DRAM within the share of what is not kept free."""
    await _store(shared, "a", "s", 7, Writer(1))
    await _flood(shared, "b", 8, tag=9)
    shared.tenant = "b"
    for _ in range(3):
        for name in sorted(shared.names()):
            await shared.read(name)

    assert _used(shared, "a")[0] == 7


async def test_who_has_as_much_as_it_may_gives_up_its_own(shared: DiskRig) -> None:
    """A limit holds while there is room for everybody; the newest stay."""
    await _flood(shared, "c", 10, tag=9)
    assert _names(shared, "c") == {f"flood{number}" for number in range(6, 10)}
    assert _used(shared, "c")[1] == 8


async def test_a_limit_that_nothing_can_be_done_about_is_named(shared: DiskRig) -> None:
    """With everything leased the next is refused, naming the quota; once let go of, it goes through."""
    for number in range(4):
        await _store(shared, "c", f"s{number}", 2, Writer(number))
    leases = [await shared.acquire(f"s{number}") for number in range(4)]
    await shared.create("more")
    with pytest.raises(CapacityExceeded, match="quota of tenant c") as raised:
        await shared.append("more", Writer(9).make(1), is_durable=True)
    assert raised.value.facts["tenant"] == "c"
    assert int(raised.value.needed_bytes) <= int(raised.value.limit_bytes)
    assert _names(shared, "c") == {"s0", "s1", "s2", "s3", "more"}

    for lease in leases:
        shared.cache.leases.release(lease.lease_id)
    await shared.append("more", tokens := Writer(9).make(3), is_durable=True)
    assert await shared.read("more") == expected(tokens)
    assert "s0" not in _names(shared, "c")


async def test_what_is_more_than_a_limit_makes_nothing_leave(shared: DiskRig) -> None:
    """A session that could never be kept is refused before anything is given up for it."""
    for number in range(4):
        await _store(shared, "c", f"s{number}", 2, Writer(number))
    await shared.create("large")
    with pytest.raises(CapacityExceeded, match="quota of tenant c") as raised:
        await shared.append("large", Writer(9).make(8 * SEGMENT_TOKENS + 1))
    assert int(raised.value.needed_bytes) > int(raised.value.limit_bytes)
    assert _names(shared, "c") == {"s0", "s1", "s2", "s3", "large"}

    await shared.append("large", Writer(9).make(8 * SEGMENT_TOKENS), is_durable=True)
    assert _names(shared, "c") == {"large"}


@pytest.mark.parametrize("is_durable", [False, True])
async def test_what_may_not_be_written_keeps_nobody_from_writing(
    divided: DiskRig, *, is_durable: bool
) -> None:
    """Memory full of a tenant's tokens that SSD has no room for under the shares.

    Others' writes go through.
    """
    stored = {f"s{i}": await _store(divided, "a", f"s{i}", 4, Writer(i)) for i in range(4)}
    others = {f"s{i}": await _store(divided, "d", f"s{i}", 4, Writer(i)) for i in range(4)}
    for divided.tenant in ("a", "d"):
        for name in stored:
            await divided.demote(name)
    await divided.cache.models.register(ANYONE, MODEL)
    divided.tenant = ANYONE
    for number in range(3):
        await divided.create(f"s{number}")
        await divided.append(f"s{number}", Writer(7).make(4 * SEGMENT_TOKENS))
    with pytest.raises(CapacityExceeded):
        await divided.flush("s0")

    divided.tenant = "a"
    stored["new"] = Writer(8).make(4 * SEGMENT_TOKENS)
    await divided.create("new")
    await divided.append("new", stored["new"], is_durable=is_durable)
    if is_durable:
        # Its own coldest, for it has all that is guaranteed to it.
        del stored["s0"]
    await _check_rows(divided, "a", stored)
    await _check_rows(divided, "d", others)
    divided.tenant = ANYONE
    for name in sorted(divided.names()):
        await divided.delete(name)


async def test_who_is_pinned_while_its_turn_to_go_is_waited_for_stays(tmp_path: Path) -> None:
    """Sessions go one at a time: who was to be the next may have come to be pinned meanwhile."""
    rig = _rig(MemoryRig, tmp_path, shares=ALL_OF_IT)
    await rig.open()
    for tenant in ("a", "d"):
        for number in range(4):
            await _store(rig, tenant, f"s{number}", 4, Writer(number))
            await rig.demote(f"s{number}")
    await rig.cache.models.register(ANYONE, MODEL)
    rig.tenant = ANYONE
    await rig.create("s0")
    await rig.append("s0", Writer(7).make(8 * SEGMENT_TOKENS))
    rig.tenant = "d"
    leases = [await rig.acquire("s0"), await rig.acquire("s1")]

    turn, is_held, is_over = rig.cache.ssd_room._turn, asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with turn:
            is_held.set()
            await is_over.wait()

    async with turn:
        rig.tenant = "a"
        await rig.create("new")
        writing = asyncio.create_task(rig.append("new", Writer(8).make(4 * SEGMENT_TOKENS)))
        while not turn._waiters:  # noqa: ASYNC110  nobody says so
            await asyncio.sleep(0)
        holding = asyncio.create_task(hold())
    await is_held.wait()
    while not turn._waiters:  # noqa: ASYNC110  as above
        await asyncio.sleep(0)
    await rig.cache.sessions.update(ANYONE, "s0", expiration=None, is_pinned=True)
    is_over.set()
    await holding
    with suppress(CapacityExceeded):
        await writing
    for lease in leases:
        rig.cache.leases.release(lease.lease_id)
    assert _names(rig, ANYONE) == {"s0"}
    await rig.check()
    rig.arena.close()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("store", "store", "store", "append", "read", "fork", "delete", "retain", "pin")),
        st.sampled_from(("a", "b", "c", ANYONE)),
        st.integers(0, 4),
        st.integers(1, 4),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS)
async def test_whatever_tenants_do_nobody_within_its_share_loses_anything(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str, int, int]]
) -> None:
    """A tenant within its share has the same sessions before and after another tenant acts.

    Limits hold, and the books.
    """
    rig = _rig(MemoryRig, tmp_path_factory.mktemp("tenants"), 12)
    await rig.open()
    await rig.cache.models.register(ANYONE, MODEL)
    tenants = ("a", "b", "c", ANYONE)
    stored: dict[tuple[str, str], list[Token]] = {}
    try:
        for number, (what, tenant, which, size) in enumerate(operations):
            safe = {
                other: _names(rig, other) for other in tenants if other != tenant and _is_within(rig, other)
            }
            rig.tenant = tenant
            with suppress(CapacityExceeded):
                await _act(rig, stored, what, f"s{which}", size, Writer(number))
            assert all(_names(rig, other) == names for other, names in safe.items())
            assert _used(rig, "c")[1] <= 3
            await rig.check()
        for (tenant, name), tokens in stored.items():
            rig.tenant = tenant
            if name in rig.names():
                assert await rig.read(name) == expected(tokens)
    finally:
        await rig.cache.drain()
        rig.arena.close()


def _is_within(rig: Rig, tenant: str) -> bool:
    share = SHARES.by_tenant.get(tenant)
    kept_bytes = rig.cache.ledger.usage.of(tenant).kept_bytes
    return share is not None and kept_bytes <= share.guaranteed * 12 * SLOT_BYTES


async def _act(
    rig: Rig, stored: dict[tuple[str, str], list[Token]], what: str, name: str, size: int, writer: Writer
) -> None:
    is_there, key = name in rig.names(), (rig.tenant, name)
    if what == "store" and not is_there:
        await rig.create(name)
        stored[key] = []
        what, is_there = "append", True
    if not is_there:
        return
    if what == "append":
        tokens = writer.make(size * SEGMENT_TOKENS)
        try:
            await rig.append(name, tokens, is_durable=writer.tag % 3 > 0)
        finally:
            # Tokens that could not be made durable are visible all the same.
            if name in rig.names():
                stored[key] = (stored[key] + tokens)[: rig.token_count(name)]
    elif what == "read":
        assert await rig.read(name) == expected(stored[key])
    elif what == "fork" and f"{name}+" not in rig.names():
        await rig.fork(name, f"{name}+")
        stored[rig.tenant, f"{name}+"] = list(stored[key])
    elif what == "delete":
        await rig.delete(name)
    elif what in ("retain", "pin"):
        session = rig.cache.ledger.find(rig.tenant, name)
        ask = getattr(rig.cache.placement.retaining, what)
        ask(session.uid, 8 * SLOT_BYTES, rig.clock.monotonic_ns() / 10**9 + 1000, size)
