"""Calls about sessions that move no rows, as methods. Worst case: one deadline per call or page.

Names are resource names, `sessions/{session_id}` and `models/{model_id}`. Ids, ranges and times are
the server's to check.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from itertools import islice

from ctxcache.client.convert import (
    duration,
    from_wire,
    ranges_to_wire,
    session_from_wire,
    timestamp,
    token_range,
)
from ctxcache.client.types import LookupResult, SessionInfo
from ctxcache.client.wire import Wire
from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import Stream
from ctxcache.v1 import session_pb2

LOOKUP_BATCH = 1000


class SessionCalls:
    """The unary rpcs of SessionService."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def create_session(
        self,
        model: str,
        *,
        session_id: str = "",
        layout: Iterable[Stream] = (),
        ttl: timedelta | None = None,
        expire_time: datetime | None = None,
        is_pinned: bool = False,
    ) -> SessionInfo:
        """Create an empty session; an empty id lets the server choose. Raises SessionAlreadyExists."""
        _check_expiration(ttl, expire_time)
        request = session_pb2.CreateSessionRequest(
            session_id=session_id,
            model=model,
            layout=ranges_to_wire(layout),
            ttl=duration(ttl),
            expire_time=timestamp(expire_time),
            is_pinned=is_pinned,
        )
        return session_from_wire(self._wire.call(self._wire.sessions.CreateSession, request))

    def get_session(self, name: str) -> SessionInfo:
        """Return a session without counting as an access. Raises SessionNotFound."""
        request = session_pb2.GetSessionRequest(name=name)
        return session_from_wire(self._wire.call(self._wire.sessions.GetSession, request))

    def list_sessions(self, model: str = "", *, page_size: int = 0) -> Iterator[SessionInfo]:
        """Iterate over sessions by name, all or one model's, asking for a page when one is used up."""
        request = session_pb2.ListSessionsRequest(model=model, page_size=page_size)
        while True:
            page = self._wire.call(self._wire.sessions.ListSessions, request)
            yield from map(session_from_wire, page.sessions)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def update_session(
        self,
        name: str,
        *,
        ttl: timedelta | None = None,
        expire_time: datetime | None = None,
        is_pinned: bool | None = None,
    ) -> SessionInfo:
        """Change expiry or pin; with neither, touch. Raises SessionNotFound."""
        _check_expiration(ttl, expire_time)
        request = session_pb2.UpdateSessionRequest(
            name=name, ttl=duration(ttl), expire_time=timestamp(expire_time), is_pinned=is_pinned
        )
        return session_from_wire(self._wire.call(self._wire.sessions.UpdateSession, request))

    def keep_recent(
        self,
        name: str,
        token_count: int,
        *,
        sink_token_count: int | None = None,
        if_generation_match: int | None = None,
    ) -> SessionInfo:
        """Truncate to the newest tokens and the sinks (4 unless said otherwise).

        Raises PositionsNotRelocatable, SessionTooFragmented, GenerationMismatch, WriteInProgress.
        """
        kept = session_pb2.KeepRecent(token_count=token_count, sink_token_count=sink_token_count)
        return self._truncate(
            session_pb2.TruncateSessionRequest(
                name=name, keep_recent=kept, if_generation_match=if_generation_match
            )
        )

    def keep_first(
        self, name: str, token_count: int, *, if_generation_match: int | None = None
    ) -> SessionInfo:
        """Truncate to the first tokens. Raises TokenRangeOutOfBounds, GenerationMismatch, WriteInProgress."""
        return self._truncate(
            session_pb2.TruncateSessionRequest(
                name=name, keep_first=token_count, if_generation_match=if_generation_match
            )
        )

    def drop_ranges(
        self, name: str, ranges: Iterable[tuple[int, int]], *, if_generation_match: int | None = None
    ) -> SessionInfo:
        """Truncate by dropping `[begin, end)` ranges, up to 4096 at a time.

        Raises as `keep_recent` and `keep_first` do, and InvalidArgument.
        """
        dropped = session_pb2.DropRanges(ranges=[token_range(begin, end) for begin, end in ranges])
        return self._truncate(
            session_pb2.TruncateSessionRequest(
                name=name, drop=dropped, if_generation_match=if_generation_match
            )
        )

    def fork_session(
        self,
        name: str,
        *,
        session_id: str = "",
        token_count: int | None = None,
        ttl: timedelta | None = None,
        expire_time: datetime | None = None,
        if_generation_match: int | None = None,
    ) -> SessionInfo:
        """Create a session that shares the source's first tokens, all unless said otherwise.

        Raises SessionAlreadyExists, TokenRangeOutOfBounds, GenerationMismatch, WriteInProgress.
        """
        _check_expiration(ttl, expire_time)
        request = session_pb2.ForkSessionRequest(
            name=name,
            session_id=session_id,
            token_count=token_count,
            ttl=duration(ttl),
            expire_time=timestamp(expire_time),
            if_generation_match=if_generation_match,
        )
        return session_from_wire(self._wire.call(self._wire.sessions.ForkSession, request))

    def flush_session(self, name: str) -> SessionInfo:
        """Make every committed token durable. Raises CapacityExceeded, TierFailure."""
        request = session_pb2.FlushSessionRequest(name=name)
        return session_from_wire(self._wire.call(self._wire.sessions.FlushSession, request))

    def delete_session(self, name: str, *, if_generation_match: int | None = None) -> None:
        """Delete a session. Raises SessionNotFound, GenerationMismatch, WriteInProgress."""
        request = session_pb2.DeleteSessionRequest(name=name, if_generation_match=if_generation_match)
        self._wire.call(self._wire.sessions.DeleteSession, request)

    def lookup(self, queries: Iterable[tuple[str, bytes]]) -> list[LookupResult]:
        """Say for each (name, model fingerprint) what could be restored, in the same order."""
        remaining = iter(queries)
        results: list[LookupResult] = []
        while batch := list(islice(remaining, LOOKUP_BATCH)):
            request = session_pb2.LookupSessionsRequest(
                queries=[
                    session_pb2.LookupQuery(name=name, model_fingerprint=fingerprint)
                    for name, fingerprint in batch
                ]
            )
            answer = self._wire.call(self._wire.sessions.LookupSessions, request)
            results += [from_wire(LookupResult, one) for one in answer.results]
        return results

    def _truncate(self, request: session_pb2.TruncateSessionRequest) -> SessionInfo:
        return session_from_wire(self._wire.call(self._wire.sessions.TruncateSession, request))


def _check_expiration(ttl: timedelta | None, expire_time: datetime | None) -> None:
    if ttl is not None and expire_time is not None:
        raise InvalidArgument(field="expiration", problem="is either ttl or expire_time")
