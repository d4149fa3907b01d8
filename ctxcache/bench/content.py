"""Bytes that say whose they are: every 8 bytes follow from owner and place. Worst case: WrongBytes."""

import numpy as np
import numpy.typing as npt

from ctxcache.bench.row import WrongBytes

Bytes = npt.NDArray[np.uint8]
_WORD_BYTES = 8


def warm(size_bytes: int) -> Bytes:
    """Memory whose pages are all there."""
    return np.ones(size_bytes, np.uint8)


def content(owner: int, size_bytes: int) -> Bytes:
    """`size_bytes`, a multiple of 8, that belong to `owner`."""
    words = np.arange(size_bytes // _WORD_BYTES, dtype=np.uint64)
    with np.errstate(over="ignore"):
        # SplitMix64 (Steele, Lea, Flood 2014): neighbours share nothing.
        words += np.uint64((owner + 1) * 0x9E3779B97F4A7C15 % 2**64)
        words ^= words >> np.uint64(30)
        words *= np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(27)
        words *= np.uint64(0x94D049BB133111EB)
        words ^= words >> np.uint64(31)
    return words.view(np.uint8)


def check(found: npt.NDArray[np.uint8], expected: Bytes, what: str) -> None:
    """Raise WrongBytes unless all bytes are the same."""
    found = found.reshape(-1)
    if found.nbytes != expected.nbytes or not np.array_equal(found, expected.reshape(-1)):
        raise WrongBytes(f"{what}: {_difference(found, expected.reshape(-1))}")


def _difference(found: Bytes, expected: Bytes) -> str:
    if found.nbytes != expected.nbytes:
        return f"{found.nbytes} B where {expected.nbytes} B were saved"
    return f"byte {int(np.flatnonzero(found != expected)[0])} is another"
