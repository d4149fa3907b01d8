"""Conversions between the client's plain types and the messages of the contract.

Checks nothing that the server checks. Worst case: a value that the wire cannot hold raises
InvalidArgument here instead of on the other side.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields
from datetime import datetime, timedelta
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args, get_type_hints

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.client import types
from ctxcache.client.types import SPEC_FIELDS, Durability, LookupResult, ModelInfo, SessionInfo
from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.format.streams import Content, DType, StateKind, Stream, StreamRange, StreamSpec, ranges_of
from ctxcache.v1 import (
    admin_pb2,
    block_pb2,
    faults_pb2,
    hints_pb2,
    model_pb2,
    operations_pb2,
    prefix_pb2,
    recording_pb2,
    session_pb2,
)

T = TypeVar("T")
_NS_PER_S = 1_000_000_000
# How a type gets here: its fields are read from the message's descriptor once, and kept as functions.
#
#     message ── _readers(kind) ──► plain type            `x` ──► `x_ns` for times and spans
#     message ◄── _writers(kind) ── plain type            None ──► the field stays unset
#
# A new field needs a line in the proto and one in the type; nothing here.
_MESSAGES: dict[type, type[Message]] = {
    StreamRange: model_pb2.StreamRange,
    Content: session_pb2.ContentRange,
    ModelProbe: model_pb2.ModelProbe,
    SessionInfo: session_pb2.Session,
    LookupResult: session_pb2.LookupResult,
    types.PrefixMatch: prefix_pb2.MatchPrefixResponse,
    types.SharedPrefix: prefix_pb2.SharedPrefix,
    types.BlockPart: block_pb2.BlockPart,
    types.BlockSpace: block_pb2.BlockSpace,
    types.KindAvailability: session_pb2.KindAvailability,
    types.LayerRange: session_pb2.LayerRange,
    ModelInfo: model_pb2.Model,
    types.Forgotten: model_pb2.ForgetModelResponse,
    types.StoredStreams: model_pb2.StreamSpec,
    types.HintResult: hints_pb2.HintResult,
    types.LayerReadiness: hints_pb2.LayerReadiness,
    types.SessionReadiness: hints_pb2.Readiness,
    types.SessionEvent: hints_pb2.SessionEvent,
    types.TierStats: admin_pb2.TierStats,
    types.StoreStats: admin_pb2.Stats,
    types.TenantStats: admin_pb2.TenantUse,
    types.SessionHappening: admin_pb2.SessionHappening,
    types.RequestMiss: admin_pb2.RequestMiss,
    types.MissReport: admin_pb2.WhyMissResponse,
    types.SettingValue: admin_pb2.Setting,
    types.SettingsReload: admin_pb2.ReloadSettingsResponse,
    types.BadSegment: admin_pb2.BadSegment,
    types.VerifyProgress: admin_pb2.VerifyResponse,
    types.HeldLease: operations_pb2.HeldLease,
    types.DrainStatus: operations_pb2.DrainStatus,
    types.EngineUse: operations_pb2.EngineUse,
    types.MethodActivity: operations_pb2.MethodActivity,
    types.SessionActivity: operations_pb2.SessionActivity,
    types.TenantActivity: operations_pb2.TenantActivity,
    types.Activity: operations_pb2.Activity,
    types.BackupPart: operations_pb2.BackupResponse,
    types.InjectedFault: faults_pb2.Fault,
    types.RecordedStore: recording_pb2.RecordedStore,
    types.RecordedStreams: recording_pb2.RecordedStreams,
    types.RecordedLayout: recording_pb2.RecordedLayout,
    types.RecordedCall: recording_pb2.RecordedCall,
    types.RecordingPart: recording_pb2.RecordResponse,
}
"""The message of each plain type.

