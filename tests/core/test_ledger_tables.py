"""Every step of the ledger's tables is taken by events of a real ledger; every other pair is refused."""

import enum
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from integrity import ledger_faults
from ledger_rig import SIZE, SUM, LedgerRig

from ctxcache.core.ledger import places, segment, session
from ctxcache.core.ledger.ledger import Flushed
from ctxcache.core.ledger.places import (
    BACKLOG_TABLE,
    SEGMENT_TABLE,
    USE_TABLE,
    Backlog,
    BacklogEvent,
    IllegalStepError,
    Place,
    SegmentEvent,
    Use,
    UseEvent,
)
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.format.checksums import Sums
from ctxcache.format.layout import Slot

Table = Mapping[tuple[Any, Any], Any]
Step = tuple[enum.Enum, enum.Enum]
TABLES: dict[str, Table] = {"segment": SEGMENT_TABLE, "use": USE_TABLE, "backlog": BACKLOG_TABLE}


# -- a ledger in every state -------------------------------------------------------------------------


def at_place(rig: LedgerRig, place: Place) -> tuple[Session, Segment]:
    """A segment that public events have brought there, and the session whose writer made it."""
    owner = rig.opened("s")
    writer = rig.write_began(owner)
    assert rig.room(writer, 3)
    found = writer.runs[0][0]
    if place is Place.RESERVED:
        return owner, found
    rig.committed(writer, 2)
    rig.write_ended(writer)
    if place is Place.UNWRITTEN:
        return owner, found
    rig.wrote_below(owner)
    if place is Place.BOTH:
        return owner, found
    if place in (Place.BELOW, Place.DORMANT):
        rig.ledger.dropped(found)
        if place is Place.DORMANT:
            rig.ledger.sleep.fell_asleep(owner, b"record", [b"record"])
        return owner, found
    if place is Place.HELD:
        rig.ledger.held(found)
    dead = rig.ledger.ended(owner)
    if place is not Place.LEAVING:
        rig.removed(dead)
    return owner, found


def in_use(rig: LedgerRig, use: Use) -> Session:
    """A session that public events have brought there."""
    found = rig.opened("s")
    if use in (Use.IDLE, Use.DORMANT):
        rig.ledger.visited(found)
        if use is Use.DORMANT:
            rig.ledger.sleep.fell_asleep(found, b"record", [])
    elif use is Use.READ:
        rig.ledger.read_began(found, (), rig.clock.ns / 10**9)
    elif use is Use.WRITTEN:
        rig.write_began(found)
    elif use is Use.GONE:
        rig.ledger.ended(found)
    return found


def with_backlog(rig: LedgerRig, backlog: Backlog) -> Session:
    """A session that public events have brought there."""
    if backlog is Backlog.SPARED:
        # It would need the place of another one that is worth more.
        for name in ("worthy", "worthier"):
            other = rig.opened(name)
            rig.wrote(other, 24)
            rig.wrote_below(other)
            for listed in other.segments:
                rig.ledger.dropped(listed)
    found = rig.opened("s")
    if backlog is Backlog.DURABLE:
        return found
    rig.wrote(found, 2)
    if backlog is Backlog.TAKEN:
        rig.ledger.unwritten.taken(found)
    elif backlog is Backlog.GONE:
        rig.ledger.ended(found)
    elif backlog is Backlog.SPARED:
        for name in ("worthy", "worthier"):
            rig.clock.ns += 1
            rig.ledger.visited(rig.ledger.find("a", name))
        assert rig.ledger.spares(found)
    return found


@pytest.mark.parametrize("place", Place)
def test_events_lead_to_every_place(place: Place) -> None:
    """The refusals below begin where they say."""
    rig = LedgerRig()
    assert at_place(rig, place)[1].place is place
    assert list(ledger_faults(rig.ledger)) == []


