"""The catalog on a device that refuses or takes less: it gives up with a log line, and never tears an entry."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ctxcache.metadata import catalog as catalogs
from ctxcache.metadata.catalog import Catalog, read_catalog

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
