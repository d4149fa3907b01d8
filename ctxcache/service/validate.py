"""Request fields: what is accepted, and which field is to blame when it is not."""

import enum
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.core.ledger.session import GUESTS, Expiration
from ctxcache.errors import InvalidArgument
from ctxcache.format.ids import MODEL_ID, SESSION_ID, Labels, checked_labels
from ctxcache.format.model import FINGERPRINT_BYTES
from ctxcache.format.streams import (
    CONTENTS_LIMIT,
    DIGEST_BYTES,
    SALT_LIMIT_BYTES,
    TOKENS,
    TOKENS_RANGE,
    Content,
    DType,
    StateKind,
    Stream,
    StreamRange,
)
from ctxcache.identity import is_tenant
from ctxcache.service.whereabouts import Whereabouts
from ctxcache.v1 import model_pb2, session_pb2

LAYER_LIMIT = 4096
PAGE_SIZE = 50
PAGE_SIZE_LIMIT = 1000
STREAMS_LIMIT = 4096
"""Streams of one model, token ids not counted."""
RANGES_LIMIT = 256
"""Ranges in which a layout, or a selection of streams, may be given."""
TTL_LIMIT_S = 3650 * 86400
_GUEST_ID = re.compile(rf"{GUESTS}[0-9a-f]{{32}}")
_TRACE_ID = re.compile(r"[0-9a-f]{32}")
LATEST_NS = 2**63 - 1
_TIMESTAMP_LIMIT_S = LATEST_NS // 10**9  # the year 2262, where 64 bits of nanoseconds end


E = TypeVar("E", bound=enum.IntEnum)


def model_id(name: str, field: str = "name") -> str:
    """The id in `models/{model_id}`."""
    return _id(name, "models/", MODEL_ID, field)


def session_id(name: str, field: str = "name") -> str:
    """The id in `sessions/{session_id}`."""
    return _id(name, "sessions/", SESSION_ID, field)


def guest_id(name: str, field: str = "name") -> str:
    """The id in the name of a guest, which a peer was told."""
    return _id(name, "sessions/", _GUEST_ID, field)


def tenant(name: str, field: str = "tenant") -> str:
    """The name of a tenant that is asked about; empty stays empty."""
    if name and not is_tenant(name):
        raise InvalidArgument(field=field, problem="is no name of a tenant")
    return name


def trace_id(value: str, *, besides: str) -> str:
    """The id of a trace, with nothing `besides` that names a session."""
    if besides:
        raise InvalidArgument(field="trace_id", problem="a session is named besides")
    if not _TRACE_ID.fullmatch(value):
        raise InvalidArgument(field="trace_id", problem=f"does not match {_TRACE_ID.pattern}")
    return value


def engine(value: str, field: str) -> str:
    """An engine's name."""
    if not SESSION_ID.fullmatch(value):
        raise InvalidArgument(field=field, problem=f"does not match {SESSION_ID.pattern}")
    return value


def new_session_id(value: str) -> str:
    """An id for a new session, or empty."""
    if value and not SESSION_ID.fullmatch(value):
        raise InvalidArgument(field="session_id", problem=f"does not match {SESSION_ID.pattern}")
    return value


def fingerprint(value: bytes, field: str = "model_fingerprint") -> bytes:
    """A model fingerprint."""
    if len(value) != FINGERPRINT_BYTES:
        problem = f"{FINGERPRINT_BYTES} bytes expected, {len(value)} given"
        raise InvalidArgument(field=field, problem=problem)
    return value


def salt(value: bytes, field: str = "salt") -> bytes:
    """The salt of keys. Raises InvalidArgument."""
    if len(value) > SALT_LIMIT_BYTES:
        raise InvalidArgument(field=field, problem=f"is longer than {SALT_LIMIT_BYTES} bytes")
    return value


