"""Restores of tiny models on pipelines whose lanes can be slowed down, and sources that can be faulty."""

import threading
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
from sessions import Session, relative_errors
from torch import Tensor
from transformers import Cache

from ctxcache.errors import CacheError
from gpu_worker.pipeline.compute import Compute, Modules
from gpu_worker.pipeline.lane import Deadline, Host, HostLane, Lane, LaneEvent, Work
from gpu_worker.pipeline.pipeline import Pipeline, PipelineSettings, Restoration
from gpu_worker.pipeline.target import CacheTarget, Target
from gpu_worker.planning.plan import RestorePlan, RestoreSchedule
from lab.quality.restoring import HeldRows

DELAY_S = 0.003
DEADLINE_S = 20.0
SMALL = PipelineSettings(slot_bytes=8192, slot_count=2, batch_tokens=16, is_poisoned=True)


class RowsSource(HeldRows):
    """The rows that capture saw, as a source."""

    def __init__(self, session: Session) -> None:
        super().__init__(session.rows.__getitem__)
        self.error: CacheError | None = None
        """The error that `check` raises from now on."""

    def check(self) -> None:
        """See Source."""
        if self.error is not None:
            raise self.error


class SlowLane(HostLane):
    """A lane at whose begin every piece of work is held up."""

    def submit(self, work: Work, **options: Any) -> LaneEvent:
        """See Lane."""

        def held_up() -> None:
            threading.Event().wait(DELAY_S)
            work()

        return super().submit(held_up, **options)


class SlowHost(Host):
    """The host as a device with memory of its own, some of whose lanes are slow."""

    def __init__(self, slow: Collection[str] = (), *, is_unified: bool = False) -> None:
        super().__init__(is_unified=is_unified)
        self._slow = slow

    def lane(self, name: str) -> Lane:
        """See Device."""
        return SlowLane(name) if name in self._slow else HostLane(name)

    def host_lane(self, name: str) -> Lane:
        """See Device."""
        return self.lane(name)


def slowed(
    *lanes: str, is_unified: bool = False, settings: PipelineSettings = SMALL
) -> AbstractContextManager[Pipeline]:
    """A pipeline of small poisoned buffers, some of whose lanes are slow."""
    return Pipeline(SlowHost(lanes, is_unified=is_unified), settings)


def schedule_of(session: Session, target: Target, plan: str) -> RestoreSchedule:
    """A plan in its compact form; `saved` stands for the session's own kind of rows."""
    text = plan.replace("saved", session.adapter.kind.name.lower())
    first_tokens = [target.first_token(layer) for layer in range(target.layer_count)]
    return RestoreSchedule.of_methods(RestorePlan.parse(text), session.token_count, first_tokens)


def start(
    pipeline: Pipeline,
    session: Session,
    target: Target,
    plan: str = "saved:0-2",
    *,
    source: RowsSource | None = None,
    positions: Tensor | None = None,
    compute: Compute | None = None,
    deadline_s: float = DEADLINE_S,
) -> Restoration:
    """Begin to restore a session."""
    return pipeline.start(
        schedule_of(session, target, plan),
        source or RowsSource(session),
        target,
        compute or Modules(session.adapter, session.positions if positions is None else positions),
        deadline=Deadline.after_s(deadline_s),
        token_ids=session.token_ids,
    )


def poisoned_target(session: Session, cache: Cache | None = None) -> CacheTarget:
    """A cache of NaN that a restore is to fill."""
    target = CacheTarget(session.adapter, session.token_count, cache)
    for layer in range(target.layer_count):
        for half in target.tensors(layer):
            half.fill_(torch.nan)
    return target


def restored(
    pipeline: Pipeline, session: Session, plan: str = "saved:0-2", *, source: RowsSource | None = None,
    positions: Tensor | None = None, cache: Cache | None = None,
) -> Cache:  # fmt: skip
    """A session restored as a whole. Raises why it was not."""
    target = poisoned_target(session, cache)
    with start(pipeline, session, target, plan, source=source, positions=positions) as restoration:
        restoration.wait_all()
    return target.cache


def is_equal(cache: Cache, session: Session) -> bool:
    """Whether a cache holds what the engine's own does, bit for bit."""
    return relative_errors(cache, session.kept_cache) == [0.0] * (2 * len(session.adapter.layers))
