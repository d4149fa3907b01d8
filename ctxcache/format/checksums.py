"""Checksums of rows, and sums: what writers said of a segment's rows, kept with it from receipt on. Pure.

A chunk's rows have a checksum that their writer makes: XXH3-64 of the bytes. The header of a slot has it
bound to the chunk's identity (see `layout.py`), so that right bytes in the wrong place fail like flipped bits
do. Binding needs the writer's checksum and not the rows.

Sums are never made from stored bytes and then believed. Where rows need sums of other ranges than their
writer gave, the new ones are computed first, and the writer's are verified over the same bytes after that: a
byte that changed before is found by the old sums, one that changes later by the new ones. Worst case: one
more pass over a segment.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from typing_extensions import Buffer
from xxhash import xxh3_64, xxh3_64_intdigest

from ctxcache.errors import ChecksumMismatch
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import Stream

_STREAM, _CHECKSUM = struct.Struct("<ii"), struct.Struct("<Q")


# Three layers of sums over the same rows:
#
#     rows_checksum      the writer's, of one chunk's rows           kept with the segment
#     bound_checksum     of that, with whose rows they are           in the header of the slot
#     header_checksum    of the header with all bound checksums      in the segment's record
#
# A read from below compares from the last layer to the first. Right bytes in the wrong place fail at the
# second.
def rows_checksum(data: Buffer) -> int:
    """XXH3-64 of rows: their writer's checksum."""
    return xxh3_64_intdigest(data)


def bound_checksum(identity_seed: int, stream: Stream, checksum: int) -> int:
    """The checksum of a chunk in a header.

    It is the rows' checksum, bound to the identity of their segment and to their stream.
    """
    # Each sum seeds the next: identity, stream, rows. No two of them can change places.
    stream_seed = xxh3_64_intdigest(_STREAM.pack(stream.layer, stream.kind), seed=identity_seed)
    return xxh3_64_intdigest(_CHECKSUM.pack(checksum), seed=stream_seed)


def bound_checksums(identity_seed: int, layout: SegmentLayout, checksums: Iterable[int]) -> tuple[int, ...]:
    """The checksum of each chunk of a segment in a header; `checksums` in storage order."""
    return tuple(
        bound_checksum(identity_seed, spec.stream, checksum)
        for spec, checksum in zip(layout.specs, checksums, strict=True)
    )


def chunk_checksum(identity_seed: int, stream: Stream, data: Buffer) -> int:
    """The bound checksum of a chunk's rows (without padding)."""
    return bound_checksum(identity_seed, stream, rows_checksum(data))


def wire_checksum(data: Buffer) -> int:
    """XXH3-64 with seed 0: what a message of the streaming rpcs carries for its own bytes."""
    return xxh3_64_intdigest(data)


def joint_checksum(parts: Iterable[Buffer]) -> int:
    """The wire checksum of bytes that lie in several places."""
    hasher = xxh3_64()
    for part in parts:
        hasher.update(part)
    return hasher.intdigest()


class Sums(NamedTuple):
    """Checksums of rows `[row_begin, row_end)` of a segment: one per stream in layout order.

    A single row may have one sum for all streams, whose rows follow one another: a *joint* one.
    """

    row_begin: int
    row_end: int
    values: tuple[int, ...]

    def is_joint(self, layout: SegmentLayout) -> bool:
        """Whether one value covers several streams."""
        return len(self.values) < len(layout.specs)


def covers(known: Iterable[Sums], row_count: int) -> bool:
    """Whether sums, in order, cover each of the first rows."""
    end = 0
    for sums in known:
        # A gap between sums means rows without a sum.
        if sums.row_begin > end:
            return False
        end = max(end, sums.row_end)
    return end >= row_count


def computed(layout: SegmentLayout, view: memoryview, row_count: int) -> tuple[int, ...]:
    """One checksum per stream of a slot's first rows, computed now."""
    return tuple(
        rows_checksum(view[offset : offset + spec.row_bytes * row_count])
        for spec, offset in zip(layout.specs, layout.offsets, strict=True)
    )


