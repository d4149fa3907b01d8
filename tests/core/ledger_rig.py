"""A ledger by itself.

A clock that is set, two small shelves, and callers that do in order what the cache does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from ctxcache.core import ranges
from ctxcache.core.ledger.ledger import Flushed, Ledger
from ctxcache.core.ledger.segment import Segment, Shelf
from ctxcache.core.ledger.session import Expiration, Session
from ctxcache.core.limits import DEFAULT_WATERMARKS, Limits
from ctxcache.core.observations import Observations
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.core.placement.shares import NO_SHARES
from ctxcache.format.checksums import Sums
from ctxcache.format.layout import SegmentLayout, Slot
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec

ROWS = 4
"""Rows of a segment: few, so that segments fill."""
LAYOUT = SegmentLayout((StreamSpec(Stream(0, StateKind.HIDDEN), 96, DType.FLOAT16),), ROWS)
SIZE = LAYOUT.size_bytes
SECOND_NS = 10**9
TTL_NS = 100 * SECOND_NS
SUM = (7,)
"""A writer's checksum of rows: this ledger has none."""


class SetClock:
    """Says what it was set to."""

    def __init__(self) -> None:
        self.ns = SECOND_NS

    def now_ns(self) -> int:
        """The store's time."""
        return self.ns

    def monotonic_ns(self) -> int:
        """For deadlines and ages."""
        return self.ns


@dataclass
class Paths:
    """The tier below: which of its paths take no writes."""

    path_count: int
    closed_paths: set[int] = field(default_factory=set)

    @property
    def has_open_path(self) -> bool:
        """Whether a path takes writes."""
        return len(self.closed_paths) < self.path_count


class Heard:
    """The ledger's wishes."""

    def __init__(self) -> None:
        self.gone: list[Segment] = []

    def prefetch_wanted(self) -> None:
        """See Wishes."""

    def write_wanted(self) -> None:
        """See Wishes."""

    def tokens_withheld(self, session: Session, token_count: int) -> None:
        """See Wishes."""

    def segment_gone(self, segment: Segment) -> None:
        """See Wishes."""
        self.gone.append(segment)


class CountedShelf(Shelf):
    """Knows by itself what is taken: no slot is handed out twice, none given back twice."""

    def __init__(self, capacities_bytes: Sequence[int]) -> None:
        super().__init__(capacities_bytes)
        self.taken: set[Slot] = set()

    def take(self, size_bytes: int, *, closed: Iterable[int] = (), on_path: int | None = None) -> Slot | None:
        """See Shelf."""
        slot = super().take(size_bytes, closed=set(closed), on_path=on_path)
        assert slot not in self.taken, f"{slot} is handed out twice"
        if slot is not None:
            self.taken.add(slot)
        return slot

    def give(self, slot: Slot) -> None:
        """See Shelf."""
        assert slot in self.taken, f"{slot} is given back twice"
        self.taken.remove(slot)
        super().give(slot)


@dataclass(eq=False)
class Writer:
    """A reservation: segments with room, each held and claimed once."""

    session: Session
    committed: int
    runs: list[tuple[Segment, int]] = field(default_factory=list)
    """Segments, and one past the last row that is reserved of each."""
    is_open: bool = True


@dataclass(eq=False)
class Flush:
    """A flush under way: what it writes, and where to."""

    session: Session
    end: int
    begun_ns: int
    items: list[Flushed] = field(default_factory=list)
    replaced: set[Slot] = field(default_factory=set)
    is_told: bool = False
    """Whether the ledger knows, and the record is being committed."""


