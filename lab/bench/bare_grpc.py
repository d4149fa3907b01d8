"""The limit of gRPC in Python: a process that keeps contexts and moves them in streams of bytes messages.

    python -m lab.bench.bare_grpc CONTEXTS BYTES RECORDS

Prints its address. `RECORDS` is a file to which what Record sends is appended and synced. Both ends
have the options of ours; messages are made of shared memory and end in warm memory, and nobody checks or
parses anything. Killed by whoever started it.
"""

import asyncio
import mmap
import os
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np

from ctxcache.client.wire import CHANNEL_OPTIONS
from ctxcache.runtime.memory import keep_freed_memory
from ctxcache.server.listening import OPTIONS
from lab.bench.bare import bare_process
from lab.bench.contexts import Bytes

MESSAGE_BYTES = 1 << 20
_SERVICE = "lab.bench.Bare"


@dataclass(frozen=True, slots=True)
class FarSide:
    """The calls of such a process. A context's index is one byte; saving sends it as the first message."""

    target: str
    read: "grpc.UnaryStreamMultiCallable[bytes, bytes]"
    save: "grpc.StreamUnaryMultiCallable[bytes, bytes]"
    pid: int
    echoes: "tuple[grpc.UnaryUnaryMultiCallable[bytes, bytes], ...]" = ()
    """A call that gives back what it gets, over a connection of its own for each client."""
    records: "tuple[grpc.UnaryUnaryMultiCallable[bytes, bytes], ...]" = ()
    """The same, once it is on disk."""


@contextmanager
def far_side(
    context_count: int, context_bytes: int, *, client_count: int = 0, records: Path = Path(os.devnull)
) -> Iterator[FarSide]:
    """Such a process, over TCP, and so many clients that echo. Raises NoPeer."""
    arguments = str(context_count), str(context_bytes), str(records)
    with (
        bare_process("lab.bench.bare_grpc", *arguments) as (target, pid),
        connected(target, pid, client_count) as far,
    ):
        yield far


@contextmanager
def connected(target: str, pid: int, client_count: int = 0) -> Iterator[FarSide]:
    """Calls of a process that is there, and so many clients that echo."""
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel, ExitStack() as stack:
        # Each with an option of its own, so that no two share a connection.
        others = [
            stack.enter_context(grpc.insecure_channel(target, options=[*CHANNEL_OPTIONS, ("client", i)]))
            for i in range(client_count)
        ]
        yield FarSide(
            target,
            channel.unary_stream(f"/{_SERVICE}/Read"),
            channel.stream_unary(f"/{_SERVICE}/Save"),
            pid,
            tuple(other.unary_unary(f"/{_SERVICE}/Echo") for other in others),
            tuple(other.unary_unary(f"/{_SERVICE}/Record") for other in others),
        )


def ask_read(far: FarSide, index: int, into: Bytes) -> None:
    """Have a context's bytes sent. Raises EOFError."""
    filled = 0
    with _broken():
        for message in far.read(bytes([index])):
            filled = _put(message, into, filled)
    if filled != into.nbytes:
        raise EOFError(f"{filled} B of {into.nbytes} B came")


def ask_save(far: FarSide, index: int, data: Bytes) -> None:
    """Send a context's bytes, and wait until they are there. Raises EOFError."""

    def messages() -> Iterator[bytes]:
        yield bytes([index])
        yield from _cut(data.data)

    with _broken():
        if far.save(messages()) != b"k":
            raise EOFError("not all bytes came")


@contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except (grpc.RpcError, ValueError) as error:
        raise EOFError(f"bare gRPC: {error}") from error


def _cut(view: memoryview) -> Iterator[bytes]:
    for begin in range(0, len(view), MESSAGE_BYTES):
        yield bytes(view[begin : begin + MESSAGE_BYTES])


def _put(message: bytes, into: Bytes, at: int) -> int:
    """Copy a message to its place; where the next one begins."""
    end = at + len(message)
    np.copyto(into[at:end], np.frombuffer(message, np.uint8))
    return end


class _Records:
    """A file of records, in one thread: those that come while it writes and syncs share the next sync."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._thread = ThreadPoolExecutor(1)
        self._waiting: list[bytes] = []
        self._done: asyncio.Future[None] | None = None
        self._is_writing = False

    async def put(self, record: bytes) -> None:
        """Return when it is on disk."""
        self._waiting.append(record)
        if self._done is None:
            self._done = asyncio.get_running_loop().create_future()
        done = self._done
        if not self._is_writing:
            self._begin()
        await done

    def _begin(self) -> None:
        written, done = b"".join(self._waiting), self._done
        self._waiting, self._done, self._is_writing = [], None, True

        def end(_: object) -> None:
            self._is_writing = False
            if done is not None:
                done.set_result(None)
            if self._done is not None:
                self._begin()

        work = asyncio.get_running_loop().run_in_executor(self._thread, self._write, written)
        work.add_done_callback(end)

    def _write(self, written: bytes) -> None:
        os.write(self._fd, written)
        os.fdatasync(self._fd)


async def serve(context_count: int, context_bytes: int, records: Path) -> None:
    """Serve until killed."""
    kept = [_shared(context_bytes) for _ in range(context_count)]
    on_disk = _Records(records)

    async def read(request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        for message in _cut(kept[request[0]].data):
            await context.write(message)

    async def save(messages: AsyncIterator[bytes], _: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        into = kept[(await anext(messages))[0]]
        at = 0
        async for message in messages:
            at = _put(message, into, at)
        return b"k" if at == into.nbytes else b"?"

    async def echo(request: bytes, _: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        return request

    async def record(request: bytes, _: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        await on_disk.put(request)
        return request

    server = grpc.aio.server(options=OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Read": grpc.unary_stream_rpc_method_handler(read),
        "Save": grpc.stream_unary_rpc_method_handler(save),
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Record": grpc.unary_unary_rpc_method_handler(record),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


def _shared(size_bytes: int) -> Bytes:
    """Memory of the arena's kind, its pages there."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    memory[:] = 1
    return memory


if __name__ == "__main__":
    keep_freed_memory()
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))
