"""The frames of a backup: what is changed anywhere, cut anywhere or goes on is refused."""

import io
from pathlib import Path

import pytest

from ctxcache.errors import FileDamaged, FormatTooNew
from ctxcache.format import archive
from ctxcache.format.archive import Frame, FrameMaker, Kind, cut, read_frames


def written() -> bytes:
    """A small archive."""
    made = FrameMaker()
    parts: list[tuple[Kind, list[bytes | memoryview]]] = [
        (Kind.FACTS, [b"{}"]), (Kind.ROWS, [b"ab", memoryview(b"cd")]), (Kind.ROWS, [b"abcd"]), (Kind.END, []),
    ]  # fmt: skip
    return made.preamble + b"".join(made.frame(kind, some) for kind, some in parts)


def read(data: bytes) -> list[Frame]:
    """All of its frames."""
    return list(read_frames(io.BytesIO(data), "it"))


def test_frames_come_back() -> None:
    """Kinds and payloads, in their order; equal payloads are not equal frames."""
    frames = read(written())

    assert [(frame.kind, frame.payload) for frame in frames] == [
        (Kind.FACTS, b"{}"), (Kind.ROWS, b"abcd"), (Kind.ROWS, b"abcd"), (Kind.END, b""),
    ]  # fmt: skip
    assert written()[frames[1].offset : frames[2].offset] != written()[frames[2].offset : frames[3].offset]


def test_a_change_of_any_bit_is_noticed() -> None:
    """In the preamble, in lengths, in payloads, in checksums."""
    data = written()
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises((FileDamaged, FormatTooNew)):
                read(bytes(changed))


def test_a_cut_anywhere_is_noticed_and_so_is_what_follows() -> None:
    """Between frames too, and a frame that is left out, doubled or moved."""
    data = written()
    begins = [frame.offset for frame in read(data)]
    for end in range(len(data)):
        with pytest.raises(FileDamaged):
            read(data[:end])
    first, second, third, last = (
        data[begin:end] for begin, end in zip(begins, [*begins[1:], len(data)], strict=True)
    )
    for frames in ((first, third, last), (first, second, second, third, last), (first, third, second, last)):
        with pytest.raises(FileDamaged):
            read(data[: begins[0]] + b"".join(frames))
    with pytest.raises(FileDamaged, match="goes on after its end"):
        read(data + b"\0")


def test_a_newer_version_is_refused_by_its_name() -> None:
    """And one that is no backup at all, however short or long."""
    data = bytearray(written())
    data[8] = archive.ARCHIVE_VERSION + 1
    with pytest.raises(FormatTooNew, match=r"it has format 2; this version reads up to 1"):
        read(bytes(data))
    with pytest.raises(FileDamaged, match="no backup"):
        read(Path(__file__).read_bytes())


def test_views_are_gathered_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each list has as many bytes as a frame takes, but the last."""
    monkeypatch.setattr(archive, "FRAME_BYTES", 4)
    lists = [b"".join(parts) for parts in cut(map(memoryview, (b"a", b"bcdefghi", b"", b"jk")))]

    assert lists == [b"abcd", b"efgh", b"ijk"]
    assert list(cut([])) == []
