"""History: what became of sessions, so that a miss can be explained. Pure; told by who did it.

Only sessions that were there are remembered, so that names which callers make up take no room. Worst case:
SESSIONS_LIMIT sessions of EVENTS_LIMIT events, 80 MB with the longest names; the session to which nothing has
happened for longest is forgotten first, and its miss counts as never stored. The misses of requests that name
their trace are remembered besides: REQUESTS_LIMIT of them with MISSES_LIMIT misses, some 6 MB.
"""

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

SESSIONS_LIMIT = 1 << 14
EVENTS_LIMIT = 8
"""Events kept of one session, the latest. A repeated event is counted in the one before."""
REQUESTS_LIMIT = 1 << 12
MISSES_LIMIT = 8
"""Misses kept of one request, the latest."""


class Event(enum.Enum):
    """A sort of event in a session's history: less of it is found than was stored, or would have been."""

    EVICTED = "evicted"
    EXPIRED = "expired"
    DELETED = "deleted"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    QUOTA = "quota"
    TIMEOUT = "timeout"
    DEVICE = "device"
    DEVICE_LOST = "device_lost"
    MENDED = "mended"
    MOVED = "moved"
    OWNER_LOST = "owner_lost"
    COMPUTED_IN_VAIN = "computed_in_vain"


ENDS = frozenset((Event.EVICTED, Event.EXPIRED, Event.DELETED, Event.MOVED, Event.OWNER_LOST))
"""After these the session is not there."""


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, `count` times from `first_time_ns` to `time_ns`; `token_count`: lost by the last of them.

    `trace_id`: of the request that did the last of them, where it named one.
    """

    event: Event
    time_ns: int
    first_time_ns: int
    detail: str
    token_count: int
    count: int = 1
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class Miss:
    """One miss of a request.

    A session, `by` which way, and what came of it, `count` times until `time_ns`.
    """

    session_id: str
    by: str
    result: str
    time_ns: int
    count: int = 1


class History:
    """The latest events of the sessions to which something happened. Owned by the event loop."""

    def __init__(self, sessions_limit: int = SESSIONS_LIMIT) -> None:
        self._sessions_limit = sessions_limit
        self._events: OrderedDict[tuple[str, str], tuple[Happened, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._events)

    def note(
        self,
        tenant: str,
        session_id: str,
        event: Event,
        *,
        time_ns: int,
        detail: str = "",
        token_count: int = 0,
        trace_id: str = "",
    ) -> None:
        """It happened to the session; `detail`: by whom or with what, in words."""
        key = (tenant, session_id)
        events = self._events.pop(key, ())
        last = events[-1] if events else None
        # The same again: counted, so that eight time-outs do not push out the eviction before them.
        if last and (last.event, last.detail) == (event, detail):
            again = Happened(
                event, time_ns, last.first_time_ns, detail, token_count, last.count + 1, trace_id
            )
            events = (*events[:-1], again)
        else:
            new = Happened(event, time_ns, time_ns, detail, token_count, trace_id=trace_id)
            events = (*events, new)[-EVENTS_LIMIT:]
        # Put last: the session to which nothing happened for longest is the first.
        self._events[key] = events
        if len(self._events) > self._sessions_limit:
            self._events.popitem(last=False)

    def of(self, tenant: str, session_id: str) -> Sequence[Happened]:
        """The remembered events of a session, the oldest first."""
        return self._events.get((tenant, session_id), ())

    def end_of(self, tenant: str, session_id: str) -> Event | None:
        """How a session that is not there ended; None when nothing is remembered of an end."""
        return next((h.event for h in reversed(self.of(tenant, session_id)) if h.event in ENDS), None)


class Requests:
    """The misses of the latest requests that name their trace. Owned by the event loop."""

    def __init__(self, requests_limit: int = REQUESTS_LIMIT) -> None:
        self._requests_limit = requests_limit
        self._misses: OrderedDict[tuple[str, str], tuple[Miss, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._misses)

    def note(self, tenant: str, trace_id: str, miss: Miss) -> None:
        """A request of a tenant missed; the same miss again is counted where the last one is."""
        misses = self._misses.pop((tenant, trace_id), ())
        last = misses[-1] if misses else None
        if last and (last.session_id, last.by, last.result) == (miss.session_id, miss.by, miss.result):
            misses, miss = misses[:-1], replace(miss, count=last.count + 1)
        # Only the latest of one request: a look-up of hundreds of names is one request.
        self._misses[tenant, trace_id] = (*misses, miss)[-MISSES_LIMIT:]
        if len(self._misses) > self._requests_limit:
            self._misses.popitem(last=False)

    def of(self, tenant: str, trace_id: str) -> Sequence[Miss]:
        """The remembered misses of a request, the oldest first."""
        return self._misses.get((tenant, trace_id), ())
