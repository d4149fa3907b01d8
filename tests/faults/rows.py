"""Rows that say whose they are: every byte follows from session, stream and position.

Any foreign, stale or shifted byte is recognised without keeping a copy of what was written.
"""

import numpy as np
import numpy.typing as npt

from ctxcache.format.streams import Stream

Rows = npt.NDArray[np.uint8]
_WORD_BYTES = 8


def rows_of(owner: int, stream: Stream, begin: int, end: int, row_bytes: int) -> Rows:
    """Rows `[begin, end)` of one stream, [n, row_bytes].

    `owner`: any number below 2**31 that names the writer.
    """
    return rows_at(owner, stream, np.arange(begin, end), row_bytes)


def rows_at(owner: int, stream: Stream, positions: npt.NDArray[np.int64], row_bytes: int) -> Rows:
    """Rows of these positions of one stream, in that order, [n, row_bytes]. See `rows_of`."""
    words = -(-row_bytes // _WORD_BYTES)
    where = positions.astype(np.uint64)[:, None] * np.uint64(1 << 20)
    where = where + np.arange(words, dtype=np.uint64)[None, :]
    stream_number = (stream.layer + 1) * 8 + int(stream.kind)
    mixed = _mix(where ^ np.uint64((owner << 32) ^ (stream_number << 52)))
    return np.ascontiguousarray(
        mixed.view(np.uint8).reshape(len(positions), words * _WORD_BYTES)[:, :row_bytes]
    )


def first_difference(
    found: Rows, owner: int, stream: Stream, begin: int, positions: npt.NDArray[np.int64] | None = None
) -> int | None:
    """Index of the first row that is not its own; None when all are.

    `found` [n, row_bytes]. Row i is that of position `begin + i`, or of `positions[i]` after truncation.
    """
    row_bytes = found.shape[1]
    if positions is None:
        positions = np.arange(begin, begin + len(found))
    expected = rows_at(owner, stream, positions, row_bytes)
    wrong = np.flatnonzero((found != expected).any(axis=1))
    return int(wrong[0]) if len(wrong) else None


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # SplitMix64 (Steele, Lea, Flood 2014): neighbours share nothing.
    with np.errstate(over="ignore"):
        words = words + np.uint64(0x9E3779B97F4A7C15)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
