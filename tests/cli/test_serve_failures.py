"""Every way in which a server cannot start: one sentence, a documented exit code, nothing left open."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from command_line import Ran, ctxcache, started_anew
from failing_places import powerless, small_filesystem
from server_process import ServerDidNotStart, ServerProcess

from ctxcache.cli.failures import ExitCode
from ctxcache.settings.config import Settings
from ctxcache.storage.data_directory import DATA_FORMAT

SMALL = ("--arena-size-bytes", "16MiB", "--ssd-size-bytes", "16MiB", "--listen", "127.0.0.1:0")
SHARED_MEMORY = Settings.model_fields["arena_directory"].default


def serve(data_directory: Path, *options: str, environment: dict[str, str] | None = None) -> Ran:
    """Start a server that is expected not to start, where no killed server of another test left its arena."""
    with tempfile.TemporaryDirectory(prefix="ctxcache-", dir=SHARED_MEMORY) as arena:
        given = ("--data-directory", str(data_directory), "--arena-directory", arena)
        return ctxcache("serve", *given, *SMALL, *options, environment=environment)


def check_refused(ran: Ran, exit_code: ExitCode, *facts: str) -> None:
    """Assert one sentence with these facts in it, the exit code, and no word on standard output."""
    assert ran.exit_code == exit_code, ran.stderr
    assert ran.stdout == ""
    assert ran.sentence.startswith("ctxcache: ")
    for fact in facts:
        assert fact in ran.sentence


def test_a_file_in_the_place_of_the_data_directory(tmp_path: Path) -> None:
    """A file cannot be a data directory."""
    (tmp_path / "data").write_text("mine")

    check_refused(serve(tmp_path / "data"), ExitCode.DATA_DIRECTORY_UNUSABLE, "is not a directory")
    assert (tmp_path / "data").read_text() == "mine"


def test_a_bound_on_memory_that_leaves_no_room(tmp_path: Path) -> None:
    """A bounded address space is refused with what is needed, before a library ends the process over it."""
    with pytest.raises(ServerDidNotStart) as refused:
        ServerProcess(tmp_path / "data", wrapper=("prlimit", f"--as={1 << 30}")).start()

    assert refused.value.returncode == ExitCode.RESOURCE_EXHAUSTED
    assert "address space (RLIMIT_AS)" in refused.value.stderr
    assert not (tmp_path / "data").exists()


def test_a_parent_that_cannot_be_created(tmp_path: Path) -> None:
    """Below a file no directory can be created."""
    (tmp_path / "file").write_text("")

    check_refused(serve(tmp_path / "file" / "data"), ExitCode.DATA_DIRECTORY_UNUSABLE, "Not a directory")


def test_a_directory_with_somebody_elses_files(tmp_path: Path) -> None:
    """A directory that is not empty and not ours stays as it is."""
    (tmp_path / "thesis.txt").write_text("mine")

    check_refused(serve(tmp_path), ExitCode.DATA_DIRECTORY_UNUSABLE, "thesis.txt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_data_directory_that_may_not_be_read(tmp_path: Path) -> None:
    """Missing permissions are named."""
    data = tmp_path / "data"
    data.mkdir(mode=0o000)

    with pytest.raises(ServerDidNotStart) as refused:
        ServerProcess(data, wrapper=powerless()).start()

    assert refused.value.returncode == ExitCode.DATA_DIRECTORY_UNUSABLE
    assert "Permission denied" in refused.value.stderr


def test_a_port_that_is_taken(tmp_path: Path, running_server: ServerProcess) -> None:
    """A second server on the same port ends before it takes any work."""
    ran = serve(tmp_path / "data", "--listen", running_server.target)

    check_refused(ran, ExitCode.ADDRESS, running_server.target, "--listen")


def test_a_socket_path_that_is_too_long(tmp_path: Path) -> None:
    """A Unix socket's path has a limit of the kernel's."""
    check_refused(serve(tmp_path / "data", "--unix-socket", "/" + "x" * 200), ExitCode.ADDRESS, "longer than")


def test_a_data_directory_that_another_server_holds(running_server: ServerProcess) -> None:
    """Two servers never share a data directory; the sentence names the other one's process."""
    ran = serve(running_server.data_directory)

    check_refused(
        ran, ExitCode.DATA_DIRECTORY_UNUSABLE, "another server holds it", f"pid {running_server.pid}"
    )


