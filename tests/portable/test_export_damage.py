"""Files that are not as they were written, and files that somebody forged: refused by a reason, whatever is wrong."""

import os
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from golden_export import BEGIN_TIME_NS, FILE_ID, GOLDEN, MODEL, described, rows
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctxcache.errors import CacheError, FileDamaged, FormatTooNew
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.portable import session_reader
from ctxcache.portable.description import Description
from ctxcache.portable.files import Source
from ctxcache.portable.frame_reader import FrameReader
from ctxcache.portable.frame_writer import FrameWriter
from ctxcache.portable.layout import (
    BLOCK,
    BLOCK_HEAD,
    DESCRIPTION_LIMIT_BYTES,
    END,
    FILE_HEADER,
    PAYLOAD_LIMIT_BYTES,
    SESSION,
    TOTALS,
    VOID,
    header_checksum,
)  # fmt: skip
from ctxcache.portable.session_reader import Found, survey

DATA = GOLDEN.read_bytes()
HEADER_BYTES = 48
Frames = list[tuple[bytes, bytes]]


def read(data: bytes) -> list[Found]:
    """Verify it as `import` does, as a file and as a pipe: both must end alike."""
    as_file = _read_file(data)
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    as_pipe = _told(Source(reading, "export", None))
    os.close(reading)
    assert type(as_file) is type(as_pipe)
    if isinstance(as_file, CacheError):
        assert "\n" not in str(as_file)
        raise as_file
    assert as_file == as_pipe
    return as_file


def _read_file(data: bytes) -> list[Found] | CacheError:
    fd = os.memfd_create("export")
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        return _told(Source(fd, "export", len(data)))
    finally:
        os.close(fd)


def _told(source: Source) -> list[Found] | CacheError:
    try:
        return survey(source, lambda _: None)
    except CacheError as error:
        return error


def frames_of(data: bytes) -> Frames:
    """Tags and payloads."""
    fd = os.memfd_create("export")
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        return [
            (tag, bytes(payload)) for tag, payload in FrameReader(Source(fd, "export", len(data))).frames()
        ]
    finally:
        os.close(fd)


def forged(frames: Sequence[tuple[bytes, bytes]]) -> bytes:
    """A file of these frames, with checksums that are right."""
    fd = os.memfd_create("forged")
    try:
        writer = FrameWriter(fd, "forged", FILE_ID, BEGIN_TIME_NS)
        for tag, payload in frames:
            writer.write(tag, payload)
        return os.pread(fd, writer.size_bytes, 0)
    finally:
        os.close(fd)


def rows_of(one: Description, begin: int, end: int) -> tuple[bytes, bytes]:
    """A frame of rows."""
    parts = (rows(one, spec.stream)[begin:end].tobytes() for spec in one.specs)
    return BLOCK, b"".join((BLOCK_HEAD.pack(begin, end - begin), *parts))


FRAMES = frames_of(DATA)


def test_every_changed_byte_is_found() -> None:
    """One bit of each byte, another one each time: never another session, never anything but our two errors."""
    chance = random.Random(1)
    for at in range(len(DATA)):
        changed = bytearray(DATA)
        changed[at] ^= 1 << chance.randrange(8)

        error = _read_file(bytes(changed))

        assert isinstance(error, FormatTooNew if 8 <= at < 12 else FileDamaged), at


def test_every_length_but_the_whole_is_too_short() -> None:
    """Cut anywhere, within a number, between two frames, before the end; and one byte more is too long."""
    for size in range(len(DATA)):
        assert isinstance(_read_file(DATA[:size]), FileDamaged), size
    for size in (0, 7, HEADER_BYTES, HEADER_BYTES + 8, len(DATA) - 1):
        with pytest.raises(FileDamaged):
            read(DATA[:size])
    with pytest.raises(FileDamaged, match="goes on behind its end"):
        read(DATA + b"\0")


def test_another_version_is_too_new_whatever_follows() -> None:
    """Before a checksum is looked at, which may be another one by then."""
    with pytest.raises(FormatTooNew, match="format 2"):
        read(DATA[:8] + struct.pack("<I", 2) + bytes(64))


