"""The health of disks, as they say it themselves: by the kernel, and by smartctl where it is installed.

Runs smartctl with a time limit and changes nothing. Worst case: a disk that says nothing, or to root alone, which is
reported as unknown and never as well.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ctxcache.cli.doctor.disk import existing
from ctxcache.cli.doctor.finding import Finding, degraded, missing, ok

BLOCK = Path("/sys/dev/block")
TIMEOUT_S = 10
WORN_PERCENT = 90
WELL_STATES = ("running", "live", "")
SECTORS = {5: "reallocated", 197: "pending", 198: "uncorrectable"}
"""Raw counts of an ATA disk's attributes that are 0 on one that is well."""
REPLACE = "keep writes off it (`ctxcache tier rest PATH`), back up, replace it"
Document = Mapping[str, Any]
"""What `smartctl --json` prints; None where it cannot be run."""


def health(
    directory: Path, root: Path = BLOCK, ask: Callable[[str], Document | None] | None = None
) -> Finding:
    """Do the disks under a directory say that they are well."""
    name, used = f"health of {directory}", "it as it is"
    disks = _disks(directory, root)
    if not disks:
        return ok(name, "unknown: no block device of this machine's", used)
    problems = [f"{disk.name}: {problem}" for disk in disks for problem in _of_kernel(disk)]
    told, unknown, documents = [], [], [(disk.name, (ask or _smartctl)(disk.name)) for disk in disks]
    for disk_name, document in documents:
        if document is None:
            unknown.append("smartctl is not installed")
            continue
        problems += [f"{disk_name}: {problem}" for problem in problems_of(document)]
        passed = document.get("smart_status", {}).get("passed")
        if passed is None:
            unknown.append(f"{disk_name} does not say: {_message(document)}")
        elif passed:
            told.append(f"{disk_name} passes its own test")
    if problems:
        return degraded(name, "; ".join(problems), used, REPLACE)
    if None in (document for _, document in documents):
        return missing(name, "; ".join(unknown), used, "install smartmontools, and run the doctor as root")
    return ok(name, "; ".join([*told, *(f"unknown: {text}" for text in unknown)]), used)


def problems_of(document: Document) -> Iterator[str]:
    """What is wrong by the disk's own word; nothing where it gives none."""
    if document.get("smart_status", {}).get("passed") is False:
        yield "it fails its own test"
    log = document.get("nvme_smart_health_information_log", {})
    if log.get("critical_warning"):
        yield f"critical warning {log['critical_warning']:#04x}"
    if log.get("media_errors"):
        yield f"{log['media_errors']} media errors"
    if log.get("percentage_used", 0) >= WORN_PERCENT:
        yield f"{log['percentage_used']} % of its writes are used up"
    if log.get("available_spare", 100) < log.get("available_spare_threshold", 0):
        yield f"{log['available_spare']} % of its spare blocks are left"
    for row in document.get("ata_smart_attributes", {}).get("table", []):
        count = row.get("raw", {}).get("value", 0)
        if row.get("id") in SECTORS and count:
            yield f"{count} {SECTORS[row['id']]} sectors"


def _of_kernel(disk: Path) -> Iterator[str]:
    state = _text(disk / "device" / "state")
    if state not in WELL_STATES:
        yield f"the kernel calls it {state}"
    if _text(disk / "ro") == "1":
        yield "the kernel takes no writes for it"


def _disks(directory: Path, root: Path) -> list[Path]:
    """Directories in /sys of the disks under a filesystem: of a mapped device or an array, those below it."""
    try:
        device = existing(directory).stat().st_dev
        place = (root / f"{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    except OSError:
        return []
    return sorted(set(_below(place)))


def _below(place: Path) -> Iterator[Path]:
    # A partition is of its disk.
    disk = place.parent if (place / "partition").exists() else place
    slaves = list((disk / "slaves").glob("*"))
    if not slaves:
        yield disk
    for slave in slaves:
        yield from _below(slave.resolve())


def _smartctl(disk_name: str) -> Document | None:
    program = shutil.which(
        "smartctl", path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
    )
    if program is None:
        return None
    command = [program, "--json", "-H", "-A", f"/dev/{disk_name}"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)  # noqa: S603  # our own words
        document: Document = json.loads(ran.stdout)
    except subprocess.TimeoutExpired:
        return {"smartctl": {"messages": [{"string": f"no answer in {TIMEOUT_S} s"}]}}
    except (OSError, ValueError) as error:
        return {"smartctl": {"messages": [{"string": str(error)}]}}
    return document if isinstance(document, dict) else {}


def _message(document: Document) -> str:
    messages = document.get("smartctl", {}).get("messages") or [{}]
    return str(messages[0].get("string") or "it has no SMART")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
