"""The export format against a file that is kept, and against a reader that knows only the document."""

import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export_reader import described as described_by_the_document
from export_reader import read
from golden_export import BEGIN_TIME_NS, GOLDEN, GOLDEN_SESSIONS, described, rows, write
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxcache.format.probe import ModelProbe
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream
from ctxcache.portable import layout
from ctxcache.portable.description import decode
from ctxcache.portable.files import source
from ctxcache.portable.session_reader import SessionReader

DOCUMENT = (Path(__file__).parents[2] / "docs" / "export_format.md").read_text(encoding="utf-8")
WHOLE = {one.session_id: one for one, counts in GOLDEN_SESSIONS if sum(counts) == one.token_count}


def test_the_golden_file_is_what_is_written(tmp_path: Path) -> None:
    """The same sessions give the same bytes, or the version must change."""
    write(tmp_path / "made")

    assert (tmp_path / "made").read_bytes() == GOLDEN.read_bytes()


def test_a_reader_made_from_the_document_reads_the_golden_file() -> None:
    """All that was put in comes out of it: facts, rows of every kind, and what was given up is not there."""
    found = read(GOLDEN.read_bytes())

    assert list(found) == ["every-kind", "empty", "long:1"]
    for session_id, one in found.items():
        expected = WHOLE[session_id]
        facts = (one.uid, one.generation, one.token_count, one.ttl_ns, one.expire_time_ns, one.is_pinned)
        assert facts == (
            expected.uid, expected.generation, expected.token_count, expected.ttl_ns, expected.expire_time_ns,
            expected.is_pinned,
        )  # fmt: skip
        assert (one.model_id, one.model_fingerprint) == (
            expected.model.model_id,
            expected.model.fingerprint(),
        )
        assert list(one.rows) == [tuple(stream) for stream in expected.layout]
        for (layer, kind), data in one.rows.items():
            assert bytes(data) == rows(expected, Stream(layer, StateKind(kind))).tobytes()


def test_our_reader_reads_the_golden_file() -> None:
    """The same, and when the export began."""
    with source(str(GOLDEN)) as opened:
        reader = SessionReader(opened)
        found = {}
        for one in reader.sessions():
            parts = [{stream: part.copy() for stream, part in block.items()} for block in one.blocks()]
            if not one.is_void:
                found[one.described.session_id] = (one.described, parts)

    assert reader.begin_time_ns == BEGIN_TIME_NS
    assert {session_id: facts for session_id, (facts, _) in found.items()} == WHOLE
    for facts, parts in found.values():
        for stream in facts.layout if parts else ():
            np.testing.assert_array_equal(
                np.concatenate([part[stream] for part in parts]), rows(facts, stream)
            )


SESSION_IDS = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9._:-]{0,127}", fullmatch=True)
CUTS = st.lists(st.integers(1, 5), max_size=4)


@settings(max_examples=40, deadline=None)
@given(sessions=st.dictionaries(SESSION_IDS, st.tuples(CUTS, st.booleans()), max_size=4))
def test_both_readers_find_what_was_written(
    sessions: dict[str, tuple[list[int], bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However a session's tokens are put into frames, and whichever are given up."""
    file = tmp_path_factory.mktemp("written") / "file"
    made = [
        (described(session_id, sum(cuts) + is_void), cuts) for session_id, (cuts, is_void) in sessions.items()
    ]
    write(file, made)

    expected = {one.session_id: one.token_count for one, cuts in made if one.token_count == sum(cuts)}
    assert {name: one.token_count for name, one in read(file.read_bytes()).items()} == expected
    with source(str(file)) as opened:
        ours: dict[str, int] = {}
        for one in SessionReader(opened).sessions():
            count = sum(len(block[TOKENS]) for block in one.blocks())
            ours |= {} if one.is_void else {one.described.session_id: count}
    assert ours == expected


def test_a_description_survives() -> None:
    """Bytes and back."""
    probe = ModelProbe(DType.FLOAT16, (3, 1), 2, struct.pack("<4f", 1, -2, 0, 4))
    for one, _ in GOLDEN_SESSIONS:
        assert decode(one.encode()) == one
        probed = replace(one, probe=probe)
        assert decode(probed.encode()) == probed
        assert described_by_the_document(probed.encode()) == described_by_the_document(one.encode())


def test_the_documented_tables_leave_no_byte_out() -> None:
    """Fields follow one another up to the sizes that the text says: the header's, and the fixed part of SESS."""
    tables = re.split(r"^\| offset .*$", DOCUMENT, flags=re.MULTILINE)[1:]
    ends = []
    for table in tables:
        end = 0
        for begin, size in re.findall(r"^\| (\d+) \| (\d+) \| (?:bytes|[iu]\d+) \|", table, re.MULTILINE):
            assert int(begin) == end
            end += int(size)
        ends.append(end)

    assert ends == [layout.FILE_HEADER.size + layout.CHECKSUM.size, layout.FRAME_HEAD.size, 64, 16, 16]
    assert struct.calcsize("<16sqqqqHHHHII") == 64


def test_the_documented_bounds_are_those_of_the_reader() -> None:
    """As powers of two."""
    for limit in (layout.PAYLOAD_LIMIT_BYTES, layout.DESCRIPTION_LIMIT_BYTES, layout.SESSION_LIMIT):
        assert f"| 2^{limit.bit_length() - 1}" in DOCUMENT