@pytest.mark.parametrize("use", Use)
def test_events_lead_to_every_use(use: Use) -> None:
    """The refusals below begin where they say."""
    rig = LedgerRig()
    assert in_use(rig, use).use is use
    assert list(ledger_faults(rig.ledger)) == []


@pytest.mark.parametrize("backlog", Backlog)
def test_events_lead_to_every_backlog(backlog: Backlog) -> None:
    """The refusals below begin where they say."""
    rig = LedgerRig()
    assert with_backlog(rig, backlog).backlog is backlog
    assert list(ledger_faults(rig.ledger)) == []


# -- every step is taken -----------------------------------------------------------------------------


def abandon() -> None:
    """A writer ends without a row, and one that is read meanwhile ends with some."""
    rig = LedgerRig()
    found = rig.opened("s")
    writer = rig.write_began(found)
    rig.room(writer, 2)
    rig.write_ended(writer)


def outgrow_and_settle() -> None:
    """Rows come while the rows before them are written, to another slot or for the first time."""
    rig = LedgerRig()
    found = rig.opened("s")
    writer = rig.write_began(found)
    assert rig.room(writer, 4)
    rig.committed(writer, 1)
    rig.committed(writer, 1)
    flush = rig.flush_began(found)
    assert flush is not None
    rig.committed(writer, 1)
    rig.flushed(flush)
    rig.flush_ended(flush)
    rig.wrote_below(found)
    copies = rig.move_began(found, found.segments)
    rig.committed(writer, 1)
    rig.move_ended(copies)
    rig.write_ended(writer)
    rig.wrote_below(found)
    rig.moved(found, found.segments)


def shorten() -> None:
    """Memory loses rows that nothing below has."""
    rig = LedgerRig()
    found = rig.opened("s")
    rig.wrote(found, 1)
    rig.wrote_below(found)
    rig.wrote(found, 2)
    tail = found.segments[0]
    rig.ledger.shortened(tail, Sums(0, 1, SUM))
    rig.ledger.truncated(found, ((0, 1),))


def leave_and_come_back() -> None:
    """Segments leave memory, come back, and go while they do."""
    rig = LedgerRig()
    found = rig.opened("s")
    rig.wrote(found, 12)
    rig.wrote_below(found)
    first, second, third = found.segments
    for listed in found.segments:
        rig.ledger.dropped(listed)
    slots = [rig.promote_began(listed) for listed in found.segments]
    assert slots[0] is not None
    assert slots[1] is not None
    assert slots[2] is not None
    rig.promote_ended(first, slots[0])
    dead = rig.ledger.ended(found)
    rig.promote_ended(second, slots[1])
    rig.ledger.dropped(second)
    rig.removed(dead)
    rig.promote_ended(third, slots[2])


def leave_past_a_reader() -> None:
    """A segment whose record is gone leaves memory, which its reader does without."""
    rig = LedgerRig()
    found, listed = at_place(rig, Place.BOTH)
    rig.ledger.held(listed, is_past=True)
    rig.removed(rig.ledger.ended(found))
    rig.ledger.released(listed, is_past=True)


def end_everywhere() -> None:
    """Sessions and segments go from every state that they may go from."""
    for place in (Place.UNWRITTEN, Place.BOTH, Place.BELOW):
        rig = LedgerRig()
        rig.removed(rig.ledger.ended(at_place(rig, place)[0]))
    for use in Use:
        rig = LedgerRig()
        found = in_use(rig, use)
        if not found.is_gone:
            rig.ledger.ended(found)
    for backlog in Backlog:
        rig = LedgerRig()
        found = with_backlog(rig, backlog)
        if backlog is not Backlog.GONE:
            rig.ledger.ended(found)


