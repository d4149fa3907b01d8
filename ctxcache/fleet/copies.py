"""Copies: this host's copies of sessions, as `Claims` knows them. Owned by the event loop.

    retire     another host continues the session: the copy is a guest, without a name
    restore    nobody took it over: the guest has its name again
    land       a session comes here: an empty copy is made, and its rows arrive

Worst case: an arrival breaks; the copy is as long as what has come.
"""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ctxcache.cache import Cache
from ctxcache.cache.eviction import NOTHING_ENDED, Ended
from ctxcache.core.fleet.claims import Busy, Left
from ctxcache.core.fleet.heads import Name
from ctxcache.core.fleet.lateness import Lateness
from ctxcache.core.fleet.register import NoAnswer
from ctxcache.core.ledger.session import Expiration, Session
from ctxcache.core.ledger.work import Work
from ctxcache.errors import CacheError, InvalidArgument
from ctxcache.fleet.arrival import Arrival, bring
from ctxcache.fleet.peers import GUEST_TTL_NS, Former
from ctxcache.fleet.sources import Offer, Source, Spare
from ctxcache.service import convert, validate
from ctxcache.service.admission import Admission
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.v1 import peer_pb2, session_pb2

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 0.1
KNOCK_S = 2.0
"""How long a store is asked for its rows that has no connection free."""
SPARED_AT_ONCE = 2
"""Objects that are read beside late stores at a time; each is in memory as a whole."""
NAME_OF_PART = re.compile("[0-9a-f]{32}")


