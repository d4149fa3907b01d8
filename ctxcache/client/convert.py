"""Conversions between the format's own types and the messages of the contract.

Checks nothing that the server checks. Worst case: a value that the wire cannot hold raises
InvalidArgument here instead of on the other side.
"""

from datetime import datetime

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from ctxcache.v1 import model_pb2, session_pb2

_NS_PER_S = 1_000_000_000
# Fields that bear the same name and type on both sides.
_PLAIN_FIELDS = (
    "architecture",
    "revision",
    "weights_digest",
    "tokenizer_digest",
    "layer_count",
    "hidden_size",
    "kv_head_count",
    "head_size",
    "rope",
    "norm",
    "settings",
    "is_relocatable",
    "settings",
)


def stream_to_wire(stream: Stream) -> model_pb2.StreamName:
    """Name a stream on the wire."""
    return model_pb2.StreamName(layer=stream.layer, kind=model_pb2.StateKind.ValueType(stream.kind))


_KINDS: dict[int, StateKind] = {kind.value: kind for kind in StateKind}
"""Calling an enumeration takes longer than all else here, and there is a stream per layer."""


def stream_from_wire(name: model_pb2.StreamName) -> Stream:
    """Read a stream's name. Raises InvalidArgument for a kind that this version does not know."""
    kind = _KINDS.get(name.kind)
    if kind is None:
        raise InvalidArgument(field="stream.kind", problem=f"{name.kind} is not known")
    return Stream(name.layer, kind)


def model_to_wire(spec: ModelSpec) -> model_pb2.Model:
    """Put a model into the message that registers it."""
    return model_pb2.Model(
        name=f"models/{spec.model_id}",
        dtype=model_pb2.Dtype.ValueType(spec.dtype),
        streams=map(_spec_to_wire, spec.streams),
        **{name: getattr(spec, name) for name in _PLAIN_FIELDS},
    )


def model_from_wire(model: model_pb2.Model) -> ModelSpec:
    """Read a registered model. Raises InvalidArgument for a type or kind that is not known here."""
    return ModelSpec(
        model_id=model.name.removeprefix("models/"),
        dtype=_dtype(model.dtype),
        streams=tuple(map(_spec_from_wire, model.streams)),
        **{name: getattr(model, name) for name in _PLAIN_FIELDS},
    )


def duration(ttl_s: float | None) -> Duration | None:
    """Put a time to live on the wire; None stays unset."""
    if ttl_s is None:
        return None
    try:
        whole = Duration()
        whole.FromNanoseconds(round(ttl_s * _NS_PER_S))
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(field="ttl", problem=f"{ttl_s} s is no duration") from error
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


def _spec_to_wire(spec: StreamSpec) -> model_pb2.StreamSpec:
    return model_pb2.StreamSpec(
        stream=stream_to_wire(spec.stream),
        row_bytes=spec.row_bytes,
        dtype=model_pb2.Dtype.ValueType(spec.dtype),
    )


def _spec_from_wire(spec: model_pb2.StreamSpec) -> StreamSpec:
    return StreamSpec(stream_from_wire(spec.stream), spec.row_bytes, _dtype(spec.dtype))


def _dtype(number: int) -> DType:
    try:
        return DType(number)
    except ValueError as error:
        raise InvalidArgument(field="dtype", problem=f"{number} is not known") from error
