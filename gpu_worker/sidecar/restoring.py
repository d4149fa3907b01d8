"""Moving rows for an attached engine: a session into its cache's blocks, or its save area into a session.

Each call runs in a thread of its own. A restore waits there for the store and for its own pipeline, so that
it holds up no other restore. There are at most as many rings as restores. Saved rows go from the engine's
memory right into the store's. Worst case of a save: the store refuses it, and nothing of it is visible. Worst
case of a restore: the pipeline does not come to rest, and `LaneStuck` says that memory may still be written.
The process must then end.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from ctxcache.client import Client, SessionRows
from ctxcache.client.convert import stream_from_wire
from ctxcache.client.rows import FiledRows
from ctxcache.client.types import Durability, SessionInfo
from ctxcache.errors import InvalidArgument, SessionNotFound, TokenRangeOutOfBounds, WriteOffsetMismatch
from ctxcache.format.streams import TOKENS, Stream
from gpu_worker.direct.storage import DirectStorage
from gpu_worker.families.generation import common_prefix
from gpu_worker.parallel.rounds import Alone, Gathering, SharedRound, StageTarget, taking_part
from gpu_worker.parallel.share import ModelShare
from gpu_worker.pipeline.lane import device_of
from gpu_worker.pipeline.pipeline import Pipeline, PipelineSettings, Restoration
from gpu_worker.pipeline.target import Target
from gpu_worker.planning.plan import Method, RestoreSchedule, Stage
from gpu_worker.planning.planner import Plan
from gpu_worker.sidecar.attachment import Attachment, BlocksTarget, RestoreControl, slots_of
from gpu_worker.sidecar.errors import TokensDiffer
from gpu_worker.v1 import worker_pb2

RING_SLOTS = 3


# Threads of one restore, and what each waits for:
#
#     event loop          the rpc ──► run_in_executor ────────────► messages to the engine
#     ctxcache-restore    plan, lease, start ──► wait for each layer ──► drain
#     lanes               read, copy, verify, compute, announce
class Pipelines:
    """Pipelines of one device, made when they are first needed."""

    def __init__(self, device: torch.device, ring_bytes: int) -> None:
        self.device = device
        self.slot_bytes = max(ring_bytes // RING_SLOTS, 1)
        """Bytes of one buffer of a ring."""
        self._settings = PipelineSettings(slot_bytes=self.slot_bytes, slot_count=RING_SLOTS)
        self._lock = threading.Lock()
        self._free: list[Pipeline] = []

    @contextmanager
    def lent(self) -> Iterator[Pipeline]:
        """A pipeline that no other restore uses."""
        with self._lock:
            # The pipeline that was used last: its buffers are in caches still.
            pipeline = self._free.pop() if self._free else None
        if pipeline is None:
            pipeline = Pipeline(device_of(self.device), self._settings)
        try:
            yield pipeline
        finally:
            # A failed restore has come to rest too: one that does not ends the process.
            with self._lock:
                self._free.append(pipeline)

    def close(self) -> None:
        """End all pipelines that no restore uses. Raises LaneStuck."""
        with self._lock:
            free, self._free = self._free, []
        with ExitStack() as closing:
            for pipeline in free:
                closing.callback(pipeline.close)


@dataclass(frozen=True, slots=True)
class RestoreOrder:
    """Tokens [begin, end) of a session into blocks; checked against the attachment."""

    restore_id: str
    session: str
    begin: int
    end: int
    block_ids: Sequence[int]
    token_ids: Sequence[int] = ()
    generation: int | None = None
    new_tokens: int = 0


@dataclass(slots=True)
class RestoreOutcome:
    """Facts of a restore at its end, whole or not."""

    plan: Plan | None = None
    observed_s: Mapping[Stage, float] = field(default_factory=dict)
    """Seconds of each stage of a restore that is whole."""
    read_bytes: int = 0


def restore(
    client: Client,
    direct: DirectStorage,
    pipelines: Pipelines,
    attachment: Attachment,
    asked: RestoreOrder,
    control: RestoreControl,
    outcome: RestoreOutcome,
    on_layer: Callable[[int], None],
) -> None:
    """Restore all that is asked for, or raise why it cannot be had.

    Nothing is written once this has returned.

    Raises what reading raises, ModelFingerprintMismatch, TokensDiffer, TokenRangeOutOfBounds, RestoreTooLate,
    RestoreCancelled, InvalidArgument for memory that has become smaller, LaneStuck; RankLost, RankFailed,
    RanksDisagree for one rank of several.
    """
    if attachment.ranks is None:
        _restore(client, direct, pipelines, attachment, asked, control, outcome, on_layer, Alone())
        return
    with taking_part(attachment.ranks, asked.restore_id, control.deadline) as together:
        _restore(client, direct, pipelines, attachment, asked, control, outcome, on_layer, together)


def _restore(
    client: Client,
    direct: DirectStorage,
    pipelines: Pipelines,
    attachment: Attachment,
    asked: RestoreOrder,
    control: RestoreControl,
    outcome: RestoreOutcome,
    on_layer: Callable[[int], None],
    together: Alone | SharedRound,
) -> None:
    model, share = attachment.model, attachment.model.share
    session = client.sessions.get(asked.session)
    _check_session(session, asked, attachment)
    held = session.streams()
    plan = outcome.plan = model.plan(held, asked.end, asked.new_tokens)
    # All that makes ranks read the same rows into the same places: a difference refuses the round.
    terms = {
        "session": session.name,
        "uid": session.uid,
        "generation": session.generation,
        "begin": asked.begin,
        "end": asked.end,
        "ring bytes": pipelines.slot_bytes,
        "tensor ranks": share.tensor_ranks,
        "stages": share.stages,
    }
    pieces = together.agree(terms, _pieces(plan))
    target = _target(attachment, asked)
    schedule = _schedule(pieces, target, attachment)
    # Weights come before the lease: reading files may take longer than a lease lasts.
    for layer, parts in enumerate(schedule.parts):
        if any(part.method.unpacked is Method.HIDDEN for part in parts):
            model.load(layer)
    control.check()
    streams: set[Stream] = {*schedule.streams(), *([TOKENS] if asked.token_ids else [])}
    # Ranks agreed on this generation. A single rank takes any, unless the engine names one.
    generation = session.generation if isinstance(together, SharedRound) else asked.generation
    with direct.read(
        session, model.own, streams=streams, end=asked.end, if_generation_match=generation
    ) as rows:
        _check_tokens(rows, asked.token_ids)
        outcome.read_bytes = _read_bytes(schedule, rows, share)
        compute = model.compute(torch.arange(asked.end))
        gathering = None
        # Leases of all ranks are held from here on: no rank can find the session gone.
        together.ready()
        control.check()
        if isinstance(together, SharedRound) and share.tensor_ranks > 1:
            together.connect(pipelines.device)
            compute = gathering = Gathering(compute, together)
        with direct.source(rows, model.own) as source, pipelines.lent() as pipeline:
            begun: list[Restoration] = []

            def begin() -> Callable[[], None]:
                # Checked right before the first write, as named memory may shrink at any time.
                attachment.memory.check()
                begun.append(
                    pipeline.start(
                        schedule,
                        source,
                        target,
                        compute,
                        deadline=control.deadline,
                        share=None if gathering is None else share.tokens,
                    )
                )
                # From here on the end of the restore cancels the pipeline, which comes to rest by itself.
                return begun[0].cancel

            control.write(begin)
            _follow(begun[0], share, on_layer, together)
    if isinstance(rows, FiledRows):
        # Reads from files say nothing of reads from the arena, which the plan is for.
        return
    observed_s = begun[0].observed_s()
    outcome.observed_s = observed_s if gathering is None else gathering.apart(observed_s)
    model.observe(plan, outcome.observed_s)


def _follow(
    restoration: Restoration,
    share: ModelShare,
    on_layer: Callable[[int], None],
    together: Alone | SharedRound,
) -> None:
    """Tell of each layer; return, or raise, when nothing is written any more."""
    with restoration:
        for layer in range(share.first_layer, share.end_layer):
            restoration.wait(layer)
            on_layer(layer - share.first_layer)
        # Wait for layers of other stages too: they have no parts here, and are usable at once.
        restoration.wait_all()
        # Meet before the pipeline is left: a failed rank makes this rank's part a miss as well.
        together.whole()


def _pieces(plan: Plan) -> list[list[tuple[str, int, int]]]:
    """A plan as ranks tell one another: method, begin and end of each layer's pieces."""
    return [
        [(piece.method.name, piece.begin, piece.end) for piece in pieces if piece.method]
        for pieces in plan.layers
    ]