def test_what_is_reserved_must_be_zero() -> None:
    """A header with a right checksum, and a number where there is none."""
    header = FILE_HEADER.pack(b"CTXCEXP\0", 1, 1, FILE_ID, 0)

    with pytest.raises(FileDamaged):
        read(header + header_checksum(header) + DATA[HEADER_BYTES:])


@pytest.mark.parametrize(
    ("tag", "size_bytes"),
    [
        (BLOCK, PAYLOAD_LIMIT_BYTES + 1),
        (SESSION, DESCRIPTION_LIMIT_BYTES + 1),
        (END, 2**32 - 1),
        (b"????", 2**31),
    ],
)
def test_a_frame_longer_than_any_is_refused_unread(tag: bytes, size_bytes: int) -> None:
    """By its head alone."""
    with pytest.raises(FileDamaged, match="longer than any"):
        read(DATA[:HEADER_BYTES] + struct.pack("<4sI", tag, size_bytes))


def test_a_pipe_that_promises_much_costs_little() -> None:
    """256 MiB in the head of a frame, and then nothing: no such room is filled."""
    script = (
        "import re\nfrom ctxcache.errors import FileDamaged\n"
        "from ctxcache.portable.files import Source\nfrom ctxcache.portable.session_reader import survey\n"
        "try:\n    survey(Source(0, 'pipe', None), print)\nexcept FileDamaged as error:\n    print(error)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    data = DATA[:HEADER_BYTES] + struct.pack("<4sI", BLOCK, PAYLOAD_LIMIT_BYTES) + bytes(1000)

    ran = subprocess.run(
        [sys.executable, "-c", script], input=data, capture_output=True, timeout=60, check=True
    )

    told, peak_kib = ran.stdout.decode().splitlines()
    assert told == f"pipe: it is cut short after byte {len(data)}"
    assert int(peak_kib) < 160 << 10


SHORT = described("a", 2)
SESS = (SESSION, SHORT.encode())
ALL_ROWS = rows_of(SHORT, 0, 2)


def end(session_count: int, token_count: int) -> tuple[bytes, bytes]:
    """The last frame."""
    return END, TOTALS.pack(session_count, token_count)


@pytest.mark.parametrize(
    "frames",
    [
        [SESS, ALL_ROWS, SESS, ALL_ROWS, end(2, 4)],
        [SESS, ALL_ROWS, end(2, 2)],
        [SESS, ALL_ROWS, end(1, 3)],
        [SESS, ALL_ROWS, (END, b"")],
        [SESS, end(1, 2)],
        [SESS, ALL_ROWS, (VOID, b""), end(0, 0)],
        [SESS, (VOID, b"x"), end(0, 0)],
        [(VOID, b""), end(0, 0)],
        [ALL_ROWS, end(0, 0)],
        [SESS, ALL_ROWS, ALL_ROWS, end(1, 2)],
        [SESS, rows_of(SHORT, 1, 2), rows_of(SHORT, 0, 1), end(1, 2)],
        [SESS, (BLOCK, BLOCK_HEAD.pack(0, 0)), ALL_ROWS, end(1, 2)],
        [SESS, (BLOCK, BLOCK_HEAD.pack(0, 2**62)), end(1, 2)],
        [SESS, (BLOCK, BLOCK_HEAD.pack(0, -1)), end(1, 2)],
        [SESS, (BLOCK, ALL_ROWS[1][:-1]), end(1, 2)],
        [SESS, (BLOCK, b"short"), end(1, 2)],
        [SESS, (b"NEXT", b""), end(1, 2)],
        [(SESSION, b""), end(0, 0)],
        [(SESSION, SESS[1] + b"x"), end(0, 0)],
        [end(0, 0), end(0, 0)],
    ],
)  # fmt: skip
def test_frames_that_do_not_follow_are_refused(frames: Frames) -> None:
    """Each with its right checksum, and a file that makes no sense."""
    with pytest.raises(FileDamaged):
        read(forged(frames))


def test_more_sessions_than_a_file_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are kept, so they are counted."""
    frames = [(SESSION, described(f"s{i}", 0).encode()) for i in range(4)]
    monkeypatch.setattr(session_reader, "SESSION_LIMIT", 4)
    assert len(read(forged([*frames, end(4, 0)]))) == 4
    monkeypatch.setattr(session_reader, "SESSION_LIMIT", 3)

    with pytest.raises(FileDamaged):
        read(forged([*frames, end(4, 0)]))


def patched(offset: int, value: bytes) -> Frames:
    """A file whose session says something else at `offset`."""
    payload = bytearray(SESS[1])
    payload[offset : offset + len(value)] = value
    return [(SESSION, bytes(payload)), ALL_ROWS, end(1, 2)]


HUGE = struct.pack("<q", 2**63 - 1)
MODEL_AT = len(SESS[1]) - len(MODEL.encode())


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (16, struct.pack("<q", -1)), (24, struct.pack("<q", -1)), (24, HUGE), (32, struct.pack("<q", -1)),
        (40, struct.pack("<q", -1)), (48, b"\2\0"), (50, b"\xff\xff"), (50, b"\0\0"), (52, b"\xff\xff"), (54, b"\1\0"),
        (56, b"\xff\xff\xff\xff"), (60, b"\xff\xff\xff\xff"), (64, b"/"), (64, b"\xff"), (65, b"\x1b"),
        (75, struct.pack("<i", 0)), (79, struct.pack("<i", 99)), (83, struct.pack("<i", -5)),
        (MODEL_AT, b"X"), (MODEL_AT + 17, b"\xff\xff\xff\xff\xff\xff"),
    ],
)  # fmt: skip
def test_a_forged_session_is_refused(offset: int, value: bytes) -> None:
    """Counts, lengths, names, streams and the model: each number that a forger may choose."""
    assert patched(75, struct.pack("<i", -1))[0] == SESS  # where the table of streams begins
    with pytest.raises(FileDamaged):
        read(forged(patched(offset, value)))


def test_a_model_with_more_streams_than_any_is_refused() -> None:
    """Well written all the same, and a tenth of what its frame may have."""
    kinds = (StateKind.HIDDEN, StateKind.KV)
    specs = tuple(StreamSpec(Stream(i // 2, kinds[i % 2]), 1, DType.INT8) for i in range(65538))
    one = replace(SHORT, token_count=0, model=replace(MODEL, streams=specs), layout=(TOKENS,))

    found = _read_file(forged([(SESSION, one.encode()), end(1, 0)]))

    assert isinstance(found, FileDamaged)
    assert "has 65538 streams" in str(found)


@settings(max_examples=300, deadline=None)
@given(
    number=st.integers(0, len(FRAMES) - 1), at=st.integers(0, 2000), value=st.binary(min_size=0, max_size=9),
    cut=st.integers(0, 9),
)  # fmt: skip
@example(number=0, at=56, value=b"\xff\xff\xff\xff", cut=4)
def test_a_forged_frame_is_read_or_refused(number: int, at: int, value: bytes, cut: int) -> None:
    """Bytes put in the place of others, checksums made right: a list of sessions, or our error, and nothing else."""
    frames = list(FRAMES)
    tag, payload = frames[number]
    at %= len(payload) + 1
    frames[number] = (tag, payload[:at] + value + payload[at + cut :])

    found = _read_file(forged(frames))

    assert isinstance(found, FileDamaged | list)


@settings(max_examples=200, deadline=None)
@given(frames=st.lists(st.sampled_from(FRAMES), max_size=12))
def test_frames_in_any_order_are_read_or_refused(frames: Frames) -> None:
    """Left out, repeated, turned around."""
    found = _read_file(forged(frames))

    assert isinstance(found, FileDamaged | list)


def test_frames_of_another_file_do_not_match(tmp_path: Path) -> None:
    """A frame is bound to its file and its place there."""
    frame_bytes = 16 + len(SESS[1])
    data = bytearray(forged([SESS, ALL_ROWS, end(1, 2)]))
    other = data.copy()
    other[16] ^= 1
    other[40:48] = header_checksum(bytes(other[:40]))

    with pytest.raises(FileDamaged, match="byte 48 does not match"):
        read(bytes(other))
    swapped = data[:48] + data[48 + frame_bytes :] + data[48 : 48 + frame_bytes]
    with pytest.raises(FileDamaged, match="byte 48 does not match"):
        read(bytes(swapped))
