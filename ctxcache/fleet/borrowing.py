"""Borrowing: prefixes that other hosts have come here, as guests that are found by their tokens.

    a prompt, of which a part is here
        │ which host has more      a router names it, or the bucket knows it by the prompt's keys
        │ LendPrefix there         a copy without a name, which lists the same rows for a minute
        │ its rows                 behind what is here, by the bulk channel, each part verified
        ▼
    a guest of ours ──► found by its keys, as any prefix

Nobody owns a prefix and its rows never change, so no head is read and nothing is agreed on. The bucket
knows of prefixes by keys at a few lengths, and what it says promises nothing. Owned by the event loop. Worst
case: nothing comes in the time that computing takes; what has come by then is used.
"""

import asyncio
import logging
import secrets
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial

from ctxcache.cache import Cache
from ctxcache.cache.prefixes import Held
from ctxcache.cache.state import Pace
from ctxcache.core.fleet.claims import Claims, Recent
from ctxcache.core.fleet.heads import ForeignObject, Holder, NodeRecord, Secret
from ctxcache.core.fleet.register import Entry, NoAnswer, Register
from ctxcache.core.fleet.register import Refused as ChangeRefused
from ctxcache.core.fleet.worth import (
    BOUNDARIES_AT_ONCE,
    FIRST_BOUNDARY,
    LEAST_PROMPT_TOKENS,
    Worth,
    boundaries,
)
from ctxcache.core.ledger.session import GUESTS, Expiration, Session
from ctxcache.core.ledger.work import at_work
from ctxcache.core.prefix.keys import BLOCK_BYTES, BLOCK_TOKENS
from ctxcache.errors import CacheError, InvalidArgument, TierFailure
from ctxcache.fleet.arrival import Arrival, bring
from ctxcache.fleet.peers import GUEST_TTL_NS, Asking
from ctxcache.service import convert, validate
from ctxcache.service.admission import Admission
from ctxcache.service.whereabouts import Wanted
from ctxcache.v1 import peer_pb2
from ctxcache.wire.address import Address

log = logging.getLogger(__name__)
KEYS_PER_STEP = 64
PATIENCE_PART = 5
"""Of the time that is saved at best, a look into the bucket may take one part in so many."""
LEAST_LOOK_S, MOST_LOOK_S = 0.005, 0.1
ASKED_INTERVAL_S = 2.0
"""How often others are asked for the same tokens at most."""
KNOWN_FOR_S = 12 * 3600.0
"""After so long the bucket is told again: what it was told is collected after a day."""
NODES_INTERVAL_S = 30.0
"""How often the records of all stores are read again for a host that none of them has."""
TELL_INTERVAL_S = 1.0
TOLD_AT_ONCE = 8
DUE_LIMIT = 1024
"""Prefixes that wait until the bucket knows of them; of more, the oldest are not told."""


