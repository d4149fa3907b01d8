"""Mounts: which filesystem holds a path, as the kernel says it."""

import re
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mounts")
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """A mounted filesystem: the kernel's name of its kind, like `ext4`, and its options; empty if unknown."""

    kind: str = ""
    options: str = ""


def mount_of(path: str | Path, table: Path = MOUNTS) -> Mount:
    """Find the mount that holds `path`: the last one of those with the longest mount point."""
    target, longest, mount = Path(path).resolve(), 0, Mount()
    try:
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return mount
    for line in lines:
        _, point, kind, options, *_ = line.split(" ")
        # The kernel writes blanks, tabs, newlines and backslashes as octal numbers.
        place = Path(_OCTAL.sub(lambda escaped: chr(int(escaped[1], 8)), point))
        if target.is_relative_to(place) and len(place.parts) >= longest:
            longest, mount = len(place.parts), Mount(kind, options)
    return mount
