"""Reads `segments.dat` with docs/chunk_format.md alone: no line of ctxcache, no metadata.

    python independent_reader.py FILE

Knows what a slot says of itself, and not which sessions still exist. Worst case: bytes that are no
whole, undamaged segment are passed over; `scan` names them when they start with a header.
"""

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_intdigest

ALIGN_BYTES = 4096
FIXED_BYTES = 256
STREAM_BYTES = 24
MAGIC = b"CTXCSEG\0"
FORMAT = 2
DOMAIN = b"ctxcache.chunk.v2"
TENANT_OFFSET = 102
CHECKSUM_OFFSET = 248
STREAM_COUNT_LIMIT = 65536
KINDS = {
    1: "tokens",
    2: "hidden",
    3: "kv",
    4: "latent",
    5: "hidden_int8",
    6: "kv_int8",
    7: "hidden_int4",
    8: "kv_int4",
    10: "kv_as_cached",
    11: "hidden_delta_int4",
    12: "hidden_delta_int3",
    13: "hidden_delta_int2",
}
PACKINGS = {5: (8, 32), 6: (8, 64), 7: (4, 32), 8: (4, 32)}
"""Bits and group size by kind; four outliers in each row."""
TOKENS = (-1, 1)


@dataclass(frozen=True)
class Stream:
    """One row of a header's stream table, and where its chunk lies in the slot."""

    layer: int
    kind: int
    row_bytes: int
    dtype: int
    checksum: int
    offset_bytes: int


@dataclass(frozen=True)
class Segment:
    """The facts of a header. Positions `[begin, begin + token_count)` are the writer's."""

    offset_bytes: int
    size_bytes: int
    segment_id: int
    tenant: str
    session_uid: bytes
    generation: int
    begin: int
    token_count: int
    model_fingerprint: bytes
    streams: tuple[Stream, ...]

    def identity_seed(self) -> int:
        """Hash who and what the segment's chunks are."""
        tenant = self.tenant.encode()
        packed = DOMAIN + struct.pack("<H", len(tenant)) + tenant + self.session_uid
        packed += struct.pack("<qqq", self.generation, self.begin, self.token_count)
        return xxh3_64_intdigest(packed + self.model_fingerprint)


class NotASegment(Exception):
    """The bytes at an offset are no segment that can be trusted; the message says why."""


