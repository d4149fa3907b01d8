"""Sessions: create, look at, update, truncate, fork, delete, expire.

Each change is checked first, made in memory in one step, and then committed; nothing awaits
between check and change.
"""

import asyncio
import uuid
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from ctxcache.cache.accesses import EMPTY, LOOKUP
from ctxcache.cache.heard import Call, Fact
from ctxcache.cache.residency import Residency
from ctxcache.cache.state import State, record_of
from ctxcache.core import ranges
from ctxcache.core.expiry import Expiration
from ctxcache.core.history import Event
from ctxcache.core.ranges import Ranges
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session, SessionView
from ctxcache.errors import (
    CacheError,
    InvalidArgument,
    PositionsNotRelocatable,
    SessionAlreadyExists,
    SessionTooFragmented,
    TierFailure,
    TooManyRequests,
    WriteInProgress,
)
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import StreamRange
from ctxcache.metadata.base import Changes, MetadataStore

NAMES_PER_TURN = 256
"""Sessions that a listing looks at before others have their turn: half a millisecond."""
SESSIONS_PER_COMMIT = 64
PARTS_PER_COMMIT = 4096
"""Sessions, and segments and streams of them, that one commit of upkeep takes at most; one session at least."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a lookup found: `reason` is empty for a hit."""

    session_id: str
    reason: str = ""
    view: SessionView | None = None
    dram_token_count: int = 0
    is_pending: bool = False


