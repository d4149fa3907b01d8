"""`ctxcache verify`, of a running server and of a directory without one."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import ctxcache
from ctxcache.client.types import Durability
from ctxcache.storage.scan import scan
from tests.faults.blocks import SPACE, KeptBlocks
from tests.faults.refusals import files_of
from tests.faults.test_golden_directory import golden, server
from tests.golden.make_directory import SSD_NAMES
from tests.server_process import COMMAND_LINE

__all__ = ["golden"]


def verify(*options: str) -> tuple[int, dict[str, Any]]:
    """Run the command; returns its exit code and what it found."""
    ran = subprocess.run(
        [*COMMAND_LINE, "verify", "--output", "json", *options], check=False, capture_output=True, text=True
    )
    if not ran.stdout:
        pytest.fail(ran.stderr)
    return ran.returncode, json.loads(ran.stdout)


def stopped(golden: Path) -> list[str]:
    """Options that name the directories of a server that does not run."""
    directories = [part for name in SSD_NAMES for part in ("--ssd-directories", str(golden / name))]
    return ["--data-directory", str(golden / "data"), *directories]


def damage(golden: Path) -> Path:
    """Damage a chunk of s2's second segment; the file that it is in."""
    path = golden / SSD_NAMES[1] / "segments.dat"
    listed = [f for f in scan(path) if (f.header.identity.begin, f.header.identity.token_count) == (128, 22)]
    with path.open("r+b") as file:
        file.seek(listed[0].offset_bytes + listed[0].header.layout.offsets[1])
        file.write(b"\xff" * 64)
    return path


def check_named(bad: dict[str, Any], path: Path) -> None:
    """Assert that it is said whose rows are bad, which, and where they lie."""
    assert (bad["sessions"], bad["problem"]) == (["sessions/s2"], "layer 0 hidden: checksum does not match")
    assert (bad["position_begin"], bad["position_end"], bad["path"]) == (128, 150, str(path))


def test_damage_is_found_without_a_server(golden: Path) -> None:
    """As by one; but nothing is changed, so that it is found again."""
    path = damage(golden)
    before = files_of(golden)
    first, again = verify(*stopped(golden)), verify(*stopped(golden))

    assert first[0] == 8
    (bad,) = first[1]["bad"]
    check_named(bad, path)
    assert first[1]["sessions"] == [
        {
            "session": "sessions/s2",
            "tenant": bad["tenant"],
            "bad_segment_count": 1,
            "mended_segment_count": 0,
            "bad_token_count": 22,
            "position_begin": 128,
            "position_end": 150,
            "problem": f"on SSD: {bad['problem']}",
        }
    ]
    assert again == first
    assert files_of(golden) == before


def test_damage_is_found_by_a_server(golden: Path) -> None:
    """A bad segment is listed once, with session and positions, and the exit code is that of DATA_LOSS."""
    offline = stopped(golden)
    whole = verify(*offline)
    path = damage(golden)
    with server(golden, *SSD_NAMES) as running:
        online = verify("--target", running.target, "--rate-limit", "100MiB")
        stats = subprocess.run(
            [*COMMAND_LINE, "stats", "--output", "json", "--target", running.target],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        released = verify("--target", running.target, "--release")
        running.terminate()
    again = verify(*offline)

    assert (whole[0], whole[1]["bad"]) == (0, [])
    assert online[0] == 8
    (bad,) = online[1]["bad"]
    check_named(bad, path)
    assert json.loads(stats)["quarantined_slot_count"] == 1
    assert (released[0], released[1]["released_slot_count"]) == (0, 1)
    assert (again[0], again[1]["bad"]) == (0, [])


def test_what_a_cut_file_has_no_more_is_lost(golden: Path) -> None:
    """A start ends the sessions there before anything is verified: both ways to verify tell of them."""
    path = golden / SSD_NAMES[1] / "segments.dat"
    listed = [f for f in scan(path) if (f.header.identity.begin, f.header.identity.token_count) == (128, 22)]
    os.truncate(path, listed[0].offset_bytes)
    before = files_of(golden)
    offline = verify(*stopped(golden))
    unchanged = files_of(golden)
    with server(golden, *SSD_NAMES) as running:
        online = verify("--target", running.target)
        again = verify("--target", running.target)
        running.terminate()

    for code, told in (offline, online):
        assert code == 8
        assert told["lost_segment_count"] == len(told["bad"]) > 0
        cut = [bad for bad in told["bad"] if bad["sessions"] == ["sessions/s2"]]
        assert [(bad["position_begin"], bad["path"]) for bad in cut] == [(128, str(path))]
    assert unchanged == before
    assert (again[0], again[1]["bad"]) == (0, [])


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """A misspelt path is refused: a store that has just been made would be whole, and says nothing."""
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "missing", tmp_path / "empty"):
        ran = subprocess.run(
            [*COMMAND_LINE, "verify", "--data-directory", str(path)],
            check=False,
            capture_output=True,
            text=True,
            env=os.environ | {"CTXCACHE_SSD_SIZE_BYTES": "1MiB"},
        )

        assert (ran.returncode, ran.stdout) == (9, "")
        assert "there is no data directory to verify" in ran.stderr

    assert sorted(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_a_damaged_block_is_found_and_named(golden: Path) -> None:
    """A server that reads it has a miss from then on."""
    kept = KeptBlocks(20_000)
    with server(golden, *SSD_NAMES) as running, ctxcache.connect(running.target) as client:
        client.blocks.put(SPACE, {kept.key(1): kept.data(1)}, durability=Durability.DISK)
        running.terminate()
    paths = [golden / name / "segments.dat" for name in SSD_NAMES]
    [(path, found)] = [
        (path, found) for path in paths for found in scan(path) if found.header.layout.is_block
    ]
    with path.open("r+b") as file:
        file.seek(found.offset_bytes + found.header.layout.offsets[0] + 99)
        file.write(b"?????")
    first, again = verify(*stopped(golden)), verify(*stopped(golden))
    with server(golden, *SSD_NAMES) as running, ctxcache.connect(running.target) as client:
        client.blocks.load(SPACE, [kept.key(1)])
        [state] = [one.state.name for one in client.blocks.look_up(SPACE, [kept.key(1)])]

    assert first[0] == 8
    (bad,) = first[1]["bad"]
    (name,) = bad["sessions"]
    assert name.startswith("blocks/")
    assert name.endswith(kept.key(1).hex())
    assert (again, state) == (first, "MISS")
