"""Storage: the places where bytes and records lie, opened in the order in which that is safe.

No other module knows concrete tiers and stores. Everything is looked at before anything is written, and the
SSD files are claimed before their neighbours are touched. The records are open for reading alone until the
cache has read them all and begins. Worst case: a part refuses. Then nothing stays open, and no SSD directory
is given a number.
"""

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from ctxcache.errors import CacheError, DataDirectoryUnusable, InvalidConfiguration, TierFailure
from ctxcache.format.layout import ALIGN_BYTES, SEGMENTS_FILE, align
from ctxcache.runtime.clock import SystemClock
from ctxcache.runtime.files import check_owners, claim_directory, existing, tighten
from ctxcache.settings.config import Settings
from ctxcache.settings.sizes import ArenaSize, default_arena, memory_available, ssd_bytes
from ctxcache.storage.data_directory import METADATA, DataDirectory, check_not_restoring
from ctxcache.storage.injection import Faults, FaultySsdFiles, SlowMetadata
from ctxcache.storage.metadata.catalog import CATALOG, Catalog
from ctxcache.storage.metadata.reading import ReadOnlyMetadata
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.metadata.shortages import check_room_to_open
from ctxcache.storage.metadata.witness import Witness
from ctxcache.storage.ssd_directories import Directory, check_not_orphaned, entries, is_ours, look, write_down
from ctxcache.storage.tiers.dram import ARENA_FILE_NAME, DramArena, remove_abandoned
from ctxcache.storage.tiers.dram import check_arena as check_new_arena
from ctxcache.storage.tiers.segments_file import SsdPath, check_file
from ctxcache.storage.tiers.shared_memory import free_huge_bytes
from ctxcache.storage.tiers.ssd import SsdFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Storage:
    """The opened places. `faults` None: nobody may inject any."""

    directory: DataDirectory
    arena: DramArena
    ssd: SsdFiles
    metadata: RocksDbMetadata
    faults: Faults | None = None


@dataclass(frozen=True, slots=True)
class Untouched:
    """The opened places of a store that is only looked at."""

    directory: DataDirectory
    arena: DramArena
    ssd: SsdFiles
    metadata: ReadOnlyMetadata


def ssd_directories_of(settings: Settings) -> tuple[Path, ...]:
    """The SSD directories of the settings, or the default one."""
    return settings.ssd_directories or (settings.data_directory / "ssd",)


def check_copies(settings: Settings) -> None:
    """Raise InvalidConfiguration for more copies than there are SSD directories."""
    named = ssd_directories_of(settings)
    if settings.ssd_copies > len(named):
        problem = f"{settings.ssd_copies} copies need as many SSD directories, and {len(named)} is named"
        raise InvalidConfiguration(source="ssd_copies", problem=problem)


def check_data_directory(settings: Settings) -> None:
    """Raise what `open_storage` would raise for the data directory. Changes nothing."""
    _check_room(settings.data_directory)
    check_not_restoring(settings.data_directory)
    # SSD directories may be in use without their data directory: a fresh one would give their slots to
    # others.
    check_not_orphaned(settings.data_directory, ssd_directories_of(settings))
    DataDirectory.check(settings.data_directory)


def check_arena(settings: Settings) -> None:
    """Raise what `open_storage` would raise for the arena. Changes nothing."""
    try:
        size_bytes = arena_size(settings).size_bytes
    except OSError as error:
        raise _no_arena(settings, error) from error
    try:
        instance_id = DataDirectory.instance_id_at(settings.data_directory)
    except (OSError, CacheError):
        # A data directory that cannot be read is refused by its own check.
        instance_id = None
    path = settings.arena_directory / ARENA_FILE_NAME.format(instance_id or "new")
    check_new_arena(path, size_bytes, huge_pages=settings.arena_huge_pages)


def check_ssd_directories(settings: Settings) -> None:
    """Raise what `open_storage` would raise for SSD directories and their files. Changes nothing."""
    data_directory, named = settings.data_directory, ssd_directories_of(settings)
    try:
        instance_id = DataDirectory.instance_id_at(data_directory) or ""
    except OSError as error:
        raise DataDirectoryUnusable(path=str(data_directory), problem=error.strerror or str(error)) from error
    is_lenient = settings.ssd_missing == "serve"
    for directory in look(data_directory, instance_id, named, may_be_absent=is_lenient):
        if directory.absence:
            continue
        try:
            check_owners(entries(directory.path))
            check_file(SsdPath(str(directory.path), ssd_size_bytes(settings, directory.path)))
        except DataDirectoryUnusable as error:
            # As the tier has it: a file that another server holds is not absent.
            is_missing = isinstance(error.__cause__, OSError) and not isinstance(
                error.__cause__, BlockingIOError
            )
            if not (is_lenient and is_missing):
                raise
        except OSError as error:
            problem = error.strerror or str(error)
            raise DataDirectoryUnusable(path=str(directory.path), problem=problem) from error


