"""SSD directories: each carries its number, so that the order in which an operator lists them is free.

Records name a slot by the directory's number. Worst case: a directory is missing or belongs to another store.
The start is then refused before anything is opened or written. Where the operator allows absent directories,
a missing, unmounted or unreadable one keeps its number and is left alone; it is never taken for a new one.

    DEVICE  in each SSD directory: {"instance_id": "...", "index": 0, "checksum": "..."}
    PATHS   in the data directory, by number, as last given:
            {"directories": [...], "sizes_bytes": [...], "checksum": "..."}
"""

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable
from ctxcache.format.layout import SEGMENTS_FILE
from ctxcache.runtime.files import read_facts, write_facts

# Facts on disk say which directory is which. The list of paths only helps to find what is missing:
#
#     DEVICE there, ours, number n          directory n, wherever it is mounted
#     DEVICE there, another store's         refused
#     no DEVICE, path known as n, file      directory n: its DEVICE was lost
#     no DEVICE, path known as n, empty     not mounted: refused, or absent
#     no DEVICE, path not known             new: the next number
DEVICE, PATHS = "DEVICE", "PATHS"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Directory:
    """An SSD directory. `absence`: why it is left alone, and then `size_bytes` is what its file last had."""

    path: Path
    absence: str = ""
    size_bytes: int = 0


def in_order(
    data_directory: Path, instance_id: str, directories: Sequence[Path], *, is_mended: bool = False
) -> tuple[Path, ...]:
    """Return the directories by their numbers; those that are new have the next ones. Writes nothing.

    With `is_mended` a DEVICE that cannot be read counts as lost where PATHS says which directory it is.
    Raises DataDirectoryUnusable: one is missing, given twice, empty though it was in use, or belongs to
    another data directory; CorruptMetadata.
    """
    found = look(data_directory, instance_id, directories, may_be_absent=False, is_mended=is_mended)
    return tuple(directory.path for directory in found)


def look(
    data_directory: Path,
    instance_id: str,
    directories: Sequence[Path],
    *,
    may_be_absent: bool,
    is_mended: bool = False,
) -> tuple[Directory, ...]:
    """As `in_order`; `may_be_absent`.

    A directory that was in use and is missing now is absent, unless all are missing.
    """
    known = _read_known(data_directory)
    # Absolute, because PATHS is read by a start from another working directory.
    given = [path.absolute() for path in directories]
    _check_each_once(given)
    absent: dict[int, Directory] = {}
    numbers: dict[Path, int | None] = {}
    for path in given:
        try:
            numbers[path] = _number(path, instance_id)
        except CorruptMetadata:
            if not is_mended or str(path) not in known:
                raise
            numbers[path] = None
        except DataDirectoryUnusable as error:
            # Only a path that was in use can be absent; a new one that cannot be read is an error.
            if not may_be_absent or not isinstance(error.__cause__, OSError) or str(path) not in known:
                raise
            _put_absent(absent, known, known.index(str(path)), str(error.facts["problem"]))
    # By numbers that directories say themselves. Paths come second.
    placed = _placed(numbers)
    new = [path for path, number in numbers.items() if number is None]
    if may_be_absent:
        _leave_out(absent, placed, new, known)
    # PATHS is lost: whether a directory without DEVICE is new, or a mount point without its filesystem, is
    # unknown.
    if placed and not known:
        _check_new(new)
    _place_new(placed, new, known, absent)
    # All absent is no store that could serve anything.
    if not placed:
        raise DataDirectoryUnusable(path=str(data_directory), problem="every SSD directory is missing")
    _check_complete(data_directory, {**placed, **{i: gone.path for i, gone in absent.items()}}, known)
    sizes = dict(enumerate(_read_sizes(data_directory)))
    found = {i: Directory(path) for i, path in placed.items()}
    found |= {i: replace(gone, size_bytes=sizes.get(i, 0)) for i, gone in absent.items()}
    return tuple(found[i] for i in range(len(found)))


