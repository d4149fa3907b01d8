"""Journal: what the store was asked, what it did, and why a caller got less. Changes nothing.

    what happens          counts        history of the session     recording, while somebody listens
    found a session       hit or empty                             LOOKUP, GET, READ
    missed it             the reason    quota, timeout, ...         LOOKUP, GET, READ with the reason
    a write failed                      quota, timeout, ...         APPEND with the reason
    tokens went                         evicted, expired, cut, ... EVICT, EXPIRE, CUT, ...
    anything else                                                  its call

Knows names; keeps no token and no row. Every memory is bounded: a recording that is not taken in time loses
what follows, and counts it.
"""

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ctxcache.core.history import ENDS, Event, History, Miss, Requests
from ctxcache.core.ledger.session import BLOCKS, Session, SessionView
from ctxcache.errors import CacheError
from ctxcache.format.layout import SegmentLayout
from ctxcache.runtime.clock import Clock
from ctxcache.runtime.spans import current_trace_id

Fact: TypeAlias = "int | str | bool | Sequence[int]"
LIMIT = 1 << 16
"""The most entries that wait to be taken: some 40 MB."""


class Call(enum.Enum):
    """The call; from EXPIRE on, an act of the store itself."""

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
        """The calls since the last time, and how many later ones were lost."""
        taken = self._heard, self._lost_count
        self._heard, self._lost_count = [], 0
        return taken


LOOKUP, READ = "lookup", "read"
"""How it was asked."""
WRITE = "write"
"""The kind of request that writes. Only requests have it: written tokens are counted elsewhere."""
HIT, EMPTY, NEVER_STORED, REFUSED = "hit", "empty", "never_stored", "refused"
EVENTS = {
    "MODEL_FINGERPRINT_MISMATCH": Event.FINGERPRINT_MISMATCH,
    "CORRUPT_SEGMENT": Event.CORRUPT,
    "CAPACITY_EXCEEDED": Event.QUOTA,
    "TOO_MANY_REQUESTS": Event.QUOTA,
    "DEADLINE_EXCEEDED": Event.TIMEOUT,
    "TIER_FAILURE": Event.DEVICE,
}
"""The sort of a failed access, by its error's reason; other reasons mean a mistaken caller."""
RESULTS = (
    HIT,
    EMPTY,
    NEVER_STORED,
    Event.EVICTED.value,
    Event.EXPIRED.value,
    Event.DELETED.value,
    *dict.fromkeys(event.value for event in EVENTS.values()),
    Event.DEVICE_LOST.value,
    REFUSED,
)
"""Every result there is."""
_CALLS = {
    Event.EVICTED: Call.EVICT,
    Event.EXPIRED: Call.EXPIRE,
    Event.DELETED: Call.DELETE,
    Event.TRUNCATED: Call.TRUNCATE,
    Event.CORRUPT: Call.CUT,
    Event.DEVICE_LOST: Call.CUT,
}
"""Events that take tokens from a session."""
_ASKED = {LOOKUP: Call.LOOKUP, READ: Call.READ}


class Journal:
    """Counts of results, and the history behind them. Owned by the event loop."""

    def __init__(self, clock: Clock, find: Callable[[str, str], Session | None]) -> None:
        """`find` returns a tenant's session by its id, expired or not."""
        self._clock, self._find = clock, find
        self.history = History()
        self.requests = Requests()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.listening: Listening | None = None
        """The recording under way, if there is one."""

    def did(self, call: Call, session: Session | SessionView, **facts: Fact) -> None:
        """Something was asked of a session that is there, or done to it."""
        if self.listening is not None:
            self._hear(self.listening, call, session, session.token_count, facts)

    def found(
        self,
        by: str,
        session: Session | SessionView,
        call: Call | None = None,
        *,
        empty: str = EMPTY,
        **facts: Fact,
    ) -> None:
        """The session was there; `tokens` among the facts: how many of its tokens were found; `empty`.

        Why none.
        """
        self.counts[by, HIT if facts["tokens"] else empty] += 1
        if self.listening is not None:
            self._hear(self.listening, call or _ASKED[by], session, session.token_count, facts)

    def missed(
        self, by: str, tenant: str, session_id: str, error: CacheError, call: Call | None = None
    ) -> None:
        """It was not, or not for this caller."""
        if self.listening is not None and not session_id.startswith(BLOCKS):
            at_ns, name = self._clock.monotonic_ns(), f"sessions/{session_id}"
            self.listening.hear(
                Heard(call or _ASKED[by], at_ns, tenant, name, 0, None, b"", {"reason": error.reason})
            )
        session, event = self._find(tenant, session_id), EVENTS.get(error.reason)
        if event is not None:
            result = event.value
            # Corruption is told once, by who ends the session before it.
            if session is not None and event is not Event.CORRUPT:
                self.happened(session, event, detail=f"{by}: {error.reason}")
        elif error.reason != "SESSION_NOT_FOUND":
            result = REFUSED
        elif session is not None:
            # It is over, and not cleared away yet.
            result = Event.EXPIRED.value
        else:
            end = self.history.end_of(tenant, session_id)
            result = end.value if end else NEVER_STORED
        self.counts[by, result] += 1
        self._noted(by, tenant, session_id, result)

    def write_failed(self, session: Session, error: CacheError) -> None:
        """Tokens of it were not stored."""
        self.did(Call.APPEND, session, reason=error.reason)
        event = EVENTS.get(error.reason)
        if event is not None:
            self.happened(session, event, detail=f"write: {error.reason}")
        self._noted(WRITE, session.tenant, session.session_id, event.value if event else REFUSED)

    def happened(
        self, session: Session, event: Event, *, detail: str = "", token_count: int = 0, **facts: Fact
    ) -> None:
        """Something was done to a session that is there, or was until now; `token_count`.

        Tokens that it lost by it.
        """
        call = _CALLS.get(event)
        if self.listening is not None and call is not None:
            left = 0 if event in ENDS else session.token_count
            self._hear(self.listening, call, session, left, {"tokens": token_count, **facts})
        if session.is_block:
            # Blocks come and go in numbers: what is remembered is for sessions, which people ask about.
            return
        self.history.note(
            session.tenant,
            session.session_id,
            event,
            time_ns=self._clock.wall_ns(),
            detail=detail,
            token_count=token_count,
            trace_id=current_trace_id(),
        )

    def _noted(self, by: str, tenant: str, session_id: str, result: str) -> None:
        trace_id = current_trace_id()
        if trace_id:
            self.requests.note(tenant, trace_id, Miss(session_id, by, result, self._clock.wall_ns()))

    def _hear(
        self,
        listening: Listening,
        call: Call,
        session: Session | SessionView,
        session_tokens: int,
        facts: Mapping[str, Fact],
    ) -> None:
        if session.layout.is_block:
            # Recordings are of sessions.
            return
        listening.hear(
            Heard(
                call,
                self._clock.monotonic_ns(),
                session.tenant,
                session.name,
                session_tokens,
                session.layout,
                session.model_fingerprint,
                facts,
            )
        )
