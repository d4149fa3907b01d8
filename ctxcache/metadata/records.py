"""Records as bytes: keys, values, and the checksum that ties a value to its key.

Knows no database. Worst case of a decode is CorruptMetadata: no record is ever half believed.

Keys, by prefix, in the order a store iterates them:

    g/ | segment id u64 big endian                         segments, ascending by id
    m/ | tenant bytes u16 big endian | tenant | model id   models
    s/ | session uid, 16 bytes                             sessions

A value is `version u8 | body | checksum u64`, little endian. The checksum is XXH3-64 of all before
it, seeded with XXH3-64 of the key, so that a value under another key fails like a flipped bit
does. What the key says is not repeated in the body. The checksum's place and seed are the same in
every version, so that a newer record is told apart from a damaged one.

    segment  fixed part | tenant
    session  fixed part | tenant | session id | model id | (layer i32, kind i32)... | ids u64...
             | (begin i64, end i64)...
    model    JSON object
"""

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from ctxcache.errors import CorruptMetadata
from ctxcache.format.identity import SegmentIdentity
from ctxcache.format.model import ModelSpec
from ctxcache.format.slot import Slot
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from ctxcache.metadata.base import ModelRecord, SegmentRecord, SessionRecord

MODEL_PREFIX = b"m/"
SESSION_PREFIX = b"s/"
SEGMENT_PREFIX = b"g/"
RECORD_VERSION = 1
UID_BYTES = 16
_CHECKSUM = struct.Struct("<Q")
_SEGMENT = struct.Struct("<16sqqq32sIqqQ")
_SESSION = struct.Struct("<qqqqqqBHHHIII")
_STREAM = struct.Struct("<ii")
_RANGE = struct.Struct("<qq")
_IS_PINNED = 1
_HAS_TTL = 2
Record = TypeVar("Record")


def model_key(tenant: str, model_id: str) -> bytes:
    """Where a model's record is kept."""
    raw = tenant.encode()
    return MODEL_PREFIX + len(raw).to_bytes(2, "big") + raw + model_id.encode()


def session_key(uid: bytes) -> bytes:
    """Where a session's record is kept. `uid` is 16 bytes."""
    if len(uid) != UID_BYTES:
        raise ValueError(f"a session uid is {UID_BYTES} bytes, not {len(uid)}")
    return SESSION_PREFIX + uid


def segment_key(segment_id: int) -> bytes:
    """Where a segment's record is kept; keys sort as ids do."""
    return SEGMENT_PREFIX + segment_id.to_bytes(8, "big")


def encode_segment(record: SegmentRecord) -> bytes:
    """Pack the value kept under `segment_key`. Raises struct.error for a number out of its range."""
    identity, slot = record.identity, record.slot
    fixed = _SEGMENT.pack(
        identity.session_uid, identity.generation, identity.begin, identity.token_count,
        identity.model_fingerprint, slot.path_index, slot.offset_bytes, slot.size_bytes, record.header_checksum,
    )  # fmt: skip
    return _seal(segment_key(record.segment_id), fixed + identity.tenant.encode())


def decode_segment(key: bytes, value: bytes) -> SegmentRecord:
    """Read a segment back. Raises CorruptMetadata."""
    return _decode(key, value, _read_segment)


def encode_session(record: SessionRecord) -> bytes:
    """Pack the value kept under `session_key`. Raises struct.error for a number out of its range."""
    names = [name.encode() for name in (record.tenant, record.session_id, record.model_id)]
    flags = _IS_PINNED * record.is_pinned | _HAS_TTL * (record.ttl_ns is not None)
    fixed = _SESSION.pack(
        record.generation, record.log_end, record.create_time_ns, record.access_time_ns,
        record.expire_time_ns, record.ttl_ns or 0, flags, *map(len, names),
        len(record.layout), len(record.segment_ids), len(record.live),
    )  # fmt: skip
    streams = [_STREAM.pack(stream.layer, stream.kind) for stream in record.layout]
    segment_ids = struct.pack(f"<{len(record.segment_ids)}Q", *record.segment_ids)
    live = [_RANGE.pack(begin, end) for begin, end in record.live]
    return _seal(session_key(record.uid), b"".join([fixed, *names, *streams, segment_ids, *live]))


def decode_session(key: bytes, value: bytes) -> SessionRecord:
    """Read a session back. Raises CorruptMetadata."""
    return _decode(key, value, _read_session)


