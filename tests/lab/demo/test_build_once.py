"""A built directory is whole or absent, whatever happens to those who build it."""

import multiprocessing
from pathlib import Path

import pytest

from lab.demo.building import build_once


def _write(directory: Path) -> None:
    (directory / "file").write_text("whole")


def test_a_second_call_does_not_build_again(tmp_path: Path) -> None:
    """A file that is there is returned as it is."""
    target = build_once(tmp_path / "model", _write)

    again = build_once(tmp_path / "model", lambda _: pytest.fail("built twice"))

    assert again == target
    assert (again / "file").read_text() == "whole"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """The error passes through and neither the target nor a partial directory stays."""

    def fail(directory: Path) -> None:
        _write(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", fail)

    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


def test_what_an_interrupted_build_left_is_ignored_and_removed(tmp_path: Path) -> None:
    """A partial directory of a dead process is never taken for the target."""
    abandoned = tmp_path / "model.partial-abc"
    abandoned.mkdir()
    (abandoned / "file").write_text("half")

    target = build_once(tmp_path / "model", _write)

    assert (target / "file").read_text() == "whole"
    assert not abandoned.exists()


def _build_and_count(cache: Path) -> None:
    def build(directory: Path) -> None:
        with (cache / "count").open("a") as count:
            count.write("built\n")
        _write(directory)

    build_once(cache / "model", build)


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    """The lock lets one process build; the others find its work."""
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_build_and_count, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert (tmp_path / "count").read_text() == "built\n"