def test_an_ssd_file_larger_than_the_disk(tmp_path: Path) -> None:
    """An SSD file for which there is no room is refused in human sizes, and nothing is made."""
    ran = serve(tmp_path / "data", "--ssd-size-bytes", "1024TiB")

    check_refused(ran, ExitCode.RESOURCE_EXHAUSTED, "no room in SSD", "1.0 PiB needed")
    assert not (tmp_path / "data").exists()


def test_an_ssd_file_too_small_for_a_segment(tmp_path: Path) -> None:
    """A tier that could hold nothing is refused, and nothing is made."""
    ran = serve(tmp_path / "data", "--ssd-size-bytes", "1")

    check_refused(ran, ExitCode.CONFIGURATION, "ssd_size_bytes", "at least 65536 B")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", [b"d\xe4ten", "d\u00e4ten".encode()], ids=["latin-1", "utf-8"])
def test_a_path_that_is_not_utf_8_in_its_locale(tmp_path: Path, name: bytes) -> None:
    """RocksDB takes the text of a path as UTF-8, and the system its bytes: refused in our words."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    data = tmp_path / os.fsdecode(name)
    given = ("--data-directory", str(data), "--arena-directory", str(tmp_path), *SMALL)

    check_refused(
        started_anew("serve", *given, environment=locale),
        ExitCode.DATA_DIRECTORY_UNUSABLE,
        "its path is not UTF-8 in this locale",
    )
    assert not data.exists()


def test_an_ssd_directory_on_a_full_disk(tmp_path: Path) -> None:
    """The same where the filesystem is really full."""
    with small_filesystem(tmp_path / "small", "8m") as small:
        ran = serve(tmp_path / "data", "--ssd-directories", str(small))

    check_refused(ran, ExitCode.RESOURCE_EXHAUSTED, "no room in SSD", "16.0 MiB needed, 8.0 MiB free")


def test_a_data_directory_on_a_full_disk(tmp_path: Path) -> None:
    """Without room for its first files a data directory cannot be made."""
    with small_filesystem(tmp_path / "small", "64k") as small:
        (small / "lost+found").write_bytes(b"x" * 65536)
        ran = serve(small)

    check_refused(ran, ExitCode.RESOURCE_EXHAUSTED, "no room in metadata", "1.0 MiB needed, 0 B free")


def test_an_arena_larger_than_shared_memory(tmp_path: Path) -> None:
    """An arena that does not fit is refused at once, not by a SIGBUS later."""
    ran = serve(tmp_path / "data", "--arena-size-bytes", "1024TiB")

    check_refused(ran, ExitCode.RESOURCE_EXHAUSTED, "no room in DRAM /dev/shm", "1.0 PiB needed")


def test_shared_memory_that_is_too_small(tmp_path: Path) -> None:
    """The same where /dev/shm is small, as in containers."""
    with small_filesystem(tmp_path / "shm", "8m") as shm:
        ran = serve(tmp_path / "data", "--arena-directory", str(shm))

    check_refused(ran, ExitCode.RESOURCE_EXHAUSTED, "16.0 MiB needed, 8.0 MiB free")


def test_an_arena_directory_that_is_not_there(tmp_path: Path) -> None:
    """A missing arena directory is named, whether a size is given or not."""
    missing = str(tmp_path / "missing")
    for size in ("16MiB", "0"):
        ran = serve(tmp_path / "data", "--arena-directory", missing, "--arena-size-bytes", size)

        check_refused(ran, ExitCode.DEVICE, missing, "cannot create the arena")


def test_a_data_directory_of_a_newer_format(tmp_path: Path) -> None:
    """A directory of a newer version is left alone."""
    (tmp_path / "FORMAT").write_text(
        json.dumps({"format": DATA_FORMAT + 1, "created_by": "later", "instance_id": "00"})
    )

    check_refused(serve(tmp_path), ExitCode.FORMAT_TOO_NEW, f"format {DATA_FORMAT + 1}", "newer")


def test_a_format_file_that_does_not_parse(tmp_path: Path) -> None:
    """A damaged FORMAT is data loss, not an empty cache."""
    (tmp_path / "FORMAT").write_text("{")

    check_refused(serve(tmp_path), ExitCode.DATA_LOSS, "FORMAT")


def test_metadata_that_is_damaged(tmp_path: Path) -> None:
    """Damaged metadata is refused: no server starts with half of its sessions."""
    data = tmp_path / "data"
    with ServerProcess(data) as server:
        server.terminate()
    for manifest in (data / "metadata").glob("MANIFEST-*"):
        manifest.write_bytes(b"garbage" * 100)

    with pytest.raises(ServerDidNotStart) as refused:
        ServerProcess(data).start()

    assert refused.value.returncode == ExitCode.DATA_LOSS
    assert "CORRUPT_METADATA" in refused.value.stderr


def test_an_ssd_file_that_would_have_to_shrink(tmp_path: Path) -> None:
    """A smaller size than the file has is a configuration error that says what to do."""
    data = tmp_path / "data"
    with ServerProcess(data) as server:
        server.terminate()

    check_refused(serve(data), ExitCode.CONFIGURATION, "cannot shrink")


@pytest.mark.parametrize(
    ("option", "value", "fact"),
    [
        ("--arena-size-bytes", "lots", "'lots' is not a size such as 512MiB"),
        ("--default-ttl-s", "0", "default_ttl_s"),
        ("--max-concurrent-rpcs", "many", "max_concurrent_rpcs"),
        ("--keepalive-s", "0", "keepalive_s"),
        ("--dram-low-watermark", "1", "dram_low_watermark"),
        ("--dram-high-watermark", "0.05", "0.05 is below dram_low_watermark, 0.0625"),
        ("--dirty-watermark", "-1", "dirty_watermark"),
        ("--dirty-limit", "0.2", "0.2 is below dirty_watermark, 0.25"),
        ("--tail-age-s", "-1", "tail_age_s"),
        ("--write-behind-bytes-per-s", "fast", "'fast' is not a size"),
        ("--drain-timeout-s", "-1", "drain_timeout_s"),
        ("--drain-timeout-s", "inf", "drain_timeout_s"),
        ("--room-wait-s", "inf", "room_wait_s"),
        ("--room-wait-s", "1e300", "room_wait_s"),
        ("--stall-timeout-s", "nan", "stall_timeout_s"),
        ("--arena-size-bytes", "99999999999999999999", "arena_size_bytes"),
        pytest.param("--ssd-size-bytes", "9" * 400, "ssd_size_bytes", id="a size of 400 digits"),
        ("--log-level", "chatty", "log_level"),
    ],
)
def test_a_value_that_is_wrong(tmp_path: Path, option: str, value: str, fact: str) -> None:
    """A wrong value is a sentence that names the setting."""
    check_refused(serve(tmp_path / "data", option, value), ExitCode.CONFIGURATION, fact)
    assert not (tmp_path / "data").exists()


def test_no_address_at_all(tmp_path: Path) -> None:
    """A server that listens nowhere is of no use."""
    ran = serve(tmp_path / "data", "--listen", "", "--unix-socket", "")

    check_refused(ran, ExitCode.CONFIGURATION, "neither a TCP address nor a Unix socket")


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (b'arena_size = "1GiB"', "arena_size: is not a setting"),
        (b"arena_size_bytes = ", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (None, "No such file or directory"),
    ],
    ids=["unknown key", "bad TOML", "not text", "missing"],
)
def test_a_file_that_is_wrong(tmp_path: Path, content: bytes | None, fact: str) -> None:
    """A file with unknown keys, of another syntax, or missing, is named."""
    file = tmp_path / "settings.toml"
    if content is not None:
        file.write_bytes(content)

    check_refused(serve(tmp_path / "data", "--config", str(file)), ExitCode.CONFIGURATION, fact)


def test_a_variable_that_nobody_knows(tmp_path: Path) -> None:
    """A misspelt CTXCACHE_ variable is an error, not a setting that silently does nothing."""
    ran = serve(tmp_path / "data", environment={"CTXCACHE_AREAN_SIZE_BYTES": "1GiB"})

    check_refused(ran, ExitCode.CONFIGURATION, "CTXCACHE_AREAN_SIZE_BYTES")


def test_a_variable_with_a_wrong_value(tmp_path: Path) -> None:
    """The environment's values are checked like options."""
    ran = serve(tmp_path / "data", environment={"CTXCACHE_DEFAULT_TTL_S": "soon"})

    check_refused(ran, ExitCode.CONFIGURATION, "default_ttl_s")
