"""Between the wire's messages and the cache's facts: models, sessions, locations, engines' queues and hints.

Answers of many entries are encoded an entry at a time, so that none takes the event loop for long, or grows
too large. To encode 3 MiB of small messages at once takes a dozen milliseconds; to join them costs a copy.
Worst case: a single entry larger than an answer may be goes alone.
"""

import io
import math
from collections.abc import Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import merge
from itertools import islice

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.cache.hints import Action, AheadTokens, Hint, HintAnswer, HintVerdict
from ctxcache.cache.leases import Lease
from ctxcache.cache.models import Registered
from ctxcache.cache.queues import Change, LayerRun, LayerWhere, Readiness
from ctxcache.cache.reservations import Reservation, Run
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Piece, SessionView
from ctxcache.core.placement.schedule import PRIORITY_LIMIT, Job
from ctxcache.errors import CacheError, CapacityExceeded, InvalidArgument
from ctxcache.format.layout import SEGMENT_TOKENS, SegmentLayout, slot_bytes
from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.format.streams import (
    TOKENS,
    TOKENS_SPEC,
    DType,
    StateKind,
    Stream,
    StreamRange,
    StreamSpec,
    contents_within,
    ranges_of,
)
from ctxcache.runtime.clock import Clock
from ctxcache.service import validate
from ctxcache.v1 import arena_pb2, hints_pb2, model_pb2, session_pb2
from ctxcache.wire.status import code_of, message_of, wire_facts

ROW_BYTES_LIMIT = 2 << 20
TEXT_BYTES = 256
CANONICAL_BYTES = 4096
COUNT_LIMIT = 2**31 - 1
SEGMENT_BYTES_LIMIT = 1 << 34
CONSTANTS_LIMIT, KEPT_ANSWER_BYTES = 4096, 1024
"""Sessions whose constant facts (a few KiB each) are kept ready, and as many whole answers of so many bytes.
"""
LAYOUTS_LIMIT = 64
"""Layouts whose messages are kept ready: some ten KiB each at most."""
IN_SLOT_LIMIT = 1 << 16
"""Chunks of layouts whose places are kept ready: some hundred bytes each."""
SPECS_PER_PAUSE = 64
"""Streams of a model between two pauses: a quarter of a millisecond."""
RUN_BYTES, SEGMENT_BYTES = 16, 96
"""The most bytes in a message of a run, and of a segment with one run and without checksums."""
ANSWER_LIMIT_BYTES = 3 << 20
"""The most that an answer has: stock clients take 4 MiB."""
PAGE_LIMIT_BYTES = 1 << 20
"""The most that a page of a list has; look-ups and batches of operations end behind so much. gRPC takes a
millisecond of the event loop to send it."""
LENGTH_DELIMITED = 2
"""How protobuf says that a field has its length before it."""
SECOND_NS = 10**9
JOBS_PER_REQUEST = 1024
JOBS_PER_PAUSE = 32
"""Jobs of a request that are read before others may have their turn: a fifth of a millisecond."""
ACTIONS_PER_REQUEST = 256
ACTIONS_PER_PAUSE = 32
ID_BYTES = 128
SPAN_LIMIT_S = 30 * 86400
HINT_COUNT_LIMIT = 2**62
LAYERS_LIMIT = 512
"""Layouts, in DRAM or not, whose layers' places are kept ready: some tens of KiB each at the most."""
PREFETCH_TTL_S = 60
KEEP_TTL_S = 600


def timestamp(time_ns: int) -> Timestamp:
    """Nanoseconds since the epoch as a Timestamp."""
    seconds, nanos = divmod(time_ns, 10**9)
    return Timestamp(seconds=seconds, nanos=nanos)


def duration(span_ns: int) -> Duration:
    """Nanoseconds as a Duration."""
    seconds, nanos = divmod(span_ns, 10**9)
    return Duration(seconds=seconds, nanos=nanos)


def stream_name(stream: Stream) -> model_pb2.StreamName:
    """A stream's name."""
    return model_pb2.StreamName(layer=stream.layer, kind=model_pb2.StateKind.ValueType(stream.kind))


def stream_range(item: StreamRange) -> model_pb2.StreamRange:
    """Streams of one kind."""
    kind = model_pb2.StateKind.ValueType(item.kind)
    return model_pb2.StreamRange(kind=kind, layer_begin=item.layer_begin, layer_end=item.layer_end)


