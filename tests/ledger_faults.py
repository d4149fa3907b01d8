"""Contradictions in the ledger's indices, one sentence each. Looks at everything, for tests alone."""

from collections.abc import Iterator

from ctxcache.core.ledger.ledger import Ledger
from ctxcache.core.ledger.places import Backlog, Place
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session


def faults(ledger: Ledger) -> Iterator[str]:
    """Contradictions in the indices, one sentence each. Looks at everything."""
    if {*ledger.names.sessions.values(), *ledger.names.blocks} != set(ledger.names.by_uid.values()):
        yield "sessions and blocks by name and by uid differ"
    yield from _faults_of_blocks(ledger)
    yield from _faults_of_copies(ledger)
    listed = {(tenant, name) for tenant, names in ledger.names._ids.items() for name in names}
    dormant = [(tenant, name) for tenant, names in ledger.sleep.dormant.names.items() for name in names]
    if not listed.issuperset(dormant) or len(dormant) != ledger.sleep.dormant.count:
        yield "dormant sessions are not those that have names"
    is_sorted = all(names == sorted(names) for names in ledger.names._ids.values())
    if listed.difference(dormant) != set(ledger.names.sessions) or not is_sorted:
        yield "sessions and the list of their names differ"
    for session in ledger.names.by_uid.values():
        yield from _faults_of(ledger, session)
    for segment in ledger._segments.values():
        yield from _faults_of_segment(segment)
    rankings = (ledger._resident, ledger._evictable, ledger.unwritten.ranking, ledger.unwritten.spared)
    late = {uid for ranking in rankings for uid in ranking.overtaken()}
    # A session without a segment has nothing that could leave, and is placed nowhere.
    if any(uid not in ledger.names.by_uid or ledger.names.by_uid[uid].segments for uid in late):
        yield "sessions leave too late: the rankings were not told that their ranks fell"
    owners = ledger.keyed.index.owners()
    known = ledger._segments
    lost = (o for o in owners if o not in known and ledger.sleep.dormant.lister(o) is None)
    if not all(map(ledger.keyed.is_leaving, lost)):
        yield "segments that no session lists are found by keys"
    for session in ledger._feed.misplaced():
        yield f"{session.name} is taken to be in memory and is not"
    if any(not s.memory or s.place in (Place.HELD, Place.GONE) for s in ledger._feed.unread):
        yield "something promoted ahead of need is not there, and may still be used"


def _faults_of_blocks(ledger: Ledger) -> Iterator[str]:
    if any(session.is_block for session in ledger.names.sessions.values()):
        yield "a block is listed as a session"
    children = {(name, uid) for name, found in ledger.names._children.items() for uid in found}
    named = {((s.tenant, s.parent_id), s.uid) for s in ledger.names.blocks if s.parent_id}
    if children != named:
        yield "blocks, and what is known of which continues which, differ"


def _faults_of_copies(ledger: Ledger) -> Iterator[str]:
    for segment in ledger._segments.values():
        paths = {slot.path_index for slot in segment.places}
        if len(paths) < len(segment.places):
            yield f"segment {segment.segment_id}: both copies lie on one path"
        is_short = segment.copies > 1 and len(paths) == 1 and not paths & ledger.lost.paths.keys()
        if is_short and segment not in ledger.copies.single:
            yield f"segment {segment.segment_id} would never get its second copy"
        if (segment.copies == 1 and len(paths) > 1) != (segment in ledger.copies.surplus):
            yield f"segment {segment.segment_id}: it is not known whether it has a copy too many"
    if not {*ledger.copies.single, *ledger.copies.surplus} <= set(ledger._segments.values()):
        yield "copies are wanted of segments that no session lists"


def _faults_of(ledger: Ledger, session: Session) -> Iterator[str]:
    if session.is_gone:
        yield f"{session.name} is gone and still known"
    clean = (
        segment
        for segment in session.segments
        if segment.memory and not (segment.is_unwritten or segment.hold_count or ledger.lost.has(segment))
    )
    if not all(map(ledger._resident.knows, clean)):
        yield f"{session.name} has segments in memory that would never leave"
    unwritten = [segment for segment in session.segments if segment.is_unwritten]
    if list(ledger.unwritten.segments(session)) != unwritten:
        yield f"{session.name}: not all that is unwritten is known, or more is"
    is_behind = session.durable_end < session.log_end
    if (session.backlog is not Backlog.DURABLE) != is_behind:
        yield (
            f"{session.name}: durable up to {session.durable_end} of {session.log_end}, and"
            f" {session.backlog.value}"
        )
    is_looked_at = session.uid in ledger.unwritten.changed or session.backlog is Backlog.SPARED
    if ledger.unwritten.has_full(session) and not is_looked_at:
        yield f"{session.name} is unwritten and would never be looked at"
    if is_behind and not ledger.unwritten.is_queued(session):
        yield f"{session.name} is unwritten and would never become old"
    if session.backlog is Backlog.SPARED and (session.amounts().durable_bytes or session.recorded_end):
        yield f"{session.name} is spared, and something below has some of it"


def _faults_of_segment(segment: Segment) -> Iterator[str]:
    expected = Place.UNWRITTEN if segment.is_unwritten else Place.BOTH if segment.memory else Place.BELOW
    if segment.place is not expected:
        yield f"segment {segment.segment_id} is {segment.place.value}, and should be {expected.value}"