def _schedule(
    pieces: Sequence[Sequence[tuple[str, int, int]]], target: Target, attachment: Attachment
) -> RestoreSchedule:
    """The layers of the share by their pieces; other layers have none.

    Raises InvalidArgument(field="plan").
    """
    share = attachment.model.share
    layers: list[list[tuple[Method, int, int]]] = [[] for _ in range(target.layer_count)]
    layers[share.first_layer : share.end_layer] = [
        [(Method[name], begin, end) for name, begin, end in some] for some in pieces
    ]
    first_tokens = [target.first_token(layer) for layer in range(target.layer_count)]
    return RestoreSchedule.of_pieces(layers, target.token_count, first_tokens)


def _target(attachment: Attachment, asked: RestoreOrder) -> Target:
    model = attachment.model
    own = BlocksTarget(
        attachment.memory.layers(attachment.layout),
        slots_of(asked.block_ids, attachment.layout.block_tokens, asked.end),
        begin=asked.begin,
        windows=model.windows,
    )
    layer_count = model.spec.layer_count
    return own if model.share.layer_count == layer_count else StageTarget(own, model.share, layer_count)


def _read_bytes(schedule: RestoreSchedule, rows: SessionRows, share: ModelShare) -> int:
    """Bytes that this rank reads, as if in one batch."""
    parts = [part for parts in schedule.parts for part in parts]
    ranges = [(share.tokens(part.begin, part.end), part) for part in parts]
    return sum((end - begin) * rows.row_bytes(part.stream) for (begin, end), part in ranges)


