"""Between the wire's messages and the cache's facts."""

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ctxcache.cache.reading import Lease
from ctxcache.cache.writing import Reservation
from ctxcache.core.segment import Segment
from ctxcache.core.session import SessionView
from ctxcache.errors import InvalidArgument
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, TOKENS_SPEC, Stream, StreamSpec
from ctxcache.service import validate
from ctxcache.v1 import arena_pb2, model_pb2, session_pb2

ROW_BYTES_LIMIT = 2 << 20
TEXT_BYTES = 256
CANONICAL_BYTES = 4096
COUNT_LIMIT = 2**31 - 1
SEGMENT_BYTES_LIMIT = 1 << 34


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


# -- models ---------------------------------------------------------------------------------------


def model_spec(model: model_pb2.Model) -> ModelSpec:
    """A model to register, validated. Raises InvalidArgument."""
    within, text = validate.within, validate.text
    return ModelSpec(
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
        streams=_stream_specs(model.streams),
        settings=text(model.settings, CANONICAL_BYTES, "model.settings"),
    )


def _stream_specs(specs: Sequence[model_pb2.StreamSpec]) -> tuple[StreamSpec, ...]:
    validate.within(len(specs), 1, validate.LAYER_LIMIT, "model.streams")
    names = validate.streams((spec.stream for spec in specs), "model.streams")
    found = tuple(
        StreamSpec(
            name,
            validate.within(spec.row_bytes, 1, ROW_BYTES_LIMIT, f"model.streams[{i}].row_bytes"),
            validate.dtype(spec.dtype, f"model.streams[{i}].dtype"),
        )
        for i, (name, spec) in enumerate(zip(names, specs, strict=True))
    )
    if any(spec.stream == TOKENS and spec != TOKENS_SPEC for spec in found):
        raise InvalidArgument(field="model.streams", problem="token ids are int32 rows of 4 bytes")
    if SegmentLayout(found).size_bytes > SEGMENT_BYTES_LIMIT:
        raise InvalidArgument(field="model.streams", problem="a segment would be larger than 16 GiB")
    return tuple(spec for spec in found if spec.stream != TOKENS)


def model_message(spec: ModelSpec, create_time_ns: int) -> model_pb2.Model:
    """A registered model."""
    return model_pb2.Model(
        name=f"models/{spec.model_id}", fingerprint=spec.fingerprint(), architecture=spec.architecture,
        revision=spec.revision, weights_digest=spec.weights_digest, tokenizer_digest=spec.tokenizer_digest,
        dtype=model_pb2.Dtype.ValueType(spec.dtype), layer_count=spec.layer_count,
        hidden_size=spec.hidden_size, kv_head_count=spec.kv_head_count, head_size=spec.head_size,
        rope=spec.rope, norm=spec.norm, is_relocatable=spec.is_relocatable,
        streams=[
            model_pb2.StreamSpec(
                stream=stream_name(item.stream), row_bytes=item.row_bytes,
                dtype=model_pb2.Dtype.ValueType(item.dtype),
            )
            for item in spec.streams
        ],
        create_time=timestamp(create_time_ns), settings=spec.settings,
    )  # fmt: skip


# -- sessions ---------------------------------------------------------------------------------------


def session_message(view: SessionView) -> session_pb2.Session:
    """A session's facts."""
    return session_pb2.Session(
        name=view.name, uid=view.uid.hex(), tenant=view.tenant, model=f"models/{view.model_id}",
        model_fingerprint=view.model_fingerprint,
        layout=[stream_name(spec.stream) for spec in view.layout.specs],
        generation=view.generation, token_count=view.token_count,
        durable_token_count=view.durable_token_count, create_time=timestamp(view.create_time_ns),
        access_time=timestamp(view.access_time_ns), expire_time=timestamp(view.expire_time_ns),
        ttl=None if view.ttl_ns is None else duration(view.ttl_ns), is_pinned=view.is_pinned,
        dram_bytes=view.dram_bytes, ssd_bytes=view.ssd_bytes,
    )  # fmt: skip


# -- locations --------------------------------------------------------------------------------------


def lease_message(lease: Lease, expire_time_ns: int) -> arena_pb2.Lease:
    """A lease with where everything lies."""
    locations: list[arena_pb2.SegmentLocation] = []
    for piece in lease.pieces:
        if not locations or locations[-1].segment_id != piece.segment.segment_id:
            locations.append(_location(piece.segment))
        locations[-1].rows.add(
            row_begin=piece.row_begin, row_end=piece.row_end, token_begin=piece.token_begin
        )
    return arena_pb2.Lease(
        lease_id=lease.lease_id, session=session_message(lease.view),
        range=session_pb2.TokenRange(begin=lease.begin, end=lease.end),
        expire_time=timestamp(expire_time_ns), layout=_chunk_layouts(lease.view.layout), segments=locations,
    )  # fmt: skip


def reservation_message(reservation: Reservation, expire_time_ns: int) -> arena_pb2.Reservation:
    """A reservation with where everything is to be written."""
    locations = []
    for run in reservation.runs:
        location = _location(run.segment)
        location.rows.add(row_begin=run.row_begin, row_end=run.row_end, token_begin=run.token_begin)
        locations.append(location)
    return arena_pb2.Reservation(
        reservation_id=reservation.reservation_id, expire_time=timestamp(expire_time_ns),
        layout=_chunk_layouts(reservation.session.layout), segments=locations,
    )  # fmt: skip


def _location(segment: Segment) -> arena_pb2.SegmentLocation:
    if segment.dram is None:
        raise RuntimeError(f"segment {segment.segment_id} is held but not in DRAM")
    return arena_pb2.SegmentLocation(
        segment_id=segment.segment_id, offset_bytes=segment.dram.offset_bytes,
        session_uid=segment.writer_uid.hex(), generation=segment.generation,
        position_begin=segment.begin, token_count=segment.ssd_row_count, checksums=segment.checksums,
    )  # fmt: skip


def _chunk_layouts(layout: SegmentLayout) -> list[arena_pb2.ChunkLayout]:
    return [
        arena_pb2.ChunkLayout(stream=stream_name(spec.stream), offset_bytes=offset, row_bytes=spec.row_bytes)
        for spec, offset in zip(layout.specs, layout.offsets, strict=True)
    ]
