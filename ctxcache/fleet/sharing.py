"""Sharing: rows of sessions in the bucket, so that they outlive their host. Owned by the event loop.

    a turn has ended, or SHARED was asked for
        │ flush                        what is shared is durable here: its positions never change
        │ objects of rows              put under names that are drawn once
        │ one object that names them   `SharedSession`
        ▼
    the head names that one            the change that decides; then SHARED is acknowledged
        └── what no head names any more is removed

Nothing is removed that a head may name: whoever removes has just replaced the head that named it. Rows are
read as a peer reads them. Worst case: the bucket does not answer; what waits are names, and nothing is held.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

from google.protobuf.message import DecodeError
from typing_extensions import Buffer

from ctxcache.cache import Cache
from ctxcache.core import ranges
from ctxcache.core.fleet.claims import Claims, Left, Recent, Verdict
from ctxcache.core.fleet.heads import ForeignObject, Name, Secret, node_path
from ctxcache.core.fleet.register import NoAnswer
from ctxcache.core.fleet.shared import Part, indexes, landed, prefix, still_right, to_put
from ctxcache.core.fleet.tenure import Tenure
from ctxcache.core.ledger.session import GUESTS, Session
from ctxcache.core.ledger.work import at_work
from ctxcache.core.limits import Pinner
from ctxcache.core.placement.prices import Bucket, BucketPrices, Recomputation
from ctxcache.core.ranges import Range, Ranges
from ctxcache.errors import CacheError, SessionMoved, SessionNotFound, Unavailable
from ctxcache.fleet.sources import Offer, Spare, StoredSource, is_whole, told_model
from ctxcache.identity import ArenaGrant
from ctxcache.service import convert
from ctxcache.service.admission import Admission
from ctxcache.service.bulk_connection import ReadTransfer, chunks
from ctxcache.service.callers import Caller
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.service.whereabouts import ALONE
from ctxcache.storage.objects import Objects
from ctxcache.v1 import peer_pb2, session_pb2
from ctxcache.wire.frame_buffer import FrameWriter
from ctxcache.wire.framed_socket import FrameError, SocketFrameKind

log = logging.getLogger(__name__)
LEAST_BYTES, MOST_BYTES = 4 << 20, 16 << 20
"""A smaller object is put again with what comes behind it; a larger one is not made."""
OBJECT_LIMIT_BYTES = 1 << 26
"""More than any object of rows has: a message for each chunk, and a row that may be large."""
INDEX_LIMIT_BYTES = 1 << 24
SECOND_NS = 10**9
QUIET_S = 1.0
"""How long a turn has to be over before its rows are shared unasked."""
AGAIN_S = 5.0
"""After so long what could not be shared is tried again."""
LIFE_INTERVAL_S = 60.0
AT_ONCE, PUT_AT_ONCE = 2, 4
LOOKS = 3
THREAD_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Known:
    """Objects of the bucket that hold rows of a copy, by positions of the copy's log.

    `index` is the object that names them, empty for none: they are there as long as the head names that one.
    """

    parts: list[Part]
    index: str = ""
    end: int = 0
    """Where those ended that were there before, while there are none."""
    is_inherited: bool = False
    """Whether they came with the session: the head named their index when it did."""
    expire_time_ns: int = 0
    """When the session ends, as the bucket was told."""
    litter: set[str] = field(default_factory=set)
    """Paths that no head names once the next one is written."""


@dataclass(frozen=True, slots=True)
class Price:
    """What computing costs where the bucket has not got it: an engine's rate, and its US dollars an hour."""

    prefill_tokens_per_s: float
    engine_hour: float

    def is_worth_put(self, session: Session, new_count: int, chance: float, held_s: float) -> bool:
        """Whether the session, of which so many tokens are new to the bucket, is to be there for so long."""
        token_bytes = session.layout.token_bytes
        computing = Recomputation(self.prefill_tokens_per_s, token_bytes, self.engine_hour)
        size_bytes = session.token_count * token_bytes
        bucket = Bucket(BucketPrices(), computing)
        return bucket.is_worth_put(size_bytes, chance, held_s, new_count * token_bytes)


