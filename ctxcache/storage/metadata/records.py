"""Records as bytes: keys, values, and the checksum that ties a value to its key.

Knows no database. Worst case of a decode is CorruptMetadata: no record is ever half believed.

Keys, by prefix, in the order a store iterates them:

    c/                                                     the last commit
    g/ | segment id u64 big endian                         segments, ascending by id
    m/ | tenant bytes u16 big endian | tenant | model id   models
    q/ | path number u32 big endian | offset u64 big endian SSD slots kept from use
    s/ | session uid, 16 bytes                             sessions

A value is `version u8 | body | checksum u64`, little endian. The checksum is XXH3-64 of all before
it, seeded with XXH3-64 of the key, so that a value under another key fails like a flipped bit
does. The body does not repeat the key. The checksum's place and seed are the same in
every version, so that a newer record is told apart from a damaged one.

    segment  fixed part | tenant | keys, 32 bytes each | of one with a copy: path number u32 | offset u64
    session  fixed part | tenant | session id | model id | (layer i32, kind i32)... | ids u64...
             | (begin i64, end i64)... | salt | (begin i64, end i64, digest 32)...
             of one with labels also: key=value in lines, to the end
             of a block also: space 32 | parent's id length u16 | parent's id | size i32 of each part
    model    JSON object; its probe, if any, in base64
    commit   sequence u64 | session count u64 | XOR of all session values' checksums u64
    slot     size in bytes u64
"""

import base64
import json
import struct
import sys
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import lru_cache, reduce
from itertools import chain, compress
from operator import xor
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from ctxcache.errors import CorruptMetadata
from ctxcache.format.ids import Labels, pack_labels, parse_labels
from ctxcache.format.layout import SegmentIdentity, Slot
from ctxcache.format.model import ModelSpec, decode_probe
from ctxcache.format.streams import DIGEST_BYTES, Content, DType, StateKind, Stream, StreamSpec
from ctxcache.storage.metadata.base import (
    BlockRecord,
    Changes,
    KeptSegments,
    KeptSessions,
    KeyedSegment,
    Kind,
    ModelRecord,
    SegmentRecord,
    SessionRecord,
    as_json,
    streams_texts,
)

MODEL_PREFIX = b"m/"
SESSION_PREFIX = b"s/"
SEGMENT_PREFIX = b"g/"
SLOT_PREFIX = b"q/"
COMMIT_KEY = b"c/"
RECORD_VERSION = 1
GENERATION_BITS = 32
"""Changes that one session can see in one run before its generations reach those after the next crash."""
UID_BYTES = 16
# Values, byte by byte. The fixed part tells the lengths of the rest:
#
#     | 1 | fixed part ............. | tenant | ... variable parts ... | XXH3-64 |
#      version        counts ─────────────────────► lengths             over all before it, seeded by the key
_CHECKSUM = struct.Struct("<Q")
_SEGMENT = struct.Struct("<16sqqq32sIqqQIH")
# A key is one field: iteration over many keys is one call into C.
_PREFIX_KEY = struct.Struct("<32s")
_SESSION = struct.Struct("<qqqqqqBHHHIIIHI")
_STREAM = struct.Struct("<ii")
_RANGE = struct.Struct("<qq")
_CONTENT = struct.Struct(f"<qq{DIGEST_BYTES}s")
_COMMIT = struct.Struct("<QQQ")
_SLOT = struct.Struct("<Q")
_SLOT_KEY = struct.Struct(">IQ")
_COPY = struct.Struct("<IQ")
"""A length that no key has. The length of the rest behind the keys so tells whether there is a copy."""
# These are the fixed parts of `_SESSION` and `_SEGMENT`, for many at once.
_SESSION_LENGTHS = ("tenant", "id", "model", "streams", "segments", "ranges", "salt", "contents")
_SESSION_HEAD = np.dtype(
    [
        ("generation", "<i8"), ("log_end", "<i8"), ("create_time_ns", "<i8"), ("access_time_ns", "<i8"),
        ("expire_time_ns", "<i8"), ("ttl_ns", "<i8"), ("flags", "u1"), ("tenant", "<u2"), ("id", "<u2"),
        ("model", "<u2"), ("streams", "<u4"), ("segments", "<u4"), ("ranges", "<u4"), ("salt", "<u2"),
        ("contents", "<u4"),
    ]
)  # fmt: skip
_SEGMENT_HEAD = np.dtype(
    [
        ("uid", "V16"), ("generation", "<i8"), ("begin", "<i8"), ("token_count", "<i8"),
        ("fingerprint", "V32"), ("path_index", "<u4"), ("offset_bytes", "<i8"), ("size_bytes", "<i8"),
        ("header_checksum", "<u8"), ("segment_tokens", "<u4"), ("tenant", "<u2"),
    ]
)  # fmt: skip
_NOTHING_LIVE = bytes(16)
LAYOUTS_KEPT = 256
"""Layouts of sessions that are kept decoded: a model has one or two."""
_IS_PINNED = 1
_HAS_TTL = 2
_IS_BLOCK = 4
_HAS_COPIES = 8
_HAS_LABELS = 16
_BLOCK = struct.Struct("<32sH")
Record = TypeVar("Record")


