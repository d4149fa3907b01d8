"""Files that are not as they were written, and files that somebody forged.

Refused by a reason, whatever is wrong.
"""

import os
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from golden_archive import BEGIN_TIME_NS, FILE_ID, GOLDEN, MODELS, ORIGIN, SPEC, described, rows_payload
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctxcache.archive import reader
from ctxcache.archive.contents import FRAME_NUMBER, STRETCH, TOTALS, ArchivedModel
from ctxcache.archive.frames import (
    CHECKSUM,
    DESCRIPTION_LIMIT_BYTES,
    END,
    FILE_HEADER,
    FRAME_HEAD,
    MADE,
    MODEL,
    PAYLOAD_LIMIT_BYTES,
    ROWS,
    SAME,
    SESSION,
    VOID,
    ArchiveFrameReader,
    FrameWriter,
    Source,
    header_checksum,
)
from ctxcache.archive.reader import ArchiveContents, survey
from ctxcache.errors import CacheError, FileDamaged, FileUnusable, FormatTooNew
from ctxcache.format.streams import Content, DType, StateKind, Stream, StreamSpec

DATA = GOLDEN.read_bytes()
HEADER_BYTES = 48
Frames = list[tuple[bytes, bytes]]


def read(data: bytes) -> ArchiveContents:
    """Verify it as `import` does, as a file and as a pipe: both must end alike."""
    as_file = _read_file(data)
    reading, writing = os.pipe()
    os.write(writing, data)
    os.close(writing)
    as_pipe = _told(Source(reading, "export", None))
    os.close(reading)
    if isinstance(as_pipe, FileUnusable):
        assert "share rows, which a pipe cannot give again" in str(as_pipe)
        as_pipe = as_file
    assert type(as_file) is type(as_pipe)
    if isinstance(as_file, CacheError):
        assert "\n" not in str(as_file)
        raise as_file
    assert as_file == as_pipe
    return as_file


def _read_file(data: bytes) -> ArchiveContents | CacheError:
    fd = os.memfd_create("export")
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        return _told(Source(fd, "export", len(data)))
    finally:
        os.close(fd)


def _told(source: Source) -> ArchiveContents | CacheError:
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
        frames = ArchiveFrameReader(Source(fd, "export", len(data))).frames()
        return [(frame.tag, bytes(frame.payload)) for frame in frames]
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


FRAMES = frames_of(DATA)


def places() -> list[int]:
    """All within 16 bytes of where a frame begins or ends, and every seventh of its payload."""
    edges, end = {*range(HEADER_BYTES), len(DATA) - 1}, HEADER_BYTES
    for _, payload in FRAMES:
        end += FRAME_HEAD.size + len(payload) + CHECKSUM.size
        edges.update(range(max(end - 16, 0), min(end + 32, len(DATA))))
    assert end == len(DATA)
    return sorted(edges | {*range(0, len(DATA), 7)})


def test_a_changed_byte_is_found_wherever_it_is() -> None:
    """One bit of a byte, another one each time.

    Never another session, never anything but our two errors.
    """
    chance = random.Random(1)
    for at in places():
        _check_flip(DATA, at, chance.randrange(8))


def test_every_changed_bit_is_found() -> None:
    """In the header, in lengths, in payloads, in checksums of a small file."""
    small = forged([*BEGUN, SESS, ALL_ROWS, end(1, 2)])
    for at in range(len(small)):
        for bit in range(8):
            _check_flip(small, at, bit)


def _check_flip(data: bytes, at: int, bit: int) -> None:
    changed = bytearray(data)
    changed[at] ^= 1 << bit
    assert isinstance(_read_file(bytes(changed)), FormatTooNew if 8 <= at < 12 else FileDamaged), (at, bit)


def test_any_length_but_the_whole_is_too_short() -> None:
    """Cut anywhere, within a number, between two frames, before the end; and one byte more is too long."""
    for size in places():
        assert isinstance(_read_file(DATA[:size]), FileDamaged), size
    for size in (0, 7, HEADER_BYTES, HEADER_BYTES + 8, len(DATA) - 1):
        with pytest.raises(FileDamaged):
            read(DATA[:size])
    with pytest.raises(FileDamaged, match="goes on behind its end"):
        read(DATA + b"\0")


def test_another_version_is_too_new_whatever_follows() -> None:
    """Before a checksum is looked at, which may be another one by then."""
    with pytest.raises(FormatTooNew, match="format 3"):
        read(DATA[:8] + struct.pack("<I", 3) + bytes(64))


def test_what_is_reserved_must_be_zero() -> None:
    """A header with a right checksum, and a number where there is none."""
    header = FILE_HEADER.pack(b"CTXCARC\0", 2, 1, FILE_ID, 0)

    with pytest.raises(FileDamaged):
        read(header + header_checksum(header) + DATA[HEADER_BYTES:])


