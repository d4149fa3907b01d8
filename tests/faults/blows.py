"""How a round ends: which blow hits the server, and when. Drawn by chance, every step in its turn."""

import enum
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.plants import steps

MOST_OPERATIONS = 60
"""Calls of all clients before a blow falls. Counted, not timed: a busy machine does no less."""
PATIENT_OPERATIONS = 120
"""How many a failpoint is waited for before the server is killed all the same."""
NTH_WORKING = (1, 2, 3, 5, 8, 13, 21)
NTH_OTHERWISE = (1, 1, 2, 3)


class Kind(enum.Enum):
    """Ways to take a server down."""

    KILL = "at a random moment"
    ANSWER = "right behind a durable answer"
    STEP = "at a step of its work"
    START_STEP = "at a step of its start"
    DRAIN = "at a random moment of its drain"
    DRAIN_STEP = "at a step of its drain"
    END = "in order"


@dataclass(frozen=True, slots=True)
class Blow:
    """`plants` make the server kill itself; `operations` are those begun before anything is sent."""

    kind: Kind
    operations: int
    step: str = ""
    nth: int = 1

    @property
    def plants(self) -> tuple[str, ...]:
        """The plants that it needs."""
        if not self.step:
            return ()
        where = "kill_at_start" if self.kind is Kind.START_STEP else "kill"
        return (f"{where}_{self.step}:{self.nth}",)

    @property
    def name(self) -> str:
        """As reports call it."""
        return f"{self.step} #{self.nth}" if self.step else self.kind.value


class Blows:
    """Draws blows. Steps come in turn, so that none is left out; `kinds` with their weights.

    `working`: the calls at whose steps a server at work is killed, `least_nth`: not before that visit.
    """

    def __init__(
        self, rng: random.Random, kinds: dict[Kind, int], *, working: tuple[str, ...] = steps.WORKING,
        least_nth: int = 1,
    ) -> None:  # fmt: skip
        self._random, self._kinds = rng, kinds
        self._nth_working = [nth for nth in NTH_WORKING if nth >= least_nth]
        self._steps = {
            Kind.STEP: self._in_turn(working),
            Kind.START_STEP: self._in_turn(steps.STARTING),
            Kind.DRAIN_STEP: self._in_turn(steps.DRAINING),
        }

    def draw(self, *, is_first: bool) -> Blow:
        """The next one. `is_first`: there is no data directory yet, and making it is worth hitting."""
        (kind,) = self._random.choices([*self._kinds], [*self._kinds.values()])
        if is_first and Kind.START_STEP in self._kinds and self._random.random() < 0.5:
            kind = Kind.START_STEP
        operations = PATIENT_OPERATIONS if kind is Kind.STEP else self._random.randint(1, MOST_OPERATIONS)
        if kind not in self._steps:
            return Blow(kind, operations)
        nth = self._nth_working if kind is Kind.STEP else NTH_OTHERWISE
        return Blow(kind, operations, next(self._steps[kind]), self._random.choice(nth))

    def _in_turn(self, calls: tuple[str, ...]) -> Iterator[str]:
        names = steps.steps_of(calls)
        self._random.shuffle(names)
        return itertools.cycle(names)