class LedgerRig:
    """A ledger, and its callers."""

    def __init__(self, memory_slots: int = 8, below_slots: Sequence[int] = (6, 6)) -> None:
        self.clock, self.heard = SetClock(), Heard()
        self.paths = Paths(len(below_slots))
        self.memory = CountedShelf([memory_slots * SIZE])
        self.below = CountedShelf([slots * SIZE for slots in below_slots])
        self.ledger = Ledger(
            self.clock,
            LeastRecentlyUsed(),
            self.memory,
            self.below,
            self.paths,
            limits=Limits(),
            shares=NO_SHARES,
            watermarks=DEFAULT_WATERMARKS,
            seen=Observations(),
            wishes=self.heard,
        )
        self._uids = count(1)

    # -- sessions ----------------------------------------------------------------------------------

    def blank(self, name: str, tenant: str = "a", live: ranges.Ranges = ()) -> Session:
        """A session that the ledger does not know."""
        now_ns = self.clock.ns
        return Session(
            uid=next(self._uids).to_bytes(16),
            tenant=tenant,
            session_id=name,
            model_id="m",
            model_fingerprint=bytes(32),
            layout=LAYOUT,
            expiration=Expiration(TTL_NS),
            create_time_ns=now_ns,
            access_time_ns=now_ns,
            expire_time_ns=now_ns + TTL_NS,
            live=live,
        )

    def opened(self, name: str, tenant: str = "a", *, is_pinned: bool = False) -> Session:
        """A session that is created."""
        session = self.blank(name, tenant)
        session.is_pinned = is_pinned
        self.ledger.opened(session)
        return session

    def forked(self, source: Session, name: str, token_count: int) -> Session:
        """A session that shares the source's first tokens, all of which are durable."""
        positions = ranges.select(source.live, 0, token_count)
        self.ledger.shared(source, source.segments_of(positions))
        fork = self.blank(name, source.tenant, positions)
        fork.segments = source.segments_of(positions)
        fork.log_end = max((segment.end for segment in fork.segments), default=0)
        fork.recorded_end = fork.durable_end = fork.log_end
        fork.path = source.path
        self.ledger.closed(fork.segments)
        self.ledger.touched(source, self.clock.ns)
        self.ledger.opened(fork)
        self.ledger.forked(source, fork)
        return fork

    def removed(self, dead: Iterable[Segment], *, is_well: bool = True) -> None:
        """The records of segments that no session lists are gone, or may be there: the commit failed."""
        dead = list(dead)
        if not is_well:
            self.ledger.stranded_with(dead)
        for segment in dead:
            self.ledger.forgotten(segment)

    # -- writing -----------------------------------------------------------------------------------

    def write_began(self, session: Session) -> Writer:
        """A writer has the session, and no room yet."""
        self.ledger.touched(session, self.clock.ns)
        self.ledger.write_began(session, self.clock.ns / 10**9)
        return Writer(session, session.token_count)

    def room(self, writer: Writer, token_count: int) -> bool:
        """Reserve so much more, as far as memory goes; whether it went all the way."""
        while token_count:
            segment, row = self._last(writer)
            if segment is None:
                slot = self.memory.take(SIZE)
                if slot is None:
                    return False
                begin = writer.runs[-1][0].begin + ROWS if writer.runs else writer.session.log_end
                segment_id, layout = self.ledger.new_segment_id(), writer.session.layout
                segment, row = self.ledger.reserved(writer.session, segment_id, begin, layout, slot), 0
            added = min(token_count, ROWS - row)
            if writer.runs and writer.runs[-1][0] is segment:
                writer.runs[-1] = segment, row + added
            else:
                self.ledger.unwritten.promise(writer.session.tenant, self.ledger.unwritten.new_bytes(segment))
                self.ledger.held(segment)
                self.ledger.unwritten.promise(writer.session.tenant, -self.ledger.unwritten.reserve(segment))
                writer.runs.append((segment, row + added))
            token_count -= added
        return True

    def _last(self, writer: Writer) -> tuple[Segment | None, int]:
        if writer.runs:
            segment, row = writer.runs[-1]
            return (segment, row) if row < ROWS else (None, 0)
        tail = writer.session.growing_tail
        return (tail, tail.row_count) if tail and tail.memory else (None, 0)

    def committed(self, writer: Writer, token_count: int) -> int:
        """Show up to so many of the reserved tokens; returns how many that were."""
        left, session = token_count, writer.session
        for segment, row_end in writer.runs:
            row_count = min(row_end, segment.row_count + left)
            left -= row_count - segment.row_count
            if row_count > segment.row_count:
                segment.note(Sums(segment.row_count, row_count, SUM))
                self.ledger.committed(session, segment, row_count, self.clock.ns)
        self.ledger.appended(session, token_count - left, self.clock.ns, is_news=True)
        writer.committed = session.token_count
        while len(writer.runs) > 1 and writer.runs[0][0].row_count == writer.runs[0][1]:
            segment, _ = writer.runs.pop(0)
            self.ledger.unwritten.release(segment)
            self.ledger.released(segment)
        return token_count - left

    def write_ended(self, writer: Writer) -> None:
        """The writer is done; what it did not commit is given back."""
        writer.is_open = False
        for segment, _ in writer.runs:
            self.ledger.unwritten.release(segment)
            segment.forget_sums(segment.row_count)
            if not segment.row_count:
                self.ledger.abandoned(segment)
            self.ledger.released(segment)
        self.ledger.write_ended(writer.session, self.clock.ns / 10**9)

    def wrote(self, session: Session, token_count: int) -> None:
        """A whole append."""
        writer = self.write_began(session)
        assert self.room(writer, token_count)
        assert self.committed(writer, token_count) == token_count
        self.write_ended(writer)

    # -- flushing ----------------------------------------------------------------------------------

    def flush_began(self, session: Session) -> Flush | None:
        """Slots below are taken for all that is unwritten; None where there are not enough."""
        flush = Flush(session, session.log_end, self.clock.ns)
        for segment in list(self.ledger.unwritten.segments(session)):
            slot = self.below.take(SIZE, closed=self.paths.closed_paths, on_path=session.path)
            if slot is None:
                self.flush_failed(flush)
                return None
            session.path = slot.path_index
            self.ledger.held(segment)
            self.ledger.staged(segment, slot, is_there=True)
            flush.items.append(Flushed(segment, slot, segment.row_count, 1, SUM))
        return flush

    def flush_failed(self, flush: Flush) -> None:
        """A device refused."""
        for item in flush.items:
            self._unstaged(item)
            self.ledger.released(item.segment)

    def flushed(self, flush: Flush) -> None:
        """All is synced, and the record is being committed."""
        flush.is_told = True
        kept = [
            item
            for item in flush.items
            if item.segment.is_listed
            and item.row_count <= item.segment.row_count
            and not flush.session.is_gone
        ]
        for item in flush.items:
            if item not in kept:
                self._unstaged(item)
        if not flush.session.is_gone:
            flush.replaced = self.ledger.flushed(flush.session, kept, flush.end, flush.begun_ns)

    def flush_ended(self, flush: Flush, *, is_well: bool = True) -> None:
        """The record is durable, or nobody knows."""
        if not is_well:
            self.ledger.stranded(flush.replaced)
        else:
            # As in the cache: what is gone meanwhile hears of it too.
            self.ledger.recorded(flush.session, flush.end, flush.begun_ns)
            for slot in flush.replaced:
                self.below.give(slot)
        for item in flush.items:
            self.ledger.released(item.segment)

    def wrote_below(self, session: Session) -> None:
        """A whole flush."""
        flush = self.flush_began(session)
        assert flush is not None
        self.flushed(flush)
        self.flush_ended(flush)

    def _unstaged(self, item: Flushed) -> None:
        self.ledger.staged(item.segment, item.slot, is_there=False)
        self.below.give(item.slot)

    def moved(self, session: Session, segments: Sequence[Segment], *, is_well: bool = True) -> None:
        """Clean segments are written to other slots, and rows may be committed to them meanwhile."""
        items = self.move_began(session, segments)
        self.move_ended(items, is_well=is_well)

    def move_began(self, session: Session, segments: Sequence[Segment]) -> list[Flushed]:
        """Copies of clean segments are under way, as many as there is room for."""
        items = []
        for segment in segments:
            slot = self.below.take(SIZE, closed=self.paths.closed_paths, on_path=session.path)
            if slot is None:
                break
            self.ledger.closed([segment])
            self.ledger.held(segment)
            self.ledger.staged(segment, slot, is_there=True)
            items.append(Flushed(segment, slot, segment.durable_row_count, 1, SUM))
        return items

    def move_ended(self, items: Sequence[Flushed], *, is_well: bool = True) -> list[Flushed]:
        """The copies are recorded, those that are still wanted; returns these."""
        kept = [i for i in items if i.segment.is_listed and i.row_count == i.segment.durable_row_count]
        replaced = self.ledger.moved(kept)
        if not is_well:
            self.ledger.stranded(replaced)
        else:
            for slot in replaced:
                self.below.give(slot)
            self.ledger.lost.reckon_again([item.segment for item in kept])
        for item in items:
            if item not in kept:
                self._unstaged(item)
            self.ledger.released(item.segment)
        return kept

    # -- memory ------------------------------------------------------------------------------------

    def promote_began(self, segment: Segment) -> Slot | None:
        """A slot in memory for a segment that lies below; None where there is none."""
        slot = self.memory.take(SIZE)
        if slot is not None:
            self.ledger.held(segment)
        return slot

    def promote_ended(self, segment: Segment, slot: Slot, *, is_well: bool = True) -> None:
        """It was read and verified, or was not."""
        if is_well and not segment.memory and segment.durable:
            self.ledger.promoted(segment, slot, SUM)
        else:
            self.memory.give(slot)
        self.ledger.released(segment)
