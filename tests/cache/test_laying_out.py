"""A backup laid out as a new store: all of it, or nothing that a server starts on."""

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import killed_restores
import pytest
from cache_rig import SLOT_BYTES, TENANT, MemoryRig, Writer

from ctxcache.archive import laying_out
from ctxcache.archive.backup import Backup
from ctxcache.archive.frames import source
from ctxcache.archive.laying_out import Restored, Step, lay_out
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    CorruptSegment,
    DataDirectoryUnusable,
    FileDamaged,
)
from ctxcache.format.streams import Content, contents_within
from ctxcache.server.lifecycle import verify_directory
from ctxcache.settings.config import Settings
from ctxcache.storage.data_directory import DataDirectory
from ctxcache.storage.opening import open_storage
from ctxcache.storage.rebuild import rebuild

FOR_EVER_NS = (1 << 62) - 1


@pytest.fixture
async def archive(rig: MemoryRig, tmp_path: Path) -> Path:
    """A backup of two sessions in five segments."""
    rig.clock.advance(ns=FOR_EVER_NS - rig.clock.now_ns() - 10**15)
    writer = Writer(1)
    for name, token_count in (("a", 150), ("b", 70)):
        await rig.create(name)
        await rig.append(name, writer.make(token_count), is_durable=True)
    path = tmp_path / "archive"
    path.write_bytes(b"".join([data async for data, _ in Backup(rig.cache).run("a test")]))
    return path


def told(*_: object) -> None:
    """Progress is not looked at."""


def laid_out(archive: Path, directory: Path, *, ssd_size_bytes: int = 1 << 20, step: Step = told) -> Restored:
    """Make a store of it, with one SSD directory inside and one outside."""
    settings = killed_restores.settings(directory)
    assert settings.ssd_directories is not None
    with source(str(archive)) as opened:
        return lay_out(
        opened, settings.data_directory, settings.ssd_directories, ssd_size_bytes=ssd_size_bytes,
        now_ns=0, created_by="a test", step=step,
    )  # fmt: skip


def times(directory: Path) -> dict[Path, int]:
    """When each file was written last, but those of locks."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.name != "LOCK"}


async def starts(directory: Path) -> bool:
    """Whether anything takes the directory for a store; nothing must change it."""
    settings = killed_restores.settings(directory)
    assert settings.ssd_directories is not None
    before = times(directory)
    refusals = []
    for way in ("serve", "verify", "rebuild"):
        try:
            if way == "verify":
                async for _ in verify_directory(settings, bytes_per_second=0):
                    continue
            elif way == "rebuild":
                rebuild(
                    settings.data_directory, settings.ssd_directories, created_by="a test", is_dry_run=False
                )
            else:
                with DataDirectory.open(settings.data_directory):
                    continue
        except CacheError as error:
            refusals.append(str(error))
    assert times(directory) == before
    assert all(
        "an import into it did not end: `ctxcache import --new-store` begins it anew" in said
        for said in refusals
    )
    return len(refusals) < 3


def test_a_restore_that_is_killed_leaves_nothing_that_starts_and_is_made_again(
    archive: Path, tmp_path: Path
) -> None:
    """At each of its steps; in the same directories, which nothing else takes meanwhile."""
    command = [sys.executable, killed_restores.__file__, str(archive), str(tmp_path / "store")]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    left = Counter(result["left"].partition(":")[0] for result in results)

    assert left.keys() == {"nothing", "DATA_DIRECTORY_UNUSABLE", "whole"}
    assert left["DATA_DIRECTORY_UNUSABLE"] > 20
    assert {result["verified"] for result in results if "verified" in result} == {
        "8 records, 5 segments, 0 bad"
    }
    assert {result["again"] for result in results if "again" in result} == {"done"}
    assert [result["killed"] for result in results] == [True] * (len(results) - 1) + [False]


def test_a_damaged_backup_makes_nothing(archive: Path, tmp_path: Path) -> None:
    """Whichever byte of it is another one, whatever is missing: a sentence, before anything is written."""
    data = archive.read_bytes()
    for at in (*range(0, len(data), 1009), len(data) - 1):
        archive.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(CacheError) as refused:
            laid_out(archive, tmp_path / "store")
        assert str(archive) in str(refused.value)
        archive.write_bytes(data[:at])
        with pytest.raises(FileDamaged):
            laid_out(archive, tmp_path / "store")

    assert not (tmp_path / "store").exists()


async def test_what_goes_wrong_in_the_middle_leaves_nothing_that_starts(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No room, bytes that do not come back, a file that changes meanwhile; then it is made again."""

    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def other_bytes(fd: int, data: bytearray, offset_bytes: int) -> None:
        os.pwrite(fd, bytes(data[:-4096]), offset_bytes)

    places: list[tuple[Any, str, Any, type[CacheError]]] = [
        (os, "posix_fallocate", no_room, DataDirectoryUnusable),
        (laying_out, "_write_all", other_bytes, CorruptSegment),
    ]
    for where, name, instead, error in places:
        with monkeypatch.context() as patched:
            patched.setattr(where, name, instead)
            with pytest.raises(error):
                laid_out(archive, tmp_path / "store")
        assert not await starts(tmp_path / "store")
    data = archive.read_bytes()  # noqa: ASYNC240  small
    golden = (Path(__file__).parents[1] / "golden" / "archive-v2.ctxarchive").read_bytes()
    for changed, told_of in (
        (data[:-300] + b"x" * 300, "checksum"),
        (golden.ljust(len(data)), "took its place"),
    ):

        def change(what: str, done: int, total: int, changed: bytes = changed) -> None:
            if (what, done) == ("checking", total):
                archive.write_bytes(changed)

        with pytest.raises(FileDamaged, match=told_of):
            laid_out(archive, tmp_path / "store", step=change)
        assert not await starts(tmp_path / "store")
        archive.write_bytes(data)  # noqa: ASYNC240  small
    found = laid_out(archive, tmp_path / "store")
    with DataDirectory.open(tmp_path / "store" / "data"):
        pass

    assert (found.session_count, found.segment_count, found.token_count) == (2, 5, 220)


