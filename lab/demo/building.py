"""Directories that are built at most once by any number of processes, and how their building shows.

A directory is either whole or absent. Worst case: a builder that hangs makes the others wait for as long. One
that dies leaves a `.partial-*` directory, which the next builder removes. A terminal that cannot redraw gets
no bar.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Progress(Protocol):
    """Is called as a step moves; must return at once and never raise."""

    def __call__(self, step: str, done_bytes: int, total_bytes: int, /) -> None:
        """`step` names the work; a total of 0 means that the end is not known."""


def silent(_step: str, _done_bytes: int, _total_bytes: int, /) -> None:
    """Show nothing."""


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Progress]:
    """Draw one bar per step until the block ends; on stderr unless a console is given."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    task_by_step: dict[str, TaskID] = {}
    with RichProgress(*columns, console=console or Console(stderr=True)) as bars:

        def show(step: str, done_bytes: int, total_bytes: int, /) -> None:
            if step not in task_by_step:
                task_by_step[step] = bars.add_task(step)
            bars.update(task_by_step[step], completed=done_bytes, total=total_bytes or None)

        yield show


def default_cache_dir() -> Path:
    """Return `$XDG_CACHE_HOME/ctxcache/models`, or the same under `~/.cache`. Creates nothing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ctxcache" / "models"


def build_once(target: Path, build: Callable[[Path], None], *, progress: Progress = silent) -> Path:
    """Return `target`, after `build(directory)` filled it if it did not exist.

    `build` gets an empty directory beside the target, renamed once every file in it is on disk.
    Errors of `build` pass through, and leave nothing behind. Raises OSError.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_name(f"{target.name}.lock"), progress):
        if not target.is_dir():
            _remove_abandoned(target)
            _build_and_rename(target, build)
    return target


@contextmanager
def _exclusive(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock that the kernel releases when its process dies."""
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("wait for another process", 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _remove_abandoned(target: Path) -> None:
    # Under the lock nobody else builds, so every partial directory belongs to a dead process.
    for partial in target.parent.glob(f"{target.name}.partial-*"):
        shutil.rmtree(partial, ignore_errors=True)


def _build_and_rename(target: Path, build: Callable[[Path], None]) -> None:
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        build(partial)
        # Sync first: a power cut after the rename must not leave a named directory of empty files.
        for file in (path for path in partial.rglob("*") if path.is_file()):
            _sync(file)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
