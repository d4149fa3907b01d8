"""Integrity: whether the cache's books add up. Reads state, changes nothing, does no I/O.

Knows no bytes: that they are right is what checksums say. Exact while no move is under way; a move
holds segments and slots that only it knows of. Worst case: one pass over every session and segment.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ctxcache.cache import Cache
from ctxcache.core import ranges
from ctxcache.core.ledger.ledger import Ledger
from ctxcache.core.ledger.places import Backlog, Place
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.core.ledger.usage import Usage
from ctxcache.core.placement.shares import NO_SHARES
from ctxcache.format.checksums import covers


def check_integrity(cache: Cache) -> list[str]:
    """The contradictions found, one sentence each; empty when all is well."""
    holders = Counter(s for holder in (cache.leases, cache.appends) for s in holder.held())
    dormant = _dormant(cache)
    known = {*cache.ledger.segments(), *(s for each in dormant for s in each.segments), *holders}
    return [
        *(problem for session in (*cache.ledger.listing(), *dormant) for problem in _session(session)),
        *_references(cache),
        *_holds(known, holders),
        *_pins(cache),
        *_claims(cache),
        *_uses(cache),
        *ledger_faults(cache.ledger),
        *_space(cache, known),
        *_usage(cache, known),
    ]


def _dormant(cache: Cache) -> list[Session]:
    """The dormant sessions as they would be, were they known: they stay dormant."""
    dormant, usage = cache.ledger.sleep.dormant, Usage(NO_SHARES)
    found = [dormant.revived(number, usage.of(dormant.tenant(number))) for number in dormant]
    for session in found:
        for segment in session.segments:
            segment.list_in(session.residence)
    return found


def _claims(cache: Cache) -> Iterator[str]:
    ledger = cache.ledger
    dirty = {s for s in ledger.segments() if s.is_unwritten}
    spared = {
        segment
        for session in ledger.listing()
        if (session.backlog is Backlog.SPARED)
        for segment in ledger.unwritten.segments(session)
    }
    reserved = {run.segment for r in cache.appends.reservations() for run in r.runs}
    for what, known_bytes, segments in (
        ("dirty", ledger.unwritten.dirty_bytes, dirty),
        ("due", ledger.unwritten.due_bytes, dirty - spared),
        ("claimed", ledger.unwritten.claimed_bytes, (dirty | reserved) - spared),
    ):
        if known_bytes != sum(segment.size_bytes for segment in segments):
            yield f"{known_bytes} B are counted as {what}, and are not"
    claimed_by: Counter[str] = Counter()
    for segment in (dirty | reserved) - spared:
        claimed_by[segment.tenant] += segment.size_bytes
    if ledger.unwritten.claimed_by != claimed_by:
        yield f"{ledger.unwritten.claimed_by} B are counted as claimed by tenants, and {claimed_by} B are"


def _uses(cache: Cache) -> Iterator[str]:
    uses = Counter(uid for lease in cache.leases.leases() for uid in (lease.view.uid, *lease.others))
    uses.update(reservation.session.uid for reservation in cache.appends.reservations())
    if any(session.use_count != uses[session.uid] for session in cache.ledger.listing()):
        yield "sessions in use, as the ledger knows them, are not those that are leased or written"


def _session(session: Session) -> Iterator[str]:
    if not session.durable_end <= session.recorded_end <= session.log_end:
        yield (
            f"{session.name}: durable {session.durable_end}, recorded {session.recorded_end}, log"
            f" {session.log_end}"
        )
    if any(a.begin >= b.begin for a, b in pairwise(session.segments)):
        yield f"{session.name}: segments are out of order"
    if session.token_count != ranges.count(session.live):
        yield (
            f"{session.name}: {session.token_count} tokens are counted, {ranges.count(session.live)} are live"
        )
    memory = [s.memory.size_bytes for s in session.segments if s.memory]
    durable_bytes = sum(slot.size_bytes for s in session.segments for slot in s.places)
    if session.amounts() != (len(memory), sum(memory), durable_bytes):
        yield f"{session.name}: what it has in DRAM and on SSD is miscounted"
    covered = sum(p.row_end - p.row_begin for p in session.pieces(0, session.token_count))
    if covered != session.token_count:
        yield f"{session.name}: {session.token_count} tokens, rows for {covered}"


def _references(cache: Cache) -> Iterator[str]:
    counts = Counter(segment for session in cache.ledger.listing() for segment in session.segments)
    if set(counts) != set(cache.ledger.segments()):
        yield "segments known and segments listed differ"
    for segment, count in counts.items():
        if segment.reference_count != count or not segment.is_listed:
            yield f"segment {segment.segment_id}: {count} sessions list it, {segment.reference_count} counted"
        if len(cache.ledger.names.listers(segment)) != count:
            yield f"segment {segment.segment_id}: not all that list it are found"
        if not segment.memory and (not segment.durable or segment.is_unwritten):
            yield f"segment {segment.segment_id}: rows that are nowhere"
        if segment.memory and not covers(segment.sums, segment.row_count):
            yield f"segment {segment.segment_id}: nobody said what its rows are"


def _holds(known: Iterable[Segment], holders: Counter[Segment]) -> Iterator[str]:
    for segment in known:
        if segment.hold_count != holders[segment]:
            yield f"segment {segment.segment_id}: {segment.hold_count} holds, {holders[segment]} holders"


def _pins(cache: Cache) -> Iterator[str]:
    leased = {
        segment_id: size for lease in cache.leases.leases() for segment_id, size in lease.pinned.items()
    }
    reserved = {segment.segment_id: segment.layout.size_bytes for segment in cache.appends.held()}
    for what, pins, held in (
        ("leases", cache.leases.pins, leased),
        ("reservations", cache.appends.pins, reserved),
    ):
        if set(pins.pinned()) != set(held) or pins.used_bytes != sum(held.values()):
            yield f"{what}: {pins.used_bytes} B are counted as pinned, {sum(held.values())} B are"


def _space(cache: Cache, known: Iterable[Segment]) -> Iterator[str]:
    memory, below = cache.ledger.memory, cache.ledger.below
    kept = memory.spoiled | cache.promotions.owed
    dram = [*(segment.memory for segment in known if segment.memory), *kept]
    recorded = {slot for segment in known for slot in segment.places}
    ssd = [
        *(recorded | below.stranded.keys() | below.quarantined),
        *(slot for written in cache.staging.written for slot in written.places),
    ]
    for name, allocator, slots in (("DRAM", memory, dram), ("SSD", below, ssd)):
        used_bytes = sum(slot.size_bytes for slot in slots)
        if allocator.used_bytes != used_bytes:
            yield f"{name}: {allocator.used_bytes} B taken, segments have {used_bytes} B"
        ordered = sorted(slots)
        if any(
            a.path_index == b.path_index and a.offset_bytes + a.size_bytes > b.offset_bytes
            for a, b in pairwise(ordered)
        ):
            yield f"{name}: slots overlap"


def _usage(cache: Cache, known: Iterable[Segment]) -> Iterator[str]:
    usage = cache.ledger.usage
    counted: Counter[tuple[str, str]] = Counter()
    for segment in known:
        sizes = {
            "DRAM": segment.memory.size_bytes if segment.memory else 0,
            "SSD": sum(slot.size_bytes for slot in segment.places),
            "all": segment.copies * segment.size_bytes if segment.memory or segment.places else 0,
        }
        counted.update({(segment.tenant, where): size_bytes for where, size_bytes in sizes.items()})
    for staged in cache.staging.written:
        counted[staged.segment.tenant, "SSD"] += sum(slot.size_bytes for slot in staged.places)
    for tenant in usage.tenants():
        use = usage.of(tenant)
        for where, size_bytes in (
            ("DRAM", use.memory_bytes),
            ("SSD", use.durable_bytes),
            ("all", use.kept_bytes),
        ):
            if size_bytes != counted[tenant, where]:
                yield f"{tenant}: {size_bytes} B counted ({where}), {counted[tenant, where]} B are there"


def ledger_faults(ledger: Ledger) -> Iterator[str]:
    """Contradictions in the ledger's indices, one sentence each. Revives no dormant session."""
    if {*ledger.names.sessions.values(), *ledger.names.blocks} != set(ledger.names.by_uid.values()):
        yield "sessions and blocks by name and by uid differ"
    yield from _faults_of_blocks(ledger)
    yield from _faults_of_copies(ledger)
    ids = {tenant: ledger.names.ids(tenant) for tenant in ledger.names.tenants()}
    listed = {(tenant, name) for tenant, names in ids.items() for name in names}
    dormant = [(tenant, name) for tenant, names in ledger.sleep.dormant.names.items() for name in names]
    if not listed.issuperset(dormant) or len(dormant) != ledger.sleep.dormant.count:
        yield "dormant sessions are not those that have names"
    is_sorted = all(list(names) == sorted(names) for names in ids.values())
    if listed.difference(dormant) != set(ledger.names.sessions) or not is_sorted:
        yield "sessions and the list of their names differ"
    for session in ledger.names.by_uid.values():
        yield from _faults_of(ledger, session)
    for segment in ledger.segments():
        yield from _faults_of_segment(segment)
    rankings = (ledger.resident, ledger.evictable, ledger.unwritten.ranking, ledger.unwritten.spared)
    late = {uid for ranking in rankings for uid in ranking.overtaken()}
    # A session without a segment has nothing that could leave, and is placed nowhere.
    if any(uid not in ledger.names.by_uid or ledger.names.by_uid[uid].segments for uid in late):
        yield "sessions leave too late: the rankings were not told that their ranks fell"
    owners = ledger.keyed.index.owners()
    known = {segment.segment_id for segment in ledger.segments()}
    lost = (o for o in owners if o not in known and ledger.sleep.dormant.lister(o) is None)
    if not all(map(ledger.keyed.is_leaving, lost)):
        yield "segments that no session lists are found by keys"
    for session in ledger.placement.misplaced():
        yield f"{session.name} is taken to be in memory and is not"
    if any(not s.memory or s.place in (Place.HELD, Place.GONE) for s in ledger.placement.unread):
        yield "something promoted ahead of need is not there, and may still be used"


