"""A backup on its way into a file: under a temporary name until all of it is there, synced and read back.

Knows no server. Worst case: its end is missing, and what there is of it is removed; after a SIGKILL it stays under
its temporary name, until the next backup of that name takes its place.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ctxcache.errors import FileAlreadyExists, FileUnusable
from ctxcache.facts_file import sync_directory
from ctxcache.format.archive import read_frames
from ctxcache.portable.files import refusals_of_file
from ctxcache.privacy import open_private


def receive(pieces: Iterable[bytes], path: Path) -> int:
    """Write a backup to a file that was not there, mode 0600; how many bytes it has.

    Raises FileAlreadyExists, FileUnusable (also where another one is being written), FileFull, FileDamaged, and what
    `pieces` raises; no file of that name is there then.
    """
    if os.path.lexists(path):
        raise FileAlreadyExists(path=str(path))
    partial = path.with_name(f"{path.name}.partial")
    with refusals_of_file(str(path)), _opened(partial) as file:
        try:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            for _ in read_frames(file, str(path)):
                continue
            size_bytes = file.tell()
            partial.rename(path)
            sync_directory(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    return size_bytes


@contextmanager
def _opened(partial: Path) -> Iterator[BinaryIO]:
    """The file, empty and ours alone. What a killed one left is written over."""
    with os.fdopen(open_private(partial, os.O_RDWR | os.O_CREAT), "w+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileUnusable(path=str(partial), problem="another backup is writing it") from None
        file.truncate(0)
        yield file