def align(size_bytes: int) -> int:
    """Round up to 4 KiB."""
    return (size_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES


def read_header(file: bytes, offset_bytes: int) -> Segment:
    """Parse and verify the header at an offset. Raises NotASegment."""
    fixed = file[offset_bytes : offset_bytes + FIXED_BYTES]
    if len(fixed) < FIXED_BYTES or not fixed.startswith(MAGIC):
        raise NotASegment("no magic")
    version, segment_tokens, segment_id, generation, begin, token_count = struct.unpack_from(
        "<IIQqqq", fixed, 8
    )
    if version != FORMAT:
        raise NotASegment(f"format {version}")
    uid, fingerprint, stream_count, tenant_bytes = struct.unpack_from("<16s32sIH", fixed, 48)
    table_begin = offset_bytes + FIXED_BYTES
    table = file[table_begin : table_begin + STREAM_BYTES * stream_count]
    if stream_count > STREAM_COUNT_LIMIT or len(table) != STREAM_BYTES * stream_count:
        raise NotASegment("stream table is cut short")
    (checksum,) = struct.unpack_from("<Q", fixed, CHECKSUM_OFFSET)
    if xxh3_64_intdigest(fixed[:CHECKSUM_OFFSET] + bytes(8) + table) != checksum:
        raise NotASegment("header checksum does not match")
    tenant = fixed[TENANT_OFFSET : TENANT_OFFSET + tenant_bytes].decode()
    streams, size_bytes = _place(table, segment_tokens)
    return Segment(
        offset_bytes,
        size_bytes,
        segment_id,
        tenant,
        uid,
        generation,
        begin,
        token_count,
        fingerprint,
        streams,
    )


def read_chunks(file: bytes, segment: Segment) -> dict[tuple[int, int], bytes]:
    """Return the rows of every stream, verified, by (layer, kind). Raises NotASegment."""
    seed = segment.identity_seed()
    rows = {}
    for stream in segment.streams:
        begin = segment.offset_bytes + stream.offset_bytes
        data = file[begin : begin + stream.row_bytes * segment.token_count]
        stream_seed = xxh3_64_intdigest(struct.pack("<ii", stream.layer, stream.kind), seed=seed)
        rows_checksum = struct.pack("<Q", xxh3_64_intdigest(data))
        if xxh3_64_intdigest(rows_checksum, seed=stream_seed) != stream.checksum:
            raise NotASegment(
                f"chunk of layer {stream.layer} {KINDS[stream.kind]} does not match its checksum"
            )
        rows[stream.layer, stream.kind] = data
    return rows


def scan(file: bytes) -> Iterator[tuple[int, Segment | None, dict[tuple[int, int], bytes] | str]]:
    """Yield (offset, segment, rows) of each whole segment, (offset, None, problem) of each damaged one.

    A segment may begin at any 4 KiB, except where another one's header or rows were just verified: rows
    may hold anything. The rest of a slot may hold a later segment, since freed slots are not cleared.
    """
    taken: set[int] = set()
    for offset_bytes in range(0, len(file), ALIGN_BYTES):
        if offset_bytes in taken or not file.startswith(MAGIC, offset_bytes):
            continue
        try:
            segment = read_header(file, offset_bytes)
            rows = read_chunks(file, segment)
        except NotASegment as problem:
            yield offset_bytes, None, str(problem)
        else:
            taken.update(_pages(segment))
            yield offset_bytes, segment, rows


def read_log(file: bytes, session_uid: bytes) -> dict[int, dict[tuple[int, int], bytes]]:
    """Return what one session wrote: position -> (layer, kind) -> row.

    Of copies of one segment the one with most tokens counts: the others are earlier flushes of it.
    """
    log: dict[int, dict[tuple[int, int], bytes]] = {}
    found = [(segment, rows) for _, segment, rows in scan(file) if segment and not isinstance(rows, str)]
    for segment, rows in sorted(found, key=lambda item: item[0].token_count):
        if segment.session_uid == session_uid:
            for row in range(segment.token_count):
                log[segment.begin + row] = {
                    (s.layer, s.kind): rows[s.layer, s.kind][row * s.row_bytes : (row + 1) * s.row_bytes]
                    for s in segment.streams
                }
    return log


def unpack_row(row: bytes, kind: int, element_count: int) -> list[float]:
    """Return the elements of one packed row, as float32 has them."""
    bits, group_size = PACKINGS[kind]
    groups, outlier_count = -(-element_count // group_size), min(4, element_count)
    begin = -(-(element_count * bits // 8) // 4) * 4
    parts = struct.unpack_from(f"<{outlier_count}f{groups}e{groups}e{outlier_count}H", row, begin)
    outliers, scales = parts[:outlier_count], parts[outlier_count : outlier_count + groups]
    zeros, places = parts[outlier_count + groups : -outlier_count], parts[-outlier_count:]
    elements = []
    for i in range(element_count):
        code = row[i] if bits == 8 else row[i // 2] >> i % 2 * 4 & 0xF
        elements.append(zeros[i // group_size] + code * scales[i // group_size])
    for place, outlier in zip(places, outliers, strict=True):
        elements[place] = outlier
    return list(struct.unpack(f"<{element_count}f", struct.pack(f"<{element_count}f", *elements)))


def _place(table: bytes, segment_tokens: int) -> tuple[tuple[Stream, ...], int]:
    """Read the stream table; the first chunk follows the header, each other one the chunk before it."""
    streams = []
    offset_bytes = align(FIXED_BYTES + len(table))
    for layer, kind, row_bytes, dtype, checksum in struct.iter_unpack("<iiiiQ", table):
        streams.append(Stream(layer, kind, row_bytes, dtype, checksum, offset_bytes))
        offset_bytes += align(row_bytes * segment_tokens)
    return tuple(streams), offset_bytes


def _pages(segment: Segment) -> Iterator[int]:
    """Offsets in the file of every 4 KiB that holds a part of the header or a row."""
    header_end = segment.offset_bytes + segment.streams[0].offset_bytes
    yield from range(segment.offset_bytes, header_end, ALIGN_BYTES)
    for stream in segment.streams:
        begin = segment.offset_bytes + stream.offset_bytes
        yield from range(begin, begin + stream.row_bytes * segment.token_count, ALIGN_BYTES)


def _describe(segment: Segment, rows: dict[tuple[int, int], bytes]) -> Iterator[str]:
    end = segment.begin + segment.token_count
    yield (
        f"segment {segment.segment_id} at byte {segment.offset_bytes}: tenant {segment.tenant!r}, session "
        f"{segment.session_uid.hex()}, generation {segment.generation}, tokens [{segment.begin}, {end})"
    )
    token_ids = struct.unpack(f"<{segment.token_count}i", rows[TOKENS])
    yield f"  token ids {' '.join(map(str, token_ids))}"
    for stream in segment.streams:
        data = rows[stream.layer, stream.kind]
        if (stream.layer, stream.kind) != TOKENS:
            yield (
                f"  layer {stream.layer} {KINDS[stream.kind]}: {segment.token_count} rows of "
                f"{stream.row_bytes} B, the first begins with {data[: min(8, stream.row_bytes)].hex()}"
            )


def main() -> None:
    """Print every segment of a file."""
    for offset_bytes, segment, rows in scan(Path(sys.argv[1]).read_bytes()):
        if segment is None or isinstance(rows, str):
            print(f"damaged or outdated at byte {offset_bytes}: {rows}")  # noqa: T201  # its output
        else:
            print("\n".join(_describe(segment, rows)))  # noqa: T201  # its output


if __name__ == "__main__":
    main()
