"""Turns of the event loop at a million tokens: what one call may do before others have theirs.

A turn is measured in lines of Python that run in it, which are the same on every machine: about 20,000 take a
millisecond. The bounds are today's figures, rounded up: lower them with what lowers them.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from cache_rig import FINGERPRINT, MODEL, TENANT, MemoryRig, Writer

from ctxcache.cache.leases import ReadRequest
from ctxcache.core.ledger.ledger import MANY_SEGMENTS, Drop
from ctxcache.core.ledger.session import DEFAULT_TTL_NS, Expiration
from ctxcache.core.ledger.sleep import SEGMENTS_ASLEEP
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec

MILLION = 1 << 20
AT_ONCE = 1 << 18
HOUR = Expiration(DEFAULT_TTL_NS)


@contextmanager
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lines that run in each turn of the loop meanwhile."""
    counts: list[int] = []
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    run = asyncio.events.Handle._run

    def counted(handle: asyncio.Handle) -> None:
        before = lines
        sys.settrace(trace)
        run(handle)
        sys.settrace(None)
        counts.append(lines - before)

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.events.Handle, "_run", counted)
        yield counts
    sys.settrace(None)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[MemoryRig]:
    """A session of a million tokens, durable and in memory."""
    made = MemoryRig(tmp_path, arena_segments=512, ssd_segments=(2048,))
    await made.open()
    await made.cache.sessions.create(
        TENANT, "long", model_id=MODEL.model_id, layout=(), expiration=HOUR, is_pinned=False
    )
    for begin in range(0, MILLION, AT_ONCE):
        reservation = await made.cache.appends.reserve(
            TENANT, "long", fingerprint=FINGERPRINT, write_offset=begin, generation=None,
            token_count=AT_ONCE, coming_count=AT_ONCE,
        )  # fmt: skip
        ids = np.arange(begin, begin + AT_ONCE, dtype=np.int32)
        made.cache.appends.place(reservation, TOKENS, begin, memoryview(ids.tobytes()))
        await made.cache.appends.commit(reservation, begin + AT_ONCE, is_durable=True, keep_open=False)
    yield made
    await made.check()
    made.arena.close()


def request(begin: int = 0, end: int | None = None) -> ReadRequest:
    """A reader's request."""
    return ReadRequest(TENANT, "long", FINGERPRINT, None, begin, end)


async def lease(rig: MemoryRig) -> None:
    """All of it, and its end."""
    held = await rig.cache.leases.acquire(request())
    rig.cache.leases.release(held.lease_id)


