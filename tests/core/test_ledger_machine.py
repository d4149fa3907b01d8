"""The ledger against dictionaries, and faults that are planted to see that the machine finds them."""

from bisect import insort
from collections.abc import Callable, Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from ledger_machine import LedgerMachine

from ctxcache.core.ledger.ledger import Ledger
from ctxcache.core.ledger.segment import Segment, Shelf
from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.unwritten import Unwritten
from ctxcache.format.layout import Slot

SETTINGS = settings(max_examples=100, stateful_step_count=50, suppress_health_check=list(HealthCheck))
SEARCH = settings(SETTINGS, max_examples=400, phases=[Phase.generate], report_multiple_bugs=False)
"""For planted bugs. One walk of 100 in fourteen missed the rarest; none is made shorter, which takes long."""

Plant = Callable[[pytest.MonkeyPatch], None]


def released_forgets_what_may_leave(patch: pytest.MonkeyPatch) -> None:
    """The last hold ends, and the segment is not told to be one that may leave memory."""
    right = Ledger.released

    def released(ledger: Ledger, segment: Segment, *, is_past: bool = False) -> None:
        resident = ledger.resident
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(resident, "add", lambda _: None)
            right(ledger, segment, is_past=is_past)

    patch.setattr(Ledger, "released", released)


def ended_leaves_the_name(patch: pytest.MonkeyPatch) -> None:
    """A session that is gone is still listed."""
    right = Ledger.ended

    def ended(ledger: Ledger, session: Session, *, is_evicted: bool = False) -> list[Segment]:
        dead = right(ledger, session, is_evicted=is_evicted)
        insort(ledger.names._ids[session.tenant], session.session_id)
        return dead

    patch.setattr(Ledger, "ended", ended)


def unstranded_gives_a_held_slot(patch: pytest.MonkeyPatch) -> None:
    """The slot of a segment that a reader still holds is given back, and again when the hold ends."""

    def unstranded(ledger: Ledger, slots: Iterable[Slot]) -> None:
        for slot in slots:
            ledger.below.stranded.pop(slot, None)
            ledger.below.give(slot)

    patch.setattr(Ledger, "unstranded", unstranded)


def empty_ignores_holds(patch: pytest.MonkeyPatch) -> None:
    """A record is gone, and the slots are free at once."""
    right = Ledger._empty

    def empty(ledger: Ledger, segment: Segment) -> None:
        held, segment.hold_count = segment.hold_count, 0
        try:
            right(ledger, segment)
        finally:
            segment.hold_count = held

    patch.setattr(Ledger, "_empty", empty)


def commit_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """Rows come that memory alone has, and nothing knows."""
    patch.setattr(Unwritten, "committed", lambda *_: None)


def a_slot_that_may_be_recorded_is_given_back(patch: pytest.MonkeyPatch) -> None:
    """A commit failed, and the slot that a record may still name is taken again."""

    def give_back(shelf: Shelf, slot: Slot | None) -> None:
        if slot is not None:
            shelf.give(slot)

    patch.setattr(Shelf, "give_back", give_back)


def test_the_ledger_does_what_the_dictionaries_say() -> None:
    """Events in any order."""
    run_state_machine_as_test(LedgerMachine, settings=SETTINGS)


@pytest.mark.parametrize(
    "plant",
    [
        released_forgets_what_may_leave,
        ended_leaves_the_name,
        unstranded_gives_a_held_slot,
        empty_ignores_holds,
        commit_is_not_counted,
        a_slot_that_may_be_recorded_is_given_back,
    ],
)
def test_the_machine_finds_what_is_planted(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that finds nothing would prove nothing."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, RuntimeError)):
        run_state_machine_as_test(LedgerMachine, settings=SEARCH)
