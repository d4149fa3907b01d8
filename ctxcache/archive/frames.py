"""The file of an archive, or a pipe in its place (`-`), and its frames, verified before anything is used.

A new file is filled under another name, synced, and gets its own name when it is whole. Knows no session and
no store. Worst case: a file that is cut short, changed or of another kind, which is FileDamaged with the
byte. A length that the file cannot have is refused before room is made for it. A killed export leaves
.FILE.ctxcache-partial, which the next export to FILE uses up.

    | header 48 | tag 4 | size 4 | payload | checksum 8 | tag 4 | size 4 | ...
"""

import errno
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from ctxcache.errors import FileAlreadyExists, FileDamaged, FileFull, FileUnusable, FormatTooNew
from ctxcache.runtime.files import open_private, sync_directory

PIPE = "-"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Source(NamedTuple):
    """An open file. `size_bytes` is None for what cannot be read twice."""

    fd: int
    path: str
    size_bytes: int | None


@contextmanager
def refusals_of_file(path: str) -> Iterator[None]:
    """Raise a system call's refusal of a file as FileFull or FileUnusable."""
    try:
        yield
    except OSError as error:
        kind = FileFull if error.errno in _FULL else FileUnusable
        raise kind(path=path, problem=error.strerror or str(error)) from error


@contextmanager
def source(path: str) -> Iterator[Source]:
    """Open a file to read, `-` for standard input. Raises FileUnusable."""
    if path == PIPE:
        yield Source(sys.stdin.fileno(), "standard input", None)
        return
    with refusals_of_file(path):
        # Opening a named pipe without a writer must not wait for one.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise FileUnusable(path=path, problem="it is no regular file; - reads a pipe")
        yield Source(fd, path, facts.st_size)
    finally:
        os.close(fd)


# How a file comes to its name, and what a crash at each step leaves:
#
#     .FILE.ctxcache-partial, locked     half a file under a name that no reader asks for
#     filled, synced                     the same; the next export uses it up
#     renamed to FILE                    a whole file, or none
#     directory synced                   a whole file
@contextmanager
def destination(path: str, *, is_forced: bool) -> Iterator[int]:
    """A descriptor to fill and read back; the file has its name, mode 0600, once the block has ended well.

    `-` is standard output. Raises FileAlreadyExists (not where it may be replaced: `is_forced`), FileFull,
    FileUnusable.
    """
    if path == PIPE:
        yield sys.stdout.fileno()
        return
    final = Path(path)
    _check_new(final, is_forced=is_forced)
    partial = final.with_name(f".{final.name}.ctxcache-partial")
    fd = _claim(partial, path)
    try:
        yield fd
        with refusals_of_file(path):
            os.fsync(fd)
            # Asked again: another process may have made it while this one was filling.
            _check_new(final, is_forced=is_forced)
            partial.rename(final)
    except BaseException:
        # The failure before counts, not that of clearing up.
        with suppress(OSError):
            partial.unlink()
        raise
    finally:
        os.close(fd)
    with refusals_of_file(path):
        sync_directory(final.parent)


def _check_new(final: Path, *, is_forced: bool) -> None:
    with refusals_of_file(str(final)):
        if not os.path.lexists(final):
            return
        if not is_forced:
            raise FileAlreadyExists(path=str(final))
        if not final.is_file():
            raise FileUnusable(path=str(final), problem="it is no regular file; - writes to a pipe")


def _claim(partial: Path, path: str) -> int:
    """Create what is filled, or empty what a killed export left of it. Raises FileUnusable, FileFull."""
    with refusals_of_file(path):
        fd = open_private(partial, os.O_RDWR | os.O_CREAT)
    try:
        with refusals_of_file(path):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Renamed between our opening and our lock: it is a whole file by now.
            # Another export renamed it meanwhile: emptying it would destroy a file that is whole.
            if not os.path.samestat(os.fstat(fd), partial.stat()):
                raise BlockingIOError(errno.EWOULDBLOCK, "")
            os.ftruncate(fd, 0)
    except FileUnusable as error:
        os.close(fd)
        if isinstance(error.__cause__, BlockingIOError | FileNotFoundError):
            raise FileUnusable(path=path, problem="another export is writing it") from error
        raise
    return fd


