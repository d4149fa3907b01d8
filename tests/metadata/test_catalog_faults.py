"""The catalog on a device that refuses or takes less.

It gives up with a log line, and never tears an entry.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hung_device import HungDevice
from metadata_contract import make_session
from xxhash import xxh3_64_intdigest

from ctxcache.errors import TierFailure
from ctxcache.storage.metadata import catalog as catalogs
from ctxcache.storage.metadata import rocksdb
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.catalog import END, Catalog, CatalogContents, pack, pack_mark, read_catalog
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata

INSTANCE_ID = "00" * 16
MOST_LOOKS = 100


def no_records() -> Iterator[tuple[bytes, bytes]]:
    """The store was empty."""
    return iter(())


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """A catalog with one entry."""
    made = Catalog(tmp_path, INSTANCE_ID)
    made.begin(0, no_records)
    made.append([([(b"s/one", b"1")], 1)])
    return made


def test_a_device_that_takes_less_than_it_is_given(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest follows: what comes behind it can be read."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[:7]))
    catalog.append([([(b"s/two", b"2" * 50)], 2)])
    catalog.append([([(b"s/three", b"3")], 3)])
    catalog.close(3)
    monkeypatch.undo()

    contents = read_catalog(tmp_path, INSTANCE_ID)
    assert contents.records == {
        b"s/one": b"1",
        b"s/two": b"2" * 50,
        b"s/three": b"3",
    }
    assert contents.sequence == 3


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_device_that_refuses_the_end_mark(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Closing says so in the log and is done: the store itself has everything."""

    def refuse(_fd: int, _data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "write", refuse)
    catalog.close(1)

    assert "catalog_failed" in caplog.text


def test_the_last_commit_is_synced_too(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no other follows it.

    A deletion must not come back because a server had nothing to do after it.
    """
    synced = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.set())
    monkeypatch.setattr(catalogs, "SYNC_INTERVAL_S", 0.5)
    catalog.append([([(b"s/two", b"2")], 2)])
    first = synced.wait(30)
    synced.clear()
    catalog.append([([(b"s/one", None)], 3)])
    last = synced.wait(30)
    catalog.close(3)

    assert (first, last) == (True, True)


def test_a_device_that_hangs_costs_few_descriptors(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Syncs do not pile up behind one that does not return."""
    goes_on, hangs = threading.Event(), threading.Event()

    def hang(_fd: int) -> None:
        hangs.set()
        goes_on.wait()

    monkeypatch.setattr(os, "fdatasync", hang)
    monkeypatch.setattr(catalogs, "SYNC_INTERVAL_S", 0)
    catalog.append([([(b"s/two", b"2")], 2)])
    hangs.wait()
    for sequence in range(3, 100):
        catalog.append([([(b"s/two", b"2")], sequence)])
    links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    goes_on.set()
    catalog.close(99)

    assert links.count(str(tmp_path / "00000001.log")) <= 3


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDevice]:
    """The device of the catalog's first log, whose writes hang from now on."""
    device = HungDevice(str(tmp_path / "00000001.log"), ("write",))
    with device.hung(monkeypatch):
        yield device


@pytest.fixture
def impatient(tmp_path: Path) -> Catalog:
    """A catalog with one commit, which waits for a device no longer than a moment."""
    made = Catalog(tmp_path, INSTANCE_ID, hang_after_s=0.05)
    made.begin(0, no_records)
    made.append([([(b"s/one", b"1")], 1)])
    while not read_catalog(tmp_path, INSTANCE_ID).records or made.is_base_due:
        continue
    return made


def read_beside(directory: Path) -> CatalogContents:
    """As it is while a thread removes logs that a base has replaced: listed again where one was removed."""
    for _ in range(MOST_LOOKS):
        with suppress(FileNotFoundError):
            contents = read_catalog(directory, INSTANCE_ID)
            if not contents.problems:
                return contents
    return read_catalog(directory, INSTANCE_ID)


@pytest.mark.parametrize("is_beside", [False, True])
async def test_a_commit_returns_when_the_catalog_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_beside: bool
) -> None:
    """Durable or not: what is acknowledged is there after the death of the process.

    Through its first log, and through those that follow on it.
    """
    monkeypatch.setattr(catalogs, "LOG_LIMIT_BYTES", 4096)
    beside = tmp_path if is_beside else None
    made = Catalog(tmp_path / "catalog", INSTANCE_ID, beside=beside)
    store = RocksDbMetadata(tmp_path / "metadata", catalog=made)
    for uid in range(1, 100):
        await store.commit(Changes(sessions=[make_session(uid)]), is_durable=uid % 10 == 0)
        assert read_beside(tmp_path / "catalog").sequence == store.commit_count
    store.close()
    contents = read_catalog(tmp_path / "catalog", INSTANCE_ID)
    assert (contents.sequence, len(contents.records), contents.problems) == (99, 99, [])
    assert max(catalogs.numbers(tmp_path / "catalog", "log")) > 1


