"""`ctxcache doctor`: what it finds on this machine, and when it says that serving is impossible."""

import _ctypes
import json
import os
import shutil
from pathlib import Path

import pytest
from command_line import Ran, ctxcache, started_anew
from failing_places import small_filesystem
from metadata_contract import make_model
from server_process import ServerProcess

from ctxcache import connect
from ctxcache.cli.failures import ExitCode
from ctxcache.storage.data_directory import DATA_FORMAT

SMALL = ("--arena-size-bytes", "16MiB", "--ssd-size-bytes", "16MiB", "--listen", "127.0.0.1:0")
KEYS = ["name", "status", "found", "used", "advice"]


def doctor(data_directory: Path, *options: str) -> tuple[Ran, dict[str, dict[str, str]]]:
    """Run the doctor as a script does; return its exit code and its findings by their first word."""
    given = ("--data-directory", str(data_directory), *SMALL, "--target", "127.0.0.1:1")
    ran = ctxcache("doctor", "-o", "json", *given, *options)
    return ran, {finding["name"].partition(" ")[0]: finding for finding in ran.document["findings"]}


def test_a_machine_that_can_serve(tmp_path: Path) -> None:
    """Every finding says what it is, how it is, and what is used; nothing is left behind."""
    ran, findings = doctor(tmp_path / "data")

    assert ran.exit_code == ExitCode.OK
    assert ran.document["can_serve"] is True
    assert all(list(finding) == KEYS for finding in findings.values())
    assert {finding["status"] for finding in findings.values()} <= {"ok", "degraded", "missing"}
    assert {
        "metadata",
        "space",
        "direct",
        "shared",
        "huge",
        "memlock",
        "disk",
        "swap",
        "NUMA",
        "open",
        "clock",
        "settings",
        "addresses",
        "arena",
        "server",
        "GPU",
        "SSD",
        "torch",
    } <= set(findings)
    assert "RocksDB opens" in findings["metadata"]["found"]
    assert list(tmp_path.iterdir()) == []


def test_the_direct_io_probe_agrees_with_the_server(tmp_path: Path) -> None:
    """The doctor's finding about O_DIRECT is the server's I/O mode afterwards."""
    _, findings = doctor(tmp_path / "data")
    with ServerProcess(tmp_path / "data") as server:
        mode = server.ready["ssd"][0]["io_mode"]

    assert findings["direct"]["used"].startswith(f"{mode} I/O")


def test_people_get_what_to_do(tmp_path: Path) -> None:
    """The text names each finding, what is used, and what to do about it."""
    ran = ctxcache("doctor", "--data-directory", str(tmp_path / "data"), *SMALL, "--target", "127.0.0.1:1")

    assert ran.exit_code == ExitCode.OK
    assert "missing   server at 127.0.0.1:1: no answer" in ran.stdout
    assert "do: start one with `ctxcache serve`" in ran.stdout


def test_a_running_server_is_found_and_left_alone(running_server: ServerProcess) -> None:
    """A held data directory is no failure, and the server that holds it answers."""
    ran, findings = doctor(
        running_server.data_directory, "--target", running_server.target, "--ssd-size-bytes", "64MiB"
    )

    assert ran.exit_code == ExitCode.OK
    assert f"held by a running server (pid {running_server.pid})" in findings["metadata"]["found"]
    assert findings["server"]["status"] == "ok"
    assert "it takes work" in findings["server"]["found"]


def test_sessions_of_a_stopped_server_are_counted(tmp_path: Path) -> None:
    """An existing data directory is really opened."""
    with ServerProcess(tmp_path / "data") as server:
        server.terminate()

    ran, findings = doctor(tmp_path / "data", "--ssd-size-bytes", "64MiB")

    assert ran.exit_code == ExitCode.OK
    assert findings["metadata"]["used"] == f"the sessions in {tmp_path}/data"


def test_what_a_start_would_refuse_is_found(tmp_path: Path) -> None:
    """A log that is gone, an SSD directory that is missing, a file that would have to shrink.

    Codes of `serve`.
    """
    data, other = tmp_path / "data", tmp_path / "other"
    with ServerProcess(
        data, "--ssd-directories", str(data / "ssd"), "--ssd-directories", str(other)
    ) as server:
        with connect(server.target, access="remote") as client:
            client.models.register(make_model().spec)
        server.terminate()
    both = ("--ssd-directories", str(data / "ssd"), "--ssd-directories", str(other), "--ssd-size-bytes", "0")
    well, _ = doctor(data, *both)
    missing, one = doctor(data, "--ssd-size-bytes", "0")
    small, _ = doctor(data, *both[:4], "--ssd-size-bytes", "1MiB")
    shutil.rmtree(data / "metadata")
    lost, findings = doctor(data, *both)
    for witness in (data / "ssd" / "WITNESS", other / "WITNESS"):
        witness.unlink()
    unwitnessed, _ = doctor(data, *both)

    assert well.exit_code == ExitCode.OK, well.stderr
    assert (missing.exit_code, small.exit_code, lost.exit_code) == (
        ExitCode.DATA_DIRECTORY_UNUSABLE, ExitCode.CONFIGURATION, ExitCode.DATA_LOSS,
    )  # fmt: skip
    assert f"number 1, last at {other}, is missing" in one["metadata"]["found"]
    assert unwitnessed.exit_code == ExitCode.DATA_LOSS
    assert "cannot shrink" in str(small.document["findings"])
    assert "were on disk and are gone" in findings["metadata"]["found"]


