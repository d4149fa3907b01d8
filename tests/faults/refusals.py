"""Refusals: what a start, a check or a rebuild refuses is byte for byte as it was, however often it is tried.

A part of `corrupt`. Every file of a store is damaged in every way, as an orderly stop and as a kill left the
store. Each case is started twice, verified, looked at by the doctor, and rebuilt where that refuses too; then
the file is put back, and everything must be there. Worst case: a damage that nobody refuses, which is counted
and left to the other parts of the harness.
"""

import contextlib
import hashlib
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from ctxcache.cli.doctor import disks
from ctxcache.cli.failures import sentence
from ctxcache.errors import CacheError
from ctxcache.server.lifecycle import verify_directory
from ctxcache.server.server import Server
from ctxcache.settings.config import Settings
from ctxcache.storage.data_directory import DataDirectory
from ctxcache.storage.metadata.catalog import CATALOG
from ctxcache.storage.rebuild import rebuild
from ctxcache.storage.ssd_directories import write_down
from tests.faults.corrupt_store import ARENA_BYTES, SSD_BYTES, Image, judge
from tests.faults.harness import Report, progress

HOMES = ("ssd0", "ssd1")
LOCK = Path("data", "LOCK")
"""Has the pid of who asked for the directory last: the one file that whoever asks writes."""
WITHOUT_CATALOG = 0.3
"""The share of cases in which the catalog is gone as well: then a rebuild refuses, too."""
NOBODY = 65534
Files = dict[Path, tuple[int, str]]
"""Every file and directory below a store: its kind, and the digest of its bytes. Modes are made private."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One way to damage a file, given the same file of an earlier day."""

    name: str
    do: Callable[[Path, Path], object]
    is_of: Callable[[Path], bool] = lambda _: True