def settled(
    layout: SegmentLayout, view: memoryview, known: Sequence[Sums], row_count: int
) -> tuple[tuple[int, ...], str]:
    """One sum per stream of all of the first rows, and what is wrong with them; empty when nothing is.

    `known` covers them. Sums behind them are verified as well.
    """
    # The sums are computed first. Then the writers' sums are verified over the same bytes.
    values = computed(layout, view, row_count)
    # Usually there is one sum per stream of exactly these rows, so that no byte is read twice.
    if len(known) == 1 and known[0].row_end == row_count and not known[0].is_joint(layout):
        return values, _first_difference(layout, known[0], values)
    return values, difference(layout, view, known)


def difference(layout: SegmentLayout, view: memoryview, known: Iterable[Sums]) -> str:
    """The rows of a slot that fail their sums, in words; empty when none does."""
    # Joint sums are of one row through all streams, and need a walk of their own.
    said = list(known)
    return _difference(
        layout, view, (sums for sums in said if not sums.is_joint(layout))
    ) or _joint_difference(layout, view, (sums for sums in said if sums.is_joint(layout)))


def _difference(layout: SegmentLayout, view: memoryview, known: Iterable[Sums]) -> str:
    for sums in known:
        checksums = tuple(
            rows_checksum(
                view[offset + sums.row_begin * spec.row_bytes : offset + sums.row_end * spec.row_bytes]
            )
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        )
        problem = _first_difference(layout, sums, checksums)
        if problem:
            return problem
    return ""


def _first_difference(layout: SegmentLayout, sums: Sums, found: tuple[int, ...]) -> str:
    for spec, wanted, value in zip(layout.specs, sums.values, found, strict=True):
        if wanted != value:
            return f"{spec.stream}: rows {sums.row_begin} to {sums.row_end} do not match their checksum"
    return ""


def _joint_difference(layout: SegmentLayout, view: memoryview, known: Iterable[Sums]) -> str:
    for sums in known:
        hasher = xxh3_64()
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            begin = offset + sums.row_begin * spec.row_bytes
            hasher.update(view[begin : begin + spec.row_bytes])
        if hasher.intdigest() != sums.values[0]:
            return f"row {sums.row_begin} of all streams does not match its checksum"
    return ""


class _Piece(NamedTuple):
    """Rows of tokens `[begin, end)` of one stream, and their checksum."""

    begin: int
    end: int
    value: int


class SumPlace(NamedTuple):
    """The place of rows of one segment, and the hasher to be fed with them before they are verified."""

    view: memoryview
    sums: xxh3_64


Rows = Callable[[int, int], Buffer]
"""Rows of tokens `[begin, end)` of a stream, where they were put; they lie in one segment."""


