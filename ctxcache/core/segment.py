"""Segment: up to 64 tokens of every stream a session stores; the unit of placement.

Rows are only ever added, never changed. A segment is in DRAM, on SSD, or both; the SSD copy
covers its first `ssd_row_count` rows. Several sessions share one after a fork.

    rows   0 ............. ssd_row_count ...... row_count ....... 63
           durable          committed in DRAM    reserved or free
"""

from dataclasses import dataclass

from ctxcache.format.identity import SegmentIdentity
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.slot import Slot


@dataclass(slots=True, eq=False)
class Segment:
    """State of one segment. Owned by the event loop.

    `reference_count` counts sessions that list it. `hold_count` counts leases, reservations and
    I/O under way: while it is not 0, the slots stay. `is_discarded`: no session lists it any more and
    its slots are free as soon as nothing holds it. `checksums` cover `ssd_row_count` rows and are
    known once the segment was flushed or read back.
    """

    segment_id: int
    tenant: str
    writer_uid: bytes
    generation: int
    begin: int
    model_fingerprint: bytes
    layout: SegmentLayout
    row_count: int = 0
    is_open: bool = True
    dram: Slot | None = None
    ssd: Slot | None = None
    ssd_row_count: int = 0
    header_checksum: int = 0
    checksums: tuple[int, ...] = ()
    reference_count: int = 0
    hold_count: int = 0
    is_discarded: bool = False

    @property
    def end(self) -> int:
        """One past the position of its last committed row."""
        return self.begin + self.row_count

    @property
    def is_dirty(self) -> bool:
        """Whether it has rows that are not on SSD."""
        return self.ssd_row_count < self.row_count

    def identity(self, row_count: int) -> SegmentIdentity:
        """What the checksums over its first `row_count` rows are bound to."""
        return SegmentIdentity(
            self.tenant, self.writer_uid, self.generation, self.begin, row_count, self.model_fingerprint
        )
