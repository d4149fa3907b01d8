"""Who is at work on which session, as look-ups count it."""

import asyncio
from collections.abc import Callable
from contextvars import Context

import pytest
from ledger_rig import LedgerRig

from ctxcache.cache.state import part_of_work
from ctxcache.core.ledger.ledger import Ledger
from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.work import NobodyAtWorkError, Work, at_work

Look = Callable[[Ledger, Session], object]
LOOKS: dict[str, Look] = {
    "find": lambda ledger, _: ledger.find("a", "s"),
    "named": lambda ledger, _: ledger.named("a", "s"),
    "get": lambda ledger, session: ledger.get(session.uid),
    "segment": lambda ledger, session: ledger.segment(session.segments[0].segment_id),
    "unsaved": lambda ledger, _: ledger.unsaved_accesses(limit=1, part_limit=1),
}
looks = pytest.mark.parametrize("look", LOOKS.values(), ids=list(LOOKS))


@pytest.fixture
def rig() -> LedgerRig:
    """One session, s, on which nobody is at work."""
    made = LedgerRig()
    with Work():
        made.wrote(made.opened("s"), 3)
    return made


def worker_count(rig: LedgerRig) -> int:
    """How many are at work on it."""
    return rig.ledger.names.sessions["a", "s"].worker_count


@looks
def test_a_look_up_counts_until_its_work_ends(rig: LedgerRig, look: Look) -> None:
    """Once for each work, however often it looks."""
    session = rig.ledger.names.sessions["a", "s"]
    assert worker_count(rig) == 0
    with Work():
        look(rig.ledger, session)
        look(rig.ledger, session)
        assert worker_count(rig) == 1
        with Work():
            look(rig.ledger, session)
            assert worker_count(rig) == 2
        assert worker_count(rig) == 1
    assert worker_count(rig) == 0


@looks
def test_a_look_up_that_is_nobodys_work_is_a_fault(rig: LedgerRig, look: Look) -> None:
    """It is told at once, and not when a session sleeps under somebody."""
    session = rig.ledger.names.sessions["a", "s"]
    with pytest.raises(NobodyAtWorkError, match="no work has begun"):
        Context().run(look, rig.ledger, session)
    assert worker_count(rig) == 0


async def test_a_task_behind_the_end_of_its_work_is_a_fault(rig: LedgerRig) -> None:
    """It has the work that it was begun in, which counts nothing any more."""
    ended = asyncio.Event()

    async def look_late() -> None:
        await ended.wait()
        rig.ledger.find("a", "s")

    with Work():
        late = asyncio.ensure_future(look_late())
    ended.set()
    with pytest.raises(NobodyAtWorkError, match="the work has ended"):
        await late


async def test_a_task_that_is_a_part_of_the_work_makes_it_last(rig: LedgerRig) -> None:
    """Also one that is cancelled before its first step."""
    may_end = asyncio.Event()

    async def go_on() -> None:
        await may_end.wait()
        rig.ledger.find("a", "s")

    with Work() as work:
        rig.ledger.find("a", "s")
        longest, shortest = part_of_work(go_on()), part_of_work(go_on())
    shortest.cancel()
    await asyncio.wait([shortest])
    assert worker_count(rig) == 1
    may_end.set()
    await longest
    await asyncio.sleep(0)
    assert worker_count(rig) == 0
    with pytest.raises(NobodyAtWorkError):
        work.join()


async def test_a_failure_ends_the_work(rig: LedgerRig) -> None:
    """What was looked up is let go of."""

    async def fail() -> None:
        rig.ledger.find("a", "s")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        await at_work(fail())
    assert worker_count(rig) == 0


def test_a_glance_needs_no_work(rig: LedgerRig) -> None:
    """It is for one turn of the event loop, and counts nobody."""
    shown = Context().run(rig.ledger.glance, "a", "s")
    assert shown is rig.ledger.names.sessions["a", "s"]
    assert worker_count(rig) == 0
