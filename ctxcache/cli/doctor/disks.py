"""The disks of a store.

How the SSD files would be read, whether the metadata opens, and how well disks are. Whether a start would be
refused is asked of `server/starting.py`, as the start does.

The probe writes only below a temporary directory of its own, which it removes. It opens a data directory only
where one is and no server holds it. Disks speak of their health by the kernel, and by smartctl where that is
installed; smartctl has a time limit and changes nothing. Worst case: a directory that refuses us, or a disk
that says nothing, or says it to root alone. Each is a finding, and a disk that says nothing is unknown, never
well.
"""

import json
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ctxcache.cli.doctor import Finding, degraded, fatal, missing, ok
from ctxcache.cli.doctor.machine import filesystem
from ctxcache.cli.units import counted, human_size
from ctxcache.errors import CacheError, CorruptMetadata, DataDirectoryUnusable, InvalidConfiguration
from ctxcache.format.layout import ALIGN_BYTES, SEGMENTS_FILE
from ctxcache.runtime.files import check_directory, check_secret, existing, loose, secret_refusal
from ctxcache.settings.config import Settings
from ctxcache.storage.data_directory import DataDirectory
from ctxcache.storage.data_directory import entries as data_entries
from ctxcache.storage.metadata.catalog import CATALOG, Catalog
from ctxcache.storage.metadata.reading import RocksDbRecords
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata, check_lock
from ctxcache.storage.metadata.witness import Witness
from ctxcache.storage.opening import check_data_directory, ssd_directories_of, ssd_size_bytes
from ctxcache.storage.ssd_directories import entries as ssd_entries
from ctxcache.storage.ssd_directories import look

REBUILD = "`ctxcache rebuild` makes it anew from what is whole"
MOUNT = "mount what belongs there and start again"
CHOOSE = "choose another with --data-directory or --ssd-directories"
BLOCK = Path("/sys/dev/block")
TIMEOUT_S = 10
WORN_PERCENT = 90
WELL_STATES = ("running", "live", "")
SECTORS = {5: "reallocated", 197: "pending", 198: "uncorrectable"}
"""Raw counts of an ATA disk's attributes that are 0 on one that is well."""
REPLACE = "keep writes off it (`ctxcache tier rest PATH`), back up, replace it"
Document = Mapping[str, Any]
"""The output of `smartctl --json`; None where it cannot be run."""


def space(settings: Settings, directory: Path) -> Finding:
    """The bytes that the SSD file takes of its filesystem."""
    name = f"space in {directory}"
    try:
        present, place = _present_bytes(directory), existing(directory)
        needed = ssd_size_bytes(settings, directory)
        status = os.statvfs(place)
    except OSError as error:
        return _unknown(name, error)
    free = human_size(status.f_bavail * status.f_frsize)
    there = f", {human_size(present)} are there" if present else ""
    found = f"{filesystem(place)}, {free} free; the SSD file takes {human_size(needed)}{there}"
    return ok(name, found, "a preallocated file")


def direct_io(directory: Path) -> Finding:
    """Can the filesystem be read and written around the page cache: tried with one aligned page."""
    name = f"direct I/O in {directory}"
    try:
        with tempfile.TemporaryDirectory(prefix=".ctxcache-doctor-", dir=existing(directory)) as scratch:
            problem = _try_direct(Path(scratch) / "probe")
    except OSError as error:
        return _unknown(name, error)
    if problem:
        return degraded(
            name,
            problem,
            "buffered I/O through the page cache",
            "choose a filesystem with O_DIRECT, such as ext4 or XFS",
        )
    return ok(name, "one page was written and read back", "direct I/O around the page cache")


def metadata(settings: Settings, held_by: str = "") -> Finding:
    """Does RocksDB open in the data directory, with what it had. `held_by`: the server that has it open."""
    directory = settings.data_directory
    if held_by:
        # A second process may not open this metadata, and need not: the directory serves.
        return ok("metadata", f"{directory} is held by a running server (pid {held_by})", "that server")
    try:
        check_data_directory(settings)
        return _opened(settings, directory)
    except CorruptMetadata as error:
        if settings.rebuild_metadata:
            return degraded("metadata", str(error), "metadata that the start makes anew", REBUILD)
        return fatal("metadata", error, REBUILD)
    except CacheError as error:
        return fatal("metadata", error, "see docs/operations.md for what this failure means")
    except OSError as error:
        return fatal("metadata", _unusable(directory, error), CHOOSE)


