"""Values of the wire that Python has other types for: times, spans, and the chunk format's enumerations."""

from typing import cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.format.streams import DType, StateKind

_NS_PER_S = 1_000_000_000
# Calling an enumeration takes longer than all else here, and there is a stream per layer.
KINDS: dict[int, StateKind] = {kind.value: kind for kind in StateKind}
_DTYPES: dict[int, DType] = {dtype.value: dtype for dtype in DType}


def nanoseconds(value: Timestamp | Duration) -> int:
    """Nanoseconds of a span, or since 1970."""
    return value.seconds * _NS_PER_S + value.nanos


def time(time_ns: int) -> Timestamp:
    """Put nanoseconds since 1970 on the wire."""
    seconds, nanos = divmod(time_ns, _NS_PER_S)
    return Timestamp(seconds=seconds, nanos=nanos)


def span(span_ns: int) -> Duration:
    """Put nanoseconds on the wire."""
    whole = Duration()
    whole.FromNanoseconds(span_ns)
    return whole


def state_kind(number: int) -> StateKind:
    """Read a state kind. A newer server's stays a number: the format's enumeration is closed."""
    return KINDS.get(number, cast("StateKind", number))


def dtype(number: int) -> DType:
    """Read an element type. A newer server's stays a number, as above."""
    return _DTYPES.get(number, cast("DType", number))
