"""Segment: up to 64 tokens of every stream a session stores; the unit of placement.

Rows are only ever added, never changed. A segment is in DRAM, on SSD, or both; the SSD copy
covers its first `ssd_row_count` rows. Several sessions share one after a fork.

    rows   0 ............. ssd_row_count ...... row_count ....... 63
           durable          committed in DRAM    reserved or free

`sums` are what the writers of its rows said of them; sealing, scrubbing and every reader verify by these.
"""

from ctxcache.core.residence import Amounts, Kin, Residence
from ctxcache.core.usage import Use
from ctxcache.format.identity import SegmentIdentity
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.slot import Slot
from ctxcache.format.sums import Sums


class Segment:
    """State of one segment. Owned by the event loop; there may be millions.

    `session_count` sessions list it. `hold_count` counts leases, reservations and
    I/O under way: while it is not 0, the slots stay. `is_discarded`: no session lists it any more and
    its slots are free as soon as nothing holds it. `sums` are in order and cover every committed row of a segment
    that is in DRAM; behind those they may cover rows that are marked as written. `bound_checksums` are those of its
    header on SSD, known once that was read. Its slots are counted in its tenant's `use`.
    """

    __slots__ = (
        "_dram", "_home", "_ssd", "begin", "bound_checksums", "generation", "header_checksum", "hold_count",
        "is_discarded", "is_open", "layout", "model_fingerprint", "row_count", "segment_id", "session_count",
        "ssd_row_count", "sums", "tenant", "use", "writer_uid",
    )  # fmt: skip

    def __init__(
        self, *, segment_id: int, tenant: str, writer_uid: bytes, generation: int, begin: int,
        model_fingerprint: bytes, layout: SegmentLayout, row_count: int = 0, is_open: bool = True,
        ssd: Slot | None = None, header_checksum: int = 0, use: Use | None = None,
    ) -> None:  # fmt: skip
        """Make a segment that no session lists. With `ssd` all its rows are there."""
        self.segment_id = segment_id
        self.tenant = tenant
        self.writer_uid = writer_uid
        self.generation = generation
        self.begin = begin
        self.model_fingerprint = model_fingerprint
        self.layout = layout
        self.row_count = row_count
        self.is_open = is_open
        self.ssd_row_count = row_count if ssd else 0
        self.header_checksum = header_checksum
        self.bound_checksums: tuple[int, ...] = ()
        self.sums: list[Sums] = []
        self.session_count = 0
        self.hold_count = 0
        self.is_discarded = False
        self._home: Residence | Kin | None = None
        self._dram: Slot | None = None
        self._ssd = ssd
        self.use = use or Use()
        if ssd:
            self.use.add(0, ssd.size_bytes, layout.size_bytes)

    @property
    def home(self) -> Residence | Kin | None:
        """Where it is counted: with the one session that lists it or, once forks shared it, with their kin."""
        return self._home.root() if isinstance(self._home, Kin) else self._home

    @property
    def dram(self) -> Slot | None:
        """Where it lies in the arena."""
        return self._dram

    @dram.setter
    def dram(self, slot: Slot | None) -> None:
        self._place(slot, self._ssd)

    @property
    def ssd(self) -> Slot | None:
        """Where it lies on SSD."""
        return self._ssd

    @ssd.setter
    def ssd(self, slot: Slot | None) -> None:
        self._place(self._dram, slot)

    def stage(self, size_bytes: int) -> None:
        """Count a slot on SSD that was taken for its rows; negative when it went, or became its place."""
        self.use.add(0, size_bytes, 0)

    def amounts(self) -> Amounts:
        """What it takes, where."""
        return Amounts(bool(self._dram), _size(self._dram), _size(self._ssd))

    @property
    def end(self) -> int:
        """One past the position of its last committed row."""
        return self.begin + self.row_count

    @property
    def is_dirty(self) -> bool:
        """Whether it has rows that are not on SSD."""
        return self.ssd_row_count < self.row_count

    def list_in(self, residence: Residence) -> None:
        """A session lists it."""
        self._count(-1)
        self._home = residence if self._home is None else residence.share_with(self._home)
        self.session_count += 1
        self._count(1)

    def unlist(self) -> None:
        """A session lists it no more. What forks shared stays their kin's, however few are left of them."""
        self._count(-1)
        self.session_count -= 1
        if not self.session_count:
            self._home = None

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
        """Rows were written behind those that are committed; what was said of them before is of no matter."""
        self.forget_sums(sums.row_begin)
        self.sums.append(sums)

    def forget_sums(self, row_begin: int) -> None:
        """Rows from there on were never committed."""
        while self.sums and self.sums[-1].row_begin >= row_begin:
            self.sums.pop()

    def settle(self, row_count: int, values: tuple[int, ...]) -> None:
        """The first rows have these sums, one per stream: verified against those that they take the place of."""
        if self.is_settled(row_count):
            return
        self.sums = [Sums(0, row_count, values), *(s for s in self.sums if s.row_begin >= row_count)]

    def identity(self, row_count: int) -> SegmentIdentity:
        """What the checksums over its first `row_count` rows are bound to."""
        return SegmentIdentity(
            self.tenant, self.writer_uid, self.generation, self.begin, row_count, self.model_fingerprint
        )

    def _place(self, dram: Slot | None, ssd: Slot | None) -> None:
        kept = bool(dram or ssd) - bool(self._dram or self._ssd)
        dram_count = bool(dram) - bool(self._dram)
        dram_bytes, ssd_bytes = _size(dram) - _size(self._dram), _size(ssd) - _size(self._ssd)
        self._dram, self._ssd = dram, ssd
        if self._home is not None:
            self._home.add(dram_count, dram_bytes, ssd_bytes)
        self.use.add(dram_bytes, ssd_bytes, kept * self.layout.size_bytes)

    def _count(self, sign: int) -> None:
        if self._home is not None:
            self._home.add(sign * bool(self._dram), sign * _size(self._dram), sign * _size(self._ssd))


def _size(slot: Slot | None) -> int:
    return slot.size_bytes if slot else 0
