"""Conversions that are more than field by field; those are in `messages.py`.

Checks nothing that the server checks. Worst case: a value that the wire cannot hold raises
InvalidArgument here instead of on the other side.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.client.messages import (
    WRITERS,
    read_model_info,
    write_block_space,
    write_model_probe,
    write_stream_range,
)
from ctxcache.client.types import SPEC_FIELDS, BlockSpace, Durability
from ctxcache.client.wire_values import KINDS
from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.format.streams import DType, StateKind, Stream, StreamRange, StreamSpec, ranges_of
from ctxcache.v1 import block_pb2, model_pb2, session_pb2

SPACES_KEPT = 64
"""Spaces whose messages are kept ready."""
_NS_PER_S = 10**9


def document(plain: object) -> dict[str, Any]:
    """A plain type as what `json.dumps` takes: the contract's own field names, every field always there.

    int64 is a number, an enumeration its name, bytes are hexadecimal, times and durations as protobuf's own
    JSON writes them (`2030-01-31T12:00:00Z`, `3600s`). A field that the server left out is null.
    """
    return _document(WRITERS[type(plain)](plain))


def kind_to_wire(kind: StateKind) -> model_pb2.StateKind.ValueType:
    """Put a state kind on the wire: both have the same numbers."""
    return model_pb2.StateKind.ValueType(kind)


def stream_to_wire(stream: Stream) -> model_pb2.StreamName:
    """Name a stream on the wire."""
    return model_pb2.StreamName(layer=stream.layer, kind=kind_to_wire(stream.kind))


def stream_from_wire(name: model_pb2.StreamName) -> Stream:
    """Read a stream's name. Raises InvalidArgument for a kind that this version does not know."""
    kind = KINDS.get(name.kind)
    if kind is None:
        raise InvalidArgument(field="stream.kind", problem=f"{name.kind} is not known")
    return Stream(name.layer, kind)


def ranges_to_wire(streams: Iterable[Stream]) -> list[model_pb2.StreamRange]:
    """Name streams on the wire, each once however often it is named here."""
    return [write_stream_range(item) for item in ranges_of(dict.fromkeys(streams))]


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
        probe=None if probe is None else write_model_probe(probe),
        **{name: getattr(spec, name) for name in SPEC_FIELDS if name != "dtype"},
    )


def model_from_wire(model: model_pb2.Model) -> ModelSpec:
    """Read a registered model. Raises InvalidArgument for a type or kind that is not known here."""
    return read_model_info(model).spec


def probe_from_wire(model: model_pb2.Model) -> ModelProbe | None:
    """A model's probe; None where it has none. Raises InvalidArgument."""
    if not model.HasField("probe"):
        return None
    probe = model.probe
    made = ModelProbe(_dtype(probe.dtype), tuple(probe.token_ids), probe.group_size, probe.values)
    if problem := made.problem():
        raise InvalidArgument(field="model.probe", problem=problem)
    return made


def durability_to_wire(durability: Durability) -> session_pb2.Durability.ValueType:
    """Put a durability on the wire: both have the same numbers."""
    return session_pb2.Durability.ValueType(durability)


def checked_token(token: bytes) -> bytes:
    """A lease's token; others than empty ones are the server's to look at. Raises InvalidArgument."""
    # On the wire an empty token is no token: the answer would be about what is missing instead.
    if not token:
        raise InvalidArgument(field="token", problem="is empty")
    return token


def ttl_to_wire(ttl_s: float) -> Duration:
    """A time to live, of seconds. Raises InvalidArgument."""
    try:
        whole, ns = divmod(round(ttl_s * _NS_PER_S), _NS_PER_S)
        return Duration(seconds=whole, nanos=ns)
    # The number of seconds is NaN, infinite, or more than a message holds.
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(field="ttl", problem=f"{ttl_s} s is no duration") from error


@lru_cache(SPACES_KEPT)
def space_to_wire(space: BlockSpace) -> block_pb2.BlockSpace:
    """The message of a space: one object for all calls, which must not change it."""
    return write_block_space(space)


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


def _range_from_wire(item: model_pb2.StreamRange) -> StreamRange:
    kind = KINDS.get(item.kind)
    if kind is None:
        raise InvalidArgument(field="streams.kind", problem=f"{item.kind} is not known")
    return StreamRange(kind, item.layer_begin, item.layer_end)


# Like streams become ranges of layers: a model has two or three ranges instead of hundreds of names.
def _specs_to_wire(specs: Iterable[StreamSpec]) -> Iterator[model_pb2.StreamSpec]:
    alike: dict[tuple[int, DType], list[Stream]] = {}
    for stream, row_bytes, dtype in specs:
        alike.setdefault((row_bytes, dtype), []).append(stream)
    for (row_bytes, dtype), streams in alike.items():
        for item in ranges_of(streams):
            yield model_pb2.StreamSpec(
                streams=write_stream_range(item), row_bytes=row_bytes, dtype=model_pb2.Dtype.ValueType(dtype)
            )


def _dtype(number: int) -> DType:
    try:
        return DType(number)
    except ValueError as error:
        raise InvalidArgument(field="dtype", problem=f"{number} is not known") from error


def _document(message: Message) -> dict[str, Any]:
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if field.is_repeated:
        return [_value(item, field) for item in value]
    # Presence is checked before the value: an unset field reads as 0, and must be null.
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
