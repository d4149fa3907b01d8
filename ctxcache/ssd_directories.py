"""Which SSD directory is which: each carries its number, whatever order they are given in.

Records name a place by the directory's number. Knows no tier. Worst case: a directory is missing or
somebody else's, which is refused with a sentence before anything is opened or written.

    DEVICE  in each SSD directory: {"instance_id": "...", "index": 0, "checksum": "..."}
    PATHS   in the data directory: {"directories": [...], "checksum": "..."}, by number, as last given
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable
from ctxcache.facts_file import read_facts, write_facts

DEVICE, PATHS, SEGMENTS = "DEVICE", "PATHS", "segments.dat"
log = logging.getLogger(__name__)


def in_order(data_directory: Path, instance_id: str, directories: Sequence[Path]) -> tuple[Path, ...]:
    """Return the directories by their numbers; those that are new have the next ones. Writes nothing.

    Raises DataDirectoryUnusable: one is missing, given twice, empty though it was in use, or belongs to
    another data directory; CorruptMetadata.
    """
    known = _read_known(data_directory)
    given = [path.absolute() for path in directories]
    _check_each_once(given)
    numbers = [_number(path, instance_id) for path in given]
    placed: dict[int, Path] = {}
    for number, path in zip(numbers, given, strict=True):
        if number is not None:
            if number in placed:
                problem = f"it is the same SSD directory as {placed[number]}, or a copy of it"
                raise DataDirectoryUnusable(path=str(path), problem=problem)
            placed[number] = path
    new = [path for number, path in zip(numbers, given, strict=True) if number is None]
    _place_new(placed, new, known)
    _check_complete(data_directory, placed, known)
    return tuple(placed[number] for number in range(len(placed)))


def write_down(data_directory: Path, instance_id: str, ordered: Sequence[Path]) -> None:
    """Give the directories their numbers, for good, and note where they are. They are ours by now.

    Raises DataDirectoryUnusable, also when another server has given one a number meanwhile; CorruptMetadata.
    """
    try:
        for number, path in enumerate(ordered):
            if _number(path, instance_id) is None:
                write_facts(path / DEVICE, {"instance_id": instance_id, "index": number})
        names = [str(path) for path in ordered]
        if names != _read_known(data_directory):
            write_facts(data_directory / PATHS, {"directories": names})
    except OSError as error:
        raise DataDirectoryUnusable(path=str(data_directory), problem=error.strerror or str(error)) from error


def check_not_orphaned(data_directory: Path, directories: Sequence[Path]) -> None:
    """Raise CorruptMetadata where SSD directories are in use and the data directory is gone, or its FORMAT."""
    # What may not be looked at is somebody else's to refuse: these do not raise.
    used = next((path for path in directories if os.path.exists(path / DEVICE)), None)  # noqa: PTH110
    if used and not os.path.exists(data_directory / "FORMAT"):  # noqa: PTH110
        raise CorruptMetadata(
            where=str(data_directory / "FORMAT"), problem=f"it is gone, and {used} is in use"
        )


def entries(directory: Path) -> list[Path]:
    """What a server has in an SSD directory."""
    return [directory / name for name in (DEVICE, SEGMENTS, "WITNESS", "catalog")]


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
        if (before := seen.setdefault(path.resolve(), path)) is not path:
            problem = f"it is named twice, as {before} before" if before != path else "it is named twice"
            raise DataDirectoryUnusable(path=str(path), problem=problem)


def _place_new(placed: dict[int, Path], new: Sequence[Path], known: Sequence[str]) -> None:
    """Number directories without a number: as they were known by their path, else in the order given."""
    rest = []
    for path in new:
        if str(path) in known and known.index(str(path)) not in placed:
            _check_not_empty(path, known.index(str(path)))
            log.error("device_file_missing path=%s", path / DEVICE)
            placed[known.index(str(path))] = path
        else:
            rest.append(path)
    next_number = max(len(known), max(placed, default=-1) + 1)
    placed.update(enumerate(rest, next_number))


def _check_not_empty(path: Path, number: int) -> None:
    """Refuse what looks like the place of a filesystem that is not mounted: sessions would be cut for it."""
    if not os.path.lexists(path / SEGMENTS):
        problem = (
            f"it was SSD directory number {number} and is empty: mount what belongs there, or create"
            f" {path / SEGMENTS} to go on without the tokens that it held"
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


def _read_known(data_directory: Path) -> list[str]:
    try:
        return [str(path) for path in read_facts(data_directory / PATHS)["directories"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataDirectoryUnusable(
            path=str(data_directory / PATHS), problem=error.strerror or str(error)
        ) from error
    except CorruptMetadata as error:
        # Each directory says its number itself: what is lost is which one may be missing.
        log.error("paths_file_corrupt error=%s", error)  # noqa: TRY400  the sentence says all
        return []
