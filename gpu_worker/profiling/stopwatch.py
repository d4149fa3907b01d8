"""The stopwatch: how long a call takes on a device, some times over. Worst case: a busy machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times calls on one device: what they started there has ended when the time is taken."""

    device: torch.device
    repeat_count: int = 3
    now_ns: Callable[[], int] = time.perf_counter_ns

    def seconds(self, call: Callable[[], object]) -> list[float]:
        """Call once to warm up, then `repeat_count` times; seconds of each."""
        call()
        return [self.once(call) for _ in range(self.repeat_count)]

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call, at least a nanosecond."""
        begin_ns = self.at_ns()
        call()
        return max(self.at_ns() - begin_ns, 1) / 1e9

    def at_ns(self) -> int:
        """The time, once the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.now_ns()