def model_key(tenant: str, model_id: str) -> bytes:
    """The key of a model's record."""
    raw = tenant.encode()
    # The tenant's length comes first: "a" + "bc" and "ab" + "c" are two models.
    return MODEL_PREFIX + len(raw).to_bytes(2, "big") + raw + model_id.encode()


def session_key(uid: bytes) -> bytes:
    """The key of a session's record. `uid` is 16 bytes."""
    if len(uid) != UID_BYTES:
        raise ValueError(f"a session uid is {UID_BYTES} bytes, not {len(uid)}")
    return SESSION_PREFIX + uid


def segment_key(segment_id: int) -> bytes:
    """The key of a segment's record. Keys sort as ids do."""
    # A database sorts bytes, and ids are read in ascending order.
    return SEGMENT_PREFIX + segment_id.to_bytes(8, "big")


def encode_segment(record: SegmentRecord) -> bytes:
    """Pack the value kept under `segment_key`.

    Raises struct.error for a number out of its range, ValueError for a key of another length.
    """
    identity, slot = record.identity, record.slot
    fixed = _SEGMENT.pack(
        identity.session_uid,
        identity.generation,
        identity.begin,
        identity.token_count,
        identity.model_fingerprint,
        slot.path_index,
        slot.offset_bytes,
        slot.size_bytes,
        record.header_checksum,
        record.segment_tokens,
        len(tenant := identity.tenant.encode()),
    )
    if any(len(key) != _PREFIX_KEY.size for key in record.keys):
        raise ValueError(f"a key is {_PREFIX_KEY.size} bytes")
    copy = b"" if record.copy is None else _COPY.pack(record.copy.path_index, record.copy.offset_bytes)
    # A copy is 12 bytes and a key 32: the length of what is left says whether there is one.
    return _seal(segment_key(record.segment_id), b"".join((fixed, tenant, *record.keys, copy)))


def decode_segment(key: bytes, value: bytes) -> SegmentRecord:
    """Read a segment back. Raises CorruptMetadata."""
    return _decode(key, value, _read_segment)


def encode_session(record: SessionRecord) -> bytes:
    """Pack the value kept under `session_key`. Raises struct.error for a number out of its range."""
    names = [name.encode() for name in (record.tenant, record.session_id, record.model_id)]
    block = record.block
    # Most records have one copy, no block and no labels, and take no byte for any of them.
    flags = _IS_PINNED * record.is_pinned | _HAS_TTL * (record.ttl_ns is not None) | _IS_BLOCK * bool(block)
    flags |= _HAS_COPIES * (record.copies > 1) | _HAS_LABELS * bool(record.labels)
    fixed = _SESSION.pack(
        record.generation,
        record.log_end,
        record.create_time_ns,
        record.access_time_ns,
        record.expire_time_ns,
        record.ttl_ns or 0,
        flags,
        # The lengths are in the order of the parts that follow.
        *map(len, names),
        len(record.layout),
        len(record.segment_ids),
        len(record.live),
        len(record.salt),
        len(record.contents),
    )
    streams = [_STREAM.pack(stream.layer, stream.kind) for stream in record.layout]
    segment_ids = struct.pack(f"<{len(record.segment_ids)}Q", *record.segment_ids)
    live = struct.pack(f"<{2 * len(record.live)}q", *chain.from_iterable(record.live))
    contents = [_CONTENT.pack(*content) for content in record.contents] if record.contents else []
    # A block's part comes last, or a session's labels: a block has none.
    besides = pack_labels(record.labels) if block is None else _packed_block(block)
    parts = [fixed, *names, *streams, segment_ids, live, record.salt, *contents, besides]
    return _seal(session_key(record.uid), b"".join(parts))


