"""Arithmetic of position ranges: what truncation keeps, and where live tokens lie in the log.

A session's tokens have two numbers. The *position* is where a token was appended to the log; it
never changes and is never used again. The *index* is its rank among the live tokens, which is
what callers see: after dropping positions [4, 132) of 200,

    positions  0..3   4 .......... 131   132 ....... 199
    live       [0,4)                     [132, 200)
    indexes    0..3                      4 .......... 71

Every function takes and returns ascending, disjoint, non-empty ranges `[begin, end)`.
"""

from bisect import bisect_left, bisect_right

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def count(ranges: Ranges) -> int:
    """How many positions the ranges hold."""
    return sum(end - begin for begin, end in ranges)


def count_from(ranges: Ranges, begin: int) -> int:
    """How many positions lie at or after `begin`. Takes time for those ranges only."""
    # Bisection on the ends: the first range that ends behind `begin`.
    low = bisect_right(ranges, begin, key=lambda item: item[1])
    return sum(e - max(b, begin) for b, e in ranges[low:])


def fragment_count(live: Ranges, log_end: int) -> int:
    """How many ranges there are once the log goes on: one more where its end is not live."""
    return len(live) + (not live or live[-1][1] != log_end)


def whole_count(ranges: Ranges) -> int:
    """How many positions there are from 0 on before the first missing one."""
    return ranges[0][1] if ranges and not ranges[0][0] else 0


def clip(ranges: Ranges, begin: int, end: int) -> Ranges:
    """The parts of the ranges within `[begin, end)`."""
    if begin >= end:
        return ()
    low = bisect_right(ranges, begin, key=lambda item: item[1])
    # Ranges that touch the window; the first and the last are cut below.
    kept = list(ranges[low : bisect_left(ranges, end, key=lambda item: item[0])])
    if kept:
        kept[0] = max(kept[0][0], begin), kept[0][1]
        kept[-1] = kept[-1][0], min(kept[-1][1], end)
    return tuple(kept)


def extend(ranges: Ranges, begin: int, end: int) -> Ranges:
    """The ranges and `[begin, end)`, which starts at or after their end."""
    if begin == end:
        return ranges
    # Appending to the last range keeps the usual session at one range, however many commits it has.
    if ranges and ranges[-1][1] == begin:
        return (*ranges[:-1], (ranges[-1][0], end))
    return (*ranges, (begin, end))


def normalise(ranges: list[Range]) -> Ranges:
    """Any ranges, in order, with touching and overlapping ones merged and empty ones left out."""
    merged: list[Range] = []
    for begin, end in sorted(r for r in ranges if r[0] < r[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return tuple(merged)


def subtract(ranges: Ranges, dropped: Ranges) -> Ranges:
    """The parts of the ranges outside `dropped`. Linear in both."""
    kept: list[Range] = []
    i = 0
    for begin, end in ranges:
        low = begin
        # Both lists ascend, so that `i` never goes back.
        while i < len(dropped) and dropped[i][1] <= low:
            i += 1
        j = i
        while j < len(dropped) and dropped[j][0] < end:
            if low < dropped[j][0]:
                kept.append((low, dropped[j][0]))
            low = dropped[j][1]
            j += 1
        # The last dropped range may reach into the next range.
        i = max(i, j - 1)
        if low < end:
            kept.append((low, end))
    return tuple(kept)


def select(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Positions of the live tokens with indexes `[begin, end)`."""
    return select_all(ranges, ((begin, end),) if begin < end else ())


def select_all(ranges: Ranges, indexes: Ranges) -> Ranges:
    """Positions of the live tokens with these indexes. Linear in both."""
    selected: list[Range] = []
    index = i = 0
    for b, e in ranges:
        stop = index + e - b
        while i < len(indexes) and indexes[i][0] < stop:
            low, high = max(indexes[i][0], index), min(indexes[i][1], stop)
            if low < high:
                selected.append((b + low - index, b + high - index))
            if indexes[i][1] > stop:
                break
            i += 1
        index = stop
    return tuple(selected)


def sinks_and_recent(token_count: int, *, sink_count: int, recent_count: int) -> Ranges:
    """Indexes that `keep_recent` drops: those between the first `sink_count` and the last `recent_count`."""
    begin, end = min(sink_count, token_count), max(token_count - recent_count, 0)
    return ((begin, end),) if begin < end else ()
