"""One rank's part of a restore: its stage's layers, and its own heads from rows that all ranks read.

Each rank reads the rows of some tokens, and projects the rows of all tokens into its heads. That runs on the
computing lane, in the order of the schedule, which all ranks share. Layers of other stages have nothing to
restore here. Worst case: a rank that does not come, which is RankLost by the restore's deadline.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from gpu_worker.parallel.share import Share
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


class StageTarget(Target):
    """The model's layers, of which `own` has those of the share."""

    def __init__(self, own: Target, share: Share, layer_count: int) -> None:
        self._own, self._share = own, share
        self.token_count, self.layer_count, self.is_by_layer = own.token_count, layer_count, own.is_by_layer

    def first_token(self, layer: int) -> int:
        """See Target."""
        own = self._index(layer)
        return 0 if own is None else self._own.first_token(own)

    def room(self, layer: int, begin: int, end: int) -> Room:
        """See Target."""
        own = self._index(layer)
        if own is None:
            raise IndexError(layer)
        return self._own.room(own, begin, end)

    def finish(self, layer: int) -> None:
        """See Target."""
        own = self._index(layer)
        if own is not None:
            self._own.finish(own)

    def announced(self, layer: int) -> None:
        """See Target."""
        own = self._index(layer)
        if own is not None:
            self._own.announced(own)

    def failed(self) -> None:
        """See Target."""
        self._own.failed()

    def _index(self, layer: int) -> int | None:
        share = self._share
        return layer - share.first_layer if share.first_layer <= layer < share.end_layer else None