def encode_model(record: ModelRecord) -> bytes:
    """Pack the value kept under `model_key`."""
    spec = record.spec
    # By name, whatever the fields are: one that was left out would come back as its default.
    body = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "model_id"}
    body["streams"] = [[s.stream.layer, s.stream.kind, s.row_bytes, s.dtype] for s in spec.streams]
    body["create_time_ns"] = record.create_time_ns
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return _seal(model_key(record.tenant, spec.model_id), text.encode())


def decode_model(key: bytes, value: bytes) -> ModelRecord:
    """Read a model back. Raises CorruptMetadata."""
    return _decode(key, value, _read_model)


def _seal(key: bytes, body: bytes) -> bytes:
    sealed = bytes((RECORD_VERSION,)) + body
    return sealed + _CHECKSUM.pack(_checksum(key, sealed))


def _checksum(key: bytes, sealed: bytes) -> int:
    return xxh3_64_intdigest(sealed, seed=xxh3_64_intdigest(key))


def _decode(key: bytes, value: bytes, read: Callable[[bytes, bytes], Record]) -> Record:
    where = f"record {key[:2].decode(errors='replace')}{key[2:].hex()}"
    body = _open(where, key, value)
    try:
        return read(key, body)
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        raise CorruptMetadata(where=where, problem=f"its body does not parse: {error!r}") from error


def _open(where: str, key: bytes, value: bytes) -> bytes:
    sealed, trailer = value[: -_CHECKSUM.size], value[-_CHECKSUM.size :]
    if not sealed:
        raise CorruptMetadata(where=where, problem=f"{len(value)} bytes are too few for a record")
    if _CHECKSUM.pack(_checksum(key, sealed)) != trailer:
        raise CorruptMetadata(where=where, problem="checksum does not match")
    if sealed[0] != RECORD_VERSION:
        problem = f"record version {sealed[0]}, this version of ctxcache reads {RECORD_VERSION}"
        raise CorruptMetadata(where=where, problem=problem)
    return sealed[1:]


def _read_segment(key: bytes, body: bytes) -> SegmentRecord:
    uid, generation, begin, token_count, fingerprint, *place, header_checksum = _SEGMENT.unpack_from(body)
    tenant = body[_SEGMENT.size :].decode()
    identity = SegmentIdentity(tenant, uid, generation, begin, token_count, fingerprint)
    segment_id = int.from_bytes(key[len(SEGMENT_PREFIX) :], "big")
    return SegmentRecord(segment_id, identity, Slot(*place), header_checksum)


def _read_session(key: bytes, body: bytes) -> SessionRecord:
    (generation, log_end, create_time_ns, access_time_ns, expire_time_ns, ttl_ns, flags,
     *name_bytes, stream_count, segment_count, range_count) = _SESSION.unpack_from(body)  # fmt: skip
    sizes = (*name_bytes, stream_count * _STREAM.size, segment_count * 8, range_count * _RANGE.size)
    tenant, session_id, model_id, streams, segment_ids, live = _split(body[_SESSION.size :], sizes)
    return SessionRecord(
        uid=key[len(SESSION_PREFIX) :],
        tenant=tenant.decode(),
        session_id=session_id.decode(),
        model_id=model_id.decode(),
        layout=tuple(Stream(layer, StateKind(kind)) for layer, kind in _STREAM.iter_unpack(streams)),
        generation=generation,
        segment_ids=struct.unpack(f"<{segment_count}Q", segment_ids),
        live=tuple((begin, end) for begin, end in _RANGE.iter_unpack(live)),
        log_end=log_end,
        create_time_ns=create_time_ns,
        access_time_ns=access_time_ns,
        expire_time_ns=expire_time_ns,
        ttl_ns=ttl_ns if flags & _HAS_TTL else None,
        is_pinned=bool(flags & _IS_PINNED),
    )


def _split(data: bytes, sizes: tuple[int, ...]) -> Iterator[bytes]:
    if sum(sizes) != len(data):
        raise ValueError(f"{len(data)} bytes where {sum(sizes)} are announced")
    begin = 0
    for size_bytes in sizes:
        yield data[begin : begin + size_bytes]
        begin += size_bytes


def _read_model(key: bytes, body: bytes) -> ModelRecord:
    names = key[len(MODEL_PREFIX) :]
    tenant_end = 2 + int.from_bytes(names[:2], "big")
    facts = json.loads(body)
    facts["dtype"] = DType(facts["dtype"])
    facts["streams"] = tuple(
        StreamSpec(Stream(layer, StateKind(kind)), row_bytes, DType(dtype))
        for layer, kind, row_bytes, dtype in facts["streams"]
    )
    create_time_ns = facts.pop("create_time_ns")
    spec = ModelSpec(model_id=names[tenant_end:].decode(), **facts)
    return ModelRecord(names[2:tenant_end].decode(), spec, create_time_ns)
