"""Segment: tokens of every stream a session stores; the unit of placement.

Rows are only ever added, never changed. The copy in a tier below covers its first `durable_row_count` rows.
Several sessions list one segment after a fork.

    rows   0 ........ durable_row_count ...... row_count ....... 63
           durable               committed in memory   reserved or free

`places.py` has the steps of its life. Only the ledger takes them, by the methods under "events" here. They
keep in step what `residence.py` counts by session and `usage.py` by tenant.
"""

from collections.abc import Collection, Sequence

from ctxcache.core.extents import SlotAllocator
from ctxcache.core.ledger.places import SEGMENT_TABLE, Place, SegmentEvent, illegal
from ctxcache.core.ledger.residence import Kin, Residence
from ctxcache.core.ledger.usage import TenantUse
from ctxcache.format.checksums import Sums
from ctxcache.format.layout import SegmentIdentity, SegmentLayout, Slot

# LEAVING and HELD are not listed: such segments have slots, and no session shows their rows.
LISTED = frozenset({Place.UNWRITTEN, Place.BOTH, Place.BELOW})
"""Places of segments that sessions list."""


class Segment:
    """State of one segment. Owned by the ledger; there may be millions.

    `memory` is the segment's slot in the first tier, `durable` its slot in a tier below. `copy` is a second
    slot there, on another path, with the same bytes; `copies` says how many there shall be. `reference_count`
    sessions list the segment. `hold_count` counts leases, reservations and I/O under way: while it is not 0,
    the slots stay. `past_hold_count` of these do not need memory. `sums` are the checksums of its rows by
    their writers, in order: they cover every committed row while the segment is in memory, and may cover rows
    that are marked as written. `bound_checksums` are those of its header below, known once that was read.
    """

    # Slots replace the dict: a store of some terabytes has millions of segments.
    __slots__ = (
        "_use",
        "begin",
        "bound_checksums",
        "copies",
        "copy",
        "counted_with",
        "durable",
        "durable_row_count",
        "generation",
        "header_checksum",
        "hold_count",
        "is_growing",
        "layout",
        "lister_uid",
        "memory",
        "model_fingerprint",
        "past_hold_count",
        "place",
        "reference_count",
        "row_count",
        "segment_id",
        "sums",
        "tenant",
        "writer_uid",
    )

    def __init__(
        self,
        *,
        segment_id: int,
        tenant: str,
        writer_uid: bytes,
        generation: int,
        begin: int,
        model_fingerprint: bytes,
        layout: SegmentLayout,
        use: TenantUse,
        copies: int = 1,
    ) -> None:
        """Make a segment that has no slot and no row."""
        self.segment_id = segment_id
        self.tenant = tenant
        self.writer_uid = writer_uid
        self.generation = generation
        self.begin = begin
        self.model_fingerprint = model_fingerprint
        self.layout = layout
        # The slots of a segment, and what may still be done in each place:
        #
        #     place       memory   durable   rows may be added   leaves memory
        #     RESERVED    slot     -         yes                 no: its writer holds it
        #     UNWRITTEN   slot     - or old  if is_growing       no: its rows are nowhere else
        #     BOTH        slot     slot      if is_growing       yes, unless a reader of memory holds it
        #     BELOW       -        slot      no                  -
        self.place = Place.RESERVED
        self.row_count = 0
        self.is_growing = True
        """Whether rows may still be appended. Turns off once, for good."""
        self.durable_row_count = 0
        self.header_checksum = 0
        self.bound_checksums: tuple[int, ...] = ()
        self.sums: list[Sums] = []
        self.reference_count = 0
        self.hold_count = self.past_hold_count = 0
        self.lister_uid = b""
        """A session that lists it and is likely to stay, of several that may; it may be gone."""
        self.counted_with: Residence | Kin | None = None
        """As `home`, but for a kin that has become a part of another."""
        self.memory: Slot | None = None
        self.durable: Slot | None = None
        self.copy: Slot | None = None
        self.copies = copies
        self._use = use

    # -- what it is --------------------------------------------------------------------------------

    @property
    def home(self) -> Residence | Kin | None:
        """The owner that counts the segment.

        That is the one session that lists it or, once forks shared it, their kin.
        """
        return self.counted_with.root() if isinstance(self.counted_with, Kin) else self.counted_with

    @property
    def size_bytes(self) -> int:
        """Bytes of a slot that holds the segment."""
        return self.layout.size_bytes

    @property
    def places(self) -> tuple[Slot, ...]:
        """The segment's slots below."""
        if self.copy is None:
            return () if self.durable is None else (self.durable,)
        return (self.copy,) if self.durable is None else (self.durable, self.copy)

    @property
    def durable_bytes(self) -> int:
        """Bytes of all the segment's slots below."""
        return (self.durable.size_bytes if self.durable else 0) + (self.copy.size_bytes if self.copy else 0)

    @property
    def end(self) -> int:
        """One past the position of the last committed row."""
        return self.begin + self.row_count

    @property
    def is_unwritten(self) -> bool:
        """Whether the segment has committed rows that no tier below has."""
        return self.durable_row_count < self.row_count

    @property
    def is_full(self) -> bool:
        """Whether no row can be added."""
        return self.row_count == self.layout.segment_tokens

    @property
    def is_listed(self) -> bool:
        """Whether a session lists the segment."""
        return self.place in LISTED

    @property
    def memory_hold_count(self) -> int:
        """Holds that need the segment's slot in memory."""
        # A reader past memory reads the slot below: memory may be given to others meanwhile.
        return self.hold_count - self.past_hold_count

    def identity(self, row_count: int) -> SegmentIdentity:
        """The identity that checksums over its first `row_count` rows are bound to."""
        # The identity is bound into every checksum: whole bytes of another tenant, writer, generation or
        # neighbour do not pass.
        return SegmentIdentity(
            self.tenant, self.writer_uid, self.generation, self.begin, row_count, self.model_fingerprint
        )

    # -- what its rows must be ---------------------------------------------------------------------

    def is_settled(self, row_count: int) -> bool:
        """Whether the first `row_count` rows have one sum per stream."""
        if not self.sums:
            return False
        first = self.sums[0]
        return first.row_end >= row_count and len(first.values) == len(self.layout.specs)

    @property
    def settled(self) -> Sums:
        """The first sums. They cover all leased rows, once a lease has settled the segment."""
        return self.sums[0]

    def note(self, sums: Sums) -> None:
        """Note sums of rows behind the committed ones. They replace earlier sums."""
        if self.sums and self.sums[-1].row_begin >= sums.row_begin:
            self.forget_sums(sums.row_begin)
        self.sums.append(sums)

    def forget_sums(self, row_begin: int) -> None:
        """Forget the sums of rows from there on, which were never committed."""
        while self.sums and self.sums[-1].row_begin >= row_begin:
            self.sums.pop()

    def settle(self, row_count: int, values: tuple[int, ...]) -> None:
        """Note verified sums of the first rows, one per stream, in the place of earlier sums."""
        if self.is_settled(row_count):
            return
        # Later sums stay: a writer may have marked rows as written that are not committed yet.
        self.sums = [Sums(0, row_count, values), *(s for s in self.sums if s.row_begin >= row_count)]

    # -- events: the ledger's alone ----------------------------------------------------------------

    def happened(self, event: SegmentEvent) -> None:
        """Take a step. Raises IllegalStepError."""
        place = SEGMENT_TABLE.get((self.place, event))
        if place is None:
            raise illegal(f"segment {self.segment_id}", self.place, event)
        self.place = place

    def reserved(self, slot: Slot) -> None:
        """A writer gets room for the segment's rows."""
        self._move(slot, self.durable, self.copy)

    def recorded(self, slot: Slot, row_count: int, header_checksum: int, copy: Slot | None = None) -> None:
        """Records name the segment: all its rows lie in that slot below, and in `copy`'s."""
        self.place, self.is_growing = Place.BELOW, False
        self.row_count = self.durable_row_count = row_count
        self.header_checksum = header_checksum
        self._move(None, slot, copy)

    def flushed(
        self,
        event: SegmentEvent,
        places: tuple[Slot, ...],
        row_count: int,
        header_checksum: int,
        values: tuple[int, ...],
    ) -> tuple[Slot, ...]:
        """The first rows lie in these slots below, which were staged. Their record is about to be written.

        Returns the slots that the segment had below before.
        """
        before = self.places
        self.happened(event)
        self._move(self.memory, *_two(places))
        self.durable_row_count = row_count
        # The bound checksums are those of the earlier header. The next read of the new header fills them.
        self.bound_checksums, self.header_checksum = (), header_checksum
        self.settle(row_count, values)
        # The staged place has become the place itself, which `_move` has counted. It must not count twice.
        self.stage(-self.durable_bytes)
        return before

    def promoted(self, slot: Slot) -> None:
        """The segment is in memory again."""
        self.happened(SegmentEvent.PROMOTED)
        self._move(slot, self.durable, self.copy)

    def dropped(self) -> Slot | None:
        """The segment leaves memory; returns the slot that it had there."""
        self.happened(SegmentEvent.DROPPED)
        # Later appends would have to read the rows back first.
        self.is_growing = False
        slot = self.memory
        # The slots below stay: they are the copy that dropping relies on.
        self._move(None, self.durable, self.copy)
        return slot

    def shortened(self, durable: Sums) -> None:
        """Drop the rows that the tier below does not have."""
        if self.place is Place.UNWRITTEN:
            self.happened(SegmentEvent.SHORTENED)
        self.row_count, self.is_growing, self.sums = durable.row_end, False, [durable]

    def placed(self, places: tuple[Slot, ...]) -> None:
        """The rows lie in these slots below and in no other."""
        self._move(self.memory, *_two(places))

    def wanted(self, copies: int) -> None:
        """Set how many copies of the segment shall be below."""
        kept_bytes = self._kept_bytes
        self.copies = copies
        self._use.add(0, 0, self._kept_bytes - kept_bytes)

    def emptied(self) -> tuple[Slot | None, tuple[Slot, ...]]:
        """The slots are out of use; returns those in memory and those below."""
        self.happened(SegmentEvent.RELEASED)
        slots = self.memory, self.places
        self._move(None, None, None)
        return slots

    def share(self) -> None:
        """Count the segment with the kin of the session that lists it. There must be a kin."""
        if isinstance(self.counted_with, Residence) and self.counted_with.kin is not None:
            self._count(-1)
            self.counted_with = self.counted_with.kin
            self._count(1)

    def list_in(self, residence: Residence) -> None:
        """A session lists the segment."""
        self.reference_count += 1
        # The session is kin already, so that the segment counts for it without a step.
        if self.counted_with is not None and self.counted_with is residence.kin:
            return
        home = self.home
        if isinstance(home, Kin):
            # The earlier residence counted how much of the segment lies where.
            self.counted_with = residence.share_with(home)
            return
        self._count(-1)
        self.counted_with = residence if home is None else residence.share_with(home)
        self._count(1)

    def unlist(self) -> None:
        """A session does not list the segment any more.

        Segments that forks shared stay their kin's, however few forks are left.
        """
        self.reference_count -= 1
        if not self.reference_count:
            self._count(-1)
            self.counted_with = None
            self.happened(SegmentEvent.UNLISTED)

    def stage(self, size_bytes: int) -> None:
        """Count a slot below that was taken for the rows; negative when it went, or became the place."""
        self._use.add(0, size_bytes, 0)

    # -- parts -------------------------------------------------------------------------------------

    @property
    def _kept_bytes(self) -> int:
        """The bytes for which the segment counts wherever it lies. A copy that is to come counts as well."""
        return self.copies * self.layout.size_bytes if self.memory or self.durable else 0

    def _move(self, memory: Slot | None, durable: Slot | None, copy: Slot | None) -> None:
        memory_bytes, memory_count = 0, 0
        durable_bytes = -self.durable_bytes
        was_kept, is_kept = bool(self.memory or self.durable), bool(memory or durable)
        if self.memory is not None:
            memory_bytes, memory_count = -self.memory.size_bytes, -1
        if memory is not None:
            memory_bytes, memory_count = memory_bytes + memory.size_bytes, memory_count + 1
        self.memory, self.durable, self.copy = memory, durable, copy
        durable_bytes += self.durable_bytes
        if self.counted_with is not None:
            self.counted_with.add(memory_count, memory_bytes, durable_bytes)
        # A segment counts from its first slot to its last: a move from memory to below changes nothing here.
        kept_bytes = (is_kept - was_kept) * self.copies * self.layout.size_bytes
        self._use.add(memory_bytes, durable_bytes, kept_bytes)

    def _count(self, sign: int) -> None:
        if self.counted_with is not None:
            memory_bytes = self.memory.size_bytes if self.memory else 0
            self.counted_with.add(sign * bool(self.memory), sign * memory_bytes, sign * self.durable_bytes)