def _packed_block(block: BlockRecord) -> bytes:
    parent = block.parent_id.encode()
    sizes = struct.pack(f"<{len(block.part_bytes)}i", *block.part_bytes)
    return b"".join((_BLOCK.pack(block.space, len(parent)), parent, sizes))


def decode_session(key: bytes, value: bytes) -> SessionRecord:
    """Read a session back. Raises CorruptMetadata."""
    return _decode(key, value, _read_session)


def keep_sessions(keys: list[bytes], values: list[bytes], kinds: dict[object, Kind]) -> KeptSessions:
    """Look at sessions' values, which are kept as they are. Raises CorruptMetadata.

    `kinds`: the kinds so far, by the bytes that tell them.
    """
    verify(keys, values)
    heads = _heads(keys, values, _SESSION_HEAD)
    is_plain = heads["flags"] & ~np.uint8(_HAS_TTL | _HAS_LABELS) == 0
    others: list[tuple[bytes, object]] = []
    if not is_plain.all():
        plain = is_plain.tolist()
        others = [
            (key[len(SESSION_PREFIX) :], value)
            for key, value, is_usual in zip(keys, values, plain, strict=True)
            if not is_usual
        ]
        keys, values = list(compress(keys, plain)), list(compress(values, plain))
        heads = heads[is_plain]
    lengths = {name: heads[name].astype(np.int64) for name in _SESSION_LENGTHS}
    tenant_begin = 1 + _SESSION.size
    id_begins = tenant_begin + lengths["tenant"]
    model_begins = id_begins + lengths["id"]
    layout_begins = model_begins + lengths["model"]
    segments_begins = layout_begins + lengths["streams"] * _STREAM.size
    live_begins = segments_begins + lengths["segments"] * 8
    live_ends = live_begins + lengths["ranges"] * _RANGE.size
    ends = live_ends + lengths["salt"] + lengths["contents"] * _CONTENT.size + _CHECKSUM.size
    sizes = np.fromiter(map(len, values), np.int64, len(values))
    # Labels are what is left. They are read when the session comes to be known.
    has_labels = heads["flags"] & np.uint8(_HAS_LABELS) != 0
    is_whole = np.where(has_labels, sizes > ends, sizes == ends)
    for i in np.flatnonzero(~is_whole)[:1].tolist():
        raise _corrupt(keys[i], f"its body does not parse: {sizes[i]} bytes where {ends[i]} are announced")
    # Columns become lists once: indexing an array for each value would cost more than all the rest.
    at = [
        each.tolist()
        for each in (id_begins, model_begins, layout_begins, segments_begins, live_begins, live_ends)
    ]
    numbers_of_kinds: dict[Kind, int] = {}
    session_ids, numbers, segment_ids, live = [], [], [], []
    try:
        for value, id_at, model_at, layout_at, segments_at, live_at, end in zip(values, *at, strict=True):
            session_ids.append(value[id_at:model_at].decode())
            # The lengths tell where the model's id ends.
            told = value[tenant_begin:id_at], value[model_at:segments_at], layout_at - model_at
            kind = kinds.get(told)
            if kind is None:
                model_id = value[model_at:layout_at].decode()
                kind = kinds[told] = Kind(told[0].decode(), model_id, value[layout_at:segments_at])
            numbers.append(numbers_of_kinds.setdefault(kind, len(numbers_of_kinds)))
            segment_ids.append(value[segments_at:live_at])
            # The first range's begin and the last one's end.
            live.append(
                value[live_at : live_at + 8] + value[end - 8 : end] if live_at < end else _NOTHING_LIVE
            )
    except ValueError as error:
        raise _corrupt(keys[len(numbers)], f"its body does not parse: {error!r}") from error
    ranges = np.frombuffer(b"".join(live), "<i8").reshape(-1, 2)
    return KeptSessions(
        b"".join([key[len(SESSION_PREFIX) :] for key in keys]),
        session_ids,
        list(numbers_of_kinds),
        np.array(numbers, np.intp),
        lengths["segments"],
        np.frombuffer(b"".join(segment_ids), "<u8"),
        ranges[:, 0],
        ranges[:, 1],
        heads["access_time_ns"],
        heads["expire_time_ns"],
        [*values],
        others,
    )


