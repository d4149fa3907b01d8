"""The archive format against a file that is kept, and against a reader that knows only the document."""

import re
import struct
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from archive_reader import described as described_by_the_document
from archive_reader import modelled as model_by_the_document
from archive_reader import read
from golden_archive import (
    BEGIN_TIME_NS,
    GOLDEN,
    GOLDEN_SESSIONS,
    MODELS,
    ORIGIN,
    Cut,
    Written,
    described,
    live_rows,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxcache.archive import contents, frames, reader
from ctxcache.archive.contents import decode_archived_model, decode_origin, decode_session
from ctxcache.archive.frames import source
from ctxcache.archive.reader import ArchiveReader
from ctxcache.format.model import ModelProbe
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream

DOCUMENT = (Path(__file__).parents[2] / "docs" / "archive_format.md").read_text(encoding="utf-8")
WHOLE = {
    (one.described.model.tenant, one.described.session_id): one.described
    for one in GOLDEN_SESSIONS
    if one.is_whole
}
FACTS = (
    "session_id",
    "uid",
    "generation",
    "log_end",
    "token_count",
    "create_time_ns",
    "access_time_ns",
    "expire_time_ns",
    "ttl_ns",
    "is_pinned",
    "salt",
    "copies",
    "labels",
    "contents",
)


def test_the_golden_file_is_what_is_written(tmp_path: Path) -> None:
    """The same sessions give the same bytes, or the version must change."""
    write(tmp_path / "made")

    assert (tmp_path / "made").read_bytes() == GOLDEN.read_bytes()


def test_a_reader_made_from_the_document_reads_the_golden_file() -> None:
    """All that was put in comes out of it: facts, rows of every kind, shared ones.

    Void sessions are not there.
    """
    found = read(GOLDEN.read_bytes())

    assert list(found) == list(WHOLE)
    for name, one in found.items():
        expected = WHOLE[name]
        for fact in FACTS:
            assert getattr(one, fact) == getattr(expected, fact), (name, fact)
        assert tuple(one.live) == expected.live
        facts = one.model.tenant, one.model.model_id, one.model.create_time_ns, one.model.fingerprint
        model = expected.model
        assert facts == (model.tenant, model.spec.model_id, model.create_time_ns, model.spec.fingerprint())
        assert list(one.rows) == [tuple(stream) for stream in expected.layout]
        for (layer, kind), data in one.rows.items():
            assert bytes(data) == live_rows(expected, Stream(layer, StateKind(kind))).tobytes()


def test_our_reader_reads_the_golden_file() -> None:
    """The same, and who wrote it when."""
    with source(str(GOLDEN)) as opened:
        archive = ArchiveReader(opened)
        found = {}
        for one in archive.sessions():
            parts = [{stream: part.copy() for stream, part in some.items()} for some in one.rows()]
            if not one.is_void:
                found[one.described.model.tenant, one.described.session_id] = (one.described, parts)

    assert (archive.begin_time_ns, archive.origin, tuple(archive.models)) == (BEGIN_TIME_NS, ORIGIN, MODELS)
    assert {name: facts for name, (facts, _) in found.items()} == WHOLE
    for facts, parts in found.values():
        for stream in facts.layout if parts else ():
            np.testing.assert_array_equal(
                np.concatenate([part[stream] for part in parts]), live_rows(facts, stream)
            )


SESSION_IDS = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9._:-]{0,127}", fullmatch=True)
CUTS = st.lists(st.integers(1, 5), max_size=4)


