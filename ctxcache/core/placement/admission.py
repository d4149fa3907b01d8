"""Admission: whether SSD is to have what only DRAM has. Pure; the ledger and the running store ask alike.

What SSD has free room for it takes. What it has none for, and is worth less than one of those who would have to leave
for it, stays in DRAM alone while that has room, and leaves the store from there: SSD is neither worn nor emptied for
it. Worst case: a crash loses what was never written, which nobody was promised.
"""

from collections.abc import Iterable
from typing import NamedTuple


class Leaving(NamedTuple):
    """One that would leave SSD; `gives_way`: it is worth less than what comes in its place."""

    gives_way: bool
    size_bytes: int


def is_worth_writing(size_bytes: int, free_bytes: int, leaving: Iterable[Leaving]) -> bool:
    """Whether so many bytes go to SSD; `leaving` are those that may, the first to leave first, looked at as far as needed.

    Where they are not enough it is for whoever writes to find that out.
    """
    for each in leaving if size_bytes > free_bytes else ():
        if not each.gives_way:
            return False
        free_bytes += each.size_bytes
        if size_bytes <= free_bytes:
            break
    return True
