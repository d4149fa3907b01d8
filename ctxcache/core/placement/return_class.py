"""Classes of sessions: how many of each came back at which idle time, and what that promises. Pure.

A class leans on its parent where it has seen few, an idle time on the one before. What all have counted can be taken
down as plain numbers, and be gone on from. Worst case: counts of another load; they halve as turns go by.
"""

import math
from collections.abc import Mapping
from itertools import accumulate
from operator import mul
from typing import Any

AGES_S = (0, 0.5, 2, 5, 10, 20, 40, 70, 110, 160, 230, 330, 480, 700, 1000, 1500, 2400, 3600)
"""Where an idle time passes into the next bin; the last bin is taken to last LAST_BIN_S."""
LAST_BIN_S = 3600
LENGTHS_S = tuple(b - a for a, b in zip(AGES_S, (*AGES_S[1:], AGES_S[-1] + LAST_BIN_S), strict=True))
BINS = range(len(AGES_S))
PRIOR_COUNT = 12.0
"""How many sessions of a class outweigh what its parent class says, or of a root what its bin before does."""
MOST_HAZARD = 0.95
SessionClass = tuple[int, ...]
IDLE, QUEUED, OVER = 0, 1, 2
"""Roots: nothing was said of the session, or not that it is over; its job is queued; it is said to be over."""
FIRST_HAZARDS = {IDLE: 0.25, QUEUED: 0.25, OVER: 0.0}
"""What a root says of its first bin before it has seen any: that clients and schedulers are right."""
DEEPEST = 3
"""Parts of a name: root, turn count, magnitude of the last input."""


class ReturnClass:
    """How many reached each bin of idle time, how many returned in it, and what that promises."""

    __slots__ = (
        "away",
        "aways",
        "came",
        "cames",
        "chances",
        "first_hazard",
        "indices",
        "parent",
        "refreshed",
    )

    def __init__(self, parent: "ReturnClass | None", first_hazard: float = 0.0) -> None:
        self.parent, self.first_hazard = parent, first_hazard
        self.away, self.came = [0.0] * len(AGES_S), [0.0] * len(AGES_S)
        # Its own counts and those of all classes above, which count the same.
        self.aways: tuple[list[float], ...] = (self.away, *(parent.aways if parent else ()))
        self.cames: tuple[list[float], ...] = (self.came, *(parent.cames if parent else ()))
        self.indices: list[float] = []
        self.chances: list[float] = []
        self.refreshed = -1

    def refresh(self, number: int, wait_s: float) -> None:
        """Compute anew what follows from the counts, once per `number`."""
        if self.refreshed == number:
            return
        self.refreshed = number
        hazards = [min(each, MOST_HAZARD) for each in self._hazards()]
        self.indices = [_index(hazards, each, wait_s) for each in BINS]
        away = list(accumulate((1 - hazard for hazard in reversed(hazards)), mul))
        self.chances = [1 - each for each in reversed(away)]

    def _hazards(self) -> list[float]:
        """How likely one that is in a bin returns in it; few counts lean on the class above, or on the bin before."""
        if self.parent is not None:
            above = self.parent._hazards()  # noqa: SLF001  another of its kind
            counts = zip(self.came, self.away, above, strict=True)
            return [(came + PRIOR_COUNT * prior) / (away + PRIOR_COUNT) for came, away, prior in counts]
        hazards, hazard = [], self.first_hazard
        for came, away in zip(self.came, self.away, strict=True):
            hazard = (came + PRIOR_COUNT * hazard) / (away + PRIOR_COUNT)
            hazards.append(hazard)
        return hazards


class ReturnClasses:
    """All classes that were seen, by name; the roots are there from the start."""

    def __init__(self) -> None:
        self._by_name: dict[SessionClass, ReturnClass] = {
            (root,): ReturnClass(None, hazard) for root, hazard in FIRST_HAZARDS.items()
        }

    def of(self, name: SessionClass) -> ReturnClass:
        """The class of that name; those above it come to be with it."""
        found = self._by_name.get(name)
        if found is None:
            found = self._by_name[name] = ReturnClass(self.of(name[:-1]))
        return found

    def halve(self) -> None:
        """Let all counts weigh half as much against what is counted from now on."""
        for one in self._by_name.values():
            for values in (one.away, one.came):
                values[:] = [value / 2 for value in values]

    def counts(self) -> dict[str, object]:
        """What was counted, as JSON has it."""
        classes = {
            ".".join(map(str, name)): [list(one.away), list(one.came)] for name, one in self._by_name.items()
        }
        return {"ages_s": list(AGES_S), "classes": classes}

    def recount(self, counts: Mapping[str, Any]) -> None:
        """Go on from `counts` of an earlier run. Raises ValueError, KeyError, TypeError, and has changed nothing then."""
        if counts["ages_s"] != list(AGES_S):
            raise ValueError(f"counts by ages of {counts['ages_s']}")
        told = counts["classes"].items()
        found = [(_name(text), _checked(away), _checked(came)) for text, (away, came) in told]
        for name, away, came in found:
            one = self.of(name)
            one.away[:], one.came[:] = away, came


def _name(text: str) -> SessionClass:
    name = tuple(map(int, text.split(".")))
    if name[0] not in FIRST_HAZARDS or len(name) > DEEPEST:
        raise ValueError(f"no class is named {text!r}")
    return name


def _checked(values: list[float]) -> list[float]:
    if len(values) != len(AGES_S) or not all(math.isfinite(value) and value >= 0 for value in values):
        raise ValueError(f"{values} are no counts")
    return [float(value) for value in values]


def _index(hazards: list[float], first: int, wait_s: float) -> float:
    away, came, kept_s, best = 1.0, 0.0, 0.0, 0.0
    for number in range(first, len(AGES_S)):
        now = away * hazards[number]
        kept_s += LENGTHS_S[number] * (away - now / 2)
        came += now
        away -= now
        best = max(best, came / (kept_s + came * wait_s))
    return best
