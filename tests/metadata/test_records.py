"""Records as bytes: whole or refused."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import compress
from typing import cast, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from metadata_contract import make_model, make_segment, make_session
from xxhash import xxh3_64_intdigest

from ctxcache.errors import CorruptMetadata
from ctxcache.format.ids import LABEL_KEY, LABEL_VALUE, LABELS_LIMIT
from ctxcache.format.layout import SegmentIdentity, Slot
from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.format.streams import Content, DType, StateKind, Stream, StreamSpec
from ctxcache.storage.metadata import records
from ctxcache.storage.metadata.base import (
    BlockRecord,
    KeptSegments,
    KeptSessions,
    ModelRecord,
    SegmentRecord,
    SessionRecord,
)

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
SIZE = st.integers(0, (1 << 63) - 1)
UINT64 = st.integers(0, (1 << 64) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
NAME = st.text(max_size=40)
STREAM = st.builds(Stream, INT32, st.sampled_from(StateKind))
PLACES = st.builds(Slot, st.integers(0, 65535), SIZE, SIZE)
ONE_COPY = st.builds(
    SegmentRecord,
    UINT64,
    st.builds(
        SegmentIdentity,
        NAME,
        st.binary(min_size=16, max_size=16),
        INT64,
        INT64,
        INT64,
        st.binary(min_size=32, max_size=32),
    ),
    PLACES,
    UINT64,
    st.lists(st.binary(min_size=32, max_size=32), max_size=3).map(tuple),
    st.integers(0, 2**32 - 1),
    copy=st.none(),
)
SEGMENTS = ONE_COPY | st.builds(
    lambda record, place: record._replace(copy=place._replace(size_bytes=record.slot.size_bytes)),
    ONE_COPY,
    PLACES,
)
LABELS = st.dictionaries(
    st.from_regex(LABEL_KEY, fullmatch=True),
    st.from_regex(LABEL_VALUE, fullmatch=True),
    max_size=LABELS_LIMIT,
).map(lambda labels: tuple(sorted(labels.items())))
SESSIONS = st.builds(
    SessionRecord,
    uid=st.binary(min_size=16, max_size=16),
    tenant=NAME,
    session_id=NAME,
    model_id=NAME,
    layout=st.lists(STREAM, max_size=5).map(tuple),
    generation=INT64,
    segment_ids=st.lists(UINT64, max_size=5).map(tuple),
    live=st.lists(st.tuples(INT64, INT64), max_size=4).map(tuple),
    log_end=INT64,
    create_time_ns=INT64,
    access_time_ns=INT64,
    expire_time_ns=INT64,
    ttl_ns=st.none() | INT64,
    is_pinned=st.booleans(),
    copies=st.sampled_from((1, 2)),
    labels=LABELS,
)
BLOCKS = st.integers(0, 4).flatmap(
    lambda count: st.builds(
        replace,
        SESSIONS,
        layout=st.lists(STREAM, min_size=count, max_size=count).map(tuple),
        labels=st.just(()),
        block=st.builds(
            BlockRecord,
            st.binary(min_size=32, max_size=32),
            NAME,
            st.lists(INT32, min_size=count, max_size=count).map(tuple),
        ),
    )
)
STREAM_SPECS = st.builds(StreamSpec, STREAM, INT64, st.sampled_from(DType))
VALUES = {
    str: NAME,
    int: INT64,
    bool: st.booleans(),
    DType: st.sampled_from(DType),
    tuple[StreamSpec, ...]: st.lists(STREAM_SPECS, max_size=4).map(tuple),
}
SPECS = st.builds(ModelSpec, **{name: VALUES[kind] for name, kind in get_type_hints(ModelSpec).items()})
GROUPS = st.lists(st.floats(1, 2.0**90, width=32), min_size=3, max_size=3)
PROBES = st.builds(
    lambda ids, groups: ModelProbe(
        DType.FLOAT16, ids, 3, b"".join(struct.pack("<3f", *group) for group in groups)
    ),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=64).map(tuple),
    st.lists(GROUPS, min_size=1, max_size=4),
)
MODELS = st.builds(ModelRecord, NAME, SPECS, INT64, st.none() | PROBES)


@dataclass(frozen=True)
class Encoded:
    """A record as it is kept, and how to read it."""

    record: object
    key: bytes
    value: bytes
    decode: Callable[[bytes, bytes], object]


def encode(record: ModelRecord | SessionRecord | SegmentRecord) -> Encoded:
    """Encode a record of any kind."""
    match record:
        case ModelRecord():
            key = records.model_key(record.tenant, record.spec.model_id)
            return Encoded(record, key, records.encode_model(record), records.decode_model)
        case SessionRecord():
            return Encoded(
                record,
                records.session_key(record.uid),
                records.encode_session(record),
                records.decode_session,
            )
        case SegmentRecord():
            key = records.segment_key(record.segment_id)
            return Encoded(record, key, records.encode_segment(record), records.decode_segment)


def look_at_session(key: bytes, value: bytes) -> KeptSessions:
    """Look at it between two others, as opening does; what is not looked at is read."""
    around = [make_session(uid) for uid in (1 << 64, 1 << 65)]
    keys = [records.session_key(record.uid) for record in around]
    values = list(map(records.encode_session, around))
    found = records.keep_sessions([keys[0], key, keys[1]], [values[0], value, values[1]], {})
    for uid, kept in found.others:
        assert isinstance(kept, bytes)
        records.decode_session(records.session_key(uid), kept)
    return found


def look_at_segment(key: bytes, value: bytes) -> KeptSegments:
    """Look at it between two others, as opening does."""
    around = [make_segment(segment_id) for segment_id in (1 << 40, 1 << 41)]
    keys = [records.segment_key(record.segment_id) for record in around]
    values = list(map(records.encode_segment, around))
    return records.keep_segments([keys[0], key, keys[1]], [values[0], value, values[1]])


SAMPLES = {
    "model": encode(make_model()),
    "session": encode(make_session(segment_ids=(1, 2))),
    "session with contents": encode(
        replace(
            make_session(segment_ids=(1, 2)),
            salt=b"a user",
            contents=(Content(0, 40, bytes(range(32))), Content(60, 64, bytes(32))),
        )
    ),
    "session with labels": encode(
        replace(make_session(segment_ids=(1, 2)), labels=(("app", ""), ("user", "4711")))
    ),
    "segment": encode(make_segment()),
    "block": encode(
        replace(make_session(segment_ids=(3,)), block=BlockRecord(bytes(32), "blocks/a", (1, 1 << 24)))
    ),
}
SAMPLES |= {
    "session with labels looked at": replace(SAMPLES["session with labels"], decode=look_at_session),
    "session looked at": replace(SAMPLES["session with contents"], decode=look_at_session),
    "segment looked at": replace(SAMPLES["segment"], decode=look_at_segment),
}


def reseal(key: bytes, sealed: bytes) -> bytes:
    """Put a right checksum under any bytes, as another version of the software would."""
    return sealed + xxh3_64_intdigest(sealed, seed=xxh3_64_intdigest(key)).to_bytes(8, "little")


@given(MODELS | SESSIONS | BLOCKS | SEGMENTS)
def test_every_record_comes_back_as_it_went_in(record: ModelRecord | SessionRecord | SegmentRecord) -> None:
    """Encoding loses nothing, whatever is in the fields."""
    encoded = encode(record)

    assert encoded.decode(encoded.key, encoded.value) == record


@given(st.lists(SESSIONS | BLOCKS, max_size=6))
def test_a_look_at_sessions_finds_what_their_records_say(some: list[SessionRecord]) -> None:
    """Columns hold the fields of those that are plain, whatever they are; the rest are told apart."""
    keys = [records.session_key(record.uid) for record in some]
    found = records.keep_sessions(keys, list(map(records.encode_session, some)), {})
    is_plain = [not (record.block or record.is_pinned or record.copies > 1) for record in some]
    plain = list(compress(some, is_plain))
    kinds = [found.kinds[number] for number in found.kind_numbers]

    assert found.uids == b"".join(record.uid for record in plain)
    assert found.session_ids == [record.session_id for record in plain]
    assert [kind[:2] for kind in kinds] == [(record.tenant, record.model_id) for record in plain]
    assert len(set(kinds)) == len({(record.tenant, record.model_id, record.layout) for record in plain})
    assert list(found.segment_counts) == [len(record.segment_ids) for record in plain]
    assert found.segment_ids.tolist() == [each for record in plain for each in record.segment_ids]
    live = [(record.live[0][0], record.live[-1][1]) if record.live else (0, 0) for record in plain]
    assert list(zip(found.live_begins.tolist(), found.live_ends.tolist(), strict=True)) == live
    assert found.access_times_ns.tolist() == [record.access_time_ns for record in plain]
    assert found.expire_times_ns.tolist() == [record.expire_time_ns for record in plain]
    assert [uid for uid, _ in found.others] == [record.uid for record in some if record not in plain]


@given(st.lists(SEGMENTS, max_size=6))
def test_a_look_at_segments_finds_what_their_records_say(some: list[SegmentRecord]) -> None:
    """Columns hold the fields, whatever they are; one with a copy is not plain, and keys are told whose."""
    keys = [records.segment_key(record.segment_id) for record in some]
    found = records.keep_segments(keys, list(map(records.encode_segment, some)))

    assert found.segment_ids.tolist() == [record.segment_id for record in some]
    assert found.begins.tolist() == [record.identity.begin for record in some]
    assert found.token_counts.tolist() == [record.identity.token_count for record in some]
    columns = found.path_indexes, found.offsets_bytes, found.sizes_bytes
    assert [tuple(each) for each in np.stack(columns).T.tolist()] == [record.slot for record in some]
    assert found.segment_tokens.tolist() == [record.segment_tokens for record in some]
    assert found.is_plain.tolist() == [record.copy is None for record in some]
    assert found.keyed == [
        (i, record.identity.tenant, record.identity.model_fingerprint, record.keys)
        for i, record in enumerate(some)
        if record.keys
    ]


@given(MODELS | SESSIONS | BLOCKS | SEGMENTS, st.data())
def test_any_flipped_bit_of_any_record_is_refused(
    record: ModelRecord | SessionRecord | SegmentRecord, data: st.DataObject
) -> None:
    """No single flipped bit passes, wherever it is."""
    encoded = encode(record)
    position = data.draw(st.integers(0, len(encoded.value) * 8 - 1))
    damaged = bytearray(encoded.value)
    damaged[position // 8] ^= 1 << position % 8

    with pytest.raises(CorruptMetadata):
        encoded.decode(encoded.key, bytes(damaged))


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_every_flipped_bit_is_refused(sample: Encoded) -> None:
    """Every bit of a record is covered, one after the other."""
    for position in range(len(sample.value) * 8):
        damaged = bytearray(sample.value)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptMetadata):
            sample.decode(sample.key, bytes(damaged))


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_a_record_cut_short_is_refused(sample: Encoded) -> None:
    """No beginning of a record passes for a record."""
    for size_bytes in range(len(sample.value)):
        with pytest.raises(CorruptMetadata):
            sample.decode(sample.key, sample.value[:size_bytes])


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_a_value_under_another_key_is_refused(sample: Encoded) -> None:
    """A value is tied to its key: right bytes in the wrong place are wrong."""
    with pytest.raises(CorruptMetadata, match="checksum"):
        sample.decode(sample.key[:-1] + bytes((sample.key[-1] ^ 1,)), sample.value)


def test_a_session_is_not_read_as_a_segment() -> None:
    """The kind is part of the key, and so of the checksum."""
    session = SAMPLES["session"]
    with pytest.raises(CorruptMetadata):
        records.decode_segment(records.segment_key(1), session.value)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_an_unknown_version_is_named(sample: Encoded) -> None:
    """A record of a newer version is refused as that, not as damage."""
    newer = reseal(sample.key, bytes((2,)) + sample.value[1:-8])

    with pytest.raises(CorruptMetadata, match="record version 2"):
        sample.decode(sample.key, newer)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"\xff" * 400], ids=["empty", "object", "list", "ones"])
def test_a_body_that_does_not_parse_is_refused(sample: Encoded, body: bytes) -> None:
    """A right checksum over nonsense is still nonsense."""
    with pytest.raises(CorruptMetadata, match="parse"):
        sample.decode(sample.key, reseal(sample.key, b"\x01" + body))


def test_the_error_names_the_record() -> None:
    """An operator can tell which record it is."""
    sample = SAMPLES["segment"]
    with pytest.raises(CorruptMetadata) as caught:
        sample.decode(sample.key, b"short")

    assert caught.value.where == f"record g/{1:016x}"


def test_a_session_without_an_expiry_of_its_own_keeps_a_ttl_of_zero_apart() -> None:
    """No ttl and a ttl of 0 are two things."""
    zero = encode(replace(make_session(), ttl_ns=0))

    assert zero.decode(zero.key, zero.value) == zero.record


def test_a_uid_of_another_length_has_no_key() -> None:
    """Keys are of one length, so that none is the beginning of another."""
    with pytest.raises(ValueError, match="16 bytes"):
        records.session_key(b"short")


def test_a_kind_of_a_later_version_is_named() -> None:
    """A stream of a kind that this version does not know is refused by its number, not taken for another."""
    later = Stream(0, cast("StateKind", 99))
    spec = StreamSpec(later, 96, DType.PACKED)
    session = encode(replace(make_session(), layout=(later,)))
    model = encode(replace(make_model(), spec=replace(make_model().spec, streams=(spec,))))

    for sample in (session, model):
        with pytest.raises(CorruptMetadata, match="99 is not a valid StateKind"):
            sample.decode(sample.key, sample.value)


@pytest.mark.parametrize("block", [None, BlockRecord(bytes(32), "parent", (64, 32))])
def test_a_session_with_bytes_behind_it_is_refused(block: BlockRecord | None) -> None:
    """Sealed as it is: a record that says less than it holds was not written by this version."""
    streams = tuple(Stream(layer, StateKind.KV) for layer in range(2))
    record = replace(make_session(), block=block, layout=streams) if block else make_session()
    key, value = records.session_key(record.uid), records.encode_session(record)
    longer = records._seal(key, value[1:-8] + b"?")

    assert records.decode_session(key, value) == record
    with pytest.raises(CorruptMetadata, match="does not parse"):
        records.decode_session(key, longer)