def _faults_of_blocks(ledger: Ledger) -> Iterator[str]:
    if any(session.is_block for session in ledger.names.sessions.values()):
        yield "a block is listed as a session"
    children = {(name, uid) for name, found in ledger.names.children.items() for uid in found}
    named = {((s.tenant, s.parent_id), s.uid) for s in ledger.names.blocks if s.parent_id}
    if children != named:
        yield "blocks, and what is known of which continues which, differ"


def _faults_of_copies(ledger: Ledger) -> Iterator[str]:
    for segment in ledger.segments():
        paths = {slot.path_index for slot in segment.places}
        if len(paths) < len(segment.places):
            yield f"segment {segment.segment_id}: both copies lie on one path"
        is_short = segment.copies > 1 and len(paths) == 1 and not paths & ledger.lost.paths.keys()
        if is_short and segment not in ledger.copies.single:
            yield f"segment {segment.segment_id} would never get its second copy"
        if (segment.copies == 1 and len(paths) > 1) != (segment in ledger.copies.surplus):
            yield f"segment {segment.segment_id}: it is not known whether it has a copy too many"
    if not {*ledger.copies.single, *ledger.copies.surplus} <= set(ledger.segments()):
        yield "copies are wanted of segments that no session lists"


def _faults_of(ledger: Ledger, session: Session) -> Iterator[str]:
    if session.is_gone:
        yield f"{session.name} is gone and still known"
    clean = (
        segment
        for segment in session.segments
        if segment.memory and not (segment.is_unwritten or segment.hold_count or ledger.lost.has(segment))
    )
    if not all(map(ledger.resident.knows, clean)):
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
