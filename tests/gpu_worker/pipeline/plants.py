"""Bugs that the pipeline's tests must find, each planted for a while."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from ctxcache.format.streams import Stream
from gpu_worker.families import Adapter
from gpu_worker.pipeline.compute import Modules
from gpu_worker.pipeline.lane import CudaEvent, LaneEvent, passed
from gpu_worker.pipeline.pipeline import BufferRing, Restoration
from gpu_worker.planning.plan import LayerPart

PLANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def _register(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    PLANTS[plant.__name__] = plant
    return plant


@_register
def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Every token stands one position further on."""
    make = Modules.__init__

    def shifted(self: Modules, adapter: Adapter, positions: Tensor, **named: Any) -> None:
        make(self, adapter, positions + 1, **named)

    patch.setattr(Modules, "__init__", shifted)


@_register
def layers_swapped(patch: pytest.MonkeyPatch) -> None:
    """Layers 0 and 1 get each other's rows."""
    patch.setattr(
        LayerPart,
        "stream",
        property(lambda part: Stream({0: 1, 1: 0}.get(part.layer, part.layer), part.method.kind)),
    )


@_register
def copy_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """R2: computing does not wait for the copy."""
    project = Restoration._project
    patch.setattr(
        Restoration, "_project", lambda self, part, begin, rows, *_after: project(self, part, begin, rows)
    )


@_register
def buffers_reused_early(patch: pytest.MonkeyPatch) -> None:
    """R3: a buffer is free as soon as its consumer was submitted."""

    def bind(ring: BufferRing, buffer: Tensor, _consumer: LaneEvent) -> None:
        ring.drop(buffer)

    patch.setattr(BufferRing, "bind", bind)


@_register
def buffers_reused_when_issued(patch: pytest.MonkeyPatch) -> None:
    """R3: a buffer is free as soon as its consumer was issued."""
    patch.setattr(CudaEvent, "settle_by", lambda event, deadline: event.issued.settle_by(deadline))


@_register
def engine_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """R4: the restore does not wait for what the engine had issued."""
    begin = Restoration.begin
    patch.setattr(Restoration, "begin", lambda self, **_: begin(self, behind=passed()))


@_register
def issue_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """R5: a stream waits for an event that may not have been recorded yet."""
    patch.setattr(CudaEvent, "order", lambda event, stream, _deadline: stream.wait_event(event._end))


@_register
def announced_early(patch: pytest.MonkeyPatch) -> None:
    """R6: a layer is announced without waiting for its last write."""

    def close_layer(self: Restoration, layer: int) -> None:
        self._submit(self._lanes.compute, lambda: self.target.finish(layer))
        self._submit(self._lanes.announce, lambda: self._announce(layer))

    patch.setattr(Restoration, "_close_layer", close_layer)


@_register
def lease_not_checked(patch: pytest.MonkeyPatch) -> None:
    """R7: nobody asks whether the rows were still the session's."""
    patch.setattr(Restoration, "_end_reading", lambda self, layer: self._close_layer(layer))


@_register
def failure_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """R9: work goes on after the restore was cancelled."""
    patch.setattr(Restoration, "_do", lambda _self, work: work())


@_register
def lanes_not_fenced(patch: pytest.MonkeyPatch) -> None:
    """R9: draining does not wait for the lanes."""
    patch.setattr(Restoration, "_fence", lambda *_: None)
    patch.setattr(Restoration, "_sweep", lambda *_: None)