def fill_error(message: arena_pb2.OperationError, error: CacheError) -> None:
    """Put an error into the message of one operation's error."""
    message.code, message.reason, message.message = code_of(error).value[0], error.reason, message_of(error)
    message.metadata.update(wire_facts(error))


# -- models ---------------------------------------------------------------------------------------


def model_spec(model: model_pb2.Model) -> Generator[None, None, ModelSpec]:
    """A model to register, validated; pauses now and then. Raises InvalidArgument."""
    within, text = validate.within, validate.text
    spec = ModelSpec(
        model_id=validate.model_id(model.name, "model.name"),
        architecture=text(model.architecture, TEXT_BYTES, "model.architecture", is_required=True),
        revision=text(model.revision, TEXT_BYTES, "model.revision"),
        weights_digest=text(model.weights_digest, TEXT_BYTES, "model.weights_digest"),
        tokenizer_digest=text(model.tokenizer_digest, TEXT_BYTES, "model.tokenizer_digest"),
        dtype=validate.dtype(model.dtype, "model.dtype"),
        layer_count=within(model.layer_count, 1, validate.LAYER_LIMIT, "model.layer_count"),
        hidden_size=within(model.hidden_size, 1, COUNT_LIMIT, "model.hidden_size"),
        kv_head_count=within(model.kv_head_count, 0, COUNT_LIMIT, "model.kv_head_count"),
        head_size=within(model.head_size, 0, COUNT_LIMIT, "model.head_size"),
        rope=text(model.rope, CANONICAL_BYTES, "model.rope"),
        norm=text(model.norm, TEXT_BYTES, "model.norm"),
        is_relocatable=model.is_relocatable,
        streams=(),
        settings=text(model.settings, CANONICAL_BYTES, "model.settings"),
    )
    streams = yield from _stream_specs(model.streams)
    return replace(spec, streams=tuple(streams))


def model_probe(model: model_pb2.Model) -> ModelProbe | None:
    """The probe of a model to register, validated; None where there is none. Raises InvalidArgument."""
    if not model.HasField("probe"):
        return None
    probe = model.probe
    dtype = validate.dtype(probe.dtype, "model.probe.dtype")
    probed = ModelProbe(dtype, tuple(probe.token_ids), probe.group_size, probe.values)
    if problem := probed.problem():
        raise InvalidArgument(field="model.probe", problem=problem)
    return probed


def _stream_specs(specs: Sequence[model_pb2.StreamSpec]) -> Generator[None, None, Sequence[StreamSpec]]:
    """The streams of a model, in storage order and without token ids."""
    if not specs:
        raise InvalidArgument(field="model.streams", problem="is required")
    limit = validate.STREAMS_LIMIT
    by_stream: dict[Stream, StreamSpec] = {}
    count = 0
    for i, spec in enumerate(specs):
        if i % SPECS_PER_PAUSE == SPECS_PER_PAUSE - 1:
            yield
        field = f"model.streams[{i}]"
        named = validate.stream_range(spec.streams, f"{field}.streams")
        row_bytes = validate.within(spec.row_bytes, 1, ROW_BYTES_LIMIT, f"{field}.row_bytes")
        dtype = validate.dtype(spec.dtype, f"{field}.dtype")
        count += named.layer_end - named.layer_begin
        # Token ids may be among the named streams, and do not count. Which stream they are is known further
        # down.
        if count > limit + 1:
            raise InvalidArgument(field="model.streams", problem=f"more than {limit} streams")
        by_stream.update((stream, StreamSpec(stream, row_bytes, dtype)) for stream in named.streams())
        if len(by_stream) != count:
            raise InvalidArgument(field="model.streams", problem="names a stream twice")
    if by_stream.pop(TOKENS, TOKENS_SPEC) != TOKENS_SPEC:
        raise InvalidArgument(field="model.streams", problem="token ids are int32 rows of 4 bytes")
    if len(by_stream) > limit:
        raise InvalidArgument(field="model.streams", problem=f"more than {limit} streams")
    ordered = yield from _in_storage_order(by_stream.values())
    if slot_bytes((TOKENS_SPEC, *ordered)) > SEGMENT_BYTES_LIMIT:
        raise InvalidArgument(field="model.streams", problem="a segment would be larger than 16 GiB")
    return ordered


