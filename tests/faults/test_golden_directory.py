"""A data directory that a killed server left.

It opens and reads right, for as long as the format is the same.
"""

import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import ctxcache
from ctxcache.client import CallerModel
from ctxcache.format.streams import TOKENS, Content
from ctxcache.runtime.files import write_facts
from tests.faults.rows import rows_of
from tests.golden.make_directory import (
    ARCHIVE,
    MODEL,
    PICTURES,
    SALTS,
    SESSIONS,
    SSD_NAMES,
    SSD_SIZE_BYTES,
    STREAMS,
    owner_of,
)
from tests.server_process import ServerDidNotStart, ServerProcess


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """The directory as it was when its server was killed."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    # Arenas are named after the directory, and tests that run beside have it as well.
    (tmp_path / "shm").mkdir()
    return tmp_path


def server(golden: Path, *names: str, options: Sequence[str] = ()) -> ServerProcess:
    """A server over it, its SSD directories in this order."""
    ssd = [part for name in names for part in ("--ssd-directories", str(golden / name))]
    own = ("--ssd-size-bytes", str(SSD_SIZE_BYTES), "--arena-directory", str(golden / "shm"))
    return ServerProcess(golden / "data", *ssd, *own, *options)


def wrong_sessions(running: ServerProcess) -> list[str]:
    """Read everything; return the sessions that are not what they were."""
    wrong = []
    with ctxcache.connect(running.target, access="remote") as client:
        found = {session.name.removeprefix("sessions/") for session in client.sessions.list()}
        for name, ranges in SESSIONS.items():
            indexes = [i for begin, end in ranges for i in range(begin, end)]
            with client.sessions.open(f"sessions/{name}", CallerModel(MODEL)).read() as rows:
                for spec in STREAMS:
                    whole = [
                        rows_of(owner_of(name, i), spec.stream, i, i + 1, spec.row_bytes) for i in indexes
                    ]
                    expected = np.concatenate(whole) if whole else np.zeros((0, spec.row_bytes), np.uint8)
                    got = rows.array(spec.stream) if indexes else expected
                    if not np.array_equal(got.view(np.uint8).reshape(expected.shape), expected):
                        wrong.append(f"{name} {spec.stream}")
        kept = client.sessions.get("sessions/s3")
        first, second = PICTURES
        if (kept.salt, kept.contents) != (SALTS["s3"], (first, Content(60, 64, second.digest))):
            wrong.append("what lies behind s3")
        ids = rows_of(3, TOKENS, 0, 64, 4).view("<i4").reshape(-1)
        match = client.prefixes.match(CallerModel(MODEL), ids, salt=kept.salt, contents=PICTURES)
        if match.token_count != 64:
            wrong.append("the keys of s3")
    return wrong + sorted(found ^ set(SESSIONS))


def test_the_golden_directory_opens_and_reads_right(golden: Path) -> None:
    """Every row is what was written, also when its SSD directories are given in another order."""
    with server(golden, *SSD_NAMES) as running:
        first = wrong_sessions(running)
        running.terminate()
    with server(golden, *reversed(SSD_NAMES)) as running:
        again = wrong_sessions(running)

    assert first == again == []


def test_a_directory_of_an_earlier_format_is_refused(golden: Path) -> None:
    """With one sentence and the exit code of a directory that cannot be used; nothing in it is touched."""
    path = golden / "data" / "FORMAT"
    facts = json.loads(path.read_text())
    write_facts(path, {"format": 2, "instance_id": facts["instance_id"]})
    with pytest.raises(ServerDidNotStart, match="it has format 2 of an earlier version") as caught:
        server(golden, *SSD_NAMES).start()

    assert caught.value.returncode == 9


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
