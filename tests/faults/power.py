"""Power: ext4 on disks that lose what was not synced, and the cut that makes them.

Needs root, /dev/fuse, loop devices, fuse3's fusermount3 and the package mfusepy. Worst case: a device
that does not let go, which is a CalledProcessError with what the tool said.
"""

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.harness import Unsupported
from tests.faults.ledger import Shape
from tests.server_process import ServerProcess

DISK_BYTES = 192 << 20
MOUNT_TIMEOUT_S = 10.0
TOOLS = ("fusermount3", "losetup", "mkfs.ext4", "mount", "umount")


def check_supported() -> None:
    """Raise Unsupported when this machine has no such disks."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0:
        raise Unsupported("loop devices need root")
    if missing:
        raise Unsupported(f"{', '.join(missing)} not found: apt-get install fuse3 e2fsprogs mount")
    if not Path("/dev/fuse").exists() or not Path("/dev/loop-control").exists():
        raise Unsupported("there is no /dev/fuse or no /dev/loop-control")
    if importlib.util.find_spec("mfusepy") is None:
        raise Unsupported("the package mfusepy is not installed")
    try:
        _run("losetup", "--find")
    except subprocess.CalledProcessError as error:
        raise Unsupported(f"no loop device is to be had: {error.stderr}") from error


@dataclass(slots=True)
class _Powered:
    """The parts that exist while there is power."""

    daemon: "subprocess.Popen[str]"
    loops: list[str] = field(default_factory=list)
    mounts: list[Path] = field(default_factory=list)


class PowerGround:
    """See Ground: every blow is a power cut as well, whatever else ended the server."""

    may_fail = True
    shapes: Sequence[Shape] = (Shape(1, 32), Shape(3, 160))

    def __init__(self, directory: Path, rng: random.Random, *, disk_counts: Sequence[int] = (1, 2)) -> None:
        self._directory, self._random, self._disk_counts = directory, rng, disk_counts
        self._disk_count = 1
        self._powered: _Powered | None = None
        self.cut_count = 0
        self.fates: dict[str, int] = {}

    def renew(self) -> tuple[Path, list[Path]]:
        """See Ground. Metadata and SSD files share a disk, or each directory has one of its own."""
        self.close()
        self._disk_count = self._random.choice(self._disk_counts)
        for i in range(self._disk_count):
            with suppress(FileNotFoundError):
                self._backing(i).unlink()
            self._mount_point(i).mkdir(exist_ok=True)
        self._switch_on(is_new=True)
        of_ssd = range(1, self._disk_count) or [0]
        return self._mount_point(0), [self._mount_point(i) / "ssd" for i in of_ssd]

    def strike(self, server: ServerProcess | None) -> None:
        """See Ground. First the devices, then the process: what it acknowledges in between it had synced."""
        fates = self._cut()
        if server is not None:
            server.kill9()
        self._switch_off()
        self.cut_count += 1
        for name, count in fates.items():
            self.fates[name] = self.fates.get(name, 0) + count
        self._switch_on(is_new=False)

    def close(self) -> None:
        """Let go of every device."""
        if self._powered is not None:
            self._switch_off()

    # -- devices -----------------------------------------------------------------------------------

    def _switch_on(self, *, is_new: bool) -> None:
        shown = self._directory / "devices"
        shown.mkdir(exist_ok=True)
        backing = [str(self._backing(i)) for i in range(self._disk_count)]
        self._powered = powered = _Powered(
            subprocess.Popen(
                [sys.executable, "-m", "tests.faults.cut_disk", str(shown), str(DISK_BYTES), *backing],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
        _wait_for(shown / "disk0")
        for i in range(self._disk_count):
            powered.loops.append(_run("losetup", "--find", "--show", str(shown / f"disk{i}")))
            if is_new:
                _run("mkfs.ext4", "-q", "-F", "-E", "nodiscard", powered.loops[-1])
            _run("mount", "-o", "noatime", powered.loops[-1], str(self._mount_point(i)))
            powered.mounts.append(self._mount_point(i))
        if is_new:
            os.sync()

    def _cut(self) -> dict[str, int]:
        powered = self._powered
        if powered is None or powered.daemon.stdin is None or powered.daemon.stdout is None:
            raise RuntimeError("there is no power to cut")
        powered.daemon.stdin.write(f"cut {self._random.getrandbits(31)}\n")
        powered.daemon.stdin.flush()
        fates: dict[str, int] = json.loads(powered.daemon.stdout.readline())
        return fates

    def _switch_off(self) -> None:
        powered, self._powered = self._powered, None
        if powered is None:
            return
        for mount_point in powered.mounts:
            _run("umount", str(mount_point))
        for loop in powered.loops:
            _run("losetup", "--detach", loop)
        _unmount_shown(self._directory / "devices")
        powered.daemon.wait(MOUNT_TIMEOUT_S)
        for pipe in (powered.daemon.stdin, powered.daemon.stdout):
            if pipe is not None:
                pipe.close()

    def _backing(self, i: int) -> Path:
        return self._directory / f"backing{i}.img"

    def _mount_point(self, i: int) -> Path:
        return self._directory / f"mount{i}"


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + MOUNT_TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} is not there after {MOUNT_TIMEOUT_S} s")
        time.sleep(0.01)


def _unmount_shown(path: Path) -> None:
    deadline_s = time.monotonic() + MOUNT_TIMEOUT_S
    while True:
        try:
            _run("fusermount3", "-u", str(path))
        except subprocess.CalledProcessError:
            # A detached loop device lets go of its file a moment later.
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
        else:
            return


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.strip()