Both have the same fields; a time or a span `x` of the message is `x_ns`.
"""


def session_from_wire(message: session_pb2.Session) -> SessionInfo:
    """Read a session. By hand, and in one call: every read and every commit brings one."""
    created, accessed, expires = message.create_time, message.access_time, message.expire_time
    return SessionInfo(
        message.name,
        message.uid,
        message.tenant,
        message.model,
        message.model_fingerprint,
        tuple(
            [
                StreamRange(_KINDS.get(one.kind, one.kind), one.layer_begin, one.layer_end)  # type: ignore[arg-type]  # of a newer server
                for one in message.layout
            ]
        ),
        message.generation,
        message.token_count,
        message.durable_token_count,
        created.seconds * _NS_PER_S + created.nanos,
        accessed.seconds * _NS_PER_S + accessed.nanos,
        expires.seconds * _NS_PER_S + expires.nanos,
        message.ttl.seconds * _NS_PER_S + message.ttl.nanos if message.HasField("ttl") else None,
        message.is_pinned,
        message.dram_bytes,
        message.ssd_bytes,
        message.salt,
        tuple([Content(one.begin, one.end, one.digest) for one in message.contents])
        if message.contents
        else (),
        message.whole_token_count,
        message.copies,
    )


def session_to_wire(session: SessionInfo) -> session_pb2.Session:
    """Put a session into its message."""
    return cast("session_pb2.Session", to_wire(session))  # by _MESSAGES


def from_wire(kind: type[T], message: Message) -> T:
    """Read a message as the plain type that stands for it, field by field."""
    readers = _readers(cast("Hashable", kind))  # a class, whatever its instances are
    return kind(*[read(message) for read in readers])


def to_wire(plain: object) -> Message:
    """Put a plain type into its message. `to_wire` undoes `from_wire`."""
    kind = type(plain)
    writers = _writers(cast("Hashable", kind))
    # None is left out: protobuf tells a field that is unset from one that is 0 only where the proto says
    # optional.
    return _MESSAGES[kind](
        **{
            name: write(value)
            for name, plain_name, write in writers
            if (value := getattr(plain, plain_name)) is not None
        }
    )


def document(plain: object) -> dict[str, Any]:
    """A plain type as what `json.dumps` takes: the contract's own field names, every field always there.

    int64 is a number, an enumeration its name, bytes are hexadecimal, times and durations as protobuf's own
    JSON
    writes them (`2030-01-31T12:00:00Z`, `3600s`). A field that the server left out is null.
    """
    return _document(to_wire(plain))


def contents_to_wire(contents: Iterable[Content]) -> list[session_pb2.ContentRange]:
    """Put what lies behind tokens on the wire."""
    # By hand, as is `session_from_wire`: each append has them.
    return [session_pb2.ContentRange(begin=one.begin, end=one.end, digest=one.digest) for one in contents]


def kind_to_wire(kind: StateKind) -> model_pb2.StateKind.ValueType:
    """Put a state kind on the wire: both have the same numbers."""
    return model_pb2.StateKind.ValueType(kind)


def stream_to_wire(stream: Stream) -> model_pb2.StreamName:
    """Name a stream on the wire."""
    return model_pb2.StreamName(layer=stream.layer, kind=kind_to_wire(stream.kind))


_KINDS: dict[int, StateKind] = {kind.value: kind for kind in StateKind}
"""Calling an enumeration takes longer than all else here, and there is a stream per layer."""


def stream_from_wire(name: model_pb2.StreamName) -> Stream:
    """Read a stream's name. Raises InvalidArgument for a kind that this version does not know."""
    kind = _KINDS.get(name.kind)
    if kind is None:
        raise InvalidArgument(field="stream.kind", problem=f"{name.kind} is not known")
    return Stream(name.layer, kind)


def ranges_to_wire(streams: Iterable[Stream]) -> list[model_pb2.StreamRange]:
    """Name streams on the wire, each once however often it is named here."""
    return [_range_to_wire(item) for item in ranges_of(dict.fromkeys(streams))]


def streams_from_wire(ranges: Iterable[model_pb2.StreamRange]) -> list[Stream]:
    """Read streams' names, in storage order.

    Raises InvalidArgument for a kind that this version does not know.
    """
    # Sorted as the format stores them; ranges on the wire may come in any order.
    return sorted(stream for item in ranges for stream in _range_from_wire(item).streams())