class Borrowing:
    """Lets prefixes come, and tells the bucket of those that are here."""

    def __init__(
        self,
        cache: Cache,
        register: Register,
        secret: Secret,
        claims: Claims,
        asking: Asking,
        nodes: Callable[[], Awaitable[Iterable[NodeRecord]]],
        threads: Executor,
        worth: Worth,
        *,
        calls: Admission,
        arriving: asyncio.Semaphore,
        is_telling: bool,
    ) -> None:
        """`nodes` reads the records of all stores. `is_telling`: the bucket knows prefixes, and is asked."""
        self._cache, self._register, self._secret, self._claims = cache, register, secret, claims
        self._asking, self._nodes, self._threads, self._worth = asking, nodes, threads, worth
        self._calls, self._arriving, self._is_telling = calls, arriving, is_telling
        self._counts = claims.counts
        self._coming: dict[tuple[str, bytes], asyncio.Task[None]] = {}
        """By tenant and the first key that is lacking, what is on its way."""
        self._asked_s = Recent[tuple[str, bytes], float]()
        """By the same, when it was asked for last."""
        self._addresses: dict[str, str] = {}
        """By the names that a router may use, where stores are reached."""
        self._looked_s = float("-inf")
        """When the records of all stores were read last."""
        self._told = Recent[str, int]()
        """By a session's uid, the longest of its prefixes that the bucket knows, or is to know."""
        self._known = Recent[str, float]()
        """By the path of a holder that the bucket has, when it was told of one."""
        self._outdated = Recent[str, Entry]()
        """By path, holders that do not have their prefix any more."""
        self._due = deque[str](maxlen=DUE_LIMIT)

    # -- a prompt is looked for ----------------------------------------------------------------------

    async def come(self, tenant: str, wanted: Wanted, pace: Pace) -> None:
        """See Whereabouts.prefix_comes."""
        if wanted.engine_host:
            self._claims.hosts.note(wanted.engine_host, None)
        asked = wanted.asked
        is_ids = isinstance(asked, bytes)
        asked_count = (len(asked) // BLOCK_BYTES if is_ids else len(asked)) * BLOCK_TOKENS
        if not (wanted.source or (self._is_telling and asked_count >= LEAST_PROMPT_TOKENS)):
            return
        held = await self._cache.prefixes.held(
            tenant,
            wanted.model_id,
            wanted.layout,
            asked,
            salt=wanted.salt,
            contents=wanted.contents,
            pace=pace,
        )
        token_bytes = held.layout.token_bytes
        patience_s = self._worth.patience_s(asked_count - held.token_count, token_bytes)
        is_worth_looking = self._is_telling and self._worth.is_worth_looking(
            asked_count, held.token_count, token_bytes
        )
        if not patience_s or not (wanted.source or is_worth_looking):
            return
        keys = await _all_keys(held, asked, wanted, pace)
        lacking = tenant, keys[held.token_count // BLOCK_TOKENS]
        task = self._coming.get(lacking)
        if task is None:
            # A caller that looks first, and begins a session with the prompt then, waits once.
            if _now() - self._asked_s.get(lacking, float("-inf")) < ASKED_INTERVAL_S:
                return
            self._asked_s.note(lacking, _now())
            work = at_work(self._come(tenant, wanted, held, keys, patience_s, may_look=is_worth_looking))
            task = self._coming[lacking] = _loop().create_task(work)
            task.add_done_callback(lambda _: self._coming.pop(lacking, None))
        # A caller that goes away ends no other caller's wait.
        await asyncio.shield(task)

    async def _come(
        self,
        tenant: str,
        wanted: Wanted,
        held: Held,
        keys: Sequence[bytes],
        patience_s: float,
        *,
        may_look: bool,
    ) -> None:
        begun = _now()
        deadline = begun + patience_s
        address, path, entry = await self._address_of(wanted.source), "", None
        if not address and may_look:
            address, path, entry = await self._look(tenant, held, keys, patience_s)
        if not address or address == self._claims.address:
            return
        self._counts.asked_prefixes += 1
        request = peer_pb2.LendPrefixRequest(
            tenant=tenant,
            model=f"models/{wanted.model_id}",
            model_fingerprint=self._cache.models.get(tenant, wanted.model_id).fingerprint,
            layout=map(convert.stream_range, wanted.layout),
            keys=keys,
            known_token_count=held.token_count,
        )
        try:
            async with asyncio.timeout_at(deadline):
                lent = await self._asking.lend(address, request)
        except (NoAnswer, TimeoutError) as error:
            log.warning("prefix_not_lent error=%s", error or "no answer in time")
            return
        if not lent.HasField("session"):
            if entry is not None:
                self._outdated.note(path, entry)
            return
        try:
            _check(lent, tenant, request, held, len(keys))
            async with asyncio.timeout_at(deadline):
                await self._arriving.acquire()
        except (CacheError, ValueError, TimeoutError) as error:
            log.warning("prefix_not_borrowed error=%s", error or "others come in the meantime")
            return
        try:
            await self._land(tenant, address, lent, held, keys, begun, deadline)
        except CacheError as error:
            log.warning("prefix_not_borrowed error=%s", error)
        finally:
            self._arriving.release()

    async def _land(
        self,
        tenant: str,
        address: str,
        lent: peer_pb2.LendPrefixResponse,
        held: Held,
        keys: Sequence[bytes],
        begun: float,
        deadline: float,
    ) -> None:
        told = lent.session
        session_id, begin = await self._guest(tenant, lent, held, keys)
        source = self._asking.source(address, told, lent.ticket, begin=begin)
        arrival = Arrival(self._cache, self._calls, source, session_id, begin=begin)
        # It ends as one that breaks off: what has come by then stays.
        ending = _loop().call_at(deadline, arrival.end)
        try:
            await bring(arrival, partial(_loop().run_in_executor, self._threads))
        finally:
            ending.cancel()
        came_count = arrival.token_count - begin
        self._worth.came(arrival.size_bytes, _now() - begun)
        if came_count:
            self._counts.borrowed_prefixes += 1
            self._counts.borrowed_tokens += came_count
            self._counts.borrowed_bytes += arrival.size_bytes
        else:
            guest = self._cache.ledger.named(tenant, session_id)
            if guest is not None:
                self._cache.sessions.end_soon(guest)

    async def _guest(
        self, tenant: str, lent: peer_pb2.LendPrefixResponse, held: Held, keys: Sequence[bytes]
    ) -> tuple[str, int]:
        """A guest that begins with what is here, and how many tokens that is. Raises CacheError."""
        told, uid = lent.session, uuid.uuid4()
        session_id = GUESTS + uid.hex
        now_ns = self._cache.state.clock.now_ns()
        kept_ns = min(lent.remaining.ToNanoseconds(), GUEST_TTL_NS)
        await self._cache.sessions.create(
            tenant,
            session_id,
            model_id=validate.model_id(told.model, "session.model"),
            layout=validate.stream_ranges(told.layout, "session.layout"),
            expiration=Expiration(None, now_ns + kept_ns),
            is_pinned=False,
            salt=validate.salt(told.salt, "session.salt"),
            uid=uid.bytes,
        )
        # Contents are told from the first token on.
        if not held.token_count or told.contents:
            return session_id, 0
        known = keys[: held.token_count // BLOCK_TOKENS]
        try:
            adopted = await self._cache.prefixes.adopt(
                tenant, session_id, told.model_fingerprint, None, known
            )
        except TierFailure:
            return session_id, 0
        return session_id, adopted.token_count

    # -- which host has it ---------------------------------------------------------------------------

    async def _address_of(self, source: str) -> str:
        """Where the store is reached that a router names; empty where no store of the fleet has that name."""
        if not source:
            return ""
        address = self._named(source)
        if not address and _now() - self._looked_s > NODES_INTERVAL_S:
            self._looked_s = _now()
            try:
                self._addresses = _names(await self._nodes())
            except NoAnswer as error:
                log.warning("fleet_nodes_unknown error=%s", error)
            address = self._named(source)
        return address

    def _named(self, source: str) -> str:
        return self._addresses.get(source) or self._addresses.get(_host(source), "")

    async def _look(
        self, tenant: str, held: Held, keys: Sequence[bytes], patience_s: float
    ) -> tuple[str, str, Entry | None]:
        """The address of the host with the longest known prefix; the path and the object that say so."""
        lengths = boundaries(len(keys) * BLOCK_TOKENS)[-BOUNDARIES_AT_ONCE:]
        paths = [
            self._secret.holder_path(tenant, keys[length // BLOCK_TOKENS - 1])
            for length in lengths
            if length > held.token_count
        ]
        begun = _now()
        limit_s = min(max(patience_s / PATIENCE_PART, LEAST_LOOK_S), MOST_LOOK_S)
        entries: list[Entry | None] = []
        try:
            async with asyncio.timeout(limit_s):
                entries = await asyncio.gather(*map(self._register.get, paths))
        except (NoAnswer, TimeoutError):
            # Unknown, and not absent: it is told anew by nobody.
            self._counts.no_answers += 1
        self._counts.head_reads += len(paths)
        there = [(path, entry) for path, entry in zip(paths, entries, strict=False) if entry is not None]
        self._worth.looked(_now() - begun, is_known=bool(there))
        for path, entry in reversed(there):
            try:
                holder = self._secret.read_holder(entry.body)
            except ForeignObject as error:
                log.error("fleet_holder_unreadable error=%s", error)  # noqa: TRY400  the sentence says all
                continue
            if holder.address == self._claims.address:
                # It was here, and has left.
                self._outdated.note(path, entry)
                continue
            return holder.address, path, entry
        return "", "", None

    # -- what is here --------------------------------------------------------------------------------

    def committed(self, session: Session) -> None:
        """Tokens of a session were committed here: the bucket is to know of its prefixes."""
        if not self._is_telling or session.is_block or session.is_hidden:
            return
        count, uid = session.whole_token_count, session.uid.hex()
        told = self._told.get(uid, 0)
        if count < max(FIRST_BOUNDARY, 2 * told):
            return
        lengths = [length for length in boundaries(count) if length > told]
        self._told.note(uid, lengths[-1])
        for length in lengths:
            key = self._cache.ledger.keyed.key_at(session, length)
            path = "" if key is None else self._secret.holder_path(session.tenant, key)
            if path and _now() - self._known.get(path, float("-inf")) > KNOWN_FOR_S:
                self._known.note(path, _now())
                self._due.append(path)

    async def run(self) -> None:
        """Tell the bucket what is due, for ever; ends by cancellation."""
        while True:
            await asyncio.sleep(TELL_INTERVAL_S)
            while self._due:
                some = [self._due.popleft() for _ in range(min(len(self._due), TOLD_AT_ONCE))]
                heard = await asyncio.gather(*map(self._tell, some))
                if not all(heard):
                    # The bucket is silent. Prefixes that are used again are told later.
                    self._due.clear()
                    self._known.clear()

    async def _tell(self, path: str) -> bool:
        """Have the bucket know that a prefix is here. False: it does not answer."""
        body = self._secret.write(Holder(self._claims.node, self._claims.address, secrets.token_hex(8)))
        outdated = self._outdated.pop(path, None)
        try:
            if outdated is None:
                await self._register.create(path, body)
            else:
                await self._register.replace(path, body, outdated.tag)
        except ChangeRefused:
            # Another host has it, and was first.
            return True
        except NoAnswer:
            return False
        self._counts.told_prefixes += 1
        return True


_loop = asyncio.get_running_loop


def _now() -> float:
    return _loop().time()


async def _all_keys(
    held: Held, asked: bytes | Sequence[bytes], wanted: Wanted, pace: Pace
) -> Sequence[bytes]:
    if not isinstance(asked, bytes):
        return asked
    keys = list[bytes]()
    for key in held.scope.keys(asked, contents=wanted.contents):
        keys.append(key)
        if len(keys) % KEYS_PER_STEP == 0 and pace.is_over:
            await pace.rest()
    return keys


def _check(
    lent: peer_pb2.LendPrefixResponse,
    tenant: str,
    request: peer_pb2.LendPrefixRequest,
    held: Held,
    key_count: int,
) -> None:
    """Raise InvalidArgument unless what is lent is what was asked for."""
    told = lent.session
    if told.tenant != tenant:
        raise InvalidArgument(field="session.tenant", problem="is another one's")
    if told.model_fingerprint != request.model_fingerprint:
        raise InvalidArgument(field="session.model_fingerprint", problem="is another model's")
    validate.guest_id(told.name, "session.name")
    least, most = held.token_count + 1, key_count * BLOCK_TOKENS
    validate.within(told.token_count, least, most, "session.token_count")
    validate.within(told.whole_token_count, told.token_count, told.token_count, "session.whole_token_count")
    validate.within(lent.remaining.ToNanoseconds(), 0, validate.LATEST_NS, "remaining")
    validate.within(lent.ticket.tcp_port, 1, 65535, "ticket.tcp_port")
    if told.contents:
        validate.contents(told.contents, 0, "session.contents")


def _names(records: Iterable[NodeRecord]) -> dict[str, str]:
    """Addresses by all that a router may call a store. A host of several stores names none of them."""
    names = dict[str, str]()
    by_host = dict[str, set[str]]()
    for record in records:
        if not record.address:
            continue
        names[record.node] = names[record.address] = record.address
        for host in (Address.of(record.address).host, *record.hosts):
            by_host.setdefault(host, set()).add(record.address)
    for host, addresses in by_host.items():
        if len(addresses) == 1:
            names.setdefault(host, *addresses)
    return names


def _host(source: str) -> str:
    """The host of `host:port`, brackets of an IPv6 address left out."""
    host, colon, port = source.rpartition(":")
    return (host if colon and port.isdigit() else source).strip("[]")
