"""Bytes that are copied and added up in one pass, while the processor has them at hand.

Memory is not trusted: whatever is copied is compared with a sum of its writer's, or gets one. To add up what
was just copied, a run at a time, costs a sixth of the copy, and half of it where the run is added up first.
"""

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64

from ctxcache.format.checksums import rows_checksum

_Bytes = npt.NDArray[np.uint8]
RUN_BYTES = 1 << 19
"""Bytes that are copied before they are added up."""


def copied(target: _Bytes, source: _Bytes, *, of_target: bool = False) -> int:
    """Copy contiguous bytes, [n]; returns the XXH3-64 of those read, or, `of_target`, of those written."""
    if source.size <= RUN_BYTES:
        # The copy first: what it read from memory, and wrote, is in the cache when it is added up.
        np.copyto(target, source)
        return rows_checksum((target if of_target else source).data)
    hasher = xxh3_64()
    for begin in range(0, source.size, RUN_BYTES):
        run, place = source[begin : begin + RUN_BYTES], target[begin : begin + RUN_BYTES]
        np.copyto(place, run)
        hasher.update((place if of_target else run).data)
    return hasher.intdigest()