def arena_size(settings: Settings) -> ArenaSize:
    """The arena's size, as set or by default. Raises OSError."""
    if settings.arena_size_bytes:
        return ArenaSize(align(settings.arena_size_bytes), "as set")
    return default_arena(settings.arena_directory)


def ssd_size_bytes(settings: Settings, directory: Path) -> int:
    """The size of the file in an SSD directory, as set, as it is there, or by default. Raises OSError."""
    return align(settings.ssd_size_bytes) or ssd_bytes(existing(directory), SEGMENTS_FILE)


def _no_arena(settings: Settings, error: OSError) -> TierFailure:
    problem = f"cannot create the arena: {error.strerror}"
    return TierFailure(path=str(settings.arena_directory), problem=problem)


def open_storage(settings: Settings, files: ExitStack) -> Storage:
    """Open everything; `files` closes it.

    Raises DataDirectoryUnusable, FormatTooNew, CorruptMetadata, InvalidConfiguration, CapacityExceeded,
    TierFailure.
    """
    faults = Faults(SystemClock()) if settings.fault_injection else None
    # The log of every start says this: a store with faults must not be taken for one without.
    if faults:
        log.warning("fault_injection_on data_directory=%s", settings.data_directory)
    check_copies(settings)
    # Looks before locks, locks before writes. Nothing is made before all of it can be made:
    #
    #     room, not half imported, not orphaned ──► data directory locked ──► SSD directories recognised
    #       ──► arena ──► SSD files locked, allocated ──► metadata read as far as the witness
    #
    # The cache reads all of it, and begins:
    #
    #     witness opened ──► numbers written ──► metadata opened for writing ──► catalog begun
    _check_room(settings.data_directory)
    directory, ssd_directories = _recognised(settings, files)
    ordered = tuple(ssd_directory.path for ssd_directory in ssd_directories)
    directory.tighten()
    # The arena comes first: its refusal leaves no large file behind.
    arena = open_arena(settings, directory.instance_id)
    files.callback(arena.close)
    paths = _ssd_paths(settings, ssd_directories, directory.instance_id)
    hang_after_s = settings.ssd_hang_after_s
    if faults:
        ssd: SsdFiles = FaultySsdFiles(paths, faults, hang_after_s=hang_after_s)
    else:
        ssd = SsdFiles(paths, hang_after_s=hang_after_s)
    files.callback(ssd.close)
    absent = {i for i, refusal in ssd.refusals.items() if refusal.is_lost}
    metadata = _open_metadata(directory, ordered, absent, faults, hang_after_s)
    files.callback(metadata.close)
    return Storage(directory, arena, ssd, metadata, faults)


def open_untouched(settings: Settings, files: ExitStack) -> Untouched:
    """Open the present parts, and change none of them; `files` closes them. Raises as `open_storage`."""
    directory, ssd_directories = _recognised(settings, files)
    paths = [
        SsdPath(
            str(ssd_directory.path),
            ssd_directory.size_bytes or _present_bytes(ssd_directory.path),
            ssd_directory.absence,
            may_be_absent=settings.ssd_missing == "serve",
        )
        for ssd_directory in ssd_directories
    ]
    present = [ssd_directory.path for ssd_directory in ssd_directories if not ssd_directory.absence]
    catalog = (
        None
        if ssd_directories[0].absence
        else Catalog(ssd_directories[0].path / CATALOG, directory.instance_id)
    )
    witness = Witness(present, directory.instance_id)
    metadata = ReadOnlyMetadata(directory.metadata_path, witness=witness, catalog=catalog)
    files.callback(metadata.close)
    arena = open_arena(settings, directory.instance_id)
    files.callback(arena.close)
    ssd = SsdFiles(paths, hang_after_s=settings.ssd_hang_after_s)
    files.callback(ssd.close)
    return Untouched(directory, arena, ssd, metadata)


def _recognised(settings: Settings, files: ExitStack) -> tuple[DataDirectory, tuple[Directory, ...]]:
    """The data directory, locked, and its SSD directories by number."""
    named = ssd_directories_of(settings)
    check_not_restoring(settings.data_directory)
    # SSD directories may be in use without their data directory: a fresh one would give their slots to
    # others.
    check_not_orphaned(settings.data_directory, named)
    directory = DataDirectory.open(settings.data_directory, created_by=f"ctxcache {version('ctxcache')}")
    files.callback(directory.close)
    is_lenient = settings.ssd_missing == "serve"
    return directory, look(directory.path, directory.instance_id, named, may_be_absent=is_lenient)


