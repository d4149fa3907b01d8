"""SessionService.

Messages with rows are read here around the rows: protobuf's own types would copy them twice.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing
from typing import TypeAlias

from ctxcache.cache import Cache
from ctxcache.cache.sessions import Lookup
from ctxcache.core.ledger.session import Expiration, SessionView
from ctxcache.core.ranges import Range, Ranges, normalise
from ctxcache.errors import ChecksumMismatch, InvalidArgument
from ctxcache.format.checksums import wire_checksum
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import StateKind
from ctxcache.format.wire_chunk import WireChunk, scan_chunk
from ctxcache.service import convert, validate
from ctxcache.service.callers import Context, current
from ctxcache.service.convert import EncodedAnswer, Page
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.service.rows import Append, begin_append, chunk_message, packed, read_header, read_request
from ctxcache.service.whereabouts import ALONE, Whereabouts
from ctxcache.v1 import model_pb2, session_pb2, session_pb2_grpc

DEFAULT_SINK_TOKENS = 4
LOOKUP_LIMIT = 1000
QUERIES_PER_LOOK = 8
"""Queries between two looks at the clock: some tens of microseconds."""
RESULTS_FIELD = session_pb2.LookupSessionsResponse.RESULTS_FIELD_NUMBER
DROP_LIMIT = 4096
FORMERS_LIMIT = 16
"""Former renderings of a session: all of them are looked at where one more comes."""
RANGES_PER_PAUSE = 256
KINDS_KEPT_BYTES, KINDS_ENTRY_BYTES = 1 << 20, 256
"""Bytes of encoded kinds that are kept ready, and what an entry takes besides."""
RANGES_KEPT = 1 << 16
"""Ranges of layouts whose part of a look-up's answer is kept ready: some tens of bytes each."""

AppendMessage: TypeAlias = WireChunk | session_pb2.AppendSessionRequest
"""A message of an append: a chunk around its bytes, or any other message."""
ReadMessage: TypeAlias = bytes | session_pb2.ReadSessionResponse
"""A message to a reader: an encoded chunk, or the header."""
_Expiring: TypeAlias = (
    session_pb2.CreateSessionRequest | session_pb2.UpdateSessionRequest | session_pb2.ForkSessionRequest
)
_Conditional: TypeAlias = (
    session_pb2.TruncateSessionRequest | session_pb2.ForkSessionRequest | session_pb2.DeleteSessionRequest
)


