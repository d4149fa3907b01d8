"""Tenure: what a host may do with its copy of a session, and the steps between.

               published                     yielded, or found to be another's
    PRIVATE ────────────► OWNED ────────────────────────────────────────────────► GUEST
       ▲                    ▲                                                        │
       │ nothing names it   │ still names this node      names another               │
       │                    ▼ taken, a beat says                                     │
       └──────────────── UNSURE ─────────────────────────────────────────────────────►
                          ▲
                          └ every copy, when the store has started

PRIVATE and OWNED copies are continued with no call off the host. Of an UNSURE one the head is read first. A
GUEST has no name: its rows are found by their keys, until it expires. Leaf.
"""

from enum import Enum, auto


class Tenure(Enum):
    """See above."""

    PRIVATE = auto()
    OWNED = auto()
    UNSURE = auto()
    GUEST = auto()


class Turn(Enum):
    """What happened to a copy."""

    PUBLISHED = auto()
    """Our change of the head was made."""
    UNNAMED = auto()
    """There is no head of its name, or a deleted one of an earlier session."""
    FOREIGN = auto()
    """Another node is, or becomes, the owner."""
    DOUBTED = auto()
    """Another node may have become the owner."""


STEPS: dict[tuple[Tenure, Turn], Tenure] = {
    (Tenure.PRIVATE, Turn.PUBLISHED): Tenure.OWNED,
    (Tenure.PRIVATE, Turn.UNNAMED): Tenure.PRIVATE,
    (Tenure.PRIVATE, Turn.FOREIGN): Tenure.GUEST,
    (Tenure.PRIVATE, Turn.DOUBTED): Tenure.UNSURE,
    (Tenure.OWNED, Turn.PUBLISHED): Tenure.OWNED,
    (Tenure.OWNED, Turn.FOREIGN): Tenure.GUEST,
    (Tenure.OWNED, Turn.DOUBTED): Tenure.UNSURE,
    (Tenure.UNSURE, Turn.PUBLISHED): Tenure.OWNED,
    (Tenure.UNSURE, Turn.UNNAMED): Tenure.PRIVATE,
    (Tenure.UNSURE, Turn.FOREIGN): Tenure.GUEST,
    (Tenure.UNSURE, Turn.DOUBTED): Tenure.UNSURE,
    (Tenure.GUEST, Turn.PUBLISHED): Tenure.OWNED,
}


class IllegalTurn(Exception):
    """A fault of the program: no such step."""


def step(tenure: Tenure, turn: Turn) -> Tenure:
    """The tenure after a turn. Raises IllegalTurn."""
    found = STEPS.get((tenure, turn))
    if found is None:
        raise IllegalTurn(f"{tenure.name} cannot be {turn.name}")
    return found