async def test_on_the_device_of_the_store_its_thread_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first commit, with which a run begins: two hand-overs fewer."""
    threads: list[str] = []
    write_all = catalogs._write_all

    def noted(fd: int, data: bytes) -> None:
        threads.append(threading.current_thread().name)
        write_all(fd, data)

    monkeypatch.setattr(catalogs, "_write_all", noted)
    made = Catalog(tmp_path / "catalog", INSTANCE_ID, beside=tmp_path)
    store = RocksDbMetadata(tmp_path / "metadata", catalog=made)
    for uid in range(1, 5):
        await store.commit(Changes(sessions=[make_session(uid)]), is_durable=uid % 2 == 0)
    store.close()

    assert threads == ["catalog-0", *["metadata-log-0"] * 3, "catalog-0"]


def test_the_threads_keep_the_order_of_commits(catalog: Catalog, tmp_path: Path) -> None:
    """The thread of the store's log waits for what the catalog's own thread has yet to write."""
    catalog.is_beside = True
    may_go_on = threading.Event()
    own: Any = catalog.writer
    own.submit(may_go_on.wait)
    catalog.append([([(b"s/two", b"2")], 2)])
    beside = catalog.beside([([(b"s/three", b"3")], 3)])
    assert beside
    writing = threading.Thread(target=beside.write)
    writing.start()
    writing.join(0.05)
    may_go_on.set()
    writing.join()
    catalog.noted(beside, 3)
    catalog.close(3)
    contents = read_catalog(tmp_path, INSTANCE_ID)

    assert (contents.sequence, len(contents.records), contents.problems) == (3, 3, [])


async def test_the_catalog_lacks_what_was_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that fails to sync a commit does not write it down a second time."""
    made = Catalog(tmp_path / "catalog", INSTANCE_ID, beside=tmp_path)
    store = RocksDbMetadata(tmp_path / "metadata", catalog=made)
    await store.commit(Changes(sessions=[make_session(1)]), is_durable=True)

    def refuse() -> None:
        raise OSError(errno.EIO, "IO error: While fdatasync: Input/output error")

    monkeypatch.setattr(store, "sync_log", refuse)
    with pytest.raises(TierFailure):
        await store.commit(Changes(sessions=[make_session(2)]), is_durable=True)
    monkeypatch.undo()
    store.close()
    contents = read_catalog(tmp_path / "catalog", INSTANCE_ID)

    assert (contents.sequence, len(contents.records), contents.problems) == (1, 1, [])


async def test_a_round_that_was_given_up_is_not_written_down_late(tmp_path: Path) -> None:
    """Behind the end mark the next run would go on with a commit that the store may lack."""
    loop = asyncio.get_running_loop()
    made = Catalog(tmp_path / "catalog", INSTANCE_ID, beside=tmp_path)
    store: Any = RocksDbMetadata(tmp_path / "metadata", catalog=made, hang_after_s=0.05)
    await store.commit(Changes(sessions=[make_session(1)]), is_durable=True)
    may_end, sync = threading.Event(), store.sync_log
    returned = asyncio.Event()
    store.sync_log = lambda: (may_end.wait(), sync())
    with pytest.raises(TierFailure, match="has not answered for"):
        await store.commit(Changes(sessions=[make_session(2)]), is_durable=True)
    store._failure = None
    may_end.set()
    # One thread, in order: this is behind what was given up.
    store._writer.submit(lambda: loop.call_soon_threadsafe(returned.set))
    await returned.wait()
    contents = read_catalog(tmp_path / "catalog", INSTANCE_ID)
    store.close()

    assert (contents.sequence, len(contents.records), contents.problems) == (1, 1, [])


