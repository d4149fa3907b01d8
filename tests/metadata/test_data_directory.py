"""The data directory: ours or refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ctxcache.errors import CorruptMetadata, DataDirectoryUnusable, FormatTooNew
from ctxcache.storage.data_directory import DataDirectory

HOLD_UNTIL_KILLED = """
import sys
from ctxcache.storage.data_directory import DataDirectory
directory = DataDirectory.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def test_a_new_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    """A directory that is created, parents and all, is closed to other users."""
    path = tmp_path / "a" / "b"
    DataDirectory.open(path).close()

    assert path.stat().st_mode & 0o777 == 0o700


def test_the_instance_id_is_stable(tmp_path: Path) -> None:
    """A directory keeps its id over restarts; another directory has another one."""
    with DataDirectory.open(tmp_path / "a") as first, DataDirectory.open(tmp_path / "b") as other:
        ids = first.instance_id, other.instance_id
    with DataDirectory.open(tmp_path / "a") as again:
        assert again.instance_id == ids[0]

    assert ids[0] != ids[1]
    assert len(bytes.fromhex(ids[0])) == 16


def test_the_format_says_who_created_it(tmp_path: Path) -> None:
    """FORMAT is for people too."""
    with DataDirectory.open(tmp_path / "data", created_by="ctxcache 0.1.0") as directory:
        facts = json.loads((tmp_path / "data" / "FORMAT").read_text())

    assert len(facts.pop("checksum")) == 16
    assert facts == {"format": 5, "created_by": "ctxcache 0.1.0", "instance_id": directory.instance_id}


@pytest.mark.parametrize("name", ["FORMAT", "RUNS"])
def test_a_fact_is_on_disk_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its bytes are synced before it gets its name, its directory after that; nothing else comes first."""
    steps: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(fd: int) -> None:
        steps.append(("sync", str(Path(f"/proc/self/fd/{fd}").readlink())))
        fsync(fd)

    def noted_rename(path: Path, target: Path) -> Path:
        steps.append(("rename", str(target)))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    data = tmp_path / "data"
    DataDirectory.open(data).close()
    at = steps.index(("rename", str(data / name)))

    assert steps[at - 1 : at + 2] == [
        ("sync", str(data / f"{name}.partial")),
        ("rename", str(data / name)),
        ("sync", str(data)),
    ]
    assert steps[-1] == ("sync", str(tmp_path))
    # A directory with a FORMAT and no RUNS has lost it.
    assert [Path(place).name for step, place in steps if step == "rename"] == ["RUNS", "FORMAT"]


def test_a_second_server_is_told_who_holds_it(tmp_path: Path) -> None:
    """One server per directory; the other is named by its process id."""
    with (
        DataDirectory.open(tmp_path / "data"),
        pytest.raises(DataDirectoryUnusable, match=rf"another server holds it \(pid {os.getpid()}\)"),
    ):
        DataDirectory.open(tmp_path / "data")


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    """A killed server leaves no lock behind, and no other process breaks a living one's."""
    arguments = [sys.executable, "-c", HOLD_UNTIL_KILLED, str(tmp_path / "data")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(DataDirectoryUnusable, match=f"pid {holder.pid}"):
            DataDirectory.open(tmp_path / "data")
        holder.send_signal(signal.SIGKILL)

    DataDirectory.open(tmp_path / "data").close()


def test_a_refused_opening_gives_up_the_lock(tmp_path: Path) -> None:
    """After an error the directory can be opened by whoever mends it."""
    DataDirectory.open(tmp_path).close()
    format_file = tmp_path / "FORMAT"
    whole = format_file.read_bytes()
    format_file.write_bytes(b"?")
    with pytest.raises(CorruptMetadata):
        DataDirectory.open(tmp_path)
    format_file.write_bytes(whole)

    DataDirectory.open(tmp_path).close()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """A directory of a newer version is left alone."""
    (tmp_path / "FORMAT").write_text(json.dumps({"format": 6, "instance_id": "00"}))
    with pytest.raises(FormatTooNew) as caught:
        DataDirectory.open(tmp_path)

    assert (caught.value.found, caught.value.supported) == (6, 5)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"7",
        b"\xff",
        b'{"format": 5}',
        b'{"format": "x", "instance_id": "00"}',
        b'{"format": 0, "instance_id": "00"}',
        b'{"format": 5, "instance_id": "00"}',
    ],
)
def test_a_format_that_does_not_parse_is_refused(tmp_path: Path, text: bytes) -> None:
    """Garbage is not taken for a new directory."""
    (tmp_path / "FORMAT").write_bytes(text)
    with pytest.raises(CorruptMetadata, match="FORMAT"):
        DataDirectory.open(tmp_path)

    assert (tmp_path / "FORMAT").read_bytes() == text


