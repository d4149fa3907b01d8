"""Losses that a database does not notice by itself.

Found by its witness, by its count, or brought back by its catalog.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hung_device import HungDevice
from metadata_contract import make_model, make_session

from ctxcache.errors import CorruptMetadata
from ctxcache.format.layout import Slot
from ctxcache.storage.metadata import catalog as catalogs
from ctxcache.storage.metadata import records
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.catalog import Catalog, read_catalog
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.metadata.witness import Witness

INSTANCE = "00ff"


def open_store(directory: Path) -> RocksDbMetadata:
    """Open a store with everything around it."""
    directory.mkdir(exist_ok=True)
    return RocksDbMetadata(
        directory / "metadata",
        witness=Witness([directory], INSTANCE),
        catalog=Catalog(directory / "catalog", INSTANCE),
    )


def keep(store: RocksDbMetadata, changes: Changes) -> None:
    """Commit, durable."""

    async def commit() -> None:
        await store.commit(changes, is_durable=True)

    asyncio.run(commit())


def commit(store: RocksDbMetadata, *uids: int, log_end: int = 0) -> None:
    """Commit sessions, durable."""
    keep(store, Changes(sessions=[replace(make_session(uid), log_end=log_end) for uid in uids]))


def wait_for_base(directory: Path) -> None:
    """Until the catalog's first base is whole: its threads write it beside the commits."""
    while not (directory / "catalog" / "00000001.base").exists():
        continue


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Path]:
    """A directory as a killed process leaves it: copied while the store is open."""
    store = open_store(tmp_path / "live")
    keep(store, Changes(models=[make_model()]))
    commit(store, 1, 2, 3)
    commit(store, 2, log_end=7)
    keep(store, Changes(deleted_session_uids=[make_session(3).uid]))
    wait_for_base(tmp_path / "live")
    shutil.copytree(tmp_path / "live", tmp_path / "killed")
    yield tmp_path / "killed"
    store.close()


def raw_of(directory: Path) -> dict[bytes, bytes]:
    """Every record."""
    store = RocksDbMetadata(directory / "metadata")
    try:
        return dict(store.raw())
    finally:
        store.close()


def test_what_is_whole_opens(stored: Path) -> None:
    """A kill loses nothing, and nothing is taken for a loss."""
    store = open_store(stored)
    found = {record.uid[-1]: record.log_end for record in store.sessions()}
    store.close()

    assert found == {1: 0, 2: 7}


def test_a_deleted_log_is_refused(stored: Path) -> None:
    """RocksDB opens without its log and says nothing; the witness does."""
    for log in (stored / "metadata").glob("*.log"):
        log.unlink()
    with pytest.raises(CorruptMetadata, match="commits 1 to 5 were on disk and are gone"):
        open_store(stored)


def test_an_older_copy_is_refused(stored: Path) -> None:
    """Metadata put back from an earlier day misses what came later."""
    store = open_store(stored)
    store.close()
    shutil.copytree(stored / "metadata", stored / "older")
    store = open_store(stored)
    commit(store, 9)
    store.close()
    shutil.rmtree(stored / "metadata")
    (stored / "older").rename(stored / "metadata")
    with pytest.raises(CorruptMetadata, match="commits 6 to 6 were on disk"):
        open_store(stored)


@pytest.mark.parametrize("damage", ["none", "log", "base and log"])
def test_a_catalog_without_metadata_is_refused(stored: Path, damage: str) -> None:
    """Also without a witness, and when the catalog is damaged.

    Nothing is written over what may be all there is.
    """
    shutil.rmtree(stored / "metadata")
    (stored / "WITNESS").unlink()
    for kind in ("log", "base"):
        if kind in damage:
            (stored / "catalog" / f"00000001.{kind}").write_bytes(b"?" * 100)
    before = {path.name: path.read_bytes() for path in (stored / "catalog").iterdir()}
    with pytest.raises(CorruptMetadata, match=r"gone"):
        open_store(stored)

    assert {path.name: path.read_bytes() for path in (stored / "catalog").iterdir()} == before


def test_a_first_start_that_was_cut_off_is_no_loss(tmp_path: Path) -> None:
    """The catalog is begun before the first commit: that there is none yet is no reason to refuse."""
    store = open_store(tmp_path / "live")
    wait_for_base(tmp_path / "live")
    shutil.copytree(tmp_path / "live" / "catalog", tmp_path / "killed" / "catalog")
    store.close()
    again = open_store(tmp_path / "killed")
    commit(again, 1)
    again.close()

    assert (tmp_path / "killed" / "catalog" / "00000002.base").exists()


