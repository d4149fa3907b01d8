"""Between the wire's messages and the cache's facts."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import islice

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.cache.appends import Reservation, Run
from ctxcache.cache.leases import Lease
from ctxcache.cache.models import Registered
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Piece, Session, SessionView
from ctxcache.errors import InvalidArgument
from ctxcache.format.layout import SegmentLayout, slot_bytes
from ctxcache.format.model import ModelSpec
from ctxcache.format.probe import ModelProbe
from ctxcache.format.slot import Slot
from ctxcache.format.streams import (
    TOKENS,
    TOKENS_SPEC,
    DType,
    StateKind,
    Stream,
    StreamRange,
    StreamSpec,
    ranges_of,
)
from ctxcache.runtime.clock import Clock
from ctxcache.service import validate
from ctxcache.v1 import arena_pb2, model_pb2, session_pb2

ROW_BYTES_LIMIT = 2 << 20
TEXT_BYTES = 256
CANONICAL_BYTES = 4096
COUNT_LIMIT = 2**31 - 1
SEGMENT_BYTES_LIMIT = 1 << 34
CONSTANTS_LIMIT = 4096
"""Sessions whose unchanging facts are kept ready: a few KiB each."""
IN_SLOT_LIMIT = 1 << 16
"""Chunks of layouts whose places are kept ready: some hundred bytes each."""
SPECS_PER_PAUSE = 64
"""Streams of a model between two pauses: a quarter of a millisecond."""
RUN_BYTES, SEGMENT_BYTES = 16, 96
"""What a run, and a segment with one run and without checksums, takes in a message at the most."""


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
        kv_head_count=within(model.kv_head_count, 1, COUNT_LIMIT, "model.kv_head_count"),
        head_size=within(model.head_size, 1, COUNT_LIMIT, "model.head_size"),
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
    found = ModelProbe(dtype, tuple(probe.token_ids), probe.group_size, probe.values)
    if problem := found.problem():
        raise InvalidArgument(field="model.probe", problem=problem)
    return found


def _stream_specs(specs: Sequence[model_pb2.StreamSpec]) -> Generator[None, None, Sequence[StreamSpec]]:
    """Those of a model, in storage order and without token ids."""
    if not specs:
        raise InvalidArgument(field="model.streams", problem="is required")
    limit = validate.STREAMS_LIMIT
    found: dict[Stream, StreamSpec] = {}
    count = 0
    for i, spec in enumerate(specs):
        if i % SPECS_PER_PAUSE == SPECS_PER_PAUSE - 1:
            yield
        field = f"model.streams[{i}]"
        named = validate.stream_range(spec.streams, f"{field}.streams")
        row_bytes = validate.within(spec.row_bytes, 1, ROW_BYTES_LIMIT, f"{field}.row_bytes")
        dtype = validate.dtype(spec.dtype, f"{field}.dtype")
        count += named.layer_end - named.layer_begin
        if count > limit + 1:
            raise InvalidArgument(field="model.streams", problem=f"more than {limit} streams")
        found.update((stream, StreamSpec(stream, row_bytes, dtype)) for stream in named.streams())
        if len(found) != count:
            raise InvalidArgument(field="model.streams", problem="names a stream twice")
    if found.pop(TOKENS, TOKENS_SPEC) != TOKENS_SPEC:
        raise InvalidArgument(field="model.streams", problem="token ids are int32 rows of 4 bytes")
    if len(found) > limit:
        raise InvalidArgument(field="model.streams", problem=f"more than {limit} streams")
    ordered = yield from _in_storage_order(found.values())
    if slot_bytes((TOKENS_SPEC, *ordered)) > SEGMENT_BYTES_LIMIT:
        raise InvalidArgument(field="model.streams", problem="a segment would be larger than 16 GiB")
    return ordered


def _in_storage_order(specs: Iterable[StreamSpec]) -> Generator[None, None, list[StreamSpec]]:
    """By layer and kind. Sorted a layer at a time: to compare thousands in one go takes milliseconds."""
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
    """Say what a registered model is, but for its probe; pauses now and then.

    Encoded some streams at a time: such messages one after the other are the message that has them all.
    """
    spec = record.spec
    facts = model_pb2.Model(
        name=f"models/{spec.model_id}", fingerprint=record.fingerprint, architecture=spec.architecture,
        revision=spec.revision, weights_digest=spec.weights_digest, tokenizer_digest=spec.tokenizer_digest,
        dtype=model_pb2.Dtype.ValueType(spec.dtype), layer_count=spec.layer_count,
        hidden_size=spec.hidden_size, kv_head_count=spec.kv_head_count, head_size=spec.head_size,
        rope=spec.rope, norm=spec.norm, is_relocatable=spec.is_relocatable,
        create_time=timestamp(record.create_time_ns), settings=spec.settings,
    )  # fmt: skip
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
    """What is said of a model's probe, as a message of a model that has nothing else."""
    return model_pb2.Model(
        probe=model_pb2.ModelProbe(
            dtype=model_pb2.Dtype.ValueType(probe.dtype), token_ids=probe.token_ids,
            group_size=probe.group_size, values=probe.values,
        )
    ).SerializeToString()  # fmt: skip