class Tally:
    """Sums of rows that were written and not committed, by stream and token. Used by one thread at a time.

    The rows noted by one call lie in one segment. Worst case: rows whose pieces have other ranges than are
    asked for are read again.
    """

    def __init__(self) -> None:
        self._pieces: dict[Stream, list[_Piece]] = {}
        self._growing: dict[Stream, list[tuple[int, int, xxh3_64]]] = {}

    def note(self, stream: Stream, begin: int, token_count: int, values: Iterable[int]) -> None:
        """Note checksums of rows: each is of so many tokens, from `begin` on."""
        pieces = self._pieces.setdefault(stream, [])
        for value in values:
            end = begin + token_count
            pieces.append(_Piece(begin, end, value))
            begin = end

    def grow(self, stream: Stream, begin: int, end: int, *, is_first: bool) -> xxh3_64:
        """The hasher to be fed rows of tokens `[begin, end)`, in order.

        `is_first`: a segment's rows begin with them.
        """
        growing = self._growing.setdefault(stream, [])
        # Rows that follow one another in one segment go on in one hasher.
        if growing and not is_first and growing[-1][1] == begin:
            first, _, hasher = growing.pop()
        else:
            first, hasher = begin, xxh3_64()
        growing.append((first, end, hasher))
        return hasher

    def drop(self, stream: Stream, begin: int, end: int, rows: Rows) -> None:
        """Forget the sums of tokens `[begin, end)`, whose rows are written again. Raises as `value`."""
        self._close(stream)
        kept = []
        for piece in self._pieces.get(stream, ()):
            if piece.end <= begin or end <= piece.begin:
                kept.append(piece)
            else:
                kept += _recut(stream, [piece], [(piece.begin, begin), (end, piece.end)], rows)
        self._pieces[stream] = sorted(kept)

    def values(self, stream: Stream, ranges: Sequence[tuple[int, int]], rows: Rows) -> list[int]:
        """The checksum of rows of each range of tokens, in order, as `value` has it."""
        self._close(stream)
        pieces = self._pieces.get(stream, [])
        first = bisect_left(pieces, ranges[0][0], key=_begin) if ranges else 0
        noted = pieces[first : first + len(ranges)]
        # Usually the ranges are those that were noted, so that none is searched.
        if [piece[:2] for piece in noted] == ranges:
            return [piece.value for piece in noted]
        return [self.value(stream, begin, end, rows) for begin, end in ranges]

    def value(self, stream: Stream, begin: int, end: int, rows: Rows) -> int:
        """The checksum of rows of tokens `[begin, end)`, all of one segment.

        Raises ChecksumMismatch when rows were changed where they lie, and KeyError where some were not noted.
        """
        self._close(stream)
        pieces = self._pieces.get(stream, [])
        first = max(bisect_right(pieces, begin, key=_begin) - 1, 0)
        last = bisect_left(pieces, end, key=_begin)
        # One piece is exactly the range: no byte is read again.
        touched = pieces[first:last]
        if [piece[:2] for piece in touched] == [(begin, end)]:
            return touched[0].value
        # Some or all of these rows have no noted sum.
        if not touched or touched[0].begin > begin or touched[-1].end < end:
            raise KeyError(stream, begin, end)
        if any(one.end != next_one.begin for one, next_one in pairwise(touched)):
            raise KeyError(stream, begin, end)
        # The parts on both sides keep sums too. New sums are made for all three before the old ones are
        # verified.
        ranges = [(touched[0].begin, begin), (begin, end), (end, touched[-1].end)]
        pieces[first:last] = made = _recut(stream, touched, ranges, rows)
        return next(piece.value for piece in made if piece.begin == begin)

    def forget(self, end: int) -> None:
        """Forget sums of tokens below `end`, whose rows are committed."""
        for stream in list(self._growing):
            self._close(stream)
        for pieces in self._pieces.values():
            del pieces[: bisect_left(pieces, end, key=_begin)]

    def _close(self, stream: Stream) -> None:
        growing = self._growing.pop(stream, None)
        if growing:
            # The hashers end here, since several may be fed at a time.
            pieces = self._pieces.setdefault(stream, [])
            pieces += [_Piece(begin, end, hasher.intdigest()) for begin, end, hasher in growing]


def _begin(piece: _Piece) -> int:
    return piece.begin


def _recut(
    stream: Stream, old: Iterable[_Piece], ranges: Iterable[tuple[int, int]], rows: Rows
) -> list[_Piece]:
    """Pieces of other ranges, of rows that old pieces cover. Raises ChecksumMismatch."""
    new = [_Piece(begin, end, rows_checksum(rows(begin, end))) for begin, end in ranges if begin < end]
    # The new pieces are made first: see the module's description.
    for piece in old:
        if rows_checksum(rows(piece.begin, piece.end)) != piece.value:
            raise ChecksumMismatch(field=f"{stream} from token {piece.begin} on, changed before its commit,")
    return new
