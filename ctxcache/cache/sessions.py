"""Sessions: create, look at, update, truncate, fork, delete, expire.

Each change is checked first, made in memory in one step, and then committed; nothing awaits
between check and change.
"""

import asyncio
import secrets
import uuid
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ctxcache.cache.eviction import NOTHING_ENDED, Departures, Ended, SsdRoom, record_of, segment_record_of
from ctxcache.cache.flushing import Flushing
from ctxcache.cache.leases import Leases, ReadRequest
from ctxcache.cache.state import LOOKUP, STEP_BY_STEP, Call, Fact, Pace, State
from ctxcache.core import ranges
from ctxcache.core.history import Event
from ctxcache.core.ledger.residence import Count
from ctxcache.core.ledger.session import GUESTS, HIDDEN, Expiration, Session, SessionView
from ctxcache.core.prefix.keys import TOKEN_BYTES
from ctxcache.core.ranges import Ranges
from ctxcache.errors import (
    CacheError,
    InvalidArgument,
    PositionsNotRelocatable,
    SessionAlreadyExists,
    SessionInUse,
    SessionNotFound,
    SessionTooFragmented,
    TierFailure,
    TooManyRequests,
    WriteInProgress,
)
from ctxcache.format.ids import Labels
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS, StreamRange, contents_within, ranges_of
from ctxcache.storage.metadata.base import Changes, MetadataStore

FIRST_GENERATION_BITS = 31
"""Bits of a new session's first generation. Half of a run's generations are left for its changes."""
NAMES_PER_TURN = 64
"""Sessions that a listing looks at before others have their turn: .5 ms, or more of dormant ones."""
SESSIONS_PER_COMMIT = 64
ASLEEP_AT_ONCE, ASLEEP_A_CALL = 16, 512
"""Sessions that fall asleep before others have their turn, and in one call of upkeep."""
SEGMENTS_PER_LOOK = 64
"""Segments that a fork comes to share before it looks whether others should have their turn."""
PARTS_PER_COMMIT = 4096
"""Sessions, and segments and streams of them, that one commit of upkeep takes at most.

One session at least.
"""


class Lookup(NamedTuple):
    """The answer of a look-up: `reason` is empty for a hit. Without a layout there is no such session.

    Not a SessionView: an engine looks up hundreds at a time, and asks for these facts alone.
    """

    session_id: str
    reason: str = ""
    layout: SegmentLayout | None = None
    generation: int = 0
    token_count: int = 0
    expire_time_ns: int = 0
    dram_token_count: int = 0
    is_pending: bool = False