@settings(max_examples=40, deadline=None)
@given(sessions=st.dictionaries(SESSION_IDS, st.tuples(CUTS, st.booleans(), st.integers(0, 3)), max_size=4))
def test_both_readers_find_what_was_written(
    sessions: dict[str, tuple[list[int], bool, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However tokens are put into frames, whatever was dropped before, and whichever are given up."""
    file = tmp_path_factory.mktemp("written") / "file"
    made = []
    for session_id, (counts, is_void, dropped) in sessions.items():
        cuts = tuple(Cut(count, more=2, skipped=0 if i else dropped) for i, count in enumerate(counts))
        one = described(session_id, sum(counts) + is_void, dropped=dropped if counts else 0)
        made.append(Written(one, cuts))
    write(file, made)

    expected = {one.described.session_id: one.described.token_count for one in made if one.is_whole}
    assert {one.session_id: one.token_count for one in read(file.read_bytes()).values()} == expected
    with source(str(file)) as opened:
        ours: dict[str, int] = {}
        for found in ArchiveReader(opened).sessions():
            count = sum(len(some[TOKENS]) for some in found.rows())
            ours |= {} if found.is_void else {found.described.session_id: count}
    assert ours == expected


def test_descriptions_survive() -> None:
    """Bytes and back."""
    probe = ModelProbe(DType.FLOAT16, (3, 1), 2, struct.pack("<4f", 1, -2, 0, 4))
    for model in MODELS:
        for one in (model, replace(model, probe=probe)):
            assert decode_archived_model(one.encode()) == one
            assert model_by_the_document(one.encode()) == model_by_the_document(model.encode())
    models = list(MODELS)
    by_the_document = [model_by_the_document(model.encode()) for model in models]
    for written in GOLDEN_SESSIONS:
        payload = written.described.encode(models.index(written.described.model))
        assert decode_session(payload, models) == written.described
        found = asdict(described_by_the_document(payload, by_the_document))
        assert found["session_id"] == written.described.session_id
    assert decode_origin(ORIGIN.encode()) == ORIGIN


def test_the_documented_tables_leave_no_byte_out() -> None:
    """Fields follow one another up to the sizes that the text says.

    Those of the header and of each payload's fixed part.
    """
    tables = re.split(r"^\| offset .*$", DOCUMENT, flags=re.MULTILINE)[1:]
    ends = []
    for table in tables:
        end = 0
        for begin, size in re.findall(r"^\| (\d+) \| (\d+) \| (?:bytes|[iu]\d+) \|", table, re.MULTILINE):
            assert int(begin) == end
            end += int(size)
        ends.append(end)

    fixed = (contents._ORIGIN, contents._MODEL, contents._SESSION, contents.STRETCH, contents.STRETCH)
    sizes = [*(one.size for one in fixed), contents.TOTALS.size]
    sizes[4] += contents.FRAME_NUMBER.size
    assert ends == [frames.FILE_HEADER.size + frames.CHECKSUM.size, frames.FRAME_HEAD.size, *sizes]


def test_the_documented_bounds_are_those_of_the_reader() -> None:
    """As powers of two."""
    limits = (
        frames.PAYLOAD_LIMIT_BYTES,
        frames.DESCRIPTION_LIMIT_BYTES,
        reader.SESSION_LIMIT,
        reader.MODEL_LIMIT,
    )
    for limit in limits:
        assert f"| 2^{limit.bit_length() - 1}" in DOCUMENT


def test_labels_are_in_a_session_of_their_own_flag() -> None:
    """One without any is written as before there were labels; one with some reads as it was written."""
    plain = GOLDEN_SESSIONS[1].described
    labelled = replace(plain, labels=(("app", "chat"), ("user", "4711")))
    payload = labelled.encode(0)

    assert decode_session(payload, [plain.model]) == labelled
    assert described_by_the_document(payload, [None]).labels == labelled.labels  # type: ignore[list-item]
    assert payload.replace(b"app=chat\nuser=4711", b"")[70:] == plain.encode(0)[70:]
    for damaged in (payload[:-18], payload[:-1] + b"\n", payload.replace(b"app=chat\n", b"user=1\n")):
        with pytest.raises(ValueError, match=r"label|match|key|does not"):
            decode_session(damaged, [plain.model])