def keep_segments(keys: list[bytes], values: list[bytes]) -> KeptSegments:
    """Look at segments' values, which are kept as they are. Raises CorruptMetadata."""
    verify(keys, values)
    heads = _heads(keys, values, _SEGMENT_HEAD)
    sizes = np.fromiter(map(len, values), np.int64, len(values))
    tenant_ends = 1 + _SEGMENT.size + heads["tenant"].astype(np.int64)
    rest_bytes = sizes - tenant_ends - _CHECKSUM.size
    for i in np.flatnonzero(rest_bytes < 0)[:1].tolist():
        raise _corrupt(keys[i], f"its body does not parse: {sizes[i]} bytes are too few")
    keyed = []
    for i in np.flatnonzero(rest_bytes >= _PREFIX_KEY.size).tolist():
        value, begin = values[i], int(tenant_ends[i])
        count = int(rest_bytes[i]) // _PREFIX_KEY.size
        prefix_keys = _PREFIX_KEY.iter_unpack(value[begin : begin + count * _PREFIX_KEY.size])
        try:
            tenant = value[1 + _SEGMENT.size : begin].decode()
        except ValueError as error:
            raise _corrupt(keys[i], f"its body does not parse: {error!r}") from error
        fingerprint = heads["fingerprint"][i].tobytes()
        keyed.append(KeyedSegment(i, tenant, fingerprint, tuple([each for (each,) in prefix_keys])))
    return KeptSegments(
        np.frombuffer(b"".join([key[len(SEGMENT_PREFIX) :] for key in keys]), ">u8").astype(np.uint64),
        heads["begin"],
        heads["token_count"],
        heads["path_index"].astype(np.int64),
        heads["offset_bytes"],
        heads["size_bytes"],
        heads["segment_tokens"].astype(np.int64),
        rest_bytes % _PREFIX_KEY.size == 0,
        keyed,
        [*values],
    )


def _heads(keys: list[bytes], values: list[bytes], fields_of: "np.dtype[np.void]") -> "npt.NDArray[np.void]":
    """The fixed parts of values."""
    end = 1 + fields_of.itemsize
    heads = b"".join([value[1:end] for value in values])
    if len(heads) != len(values) * fields_of.itemsize:
        i = next(i for i, value in enumerate(values) if len(value) < end)
        raise _corrupt(keys[i], f"its body does not parse: {len(values[i])} bytes are too few")
    return np.frombuffer(heads, fields_of)


def verify(keys: list[bytes], values: list[bytes]) -> None:
    """Raise CorruptMetadata unless each value is what was sealed under its key, in this version."""
    # This does for many values what `_open` does for one.
    end, digest = -_CHECKSUM.size, xxh3_64_intdigest
    digests = [digest(value[:end], digest(key)) for key, value in zip(keys, values, strict=True)]
    seals = seals_of(values)
    versions = {value[:1] for value in values}
    if len(seals) == len(values) and versions == {bytes((RECORD_VERSION,))}:
        is_whole = np.array(digests, np.uint64) == np.frombuffer(seals, np.uint64)
        if is_whole.all():
            return
    for key, value in zip(keys, values, strict=True):
        _open(key, value)


