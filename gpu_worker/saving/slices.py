"""Slices: which rows of a packed pass belong to which session. Facts and arithmetic."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = slice | npt.NDArray[np.int64]
"""Rows of a staging buffer: one run, or their numbers."""


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` rows of a pass: tokens `[token_begin, token_begin + count)` of a session.

    Slices follow one another as the engine packs them. Those of a session that is not saved are passed over.
    """

    session_name: str
    token_begin: int
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `[begin, end)` of the staging buffers."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


def rows_of(runs: Iterable[Run]) -> Rows:
    """The rows of runs in order: a slice where they follow one another, else their numbers."""
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].end == run.begin:
            joined[-1] = Run(joined[-1].begin, run.end)
        else:
            joined.append(run)
    if len(joined) == 1:
        return slice(joined[0].begin, joined[0].end)
    return np.concatenate([np.arange(run.begin, run.end) for run in joined] or [np.zeros(0, np.int64)])


def cut(runs: Sequence[Run], count: int) -> tuple[list[Run], list[Run]]:
    """The first `count` rows of runs, and the rest."""
    first, rest = [], []
    for run in runs:
        middle = min(run.end, run.begin + count)
        count -= middle - run.begin
        first += [Run(run.begin, middle)] if middle > run.begin else []
        rest += [Run(middle, run.end)] if run.end > middle else []
    return first, rest