@pytest.mark.parametrize("loss", ["gone", "old", "back"])
def test_a_session_that_is_gone_old_or_back_is_refused(stored: Path, loss: str) -> None:
    """The last commit's number is right, and one record is not what it was: a table went missing."""
    store = open_store(stored)
    store.begin()
    number = {"gone": 1, "old": 2, "back": 3}[loss]
    key = records.session_key(make_session(number).uid)
    if loss == "gone":
        store.database.delete(key)
    else:
        store.database.put(key, records.encode_session(make_session(number)))
    store.close()
    store = open_store(stored)
    with pytest.raises(CorruptMetadata, match="sessions are"):
        list(store.sessions())
    store.close()


def test_the_catalog_has_every_commit_after_a_kill(stored: Path) -> None:
    """Deletions and replacements included: it says what the database says."""
    contents = read_catalog(stored / "catalog", INSTANCE)

    assert contents.records == raw_of(stored)
    assert (contents.sequence, contents.problems) == (5, [])


def test_the_catalog_goes_on_over_runs_and_rotations(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was cut off is left as it is until the next commit; after an end in order the log goes on.

    Past its limit a base takes its place.
    """
    open_store(stored).close()
    untouched = sorted(path.name for path in (stored / "catalog").iterdir())
    store = open_store(stored)
    commit(store, 3)
    store.close()
    before = sorted(path.name for path in (stored / "catalog").iterdir())
    store = open_store(stored)
    commit(store, 4)
    store.close()
    after = sorted(path.name for path in (stored / "catalog").iterdir())
    monkeypatch.setattr(catalogs, "LOG_LIMIT_BYTES", 1)
    store = open_store(stored)
    slot = Slot(0, 4096, 8192)
    keep(store, Changes(quarantined=[slot]))
    commit(store, *range(5, 25))
    commit(store, 25)
    store.close()
    contents = read_catalog(stored / "catalog", INSTANCE)

    assert untouched == ["00000001.base", "00000001.log"]
    assert before == after == ["00000002.base", "00000002.log"]
    assert [path.name for path in (stored / "catalog").iterdir() if path.stem > "00000002"]
    assert contents.records == raw_of(stored)
    assert contents.problems == []


def test_another_stores_files_are_not_believed(stored: Path) -> None:
    """Catalog and witness of another data directory say nothing about this one."""
    contents = read_catalog(stored / "catalog", "ff00")

    assert contents.records == {}
    assert contents.problems
    assert Witness([stored], "ff00").sequence == 0


def test_a_damaged_witness_is_said(stored: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The other of its two places still counts."""
    path = stored / "WITNESS"
    raw = bytearray(path.read_bytes())
    raw[4096 + 20] ^= 1
    path.write_bytes(raw)
    witness = Witness([stored], INSTANCE)
    witness.close()

    assert witness.sequence == 4
    assert "witness_damaged" in caplog.text


def test_a_commit_does_not_wait_for_a_directory_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other directories have the witness; the late file has the last word it was told once it answers."""
    for name in ("hung", "there"):
        (tmp_path / name).mkdir()
    directories = [tmp_path / "hung", tmp_path / "there"]
    witness = Witness(directories, INSTANCE, patience_s=0.05)
    witness.begin()
    device = HungDevice(str(tmp_path / "hung" / "WITNESS"), ("pwrite",))
    with device.hung(monkeypatch):
        for sequence in (1, 2, 3):
            witness.note(sequence)
        came_count = device.waiting_count
        noted = [Witness([path], INSTANCE).sequence for path in directories]
        device.answer()
        while Witness([tmp_path / "hung"], INSTANCE).sequence < 1:
            continue
        # The write is there a moment before its thread says so.
        while Witness([tmp_path / "hung"], INSTANCE).sequence < 4:
            witness.note(4)
    witness.close()

    assert came_count == 1
    assert noted == [0, 3]
    assert caplog.text.count("witness_late") == 1


def test_a_witness_on_the_stores_own_device_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread that notes: a device that hangs has the store itself as well."""
    (tmp_path / "ssd").mkdir()
    writers: list[int] = []
    pwrite = os.pwrite

    def noticed(fd: int, data: bytes, offset: int) -> int:
        writers.append(threading.get_ident())
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", noticed)
    witness = Witness([tmp_path / "ssd"], INSTANCE, beside=tmp_path)
    witness.begin()
    for sequence in (1, 2, 3):
        witness.note(sequence)
    witness.close()

    assert writers == [threading.get_ident()] * 3
    assert Witness([tmp_path / "ssd"], INSTANCE).sequence == 3


def test_a_torn_catalog_ends_before_the_tear(stored: Path) -> None:
    """Commits before the damage of a log count, and the rest is named."""
    path = stored / "catalog" / "00000001.log"
    path.write_bytes(path.read_bytes()[:-3])
    contents = read_catalog(stored / "catalog", INSTANCE)

    assert contents.sequence == 4
    assert "damaged or torn" in contents.problems[0]
