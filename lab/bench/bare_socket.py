"""The limit of a socket: a process that keeps contexts and moves them, in plain Python.

    python -m lab.bench.bare_socket CONTEXTS BYTES

Prints its port. A request is `r` or `s` and one byte, the context's index; `s` is followed by the bytes
and answered with one byte, `r` is answered with the bytes. Ends with its connection.
"""

import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from lab.bench.bare import bare_process
from lab.bench.contexts import Bytes, warm

_REQUEST = struct.Struct("cB")
BUFFER_BYTES = 4 << 20


def receive(connection: socket.socket, into: Bytes) -> None:
    """Fill `into`. Raises EOFError."""
    view, read = into.data, 0
    while read < len(view):
        count = connection.recv_into(view[read:])
        if not count:
            raise EOFError(f"{read} B of {len(view)} B came")
        read += count


@contextmanager
def far_side(context_count: int, context_bytes: int) -> Iterator[tuple[socket.socket, int]]:
    """A connection to such a process, and the process's id."""
    with (
        bare_process("lab.bench.bare_socket", str(context_count), str(context_bytes)) as (port, pid),
        socket.create_connection(("127.0.0.1", int(port))) as connection,
    ):
        _tune(connection)
        yield connection, pid


@contextmanager
def exchanging(request_bytes: int, answer_bytes: int) -> Iterator[Callable[[], None]]:
    """A call over a Unix socket to a process that answers so many bytes with so many, and no more."""
    near, far = socket.socketpair()
    code = (
        f"import socket; s = socket.socket(fileno={far.fileno()})\n"
        f"while s.recv({request_bytes}, socket.MSG_WAITALL): s.sendall(bytes({answer_bytes}))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[far.fileno()])  # noqa: S603  ourselves
    far.close()
    request, answer = bytes(request_bytes), np.zeros(answer_bytes, np.uint8)

    def exchange() -> None:
        near.sendall(request)
        receive(near, answer)

    try:
        with near:
            exchange()
            yield exchange
    finally:
        process.kill()
        process.wait()


def ask_read(connection: socket.socket, index: int, into: Bytes) -> None:
    """Have a context's bytes sent."""
    connection.sendall(_REQUEST.pack(b"r", index))
    receive(connection, into)


def ask_save(connection: socket.socket, index: int, data: Bytes) -> None:
    """Send a context's bytes, and wait until they are there."""
    connection.sendall(_REQUEST.pack(b"s", index))
    connection.sendall(data.data)
    if connection.recv(1) != b"k":
        raise EOFError("no answer")


def serve(context_count: int, context_bytes: int) -> None:
    """Serve one connection."""
    kept = [warm(context_bytes) for _ in range(context_count)]
    request = warm(_REQUEST.size)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        connection, _ = listener.accept()
    _tune(connection)
    while True:
        try:
            receive(connection, request)
            kind, index = _REQUEST.unpack(request.tobytes())
            if kind == b"r":
                connection.sendall(kept[index].data)
            else:
                receive(connection, kept[index])
                connection.sendall(b"k")
        except (EOFError, OSError):
            # It ended, or was killed in the middle.
            return


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
