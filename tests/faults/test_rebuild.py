"""Metadata deleted or refused is made anew: from the golden directory, whose every row is known."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ctxcache.errors import CorruptMetadata
from ctxcache.rebuild import Rebuilt, rebuild
from ctxcache.scan import scan
from tests.faults.test_golden_directory import golden, server, wrong_sessions
from tests.golden.make_directory import SSD_NAMES
from tests.server_process import COMMAND_LINE, ServerDidNotStart

__all__ = ["golden"]


@pytest.fixture
def stored(golden: Path) -> Path:
    """The golden directory as this version leaves it."""
    with server(golden, *SSD_NAMES) as running:
        running.terminate()
    return golden


def made_anew(stored: Path, *, is_dry_run: bool = False) -> Rebuilt:
    """Rebuild in this process; the directories in the wrong order."""
    directories = [stored / name for name in reversed(SSD_NAMES)]
    return rebuild(stored / "data", directories, created_by="a test", is_dry_run=is_dry_run)


@pytest.mark.parametrize("lost", ["metadata", "."])
def test_all_comes_back_without_metadata(stored: Path, lost: str) -> None:
    """Every session with its name, its model, its rows, its truncation; the deleted one stays deleted.

    Also when nothing but the SSD directories is left.
    """
    shutil.rmtree(stored / "data" / lost)
    with pytest.raises(ServerDidNotStart, match=r"gone.*; `ctxcache rebuild` makes it anew"):
        server(stored, *SSD_NAMES).start()
    foreseen = made_anew(stored, is_dry_run=True)
    found = made_anew(stored)
    with server(stored, *SSD_NAMES) as running:
        wrong = wrong_sessions(running)

    assert wrong == []
    assert (found.session_count, found.lost_token_count, found.is_complete) == (5, 0, True)
    assert foreseen.token_count == found.token_count == 388


def test_a_server_does_it_at_the_start_where_it_is_told_to(stored: Path) -> None:
    """With the setting the refusal becomes a rebuild; the command tells the same beforehand."""
    for name in ("CURRENT", "RUNS"):
        where = stored / "data" / ("metadata" if name == "CURRENT" else "")
        (where / name).unlink()
    command = [
        *COMMAND_LINE,
        "rebuild",
        "--dry-run",
        "--output",
        "json",
        "--data-directory",
        str(stored / "data"),
    ]
    command += [part for name in SSD_NAMES for part in ("--ssd-directories", str(stored / name))]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    again = server(stored, *SSD_NAMES)
    again._options = (*again._options, "--rebuild-metadata", "true")
    with again:
        wrong = wrong_sessions(again)

    assert wrong == []
    assert "metadata_rebuilt" in again.stderr
    assert (said["token_count"], said["is_dry_run"], said["is_complete"]) == (388, True, True)
    assert (stored / "data" / "metadata.damaged-1").is_dir()


def test_what_is_torn_is_left_out_and_counted(stored: Path) -> None:
    """A session ends before the first segment that is not whole; the others have all they had."""
    path = stored / SSD_NAMES[0] / "segments.dat"
    victim = next(
        f for f in scan(path) if f.header.identity.begin == 64 and f.header.identity.token_count == 64
    )
    with path.open("r+b") as file:
        file.seek(victim.offset_bytes + victim.header.layout.offsets[2])
        file.write(b"\xff" * 64)
    shutil.rmtree(stored / "data" / "metadata")
    found = made_anew(stored)

    assert found.lost_segment_count == 1
    assert 0 < found.lost_token_count < 200
    assert found.token_count + found.lost_token_count == 388


def test_without_a_catalog_there_is_nothing_to_make_it_from(stored: Path) -> None:
    """It is said, and nothing is touched."""
    shutil.rmtree(stored / SSD_NAMES[0] / "catalog")
    with pytest.raises(CorruptMetadata, match="has no base that is whole"):
        made_anew(stored)

    assert sorted(path.name for path in (stored / "data" / "metadata").glob("CURRENT")) == ["CURRENT"]


def test_a_header_without_its_rows_is_no_place(stored: Path) -> None:
    """A slot that was given back and is somebody else's by now may still begin as it did."""
    path = stored / SSD_NAMES[-1] / "segments.dat"
    every = [found for name in SSD_NAMES for found in scan(stored / name / "segments.dat")]
    size_bytes = path.stat().st_size
    with path.open("r+b") as file:
        for i, found in enumerate(every, 1):
            file.seek(size_bytes - i * found.header.layout.size_bytes)
            file.write(found.header.encode())
    shutil.rmtree(stored / "data" / "metadata")
    rebuilt = made_anew(stored)
    with server(stored, *SSD_NAMES) as running:
        wrong = wrong_sessions(running)

    assert wrong == []
    assert rebuilt.is_complete
