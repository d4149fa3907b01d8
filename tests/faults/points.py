"""Points: which system call of a server's life fails, and how.

Knows no server. Worst case: a point that a run does not have, which whoever visits it notices.
"""

from dataclasses import dataclass

from tests.faults.interposed import FOR_EVER

PHASES = ("first start", "restart", "life", "stop")
ERRORS = {
    "open": ("EIO", "EMFILE", "ENOSPC"),
    "write": ("EIO", "ENOSPC", "short"),
    "fsync": ("EIO", "ENOSPC"),
    "fdatasync": ("EIO", "ENOSPC"),
    "rename": ("EIO", "ENOSPC"),
    "fallocate": ("ENOSPC", "EIO"),
    "ftruncate": ("EIO",),
    "mkdir": ("ENOSPC", "EIO"),
    "link": ("EIO",),
    "unlink": ("EIO",),
    "mmap": ("ENOMEM",),
    "read": ("EIO", "short"),
}
PLACES = ("directory", "metadata", "ssd", "copies", "arena")


@dataclass(frozen=True, slots=True)
class Point:
    """The `number`-th `call` on files of a place, in a phase, `times - 1` after it, and their failure."""

    phase: str
    place: str
    call: str
    error: str
    number: int
    times: int = 1

    def __str__(self) -> str:
        on = " and all after it" if self.times == FOR_EVER else ""
        return f"{self.phase}, {self.call} {self.number}{on} in {self.place}: {self.error}"


ALWAYS = (
    Point("life", "ssd", "fdatasync", "EIO", 1),
    Point("life", "ssd", "write", "short", 1, times=FOR_EVER),
    Point("life", "metadata", "write", "ENOSPC", 3),
    Point("first start", "metadata", "fdatasync", "EIO", 2),
)
"""Points that every run visits."""


def every_series() -> list[Point]:
    """The first point of every series."""
    return [
        Point(phase, place, call, error, 1)
        for phase in PHASES
        for place in PLACES
        for call, errors in ERRORS.items()
        for error in errors
    ]
