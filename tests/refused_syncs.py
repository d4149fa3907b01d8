"""Syncs that a device refuses: a pipe, which cannot be synced, in the place of an open file."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def refused_syncs(path: str) -> Iterator[None]:
    """Let every sync of this process's open file fail whose whole path matches the expression `path`."""
    links = {int(name): Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208
    fd = next(
        fd for fd, link in links.items() if link.is_symlink() and re.fullmatch(path, str(link.readlink()))
    )
    kept, (pipe_out, pipe_in) = os.dup(fd), os.pipe()
    os.dup2(pipe_in, fd)
    try:
        yield
    finally:
        os.dup2(kept, fd)
        for unused in (kept, pipe_out, pipe_in):
            os.close(unused)