def _check_session(session: SessionInfo, asked: RestoreOrder, attachment: Attachment) -> None:
    attachment.model.own.check(session)
    if session.token_count < asked.end:
        raise TokenRangeOutOfBounds(begin=asked.begin, end=asked.end, token_count=session.token_count)


def _check_tokens(rows: SessionRows, token_ids: Sequence[int]) -> None:
    # An engine that gives no ids trusts the session's name.
    if not token_ids:
        return
    stored = rows.token_ids()
    common = common_prefix(stored, token_ids)
    if common < len(token_ids):
        raise TokensDiffer(common_token_count=common, token_count=len(token_ids))


def save(client: Client, attachment: Attachment, request: worker_pb2.SaveRequest) -> SessionInfo:
    """Append the rows, and return the session. Raises InvalidArgument and what appending raises."""
    rows = _rows_to_save(attachment, request)
    session = _session_to_extend(client, attachment, request, list(rows))
    return client.sessions.open(session, attachment.model.own).append(
        rows, durability=Durability(request.durability)
    )


def _rows_to_save(
    attachment: Attachment, request: worker_pb2.SaveRequest
) -> Mapping[Stream, npt.NDArray[np.uint8]]:
    streams = [stream_from_wire(part.stream) for part in request.streams]
    if len(set(streams)) < len(streams) or not streams:
        raise InvalidArgument(field="streams", problem="none, or one is named twice")
    specs = attachment.model.own.specs(streams)
    rows = {}
    for stream, part in zip(streams, request.streams, strict=True):
        size_bytes = request.token_count * specs[stream].row_bytes
        # A view: rows go from the engine's memory into the store's, without a copy between.
        data = attachment.rows_in_save_area(stream, part.offset_bytes, size_bytes)
        rows[stream] = data.numpy().reshape(request.token_count, specs[stream].row_bytes)
    return rows


def _session_to_extend(
    client: Client, attachment: Attachment, request: worker_pb2.SaveRequest, layout: list[Stream]
) -> SessionInfo:
    own = attachment.model.own
    try:
        session = client.sessions.get(request.session)
    except SessionNotFound:
        # A session that is gone cannot be extended in the middle; from 0 on it may be made anew.
        if request.write_offset:
            raise
        session_id = request.session.removeprefix("sessions/")
        session = client.sessions.create(own, id=session_id, layout=layout).info
    own.check(session)
    if session.token_count != request.write_offset:
        raise WriteOffsetMismatch(
            session=session.name, token_count=session.token_count, write_offset=request.write_offset
        )
    return session
