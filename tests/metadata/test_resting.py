"""A metadata store that finds no descriptor, no inode or no room.

A rest, after which it goes on by itself.
"""

import gc
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from metadata_contract import make_segment, make_session

from ctxcache.errors import CapacityExceeded, TierFailure
from ctxcache.storage.metadata import reading, records, rocksdb, shortages
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata

MANY = 5000
NO_ROOM = "IO error: No space left on device: While appending to file: 000004.log"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables so small that the log is soon followed by the next one; no pause between two looks."""
    monkeypatch.setattr(reading, "MEMTABLE_BYTES", 64 << 10)
    monkeypatch.setattr(rocksdb, "REOPEN_PAUSE_S", 0)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing in this process can be opened meanwhile."""
    # Files that other tests left open in a circle of objects would be closed in the middle, and make room.
    gc.collect()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(
        resource.RLIMIT_NOFILE,
        (max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 8, limits[1]),
    )
    try:
        with suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def until_refused(store: RocksDbMetadata) -> int:
    """Record sessions until one is refused; how many were acknowledged."""
    for i in range(MANY):
        try:
            await store.commit(Changes(sessions=[make_session(i)]), is_durable=i % 8 == 0)
        except TierFailure:
            return i
    raise AssertionError("nothing was refused")


def sessions_of(path: Path) -> list[Any]:
    """The sessions that the next process finds."""
    store = RocksDbMetadata(path)
    try:
        return sorted(store.sessions(), key=lambda session: session.uid)
    finally:
        store.close()


async def test_a_store_that_lacked_descriptors_takes_changes_again(tmp_path: Path) -> None:
    """By itself, when there are some.

    All that was acknowledged is there, and what was refused meanwhile is too, once.
    """
    store = RocksDbMetadata(tmp_path / "metadata")
    with no_descriptors():
        count = await until_refused(store)
        for changes in (
            Changes(sessions=[make_session(MANY)]),
            Changes(deleted_session_uids=[make_session(0).uid], segments=[make_segment(1), make_segment(2)]),
            Changes(deleted_segment_ids=[make_segment(2).segment_id]),
        ):
            with pytest.raises(TierFailure, match="Too many open files"):
                await store.commit(changes, is_durable=True)
        with pytest.raises(TierFailure):
            store.check(is_growing=False)
        assert store.is_fenced
        assert "resting" in store.problem
        assert not await store.reopen()

    assert await store.reopen()
    assert (store.is_fenced, store.problem, store.reopened_count) == (False, "", 1)
    assert await store.recorded_slots() == {make_segment(1).slot}
    await store.commit(Changes(sessions=[make_session(MANY + 1)]), is_durable=True)
    store.close()
    expected = [make_session(i) for i in (*range(1, count + 1), MANY, MANY + 1)]
    assert sessions_of(tmp_path / "metadata") == sorted(expected, key=lambda session: session.uid)


@pytest.fixture
def few_inodes(tmp_path: Path) -> Iterator[Path]:
    """A small filesystem that counts its inodes."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,nr_inodes=128", "none", str(place)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("THIS NEEDS root: no filesystem could be mounted")
    yield place
    subprocess.run(["umount", place], check=True)


async def test_a_store_without_inodes_takes_changes_again(few_inodes: Path) -> None:
    """Commits that grow are refused before RocksDB runs into the limit; what runs into it passes."""
    store = RocksDbMetadata(few_inodes / "metadata")
    taken = few_inodes / "taken"
    taken.mkdir()
    with suppress(OSError):
        for i in range(MANY):
            (taken / str(i)).touch()
    with pytest.raises(CapacityExceeded, match="inodes"):
        store.check()
    store.check(is_growing=False)
    count = await until_refused(store)
    assert "No space left" in store.problem
    assert not await store.reopen()

    for file in taken.iterdir():
        file.unlink()
    assert await store.reopen()
    store.check()
    store.close()
    assert len(sessions_of(few_inodes / "metadata")) == count + 1


class Lying:
    """A database of which one write says that it failed."""

    def __init__(self, database: Any, *, does_write: bool) -> None:
        self._database, self._does_write = database, does_write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def write(self, batch: Any) -> None:
        """See Rdict."""
        if self._does_write:
            self._database.write(batch)
        raise OSError(NO_ROOM)


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_write_that_may_be_there_is_there_once(tmp_path: Path, *, is_there: bool) -> None:
    """Whether it was or not: its record, the count of commits and what a restart makes of them agree."""
    store: Any = RocksDbMetadata(tmp_path / "metadata")
    await store.commit(Changes(sessions=[make_session(1)]), is_durable=True)
    store.database = Lying(store.database, does_write=is_there)
    with pytest.raises(TierFailure, match="No space left"):
        await store.commit(Changes(sessions=[make_session(2)]), is_durable=True)

    assert await store.reopen()
    await store.commit(Changes(deleted_session_uids=[make_session(1).uid]), is_durable=True)
    store.close()
    assert sessions_of(tmp_path / "metadata") == [make_session(2)]


async def test_what_is_another_after_a_rest_stays_refused(tmp_path: Path) -> None:
    """A database that lost or gained a session meanwhile is not gone on with."""
    store: Any = RocksDbMetadata(tmp_path / "metadata")
    await store.commit(Changes(sessions=[make_session(1), make_session(2)]), is_durable=True)
    store.database = Lying(store.database, does_write=False)
    with pytest.raises(TierFailure):
        await store.commit(Changes(sessions=[make_session(3)]), is_durable=True)
    store.database.delete(records.session_key(make_session(1).uid))

    assert not await store.reopen()
    assert "was acknowledged" in store.problem
    assert not await store.reopen()
    store.close()


def test_only_what_lacked_passes() -> None:
    """A device's refusal does not, nor a sync that found no room: it says nothing of what was written."""
    assert shortages.is_passing(NO_ROOM)
    assert shortages.is_passing("IO error: While open a file for appending: Too many open files")
    assert not shortages.is_passing("IO error: While fdatasync: 000004.log: No space left on device")
    assert not shortages.is_passing("IO error: While appending to file: Input/output error")
