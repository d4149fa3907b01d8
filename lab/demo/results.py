"""The facts that the demo found out, and the clock that they are taken by: no models, no tables, no JSON.

Every time is in nanoseconds. Worst case: none.
"""

import enum
import time
from dataclasses import dataclass, field

from gpu_worker.planning.plan import Method


class Source(enum.StrEnum):
    """Where a turn's history came from."""

    NOWHERE = "none"
    """The first turn: there was none."""
    DRAM = "dram"
    SSD = "ssd"
    """None of its state was in DRAM before the turn."""
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class ReferenceTurn:
    """A turn of the conversation whose state is never dropped."""

    new_token_ids: list[int]
    token_ids: list[int]
    history_token_count: int
    first_token_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class RestoredTurn:
    """The same turn from restored state.

    `first_difference` is the index of the first generated token that is not the reference's, None
    where all are equal. `problem` is empty, or says in a sentence what went wrong.
    """

    method: Method
    source: Source
    history_token_count: int
    reused_token_count: int
    prefilled_token_count: int
    restore_ns: int
    first_token_ns: int
    token_ids: list[int]
    first_difference: int | None
    problem: str

    @property
    def is_identical(self) -> bool:
        """Whether it went as it would have gone had nothing been dropped."""
        return not self.problem


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn, by all methods."""

    number: int
    user_text: str
    reference: ReferenceTurn
    restored: list[RestoredTurn]


@dataclass(frozen=True, slots=True)
class Stored:
    """The state that one method kept: bytes per token by the model's shape, and bytes on SSD by the store."""

    method: Method
    bytes_per_token: int
    token_count: int
    ssd_bytes: int


@dataclass(frozen=True, slots=True)
class WindowTurn:
    """A turn that did not fit into the context window. `problem` is empty, or says what went wrong."""

    method: Method
    window: int
    sink_count: int
    history_token_count: int
    dropped_token_count: int
    reused_token_count: int
    new_token_count: int
    prefilled_token_count: int
    restore_ns: int
    first_token_ns: int
    text: str
    problem: str


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeats of one measurement."""

    median_ns: int
    lowest_ns: int
    highest_ns: int


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """Time to first token at one length of history; of the turn, and of restoring alone."""

    method: Method
    source: Source
    history_token_count: int
    first_token: Spread
    restore: Spread
    problem: str


@dataclass(slots=True)
class ModelResult:
    """Everything about one model."""

    title: str
    path: str
    architecture: str
    layer_count: int
    hidden_size: int
    head_count: int
    kv_head_count: int
    head_size: int
    parameter_count: int
    ssd_io_mode: str = ""
    kill_count: int = 0
    turns: list[TurnResult] = field(default_factory=list)
    stored: list[Stored] = field(default_factory=list)
    windows: list[WindowTurn] = field(default_factory=list)
    history: list[HistoryPoint] = field(default_factory=list)
    window_refusal: str = ""

    @property
    def problems(self) -> list[str]:
        """Every sentence about something that went wrong."""
        parts = [run.problem for turn in self.turns for run in turn.restored]
        parts += [window.problem for window in self.windows] + [point.problem for point in self.history]
        return [f"{self.title}: {problem}" for problem in parts if problem]


class Stopwatch:
    """Runs from its creation until `stop_once`."""

    def __init__(self) -> None:
        self._begin_ns = time.perf_counter_ns()
        self.elapsed_ns = 0

    def stop_once(self) -> None:
        """Stop it; later calls change nothing."""
        self.elapsed_ns = self.elapsed_ns or time.perf_counter_ns() - self._begin_ns