class Sharing:
    """Puts rows of this host's sessions into the bucket, and finds those of others."""

    def __init__(
        self,
        cache: Cache,
        objects: Objects,
        secret: Secret,
        claims: Claims,
        settle: Callable[[Name], Awaitable[Verdict]],
        threads: Executor,
        spawn: Callable[[Coroutine[Any, Any, object]], None],
        *,
        turns: Turns,
        bucket: str,
        is_asked_always: bool,
        price: Price | None,
        bytes_per_s: int,
    ) -> None:
        """`is_asked_always`: every session is shared behind its turns, with a `price` where it is worth it.

        `bytes_per_s`: 0 for no bound.
        """
        self._cache, self._objects, self._secret, self._claims = cache, objects, secret, claims
        self._settle, self._threads, self._spawn = settle, threads, spawn
        self._turns_of_loop, self._bucket, self._bytes_per_s = turns, bucket, bytes_per_s
        self._is_asked_always, self._price = is_asked_always, price
        self._known = Recent[str, _Known]()
        """By a copy's uid."""
        self._due: dict[Name, float] = {}
        """Sessions that are to be shared, and when."""
        self._turns: WeakValueDictionary[Name, asyncio.Lock] = WeakValueDictionary()
        self._putting = asyncio.Semaphore(PUT_AT_ONCE)
        self._calls = Admission("shares", PUT_AT_ONCE)
        self._counts = claims.counts

    # -- when ----------------------------------------------------------------------------------------

    def changed(self, session: Session, *, is_cut: bool) -> None:
        """Tokens of a session were committed here, or dropped."""
        if session.is_block or session.is_hidden:
            return
        # What the bucket has follows a drop, also where it was put there because somebody asked once.
        if self._is_asked_always or (is_cut and self._has_some(session)):
            self._due[Name(session.tenant, session.session_id)] = time.monotonic() + QUIET_S

    def _has_some(self, session: Session) -> bool:
        known = self._known.get(session.uid.hex())
        name = Name(session.tenant, session.session_id)
        return bool(known.parts or known.index if known else self._claims.shared(name))

    @property
    def waiting_count(self) -> int:
        """Sessions that are to be shared."""
        return len(self._due)

    async def run(self) -> None:
        """Share what is due, for ever; ends by cancellation."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(QUIET_S)
            now = time.monotonic()
            if now - looked > LIFE_INTERVAL_S:
                looked = now
                self._note_lives()
            due = [name for name, at in self._due.items() if at <= now]
            for begin in range(0, len(due), AT_ONCE):
                some = due[begin : begin + AT_ONCE]
                heard = await asyncio.gather(*(at_work(self._share_unasked(name)) for name in some))
                # Where the bucket is silent, all the others do not ask it again at once.
                if not all(heard):
                    break

    def _is_worth(self, session: Session) -> bool:
        """Whether to put what the bucket has not got of the session, which then stays until that expires."""
        if self._price is None:
            return True
        known = self._known.get(session.uid.hex())
        there_count = sum(part.end - part.begin for part in known.parts) if known else 0
        held_s = max(session.expire_time_ns - self._cache.state.clock.now_ns(), 0) / SECOND_NS
        chance = self._cache.placement.chance(session.uid)
        return self._price.is_worth_put(session, max(session.token_count - there_count, 0), chance, held_s)

    def _note_lives(self) -> None:
        """The bucket is told how long sessions live on that were used here, and not written."""
        for uid, known in list(self._known.items()):
            session = self._cache.ledger.names.by_uid.get(bytes.fromhex(uid))
            if session is None or session.is_hidden or not known.index or not _lives_longer(session, known):
                continue
            self._due.setdefault(Name(session.tenant, session.session_id), time.monotonic())

    async def _share_unasked(self, name: Name) -> bool:
        """Share a session that is due. False: the bucket does not answer."""
        session = self._session(name)
        if session is not None and session.is_writing:
            self._due[name] = time.monotonic() + QUIET_S
            return True
        due = self._due.get(name)
        is_all = self._is_asked_always and (session is None or self._is_worth(session))
        try:
            # The bucket hears of tokens that were dropped, also of a session that is not worth its price.
            if is_all or (session is not None and self._has_some(session)):
                await self._share_in_turn(name, is_all=is_all)
        except Unavailable as error:
            self._due[name] = time.monotonic() + AGAIN_S
            log.warning("session_not_shared error=%s", error)
            return False
        except CacheError as error:
            # It has ended, or goes on elsewhere, or is changed too often: its next turn is heard of.
            log.info("session_not_to_share error=%s", error)
        # It waits until it is shared, and on if it has changed meanwhile.
        if self._due.get(name) == due:
            self._due.pop(name, None)
        return True

    # -- what is put ---------------------------------------------------------------------------------

    async def share(self, name: Name) -> None:
        """Have the bucket, and the session's head, say what the session is now.

        Raises Unavailable, SessionMoved, SessionNotFound, and what a flush and a read raise.
        """
        await self._share_in_turn(name, is_all=True)

    async def _share_in_turn(self, name: Name, *, is_all: bool) -> None:
        """As `share`. Without `is_all` nothing behind what was shared before: what was dropped is told."""
        turn = self._turns.setdefault(name, asyncio.Lock())
        async with turn:
            try:
                for _ in range(LOOKS):
                    if await self._share(name, is_all=is_all):
                        return
            except (NoAnswer, ForeignObject, DecodeError) as error:
                self._counts.share_failures += 1
                raise Unavailable(target=self._bucket, problem=str(error)) from error
            self._counts.share_failures += 1
            raise Unavailable(target=self._bucket, problem="the session's head takes no change")

    async def _share(self, name: Name, *, is_all: bool) -> bool:
        """False: its head has changed, and what was put may be gone."""
        session = self._session(name)
        if session is None:
            raise SessionNotFound(session=f"sessions/{name.session_id}")
        await self.own(name)
        term = self._claims.term(name)
        if session.durable_end < session.log_end:
            await self._cache.flushing.flush(session)
        known = await self._known_of(name, session)
        end = session.durable_end if is_all else max((part.end for part in known.parts), default=known.end)
        live = _durable(session, end)
        right = still_right(known.parts, live)
        kept, cuts = to_put(
            right,
            live,
            token_bytes=session.layout.token_bytes,
            least_bytes=LEAST_BYTES,
            most_bytes=self._most_bytes(session),
        )
        is_told = known.index and not _lives_longer(session, known)
        if not cuts and len(right) == len(known.parts) and is_told:
            return True
        expire_time_ns = session.expire_time_ns
        for cut in cuts:
            # Each holds all of an object in memory.
            async with self._putting:
                part = await self._put(name, session, cut)
            known.litter.add(self._path(name, part.name))
            kept.append(part)
        # Of what was dropped meanwhile nothing is told, nor of what lies behind it.
        live = _durable(session, end)
        told = prefix(still_right(kept, live), live)
        before, index = self._claims.shared(name), await self._put_index(name, session, told)
        known.litter.add(self._path(name, index))
        verdict = await self._claims.share(name, session.uid.hex(), index, term)
        if verdict is Verdict.UNKNOWN:
            return False
        if verdict is not Verdict.HERE:
            raise SessionMoved(session=session.name)
        if before:
            known.litter.add(self._path(name, before))
        self._tidy(name, known, told, index)
        known.expire_time_ns = expire_time_ns
        self._counts.shares += 1
        if is_all and end == session.log_end:
            self._cache.placement.backed(session)
        return True

    def _most_bytes(self, session: Session) -> int:
        # Whoever lets it land needs room for all of an object at once, and may be as small as this store.
        pins = self._cache.appends.pins
        return max(min(MOST_BYTES, pins.limit_of(Pinner(session.tenant, None)) // 8), 1)

    async def own(self, name: Name) -> None:
        """Have a head that this host may change. Raises Unavailable, SessionMoved, NoAnswer."""
        for _ in range(LOOKS):
            match self._claims.tenure(name):
                case Tenure.OWNED:
                    return
                case Tenure.PRIVATE:
                    verdict = await self._claims.publish(name)
                case _:
                    verdict = await self._settle(name)
            if verdict is Verdict.ELSEWHERE:
                raise SessionMoved(session=f"sessions/{name.session_id}")
        raise NoAnswer("who continues the session is not known")

    async def _put(self, name: Name, session: Session, cut: Range) -> Part:
        """An object of the rows at these positions.

        Raises NoAnswer, SessionMoved, SessionNotFound, and as reads do.
        """
        if session.is_hidden:
            raise SessionMoved(session=session.name)
        request = session_pb2.ReadSessionRequest(
            name=session.name,
            model_fingerprint=session.model_fingerprint,
            range=_range(indexes(cut, session.live)),
            is_quiet=True,
        )
        transfer = ReadTransfer(self._cache, ALONE)
        await transfer.open(request, Caller("fleet", ArenaGrant(name.tenant)), self._calls)
        try:
            view = transfer.lease.view
            if view.uid != session.uid or indexes(cut, view.live) != (
                transfer.lease.begin,
                transfer.lease.end,
            ):
                raise SessionNotFound(session=session.name)
            made = secrets.token_hex(16)
            writer = FrameWriter(self._hasher(name, made))
            await self._written(transfer, writer)
        finally:
            await transfer.close()
        begun = time.monotonic()
        await self._objects.put(self._path(name, made), writer.body)
        self._counts.shared_objects += 1
        self._counts.shared_bytes += len(writer.body)
        if self._bytes_per_s:
            await asyncio.sleep(max(len(writer.body) / self._bytes_per_s - (time.monotonic() - begun), 0))
        return Part(made, *cut, len(writer.body), writer.digest)

    async def _written(self, transfer: ReadTransfer, writer: FrameWriter) -> None:
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, _write, transfer, writer, loop)
        try:
            await asyncio.shield(running)
        finally:
            # What it reads is lent to it: whoever goes away waits until it has ended.
            if not running.done():
                await asyncio.wait([running], timeout=THREAD_TIMEOUT_S)

    async def _put_index(self, name: Name, session: Session, parts: list[Part]) -> str:
        """The object that names the others; its own name."""
        live = ranges.normalise([(part.begin, part.end) for part in parts])
        view = session.view()._replace(live=live, token_count=ranges.count(live))
        told = session_pb2.Session.FromString(convert.whole_session(view, self._cache.state.clock))
        # As whoever lets it land will call it: no name that a client can ask for.
        told.name = f"sessions/{GUESTS}{session.uid.hex()}"
        model = self._cache.models.get(name.tenant, session.model_id)
        remaining_ns = max(session.expire_time_ns - self._cache.state.clock.now_ns(), 0)
        index = peer_pb2.SharedSession(
            session=told,
            model=await told_model(model, LoopSlice(self._turns_of_loop)),
            remaining=convert.duration(remaining_ns),
            parts=[_message(part, live) for part in parts],
        )
        made = secrets.token_hex(16)
        path = self._path(name, made)
        await self._objects.put(path, self._secret.signed(path, index.SerializeToString()))
        return made

    def _tidy(self, name: Name, known: _Known, told: list[Part], index: str) -> None:
        """The head names these now. What it named before, or what was put in vain, goes."""
        known.litter.update(self._path(name, part.name) for part in known.parts)
        if known.index:
            known.litter.add(self._path(name, known.index))
        named = {self._path(name, one) for one in (index, *(part.name for part in told))}
        gone = [path for path in known.litter if path not in named]
        known.parts, known.index, known.litter = told, index, set()
        if gone:
            self._spawn(self._remove(gone))

    async def _known_of(self, name: Name, session: Session) -> _Known:
        """What the bucket has of a copy. Raises NoAnswer, ForeignObject."""
        uid = session.uid.hex()
        known, index = self._inherited(name, uid), self._claims.shared(name)
        if known is not None and known.index != index:
            # A change of the head without an answer, or a deletion that was not carried out: put it all anew.
            paths = {
                self._path(name, one) for one in (*(part.name for part in known.parts), known.index) if one
            }
            end = max((part.end for part in known.parts), default=known.end)
            known = _Known([], index=index, end=end, litter=known.litter | paths)
        if known is None:
            known = _Known([])
            told = None if not index else await self._index(name, index)
            if told is not None:
                # After a start. Another copy's are put anew, and what there was goes.
                is_ours = told[0].session.uid == uid
                parts = [_part(one, one.position) for one in told[0].parts]
                known.index = index
                known.parts = parts if is_ours else []
                known.litter.update(self._path(name, part.name) for part in parts)
                known.litter.add(self._path(name, index))
        self._known.note(uid, known)
        return known

    def _inherited(self, name: Name, uid: str) -> _Known | None:
        known = self._known.get(uid)
        if known is not None and known.is_inherited:
            known.index, known.is_inherited = self._claims.shared(name), False
        return known

    # -- what is there -------------------------------------------------------------------------------

    async def stored(self, name: Name, shared: str) -> Offer:
        """See `core.fleet.claims.Peers`."""
        try:
            found = await self._index(name, shared)
        except (ForeignObject, DecodeError) as error:
            log.error("shared_session_unreadable error=%s", error)  # noqa: TRY400  the sentence says all
            raise Left from error
        if found is None:
            # The head was read a moment ago: its owner may have changed it since, and nobody else has.
            log.warning("shared_session_gone index=%s", shared)
            raise Left
        told, modified_s = found
        # Two times of the bucket: no host's clock is compared with another's.
        now_s = await self._objects.modified_s(node_path(self._claims.node))
        if now_s is None:
            raise NoAnswer("this host has no record yet")
        left_ns = told.remaining.ToNanoseconds() - int(max(now_s - modified_s, 0.0) * 1e9)
        if left_ns <= 0 or told.session.tenant != name.tenant:
            raise Left
        parts = tuple(told.parts)
        source = partial(
            StoredSource, told.session, parts, partial(self._object, name), partial(self._hasher, name)
        )
        return Offer(told.session, told.model, convert.duration(left_ns), parts, source)

    async def _index(self, name: Name, shared: str) -> tuple[peer_pb2.SharedSession, float] | None:
        """What a head names, and when it was written. Raises NoAnswer, ForeignObject, DecodeError."""
        path = self._path(name, shared)
        found = await self._objects.get(path, INDEX_LIMIT_BYTES)
        if found is None:
            return None
        body = self._secret.verified(path, bytes(memoryview(found.body)))
        return peer_pb2.SharedSession.FromString(body), found.modified_s

    async def _object(self, name: Name, part: peer_pb2.SharedPart) -> Buffer:
        found = await self._objects.get(self._path(name, part.name), OBJECT_LIMIT_BYTES)
        if found is None:
            raise NoAnswer(f"object {part.name} is gone")
        return found.body

    def source(self, name: Name, offer: Offer, begin: int, spare: Spare | None) -> StoredSource:
        """The bucket's objects of a session, as a source of its tokens from `begin` on.

        `spare`: one of these objects, which has been read already.
        """

        async def get(part: peer_pb2.SharedPart) -> Buffer:
            is_here = spare is not None and part.name == spare.part.name
            return spare.body if spare is not None and is_here else await self._object(name, part)

        return StoredSource(offer.told, offer.parts, get, partial(self._hasher, name), begin=begin)

    async def spare(self, name: Name, offer: Offer, begin: int) -> Spare | None:
        """The object that has this token, read and verified; None where it cannot be had."""
        part = next((one for one in offer.parts if one.token_begin <= begin < one.token_end), None)
        if part is None:
            return None
        try:
            body = await self._object(name, part)
            work = partial(is_whole, part, body, self._hasher(name, part.name))
            is_right = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except (NoAnswer, FrameError, DecodeError) as error:
            log.warning("shared_object_unusable error=%s", error)
            return None
        return Spare(part, body) if is_right else None

    def arrived(self, name: Name, uid: str, offer: Offer, token_count: int) -> None:
        """A copy of this uid is here, with so many tokens of what was offered."""
        told = offer.told
        has_gap = told.whole_token_count < told.token_count
        parts = [_part(part, part.token_begin) for part in offer.parts]
        whole_count = told.whole_token_count if has_gap else None
        litter = {self._path(name, part.name) for part in parts}
        here, is_whole = landed(parts, token_count, whole_count), token_count >= told.token_count
        self._known.note(uid, _Known(here, is_inherited=is_whole, litter=litter))

    def parts_of(self, session: Session) -> list[peer_pb2.SharedPart]:
        """What the bucket has of a copy that another host takes over."""
        name = Name(session.tenant, session.session_id)
        known = self._inherited(name, session.uid.hex())
        # What the head does not name may be gone tomorrow.
        if known is None or known.index != self._claims.shared(name):
            return []
        return [_message(part, session.live) for part in still_right(known.parts, session.live)]

    # -- what goes -----------------------------------------------------------------------------------

    async def removed(self, name: Name, shared: str) -> None:
        """A head that named this is one of a deleted session now."""
        try:
            found = await self._index(name, shared)
            parts = () if found is None else found[0].parts
            await self._remove([self._path(name, one) for one in (*(p.name for p in parts), shared)])
        except (NoAnswer, ForeignObject, DecodeError) as error:
            log.warning("shared_session_not_removed error=%s", error)

    async def _remove(self, paths: Iterable[str]) -> None:
        try:
            paths = list(paths)
            await self._objects.remove(paths)
            self._counts.removed_objects += len(paths)
        except NoAnswer as error:
            log.warning("objects_not_removed error=%s", error)

    # -- what it is made of --------------------------------------------------------------------------

    def _session(self, name: Name) -> Session | None:
        session = self._cache.ledger.named(*name)
        now_ns = self._cache.state.clock.now_ns()
        return None if session is None or session.has_expired(now_ns) else session

    def _path(self, name: Name, made: str) -> str:
        return self._secret.objects_folder(name) + made

    def _hasher(self, name: Name, made: str) -> blake2b:
        return self._secret.hasher(self._path(name, made))


def _durable(session: Session, end: int) -> Ranges:
    """What may be shared up to `end`: these positions have the same rows after a crash, too."""
    return ranges.clip(session.live, 0, min(end, session.durable_end))


# At most four times in the life of a session that is read all the while.
def _lives_longer(session: Session, known: _Known) -> bool:
    """Whether a session lives on for notably longer than the bucket was told."""
    return session.expire_time_ns - known.expire_time_ns > (session.expiration.ttl_ns or 0) // 4


def _range(span: Range) -> session_pb2.TokenRange:
    return session_pb2.TokenRange(begin=span[0], end=span[1])


def _part(told: peer_pb2.SharedPart, position: int) -> Part:
    end = position + told.token_end - told.token_begin
    return Part(told.name, position, end, told.size_bytes, told.digest)


def _message(part: Part, live: Ranges) -> peer_pb2.SharedPart:
    begin, end = indexes((part.begin, part.end), live)
    return peer_pb2.SharedPart(
        name=part.name,
        token_begin=begin,
        token_end=end,
        size_bytes=part.size_bytes,
        digest=part.digest,
        position=part.begin,
    )


def _write(transfer: ReadTransfer, writer: FrameWriter, loop: asyncio.AbstractEventLoop) -> None:
    """In a thread: the frames of a read, as another host would get them."""

    def wait(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(at_work(work), loop).result(THREAD_TIMEOUT_S)

    writer.write(SocketFrameKind.READ_HEADER, transfer.header.SerializeToString())
    for message, data in chunks(transfer, wait):
        writer.write(SocketFrameKind.CHUNK, message, data)
    writer.write(SocketFrameKind.END)