def test_an_address_that_the_server_itself_has_is_no_failure(running_server: ServerProcess) -> None:
    """A server that runs by the same settings is not in its own way; for any other start it is."""
    options = ("--target", running_server.target, "--listen", running_server.target)
    same, findings = doctor(running_server.data_directory, *options, "--ssd-size-bytes", "64MiB")
    other, refused = doctor(running_server.data_directory / "other", *options)

    assert same.exit_code == ExitCode.OK
    assert "addresses" not in findings
    assert other.exit_code == ExitCode.ADDRESS
    assert "Address already in use" in refused["addresses"]["found"]


@pytest.mark.parametrize(
    ("options", "name", "exit_code"),
    [
        (("--arena-size-bytes", "1024TiB"), "arena", ExitCode.RESOURCE_EXHAUSTED),
        (("--arena-directory", "/nowhere/at/all"), "arena", ExitCode.DEVICE),
        (("--ssd-size-bytes", "1024TiB"), "SSD files", ExitCode.RESOURCE_EXHAUSTED),
        (("--ssd-directories", "/dev/null/ssd"), "SSD files", ExitCode.DATA_DIRECTORY_UNUSABLE),
    ],
)
def test_what_makes_serving_impossible_is_the_exit_code(
    tmp_path: Path, options: tuple[str, ...], name: str, exit_code: ExitCode
) -> None:
    """The doctor exits as the server would, after it has said everything."""
    ran, _ = doctor(tmp_path / "data", *options)

    assert ran.exit_code == exit_code
    assert ran.document["can_serve"] is False
    found = {finding["name"]: finding for finding in ran.document["findings"]}[name]
    assert found["used"] == "nothing: the server cannot start"
    assert found["advice"]


def test_a_newer_format_is_found(tmp_path: Path) -> None:
    """A data directory that this version cannot read is said to be one."""
    (tmp_path / "FORMAT").write_text(
        json.dumps({"format": DATA_FORMAT + 1, "created_by": "later", "instance_id": "00"})
    )

    ran, findings = doctor(tmp_path)

    assert ran.exit_code == ExitCode.FORMAT_TOO_NEW
    assert findings["metadata"]["status"] == "missing"


def test_a_file_instead_of_a_directory_is_found(tmp_path: Path) -> None:
    """A path through a file leads nowhere."""
    (tmp_path / "data").write_text("")

    ran, _ = doctor(tmp_path / "data")

    assert ran.exit_code == ExitCode.DATA_DIRECTORY_UNUSABLE


def test_a_small_shared_memory_is_found(tmp_path: Path) -> None:
    """A tmpfs too small for the arena is a failure with both sizes."""
    with small_filesystem(tmp_path / "shm", "8m") as shm:
        ran, findings = doctor(tmp_path / "data", "--arena-directory", str(shm))

    assert ran.exit_code == ExitCode.RESOURCE_EXHAUSTED
    assert "--shm-size" in findings["arena"]["advice"]


def test_a_gpu_is_named_as_its_driver_names_it(tmp_path: Path) -> None:
    """The finding names the GPU as nvidia-smi does."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'NVIDIA Tiny, 1024 MiB, 1.0'\n")
    program.chmod(0o755)

    findings = examine(tmp_path, {"PATH": f"{program.parent}:{os.environ['PATH']}"})

    assert findings["GPU"]["found"] == "NVIDIA Tiny, 1024 MiB, 1.0"


@pytest.mark.parametrize(
    ("kvikio", "used"),
    [
        ("", "POSIX"),
        ("raise RuntimeError('no libcufile')", "POSIX"),
        ("cufile_driver = {'is_gds_available': False}", "kvikio's compatibility mode"),
        ("cufile_driver = {'is_gds_available': True}", "GDS"),
    ],
    ids=["not installed", "does not load", "no GDS", "GDS"],
)
def test_the_path_from_ssd_to_gpu_is_the_one_a_worker_takes(tmp_path: Path, kvikio: str, used: str) -> None:
    """With libcuda there, it depends on kvikio, which is asked in a process of its own."""
    # Any library loads as libcuda: nothing in it is called.
    shutil.copy(_ctypes.__file__, tmp_path / "libcuda.so.1")
    if kvikio:
        package = tmp_path / "kvikio"
        package.mkdir()
        (package / "__init__.py").write_text(f"__version__ = '1.0'\n{kvikio}\n")
        (package / "cufile_driver.py").write_text("import kvikio\nget = kvikio.cufile_driver.get\n")

    findings = examine(tmp_path, {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)})

    assert findings["SSD"]["used"].startswith(used)


def examine(place: Path, environment: dict[str, str]) -> dict[str, dict[str, str]]:
    """Run the doctor in an environment; return its findings by their first word."""
    given = ("--data-directory", str(place / "data"), *SMALL, "--target", "127.0.0.1:1")
    ran = started_anew("doctor", "-o", "json", *given, environment=environment)
    return {finding["name"].partition(" ")[0]: finding for finding in ran.document["findings"]}
