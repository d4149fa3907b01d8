"""Counts of what a worker did since it started. Owned by the event loop."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

LEFT, LOST = "left", "lost"


class Attached(NamedTuple):
    """What is attached now, all together."""

    mapped_bytes: int
    """Of engines' memory."""
    longest_idle_s: float
    """0 where nobody is attached."""


@dataclass(slots=True)
class Counts:
    """Restores, saves and attachments, by how they ended."""

    restored: int = 0
    restored_tokens: int = 0
    read_bytes: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    """By reason."""
    predicted_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by stage, of restores that were whole: what their plans said."""
    observed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What the same stages took."""
    saved: int = 0
    saved_tokens: int = 0
    failed_saves: Counter[str] = field(default_factory=Counter)
    """By reason."""
    ended_attachments: Counter[str] = field(default_factory=lambda: Counter({LEFT: 0, LOST: 0}))
    """By how: LEFT, LOST, or the reason for which the worker ended it."""