@pytest.mark.parametrize(
    ("tag", "size_bytes"),
    [
        (ROWS, PAYLOAD_LIMIT_BYTES + 1),
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
    """1 GiB in the head of a frame, and then nothing: no such room is filled."""
    script = (
        "import re\nfrom ctxcache.errors import FileDamaged\n"
        "from ctxcache.archive.frames import Source\nfrom ctxcache.archive.reader import survey\n"
        "try:\n    survey(Source(0, 'pipe', None), print)\nexcept FileDamaged as error:\n    print(error)\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])"
    )
    data = DATA[:HEADER_BYTES] + struct.pack("<4sI", ROWS, PAYLOAD_LIMIT_BYTES) + bytes(1000)

    ran = subprocess.run(
        [sys.executable, "-c", script], input=data, capture_output=True, timeout=60, check=True
    )

    told, peak_kib = ran.stdout.decode().splitlines()
    assert told == f"pipe: it is cut short after byte {len(data)}"
    assert int(peak_kib) < 160 << 10


SHORT = described("a", 2)
FORK = described("b", 2, dropped=1)
BEGUN = [(MADE, ORIGIN.encode()), (MODEL, MODELS[0].encode())]
SESS = (SESSION, SHORT.encode(0))
ALL_ROWS = (ROWS, rows_payload(SHORT, 0, 2))


def end(session_count: int, token_count: int) -> tuple[bytes, bytes]:
    """The last frame."""
    return END, TOTALS.pack(session_count, token_count)


def same(begin: int, count: int, number: int) -> tuple[bytes, bytes]:
    """A reference to a frame's rows."""
    return SAME, STRETCH.pack(begin, count) + FRAME_NUMBER.pack(number)


def test_rows_are_shared_with_an_earlier_session_even_a_void_one() -> None:
    """The frames before are MADE, MODL and SESS: rows are in frame 3."""
    long = described("a", 3)
    fork = (SESSION, described("b", 3).encode(0))
    one = (ROWS, rows_payload(long, 2, 1))
    void = [(SESSION, long.encode(0)), ALL_ROWS, (VOID, b"")]
    found = _read_file(forged([*BEGUN, *void, fork, same(0, 2, 3), one, SESS, same(0, 2, 3), end(2, 5)]))

    assert isinstance(found, ArchiveContents)
    assert [(session.session_id, session.token_count) for session, _ in found.sessions] == [
        ("b", 3),
        ("a", 2),
    ]


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
        [same(0, 2, 3), end(0, 0)],
        [BEGUN[0], end(0, 0)],
        [SESS, BEGUN[1], ALL_ROWS, end(1, 2)],
        [SESS, ALL_ROWS, ALL_ROWS, end(1, 2)],
        [SESS, (ROWS, rows_payload(SHORT, 1, 1)), (ROWS, rows_payload(SHORT, 0, 1)), end(1, 2)],
        [SESS, (ROWS, STRETCH.pack(0, 0)), ALL_ROWS, end(1, 2)],
        [SESS, (ROWS, STRETCH.pack(0, 2**62)), end(1, 2)],
        [SESS, (ROWS, STRETCH.pack(0, -1)), end(1, 2)],
        [SESS, (ROWS, STRETCH.pack(-1, 3) + ALL_ROWS[1][16:]), end(1, 2)],
        [SESS, (ROWS, ALL_ROWS[1][:-1]), end(1, 2)],
        [SESS, (ROWS, rows_payload(SHORT, 0, 3)), end(1, 2)],
        [SESS, (ROWS, b"short"), end(1, 2)],
        [SESS, (b"NEXT", b""), end(1, 2)],
        [SESS, same(0, 2, 3), end(1, 2)],
        [SESS, same(0, 2, 2), end(1, 2)],
        [SESS, same(0, 2, 2**63), end(1, 2)],
        [SESS, ALL_ROWS, (SESSION, FORK.encode(0)), same(1, 2, 3), end(2, 4)],
        [SESS, ALL_ROWS, (SESSION, FORK.encode(0)), same(0, 3, 3), end(2, 4)],
        [SESS, ALL_ROWS, (SESSION, FORK.encode(0)), (ROWS, rows_payload(FORK, 0, 1)), end(2, 4)],
        [SESS, ALL_ROWS, (SESSION, described("b", 2).encode(0)), (SAME, b"short"), end(2, 4)],
        [(SESSION, SHORT.encode(1)), ALL_ROWS, end(1, 2)],
        [(SESSION, replace(SHORT, salt=bytes(65)).encode(0)), ALL_ROWS, end(1, 2)],
        *(
            [(SESSION, replace(SHORT, contents=bad).encode(0)), ALL_ROWS, end(1, 2)]
            for bad in (
                (Content(0, 3, bytes(32)),),
                (Content(1, 1, bytes(32)),),
                (Content(-1, 1, bytes(32)),),
                (Content(1, 2, bytes(32)), Content(0, 1, bytes(32))),
                (Content(0, 2, bytes(32)), Content(1, 2, b"1" * 32)),
                (Content(0, 1, bytes(32)), Content(1, 2, bytes(32))),
            )
        ),
        [(SESSION, b""), end(0, 0)],
        [(SESSION, SESS[1] + b"x"), end(0, 0)],
        [(MODEL, b""), end(0, 0)],
        [(MODEL, BEGUN[1][1] + b"x"), end(0, 0)],
        [end(0, 0), end(0, 0)],
    ],
)
def test_frames_that_do_not_follow_are_refused(frames: Frames) -> None:
    """Each with its right checksum, and a file that makes no sense."""
    with pytest.raises(FileDamaged):
        read(forged([*BEGUN, *frames]))


