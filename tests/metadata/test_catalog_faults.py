"""The catalog on a device that refuses or takes less: it gives up with a log line, and never tears an entry."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

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