def _in_storage_order(specs: Iterable[StreamSpec]) -> Generator[None, None, list[StreamSpec]]:
    """Sort by layer and kind, a layer at a time: to compare thousands in one go takes milliseconds."""
    by_layer: dict[int, list[StreamSpec]] = {}
    for i, spec in enumerate(specs):
        if i % SPECS_PER_PAUSE == SPECS_PER_PAUSE - 1:
            yield
        by_layer.setdefault(spec.stream.layer, []).append(spec)
    ordered: list[StreamSpec] = []
    for i, layer in enumerate(sorted(by_layer)):
        if i % SPECS_PER_PAUSE == SPECS_PER_PAUSE - 1:
            yield
        ordered += sorted(by_layer[layer])
    yield
    return ordered


def encoded_model(record: Registered) -> Generator[None, None, bytes]:
    """The message of a registered model without its probe; pauses now and then.

    Some streams are encoded at a time: encoded messages in a row are the message that has them all.
    """
    spec = record.spec
    facts = model_pb2.Model(
        name=f"models/{spec.model_id}",
        fingerprint=record.fingerprint,
        architecture=spec.architecture,
        revision=spec.revision,
        weights_digest=spec.weights_digest,
        tokenizer_digest=spec.tokenizer_digest,
        dtype=model_pb2.Dtype.ValueType(spec.dtype),
        layer_count=spec.layer_count,
        hidden_size=spec.hidden_size,
        kv_head_count=spec.kv_head_count,
        head_size=spec.head_size,
        rope=spec.rope,
        norm=spec.norm,
        is_relocatable=spec.is_relocatable,
        create_time=timestamp(record.create_time_ns),
        settings=spec.settings,
    )
    parts = [facts.SerializeToString()]
    alike: dict[tuple[StateKind, int, DType], list[Stream]] = {}
    for i, (stream, row_bytes, dtype) in enumerate(spec.streams):
        if i % SPECS_PER_PAUSE == SPECS_PER_PAUSE - 1:
            yield
        alike.setdefault((stream.kind, row_bytes, dtype), []).append(stream)
    ranges: list[list[tuple[StreamRange, int, DType]]] = []
    for (_, row_bytes, dtype), streams in alike.items():
        yield
        ranges.append([(item, row_bytes, dtype) for item in ranges_of(streams)])
    # Each list is in order by itself; merged they are in order too, without a sort of all.
    ordered = merge(*ranges)
    while some := list(islice(ordered, SPECS_PER_PAUSE)):
        yield
        message = model_pb2.Model()
        for item, row_bytes, dtype in some:
            message.streams.add(
                streams=stream_range(item), row_bytes=row_bytes, dtype=model_pb2.Dtype.ValueType(dtype)
            )
        parts.append(message.SerializeToString())
    return b"".join(parts)


def encoded_probe(probe: ModelProbe) -> bytes:
    """A model's probe, as a message of a model with no other field."""
    return model_pb2.Model(
        probe=model_pb2.ModelProbe(
            dtype=model_pb2.Dtype.ValueType(probe.dtype),
            token_ids=probe.token_ids,
            group_size=probe.group_size,
            values=probe.values,
        )
    ).SerializeToString()


# -- sessions ---------------------------------------------------------------------------------------


def session_message(view: SessionView, clock: Clock) -> session_pb2.Session:
    """A session's facts."""
    fill_session(message := session_pb2.Session(), view, clock)
    return message


_CONSTANTS: dict[bytes, session_pb2.Session] = {}
"""The fields of a session's message that never change, by uid. A copy is cheaper than a new message."""


@lru_cache(LAYOUTS_LIMIT)
def _layout(ranges: tuple[StreamRange, ...]) -> session_pb2.Session:
    """A session's message that says its layout alone. Sessions of one engine have the same."""
    return session_pb2.Session(layout=map(stream_range, ranges))


_ANSWERS: dict[bytes, tuple[SessionView, int, bytes]] = {}
"""The last whole answer about a session, and the facts that it tells, by uid."""


def whole_session(view: SessionView, clock: Clock) -> bytes:
    """A session's message, encoded, with the contents that its keys are of: all that GetSession tells."""
    ahead_ns = clock.wall_ahead_ns()
    known = _ANSWERS.get(view.uid)
    # A session that is asked for again has mostly not changed: comparing costs a tenth of making it.
    if known is not None and known[0] == view and known[1] == ahead_ns:
        return known[2]
    _fill(message := session_pb2.Session(), view, ahead_ns)
    message.whole_token_count = view.whole_token_count
    message.is_being_appended = view.is_writing
    for content in contents_within(view.contents, 0, view.whole_token_count):
        message.contents.add(begin=content.begin, end=content.end, digest=content.digest)
    encoded = message.SerializeToString()
    if len(encoded) <= KEPT_ANSWER_BYTES:
        if len(_ANSWERS) >= CONSTANTS_LIMIT:
            _ANSWERS.clear()
        _ANSWERS[view.uid] = view, ahead_ns, encoded
    return encoded


