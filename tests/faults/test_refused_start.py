"""What is refused is as it was: real programs over a store whose files are damaged one by one."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ctxcache.cli.failures import ExitCode
from tests.faults.harness import Unsupported
from tests.faults.refusals import Files, files_of
from tests.faults.shortages import small_disk
from tests.faults.test_golden_directory import golden, server, wrong_sessions
from tests.golden.make_directory import SSD_NAMES
from tests.server_process import COMMAND_LINE, ServerDidNotStart

__all__ = ["golden"]


@pytest.fixture
def stopped(golden: Path) -> Path:
    """The golden directory as this version leaves it."""
    (golden / "data" / "CLOCK").unlink()
    with server(golden, *SSD_NAMES) as running:
        running.terminate()
    return golden


def files(stored: Path) -> Files:
    """What is in the directories; beside them a server under test leaves its output."""
    return {path: found for path, found in files_of(stored).items() if path.parts[0] in ("data", *SSD_NAMES)}


def cut_manifest(stored: Path) -> Path:
    """Cut the manifest in half."""
    (path,) = (stored / "data" / "metadata").glob("MANIFEST-*")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def lose_current(stored: Path) -> Path:
    """Remove the file that names the manifest."""
    path = stored / "data" / "metadata" / "CURRENT"
    path.unlink()
    return path


def run(command: str, stored: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the directories of a server that does not run."""
    directories = [part for name in SSD_NAMES for part in ("--ssd-directories", str(stored / name))]
    words = [*COMMAND_LINE, command, "--data-directory", str(stored / "data"), *directories, *options]
    return subprocess.run(words, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("damage", [cut_manifest, lose_current])
def test_a_refused_start_leaves_everything_as_it_was(stopped: Path, damage: object, tmp_path: Path) -> None:
    """Twice, as a supervisor tries; then the file is put back, and every session is there."""
    assert callable(damage)
    shutil.copytree(stopped, tmp_path / "whole")
    path = damage(stopped)
    before = files(stopped)
    verified = [run("verify", stopped) for _ in range(2)]
    after_verify = files(stopped)
    for _ in range(2):
        with pytest.raises(ServerDidNotStart) as refused:
            server(stopped, *SSD_NAMES).start()
        assert refused.value.returncode == ExitCode.DATA_LOSS
    after_start = files(stopped)
    shutil.copy2(tmp_path / "whole" / path.relative_to(stopped), path)
    with server(stopped, *SSD_NAMES) as running:
        wrong = wrong_sessions(running)

    assert [ran.returncode for ran in verified] == [ExitCode.DATA_LOSS] * 2, verified[0].stderr
    assert after_verify == before
    assert after_start == before
    assert wrong == []


def test_neither_catalog_nor_metadata_is_no_circle(stopped: Path) -> None:
    """The start advises a rebuild; the rebuild advises something else, and has changed nothing."""
    cut_manifest(stopped)
    shutil.rmtree(stopped / SSD_NAMES[0] / "catalog")
    before = files(stopped)
    with pytest.raises(ServerDidNotStart, match="`ctxcache rebuild` makes it anew"):
        server(stopped, *SSD_NAMES).start()
    ran = run("rebuild", stopped)

    assert ran.returncode == ExitCode.DATA_LOSS
    assert "ctxcache rebuild" not in ran.stderr
    assert "put back a copy" in ran.stderr
    assert files(stopped) == before


def test_a_rebuild_keeps_a_catalog_that_was_read_in_part(stopped: Path) -> None:
    """The next run begins another one: what could not be read may be all there is of some sessions."""
    (log,) = (stopped / SSD_NAMES[0] / "catalog").glob("*.log")
    log.write_bytes(log.read_bytes()[:-3])
    kept = {path.name: path.read_bytes() for path in log.parent.iterdir()}
    shutil.rmtree(stopped / "data" / "metadata")
    ran = run("rebuild", stopped)
    with server(stopped, *SSD_NAMES) as running:
        running.terminate()
    beside = log.parent.with_name("catalog.damaged-1")

    assert ran.returncode == ExitCode.OK, ran.stderr
    assert {path.name: path.read_bytes() for path in beside.iterdir()} == kept


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A small filesystem."""
    try:
        with small_disk(tmp_path / "small", tmp_path / "image"):
            yield tmp_path / "small"
    except Unsupported as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("left_bytes", [0, 512 << 10])
def test_a_start_on_a_full_disk_says_what_to_free(stopped: Path, small: Path, left_bytes: int) -> None:
    """Of the records' filesystem; with that much room the same start succeeds, and nothing is missing."""
    shutil.copytree(stopped / "data", small / "data")
    shutil.rmtree(stopped / "data")
    (stopped / "data").symlink_to(small / "data")
    ballast = small / "ballast"
    fill(ballast, left_bytes)
    before = files(small)
    for _ in range(2):
        with pytest.raises(ServerDidNotStart, match=r"no room in metadata .*: 1\.\d MiB needed") as refused:
            server(stopped, *SSD_NAMES).start()
        assert refused.value.returncode == ExitCode.RESOURCE_EXHAUSTED
    after = files(small)
    ballast.unlink()
    with server(stopped, *SSD_NAMES) as running:
        wrong = wrong_sessions(running)

    assert after == before
    assert wrong == []


def fill(ballast: Path, left_bytes: int) -> None:
    """Take all room but so much."""
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 512):
            with suppress(OSError):
                while file.write(bytes(size)):
                    continue
        file.truncate(max(0, file.tell() - left_bytes))
