"""Heard: what the store was asked and what it did, for whoever records it. Knows names; keeps no token and no row.

Bounded, and nobody waits: what is not taken in time is counted and lost.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ctxcache.format.layout import SegmentLayout

Fact: TypeAlias = "int | str | bool | Sequence[int]"
LIMIT = 1 << 16
"""What waits to be taken at most: some 40 MB."""


class Call(enum.Enum):
    """What was asked; from EXPIRE on what the store did by itself."""

    OPEN = "open"
    RESERVE = "reserve"
    APPEND = "append"
    FINISH = "finish"
    LOOKUP = "lookup"
    GET = "get"
    READ = "read"
    RELEASE = "release"
    TRUNCATE = "truncate"
    FORK = "fork"
    TOUCH = "touch"
    FLUSH = "flush"
    DEMOTE = "demote"
    DELETE = "delete"
    HINT = "hint"
    EXPIRE = "expire"
    EVICT = "evict"
    CUT = "cut"


class Heard(NamedTuple):
    """One call. `at_ns` is of the monotonic clock; `layout` is None where there was no session."""

    call: Call
    at_ns: int
    tenant: str
    name: str
    session_tokens: int
    layout: SegmentLayout | None
    fingerprint: bytes
    facts: Mapping[str, Fact]


class Listening:
    """Keeps what is heard until it is taken. Owned by the event loop."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._heard: list[Heard] = []
        self._lost_count = 0

    def hear(self, heard: Heard) -> None:
        """Keep it, or count it as lost: then so is all that follows until the next `take`."""
        if len(self._heard) < self._limit:
            self._heard.append(heard)
        else:
            self._lost_count += 1

    def take(self) -> tuple[list[Heard], int]:
        """What was heard since the last time, and how much of what followed is lost."""
        taken = self._heard, self._lost_count
        self._heard, self._lost_count = [], 0
        return taken
