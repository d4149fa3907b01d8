"""Conversions between the format's own types and the messages of the contract.

Checks nothing that the server checks. Worst case: a value that the wire cannot hold raises
InvalidArgument here instead of on the other side.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import chain

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.errors import InvalidArgument
from ctxcache.format.model import ModelSpec
from ctxcache.format.probe import ModelProbe
from ctxcache.format.streams import DType, StateKind, Stream, StreamRange, StreamSpec, ranges_of
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


def ranges_to_wire(streams: Iterable[Stream]) -> list[model_pb2.StreamRange]:
    """Name streams on the wire, each once however often it is named here."""
    return [_range_to_wire(item) for item in ranges_of(dict.fromkeys(streams))]


def streams_from_wire(ranges: Iterable[model_pb2.StreamRange]) -> list[Stream]:
    """Read streams' names, in storage order. Raises InvalidArgument for a kind that this version does not know."""
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
        **{name: getattr(spec, name) for name in _PLAIN_FIELDS},
    )


def model_from_wire(model: model_pb2.Model) -> ModelSpec:
    """Read a registered model. Raises InvalidArgument for a type or kind that is not known here."""
    return ModelSpec(
        model_id=model.name.removeprefix("models/"),
        dtype=_dtype(model.dtype),
        streams=tuple(sorted(chain.from_iterable(map(_specs_from_wire, model.streams)))),
        **{name: getattr(model, name) for name in _PLAIN_FIELDS},
    )


def probe_from_wire(model: model_pb2.Model) -> ModelProbe | None:
    """A model's probe; None where it has none. Raises InvalidArgument."""
    if not model.HasField("probe"):
        return None
    probe = model.probe
    found = ModelProbe(_dtype(probe.dtype), tuple(probe.token_ids), probe.group_size, probe.values)
    if problem := found.problem():
        raise InvalidArgument(field="model.probe", problem=problem)
    return found


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


def _range_to_wire(item: StreamRange) -> model_pb2.StreamRange:
    kind = model_pb2.StateKind.ValueType(item.kind)
    return model_pb2.StreamRange(kind=kind, layer_begin=item.layer_begin, layer_end=item.layer_end)


def _range_from_wire(item: model_pb2.StreamRange) -> StreamRange:
    kind = _KINDS.get(item.kind)
    if kind is None:
        raise InvalidArgument(field="streams.kind", problem=f"{item.kind} is not known")
    return StreamRange(kind, item.layer_begin, item.layer_end)


def _specs_to_wire(specs: Iterable[StreamSpec]) -> Iterator[model_pb2.StreamSpec]:
    alike: dict[tuple[int, DType], list[Stream]] = {}
    for stream, row_bytes, dtype in specs:
        alike.setdefault((row_bytes, dtype), []).append(stream)
    for (row_bytes, dtype), streams in alike.items():
        for item in ranges_of(streams):
            yield model_pb2.StreamSpec(
                streams=_range_to_wire(item), row_bytes=row_bytes, dtype=model_pb2.Dtype.ValueType(dtype)
            )


def _specs_from_wire(spec: model_pb2.StreamSpec) -> Iterator[StreamSpec]:
    dtype = _dtype(spec.dtype)
    return (StreamSpec(stream, spec.row_bytes, dtype) for stream in _range_from_wire(spec.streams).streams())


def _dtype(number: int) -> DType:
    try:
        return DType(number)
    except ValueError as error:
        raise InvalidArgument(field="dtype", problem=f"{number} is not known") from error
