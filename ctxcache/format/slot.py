"""Slot: a place of a fixed size in a tier. Who hands slots out is `core/extents.py`; tiers only do I/O."""

from typing import NamedTuple


class Slot(NamedTuple):
    """`[offset_bytes, offset_bytes + size_bytes)` of a tier's path number `path_index`. 4 KiB-aligned."""

    path_index: int
    offset_bytes: int
    size_bytes: int
