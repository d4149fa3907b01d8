"""Faults of chosen system calls in a process that runs: the Python side of `interpose.c`.

Compiled with the machine's C compiler when first needed. Worst case: there is none, which is Unsupported.
"""

import ctypes
import errno
import functools
import mmap
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.harness import Unsupported

SOURCE = Path(__file__).with_name("interpose.c")
FOR_EVER = 1 << 30
CALLS = {
    name: 1 << bit
    for bit, name in enumerate(
        ("open", "write", "fsync", "fdatasync", "rename", "fallocate", "ftruncate", "mkdir", "link", "unlink",
         "mmap", "read")
    )
}  # fmt: skip


class _Layout(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("calls", "first", "times", "error", "is_short", "is_waiting")),
        ("seen", ctypes.c_int64),
        ("hit", ctypes.c_int64),
        ("prefixes", (ctypes.c_char * 256) * 4),
        ("where", ctypes.c_char * 512),
    )


class Interposer:
    """Arms and disarms the faults of every process started with `environment`. Disarmed at first."""

    def __init__(self, control_path: Path) -> None:
        control_path.write_bytes(bytes(ctypes.sizeof(_Layout)))
        with control_path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._layout = _Layout.from_buffer(self._memory)
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(_library()),
            "FAULTS_CONTROL": str(control_path),
        }

    def arm(
        self, call: str, prefixes: Sequence[str], *, first: int, error: str = "", times: int = 1,
        is_short: bool = False, is_waiting: bool = False,
    ) -> None:  # fmt: skip
        """Let the `first`-th such call from now on, and `times - 1` after it, fail, move half, or wait.

        `prefixes`: beginnings of the paths that count, four at most. `error`: an errno's name.
        """
        layout = self._layout
        layout.calls = 0
        layout.seen = layout.hit = 0
        layout.where = b""
        for i in range(4):
            layout.prefixes[i].value = prefixes[i].encode() if i < len(prefixes) else b""
        layout.first, layout.times = first, times
        layout.error = getattr(errno, error) if error else 0
        layout.is_short, layout.is_waiting = is_short, is_waiting
        layout.calls = CALLS[call]

    def reset(self) -> None:
        """Disarm, and forget what was counted."""
        self.disarm()
        self._layout.seen = self._layout.hit = 0
        self._layout.where = b""

    def disarm(self) -> None:
        """Let everything through, also what waits."""
        self._layout.calls = self._layout.is_waiting = 0

    @property
    def seen_count(self) -> int:
        """Calls that were looked at since `arm`."""
        return int(self._layout.seen)

    @property
    def hit_count(self) -> int:
        """Calls that were hit since `arm`."""
        return int(self._layout.hit)

    @property
    def where(self) -> str:
        """Name and path of the first call that was hit."""
        return bytes(self._layout.where).decode(errors="replace")


@functools.cache
def _library() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unsupported("there is no C compiler; apt-get install gcc libc6-dev")
    target = Path(tempfile.mkdtemp(prefix="ctxcache-interpose-")) / "interpose.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(target), str(SOURCE), "-ldl"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise Unsupported(f"{SOURCE.name} does not compile here: {done.stderr.strip()}")
    return target
