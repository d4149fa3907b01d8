"""What reaches the disk is a session's own rows, and zeros."""

from cache_rig import LAYOUT, SEGMENT_TOKENS, STREAMS, TENANT, DiskRig, Writer


async def test_a_flush_writes_nobody_elses_rows(disk_rig: DiskRig) -> None:
    """A slot of the arena that held another session's rows brings none of them to the disk."""
    secret, own = Writer(7), Writer(8)
    await disk_rig.create("a")
    await disk_rig.append("a", secret.make(2 * SEGMENT_TOKENS))
    await disk_rig.delete("a")
    await disk_rig.create("b")
    await disk_rig.append("b", own.make(SEGMENT_TOKENS + 1), is_durable=True)
    on_disk = [bytearray(disk_rig.segments_file(path).read_bytes()) for path in range(2)]
    for segment in disk_rig.cache.state.session(TENANT, "b").segments:
        assert segment.ssd is not None
        slot = segment.ssd
        for stream in STREAMS:
            rows = LAYOUT.rows(stream, 0, segment.row_count)
            begin, end = slot.offset_bytes + rows.start, slot.offset_bytes + rows.stop
            on_disk[slot.path_index][begin:end] = bytes(end - begin)
        header = slice(slot.offset_bytes, slot.offset_bytes + LAYOUT.header_bytes)
        on_disk[slot.path_index][header] = bytes(LAYOUT.header_bytes)

    assert not any(map(any, on_disk))
