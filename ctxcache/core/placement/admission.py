"""Admission: whether the tier below is to have what only memory has. Pure; simulator and store ask alike.

The tier below takes what it has free room for. Beyond that a session stays in memory alone if it is worth less than
one that would have to leave for it, and leaves the store from there: the device is neither worn nor emptied for it.
Worst case: a crash loses what was never written, which no caller was promised.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Leaving(NamedTuple):
    """One that would leave the tier below; `gives_way`: it is worth less than what comes in its place."""

    gives_way: bool
    size_bytes: int


def is_worth_writing(size_bytes: int, free_bytes: int, leaving: Iterable[Leaving]) -> bool:
    """Whether so many bytes go below; `leaving` are those that may, the first to leave first, looked at as needed.

    Where they are not enough it is for whoever writes to find that out.
    """
    for each in leaving if size_bytes > free_bytes else ():
        if not each.gives_way:
            return False
        free_bytes += each.size_bytes
        if size_bytes <= free_bytes:
            break
    return True