def test_someone_elses_files_are_refused_untouched(tmp_path: Path) -> None:
    """A directory with other files and no FORMAT is not ours, and nothing is put into it."""
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(DataDirectoryUnusable, match=r"not ours \(thesis.tex is in it\)"):
        DataDirectory.open(tmp_path)

    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_fresh_filesystem_counts_as_empty(tmp_path: Path) -> None:
    """The root of a new volume holds lost+found, which is nobody's."""
    (tmp_path / "lost+found").mkdir()

    DataDirectory.open(tmp_path).close()


def test_an_interrupted_creation_is_finished(tmp_path: Path) -> None:
    """A crash before FORMAT got its name leaves a directory that still becomes ours."""
    (tmp_path / "LOCK").write_text("1\n")
    (tmp_path / "FORMAT.partial").write_text('{"form')

    with DataDirectory.open(tmp_path) as directory:
        assert len(directory.instance_id) == 32


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    """A path that is no directory is named."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "data"):
        with pytest.raises(DataDirectoryUnusable, match=r"[nN]ot a directory"):
            DataDirectory.open(path)


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    """The sentence says what the kernel said, and where."""
    with pytest.raises(DataDirectoryUnusable, match="/proc/ctxcache"):
        DataDirectory.open("/proc/ctxcache/data")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything: closed directories are NOT checked")
def test_a_closed_directory_is_refused(tmp_path: Path) -> None:
    """Without permission there is an error and no traceback of another kind."""
    tmp_path.chmod(0)
    with pytest.raises(DataDirectoryUnusable, match="Permission denied"):
        DataDirectory.open(tmp_path)
    tmp_path.chmod(0o700)


def test_metadata_is_kept_inside(tmp_path: Path) -> None:
    """Everything of the directory is below it."""
    with DataDirectory.open(tmp_path) as directory:
        assert directory.metadata_path == tmp_path / "metadata"


def test_only_runs_that_did_not_end_in_order_count_as_crashes(tmp_path: Path) -> None:
    """A run that began and did not end is counted once; one that never began or ended well is not."""
    counts = []
    for ends_in_order in (True, False, True):
        with DataDirectory.open(tmp_path / "data") as directory:
            counts.append(directory.crash_count)
            directory.begin_run()
            if ends_in_order:
                directory.end_run()
    with DataDirectory.open(tmp_path / "data") as directory:
        counts.append(directory.crash_count)

    assert counts == [0, 0, 1, 1]


@pytest.mark.parametrize("name", ["FORMAT", "RUNS"])
def test_every_flipped_bit_is_refused(tmp_path: Path, name: str) -> None:
    """No flip makes another number of these files.

    Each is refused, by the file's name or as a newer format.
    """
    DataDirectory.open(tmp_path).close()
    path = tmp_path / name
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(
            (CorruptMetadata, DataDirectoryUnusable, FormatTooNew), match=rf"{name}|has format"
        ):
            DataDirectory.open(tmp_path)


def test_runs_that_are_gone_are_refused(tmp_path: Path) -> None:
    """Generations would begin anew, and those that a crash took back would come again."""
    DataDirectory.open(tmp_path).close()
    (tmp_path / "RUNS").unlink()
    with pytest.raises(CorruptMetadata, match="RUNS: it is gone"):
        DataDirectory.open(tmp_path)


@pytest.mark.parametrize("found", [1, 2])
def test_an_earlier_format_is_refused(tmp_path: Path, found: int) -> None:
    """Its rows are bound to their checksums in another way: nothing of it is read, and nothing changed."""
    text = json.dumps({"format": found, "created_by": "ctxcache 0.1.0", "instance_id": "00ff"})
    (tmp_path / "FORMAT").write_text(text)
    with pytest.raises(DataDirectoryUnusable, match=f"it has format {found} of an earlier version"):
        DataDirectory.open(tmp_path)

    assert (tmp_path / "FORMAT").read_text() == text
