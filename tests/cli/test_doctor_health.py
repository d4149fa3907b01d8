"""The doctor's findings about disks, from the words of a kernel and of smartctl."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ctxcache.cli.doctor import Finding, FindingStatus, disks

PASSED: dict[str, Any] = {"smart_status": {"passed": True}}


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    """A kernel's word of a filesystem on a partition of sda."""
    device = tmp_path.stat().st_dev
    partition = tmp_path / "block" / "sda" / "sda1"
    partition.mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    root = tmp_path / "dev"
    root.mkdir()
    (root / f"{os.major(device)}:{os.minor(device)}").symlink_to(partition)
    return root


def _asked(blocks: Path, **documents: dict[str, Any]) -> Finding:
    return disks.health(blocks, blocks, lambda name: documents[name])


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"smart_status": {"passed": False}}, "fails its own test"),
        (PASSED | {"nvme_smart_health_information_log": {"critical_warning": 4}}, "critical warning 0x04"),
        (PASSED | {"nvme_smart_health_information_log": {"media_errors": 7}}, "7 media errors"),
        (PASSED | {"nvme_smart_health_information_log": {"percentage_used": 97}}, "97 % of its writes"),
        (
            PASSED
            | {"nvme_smart_health_information_log": {"available_spare": 4, "available_spare_threshold": 10}},
            "4 % of its spare",
        ),
        (
            PASSED | {"ata_smart_attributes": {"table": [{"id": 197, "raw": {"value": 8}}]}},
            "8 pending sectors",
        ),
    ],
)
def test_a_disk_that_ails_has_advice(blocks: Path, document: dict[str, Any], said: str) -> None:
    """By its own word, with the disk's name."""
    found = _asked(blocks, sda=document)

    assert found.status is FindingStatus.DEGRADED
    assert found.found.startswith("sda: ")
    assert said in found.found
    assert "tier rest" in found.advice


def test_a_disk_that_is_well_needs_nothing(blocks: Path) -> None:
    """With the figures of one that is a year old."""
    log = {
        "critical_warning": 0,
        "media_errors": 0,
        "percentage_used": 12,
        "available_spare": 100,
        "available_spare_threshold": 10,
    }
    table = [{"id": 5, "raw": {"value": 0}}, {"id": 9, "raw": {"value": 8760}}]
    found = _asked(
        blocks,
        sda=PASSED | {"nvme_smart_health_information_log": log, "ata_smart_attributes": {"table": table}},
    )

    assert (found.status, found.found) == (FindingStatus.OK, "sda passes its own test")


def test_what_the_kernel_says_counts_too(blocks: Path) -> None:
    """A disk that it has given up, or takes no writes for."""
    disk = blocks.parent / "block" / "sda"
    (disk / "device").mkdir()
    (disk / "device" / "state").write_text("offline\n")
    (disk / "ro").write_text("1\n")
    found = _asked(blocks, sda={})

    assert found.found == "sda: the kernel calls it offline; sda: the kernel takes no writes for it"


def test_the_disks_of_an_array_are_asked_each(blocks: Path) -> None:
    """Not the array, which has no health of its own."""
    disk = blocks.parent / "block" / "sda"
    (disk / "slaves").mkdir()
    for name in ("nvme0n1", "nvme1n1"):
        (blocks.parent / "block" / name).mkdir()
        (disk / "slaves" / name).symlink_to(blocks.parent / "block" / name)
    found = _asked(blocks, nvme0n1=PASSED, nvme1n1={"smart_status": {"passed": False}})

    assert found.found == "nvme1n1: it fails its own test"


def test_who_says_nothing_is_unknown(blocks: Path, tmp_path: Path) -> None:
    """Neither well nor ill.

    Another machine's disk, one of a virtual machine, and one that tells root alone.
    """
    message = {"smartctl": {"messages": [{"string": "Permission denied"}]}}

    assert _asked(blocks, sda=message).found == "unknown: sda does not say: Permission denied"
    assert _asked(blocks, sda={}).found == "unknown: sda does not say: it has no SMART"
    assert "no block device" in disks.health(blocks, tmp_path / "none").found


def test_smartctl_is_run_where_it_is_installed(blocks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a program of its own, asked for the disk; without it the finding says what to install."""
    programs = blocks.parent / "bin"
    programs.mkdir()
    smartctl = programs / "smartctl"
    smartctl.write_text(
        f"#!/bin/sh\ntest \"$*\" = '--json -H -A /dev/sda' && echo '{json.dumps(PASSED)}'\nexit 4\n"
    )
    smartctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    there = disks.health(blocks, blocks)
    smartctl.write_text("#!/bin/sh\necho nonsense\n")
    broken = disks.health(blocks, blocks)
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    absent = disks.health(blocks, blocks)

    assert there.found == "sda passes its own test"
    assert broken.found.startswith("unknown: sda does not say: ")
    assert (absent.status, absent.found) == (FindingStatus.MISSING, "smartctl is not installed")
    assert "smartmontools" in absent.advice
