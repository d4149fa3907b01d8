"""The ledger against dictionaries: events in any order, and what must be so after each of them.

The model knows of a segment its rows, its slots and who holds it, and of a session its tokens. It has no
index: what may leave, what is unwritten and what everything adds up to is worked out anew at every step.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from integrity import ledger_faults
from ledger_rig import SECOND_NS, SIZE, SUM, TTL_NS, Flush, LedgerRig, Writer

from ctxcache.core import ranges
from ctxcache.core.ledger.ledger import Drop, Flushed, GiveUp
from ctxcache.core.ledger.places import Backlog
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.errors import SessionNotFound
from ctxcache.format.checksums import Sums
from ctxcache.format.layout import Slot

# Sampled, not drawn: hypothesis prefers small numbers.
picks = st.sampled_from(range(24))
counts = st.sampled_from([1, 2, 3, 4, 5, 8, 9])
seldom = st.sampled_from([False] * 4 + [True])
often = st.sampled_from([True] * 4 + [False])


@dataclass(eq=False)
class Rows:
    """A segment, as the model knows it."""

    tenant: str
    begin: int
    memory: Slot | None
    below: Slot | None = None
    count: int = 0
    durable_count: int = 0
    hold_count: int = 0
    past_count: int = 0
    is_claimed: bool = True
    is_bare: bool = False
    """Whether no record names it, or none does any more."""
    is_spoiling: bool = False
    listers: set[str] = field(default_factory=set)

    @property
    def is_unwritten(self) -> bool:
        """Whether memory alone has some of it."""
        return self.durable_count < self.count


@dataclass(eq=False)
class Known:
    """A session, as the model knows it."""

    session: Session
    tokens: list[tuple[int, Segment]] = field(default_factory=list)
    """Positions, and where their rows are, withheld ones too."""
    log_end: int = 0
    recorded_end: int = 0
    durable_end: int = 0
    read_count: int = 0
    writer: Writer | None = None
    is_pinned: bool = False
    is_spared: bool = False
    expire_ns: int = 0

    @property
    def key(self) -> str:
        """The session's key."""
        return f"{self.session.tenant}/{self.session.session_id}"

    @property
    def segments(self) -> list[Segment]:
        """Those that it lists, in order."""
        return list(dict.fromkeys(segment for _, segment in self.tokens))

    @property
    def is_behind(self) -> bool:
        """Whether something of its log is not durable."""
        return self.durable_end < self.log_end