def _cut(path: Path, _: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path, _: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0x10
    path.write_bytes(raw)


def _replace_by_directory(path: Path, _: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


def _add(name: str) -> Callable[[Path, Path], None]:
    def add(path: Path, _: Path) -> None:
        (path.parent / name).write_bytes(path.read_bytes()[:100])

    return add


def _is_current(path: Path) -> bool:
    return path.name == "CURRENT"


DAMAGES = (
    Damage("cut", _cut, lambda path: path.stat().st_size > 1),
    Damage("emptied", lambda path, _: os.truncate(path, 0), lambda path: path.stat().st_size > 0),
    Damage("missing", lambda path, _: path.unlink()),
    Damage("flipped", _flip, lambda path: path.stat().st_size > 0),
    Damage("older", lambda path, older: shutil.copyfile(older, path)),
    Damage("a directory", _replace_by_directory),
    Damage("somebody's", lambda path, _: os.chown(path, NOBODY, NOBODY), lambda _: os.geteuid() == 0),
    Damage("beside a strange table", _add("009999.sst"), _is_current),
    Damage("beside a strange log", _add("009999.log"), _is_current),
    Damage("beside a strange manifest", _add("MANIFEST-009999"), _is_current),
)


class Refusals:
    """Damages one file at a time, in a fresh copy of a store, and sees that a refusal changes nothing."""

    def __init__(self, image: Image, rng: random.Random, report: Report) -> None:
        self._image, self._random, self._report = image, rng, report
        self._home = image.home.parent / "refused"
        self._killed, self._ended = image.home.parent / "killed", image.home.parent / "ended"

    async def run(self, count: int) -> None:
        """Try so many of all cases."""
        await self._make_homes()
        cases = [case for home in (self._killed, self._ended) for case in self._cases(home)]
        self._random.shuffle(cases)
        for number, (home, path, damage) in enumerate(cases[:count], 1):
            await self._try(home, path, damage)
            progress(number, min(count, len(cases)), "refused starts")
            self._report.end_if_found()
        self._report.figures["refusal_case_count"] = len(cases)

    async def _make_homes(self) -> None:
        """Stores as a kill and as a stop leave them, which know that they lie where they will be tried."""
        shutil.copytree(self._image.home, self._home)
        with DataDirectory.open(self._home / "data") as directory:
            homes = [self._home / name for name in HOMES]
            write_down(directory.path, directory.instance_id, homes)
        shutil.copytree(self._home, self._killed)
        server = await Server.start(self._settings(self._home))
        await server.stop()
        shutil.copytree(self._home, self._ended)

    def _cases(self, home: Path) -> Iterator[tuple[Path, Path, Damage]]:
        for path in sorted(path.relative_to(home) for path in home.rglob("*") if path.is_file()):
            for damage in DAMAGES:
                is_there = damage.name != "older" or (self._image.older / path).is_file()
                if is_there and damage.is_of(home / path):
                    yield home, path, damage

    async def _try(self, home: Path, path: Path, damage: Damage) -> None:
        shutil.rmtree(self._home, ignore_errors=True)
        shutil.copytree(home, self._home)
        whole = files_of(self._home)
        damage.do(self._home / path, self._image.older / path)
        told = f"{path.name} {damage.name} after a {'kill' if home == self._killed else 'stop'}"
        if CATALOG not in path.parts and self._random.random() < WITHOUT_CATALOG:
            shutil.rmtree(self._home / HOMES[0] / CATALOG)
            told += ", without a catalog"
        before = files_of(self._home)
        self._report.count("damaged_file_count")
        # Whether it refuses or not: both only look.
        await self._verify()
        self._compare(before, f"{told}: a verify")
        disks.metadata(self._settings(self._home))
        self._compare(before, f"{told}: the doctor")
        for number in ("first", "second"):
            if not await self._is_refused():
                return
            self._report.count("refusal_count")
            self._compare(before, f"{told}: the {number} refused start")
        self._look_at_rebuild(before, told)
        self._put_back(home, path, before.keys() - whole.keys())
        await self._check_all(f"{told}, put back")

    async def _verify(self) -> None:
        with contextlib.suppress(CacheError):
            async with aclosing(verify_directory(self._settings(self._home), bytes_per_second=0)) as reports:
                async for _ in reports:
                    continue

    async def _is_refused(self) -> bool:
        try:
            server = await Server.start(self._settings(self._home))
        except CacheError:
            return True
        await server.stop()
        return False

    def _look_at_rebuild(self, before: Files, told: str) -> None:
        """See that a dry run changes nothing, and what it refuses neither."""
        homes = [self._home / name for name in HOMES]
        for is_dry_run in (True, False):
            try:
                rebuild(self._home / "data", homes, created_by="test", is_dry_run=is_dry_run)
            except CacheError as error:
                self._report.count("refused_rebuild_count")
                if "`ctxcache rebuild`" in sentence(error):
                    self._report.find(f"{told}: a refused rebuild advises a rebuild")
                self._compare(before, f"{told}: a refused rebuild")
            else:
                # It would go through: the other parts of the harness rebuild.
                self._compare(before, f"{told}: a dry run")
                return

    def _put_back(self, home: Path, path: Path, strange: set[Path]) -> None:
        for there in (self._home / path, *(self._home / name for name in strange)):
            shutil.rmtree(there) if there.is_dir() else there.unlink(missing_ok=True)
        shutil.copy2(home / path, self._home / path)
        shutil.copytree(home / HOMES[0] / CATALOG, self._home / HOMES[0] / CATALOG, dirs_exist_ok=True)

    async def _check_all(self, told: str) -> None:
        """The store is whole again: it opens, and has every session."""
        try:
            server = await Server.start(self._settings(self._home))
        except CacheError as error:
            self._report.find(f"{told}: {error}")
            return
        broken, refused = await judge(server.cache, self._image.sessions, list(self._image.sessions))
        for problem in broken:
            self._report.find(f"{told}: {problem}")
        if refused:
            self._report.find(f"{told}: {refused} reads were refused")
        await server.stop()

    def _compare(self, before: Files, told: str) -> None:
        after = files_of(self._home)
        for path in sorted(before.keys() | after.keys()):
            if before.get(path) != after.get(path):
                change = (
                    "has left" if path not in before else "has removed" if path not in after else "changed"
                )
                self._report.find(f"{told} {change} {path}")

    def _settings(self, home: Path) -> Settings:
        return Settings(
            data_directory=home / "data", ssd_directories=tuple(home / name for name in HOMES), listen="",
            unix_socket=str(home / "socket"), control_socket="", metrics_listen="", drain_timeout_s=1,
            arena_size_bytes=ARENA_BYTES, ssd_size_bytes=SSD_BYTES, arena_huge_pages="off",
        )  # fmt: skip


def files_of(home: Path) -> Files:
    """What is there, all but the lock."""
    found: Files = {}
    for path in home.rglob("*"):
        digest = hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[path.relative_to(home)] = stat.S_IFMT(path.lstat().st_mode), digest
    found.pop(LOCK, None)
    return found