def test_directories_that_are_somebodys_are_refused_untouched(archive: Path, tmp_path: Path) -> None:
    """Data directories and others; SSD directories with anything in them, or named twice."""
    laid_out(archive, tmp_path / "store")
    with pytest.raises(DataDirectoryUnusable, match="it is a data directory already"):
        laid_out(archive, tmp_path / "store")
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / "mine" / "data" / "letter").touch()
    with pytest.raises(DataDirectoryUnusable, match="not empty"):
        laid_out(archive, tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").rglob("*")] == ["data", "letter"]
    # Another store's, which has only lost its data directory.
    (tmp_path / "store" / "data").rename(tmp_path / "elsewhere")
    with pytest.raises(DataDirectoryUnusable, match="not empty"):
        laid_out(archive, tmp_path / "store")
    assert (tmp_path / "store" / "other" / "segments.dat").exists()


def test_it_must_fit(archive: Path, tmp_path: Path) -> None:
    """SSD files as large as was said take it, or it is refused."""
    with pytest.raises(CapacityExceeded):
        laid_out(archive, tmp_path / "small", ssd_size_bytes=2 * SLOT_BYTES)
    laid_out(archive, tmp_path / "store", ssd_size_bytes=3 * SLOT_BYTES)
    sizes = [path.stat().st_size for path in (tmp_path / "store").rglob("segments.dat")]

    assert sizes == [3 * SLOT_BYTES] * 2


async def test_a_store_opens_as_it_was_laid_out(archive: Path, tmp_path: Path) -> None:
    """With its directories in either order, and at once as one of its own."""
    laid_out(archive, tmp_path / "store")
    settings = killed_restores.settings(tmp_path / "store")
    assert settings.ssd_directories is not None
    turned: Settings = settings.model_copy(
        update={
            "ssd_directories": settings.ssd_directories[::-1],
            "arena_size_bytes": 1 << 20,
            "arena_huge_pages": "off",
        }
    )
    with ExitStack() as files:
        storage = open_storage(turned, files)
        sessions = {session.session_id for session in storage.metadata.sessions()}
        assert storage.directory.is_clean

    assert sessions == {"a", "b"}
    assert not (tmp_path / "store" / "data" / "RESTORING").exists()


async def test_tokens_are_found_in_a_store_that_was_laid_out(rig: MemoryRig, tmp_path: Path) -> None:
    """By the keys that they had, with salt and contents, of forks and adopters; none behind a cut."""
    rig.clock.advance(ns=FOR_EVER_NS - rig.clock.now_ns() - 10**15)
    tokens, picture = Writer(1).make(300), Content(50, 110, b"p" * 32)
    await rig.create("a", salt=b"user")
    for begin, end in ((0, 70), (70, 100), (100, 300)):
        told_now = contents_within([picture], begin, end)
        await rig.append("a", tokens[begin:end], contents=told_now, is_durable=True)
    await rig.fork("a", "b", 128)
    await rig.append("b", tokens[200:300], contents=[Content(128, 140, b"q" * 32)], is_durable=True)
    await rig.fork("a", "short", 100)
    await rig.create("c", salt=b"user")
    assert await rig.adopt("c", tokens[:150], contents=[picture]) == 128
    await rig.append("c", tokens[:100], is_durable=True)
    await rig.create("d")
    await rig.append("d", Writer(2).make(200), is_durable=True)
    kept = sorted((record.identity.begin, record.keys) for record in rig.metadata.segments())
    cut = rig.cache.ledger.find(TENANT, "d").segments[1:]
    await rig.truncate("d", (70, 75))
    path = tmp_path / "archive"
    path.write_bytes(b"".join([data async for data, _ in Backup(rig.cache).run("a test")]))
    laid_out(path, tmp_path / "store")
    settings = killed_restores.settings(tmp_path / "store")
    with ExitStack() as files:
        storage = open_storage(settings.model_copy(update={"arena_size_bytes": 1 << 20}), files)
        found = sorted((record.identity.begin, record.keys) for record in storage.metadata.segments())
        sessions = {one.session_id: (one.salt, one.contents) for one in storage.metadata.sessions()}

    gone = [(segment.begin, rig.cache.ledger.keyed.keys_of(segment, 64)) for segment in cut]
    assert [keys for _, keys in gone] == [()] * len(gone)
    lost = [one for one in kept if one not in found]
    assert [begin for begin, _ in lost] == [64, 128], "those of d, which has them no more"
    assert [one for one in found if one not in kept] == [(begin, ()) for begin in (64, 128)]
    assert sum(len(keys) for _, keys in found) == 4 + 1 + 1 + 1
    assert sessions["b"] == (b"user", (picture, Content(128, 140, b"q" * 32)))
    assert sessions["short"] == (b"user", (Content(50, 100, b"p" * 32),))
