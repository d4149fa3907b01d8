"""Objects of the bucket that hold rows of a session: which are still right, and which are to be put.

    log       0 ======================== 900      1000 ==== 1200 = 1300     live
    objects   |   a   |   b   |   c   |                             a, b hold, and c does if all of it is live
    to put                            |==|        |=============|   in pieces of a bounded size

Positions of a copy's log never change their rows, so that an object is right for as long as its positions are
live. An object that is small is put again with what comes behind it: a session of many short turns has few
objects. Leaf.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ctxcache.core import ranges
from ctxcache.core.ranges import Range, Ranges

GRAIN_TOKENS = 64
"""Objects begin and end between segments where they can: then no row is read to be summed."""


@dataclass(frozen=True, slots=True)
class Part:
    """An object of rows: those of the tokens at positions `[begin, end)` of a copy's log.

    `digest`: of what the object says of its rows, their sums among it.
    """

    name: str
    begin: int
    end: int
    size_bytes: int
    digest: bytes


def still_right(parts: Iterable[Part], live: Ranges) -> list[Part]:
    """The objects all of whose positions are live and one behind the other, in their order."""
    kept = [part for part in parts if ranges.clip(live, part.begin, part.end) == ((part.begin, part.end),)]
    return sorted(kept, key=lambda part: part.begin)


def prefix(parts: Sequence[Part], live: Ranges) -> list[Part]:
    """The objects up to the first live token that none of them has. `parts`: as `still_right` gives them."""
    first, at = list[Part](), 0
    for part in parts:
        begin, end = indexes((part.begin, part.end), live)
        if begin != at:
            break
        first.append(part)
        at = end
    return first


def to_put(
    parts: Sequence[Part], live: Ranges, *, token_bytes: int, least_bytes: int, most_bytes: int
) -> tuple[list[Part], list[Range]]:
    """The objects that stay, and the positions of those that are lacking, in their order.

    `parts`: as `still_right` gives them. `live`: what is to be in the bucket. An object below `least_bytes`
    stays where nothing is lacking right behind it.
    """
    lacking = ranges.subtract(live, tuple((part.begin, part.end) for part in parts))
    begins = {begin for begin, _ in lacking}
    kept = [part for part in parts if part.size_bytes >= least_bytes or part.end not in begins]
    lacking = ranges.subtract(live, tuple((part.begin, part.end) for part in kept))
    step = max(most_bytes // max(token_bytes, 1) // GRAIN_TOKENS, 1) * GRAIN_TOKENS
    cuts = [(at, min(at + step, end)) for begin, end in lacking for at in range(begin, end, step)]
    return kept, cuts


def indexes(span: Range, live: Ranges) -> Range:
    """The indexes of tokens whose positions are all live, one behind the other."""
    begin = ranges.count(live) - ranges.count_from(live, span[0])
    return begin, begin + span[1] - span[0]


def landed(parts: Iterable[Part], token_count: int, whole_count: int | None) -> list[Part]:
    """The objects of a copy that came from elsewhere, by the positions that their tokens have here.

    `parts`: by indexes of the session that came. `token_count`: how many of its tokens are here.
    `whole_count`: the index that a token stands before in place of those that were dropped; None for none.
    """
    found = []
    for part in parts:
        shift = int(whole_count is not None and part.begin >= whole_count)
        if part.end <= token_count:
            found.append(replace(part, begin=part.begin + shift, end=part.end + shift))
    return found