class LedgerMachine(RuleBasedStateMachine):
    """Drives a ledger, and does to dictionaries what that should mean."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = LedgerRig()
        self.ledger = self.rig.ledger
        self.known: dict[str, Known] = {}
        self.rows: dict[Segment, Rows] = {}
        self.writers: list[tuple[Known, Writer]] = []
        self.leases: list[tuple[Known, list[tuple[Segment, bool]]]] = []
        self.flushes: list[tuple[Known, Flush]] = []
        self.promotions: list[tuple[Segment, Slot]] = []
        self.removals: list[list[Segment]] = []
        self.stranded: set[Slot] = set()
        self.quarantined: set[Slot] = set()
        self.spoiled: set[Slot] = set()

    # -- what the model knows ----------------------------------------------------------------------

    def _pick(self, pick: int) -> Known | None:
        """A session that can be found."""
        known = list(self.known.values())
        found = known[pick % len(known)] if known else None
        if found is None or found.expire_ns <= self.rig.clock.ns:
            return None
        session = found.session
        assert self.ledger.find(session.tenant, session.session_id) is session
        assert session.token_count == len(self._shown(found))
        return found

    def _is_lost(self, rows: Rows) -> bool:
        return rows.below is not None and rows.below.path_index in self.ledger.lost.paths

    def _shown(self, known: Known) -> list[tuple[int, Segment]]:
        missing = [
            self.rows[segment].begin
            for segment in known.segments
            if self._is_lost(self.rows[segment]) and self.rows[segment].memory is None
        ]
        return [token for token in known.tokens if token[0] < min(missing, default=known.log_end)]

    def _is_clean(self, rows: Rows) -> bool:
        is_free = rows.memory is not None and not rows.is_unwritten and rows.hold_count == rows.past_count
        return is_free and not (self._is_lost(rows) and self.rig.paths.has_open_path)

    def _is_removable(self, known: Known) -> bool:
        if known.is_pinned or known.read_count or known.writer:
            return False
        of = [self.rows[segment] for segment in known.segments]
        held = [rows for rows in of if rows.hold_count]
        is_shared = all(len(rows.listers) > 1 for rows in held)
        return not held or (is_shared and any(len(rows.listers) == 1 for rows in of))

    def _hold(self, segment: Segment, *, is_past: bool = False) -> None:
        self.rows[segment].hold_count += 1
        self.rows[segment].past_count += is_past

    def _release(self, segment: Segment, *, is_past: bool = False) -> None:
        rows = self.rows[segment]
        rows.hold_count -= 1
        rows.past_count -= is_past
        self._spoil(rows)
        if rows.is_bare and not rows.listers:
            self._empty(rows)

    def _spoil(self, rows: Rows) -> None:
        if rows.is_spoiling and not rows.is_unwritten and rows.hold_count == rows.past_count:
            self._leave_memory(rows)

    def _leave_memory(self, rows: Rows) -> None:
        if rows.memory and rows.is_spoiling:
            self.spoiled.add(rows.memory)
        rows.memory, rows.is_spoiling = None, False

    def _empty(self, rows: Rows) -> None:
        if rows.hold_count and not self._is_clean(rows):
            return
        self._leave_memory(rows)
        if not rows.hold_count:
            rows.below = None

    def _unlisted(self, known: Known, tokens: list[tuple[int, Segment]], dead: Iterable[Segment]) -> None:
        """Only these tokens are left of the session."""
        before = known.segments
        known.tokens = tokens
        expected = set()
        for segment in set(before) - set(known.segments):
            rows = self.rows[segment]
            rows.listers.discard(known.key)
            if not rows.listers:
                expected.add(segment)
                known.is_spared = known.is_spared and not rows.is_unwritten
        dead = list(dead)
        assert set(dead) == expected
        if dead:
            self.removals.append(dead)

    def _ended(self, known: Known, *, is_evicted: bool = False) -> None:
        dead = self.ledger.ended(known.session, is_evicted=is_evicted)
        del self.known[known.key]
        self._unlisted(known, [], dead)

    def _truncated(self, known: Known, tokens: list[tuple[int, Segment]]) -> None:
        live = ranges.normalise([(position, position + 1) for position, _ in tokens])
        dead = self.ledger.truncated(known.session, live)
        self._unlisted(known, tokens, dead)

    def _forgotten(self, dead: Iterable[Segment]) -> None:
        for segment in dead:
            self.rows[segment].is_bare = True
            self._empty(self.rows[segment])

    def _cut(self, segment: Segment, begin: int) -> None:
        for known in list(self.known.values()):
            if segment in known.segments:
                # As the cache does: tokens that the session withholds do not come back by a cut.
                live = known.session.live
                end = min(begin, live[-1][1] if live else 0)
                self._truncated(known, [t for t in known.tokens if t[0] < end])

    # -- sessions ----------------------------------------------------------------------------------

    @initialize(first=counts, second=counts)
    def begin(self, first: int, second: int) -> None:
        """Something is there: hypothesis leaves out some rules in each run."""
        for tenant, name, count in (("a", "s", first), ("b", "s", second), ("a", "t", 4)):
            self.open(tenant, name, is_pinned=False)
            self.append(len(self.known) - 1, count, is_flushed=name == "s")

    @rule(tenant=st.sampled_from("ab"), name=st.sampled_from("stu"), is_pinned=seldom)
    def open(self, tenant: str, name: str, *, is_pinned: bool) -> None:
        """Create a session; one that has expired makes place for it."""
        before = self.known.get(f"{tenant}/{name}")
        if before is not None:
            if before.expire_ns > self.rig.clock.ns or before.writer:
                return
            self._ended(before)
        session = self.rig.opened(name, tenant, is_pinned=is_pinned)
        known = Known(session, is_pinned=is_pinned, expire_ns=self.rig.clock.ns + TTL_NS)
        self.known[known.key] = known

    @precondition(lambda self: self.known)
    @rule(pick=picks, name=st.sampled_from("stuv"), part=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def fork(self, pick: int, name: str, part: float) -> None:
        """Share the first tokens of a durable session."""
        source = self._pick(pick)
        if source is None or source.writer or source.is_behind:
            return
        if f"{source.session.tenant}/{name}" in self.known:
            return
        tokens = self._shown(source)
        tokens = tokens[: int(len(tokens) * part)]
        session = self.rig.forked(source.session, name, len(tokens))
        fork = Known(session, tokens, expire_ns=self.rig.clock.ns + TTL_NS)
        fork.log_end = max((s.begin + self.rows[s].count for s in fork.segments), default=0)
        fork.recorded_end = fork.durable_end = fork.log_end
        self.known[fork.key] = fork
        source.expire_ns = self.rig.clock.ns + TTL_NS
        for segment in fork.segments:
            self.rows[segment].listers.add(fork.key)

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def touch(self, pick: int) -> None:
        """An access that is over at once."""
        known = self._pick(pick)
        if known is not None:
            self.ledger.touched(known.session, self.rig.clock.ns)
            self.ledger.visited(known.session)
            known.expire_ns = self.rig.clock.ns + TTL_NS

    @precondition(lambda self: self.known)
    @rule(pick=picks, is_pinned=st.booleans())
    def pin(self, pick: int, *, is_pinned: bool) -> None:
        """The session may leave, or may not."""
        known = self._pick(pick)
        if known is not None:
            self.ledger.pinned(known.session, is_pinned=is_pinned)
            known.is_pinned = is_pinned

    @precondition(lambda self: self.known)
    @rule(pick=picks, begin=picks, count=counts)
    def drop_tokens(self, pick: int, begin: int, count: int) -> None:
        """Truncate: some tokens of those that are shown go."""
        known = self._pick(pick)
        if known is None or known.writer:
            return
        shown = self._shown(known)
        kept = shown[: begin % (len(shown) + 1)]
        kept += shown[len(kept) + count :]
        if kept != shown:
            self._truncated(known, kept)
            self.ledger.visited(known.session)

    @precondition(lambda self: self.known)
    @rule(pick=picks, is_evicted=st.booleans(), fate=st.sampled_from(["later", "well", "stranded"]))
    def end(self, pick: int, fate: str, *, is_evicted: bool) -> None:
        """Delete a session, or give it up on request; its records go at once or later."""
        known = self._pick(pick)
        if known is not None and not known.writer:
            before = len(self.removals)
            self._ended(known, is_evicted=is_evicted)
            if fate != "later" and len(self.removals) > before:
                self.remove(before, is_well=fate == "well")

    @precondition(lambda self: self.known)
    @rule(pick=picks, is_past=st.booleans(), is_well=st.booleans())
    def end_while_read(self, pick: int, *, is_past: bool, is_well: bool) -> None:
        """Delete a durable session that a reader holds."""
        self.write_down(pick)
        if is_past:
            self.demote(pick)
        self.lease(pick, is_past=is_past)
        self.end(pick, "well" if is_well else "stranded", is_evicted=False)

    @precondition(lambda self: self.known)
    @rule(pick=picks, count=counts)
    def commit_while_flushed(self, pick: int, count: int) -> None:
        """Rows come while those before them are written."""
        before = len(self.writers), len(self.flushes)
        self.reserve(pick, count + 2)
        if len(self.writers) > before[0]:
            self.commit(len(self.writers) - 1, count)
            self.flush(pick)
            self.commit(len(self.writers) - 1, 1)
            if len(self.flushes) > before[1]:
                self.go_on_flushing(len(self.flushes) - 1, is_well=True)

    @rule(seconds=st.sampled_from([1, 1, 1, 1, 5, 5, 40, 101]))
    def wait(self, seconds: int) -> None:
        """Time passes."""
        self.rig.clock.ns += seconds * SECOND_NS
        self.ledger.placement.passed()

    @precondition(lambda self: self.known)
    @rule()
    def expire(self) -> None:
        """Expired sessions go, but for those that are written."""
        now_ns = self.rig.clock.ns
        waiting = []
        while due := self.ledger.due(now_ns, limit=2):
            for session in due:
                known = self.known[f"{session.tenant}/{session.session_id}"]
                assert known.session is session
                assert known.expire_ns <= now_ns
                if known.writer:
                    waiting.append(session)
                else:
                    self._ended(known)
        for session in waiting:
            self.ledger.still_due(session, now_ns)
        assert all(known.expire_ns > now_ns or known.writer for known in self.known.values())

    @precondition(lambda self: self.removals)
    @rule(pick=picks, is_well=often)
    def remove(self, pick: int, *, is_well: bool) -> None:
        """The records of dead segments are gone, or may be there."""
        if self.removals:
            dead = self.removals.pop(pick % len(self.removals))
            if not is_well:
                self.stranded |= {slot for segment in dead if (slot := self.rows[segment].below)}
            self.rig.removed(dead, is_well=is_well)
            self._forgotten(dead)

    @precondition(lambda self: self.stranded)
    @rule()
    def unstrand(self) -> None:
        """The metadata takes changes again."""
        self.ledger.unstranded(sorted(self.stranded))
        self.stranded.clear()

    # -- reading -----------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(pick=picks, is_past=st.booleans())
    def lease(self, pick: int, *, is_past: bool) -> None:
        """A reader holds what is shown; what lies below it may read there."""
        known = self._pick(pick)
        if known is None:
            return
        segments = dict.fromkeys(segment for _, segment in self._shown(known))
        held = [(segment, is_past and self.rows[segment].memory is None) for segment in segments]
        self.ledger.touched(known.session, self.rig.clock.ns)
        known.expire_ns = self.rig.clock.ns + TTL_NS
        self.ledger.read_began(
            known.session, known.session.pieces(0, known.session.token_count), self.rig.clock.ns / 10**9
        )
        known.read_count += 1
        for segment, is_past_it in held:
            self.ledger.held(segment, is_past=is_past_it)
            self._hold(segment, is_past=is_past_it)
        self.leases.append((known, held))

    @precondition(lambda self: self.leases)
    @rule(pick=picks)
    def end_lease(self, pick: int) -> None:
        """A reader is done."""
        if self.leases:
            known, held = self.leases.pop(pick % len(self.leases))
            self.ledger.read_ended(known.session.uid, self.rig.clock.ns / 10**9)
            known.read_count -= 1
            for segment, is_past in held:
                self.ledger.released(segment, is_past=is_past)
                self._release(segment, is_past=is_past)

    # -- writing -----------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(pick=picks, count=counts)
    def reserve(self, pick: int, count: int) -> None:
        """A writer gets room, as far as memory goes."""
        known = self._pick(pick)
        if known is None or known.writer:
            return
        if len(self._shown(known)) < len(known.tokens):
            self._truncated(known, self._shown(known))
        writer = known.writer = self.rig.write_began(known.session)
        known.expire_ns, known.is_spared = self.rig.clock.ns + TTL_NS, False
        self.writers.append((known, writer))
        self._extend(writer, count)

    @precondition(lambda self: self.writers)
    @rule(pick=picks, count=counts)
    def extend(self, pick: int, count: int) -> None:
        """A writer gets more room."""
        if self.writers:
            self._extend(self.writers[pick % len(self.writers)][1], count)

    def _extend(self, writer: Writer, count: int) -> None:
        before = {segment for segment, _ in writer.runs}
        self.rig.room(writer, count)
        for segment, _ in writer.runs:
            if segment not in self.rows:
                self.rows[segment] = Rows(segment.tenant, segment.begin, segment.memory)
            if segment not in before:
                self.rows[segment].is_claimed = True
                self._hold(segment)

    @precondition(lambda self: self.writers)
    @rule(pick=picks, count=counts)
    def commit(self, pick: int, count: int) -> None:
        """Rows become visible; a session that changed under its writer or has expired takes none."""
        if not self.writers:
            return
        known, writer = self.writers[pick % len(self.writers)]
        is_other = known.session.is_gone or known.session.token_count != writer.committed
        if is_other or known.expire_ns <= self.rig.clock.ns:
            self._write_ended(known, writer)
            return
        runs, left = list(writer.runs), count
        assert self.rig.committed(writer, count) <= count
        for segment, row_end in runs:
            rows = self.rows[segment]
            added = min(row_end - rows.count, left)
            left -= added
            for _ in range(added):
                assert rows.begin + rows.count == known.log_end
                known.tokens.append((known.log_end, segment))
                rows.listers.add(known.key)
                rows.count += 1
                known.log_end += 1
        if left < count:
            known.is_spared = False
        known.expire_ns = self.rig.clock.ns + TTL_NS
        for segment, _ in runs[: len(runs) - len(writer.runs)]:
            self.rows[segment].is_claimed = False
            self._release(segment)

    @precondition(lambda self: self.writers)
    @rule(pick=picks)
    def end_write(self, pick: int) -> None:
        """A writer is done."""
        if self.writers:
            self._write_ended(*self.writers[pick % len(self.writers)])

    def _write_ended(self, known: Known, writer: Writer) -> None:
        self.writers.remove((known, writer))
        self.rig.write_ended(writer)
        known.writer = None
        for segment, _ in writer.runs:
            rows = self.rows[segment]
            rows.is_claimed, rows.is_bare = False, rows.is_bare or not rows.count
            self._release(segment)

    @precondition(lambda self: self.known)
    @rule(pick=picks, count=counts, is_flushed=st.booleans())
    def append(self, pick: int, count: int, *, is_flushed: bool) -> None:
        """A whole append, durable or not."""
        known = self._pick(pick)
        if known is None or known.writer:
            return
        self.reserve(pick, count)
        self.commit(len(self.writers) - 1, count)
        self.end_write(len(self.writers) - 1)
        if is_flushed:
            self.write_down(pick)

    # -- flushing ----------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def write_down(self, pick: int) -> None:
        """A whole flush, if its devices take it."""
        before = len(self.flushes)
        self.flush(pick)
        if len(self.flushes) > before:
            mine = self.flushes[-1]
            while mine in self.flushes:
                self.go_on_flushing(self.flushes.index(mine), is_well=True)

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def flush(self, pick: int) -> None:
        """A flush begins; a session has one at a time."""
        known = self._pick(pick)
        if known is None or not known.is_behind or any(of is known for of, _ in self.flushes):
            return
        flush = self.rig.flush_began(known.session)
        if flush is not None:
            self.flushes.append((known, flush))
            unwritten = [segment for segment in known.segments if self.rows[segment].is_unwritten]
            assert [item.segment for item in flush.items] == unwritten
            for segment in unwritten:
                self._hold(segment)

    @precondition(lambda self: self.flushes)
    @rule(pick=picks, is_well=often)
    def go_on_flushing(self, pick: int, *, is_well: bool) -> None:
        """Its rows are synced, or a device refused; then its record is durable, or nobody knows."""
        if not self.flushes:
            return
        known, flush = self.flushes[pick % len(self.flushes)]
        if (
            not flush.is_told
            and is_well
            and not any(i.slot.path_index in self.ledger.lost.paths for i in flush.items)
        ):
            self.rig.flushed(flush)
            if not known.session.is_gone:
                self._flushed(known, flush)
            return
        self.flushes.remove((known, flush))
        if not flush.is_told:
            self.rig.flush_failed(flush)
        else:
            self.rig.flush_ended(flush, is_well=is_well)
            if not is_well:
                self.stranded |= flush.replaced
            elif not known.session.is_gone:
                known.durable_end = max(known.durable_end, flush.end)
                known.is_spared = False
        for item in flush.items:
            self._release(item.segment)

    def _flushed(self, known: Known, flush: Flush) -> None:
        known.recorded_end, known.is_spared = flush.end, False
        for item in flush.items:
            rows = self.rows[item.segment]
            if rows.listers and item.row_count <= rows.count:
                rows.below, rows.durable_count = item.slot, item.row_count

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def spare(self, pick: int) -> None:
        """A session is not worth its place below, if the ledger says so."""
        known = self._pick(pick)
        if known is None or not known.is_behind:
            return
        known.is_spared = self.ledger.spares(known.session)
        if known.is_spared:
            assert known.read_count == 0
            assert known.writer is None
            assert (known.is_pinned, known.recorded_end) == (False, 0)
            assert not any(self.rows[segment].below for segment in known.segments)

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def write_behind(self, pick: int) -> None:
        """A session is looked at to be written, and put back."""
        known = self._pick(pick)
        if known is not None and known.is_behind and not known.is_spared:
            self.ledger.unwritten.taken(known.session)
            self.ledger.unwritten.put_back(known.session)

    # -- memory ------------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule()
    def leave_memory(self) -> None:
        """The ledger's next move out of memory is carried out."""
        move = self.ledger.next_out_of_memory(None, lambda session: session.is_idle)
        for known in self.known.values():
            if known.is_spared:
                known.is_spared = known.session.backlog is Backlog.SPARED
        if isinstance(move, Drop):
            rows = self.rows[move.segment]
            assert rows.listers
            assert self._is_clean(rows)
            self.ledger.dropped(move.segment)
            self._leave_memory(rows)
        elif isinstance(move, GiveUp):
            known = self.known[f"{move.session.tenant}/{move.session.session_id}"]
            assert known.is_spared
            assert self._is_removable(known)
            assert not any(self.rows[segment].below for segment in known.segments)
            segments = known.segments
            self._ended(known, is_evicted=True)
            self.removals.remove(segments)
            self.rig.removed(segments)
            self._forgotten(segments)
        else:
            assert not any(self._is_clean(rows) for rows in self.rows.values() if rows.listers)

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def demote(self, pick: int) -> None:
        """Segments of a session that may leave memory do."""
        known = self._pick(pick)
        for segment in known.segments if known else ():
            rows = self.rows[segment]
            assert self.ledger.is_clean(segment) == self._is_clean(rows)
            if self.ledger.is_clean(segment):
                self.ledger.dropped(segment)
                self._leave_memory(rows)

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def promote(self, pick: int) -> None:
        """A segment that lies below begins to come back."""
        some = [s for s, r in self.rows.items() if r.listers and r.memory is None and not self._is_lost(r)]
        some = [s for s in some if all(s is not other for other, _ in self.promotions)]
        if some:
            segment = some[pick % len(some)]
            slot = self.rig.promote_began(segment)
            if slot is not None:
                self._hold(segment)
                self.promotions.append((segment, slot))

    @precondition(lambda self: self.promotions)
    @rule(pick=picks, is_well=often)
    def end_promotion(self, pick: int, *, is_well: bool) -> None:
        """It is there, or could not be read."""
        if self.promotions:
            segment, slot = self.promotions.pop(pick % len(self.promotions))
            rows = self.rows[segment]
            is_well = is_well and not self._is_lost(rows)
            if is_well and rows.below and not rows.memory:
                rows.memory = slot
            self.rig.promote_ended(segment, slot, is_well=is_well)
            self._release(segment)

    # -- who leaves the store ----------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def evict_from_below(self, pick: int) -> None:
        """The coldest session that gives room on a path that takes writes goes."""
        comer = self._pick(pick)
        if comer is None:
            return
        victim = self.ledger.leaving.from_below(comer.session, SIZE)
        fit = {known.session.uid for known in self.known.values() if self._gives_room(known, comer)}
        assert (victim is None) == (not fit)
        if victim is not None:
            assert victim.uid in fit
            self._ended(self.known[f"{victim.tenant}/{victim.session_id}"], is_evicted=True)

    def _gives_room(self, known: Known, comer: Known) -> bool:
        slots = [self.rows[segment].below for segment in known.segments]
        closed = self.rig.paths.closed_paths
        is_room = any(slot and slot.path_index not in closed for slot in slots)
        return known is not comer and is_room and self._is_removable(known)

    @precondition(lambda self: self.known)
    @rule()
    def evict_from_memory(self) -> None:
        """The coldest session that memory alone has goes."""
        victim = self.ledger.leaving.from_memory(None)
        fit = {k.session.uid for k in self.known.values() if k.is_behind and self._is_removable(k)}
        assert (victim is None) == (not fit)
        if victim is not None:
            assert victim.uid in fit
            self._ended(self.known[f"{victim.tenant}/{victim.session_id}"], is_evicted=True)

    # -- what is bad -------------------------------------------------------------------------------

    @precondition(lambda self: self.known)
    @rule(pick=picks)
    def shorten(self, pick: int) -> None:
        """Memory loses rows that nothing below has."""
        some = [s for s, r in self.rows.items() if r.listers and r.durable_count and r.is_unwritten]
        if some:
            segment = some[pick % len(some)]
            rows = self.rows[segment]
            self.ledger.held(segment)
            self._hold(segment)
            sessions = self.ledger.shortened(segment, Sums(0, rows.durable_count, SUM))
            assert {f"{s.tenant}/{s.session_id}" for s in sessions} == rows.listers
            rows.count = rows.durable_count
            for key in rows.listers:
                self.known[key].is_spared = False
            self._cut(segment, rows.begin + rows.count)
            self.ledger.released(segment)
            self._release(segment)

    @precondition(lambda self: self.rows)
    @rule(pick=picks)
    def corrupt(self, pick: int) -> None:
        """A segment's rows below are bad: listed, on its way out, or held by a reader alone."""
        some = [s for s, r in self.rows.items() if r.below]
        if some:
            segment = some[pick % len(some)]
            rows = self.rows[segment]
            self.ledger.held(segment)
            self._hold(segment)
            self._cut(segment, rows.begin)
            slots = self.ledger.disowned(segment, is_bad=True)
            assert slots == (rows.below,)
            self.quarantined.update(slots)
            rows.below = None
            self.ledger.released(segment)
            self._release(segment)

    @precondition(lambda self: self.quarantined)
    @rule(pick=picks)
    def unquarantine(self, pick: int) -> None:
        """A bad slot turns out to keep what is written there."""
        if self.quarantined:
            slot = sorted(self.quarantined)[pick % len(self.quarantined)]
            self.ledger.unquarantined(slot)
            self.quarantined.remove(slot)

    @precondition(lambda self: self.rows)
    @rule(pick=picks, is_kept=often)
    def spoil(self, pick: int, *, is_kept: bool) -> None:
        """A slot in memory does not keep what is put there."""
        some = [s for s, r in self.rows.items() if r.listers and r.memory and not r.is_unwritten]
        if some and not is_kept:
            segment = some[pick % len(some)]
            self.ledger.held(segment)
            self._hold(segment)
            self.ledger.spoiled(segment)
            self.rows[segment].is_spoiling = True
            self.ledger.released(segment)
            self._release(segment)

    # -- paths -------------------------------------------------------------------------------------

    @rule(path=st.sampled_from([0, 1]), is_lost=st.booleans(), is_refusing=seldom)
    def lose_or_return(self, path: int, *, is_lost: bool, is_refusing: bool) -> None:
        """A path is lost, comes back, or takes no writes."""
        lost = dict(self.ledger.lost.paths)
        lost.pop(path, None)
        self.rig.paths.closed_paths.discard(path)
        if is_lost or is_refusing:
            self.rig.paths.closed_paths.add(path)
        if is_lost:
            lost[path] = f"path {path}"
        is_news = lost.keys() != self.ledger.lost.paths.keys()
        assert self.ledger.paths_lost(lost) == is_news

    @precondition(lambda self: self.known)
    @rule()
    def reckon(self) -> None:
        """Every session shows what can be had."""
        for known in self.known.values():
            self.ledger.lost.reckon(known.session)
            assert known.session.token_count == len(self._shown(known))
        fewer = {k.session.uid: len(k.tokens) - len(self._shown(k)) for k in self.known.values()}
        assert self.ledger.lost.withheld == {uid: count for uid, count in fewer.items() if count}

    @precondition(lambda self: self.ledger.lost.paths)
    @rule(pick=picks, is_well=often)
    def rescue(self, pick: int, *, is_well: bool) -> None:
        """Rows of a lost path that memory has are written elsewhere."""
        known = self._pick(pick)
        if known is None or any(of is known for of, _ in self.flushes):
            return
        tail = known.session.growing_tail if known.writer else None
        rows = self.rows
        some = [s for s in known.segments if rows[s].memory and self._is_lost(rows[s]) and s is not tail]
        items = self.rig.move_began(known.session, [s for s in some if not rows[s].is_unwritten])
        kept = self.rig.move_ended(items, is_well=is_well)
        for item in kept:
            slot = rows[item.segment].below
            if not is_well and slot:
                self.stranded.add(slot)
            rows[item.segment].below = item.slot
        self.ledger.lost.rescued(known.session)

    # -- what must be so after every step ------------------------------------------------------------

    @invariant()
    def adds_up(self) -> None:
        """The ledger says of itself that nothing is wrong."""
        assert list(ledger_faults(self.ledger)) == []

    @invariant()
    def segments_are_as_the_model_has_them(self) -> None:
        """Rows, slots and holds."""
        for segment, rows in self.rows.items():
            assert (segment.memory, segment.durable) == (rows.memory, rows.below)
            assert segment.row_count == rows.count
            assert segment.hold_count == rows.hold_count
            assert segment.is_listed == bool(rows.listers)
            assert self.ledger.segment(segment.segment_id) is (segment if rows.listers else None)

    @invariant()
    def every_slot_is_somewhere(self) -> None:
        """The taken slots of a shelf are those of segments, moves and bad places, each once."""
        memory = [rows.memory for rows in self.rows.values() if rows.memory]
        memory += [*self.spoiled, *(slot for _, slot in self.promotions)]
        assert sorted(memory) == sorted(self.rig.memory.taken)
        assert self.rig.memory.used_bytes == len(memory) * SIZE
        below = {rows.below for rows in self.rows.values() if rows.below}
        below |= self.stranded | self.quarantined | {item.slot for item in self._staged()}
        below |= {slot for _, flush in self.flushes for slot in flush.replaced}
        assert below == self.rig.below.taken
        assert self.rig.below.used_bytes == len(below) * SIZE
        assert (set(self.rig.below.stranded), self.rig.below.quarantined) == (
            self.stranded,
            self.quarantined,
        )
        assert self.rig.memory.spoiled == self.spoiled

    def _staged(self) -> list[Flushed]:
        return [item for _, flush in self.flushes if not flush.is_told for item in flush.items]

    @invariant()
    def tenants_have_what_they_use(self) -> None:
        """Usage, and what is dirty, due and claimed."""
        in_memory, below, kept, claimed = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
        spared = {s for known in self.known.values() if known.is_spared for s in known.segments}
        dirty = {s for s, rows in self.rows.items() if rows.listers and rows.is_unwritten}
        for segment, rows in self.rows.items():
            in_memory[rows.tenant] += SIZE * bool(rows.memory)
            below[rows.tenant] += SIZE * bool(rows.below)
            kept[rows.tenant] += SIZE * bool(rows.memory or rows.below)
            is_claimed = (segment in dirty and segment not in spared) or rows.is_claimed
            claimed[rows.tenant] += SIZE * is_claimed
        for item in self._staged():
            below[self.rows[item.segment].tenant] += SIZE
        usage = self.ledger.usage
        assert (usage.in_memory, usage.below, usage.kept) == (+in_memory, +below, +kept)
        assert self.ledger.unwritten.dirty_bytes == SIZE * len(dirty)
        assert self.ledger.unwritten.due_bytes == SIZE * len(dirty - spared)
        assert self.ledger.unwritten.claimed_bytes == claimed.total()
        assert self.ledger.unwritten.claimed_by == +claimed

    @invariant()
    def sessions_are_as_the_model_has_them(self) -> None:
        """Names, look-ups, backlogs, and sessions that are gone."""
        assert {f"{s.tenant}/{s.session_id}" for s in self.ledger.sessions()} == set(self.known)
        for tenant in "ab":
            names = sorted(k.session.session_id for k in self.known.values() if k.session.tenant == tenant)
            assert list(self.ledger.names.ids(tenant)) == names
            assert self.ledger.names.model_count(tenant, "m") == len(names)
            for name in set("stuv") - set(names):
                self._is_not_found(tenant, name)
        behind = {known.session.uid for known in self.known.values() if known.is_behind}
        assert {session.uid for session in self.ledger.unwritten.sessions()} == behind
        for known in self.known.values():
            assert known.session.segments == known.segments
            assert known.session.log_end == known.log_end
            assert known.session.durable_end == known.durable_end
            assert (known.session.backlog is Backlog.SPARED) == known.is_spared
            if known.expire_ns <= self.rig.clock.ns:
                self._is_not_found(known.session.tenant, known.session.session_id)

    def _is_not_found(self, tenant: str, name: str) -> None:
        try:
            self.ledger.find(tenant, name)
        except SessionNotFound:
            return
        raise AssertionError(f"{tenant}/{name} is found")
