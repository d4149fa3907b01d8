"""Two copies, as a client sees them: a directory that is gone or damaged costs no token."""

import shutil
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import ctxcache
from ctxcache.cli.failures import ExitCode
from ctxcache.client import CallerModel
from ctxcache.client.types import Durability
from ctxcache.errors import InvalidArgument
from ctxcache.format.layout import ALIGN_BYTES, MAGIC
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.storage.rebuild import rebuild
from tests.cli.command_line import ctxcache as command
from tests.cli.stored import HIDDEN, ROW_BYTES, model_spec
from tests.server_process import ServerDidNotStart, ServerProcess

MODEL = CallerModel(model_spec())
LENGTH = 300
NAMES = ("ssd0", "ssd1")


def server(folder: Path, *options: str, names: tuple[str, ...] = NAMES) -> ServerProcess:
    """A server with these SSD directories, of which some may be missing."""
    ssd = [part for name in names for part in ("--ssd-directories", str(folder / name))]
    sizes = ("--ssd-size-bytes", "4MiB", "--arena-size-bytes", "8MiB")
    return ServerProcess(folder / "data", *ssd, *sizes, "--ssd-missing", "serve", *options)


def copied(stored: Path, tmp_path: Path) -> Path:
    """All of it but the sockets."""
    target = tmp_path / "all"
    return Path(shutil.copytree(stored, target, ignore=shutil.ignore_patterns("*.sock*")))


def rows(seed: int) -> dict[Stream, npt.NDArray[np.generic]]:
    """A session's rows."""
    hidden = np.random.default_rng(seed).integers(0, 256, (LENGTH, ROW_BYTES), np.uint8)
    return {TOKENS: np.arange(seed, seed + LENGTH, dtype=np.int32).reshape(-1, 1), HIDDEN: hidden}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sessions on both directories, of a server that was killed."""
    folder = tmp_path_factory.mktemp("copies")
    with server(folder, "--ssd-copies", "2") as running:
        with ctxcache.connect(running.target) as client:
            client.models.register(model_spec())
            for seed in range(3):
                session = client.sessions.create(MODEL, id=f"s{seed}", layout=[HIDDEN])
                for begin in range(0, LENGTH, 100):
                    part = {stream: data[begin : begin + 100] for stream, data in rows(seed).items()}
                    session.append(part, durability=Durability.DISK)
                assert session.info.copies == 2
            once = client.sessions.create(MODEL, id="once", layout=[HIDDEN], copies=1)
            once.append(rows(9), durability=Durability.DISK)
            assert (s0 := client.sessions.get("sessions/s0")).ssd_bytes == 2 * s0.dram_bytes
            assert (one := once.refresh()).ssd_bytes == one.dram_bytes
        running.kill9()
    return folder


def done(*words: str) -> None:
    """Run a command that must end well."""
    assert (ran := command(*words)).exit_code == 0, ran.stderr


def wrong(running: ServerProcess) -> list[str]:
    """The sessions with two copies that are missing or wrong."""
    found = []
    with ctxcache.connect(running.target, access="remote") as client:
        looked_up = client.sessions.lookup((f"sessions/s{i}", model_spec().fingerprint()) for i in range(3))
        short = [one for one in looked_up if one.token_count != LENGTH]
        found += [f"{one.name}: {one.reason} {one.token_count}" for one in short]
        for seed in range(3):
            with client.sessions.open(f"sessions/s{seed}", MODEL).read() as read:
                for stream, data in rows(seed).items():
                    if read.array(stream).tobytes() != data.tobytes():
                        found.append(f"s{seed} {stream}")
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_start_without_a_directory_loses_no_token(stored: Path, tmp_path: Path, name: str) -> None:
    """Either one, and whatever else lay there."""
    folder = copied(stored, tmp_path)
    (folder / name).rename(folder / "away")
    with server(folder) as running:
        assert wrong(running) == []


def test_damage_in_one_directory_loses_no_token(stored: Path, tmp_path: Path) -> None:
    """Every segment of one file has a byte flipped.

    Reads are served from the other copy, and the bad one is mended.
    """
    folder = copied(stored, tmp_path)
    data = bytearray((folder / "ssd0" / "segments.dat").read_bytes())
    begins = [at for at in range(0, len(data), ALIGN_BYTES) if data[at : at + len(MAGIC)] == MAGIC]
    for at in begins:
        data[at + ALIGN_BYTES + 7] ^= 1
    (folder / "ssd0" / "segments.dat").write_bytes(data)
    with server(folder) as running:
        with ctxcache.connect(running.target) as client:
            sizes = [client.sessions.get(f"sessions/s{i}").ssd_bytes for i in range(3)]
        assert wrong(running) == []
        with ctxcache.connect(running.target) as client:
            bad = [one for report in client.admin.verify() for one in report.bad]
            marked = [one for one in bad if one.sessions != ("sessions/once",)]
            assert all(one.is_mended for one in marked)
            # New copies are made behind everybody's back.
            deadline_s = time.monotonic() + 30
            while any((one := client.sessions.get(f"sessions/s{i}")).ssd_bytes < sizes[i] for i in range(3)):
                assert time.monotonic() < deadline_s, one
                time.sleep(0.05)
        running.terminate()
    (folder / "ssd1").rename(folder / "away")
    with server(folder) as running:
        assert wrong(running) == []


@pytest.mark.parametrize("names", [NAMES, NAMES[:1]])
def test_archives_keep_how_many_copies_there_were(
    stored: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Archives of a session, and of a whole store. A store with one directory takes them with one copy."""
    file, whole = str(tmp_path / "some"), str(tmp_path / "whole")
    kept = {"once": 1, **dict.fromkeys(("s0", "s1", "s2"), len(names))}
    with server(copied(stored, tmp_path)) as running:
        done("--target", running.target, "export", "s0", "s1", "s2", "once", "--to", file)
        done("--target", running.target, "export", "--store", "--to", whole)
    (here := tmp_path / "here").mkdir()
    with server(here, names=names) as running:
        done("--target", running.target, "import", file)
        assert wrong(running) == []
        with ctxcache.connect(running.target) as client:
            assert {s.name[9:]: s.copies for s in client.sessions.list()} == kept
    (made := tmp_path / "made").mkdir()
    ssd = [part for name in names for part in ("--ssd-directories", str(made / name))]
    done(
        "import",
        whole,
        "--new-store",
        "--data-directory",
        str(made / "data"),
        *ssd,
        "--ssd-size-bytes",
        "4MiB",
    )
    with server(made, names=names) as running:
        assert wrong(running) == []
        with ctxcache.connect(running.target) as client:
            assert {s.name[9:]: s.copies for s in client.sessions.list()} == kept
            deadline_s = time.monotonic() + 30
            while client.admin.stats().single_copy_segment_count:
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            # They were read, so that all of them is in memory.
            assert (s0 := client.sessions.get("sessions/s0")).ssd_bytes == len(names) * s0.dram_bytes


