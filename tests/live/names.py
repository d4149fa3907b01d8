"""What the sessions of a load are called in a store, and whose their rows are."""

import zlib


def name_of(uid: bytes) -> str:
    """Resource name."""
    return f"sessions/{uid.decode()}"


def owner_of(uid: bytes) -> int:
    """See `tests.faults.rows`."""
    return zlib.crc32(uid) >> 1