def fill_session(message: session_pb2.Session, view: SessionView, clock: Clock) -> None:
    """Say a session's facts, its times as the wall clock counts them now."""
    _fill(message, view, clock.wall_ahead_ns())


def _fill(message: session_pb2.Session, view: SessionView, ahead_ns: int) -> None:
    constants = _CONSTANTS.get(view.uid)
    if constants is None:
        # All entries go at once: sessions that are asked for come back within their next calls.
        if len(_CONSTANTS) >= CONSTANTS_LIMIT:
            _CONSTANTS.clear()
        constants = _CONSTANTS[view.uid] = session_pb2.Session()
        constants.CopyFrom(_layout(view.layout.outline.ranges))
        constants.name, constants.uid, constants.tenant = view.name, view.uid.hex(), view.tenant
        constants.model, constants.model_fingerprint = f"models/{view.model_id}", view.model_fingerprint
        constants.salt = view.salt
        constants.labels.update(view.labels)
    message.CopyFrom(constants)
    message.generation, message.token_count = view.generation, view.token_count
    message.durable_token_count = view.durable_token_count
    message.is_pinned, message.copies = view.is_pinned, view.copies
    message.dram_bytes, message.ssd_bytes = view.memory_bytes, view.durable_bytes
    # The store's time may stand behind the wall clock; clients are told the wall clock's.
    for told, time_ns in (
        (message.create_time, view.create_time_ns),
        (message.access_time, view.access_time_ns),
        (message.expire_time, view.expire_time_ns),
    ):
        # The field is set, so that the epoch is a time too.
        told.SetInParent()
        told.seconds, told.nanos = divmod(time_ns + ahead_ns, SECOND_NS)
    if view.ttl_ns is not None:
        message.ttl.seconds, message.ttl.nanos = divmod(view.ttl_ns, SECOND_NS)


def wall_time_ns(clock: Clock, deadline_ns: int) -> int:
    """The wall clock at a moment of the monotonic clock."""
    return clock.wall_ns() + deadline_ns - clock.monotonic_ns()


# -- locations --------------------------------------------------------------------------------------


def fill_lease(
    message: arena_pb2.Lease, lease: Lease, clock: Clock, *, is_brief: bool, limit_bytes: int
) -> None:
    """Fill in a lease, and for a brief one the places of everything; `fill_segments` does so for others.

    Raises CapacityExceeded where all of it would take more than `limit_bytes`, reckoned from above.
    """
    in_slot = _in_slot(lease.view.layout)
    # The size is reckoned from above: encoding the answer to measure it would take what the bound is for.
    piece_bytes = RUN_BYTES if is_brief else SEGMENT_BYTES + 8 * len(lease.view.layout.specs)
    size_bytes = in_slot.ByteSize() + piece_bytes * len(lease.pieces)
    if size_bytes > limit_bytes:
        raise too_large(size_bytes, limit_bytes)
    message.CopyFrom(in_slot)
    fill_session(message.session, lease.view, clock)
    message.lease_id = lease.lease_id
    message.range.begin, message.range.end = lease.begin, lease.end
    expire_time_ns = clock.wall_ns() + lease.deadline_ns - clock.monotonic_ns()
    message.expire_time.seconds, message.expire_time.nanos = divmod(expire_time_ns, SECOND_NS)
    if is_brief:
        _fill_runs(message.runs, lease.pieces)


def too_large(size_bytes: int, limit_bytes: int) -> CapacityExceeded:
    """The refusal of an answer with more locations than one may hold."""
    return CapacityExceeded(
        f"{size_bytes} B of locations are more than an answer may hold, {limit_bytes} B",
        needed_bytes=size_bytes,
        limit_bytes=limit_bytes,
    )