class SessionService(session_pb2_grpc.SessionServiceServicer):
    """See proto/ctxcache/v1/session.proto."""

    def __init__(self, cache: Cache, turns: Turns, whereabouts: Whereabouts = ALONE) -> None:
        """`turns` bound large requests and answers."""
        self._turns, self._whereabouts = turns, whereabouts
        self._sessions, self._writing, self._reading = cache.sessions, cache.appends, cache.leases
        self._clock = cache.state.clock

    async def CreateSession(
        self, request: session_pb2.CreateSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        # Pinned sessions are never evicted, so that only an operator may pin.
        if request.is_pinned:
            current().check_operator("is_pinned")
        tenant, session_id = current().tenant, validate.new_session_id(request.session_id)
        await self._whereabouts.come(tenant, session_id)
        view = await self._sessions.create(
            tenant,
            session_id,
            model_id=validate.model_id(request.model, "model"),
            layout=validate.stream_ranges(request.layout, "layout"),
            expiration=self._future(self._expiration(request)),
            is_pinned=request.is_pinned,
            salt=validate.salt(request.salt) if request.salt else b"",
            copies=validate.within(request.copies, 0, 2, "copies"),
            labels=validate.labels(request.labels),
        )
        await self._whereabouts.created(tenant, view.name.removeprefix("sessions/"))
        return convert.session_message(view, self._clock)

    async def GetSession(  # type: ignore[override]  # it is encoded already
        self, request: session_pb2.GetSessionRequest, context: Context
    ) -> bytes:
        """See the proto."""
        view = self._sessions.get(current().tenant, await self._named(request.name))
        return convert.whole_session(view, self._clock)

    async def ListSessions(  # type: ignore[override]  # it is encoded already
        self, request: session_pb2.ListSessionsRequest, context: Context
    ) -> bytes:
        """See the proto."""
        page, part = Page(request.page_size), LoopSlice(self._turns)
        # The page is made in pieces: it ends at a number of sessions or of bytes, whichever is reached first.
        listed = self._sessions.list(
            current().tenant,
            after=validate.page_token(request.page_token),
            model_id=validate.model_id(request.model, "model") if request.model else "",
            labels=validate.labels(request.labels),
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

    async def UpdateSession(
        self, request: session_pb2.UpdateSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        if request.HasField("is_pinned"):
            current().check_operator("is_pinned")
        view = await self._sessions.update(
            current().tenant,
            await self._named(request.name),
            expiration=self._expiration(request),
            is_pinned=request.is_pinned if request.HasField("is_pinned") else None,
            copies=validate.within(request.copies, 0, 2, "copies"),
        )
        return convert.session_message(view, self._clock)

    async def TruncateSession(
        self, request: session_pb2.TruncateSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        return convert.session_message(await self._truncate(request, current().tenant), self._clock)

    async def _truncate(self, request: session_pb2.TruncateSessionRequest, tenant: str) -> SessionView:
        session_id, generation = await self._named(request.name), _generation(request)
        match request.WhichOneof("kept"):
            case "keep_recent":
                recent, sinks = _keep_recent(request.keep_recent)
                return await self._sessions.keep_recent(
                    tenant, session_id, generation, recent_count=recent, sink_count=sinks
                )
            case "drop":
                dropped, furthest = await LoopSlice(self._turns).work(_dropped(request.drop))
                return await self._sessions.drop(tenant, session_id, generation, dropped, furthest)
            case "keep_first":
                return await self._sessions.keep_first(tenant, session_id, generation, request.keep_first)
            case None:
                raise InvalidArgument(field="kept", problem="is required")

    async def ForkSession(
        self, request: session_pb2.ForkSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        replaces = request.replaces_generation if request.HasField("replaces_generation") else None
        if replaces is not None and not request.session_id:
            raise InvalidArgument(field="session_id", problem="is required: it says which one is replaced")
        if replaces is None and request.is_rewrite:
            raise InvalidArgument(field="is_rewrite", problem="needs replaces_generation")
        if request.former_count and not request.is_rewrite:
            raise InvalidArgument(field="former_count", problem="needs is_rewrite")
        validate.within(request.former_count, 0, FORMERS_LIMIT, "former_count")
        if replaces is not None and request.WhichOneof("expiration") is not None:
            raise InvalidArgument(field="expiration", problem="is that of the session that is replaced")
        tenant, new_id = current().tenant, validate.new_session_id(request.session_id)
        source_id = await self._named(request.name)
        await self._whereabouts.come(tenant, new_id)
        view = await self._sessions.fork(
            tenant,
            source_id,
            new_id,
            _generation(request),
            replaces=replaces,
            is_rewrite=request.is_rewrite,
            former_count=request.former_count,
            is_quiet=request.is_quiet,
            token_count=request.token_count if request.HasField("token_count") else None,
            expiration=self._future(self._expiration(request)),
            pace=LoopSlice(self._turns),
        )
        await self._whereabouts.created(tenant, view.name.removeprefix("sessions/"))
        return convert.session_message(view, self._clock)

    async def FlushSession(
        self, request: session_pb2.FlushSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        tenant, session_id = current().tenant, await self._named(request.name)
        if request.is_shared:
            self._whereabouts.check_shares()
        view = await self._sessions.flush(tenant, session_id)
        if request.is_shared:
            await self._whereabouts.share(tenant, session_id)
        return convert.session_message(view, self._clock)

    async def DeleteSession(
        self, request: session_pb2.DeleteSessionRequest, context: Context
    ) -> session_pb2.DeleteSessionResponse:
        """See the proto."""
        tenant, session_id = current().tenant, await self._named(request.name)
        generation = _generation(request)
        # Refused before anything is changed elsewhere.
        self._sessions.check_delete(tenant, session_id, generation)
        await self._whereabouts.ending(tenant, session_id)
        await self._sessions.delete(tenant, session_id, generation)
        self._whereabouts.deleted(tenant, session_id)
        return session_pb2.DeleteSessionResponse()

    async def LookupSessions(  # type: ignore[override]  # it is encoded already
        self, request: session_pb2.LookupSessionsRequest, context: Context
    ) -> bytes:
        """See the proto."""
        validate.within(len(request.queries), 1, LOOKUP_LIMIT, "queries")
        asked: list[tuple[str, bytes]] = []
        part = LoopSlice(self._turns)
        # All queries are validated before the first is answered: an answer has no place for a field's error.
        for i, query in enumerate(request.queries):
            # Validating and answering take their slices alike.
            if not i % QUERIES_PER_LOOK and part.is_over:
                await part.rest()
            try:
                asked.append((validate.session_id(query.name), validate.fingerprint(query.model_fingerprint)))
            except InvalidArgument as error:
                # A field's name is made only where it is wrong.
                field, problem = f"queries[{i}].{error.facts['field']}", str(error.facts["problem"])
                raise InvalidArgument(field=field, problem=problem) from None
        tenant = current().tenant
        await self._whereabouts.all_come(tenant, (session_id for session_id, _ in asked))
        ahead_ns = self._clock.wall_ahead_ns()
        answer = EncodedAnswer()
        for i, (session_id, print_) in enumerate(asked):
            # Bytes bound an answer. The client asks again for what is missing at its end.
            if answer.size_bytes > convert.PAGE_LIMIT_BYTES:
                break
            if not i % QUERIES_PER_LOOK and part.is_over:
                await part.rest()
                # The wall clock may have been set while others had their turn.
                ahead_ns = self._clock.wall_ahead_ns()
            result = _result(self._sessions.lookup(tenant, session_id, print_), ahead_ns)
            answer.add_encoded(convert.entry(RESULTS_FIELD, result))
        return answer.encoded()

    # -- rows ---------------------------------------------------------------------------------------

    async def AppendSession(
        self, request_iterator: AsyncIterator[AppendMessage], context: Context
    ) -> session_pb2.AppendSessionResponse:
        """See the proto."""
        first = await anext(aiter(request_iterator), None)
        if not isinstance(first, session_pb2.AppendSessionRequest) or first.WhichOneof("message") != "header":
            raise InvalidArgument(field="header", problem="the first message must be the header")
        append = await begin_append(self._writing, first.header, current().tenant, self._whereabouts)
        try:
            async for request in request_iterator:
                await self._take(append, request)
        # Rows that were not committed go back, whatever ends the stream.
        finally:
            append.release()
        append.check_finished()
        return session_pb2.AppendSessionResponse(session=convert.session_message(append.view, self._clock))

    async def _take(self, append: Append, request: AppendMessage) -> None:
        if isinstance(request, WireChunk):
            await self._place(append, request)
            return
        match request.WhichOneof("message"):
            case "chunk":
                await self._place(append, _as_wire_chunk(request.chunk))
            case "commit":
                await append.commit(request.commit)
            case other:
                raise InvalidArgument(field="message", problem=f"{other or 'nothing'} is not expected here")

    async def _place(self, append: Append, chunk: WireChunk) -> None:
        stream = validate.stream(chunk.stream, "chunk.stream")
        # The order is: what can be refused, then the room, then the bytes, then their sum.
        end = append.check(stream, chunk.token_begin, len(chunk.data))
        await append.make_room(end)
        self._writing.place(append.reservation, stream, chunk.token_begin, chunk.data)
        # The sum of the chunk comes last. The rows were summed before, so that a change until now is found
        # here, and a later one by the rows' sums.
        if wire_checksum(chunk.data) != chunk.checksum:
            raise ChecksumMismatch(field="chunk.data")
        append.received[stream] = end

    def ReadSession(  # type: ignore[override]  # chunks are encoded already
        self, request: session_pb2.ReadSessionRequest, context: Context
    ) -> AsyncGenerator[ReadMessage]:
        """See the proto."""
        return self._messages(request, current().tenant)

    async def _messages(
        self, request: session_pb2.ReadSessionRequest, tenant: str
    ) -> AsyncGenerator[ReadMessage]:
        asked, streams = read_request(request, tenant)
        await self._whereabouts.come(tenant, asked.session_id)
        async with self._reading.stream(asked, streams) as (lease, _, rows):
            yield session_pb2.ReadSessionResponse(header=read_header(lease, streams, self._clock))
            async for parts in packed(rows, lease.view.layout, self._reading.mend):
                # A slow reader may outlive its lease.
                self._reading.check(lease)
                yield await chunk_message(parts, self._reading.mend)

    async def _named(self, name: str) -> str:
        """The id in a name, once its session is here if it can be.

        Raises InvalidArgument, SessionMoved.
        """
        session_id = validate.session_id(name)
        await self._whereabouts.come(current().tenant, session_id)
        return session_id

    # -- expiry -------------------------------------------------------------------------------------

    def _future(self, expiration: Expiration | None) -> Expiration | None:
        if expiration and expiration.ttl_ns is None and expiration.expire_time_ns <= self._clock.now_ns():
            raise InvalidArgument(field="expire_time", problem="is not in the future")
        return expiration

    def _expiration(self, request: _Expiring) -> Expiration | None:
        match request.WhichOneof("expiration"):
            case "expire_time":
                told = validate.absolute(request.expire_time)
                # The wall clock of now counts: the time left is measured from here on, whoever sets the clock
                # later.
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
    """The ranges to drop, validated and merged, and the one that reaches furthest; pauses now and then."""
    validate.within(len(drop.ranges), 1, DROP_LIMIT, "drop.ranges")
    dropped: list[Range] = []
    furthest, lowest = (0, 0), (0, 0)
    for i, item in enumerate(drop.ranges):
        begin, end = item.begin, item.end
        if begin > end:
            raise InvalidArgument(field=f"drop.ranges[{i}]", problem="ends before it begins")
        # The range that reaches furthest stands for all in the check against the session, so that the check
        # is one comparison.
        if end > furthest[1]:
            furthest = begin, end
        if begin < lowest[0]:
            lowest = begin, end
        if begin < end:
            dropped.append((begin, end))
        if i % RANGES_PER_PAUSE == RANGES_PER_PAUSE - 1:
            yield
    return normalise(dropped), lowest if lowest[0] < 0 else furthest


def _result(lookup: Lookup, ahead_ns: int) -> bytes:
    """An encoded LookupResult. `ahead_ns`: how far the wall clock is ahead of the store's time."""
    result = session_pb2.LookupResult(name=f"sessions/{lookup.session_id}")
    if lookup.layout is None:
        result.state, result.reason = session_pb2.LOOKUP_STATE_MISS, lookup.reason
        return result.SerializeToString()
    if lookup.is_pending:
        result.state = session_pb2.LOOKUP_STATE_PENDING
    elif lookup.reason:
        result.state, result.reason = session_pb2.LOOKUP_STATE_MISS, lookup.reason
    else:
        result.state = session_pb2.LOOKUP_STATE_HIT
    result.generation, result.token_count = lookup.generation, lookup.token_count
    result.dram_token_count, end = lookup.dram_token_count, result.expire_time
    end.seconds, end.nanos = divmod(lookup.expire_time_ns + ahead_ns, 10**9)
    # Many sessions share a layout's kinds and a token count, so that these are encoded once and appended.
    return result.SerializeToString() + _KINDS.encoded(lookup.layout, lookup.token_count)


class _Kinds:
    """The kinds in look-ups' answers, encoded, by layout and number of tokens.

    An entry keeps the layout alive, so that no other layout has its identity.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[SegmentLayout, bytes]] = {}
        self._size_bytes = 0

    def encoded(self, layout: SegmentLayout, token_count: int) -> bytes:
        """A LookupResult that has only the kinds of a session of so many tokens."""
        # The key is the layout's identity, so that nothing is hashed. The entry keeps the layout alive, so
        # that no other layout gets its identity.
        key = id(layout), token_count
        known = self._known.get(key)
        if known is None:
            result = session_pb2.LookupResult()
            result.CopyFrom(_of_one_token(layout))
            for kind in result.kinds:
                kind.size_bytes *= token_count
            known = layout, result.SerializeToString()
            self._size_bytes += KINDS_ENTRY_BYTES + len(known[1])
            # All entries go at once: which of them are asked for again is not known.
            if self._size_bytes > KINDS_KEPT_BYTES:
                self._known.clear()
                self._size_bytes = 0
            self._known[key] = known
        return known[1]


_KINDS = _Kinds()
_OF_ONE_TOKEN: dict[int, tuple[SegmentLayout, session_pb2.LookupResult]] = {}
"""By the layout's identity. An entry keeps the layout alive, so that no other layout has its identity."""


def _of_one_token(layout: SegmentLayout) -> session_pb2.LookupResult:
    """The kinds in a look-up's answer for a session of one token. Copying it is cheaper than making it."""
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


def _as_wire_chunk(chunk: session_pb2.Chunk) -> WireChunk:
    stream = validate.stream(chunk.stream, "chunk.stream")
    return WireChunk(stream, chunk.token_begin, memoryview(chunk.data), chunk.checksum)


def _decode_append(encoded: bytes) -> AppendMessage:
    # Chunks are read around their rows. protobuf reads any other message.
    return scan_chunk(encoded) or session_pb2.AppendSessionRequest.FromString(encoded)


DECODERS = {"/ctxcache.v1.SessionService/AppendSession": _decode_append}
"""How the edge reads requests that carry rows."""