def write_down(
    data_directory: Path, instance_id: str, ordered: Sequence[Path], *, absent: Collection[int] = ()
) -> None:
    """Give the directories their numbers, for good, and note where they are. They are ours by now.

    Those that are absent are noted as they were. Raises DataDirectoryUnusable, also when another server has
    given one a number meanwhile; CorruptMetadata.
    """
    try:
        for number, path in enumerate(ordered):
            # A number once given stays.
            if number not in absent and _number(path, instance_id) is None:
                write_facts(path / DEVICE, {"instance_id": instance_id, "index": number})
        names = [str(path) for path in ordered]
        before = _read_sizes(data_directory)
        sizes = [
            # The size of an absent file is what it last was: slots in it stay where they are.
            (before[i] if i < len(before) else 0) if i in absent else _size_bytes(path / SEGMENTS_FILE)
            for i, path in enumerate(ordered)
        ]
        # Written only when something changed.
        if names != _read_known(data_directory) or sizes != before:
            write_facts(data_directory / PATHS, {"directories": names, "sizes_bytes": sizes})
    except OSError as error:
        raise DataDirectoryUnusable(path=str(data_directory), problem=error.strerror or str(error)) from error


def is_ours(directory: Path, instance_id: str, number: int) -> bool:
    """Whether the directory, as it is now, says that it is that one."""
    return instance_id_of(directory) == instance_id and number_of(directory) == number


def check_not_orphaned(data_directory: Path, directories: Sequence[Path]) -> None:
    """Raise CorruptMetadata where SSD directories are in use and the data directory or its FORMAT is gone."""
    # A directory that may not be read is refused elsewhere: these do not raise.
    used = next((path for path in directories if os.path.exists(path / DEVICE)), None)  # noqa: PTH110
    if used and not os.path.exists(data_directory / "FORMAT"):  # noqa: PTH110
        raise CorruptMetadata(
            where=str(data_directory / "FORMAT"), problem=f"it is gone, and {used} is in use"
        )


def entries(directory: Path) -> list[Path]:
    """The server's entries in an SSD directory."""
    return [directory / name for name in (DEVICE, SEGMENTS_FILE, "WITNESS", "catalog")]


def instance_id_of(directory: Path) -> str | None:
    """The data directory that an SSD directory belongs to; None when it says none, or cannot be read."""
    try:
        return str(read_facts(directory / DEVICE)["instance_id"])
    except (OSError, CorruptMetadata):
        return None


def number_of(directory: Path) -> int | None:
    """The number that an SSD directory says it has; None when it says none, or cannot be read."""
    try:
        return int(read_facts(directory / DEVICE)["index"])
    except (OSError, CorruptMetadata):
        return None


def forget_unreadable(data_directory: Path, directories: Sequence[Path]) -> None:
    """Remove a DEVICE that cannot be read where PATHS says which directory it is. Raises OSError."""
    known = _read_known(data_directory)
    for path in (directory.absolute() / DEVICE for directory in directories):
        try:
            read_facts(path)
        except FileNotFoundError:
            continue
        except CorruptMetadata as error:
            if str(path.parent) in known:
                log.error("device_file_removed error=%s", error)  # noqa: TRY400  the sentence says all
                path.unlink()


def _number(directory: Path, instance_id: str) -> int | None:
    try:
        facts = read_facts(directory / DEVICE)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataDirectoryUnusable(path=str(directory), problem=error.strerror or str(error)) from error
    if facts["instance_id"] != instance_id:
        problem = f"its {DEVICE} says that it belongs to another data directory ({facts['instance_id']})"
        raise DataDirectoryUnusable(path=str(directory), problem=problem)
    return int(facts["index"])


def _check_each_once(given: Sequence[Path]) -> None:
    seen: dict[Path, Path] = {}
    for path in given:
        # Resolved: two names of one directory would be written by two files' worth of slots.
        if (before := seen.setdefault(path.resolve(), path)) is not path:
            problem = f"it is named twice, as {before} before" if before != path else "it is named twice"
            raise DataDirectoryUnusable(path=str(path), problem=problem)


def _placed(numbers: Mapping[Path, int | None]) -> dict[int, Path]:
    placed: dict[int, Path] = {}
    for path, number in numbers.items():
        if number is not None:
            # A copy of an SSD directory says the same number. Which of them has the newer bytes cannot be
            # told.
            if number in placed:
                problem = f"it is the same SSD directory as {placed[number]}, or a copy of it"
                raise DataDirectoryUnusable(path=str(path), problem=problem)
            placed[number] = path
    return placed


