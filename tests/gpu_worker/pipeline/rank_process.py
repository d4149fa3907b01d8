"""One rank in a process of its own: restores its part of a tiny model's session, and says how that ended."""

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from sessions import Session, saved_session
from slow_pipelines import RowsSource, SlowHost
from torch import Tensor

from ctxcache.client.arena import Bytes
from ctxcache.errors import CacheError, CorruptSegment, LeaseNotFound
from ctxcache.format.streams import Stream
from gpu_worker.parallel.ranks import EngineRanks
from gpu_worker.parallel.rounds import Gathering, SharedRound, StageTarget, taking_part
from gpu_worker.parallel.sharded import cached_heads, shard
from gpu_worker.parallel.share import ModelShare
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import Deadline
from gpu_worker.pipeline.pipeline import Pipeline, PipelineSettings
from gpu_worker.pipeline.target import PagedTarget
from gpu_worker.planning.plan import RestorePlan, RestoreSchedule

SETTINGS = PipelineSettings(slot_bytes=1 << 14, slot_count=2, batch_tokens=32, is_poisoned=True)
PAGE_TOKENS = 16


@dataclass(frozen=True)
class Order:
    """A rank's orders: rounds by name, each whole or with a fault in this rank."""

    share: ModelShare
    rendezvous: str
    family: str = "llama"
    plan: str = "kv:0-2"
    rounds: tuple[tuple[str, str], ...] = (("first", ""),)
    deadline_s: float = 20.0
    stays_s: float = 0.0
    """How long it waits at its end for all ranks' results: the one that listens takes the meeting with it."""
    result: Path = Path()


class Faulty(RowsSource):
    """Rows of which the second read does something else."""

    def __init__(self, session: Session, fault: str) -> None:
        super().__init__(session)
        self._fault, self._reads = fault, 0

    def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """See Source."""
        self._reads += 1
        if self._reads == 2 and self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._reads == 2 and self._fault == "corrupt":
            raise CorruptSegment(segment_id=7, problem="planted")
        if self._reads == 2 and self._fault == "stale":
            self.error = LeaseNotFound(lease_id=7)
        super().fill(stream, begin, end, into)


def run(order: Order, told: Connection) -> None:
    """Take part in all rounds; tells of each its reason, empty where it is whole."""
    torch.set_num_threads(1)
    session = saved_session(order.family)
    ranks = EngineRanks(order.share, order.rendezvous)
    cache = _empty(session, order.share)
    for name, fault in order.rounds:
        for half in (half for layer in cache for half in layer):
            half.fill_(torch.nan)
        deadline = Deadline.after_s(order.deadline_s)
        try:
            with taking_part(ranks, name, deadline) as together:
                _restore(session, order, cache, together, fault, deadline)
            told.send("")
        except CacheError as error:
            told.send(error.reason)
    torch.save(_rows(cache, session.token_count), order.result)
    told.close()
    count, end_s = order.share.tensor_ranks * order.share.stages, time.monotonic() + order.stays_s
    while len(list(order.result.parent.glob("[0-9]-[0-9]"))) < count and time.monotonic() < end_s:
        time.sleep(0.01)


def _restore(
    session: Session, order: Order, cache: list[tuple[Tensor, Tensor]], together: SharedRound, fault: str,
    deadline: Deadline,
) -> None:  # fmt: skip
    share = order.share
    count = len(session.adapter.layers)
    own = PagedTarget(cache, torch.arange(session.token_count))
    target = StageTarget(own, share, count)
    methods = RestorePlan.parse(order.plan).methods
    terms = {"tokens": session.token_count if fault != "other terms" else -1}
    mine = [(method.name, 0, session.token_count) for method in methods]
    agreed = together.agree(terms, [[piece] for piece in mine])
    assert [list(piece) for piece in mine] == [list(some[0]) for some in agreed]
    layers = [
        [(method, 0, session.token_count)] if share.first_layer <= layer < share.end_layer else []
        for layer, method in enumerate(methods)
    ]
    schedule = RestoreSchedule.of_pieces(layers, session.token_count, [0] * count)
    together.ready()
    together.connect(torch.device("cpu"))
    modules = Modules(shard(session.adapter, share), session.positions)
    compute = Gathering(modules, together) if share.tensor_ranks > 1 else modules
    tokens = share.tokens if share.tensor_ranks > 1 else None
    with (
        Pipeline(SlowHost(is_unified=False), SETTINGS) as pipeline,
        pipeline.start(
            schedule, Faulty(session, fault), target, compute, deadline=deadline, share=tokens
        ) as restoration,
    ):
        restoration.wait_all()
        together.whole()


def _empty(session: Session, share: ModelShare) -> list[tuple[Tensor, Tensor]]:
    adapter = session.adapter
    pages, heads = -(-session.token_count // PAGE_TOKENS), cached_heads(adapter, share)
    shapes = [(pages, PAGE_TOKENS, heads, half.head_size) for half in (adapter.key, adapter.value)]
    return [
        (torch.full(shapes[0], torch.nan), torch.full(shapes[1], torch.nan)) for _ in range(share.layer_count)
    ]


def _rows(cache: list[tuple[Tensor, Tensor]], token_count: int) -> list[list[Tensor]]:
    return [[half.flatten(0, 1)[:token_count].clone() for half in layer] for layer in cache]
