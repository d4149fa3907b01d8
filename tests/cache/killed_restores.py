"""Restores that are killed at each of their steps in turn, each in a process of its own without threads.

`python killed_restores.py ARCHIVE DIRECTORY` prints one JSON line for each: what was left, and what a second
restore made of it.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from ctxcache.archive.frames import source
from ctxcache.archive.laying_out import lay_out
from ctxcache.errors import CacheError
from ctxcache.server.lifecycle import verify_directory
from ctxcache.settings.config import Settings
from ctxcache.storage.data_directory import DataDirectory

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
LOOKED_AT = 10
"""One of so many killed restores is made again and verified; each is looked at."""


def settings(directory: Path) -> Settings:
    """The new store's SSD directories: one inside, one outside."""
    return Settings(
        data_directory=directory / "data",
        ssd_directories=(directory / "data" / "ssd", directory / "other"),
        ssd_size_bytes=1 << 20,
        unix_socket="",
    )


def restore(archive: Path, directory: Path, kill_at: int = 0) -> str:
    """Lay it out; killed at that step."""
    steps = count(1)

    def step(*_: object) -> None:
        if next(steps) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if kill_at:
        sys.addaudithook(lambda event, _: step() if event in EVENTS else None)
    found = settings(directory)
    with source(str(archive)) as opened:
        lay_out(
            opened,
            found.data_directory,
            found.ssd_directories or (),
            ssd_size_bytes=found.ssd_size_bytes,
            now_ns=time.time_ns(),
            created_by="a test",
            step=step,
        )
    return "done"


def look(directory: Path) -> str:
    """A server's answer to the directory."""
    with DataDirectory.open(directory / "data"):
        return "whole"


def verify(directory: Path) -> str:
    """All that is there, and all of it whole."""

    async def run() -> str:
        reports = [r async for r in verify_directory(settings(directory), bytes_per_second=0)]
        bad = sum(len(report.bad) for report in reports)
        return f"{reports[-1].record_count} records, {reports[-1].checked_segment_count} segments, {bad} bad"

    return asyncio.run(run())


def forked(work: Callable[[], str]) -> str:
    """The answer of `work`, from a process of its own; nothing when that is killed."""
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = work()
        except CacheError as error:
            said = f"{error.reason}: {error}"
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as said_to_us:
        said = said_to_us.read()
    os.waitpid(child, 0)
    return said


def main(archive: Path, directory: Path) -> None:
    """Kill them, one step after the other, until one comes to its end."""
    for kill_at in count(1):
        shutil.rmtree(directory, ignore_errors=True)
        ended = forked(partial(restore, archive, directory, kill_at))
        is_begun = any((directory / "data" / name).exists() for name in ("RESTORING", "FORMAT"))
        left = forked(partial(look, directory)) if is_begun else "nothing"
        result = {"killed": ended != "done", "left": left}
        if kill_at % LOOKED_AT == 0 or left == "whole":
            if left != "whole":
                result["again"] = forked(partial(restore, archive, directory))
            result["verified"] = forked(partial(verify, directory))
        sys.stdout.write(json.dumps(result) + "\n")
        if ended == "done":
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
