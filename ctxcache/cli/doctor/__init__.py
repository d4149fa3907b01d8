"""`ctxcache doctor`: what this machine offers, and which path is live for each thing.

Here: a finding, which is one thing that was looked at, its meaning, and the advice.
"""

import enum
from dataclasses import dataclass

from ctxcache.errors import CacheError


class FindingStatus(enum.StrEnum):
    """How well it is. Only a finding with a `failure` makes serving impossible."""

    OK = "ok"
    DEGRADED = "degraded"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of `name` here (`found`), the choice that follows from it, and how to improve it.

    `failure` is what `ctxcache serve` would end with.
    """

    name: str
    status: FindingStatus
    found: str
    used: str
    advice: str = ""
    failure: CacheError | None = None


def ok(name: str, found: str, used: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(name, FindingStatus.OK, found, used)


def degraded(name: str, found: str, used: str, advice: str) -> Finding:
    """Return a finding about something slower or smaller than it could be."""
    return Finding(name, FindingStatus.DEGRADED, found, used, advice)


def missing(name: str, found: str, used: str, advice: str) -> Finding:
    """Return a finding about something that is not there and that serving can do without."""
    return Finding(name, FindingStatus.MISSING, found, used, advice)


def fatal(name: str, failure: CacheError, advice: str) -> Finding:
    """Return a finding that makes serving impossible."""
    return Finding(
        name, FindingStatus.MISSING, str(failure), "nothing: the server cannot start", advice, failure
    )
