"""Reads an export file's frames, each verified before anybody sees it. Knows no session.

Worst case: a file that is cut short, changed or not ours, which is FileDamaged with the byte. A length that the file
cannot have is refused before room is made for it.
"""

import os
from collections.abc import Iterator

import numpy as np

from ctxcache.errors import FileDamaged, FormatTooNew
from ctxcache.portable.files import Source, refusals_of_file
from ctxcache.portable.layout import (
    BLOCK,
    CHECKSUM,
    DESCRIPTION_LIMIT_BYTES,
    END,
    FILE_HEADER,
    FRAME_HEAD,
    MAGIC,
    PAYLOAD_LIMIT_BYTES,
    VERSION,
    frame_checksum,
    header_checksum,
)


class FrameReader:
    """The frames of a file from where it stands. Not thread-safe.

    Everything raises FileDamaged and FileUnusable; the constructor FormatTooNew too.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._room = memoryview(bytearray(CHECKSUM.size))
        self.at_bytes = 0
        """How far it has read."""
        raw = bytes(self._take(FILE_HEADER.size + CHECKSUM.size))
        header, checksum = raw[: FILE_HEADER.size], raw[FILE_HEADER.size :]
        magic, version, zero, self._file_id, begin_time_ns = FILE_HEADER.unpack(header)
        self.begin_time_ns: int = begin_time_ns
        """When the export began, by its exporter's clock: Unix time."""
        if magic != MAGIC:
            raise self.damage("it is no export of sessions")
        # A later format may say something else behind its number.
        if version != VERSION:
            raise FormatTooNew(f"{source.path} has export format {version}; this version reads {VERSION}")
        if checksum != header_checksum(header) or zero:
            raise self.damage("its header does not match its checksum")

    def frames(self) -> Iterator[tuple[bytes, memoryview]]:
        """Iterate over tags and payloads up to the end, the last of which nothing follows.

        A payload is valid until the next is asked for.
        """
        number = 0
        while True:
            begin = self.at_bytes
            head = bytes(self._take(FRAME_HEAD.size))
            tag, size_bytes = FRAME_HEAD.unpack(head)
            if size_bytes > (PAYLOAD_LIMIT_BYTES if tag == BLOCK else DESCRIPTION_LIMIT_BYTES):
                raise self.damage(f"the frame at byte {begin} is longer than any")
            whole = self._take(size_bytes + CHECKSUM.size)
            payload, checksum = whole[:size_bytes], whole[size_bytes:]
            if checksum != frame_checksum(self._file_id, number, head, payload):
                raise self.damage(f"the frame at byte {begin} does not match its checksum")
            if tag == END and self._fill(memoryview(bytearray(1))):
                raise self.damage(f"it goes on behind its end at byte {self.at_bytes - 1}")
            number += 1
            yield tag, payload
            if tag == END:
                return

    def damage(self, problem: str) -> FileDamaged:
        """The error that says so of this file."""
        return FileDamaged(path=self._source.path, problem=problem)

    def _take(self, size_bytes: int) -> memoryview:
        """The next bytes, in room that is used again for what follows them."""
        if self._source.size_bytes is not None and size_bytes > self._source.size_bytes - self.at_bytes:
            raise self._cut(self._source.size_bytes)
        if size_bytes > len(self._room):
            # Not touched before it is filled: a pipe that promises much and sends little costs little.
            self._room = np.empty(size_bytes, np.uint8).data
        taken = self._room[:size_bytes]
        if self._fill(taken) < size_bytes:
            raise self._cut(self.at_bytes)
        return taken

    def _fill(self, room: memoryview) -> int:
        """Read until the room or the file ends; how many bytes came."""
        filled = 0
        with refusals_of_file(self._source.path):
            while filled < len(room) and (count := os.readv(self._source.fd, [room[filled:]])):
                filled += count
        self.at_bytes += filled
        return filled

    def _cut(self, end_bytes: int) -> FileDamaged:
        return self.damage(f"it is cut short after byte {end_bytes}")
