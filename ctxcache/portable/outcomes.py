"""What became of each session of an export or an import. Knows no file and no store."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

from ctxcache import errors
from ctxcache.errors import CacheError

Step = Callable[[str, int, int], None]
"""Hears of progress: the session's name, how many tokens more, how many bytes more."""
ENDS_ALL = (
    errors.Unavailable, errors.DeadlineExceeded, errors.Draining, errors.TooManyRequests, errors.Unauthenticated,
    errors.PermissionDenied, errors.FileUnusable, errors.FileDamaged, errors.FormatTooNew,
)  # fmt: skip
"""Errors after which the next session would fare no better."""


class Status(enum.StrEnum):
    """How it went."""

    EXPORTED = "exported"
    IMPORTED = "imported"
    SKIPPED = "skipped"
    """On purpose: `error` says what was found."""
    FAILED = "failed"
    """Nothing of it is there; `error` says why."""
    WHOLE = "whole"
    """It is in the file; nobody tried to import it."""
    UNTRIED = "untried"
    """Something before it ended all."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One session's. `target` is what it is called where it went, counts are of what is there."""

    session: str
    target: str
    status: Status
    token_count: int = 0
    size_bytes: int = 0
    error: CacheError | None = None
