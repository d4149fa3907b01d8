"""Default sizes, from what the machine has and what is there."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ctxcache.cli.doctor import FindingStatus, machine
from ctxcache.settings import sizes
from ctxcache.settings.config import GIB, MIB, Settings
from ctxcache.storage.opening import open_arena

HOST_BYTES = 512 * GIB
V1_GROUPS = Path("/sys/fs/cgroup/memory")
NO_LIMIT = str((1 << 63) - 4096)
"""As v1 writes it."""


@pytest.mark.parametrize(("present_bytes", "expected_bytes"), [(8192, 8192), (8193, 12288), (1, 4096)])
def test_a_file_that_is_there_keeps_its_size(tmp_path: Path, present_bytes: int, expected_bytes: int) -> None:
    """In whole pages: what cut it short between two of them does not keep a server from starting."""
    (tmp_path / "file").write_bytes(bytes(present_bytes))

    assert sizes.ssd_bytes(tmp_path, "file") == expected_bytes


def test_an_empty_file_is_as_good_as_none(tmp_path: Path) -> None:
    """A start that was killed or refused before it had allocated anything leaves one."""
    (tmp_path / "file").touch()

    assert sizes.ssd_bytes(tmp_path, "file") >= sizes.LEAST_BYTES


def host(proc: Path, cgroup: str, mounts: str, files: Mapping[str, str]) -> Path:
    """A directory as /proc of a host with much memory; cgroups are mounted at `sys` beside it."""
    for path, text in {
        "meminfo": f"MemTotal: 9 kB\nMemAvailable: {HOST_BYTES // 1024} kB\n",
        "self/cgroup": cgroup,
        "self/mountinfo": mounts.format(proc),
        **files,
    }.items():
        (proc / path).parent.mkdir(parents=True, exist_ok=True)
        (proc / path).write_text(text)
    return proc


V2 = "31 23 0:28 / {}/sys rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 23 0:28 {root} {{}}/sys/memory rw - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files", "available_bytes", "source"),
    [
        ("", "", {}, HOST_BYTES, "the machine"),
        ("0::/\n", V2, {}, HOST_BYTES, "the machine"),
        ("0::/\n", V2, {"sys/memory.max": "max\n"}, HOST_BYTES, "the machine"),
        # A container with a namespace of its own: its cgroup is the top.
        ("0::/\n", V2, {"sys/memory.max": f"{GIB}\n"}, GIB, "sys/memory.max"),
        ("0::/../a\n", V2, {"sys/a/memory.max": f"{GIB}\n"}, GIB, "sys/a/memory.max"),
        # Nested, as a pod and its container; any of them may be the least.
        ("0::/pod/c\n", V2, {"sys/pod/memory.max": f"{GIB}\n", "sys/pod/c/memory.max": "max\n"}, GIB,
            "sys/pod/memory.max"),
        ("0::/pod/c\n", V2, {"sys/pod/memory.max": f"{GIB}\n", "sys/pod/c/memory.max": f"{MIB}\n"}, MIB,
            "sys/pod/c/memory.max"),
        ("0::/pod/c\n", V2, {"sys/memory.max": f"{MIB}\n", "sys/pod/c/memory.max": f"{GIB}\n"}, MIB,
            "sys/memory.max"),
        # A cgroup of others beside it is none of it.
        ("0::/pod/c\n", V2, {"sys/pod/d/memory.max": f"{MIB}\n"}, HOST_BYTES, "the machine"),
        ("0::/\n", V2, {"sys/memory.max": f"{GIB}\n", "sys/memory.high": f"{MIB}\n"}, MIB, "memory.high"),
        # Bytes that are taken already are not left, but for page cache.
        ("0::/\n", V2, {"sys/memory.max": f"{GIB}\n", "sys/memory.current": f"{5 * MIB}\n",
            "sys/memory.stat": f"anon 7\ninactive_file {MIB}\nactive_file {MIB}\n"},
            GIB - 3 * MIB, "memory.max"),
        ("0::/\n", V2, {"sys/memory.max": f"{MIB}\n", "sys/memory.current": f"{GIB}\n"}, 0, "memory.max"),
        ("4:cpu,memory:/docker/1\n0::/\n", V1.format(root="/"),
            {"sys/memory/docker/memory.limit_in_bytes": f"{GIB}\n",
             "sys/memory/docker/1/memory.limit_in_bytes": NO_LIMIT,
             "sys/memory/docker/memory.usage_in_bytes": f"{4 * MIB}\n",
             "sys/memory/docker/memory.stat": f"inactive_file 9\ntotal_inactive_file {MIB}\n"},
            GIB - 3 * MIB, "docker/memory.limit_in_bytes"),
        # A container of v1 is mounted its own part, and reads the path on the host.
        ("4:memory:/docker/1\n", V1.format(root="/docker/1"),
            {"sys/memory/memory.limit_in_bytes": f"{GIB}\n"}, GIB, "sys/memory/memory.limit_in_bytes"),
        # The unified hierarchy beside v1 limits nothing, and the other controllers have no such files.
        ("4:memory:/\n3:cpu:/\n0::/\n", V1.format(root="/"),
            {"sys/memory/memory.limit_in_bytes": NO_LIMIT}, HOST_BYTES, "the machine"),
    ],
)  # fmt: skip
def test_the_least_limit_of_memory_counts(
    tmp_path: Path, cgroup: str, mounts: str, files: Mapping[str, str], available_bytes: int, source: str
) -> None:
    """The machine's, or that of a cgroup of this process, however they are nested and mounted."""
    found = sizes.memory_available(host(tmp_path, cgroup, mounts, files))

    assert found.available_bytes == available_bytes
    assert source in found.source


