"""Blocks: what a run of layers does to the three streams of the pipeline, as a matrix over (max, +).

The pipeline has three streams: reads into DRAM, copies onto the device, computation. A layer passes
them in this order and each of them takes layers in order, so that

    read'    = read + r
    copy'    = max(copy, read') + c
    compute' = max(compute, copy') + p

which is linear over (max, +). Blocks therefore compose: a run of layers is one block, whatever its
length. Worst case: none, a block is six numbers.
"""

from collections.abc import Sequence
from itertools import accumulate, combinations, repeat
from typing import NamedTuple

_ROUNDING = 1 + 1e-12

State = tuple[float, float, float]
"""When reading, copying and computing are free, in ascending seconds.

A tuple, because searches make thousands.
"""
START: State = (0.0, 0.0, 0.0)


# The six numbers as a matrix over (max, +); a dot is minus infinity, as nothing flows backwards:
#
#                from read          from copy          from compute
#     read'    [ read_s             .                  .         ]
#     copy'    [ read_to_copy_s     copy_s             .         ]
#     compute' [ read_to_compute_s  copy_to_compute_s  compute_s ]
#
# `after` is this matrix times the state, `then` the product of two. Times is + there, and plus is max.
class StreamBlock(NamedTuple):
    """Seconds that a run of layers keeps each stream busy, and seconds of the longest way between streams."""

    read_s: float
    copy_s: float
    compute_s: float
    read_to_copy_s: float
    copy_to_compute_s: float
    read_to_compute_s: float

    def then(self, after: "StreamBlock") -> "StreamBlock":
        """Return both as one: this block's layers, then those of `after`."""
        read, copy, compute, read_copy, copy_compute, read_compute = self
        read2, copy2, compute2, read_copy2, copy_compute2, read_compute2 = after
        return StreamBlock(
            read + read2,
            copy + copy2,
            compute + compute2,
            max(read + read_copy2, read_copy + copy2),
            max(copy + copy_compute2, copy_compute + compute2),
            # The longest way from the first read to the last
            # computation changes streams in one run or the other.
            max(read + read_compute2, read_copy + copy_compute2, read_compute + compute2),
        )

    def after(self, state: State) -> State:
        """Return when each stream is free again, if they were free at `state`."""
        read, copy, compute = state
        read_s, copy_s, compute_s, read_to_copy_s, copy_to_compute_s, read_to_compute_s = self
        copied, computed = copy + copy_s, compute + compute_s
        # Comparing takes a third of the time that max() takes, and a search does this thousands of times.
        if (late := read + read_to_copy_s) > copied:
            copied = late
        if (late := copy + copy_to_compute_s) > computed:
            computed = late
        if (late := read + read_to_compute_s) > computed:
            computed = late
        return read + read_s, copied, computed

    def never_later_than(self, other: "StreamBlock") -> bool:
        """Whether this block ends no later than `other` on every stream, from any state; rounding apart."""
        # Sums of the same times in another order differ in their last bits, and would count as worse.
        return all(mine <= theirs * _ROUNDING for mine, theirs in zip(self, other, strict=True))

    def powers(self, count: int) -> list["StreamBlock"]:
        """Return this block repeated 0 to `count` times."""
        return list(accumulate(repeat(self, count), StreamBlock.then, initial=NOTHING))


NOTHING = StreamBlock(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def step(*, read_s: float = 0.0, copy_s: float = 0.0, compute_s: float = 0.0) -> StreamBlock:
    """Return the block of one layer's rows that are read, then copied, then computed on."""
    return StreamBlock(
        read_s,
        copy_s,
        compute_s,
        read_s + copy_s,
        copy_s + compute_s,
        read_s + copy_s + compute_s,
    )


def is_better_first(block: StreamBlock, other: StreamBlock) -> bool:
    """Whether `block` before `other` is never worse than the other way round, from any state.

    For two streams this is Johnson's rule (1954) and always holds one way or the other; for three
    streams neither order may be better always.
    """
    return block.then(other).never_later_than(other.then(block))


def in_order(blocks: Sequence[StreamBlock]) -> list[int] | None:
    """Return the blocks' indexes so that any two are better that way round; None if no order does that."""
    ordered: list[int] = []
    for index, block in enumerate(blocks):
        places = (i for i, other in enumerate(ordered) if not is_better_first(blocks[other], block))
        ordered.insert(next(places, len(ordered)), index)
    # Every pair, not neighbours alone: with three streams the relation need not be transitive.
    is_sorted = all(is_better_first(blocks[one], blocks[other]) for one, other in combinations(ordered, 2))
    return ordered if is_sorted else None
