"""Places that a server cannot start in, and the means to make them where the machine allows it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_filesystem(place: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of `size` at `place`. Skips the test where we may not mount."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("SKIPPED: a small filesystem cannot be mounted without root")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def powerless() -> tuple[str, ...]:
    """Return what runs a command without root's power over permissions; nothing where we have none."""
    if os.geteuid() != 0:
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("SKIPPED: root cannot be denied anything without setpriv")
    return (
        "setpriv",
        "--bounding-set=-dac_override,-dac_read_search",
        "--inh-caps=-dac_override,-dac_read_search",
    )
