"""How to import. Knows no file and no store."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class OnConflict(enum.StrEnum):
    """What to do where a session of that name is there."""

    FAIL = "fail"
    SKIP = "skip"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class Wishes:
    """`names`: by id in the file, what a session is to be called; `only`: those ids and no others, unless it is empty."""

    on_conflict: OnConflict = OnConflict.FAIL
    names: Mapping[str, str] = field(default_factory=dict)
    only: frozenset[str] = frozenset()
    ttl_s: float | None = None
    """For all of them, in the place of their own expiry."""
    keeps_pins: bool = False

    def target(self, session_id: str) -> str:
        """The id to import it by."""
        return self.names.get(session_id, session_id)

    def wants(self, session_id: str) -> bool:
        """Whether to import it."""
        return not self.only or session_id in self.only