def _leave_out(
    absent: dict[int, Directory], placed: Mapping[int, Path], new: list[Path], known: Sequence[str]
) -> None:
    """Take from the new ones those that were in use and are not there, and note those that are not named."""
    for path in [path for path in new if _is_unmounted(path, known, placed)]:
        new.remove(path)
        _put_absent(absent, known, known.index(str(path)), "it is missing, empty or not mounted")
    # Directories that are not named at all keep their numbers, too.
    by_path = {known.index(str(path)) for path in new if str(path) in known}
    for number in sorted(set(range(len(known))) - placed.keys() - absent.keys() - by_path):
        _put_absent(absent, known, number, "it is not named")


def _put_absent(absent: dict[int, Directory], known: Sequence[str], number: int, why: str) -> None:
    log.error("ssd_directory_absent path=%s number=%d problem=%s", known[number], number, why)
    absent[number] = Directory(Path(known[number]), why)


def _is_unmounted(path: Path, known: Sequence[str], placed: Mapping[int, Path]) -> bool:
    is_known = str(path) in known and known.index(str(path)) not in placed
    # The segments file is made at the first start, so that its absence says that something else lies there.
    return is_known and not os.path.lexists(path / SEGMENTS_FILE)


def _check_new(new: Sequence[Path]) -> None:
    """Refuse directories without a segments file while the list is lost.

    Each may be an unmounted mount point.
    """
    for path in new:
        if not os.path.lexists(path / SEGMENTS_FILE):
            file = path / SEGMENTS_FILE
            problem = f"{PATHS} is lost, so that nothing says whether it is new: create {file} if it is"
            raise DataDirectoryUnusable(path=str(path), problem=problem)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _place_new(
    placed: dict[int, Path], new: Sequence[Path], known: Sequence[str], absent: Collection[int]
) -> None:
    """Number directories without a number: as they were known by their path, else in the order given."""
    rest = []
    for path in new:
        if str(path) in known and known.index(str(path)) not in (*placed, *absent):
            _check_not_empty(path, known.index(str(path)))
            log.error("device_file_missing path=%s", path / DEVICE)
            placed[known.index(str(path))] = path
        else:
            rest.append(path)
    # Behind every number that was ever given: a number of an absent directory must not be given again.
    next_number = max(len(known), max((*placed, *absent), default=-1) + 1)
    placed.update(enumerate(rest, next_number))


def _check_not_empty(path: Path, number: int) -> None:
    """Refuse what looks like the place of a filesystem that is not mounted: sessions would be cut for it."""
    if not os.path.lexists(path / SEGMENTS_FILE):
        problem = (
            f"it was SSD directory number {number} and is empty: mount what belongs there, or create"
            f" {path / SEGMENTS_FILE} to go on without the tokens that it held"
        )
        raise DataDirectoryUnusable(path=str(path), problem=problem)


def _check_complete(data_directory: Path, placed: dict[int, Path], known: Sequence[str]) -> None:
    missing = sorted(set(range(max(placed) + 1)) | set(range(len(known))) - set(placed))
    missing = [number for number in missing if number not in placed]
    if missing:
        number = missing[0]
        last_seen = f", last at {known[number]}," if number < len(known) else ""
        problem = f"SSD directory number {number}{last_seen} is missing: name it with --ssd-directories"
        raise DataDirectoryUnusable(path=str(data_directory), problem=problem)


def _read_sizes(data_directory: Path) -> list[int]:
    return [int(size) for size in _read_paths(data_directory).get("sizes_bytes", ())]


def _read_known(data_directory: Path) -> list[str]:
    return [str(path) for path in _read_paths(data_directory).get("directories", ())]


def _read_paths(data_directory: Path) -> Mapping[str, Sequence[Any]]:
    try:
        return read_facts(data_directory / PATHS)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataDirectoryUnusable(
            path=str(data_directory / PATHS), problem=error.strerror or str(error)
        ) from error
    except CorruptMetadata as error:
        # Each directory says its number itself: what is lost is which one may be missing.
        log.error("paths_file_corrupt error=%s", error)  # noqa: TRY400  the sentence says all
        return {}
