"""SSD directories by the numbers that they carry."""

import errno
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable
from ctxcache.storage.ssd_directories import in_order, instance_id_of, look, write_down


def numbered(data_directory: Path, directories: Sequence[Path]) -> tuple[Path, ...]:
    """Order them as a start does, for good."""
    ordered = in_order(data_directory, "ours", directories)
    for path in ordered:
        (path / "segments.dat").touch()
    write_down(data_directory, "ours", ordered)
    return ordered


@pytest.fixture
def made(tmp_path: Path) -> list[Path]:
    """Three directories in use, and the data directory, whose id is `ours`."""
    paths = [tmp_path / name for name in "abc"]
    for path in (*paths, tmp_path / "data", tmp_path / "d"):
        path.mkdir()
    numbered(tmp_path / "data", paths)
    return paths


def test_any_order_is_the_first_one(tmp_path: Path, made: list[Path]) -> None:
    """Records name a directory by its number."""
    orders = {in_order(tmp_path / "data", "ours", order) for order in itertools.permutations(made)}

    assert orders == {tuple(made)}
    assert instance_id_of(made[1]) == "ours"


def test_a_new_directory_comes_last(tmp_path: Path, made: list[Path]) -> None:
    """Wherever it is named, and for good."""
    ordered = numbered(tmp_path / "data", [tmp_path / "d", *made])
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


def test_what_is_named_twice_is_refused(tmp_path: Path) -> None:
    """Also by another name, and before it is there: it must not get two numbers."""
    (tmp_path / "data").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "a")
    for second in (tmp_path / "a", tmp_path / "alias"):
        with pytest.raises(DataDirectoryUnusable, match="named twice"):
            in_order(tmp_path / "data", "ours", [tmp_path / "a", second])


def test_a_number_is_given_when_everything_else_went_well(tmp_path: Path, made: list[Path]) -> None:
    """Looking at a new directory does not make it one that may not be missing.

    The start may yet be refused.
    """
    in_order(tmp_path / "data", "ours", [*made, tmp_path / "d"])

    assert in_order(tmp_path / "data", "ours", made) == tuple(made)


def test_a_number_that_another_server_has_given_meanwhile_stays(tmp_path: Path) -> None:
    """The second of two first starts on one SSD directory does not own it."""
    (tmp_path / "a").mkdir()
    for name in ("mine", "theirs"):
        (tmp_path / name).mkdir()
    ordered = in_order(tmp_path / "mine", "mine", [tmp_path / "a"])
    write_down(tmp_path / "theirs", "theirs", in_order(tmp_path / "theirs", "theirs", [tmp_path / "a"]))
    with pytest.raises(DataDirectoryUnusable, match="belongs to another data directory"):
        write_down(tmp_path / "mine", "mine", ordered)

    assert instance_id_of(tmp_path / "a") == "theirs"


def test_a_filesystem_that_is_not_mounted_is_refused(tmp_path: Path, made: list[Path]) -> None:
    """A directory that was in use and is empty now would cost sessions their tokens at the first read.

    Or not be there.
    """
    for path in made[1].iterdir():
        path.unlink()
    with pytest.raises(DataDirectoryUnusable, match="was SSD directory number 1 and is empty: mount"):
        in_order(tmp_path / "data", "ours", made)
    made[1].rmdir()
    with pytest.raises(DataDirectoryUnusable, match="was SSD directory number 1 and is empty: mount"):
        in_order(tmp_path / "data", "ours", made)

    assert not made[1].exists()


def test_a_disk_that_is_gone_for_good_is_replaced_on_purpose(tmp_path: Path, made: list[Path]) -> None:
    """The file that the refusal names says that it is meant."""
    for path in made[1].iterdir():
        path.unlink()
    (made[1] / "segments.dat").touch()

    assert in_order(tmp_path / "data", "ours", made) == tuple(made)


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


@pytest.mark.parametrize("missing", range(3))
def test_a_directory_that_may_be_missing_keeps_its_number(
    tmp_path: Path, made: list[Path], missing: int
) -> None:
    """Not mounted, removed or not named: the others are where they were, and nothing is made in its place."""
    (tmp_path / "away").mkdir()
    sizes = [100 * (i + 1) for i in range(3)]
    for path, size_bytes in zip(made, sizes, strict=True):
        (path / "segments.dat").write_bytes(bytes(size_bytes))
    write_down(tmp_path / "data", "ours", made)
    made[missing].rename(tmp_path / "away" / "it")
    rest = [path for i, path in enumerate(made) if i != missing]
    for is_empty, given in ((False, made), (False, rest), (True, made)):
        if is_empty:
            made[missing].mkdir()
        found = look(tmp_path / "data", "ours", [*given, tmp_path / "d"], may_be_absent=True)
        write_down(tmp_path / "data", "ours", [each.path for each in found[:3]], absent={missing})

        assert [each.path for each in found] == [*made, tmp_path / "d"]
        assert [bool(each.absence) for each in found] == [i == missing for i in range(3)] + [False]
        assert found[missing].size_bytes == sizes[missing]
    assert list(made[missing].iterdir()) == []
    made[missing].rmdir()
    (tmp_path / "away" / "it").rename(made[missing])
    assert in_order(tmp_path / "data", "ours", made) == tuple(made)


def test_that_all_are_missing_is_refused(tmp_path: Path, made: list[Path]) -> None:
    """There is nothing to serve from, and no telling whether these were the right names."""
    for path in made:
        path.rename(tmp_path / f"away-{path.name}")
    with pytest.raises(DataDirectoryUnusable, match="every SSD directory is missing"):
        look(tmp_path / "data", "ours", made, may_be_absent=True)


def test_somebody_elses_directory_is_refused_where_ours_may_be_missing(
    tmp_path: Path, made: list[Path]
) -> None:
    """Its bytes are another server's, whatever this one is told."""
    (made[1] / "DEVICE").unlink()
    numbered_by_others = in_order(tmp_path / "d", "theirs", [made[1]])
    write_down(tmp_path / "d", "theirs", numbered_by_others)
    with pytest.raises(DataDirectoryUnusable, match="belongs to another data directory"):
        look(tmp_path / "data", "ours", made, may_be_absent=True)


@pytest.mark.parametrize("may_be_absent", [False, True])
def test_without_its_list_an_empty_directory_is_not_taken_for_a_new_one(
    tmp_path: Path, made: list[Path], *, may_be_absent: bool
) -> None:
    """It may be the place of one that is not mounted: its number would go to an empty file."""
    (tmp_path / "data" / "PATHS").unlink()
    for path in made[2].iterdir():
        path.unlink()
    with pytest.raises(DataDirectoryUnusable, match="PATHS is lost"):
        look(tmp_path / "data", "ours", made, may_be_absent=may_be_absent)