# The bytes of a file, all numbers little endian:
#
#     header   | magic 8 | version 4 | zero 4 | file id 16 | begin, Unix ns 8 | checksum 8 |
#     frame    | tag 4 | bytes of payload 4 | payload | checksum 8 |
#
#     MADE  ( MODL | SESS ( ROWS | SAME )* VOID? )*  END
#             └ a model comes before the first session that has it
MAGIC, VERSION = b"CTXCARC\0", 2
FILE_ID_BYTES = 16
FILE_HEADER = struct.Struct("<8sII16sq")
"""Magic, version, zero, the file's id, when the export began (Unix time, ns); its checksum follows."""
FRAME_HEAD = struct.Struct("<4sI")
"""Tag, and bytes of the payload; the payload and a checksum follow."""
CHECKSUM = struct.Struct("<Q")
MADE, MODEL, SESSION, ROWS, SAME, VOID, END = (
    b"MADE",
    b"MODL",
    b"SESS",
    b"ROWS",
    b"SAME",
    b"VOID",
    b"END ",
)
PAYLOAD_LIMIT_BYTES = 1 << 30
"""Most bytes of a frame of rows. 64 tokens of 16 MiB, a segment of the widest models, and the numbers before
them fit.
"""
DESCRIPTION_LIMIT_BYTES = 4 << 20
"""Most bytes of every other frame: 65,536 streams of a model and of a session, and their texts, fit."""


class ArchiveFrame(NamedTuple):
    """One verified frame. `number` counts from 0.

    `begin` is the byte of the file at which the frame begins.
    """

    number: int
    begin: int
    tag: bytes
    payload: memoryview


def header_checksum(header: bytes) -> bytes:
    """Checksum of the file's header, 8 bytes."""
    return CHECKSUM.pack(xxh3_64_intdigest(header))


# The seed is of the file's id and the frame's number: a whole frame of another file, or from elsewhere in
# this one, does not pass.
def _hasher(file_id: bytes, number: int, head: bytes) -> xxh3_64:
    """Begin the checksum of a frame: it is bound to this file, and to this place in the file."""
    return xxh3_64(head, seed=xxh3_64_intdigest(file_id + CHECKSUM.pack(number)))


class FrameMaker:
    """Makes a file's bytes in order. `begin_time_ns` is the present, Unix time."""

    def __init__(self, file_id: bytes, begin_time_ns: int) -> None:
        header = FILE_HEADER.pack(MAGIC, VERSION, 0, file_id, begin_time_ns)
        self.header = header + header_checksum(header)
        self.frame_count = 0
        """Frames made so far: the number of the next one."""
        self._file_id = file_id

    def frame(self, tag: bytes, *payload: bytes | memoryview) -> Iterator[bytes | memoryview]:
        """The next frame's bytes in order. All of them must be taken before another frame is begun."""
        head = FRAME_HEAD.pack(tag, sum(len(part) for part in payload))
        hasher = _hasher(self._file_id, self.frame_count, head)
        self.frame_count += 1
        yield head
        for part in payload:
            hasher.update(part)
            yield part
        yield CHECKSUM.pack(hasher.intdigest())


class FrameWriter:
    """Writes frames to a descriptor. `path` is the file's name in errors. Not thread-safe.

    Everything raises FileFull and FileUnusable.
    """

    def __init__(self, fd: int, path: str, file_id: bytes, begin_time_ns: int) -> None:
        self._fd, self._path = fd, path
        self._maker = FrameMaker(file_id, begin_time_ns)
        self.size_bytes = 0
        self._put(self._maker.header)

    def write(self, tag: bytes, *payload: bytes | memoryview) -> None:
        """Append a frame; the parts of its payload follow one another."""
        for part in self._maker.frame(tag, *payload):
            self._put(part)

    def _put(self, part: bytes | memoryview) -> None:
        write_all(self._fd, self._path, part)
        self.size_bytes += len(part)


def write_all(fd: int, path: str, part: bytes | memoryview) -> None:
    """Write all of it: a descriptor takes what it can, and says how much that was.

    Raises FileFull, FileUnusable.
    """
    rest = memoryview(part)
    with refusals_of_file(path):
        while rest:
            rest = rest[os.write(fd, rest) :]


