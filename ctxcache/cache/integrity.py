"""Integrity: whether the cache's books add up. Reads state, changes nothing, does no I/O.

Knows no bytes: that they are right is what checksums say. Exact while no move is under way; a move
holds segments and slots that only it knows of. Worst case: one pass over every session and segment.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from ctxcache.cache import Cache
from ctxcache.core import ranges
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session
from ctxcache.format.sums import covers


def check_integrity(cache: Cache) -> list[str]:
    """What does not add up, one sentence each; empty when all is well."""
    holders = Counter(s for holder in (cache.reading, cache.writing) for s in holder.held())
    known = {*cache.state.segments.values(), *holders}
    return [
        *_sessions(cache),
        *_references(cache),
        *_holds(known, holders),
        *_pins(cache),
        *_claims(cache),
        *_placement(cache),
        *_space(cache, known),
        *_usage(cache, known),
    ]


def _sessions(cache: Cache) -> Iterator[str]:
    state = cache.state
    if set(state.sessions.values()) != set(state.by_uid.values()):
        yield "sessions by name and by uid differ"
    listed = {(tenant, name) for tenant, names in state.names.items() for name in names}
    if listed != set(state.sessions) or any(names != sorted(names) for names in state.names.values()):
        yield "sessions and the list of their names differ"
    for session in state.by_uid.values():
        yield from _session(session)
        clean = (
            s for s in session.segments
            if s.dram and not (s.is_dirty or s.hold_count or state.is_on_lost_path(s))
        )  # fmt: skip
        if not all(map(state.resident.knows, clean)):
            yield f"{session.name} has segments in DRAM that nobody would let leave"
        yield from _unwritten(cache, session)


def _unwritten(cache: Cache, session: Session) -> Iterator[str]:
    unwritten = cache.state.unwritten
    dirty = [segment for segment in session.segments if segment.is_dirty]
    if list(unwritten.segments(session.uid)) != dirty:
        yield f"{session.name}: not all that is dirty is known, or more is"
    if (session.uid in unwritten) != (session.durable_end < session.log_end):
        yield f"{session.name}: known to be unwritten, or not, and the reverse is true"
    is_looked_at = session.uid in unwritten.changed or unwritten.is_spared(session.uid)
    if unwritten.has_full(session) and not is_looked_at:
        yield f"{session.name} is dirty and nobody would look at it"
    if session.uid in unwritten and not unwritten.is_queued(session.uid):
        yield f"{session.name} is dirty and would never become old"
    if unwritten.is_spared(session.uid) and (session.amounts().ssd_bytes or session.recorded_end):
        yield f"{session.name} is spared, and SSD has some of it"


def _claims(cache: Cache) -> Iterator[str]:
    unwritten = cache.state.unwritten
    dirty = {s for s in cache.state.segments.values() if s.is_dirty}
    spared = {s for uid in cache.state.by_uid if unwritten.is_spared(uid) for s in unwritten.segments(uid)}
    reserved = {run.segment for r in cache.writing.reservations() for run in r.runs}
    for what, known_bytes, segments in (
        ("dirty", unwritten.dirty_bytes, dirty),
        ("due", unwritten.due_bytes, dirty - spared),
        ("claimed", unwritten.claimed_bytes, (dirty | reserved) - spared),
    ):
        if known_bytes != sum(segment.layout.size_bytes for segment in segments):
            yield f"{known_bytes} B are counted as {what}, and are not"


def _placement(cache: Cache) -> Iterator[str]:
    placement, by_uid = cache.placement, cache.state.by_uid
    uses = Counter(lease.view.uid for lease in cache.reading.leases())
    uses.update(reservation.session.uid for reservation in cache.writing.reservations())
    if placement.use_counts() != {uid: uses[uid] for uid in by_uid}:
        yield "sessions in use, as placement knows them, are not those that are leased or written"
    for session in by_uid.values():
        is_in_dram = all(segment.dram for segment in session.shown)
        if placement.is_in_dram(session) and not is_in_dram:
            yield f"{session.name} is taken to be in DRAM and is not"
    unwritten = cache.state.unwritten
    rankings = (cache.state.resident, cache.state.evictable, unwritten.ranking, unwritten.spared)
    late = {uid for ranking in rankings for uid in ranking.overtaken()}
    # One without a segment has nothing that could leave, and is placed nowhere.
    if any(uid not in by_uid or by_uid[uid].segments for uid in late):
        yield "sessions leave too late: nobody told that their ranks fell"
    if any(not segment.dram or segment.is_discarded for segment in placement.unread()):
        yield "something promoted ahead of need is not there, and may still be used"


def _session(session: Session) -> Iterator[str]:
    if session.is_gone:
        yield f"{session.name} is gone and still known"
    if not session.durable_end <= session.recorded_end <= session.log_end:
        yield f"{session.name}: durable {session.durable_end}, recorded {session.recorded_end}, log {session.log_end}"
    if any(a.begin >= b.begin for a, b in pairwise(session.segments)):
        yield f"{session.name}: segments are out of order"
    if session.token_count != ranges.count(session.live):
        yield f"{session.name}: {session.token_count} tokens are counted, {ranges.count(session.live)} are live"
    dram = [s.dram.size_bytes for s in session.segments if s.dram]
    ssd = [s.ssd.size_bytes for s in session.segments if s.ssd]
    if session.amounts() != (len(dram), sum(dram), sum(ssd)):
        yield f"{session.name}: what it has in DRAM and on SSD is miscounted"
    covered = sum(p.row_end - p.row_begin for p in session.pieces(0, session.token_count))
    if covered != session.token_count:
        yield f"{session.name}: {session.token_count} tokens, rows for {covered}"


def _references(cache: Cache) -> Iterator[str]:
    counts = Counter(segment for session in cache.state.by_uid.values() for segment in session.segments)
    if set(counts) != set(cache.state.segments.values()):
        yield "segments known and segments listed differ"
    for segment, count in counts.items():
        if segment.session_count != count or segment.is_discarded:
            yield f"segment {segment.segment_id}: {count} sessions list it, {segment.session_count} counted"
        if len(cache.state.listers(segment)) != count:
            yield f"segment {segment.segment_id}: not all that list it are found"
        if not segment.dram and (not segment.ssd or segment.is_dirty):
            yield f"segment {segment.segment_id}: rows that are nowhere"
        if segment.dram and not covers(segment.sums, segment.row_count):
            yield f"segment {segment.segment_id}: nobody said what its rows are"


def _holds(known: Iterable[Segment], holders: Counter[Segment]) -> Iterator[str]:
    for segment in known:
        if segment.hold_count != holders[segment]:
            yield f"segment {segment.segment_id}: {segment.hold_count} holds, {holders[segment]} holders"


def _pins(cache: Cache) -> Iterator[str]:
    leased = {
        segment_id: size for lease in cache.reading.leases() for segment_id, size in lease.pinned.items()
    }
    reserved = {segment.segment_id: segment.layout.size_bytes for segment in cache.writing.held()}
    for what, pins, held in (
        ("leases", cache.reading.pins, leased),
        ("reservations", cache.writing.pins, reserved),
    ):
        if set(pins.budget.pinned()) != set(held) or pins.budget.used_bytes != sum(held.values()):
            yield f"{what}: {pins.budget.used_bytes} B are counted as pinned, {sum(held.values())} B are"


def _space(cache: Cache, known: Iterable[Segment]) -> Iterator[str]:
    dram = [*(segment.dram for segment in known if segment.dram), *cache.residency.spoiled]
    recorded = {segment.ssd for segment in known if segment.ssd}
    ssd = [
        *(recorded | cache.residency.stranded | cache.residency.quarantined),
        *(written.slot for written in cache.residency.staged),
    ]
    for name, allocator, slots in (("DRAM", cache.residency.dram, dram), ("SSD", cache.residency.ssd, ssd)):
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
    usage = cache.state.usage
    counted: Counter[tuple[str, str]] = Counter()
    for segment in known:
        sizes = {
            "DRAM": segment.dram.size_bytes if segment.dram else 0,
            "SSD": segment.ssd.size_bytes if segment.ssd else 0,
            "all": segment.layout.size_bytes if segment.dram or segment.ssd else 0,
        }
        counted.update({(segment.tenant, where): size_bytes for where, size_bytes in sizes.items()})
    for staged in cache.residency.staged:
        counted[staged.segment.tenant, "SSD"] += staged.slot.size_bytes
    for tenant in usage.tenants():
        use = usage.of(tenant)
        for where, size_bytes in (("DRAM", use.dram_bytes), ("SSD", use.ssd_bytes), ("all", use.kept_bytes)):
            if size_bytes != counted[tenant, where]:
                yield f"{tenant}: {size_bytes} B counted ({where}), {counted[tenant, where]} B are there"
