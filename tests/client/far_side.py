# ruff: noqa: ARG002, D102, N802  # the methods are the contract's
"""The far side of the wire for the client's tests: sessions in a dict, rows in a real arena file.

It checks little and can be told to misbehave. The server itself is tested elsewhere.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Never

import grpc
import numpy as np
from control_side import ControlSide

from ctxcache import errors
from ctxcache.client import CallerModel, Client
from ctxcache.client.convert import (
    model_to_wire,
    ranges_to_wire,
    stream_from_wire,
    stream_to_wire,
    streams_from_wire,
)
from ctxcache.client.messages import read_session_info
from ctxcache.client.types import SessionInfo
from ctxcache.format.checksums import rows_checksum, wire_checksum
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.v1 import arena_pb2, arena_pb2_grpc, model_pb2, model_pb2_grpc, session_pb2, session_pb2_grpc
from ctxcache.wire.status import code_of, message_of, trailing_metadata, wire_facts
from tests.model_specs import small_model

Connect = Callable[..., Client]
HIDDEN = Stream(0, StateKind.HIDDEN)
KV = Stream(1, StateKind.KV)
SPEC = small_model(
    StreamSpec(HIDDEN, 8, DType.FLOAT16),
    StreamSpec(KV, 16, DType.FLOAT16),
    weights_digest="w",
    tokenizer_digest="t",
    layer_count=2,
    hidden_size=4,
    head_size=4,
)
LAYOUT = (TOKENS, HIDDEN, KV)
OWN = CallerModel(SPEC)
ROW_SIZES = {stream: spec.row_bytes for stream, spec in OWN.specs(LAYOUT).items()}
SEGMENT_TOKENS = 4
ROWS_PER_CHUNK = 3
LEASE_ID = 7
_SLOTS = SegmentLayout(SPEC.resolve(LAYOUT), SEGMENT_TOKENS)
_ARENA_BYTES = 1 << 20
_PATIENCE_S = 30.0


def make_rows(token_count: int, *, first: int = 0) -> dict[Stream, np.ndarray]:
    """Rows whose bytes tell stream and token, so that a swap shows."""
    return {
        stream: (np.arange(first, first + token_count)[:, None] * 7 + size + np.arange(size)).astype(np.uint8)
        for stream, size in ROW_SIZES.items()
    }


class FarSide(
    model_pb2_grpc.ModelServiceServicer,
    session_pb2_grpc.SessionServiceServicer,
    arena_pb2_grpc.ArenaServiceServicer,
):
    """One model and its sessions. Its public attributes are what a test may turn."""

    def __init__(self, directory: Path, *, has_control_socket: bool = False) -> None:
        self.directory = directory
        self.has_control_socket = has_control_socket
        self.target = f"unix:{directory}/socket"
        self.rows: dict[str, dict[Stream, np.ndarray]] = {}
        self.sessions: dict[str, session_pb2.Session] = {}
        self.lease_ttl_s = 60.0
        self.is_arena_full = False
        self.flips_arena_bytes = False
        self.flips_wire_bytes = False
        self.skips_a_chunk = False
        self.swaps_chunks = False
        self.chunks_until_break: list[int] = []
        self.reads: list[session_pb2.ReadSessionRequest] = []
        self.operations: list[str] = []
        self.stalls = False
        self.released = threading.Semaphore(0)
        """Counts the leases that were given back."""
        self.is_stalled = threading.Event()
        self._go_on = threading.Event()
        self._lock = threading.Lock()
        self._reserved: dict[int, arena_pb2.Reserve] = {}
        self.start()

    def start(self) -> None:
        """Listen, with a new arena."""
        self.arena_id = os.urandom(16)
        self.arena_path = self.directory / self.arena_id.hex()
        self.arena_path.write_bytes(self.arena_id.ljust(_ARENA_BYTES, b"\0"))
        self.arena = np.memmap(self.arena_path, np.uint8, "r+")
        self._next_slot = _SLOTS.size_bytes
        self._server = grpc.server(ThreadPoolExecutor(16))
        model_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server)
        session_pb2_grpc.add_SessionServiceServicer_to_server(self, self._server)
        arena_pb2_grpc.add_ArenaServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.target)
        self._server.start()
        facts = arena_pb2.Arena(
            arena_id=self.arena_id,
            path=str(self.arena_path),
            size_bytes=_ARENA_BYTES,
            control_socket=f"{self.directory}/control" if self.has_control_socket else "",
            may_write=True,
        )
        self.facts = facts
        self.control = ControlSide(facts, self._answer) if self.has_control_socket else None

    def stop(self) -> None:
        """Break every stream and stop listening."""
        self._go_on.set()
        self._server.stop(None).wait(_PATIENCE_S)
        if self.control is not None:
            self.control.stop()

    def break_streams(self) -> None:
        """Break every stream while its handlers are still busy."""
        self._server.stop(None)
        if self.control is not None:
            self.control.break_connections()

    def add(self, name: str, token_count: int) -> SessionInfo:
        """Keep a session of that many tokens."""
        self.rows[name] = make_rows(token_count)
        self.sessions[name] = session_pb2.Session(
            name=name,
            uid=os.urandom(16).hex(),
            tenant="acme",
            model="models/tiny",
            model_fingerprint=SPEC.fingerprint(),
            layout=ranges_to_wire(LAYOUT),
            generation=1,
            token_count=token_count,
        )
        return read_session_info(self.sessions[name])

    def GetModel(self, request: model_pb2.GetModelRequest, context: grpc.ServicerContext) -> model_pb2.Model:
        return model_to_wire(SPEC)

    def ListModels(
        self, request: model_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> model_pb2.ListModelsResponse:
        number = int(request.page_token or 0)
        last = number == 2
        return model_pb2.ListModelsResponse(
            models=[model_pb2.Model(name=f"models/{number}")], next_page_token="" if last else str(number + 1)
        )

    def GetSession(
        self, request: session_pb2.GetSessionRequest, context: grpc.ServicerContext
    ) -> session_pb2.Session:
        if request.name not in self.sessions:
            _abort(context, errors.SessionNotFound(session=request.name))
        return self.sessions[request.name]

    def AppendSession(
        self, request_iterator: Iterator[session_pb2.AppendSessionRequest], context: grpc.ServicerContext
    ) -> session_pb2.AppendSessionResponse:
        header = next(request_iterator).header
        parts: dict[Stream, list[bytes]] = {stream: [] for stream in LAYOUT}
        for message in request_iterator:
            if message.HasField("commit"):
                break
            if wire_checksum(message.chunk.data) != message.chunk.checksum:
                _abort(context, errors.ChecksumMismatch(field="chunk"))
            parts[stream_from_wire(message.chunk.stream)].append(message.chunk.data)
        rows = {
            stream: np.frombuffer(b"".join(parts[stream]), np.uint8).reshape(-1, ROW_SIZES[stream])
            for stream in LAYOUT
        }
        return session_pb2.AppendSessionResponse(session=self._append(header.name, rows))

    def ReadSession(
        self, request: session_pb2.ReadSessionRequest, context: grpc.ServicerContext
    ) -> Iterator[session_pb2.ReadSessionResponse]:
        self.reads.append(request)
        session = self.sessions[request.name]
        begin, end = 0, session.token_count
        if request.HasField("range"):
            begin, end = request.range.begin, request.range.end
        asked = list(request.streams) or list(session.layout)
        header = session_pb2.ReadHeader(
            session=session, streams=asked, range=session_pb2.TokenRange(begin=begin, end=end)
        )
        yield session_pb2.ReadSessionResponse(header=header)
        left = self.chunks_until_break.pop(0) if self.chunks_until_break else -1
        for chunk in self._chunks(request.name, streams_from_wire(asked), begin, end):
            if left == 0:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            left -= 1
            yield session_pb2.ReadSessionResponse(chunk=chunk)

    def GetArena(self, request: arena_pb2.GetArenaRequest, context: grpc.ServicerContext) -> arena_pb2.Arena:
        return self.facts

    def Access(
        self, request_iterator: Iterator[arena_pb2.AccessRequest], context: grpc.ServicerContext
    ) -> Iterator[arena_pb2.AccessResponse]:
        for request in request_iterator:
            yield self._answer(request)

    def _answer(self, request: arena_pb2.AccessRequest) -> arena_pb2.AccessResponse:
        results = [self._carry_out(operation) for operation in request.operations]
        return arena_pb2.AccessResponse(request_id=request.request_id, results=results)

    def _carry_out(self, operation: arena_pb2.Operation) -> arena_pb2.OperationResult:
        kind = operation.WhichOneof("operation")
        assert kind is not None
        self.operations.append(kind)
        if self.stalls and kind != "release_lease":
            self.is_stalled.set()
            self._go_on.wait(_PATIENCE_S)
        try:
            with self._lock:
                result: arena_pb2.OperationResult = getattr(self, f"_{kind}")(getattr(operation, kind))
                return result
        except errors.CacheError as error:
            failure = arena_pb2.OperationError(
                code=code_of(error).value[0],
                reason=error.reason,
                message=message_of(error),
                metadata=wire_facts(error),
            )
            return arena_pb2.OperationResult(error=failure)

    def let_go_on(self) -> None:
        """End the stall."""
        self.stalls = False
        self._go_on.set()

    def _acquire_lease(self, request: arena_pb2.AcquireLease) -> arena_pb2.OperationResult:
        if self.is_arena_full:
            raise errors.CapacityExceeded(tier="dram", needed_bytes=2, free_bytes=1, limit_bytes=1)
        session = self.sessions.get(request.session)
        if session is None:
            raise errors.SessionNotFound(session=request.session)
        begin, end = 0, session.token_count
        if request.HasField("range"):
            begin, end = request.range.begin, request.range.end
        lease = arena_pb2.Lease(
            lease_id=LEASE_ID,
            session=session,
            range=session_pb2.TokenRange(begin=begin, end=end),
            layout=_chunk_layout(),
        )
        segments = self._place(session, begin, end)
        _say_where(lease, segments, is_brief=request.is_brief)
        lease.expire_time.FromNanoseconds(time.time_ns() + int(self.lease_ttl_s * 1e9))
        if self.flips_arena_bytes:
            first = segments[0].offset_bytes + _SLOTS.rows(HIDDEN, 0, 1).start
            self.arena[first] ^= 1
        return arena_pb2.OperationResult(lease=lease)

    def _release_lease(self, request: arena_pb2.ReleaseLease) -> arena_pb2.OperationResult:
        if request.lease_id != LEASE_ID:
            raise errors.LeaseNotFound(lease_id=request.lease_id)
        self.released.release()
        return arena_pb2.OperationResult(released=arena_pb2.Released())

    def _recheck_lease(self, request: arena_pb2.RecheckLease) -> arena_pb2.OperationResult:
        if request.lease_id != LEASE_ID:
            raise errors.LeaseNotFound(lease_id=request.lease_id)
        return arena_pb2.OperationResult(rechecked=arena_pb2.Rechecked())

    def _reserve(self, request: arena_pb2.Reserve) -> arena_pb2.OperationResult:
        if self._reserved:
            raise errors.WriteInProgress(session=request.session)
        self._reserved[9] = request
        count = request.token_count
        segments = self._locations(
            self.sessions[request.session], request.write_offset, request.write_offset + count
        )
        self._reserved_segments = segments
        reservation = arena_pb2.Reservation(
            reservation_id=9, layout=_chunk_layout(), session_uid=self.sessions[request.session].uid
        )
        _say_where(reservation, segments, is_brief=request.is_brief)
        reservation.expire_time.FromNanoseconds(time.time_ns() + int(self.lease_ttl_s * 1e9))
        return arena_pb2.OperationResult(reservation=reservation)

    def _commit(self, request: arena_pb2.CommitReservation) -> arena_pb2.OperationResult:
        if 9 not in self._reserved:
            raise errors.ReservationNotFound(reservation_id=request.reservation_id)
        reserve = self._reserved[9] if request.keep_open else self._reserved.pop(9)
        held = self.sessions[reserve.session].token_count
        slots = slice(held - reserve.write_offset, request.token_count - reserve.write_offset)
        rows = {stream: self._gather(stream)[slots] for stream in LAYOUT}
        return arena_pb2.OperationResult(committed=self._append(reserve.session, rows))

    def _release_reservation(self, request: arena_pb2.ReleaseReservation) -> arena_pb2.OperationResult:
        self._reserved.pop(request.reservation_id)
        return arena_pb2.OperationResult(released=arena_pb2.Released())

    def _append(self, name: str, rows: dict[Stream, np.ndarray]) -> session_pb2.Session:
        self.rows[name] = {
            stream: np.concatenate([self.rows[name][stream], rows[stream]]) for stream in LAYOUT
        }
        changed = session_pb2.Session()
        changed.CopyFrom(self.sessions[name])
        changed.generation += 1
        changed.token_count = len(self.rows[name][TOKENS])
        self.sessions[name] = changed
        return changed

    def _gather(self, stream: Stream) -> np.ndarray:
        parts = [
            self._room(one, stream, rows.row_begin, rows.row_end)
            for one in self._reserved_segments
            for rows in one.rows
        ]
        return np.concatenate(parts)

    def _room(self, segment: arena_pb2.SegmentLocation, stream: Stream, begin: int, end: int) -> np.ndarray:
        place = _SLOTS.rows(stream, begin, end)
        offset = segment.offset_bytes
        return self.arena[offset + place.start : offset + place.stop].reshape(end - begin, -1)

    def _place(self, session: session_pb2.Session, begin: int, end: int) -> list[arena_pb2.SegmentLocation]:
        """Put whole segments into fresh slots, and name the rows of `[begin, end)` in them."""
        segments = self._locations(session, begin, end)
        for segment in segments:
            first = segment.position_begin
            segment.token_count = min(SEGMENT_TOKENS, session.token_count - first)
            for stream in LAYOUT:
                rows = self.rows[session.name][stream][first : first + segment.token_count]
                self._room(segment, stream, 0, segment.token_count)[:] = rows
                segment.checksums.append(rows_checksum(rows.tobytes()))
        return segments

    def _locations(
        self, session: session_pb2.Session, begin: int, end: int
    ) -> list[arena_pb2.SegmentLocation]:
        segments = []
        for first in range(begin - begin % SEGMENT_TOKENS, end, SEGMENT_TOKENS):
            token_begin, token_end = max(first, begin), min(first + SEGMENT_TOKENS, end)
            rows = arena_pb2.RowRange(
                row_begin=token_begin - first, row_end=token_end - first, token_begin=token_begin
            )
            segments.append(
                arena_pb2.SegmentLocation(
                    row_capacity=64,
                    segment_id=first,
                    offset_bytes=self._next_slot,
                    rows=[rows],
                    session_uid=session.uid,
                    generation=1,
                    position_begin=first,
                )
            )
            self._next_slot += _SLOTS.size_bytes
        return segments

    def _chunks(self, name: str, streams: list[Stream], begin: int, end: int) -> Iterator[session_pb2.Chunk]:
        for stream in streams:
            rows = self.rows[name][stream]
            firsts = list(range(begin, end, ROWS_PER_CHUNK))
            if self.swaps_chunks:
                firsts[:2] = reversed(firsts[:2])
            for first in firsts:
                if self.skips_a_chunk and first > begin:
                    continue
                data = rows[first : min(first + ROWS_PER_CHUNK, end)].tobytes()
                checksum = wire_checksum(data) ^ self.flips_wire_bytes
                yield session_pb2.Chunk(
                    stream=stream_to_wire(stream), token_begin=first, data=data, checksum=checksum
                )


def _say_where(
    message: arena_pb2.Lease | arena_pb2.Reservation,
    segments: list[arena_pb2.SegmentLocation],
    *,
    is_brief: bool,
) -> None:
    if not is_brief:
        message.segments.extend(segments)
        return
    for segment in segments:
        for rows in segment.rows:
            message.runs.offset_bytes.append(segment.offset_bytes)
            message.runs.row_begin.append(rows.row_begin)
            message.runs.row_end.append(rows.row_end)


def _chunk_layout() -> list[arena_pb2.ChunkLayout]:
    return [
        arena_pb2.ChunkLayout(
            stream=stream_to_wire(stream),
            offset_bytes=_SLOTS.rows(stream, 0, 1).start,
            row_bytes=ROW_SIZES[stream],
        )
        for stream in LAYOUT
    ]


def _abort(context: grpc.ServicerContext, error: errors.CacheError) -> Never:
    context.set_trailing_metadata(trailing_metadata(error))
    context.abort(code_of(error), message_of(error))
