"""Files of a server and its commands: whose a file is, which mode it has, and small files of facts.

Files made here are for this user alone. A file that is there already gets such a mode where it is this
user's. It is refused where it is another user's, or where every user could have put something into it.
Secrets are refused as ssh does. Worst case: others may change or read a place; one sentence says so, with the
mode, before anything is opened.

A file of facts is JSON with a checksum of its own, replaced as a whole. Worst case: a crash at any point
leaves the file as it was or as it was to be; a flipped bit is a CorruptMetadata, never another fact.
"""

import errno
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from ctxcache.errors import CacheError, CorruptMetadata, DataDirectoryUnusable, InvalidConfiguration

log = logging.getLogger(__name__)

FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
_OTHERS_WRITE, _GROUP_WRITES = stat.S_IWOTH, stat.S_IWGRP
_GROUP_BEYOND_READING = stat.S_IRWXG & ~stat.S_IRGRP
_ROOT = 0


def keep_private() -> None:
    """Make every new file of this process readable for this user alone."""
    os.umask(0o077)


# A mode given to `open` is cut by the umask, and is not applied at all to a file that is there.
def open_private(path: str | Path, flags: int) -> int:
    """Open a file, or make it, with mode 0600 whatever the umask is and was. Raises OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        if flags & os.O_CREAT and stat.S_IMODE(os.fstat(fd).st_mode) != FILE_MODE:
            os.fchmod(fd, FILE_MODE)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_directory(path: Path) -> None:
    """Raise DataDirectoryUnusable for a directory that others may change, or OSError. Changes nothing.

    The directory belongs to this user or to root: a mounted volume is root's, and a group of this process may
    write to it.
    """
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    _check_owner(path, status)
    # In a sticky directory (/tmp) everybody may add, and only owners remove: it may hold one of ours.
    if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
        problem = f"every user may write to it (mode {mode:04o}): chmod 700 {path}, or name one below it"
        raise DataDirectoryUnusable(path=str(path), problem=problem)
    if mode & _GROUP_WRITES and status.st_uid != os.geteuid() and not _is_our_group(status.st_gid):
        problem = f"group {status.st_gid}, which is not this process's, may write to it (mode {mode:04o})"
        raise DataDirectoryUnusable(path=str(path), problem=problem)


def existing(path: Path) -> Path:
    """Return the path, or what is nearest above it: where it would be made. Raises NotADirectoryError."""
    path = path.absolute()
    place = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not place.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{os.strerror(errno.ENOTDIR)}: {place}")
    return place


def check_usable(path: Path) -> None:
    """Raise OSError where this process could not make the directory, or files in it. Changes nothing."""
    place = existing(path)
    if os.access(place, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        raise OSError(errno.EROFS, f"{os.strerror(errno.EROFS)}: {place}")
    problem = (
        f"{os.strerror(errno.EACCES)}: {place}, owner {place.stat().st_uid}, needed {os.geteuid()}"
        f" (mode {stat.S_IMODE(place.stat().st_mode):04o})"
    )
    raise PermissionError(errno.EACCES, problem)


def claim_directory(path: Path) -> None:
    """Make a directory for this user alone, or check one that is there and take its group's right to write.

    Raises DataDirectoryUnusable, OSError.
    """
    path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    check_directory(path)
    status = path.stat()
    # A sticky directory that everybody may write to has no group of its own.
    if status.st_uid == os.geteuid() and status.st_mode & (_GROUP_WRITES | _OTHERS_WRITE) == _GROUP_WRITES:
        _change(path, status, stat.S_IMODE(status.st_mode) & ~_GROUP_WRITES)


def check_owners(paths: Iterable[Path]) -> None:
    """Raise DataDirectoryUnusable where one of them is neither this user's nor root's. Changes nothing."""
    for path, status in _loose(paths):
        _check_owner(path, status)


def tighten(paths: Iterable[Path]) -> None:
    """Take others' rights to files, and to directories with all that is in them. Skips what is missing.

    Raises as `check_owners`.
    """
    for path, status in _loose(paths):
        _check_owner(path, status)
        if status.st_uid == os.geteuid():
            _change(path, status, DIRECTORY_MODE if stat.S_ISDIR(status.st_mode) else FILE_MODE)


def loose(paths: Iterable[Path]) -> list[Path]:
    """The paths that `tighten` would change or refuse. Raises OSError."""
    return [path for path, _ in _loose(paths)]


def check_secret(path: Path, fail: Callable[[str], CacheError]) -> None:
    """Raise `fail(problem)` for a file that others may read or change; OSError.

    Links are followed: mounts of secrets have them.

    Other users may have no right to the file. A group may read root's file where the group is root's or this
    process's: a pod's secrets are mounted so.
    """
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (_ROOT, os.geteuid()):
        raise fail(f"it belongs to user {status.st_uid}, and this process is user {os.geteuid()}")
    # The checks go from the strictest to the mildest: the first refusal names the fix.
    if mode & stat.S_IRWXO:
        raise fail(f"every user may {_rights(mode)} it (mode {mode:04o}): chmod 600 {path}")
    is_mounted = status.st_uid == _ROOT and (status.st_gid == _ROOT or _is_our_group(status.st_gid))
    if mode & (_GROUP_BEYOND_READING if is_mounted else stat.S_IRWXG):
        raise fail(f"group {status.st_gid} may {_rights(mode >> 3)} it (mode {mode:04o}): chmod 600 {path}")


def stamp(path: Path) -> tuple[int, ...]:
    """Numbers that change with a file, or with the rights to it; none for a missing file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    # A refused file whose mode is mended gets another stamp, though its content has not changed.
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size