def labels(given: Mapping[str, str], field: str = "labels") -> Labels:
    """Labels of a session, or those that are looked for. Raises InvalidArgument."""
    if not given:
        return ()
    try:
        return checked_labels(given.items())
    except ValueError as error:
        raise InvalidArgument(field=field, problem=str(error)) from error


def contents(given: Sequence[session_pb2.ContentRange], begin: int, field: str) -> tuple[Content, ...]:
    """The contents behind tokens from `begin` on: in order, apart, with digests. Raises InvalidArgument."""
    if not given:
        return ()
    within(len(given), 0, CONTENTS_LIMIT, field)
    last = begin
    for i, content in enumerate(given):
        # Contents are in order and apart: two contents at one token would make keys depend on their order.
        if not last <= content.begin < content.end:
            problem = f"[{content.begin}, {content.end}) is no range of tokens behind {last}"
            raise InvalidArgument(field=f"{field}[{i}]", problem=problem)
        if len(content.digest) != DIGEST_BYTES:
            problem = f"{DIGEST_BYTES} bytes expected, {len(content.digest)} given"
            raise InvalidArgument(field=f"{field}[{i}].digest", problem=problem)
        last = content.end
    return tuple([Content(content.begin, content.end, content.digest) for content in given])


def stream(name: model_pb2.StreamName | Stream, field: str) -> Stream:
    """A stream's name."""
    stream = Stream(name.layer, _member(StateKind, int(name.kind), f"{field}.kind"))
    if stream.kind is StateKind.TOKENS and stream != TOKENS:
        raise InvalidArgument(field=f"{field}.layer", problem="token ids have layer -1")
    if stream.kind is not StateKind.TOKENS and not 0 <= stream.layer < LAYER_LIMIT:
        raise InvalidArgument(
            field=f"{field}.layer", problem=f"{stream.layer} is not within [0, {LAYER_LIMIT})"
        )
    return stream


_LAYERED = {int(kind): kind for kind in StateKind if kind is not StateKind.TOKENS}
"""Kinds of layers' streams, by their numbers."""


def stream_range(given: model_pb2.StreamRange, field: str, index: int | None = None) -> StreamRange:
    """Streams of one kind."""
    begin, end = given.layer_begin, given.layer_end
    # Numbers are checked first. The text of a field's name is made only for an error.
    if given.kind in _LAYERED and 0 <= begin < end <= LAYER_LIMIT:
        # Making the field's name takes longer than this, and a layout has up to 256 ranges.
        return StreamRange(_LAYERED[given.kind], begin, end)
    field = field if index is None else f"{field}[{index}]"
    kind = _member(StateKind, int(given.kind), f"{field}.kind")
    if kind is StateKind.TOKENS:
        if (begin, end) != TOKENS_RANGE[1:]:
            raise InvalidArgument(field=f"{field}.layer_begin", problem="token ids have layer -1 alone")
        return TOKENS_RANGE
    within(begin, 0, LAYER_LIMIT - 1, f"{field}.layer_begin")
    return StreamRange(kind, begin, within(end, begin + 1, LAYER_LIMIT, f"{field}.layer_end"))


def stream_ranges(given: Sequence[model_pb2.StreamRange], field: str) -> tuple[StreamRange, ...]:
    """Merge ranges of streams, by kind and layer, with each stream once."""
    if len(given) > RANGES_LIMIT:
        raise InvalidArgument(field=field, problem=f"{len(given)} ranges are more than {RANGES_LIMIT}")
    ranges: list[StreamRange] = []
    count = 0
    # The ranges are sorted first, so that overlaps are neighbours.
    for streams in sorted(stream_range(item, field, i) for i, item in enumerate(given)):
        last = ranges[-1] if ranges and ranges[-1].kind is streams.kind else None
        if last and streams.layer_begin < last.layer_end:
            raise InvalidArgument(field=field, problem="names a stream twice")
        if last and streams.layer_begin == last.layer_end:
            ranges[-1] = StreamRange(streams.kind, last.layer_begin, streams.layer_end)
        else:
            ranges.append(streams)
        count += streams.layer_end - streams.layer_begin
    # Token ids may be named, and do not count.
    if count > STREAMS_LIMIT + 1:
        raise InvalidArgument(field=field, problem=f"{count} streams are more than {STREAMS_LIMIT}")
    return tuple(ranges)


