"""Segment: up to 64 tokens of every stream a session stores; the unit of placement.

Rows are only ever added, never changed. The copy in a tier below covers its first `durable_row_count` rows.
Several sessions list one segment after a fork.

    rows   0 ........ durable_row_count ...... row_count ....... 63
           durable               committed in memory   reserved or free

`places.py` has the steps of its life. Only the ledger takes them, by the methods under "events" here.
"""

from ctxcache.core.ledger.kin import Kin, Residence
from ctxcache.core.ledger.places import SEGMENT_TABLE, Place, SegmentEvent, step
from ctxcache.core.ledger.usage import TenantUse
from ctxcache.format.identity import SegmentIdentity
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.slot import Slot
from ctxcache.format.sums import Sums

LISTED = frozenset({Place.UNWRITTEN, Place.BOTH, Place.BELOW})
"""Places of segments that sessions list."""


class Segment:
    """State of one segment. Owned by the ledger; there may be millions.

    `memory` is its slot in the first tier, `durable` its slot in a tier below. `reference_count` sessions list it.
    `hold_count` counts leases, reservations and I/O under way: while it is not 0, the slots stay. Of these,
    `past_hold_count` can do without memory. `sums` are what the writers of its rows said of them, in order: they
    cover every committed row while the segment is in memory, and may cover rows that are marked as written.
    `bound_checksums` are those of its header below, known once that was read.
    """

    __slots__ = (
        "_durable", "_home", "_memory", "_use", "begin", "bound_checksums", "durable_row_count", "generation",
        "header_checksum", "hold_count", "is_growing", "layout", "model_fingerprint", "past_hold_count", "place",
        "reference_count", "row_count", "segment_id", "sums", "tenant", "writer_uid",
    )  # fmt: skip

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
    ) -> None:
        """Make a segment that has no slot and no row."""
        self.segment_id = segment_id
        self.tenant = tenant
        self.writer_uid = writer_uid
        self.generation = generation
        self.begin = begin
        self.model_fingerprint = model_fingerprint
        self.layout = layout
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
        self._home: Residence | Kin | None = None
        self._memory: Slot | None = None
        self._durable: Slot | None = None
        self._use = use

    # -- what it is --------------------------------------------------------------------------------

    @property
    def home(self) -> Residence | Kin | None:
        """Where it is counted: with the one session that lists it or, once forks shared it, with their kin."""
        return self._home.root() if isinstance(self._home, Kin) else self._home

    @property
    def memory(self) -> Slot | None:
        """Where its rows lie in memory."""
        return self._memory

    @property
    def durable(self) -> Slot | None:
        """Where its first `durable_row_count` rows lie in a tier below."""
        return self._durable

    @property
    def size_bytes(self) -> int:
        """Of a slot that takes it."""
        return self.layout.size_bytes

    @property
    def end(self) -> int:
        """One past the position of its last committed row."""
        return self.begin + self.row_count

    @property
    def is_unwritten(self) -> bool:
        """Whether it has committed rows that no tier below has."""
        return self.durable_row_count < self.row_count

    @property
    def is_full(self) -> bool:
        """Whether no row can be added."""
        return self.row_count == self.layout.segment_tokens

    @property
    def is_listed(self) -> bool:
        """Whether a session lists it."""
        return self.place in LISTED

    @property
    def memory_hold_count(self) -> int:
        """Holds that need its slot in memory."""
        return self.hold_count - self.past_hold_count

    def identity(self, row_count: int) -> SegmentIdentity:
        """What the checksums over its first `row_count` rows are bound to."""
        return SegmentIdentity(
            self.tenant, self.writer_uid, self.generation, self.begin, row_count, self.model_fingerprint
        )

    # -- what its rows must be ---------------------------------------------------------------------

    def is_settled(self, row_count: int) -> bool:
        """Whether so many of its rows have one sum per stream."""
        return (
            bool(self.sums) and self.sums[0].row_end >= row_count and not self.sums[0].is_joint(self.layout)
        )

    @property
    def settled(self) -> Sums:
        """Its first sums: of all leased rows, once a lease has settled it."""
        return self.sums[0]

    def note(self, sums: Sums) -> None:
        """Rows were written behind those that are committed; these sums take the place of earlier ones."""
        self.forget_sums(sums.row_begin)
        self.sums.append(sums)

    def forget_sums(self, row_begin: int) -> None:
        """Rows from there on were never committed."""
        while self.sums and self.sums[-1].row_begin >= row_begin:
            self.sums.pop()

    def settle(self, row_count: int, values: tuple[int, ...]) -> None:
        """The first rows have these sums, one per stream, verified against the sums that they replace."""
        if self.is_settled(row_count):
            return
        self.sums = [Sums(0, row_count, values), *(s for s in self.sums if s.row_begin >= row_count)]

    # -- events: the ledger's alone ----------------------------------------------------------------

    def happened(self, event: SegmentEvent) -> None:
        """Take a step. Raises IllegalStepError."""
        self.place = step(SEGMENT_TABLE, self.place, event, f"segment {self.segment_id}")

    def reserved(self, slot: Slot) -> None:
        """A writer gets room for its rows."""
        self._move(slot, self._durable)

    def recorded(self, slot: Slot | None, row_count: int, header_checksum: int) -> None:
        """Records name it: all its rows lie below, or nowhere where its slot is not its own."""
        self.place, self.is_growing = Place.BELOW, False
        self.row_count = self.durable_row_count = row_count
        self.header_checksum = header_checksum
        self._move(None, slot)

    def flushed(
        self, event: SegmentEvent, slot: Slot, row_count: int, header_checksum: int, values: tuple[int, ...]
    ) -> None:
        """Its first rows lie in that slot below, whose record is about to be written."""
        self.happened(event)
        self._move(self._memory, slot)
        self.durable_row_count = row_count
        self.bound_checksums, self.header_checksum = (), header_checksum
        self.settle(row_count, values)

    def promoted(self, slot: Slot) -> None:
        """Memory has it again."""
        self.happened(SegmentEvent.PROMOTED)
        self._move(slot, self._durable)

    def dropped(self) -> Slot | None:
        """It leaves memory; returns the slot that it had there."""
        self.happened(SegmentEvent.DROPPED)
        # What was appended later would have to be read back first.
        self.is_growing = False
        slot = self._memory
        self._move(None, self._durable)
        return slot

    def shortened(self, durable: Sums) -> None:
        """Only the rows that a tier below has are left."""
        if self.place is Place.UNWRITTEN:
            self.happened(SegmentEvent.SHORTENED)
        self.row_count, self.is_growing, self.sums = durable.row_end, False, [durable]

    def disowned(self) -> Slot | None:
        """Its slot below is not its own any more; returns that slot."""
        slot = self._durable
        self._move(self._memory, None)
        return slot

    def emptied(self) -> tuple[Slot | None, Slot | None]:
        """Nothing uses its slots any more; returns those that it had in memory and below."""
        self.happened(SegmentEvent.RELEASED)
        slots = self._memory, self._durable
        self._move(None, None)
        return slots

    def share(self) -> None:
        """Count it with the kin of the session that lists it, which there must be."""
        if isinstance(self._home, Residence) and self._home.kin:
            self._count(-1)
            self._home = self._home.kin
            self._count(1)

    def list_in(self, residence: Residence) -> None:
        """A session lists it."""
        self.reference_count += 1
        if residence.is_kin(self._home):
            return
        home = self.home
        if isinstance(home, Kin):
            # How much of it lies where was counted there before.
            self._home = residence.share_with(home)
            return
        self._count(-1)
        self._home = residence if home is None else residence.share_with(home)
        self._count(1)

    def unlist(self) -> None:
        """A session lists it no more. What forks shared stays their kin's, however few are left of them."""
        self.reference_count -= 1
        if not self.reference_count:
            self._count(-1)
            self._home = None
            self.happened(SegmentEvent.UNLISTED)

    def stage(self, size_bytes: int) -> None:
        """Count a slot below that was taken for its rows; negative when it went, or became its place."""
        self._use.add(0, size_bytes, 0)

    # -- parts -------------------------------------------------------------------------------------

    def _move(self, memory: Slot | None, durable: Slot | None) -> None:
        kept = bool(memory or durable) - bool(self._memory or self._durable)
        memory_count = bool(memory) - bool(self._memory)
        memory_bytes = _size(memory) - _size(self._memory)
        durable_bytes = _size(durable) - _size(self._durable)
        self._memory, self._durable = memory, durable
        if self._home is not None:
            self._home.add(memory_count, memory_bytes, durable_bytes)
        self._use.add(memory_bytes, durable_bytes, kept * self.layout.size_bytes)

    def _count(self, sign: int) -> None:
        if self._home is not None:
            memory_bytes, durable_bytes = _size(self._memory), _size(self._durable)
            self._home.add(sign * bool(self._memory), sign * memory_bytes, sign * durable_bytes)


def _size(slot: Slot | None) -> int:
    return slot.size_bytes if slot else 0