class Sessions:
    """The use cases of sessions that move no rows."""

    def __init__(
        self, state: State, residency: Residency, metadata: MetadataStore, default: Expiration
    ) -> None:
        self._state = state
        self._residency = residency
        self._departures = residency.departures
        self._metadata = metadata
        self.default_expiration = default

    async def create(
        self, tenant: str, session_id: str, *, model_id: str, layout: Sequence[StreamRange],
        expiration: Expiration | None, is_pinned: bool,
    ) -> SessionView:  # fmt: skip
        """Create an empty session; an empty id means one of our choice.

        Raises ModelNotFound, SessionAlreadyExists, InvalidArgument (a stream the model does not have).
        """
        self._metadata.check()
        model = self._state.model(tenant, model_id)
        try:
            made = self._state.layout(model, layout)
        except KeyError as error:
            raise InvalidArgument(field="layout", problem=f"the model has no {error.args[0]}") from error
        session = self._blank(
            tenant, session_id, model_id, model.fingerprint, made,
            expiration or self.default_expiration,
        )  # fmt: skip
        session.is_pinned = is_pinned
        return await self._admit(session)

    def get(self, tenant: str, session_id: str) -> SessionView:
        """One session. Raises SessionNotFound."""
        try:
            view = self._state.session(tenant, session_id).view()
        except CacheError as error:
            self._state.accesses.missed(LOOKUP, tenant, session_id, error, Call.GET)
            raise
        self._state.accesses.found(LOOKUP, view, Call.GET, tokens=view.token_count)
        return view

    async def list(self, tenant: str, *, after: str, model_id: str) -> AsyncGenerator[SessionView]:
        """Sessions with ids greater than `after`, by id; of one model unless `model_id` is empty.

        Others have their turn in between: what is created or deleted meanwhile may be listed or not.
        """
        now_ns = self._state.clock.now_ns()
        while True:
            names = self._state.names.get(tenant, [])
            begin = bisect_right(names, after)
            some = names[begin : begin + NAMES_PER_TURN]
            for name in some:
                session = self._state.sessions.get((tenant, name))
                if session is None or session.expire_time_ns <= now_ns:
                    continue
                if model_id in ("", session.model_id):
                    self._state.reckon(session)
                    yield session.view()
            if len(some) < NAMES_PER_TURN:
                return
            after = some[-1]
            await asyncio.sleep(0)

    async def update(
        self, tenant: str, session_id: str, *, expiration: Expiration | None, is_pinned: bool | None
    ) -> SessionView:
        """Change expiry or pin, and count an access. Raises SessionNotFound."""
        session = self._state.session(tenant, session_id)
        self._metadata.check(is_growing=False)
        if expiration is not None:
            session.expiration = expiration
        if is_pinned is not None:
            session.is_pinned = is_pinned
            self._state.evictable.add(session.uid)
        self._state.touch(session)
        self._state.placement.visited(session)
        self._state.accesses.did(Call.TOUCH, session, **self._terms(session))
        self._state.unwritten.look_again(session)
        await self._departures.write_down([session])
        return session.view()

    async def keep_recent(
        self, tenant: str, session_id: str, generation: int | None, *, recent_count: int, sink_count: int
    ) -> SessionView:
        """Drop what lies between the first `sink_count` and the last `recent_count` tokens. See `drop`."""
        session = self._state.session(tenant, session_id)
        dropped = ranges.sinks_and_recent(
            session.token_count, sink_count=sink_count, recent_count=recent_count
        )
        return await self.drop(tenant, session_id, generation, dropped)

    async def keep_first(
        self, tenant: str, session_id: str, generation: int | None, token_count: int
    ) -> SessionView:
        """Drop every token at or after `token_count`. See `drop`."""
        session = self._state.session(tenant, session_id)
        session.check_range(token_count, session.token_count)
        return await self.drop(tenant, session_id, generation, ((token_count, session.token_count),))

    async def drop(
        self, tenant: str, session_id: str, generation: int | None, dropped: Ranges
    ) -> SessionView:
        """Drop tokens by index. What drops nothing changes nothing.

        Raises SessionNotFound, GenerationMismatch, WriteInProgress, TokenRangeOutOfBounds,
        PositionsNotRelocatable, SessionTooFragmented.
        """
        session = self._state.session(tenant, session_id)
        self._check_change(session, generation)
        if any(not 0 <= begin <= end <= session.token_count for begin, end in dropped):
            for begin, end in dropped:
                session.check_range(begin, end)
        indexes = ranges.normalise(list(dropped))
        self._check_relocatable(session, indexes)
        kept = ranges.subtract(session.live, ranges.select_all(session.live, indexes))
        self._check_fragments(session, kept, session.log_end)
        self._metadata.check(is_growing=False)
        self._state.touch(session)
        if kept != session.live:
            lost_count = session.token_count - ranges.count(kept)
            dead = self._state.unlist(session, session.keep_positions(kept))
            self._state.accesses.happened(
                session, Event.TRUNCATED, detail="by request", token_count=lost_count,
                dropped=[index for begin_end in indexes for index in begin_end],
            )  # fmt: skip
            self._state.placement.visited(session)
            await self._departures.write_down([session], dead=dead)
        return session.view()

    async def fork(
        self, tenant: str, session_id: str, new_id: str, generation: int | None,
        *, token_count: int | None, expiration: Expiration | None,
    ) -> SessionView:  # fmt: skip
        """Create a session that shares the source's first tokens, which are made durable first.

        Raises SessionNotFound, SessionAlreadyExists, GenerationMismatch, WriteInProgress,
        TokenRangeOutOfBounds, SessionTooFragmented, CapacityExceeded, TierFailure.
        """
        source = self._state.session(tenant, session_id)
        self._metadata.check()
        self._check_new(tenant, new_id)
        self._check_change(source, generation)
        source.check_range(0, source.token_count if token_count is None else token_count)
        while source.durable_end < source.log_end:
            await self._residency.flush(source)
            # What was checked may have changed, and a writer that goes on would be waited for for ever.
            source = self._state.session(tenant, session_id)
            self._check_change(source, generation)
        kept = source.token_count if token_count is None else token_count
        source.check_range(0, kept)
        fork = self._blank(
            tenant, new_id, source.model_id, source.model_fingerprint, source.layout,
            expiration or source.expiration, live=ranges.select(source.live, 0, kept),
        )  # fmt: skip
        fork.segments = source.segments_of(fork.live)
        fork.log_end = max((s.end for s in fork.segments), default=0)
        fork.recorded_end = fork.durable_end = fork.log_end
        fork.ssd_path = source.ssd_path
        self._check_fragments(source, fork.live, fork.log_end)
        # What is shared grows no more: both logs go on behind it.
        for segment in fork.segments:
            segment.is_open = False
        self._state.touch(source)
        return await self._admit(fork, source)

    async def flush(self, tenant: str, session_id: str) -> SessionView:
        """Make what is committed durable. Raises SessionNotFound, CapacityExceeded, TierFailure."""
        session = self._state.session(tenant, session_id)
        self._state.accesses.did(Call.FLUSH, session)
        await self._residency.flush(session)
        return session.view()

    async def demote(self, tenant: str, session_id: str) -> SessionView:
        """Flush, and drop from DRAM what nobody holds. Raises SessionNotFound, CapacityExceeded, TierFailure."""
        session = self._state.session(tenant, session_id)
        self._state.accesses.did(Call.DEMOTE, session)
        await self._residency.demote(session)
        return session.view()

    async def delete(self, tenant: str, session_id: str, generation: int | None) -> None:
        """Delete a session. Raises SessionNotFound, GenerationMismatch, WriteInProgress."""
        session = self._state.session(tenant, session_id)
        self._check_change(session, generation)
        self._metadata.check(is_growing=False)
        self._state.seen.deleted_session_count += 1
        self._ended(session, Event.DELETED)
        await self._departures.remove([session])

    async def evict(self, tenant: str, session_id: str) -> None:
        """Give up a session, pinned or not. Raises SessionNotFound, WriteInProgress, TierFailure."""
        session = self._state.session(tenant, session_id)
        self._check_change(session, None)
        await self._residency.ssd_room.expel(session, "an operator's request")

    async def expire_due(self) -> None:
        """Remove the sessions whose time has come, a few at a time; a writer is waited for.

        Each few are one commit, and the next ones wait for it: others have their turn meanwhile.
        """
        now_ns = self._state.clock.now_ns()
        writing: list[Session] = []
        try:
            while due := self._due(now_ns):
                writing += [session for session in due if session.is_writing]
                gone = [session for session in due if not session.is_writing]
                self._state.counters.expired_session_count += len(gone)
                for session in gone:
                    self._ended(session, Event.EXPIRED)
                await self._departures.remove(gone)
        finally:
            for session in writing:
                if not session.is_gone:
                    self._state.expiry.schedule(session.uid, now_ns)

    def _due(self, now_ns: int) -> Sequence[Session]:
        uids = self._state.expiry.due(now_ns, self._expire_time, limit=SESSIONS_PER_COMMIT)
        return [self._state.by_uid[uid] for uid in uids]

    async def save_access_times(self, *, is_last: bool = False) -> None:
        """Write down accesses since the last call, so that sliding expiry survives a restart.

        `is_last`: the server ends, and may use up the room for records. Raises CapacityExceeded, TierFailure.
        """
        while self._state.touched:
            self._metadata.check(is_growing=not is_last)
            some = self._some_touched()
            records = [record_of(session) for session in some]
            await self._metadata.commit(Changes(sessions=records), is_durable=False)
            self._state.touched -= {session.uid for session in some}
            await asyncio.sleep(0)

    def _some_touched(self) -> Sequence[Session]:
        some: list[Session] = []
        part_count = 0
        for uid in islice(self._state.touched, SESSIONS_PER_COMMIT):
            some.append(self._state.by_uid[uid])
            part_count += len(some[-1].segments) + len(some[-1].layout.specs)
            if part_count >= PARTS_PER_COMMIT:
                break
        return some

    def lookup(self, tenant: str, session_id: str, fingerprint: bytes) -> Found:
        """What could be restored of a session, without side effects. Never raises."""
        try:
            session = self._state.session(tenant, session_id)
            session.check_fingerprint(fingerprint)
        except CacheError as error:
            self._state.accesses.missed(LOOKUP, tenant, session_id, error)
            return Found(session_id, reason=error.reason)
        lost = Event.DEVICE_LOST if session.withheld else None
        reason = "" if session.live else lost.name if lost else "EMPTY"
        in_dram = session.dram_token_count
        self._state.accesses.found(
            LOOKUP, session, empty=lost.value if lost else EMPTY, tokens=session.token_count,
            dram_tokens=in_dram,
        )  # fmt: skip
        return Found(session_id, reason, session.view(), in_dram, session.is_writing and not session.live)

    async def lose(self, gone: Sequence[Segment], why: str) -> None:
        """End every session before the first of these segments, whose bytes are nowhere any more; some in each commit.

        Raises TierFailure.
        """
        for begin in range(0, len(gone), PARTS_PER_COMMIT):
            some = {s for s in gone[begin : begin + PARTS_PER_COMMIT] if s.session_count}
            cut, dead = self._residency.mending.cut(some, Event.DEVICE_LOST, why)
            await self._departures.write_down(cut, dead=dead)

    # -- checks and parts ----------------------------------------------------------------------------

    def _terms(self, session: Session) -> dict[str, Fact]:
        """For how long it is kept, as recordings have it."""
        ttl_ns = session.expiration.ttl_ns
        if ttl_ns is None:
            ttl_ns = session.expire_time_ns - self._state.clock.now_ns()
        return {"ttl_ms": ttl_ns // 10**6, "is_pinned": session.is_pinned}

    def _ended(self, session: Session, event: Event) -> None:
        self._state.accesses.happened(session, event, token_count=session.token_count)

    def _expire_time(self, uid: bytes) -> int | None:
        session = self._state.by_uid.get(uid)
        return session.expire_time_ns if session else None

    def _check_change(self, session: Session, generation: int | None) -> None:
        session.check_generation(generation)
        if session.is_writing:
            raise WriteInProgress(session=session.name)

    def _check_relocatable(self, session: Session, dropped: Ranges) -> None:
        model = self._state.model(session.tenant, session.model_id)
        is_suffix = all(end == session.token_count for _, end in dropped)
        if not model.spec.is_relocatable and not is_suffix:
            raise PositionsNotRelocatable(model=f"models/{session.model_id}")

    def _check_fragments(self, session: Session, live: Ranges, log_end: int) -> None:
        """What has more than it may, from a time of other limits, must not get more still."""
        limit, count = self._state.limits.fragment_count, ranges.fragment_count(live, log_end)
        if count > max(limit, ranges.fragment_count(session.live, session.log_end)):
            raise SessionTooFragmented(session=session.name, fragment_count=count, limit=limit)

    def _check_new(self, tenant: str, session_id: str) -> None:
        limit = self._state.limits.session_count
        own = len(self._state.names.get(tenant, ()))
        if self._state.limits.bound(limit).is_reached(len(self._state.sessions), own):
            raise TooManyRequests(what="sessions", limit=limit)
        known = self._state.sessions.get((tenant, session_id))
        if known and known.expire_time_ns > self._state.clock.now_ns():
            raise SessionAlreadyExists(session=known.name)

    def _blank(
        self, tenant: str, session_id: str, model_id: str, fingerprint: bytes, layout: SegmentLayout,
        expiration: Expiration, live: Ranges = (),
    ) -> Session:  # fmt: skip
        uid, now_ns = uuid.uuid4(), self._state.clock.now_ns()
        return Session(
            uid=uid.bytes, tenant=tenant, session_id=session_id or uid.hex, model_id=model_id,
            model_fingerprint=fingerprint, layout=layout, expiration=expiration, create_time_ns=now_ns,
            access_time_ns=now_ns, expire_time_ns=expiration.after_access(now_ns), live=live,
        )  # fmt: skip

    async def _admit(self, session: Session, source: Session | None = None) -> SessionView:
        self._check_new(session.tenant, session.session_id)
        expired = self._state.sessions.get((session.tenant, session.session_id))
        if expired:
            self._ended(expired, Event.EXPIRED)
        dead = self._state.forget(expired) if expired else []
        self._state.add(session)
        self._heard_of(session, source)
        if source:
            self._state.placement.visited(source)
            # It may be in use, and go on in DRAM as kin to the new one.
            self._state.placement.settled(source)
            self._state.placement.visited(session)
        try:
            await self._departures.write_down([session], gone=[expired] if expired else [], dead=dead)
        except TierFailure:
            if not session.is_gone:
                self._departures.strand(self._state.forget(session))
                # Its record may be there, or be owed: it goes when changes are taken again.
                with suppress(TierFailure):
                    changes = Changes(deleted_session_uids=[session.uid])
                    await self._metadata.commit(changes, is_durable=False)
            raise
        return session.view()

    def _heard_of(self, session: Session, source: Session | None) -> None:
        terms = self._terms(session)
        if source is None:
            self._state.accesses.did(Call.OPEN, session, **terms)
        else:
            count = session.token_count
            self._state.accesses.did(Call.FORK, session, source=source.name, tokens=count, **terms)