def fill_segments(message: arena_pb2.Lease, lease: Lease, begin: int, end: int) -> None:
    """Fill in where pieces `[begin, end)` of a lease lie, and their checksums."""
    # A segment may be in two pieces, which are told as one location with two runs.
    last = lease.pieces[begin - 1].segment if begin else None
    location = message.segments[-1] if begin else None
    for piece in lease.pieces[begin:end]:
        segment = piece.segment
        if segment is not last or location is None:
            location = message.segments.add()
            on_ssd = lease.on_ssd.get(segment.segment_id)
            # Segments in memory have the writers' sums. Those on SSD have the header's, which the client
            # verifies.
            if on_ssd is None:
                sums = segment.settled
                _fill_identity(location, segment, _offset_bytes(segment), sums.row_end)
                location.checksums.extend(sums.values)
            else:
                _fill_identity(location, segment, on_ssd.offset_bytes, segment.durable_row_count)
                location.path_index, location.header_checksum = on_ssd.path_index, segment.header_checksum
            last = segment
        # Fields are set one by one: named arguments take twice as long.
        rows = location.rows.add()
        rows.row_begin, rows.row_end, rows.token_begin = piece.row_begin, piece.row_end, piece.token_begin


def fill_reservation(
    message: arena_pb2.Reservation, reservation: Reservation, clock: Clock, *, is_brief: bool
) -> None:
    """Fill in where everything of a reservation is to be written."""
    message.layout.MergeFrom(_in_slot(reservation.session.layout).layout)
    message.session_uid = reservation.session.uid.hex()
    message.reservation_id = reservation.reservation_id
    if is_brief:
        _fill_runs(message.runs, reservation.runs)
    else:
        for run in reservation.runs:
            location = message.segments.add()
            _fill_identity(location, run.segment, _offset_bytes(run.segment), run.segment.row_count)
            location.rows.add(row_begin=run.row_begin, row_end=run.row_end, token_begin=run.token_begin)
    expire_time_ns = clock.wall_ns() + reservation.deadline_ns - clock.monotonic_ns()
    message.expire_time.seconds, message.expire_time.nanos = divmod(expire_time_ns, SECOND_NS)


def _fill_runs(message: arena_pb2.Runs, pieces: Sequence[Piece | Run]) -> None:
    message.offset_bytes.extend([_offset_bytes(piece.segment) for piece in pieces])
    message.row_begin.extend([piece.row_begin for piece in pieces])
    message.row_end.extend([piece.row_end for piece in pieces])
    # Capacities are left out where every segment has 64 rows: short answers stay short.
    capacities = [piece.segment.layout.segment_tokens for piece in pieces]
    if capacities and max(capacities) > SEGMENT_TOKENS:
        message.row_capacity.extend(capacities)


def _fill_identity(
    message: arena_pb2.SegmentLocation, segment: Segment, offset_bytes: int, row_count: int
) -> None:
    message.segment_id, message.offset_bytes = segment.segment_id, offset_bytes
    message.session_uid, message.generation = segment.writer_uid.hex(), segment.generation
    message.position_begin, message.token_count = segment.begin, row_count
    message.row_capacity = segment.layout.segment_tokens


def _offset_bytes(segment: Segment) -> int:
    if segment.memory is None:
        raise RuntimeError(f"segment {segment.segment_id} is held but not in DRAM")
    return segment.memory.offset_bytes


_IN_SLOT: dict[int, tuple[SegmentLayout, arena_pb2.Lease]] = {}
"""By the layout's identity. An entry keeps the layout alive, so that no other layout has its identity."""


def _in_slot(layout: SegmentLayout) -> arena_pb2.Lease:
    """A lease message that has only the places of the chunks in a slot."""
    described = _IN_SLOT.get(id(layout))
    if described is None:
        # The number of streams bounds the entries, not that of layouts: a layout may have thousands of
        # streams.
        if sum(len(kept.specs) for kept, _ in _IN_SLOT.values()) + len(layout.specs) > IN_SLOT_LIMIT:
            _IN_SLOT.clear()
        chunks = (
            arena_pb2.ChunkLayout(
                stream=stream_name(spec.stream), offset_bytes=offset, row_bytes=spec.row_bytes
            )
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        )
        described = _IN_SLOT[id(layout)] = layout, arena_pb2.Lease(layout=chunks)
    return described[1]


# -- answers of many entries ---------------------------------------------------------------------------


