"""Bugs that only several clients of one session show."""

from typing import Any

from ctxcache.cache.appends import Appends
from ctxcache.cache.eviction import Departures
from ctxcache.cache.sessions import Sessions
from ctxcache.core.ledger.session import SessionView
from tests.faults.planted import plant


@plant
def fork_leaves_tail_open(_: int) -> None:
    """A fork and its source go on in the same segment, whoever writes first."""
    fork = Sessions.fork

    async def fork_open(
        sessions: Sessions, tenant: str, session_id: str, *arguments: Any, **named: Any
    ) -> SessionView:
        made = await fork(sessions, tenant, session_id, *arguments, **named)
        forked = sessions._ledger.get(made.uid)
        for segment in forked.segments if forked else ():
            segment.is_growing = True
        return made

    setattr(Sessions, "fork", fork_open)  # noqa: B010  # mypy would have it typed


@plant
def truncation_not_recorded(_: int) -> None:
    """A change of an existing session is written down only when something else is."""
    write_down = Departures.write_down

    async def write_some(departures: Departures, changed: Any = (), **named: Any) -> None:
        await write_down(
            departures,
            [s for s in changed if s.access_time_ns == s.create_time_ns or not s.segments],
            **named,
        )

    setattr(Departures, "write_down", write_some)  # noqa: B010


@plant
def offset_not_compared(_: int) -> None:
    """An append begins wherever the session ends by then."""
    reserve = Appends.reserve

    async def reserve_anywhere(writing: Appends, tenant: str, session_id: str, **named: Any) -> Any:
        named["write_offset"] = writing._ledger.find(tenant, session_id).token_count
        # A session that has other tokens has another generation, too.
        named["generation"] = None
        return await reserve(writing, tenant, session_id, **named)

    setattr(Appends, "reserve", reserve_anywhere)  # noqa: B010
