"""SessionService, the rpcs that move no rows; `streams.py` has the two that do."""

from collections.abc import Generator
from contextlib import aclosing
from typing import TypeAlias

from ctxcache.cache import Cache
from ctxcache.cache.sessions import Found
from ctxcache.core.ledger.expiry import Expiration
from ctxcache.core.ledger.session import SessionView
from ctxcache.core.ranges import Range, Ranges, normalise
from ctxcache.errors import InvalidArgument
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import StateKind
from ctxcache.runtime.clock import Clock
from ctxcache.service import convert, validate
from ctxcache.service.answers import Answer, Page
from ctxcache.service.caller import current
from ctxcache.service.rpc import Context
from ctxcache.service.streams import StreamRpcs
from ctxcache.service.tenant import tenant_of
from ctxcache.service.turns import Slice, Turns
from ctxcache.v1 import model_pb2, session_pb2

DEFAULT_SINK_TOKENS = 4
LOOKUP_LIMIT = 1000
DROP_LIMIT = 4096
RANGES_PER_PAUSE = 256
RANGES_KEPT = 1 << 16
"""Ranges of layouts whose part of a look-up's answer is kept ready: some tens of bytes each."""

_Expiring: TypeAlias = (
    session_pb2.CreateSessionRequest | session_pb2.UpdateSessionRequest | session_pb2.ForkSessionRequest
)
_Conditional: TypeAlias = (
    session_pb2.TruncateSessionRequest | session_pb2.ForkSessionRequest | session_pb2.DeleteSessionRequest
)


