"""The server that is measured: `ctxcache serve` in a process of its own, with its own data directory.

Worst case: it does not start, which is a ServerDidNotStart with what it said.
"""

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ctxcache.settings.config import PREFIX

START_TIMEOUT_S = 120
_COMMAND = (sys.executable, "-m", "ctxcache.cli.main", "serve")


class ServerDidNotStart(Exception):
    """It ended, or said nothing in time."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    process: "subprocess.Popen[str]"
    ready: dict[str, Any]

    @property
    def pid(self) -> int:
        """Its process."""
        return self.process.pid

    @property
    def control_socket(self) -> str:
        """The path of its control socket."""
        return str(self.ready["control_socket"])

    def target(self, transport: str) -> str:
        """Its address as a gRPC target; `transport` is `tcp` or `unix`."""
        addresses = [str(address) for address in self.ready["listen_addresses"]]
        return next(a for a in addresses if a.startswith("unix:") == (transport == "unix"))


def start(arguments: Sequence[str], stderr: IO[str]) -> "subprocess.Popen[str]":
    """Start `ctxcache serve` with these arguments, its standard output a pipe."""
    return subprocess.Popen(  # noqa: S603  our own command
        [*_COMMAND, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=stderr, text=True
    )


@contextmanager
def serving(
    directory: Path, *, arena_bytes: int, ssd_bytes: int, options: Sequence[str] = ()
) -> Iterator[Server]:
    """Serve over `directory`, with more `options` if need be; killed at the end, and its arena removed.

    Raises ServerDidNotStart.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Sockets' paths have to be short, whatever the directory's is.
    with (
        tempfile.TemporaryDirectory(prefix="cb-") as sockets,
        (directory.parent / f"{directory.name}.stderr").open("w+") as stderr,
    ):
        arguments = [
            "--data-directory",
            str(directory),
            "--listen",
            "127.0.0.1:0",
            "--arena-size-bytes",
            str(arena_bytes),
            "--ssd-size-bytes",
            str(ssd_bytes),
            "--unix-socket",
            f"{sockets}/grpc",
            "--control-socket",
            f"{sockets}/control",
            "--output",
            "json",
            *options,
        ]
        process = start(arguments, stderr)
        ready: dict[str, Any] = {}
        try:
            ready = _ready(process, Path(stderr.name))
            yield Server(process, ready)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
            with suppress(FileNotFoundError, KeyError):
                Path(ready["arena"]["path"]).unlink()


def wait_for_port(port: int) -> None:
    """Wait until a process of this machine listens. Raises OSError where none does in time."""
    end_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)
        else:
            return


def environment() -> dict[str, str]:
    """The process's environment: ours, without settings. Bytecode is kept, as installations have it."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    ours.pop("PYTHONDONTWRITEBYTECODE", None)
    return ours


def _ready(process: "subprocess.Popen[str]", stderr: Path) -> dict[str, Any]:
    if process.stdout is None:
        raise RuntimeError("standard output is a pipe, always")
    can_read, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if can_read else ""
    if not line:
        raise ServerDidNotStart(stderr.read_text()[-2000:] or "it said nothing in time")
    ready: dict[str, Any] = json.loads(line)
    return ready