def use_together() -> None:
    """Readers and a writer come and go in every order."""
    rig = LedgerRig()
    found = rig.opened("s")
    ledger = rig.ledger
    ledger.read_began(found, (), rig.clock.ns / 10**9)
    ledger.read_began(found, (), rig.clock.ns / 10**9)
    ledger.read_ended(found.uid, rig.clock.ns / 10**9)
    writer = rig.write_began(found)
    ledger.read_began(found, (), rig.clock.ns / 10**9)
    ledger.read_ended(found.uid, rig.clock.ns / 10**9)
    rig.write_ended(writer)
    ledger.read_ended(found.uid, rig.clock.ns / 10**9)
    rig.write_ended(rig.write_began(found))
    ledger.read_began(found, (), rig.clock.ns / 10**9)
    ledger.read_ended(found.uid, rig.clock.ns / 10**9)
    fresh = rig.opened("fresh")
    rig.write_ended(rig.write_began(fresh))
    ledger.recalled(rig.blank("from records"), 1.0)


def write_behind() -> None:
    """Due sessions are taken, put back, spared and recalled."""
    rig = LedgerRig()
    found = with_backlog(rig, Backlog.TAKEN)
    rig.ledger.unwritten.taken(found)
    rig.wrote(found, 1)
    rig.ledger.unwritten.put_back(found)
    rig.ledger.unwritten.put_back(found)
    rig.ledger.unwritten.taken(found)
    rig.wrote_below(found)
    rig.wrote(found, 1)
    rig.wrote_below(found)
    rig = LedgerRig()
    spared = with_backlog(rig, Backlog.SPARED)
    rig.write_ended(rig.write_began(spared))
    rig.ledger.unwritten.taken(spared)
    for name in ("worthy", "worthier"):
        rig.clock.ns += 1
        rig.ledger.visited(rig.ledger.find("a", name))
    assert rig.ledger.spares(spared)


def fall_asleep() -> None:
    """A session is put away with its segment."""
    at_place(LedgerRig(), Place.DORMANT)


DRIVES: tuple[Callable[[], None], ...] = (
    abandon,
    outgrow_and_settle,
    shorten,
    leave_and_come_back,
    leave_past_a_reader,
    end_everywhere,
    use_together,
    write_behind,
    fall_asleep,
)


class Watched(dict[Any, Any]):
    """A table that notes which of its steps are taken."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.taken: set[Step] = set()

    def get(self, step: Any, default: Any = None) -> Any:
        """Note the step."""
        self.taken.add(step)
        return super().get(step, default)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Step]]:
    """The steps that were taken of each table, by the table's name."""
    watched = {name: Watched(table) for name, table in TABLES.items()}
    monkeypatch.setattr(segment, "SEGMENT_TABLE", watched["segment"])
    monkeypatch.setattr(session, "USE_TABLE", watched["use"])
    monkeypatch.setattr(session, "BACKLOG_TABLE", watched["backlog"])
    return {name: table.taken for name, table in watched.items()}


@pytest.mark.parametrize("name", TABLES)
def test_every_step_is_taken_by_an_event(name: str, taken: dict[str, set[Step]]) -> None:
    """A row that no event of the ledger leads to does not belong there."""
    for drive in DRIVES:
        drive()
    assert taken[name] == set(TABLES[name])


