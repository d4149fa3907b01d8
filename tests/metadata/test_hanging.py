"""A metadata store whose device does not answer: nobody waits for it longer than a bound, and the loop never.

The log is a full pipe meanwhile: a write of it does not return until somebody reads.
"""

import asyncio
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from metadata_contract import make_session

from ctxcache.errors import TierFailure
from ctxcache.runtime.mounts import Mount
from ctxcache.storage.metadata import reading, rocksdb, shortages
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata

HANG_AFTER_S = 0.3
PATIENCE_S = 25.0
PIPE_BYTES = 4096


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between two looks at whether the device answers."""
    monkeypatch.setattr(rocksdb, "REOPEN_PAUSE_S", 0)


@contextmanager
def hanging_log(path: Path) -> Iterator[Callable[[], None]]:
    """Writes of the open log of the store at `path` hang; what is yielded lets them return."""
    links = {int(name): Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208
    fd = next(
        fd
        for fd, link in links.items()
        if link.is_symlink() and re.match(f"{path}/.*log$", str(link.readlink()))
    )
    kept, (pipe_out, pipe_in) = os.dup(fd), os.pipe()
    fcntl.fcntl(pipe_in, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    os.write(pipe_in, bytes(PIPE_BYTES))
    os.dup2(pipe_in, fd)
    reader = threading.Thread(target=lambda: _drain(pipe_out), daemon=True)

    def answer() -> None:
        os.dup2(kept, fd)
        reader.start()

    try:
        yield answer
    finally:
        if not reader.ident:
            answer()
        os.close(pipe_in)
        reader.join(PATIENCE_S)
        os.close(kept)


def _drain(pipe_out: int) -> None:
    while os.read(pipe_out, PIPE_BYTES):
        pass
    os.close(pipe_out)


def session(i: int) -> Changes:
    """The changes that make a session."""
    return Changes(sessions=[make_session(i)])


async def until_open(store: RocksDbMetadata) -> None:
    """Wait until it takes changes again."""
    end_s = time.monotonic() + PATIENCE_S
    while not await store.reopen():
        assert time.monotonic() < end_s, store.problem
        await asyncio.sleep(0.01)


async def until_returned(store: RocksDbMetadata) -> None:
    """Wait until the device has returned the thread that hung."""
    end_s = time.monotonic() + PATIENCE_S
    while store._writer.is_owed:
        assert time.monotonic() < end_s
        await asyncio.sleep(0.01)


def uids_of(path: Path) -> list[bytes]:
    """The sessions that the next process finds."""
    store = RocksDbMetadata(path)
    try:
        return sorted(session.uid for session in store.sessions())
    finally:
        store.close()


@pytest.mark.parametrize("is_durable", [False, True])
async def test_commits_are_refused_in_time_and_taken_again_afterwards(
    tmp_path: Path, *, is_durable: bool
) -> None:
    """The loop goes on meanwhile; what was wanted recorded is recorded once the device has answered."""
    store = RocksDbMetadata(tmp_path / "metadata", hang_after_s=HANG_AFTER_S)
    await store.commit(session(0), is_durable=True)
    with hanging_log(tmp_path / "metadata") as answer:
        changes = [session(1), session(2), session(3), Changes(deleted_session_uids=[make_session(1).uid])]
        commits = [asyncio.create_task(store.commit(each, is_durable=is_durable)) for each in changes]
        turn_count = 0
        while not all(commit.done() for commit in commits):
            await asyncio.sleep(0.001)
            turn_count += 1
        assert turn_count > 1
        for commit in commits:
            with pytest.raises(TierFailure, match="has not answered for"):
                commit.result()
        with pytest.raises(TierFailure):
            store.check(is_growing=False)
        with pytest.raises(TierFailure):
            await store.commit(Changes(deleted_session_uids=[make_session(2).uid]), is_durable=is_durable)
        assert store.is_fenced
        assert not await store.reopen()
        answer()
        await until_open(store)

    assert (store.problem, store.reopened_count) == ("", 1)
    await store.commit(session(4), is_durable=True)
    store.close()
    assert uids_of(tmp_path / "metadata") == sorted(make_session(i).uid for i in (0, 3, 4))


async def test_the_end_does_not_wait_for_the_device(tmp_path: Path) -> None:
    """Neither for the commit that hangs, nor for the one behind it; both were acknowledged to nobody."""
    store = RocksDbMetadata(tmp_path / "metadata", hang_after_s=HANG_AFTER_S)
    await store.commit(session(0), is_durable=True)
    with hanging_log(tmp_path / "metadata"):
        commits = [asyncio.create_task(store.commit(session(i), is_durable=True)) for i in (1, 2)]
        await asyncio.sleep(0)
        store.close()
        outcomes = await asyncio.gather(*commits, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [TierFailure, TierFailure]
    await until_returned(store)
    # The files are closed now, and not at some time during another test.
    reading.release(store.database)


async def test_a_caller_that_goes_takes_nobody_along(tmp_path: Path) -> None:
    """A commit whose caller does not wait any more is in the log with those of the others, in order."""
    store = RocksDbMetadata(tmp_path / "metadata")
    commits = [asyncio.create_task(store.commit(session(i), is_durable=True)) for i in range(6)]
    await asyncio.sleep(0)
    for commit in commits[::2]:
        commit.cancel()
    outcomes = await asyncio.gather(*commits, return_exceptions=True)
    assert [outcome for outcome in outcomes if outcome is None] == [None] * 3
    store.close()
    assert uids_of(tmp_path / "metadata") == sorted(make_session(i).uid for i in range(6))


class LateSync:
    """A database whose next sync takes long, and then fails as the device says."""

    def __init__(self, database: Any, error: Exception) -> None:
        self.may_end = threading.Event()
        self._database, self._error = database, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)

    def flush_wal(self, *, sync: bool) -> None:
        """See Rdict."""
        self._database.flush_wal(sync=sync)
        if sync:
            self.may_end.wait(PATIENCE_S)
            raise self._error


async def test_a_sync_that_fails_late_fences(tmp_path: Path) -> None:
    """The device was given up, which passes; then it says that it lost what was written, which does not."""
    store: Any = RocksDbMetadata(tmp_path / "metadata", hang_after_s=HANG_AFTER_S)
    await store.commit(session(0), is_durable=True)
    store.database = late = LateSync(store.database, OSError("IO error: While fdatasync: Input/output error"))
    with pytest.raises(TierFailure, match="has not answered for"):
        await store.commit(session(1), is_durable=True)
    assert "resting" in store.problem
    late.may_end.set()
    end_s = time.monotonic() + PATIENCE_S
    while "fenced" not in store.problem:
        assert time.monotonic() < end_s, store.problem
        await asyncio.sleep(0.01)
    assert "Input/output error" in store.problem
    assert not await store.reopen()
    store.close()


async def test_a_remote_filesystem_that_does_not_say_how_full_it_is_delays_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure of the start counts until it answers, and it is asked once meanwhile."""
    answer, asked = threading.Event(), 0
    statvfs = os.statvfs

    def hangs(path: str) -> os.statvfs_result:
        nonlocal asked
        asked += 1
        assert answer.wait(PATIENCE_S)
        return statvfs(path)

    monkeypatch.setattr(shortages, "mount_of", lambda _: Mount("nfs4"))
    store = RocksDbMetadata(tmp_path, hang_after_s=HANG_AFTER_S)
    monkeypatch.setattr(os, "statvfs", hangs)

    store.check()
    store.check()
    answer.set()
    await until_returned(store)
    store.close()

    assert asked == 1
