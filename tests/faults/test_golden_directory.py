"""A data directory of the first version: it opens, reads right, and is of this version afterwards."""

import json
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rocksdict import Options, Rdict

from ctxcache.client import CallerModel, Client
from ctxcache.errors import CorruptMetadata
from ctxcache.rebuild import rebuild
from tests.faults.planted import command as planted
from tests.faults.rows import rows_of
from tests.golden.make_directory import ARCHIVE, MODEL, SESSIONS, SSD_NAMES, SSD_SIZE_BYTES, STREAMS, owner_of
from tests.server_process import COMMAND_LINE, ServerDidNotStart, ServerProcess


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """The directory as it was when its server was killed."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def server(golden: Path, *names: str) -> ServerProcess:
    """A server over it, its SSD directories in this order."""
    ssd = [part for name in names for part in ("--ssd-directories", str(golden / name))]
    return ServerProcess(golden / "data", *ssd, "--ssd-size-bytes", str(SSD_SIZE_BYTES))


def wrong_sessions(running: ServerProcess) -> list[str]:
    """Read everything; return the sessions that are not what they were."""
    wrong = []
    with Client(running.target, access="remote") as client:
        found = {session.name.removeprefix("sessions/") for session in client.list_sessions()}
        for name, ranges in SESSIONS.items():
            indexes = [i for begin, end in ranges for i in range(begin, end)]
            with client.read(f"sessions/{name}", CallerModel(MODEL)) as rows:
                for spec in STREAMS:
                    whole = [
                        rows_of(owner_of(name, i), spec.stream, i, i + 1, spec.row_bytes) for i in indexes
                    ]
                    expected = np.concatenate(whole) if whole else np.zeros((0, spec.row_bytes), np.uint8)
                    got = rows.array(spec.stream) if indexes else expected
                    if not np.array_equal(got.view(np.uint8).reshape(expected.shape), expected):
                        wrong.append(f"{name} {spec.stream}")
    return wrong + sorted(found ^ set(SESSIONS))


def test_the_first_versions_directory_opens_reads_right_and_is_upgraded(golden: Path) -> None:
    """Every row is what was written, and stays so when its SSD directories are later given in another order."""
    with server(golden, *SSD_NAMES) as running:
        first = wrong_sessions(running)
        running.terminate()
    facts = json.loads((golden / "data" / "FORMAT").read_text())
    with server(golden, *reversed(SSD_NAMES)) as running:
        again = wrong_sessions(running)

    assert first == again == []
    assert (facts["format"], facts["created_by"]) == (2, "ctxcache 0.1.0")


@pytest.mark.parametrize("names", [SSD_NAMES[::-1], SSD_NAMES[1:]], ids=["reversed", "second alone"])
def test_another_order_than_the_first_version_had_is_refused(golden: Path, names: Sequence[str]) -> None:
    """It noted none, and this version's numbers are for good: what lies there tells. Nothing is changed."""
    before = raw_records(golden)
    with pytest.raises(ServerDidNotStart, match=r"it was SSD directory number [01] and is named") as caught:
        server(golden, *names).start()
    with pytest.raises(CorruptMetadata, match="no base that is whole"):
        rebuild(golden / "data", [golden / name for name in names], created_by="a test", is_dry_run=False)
    unchanged = raw_records(golden) == before
    facts = json.loads((golden / "data" / "FORMAT").read_text())
    with server(golden, *SSD_NAMES) as running:
        wrong = wrong_sessions(running)

    assert (caught.value.returncode, facts["format"], unchanged, wrong) == (9, 1, True, [])


def test_looking_at_a_first_versions_directory_leaves_it_to_that_version(golden: Path) -> None:
    """The doctor counts its sessions; a count kept in it would be wrong as soon as the first version goes on."""
    before = raw_records(golden)
    directories = [part for name in SSD_NAMES for part in ("--ssd-directories", str(golden / name))]
    command = [*COMMAND_LINE, "doctor", "--data-directory", str(golden / "data"), *directories]
    said = subprocess.run(command, check=False, capture_output=True, text=True).stdout

    assert f"RocksDB opens; {len(SESSIONS)} sessions" in said
    assert raw_records(golden) == before
    assert json.loads((golden / "data" / "FORMAT").read_text())["format"] == 1


def test_a_start_that_is_killed_leaves_one_format_or_the_other(golden: Path) -> None:
    """What only this version keeps up is not written before the first version is kept out."""
    kill = planted(["kill_at_start_record_write_before:1"])
    halfway = server(golden, *SSD_NAMES)
    halfway._program = kill
    with pytest.raises(ServerDidNotStart):
        halfway.start()
    halfway.close()
    facts = json.loads((golden / "data" / "FORMAT").read_text())
    with server(golden, *SSD_NAMES) as running:
        wrong = wrong_sessions(running)

    assert (facts["format"], wrong) == (2, [])


def raw_records(golden: Path) -> dict[bytes, bytes]:
    """Everything in the metadata, whatever it is."""
    database = Rdict(str(golden / "data" / "metadata"), Options(raw_mode=True))
    try:
        items = database.items()
        return {k: v for k, v in items if isinstance(k, bytes) and isinstance(v, bytes)}
    finally:
        database.close()


def test_a_missing_ssd_directory_is_refused(golden: Path) -> None:
    """Its sessions would be lost otherwise; the sentence says which one, and where it was."""
    with server(golden, *SSD_NAMES):
        pass
    with pytest.raises(ServerDidNotStart, match=r"number 1, last at .*ssd-b, is missing") as caught:
        server(golden, SSD_NAMES[0]).start()

    assert caught.value.returncode == 9


def test_a_missing_ssd_directory_is_refused_also_when_nobody_knows_of_it(golden: Path) -> None:
    """Without PATHS the records tell: no session loses tokens for a directory that was left out."""
    with server(golden, *SSD_NAMES) as running:
        running.terminate()
    (golden / "data" / "PATHS").unlink()
    with pytest.raises(
        ServerDidNotStart, match="records name SSD directory number 1, which is missing"
    ) as caught:
        server(golden, SSD_NAMES[0]).start()
    with server(golden, *SSD_NAMES) as running:
        wrong = wrong_sessions(running)

    assert (caught.value.returncode, wrong) == (9, [])
