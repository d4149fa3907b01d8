"""The data directory: whose it is, which format it has, and where things are in it.

Knows no metadata store and no tier. Worst case: another server holds it, or someone else's files
are in it; either way it is refused untouched, with a sentence that says why.

    LOCK        held by the running server, with its process id
    FORMAT      {"format": 1, "created_by": "...", "instance_id": "..."}
    RUNS        {"crash_count": 0, "is_clean": true}
    metadata/   the metadata store's
"""

import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable, FormatTooNew

DATA_FORMAT = 1
_LOCK, _FORMAT, _FORMAT_PARTIAL, _RUNS = "LOCK", "FORMAT", "FORMAT.partial", "RUNS"
_METADATA = "metadata"
# What may lie in a directory that is to become ours: what an interrupted creation leaves, and
# what mkfs does.
_MAY_PRECEDE = {_LOCK, _FORMAT_PARTIAL, "lost+found"}


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """An open data directory: locked until `close`, or until the process ends however it ends.

    `instance_id` is 32 hex digits, drawn at creation and stable from then on; it names what this
    directory's server keeps elsewhere, the arena for one. `crash_count` is how many runs did not end in
    order before this one.
    """

    path: Path
    instance_id: str
    crash_count: int
    _lock_fd: int

    @classmethod
    def open(cls, path: str | Path, *, created_by: str = "ctxcache") -> Self:
        """Open the directory, or create it (mode 0700).

        Raises DataDirectoryUnusable, FormatTooNew, and CorruptMetadata for an unreadable FORMAT.
        """
        path = Path(path)
        with _refusals(path):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_not_foreign(path)
            lock_fd = _lock(path)
            try:
                instance_id = _read_or_create_format(path, created_by)
                return cls(path, instance_id, _read_crash_count(path), lock_fd)
            except BaseException:
                os.close(lock_fd)
                raise

    @property
    def metadata_path(self) -> Path:
        """Where the metadata store keeps its files."""
        return self.path / _METADATA

    def begin_run(self) -> None:
        """Note that a run begins: unless `end_run` follows, it counts as a crash. Raises DataDirectoryUnusable."""
        self._note_run(is_clean=False)

    def end_run(self) -> None:
        """Note that the run ended in order, with nothing lost. Raises DataDirectoryUnusable."""
        self._note_run(is_clean=True)

    def _note_run(self, *, is_clean: bool) -> None:
        with _refusals(self.path):
            _write_whole(self.path, _RUNS, {"crash_count": self.crash_count, "is_clean": is_clean})

    def close(self) -> None:
        """Let go of the lock; the last thing a server does with the directory."""
        os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise DataDirectoryUnusable(path=str(path), problem="it is not a directory") from error
    except OSError as error:
        problem = f"{error.strerror}: {error.filename or path}"
        raise DataDirectoryUnusable(path=str(path), problem=problem) from error


def _check_not_foreign(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    foreign = sorted(names - _MAY_PRECEDE)
    if _FORMAT not in names and foreign:
        problem = f"it is not empty and has no {_FORMAT} file, so it is not ours ({foreign[0]} is in it)"
        raise DataDirectoryUnusable(path=str(path), problem=problem)


def _lock(path: Path) -> int:
    fd = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode=0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise DataDirectoryUnusable(
            path=str(path), problem=f"another server holds it (pid {holder})"
        ) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_or_create_format(path: Path, created_by: str) -> str:
    try:
        text = (path / _FORMAT).read_bytes()
    except FileNotFoundError:
        return _create_format(path, created_by)
    return _parse_format(path, text)


def _parse_format(path: Path, text: bytes) -> str:
    try:
        facts = json.loads(text)
        found, instance_id = int(facts["format"]), str(facts["instance_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptMetadata(where=str(path / _FORMAT), problem=f"it does not parse: {error!r}") from error
    if found > DATA_FORMAT:
        raise FormatTooNew(path=str(path), found=found, supported=DATA_FORMAT)
    if found < 1:
        raise CorruptMetadata(where=str(path / _FORMAT), problem=f"there is no format {found}")
    return instance_id


def _create_format(path: Path, created_by: str) -> str:
    instance_id = secrets.token_hex(16)
    facts = {"format": DATA_FORMAT, "created_by": created_by, "instance_id": instance_id}
    _write_whole(path, _FORMAT, facts)
    _sync_directory(path.parent)
    return instance_id


def _read_crash_count(path: Path) -> int:
    """Runs that did not end in order, the last one included."""
    try:
        facts = json.loads((path / _RUNS).read_bytes())
        return int(facts["crash_count"]) + (not facts["is_clean"])
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptMetadata(where=str(path / _RUNS), problem=f"it does not parse: {error!r}") from error


def _write_whole(path: Path, name: str, facts: Mapping[str, object]) -> None:
    # Synced before it gets its name, and the name before anything relies on it: a crash at any
    # point leaves the file as it was or as it is to be.
    partial = path / f"{name}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump(facts, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path / name)
    _sync_directory(path)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
