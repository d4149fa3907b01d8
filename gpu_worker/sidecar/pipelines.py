"""Pipelines: one for each restore that is under way, so that none waits behind what holds another one up.

Thread-safe. Worst case in memory: a ring for as many restores as there may be.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from gpu_worker.pipeline.devices import device_of
from gpu_worker.pipeline.pipeline import Pipeline, Settings

RING_SLOTS = 4


class Pipelines:
    """Pipelines of one device, made when they are first needed."""

    def __init__(self, device: torch.device, ring_bytes: int) -> None:
        self.device = device
        self._settings = Settings(slot_bytes=max(ring_bytes // RING_SLOTS, 1), slot_count=RING_SLOTS)
        self._lock = threading.Lock()
        self._free: list[Pipeline] = []

    @property
    def slot_bytes(self) -> int:
        """Bytes of one buffer of a ring."""
        return self._settings.slot_bytes

    @contextmanager
    def lent(self) -> Iterator[Pipeline]:
        """One that nobody else uses."""
        with self._lock:
            pipeline = self._free.pop() if self._free else None
        if pipeline is None:
            pipeline = Pipeline(device_of(self.device), self._settings)
        try:
            yield pipeline
        finally:
            # A restore that failed has come to rest too; one that has not ends the process.
            with self._lock:
                self._free.append(pipeline)

    def close(self) -> None:
        """End those that nobody uses, all of them. Raises LaneStuck."""
        with self._lock:
            free, self._free = self._free, []
        with ExitStack() as closing:
            for pipeline in free:
                closing.callback(pipeline.close)
