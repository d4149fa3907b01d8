"""Peers: what stores of one fleet ask each other, both as the one who asks and as the one who is asked."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, TypeVar

from grpc_health.v1 import health_pb2

from ctxcache.cache import Cache
from ctxcache.client.credentials import ClientTls, OwnTokenFile
from ctxcache.client.wire import Wire
from ctxcache.core.fleet.claims import Busy, Counts, Left, Source
from ctxcache.core.fleet.heads import Name
from ctxcache.core.fleet.register import NoAnswer
from ctxcache.core.ledger.session import GUESTS, Expiration, Session
from ctxcache.errors import (
    CacheError,
    DeadlineExceeded,
    FleetNotFound,
    InvalidArgument,
    SessionNotFound,
    TooManyRequests,
    Unavailable,
    WriteInProgress,
)
from ctxcache.fleet.sources import Offer, PeerSource, told_model
from ctxcache.identity import ArenaGrant, Role
from ctxcache.runtime.threads import started_pool
from ctxcache.service import convert, validate
from ctxcache.service.bulk import BulkListener
from ctxcache.service.bulk_connection import TICKET_LIFETIME_NS
from ctxcache.service.callers import Caller, Context, current
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.service.prefixes import checked_keys
from ctxcache.v1 import bulk_pb2, peer_pb2, peer_pb2_grpc, session_pb2
from ctxcache.wire.address import Address

GUEST_TTL_NS = 3600 * 10**9
"""How long a guest is kept. A host that cannot be reached keeps what was deleted elsewhere no longer."""
LENT_NS = 60 * 10**9
"""How long a prefix can be read that was lent."""
YIELD_TIMEOUT_S = 0.5
"""How long an owner may take to answer: a user waits."""
ENDED_TIMEOUT_S = 30.0
"""How long an owner may take to look for sessions that have ended."""
SILENT_S = 5.0
"""How long a host that did not answer is not asked again."""
ASKED_AT_ONCE = 16
A = TypeVar("A")
PATHS_LIMIT = 10_000
WIRES = 64
"""Connections that are kept; of more, those that were used longest ago are ended."""


@dataclass(frozen=True, slots=True)
class Former:
    """What a guest was before it lost its name."""

    expiration: Expiration
    expire_time_ns: int
    is_pinned: bool
    parts: tuple[peer_pb2.SharedPart, ...] = ()
    """Objects of the bucket that hold rows of the session."""

    @classmethod
    def of(cls, session: Session, parts: Iterable[peer_pb2.SharedPart]) -> Self:
        """What a session is now."""
        return cls(session.expiration, session.expire_time_ns, session.is_pinned, tuple(parts))


class Asking:
    """Asks other hosts. Calls run in threads, so that one that hangs holds up no other."""

    def __init__(
        self,
        tls: ClientTls | None,
        token: OwnTokenFile | None,
        stored: Callable[[Name, str], Awaitable[Offer]],
    ) -> None:
        """`stored` finds what the bucket has."""
        self._stored = stored
        # Of its own: a question does not wait until rows have come.
        self._threads = started_pool(ASKED_AT_ONCE, "fleet-ask")
        self._tls, self._token = tls, token
        self._wires: dict[str, tuple[list[tuple[int, ...]], Wire]] = {}
        """By address, with the stamps of the certificates that were shown."""
        self._silent_until: dict[str, float] = {}

    async def stored(self, name: Name, shared: str) -> Offer:
        """See `core.fleet.claims.Peers`."""
        return await self._stored(name, shared)

    async def yield_(self, name: Name, source: Source, term: int) -> Offer:
        """See `core.fleet.claims.Peers`."""
        self._check_not_silent(source.address)
        request = peer_pb2.YieldSessionRequest(
            tenant=name.tenant, session_id=name.session_id, uid=source.uid, term=term
        )
        try:
            answer = await self._answer(
                source.address, lambda wire: wire.call(wire.peers.YieldSession, request)
            )
        except SessionNotFound as error:
            raise Left(str(error)) from error
        # It has the session, and answers: it is asked again.
        except (WriteInProgress, TooManyRequests) as error:
            raise Busy(str(error)) from error
        except (CacheError, ValueError) as error:
            raise self._silence(source.address, error) from error
        return Offer(
            answer.session,
            answer.model,
            answer.remaining,
            tuple(answer.parts),
            partial(self.source, source.address, answer.session, answer.ticket),
            partial(self.yield_, name, source, term),
            answer.ticket.tcp_port,
        )

    async def lend(self, address: str, request: peer_pb2.LendPrefixRequest) -> peer_pb2.LendPrefixResponse:
        """Ask a host for more of a prompt. Raises NoAnswer, also for a host that has no room to answer."""
        self._check_not_silent(address)
        try:
            return await self._answer(address, lambda wire: wire.call(wire.peers.LendPrefix, request))
        except (Unavailable, DeadlineExceeded, ValueError) as error:
            raise self._silence(address, error) from error
        except CacheError as error:
            raise NoAnswer(f"{address}: {error}") from error

    async def ended(self, address: str, paths: Sequence[str]) -> Sequence[str]:
        """Those of these heads that a host says to name none of its sessions. Raises NoAnswer."""
        request = peer_pb2.FindEndedRequest(paths=paths)
        # A host with many sessions takes seconds, and no user waits for its answer.
        wire = Wire(address, ENDED_TIMEOUT_S, self._tls, self._token)
        try:
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(self._threads, wire.call, wire.peers.FindEnded, request)
        except (CacheError, ValueError) as error:
            raise NoAnswer(f"{address}: {error}") from error
        finally:
            wire.close()
        # The host speaks of the heads that it was asked for, and of no others.
        return sorted(set(paths) & set(answer.paths))

    def source(
        self, address: str, told: session_pb2.Session, ticket: bulk_pb2.BulkTicket, *, begin: int = 0
    ) -> PeerSource:
        """The rows of what a host has told, by its ticket."""
        return PeerSource(Address.of(address).host, told, ticket, self._tls, begin=begin)

    async def _answer(self, address: str, call: Callable[[Wire], A]) -> A:
        """The answer of a host. Raises CacheError, ValueError, NoAnswer."""
        wire = self._wire(address)

        def ask() -> A:
            # Once more: of many questions to one host, those behind the first do not wait for it, too.
            self._check_not_silent(address)
            return call(wire)

        return await asyncio.get_running_loop().run_in_executor(self._threads, ask)

    def _silence(self, address: str, error: Exception) -> NoAnswer:
        """The host did not answer: it is not asked again for a moment."""
        self._silent_until.pop(address, None)
        self._silent_until[address] = time.monotonic() + SILENT_S
        if len(self._silent_until) > WIRES:
            del self._silent_until[next(iter(self._silent_until))]
        return NoAnswer(f"{address}: {error}")

    def _check_not_silent(self, address: str) -> None:
        if self._silent_until.get(address, 0.0) > time.monotonic():
            raise NoAnswer(f"{address} did not answer a moment ago")

    def _wire(self, address: str) -> Wire:
        """On the event loop alone. Raises ValueError."""
        stamps = [] if self._tls is None else self._tls.stamps()
        then, wire = self._wires.pop(address, ([], None))
        if wire is None or then != stamps:
            Address.of(address)
            # Renewed certificates hold from here on. Calls under way end on the connection that they have.
            wire = Wire(address, YIELD_TIMEOUT_S, self._tls, self._token)
        # Stores that start anew elsewhere leave their addresses behind.
        self._wires[address] = stamps, wire
        if len(self._wires) > WIRES:
            _, oldest = self._wires.pop(next(iter(self._wires)))
            oldest.close()
        return wire

    async def problem_of(self, address: str) -> str:
        """Why a store does not answer; empty where it does."""
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._problem_of, self._wire(address))
        except (CacheError, ValueError) as error:
            return str(error)

    def _problem_of(self, wire: Wire) -> str:
        answer = wire.call(wire.check_health, health_pb2.HealthCheckRequest())
        return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "draining"

    def close(self) -> None:
        """End every connection."""
        for _, wire in self._wires.values():
            wire.close()
        self._wires.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """See proto/ctxcache/v1/peer.proto."""

    def __init__(
        self,
        cache: Cache,
        bulk: BulkListener,
        turns: Turns,
        give_up: Callable[[Name, str, int], tuple[Session, Former]] | None,
        counts: Counts | None = None,
        ended: Callable[[Sequence[str]], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        """`give_up` makes a guest of a session, by its uid and a term; None in a store that is alone.

        It raises Busy, Left. `ended`: which of these heads name no session here.
        """
        self._counts, self._ended = counts or Counts(), ended
        self._cache, self._bulk, self._turns, self._give_up = cache, bulk, turns, give_up
        self._clock = cache.state.clock

    async def YieldSession(
        self, request: peer_pb2.YieldSessionRequest, context: Context
    ) -> peer_pb2.YieldSessionResponse:
        """See the proto."""
        tenant = validate.tenant(request.tenant)
        if not tenant:
            raise InvalidArgument(field="tenant", problem="is required")
        session_id = validate.session_id(f"sessions/{request.session_id}", "session_id")
        term = validate.within(request.term, 1, 2**62, "term")
        if len(request.uid) != 32 or not all(digit in "0123456789abcdef" for digit in request.uid):
            raise InvalidArgument(field="uid", problem="is not 32 hexadecimal digits")
        name, give_up = f"sessions/{session_id}", self._give_up
        if give_up is None:
            raise FleetNotFound
        # The ticket first: where there is none to be had, nothing is given up.
        ticket = self._ticket(tenant)
        try:
            guest, former = give_up(Name(tenant, session_id), request.uid, term)
        except Left:
            raise SessionNotFound(session=name) from None
        except Busy:
            raise WriteInProgress(session=name) from None
        view = guest.view()
        model = self._cache.models.get(tenant, view.model_id)
        model_message = await told_model(model, LoopSlice(self._turns))
        told = session_pb2.Session.FromString(convert.whole_session(view, self._clock))
        told.name = f"sessions/{guest.session_id}"
        told.is_pinned = former.is_pinned
        told.ClearField("ttl")
        if former.expiration.ttl_ns is not None:
            told.ttl.CopyFrom(convert.duration(former.expiration.ttl_ns))
        return peer_pb2.YieldSessionResponse(
            session=told,
            model=model_message,
            remaining=convert.duration(max(former.expire_time_ns - self._clock.now_ns(), 0)),
            ticket=ticket,
            parts=former.parts,
        )

    async def FindEnded(
        self, request: peer_pb2.FindEndedRequest, context: Context
    ) -> peer_pb2.FindEndedResponse:
        """See the proto."""
        if self._ended is None:
            raise FleetNotFound
        validate.within(len(request.paths), 0, PATHS_LIMIT, "paths")
        return peer_pb2.FindEndedResponse(paths=await self._ended(request.paths))

    async def LendPrefix(
        self, request: peer_pb2.LendPrefixRequest, context: Context
    ) -> peer_pb2.LendPrefixResponse:
        """See the proto."""
        tenant = validate.tenant(request.tenant)
        if not tenant:
            raise InvalidArgument(field="tenant", problem="is required")
        model_id = validate.model_id(request.model, "model")
        layout = validate.stream_ranges(request.layout, "layout")
        keys = checked_keys(request.keys, "keys")
        known_count = validate.within(request.known_token_count, 0, 2**62, "known_token_count")
        fingerprint = validate.fingerprint(request.model_fingerprint)
        if self._give_up is None:
            raise FleetNotFound
        lent = peer_pb2.LendPrefixResponse()
        if self._cache.models.get(tenant, model_id).fingerprint != fingerprint:
            return lent
        pace, prefixes = LoopSlice(self._turns), self._cache.prefixes
        held = await prefixes.held(tenant, model_id, layout, keys, pace=pace)
        if held.token_count <= known_count:
            return lent
        # The ticket first: where there is none to be had, no copy is made.
        ticket, uid, now_ns = self._ticket(tenant), uuid.uuid4(), self._clock.now_ns()
        await self._cache.sessions.create(
            tenant,
            GUESTS + uid.hex,
            model_id=model_id,
            layout=layout,
            expiration=Expiration(None, now_ns + LENT_NS),
            is_pinned=False,
            salt=held.salt,
            uid=uid.bytes,
        )
        adopted = await prefixes.adopt(tenant, GUESTS + uid.hex, fingerprint, None, keys, pace=pace)
        if adopted.token_count <= known_count:
            return lent
        # A guest may be of a session that was deleted elsewhere: no copy of it lives longer.
        kept_ns = min(held.expire_time_ns - now_ns, GUEST_TTL_NS)
        lent.session.CopyFrom(
            session_pb2.Session.FromString(convert.whole_session(adopted.view, self._clock))
        )
        lent.remaining.CopyFrom(convert.duration(max(kept_ns, 0)))
        lent.ticket.CopyFrom(ticket)
        self._counts.lent_prefixes += 1
        return lent

    def _ticket(self, tenant: str) -> bulk_pb2.BulkTicket:
        caller = Caller(current().subject, ArenaGrant(tenant, Role.PEER))
        return bulk_pb2.BulkTicket(
            ticket=self._bulk.tickets.issue(caller),
            tcp_port=self._bulk.tcp_port,
            expire_time=convert.timestamp(self._clock.wall_ns() + TICKET_LIFETIME_NS),
        )
