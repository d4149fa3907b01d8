"""Rows to a cache through the pipeline, for studies that hold the rows themselves.

Knows one model through its adapter. Worst case: the reason why a restore failed, raised.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from ctxcache.client.arena import Bytes
from ctxcache.format.streams import Stream
from gpu_worker.families import Adapter
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import Deadline, device_of
from gpu_worker.pipeline.pipeline import Pipeline
from gpu_worker.pipeline.sources import RowSource
from gpu_worker.pipeline.target import CacheTarget
from gpu_worker.planning.plan import RestorePlan, RestoreSchedule

TIMEOUT_S = 600.0


class HeldRows:
    """Rows in the host's memory, as a source of the pipeline. `rows_of` gives all rows of a stream."""

    def __init__(self, rows_of: Callable[[Stream], Tensor]) -> None:
        self._rows_of = rows_of

    def row_bytes(self, stream: Stream) -> int:
        """See RowSource."""
        rows = self._rows_of(stream)
        return rows.shape[1] * rows.element_size()

    def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """See RowSource."""
        np.copyto(into, self._rows_of(stream)[begin:end].contiguous().view(torch.uint8).numpy())

    def check(self) -> None:
        """See RowSource: rows in memory are nobody else's."""

    def abort(self) -> None:
        """See RowSource: a read of memory never waits."""


def restored_cache(
    pipeline: Pipeline,
    adapter: Adapter,
    plan: RestorePlan,
    source: RowSource,
    *,
    positions: Tensor,
    token_ids: Tensor | None = None,
) -> Cache:
    """A new cache with the rows of `source` at `positions` [T] int64. Raises what the restore raises.

    `token_ids` [T] are needed where the plan recomputes layers.
    """
    count = len(positions)
    target = CacheTarget(adapter, count)
    first_tokens = [target.first_token(layer) for layer in range(target.layer_count)]
    with pipeline.start(
        RestoreSchedule.of_methods(plan, count, first_tokens),
        source,
        target,
        Modules(adapter, positions),
        deadline=Deadline.after_s(TIMEOUT_S),
        token_ids=token_ids,
    ) as restoration:
        restoration.wait_all()
    return target.cache


def pipeline_for(adapter: Adapter) -> Pipeline:
    """A pipeline on the model's device. Close it."""
    return Pipeline(device_of(adapter.layers[0].device))
