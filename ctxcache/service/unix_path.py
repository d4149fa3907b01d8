"""The path of a Unix socket: free for a server to listen at, or another's.

Between the look and the listening another process may come; the lock on the data directory keeps out
those that have the same paths by default.
"""

import errno
import socket
from pathlib import Path


def bound(path: str, *, mode: int = 0o600) -> socket.socket:
    """A socket at a path, with that mode before anybody can connect. Raises OSError.

    A socket that nobody listens to is replaced.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        remove_stale(path)
        listener.bind(path)
        # Nobody can connect before it listens.
        Path(path).chmod(mode)
    except BaseException:
        listener.close()
        raise
    return listener


def remove_stale(path: str) -> None:
    """Remove a socket that nobody listens to. Raises OSError when somebody does.

    Anything else that has the name stays, and is in the way.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        # Else it would wait for a server that takes nobody for now.
        probe.setblocking(False)  # noqa: FBT003  # positional alone
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            if Path(path).is_socket():
                Path(path).unlink()
        except FileNotFoundError:
            return
        except BlockingIOError:
            raise _in_use() from None
        else:
            raise _in_use()


def _in_use() -> OSError:
    return OSError(errno.EADDRINUSE, "another process listens there")