class SessionService(StreamRpcs):
    """See proto/ctxcache/v1/session.proto."""

    def __init__(self, cache: Cache, turns: Turns) -> None:
        """`turns`: in which large requests are carried out, and large answers made."""
        super().__init__(cache)
        self._turns = turns
        self._sessions = cache.sessions

    async def CreateSession(  # noqa: N802
        self, request: session_pb2.CreateSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        if request.is_pinned:
            current().check_operator("is_pinned")
        view = await self._sessions.create(
            tenant_of(context),
            validate.new_session_id(request.session_id),
            model_id=validate.model_id(request.model, "model"),
            layout=validate.stream_ranges(request.layout, "layout"),
            expiration=self._future(self._expiration(request)),
            is_pinned=request.is_pinned,
        )
        return convert.session_message(view, self._clock)

    async def GetSession(  # noqa: N802
        self, request: session_pb2.GetSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        view = self._sessions.get(tenant_of(context), validate.session_id(request.name))
        return convert.session_message(view, self._clock)

    async def ListSessions(  # type: ignore[override]  # noqa: N802  # it is encoded already
        self, request: session_pb2.ListSessionsRequest, context: Context
    ) -> bytes:
        """See the proto."""
        page, part = Page(request.page_size), Slice(self._turns)
        listed = self._sessions.list(
            tenant_of(context),
            after=validate.page_token(request.page_token),
            model_id=validate.model_id(request.model, "model") if request.model else "",
        )
        async with aclosing(listed) as views:
            async for view in views:
                found = session_pb2.ListSessionsResponse()
                convert.fill_session(found.sessions.add(), view, self._clock)
                if not page.takes(view.name.removeprefix("sessions/"), found):
                    break
                if part.is_over:
                    await part.rest()
        page.add(session_pb2.ListSessionsResponse(next_page_token=page.next_page_token))
        return page.encoded()

    async def UpdateSession(  # noqa: N802
        self, request: session_pb2.UpdateSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        if request.HasField("is_pinned"):
            current().check_operator("is_pinned")
        view = await self._sessions.update(
            tenant_of(context),
            validate.session_id(request.name),
            expiration=self._expiration(request),
            is_pinned=request.is_pinned if request.HasField("is_pinned") else None,
        )
        return convert.session_message(view, self._clock)

    async def TruncateSession(  # noqa: N802
        self, request: session_pb2.TruncateSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        return convert.session_message(await self._truncate(request, tenant_of(context)), self._clock)

    async def _truncate(self, request: session_pb2.TruncateSessionRequest, tenant: str) -> SessionView:
        session_id, generation = validate.session_id(request.name), _generation(request)
        match request.WhichOneof("kept"):
            case "keep_recent":
                recent, sinks = _keep_recent(request.keep_recent)
                return await self._sessions.keep_recent(
                    tenant, session_id, generation, recent_count=recent, sink_count=sinks
                )
            case "drop":
                dropped, furthest = await Slice(self._turns).work(_dropped(request.drop))
                return await self._sessions.drop(tenant, session_id, generation, dropped, furthest)
            case "keep_first":
                return await self._sessions.keep_first(tenant, session_id, generation, request.keep_first)
            case None:
                raise InvalidArgument(field="kept", problem="is required")

    async def ForkSession(  # noqa: N802
        self, request: session_pb2.ForkSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        view = await self._sessions.fork(
            tenant_of(context),
            validate.session_id(request.name),
            validate.new_session_id(request.session_id),
            _generation(request),
            token_count=request.token_count if request.HasField("token_count") else None,
            expiration=self._future(self._expiration(request)),
            pace=Slice(self._turns),
        )
        return convert.session_message(view, self._clock)

    async def FlushSession(  # noqa: N802
        self, request: session_pb2.FlushSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        view = await self._sessions.flush(tenant_of(context), validate.session_id(request.name))
        return convert.session_message(view, self._clock)

    async def DeleteSession(  # noqa: N802
        self, request: session_pb2.DeleteSessionRequest, context: Context
    ) -> session_pb2.DeleteSessionResponse:
        """See the proto."""
        session_id = validate.session_id(request.name)
        await self._sessions.delete(tenant_of(context), session_id, _generation(request))
        return session_pb2.DeleteSessionResponse()

    async def LookupSessions(  # type: ignore[override]  # noqa: N802  # it is encoded already
        self, request: session_pb2.LookupSessionsRequest, context: Context
    ) -> bytes:
        """See the proto."""
        validate.within(len(request.queries), 1, LOOKUP_LIMIT, "queries")
        asked: list[tuple[str, bytes]] = []
        part = Slice(self._turns)
        for i, query in enumerate(request.queries):
            if part.is_over:
                await part.rest()
            session_id = validate.session_id(query.name, f"queries[{i}].name")
            field = f"queries[{i}].model_fingerprint"
            asked.append((session_id, validate.fingerprint(query.model_fingerprint, field)))
        tenant = tenant_of(context)
        answer = Answer()
        for session_id, print_ in asked:
            if part.is_over:
                await part.rest()
            result = _result(self._sessions.lookup(tenant, session_id, print_), self._clock)
            answer.add(session_pb2.LookupSessionsResponse(results=[result]))
        return answer.encoded()

    def _future(self, expiration: Expiration | None) -> Expiration | None:
        if expiration and expiration.ttl_ns is None and expiration.expire_time_ns <= self._clock.now_ns():
            raise InvalidArgument(field="expire_time", problem="is not in the future")
        return expiration

    def _expiration(self, request: _Expiring) -> Expiration | None:
        match request.WhichOneof("expiration"):
            case "expire_time":
                told = validate.absolute(request.expire_time)
                # By the wall clock as it is now: what is left is counted from here on, whoever sets it later.
                return Expiration(
                    None, min(told.expire_time_ns - self._clock.wall_ahead_ns(), validate.LATEST_NS)
                )
            case "ttl":
                return validate.sliding(request.ttl)
            case None:
                return None


def _generation(request: _Conditional) -> int | None:
    return request.if_generation_match if request.HasField("if_generation_match") else None


def _keep_recent(kept: session_pb2.KeepRecent) -> tuple[int, int]:
    sinks = kept.sink_token_count if kept.HasField("sink_token_count") else DEFAULT_SINK_TOKENS
    recent = validate.within(kept.token_count, 0, 2**62, "keep_recent.token_count")
    return recent, validate.within(sinks, 0, 2**62, "keep_recent.sink_token_count")


def _dropped(drop: session_pb2.DropRanges) -> Generator[None, None, tuple[Ranges, Range]]:
    """Ranges to drop, validated and put together, and the one that reaches furthest; pauses now and then."""
    validate.within(len(drop.ranges), 1, DROP_LIMIT, "drop.ranges")
    found: list[Range] = []
    furthest, lowest = (0, 0), (0, 0)
    for i, item in enumerate(drop.ranges):
        begin, end = item.begin, item.end
        if begin > end:
            raise InvalidArgument(field=f"drop.ranges[{i}]", problem="ends before it begins")
        if end > furthest[1]:
            furthest = begin, end
        if begin < lowest[0]:
            lowest = begin, end
        if begin < end:
            found.append((begin, end))
        if i % RANGES_PER_PAUSE == RANGES_PER_PAUSE - 1:
            yield
    return normalise(found), lowest if lowest[0] < 0 else furthest


def _result(found: Found, clock: Clock) -> session_pb2.LookupResult:
    name = f"sessions/{found.session_id}"
    miss = session_pb2.LOOKUP_STATE_MISS
    if found.view is None:
        return session_pb2.LookupResult(name=name, state=miss, reason=found.reason)
    if found.is_pending:
        miss = session_pb2.LOOKUP_STATE_PENDING
    result = session_pb2.LookupResult()
    result.CopyFrom(_of_one_token(found.view.layout))
    for kind in result.kinds:
        kind.size_bytes *= found.view.token_count
    result.name = name
    result.state = miss if found.reason else session_pb2.LOOKUP_STATE_HIT
    result.reason = "" if found.is_pending else found.reason
    result.generation, result.token_count = found.view.generation, found.view.token_count
    result.dram_token_count = found.dram_token_count
    result.expire_time.CopyFrom(convert.timestamp(found.view.expire_time_ns + clock.wall_ahead_ns()))
    return result


_OF_ONE_TOKEN: dict[int, tuple[SegmentLayout, session_pb2.LookupResult]] = {}
"""By the layout's identity. What is kept here keeps the layout, so that no other one has its identity."""


def _of_one_token(layout: SegmentLayout) -> session_pb2.LookupResult:
    """What a look-up says of the kinds of a session of one token. Copying it is cheaper than making it."""
    known = _OF_ONE_TOKEN.get(id(layout))
    if known is None:
        if sum(len(kept.outline.ranges) for kept, _ in _OF_ONE_TOKEN.values()) > RANGES_KEPT:
            _OF_ONE_TOKEN.clear()
        by_kind: dict[StateKind, session_pb2.KindAvailability] = {}
        for kind, size_bytes in layout.outline.kind_bytes.items():
            name = model_pb2.StateKind.ValueType(kind)
            by_kind[kind] = session_pb2.KindAvailability(kind=name, size_bytes=size_bytes)
        for kind, begin, end in layout.outline.ranges:
            by_kind[kind].layers.add(begin=begin, end=end)
        result = session_pb2.LookupResult(kinds=by_kind.values())
        known = _OF_ONE_TOKEN[id(layout)] = layout, result
    return known[1]
