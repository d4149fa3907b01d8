"""The catalog on a device that refuses or takes less: it gives up with a log line, and never tears an entry."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from ctxcache.metadata import catalog as catalogs
from ctxcache.metadata.catalog import Catalog
from ctxcache.metadata.catalog_contents import END, pack, pack_mark, read_catalog

INSTANCE_ID = "00" * 16


def no_records() -> Iterator[tuple[bytes, bytes]]:
    """The store was empty."""
    return iter(())


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """A catalog with one entry."""
    made = Catalog(tmp_path, INSTANCE_ID)
    made.begin(0, no_records)
    made.append([(b"s/one", b"1")], 1)
    return made


def test_a_device_that_takes_less_than_it_is_given(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest follows: what comes behind it can be read."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[:7]))
    catalog.append([(b"s/two", b"2" * 50)], 2)
    catalog.append([(b"s/three", b"3")], 3)
    catalog.close(3)
    monkeypatch.undo()

    contents = read_catalog(tmp_path, INSTANCE_ID)
    assert contents.records == {
        b"s/one": b"1", b"s/two": b"2" * 50, b"s/three": b"3",
    }  # fmt: skip
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
    """Though no other follows it: a deletion must not come back because a server had nothing to do after it."""
    synced = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.set())
    monkeypatch.setattr(catalogs, "SYNC_INTERVAL_S", 0.5)
    catalog.append([(b"s/two", b"2")], 2)
    first = synced.wait(30)
    synced.clear()
    catalog.append([(b"s/one", None)], 3)
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
    catalog.append([(b"s/two", b"2")], 2)
    hangs.wait()
    for sequence in range(3, 100):
        catalog.append([(b"s/two", b"2")], sequence)
    links = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    goes_on.set()
    catalog.close(99)

    assert links.count(str(tmp_path / "00000001.log")) <= 3


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


def test_a_commit_takes_effect_whole_or_not_at_all(catalog: Catalog, tmp_path: Path) -> None:
    """Wherever the power cut tore the log: a truncation without what it freed would be half of a commit."""
    pairs = [[(b"s/a", b"%d" % i), (b"s/b", b"%d" % i)] for i in range(4)]
    for sequence, entries in enumerate(pairs, 2):
        catalog.append(entries, sequence)
    catalog.close(5)
    path = tmp_path / "00000001.log"
    whole = path.read_bytes()
    found = set()
    for size_bytes in range(len(whole) + 1):
        path.write_bytes(whole[:size_bytes])
        contents = read_catalog(tmp_path, INSTANCE_ID)
        found.add((contents.sequence, contents.records.get(b"s/a"), contents.records.get(b"s/b")))

    assert found == {(0, None, None), (1, None, None)} | {
        (2 + i, b"%d" % i, b"%d" % i) for i in range(4)
    }  # fmt: skip


def run(directory: Path, begin: int, *commits: tuple[int, bytes], is_cut: bool = False) -> None:
    """One run over a catalog: commits of one record, the base of the first one unwritten where it is cut off."""
    made = Catalog(directory, INSTANCE_ID)
    made.begin(begin, no_records)
    for sequence, key in commits:
        made.append([(key, b"%d" % sequence)], sequence)
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
