"""Gathering: every rank has read some tokens' rows, and projects the rows of all into its own heads.

Runs on the computing lane, in the order of the schedule, which all ranks share. Worst case: a rank that does not
come, which is RankLost by the restore's deadline.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from gpu_worker.pipeline.compute import Compute
from gpu_worker.pipeline.schedule import Schedule
from gpu_worker.pipeline.target import Room, Target
from gpu_worker.plan import Method
from gpu_worker.planning.profile import Stage


class Gather(Protocol):
    """What ranks exchange rows by."""

    def gather(self, own: Tensor, count: int) -> Tensor:
        """This rank's rows [t, row_bytes] uint8 -> all ranks' [count, row_bytes], in order. Raises RankLost."""
        ...


class Gathering:
    """See Compute: `compute` on the rows of all ranks."""

    def __init__(self, compute: Compute, gather: Gather) -> None:
        self._compute, self._gather = compute, gather
        self._seconds: dict[Stage, float] = defaultdict(float)

    def restore(self, layer: int, method: Method, data: Tensor, begin: int, room: Room) -> None:
        """See Compute; `data` are this rank's rows of the tokens that `room` is for."""
        began_ns = time.perf_counter_ns()
        rows = self._gather.gather(data, len(room.pages.slots))
        self._seconds[Stage.of(method)] += (time.perf_counter_ns() - began_ns) / 1e9
        self._compute.restore(layer, method, rows, begin, room)

    def recompute(self, schedule: Schedule, token_ids: Tensor, target: Target) -> None:
        """See Compute."""
        self._compute.recompute(schedule, token_ids, target)

    def apart(self, observed_s: Mapping[Stage, float]) -> Mapping[Stage, float]:
        """What stages took, with gathering, which ran within others, as a stage of its own."""
        within = {stage: max(0.0, observed_s.get(stage, 0.0) - part) for stage, part in self._seconds.items()}
        return {**observed_s, **within, Stage.GATHER: sum(self._seconds.values())}