@pytest.mark.parametrize("drive", DRIVES)
def test_what_the_drives_leave_adds_up(drive: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that does what callers never do would prove nothing."""
    rigs: list[LedgerRig] = []
    make = LedgerRig.__init__

    def noted(rig: LedgerRig) -> None:
        make(rig)
        rigs.append(rig)

    monkeypatch.setattr(LedgerRig, "__init__", noted)
    drive()
    assert rigs
    assert [list(ledger_faults(rig.ledger)) for rig in rigs] == [[] for _ in rigs]


# -- every other pair is refused ---------------------------------------------------------------------


def refused(table: Table, states: type[enum.Enum], events: type[enum.Enum]) -> Iterator[Step]:
    """Every pair that is not in the table."""
    return ((state, event) for state in states for event in events if (state, event) not in table)


PAIRS = [
    *refused(SEGMENT_TABLE, Place, SegmentEvent),
    *refused(USE_TABLE, Use, UseEvent),
    *refused(BACKLOG_TABLE, Backlog, BacklogEvent),
]


def facts(rig: LedgerRig, *of: object) -> list[Any]:
    """All that a step may change."""
    found: list[Any] = [
        set(rig.memory.taken),
        set(rig.below.taken),
        rig.ledger.unwritten.dirty_bytes,
        rig.ledger.unwritten.claimed_bytes,
        dict(rig.ledger.usage.in_memory),
        dict(rig.ledger.usage.below),
        dict(rig.ledger.usage.kept),
        list(ledger_faults(rig.ledger)),
    ]
    for each in of:
        if isinstance(each, Segment):
            found.append([getattr(each, name) for name in Segment.__slots__ if name != "sums"])
            found.append(list(each.sums))
        elif isinstance(each, Session):
            found.append((each.use, each.use_count, each.backlog, list(each.segments), each.live))
            found.append((each.log_end, each.recorded_end, each.durable_end, each.generation))
    return found


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=lambda value: f"{type(value).__name__}.{value.name}")
def test_a_pair_that_is_not_in_a_table_is_refused(state: Any, event: Any) -> None:
    """The program is at fault then, and nothing has changed."""
    rig = LedgerRig()
    take: Callable[[Any], None]
    of: tuple[object, ...]
    if isinstance(state, Place):
        of = at_place(rig, state)
        take = of[1].happened
    elif isinstance(state, Use):
        of = (in_use(rig, state),)
        take = of[0].used
    else:
        of = (with_backlog(rig, state),)
        take = of[0].owed
    before = facts(rig, *of)
    with pytest.raises(IllegalStepError, match=re.escape(event.value)):
        take(event)
    assert facts(rig, *of) == before


ELSEWHERE = Slot(0, 11 * SIZE, SIZE)
"""A slot that nothing has."""


def _flushed(row_count: Callable[[Segment], int]) -> Callable[[LedgerRig, Session, Segment], object]:
    def tell(rig: LedgerRig, of: Session, listed: Segment) -> object:
        return rig.ledger.flushed(of, [Flushed(listed, ELSEWHERE, row_count(listed), 1, SUM)], of.log_end, 0)

    return tell


TOLD: dict[SegmentEvent, Callable[[LedgerRig, Session, Segment], object]] = {
    SegmentEvent.COMMITTED: lambda rig, of, listed: rig.ledger.committed(
        of, listed, listed.row_count + 1, rig.clock.ns
    ),
    SegmentEvent.FLUSHED: _flushed(lambda listed: listed.row_count),
    SegmentEvent.OUTGROWN: _flushed(lambda listed: listed.row_count - 1),
    SegmentEvent.MOVED: lambda rig, _, listed: rig.ledger.moved(
        [Flushed(listed, ELSEWHERE, listed.durable_row_count, 1, SUM)]
    ),
    SegmentEvent.PROMOTED: lambda rig, _, listed: rig.ledger.promoted(listed, ELSEWHERE, (8,)),
    SegmentEvent.DROPPED: lambda rig, _, listed: rig.ledger.dropped(listed),
    SegmentEvent.FORGOTTEN: lambda rig, _, listed: rig.ledger.forgotten(listed),
    SegmentEvent.ABANDONED: lambda rig, _, listed: rig.ledger.abandoned(listed),
}
"""Events of the ledger that are that one event of a segment."""


@pytest.mark.parametrize(
    ("place", "event"),
    [pair for pair in refused(SEGMENT_TABLE, Place, SegmentEvent) if pair[1] in TOLD],
    ids=lambda value: value.name,
)
def test_the_ledger_refuses_what_cannot_happen_to_a_segment(place: Place, event: SegmentEvent) -> None:
    """Told by its own event it refuses too, before it has changed anything."""
    rig = LedgerRig()
    of, listed = at_place(rig, place)
    before = facts(rig, of, listed)
    with pytest.raises(IllegalStepError):
        TOLD[event](rig, of, listed)
    assert facts(rig, of, listed) == before


@pytest.mark.parametrize("use", [Use.GONE, Use.DORMANT])
def test_the_ledger_refuses_uses_of_a_session_that_is_gone(use: Use) -> None:
    """A session that is gone, or asleep, is not read, written or ended: it is to be asked for again."""
    rig = LedgerRig()
    gone = in_use(rig, use)
    before = facts(rig, gone)
    ledger = rig.ledger
    read_began = partial(ledger.read_began, pieces=(), now_s=0.0)
    write_began = partial(ledger.write_began, now_s=0.0)
    for tell in (read_began, write_began, ledger.visited, ledger.ended):
        with pytest.raises(IllegalStepError):
            tell(gone)
        assert facts(rig, gone) == before


def test_the_ledger_refuses_a_second_writer() -> None:
    """A session has one."""
    rig = LedgerRig()
    found = in_use(rig, Use.WRITTEN)
    before = facts(rig, found)
    with pytest.raises(IllegalStepError):
        rig.ledger.write_began(found, rig.clock.ns / 10**9)
    assert facts(rig, found) == before


# -- the pictures ------------------------------------------------------------------------------------


def drawn(title: str) -> str:
    """One picture of the module's docstring."""
    text = places.__doc__ or ""
    begin = text.index(title)
    ends = [text.find(other, begin + 1) for other in ("A session's use.", "A session's backlog:")]
    return text[begin : min((end for end in ends if end > 0), default=len(text))]


PICTURES = (
    ("A segment's place.", SEGMENT_TABLE, Place, SegmentEvent),
    ("A session's use.", USE_TABLE, Use, UseEvent),
    ("A session's backlog:", BACKLOG_TABLE, Backlog, BacklogEvent),
)


@pytest.mark.parametrize(("title", "table", "states", "events"), PICTURES)
def test_the_pictures_have_every_state_and_name_events_of_the_table(
    title: str, table: Table, states: type[enum.Enum], events: type[enum.Enum]
) -> None:
    """States stand in capitals, and each word on an arrow is an event that leads somewhere else."""
    picture = drawn(title)
    assert set(re.findall(r"\b[A-Z]{3,}\b", picture)) == {state.name for state in states}
    lines = picture.split("\n\n", 1)[1]
    words = re.sub(r"[^a-z ]", " ", lines)
    words = re.sub(r"\bits record is gone\b|\bnothing uses its slots\b|\bfrom( [a-z]+)+", " ", words)
    named = {" ".join(word.split()) for word in re.split(r" {2,}", words)} - {""}
    moving = {event.value for (state, event), after in table.items() if after is not state}
    assert named <= {event.value for event in events}
    assert named <= moving
    drawn_by_others = {"outgrown", "moved", "shortened", "read ended"}
    assert moving - named <= drawn_by_others


@pytest.mark.parametrize(
    ("title", "table", "states"), [(title, table, states) for title, table, states, _ in PICTURES]
)
def test_straight_arrows_of_the_pictures_are_in_the_table(
    title: str, table: Table, states: type[enum.Enum]
) -> None:
    """An arrow from one state to the next in a line is a step of the table by the event above it."""
    lines = drawn(title).splitlines()
    seen = 0
    for above, line in zip(["", *lines], lines, strict=False):
        for arrow in re.finditer(r"([A-Z]{3,}) ─+► (?=([A-Z]{3,}))", line):
            before, after = states[arrow[1]], states[arrow[2]]
            over = above[arrow.start() : arrow.end()].strip(" │▲▼")
            events = [event for (state, event), to in table.items() if state is before and to is after]
            assert any(event.value in over for event in events), f"{arrow[1]} {over!r} {arrow[2]}"
            seen += 1
    assert seen >= 1