def dtype(value: int, field: str) -> DType:
    """An element type."""
    return _member(DType, value, field)


def is_durable(value: int, field: str = "durability") -> bool:
    """Whether to wait for the disk."""
    if value not in session_pb2.Durability.values():
        raise InvalidArgument(field=field, problem=f"{value} is not a durability")
    if value == session_pb2.DURABILITY_SHARED:
        raise InvalidArgument(field=field, problem="is of sessions: no block is shared")
    return value == session_pb2.DURABILITY_DISK


def durability(value: int, whereabouts: Whereabouts, field: str = "durability") -> tuple[bool, bool]:
    """Whether to wait for the disk, and for the bucket. Raises FleetNotFound where there is none."""
    if value == session_pb2.DURABILITY_SHARED:
        whereabouts.check_shares()
        return True, True
    return is_durable(value, field), False


def within(value: int, low: int, high: int, field: str) -> int:
    """An integer within `[low, high]`."""
    if not low <= value <= high:
        raise InvalidArgument(field=field, problem=f"{value} is not within [{low}, {high}]")
    return value


def text(value: str, limit_bytes: int, field: str, *, is_required: bool = False) -> str:
    """A text of bounded size."""
    if len(value.encode()) > limit_bytes:
        raise InvalidArgument(field=field, problem=f"is longer than {limit_bytes} bytes")
    if is_required and not value:
        raise InvalidArgument(field=field, problem="is required")
    return value


def page_size(value: int) -> int:
    """How many to list; 0 means PAGE_SIZE."""
    # 0 is what protobuf sends for nothing.
    if value < 0:
        raise InvalidArgument(field="page_size", problem="is negative")
    return min(value or PAGE_SIZE, PAGE_SIZE_LIMIT)


def page_token(value: str) -> str:
    """Where to go on listing: the last id of the page before, with a prefix so that it stays opaque."""
    # The prefix keeps clients from building tokens themselves.
    if value and not value.startswith("after:"):
        raise InvalidArgument(field="page_token", problem="is not one of ours")
    return value.removeprefix("after:")


def next_page_token(ids: Sequence[str], limit: int) -> str:
    """The token for the ids behind the first `limit`; empty when there are none."""
    return f"after:{ids[limit - 1]}" if len(ids) > limit else ""


def absolute(value: Timestamp, field: str = "expire_time") -> Expiration:
    """An absolute expiry."""
    within(value.seconds, 0, _TIMESTAMP_LIMIT_S - 1, field)
    within(value.nanos, 0, 10**9 - 1, f"{field}.nanos")
    return Expiration(None, value.seconds * 10**9 + value.nanos)


def sliding(value: Duration, field: str = "ttl") -> Expiration:
    """An expiry that moves with every access."""
    within(value.seconds, 1, TTL_LIMIT_S, field)
    within(value.nanos, 0, 10**9 - 1, f"{field}.nanos")
    return Expiration(value.seconds * 10**9 + value.nanos)


def _member(closed_set: type[E], value: int, field: str) -> E:
    try:
        return closed_set(value)
    except ValueError:
        problem = f"{value} is not a {closed_set.__name__}"
        raise InvalidArgument(field=field, problem=problem) from None


def _id(name: str, prefix: str, pattern: re.Pattern[str], field: str) -> str:
    identifier = name.removeprefix(prefix)
    if not name.startswith(prefix) or not pattern.fullmatch(identifier):
        raise InvalidArgument(field=field, problem=f"does not match {prefix}{pattern.pattern}")
    return identifier