@pytest.mark.parametrize(
    "frames", [[], [end(0, 0)], [SESS], [(MADE, b""), end(0, 0)], [(MADE, b"\xff" * 8), end(0, 0)]]
)
def test_a_file_begins_with_its_origin(frames: Frames) -> None:
    """Nothing else, and nothing that is none."""
    with pytest.raises(FileDamaged):
        read(forged(frames))


def test_rows_of_another_model_or_of_other_streams_are_not_shared() -> None:
    """Frames 4 and on: the bytes would be as many, and mean something else."""
    models = [*BEGUN, (MODEL, MODELS[1].encode())]
    other = described("b", 2, model=MODELS[1])
    swapped = replace(SHORT, session_id="b", layout=SHORT.layout[:1])
    for one, model_number in ((other, 1), (swapped, 0)):
        frames = [SESS, ALL_ROWS, (SESSION, one.encode(model_number)), same(0, 2, 4), end(2, 4)]
        with pytest.raises(FileDamaged):
            read(forged([*models, *frames]))


def test_more_sessions_or_models_than_a_file_may_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names are kept, so they are counted."""
    frames = [*BEGUN, *((SESSION, described(f"s{i}", 0).encode(0)) for i in range(4)), end(4, 0)]
    monkeypatch.setattr(reader, "SESSION_LIMIT", 4)
    assert len(read(forged(frames)).sessions) == 4
    monkeypatch.setattr(reader, "SESSION_LIMIT", 3)
    with pytest.raises(FileDamaged, match="too many"):
        read(forged(frames))
    monkeypatch.setattr(reader, "MODEL_LIMIT", 1)

    with pytest.raises(FileDamaged, match="too many models"):
        read(forged([*BEGUN, BEGUN[1], end(0, 0)]))


def patched(index: int, offset: int, value: bytes) -> Frames:
    """A file whose model (1) or session (2) says something else at `offset`."""
    frames = [*BEGUN, SESS, ALL_ROWS, end(1, 2)]
    payload = bytearray(frames[index][1])
    payload[offset : offset + len(value)] = value
    frames[index] = frames[index][0], bytes(payload)
    return frames


HUGE = struct.pack("<q", 2**63 - 1)
NEGATIVE = struct.pack("<q", -1)
STREAMS_AT = 89
"""The place in a session whose id has one letter."""
LIVE_AT = len(SESS[1]) - 16
SPEC_AT = 20 + len("acme") + len("every-kind")


@pytest.mark.parametrize(
    ("index", "offset", "value"),
    [
        (2, 16, NEGATIVE),
        (2, 24, NEGATIVE),
        (2, 24, struct.pack("<q", 1)),
        (2, 32, NEGATIVE),
        (2, 40, NEGATIVE),
        (2, 48, NEGATIVE),
        (2, 56, NEGATIVE),
        (2, 64, b"\1"),
        (2, 64, b"\xff\xff\xff\xff"),
        (2, 68, b"\4\0"),
        (2, 70, b"\xff\xff"),
        (2, 70, b"\0\0"),
        (2, 72, b"\xff\xff\xff\xff"),
        (2, 76, b"\xff\xff\xff\xff"),
        (2, 80, b"\1"),
        (2, 84, b"\1"),
        (2, 84, b"\xff\xff\xff\xff"),
        (2, 88, b"/"),
        (2, 88, b"\xff"),
        (2, 88, b"\x1b"),
        (2, STREAMS_AT, struct.pack("<i", 0)),
        (2, STREAMS_AT + 4, struct.pack("<i", 99)),
        (2, STREAMS_AT + 8, struct.pack("<i", -5)),
        (2, LIVE_AT, NEGATIVE),
        (2, LIVE_AT, HUGE),
        (2, LIVE_AT + 8, HUGE),
        (2, LIVE_AT + 8, bytes(8)),
        (1, 0, NEGATIVE),
        (1, 8, b"\xff\xff"),
        (1, 10, b"\0\0"),
        (1, 12, b"\xff\xff\xff\xff"),
        (1, 16, b"\1"),
        (1, 20, b"\xff"),
        (1, 24, b"/"),
        (1, SPEC_AT, b"X"),
        (1, SPEC_AT + 17, b"\xff\xff\xff\xff\xff\xff"),
    ],
)
def test_a_forged_description_is_refused(index: int, offset: int, value: bytes) -> None:
    """Counts, lengths, names, streams, ranges and the model: each number that a forger may choose."""
    assert SESS[1][STREAMS_AT : STREAMS_AT + 4] == struct.pack("<i", -1)
    assert BEGUN[1][1][SPEC_AT:].startswith(b"ctxcache.model.v1")
    assert isinstance(_read_file(forged(patched(2, 0, b"any uid"))), ArchiveContents)
    with pytest.raises(FileDamaged):
        read(forged(patched(index, offset, value)))


@pytest.mark.parametrize(
    "live", [((0, 1), (1, 2)), ((1, 2), (0, 1)), ((0, 2), (1, 2)), ((0, 0), (1, 2)), ((0, 3),)]
)
def test_ranges_that_are_not_ascending_and_apart_are_refused(live: tuple[tuple[int, int], ...]) -> None:
    """A session of two positions is written in one way."""
    one = replace(SHORT, live=live)
    with pytest.raises(FileDamaged):
        read(forged([*BEGUN, (SESSION, one.encode(0)), ALL_ROWS, end(1, one.token_count)]))


def test_a_tenant_of_too_long_a_name_is_refused() -> None:
    """As no store has one."""
    model = ArchivedModel("t" * 129, SPEC, 0)
    with pytest.raises(FileDamaged):
        read(forged([BEGUN[0], (MODEL, model.encode()), end(0, 0)]))


def test_a_model_with_more_streams_than_any_is_refused() -> None:
    """Well written all the same, and a tenth of what its frame may have."""
    kinds = (StateKind.HIDDEN, StateKind.KV)
    specs = tuple(StreamSpec(Stream(i // 2, kinds[i % 2]), 1, DType.INT8) for i in range(65538))
    model = replace(MODELS[0], spec=replace(SPEC, streams=specs))

    found = _read_file(forged([BEGUN[0], (MODEL, model.encode()), end(0, 0)]))

    assert isinstance(found, FileDamaged)
    assert "has 65538 streams" in str(found)


@settings(max_examples=300, deadline=None)
@given(
    number=st.integers(0, len(FRAMES) - 1),
    at=st.integers(0, 2000),
    value=st.binary(min_size=0, max_size=9),
    cut=st.integers(0, 9),
)
@example(number=3, at=72, value=b"\xff\xff\xff\xff", cut=4)
def test_a_forged_frame_is_read_or_refused(number: int, at: int, value: bytes, cut: int) -> None:
    """Bytes put in the place of others, checksums made right: contents, or our error, and nothing else."""
    frames = list(FRAMES)
    tag, payload = frames[number]
    at %= len(payload) + 1
    frames[number] = (tag, payload[:at] + value + payload[at + cut :])

    found = _read_file(forged(frames))

    assert isinstance(found, FileDamaged | ArchiveContents)


@settings(max_examples=200, deadline=None)
@given(frames=st.lists(st.sampled_from(FRAMES), max_size=12))
def test_frames_in_any_order_are_read_or_refused(frames: Frames) -> None:
    """Left out, repeated, turned around."""
    found = _read_file(forged(frames))

    assert isinstance(found, FileDamaged | ArchiveContents)


def test_frames_of_another_file_do_not_match() -> None:
    """A frame is bound to its file and its place there."""
    first, second = (16 + len(payload) for _, payload in BEGUN)
    data = bytearray(forged([*BEGUN, SESS, ALL_ROWS, end(1, 2)]))
    other = data.copy()
    other[16] ^= 1
    other[40:48] = header_checksum(bytes(other[:40]))

    with pytest.raises(FileDamaged, match="byte 48 does not match"):
        read(bytes(other))
    begin, middle, last = HEADER_BYTES, HEADER_BYTES + first, HEADER_BYTES + first + second
    swapped = data[:begin] + data[middle:last] + data[begin:middle] + data[last:]
    doubled = data[:middle] + data[begin:]
    left_out = data[:begin] + data[middle:]
    for damaged in (swapped, left_out):
        with pytest.raises(FileDamaged, match="byte 48 does not match"):
            read(bytes(damaged))
    with pytest.raises(FileDamaged, match=f"byte {middle} does not match"):
        read(bytes(doubled))
