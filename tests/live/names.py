"""Names of a load's sessions in a store, and the owner that their rows tell."""

import zlib


def name_of(uid: bytes) -> str:
    """Resource name."""
    return f"sessions/{uid.decode()}"


def owner_of(uid: bytes) -> int:
    """See `tests.faults.rows`."""
    return zlib.crc32(uid) >> 1