# The shape of every change here:
#
#     find, check     in one step, no await           refused requests leave nothing behind
#     change          in memory, at once              from here on every caller sees it
#     write_down      one commit, synced              then the answer goes out
#
# A failed commit leaves the change in memory, and its record is owed: a restart may show the session as it
# was.
class Sessions:
    """The use cases of sessions that move no rows."""

    def __init__(
        self,
        state: State,
        metadata: MetadataStore,
        departures: Departures,
        ssd_room: SsdRoom,
        flushing: Flushing,
        leases: Leases,
        default: Expiration,
    ) -> None:
        self._state = state
        self._ledger = state.ledger
        self._departures, self._ssd_room, self._flushing = departures, ssd_room, flushing
        self._metadata, self._leases = metadata, leases
        self.default_expiration = default

    async def create(
        self,
        tenant: str,
        session_id: str,
        *,
        model_id: str,
        layout: Sequence[StreamRange],
        expiration: Expiration | None,
        is_pinned: bool,
        salt: bytes = b"",
        copies: int = 0,
        labels: Labels = (),
        uid: bytes = b"",
    ) -> SessionView:
        """Create an empty session; an empty id means one of our choice, 0 copies the store's setting.

        `salt`: the keys of its tokens are made with it. `uid`: empty for a new one. Raises ModelNotFound,
        SessionAlreadyExists, InvalidArgument (a stream the model does not have, or more copies than there are
        SSD paths).
        """
        self._check_copies(copies)
        # The metadata is asked first: else the session would be made, and its record refused.
        self._metadata.check()
        model = self._state.model(tenant, model_id)
        try:
            made = self._state.layout(model, layout)
        except KeyError as error:
            raise InvalidArgument(field="layout", problem=f"the model has no {error.args[0]}") from error
        session = self._blank(
            tenant,
            session_id,
            model_id,
            model.fingerprint,
            made,
            expiration or self.default_expiration,
            uid=uid,
        )
        session.is_pinned, session.salt, session.labels = is_pinned, salt, labels
        session.copies = copies or self._state.copies
        return await self._admit(session)

    def get(self, tenant: str, session_id: str) -> SessionView:
        """One session. Raises SessionNotFound."""
        try:
            view = self._ledger.find(tenant, session_id).view()
        except CacheError as error:
            self._state.journal.missed(LOOKUP, tenant, session_id, error, Call.GET)
            raise
        self._state.journal.found(LOOKUP, view, Call.GET, tokens=view.token_count)
        return view

    async def list(
        self, tenant: str, *, after: str, model_id: str, labels: Labels = ()
    ) -> AsyncGenerator[SessionView]:
        """Sessions with ids greater than `after`, by id; of one model unless `model_id` is empty.

        Only those that have all of the `labels`. Others have their turn in between: what is created or
        deleted meanwhile may be listed or not.
        """
        now_ns, wanted = self._state.clock.now_ns(), frozenset(labels)
        # The listing goes by name and not by place: sessions that come and go move places.
        while True:
            names = self._ledger.names.ids(tenant)
            begin = bisect_right(names, after)
            some = names[begin : begin + NAMES_PER_TURN]
            for name in some:
                # Hidden ones come behind all sessions that have names, and are listed to nobody.
                if name.startswith(HIDDEN):
                    return
                session = self._ledger.glance(tenant, name)
                if session is None or session.has_expired(now_ns):
                    # The session has expired, and is not removed yet.
                    continue
                if model_id in ("", session.model_id) and wanted.issubset(session.labels):
                    self._ledger.lost.reckon(session)
                    yield session.view()
            if len(some) < NAMES_PER_TURN:
                return
            after = some[-1]
            await asyncio.sleep(0)

    async def update(
        self,
        tenant: str,
        session_id: str,
        *,
        expiration: Expiration | None,
        is_pinned: bool | None,
        copies: int = 0,
    ) -> SessionView:
        """Change expiry, pin or copies (0: as they are), and count an access.

        Copies that are lacking or too many are made and given back later. Raises SessionNotFound,
        InvalidArgument, CapacityExceeded (the tenant's limit).
        """
        self._check_copies(copies)
        session = self._ledger.find(tenant, session_id)
        self._metadata.check(is_growing=False)
        # The room that more copies take is made before the setting is there.
        if copies > session.copies:
            new_bytes = sum(s.size_bytes for s in session.segments if s.copies < copies)
            await self._ssd_room.keep_within_limit(session, new_bytes)
            self._still(session)
        if copies:
            session.copies = copies
            segments = list(session.segments)
            # Others have their turn after a few segments: a long session has thousands.
            for begin in range(0, len(segments), SEGMENTS_PER_LOOK):
                listed = [
                    segment for segment in segments[begin : begin + SEGMENTS_PER_LOOK] if segment.is_listed
                ]
                self._ledger.wanted(session, listed)
                await asyncio.sleep(0)
            self._still(session)
        if expiration is not None:
            session.expiration = expiration
        if is_pinned is not None:
            self._ledger.pinned(session, is_pinned=is_pinned)
        self._ledger.touched(session, self._state.clock.now_ns())
        self._ledger.visited(session)
        self._state.journal.did(Call.TOUCH, session, **self._terms(session))
        await self._departures.write_down([session])
        return session.view()

    def _still(self, session: Session) -> None:
        """Raise SessionNotFound where the session has ended, or goes on at another host by now."""
        if session.is_hidden or self._ledger.find(session.tenant, session.session_id) is not session:
            raise SessionNotFound(session=session.name)

    async def keep_recent(
        self, tenant: str, session_id: str, generation: int | None, *, recent_count: int, sink_count: int
    ) -> SessionView:
        """Drop what lies between the first `sink_count` and the last `recent_count` tokens. See `drop`."""
        session = self._ledger.find(tenant, session_id)
        dropped = ranges.sinks_and_recent(
            session.token_count, sink_count=sink_count, recent_count=recent_count
        )
        return await self.drop(tenant, session_id, generation, dropped)

    async def keep_first(
        self, tenant: str, session_id: str, generation: int | None, token_count: int
    ) -> SessionView:
        """Drop every token at or after `token_count`. See `drop`."""
        session = self._ledger.find(tenant, session_id)
        session.check_range(token_count, session.token_count)
        return await self.drop(tenant, session_id, generation, ((token_count, session.token_count),))

    async def drop(
        self,
        tenant: str,
        session_id: str,
        generation: int | None,
        dropped: Ranges,
        furthest: ranges.Range | None = None,
    ) -> SessionView:
        """Drop tokens by index. A truncation that drops nothing changes nothing.

        `furthest`: the range that must lie within the session for all others to do so; `dropped` is then in
        order.

        Raises SessionNotFound, GenerationMismatch, WriteInProgress, TokenRangeOutOfBounds,
        PositionsNotRelocatable, SessionTooFragmented.
        """
        session = self._ledger.find(tenant, session_id)
        self._check_change(session, generation)
        # Generation and writer are checked first: a range error of an old view would mislead.
        for begin, end in dropped if furthest is None else (furthest,):
            session.check_range(begin, end)
        # Sorted and disjoint already where `furthest` is given, so that thousands of ranges are not sorted
        # again.
        indexes = ranges.normalise(list(dropped)) if furthest is None else dropped
        self._check_relocatable(session, indexes)
        kept = ranges.subtract(session.live, ranges.select_all(session.live, indexes))
        # Each range is a step of every later look: their number is bounded.
        self._check_fragments(session, kept, session.log_end)
        self._metadata.check(is_growing=False)
        self._ledger.touched(session, self._state.clock.now_ns())
        # A drop of nothing changes no generation.
        if kept != session.live:
            lost_count = session.token_count - ranges.count(kept)
            dead = self._ledger.truncated(session, kept)
            self._state.journal.happened(
                session,
                Event.TRUNCATED,
                detail="by request",
                token_count=lost_count,
                dropped=[index for begin_end in indexes for index in begin_end],
            )
            self._ledger.visited(session)
            self._state.dropped(session)
            await self._departures.write_down([session], dead=dead)
        return session.view()

    async def fork(
        self,
        tenant: str,
        session_id: str,
        new_id: str,
        generation: int | None,
        *,
        token_count: int | None,
        expiration: Expiration | None,
        replaces: int | None = None,
        is_rewrite: bool = False,
        former_count: int = 0,
        is_quiet: bool = False,
        pace: Pace = STEP_BY_STEP,
    ) -> SessionView:
        """Create a session that shares the source's first tokens, which are made durable first.

        Long work is done at `pace`, and changes nothing that a caller sees: the fork is of the source as
        that is at the end. `replaces`: it takes the place of the session of that id, which is at this
        generation; then `expiration` is that one's. `is_rewrite`: that one may have other tokens, and stays
        hidden as a former rendering, of which the name has `former_count` at most. `is_quiet`: the source is
        not used by this. Raises SessionNotFound, SessionAlreadyExists, GenerationMismatch, WriteInProgress,
        SessionInUse, ModelFingerprintMismatch, InvalidArgument, TokenRangeOutOfBounds, SessionTooFragmented,
        CapacityExceeded, TierFailure.
        """
        # Every refusal comes before the source is flushed for the fork.
        source, kept = self._forkable(tenant, session_id, generation, token_count)
        self._metadata.check()
        if self._replaceable(source, kept, new_id, replaces, is_rewrite=is_rewrite) is None:
            self.check_new(tenant, new_id)
        counted: Count | None = None
        gone_through: tuple[bytes, int] | None = None
        compared: tuple[bytes, int, int] | None = None
        comparable = None if is_rewrite else replaces
        # Three preparations that wait, and after each of them everything is looked at again:
        #
        #     flush          what is shared must be durable: one record lists it for two sessions
        #     compare        what takes another's place must be of the same token ids
        #     make shareable count with the kin, so that the last step costs the same for a million tokens
        while True:
            if source.durable_end < source.log_end:
                await self._flushing.flush(source)
            elif comparable is not None and compared != (source.uid, source.generation, kept):
                compared = source.uid, source.generation, kept
                await self._check_same_tokens(source, new_id, comparable, kept)
            elif gone_through != (source.uid, source.generation):
                gone_through = source.uid, source.generation
                counted = await self._make_shareable(source, ranges.select(source.live, 0, kept), pace)
            else:
                break
            # The checked state may have changed; waiting for a writer that goes on could last for ever.
            source, kept = self._forkable(tenant, session_id, generation, token_count)
        fork = self._blank(
            # This is the last look: no await follows before the fork is there.
            tenant,
            new_id,
            source.model_id,
            source.model_fingerprint,
            source.layout,
            expiration or source.expiration,
            live=ranges.select(source.live, 0, kept),
        )
        fork.segments = source.segments_of(fork.live)
        # Positions behind the last kept token are the fork's own, also where its last segment has the
        # source's rows there: see `pieces`. Behind a gap its tokens would have no keys.
        fork.log_end = fork.live[-1][1] if fork.live else 0
        fork.recorded_end = fork.durable_end = fork.log_end
        fork.path, fork.copy_path, fork.copies = source.path, source.copy_path, source.copies
        fork.salt, fork.labels = source.salt, source.labels
        fork.contents = contents_within(source.contents, 0, fork.whole_token_count)
        # The counts were made while others had their turns, and hold only if the kin did not change since.
        if counted is not None:
            fork.residence.take_count(counted)
            if len(fork.segments) == len(source.segments):
                source.residence.take_count(counted)
        self._check_fragments(source, fork.live, fork.log_end)
        replaced = self._replaceable(source, kept, new_id, replaces, is_rewrite=is_rewrite)
        # A shared segment grows no more: both logs go on behind it.
        self._ledger.closed(fork.segments)
        if not is_quiet:
            # The access counts for the source: a session that is forked is in use.
            self._ledger.touched(source, self._state.clock.now_ns())
        if replaced is not None:
            return await self._take_place(replaced, fork, source, former_count if is_rewrite else None)
        return await self._admit(fork, source, is_quiet=is_quiet)

    def _replaceable(
        self, source: Session, kept: int, session_id: str, generation: int | None, *, is_rewrite: bool
    ) -> Session | None:
        """The session whose place a fork of the source's first `kept` tokens may take. Raises as `fork`.

        None where it is to take nobody's: no generation is named.
        """
        if generation is None:
            return None
        replaced = self._ledger.find(source.tenant, session_id)
        self._check_change(replaced, generation)
        replaced.check_fingerprint(source.model_fingerprint)
        # Each of these would let the new session answer for tokens that are not its own.
        if replaced is source:
            problem = "is the source itself"
        elif replaced.salt != source.salt:
            problem = "has another salt than the source"
        elif replaced.withheld:
            problem = "has tokens on a path that is lost"
        else:
            problem = "" if is_rewrite else _differs(source, replaced, kept)
        if problem:
            raise InvalidArgument(field="session_id", problem=problem)
        # A reader uses the session, or a hint said that it stays.
        if not replaced.is_idle or self._ledger.placement.is_awaited(replaced.uid):
            raise SessionInUse(session=replaced.name)
        return replaced

    async def _check_same_tokens(
        self, source: Session, session_id: str, generation: int, token_count: int
    ) -> None:
        """Compare the first token ids of two sessions. Raises InvalidArgument, what a stream raises."""
        # Keys cannot tell, since they are made with the layout, in which the two differ.
        own = await self._token_ids(source, source.session_id, source.generation, token_count)
        theirs = await self._token_ids(source, session_id, generation, token_count)
        if own != theirs:
            differing = next(i for i, pair in enumerate(zip(own, theirs, strict=True)) if pair[0] != pair[1])
            problem = f"has other token ids than the source, from token {differing // TOKEN_BYTES} on"
            raise InvalidArgument(field="session_id", problem=problem)

    async def _token_ids(self, like: Session, session_id: str, generation: int, token_count: int) -> bytes:
        """The first token ids of a session of this one's tenant and model. The read counts as no access."""
        request = ReadRequest(
            like.tenant, session_id, like.model_fingerprint, generation, 0, token_count, is_quiet=True
        )
        async with self._leases.stream(request, ranges_of((TOKENS,))) as (_, _, rows):
            return b"".join([bytes(item.data) async for item in rows])

    async def _take_place(
        self, replaced: Session, fork: Session, source: Session, former_count: int | None
    ) -> SessionView:
        # The times, pins, copies and labels belong to the name, and go on. Only the rows are others.
        fork.create_time_ns, fork.access_time_ns = replaced.create_time_ns, replaced.access_time_ns
        fork.expiration, fork.expire_time_ns = replaced.expiration, replaced.expire_time_ns
        fork.is_pinned, fork.copies, fork.heat = replaced.is_pinned, replaced.copies, replaced.heat
        fork.labels = replaced.labels
        # A condition on the replaced session's generation must fail from here on.
        fork.generation = replaced.generation + 1
        # `why-miss` so tells an edit ahead of its turn from a cut, which its turn has made.
        how = "replaced" if former_count is None else f"replaced by an edit of {fork.token_count} tokens"
        self._state.journal.happened(replaced, Event.DELETED, detail=how, token_count=replaced.token_count)
        gone, dead = self._ledger.replaced(replaced, fork, source, former_count=former_count)
        self._heard_of(fork, source)
        changed = [fork] if replaced.is_gone else [fork, replaced]
        # The fork stays where this fails: its rows are durable, and its record is owed or there.
        await self._departures.write_down(changed, gone=gone, dead=dead)
        return fork.view()

    def _forkable(
        self, tenant: str, session_id: str, generation: int | None, token_count: int | None
    ) -> tuple[Session, int]:
        """The session that is to be forked, and how many of its tokens the fork keeps. Raises as `fork`."""
        source = self._ledger.find(tenant, session_id)
        self._check_change(source, generation)
        kept = source.token_count if token_count is None else token_count
        source.check_range(0, kept)
        return source, kept

    async def _make_shareable(self, source: Session, positions: Ranges, pace: Pace) -> Count | None:
        """Count the segments at these positions with the source's kin, so that a later listing is cheap.

        Returns what they take; None where nothing is to count, and for a source that is gone meanwhile.
        """
        segments = source.segments_of(positions)
        for begin in range(0, len(segments), SEGMENTS_PER_LOOK):
            self._ledger.shared(source, segments[begin : begin + SEGMENTS_PER_LOOK])
            # The pace decides about rests: short sessions are forked without one.
            if pace.is_over:
                await pace.rest()
                if source.is_gone:
                    return None
        kin = source.residence.kin
        if kin is None:
            return None
        counted = Count(kin)
        for begin in range(0, len(segments), SEGMENTS_PER_LOOK):
            counted.add(segments[begin : begin + SEGMENTS_PER_LOOK])
            if pace.is_over:
                await pace.rest()
        return counted

    async def flush(self, tenant: str, session_id: str) -> SessionView:
        """Make what is committed durable. Raises SessionNotFound, CapacityExceeded, TierFailure."""
        session = self._ledger.find(tenant, session_id)
        self._state.journal.did(Call.FLUSH, session)
        await self._flushing.flush(session)
        return session.view()

    async def demote(self, tenant: str, session_id: str) -> SessionView:
        """Flush, and drop from DRAM what nobody holds.

        Raises SessionNotFound, CapacityExceeded, TierFailure.
        """
        session = self._ledger.find(tenant, session_id)
        self._state.journal.did(Call.DEMOTE, session)
        await self._flushing.demote(session)
        return session.view()

    def check_delete(self, tenant: str, session_id: str, generation: int | None) -> Session:
        """The session that may be deleted. Raises as `delete`."""
        session = self._ledger.find(tenant, session_id)
        self._check_change(session, generation)
        self._metadata.check(is_growing=False)
        return session

    async def delete(self, tenant: str, session_id: str, generation: int | None) -> None:
        """Delete a session. Raises SessionNotFound, GenerationMismatch, WriteInProgress, TierFailure."""
        session = self.check_delete(tenant, session_id, generation)
        self._state.seen.deleted_session_count += 1
        # The journal is told while the session is still there.
        self._ended(session, Event.DELETED)
        await self._departures.remove([session])

    async def evict(self, tenant: str, session_id: str) -> None:
        """Give up a session, pinned or not. Raises SessionNotFound, WriteInProgress, TierFailure."""
        session = self._ledger.find(tenant, session_id)
        self._check_change(session, None)
        await self._ssd_room.expel(session, "an operator's request")

    async def expire_due(self) -> None:
        """Remove the sessions whose time has come, a few at a time; a writer is waited for.

        Each few are one commit, and the next ones wait for it: others have their turn meanwhile.
        """
        now_ns = self._state.clock.now_ns()
        writing: list[Session] = []
        try:
            while due := self._ledger.due(now_ns, limit=SESSIONS_PER_COMMIT):
                # A writer's reservation keeps an expired session until it ends, or the writer's deadline
                # does.
                writing += [session for session in due if session.is_writing]
                gone = [session for session in due if not session.is_writing]
                self._state.counters.expired_session_count += len(gone)
                for session in gone:
                    self._ended(session, Event.EXPIRED)
                await self._departures.remove(gone)
        # The sessions of writers are told again at the next call, whatever went wrong here.
        finally:
            for session in writing:
                self._ledger.still_due(session, now_ns)

    async def save_access_times(self, *, is_last: bool = False) -> None:
        """Write down accesses since the last call, so that sliding expiry survives a restart.

        `is_last`: the server ends, and may use up the room for records. Raises CapacityExceeded, TierFailure.
        """
        # Only the accesses of now are saved, once each: sessions that are used all the while would keep this
        # call for ever, and delay the deadlines behind it.
        left_count = self._ledger.unsaved_access_count
        while some := self._ledger.unsaved_accesses(
            limit=min(left_count, SESSIONS_PER_COMMIT), part_limit=PARTS_PER_COMMIT
        ):
            left_count -= len(some)
            self._metadata.check(is_growing=not is_last)
            records = [record_of(session) for session in some]
            # The accesses are marked before the wait: an access during it is a new one.
            self._ledger.saved(some)
            try:
                await self._metadata.commit(Changes(sessions=records), is_durable=False)
            except TierFailure:
                self._ledger.unsaved(some)
                raise
            await asyncio.sleep(0)

    async def let_sleep(self) -> None:
        """Let sessions be dormant that nobody has used for long, a few at a time, so many a call."""
        for _ in range(ASLEEP_A_CALL // ASLEEP_AT_ONCE):
            if not self._ledger.sleep.is_any_drowsy:
                return
            for session in self._ledger.sleep.drowsy(limit=ASLEEP_AT_ONCE):
                # Keys are left out: they are found by their segments all the while.
                segments = [segment_record_of(self._ledger, s)._replace(keys=()) for s in session.segments]
                kept = self._metadata.kept
                self._ledger.sleep.fell_asleep(
                    session, kept(record_of(session)), [kept(each) for each in segments]
                )
            await asyncio.sleep(0)

    def check_new(self, tenant: str, session_id: str) -> None:
        """Raise TooManyRequests, SessionAlreadyExists where no session of this name may begin."""
        if session_id.startswith(HIDDEN):
            return
        limit = self._state.limits.session_count
        names = self._ledger.names
        # Hidden ones stay for an hour, and nobody could do anything about them.
        count, own = self._ledger.session_count - names.hidden_count, names.own_count(tenant)
        if self._state.limits.bound(limit).is_reached(count, own):
            # The limit counts sessions. Blocks have a limit of their own.
            raise TooManyRequests(what="sessions", limit=limit)
        known = self._ledger.named(tenant, session_id)
        if known and not known.has_expired(self._state.clock.now_ns()):
            raise SessionAlreadyExists(session=known.name)

    # -- a fleet of hosts ----------------------------------------------------------------------------

    def retire(self, session: Session, until_ns: int) -> Ended:
        """Take its name from a session that goes on at another host; it ends at `until_ns` at the latest.

        What it was before edits ends, and is returned. The record follows with `renamed`.
        """
        ended = self._departures.end(self._ledger.with_formers(session)[1:])
        self._state.journal.happened(session, Event.MOVED, detail="another host took it over")
        self._ledger.renamed(session, GUESTS + session.uid.hex())
        session.expiration = Expiration(None, min(session.expire_time_ns, until_ns))
        if session.is_pinned:
            self._ledger.pinned(session, is_pinned=False)
        self._ledger.touched(session, self._state.clock.now_ns())
        return ended

    def restore(self, guest: Session, session_id: str, expiration: Expiration, *, is_pinned: bool) -> None:
        """Give a guest its name again, and what it had before."""
        self._ledger.renamed(guest, session_id)
        guest.expiration = expiration
        if is_pinned:
            self._ledger.pinned(guest, is_pinned=True)
        self._ledger.touched(guest, self._state.clock.now_ns())

    def end_soon(self, guest: Session) -> None:
        """A guest ends with the next ones whose time has come."""
        guest.expiration = Expiration(None, self._state.clock.now_ns())
        self._ledger.touched(guest, self._state.clock.now_ns())

    async def renamed(self, session: Session, ended: Ended = NOTHING_ENDED) -> None:
        """Write down that a session has another name, and what ended with that. Raises TierFailure."""
        changed = [] if session.is_gone else [session]
        if changed or ended.sessions:
            await self._departures.write_down(changed, gone=ended.sessions, dead=ended.segments)

    def lookup(self, tenant: str, session_id: str, fingerprint: bytes) -> Lookup:
        """The part of a session that could be restored, without side effects. Never raises."""
        # Engines ask for hundreds of names: no exception leaves this call.
        try:
            session = self._ledger.find(tenant, session_id)
            session.check_fingerprint(fingerprint)
        except CacheError as error:
            self._state.journal.missed(LOOKUP, tenant, session_id, error)
            return Lookup(session_id, reason=error.reason)
        # Tokens on a lost path are no empty session: they may come back.
        reason = "" if session.live else Event.DEVICE_LOST.name if session.withheld else "EMPTY"
        in_dram = session.memory_token_count
        self._state.journal.found(
            LOOKUP,
            session,
            tokens=session.token_count,
            dram_tokens=in_dram,
        )
        return Lookup(
            session_id,
            reason,
            session.layout,
            session.generation,
            session.token_count,
            session.expire_time_ns,
            in_dram,
            session.is_writing and not session.live,
        )

    # -- checks and parts ----------------------------------------------------------------------------

    def _terms(self, session: Session) -> dict[str, Fact]:
        """The time for which the session is kept, and its pin, as recordings have them."""
        ttl_ns = session.expiration.ttl_ns
        if ttl_ns is None:
            ttl_ns = session.expire_time_ns - self._state.clock.now_ns()
        return {"ttl_ms": ttl_ns // 10**6, "is_pinned": session.is_pinned}

    def _ended(self, session: Session, event: Event) -> None:
        self._state.journal.happened(session, event, token_count=session.token_count)

    def _check_copies(self, copies: int) -> None:
        path_count = self._ledger.below.path_count
        if copies > path_count:
            problem = f"{copies} copies need {copies} SSD directories, and the store has {path_count}"
            raise InvalidArgument(field="copies", problem=problem)

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
        """A session over a limit that was lowered since must not get more fragments."""
        limit, count = self._state.limits.fragment_count, ranges.fragment_count(live, log_end)
        if count > max(limit, ranges.fragment_count(session.live, session.log_end)):
            raise SessionTooFragmented(session=session.name, fragment_count=count, limit=limit)

    def _blank(
        self,
        tenant: str,
        session_id: str,
        model_id: str,
        fingerprint: bytes,
        layout: SegmentLayout,
        expiration: Expiration,
        live: Ranges = (),
        uid: bytes = b"",
    ) -> Session:
        uid, now_ns = uid or uuid.uuid4().bytes, self._state.clock.now_ns()
        return Session(
            uid=uid,
            tenant=tenant,
            session_id=session_id or uid.hex(),
            model_id=model_id,
            model_fingerprint=fingerprint,
            layout=layout,
            expiration=expiration,
            create_time_ns=now_ns,
            access_time_ns=now_ns,
            expire_time_ns=expiration.after_access(now_ns),
            # The first generation is random: a condition on a session that is gone would else hold of the
            # next one of its name after as many changes.
            generation=1 + secrets.randbits(FIRST_GENERATION_BITS),
            live=live,
        )

    async def _admit(
        self, session: Session, source: Session | None = None, *, is_quiet: bool = False
    ) -> SessionView:
        # The name is checked once more: a fork has waited for flushes since the first check.
        self.check_new(session.tenant, session.session_id)
        # The old session of this name has expired and is not removed yet: one commit replaces it by the new
        # one.
        expired = self._ledger.named(session.tenant, session.session_id)
        if expired:
            self._ended(expired, Event.EXPIRED)
        gone, dead = self._departures.end([expired] if expired else [])
        self._ledger.opened(session)
        self._heard_of(session, source)
        if source:
            self._ledger.forked(source, session, is_quiet=is_quiet)
        try:
            await self._departures.write_down([session], gone=gone, dead=dead)
        except TierFailure:
            # The caller is told of the failure: then there must be no session either.
            if not session.is_gone:
                self._departures.strand(self._ledger.ended(session))
                # The record may be there, or be owed: it goes when changes are taken again.
                with suppress(TierFailure):
                    changes = Changes(deleted_session_uids=[session.uid])
                    await self._metadata.commit(changes, is_durable=False)
            raise
        return session.view()

    def _heard_of(self, session: Session, source: Session | None) -> None:
        terms = self._terms(session)
        if source is None:
            self._state.journal.did(Call.OPEN, session, **terms)
        else:
            count = session.token_count
            self._state.journal.did(Call.FORK, session, source=source.name, tokens=count, **terms)


def _differs(source: Session, replaced: Session, kept: int) -> str:
    """Why a session is not of the source's first `kept` tokens, but for their ids; empty where it may be."""
    # Only the tokens that the fork keeps need to be whole.
    whole_count = min(source.whole_token_count, kept)
    if replaced.token_count != kept:
        return f"has {replaced.token_count} tokens, and {kept} are to take their place"
    if replaced.whole_token_count < whole_count:
        return "was computed with tokens that were dropped, and the source was not"
    theirs, own = (contents_within(each.contents, 0, whole_count) for each in (replaced, source))
    return "" if theirs == own else "has other contents than the source"