@pytest.mark.parametrize(
    ("cgroup", "mounts"),
    [("nonsense\n", V2), ("0::/\n", "nonsense\n"), ("0::/\n", "1 2 - cgroup2\n"), ("\n", "\n")],
)
def test_words_of_a_kernel_that_nobody_knows_limit_nothing(tmp_path: Path, cgroup: str, mounts: str) -> None:
    """A start does not fail by them."""
    assert sizes.memory_available(host(tmp_path, cgroup, mounts, {})).available_bytes == HOST_BYTES


def opened_bytes(settings: Settings) -> int:
    """The size of the arena that a store with these settings has."""
    arena = open_arena(settings, "one")
    (size_bytes,) = arena.capacities_bytes
    arena.unlink()
    arena.close()
    return size_bytes


def test_a_default_arena_fits_a_small_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An eighth of its limit on a host of any size; the log and the doctor tell the limit that counted."""
    proc = host(tmp_path / "proc", "0::/\n", V2, {"sys/memory.max": f"{GIB}\n"})
    monkeypatch.setattr(sizes, "PROC", proc)
    space = shutil.disk_usage(tmp_path)._replace(free=HOST_BYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: space)
    settings = Settings(data_directory=tmp_path, arena_directory=tmp_path)
    with caplog.at_level(logging.INFO):
        size_bytes = opened_bytes(settings)
    told = machine.shared_memory(settings).found

    assert size_bytes == 128 * MIB
    assert f"size_bytes={size_bytes} by='an eighth of what {proc}/sys/memory.max leaves'" in caplog.text
    assert f"128.0 MiB: an eighth of what {proc}/sys/memory.max leaves" in told


def test_an_arena_above_the_limit_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the operator's word, and taken; the log and the doctor warn."""
    proc = host(tmp_path / "proc", "0::/\n", V2, {"sys/memory.max": f"{65 * MIB}\n"})
    monkeypatch.setattr(sizes, "PROC", proc)
    settings = Settings(data_directory=tmp_path, arena_directory=tmp_path, arena_size_bytes=66 * MIB)
    finding = machine.shared_memory(settings)

    assert opened_bytes(settings) == 66 * MIB
    assert "arena_above_memory" in caplog.text
    assert finding.status is FindingStatus.DEGRADED
    assert f"65.0 MiB is what {proc}/sys/memory.max leaves" in finding.found
    assert "may be killed" in finding.used


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A cgroup of this machine whose parent allows 300 MiB."""
    if not os.access(V1_GROUPS / "cgroup.procs", os.W_OK):
        pytest.skip(
            "NOTICE: no cgroup of v1 can be made here: only directories that look like one are tested"
        )
    parent = V1_GROUPS / f"sizes-{os.getpid()}"
    group = parent / "inner"
    group.mkdir(parents=True)
    try:
        (parent / "memory.limit_in_bytes").write_text(str(300 * MIB))
        yield group
    finally:
        group.rmdir()
        parent.rmdir()


def test_a_process_under_a_real_limit_sees_it(small_group: Path) -> None:
    """The kernel's own files say the same as those that were made up here."""
    program = (
        "import dataclasses, json; from ctxcache.settings.sizes import memory_available as m;"
        "print(json.dumps(dataclasses.asdict(m())))"
    )
    inside = ["sh", "-c", f'echo $$ > {small_group}/cgroup.procs && exec "$@"', "sh"]
    ran = subprocess.run([*inside, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)

    assert found["source"] == f"what {small_group.parent}/memory.limit_in_bytes leaves"
    # The interpreter itself is in it.
    assert 100 * MIB < found["available_bytes"] < 300 * MIB