class ArchiveFrameReader:
    """The frames of a file from where its descriptor stands. Not thread-safe.

    Everything raises FileDamaged and FileUnusable; the constructor FormatTooNew too.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._room = memoryview(bytearray(CHECKSUM.size))
        self.at_bytes = 0
        """How many bytes have been read."""
        raw = bytes(self._take(FILE_HEADER.size + CHECKSUM.size))
        header, checksum = raw[: FILE_HEADER.size], raw[FILE_HEADER.size :]
        magic, version, zero, file_id, begin_time_ns = FILE_HEADER.unpack(header)
        self.file_id: bytes = file_id
        self.begin_time_ns: int = begin_time_ns
        """When the export began, by its exporter's clock: Unix time."""
        # First the magic, then the version, then the checksum: each question has an answer only after the one
        # before.
        if magic != MAGIC:
            raise self.damage("it is no archive of sessions")
        # A later format may say something else behind its number.
        if version != VERSION:
            raise FormatTooNew(f"{source.path} has archive format {version}; this version reads {VERSION}")
        if checksum != header_checksum(header) or zero:
            raise self.damage("its header does not match its checksum")

    @property
    def is_pipe(self) -> bool:
        """Whether what was read is gone."""
        return self._source.size_bytes is None

    def frames(self) -> Iterator[ArchiveFrame]:
        """Iterate over the frames up to END, behind which the file must end.

        A payload is valid until the next frame is asked for.
        """
        number = 0
        while True:
            begin = self.at_bytes
            head = bytes(self._take(FRAME_HEAD.size))
            tag, size_bytes = self._head(head, begin)
            whole = self._take(size_bytes + CHECKSUM.size)
            payload = self._verified(number, begin, head, whole)
            # A byte more is read: a file that goes on was put together from two, or is no export's.
            if tag == END and self._fill(memoryview(bytearray(1))):
                raise self.damage(f"it goes on behind its end at byte {self.at_bytes - 1}")
            yield ArchiveFrame(number, begin, tag, payload)
            if tag == END:
                return
            number += 1

    def again(self, number: int, begin: int) -> memoryview:
        """The payload of a frame that was read before. The reading goes on where it was."""
        # A pipe is read once, so an archive of shared rows cannot be read from one.
        if self.is_pipe:
            problem = "its sessions share rows, which a pipe cannot give again: read it from a file"
            raise FileUnusable(path=self._source.path, problem=problem)
        head = self._at(begin, FRAME_HEAD.size)
        _, size_bytes = self._head(head, begin)
        return self._verified(
            number, begin, head, memoryview(self._at(begin + len(head), size_bytes + CHECKSUM.size))
        )

    def damage(self, problem: str) -> FileDamaged:
        """The error that says so of this file."""
        return FileDamaged(path=self._source.path, problem=problem)

    def _head(self, head: bytes, begin: int) -> tuple[bytes, int]:
        tag, size_bytes = FRAME_HEAD.unpack(head)
        if size_bytes > (PAYLOAD_LIMIT_BYTES if tag == ROWS else DESCRIPTION_LIMIT_BYTES):
            raise self.damage(f"the frame at byte {begin} is longer than any")
        return tag, size_bytes

    def _verified(self, number: int, begin: int, head: bytes, whole: memoryview) -> memoryview:
        payload, checksum = whole[: -CHECKSUM.size], whole[-CHECKSUM.size :]
        hasher = _hasher(self.file_id, number, head)
        hasher.update(payload)
        if checksum != CHECKSUM.pack(hasher.intdigest()):
            raise self.damage(f"the frame at byte {begin} does not match its checksum")
        return payload

    def _take(self, size_bytes: int) -> memoryview:
        """The next bytes, in room that is used again for those that follow."""
        size_of_file = self._source.size_bytes
        # Before room is made: a damaged length could ask for any amount of memory.
        if size_of_file is not None and size_bytes > size_of_file - self.at_bytes:
            raise self._cut(size_of_file)
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

    def _at(self, begin: int, size_bytes: int) -> bytes:
        with refusals_of_file(self._source.path):
            data = os.pread(self._source.fd, size_bytes, begin)
        if len(data) != size_bytes:
            raise self._cut(begin + len(data))
        return data

    def _cut(self, end_bytes: int) -> FileDamaged:
        return self.damage(f"it is cut short after byte {end_bytes}")