def seals_of(values: list[bytes]) -> "array[int]":
    """See `seal_of`."""
    ends = b"".join([value[-_CHECKSUM.size :] for value in values])
    seals = array("Q", ends[: len(ends) // _CHECKSUM.size * _CHECKSUM.size])
    if sys.byteorder == "big":
        seals.byteswap()
    return seals


class Seals(dict[bytes, int]):
    """The checksum of each session's record by uid, 0 for a session without one.

    Its items are the records that were written since. The records that were read, in the order of their keys,
    take 24 bytes each.
    """

    def __init__(self) -> None:
        super().__init__()
        self._uids, self._read = bytearray(), array("Q")

    def __missing__(self, uid: bytes) -> int:
        """The checksum of a record that was read and not written since."""
        i = bisect_left(range(len(self._read)), uid, key=self._uid)
        return self._read[i] if i < len(self._read) and self._uid(i) == uid else 0

    @property
    def read_count(self) -> int:
        """How many records were read."""
        return len(self._read)

    @property
    def read_digest(self) -> int:
        """XOR of the checksums of the records that were read."""
        return reduce(xor, self._read, 0)

    def extend(self, keys: list[bytes], values: list[bytes]) -> None:
        """Add records that were read. Their keys ascend, and come behind all before them."""
        self._uids += b"".join([key[len(SESSION_PREFIX) :] for key in keys])
        self._read.extend(seals_of(values))

    def forget(self, uid: bytes) -> None:
        """Forget a session whose record is gone."""
        self.pop(uid, None)
        # A record that was read gets an entry of its own, which hides it.
        if self[uid]:
            self[uid] = 0

    def _uid(self, i: int) -> bytes:
        return bytes(self._uids[i * UID_BYTES : (i + 1) * UID_BYTES])


def encode_model(record: ModelRecord) -> bytes:
    """Pack the value kept under `model_key`."""
    spec = record.spec
    # Fields go by name: a field that was left out would come back as its default.
    body = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "model_id"}
    body["streams"] = []
    body["create_time_ns"] = record.create_time_ns
    if record.probe is not None:
        body["probe"] = base64.b64encode(record.probe.encode()).decode()
    # The text is inserted: the streams of a large model are encoded a part at a time, before the commit.
    streams = record.streams_text or ",".join(streams_texts(spec))
    # Quotes within strings are escaped, so that this matches the field alone.
    text = as_json(body).replace('"streams":[]', f'"streams":[{streams}]')
    return _seal(model_key(record.tenant, spec.model_id), text.encode())


def decode_model(key: bytes, value: bytes) -> ModelRecord:
    """Read a model back. Raises CorruptMetadata."""
    return _decode(key, value, _read_model)


class Commit(NamedTuple):
    """The last commit: its number, and a count and a digest of the sessions' records."""

    sequence: int
    session_count: int
    session_digest: int


def encode_commit(commit: Commit) -> bytes:
    """Pack the value kept under COMMIT_KEY."""
    return _seal(COMMIT_KEY, _COMMIT.pack(*commit))


def decode_commit(value: bytes) -> Commit:
    """Read the last commit back. Raises CorruptMetadata."""
    return _decode(COMMIT_KEY, value, lambda _, body: Commit(*_COMMIT.unpack(body)))


def slot_key(slot: Slot) -> bytes:
    """The key of a slot that is kept from use."""
    return SLOT_PREFIX + _SLOT_KEY.pack(slot.path_index, slot.offset_bytes)


def encode_slot(slot: Slot) -> bytes:
    """Pack the value kept under `slot_key`."""
    return _seal(slot_key(slot), _SLOT.pack(slot.size_bytes))


def decode_slot(key: bytes, value: bytes) -> Slot:
    """Read a slot back. Raises CorruptMetadata."""
    return _decode(key, value, _read_slot)


def seal_of(value: bytes) -> int:
    """The checksum that a value ends with: another one for another value, or under another key."""
    return int.from_bytes(value[-_CHECKSUM.size :], "little")


def entries(changes: Changes) -> list[tuple[bytes, bytes | None]]:
    """The entries that changes put, by key, None for a deleted one; deletions last, so that they win."""
    puts: list[tuple[bytes, bytes | None]] = []
    puts += [(model_key(m.tenant, m.spec.model_id), encode_model(m)) for m in changes.models]
    puts += [(segment_key(s.segment_id), encode_segment(s)) for s in changes.segments]
    puts += [(session_key(s.uid), encode_session(s)) for s in changes.sessions]
    puts += [(slot_key(slot), encode_slot(slot)) for slot in changes.quarantined]
    puts += [(session_key(uid), None) for uid in changes.deleted_session_uids]
    puts += [(segment_key(segment_id), None) for segment_id in changes.deleted_segment_ids]
    puts += [(slot_key(slot), None) for slot in changes.released]
    puts += [(model_key(tenant, model_id), None) for tenant, model_id in changes.deleted_models]
    return puts


def _seal(key: bytes, body: bytes) -> bytes:
    sealed = bytes((RECORD_VERSION,)) + body
    # The checksum is bound to the key: a value under another key is as wrong as one with a flipped bit.
    return sealed + _CHECKSUM.pack(_checksum(key, sealed))


def _checksum(key: bytes, sealed: bytes) -> int:
    return xxh3_64_intdigest(sealed, seed=xxh3_64_intdigest(key))


def _decode(key: bytes, value: bytes, read: Callable[[bytes, bytes], Record]) -> Record:
    body = _open(key, value)
    try:
        return read(key, body)
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise _corrupt(key, f"its body does not parse: {error!r}") from error


def _open(key: bytes, value: bytes) -> bytes:
    sealed = value[: -_CHECKSUM.size]
    if not sealed:
        # The checksum is verified before the version: a damaged byte must not be told as a later version.
        raise _corrupt(key, f"{len(value)} bytes are too few for a record")
    if _CHECKSUM.pack(_checksum(key, sealed)) != value[-_CHECKSUM.size :]:
        raise _corrupt(key, "checksum does not match")
    if sealed[0] != RECORD_VERSION:
        raise _corrupt(key, f"record version {sealed[0]}, this version of ctxcache reads {RECORD_VERSION}")
    return sealed[1:]


def _corrupt(key: bytes, problem: str) -> CorruptMetadata:
    return CorruptMetadata(where=f"record {key[:2].decode(errors='replace')}{key[2:].hex()}", problem=problem)


def _read_segment(key: bytes, body: bytes) -> SegmentRecord:
    (
        uid,
        generation,
        begin,
        token_count,
        fingerprint,
        path_index,
        offset_bytes,
        size_bytes,
        header_checksum,
        segment_tokens,
        tenant_bytes,
    ) = _SEGMENT.unpack_from(body)
    tenant_end = _SEGMENT.size + tenant_bytes
    tenant = _exactly(body, _SEGMENT.size, tenant_end).decode()
    # The rest behind whole keys is the copy, or empty.
    end = len(body) - (len(body) - tenant_end) % _PREFIX_KEY.size
    keys = tuple([key for (key,) in _PREFIX_KEY.iter_unpack(body[tenant_end:end])])
    identity = SegmentIdentity(tenant, uid, generation, begin, token_count, fingerprint)
    slot = Slot(path_index, offset_bytes, size_bytes)
    copy = None
    if end < len(body):
        path_index, offset_bytes = _COPY.unpack(body[end:])
        copy = Slot(path_index, offset_bytes, size_bytes)
    segment_id = int.from_bytes(key[len(SEGMENT_PREFIX) :], "big")
    return SegmentRecord(segment_id, identity, slot, header_checksum, keys, segment_tokens, copy)


def _exactly(body: bytes, begin: int, end: int) -> bytes:
    if end > len(body):
        raise ValueError(f"{len(body)} bytes where {end} are announced")
    return body[begin:end]


def _read_session(key: bytes, body: bytes) -> SessionRecord:
    (
        generation,
        log_end,
        create_time_ns,
        access_time_ns,
        expire_time_ns,
        ttl_ns,
        flags,
        *name_bytes,
        stream_count,
        segment_count,
        range_count,
        salt_bytes,
        content_count,
    ) = _SESSION.unpack_from(body)
    sizes = (
        # `name_bytes` are three, in the order of the names.
        *name_bytes,
        stream_count * _STREAM.size,
        segment_count * 8,
        range_count * _RANGE.size,
        salt_bytes,
        content_count * _CONTENT.size,
    )
    end = _SESSION.size + sum(sizes)
    tenant, session_id, model_id, streams, segment_ids, live, salt, contents = _split(
        _exactly(body, _SESSION.size, end), sizes
    )
    return SessionRecord(
        uid=key[len(SESSION_PREFIX) :],
        tenant=tenant.decode(),
        session_id=session_id.decode(),
        model_id=model_id.decode(),
        layout=_read_layout(streams),
        generation=generation,
        segment_ids=struct.unpack(f"<{segment_count}Q", segment_ids),
        live=tuple((begin, end) for begin, end in _RANGE.iter_unpack(live)),
        log_end=log_end,
        create_time_ns=create_time_ns,
        access_time_ns=access_time_ns,
        expire_time_ns=expire_time_ns,
        ttl_ns=ttl_ns if flags & _HAS_TTL else None,
        is_pinned=bool(flags & _IS_PINNED),
        salt=salt,
        contents=tuple([Content(*content) for content in _CONTENT.iter_unpack(contents)]),
        block=_read_block(body[end:], stream_count) if flags & _IS_BLOCK else None,
        copies=2 if flags & _HAS_COPIES else 1,
        labels=() if flags & _IS_BLOCK else _read_labels(body[end:], is_there=bool(flags & _HAS_LABELS)),
    )


def _read_labels(body: bytes, *, is_there: bool) -> Labels:
    if is_there != bool(body):
        raise ValueError(f"{len(body)} bytes of labels, and {'some' if is_there else 'none'} are announced")
    return parse_labels(body)


def _read_block(body: bytes, part_count: int) -> BlockRecord:
    space, parent_bytes = _BLOCK.unpack_from(body)
    parent, sizes = _split(body[_BLOCK.size :], (parent_bytes, 4 * part_count))
    return BlockRecord(space, parent.decode(), struct.unpack(f"<{part_count}i", sizes))


@lru_cache(LAYOUTS_KEPT)
def _read_layout(packed: bytes) -> tuple[Stream, ...]:
    return tuple(Stream(layer, StateKind(kind)) for layer, kind in _STREAM.iter_unpack(packed))


def _split(data: bytes, sizes: tuple[int, ...]) -> Iterator[bytes]:
    # The sizes make up all bytes: a record that leaves bytes behind is not understood.
    if sum(sizes) != len(data):
        raise ValueError(f"{len(data)} bytes where {sum(sizes)} are announced")
    begin = 0
    for size_bytes in sizes:
        yield data[begin : begin + size_bytes]
        begin += size_bytes


def _read_slot(key: bytes, body: bytes) -> Slot:
    path_index, offset_bytes = _SLOT_KEY.unpack(key[len(SLOT_PREFIX) :])
    return Slot(path_index, offset_bytes, *_SLOT.unpack(body))


def _read_model(key: bytes, body: bytes) -> ModelRecord:
    names = key[len(MODEL_PREFIX) :]
    tenant_end = 2 + int.from_bytes(names[:2], "big")
    facts = json.loads(body)
    facts["dtype"] = DType(facts["dtype"])
    facts["streams"] = tuple(
        StreamSpec(Stream(layer, StateKind(kind)), row_bytes, DType(dtype))
        for layer, kind, row_bytes, dtype in facts["streams"]
    )
    create_time_ns, encoded = facts.pop("create_time_ns"), facts.pop("probe", None)
    probe = None if encoded is None else decode_probe(base64.b64decode(encoded, validate=True))
    spec = ModelSpec(model_id=names[tenant_end:].decode(), **facts)
    return ModelRecord(names[2:tenant_end].decode(), spec, create_time_ns, probe)
