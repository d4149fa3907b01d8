"""Default sizes, from what the machine has and what is there."""

from pathlib import Path

import pytest

from ctxcache.settings import sizes


@pytest.mark.parametrize(("present_bytes", "expected_bytes"), [(8192, 8192), (8193, 12288), (1, 4096)])
def test_a_file_that_is_there_keeps_its_size(tmp_path: Path, present_bytes: int, expected_bytes: int) -> None:
    """In whole pages: what cut it short between two of them does not keep a server from starting."""
    (tmp_path / "file").write_bytes(bytes(present_bytes))

    assert sizes.ssd_bytes(tmp_path, "file") == expected_bytes


def test_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    """A start that was killed or refused before it had allocated anything leaves one."""
    (tmp_path / "file").touch()

    assert sizes.ssd_bytes(tmp_path, "file") >= sizes.LEAST_BYTES
