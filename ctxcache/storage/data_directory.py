"""The data directory: its owner, its format, and where its parts are.

Worst case: another server holds it, or it has files of another program. It is then refused untouched, with
the reason.

    LOCK        held by the running server, with its process id
    RESTORING   {"instance_id": "...", "checksum": "..."}: an archive is laid out until FORMAT is written
    FORMAT      {"format": 5, "created_by": "...", "instance_id": "...", "checksum": "..."}
    RUNS        {"crash_count": 0, "is_clean": true, "checksum": "..."}
    LESSONS     what the placement policy has learned (`lessons`); may be missing
    CLOCK       what time the store has (`clock`); may be missing
    metadata/   the metadata store's

A directory of another format is refused: its segments are bound to their checksums in another way.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable, FormatTooNew
from ctxcache.runtime.files import (
    check_directory,
    check_owners,
    check_usable,
    claim_directory,
    existing,
    open_private,
    read_facts,
    sync_directory,
    tighten,
    write_facts,
)

# Order of writes, so that a crash between any two leaves something that the next start understands:
#
#     creation   RUNS ──► FORMAT ──► name of the directory      no FORMAT: it is not a store yet
#     import     RESTORING ──► records, segments ──► RUNS ──► FORMAT ──► RESTORING goes
#     a run      RUNS not clean ──► ... ──► RUNS clean          not clean at the start: a crash is counted
DATA_FORMAT = 5
_LOCK, _FORMAT, _FORMAT_PARTIAL, _RUNS = "LOCK", "FORMAT", "FORMAT.partial", "RUNS"
METADATA = "metadata"
RESTORING = "RESTORING"
# The entries that may lie in a directory that is to become the store's: what an interrupted creation leaves,
# and what mkfs does.
_MAY_PRECEDE = {_LOCK, _FORMAT_PARTIAL, _RUNS, f"{_RUNS}.partial", "lost+found"}


@dataclass(frozen=True, slots=True)
class DataDirectory:
    """An open data directory: locked until `close`, or until the process ends however it ends.

    `instance_id` is 32 hex digits, drawn at creation and stable from then on; it names what this
    directory's server keeps elsewhere, the arena for one. `crash_count` is how many runs did not end in
    order before this one, `is_clean` whether the last one did.
    """

    path: Path
    instance_id: str
    created_by: str
    crash_count: int
    is_clean: bool
    _lock_fd: int

    @classmethod
    def open(cls, path: str | Path, *, created_by: str = "ctxcache") -> Self:
        """Open the directory, or create it (mode 0700).

        Raises DataDirectoryUnusable, FormatTooNew, and CorruptMetadata for an unreadable FORMAT.
        """
        path = Path(path)
        with _refusals(path):
            claim_directory(path)
            # This check comes before the lock, which would be our first file in somebody's directory.
            _check_not_foreign(path)
            lock_fd = _lock(path)
            # Everything is read under the lock.
            try:
                facts = _read_or_create_format(path, created_by)
                runs = _read_runs(path)
                # The last run counts now. The count is written down when the next run begins.
                crash_count = int(runs["crash_count"]) + (not runs["is_clean"])
                return cls(
                    path,
                    str(facts["instance_id"]),
                    str(facts.get("created_by")),
                    crash_count,
                    bool(runs["is_clean"]),
                    lock_fd,
                )
            except BaseException:
                os.close(lock_fd)
                raise

    @classmethod
    def check(cls, path: Path) -> None:
        """Raise what `open` would raise. Changes nothing."""
        with _refusals(path):
            place = _usable(path)
            if place != path.absolute():
                return
            check_directory(path)
            check_owners(entries(path))
            _check_not_foreign(path)
            if pid := holder(path):
                raise _held(path, pid)
            if (path / _FORMAT).exists():
                _parse_format(path)
                _read_runs(path)

    @classmethod
    def mend(cls, path: Path, *, instance_id: str, crash_count: int, created_by: str) -> None:
        """Write FORMAT and RUNS anew where they cannot be read; a newer format is left alone.

        Raises DataDirectoryUnusable, FormatTooNew.
        """
        with _refusals(path):
            claim_directory(path)
            check_not_restoring(path)
            lock_fd = _lock(path)
            try:
                # A newer format is no damage: FormatTooNew passes through.
                _mend_format(path, instance_id, created_by)
                try:
                    _read_runs(path)
                except CorruptMetadata:
                    _note_run(path, crash_count, is_clean=False)
            finally:
                os.close(lock_fd)

    @staticmethod
    def instance_id_at(path: Path) -> str | None:
        """The id of the directory there; None where there is none that can be read.

        Raises OSError, FormatTooNew.
        """
        try:
            return str(_parse_format(path)["instance_id"])
        except (FileNotFoundError, CorruptMetadata):
            return None

    @property
    def metadata_path(self) -> Path:
        """The metadata store's directory."""
        return self.path / METADATA

    def tighten(self) -> None:
        """Take everybody else's rights to the directory's files. Raises DataDirectoryUnusable."""
        with _refusals(self.path):
            tighten(entries(self.path))

    def begin_run(self) -> None:
        """Note that a run begins: unless `end_run` follows, it counts as a crash.

        Raises DataDirectoryUnusable.
        """
        with _refusals(self.path):
            _note_run(self.path, self.crash_count, is_clean=False)

    def end_run(self) -> None:
        """Note that the run ended in order, with nothing lost. Raises DataDirectoryUnusable."""
        with _refusals(self.path):
            _note_run(self.path, self.crash_count, is_clean=True)

    def close(self) -> None:
        """Give back the lock. A server does this last."""
        os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class FreshDirectory:
    """A data directory that is being laid out, locked: no server takes it before `finish`."""

    path: Path
    instance_id: str
    _lock_fd: int

    @classmethod
    @contextmanager
    def begin(cls, path: Path) -> Iterator[Self]:
        """Claim an empty directory, or one of an earlier try.

        Raises DataDirectoryUnusable, CorruptMetadata.
        """
        with _refusals(path):
            claim_directory(path)
            _check_fresh(path)
            lock_fd = _lock(path)
        try:
            with _refusals(path):
                # The directory is checked once more: another import may have finished meanwhile.
                _check_fresh(path)
                # The id is drawn once: an interrupted import goes on with it, and its SSD directories are
                # still its own.
                if not (path / RESTORING).exists():
                    write_facts(path / RESTORING, {"instance_id": secrets.token_hex(16)})
                yield cls(path, str(read_facts(path / RESTORING)["instance_id"]), lock_fd)
        finally:
            os.close(lock_fd)

    @property
    def metadata_path(self) -> Path:
        """The directory for the metadata store."""
        return self.path / METADATA

    def finish(self, *, crash_count: int, created_by: str) -> None:
        """Make it a data directory. All its contents are on disk by now. Raises OSError."""
        # RUNS is written before FORMAT: a directory that has FORMAT and no RUNS has lost RUNS.
        _note_run(self.path, crash_count, is_clean=True)
        _write_format(self.path, self.instance_id, created_by)
        sync_directory(self.path.parent)
        (self.path / RESTORING).unlink()


