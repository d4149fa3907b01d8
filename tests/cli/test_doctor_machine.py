"""The doctor's findings about the machine, from the words of a kernel."""

import os
import resource
import time
from pathlib import Path

import pytest

from ctxcache.cli.doctor import FindingStatus, disks, machine
from ctxcache.runtime.clock import BOOT_ID, boot_ns
from ctxcache.runtime.files import write_facts
from ctxcache.settings.config import Settings


def test_two_memory_nodes_have_advice(tmp_path: Path) -> None:
    """One has none, and neither has a kernel that says nothing."""
    (tmp_path / "node0").mkdir()
    one = machine.memory_nodes(tmp_path)
    (tmp_path / "node1").mkdir()
    two = machine.memory_nodes(tmp_path)

    assert (one.status, machine.memory_nodes(tmp_path / "none").found) == (FindingStatus.OK, "unknown")
    assert two.status is FindingStatus.DEGRADED
    assert "numactl" in two.advice


def test_swap_that_is_on_has_advice(tmp_path: Path) -> None:
    """A heading alone is none."""
    swaps = tmp_path / "swaps"
    swaps.write_text("Filename Type Size Used Priority\n")
    off = machine.swap(swaps)
    swaps.write_text("Filename Type Size Used Priority\n/dev/sda2 partition 1 0 -2\n")
    on = machine.swap(swaps)

    assert (off.status, on.status) == (FindingStatus.OK, FindingStatus.DEGRADED)
    assert "/dev/sda2" in on.found
    assert machine.swap(tmp_path / "none").found == "unknown"


def test_a_slow_clock_has_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So has one that nobody keeps right."""
    source = tmp_path / "current_clocksource"
    source.write_text("hpet\n")
    slow = machine.clock(source)
    source.write_text("tsc\n")
    monkeypatch.setattr(machine, "_is_synchronised", lambda: False)
    loose = machine.clock(source)
    monkeypatch.setattr(machine, "_is_synchronised", lambda: True)

    assert "clocksource=tsc" in slow.advice
    assert "chrony" in loose.advice
    assert machine.clock(source).status is FindingStatus.OK


def test_a_disk_that_rotates_has_advice(tmp_path: Path) -> None:
    """A partition's queue is its disk's; what is no block device is left alone."""
    device = tmp_path.stat().st_dev
    disk = tmp_path / "sda"
    (disk / "queue").mkdir(parents=True)
    (disk / "sda1").mkdir()
    (tmp_path / f"{os.major(device)}:{os.minor(device)}").symlink_to(disk / "sda1")
    (disk / "queue" / "rotational").write_text("1\n")
    rotating = disks.disk_kind(tmp_path, tmp_path)
    (disk / "queue" / "rotational").write_text("0\n")

    assert (rotating.status, disks.disk_kind(tmp_path, tmp_path).status) == (
        FindingStatus.DEGRADED,
        FindingStatus.OK,
    )
    assert "unknown" in disks.disk_kind(tmp_path, tmp_path / "none").found


def test_too_few_open_files_have_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as connections need."""
    settings = Settings(max_local_clients=100)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    few = machine.open_files(settings)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))

    assert few.status is FindingStatus.DEGRADED
    assert "LimitNOFILE" in few.advice
    assert machine.open_files(settings).status is FindingStatus.OK


def test_odd_settings_are_named() -> None:
    """Each of them."""
    odd = machine.odd_settings(["a is 0", "b is not set"])

    assert odd.found == "a is 0; b is not set"
    assert machine.odd_settings([]).status is FindingStatus.OK


def test_a_memlock_limit_matters_where_there_is_rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without such a device, or without a limit, nobody needs more."""
    (tmp_path / "with" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    limited, plain = machine.locked_memory(tmp_path / "with"), machine.locked_memory(tmp_path / "without")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    assert (limited.status, plain.status) == (FindingStatus.DEGRADED, FindingStatus.OK)
    assert "memlock=-1" in limited.advice
    assert machine.locked_memory(tmp_path / "with").found == "unlimited"


def test_a_wall_clock_that_was_set_is_told(tmp_path: Path) -> None:
    """Sessions do not live by it, and whoever looks at times should know."""
    settings = Settings(data_directory=tmp_path)
    before = machine.store_time(settings)
    hour_ns = 3600 * 10**9
    facts = {
        "boot_id": BOOT_ID.read_text().strip(), "boot_ns": 0, "time_ns": time.time_ns() - boot_ns() - hour_ns,
        "wall_ns": 0,
    }  # fmt: skip
    write_facts(tmp_path / "CLOCK", facts)
    after = machine.store_time(settings)

    assert before.status is FindingStatus.OK
    assert after.status is FindingStatus.DEGRADED
    assert "ahead of it" in after.found