async def lease_a_part(rig: MemoryRig) -> None:
    """A hundred tokens of it."""
    held = await rig.cache.leases.acquire(request(MILLION // 2, MILLION // 2 + 100))
    rig.cache.leases.release(held.lease_id)


async def fork(rig: MemoryRig) -> None:
    """Half of it under another name."""
    await rig.fork("long", "fork", MILLION // 2)


async def drop(rig: MemoryRig) -> None:
    """The oldest half goes, four tokens stay."""
    await rig.truncate("long", (4, MILLION // 2))


async def keep_first(rig: MemoryRig) -> None:
    """The newest half goes."""
    await rig.cache.sessions.keep_first(TENANT, "long", None, MILLION // 2)


async def delete(rig: MemoryRig) -> None:
    """All of it goes."""
    await rig.delete("long")


async def look(rig: MemoryRig) -> None:
    """The session's facts."""
    rig.cache.sessions.get(TENANT, "long")


async def append_durable(rig: MemoryRig) -> None:
    """One token more, on disk."""
    reservation = await rig.cache.appends.reserve(
        TENANT, "long", fingerprint=FINGERPRINT, write_offset=MILLION, generation=None, token_count=1
    )
    rig.cache.appends.place(reservation, TOKENS, MILLION, memoryview(bytes(4)))
    await rig.cache.appends.commit(reservation, MILLION + 1, is_durable=True, keep_open=False)


async def append_many(rig: MemoryRig) -> None:
    """As many tokens as a long prompt has."""
    count = 1 << 16
    reservation = await rig.cache.appends.reserve(
        TENANT, "long", fingerprint=FINGERPRINT, write_offset=MILLION, generation=None,
        token_count=count, coming_count=count,
    )  # fmt: skip
    rig.cache.appends.place(reservation, TOKENS, MILLION, memoryview(bytes(4 * count)))
    await rig.cache.appends.commit(reservation, MILLION + count, is_durable=False, keep_open=False)


async def look_up(rig: MemoryRig) -> None:
    """As an engine asks for many sessions at a time: this one among them."""
    rig.cache.sessions.lookup(TENANT, "long", FINGERPRINT)


async def list_fork(rig: MemoryRig) -> None:
    """A page with it and with a fork of it, whose segments both list."""
    assert [view.token_count async for view in rig.cache.sessions.list(TENANT, after="", model_id="")]


async def match(rig: MemoryRig) -> None:
    """How much of a prompt of a million tokens is there."""
    ids = np.arange(MILLION, dtype=np.int32).tobytes()
    found = await rig.cache.prefixes.match(TENANT, MODEL.model_id, (), ids)
    assert found.token_count == MILLION


async def register(rig: MemoryRig) -> None:
    """A model of 128 layers."""
    specs = [StreamSpec(Stream(i, StateKind.KV), 160, DType.FLOAT16) for i in range(128)]
    await rig.cache.models.register(
        TENANT, replace(MODEL, model_id="deep", layer_count=128, streams=tuple(specs))
    )


CALLS: dict[Callable[[MemoryRig], Awaitable[None]], int] = {
    look: 110,
    lease: 18_500,
    lease_a_part: 1_000,
    fork: 5_500,
    drop: 9_300,
    keep_first: 9_300,
    delete: 11_000,
    append_durable: 2_200,
    append_many: 86_000,
    look_up: 100,
    list_fork: 250,
    match: 750,
    register: 650,
}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_no_turn_is_longer_than_its_bound(
    rig: MemoryRig, call: Callable[[MemoryRig], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither before nor behind an await is more done than the bound says."""
    assert len(rig.cache.ledger.find(TENANT, "long").segments) == MILLION // 4096
    if call is list_fork:
        await fork(rig)
    with turns(monkeypatch) as counts:
        await asyncio.ensure_future(call(rig))
        await rig.cache.drain()
    assert max(counts) <= CALLS[call]


VAST = replace(
    MODEL,
    model_id="vast",
    layer_count=2048,
    streams=tuple(
        StreamSpec(Stream(layer, kind), 160, DType.FLOAT16)
        for kind in (StateKind.HIDDEN, StateKind.KV)
        for layer in range(2048)
    ),
)


class Rests:
    """A pace that rests whenever it is asked, and counts how often."""

    is_over = True

    def __init__(self) -> None:
        self.count = 0

    async def rest(self) -> None:
        """Let others have their turn."""
        self.count += 1
        await asyncio.sleep(0)


async def test_sessions_fall_asleep_and_wake_in_short_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one segment and of nearly as many as a sleeper may have, a few at a time."""
    made = MemoryRig(tmp_path, arena_segments=2 * SEGMENTS_ASLEEP, ssd_segments=(1 << 10,))
    await made.open()
    ledger = made.cache.ledger
    for number in range(40):
        await made.create(f"s{number}")
        await made.append(f"s{number}", Writer(number).make(3500 if number % 10 == 0 else 1), is_durable=True)
        while isinstance(move := ledger.next_out_of_memory(None, lambda _: False), Drop):
            ledger.dropped(move.segment)
    await made.cache.sessions.save_access_times()
    ledger.sleep.awake_count = 0
    made.clock.advance(seconds=ledger.sleep.sleep_ns / 10**9)
    await made.let_go()
    with turns(monkeypatch) as counts:
        await asyncio.create_task(made.cache.sessions.let_sleep())
    assert ledger.sleep.dormant.count == 40
    assert max(counts) <= 20_000, max(counts)
    with turns(monkeypatch) as counts:
        await asyncio.create_task(glance(made, "s10"))
    assert max(counts) <= 12_000, max(counts)
    await made.check()
    made.arena.close()


async def glance(rig: MemoryRig, name: str) -> None:
    """Look a session up."""
    rig.cache.sessions.get(TENANT, name)


async def test_a_model_of_thousands_of_streams_is_written_down_in_pieces(tmp_path: Path) -> None:
    """Others have their turns between pieces of its fingerprint, and between those of its record."""
    rig, pace = MemoryRig(tmp_path), Rests()
    await rig.open()

    await rig.cache.models.register(TENANT, VAST, pace=pace)

    pieces_of_fingerprint = len(list(VAST.encoded_parts()))
    assert pace.count >= pieces_of_fingerprint + len(VAST.streams) // 256
    await rig.crash()
    await rig.open()
    assert rig.cache.models.get(TENANT, "vast").spec == VAST
    await rig.close()


async def _grow(rig: MemoryRig, begin: int, count: int) -> None:
    """Append durable tokens of which the store does not know beforehand."""
    reservation = await rig.cache.appends.reserve(
        TENANT, "long", fingerprint=FINGERPRINT, write_offset=begin, generation=None, token_count=count
    )
    ids = np.arange(begin, begin + count, dtype=np.int32)
    rig.cache.appends.place(reservation, TOKENS, begin, memoryview(ids.tobytes()))
    await rig.cache.appends.commit(reservation, begin + count, is_durable=True, keep_open=False)


GROWN = 1 << 18
A_TURN = 1 << 13


async def test_what_grows_token_by_token_comes_to_lie_in_few_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short segments are joined as the session grows, each time in turns as short as those of others."""
    made = MemoryRig(tmp_path, arena_segments=512, ssd_segments=(2048,))
    await made.open()
    await made.cache.sessions.create(
        TENANT, "long", model_id=MODEL.model_id, layout=(), expiration=HOUR, is_pinned=False
    )
    longest = 0
    for begin in range(0, GROWN, A_TURN):
        await _grow(made, begin, A_TURN)
        with turns(monkeypatch) as counts:
            await asyncio.ensure_future(made.cache.joining.turn())
            await made.cache.drain()
        longest = max(longest, *counts)
        await made.cache.prefixes.forget_gone()
    assert len(made.cache.ledger.find(TENANT, "long").segments) <= GROWN // 4096 + MANY_SEGMENTS
    assert longest <= 11_500
    prompt = np.arange(GROWN, dtype=np.int32).tobytes()
    assert (await made.cache.prefixes.match(TENANT, MODEL.model_id, (), prompt)).token_count == GROWN
    await made.check()
    made.arena.close()


@pytest.mark.parametrize("fork_count", [1, 3])
async def test_segments_that_forks_list_too_are_joined_or_passed_over_in_short_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_count: int
) -> None:
    """Joining looks at each segment once, also where none of a thousand can be joined."""
    made = MemoryRig(tmp_path, arena_segments=1200, ssd_segments=(2048,))
    await made.open()
    await made.cache.sessions.create(
        TENANT, "long", model_id=MODEL.model_id, layout=(), expiration=HOUR, is_pinned=False
    )
    await _grow(made, 0, 1 << 16)
    for number in range(fork_count):
        await made.fork("long", f"fork{number}", 1 << 16)
    await _grow(made, 1 << 16, 64)
    assert len(made.cache.ledger.find(TENANT, "long").segments) == 1025
    with turns(monkeypatch) as counts:
        await asyncio.ensure_future(made.cache.joining.turn())
    is_joined = len(made.cache.ledger.find(TENANT, "long").segments) < 1025
    assert is_joined == (fork_count == 1)
    assert max(counts) <= (15_000 if is_joined else 17_000)
    await made.check()
    made.arena.close()
