"""Readiness: where a session's state is, layer by layer, and how much of it still has to come. Looks, and changes nothing."""

import enum
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from ctxcache.cache.state import State
from ctxcache.core.ledger.session import Session
from ctxcache.core.throughput import Throughput
from ctxcache.format.streams import StreamRange

LAYOUTS_LIMIT = 256
"""Layouts whose runs of layers are kept ready."""


class LayerPlace(enum.Enum):
    """Where a layer's state is; all that are stored lie together."""

    DRAM = "dram"
    SSD = "ssd"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers `[begin, end)`, stored or not."""

    begin: int
    end: int
    is_stored: bool


@dataclass(frozen=True, slots=True)
class Readiness:
    """How a session stands. `ready_in_s` is an estimate, 0 where nothing is missing in DRAM."""

    token_count: int
    runs: tuple[LayerRun, ...]
    missing_bytes: int
    ready_in_s: float

    def place(self, run: LayerRun) -> LayerPlace:
        """Where a run of layers lies."""
        if not run.is_stored:
            return LayerPlace.MISSING
        return LayerPlace.SSD if self.missing_bytes else LayerPlace.DRAM


def missing_bytes(session: Session) -> int:
    """Bytes of slots that are on SSD alone."""
    if session.withheld:
        return sum(s.layout.size_bytes for s in session.shown if not s.memory)
    return session.size_bytes - session.amounts().memory_bytes


def readiness_of(session: Session, state: State, promotions: Throughput) -> Readiness:
    """Where the session's state is now. Takes a time that does not grow with the session's tokens or layers."""
    missing = missing_bytes(session)
    model = state.model(session.tenant, session.model_id)
    runs = _runs(session.layout.outline.ranges, model.spec.layer_count)
    return Readiness(session.token_count, runs, missing, promotions.time_s(missing) if missing else 0.0)


@lru_cache(maxsize=LAYOUTS_LIMIT)
def _runs(ranges: tuple[StreamRange, ...], layer_count: int) -> tuple[LayerRun, ...]:
    stored = {layer for item in ranges for layer in range(item.layer_begin, item.layer_end)}
    groups = groupby(range(layer_count), key=lambda layer: layer in stored)
    runs = [(is_stored, list(layers)) for is_stored, layers in groups]
    return tuple(LayerRun(layers[0], layers[-1] + 1, is_stored) for is_stored, layers in runs)