def test_a_rebuild_finds_both_copies(stored: Path, tmp_path: Path) -> None:
    """Records made anew name both places: either directory may be gone after it."""
    folder = copied(stored, tmp_path)
    shutil.rmtree(folder / "data" / "metadata")
    done = rebuild(folder / "data", [folder / name for name in NAMES], created_by="a test", is_dry_run=False)
    assert done.is_complete
    for name in reversed(NAMES):
        (folder / name).rename(folder / "away")
        with server(folder) as running:
            assert wrong(running) == []
            running.kill9()
        (folder / "away").rename(folder / name)


def test_copies_that_there_are_no_directories_for_are_refused(tmp_path: Path) -> None:
    """By a setting at the start, before anything is made; of a session by name of the field."""
    with pytest.raises(
        ServerDidNotStart, match="2 copies need as many SSD directories, and 1 is named"
    ) as told:
        server(tmp_path, "--ssd-copies", "2", names=("ssd0",)).start()
    assert told.value.returncode == ExitCode.CONFIGURATION
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "ssd0").exists()
    with server(tmp_path, names=("ssd0",)) as running, ctxcache.connect(running.target) as client:
        client.models.register(model_spec())
        for copies in (2, 3, -1):
            with pytest.raises(InvalidArgument, match="copies"):
                client.sessions.create(MODEL, id="s", layout=[HIDDEN], copies=copies)
        client.sessions.create(MODEL, id="s", layout=[HIDDEN])
        with pytest.raises(InvalidArgument, match="2 copies need 2 SSD directories, and the store has 1"):
            client.sessions.open("sessions/s").update(copies=2)
