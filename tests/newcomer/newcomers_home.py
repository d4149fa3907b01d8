"""A shell of somebody's own, in which nothing of this checkout is found but what its lines have installed."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ctxcache import __version__
from tests.nursery import without_settings

TIMEOUT_S = 240
SAID = f"ctxcache {__version__}\n"


def typed(commands: str, directory: Path, home: Path, *, wrapper: Sequence[str] = (), **more: str) -> str:
    """What the lines print that somebody types in a shell of their own; `more`: variables of it."""
    environment = without_settings(os.environ) | {"HOME": str(home)} | more
    environment = {
        name: text for name, text in environment.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    # The Python of this test is that of no environment's: the lines find the machine's own.
    own = str(Path(sys.prefix) / "bin")
    environment["PATH"] = os.pathsep.join(
        part for part in environment["PATH"].split(os.pathsep) if part != own
    )
    ran = subprocess.run(
        [*wrapper, "bash", "-ec", commands],
        cwd=directory,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