def model_to_wire(spec: ModelSpec, probe: ModelProbe | None = None) -> model_pb2.Model:
    """Put a model, with what it made of a few tokens, into the message that registers it."""
    return model_pb2.Model(
        name=f"models/{spec.model_id}",
        dtype=model_pb2.Dtype.ValueType(spec.dtype),
        streams=_specs_to_wire(spec.streams),
        probe=None
        if probe is None
        else model_pb2.ModelProbe(
            dtype=model_pb2.Dtype.ValueType(probe.dtype),
            token_ids=probe.token_ids,
            group_size=probe.group_size,
            values=probe.values,
        ),
        **{name: getattr(spec, name) for name in SPEC_FIELDS if name != "dtype"},
    )


def model_from_wire(model: model_pb2.Model) -> ModelSpec:
    """Read a registered model. Raises InvalidArgument for a type or kind that is not known here."""
    return from_wire(ModelInfo, model).spec


def probe_from_wire(model: model_pb2.Model) -> ModelProbe | None:
    """A model's probe; None where it has none. Raises InvalidArgument."""
    if not model.HasField("probe"):
        return None
    probe = model.probe
    found = ModelProbe(_dtype(probe.dtype), tuple(probe.token_ids), probe.group_size, probe.values)
    if problem := found.problem():
        raise InvalidArgument(field="model.probe", problem=problem)
    return found


def durability_to_wire(durability: Durability) -> session_pb2.Durability.ValueType:
    """Put a durability on the wire: both have the same numbers."""
    return session_pb2.Durability.ValueType(durability)


def checked_token(token: bytes) -> bytes:
    """A lease's token; others than empty ones are the server's to look at. Raises InvalidArgument."""
    # On the wire an empty token is no token: the answer would be about what is missing instead.
    if not token:
        raise InvalidArgument(field="token", problem="is empty")
    return token


def duration(span: timedelta | None) -> Duration | None:
    """Put a span of time on the wire; None stays unset.

    Raises InvalidArgument for one that the wire cannot hold.
    """
    if span is None:
        return None
    try:
        whole = Duration()
        whole.FromTimedelta(span)
    except ValueError as error:
        raise InvalidArgument(field="ttl", problem=f"{span.total_seconds()} s is no duration") from error
    return whole


def timestamp(instant: datetime | None) -> Timestamp | None:
    """Put an instant on the wire; None stays unset. Raises InvalidArgument without a time zone."""
    if instant is None:
        return None
    if instant.tzinfo is None:
        raise InvalidArgument(field="expire_time", problem="has no time zone")
    whole = Timestamp()
    whole.FromDatetime(instant)
    return whole


def token_range(begin: int, end: int) -> session_pb2.TokenRange:
    """Put a range of tokens on the wire."""
    return session_pb2.TokenRange(begin=begin, end=end)


def _range_to_wire(item: StreamRange) -> model_pb2.StreamRange:
    return model_pb2.StreamRange(
        kind=kind_to_wire(item.kind), layer_begin=item.layer_begin, layer_end=item.layer_end
    )


def _range_from_wire(item: model_pb2.StreamRange) -> StreamRange:
    kind = _KINDS.get(item.kind)
    if kind is None:
        raise InvalidArgument(field="streams.kind", problem=f"{item.kind} is not known")
    return StreamRange(kind, item.layer_begin, item.layer_end)


# Streams that are alike become ranges of layers: a model has two or three ranges instead of hundreds of
# names.
def _specs_to_wire(specs: Iterable[StreamSpec]) -> Iterator[model_pb2.StreamSpec]:
    alike: dict[tuple[int, DType], list[Stream]] = {}
    for stream, row_bytes, dtype in specs:
        alike.setdefault((row_bytes, dtype), []).append(stream)
    for (row_bytes, dtype), streams in alike.items():
        for item in ranges_of(streams):
            yield model_pb2.StreamSpec(
                streams=_range_to_wire(item), row_bytes=row_bytes, dtype=model_pb2.Dtype.ValueType(dtype)
            )


