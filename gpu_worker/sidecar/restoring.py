"""Restoring: one session's rows into the blocks of an attached cache, by the pipeline.

Runs in a thread of its own, which waits for the store and for the pipeline. Worst case: the pipeline does not
come to rest, and `LaneStuck` says that memory may still be written: the process must then end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ctxcache.client import Client, SessionRows
from ctxcache.client.convert import stream_from_wire
from ctxcache.errors import ModelFingerprintMismatch, TokenRangeOutOfBounds
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.v1.session_pb2 import Session
from gpu_worker.conversation import common_prefix
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.restoration import Restoration
from gpu_worker.pipeline.schedule import Schedule
from gpu_worker.pipeline.source import LeasedSource
from gpu_worker.plan import Method
from gpu_worker.planning.planner import Plan
from gpu_worker.rows import token_ids_of
from gpu_worker.sidecar.attachment import Attachment, BlocksTarget, slots_of
from gpu_worker.sidecar.control import Control
from gpu_worker.sidecar.errors import TokensDiffer
from gpu_worker.sidecar.pipelines import Pipelines


@dataclass(frozen=True, slots=True)
class Asked:
    """Tokens [begin, end) of a session into blocks; checked against the attachment."""

    session: str
    begin: int
    end: int
    block_ids: Sequence[int]
    token_ids: Sequence[int] = ()
    generation: int | None = None
    new_tokens: int = 0


@dataclass(slots=True)
class Outcome:
    """What is known of a restore by its end, well or not."""

    plan: Plan | None = None
    read_bytes: int = 0


def restore(
    client: Client, pipelines: Pipelines, attachment: Attachment, asked: Asked, control: Control,
    outcome: Outcome, on_layer: Callable[[int], None],
) -> None:  # fmt: skip
    """Restore all that is asked for, or raise why it cannot be had; nothing is written once this has returned.

    Raises what reading raises, ModelFingerprintMismatch, TokensDiffer, TokenRangeOutOfBounds, RestoreTooLate,
    RestoreCancelled, InvalidArgument for memory that has become smaller, LaneStuck.
    """
    session = client.get_session(asked.session)
    _check_session(session, asked, attachment)
    held = [stream_from_wire(stream) for stream in session.layout]
    plan = outcome.plan = attachment.model.plan(held, asked.end, asked.new_tokens)
    target = BlocksTarget(
        attachment.memory.layers(attachment.layout),
        slots_of(asked.block_ids, attachment.layout.block_tokens, asked.end),
        begin=asked.begin,
        windows=attachment.model.windows,
    )
    schedule = Schedule.of_plan(plan, [target.first_token(layer) for layer in range(target.layer_count)])
    for layer, parts in enumerate(schedule.parts):
        if any(part.method.unpacked is Method.HIDDEN for part in parts):
            attachment.model.weights.load(layer)
    control.check()
    streams: set[Stream] = {*schedule.streams(), *([TOKENS] if asked.token_ids else [])}
    with client.read(session, streams=streams, end=asked.end, if_generation_match=asked.generation) as rows:
        _check_tokens(rows, asked.token_ids)
        outcome.read_bytes = sum(
            (part.end - part.begin) * rows.row_bytes(part.stream)
            for parts in schedule.parts
            for part in parts
        )
        compute = Modules(
            attachment.model.weights.adapter, torch.arange(asked.end), decode=attachment.model.decode
        )
        with pipelines.lent() as pipeline:
            begun: list[Restoration] = []

            def begin() -> Callable[[], None]:
                attachment.memory.check()
                source = LeasedSource(rows)
                begun.append(pipeline.start(schedule, source, target, compute, deadline=control.deadline))
                return begun[0].cancel

            control.write(begin)
            _follow(begun[0], on_layer)
    attachment.model.observe(plan, begun[0])


def _follow(restoration: Restoration, on_layer: Callable[[int], None]) -> None:
    """Tell of each layer; return, or raise, when nothing is written any more."""
    with restoration:
        for layer in range(restoration.target.layer_count):
            restoration.wait(layer)
            on_layer(layer)


def _check_session(session: Session, asked: Asked, attachment: Attachment) -> None:
    fingerprint = attachment.model.spec.fingerprint()
    if session.model_fingerprint != fingerprint:
        raise ModelFingerprintMismatch(
            model=session.name, actual=session.model_fingerprint.hex(), expected=fingerprint.hex()
        )
    if session.token_count < asked.end:
        raise TokenRangeOutOfBounds(begin=asked.begin, end=asked.end, token_count=session.token_count)


def _check_tokens(rows: SessionRows, token_ids: Sequence[int]) -> None:
    if not token_ids:
        return
    stored = token_ids_of(rows.array(TOKENS))
    common = common_prefix(stored, token_ids)
    if common < len(token_ids):
        raise TokensDiffer(common_token_count=common, token_count=len(token_ids))