def entry(field: int, encoded: bytes) -> bytes:
    """A message that has this one as an entry of a field, whose number is below 16."""
    length = len(encoded)
    # Lengths of one and two bytes are nearly all.
    if length < 0x80:
        return bytes((field << 3 | LENGTH_DELIMITED, length)) + encoded
    if length < 0x4000:
        return bytes((field << 3 | LENGTH_DELIMITED, length & 0x7F | 0x80, length >> 7)) + encoded
    size = bytearray()
    while length >= 0x80:
        size.append(length & 0x7F | 0x80)
        length >>= 7
    size.append(length)
    return bytes((field << 3 | LENGTH_DELIMITED,)) + bytes(size) + encoded


class EncodedAnswer:
    """An answer that is being made."""

    def __init__(self) -> None:
        self._encoded = io.BytesIO()
        self._part_count = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of the answer so far."""
        return self._encoded.tell()

    def add(self, part: Message) -> None:
        """Append a message that has one entry, or the fields that are said once."""
        self.add_encoded(part.SerializeToString())

    def add_encoded(self, part: bytes) -> None:
        """As `add`, already encoded."""
        self._encoded.write(part)
        self._part_count += 1

    def encoded(self) -> bytes:
        """The whole answer: encoded messages one after the other are the message with all their entries."""
        # The parts are not joined at the end: a megabyte takes half a millisecond.
        return self._encoded.getvalue()


class Page(EncodedAnswer):
    """A page of a list: so many entries at most, and so many bytes."""

    def __init__(self, size: int) -> None:
        """`size` as it was asked for. Raises InvalidArgument."""
        super().__init__()
        self.limit = validate.page_size(size)
        self._last_id = ""
        self.next_page_token = ""
        """The token for what follows; empty while everything was taken."""

    def takes(self, listed_id: str, part: Message) -> bool:
        """Add an answer of one entry. False, and the page is over, where it belongs to the next page."""
        return self.takes_encoded(listed_id, part.SerializeToString())

    def takes_encoded(self, listed_id: str, encoded: bytes) -> bool:
        """As `takes`, already encoded."""
        is_full = self._part_count == self.limit or self.size_bytes + len(encoded) > PAGE_LIMIT_BYTES
        # A page has one entry at least: else a listing would never end.
        if self._part_count and is_full:
            self.next_page_token = f"after:{self._last_id}"
            return False
        self.add_encoded(encoded)
        self._last_id = listed_id
        return True


# -- engines' queues -----------------------------------------------------------------------------------


_OUTCOMES = {
    HintVerdict.ACCEPTED: hints_pb2.HINT_OUTCOME_ACCEPTED,
    HintVerdict.CLIPPED: hints_pb2.HINT_OUTCOME_CLIPPED,
    HintVerdict.DEFERRED: hints_pb2.HINT_OUTCOME_DEFERRED,
    HintVerdict.REJECTED: hints_pb2.HINT_OUTCOME_REJECTED,
    HintVerdict.MISSING: hints_pb2.HINT_OUTCOME_MISSING,
}
_CHANGES = {
    Change.PROMOTED: hints_pb2.SESSION_CHANGE_PROMOTED,
    Change.DEMOTED: hints_pb2.SESSION_CHANGE_DEMOTED,
    Change.EVICTED: hints_pb2.SESSION_CHANGE_EVICTED,
    Change.EXPIRED: hints_pb2.SESSION_CHANGE_EXPIRED,
}
_STATES = {
    LayerWhere.DRAM: hints_pb2.LAYER_STATE_DRAM,
    LayerWhere.SSD: hints_pb2.LAYER_STATE_SSD,
    LayerWhere.MISSING: hints_pb2.LAYER_STATE_MISSING,
}


@dataclass(frozen=True, slots=True)
class Hello:
    """The publisher of a queue."""

    engine: str
    grace_ns: int | None
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Deltas:
    """The changes of a queue: sessions' ids with their jobs, and jobs that go, with whether they started."""

    put: dict[str, tuple[str, Job]]
    gone: dict[str, bool]
    is_whole: bool = False
    """Whether the jobs that are put are the whole queue."""


def hello(message: hints_pb2.ScheduleHello) -> Hello:
    """A hello, validated. Raises InvalidArgument."""
    fingerprint = message.model_fingerprint
    if fingerprint:
        validate.fingerprint(fingerprint, "hello.model_fingerprint")
    grace_ns = span_ns(message.grace, "hello.grace") if message.HasField("grace") else None
    return Hello(validate.engine(message.engine, "hello.engine"), grace_ns, fingerprint)


