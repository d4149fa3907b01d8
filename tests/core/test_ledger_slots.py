"""Slots that are kept from use: none comes back while a reason is left, and none is given back twice."""

from integrity import ledger_faults
from ledger_rig import LedgerRig

from ctxcache.core.ledger.ledger import Drop
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session


def durable(rig: LedgerRig) -> tuple[Session, Segment]:
    """A session of one segment that memory and a tier below have."""
    session = rig.opened("s")
    rig.wrote(session, 2)
    rig.wrote_below(session)
    return session, session.segments[0]


def test_a_slot_in_memory_that_is_bad_is_left_with_its_segment() -> None:
    """Rows that came to it meanwhile go with the session; the slot is used no more all the same."""
    rig = LedgerRig()
    session, segment = durable(rig)
    slot = segment.memory
    writer = rig.write_began(session)
    rig.room(writer, 1)
    rig.ledger.spoiled(segment)
    rig.committed(writer, 1)
    rig.write_ended(writer)
    rig.removed(rig.ledger.ended(session))

    assert rig.memory.spoiled == {slot}
    assert rig.memory.taken == {slot}


def test_what_a_bad_slot_held_of_a_lost_path_is_withheld() -> None:
    """The slot is left when its reader is done, and by then the path below is lost."""
    rig = LedgerRig()
    _, segment = durable(rig)
    assert segment.durable is not None
    rig.ledger.held(segment)
    rig.ledger.spoiled(segment)
    rig.ledger.paths_lost({segment.durable.path_index: "a path"})
    assert rig.ledger.find("a", "s").token_count == 2
    rig.ledger.released(segment)

    assert segment.memory is None
    assert rig.ledger.find("a", "s").token_count == 0


def test_a_slot_that_is_bad_and_may_be_recorded_waits_for_both() -> None:
    """A scrub finds it bad after the commit failed that was to remove its record."""
    for is_first_named in (True, False):
        rig = LedgerRig()
        session, segment = durable(rig)
        slot = segment.durable
        assert slot is not None
        rig.ledger.held(segment)
        rig.removed(rig.ledger.ended(session), is_well=False)
        assert rig.ledger.disowned(segment, is_bad=True) == (slot,)
        rig.ledger.released(segment)
        if is_first_named:
            rig.ledger.unstranded([slot])
            assert rig.below.taken == {slot}
            rig.ledger.unquarantined(slot)
        else:
            rig.ledger.unquarantined(slot)
            assert rig.below.taken == {slot}
            rig.ledger.unstranded([slot])
        assert rig.below.taken == set()


def test_what_was_kept_for_a_lost_path_leaves_memory_when_that_is_over() -> None:
    """The path is back, or there is no other one left that the rows could be written to."""
    for is_back in (True, False):
        rig = LedgerRig()
        _, segment = durable(rig)
        slot = segment.durable
        assert slot is not None
        rig.paths.closed_paths.add(slot.path_index)
        rig.ledger.paths_lost({slot.path_index: "a path"})
        assert rig.ledger.next_out_of_memory(None, lambda _: False) is None
        if is_back:
            rig.ledger.paths_lost({})
        else:
            rig.paths.closed_paths.add(1 - slot.path_index)
        assert list(ledger_faults(rig.ledger)) == []
        assert rig.ledger.next_out_of_memory(None, lambda _: False) == Drop(segment)
