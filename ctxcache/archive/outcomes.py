"""What an import shall do, and what became of each session of an export or an import.

Knows no file and no store.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ctxcache import errors
from ctxcache.errors import CacheError

Step = Callable[[str, int, int], None]
"""Called with progress: the session's name, how many tokens more, how many bytes more."""
ENDS_ALL = (
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.Draining,
    errors.TooManyRequests,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.FileUnusable,
    errors.FileDamaged,
    errors.FormatTooNew,
)
"""Errors after which the next session would fare no better."""


class ArchiveStatus(enum.StrEnum):
    """How it went."""

    EXPORTED = "exported"
    IMPORTED = "imported"
    SKIPPED = "skipped"
    """On purpose: `error` says what was found."""
    FAILED = "failed"
    """Nothing of the session is there; `error` says why."""
    WHOLE = "whole"
    """The session is in the file, and was not to be imported."""
    UNTRIED = "untried"
    """An error before this session ended all."""


@dataclass(frozen=True, slots=True)
class ArchiveOutcome:
    """What became of one session. `target` is its name where it went; counts are of what is there."""

    session: str
    target: str
    status: ArchiveStatus
    token_count: int = 0
    size_bytes: int = 0
    error: CacheError | None = None


class OnConflict(enum.StrEnum):
    """What to do where a session of that name is there."""

    FAIL = "fail"
    SKIP = "skip"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class ImportWishes:
    """What to import and how. `names` maps ids in the file to new ids.

    `only` those ids, all where it is empty.
    """

    on_conflict: OnConflict = OnConflict.FAIL
    names: Mapping[str, str] = field(default_factory=dict)
    only: frozenset[str] = frozenset()
    tenant: str | None = None
    """Whose sessions of the file; None where the file has those of one tenant alone."""
    ttl_s: float | None = None
    """For all of them, in the place of their own expiry."""
    keeps_pins: bool = False

    def target(self, session_id: str) -> str:
        """The id to import it by."""
        return self.names.get(session_id, session_id)

    def wants(self, tenant: str, session_id: str) -> bool:
        """Whether to import it."""
        return self.tenant in (None, tenant) and (not self.only or session_id in self.only)