def _two(places: tuple[Slot, ...]) -> tuple[Slot | None, Slot | None]:
    """The first and the second of at most two slots."""
    return (places[0] if places else None), (places[1] if len(places) > 1 else None)


class Shelf(SlotAllocator):
    """Hands out a tier's slots. Owned by the ledger. Others only read the sets."""

    def __init__(self, capacities_bytes: Sequence[int], *, first_offset: int = 0) -> None:
        super().__init__(capacities_bytes, first_offset=first_offset)
        self.stranded: dict[Slot, Segment | None] = {}
        """Slots whose records may be gone or not, since a commit failed. Taken until commits succeed again.

        Each comes with the segment whose record was to go, which may still be held; None for a replaced slot.
        """
        self.quarantined: set[Slot] = set()
        """Slots that gave back other bytes than were written there. Taken until they are released."""
        self.spoiled: set[Slot] = set()
        """Slots in memory that do not keep what is written there. Taken until a restart."""

    def give_back(self, slot: Slot | None) -> None:
        """Let a slot be taken again, unless a record may still name it."""
        # A record that a failed commit left may name a stranded slot. After a restart that record would read
        # rows that another session wrote there.
        if slot is not None and slot not in self.stranded:
            self.give(slot)


class Copies:
    """Segments that have more or fewer copies below than they shall have. Owned by the ledger."""

    def __init__(self) -> None:
        self.single: dict[Segment, None] = {}
        """Segments that shall have two copies, of which one can be had: in the order of their turns."""
        self.surplus: dict[Segment, None] = {}
        """Segments that have two copies and shall have one."""

    def count(self, segment: Segment, lost: Collection[int]) -> None:
        """Look at the copies of a segment anew, while these paths are lost."""
        places = segment.places if segment.is_listed else ()
        # A copy on a lost path counts as missing: the second one is made from the copy that is left.
        there = sum(slot.path_index not in lost for slot in places)
        for segments, is_one in (
            (self.single, segment.copies > 1 and there == 1),
            (self.surplus, segment.copies == 1 and len(places) > 1),
        ):
            if is_one:
                segments[segment] = None
            else:
                segments.pop(segment, None)

    def put_last(self, segment: Segment) -> None:
        """The other segments that lack a copy have their turn before this one."""
        if segment in self.single:
            del self.single[segment]
            self.single[segment] = None
