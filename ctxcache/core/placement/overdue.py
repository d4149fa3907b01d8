"""Overdue: what is still expected of a job that has not started when it should have. Pure.

Whoever is late by so much is expected to be late by as much again. So a job is put off each time that its
lateness has doubled, and in the end it is given up. Jobs of one engine that is stuck keep their order meanwhile.
Worst case: a job that was given up starts after all, and nobody had foreseen it.
"""

from dataclasses import dataclass
from math import inf

LEAST_PATIENCE_S, MOST_PATIENCE_S = 60.0, 600.0
GIVEN_UP_AFTER = 16
"""Patiences that a job may be late by."""


@dataclass(frozen=True, slots=True)
class Due:
    """A start that was foreseen at `start_s`, and how late it may be before anything is made of it."""

    start_s: float
    patience_s: float

    def put_off_s(self, now_s: float) -> float:
        """By how much the start is put off, which is more than it is late: 0 before it is overdue; infinity: given up."""
        late_s = self.patience_s
        if now_s < self.start_s + late_s:
            return 0.0
        while self.start_s + late_s <= now_s:
            late_s *= 2
        return late_s if late_s <= GIVEN_UP_AFTER * self.patience_s else inf

    def next_look_s(self, put_off_s: float) -> float:
        """When more is to be made of it."""
        return self.start_s + max(put_off_s, self.patience_s)


def due(start_s: float, now_s: float, patience_s: float) -> Due:
    """A start foreseen now: it may be late by as long as it is away, or `patience_s`, within bounds."""
    return Due(start_s, min(max(start_s - now_s, patience_s, LEAST_PATIENCE_S), MOST_PATIENCE_S))