def is_shortage(error: BaseException) -> bool:
    """Whether a file was not read for a lack of descriptors or memory, which is no fault of the file."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def secret_refusal(source: str, path: Path) -> Callable[[str], CacheError]:
    """Make the refusal of a file that the setting `source` names."""
    return lambda problem: InvalidConfiguration(source=source, problem=f"{path}: {problem}")


def _rights(bits: int) -> str:
    return "change" if bits & stat.S_IWOTH else "read"


def _is_our_group(gid: int) -> bool:
    return gid == os.getegid() or gid in os.getgroups()


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (_ROOT, os.geteuid()):
        problem = (
            f"{path} belongs to user {status.st_uid}, and this process is user {os.geteuid()}:"
            " chown it, or run as that user"
        )
        raise DataDirectoryUnusable(path=str(path), problem=problem)


def _loose(paths: Iterable[Path]) -> Iterable[tuple[Path, os.stat_result]]:
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        # Another user's path is yielded even with tight rights, so that it is refused.
        is_ours = status.st_uid == os.geteuid()
        if not is_ours or stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            yield path, status
        if stat.S_ISDIR(status.st_mode):
            yield from _loose(sorted(path.iterdir()))


def _change(path: Path, found: os.stat_result, mode: int) -> None:
    path.chmod(mode)
    before = f"{stat.S_IMODE(found.st_mode):04o}"
    log.warning("mode_tightened path=%s from=%s to=%s", path, before, f"{mode:04o}")


# -- small files of facts ----------------------------------------------------------------------------

CHECKSUM = "checksum"


# The disk after each step, and what a crash there leaves:
#
#     NAME.partial written and synced     NAME as it was; the partial file is truncated the next time
#     renamed to NAME                     NAME as it was, or as it is to be: never half of either
#     directory synced                    NAME as it is to be
def write_facts(path: Path, facts: Mapping[str, object]) -> None:
    """Write the file and sync it. Raises OSError."""
    # The bytes are synced before the file gets its name, and the name before anything relies on it.
    partial = path.with_name(f"{path.name}.partial")
    fd = open_private(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump({**facts, CHECKSUM: _checksum(facts)}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_directory(path.parent)


def read_facts(path: Path, *, is_checksum_needed: bool = True) -> dict[str, Any]:
    """Read the facts back. Raises CorruptMetadata, FileNotFoundError and other OSError."""
    try:
        facts = json.loads(path.read_bytes())
        checksum = facts.pop(CHECKSUM, None)
    except (ValueError, AttributeError, TypeError) as error:
        raise CorruptMetadata(where=str(path), problem=f"it does not parse: {error!r}") from error
    # A file of an older version has no checksum. A checksum that is there has to match.
    if checksum != _checksum(facts) and (checksum is not None or is_checksum_needed):
        raise CorruptMetadata(where=str(path), problem="its checksum does not match")
    return dict(facts)


def sync_directory(path: Path) -> None:
    """Make a directory's entries durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(facts: Mapping[str, object]) -> str:
    # Keys are sorted: their order in the file has no meaning.
    return xxh3_64_hexdigest(json.dumps(facts, sort_keys=True).encode())
