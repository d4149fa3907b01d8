"""SSD directories by the numbers that they carry."""

import errno
import itertools
from pathlib import Path

import pytest

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable
from ctxcache.ssd_directories import in_order, instance_id_of


@pytest.fixture
def made(tmp_path: Path) -> list[Path]:
    """Three directories in use, and the data directory, whose id is `ours`."""
    paths = [tmp_path / name for name in "abc"]
    for path in (*paths, tmp_path / "data", tmp_path / "d"):
        path.mkdir()
    in_order(tmp_path / "data", "ours", paths)
    return paths


def test_any_order_is_the_first_one(tmp_path: Path, made: list[Path]) -> None:
    """Records name a directory by its number."""
    orders = {in_order(tmp_path / "data", "ours", order) for order in itertools.permutations(made)}

    assert orders == {tuple(made)}
    assert instance_id_of(made[1]) == "ours"


def test_a_new_directory_comes_last(tmp_path: Path, made: list[Path]) -> None:
    """Wherever it is named, and for good."""
    ordered = in_order(tmp_path / "data", "ours", [tmp_path / "d", *made])
    again = in_order(tmp_path / "data", "ours", [made[2], tmp_path / "d", *made[:2]])

    assert ordered == again == (*made, tmp_path / "d")


@pytest.mark.parametrize("missing", range(3))
def test_a_missing_directory_is_refused(tmp_path: Path, made: list[Path], missing: int) -> None:
    """Also when another one was given in its place."""
    rest = [path for i, path in enumerate(made) if i != missing]
    for given in (rest, [*rest, tmp_path / "d"]):
        with pytest.raises(
            DataDirectoryUnusable, match=f"number {missing}, last at {made[missing]}, is missing"
        ):
            in_order(tmp_path / "data", "ours", given)

    assert not (tmp_path / "d" / "DEVICE").exists()


def test_somebody_elses_directory_is_refused(tmp_path: Path, made: list[Path]) -> None:
    """Its bytes are another server's."""
    (tmp_path / "other").mkdir()
    with pytest.raises(DataDirectoryUnusable, match=r"belongs to another data directory \(ours\)"):
        in_order(tmp_path / "other", "theirs", made)


def test_a_copy_is_refused(tmp_path: Path, made: list[Path]) -> None:
    """Two directories cannot have one number."""
    (tmp_path / "d" / "DEVICE").write_bytes((made[0] / "DEVICE").read_bytes())
    with pytest.raises(DataDirectoryUnusable, match="the same SSD directory"):
        in_order(tmp_path / "data", "ours", [*made, tmp_path / "d"])


def test_a_damaged_number_is_refused(tmp_path: Path, made: list[Path]) -> None:
    """It is not guessed from the others."""
    (made[0] / "DEVICE").write_text('{"instance_id": "ours", "index": 1}')
    with pytest.raises(CorruptMetadata, match="DEVICE"):
        in_order(tmp_path / "data", "ours", made)


def test_a_lost_number_comes_back_by_its_path(
    tmp_path: Path, made: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The data directory knows where it was; that it was lost is logged."""
    (made[1] / "DEVICE").unlink()
    ordered = in_order(tmp_path / "data", "ours", [made[1], made[2], made[0]])

    assert ordered == tuple(made)
    assert "device_file_missing" in caplog.text


def test_a_damaged_list_is_made_anew(
    tmp_path: Path, made: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Each directory says its number itself."""
    (tmp_path / "data" / "PATHS").write_text("{")
    ordered = in_order(tmp_path / "data", "ours", made[::-1])

    assert ordered == tuple(made)
    assert "paths_file_corrupt" in caplog.text


def test_a_list_that_cannot_be_read(
    tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that refuses is said with the file's name, not a traceback."""
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "PATHS":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataDirectoryUnusable, match="PATHS"):
        in_order(tmp_path / "data", "ours", made)