class HostCopies:
    """See `core.fleet.claims.Copies`."""

    def __init__(
        self,
        cache: Cache,
        threads: ThreadPoolExecutor,
        turns: Turns,
        spawn: Callable[[Coroutine[Any, Any, object]], None],
        *,
        calls: Admission,
        arriving: asyncio.Semaphore,
        parts_of: Callable[[Session], Iterable[peer_pb2.SharedPart]],
        arrived: Callable[[Name, str, Offer, Arrival], None],
        stored: Callable[[Name, Offer, int, Spare | None], Source],
        spare: Callable[[Name, Offer, int], Awaitable[Spare | None]],
    ) -> None:
        """`parts_of`: what the bucket has of a session. `arrived` hears of each session that has come.

        `stored`: what the bucket has of an offered session behind so many tokens. `spare`: the first object
        of that, read and verified.
        """
        self._stored, self._spare, self._sparing = stored, spare, asyncio.Semaphore(SPARED_AT_ONCE)
        self._lateness = Lateness()
        self._cache, self._threads, self._turns, self._spawn = cache, threads, turns, spawn
        self._calls, self._arriving = calls, arriving
        self._parts_of, self._arrived = parts_of, arrived
        self._former: dict[str, Former] = {}
        """By a guest's uid, what it had before; the oldest first."""
        self._guest_of: dict[Name, str] = {}
        """The guest that a session has left here."""

    def session(self, name: Name) -> Session | None:
        """A session that has not expired, to be looked at."""
        session = self._cache.ledger.glance(*name)
        now_ns = self._cache.state.clock.now_ns()
        return None if session is None or session.has_expired(now_ns) else session

    def _guest_of_uid(self, uid: str) -> Session | None:
        session = self._cache.ledger.get(bytes.fromhex(uid))
        return session if session is not None and session.is_guest else None

    def uid(self, name: Name) -> str | None:
        """See Copies."""
        session = self.session(name)
        return None if session is None else session.uid.hex()

    def is_written(self, name: Name) -> bool:
        """See Copies."""
        session = self.session(name)
        return session is not None and session.is_writing

    def has_guest(self, name: Name, uid: str) -> bool:
        """See Copies."""
        guest = self._guest_of_uid(uid)
        return guest is not None and guest.tenant == name.tenant

    def retire(self, name: Name) -> None:
        """See Copies."""
        session = self._cache.ledger.named(*name)
        if session is None or self.session(name) is None:
            return
        # A writer learns at its next commit. It may still write to its slots: others get them later.
        for reservation in list(self._cache.appends.reservations()):
            if reservation.session is session:
                self._cache.appends.release(reservation, is_abandoned=True)
        self._end_guest(name)
        self._guest_of[name] = session.uid.hex()
        self._former[session.uid.hex()] = self._was(session)
        ended = self._cache.sessions.retire(session, self._cache.state.clock.now_ns() + GUEST_TTL_NS)
        self._spawn(self._write_down(session, ended))

    def _was(self, session: Session) -> Former:
        return Former.of(session, self._parts_of(session))

    def restore(self, name: Name, uid: str) -> None:
        """See Copies."""
        guest = self._guest_of_uid(uid)
        if guest is None:
            return
        former = self._former.pop(uid, None)
        expiration = former.expiration if former else self._cache.sessions.default_expiration
        is_pinned = former is not None and former.is_pinned
        self._cache.sessions.restore(guest, name.session_id, expiration, is_pinned=is_pinned)
        self._spawn(self._write_down(guest))

    # A session that comes and goes leaves one guest, not one each time: they would be as large as all of it.
    def _end_guest(self, name: Name) -> None:
        uid = self._guest_of.pop(name, "")
        guest = self._guest_of_uid(uid) if uid else None
        if guest is not None:
            self._cache.sessions.end_soon(guest)

    def former(self, uid: str) -> tuple[Session, Former]:
        """A guest, and what it was. Raises Left."""
        guest = self._guest_of_uid(uid)
        if guest is None:
            raise Left
        return guest, self._former.get(uid) or self._was(guest)

    @property
    def guest_count(self) -> int:
        """Guests since the start, as far as they are known."""
        return len(self._former)

    def forget_ended(self) -> None:
        """Forget what guests were that have ended."""
        with Work():
            ended = [uid for uid in self._former if self._guest_of_uid(uid) is None]
        for uid in ended:
            self._former.pop(uid, None)
        self._guest_of = {name: uid for name, uid in self._guest_of.items() if uid in self._former}

    async def has_place(self, name: Name, offer: object) -> bool:
        """See Copies."""
        assert isinstance(offer, Offer)  # noqa: S101  what `Asking` returned
        try:
            await self._check_place(name, offer)
        except (CacheError, ValueError) as error:
            log.warning("session_has_no_place error=%s", error)
            return False
        return True

    async def _check_place(self, name: Name, offer: Offer) -> None:
        """Register the model that the other store describes; raise what speaks against its session here."""
        model, guest = offer.model, offer.told
        if guest.tenant != name.tenant:
            raise InvalidArgument(field="session.tenant", problem="is another one's")
        validate.guest_id(guest.name, "session.name")
        validate.within(guest.token_count, 0, 2**62, "session.token_count")
        validate.within(guest.whole_token_count, 0, guest.token_count, "session.whole_token_count")
        validate.within(offer.tcp_port, 0, 65535, "ticket.tcp_port")
        validate.within(guest.copies, 0, 2, "session.copies")
        if guest.contents:
            validate.contents(guest.contents, 0, "session.contents")
        self._expiration(offer)
        _described(guest)
        _check_parts(offer)
        if self.uid(name) is None:
            self._cache.sessions.check_new(*name)
        pace = LoopSlice(self._turns)
        spec = await pace.work(convert.model_spec(model))
        probe = convert.model_probe(model)
        registered = await self._cache.models.register(name.tenant, spec, probe, pace=pace)
        if registered.fingerprint != guest.model_fingerprint:
            raise InvalidArgument(field="session.model_fingerprint", problem="is not that of its model")

    async def land(self, name: Name, uid: str, offer: object) -> bool:
        """See Copies."""
        assert isinstance(offer, Offer)  # noqa: S101  what `Asking` returned
        guest = offer.told
        try:
            async with self._arriving:
                await self._make_room_for(name, uid, offer)
                arrival = await self._brought(name, offer)
            self._arrived(name, uid, offer, arrival)
            if arrival.token_count >= guest.token_count:
                self._end_guest(name)
        except CacheError as error:
            log.warning("session_not_arrived error=%s", error)
        return self.uid(name) == uid

    # The other store has as many connections as it may, and one of them ends soon. The head names us by now:
    # nobody else has a way to these rows.
    async def _brought(self, name: Name, offer: Offer) -> Arrival:
        begun, run = time.monotonic(), partial(asyncio.get_running_loop().run_in_executor, self._threads)
        while True:
            source = offer.source()
            arrival = Arrival(self._cache, self._calls, source, name.session_id)
            late = asyncio.get_running_loop().create_task(self._spared(name, offer, arrival))
            try:
                await bring(arrival, run)
            finally:
                late.cancel()
            (spare,) = await asyncio.gather(late, return_exceptions=True)
            for seconds in arrival.stretches_s if offer.tcp_port else ():
                self._lateness.took(seconds)
            if _has_spare(offer) and arrival.token_count < offer.told.token_count:
                return await self._rest(name, offer, arrival, spare if isinstance(spare, Spare) else None)
            if source.was_let_in or offer.again is None or time.monotonic() > begun + KNOCK_S:
                return arrival
            await asyncio.sleep(LOOK_INTERVAL_S)
            try:
                offer = await offer.again()
            except (Busy, Left, NoAnswer):
                return arrival

    # The first of both that has come and is verified is taken, and the other one is ended.
    async def _spared(self, name: Name, offer: Offer, arrival: Arrival) -> Spare | None:
        """Read an object beside a store whose rows are late, and end that where the object is there first."""
        if not _has_spare(offer):
            return None
        count = -1
        while count != arrival.token_count:
            count = arrival.token_count
            await asyncio.sleep(self._lateness.late_s)
        async with self._sparing:
            spare = await self._spare(name, offer, arrival.token_count)
        if spare is not None and arrival.token_count < spare.part.token_end:
            log.info("session_store_late tokens=%d", arrival.token_count)
            arrival.end()
        return spare

    async def _rest(self, name: Name, offer: Offer, arrival: Arrival, spare: Spare | None) -> Arrival:
        """What another store did not bring comes out of the bucket."""
        source = self._stored(name, offer, arrival.token_count, spare)
        rest = Arrival(self._cache, self._calls, source, name.session_id, begin=arrival.token_count)
        await bring(rest, partial(asyncio.get_running_loop().run_in_executor, self._threads))
        rest.size_bytes += arrival.size_bytes
        return rest

    async def _make_room_for(self, name: Name, uid: str, offer: Offer) -> None:
        """An empty session of that uid, as the other store describes it."""
        guest = offer.told
        await self._cache.sessions.create(
            name.tenant,
            name.session_id,
            model_id=validate.model_id(offer.model.name, "model.name"),
            expiration=self._expiration(offer),
            is_pinned=guest.is_pinned,
            copies=min(guest.copies, self._cache.ledger.below.path_count),
            uid=bytes.fromhex(uid),
            **_described(guest),
        )

    def _expiration(self, offer: Offer) -> Expiration:
        """The expiry that a session had at the other store. Raises InvalidArgument."""
        remaining_ns, now_ns = offer.remaining.ToNanoseconds(), self._cache.state.clock.now_ns()
        validate.within(remaining_ns, 0, validate.LATEST_NS, "remaining")
        has_ttl = offer.told.HasField("ttl")
        ttl_ns = validate.sliding(offer.told.ttl).ttl_ns if has_ttl else None
        return Expiration(ttl_ns, min(now_ns + remaining_ns, validate.LATEST_NS))

    async def _write_down(self, session: Session, ended: Ended = NOTHING_ENDED) -> None:
        try:
            await self._cache.sessions.renamed(session, ended)
        except CacheError as error:
            # The record is owed. After a crash before it is written, the head says whose the session is.
            log.warning("guest_not_recorded error=%s", error)