# -- sessions ---------------------------------------------------------------------------------------


def session_message(view: SessionView, clock: Clock) -> session_pb2.Session:
    """A session's facts."""
    fill_session(message := session_pb2.Session(), view, clock)
    return message


def fill_session(message: session_pb2.Session, view: SessionView, clock: Clock) -> None:
    """Say a session's facts, its times as the wall clock counts them now."""
    message.CopyFrom(_constants(view))
    _fill_changes(message, view, clock)


_CONSTANTS: dict[bytes, session_pb2.Session] = {}


def _fill_changes(message: session_pb2.Session, view: SessionView, clock: Clock) -> None:
    """Add what changes to what does not."""
    message.generation, message.token_count = view.generation, view.token_count
    message.durable_token_count = view.durable_token_count
    message.is_pinned = view.is_pinned
    message.dram_bytes, message.ssd_bytes = view.memory_bytes, view.durable_bytes
    ahead_ns = clock.wall_ahead_ns()
    _fill_time(message.create_time, view.create_time_ns + ahead_ns)
    _fill_time(message.access_time, view.access_time_ns + ahead_ns)
    _fill_time(message.expire_time, view.expire_time_ns + ahead_ns)
    if view.ttl_ns is not None:
        message.ttl.seconds, message.ttl.nanos = divmod(view.ttl_ns, 10**9)


def wall_time_ns(clock: Clock, deadline_ns: int) -> int:
    """What the wall clock will show at a moment of the monotonic clock."""
    return clock.wall_ns() + deadline_ns - clock.monotonic_ns()


def _fill_time(message: Timestamp, time_ns: int) -> None:
    # Set, so that the epoch is a time too.
    message.SetInParent()
    message.seconds, message.nanos = divmod(time_ns, 10**9)


def _constants(of: Session | SessionView) -> session_pb2.Session:
    """What of a session's message never changes. Copying it is cheaper than making it."""
    found = _CONSTANTS.get(of.uid)
    if found is None:
        if len(_CONSTANTS) >= CONSTANTS_LIMIT:
            _CONSTANTS.clear()
        found = _CONSTANTS[of.uid] = session_pb2.Session(
            name=of.name, uid=of.uid.hex(), tenant=of.tenant, model=f"models/{of.model_id}",
            model_fingerprint=of.model_fingerprint,
            layout=map(stream_range, of.layout.outline.ranges),
        )  # fmt: skip
    return found


# -- locations --------------------------------------------------------------------------------------


def fill_lease(message: arena_pb2.Lease, lease: Lease, clock: Clock, *, is_brief: bool) -> None:
    """Say what a lease is, and for a brief one where everything of it lies; `fill_segments` does for another."""
    message.CopyFrom(_in_slot(lease.view.layout))
    fill_session(message.session, lease.view, clock)
    message.lease_id = lease.lease_id
    message.range.begin, message.range.end = lease.begin, lease.end
    _fill_time(message.expire_time, wall_time_ns(clock, lease.deadline_ns))
    if is_brief:
        _fill_runs(message.runs, lease.pieces)


