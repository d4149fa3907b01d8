"""RocksDB under kills, refused syncs and damage on disk."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from metadata_contract import make_segment, make_session
from refused_syncs import refused_syncs
from rocksdict import Options, Rdict

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable, TierFailure
from ctxcache.storage.metadata import records
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata

RECORD_COUNT = 50
COMMITS_UNTIL_KILLED = """
import asyncio, sys
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from metadata_contract import make_segment

async def main():
    store = RocksDbMetadata(sys.argv[1])
    first, step = int(sys.argv[2]), 8
    for i in range(first, 1 << 40, step):
        ids = range(i, i + step)
        commits = (
            store.commit(Changes(segments=[make_segment(n)]), is_durable=sys.argv[3] == "durable")
            for n in ids
        )
        await asyncio.gather(*commits)
        print(i + step, flush=True)

asyncio.run(main())
"""
COMMITS_AT_ONCE = """
import asyncio, sys
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from metadata_contract import make_segment

async def main():
    store = RocksDbMetadata(sys.argv[1])
    changes = [Changes(segments=[make_segment(n)]) for n in range(500)]
    await asyncio.gather(*(store.commit(change, is_durable=True) for change in changes))

asyncio.run(main())
"""


# The processes find the tests' modules where this one does.
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def fill(path: Path, *, is_killed: bool = False) -> None:
    """Leave a store with 50 segments: in a table, as closing does, or in the log, as a kill does."""

    async def commit_all() -> None:
        store = RocksDbMetadata(path.with_suffix(".open"))
        for i in range(RECORD_COUNT):
            await store.commit(Changes(segments=[make_segment(i)]), is_durable=True)
        if is_killed:
            shutil.copytree(path.with_suffix(".open"), path)
        store.close()

    asyncio.run(commit_all())
    if not is_killed:
        path.with_suffix(".open").rename(path)


def newest(path: Path, pattern: str) -> Path:
    """Find the file of that name with the most in it."""
    return max(path.glob(pattern), key=lambda file: file.stat().st_size)


def read_all(path: Path) -> int:
    """Open, count the segments, close. Raises CorruptMetadata."""
    store = RocksDbMetadata(path)
    try:
        return len(list(store.segments()))
    finally:
        store.close()


@pytest.mark.parametrize("durability", ["durable", "logged"])
@pytest.mark.parametrize("kill_after", [1, 7, 40])
def test_acknowledged_commits_survive_kill_9(tmp_path: Path, kill_after: int, durability: str) -> None:
    """Acknowledged commits, synced or not, are there after a kill, three times in a row."""
    acknowledged = 0
    for _ in range(3):
        arguments = [
            sys.executable,
            "-c",
            COMMITS_UNTIL_KILLED,
            str(tmp_path / "metadata"),
            str(acknowledged),
            durability,
        ]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as writer:
            assert writer.stdout is not None
            for _ in range(kill_after):
                acknowledged = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)

        store = RocksDbMetadata(tmp_path / "metadata")
        ids = [segment.segment_id for segment in store.segments()]
        store.close()
        assert ids[:acknowledged] == list(range(acknowledged))
        acknowledged = len(ids)


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace: sharing of syncs is NOT checked")
def test_commits_at_once_share_their_syncs(tmp_path: Path) -> None:
    """Five hundred durable commits that come together cost a few syncs, not five hundred."""
    trace = tmp_path / "trace"
    command = ["strace", "-f", "-e", "trace=fdatasync", "-o", str(trace)]
    arguments = [*command, sys.executable, "-c", COMMITS_AT_ONCE, str(tmp_path / "metadata")]
    subprocess.run(arguments, check=True, env=ENVIRONMENT)
    syncs = [line for line in trace.read_text().splitlines() if "fdatasync(" in line]

    assert 0 < len(syncs) < 25


async def test_a_sync_that_runs_already_covers_no_later_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that comes while a sync runs waits for another one, begun after that, as do its neighbours."""
    store, sync = RocksDbMetadata(tmp_path / "metadata"), RocksDbMetadata.sync_log
    begun, may_end = threading.Event(), threading.Event()
    covered: list[int] = []

    def slow_sync(store: RocksDbMetadata) -> None:
        covered.append(store._written.sequence)
        begun.set()
        may_end.wait()
        sync(store)

    monkeypatch.setattr(RocksDbMetadata, "sync_log", slow_sync)
    commits = [asyncio.create_task(store.commit(Changes(segments=[make_segment(0)]), is_durable=True))]
    await asyncio.to_thread(begun.wait)
    changes = (Changes(segments=[make_segment(i)]) for i in (1, 2))
    commits += [asyncio.create_task(store.commit(each, is_durable=True)) for each in changes]
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not any(commit.done() for commit in commits)
    may_end.set()
    await asyncio.gather(*commits)
    assert covered == [1, 3]
    store.close()