def delta(message: hints_pb2.QueueDelta, now_s: float) -> Generator[None, None, Deltas]:
    """A delta that arrived at `now_s`, validated; pauses now and then. Raises InvalidArgument."""
    validate.within(len(message.gone), 0, JOBS_PER_REQUEST, "delta.gone")
    gone: dict[str, bool] = {}
    for i, item in enumerate(message.gone):
        try:
            _check_id(item.job_id, gone)
            gone[item.job_id] = _is_started(item.end)
        except InvalidArgument as error:
            raise _inside(f"delta.gone[{i}]", error) from error
        if i % JOBS_PER_PAUSE == JOBS_PER_PAUSE - 1:
            yield
    put = yield from _jobs(message.put, "delta.put", now_s)
    return Deltas(put, gone)


def snapshot(message: hints_pb2.QueueSnapshot, now_s: float) -> Generator[None, None, Deltas]:
    """A whole queue that arrived at `now_s`, validated; pauses now and then. Raises InvalidArgument."""
    put = yield from _jobs(message.jobs, "snapshot.jobs", now_s)
    return Deltas(put, {}, is_whole=True)


def _jobs(
    messages: Sequence[hints_pb2.Job], field: str, now_s: float
) -> Generator[None, None, dict[str, tuple[str, Job]]]:
    validate.within(len(messages), 0, JOBS_PER_REQUEST, field)
    jobs: dict[str, tuple[str, Job]] = {}
    for i, message in enumerate(messages):
        try:
            _check_id(message.job_id, jobs)
            jobs[message.job_id] = validate.session_id(message.session, "session"), _job(message, now_s)
        except InvalidArgument as error:
            raise _inside(f"{field}[{i}]", error) from error
        if i % JOBS_PER_PAUSE == JOBS_PER_PAUSE - 1:
            yield
    return jobs


def _job(message: hints_pb2.Job, now_s: float) -> Job:
    validate.within(message.new_token_count, 0, HINT_COUNT_LIMIT, "new_token_count")
    start_s: float | None = None
    match message.WhichOneof("start"):
        case "position":
            if not math.isfinite(message.position):
                raise InvalidArgument(field="position", problem="is not finite")
        case "start_in":
            start_s = now_s + span_ns(message.start_in, "start_in") / SECOND_NS
        case None:
            raise InvalidArgument(field="start", problem="is required")
    deadline_s = math.inf
    if message.HasField("deadline_in"):
        deadline_s = now_s + span_ns(message.deadline_in, "deadline_in") / SECOND_NS
    priority = validate.within(message.priority, 0, PRIORITY_LIMIT, "priority")
    return Job(message.job_id, None, message.position, start_s, priority, deadline_s)


def _is_started(end: int) -> bool:
    if end not in (hints_pb2.JOB_END_STARTED, hints_pb2.JOB_END_CANCELLED):
        raise InvalidArgument(field="end", problem=f"{end} is not the end of a job")
    return end == hints_pb2.JOB_END_STARTED


def _check_id(job_id: str, known: Collection[str]) -> None:
    validate.text(job_id, ID_BYTES, "job_id", is_required=True)
    if job_id in known:
        raise InvalidArgument(field="job_id", problem="is there twice")


def _inside(at: str, error: InvalidArgument) -> InvalidArgument:
    """The same error of a field of a part of the request."""
    return InvalidArgument(field=f"{at}.{error.field}", problem=error.problem)


def span_ns(message: Duration, field: str, *, least_s: int = 0) -> int:
    """A span of time from now on, in nanoseconds: up to 30 days. Raises InvalidArgument."""
    validate.within(message.seconds, least_s, SPAN_LIMIT_S, field)
    validate.within(message.nanos, 0, SECOND_NS - 1, f"{field}.nanos")
    return message.seconds * SECOND_NS + message.nanos


# -- hints ------------------------------------------------------------------------------------------


def hints(request: hints_pb2.HintRequest, tenant: str) -> Generator[None, None, list[Hint]]:
    """A batch of hints, validated; pauses now and then. Raises InvalidArgument."""
    validate.text(request.message_id, ID_BYTES, "message_id")
    validate.within(len(request.actions), 1, ACTIONS_PER_REQUEST, "actions")
    batch = []
    for i, action in enumerate(request.actions):
        if i % ACTIONS_PER_PAUSE == ACTIONS_PER_PAUSE - 1:
            yield
        try:
            batch.append(_hint(action, tenant))
        except InvalidArgument as error:
            raise _inside(f"actions[{i}]", error) from error
    return batch


