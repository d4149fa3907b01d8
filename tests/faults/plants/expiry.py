"""Bugs that the expiry harness must find."""

from collections.abc import Callable

from ctxcache.cache import sessions
from ctxcache.core.ledger.ledger import Ledger
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Session
from ctxcache.errors import SessionNotFound
from ctxcache.server.upkeep import Upkeep
from tests.faults.planted import plant


@plant
def seen_until_removed(_: int) -> None:
    """No call looks at the time, and upkeep comes too late."""

    def find(ledger: Ledger, tenant: str, session_id: str) -> Session:
        session = ledger.named(tenant, session_id)
        if session is None:
            raise SessionNotFound(session=f"sessions/{session_id}")
        return session

    setattr(Ledger, "find", find)  # noqa: B010  # mypy would have it typed
    init: Callable[..., None] = Upkeep.__init__

    def late(upkeep: Upkeep, *arguments: object, **_: object) -> None:
        init(upkeep, *arguments, interval_s=3600.0)

    setattr(Upkeep, "__init__", late)  # noqa: B010


@plant
def space_kept(_: int) -> None:
    """Segments that no session lists any more keep their places on SSD."""
    known = Ledger.forgotten

    def forgotten(ledger: Ledger, segment: Segment) -> None:
        kept, give = ledger.below, ledger.below.give
        setattr(kept, "give", lambda _: None)  # noqa: B010
        try:
            known(ledger, segment)
        finally:
            setattr(kept, "give", give)  # noqa: B010

    setattr(Ledger, "forgotten", forgotten)  # noqa: B010


@plant
def all_at_once(_: int) -> None:
    """There are no slices."""
    sessions.SESSIONS_PER_COMMIT = 10**9