def _opened(settings: Settings, directory: Path) -> Finding:
    if not (directory / "FORMAT").exists():
        with tempfile.TemporaryDirectory(prefix=".ctxcache-doctor-", dir=existing(directory)) as scratch:
            RocksDbMetadata(Path(scratch)).close()
        return ok("metadata", "RocksDB opens", f"a new data directory at {directory}")
    with DataDirectory.open(directory) as data:
        is_lenient = settings.ssd_missing == "serve"
        directories = look(
            directory, data.instance_id, ssd_directories_of(settings), may_be_absent=is_lenient
        )
        ordered = [ssd.path for ssd in directories if not ssd.absence]
        is_absent = bool(directories[0].absence)
        catalog = None if is_absent else Catalog(directories[0].path / CATALOG, data.instance_id)
        opened = _look_at_metadata(data, Witness(ordered, data.instance_id), catalog)
    absent = "; ".join(f"{ssd.path}: {ssd.absence}" for ssd in directories if ssd.absence)
    return degraded("metadata", absent, opened.used, MOUNT) if absent else opened


def modes(settings: Settings) -> Iterator[Finding]:
    """May others read or change what the server has, or is to have: directories, what is in them, secrets."""
    data, directories = settings.data_directory, ssd_directories_of(settings)
    for directory in (data, *directories):
        yield _directory_modes(directory, data_entries if directory == data else ssd_entries)
    for source in ("tls_key", "token_hashes", "metrics_tls_key", "metrics_token_file"):
        if (path := getattr(settings, source)) is not None:
            yield _secret_modes(source, path)


def _directory_modes(directory: Path, entries: Callable[[Path], Iterable[Path]]) -> Finding:
    name = f"modes of {directory}"
    try:
        if not directory.exists():
            return ok(name, "it is not there yet", "one that is made with mode 0700")
        check_directory(directory)
        open_to_others = loose(entries(directory))
    except CacheError as error:
        return fatal(name, error, "chown and chmod it, or choose another")
    except OSError as error:
        return _unknown(name, error)
    if open_to_others:
        what = f"others have rights to {len(open_to_others)} files in it, {open_to_others[0]} among them"
        return degraded(
            name, what, "the same, without those rights", "the next start takes them; chmod does too"
        )
    return ok(name, "nobody else may write to it, or read what is in it", "as it is")


def _secret_modes(source: str, path: Path) -> Finding:
    name = f"modes of {path}"
    try:
        check_secret(path, secret_refusal(source, path))
    except CacheError as error:
        return fatal(name, error, f"chmod 600 {path}; a pod mounts it with defaultMode 0440")
    except OSError as error:
        problem = f"{path}: {error.strerror}"
        return fatal(
            name, InvalidConfiguration(source=source, problem=problem), f"name a file with --{source}"
        )
    return ok(name, "nobody else may read or change it", f"the file of {source}")


def _look_at_metadata(data: DataDirectory, witness: Witness, catalog: Catalog | None) -> Finding:
    """Read it as a start does, which changes nothing."""
    check_lock(data.metadata_path)
    store = RocksDbRecords(data.metadata_path, witness=witness, catalog=catalog)
    try:
        count = sum(1 for _ in store.sessions()) if store.is_there else 0
    finally:
        store.close()
    return ok("metadata", f"RocksDB opens; {counted(count, 'session')}", f"the sessions in {data.path}")


