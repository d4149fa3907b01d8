"""Writes an export file's frames one behind the other. Knows no session. Worst case: a device that refuses or is full."""

import os

from ctxcache.portable.files import refusals_of_file
from ctxcache.portable.layout import FILE_HEADER, FRAME_HEAD, MAGIC, VERSION, frame_checksum, header_checksum


class FrameWriter:
    """Frames into a descriptor. `path` is what errors call it; `begin_time_ns` is the present. Not thread-safe.

    Everything raises FileFull and FileUnusable.
    """

    def __init__(self, fd: int, path: str, file_id: bytes, begin_time_ns: int) -> None:
        self._fd, self._path, self._file_id = fd, path, file_id
        self._number = 0
        self.size_bytes = 0
        header = FILE_HEADER.pack(MAGIC, VERSION, 0, file_id, begin_time_ns)
        self._put(header)
        self._put(header_checksum(header))

    def write(self, tag: bytes, *payload: bytes | memoryview) -> None:
        """Append a frame; the parts of its payload follow one another."""
        head = FRAME_HEAD.pack(tag, sum(len(part) for part in payload))
        for part in (head, *payload, frame_checksum(self._file_id, self._number, head, *payload)):
            self._put(part)
        self._number += 1

    def _put(self, part: bytes | memoryview) -> None:
        rest = memoryview(part)
        with refusals_of_file(self._path):
            while rest:
                # A descriptor takes what it can, and says how much that was.
                written = os.write(self._fd, rest)
                rest = rest[written:]
                self.size_bytes += written
