"""Descriptors: how many this process may have, and how many of them connections may take. Leaf.

What storage opens, a log of RocksDB's above all, must never be short of one because of connections: those get what
the limit leaves. Worst case: a limit so low that a quarter of it has to do for connections.
"""

import logging
import resource

log = logging.getLogger(__name__)

RESERVE = 512
"""Of storage and everything but connections: at most 256 tables, logs, SSD files, what is open for a moment."""


def raise_limit() -> int:
    """Allow this process as many as the system lets it have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        log.info("descriptor_limit_raised before=%d now=%d", soft, hard)
    return hard


def connection_limit(wanted: int, *, listener_count: int, others: int) -> int:
    """Connections of each of so many listeners: `wanted`, or what is left beside `others` and the reserve."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    left = max(limit - others - RESERVE, limit // 4) // listener_count
    if left < wanted:
        log.warning("connections_limited wanted=%d limit=%d descriptors=%d", wanted, left, limit)
    return max(min(wanted, left), 1)