def _has_spare(offer: Offer) -> bool:
    """Whether the bucket has rows of what another store offers, which lie where they do there."""
    is_from_store = offer.tcp_port > 0
    return is_from_store and bool(offer.parts) and offer.told.whole_token_count == offer.told.token_count


def _described(guest: session_pb2.Session) -> dict[str, Any]:
    """The layout, salt and labels of a session that comes. Raises InvalidArgument."""
    return {
        "layout": validate.stream_ranges(guest.layout, "session.layout"),
        "salt": validate.salt(guest.salt, "session.salt"),
        "labels": validate.labels(guest.labels, "session.labels"),
    }


def _check_parts(offer: Offer) -> None:
    """Raise InvalidArgument unless what the bucket has is rows of the session, one behind the other."""
    at, count, told = 0, 0, offer.told
    for part in offer.parts:
        is_right = at <= part.token_begin < part.token_end <= told.token_count
        is_within = part.token_begin >= told.whole_token_count or part.token_end <= told.whole_token_count
        if not (is_right and is_within and NAME_OF_PART.fullmatch(part.name)):
            raise InvalidArgument(field="parts", problem="are not the session's")
        at, count = part.token_end, count + part.token_end - part.token_begin
    if not offer.tcp_port and count != told.token_count:
        raise InvalidArgument(field="parts", problem="are not all of the session")
