"""Bugs that the expiry harness must find."""

from collections.abc import Callable

from ctxcache.cache import sessions
from ctxcache.cache.residency import Residency
from ctxcache.cache.state import State
from ctxcache.core.session import Session
from ctxcache.errors import SessionNotFound
from ctxcache.upkeep import Upkeep
from tests.faults.planted import plant


@plant
def seen_until_removed(_: int) -> None:
    """Nobody looks at the time, and upkeep does not come in time."""

    def session(state: State, tenant: str, session_id: str) -> Session:
        try:
            return state.sessions[tenant, session_id]
        except KeyError:
            raise SessionNotFound(session=f"sessions/{session_id}") from None

    setattr(State, "session", session)  # noqa: B010  # mypy would have it typed
    init: Callable[..., None] = Upkeep.__init__

    def late(upkeep: Upkeep, *arguments: object, **_: object) -> None:
        init(upkeep, *arguments, interval_s=3600.0)

    setattr(Upkeep, "__init__", late)  # noqa: B010


@plant
def space_kept(_: int) -> None:
    """What nobody lists any more keeps its place on SSD."""
    known = Residency.free

    def free(residency: Residency, segment: object) -> None:
        kept, give = residency.ssd, residency.ssd.give
        setattr(kept, "give", lambda _: None)  # noqa: B010
        try:
            known(residency, segment)  # type: ignore[arg-type]  # a segment, whatever mypy says
        finally:
            setattr(kept, "give", give)  # noqa: B010

    setattr(Residency, "free", free)  # noqa: B010


@plant
def all_at_once(_: int) -> None:
    """There are no slices."""
    sessions.SESSIONS_PER_COMMIT = 10**9