def test_a_store_that_is_open_elsewhere_is_refused(tmp_path: Path) -> None:
    """Two processes never share a store, and the second is told why."""
    store = RocksDbMetadata(tmp_path / "metadata")
    other = RocksDbMetadata(tmp_path / "metadata")
    with pytest.raises(DataDirectoryUnusable, match="another process"):
        other.begin()
    other.close()
    store.close()


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace: a cut creation is NOT checked")
def test_a_creation_that_was_cut_off_is_begun_anew(tmp_path: Path) -> None:
    """A manifest that nothing names yet is no database that lost the file which does.

    The second file that RocksDB gives its name is the one that names the manifest.
    """
    kill = ["strace", "-f", "-o", os.devnull, "-e", "inject=rename:signal=KILL:when=2"]
    command = [*kill, sys.executable, "-c", COMMITS_AT_ONCE, str(tmp_path / "metadata")]
    killed = subprocess.run(command, check=False, env=ENVIRONMENT)
    left = [path.name for path in (tmp_path / "metadata").glob("[CM]*")]
    RocksDbMetadata(tmp_path / "metadata").close()

    assert killed.returncode != 0
    assert left == ["MANIFEST-000001"]


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """A file in the place of the directory is named, and left alone."""
    path = tmp_path / "metadata"
    path.write_text("mine")
    with pytest.raises(DataDirectoryUnusable, match="metadata"):
        RocksDbMetadata(path)

    assert path.read_text() == "mine"


@pytest.mark.parametrize("word", ["Corruption", "LOCK"])
def test_what_a_directory_is_called_is_no_reason(tmp_path: Path, word: str) -> None:
    """The refusal is the device's, whatever words are in the path that it names.

    Nothing is made anew for them.
    """
    path = tmp_path / word / "metadata"
    RocksDbMetadata(path).close()
    (path / "CURRENT").unlink()
    (path / "CURRENT").mkdir()
    with pytest.raises(DataDirectoryUnusable) as refused:
        RocksDbMetadata(path)

    assert "another process" not in str(refused.value)


async def test_a_refused_sync_fails_every_commit_that_waits_for_it(tmp_path: Path) -> None:
    """No commit that shares a failed sync is told that all is well."""
    store = RocksDbMetadata(tmp_path / "metadata")
    commits = [Changes(segments=[make_segment(i)]) for i in range(10)]
    with refused_syncs(f"{tmp_path}/metadata/.*log"):
        outcomes = await asyncio.gather(
            *(store.commit(changes, is_durable=True) for changes in commits), return_exceptions=True
        )

    assert [type(outcome) for outcome in outcomes] == [TierFailure] * 10
    store.close()


@pytest.mark.parametrize("flags", [(True, False), (False, True), (False, True, False), (True, False, False)])
async def test_a_durable_commit_is_synced_whatever_is_written_with_it(
    tmp_path: Path, flags: tuple[bool, ...]
) -> None:
    """Wherever it comes among those that share one write of the log."""
    store = RocksDbMetadata(tmp_path / "metadata")
    with refused_syncs(f"{tmp_path}/metadata/.*log"):
        # The log is written for the first one while the others come.
        commits = [
            store.commit(Changes(segments=[make_segment(i)]), is_durable=is_durable)
            for i, is_durable in enumerate((False, *flags))
        ]
        first, *others = await asyncio.gather(*commits, return_exceptions=True)

    assert first is None
    assert [type(outcome) for outcome in others] == [TierFailure] * len(flags)
    store.close()


async def test_a_store_stays_fenced_after_a_refused_sync(tmp_path: Path) -> None:
    """A later sync that would succeed is not asked: it says nothing of the writes that were lost."""
    store = RocksDbMetadata(tmp_path / "metadata")
    with refused_syncs(f"{tmp_path}/metadata/.*log"), pytest.raises(TierFailure):
        await store.commit(Changes(segments=[make_segment(1)]), is_durable=True)
    with pytest.raises(TierFailure, match="fenced"):
        await store.commit(Changes(), is_durable=True)
    with pytest.raises(TierFailure, match="fenced"):
        await store.commit(Changes(segments=[make_segment(2)]), is_durable=False)
    store.close()


async def test_a_sync_that_waited_behind_a_refused_one_is_not_tried(tmp_path: Path) -> None:
    """The device would say that all is well, of writes that are gone."""
    store = RocksDbMetadata(tmp_path / "metadata")
    with refused_syncs(f"{tmp_path}/metadata/.*log"), pytest.raises(TierFailure):
        await store.commit(Changes(segments=[make_segment(0)]), is_durable=True)
    with pytest.raises(TierFailure):
        store.sync_log()
    store.close()