async def test_on_the_device_of_the_store_a_write_that_hangs_is_the_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit is refused in time; when the device has answered, both have all of it."""
    monkeypatch.setattr(rocksdb, "REOPEN_PAUSE_S", 0)
    made = Catalog(tmp_path / "catalog", INSTANCE_ID, beside=tmp_path)
    store = RocksDbMetadata(tmp_path / "metadata", catalog=made, hang_after_s=0.05)
    for uid in (1, 2):
        await store.commit(Changes(sessions=[make_session(uid)]), is_durable=True)
    device = HungDevice(str(tmp_path / "catalog" / "00000001.log"), ("write",))
    with device.hung(monkeypatch):
        with pytest.raises(TierFailure, match="has not answered for"):
            await store.commit(Changes(sessions=[make_session(3)]), is_durable=True)
        assert not await store.reopen()
        device.answer()
        # Patient from here on: a slow machine is no hang.
        store.patience_s = made.hang_after_s = 600.0
        while not await store.reopen():  # noqa: ASYNC110  # nothing tells that the device has answered
            await asyncio.sleep(0.01)
    await store.commit(Changes(sessions=[make_session(4)]), is_durable=True)
    records = dict(store.raw())
    store.close()
    contents = read_catalog(tmp_path / "catalog", INSTANCE_ID)

    assert (len(records), contents.records, contents.problems) == (4, records, [])


async def test_a_write_that_hangs_is_given_up_by_all_who_wait(
    impatient: Catalog, hanging: HungDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop goes on meanwhile; later commits do not wait for what is lost."""
    waiting = []
    for sequence in (2, 3, 4):
        impatient.append([([(b"s/two", b"%d" % sequence)], sequence)])
        # A write that its thread has not begun would be dropped, and hang nobody.
        hanging.came.wait()
        waiting.append(asyncio.create_task(impatient.wait(impatient.last_write)))
    await asyncio.gather(*waiting)
    impatient.append([([(b"s/two", b"5")], 5)])
    assert impatient.last_write
    is_waited_for = not impatient.last_write.done()
    hanging.answer()
    impatient.close(5)

    assert not is_waited_for
    assert hanging.waiting_count == 1
    assert caplog.text.count("catalog_failed") == 1


async def test_after_a_hang_the_catalog_begins_anew(
    impatient: Catalog, hanging: HungDevice, tmp_path: Path
) -> None:
    """With a base of all records, once the device has returned the write.

    The missing part is named until then.
    """
    impatient.append([([(b"s/two", b"2")], 2)])
    hanging.came.wait()
    await impatient.wait(impatient.last_write)
    impatient.append([([(b"s/three", b"3")], 3)])
    impatient._snapshot = lambda: iter([(b"s/one", b"1"), (b"s/two", b"2"), (b"s/three", b"3")])
    hanging.answer()
    # Patient from here on: a slow machine is no hang.
    impatient.hang_after_s = 600.0
    sequence = 3
    while not (tmp_path / "00000002.base").exists():
        sequence += 1
        impatient.append([([(b"s/late", b"%d" % sequence)], sequence)])
        await impatient.wait(impatient.last_write)
    impatient.close(sequence)
    contents = read_catalog(tmp_path, INSTANCE_ID)

    assert contents.problems == []
    assert contents.sequence == sequence
    assert contents.records.keys() == {b"s/one", b"s/two", b"s/three", b"s/late"}


async def test_no_end_is_marked_behind_commits_that_are_missing(
    impatient: Catalog, hanging: HungDevice, tmp_path: Path
) -> None:
    """The next run must not go on in a log that lacks commits, though the device has answered by the end."""
    impatient.append([([(b"s/two", b"2")], 2)])
    hanging.came.wait()
    await impatient.wait(impatient.last_write)
    impatient.append([([(b"s/three", b"3")], 3)])
    hanging.answer()
    while impatient.writer.is_owed:
        continue
    impatient.close(3)
    again = Catalog(tmp_path, INSTANCE_ID)
    again.begin(3, lambda: iter([(b"s/one", b"1"), (b"s/two", b"2"), (b"s/three", b"3")]))
    again.append([([(b"s/four", b"4")], 4)])
    again.close(4)
    contents = read_catalog(tmp_path, INSTANCE_ID)

    assert (contents.sequence, len(contents.records), contents.problems) == (4, 4, [])