def fill_segments(message: arena_pb2.Lease, lease: Lease) -> Iterator[None]:
    """Say where everything of a lease lies and how it is verified, a segment at a time: each takes a while."""
    last: Segment | None = None
    for piece in lease.pieces:
        if piece.segment is not last:
            yield
            location = message.segments.add()
            _fill_location(location, piece.segment, lease.on_ssd.get(piece.segment.segment_id))
            last = piece.segment
        location.rows.add(row_begin=piece.row_begin, row_end=piece.row_end, token_begin=piece.token_begin)


def lease_bytes(lease: Lease, *, is_brief: bool) -> int:
    """About how large the message about a lease is, from above."""
    layout_bytes = _in_slot(lease.view.layout).ByteSize()
    if is_brief:
        return layout_bytes + RUN_BYTES * len(lease.pieces)
    return layout_bytes + (SEGMENT_BYTES + 8 * len(lease.view.layout.specs)) * len(lease.pieces)


def fill_reservation(
    message: arena_pb2.Reservation, reservation: Reservation, expire_time_ns: int, *, is_brief: bool
) -> None:
    """Say where everything of a reservation is to be written."""
    message.layout.MergeFrom(_in_slot(reservation.session.layout).layout)
    message.session_uid = reservation.session.uid.hex()
    message.reservation_id = reservation.reservation_id
    _fill_time(message.expire_time, expire_time_ns)
    if is_brief:
        _fill_runs(message.runs, reservation.runs)
        return
    for run in reservation.runs:
        location = message.segments.add()
        _fill_identity(location, run.segment, _slot(run.segment).offset_bytes, run.segment.row_count)
        location.rows.add(row_begin=run.row_begin, row_end=run.row_end, token_begin=run.token_begin)


def _fill_runs(message: arena_pb2.Runs, pieces: Sequence[Piece | Run]) -> None:
    message.offset_bytes.extend([_slot(piece.segment).offset_bytes for piece in pieces])
    message.row_begin.extend([piece.row_begin for piece in pieces])
    message.row_end.extend([piece.row_end for piece in pieces])


def _fill_location(message: arena_pb2.SegmentLocation, segment: Segment, on_ssd: Slot | None) -> None:
    if on_ssd is None:
        sums = segment.settled
        _fill_identity(message, segment, _slot(segment).offset_bytes, sums.row_end)
        message.checksums.extend(sums.values)
    else:
        _fill_identity(message, segment, on_ssd.offset_bytes, segment.durable_row_count)
        message.path_index, message.header_checksum = on_ssd.path_index, segment.header_checksum


def _fill_identity(
    message: arena_pb2.SegmentLocation, segment: Segment, offset_bytes: int, row_count: int
) -> None:
    message.segment_id, message.offset_bytes = segment.segment_id, offset_bytes
    message.session_uid, message.generation = segment.writer_uid.hex(), segment.generation
    message.position_begin, message.token_count = segment.begin, row_count


def _slot(segment: Segment) -> Slot:
    if segment.memory is None:
        raise RuntimeError(f"segment {segment.segment_id} is held but not in DRAM")
    return segment.memory


_IN_SLOT: dict[int, tuple[SegmentLayout, arena_pb2.Lease]] = {}
"""By the layout's identity. What is kept here keeps the layout, so that no other one has its identity."""


def _in_slot(layout: SegmentLayout) -> arena_pb2.Lease:
    """A lease that says no more than where the chunks of a slot are."""
    found = _IN_SLOT.get(id(layout))
    if found is None:
        if sum(len(kept.specs) for kept, _ in _IN_SLOT.values()) + len(layout.specs) > IN_SLOT_LIMIT:
            _IN_SLOT.clear()
        chunks = (
            arena_pb2.ChunkLayout(
                stream=stream_name(spec.stream), offset_bytes=offset, row_bytes=spec.row_bytes
            )
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        )
        found = _IN_SLOT[id(layout)] = layout, arena_pb2.Lease(layout=chunks)
    return found[1]