def holder(path: Path) -> str:
    """The process id of the server that holds the directory, `unknown` for one without; empty for none."""
    try:
        with (path / _LOCK).open("rb") as lock:
            try:
                # The lock is shared, and only asks: the server's is exclusive, and two that ask do not
                # disturb each other.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _pid(lock.fileno())
    except OSError:
        return ""
    return ""


def entries(path: Path) -> list[Path]:
    """The server's entries in the directory, sockets apart; also metadata that a rebuild has kept.

    Raises OSError.
    """
    named = (_LOCK, _FORMAT, _RUNS, RESTORING, "LESSONS", "PATHS", "CLOCK")
    return [*(path / name for name in named), *path.glob(f"{METADATA}*")]


def check_not_restoring(path: Path) -> None:
    """Raise DataDirectoryUnusable where laying out an archive was begun and not finished."""
    # A directory that may not be read is refused elsewhere: these do not raise.
    if os.path.exists(path / RESTORING) and not os.path.exists(path / _FORMAT):  # noqa: PTH110
        problem = "an import into it did not end: `ctxcache import --new-store` begins it anew"
        raise DataDirectoryUnusable(path=str(path), problem=problem)


def _check_fresh(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    if _FORMAT in names:
        raise DataDirectoryUnusable(path=str(path), problem="it is a data directory already: name a new one")
    foreign = sorted(names - _MAY_PRECEDE - {f"{RESTORING}.partial"})
    if foreign and RESTORING not in names:
        problem = f"it is not empty ({foreign[0]} is in it): name a new one"
        raise DataDirectoryUnusable(path=str(path), problem=problem)


@contextmanager
def _refusals(path: Path) -> Iterator[None]:
    try:
        _check_locale(path)
        yield
    except FileExistsError as error:
        raise DataDirectoryUnusable(path=str(path), problem="it is not a directory") from error
    except OSError as error:
        problem = f"{error.strerror}: {error.filename or path}"
        raise DataDirectoryUnusable(path=str(path), problem=problem) from error


def _check_locale(path: Path) -> None:
    """RocksDB and messages take the text of a path as UTF-8, and the system takes its bytes."""
    # A byte without a character in the locale is a surrogate, of which "replace" makes a question mark.
    if str(path).encode(errors="replace") != os.fsencode(path):
        problem = "its path is not UTF-8 in this locale: name another one, or start with LC_ALL=C.UTF-8"
        raise DataDirectoryUnusable(path=ascii(str(path)), problem=problem)


def _check_not_foreign(path: Path) -> None:
    check_not_restoring(path)
    names = {entry.name for entry in path.iterdir()}
    # Entries of mkfs, or of our own interrupted creation, are nobody's work.
    foreign = sorted(names - _MAY_PRECEDE)
    if _FORMAT not in names and foreign:
        problem = f"it is not empty and has no {_FORMAT} file, so it is not ours ({foreign[0]} is in it)"
        raise DataDirectoryUnusable(path=str(path), problem=problem)


def _lock(path: Path) -> int:
    fd = open_private(path / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        # The lock goes with the process, however it ends. The pid in the file is for people, not for the
        # check.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except BlockingIOError as error:
        pid = _pid(fd)
        os.close(fd)
        raise _held(path, pid) from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _pid(lock_fd: int) -> str:
    return os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"


def _held(path: Path, pid: str) -> DataDirectoryUnusable:
    return DataDirectoryUnusable(path=str(path), problem=f"another server holds it (pid {pid})")


def _usable(path: Path) -> Path:
    """The directory, or the one above it in which it can be made. Raises DataDirectoryUnusable, OSError."""
    # These do not raise for what may not be looked at, which `check_usable` refuses.
    if os.path.exists(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112
        raise DataDirectoryUnusable(path=str(path), problem="it is not a directory")
    try:
        check_usable(path)
        return existing(path)
    except OSError as error:
        raise DataDirectoryUnusable(path=str(path), problem=error.strerror or str(error)) from error


def _read_or_create_format(path: Path, created_by: str) -> dict[str, Any]:
    try:
        return _parse_format(path)
    except FileNotFoundError:
        # RUNS is written first: a directory with a FORMAT and no RUNS has lost RUNS.
        _note_run(path, 0, is_clean=True)
        _write_format(path, secrets.token_hex(16), created_by)
        sync_directory(path.parent)
        return _parse_format(path)


def _parse_format(path: Path) -> dict[str, Any]:
    # The format is read first, the checksum later: a later format may have another kind of checksum.
    facts = read_facts(path / _FORMAT, is_checksum_needed=False)
    try:
        format_number, _ = int(facts["format"]), str(facts["instance_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptMetadata(where=str(path / _FORMAT), problem=f"it does not parse: {error!r}") from error
    if format_number > DATA_FORMAT:
        raise FormatTooNew(path=str(path), found=format_number, supported=DATA_FORMAT)
    if format_number < 1:
        raise CorruptMetadata(where=str(path / _FORMAT), problem=f"there is no format {format_number}")
    if format_number < DATA_FORMAT:
        problem = (
            f"it has format {format_number} of an earlier version, and this one reads format {DATA_FORMAT}:"
            " name a new one"
        )
        raise DataDirectoryUnusable(path=str(path), problem=problem)
    # The format is known now, so that the checksum is verified.
    return read_facts(path / _FORMAT)


def _write_format(path: Path, instance_id: str, created_by: str) -> None:
    write_facts(path / _FORMAT, {"format": DATA_FORMAT, "created_by": created_by, "instance_id": instance_id})


def _mend_format(path: Path, instance_id: str, created_by: str) -> None:
    try:
        _parse_format(path)
    except (CorruptMetadata, FileNotFoundError):
        _write_format(path, instance_id, created_by)


def _read_runs(path: Path) -> dict[str, Any]:
    """The outcome of earlier runs."""
    try:
        runs = read_facts(path / _RUNS)
        return {"crash_count": int(runs["crash_count"]), "is_clean": bool(runs["is_clean"])}
    except FileNotFoundError as error:
        raise CorruptMetadata(where=str(path / _RUNS), problem="it is gone") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptMetadata(where=str(path / _RUNS), problem=f"it does not parse: {error!r}") from error


def _note_run(path: Path, crash_count: int, *, is_clean: bool) -> None:
    write_facts(path / _RUNS, {"crash_count": crash_count, "is_clean": is_clean})
