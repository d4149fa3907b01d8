"""A peer's process beside this one, which says a line once it can be asked."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lab.bench.row import NoPeer


@contextmanager
def bare_process(module: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """Run a module of ours; what its line says, and its process id. Killed at the end. Raises NoPeer."""
    process = subprocess.Popen(  # noqa: S603  ourselves
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline().strip() if process.stdout else ""
        if not line:
            raise NoPeer(f"the process of {module} did not start")
        yield line, process.pid
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
