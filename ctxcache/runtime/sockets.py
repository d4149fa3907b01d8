"""Descriptors and Unix sockets of this process: how many there may be, and whose a socket's path is. Leaf.

Storage must never be short of a descriptor because of connections, a log of RocksDB's above all. So
connections get what the limit leaves. Worst case: a limit so low that a quarter of it has to do for
connections.

A path of a Unix socket is free when no process listens there. Between that look and the listening another
process may come; the lock on the data directory keeps out servers that have the same paths by default.
"""

import errno
import logging
import os
import resource
import socket
from pathlib import Path

log = logging.getLogger(__name__)

RESERVE = 512
"""Descriptors kept from connections: at most 256 tables, logs, SSD files, and what is open for a moment."""


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
    # Never less than a quarter: a limit below the reserve must not leave a server that nobody can reach.
    left = max(limit - others - RESERVE, limit // 4) // listener_count
    if left < wanted:
        log.warning("connections_limited wanted=%d limit=%d descriptors=%d", wanted, left, limit)
    return max(min(wanted, left), 1)


def bound(path: str, *, mode: int = 0o600) -> socket.socket:
    """A socket at a path, with that mode before anybody can connect. Raises OSError.

    A socket that nobody listens to is replaced.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_stale(path)
        listener.bind(path)
        # No client can connect before it listens.
        Path(path).chmod(mode)
    except BaseException:
        listener.close()
        raise
    return listener


def remove_stale(path: str) -> None:
    """Remove a socket that nobody listens to. Raises OSError when somebody does.

    Anything else that has the name stays, and is in the way.
    """
    if _is_stale(path):
        Path(path).unlink()


def check_free(path: str) -> None:
    """Raise OSError where no socket could be made at the path. Changes nothing."""
    if os.path.lexists(path) and not _is_stale(path):
        raise OSError(errno.EEXIST, "a file that is no socket is there")


def _is_stale(path: str) -> bool:
    """Whether a socket is there and nobody listens. Raises OSError when somebody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Else it would wait for a server that takes nobody for now.
        probe.setblocking(False)  # noqa: FBT003  # positional alone
        # Answers of `connect` about a path, and whether the path may be used:
        #
        #     ECONNREFUSED   a socket that nobody listens to    stale
        #                    or no socket at all                in the way, and `bind` refuses it
        #     ENOENT         nothing is there                   free
        #     EAGAIN         somebody listens, queue full       in use
        #     connected      somebody listens                   in use
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return Path(path).is_socket()
        except FileNotFoundError:
            return False
        except BlockingIOError:
            raise _in_use() from None
        else:
            raise _in_use()


def _in_use() -> OSError:
    return OSError(errno.EADDRINUSE, "another process listens there")
