"""The timeline: steps go through the pipeline's streams one after the other, and each leaves its times.

Three streams (reads into DRAM, copies onto the device, computation); each takes steps in the order
given, and a step enters the next stream when it has left the one before. This is the definition that
`Block` condenses, written out. Worst case: none, it is one pass over the steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Step(NamedTuple):
    """Work on one layer that passes all streams; 0 seconds where a stream has nothing to do."""

    layer: int
    what: str
    read_s: float = 0.0
    copy_s: float = 0.0
    compute_s: float = 0.0


class Timed(NamedTuple):
    """A step and when it leaves each stream, in seconds from the start."""

    step: Step
    read_end_s: float
    copy_end_s: float
    compute_end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What became of the steps."""

    steps: tuple[Timed, ...]

    @property
    def end_s(self) -> float:
        """When the last step has left the last stream."""
        return self.steps[-1].compute_end_s if self.steps else 0.0

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds that each stream works: the stages' predicted times."""
        return {
            "read": sum(timed.step.read_s for timed in self.steps),
            "copy": sum(timed.step.copy_s for timed in self.steps),
            "compute": sum(timed.step.compute_s for timed in self.steps),
        }

    def restored_s(self, layer: int, *, besides: str = "") -> float:
        """When the layer has left the pipeline, steps called `besides` not counted."""
        ends = (
            timed.compute_end_s
            for timed in self.steps
            if timed.step.layer == layer and timed.step.what != besides
        )
        return max(ends, default=0.0)


def simulate(steps: Iterable[Step]) -> Timeline:
    """Let the steps through, in order."""
    read_s = copy_s = compute_s = 0.0
    timed: list[Timed] = []
    for step in steps:
        read_s += step.read_s
        copy_s = max(copy_s, read_s) + step.copy_s
        compute_s = max(compute_s, copy_s) + step.compute_s
        timed.append(Timed(step, read_s, copy_s, compute_s))
    return Timeline(tuple(timed))