def _check_room(data_directory: Path) -> None:
    """Raise CapacityExceeded where a start lacks room for its writes. The lock itself may fail then."""
    places = (data_directory / METADATA, data_directory)
    for place in [place for place in places if os.path.isdir(place)][:1]:  # noqa: PTH112  it does not raise
        check_room_to_open(place)


def _present_bytes(directory: Path) -> int:
    """The size of the present file, which is left as it is."""
    path = directory / SEGMENTS_FILE
    try:
        return path.stat().st_size // ALIGN_BYTES * ALIGN_BYTES
    except FileNotFoundError as error:
        problem = f"{SEGMENTS_FILE} is gone: a start goes on without the tokens that it held"
        raise DataDirectoryUnusable(path=str(directory), problem=problem) from error
    except OSError as error:
        raise DataDirectoryUnusable(path=str(path), problem=error.strerror or str(error)) from error


def open_arena(settings: Settings, instance_id: str) -> DramArena:
    """An arena. The log tells how a default size came about, and of a size that may be too much."""
    # The memory of killed servers stays taken until somebody removes it.
    for abandoned in remove_abandoned(settings.arena_directory):
        log.warning("abandoned_arena_removed path=%s", abandoned)
    try:
        size = arena_size(settings)
    except OSError as error:
        raise _no_arena(settings, error) from error
    size_bytes = size.size_bytes
    path = settings.arena_directory / ARENA_FILE_NAME.format(instance_id)
    if not settings.arena_size_bytes:
        log.info("arena_sized size_bytes=%d by=%r", size_bytes, size.bound)
    arena = DramArena(path, size_bytes, huge_pages=settings.arena_huge_pages, is_sealed=settings.arena_sealed)
    if settings.arena_size_bytes:
        _look_at_memory(size_bytes)
    return arena


def _look_at_memory(size_bytes: int) -> None:
    """Warn of an arena that may be too much."""
    memory = memory_available()
    # Huge pages of the pool count in nobody's limit of memory.
    if size_bytes > memory.available_bytes and size_bytes > free_huge_bytes():
        log.warning(
            "arena_above_memory size_bytes=%d available_bytes=%d by=%r",
            size_bytes,
            memory.available_bytes,
            memory.source,
        )


def _ssd_paths(settings: Settings, directories: Sequence[Directory], instance_id: str) -> list[SsdPath]:
    return [
        SsdPath(
            str(directory.path),
            directory.size_bytes or _size_bytes(settings, directory),
            directory.absence,
            partial(is_ours, directory.path, instance_id, number),
            settings.ssd_missing == "serve",
        )
        for number, directory in enumerate(directories)
    ]


def _size_bytes(settings: Settings, directory: Directory) -> int:
    path = directory.path
    if directory.absence:
        problem = f"{directory.absence}, and how large its file was is not noted: start once with it"
        raise DataDirectoryUnusable(path=str(path), problem=problem)
    try:
        # The directory is made private before its size is looked at.
        claim_directory(path)
        tighten(entries(path))
        return ssd_size_bytes(settings, path)
    except OSError as error:
        raise DataDirectoryUnusable(path=str(path), problem=error.strerror or str(error)) from error


def _open_metadata(
    data: DataDirectory,
    ssd_directories: Sequence[Path],
    absent: Collection[int],
    faults: Faults | None,
    hang_after_s: float,
) -> RocksDbMetadata:
    """Open the metadata. Without its first SSD directory it has no catalog, until a start with that."""
    # Witness and catalog are opened first, and closed if the metadata refuses.
    with ExitStack() as opened:
        present = [path for i, path in enumerate(ssd_directories) if i not in absent]
        store_path = data.metadata_path if data.metadata_path.exists() else data.path
        witness = Witness(present, data.instance_id, beside=store_path)
        opened.callback(witness.close)
        catalog = None
        # The catalog lies in the first directory alone: a second copy, on another device than the metadata.
        if 0 not in absent:
            path = ssd_directories[0] / CATALOG
            catalog = Catalog(path, data.instance_id, hang_after_s=hang_after_s, beside=store_path)
            opened.callback(catalog.close, 0)
        store = partial(SlowMetadata, faults=faults) if faults else RocksDbMetadata
        # Numbers are given under the locks of the files: two servers that start at once must not both give
        # them.
        before = partial(write_down, data.path, data.instance_id, ssd_directories, absent=absent)
        metadata = store(
            data.metadata_path, witness=witness, catalog=catalog, hang_after_s=hang_after_s, before=before
        )
        opened.pop_all()
    return metadata