def _dtype(number: int) -> DType:
    try:
        return DType(number)
    except ValueError as error:
        raise InvalidArgument(field="dtype", problem=f"{number} is not known") from error


# -- field by field -----------------------------------------------------------------------------------


# Once per type: the hints of a dataclass cost more to resolve than a message to read.
@cache
def _readers(kind: Any) -> tuple[Callable[[Message], Any], ...]:
    """How each field of a plain type is read from its message, in order."""
    known, hints = _MESSAGES[kind].DESCRIPTOR.fields_by_name, get_type_hints(kind)
    return tuple(_reader(known[_wire_name(name)], _inner(hints[name])) for name in _names(kind))


# Any: protobuf has two classes of descriptors, and which one it is depends on how it was built.
def _reader(field: Any, inner: Any) -> Callable[[Message], Any]:
    name = field.name
    read = _value_reader(field, inner)
    if field.is_repeated:
        # Each case is a function of its own, so that no case is asked for again when a message is read.
        return lambda message: tuple([read(one) for one in getattr(message, name)])
    if field.has_presence:
        return lambda message: read(getattr(message, name)) if message.HasField(name) else None
    return lambda message: read(getattr(message, name))


def _value_reader(field: Any, inner: Any) -> Callable[[Any], Any]:
    if field.message_type is not None:
        if field.message_type.full_name in _TIMES:
            return lambda time: time.seconds * _NS_PER_S + time.nanos
        return lambda message: from_wire(inner, message)
    if field.enum_type is not None:
        # A newer server's kind or element type stays a number: the format's enumerations are closed.
        return lambda number: _CLOSED[inner].get(number, number) if inner in _CLOSED else inner(number)
    return _same


@cache
def _writers(kind: Any) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    """Each field's name in the message, its name in the plain type, and how it is written."""
    known = _MESSAGES[kind].DESCRIPTOR.fields_by_name
    return tuple((_wire_name(name), name, _writer(known[_wire_name(name)])) for name in _names(kind))


def _writer(field: Any) -> Callable[[Any], Any]:
    write = _same if field.message_type is None else _TIMES.get(field.message_type.full_name, to_wire)
    return (lambda values: [write(one) for one in values]) if field.is_repeated else write


def _same(value: Any) -> Any:
    return value


def _timestamp_of(time_ns: int) -> Timestamp:
    whole = Timestamp()
    whole.FromNanoseconds(time_ns)
    return whole


def _duration_of(span_ns: int) -> Duration:
    whole = Duration()
    whole.FromNanoseconds(span_ns)
    return whole


_TIMES: dict[str, Callable[[int], Message]] = {
    "google.protobuf.Timestamp": _timestamp_of,
    "google.protobuf.Duration": _duration_of,
}
_CLOSED: dict[Any, dict[int, Any]] = {StateKind: _KINDS, DType: {one.value: one for one in DType}}


def _names(kind: Any) -> tuple[str, ...]:
    return kind._fields if issubclass(kind, tuple) else tuple(field.name for field in fields(kind))


def _wire_name(name: str) -> str:
    # `at_ns` is the field's own name: the recording counts from its beginning, and is no time of protobuf's.
    return name.removesuffix("_ns") if name != "at_ns" else name


def _inner(hint: Any) -> Any:
    """The type inside an annotation's tuple or optional."""
    parts = [part for part in get_args(hint) if part not in (NoneType, Ellipsis)]
    return _inner(parts[0]) if parts else hint


def _document(message: Message) -> dict[str, Any]:
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_value(item, field) for item in value]
    # Before the value: an unset field reads as 0, and must be null.
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: object, field: Any) -> Any:
    match value:
        case Timestamp() | Duration():
            return value.ToJsonString()
        case Message():
            return _document(value)
        case bytes():
            return value.hex()
        case int() if field.enum_type is not None:
            known = field.enum_type.values_by_number.get(value)
            return known.name if known else value
        case bool() | int() | float() | str():
            return value
    raise TypeError(f"{field.full_name} is a {type(value).__name__}")
