"""Counts of what a worker did since it started. Owned by the event loop."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Restores and saves, by how they ended."""

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