def _try_direct(path: Path) -> str:
    """Write and read one page. Returns the problem; empty for none."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
    try:
        fd = os.open(path, flags, mode=0o600)
    except OSError as error:
        return f"the filesystem refuses O_DIRECT: {error.strerror}"
    try:
        return _try_page(fd)
    except OSError as error:
        return f"direct I/O fails: {error.strerror}"
    finally:
        os.close(fd)


def _try_page(fd: int) -> str:
    with mmap.mmap(-1, ALIGN_BYTES) as written, mmap.mmap(-1, ALIGN_BYTES) as read:
        written[:] = os.urandom(ALIGN_BYTES)
        os.pwritev(fd, [written], 0)
        os.preadv(fd, [read], 0)
        return "" if written[:] == read[:] else "what was written is not what is read"


def _present_bytes(directory: Path) -> int:
    file = directory / SEGMENTS_FILE
    return file.stat().st_size if file.exists() else 0


def _unknown(name: str, error: OSError) -> Finding:
    return missing(name, f"unknown: {error.strerror}", "nothing", "see the findings about its directory")


def _unusable(directory: Path, error: OSError) -> DataDirectoryUnusable:
    return DataDirectoryUnusable(path=str(directory), problem=error.strerror or str(error))


def disk_kind(directory: Path, root: Path = BLOCK) -> Finding:
    """Is the disk one without moving parts."""
    name = f"disk of {directory}"
    try:
        device = existing(directory).stat().st_dev
        place = (root / f"{os.major(device)}:{os.minor(device)}").resolve()
        # A partition shares the queue of its disk.
        queue = next(path / "queue" for path in (place, place.parent) if (path / "queue").is_dir())
        is_rotational = (queue / "rotational").read_text().strip() == "1"
    except (OSError, StopIteration):
        return ok(name, "unknown: no block device of this machine's", "it as it is")
    if is_rotational:
        return degraded(
            name, "it says that it rotates", "it as it is", "choose an SSD with --ssd-directories"
        )
    return ok(name, "no moving parts", "it as it is")


def health(
    directory: Path, root: Path = BLOCK, ask: Callable[[str], Document | None] | None = None
) -> Finding:
    """Do the disks under a directory say that they are well."""
    name, used = f"health of {directory}", "it as it is"
    disks = _disks(directory, root)
    if not disks:
        return ok(name, "unknown: no block device of this machine's", used)
    problems = [f"{disk.name}: {problem}" for disk in disks for problem in _of_kernel(disk)]
    told, unknown, documents = [], [], [(disk.name, (ask or _smartctl)(disk.name)) for disk in disks]
    for disk_name, document in documents:
        if document is None:
            unknown.append("smartctl is not installed")
            continue
        problems += [f"{disk_name}: {problem}" for problem in problems_of(document)]
        passed = document.get("smart_status", {}).get("passed")
        if passed is None:
            unknown.append(f"{disk_name} does not say: {_message(document)}")
        elif passed:
            told.append(f"{disk_name} passes its own test")
    if problems:
        return degraded(name, "; ".join(problems), used, REPLACE)
    if None in (document for _, document in documents):
        return missing(name, "; ".join(unknown), used, "install smartmontools, and run the doctor as root")
    return ok(name, "; ".join([*told, *(f"unknown: {text}" for text in unknown)]), used)


def problems_of(document: Document) -> Iterator[str]:
    """Faults that the disk reports of itself; nothing where it gives none."""
    if document.get("smart_status", {}).get("passed") is False:
        yield "it fails its own test"
    log = document.get("nvme_smart_health_information_log", {})
    if log.get("critical_warning"):
        yield f"critical warning {log['critical_warning']:#04x}"
    if log.get("media_errors"):
        yield f"{log['media_errors']} media errors"
    if log.get("percentage_used", 0) >= WORN_PERCENT:
        yield f"{log['percentage_used']} % of its writes are used up"
    if log.get("available_spare", 100) < log.get("available_spare_threshold", 0):
        yield f"{log['available_spare']} % of its spare blocks are left"
    for row in document.get("ata_smart_attributes", {}).get("table", []):
        count = row.get("raw", {}).get("value", 0)
        if row.get("id") in SECTORS and count:
            yield f"{count} {SECTORS[row['id']]} sectors"


def _of_kernel(disk: Path) -> Iterator[str]:
    state = _text(disk / "device" / "state")
    if state not in WELL_STATES:
        yield f"the kernel calls it {state}"
    if _text(disk / "ro") == "1":
        yield "the kernel takes no writes for it"


def _disks(directory: Path, root: Path) -> list[Path]:
    """Directories in /sys of the disks under a filesystem: of a mapped device or an array, those below it."""
    try:
        device = existing(directory).stat().st_dev
        place = (root / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:
        return []
    return sorted(set(_below(place)))


def _below(place: Path) -> Iterator[Path]:
    # A partition belongs to its disk.
    disk = place.parent if (place / "partition").exists() else place
    # A mapped device, or an array, tells nothing of itself. The disks below it do.
    slaves = list((disk / "slaves").glob("*"))
    if not slaves:
        yield disk
    for slave in slaves:
        yield from _below(slave.resolve())


def _smartctl(disk_name: str) -> Document | None:
    program = shutil.which(
        "smartctl", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    )
    if program is None:
        return None
    command = [program, "--json", "-H", "-A", f"/dev/{disk_name}"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)  # noqa: S603  # our own words
        document: Document = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        return {"smartctl": {"messages": [{"string": f"no answer in {TIMEOUT_S} s"}]}}
    except (OSError, ValueError) as error:
        return {"smartctl": {"messages": [{"string": str(error)}]}}
    return document if isinstance(document, dict) else {}


def _message(document: Document) -> str:
    messages = document.get("smartctl", {}).get("messages") or [{}]
    return str(messages[0].get("string") or "it has no SMART")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