def test_an_end_does_not_wait_for_a_write_that_hangs(
    impatient: Catalog, hanging: HungDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """The damage was not noticed before: the end comes all the same."""
    impatient.append([([(b"s/two", b"2")], 2)])
    hanging.came.wait()
    impatient.close(2)

    assert hanging.is_hung
    assert "the end has waited" in caplog.text


def test_commits_that_nobody_waits_for_do_not_pile_up(
    impatient: Catalog, hanging: HungDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers that went away leave their commits behind.

    With so many bytes the device counts as one that hangs.
    """
    monkeypatch.setattr(catalogs, "BACKLOG_LIMIT_BYTES", 1000)
    for sequence in range(2, 100):
        impatient.append([([(b"s/two", bytes(100))], sequence)])
    hanging.answer()
    impatient.close(99)

    assert "bytes of commits wait for it" in caplog.text
    assert hanging.waiting_count <= 2


def test_an_end_does_not_wait_for_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that is being written at its leisure is finished at once when the store is closed."""
    monkeypatch.setattr(catalogs, "_PAUSE_SHARE", 1e9)
    made = Catalog(tmp_path, INSTANCE_ID)
    made.begin(0, lambda: ((b"s/%d" % i, b"v") for i in range(5000)))
    closing = threading.Thread(target=made.close, args=(0,), daemon=True)
    closing.start()
    closing.join(30)

    assert not closing.is_alive()
    assert len(read_catalog(tmp_path, INSTANCE_ID).records) == 5000


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_commit_takes_effect_whole_or_not_at_all(catalog: Catalog, tmp_path: Path, at_once: int) -> None:
    """Wherever the power cut tore the log: a truncation without what it freed would be half of a commit.

    Also where commits share a write.
    """
    pairs = [[(b"s/a", b"%d" % i), (b"s/b", b"%d" % i)] for i in range(4)]
    commits = [(entries, sequence) for sequence, entries in enumerate(pairs, 2)]
    for begin in range(0, len(commits), at_once):
        catalog.append(commits[begin : begin + at_once])
    catalog.close(5)
    path = tmp_path / "00000001.log"
    whole = path.read_bytes()
    found = set()
    for size_bytes in range(len(whole) + 1):
        path.write_bytes(whole[:size_bytes])
        contents = read_catalog(tmp_path, INSTANCE_ID)
        found.add((contents.sequence, contents.records.get(b"s/a"), contents.records.get(b"s/b")))

    assert found == {(0, None, None), (1, None, None)} | {(2 + i, b"%d" % i, b"%d" % i) for i in range(4)}


def run(directory: Path, begin: int, *commits: tuple[int, bytes], is_cut: bool = False) -> None:
    """One run over a catalog.

    Commits of one record, the base of the first one unwritten where it is cut off.
    """
    made = Catalog(directory, INSTANCE_ID)
    made.begin(begin, no_records)
    for sequence, key in commits:
        made.append([([(key, b"%d" % sequence)], sequence)])
    made.close(commits[-1][0])
    if is_cut:
        newest = max(directory.glob("*.log"))
        newest.write_bytes(newest.read_bytes()[:-24])


def test_commits_that_are_missing_between_two_logs_are_reported(tmp_path: Path) -> None:
    """A log that lost its end is followed by the next run's: what is between them was acknowledged."""
    run(tmp_path, 0, (1, b"s/1"), (2, b"s/2"), is_cut=True)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    run(tmp_path, 4, (5, b"s/5"))
    (tmp_path / "00000002.base").unlink()
    for path, raw in kept.items():
        path.write_bytes(raw)
    contents = read_catalog(tmp_path, INSTANCE_ID)

    assert contents.sequence == 5
    assert contents.records.keys() == {b"s/1", b"s/2", b"s/5"}
    assert ["commits 3 to 4 are missing" in problem for problem in contents.problems] == [True]


def test_commits_that_a_power_cut_took_back_do_not_come_again(tmp_path: Path) -> None:
    """The catalog may have had what the store had not: the next run went on without it."""
    run(tmp_path, 0, (1, b"s/1"), (2, b"s/2"), (3, b"s/3"), is_cut=True)
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    run(tmp_path, 1, (2, b"s/other"))
    (tmp_path / "00000002.base").unlink()
    for path, raw in kept.items():
        path.write_bytes(raw)
    contents = read_catalog(tmp_path, INSTANCE_ID)

    assert (sorted(contents.records), contents.sequence, contents.problems) == ([b"s/1", b"s/other"], 2, [])


def test_a_log_that_is_gone_is_reported(catalog: Catalog, tmp_path: Path) -> None:
    """The base alone is not all that there was."""
    catalog.close(1)
    (tmp_path / "00000001.log").unlink()

    assert "is gone" in read_catalog(tmp_path, INSTANCE_ID).problems[0]


def test_a_log_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Its commits had no marks; a run of this version goes on in it."""
    seed = xxh3_64_intdigest(INSTANCE_ID.encode())
    (tmp_path / "00000001.base").write_bytes(pack_mark(seed, 0, END))
    old = [(2, b"s/a", b"2"), (2, b"s/b", b"2"), (3, b"s/a", None), (3, b"", b"")]
    (tmp_path / "00000001.log").write_bytes(b"".join(pack(seed, *entry) for entry in old))
    before = read_catalog(tmp_path, INSTANCE_ID)
    run(tmp_path, 3, (4, b"s/c"))
    after = read_catalog(tmp_path, INSTANCE_ID)

    assert (before.records, before.sequence, before.problems) == ({b"s/b": b"2"}, 3, [])
    assert (after.records, after.sequence, after.problems) == ({b"s/b": b"2", b"s/c": b"4"}, 4, [])
    assert [path.name for path in tmp_path.glob("*.log")] == ["00000001.log"]
