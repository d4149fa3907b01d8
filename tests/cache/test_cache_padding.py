"""Only a session's own rows, and zeros, reach the disk."""

from collections.abc import Sequence

from cache_rig import (
    FINGERPRINT,
    KV,
    LAYOUT,
    MODEL,
    SEGMENT_TOKENS,
    STREAMS,
    TENANT,
    DiskRig,
    Writer,
    rows_of,
)

from ctxcache.format.layout import ALIGN_BYTES, HEADER_FIXED_BYTES, HEADER_STREAM_BYTES, SegmentLayout
from ctxcache.format.streams import TOKENS, Stream, ranges_of


def beside_rows(
    rig: DiskRig, session_id: str, layout: SegmentLayout, streams: Sequence[Stream]
) -> list[bytearray]:
    """The files of the SSD tier, with zeros where the session's headers and rows lie."""
    on_disk = [bytearray(rig.segments_file(path).read_bytes()) for path in range(2)]
    for segment in rig.cache.ledger.find(TENANT, session_id).segments:
        assert segment.durable is not None
        slot = segment.durable
        for stream in streams:
            rows = layout.rows(stream, 0, segment.row_count)
            begin, end = slot.offset_bytes + rows.start, slot.offset_bytes + rows.stop
            on_disk[slot.path_index][begin:end] = bytes(end - begin)
        header_bytes = HEADER_FIXED_BYTES + HEADER_STREAM_BYTES * len(layout.specs)
        header = slice(slot.offset_bytes, slot.offset_bytes + header_bytes)
        on_disk[slot.path_index][header] = bytes(header_bytes)
    return on_disk


async def test_a_flush_writes_nobody_elses_rows(disk_rig: DiskRig) -> None:
    """A slot of the arena that held another session's rows brings none of them to the disk."""
    secret, own = Writer(7), Writer(8)
    await disk_rig.create("a")
    await disk_rig.append("a", secret.make(2 * SEGMENT_TOKENS))
    await disk_rig.delete("a")
    # And of headers, which are longer where there are more streams.
    disk_rig.arena._bytes[ALIGN_BYTES:] = 7
    await disk_rig.create("b")
    await disk_rig.append("b", own.make(SEGMENT_TOKENS + 1), is_durable=True)

    assert not any(map(any, beside_rows(disk_rig, "b", LAYOUT, STREAMS)))


async def test_a_full_segment_has_nothing_of_another_layout(disk_rig: DiskRig) -> None:
    """Rows end elsewhere in a slot that another layout had used.

    The rest of their pages is zeros all the same.
    """
    streams = (TOKENS, KV)
    layout = SegmentLayout(MODEL.resolve(streams))
    await disk_rig.create("a")
    await disk_rig.append("a", Writer(7).make(2 * SEGMENT_TOKENS))
    await disk_rig.delete("a")
    await disk_rig.cache.sessions.create(
        TENANT, "b", model_id=MODEL.model_id, layout=ranges_of(streams), expiration=None, is_pinned=False
    )
    reservation = await disk_rig.cache.appends.reserve(
        TENANT, "b", fingerprint=FINGERPRINT, write_offset=0, generation=None, token_count=2 * SEGMENT_TOKENS
    )
    tokens = Writer(8).make(2 * SEGMENT_TOKENS)
    for stream in streams:
        disk_rig.cache.appends.place(reservation, stream, 0, memoryview(rows_of(tokens, stream)))
    await disk_rig.cache.appends.commit(reservation, len(tokens), is_durable=True, keep_open=False)

    assert not any(map(any, beside_rows(disk_rig, "b", layout, streams)))