def _hint(message: hints_pb2.HintAction, tenant: str) -> Hint:
    validate.text(message.action_id, ID_BYTES, "action_id")
    kind = message.WhichOneof("action")
    if kind is None:
        raise InvalidArgument(field="action", problem="is required")
    action = Action(kind)
    begin, end = _range(message)
    return Hint(
        tenant,
        validate.session_id(message.session, "session"),
        action,
        begin,
        end,
        ttl_ns=_ttl_ns(message, action),
        priority=validate.within(message.priority, 0, PRIORITY_LIMIT, "priority"),
        budget_bytes=validate.within(message.budget_bytes, 1, HINT_COUNT_LIMIT, "budget_bytes")
        if message.HasField("budget_bytes")
        else None,
        return_in_ns=_return_in_ns(message.expect) if action is Action.EXPECT else None,
        ahead=_ahead(message.ahead),
    )


def _ahead(message: hints_pb2.AheadHint) -> AheadTokens:
    def count(of: str, value: int) -> int:
        return validate.within(value, 0, HINT_COUNT_LIMIT, f"ahead.{of}_token_count")

    return AheadTokens(
        count("computed", message.computed_token_count),
        count("used", message.used_token_count),
        count("wasted", message.wasted_token_count),
    )


def _range(message: hints_pb2.HintAction) -> tuple[int, int | None]:
    if not message.HasField("range"):
        return 0, None
    begin = validate.within(message.range.begin, 0, HINT_COUNT_LIMIT, "range.begin")
    return begin, validate.within(message.range.end, begin, HINT_COUNT_LIMIT, "range.end")


def _ttl_ns(message: hints_pb2.HintAction, action: Action) -> int:
    if message.HasField("ttl"):
        return span_ns(message.ttl, "ttl", least_s=1)
    return (PREFETCH_TTL_S if action is Action.PREFETCH else KEEP_TTL_S) * SECOND_NS


def _return_in_ns(message: hints_pb2.ExpectHint) -> int | None:
    match message.WhichOneof("expected"):
        case "return_in":
            return span_ns(message.return_in, "expect.return_in")
        case "ended" if message.ended:
            return None
        case "ended":
            raise InvalidArgument(field="expect.ended", problem="is false, which says nothing")
        case None:
            raise InvalidArgument(field="expect.expected", problem="is required")


def hint_result(action_id: str, answer: HintAnswer, *, wall_offset_ns: int) -> hints_pb2.HintResult:
    """The outcome of a hint; `wall_offset_ns` leads from the monotonic to the wall clock."""
    result = hints_pb2.HintResult(
        action_id=action_id,
        outcome=_OUTCOMES[answer.outcome],
        reason=answer.reason,
        granted_bytes=answer.granted_bytes,
    )
    if answer.until_ns is not None:
        result.valid_until.CopyFrom(timestamp(answer.until_ns + wall_offset_ns))
    return result


# -- events -----------------------------------------------------------------------------------------


def fill_event(
    message: hints_pb2.SessionEvent, name: str, changes: Change, readiness: Readiness | None
) -> None:
    """Fill in what happened to a session. A session that is gone has no readiness."""
    message.session = name
    message.changes.extend([_CHANGES[change] for change in changes])
    message.readiness.SetInParent()
    if readiness is not None:
        message.readiness.CopyFrom(_layers(readiness))
        message.readiness.token_count = readiness.token_count
        message.readiness.missing_bytes = readiness.missing_bytes
        message.readiness.ready_in.CopyFrom(duration(int(readiness.ready_in_s * SECOND_NS)))


_LAYERS: dict[tuple[int, bool], tuple[tuple[LayerRun, ...], hints_pb2.Readiness]] = {}
"""By the identity of the runs and whether bytes are missing. An entry keeps the runs alive."""


def _layers(readiness: Readiness) -> hints_pb2.Readiness:
    """The readiness of a session's layers.

    A layout of 512 runs takes a millisecond to say, and to copy far less.
    """
    key = id(readiness.runs), bool(readiness.missing_bytes)
    known = _LAYERS.get(key)
    if known is None:
        if len(_LAYERS) >= LAYERS_LIMIT:
            _LAYERS.clear()
        message = hints_pb2.Readiness()
        for run in readiness.runs:
            message.layers.add(layer_begin=run.begin, layer_end=run.end, state=_STATES[readiness.place(run)])
        known = _LAYERS[key] = readiness.runs, message
    return known[1]
