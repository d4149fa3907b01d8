"""The pipeline: lanes and rings of one device, on which restores run, one behind the other or interleaved.

Owned by whoever restores; thread-safe, the lanes are. Worst case: a lane that is stuck; the pipeline then
refuses further restores, and is to be replaced.
"""

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from torch import Tensor

from ctxcache.errors import CacheError, InvalidArgument
from gpu_worker.errors import LaneStuck
from gpu_worker.pipeline.compute import Compute
from gpu_worker.pipeline.deadline import Deadline
from gpu_worker.pipeline.device import Device
from gpu_worker.pipeline.lane import Lane
from gpu_worker.pipeline.restoration import Lanes, Restoration, Rings, TokenShare
from gpu_worker.pipeline.ring import Ring
from gpu_worker.pipeline.schedule import Schedule
from gpu_worker.pipeline.source import Source
from gpu_worker.pipeline.target import Target
from gpu_worker.rows import BATCH_TOKENS


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is under way at once.

    `slot_bytes` of each staging buffer, `slot_count` of them, and as many on a device with memory of its own;
    `batch_tokens` at most in one; `is_poisoned`: free buffers are NaN, to see what reads them (costs a pass).
    """

    slot_bytes: int = 8 << 20
    slot_count: int = 4
    batch_tokens: int = BATCH_TOKENS
    is_poisoned: bool = False


class Pipeline:
    """Lanes for reading, copying, computing and announcing, and the buffers between them. A context manager."""

    def __init__(self, device: Device, settings: Settings | None = None) -> None:
        """Start the lanes and allocate the buffers. Raises InvalidArgument(field="slot_count")."""
        self.device, self.settings = device, settings or Settings()
        own = self.settings
        sizes = [own.slot_bytes] * own.slot_count
        staging = Ring([device.host_buffer(size) for size in sizes], is_poisoned=own.is_poisoned)
        landing = None
        if not device.is_unified:
            landing = Ring([device.device_buffer(size) for size in sizes], is_poisoned=own.is_poisoned)
        self.rings = Rings(staging, landing)
        self.lanes = Lanes(
            read=device.host_lane("read"),
            copy=device.lane("copy"),
            compute=device.lane("compute"),
            announce=device.host_lane("announce"),
        )
        self._stuck: Lane | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self,
        schedule: Schedule,
        source: Source,
        target: Target,
        compute: Compute,
        *,
        deadline: Deadline,
        token_ids: Tensor | None = None,
        share: TokenShare | None = None,
    ) -> Restoration:
        """Begin to restore; returns at once. All is done, or has failed, by the deadline.

        Source and target belong to the restore until it is drained. `token_ids` [T] where layers are recomputed. `share`: the tokens of
        [begin, end) that are read here; `compute` is then given their rows, and room for all.
        Raises InvalidArgument, LaneStuck; what goes wrong later is told by the restoration.
        """
        if self._stuck is not None:
            raise LaneStuck(lane=self._stuck.name)
        if schedule.needs_token_ids and token_ids is None:
            raise InvalidArgument(field="token_ids", problem="the plan recomputes layers")
        if (len(schedule.parts), schedule.token_count) != (target.layer_count, target.token_count):
            problem = f"{len(schedule.parts)} layers of {schedule.token_count} tokens"
            raise InvalidArgument(field="schedule", problem=f"{problem} are not the target's")
        restoration = Restoration(
            schedule=schedule, source=source, target=target, compute=compute, token_ids=token_ids,
            lanes=self.lanes, rings=self.rings, batch_tokens=self.settings.batch_tokens,
            deadline=deadline, on_stuck=self._give_up, share=share,
        )  # fmt: skip
        restoration.begin(behind=self.device.mark())
        return restoration

    @property
    def is_stuck(self) -> bool:
        """Whether a lane did not come to rest, so that no restore can begin here any more."""
        return self._stuck is not None

    def close(self, *, timeout_s: float = 30.0) -> None:
        """End every lane behind what is under way. Raises LaneStuck; that lane ends when its work does."""
        deadline = Deadline.after_s(timeout_s)
        errors: list[Exception] = []
        for lane in self.lanes:
            try:
                lane.close(deadline)
            except (CacheError, RuntimeError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _give_up(self, lane: Lane) -> None:
        self._stuck = lane
