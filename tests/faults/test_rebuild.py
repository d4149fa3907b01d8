"""Metadata deleted or refused is made anew: from the golden directory, whose every row is known."""

import json
import shutil
import signal
import subprocess
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

import ctxcache
from ctxcache.cli.failures import ExitCode
from ctxcache.client import CallerModel
from ctxcache.client.types import Durability, PrefixMatch
from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable
from ctxcache.format.layout import Slot
from ctxcache.format.streams import TOKENS, TOKENS_SPEC
from ctxcache.storage.metadata.rocksdb import RocksDbMetadata
from ctxcache.storage.rebuild import Rebuilt, rebuild
from ctxcache.storage.scan import scan
from tests.faults.blocks import SPACE, KeptBlocks
from tests.faults.planted import command as planted
from tests.faults.rows import rows_of
from tests.faults.test_golden_directory import golden, server, wrong_sessions
from tests.golden.make_directory import EXPIRE_TIME, MODEL, SSD_NAMES
from tests.server_process import COMMAND_LINE, ServerDidNotStart, ServerProcess

__all__ = ["golden"]


@pytest.fixture
def stored(golden: Path) -> Path:
    """The golden directory as this version leaves it."""
    # Its clock stood still since it was made: behind more than a day a store's time lags, and expiry with it.
    (golden / "data" / "CLOCK").unlink()
    with server(golden, *SSD_NAMES) as running:
        running.terminate()
    return golden


def made_anew(stored: Path, *, is_dry_run: bool = False) -> Rebuilt:
    """Rebuild in this process; the directories in the wrong order."""
    directories = [stored / name for name in reversed(SSD_NAMES)]
    return rebuild(stored / "data", directories, created_by="a test", is_dry_run=is_dry_run)


def expire_times(running: ServerProcess) -> set[datetime]:
    """When its sessions end."""
    with ctxcache.connect(running.target, access="remote") as client:
        return {session.expire_time for session in client.sessions.list()}


@pytest.mark.parametrize("lost", ["metadata", "."])
def test_all_comes_back_without_metadata(stored: Path, lost: str) -> None:
    """Every session with its name, model, rows, truncation and expiry; the deleted one stays deleted.

    Also when nothing but the SSD directories is left.
    """
    shutil.rmtree(stored / "data" / lost)
    with pytest.raises(ServerDidNotStart, match=r"gone.*`ctxcache rebuild` makes it anew"):
        server(stored, *SSD_NAMES).start()
    foreseen = made_anew(stored, is_dry_run=True)
    found = made_anew(stored)
    with server(stored, *SSD_NAMES) as running:
        wrong, ends = wrong_sessions(running), expire_times(running)

    assert (wrong, ends) == ([], {EXPIRE_TIME})
    assert (found.session_count, found.lost_token_count, found.is_complete) == (5, 0, True)
    assert foreseen.token_count == found.token_count == 388


def found_by_tokens(running: ServerProcess) -> PrefixMatch:
    """How much of s1 is found by its token ids."""
    token_ids = rows_of(1, TOKENS, 0, 200, TOKENS_SPEC.row_bytes).view("<i4").ravel()
    with ctxcache.connect(running.target, access="remote") as client:
        return client.prefixes.match(CallerModel(MODEL), token_ids)


def test_what_is_found_by_its_tokens_is_found_after_a_rebuild(stored: Path) -> None:
    """Keys are in the records: no row is read for them."""
    with server(stored, *SSD_NAMES) as running:
        before = found_by_tokens(running)
        running.terminate()
    shutil.rmtree(stored / "data" / "metadata")
    made_anew(stored)
    with server(stored, *SSD_NAMES) as running:
        after = found_by_tokens(running)

    assert before.token_count >= 64
    assert (before.dram_token_count, (before.ready_in_ns or 0) > 0) == (0, True)
    assert after == before


def test_metadata_and_witnesses_that_are_gone_together_are_refused(stored: Path) -> None:
    """The catalog knows of commits: a start that went on without them would write over it."""
    shutil.rmtree(stored / "data" / "metadata")
    for name in SSD_NAMES:
        (stored / name / "WITNESS").unlink()
    for _ in range(2):
        with pytest.raises(ServerDidNotStart, match=r"gone.*`ctxcache rebuild` makes it anew") as refused:
            server(stored, *SSD_NAMES).start()
        assert refused.value.returncode == ExitCode.DATA_LOSS
    found = made_anew(stored)
    with server(stored, *SSD_NAMES) as running:
        wrong = wrong_sessions(running)

    assert (wrong, found.token_count, found.is_complete) == ([], 388, True)


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
    again = server(stored, *SSD_NAMES, options=("--rebuild-metadata", "true"))
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
        f for f in scan(path) if f.header.identity.begin == 130 and f.header.identity.token_count == 64
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


def test_no_rebuild_beside_a_server(stored: Path) -> None:
    """Its SSD directories are in use, whatever data directory is named.

    Two servers would have one's sessions.
    """
    with server(stored, *SSD_NAMES):
        for is_dry_run in (True, False):
            with pytest.raises(DataDirectoryUnusable, match="another server holds"):
                rebuild(
                    stored / "other",
                    [stored / name for name in SSD_NAMES],
                    created_by="a test",
                    is_dry_run=is_dry_run,
                )

    assert not (stored / "other").exists()


