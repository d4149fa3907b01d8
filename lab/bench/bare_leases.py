"""Leases as fast as one server gives them: many connections of one process, made of bare frames.

    python -m lab.bench.bare_leases CONTROL_SOCKET SESSION FINGERPRINT CONNECTIONS

Obeys a line at a time: a number is so many leases and releases, answered with the seconds that they took.
Every connection has one request under way, so that the server always has work. The client of the product
would be the slower side: it makes objects of each answer.
"""

import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ctxcache.runtime.memory import keep_freed_memory
from ctxcache.v1 import arena_pb2
from ctxcache.wire.frames import PROTOCOL_VERSION, FrameKind, FrameReader, encode_frame
from lab.bench.row import WrongBytes

READ_BYTES = 1 << 16


class Leases:
    """Such a process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def take(self, count: int) -> float:
        """Seconds that so many leases and releases take. Raises WrongBytes where one was refused."""
        said, asked = self._process.stdout, self._process.stdin
        if said is None or asked is None:
            raise RuntimeError("both are pipes, always")
        asked.write(f"{count}\n")
        asked.flush()
        line = said.readline().strip()
        try:
            return float(line)
        except ValueError:
            raise WrongBytes(f"bare leases: {line or 'the process ended'}") from None


@contextmanager
def bare_leases(path: str, session: str, fingerprint: bytes, connection_count: int) -> Iterator[Leases]:
    """Such a process on the control socket at `path`; killed at the end."""
    arguments = [path, session, fingerprint.hex(), str(connection_count)]
    process = subprocess.Popen(  # noqa: S603  ourselves
        [sys.executable, "-m", "lab.bench.bare_leases", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Leases(process)
    finally:
        process.kill()
        process.wait()


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    hello = arena_pb2.ControlHello(protocol_version=PROTOCOL_VERSION)
    connection.sendall(encode_frame(FrameKind.HELLO, hello.SerializeToString()))
    data, fds, _, _ = socket.recv_fds(connection, READ_BYTES, 4)
    for fd in fds:
        socket.close(fd)
    reader = FrameReader()
    reader.feed(data)
    frame = reader.next()
    if frame is None or frame.kind != FrameKind.HELLO:
        raise WrongBytes("the control socket does not greet")
    return connection


def _round(connections: list[socket.socket], acquire: bytes, count: int) -> float:
    """Take so many leases, by turns of the connections; their seconds."""
    left = {connection: count // len(connections) for connection in connections}
    readers = {connection: FrameReader() for connection in connections}
    selector = selectors.DefaultSelector()
    for each in connections:
        selector.register(each, selectors.EVENT_READ, each)
    begun = time.perf_counter()
    for each in connections:
        each.sendall(acquire)
    while left:
        for key, _ in selector.select():
            connection: socket.socket = key.data
            readers[connection].feed(connection.recv(READ_BYTES))
            frame = readers[connection].next()
            if frame is None:
                continue
            if frame.kind != FrameKind.ACCESS:
                raise WrongBytes("the connection was ended")
            (result,) = arena_pb2.AccessResponse.FromString(frame.message).results
            if result.HasField("lease"):
                release = arena_pb2.Operation(
                    release_lease=arena_pb2.ReleaseLease(lease_id=result.lease.lease_id)
                )
                connection.sendall(_request(release))
            elif not result.HasField("released"):
                raise WrongBytes(f"a lease was refused: {result.error.message}")
            elif left[connection] > 1:
                left[connection] -= 1
                connection.sendall(acquire)
            else:
                del left[connection]
    took_s = time.perf_counter() - begun
    selector.close()
    return took_s


def _request(operation: arena_pb2.Operation) -> bytes:
    request = arena_pb2.AccessRequest(request_id=1, operations=[operation])
    return encode_frame(FrameKind.ACCESS, request.SerializeToString())


def main() -> None:
    """Obey."""
    keep_freed_memory()
    path, session, fingerprint, count = sys.argv[1:]
    connections = [_connected(path) for _ in range(int(count))]
    acquire = arena_pb2.AcquireLease(
        session=session, model_fingerprint=bytes.fromhex(fingerprint), is_brief=True
    )
    encoded = _request(arena_pb2.Operation(acquire_lease=acquire))
    for line in sys.stdin:
        try:
            answer = str(_round(connections, encoded, int(line)))
        except (WrongBytes, OSError) as error:
            answer = str(error)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
