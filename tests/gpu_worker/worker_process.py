"""A real worker in a process of its own.

`ctxcache worker serve`, forked by a nursery that has torch imported.
"""

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ctxcache.cli.documents import TITLE
from ctxcache.cli.main import main
from gpu_worker.cli.app import app
from gpu_worker.sidecar import asking
from tests.nursery import Entry, Forked, Nursery

TIMEOUT_S = 180
"""How long a start may take where torch is imported on a busy machine; nothing is promised about it."""
WORKER = Entry("gpu_worker.cli.app:app", ("serve",))
UNCHECKED = Entry("tests.gpu_worker.worker_process:run_unchecked", ("serve",))
ON_ONE_THREAD = Entry("tests.gpu_worker.worker_process:run_on_one_thread", ("worker",))
"""Commands of the worker's that compute a little: on a busy machine threads wait for each other."""


def run_on_one_thread() -> None:
    """Run `ctxcache`."""
    torch.set_num_threads(1)
    main()


def run_unchecked() -> None:
    """Run a worker with a bug: it looks a restore's session up before it looks whether there is one."""

    def unchecked(request: Any, *_: object) -> Any:
        return {"sessions/none": None}[request.session]

    vars(asking)["restore"] = unchecked
    app()


def examples_of(name: str) -> list[str]:
    """The examples that end the help of one of the worker's commands."""
    (command,) = [each for each in app.registered_commands if each.name == name]
    title, *lines = (command.epilog or TITLE).split("\n\n")
    assert title == TITLE
    return lines


def mortal_engine(worker: Path, hello: Path, session: str, token_count: int) -> "subprocess.Popen[str]":
    """An engine in a process of its own, attached to the worker that listens at a path."""
    program = Path(__file__).parent / "sidecar" / "engine_process.py"
    return subprocess.Popen(
        [sys.executable, str(program), str(worker), str(hello), session, str(token_count)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@functools.cache
def nursery() -> Nursery:
    """The nursery of this test process for programs that need torch, whose import takes seconds."""
    made = Nursery(("gpu_worker.cli", "gpu_worker.sidecar", "gpu_worker.sidecar.upkeep"))
    atexit.register(made.close)
    return made


class WorkerProcess:
    """A worker that listens in `directory`. A context manager: it is killed on exit if it still runs.

    `entry` is the function that runs it, with the same arguments.
    """

    def __init__(self, directory: Path, store: str, *options: str, entry: Entry = WORKER) -> None:
        self.path = directory / "worker.sock"
        self.stderr_path = directory / "worker.stderr"
        self._entry = entry
        self._arguments = ["--store", store, "--listen", str(self.path), *options]
        self._process: Forked | None = None
        self.ready: dict[str, Any] = {}

    def start(self) -> Self:
        """Start it and wait until it listens."""
        with self.stderr_path.open("a") as stderr:
            process = nursery().start(self._entry, self._arguments, os.environ, stderr=stderr.fileno())
        self._process = process
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        line = process.stdout.readline() if readable else ""
        assert line, f"it did not start: {self.stderr_path.read_text()}"
        self.ready = json.loads(line)
        return self

    @property
    def process(self) -> Forked:
        """The process."""
        assert self._process is not None
        return self._process

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; its exit code."""
        return self.process.wait(TIMEOUT_S)

    def __enter__(self) -> Self:
        return self.start()

    def close(self) -> None:
        """Kill it where it stands, and wait until it is gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(TIMEOUT_S)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
