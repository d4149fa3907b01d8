"""Processes beside this one that move bytes on demand: a second reader, or traffic in the background.

    python -m lab.bench.children KIND TARGET ACCESS SCALE...

Prints `ready`, then obeys a line at a time: `go` is one walk over all contexts, answered with `done`
or, when a byte was another, with `wrong ...`. KIND `read` goes through the store, `copy` copies memory.
`bare-socket` reads from a bare socket's process of its own, `bare-grpc` from the one at TARGET.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

import ctxcache
from ctxcache.client import CallerModel
from ctxcache.runtime.memory import keep_freed_memory
from lab.bench import bare_grpc, bare_socket
from lab.bench.contexts import Bytes, by_stream, check, content, copy_out, model_of, warm
from lab.bench.row import Scale, WrongBytes
from lab.routes import route_options

BARE_SOCKET, BARE_GRPC = "bare-socket", "bare-grpc"


class Child:
    """One such process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def start(self) -> None:
        """Have it begin a walk."""
        if self.process.stdin is None:
            raise RuntimeError("its input is a pipe, always")
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def wait(self) -> None:
        """Wait until it has said something. Raises WrongBytes unless that is that it did well."""
        line = self.process.stdout.readline().strip() if self.process.stdout else ""
        if line not in ("ready", "moved", "done"):
            raise WrongBytes(f"a process beside: {line or 'it ended'}")


@contextmanager
def child(kind: str, target: str, way: str, scale: Scale) -> Iterator[Child]:
    """Such a process, ready; killed at the end."""
    numbers = [scale.context_count, scale.layer_count, scale.token_count, scale.row_bytes]
    process = subprocess.Popen(  # noqa: S603  ourselves
        [sys.executable, "-m", "lab.bench.children", kind, target, way, *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        started = Child(process)
        started.wait()
        yield started
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _mover(
    stack: ExitStack,
    kind: str,
    target: str,
    way: str,
    scale: Scale,
    data: Sequence[Bytes],
    outs: Sequence[Bytes],
) -> Callable[[int], object]:
    """What brings a context's bytes to `outs`, until the stack is closed."""
    if kind == "copy":
        return lambda index: np.copyto(outs[index], data[index])
    if kind == BARE_SOCKET:
        connection, _ = stack.enter_context(bare_socket.far_side(len(data), scale.context_bytes))
        for index, flat in enumerate(data):
            bare_socket.ask_save(connection, index, flat)
        return lambda index: bare_socket.ask_read(connection, index, outs[index])
    if kind == BARE_GRPC:
        far = stack.enter_context(bare_grpc.connected(target, 0))
        for index, flat in enumerate(data):
            bare_grpc.ask_save(far, index, flat)
        return lambda index: bare_grpc.ask_read(far, index, outs[index])
    # The command line is our own, made by `child` of an Access.
    client = stack.enter_context(ctxcache.connect(target, **route_options(way)))
    streams, model = [by_stream(scale, out) for out in outs], CallerModel(model_of(scale))

    def read(index: int) -> None:
        with client.sessions.open(f"sessions/context{index}", model).read() as rows:
            copy_out(rows, streams[index])

    return read


def _walk(stack: ExitStack, kind: str, target: str, way: str, scale: Scale) -> Callable[[], None]:
    """One walk; what it moved last is checked after it, and every context over the walks."""
    data = [content(owner, scale.context_bytes) for owner in range(scale.context_count)]
    outs = [warm(scale.context_bytes) for _ in data]
    move = _mover(stack, kind, target, way, scale, data, outs)

    def walk() -> None:
        for index in range(len(data)):
            move(index)
        _say("moved")
        for out, expected in zip(outs, data, strict=True):
            check(out, expected, kind)
            out[::4096] = 0

    return walk


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    """Obey standard input until it ends."""
    kind, target, way, *numbers = sys.argv[1:]
    scale = Scale(*(int(number) for number in (*numbers, "0", "0")))
    keep_freed_memory()
    with ExitStack() as stack:
        walk = _walk(stack, kind, target, way, scale)
        _say("ready")
        for _ in sys.stdin:
            try:
                walk()
            except WrongBytes as error:
                _say(f"wrong {error}")
                return 1
            _say("done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