async def test_closing_says_when_the_last_sync_is_refused(tmp_path: Path) -> None:
    """An orderly end that lost something is not silent, and still gives up the lock."""
    store = RocksDbMetadata(tmp_path / "metadata")
    await store.commit(Changes(segments=[make_segment(1)]), is_durable=False)
    with refused_syncs(f"{tmp_path}/metadata/.*log"), pytest.raises(TierFailure):
        store.close()

    RocksDbMetadata(tmp_path / "metadata").close()


async def test_acknowledged_commits_outlive_a_refused_sync(tmp_path: Path) -> None:
    """A restart after a fence finds everything that was acknowledged before it."""
    store = RocksDbMetadata(tmp_path / "metadata")
    await store.commit(Changes(segments=[make_segment(1)]), is_durable=True)
    with refused_syncs(f"{tmp_path}/metadata/.*log"), pytest.raises(TierFailure):
        await store.commit(Changes(segments=[make_segment(2)]), is_durable=True)
    store.close()

    again = RocksDbMetadata(tmp_path / "metadata")
    assert make_segment(1) in list(again.segments())
    again.close()


def test_damage_in_the_log_is_never_silent(tmp_path: Path) -> None:
    """A flipped bit anywhere in the log refuses the store, or costs no record at all."""
    fill(tmp_path / "whole", is_killed=True)
    log_bytes = newest(tmp_path / "whole", "*.log").stat().st_size
    refused = 0
    for position in range(3, log_bytes, log_bytes // 24):
        path = tmp_path / f"damaged-{position}"
        shutil.copytree(tmp_path / "whole", path)
        flip(newest(path, "*.log"), position)
        try:
            assert read_all(path) == RECORD_COUNT
        except CorruptMetadata:
            refused += 1

    assert refused > 20


def flip(file: Path, position: int) -> None:
    """Flip one bit."""
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def test_a_torn_end_of_the_log_costs_only_the_last_commit(tmp_path: Path) -> None:
    """A crash in the middle of a write, which nobody was told had happened, does not stop the server."""
    fill(tmp_path / "metadata", is_killed=True)
    log = newest(tmp_path / "metadata", "*.log")
    os.truncate(log, log.stat().st_size - 5)

    assert read_all(tmp_path / "metadata") == RECORD_COUNT - 1


def test_damage_in_a_table_is_never_silent(tmp_path: Path) -> None:
    """A scan that meets a damaged block raises; it does not end early as if there were no more."""
    fill(tmp_path / "metadata")
    table = newest(tmp_path / "metadata", "*.sst")
    flip(table, table.stat().st_size // 3)

    with pytest.raises(CorruptMetadata):
        read_all(tmp_path / "metadata")


async def test_a_scan_that_meets_damage_half_way_does_not_just_end(tmp_path: Path) -> None:
    """The blocks before are whole, opening reads none that is not: only the scan can tell."""
    path = tmp_path / "metadata"
    store = RocksDbMetadata(path)
    await store.commit(Changes(segments=[make_segment(i) for i in range(2000)]), is_durable=True)
    store.close()
    table = newest(path, "*.sst")
    flip(table, table.stat().st_size // 2)
    store = RocksDbMetadata(path)
    try:
        with pytest.raises(CorruptMetadata, match="block checksum"):
            list(store.segments())
    finally:
        store.close()


@pytest.mark.parametrize("pattern", ["CURRENT", "MANIFEST-*", "*.sst"])
def test_a_missing_file_is_corruption(tmp_path: Path, pattern: str) -> None:
    """A store that lost a file is refused; it is not created anew over what is left."""
    fill(tmp_path / "metadata")
    newest(tmp_path / "metadata", pattern).unlink()

    with pytest.raises(CorruptMetadata):
        read_all(tmp_path / "metadata")


def test_a_value_moved_to_another_key_is_corruption(tmp_path: Path) -> None:
    """RocksDB's own checksums do not know which value belongs to which key; ours do."""
    fill(tmp_path / "metadata")
    database = Rdict(str(tmp_path / "metadata"), Options(raw_mode=True))
    database[records.segment_key(1)] = database[records.segment_key(2)]
    database.close()

    with pytest.raises(CorruptMetadata, match="checksum"):
        read_all(tmp_path / "metadata")


async def test_one_kind_of_record_is_not_read_as_another(tmp_path: Path) -> None:
    """Scans keep to their prefix."""
    store = RocksDbMetadata(tmp_path / "metadata")
    await store.commit(Changes(sessions=[make_session()]), is_durable=False)

    assert not list(store.segments())
    assert not list(store.models())
    store.close()