@pytest.mark.parametrize(
    "step",
    [
        "file_rename_before:1",
        "file_rename_after:2",
        "directory_sync_before:3",
        "record_write_after:1",
        "file_rename_before:4",
        "file_rename_after:4",
    ],
)
def test_a_rebuild_that_is_killed_is_made_again(stored: Path, step: str) -> None:
    """No start takes half of it, and the next one has everything. Here of all that the data directory had."""
    shutil.rmtree(stored / "data")
    command = [*planted([f"kill_at_start_{step}"]), "rebuild", "--data-directory", str(stored / "data")]
    command += [part for name in SSD_NAMES for part in ("--ssd-directories", str(stored / name))]
    killed = subprocess.run(command, check=False, capture_output=True, text=True)
    with suppress(ServerDidNotStart), server(stored, *SSD_NAMES) as running:
        running.terminate()
    again = server(stored, *SSD_NAMES, options=("--rebuild-metadata", "true"))
    with again:
        wrong = wrong_sessions(again)

    assert (killed.returncode, wrong) == (-signal.SIGKILL, [])


def test_another_servers_metadata_is_not_replaced(stored: Path) -> None:
    """A data directory and the SSD directories of somebody else: nothing is touched."""
    with ServerProcess(stored / "theirs") as other:
        other.terminate()
    before = sorted((stored / "theirs").rglob("*"))
    with pytest.raises(DataDirectoryUnusable, match="belong to another data directory"):
        rebuild(
            stored / "theirs", [stored / name for name in SSD_NAMES], created_by="a test", is_dry_run=False
        )
    after = sorted((stored / "theirs").rglob("*"))
    with ServerProcess(stored / "theirs"):
        pass

    assert after == before


def test_a_store_without_records_is_made_anew_too(tmp_path: Path) -> None:
    """There is a catalog, and it says that there was nothing."""
    with ServerProcess(tmp_path / "data") as empty:
        empty.terminate()
    shutil.rmtree(tmp_path / "data" / "metadata")
    found = rebuild(tmp_path / "data", [tmp_path / "data" / "ssd"], created_by="a test", is_dry_run=False)
    with ServerProcess(tmp_path / "data") as again:
        count = again.ready["session_count"]

    assert (found.is_complete, found.session_count, count) == (True, 0, 0)


def test_a_damaged_number_is_mended(stored: Path) -> None:
    """The advice of the refused start helps: the data directory knows which number was where."""
    for name in SSD_NAMES:
        (stored / name / "DEVICE").write_text("{")
    with pytest.raises(ServerDidNotStart, match=r"DEVICE.*`ctxcache rebuild` makes it anew"):
        server(stored, *SSD_NAMES).start()
    found = made_anew(stored)
    with server(stored, *SSD_NAMES) as running:
        wrong = wrong_sessions(running)

    assert (wrong, found.is_complete) == ([], True)


def test_a_segment_stays_in_its_slot(stored: Path) -> None:
    """An earlier copy in a slot that was given back may have somebody else's pages in its gaps by now."""
    before = recorded_slots(stored)
    first, last = (stored / SSD_NAMES[i] / "segments.dat" for i in (0, -1))
    size_bytes = first.stat().st_size
    # Where a scan comes by first.
    with first.open("r+b") as copies, last.open("rb") as file:
        for i, found in enumerate(scan(last), 1):
            copies.seek(size_bytes - i * found.header.layout.size_bytes)
            file.seek(found.offset_bytes)
            copies.write(file.read(found.header.layout.size_bytes))
    shutil.rmtree(stored / "data" / "metadata")
    made_anew(stored)

    assert recorded_slots(stored) == before


def recorded_slots(stored: Path) -> dict[int, Slot]:
    """Where the metadata says that each segment is."""
    store = RocksDbMetadata(stored / "data" / "metadata")
    try:
        return {record.segment_id: record.slot for record in store.segments()}
    finally:
        store.close()


def test_blocks_come_back_whole_or_not_at_all(stored: Path) -> None:
    """As sessions do; one whose bytes are damaged is gone."""
    kept = KeptBlocks(20_000)
    with server(stored, *SSD_NAMES) as running, ctxcache.connect(running.target) as client:
        blocks = {kept.key(number): kept.data(number) for number in range(4)}
        assert client.blocks.put(SPACE, blocks, durability=Durability.DISK) == 4
        assert len(list(client.sessions.list())) == 5
        running.kill9()
    for name in SSD_NAMES:
        path = stored / name / "segments.dat"
        for found in scan(path):
            layout = found.header.layout
            if layout.is_block and path.read_bytes()[found.offset_bytes :].find(kept.data(2)[:64]) == 4096:
                with path.open("r+b") as file:
                    file.seek(found.offset_bytes + layout.offsets[0] + 99)
                    file.write(b"?????")
    shutil.rmtree(stored / "data" / "metadata")
    result = made_anew(stored)
    with server(stored, *SSD_NAMES) as running, ctxcache.connect(running.target) as client:
        states = [one.state.name for one in client.blocks.look_up(SPACE, list(blocks))]
        loaded = client.blocks.load(SPACE, list(blocks))
        wrong = wrong_sessions(running)
        running.terminate()

    assert (states, wrong) == (["HIT", "HIT", "MISS", "HIT"], [])
    assert [one and one[0].tobytes() for one in loaded] == [
        kept.data(0),
        kept.data(1),
        None,
        kept.data(3),
    ]
    assert result.lost_segment_count == 1
