"""Blocks: an engine's own bytes, put and found by a key of 32 bytes.

    absent ──reserved──► PENDING ──every part committed──► HIT ──expired, evicted, deleted, cut──► absent
                            └── a writer let go, or was too late ──► absent

A block is a session that no list of sessions shows: one segment of one row, whose streams are the block's
parts. So reservations, commits, flushes, checksums, leases, placement, budgets and records are those of
sessions. A block has no record before it is on SSD: a crash leaves all of it or nothing. It is put if it is
absent: the second writer of a block writes nothing. Its parts may have several writers; when one of them
disappears with parts uncommitted, all of the put is given up, for it may still be writing there.

Keys are looked for within a tenant and a space, see `core/prefix/keys.py`. Nothing awaits between a look
and the change that it allows.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import NamedTuple

from ctxcache.cache.appends import Appends
from ctxcache.cache.block_news import Subscriptions
from ctxcache.cache.eviction import Departures
from ctxcache.cache.flushing import Flushing
from ctxcache.cache.leases import Lease, Leases, ReadRequest
from ctxcache.cache.reservations import Reservation
from ctxcache.cache.scrubbing import TRIES
from ctxcache.cache.segments import SegmentIO
from ctxcache.cache.state import STEP_BY_STEP, Pace, State
from ctxcache.cache.token_leases import Held, TokenLease, TokenLeases
from ctxcache.core.history import Event
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Expiration, Session, block_id, block_key
from ctxcache.core.limits import Pinner
from ctxcache.errors import (
    CorruptSegment,
    InvalidArgument,
    ReservationNotFound,
    SessionNotFound,
    TooManyRequests,
    WriteInProgress,
)
from ctxcache.format.checksums import rows_checksum
from ctxcache.format.layout import block_layout
from ctxcache.storage.metadata.base import MetadataStore

LEFT_KEPT = 1 << 16
"""Blocks of which it is known that a reader left them on SSD, some 100 bytes each."""
BLOCKS_AT_A_TIME = 64
"""Blocks that are brought to DRAM together, or deleted with one commit."""


class BlockState(Enum):
    """How much of a block the store has."""

    MISS = "miss"
    PENDING = "pending"
    """Somebody writes it."""
    HIT = "hit"


class FoundBlock(NamedTuple):
    """The answer of a look-up for one key. `part_bytes` are empty for a miss."""

    state: BlockState
    part_bytes: tuple[int, ...] = ()
    is_in_memory: bool = False


ABSENT = FoundBlock(BlockState.MISS)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to be put: sizes of all its parts, in bytes, and the numbers of those that this writer has.

    `parent`: the key of the block that it continues.
    """

    key: bytes
    part_bytes: tuple[int, ...]
    parts: tuple[int, ...]
    parent: bytes | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """The answer to a request for room: HIT, PENDING (another writer has the parts), or the parts' places.

    `reservation_id` is 0 where there is nothing to write. `offsets_bytes`: the asked parts' places in the
    arena.
    """

    state: BlockState
    reservation_id: int = 0
    offsets_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part whose bytes are in place, and their XXH3-64."""

    reservation_id: int
    part: int
    checksum: int


# A put of a block with parts 0, 1, 2 by two writers:
#
#     claims    {0: a, 1: a, 2: b}      sums    {}
#     a commits 0 and 1      {2: b}             {0: x, 1: y}
#     b commits 2            {}                 {0: x, 1: y, 2: z} ──► one commit, HIT
#     b disappears instead   ──► all of the put is given up, for b may still be writing there
@dataclass(slots=True, eq=False)
class Put:
    """A block that is being written. `claims`: the writer of each part; `sums` of those committed."""

    session: Session
    reservation: Reservation | None = None
    claims: dict[int, int] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)


# The owner of the slot at any time:
#
#     opened      a session without a token: look-ups say PENDING
#     reserved    the slot is the put's; offsets go to the writers
#     committed   the session has one token: HIT. From here on it is like any session
#     gave up     the session ends without ever having had a token
class Blocks:
    """The use cases of blocks. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        io: SegmentIO,
        metadata: MetadataStore,
        appends: Appends,
        leases: Leases,
        tokens: TokenLeases,
        flushing: Flushing,
        departures: Departures,
        default: Callable[[], Expiration],
    ) -> None:
        self._state, self._ledger, self._metadata = state, state.ledger, metadata
        self._io = io
        self._appends, self._leases, self._tokens = appends, leases, tokens
        self._flushing, self._departures = flushing, departures
        self._default = default
        self._puts: dict[bytes, Put] = {}
        """By the uid of the block."""
        self._put_numbers: dict[int, bytes] = {}
        """Uids by the number of the reservation."""
        self._left: dict[bytes, bool] = {}
        """Uids of blocks that readers left on SSD, the oldest first."""
        self.subscriptions = Subscriptions(state.ledger)
        appends.abandoned = self._gave_up

    # -- look ----------------------------------------------------------------------------------------

    def look_up(self, tenant: str, space: bytes, keys: Iterable[bytes]) -> list[FoundBlock]:
        """The blocks under these keys, in their order. Counts as no access."""
        now_ns = self._state.clock.now_ns()
        # Blocks put by one engine share a layout, and so an answer, mostly that of the block before.
        hits: dict[tuple[int, bool], FoundBlock] = {}
        layout, is_in_memory, hit = None, False, ABSENT
        answers = []
        for block in self._ledger.blocks_under(tenant, space, keys):
            if block is None or block.has_expired(now_ns):
                answers.append(ABSENT)
            elif block.token_count:
                # A block that is there and not withheld shows its one segment.
                is_there = block.is_in_memory if block.withheld else block.segments[0].memory is not None
                if block.layout is not layout or is_there is not is_in_memory:
                    layout, is_in_memory = block.layout, is_there
                    kind = id(layout), is_in_memory
                    if kind not in hits:
                        hits[kind] = FoundBlock(BlockState.HIT, _sizes(block), is_in_memory)
                    hit = hits[kind]
                answers.append(hit)
            else:
                # A block without its token and without a put was cut, or lies on a lost path.
                is_put = block.uid in self._puts
                answers.append(FoundBlock(BlockState.PENDING, _sizes(block)) if is_put else ABSENT)
        return answers

    def parent(self, tenant: str, space: bytes, key: bytes) -> bytes | None:
        """The key of the block that this one continues, if it is there and continues one."""
        block = self._ledger.named(tenant, block_id(space, key))
        return block_key(block.parent_id) if block is not None and block.parent_id else None

    def there(self, tenant: str, space: bytes, keys: Iterable[bytes]) -> list[Session]:
        """The blocks among these that are there."""
        now_ns = self._state.clock.now_ns()
        found = (self._there(tenant, space, key, now_ns) for key in keys)
        return [block for block in found if block is not None and block.token_count]

    def _shown(self, tenant: str, space: bytes, keys: Iterable[bytes], now_ns: int) -> list[Session | None]:
        """The blocks under these keys that are there whole at that time; None for the others."""
        return [
            block if block is not None and block.token_count and not block.has_expired(now_ns) else None
            for block in self._ledger.blocks_under(tenant, space, keys)
        ]

    def _there(self, tenant: str, space: bytes, key: bytes, now_ns: int) -> Session | None:
        """A block that is there or being written, and has not expired."""
        block = self._ledger.named(tenant, block_id(space, key))
        if block is None or block.has_expired(now_ns):
            return None
        self._ledger.lost.reckon(block)
        return block if block.token_count or block.uid in self._puts else None

    # -- put -----------------------------------------------------------------------------------------

    async def reserve(
        self,
        tenant: str,
        space: bytes,
        wanted: Sequence[Wanted],
        client: int | None,
        *,
        writer: int,
        model: str = "",
        expiration: Expiration | None = None,
        pace: Pace = STEP_BY_STEP,
    ) -> list[Room]:
        """Room for the parts of blocks that are absent, in the order of `wanted`; all of it or none.

        `model` owns the blocks, see `block_model`. `writer` may commit them. They count in `client`'s share
        of the arena. A parent is there, or earlier in the list. Raises InvalidArgument, CapacityExceeded,
        TooManyRequests, TierFailure.
        """
        self._metadata.check()
        # Old blocks in the way of a new put go first, with one commit.
        await self._clear_away(tenant, space, wanted)
        self._check(Pinner(tenant, client), space, wanted)
        rooms: list[Room] = []
        try:
            for request in wanted:
                if pace.is_over:
                    await pace.rest()
                room = await self._reserve(tenant, space, request, client, writer, model, expiration)
                rooms.append(room)
        except BaseException:
            # A writer that got half of its places could not go on.
            self.give_back(wanted, rooms, writer)
            raise
        return rooms

    async def commit(
        self, written: Sequence[WrittenPart], *, writer: int, pace: Pace = STEP_BY_STEP
    ) -> list[Session]:
        """These parts are in place and will not change; blocks that have all of theirs are there from now on.

        Returns the block of each part. A block that expired, or was given up by another writer, before all
        its parts were there is gone. Raises ReservationNotFound (not this writer's, or over), InvalidArgument
        (a part twice): then nothing is committed.
        """
        # Every part is looked at before any is committed.
        puts = [self._own(part, writer) for part in written]
        if len({(part.reservation_id, part.part) for part in written}) < len(written):
            raise InvalidArgument(field="parts", problem="names one twice")
        for put, part in zip(puts, written, strict=True):
            if pace.is_over:
                await pace.rest()
            # Another writer's end may have given up the put while this call let others have their turn.
            if self._puts.get(put.session.uid) is not put:
                continue
            put.sums[part.part] = part.checksum
            put.claims.pop(part.part, None)
            count = len(put.session.layout.specs)
            if len(put.sums) == count and put.reservation is not None:
                sums = [put.sums[number] for number in range(count)]
                self._forget(put)
                # The block expired meanwhile: it is a miss, and its writer hears no error for that.
                with suppress(SessionNotFound):
                    self._appends.commit_in_memory(put.reservation, 1, keep_open=False, checksums=sums)
                    self.subscriptions.came(put.session)
        return [put.session for put in puts]

    async def flush(self, blocks: Sequence[Session]) -> None:
        """Make those of the blocks durable that are there. Raises the first failure when all were tried.

        A block that goes meanwhile, or turns out to be damaged, is a miss and no failure.
        """
        # Blocks that are durable already, or gone, are not waited for.
        due = {block for block in blocks if block.durable_end < block.log_end and not block.is_gone}
        _raise_first(await asyncio.gather(*map(self._flush, due), return_exceptions=True))

    async def _flush(self, block: Session) -> None:
        with suppress(SessionNotFound, CorruptSegment):
            await self._flushing.flush(block)

    def give_back(self, wanted: Sequence[Wanted], rooms: Sequence[Room], writer: int) -> None:
        """Take back the places that one call of `reserve` gave. The writer keeps those of its other calls."""
        for one, room in zip(wanted, rooms, strict=False):
            if room.reservation_id:
                self.withdraw(room.reservation_id, writer, one.parts, is_abandoned=False)

    def withdraw(
        self, reservation_id: int, writer: int, parts: Sequence[int] | None = None, *, is_abandoned: bool
    ) -> None:
        """Take back this writer's uncommitted claims to those parts, else to all. It may have none.

        `is_abandoned`: nobody can say that the writer has stopped, so that the put is given up. Otherwise the
        put goes on while other writers have parts of it.
        """
        put = self._puts.get(self._put_numbers.get(reservation_id, b""))
        if put is None or put.reservation is None or writer not in put.claims.values():
            return
        # Only this writer's claims go: others may still be writing their parts.
        put.claims = {
            part: owner
            for part, owner in put.claims.items()
            if owner != writer or (parts is not None and part not in parts)
        }
        if is_abandoned or not (put.claims or put.sums):
            self._appends.release(put.reservation, is_abandoned=is_abandoned)

    def is_open(self, reservation_id: int) -> bool:
        """Whether a put goes on."""
        return reservation_id in self._put_numbers

    def place(self, reservation_id: int, part: int, begin: int, data: memoryview, *, writer: int) -> None:
        """Put bytes of a part where they belong, from byte `begin` of it on.

        Raises ReservationNotFound, InvalidArgument.
        """
        put = self._own(WrittenPart(reservation_id, part, 0), writer)
        size_bytes = put.session.layout.specs[part].row_bytes
        if begin + len(data) > size_bytes:
            problem = f"{begin + len(data)} B do not fit into {size_bytes} B"
            raise InvalidArgument(field="data", problem=problem)
        if put.reservation is not None:
            self._appends.place_in_row(put.reservation, part, begin, data)

    # -- read ----------------------------------------------------------------------------------------

    async def lease(
        self,
        tenant: str,
        space: bytes,
        keys: Sequence[bytes],
        client: int | None,
        *,
        ttl_ns: int,
        is_rechecked: bool = False,
        leaves_on_ssd: bool = False,
        pace: Pace = STEP_BY_STEP,
    ) -> TokenLease:
        """Bring blocks into DRAM and hold them there for `ttl_ns`, or until the token is released.

        `is_rechecked`: blocks in DRAM are verified before the answer. `leaves_on_ssd`: the first time, blocks
        that are not in DRAM are held where they lie. A key that is not there, or whose bytes turn out to be
        bad, has no lease. Raises CapacityExceeded, TooManyRequests, TierFailure: then nothing is held.
        """
        owner, clock = Pinner(tenant, client), self._state.clock
        there = self._shown(tenant, space, keys, clock.now_ns())
        left = {block.uid for block in there if leaves_on_ssd and block and self._is_left(block)}
        segments = [s for block in there if block and block.uid not in left for s in block.segments]
        sizes = {s.segment_id: s.size_bytes for s in segments}
        # Blocks that can never be held at once are not waited for.
        self._leases.pins.has_room(owner, sizes)
        held: dict[int, Held] = {}
        try:
            for begin in range(0, len(keys), BLOCKS_AT_A_TIME):
                if pace.is_over:
                    await pace.rest()
                waiting = list[tuple[int, ReadRequest]]()
                # The blocks are looked up again after the await: some may be gone.
                now_ns = clock.now_ns()
                some = self._shown(tenant, space, keys[begin : begin + BLOCKS_AT_A_TIME], now_ns)
                # Most blocks are in DRAM, and a task takes as long as a lease.
                near = {} if is_rechecked else _at_hand(some)
                has_room = bool(near) and self._leases.has_room_for_blocks(near, owner)
                lease = self._leases.acquire_blocks(near, owner, now_ns) if has_room else None
                for i, block in enumerate(some, begin):
                    if block is None:
                        continue
                    if lease is not None and block in near:
                        held[i] = Held(lease, near[block])
                        continue
                    request = ReadRequest(
                        block.tenant,
                        block.session_id,
                        block.model_fingerprint,
                        None,
                        client=client,
                        is_summed=True,
                        is_rechecked=is_rechecked,
                        leaves_on_ssd=block.uid in left,
                    )
                    if block.uid in left and self._hold_at_once(request, held, i):
                        continue
                    waiting.append((i, request))
                # All tasks are waited for before the first failure is raised, so that none runs on behind an
                # error.
                asked = [self._hold(request, held, i) for i, request in waiting]
                if asked:
                    _raise_first(await asyncio.gather(*asked, return_exceptions=True))
        except BaseException:
            self._leases.let_go(one.lease for one in held.values())
            raise
        return self._tokens.hold(tenant, [held.get(i) for i in range(len(keys))], ttl_ns)

    def hold_at_hand(
        self, tenant: str, space: bytes, keys: Sequence[bytes], client: int | None
    ) -> list[Held | None]:
        """Hold the first of these blocks that lie in DRAM: up to half of what `client` may pin. Never waits.

        The other half is for bringing and reading blocks. The answer is in the order of the keys. The caller
        puts what is held under a token.
        """
        owner, now_ns = Pinner(tenant, client), self._state.clock.now_ns()
        there = self._shown(tenant, space, keys, now_ns)
        some = self._within(owner, _at_hand(there))
        # Other clients hold too much for all of these blocks: half of them are tried.
        while some and not self._leases.has_room_for_blocks(some, owner):
            some = dict(islice(some.items(), len(some) // 2))
        if not some:
            return [None] * len(keys)
        lease = self._leases.acquire_blocks(some, owner, now_ns)
        segments = [None if block is None else some.get(block) for block in there]
        return [None if segment is None else Held(lease, segment) for segment in segments]

    def _within(self, owner: Pinner, blocks: Mapping[Session, Segment]) -> dict[Session, Segment]:
        """The first blocks, as many as leave half of what the client may pin."""
        pins, some = self._leases.pins, dict[Session, Segment]()
        left_bytes, own = pins.limit_of(owner) // 2 - pins.used_by(owner), pins.pinned_by(owner)
        for block, segment in blocks.items():
            # A block that the client pins already takes no room again.
            left_bytes -= 0 if segment.segment_id in own else segment.layout.size_bytes
            if left_bytes < 0:
                break
            some[block] = segment
        return some

    def leased(self, tenant: str, token: bytes) -> TokenLease:
        """The leases behind a token of the tenant, for any of its connections.

        Raises LeaseNotFound, InvalidArgument (it holds a prefix).
        """
        token_lease = self._tokens.find(tenant, token)
        if token_lease.blocks is None:
            raise InvalidArgument(field="token", problem="is that of a prefix: AcquireLease takes it")
        return token_lease

    async def summed(self, held: Held, part: int, most_bytes: int) -> list[tuple[memoryview, int]]:
        """The bytes of a leased block's part where they lie, in runs of at most so many, and their XXH3-64.

        They are those of the writer. Raises CorruptSegment, TierFailure.
        """
        segment = held.segment
        for _ in range(TRIES):
            stream = segment.layout.specs[part].stream
            # The place is looked up in each try: mending may have moved it.
            data = self._io.view(segment)[segment.layout.rows(stream, 0, 1)]
            runs = [data[begin : begin + most_bytes] for begin in range(0, len(data), most_bytes)]
            # The runs are summed before the whole: a change between the two is found by one of them.
            found = [(run, rows_checksum(run)) for run in runs]
            if rows_checksum(data) == segment.settled.values[part]:
                return found
            await self._leases.mend(segment)
        raise CorruptSegment(segment_id=segment.segment_id, problem="memory does not keep its rows")

    # -- delete --------------------------------------------------------------------------------------

    async def delete(self, tenant: str, space: bytes, keys: Sequence[bytes]) -> int:
        """Delete the blocks that are there; returns how many. Leased blocks stay readable.

        Raises WriteInProgress where one is being written: then none is deleted; TierFailure.
        """
        self._metadata.check(is_growing=False)
        now_ns = self._state.clock.now_ns()
        found = dict.fromkeys(self._there(tenant, space, key, now_ns) for key in keys)
        blocks = [block for block in found if block is not None]
        # All blocks are looked at first: one that is being written refuses the whole call.
        for block in blocks:
            if block.is_writing:
                raise WriteInProgress(session=block.name)
        for begin in range(0, len(blocks), BLOCKS_AT_A_TIME):
            some = [block for block in blocks[begin : begin + BLOCKS_AT_A_TIME] if not block.is_gone]
            for block in some:
                self._state.journal.happened(block, Event.DELETED, token_count=block.token_count)
            await self._departures.remove(some)
        return len(blocks)

    # -- parts ---------------------------------------------------------------------------------------

    async def _clear_away(self, tenant: str, space: bytes, wanted: Iterable[Wanted]) -> None:
        """Remove blocks in the way that have expired, were cut, or lie on a lost path."""
        now_ns, gone = self._state.clock.now_ns(), list[Session]()
        for one in wanted:
            block = self._ledger.named(tenant, block_id(space, one.key))
            is_there = block is not None and self._there(tenant, space, one.key, now_ns) is not None
            if block is not None and not is_there and not block.is_writing:
                gone.append(block)
        if gone:
            await self._departures.remove(gone)

    def _check(self, owner: Pinner, space: bytes, wanted: Sequence[Wanted]) -> None:
        """Raise InvalidArgument, CapacityExceeded, TooManyRequests before anything is changed."""
        tenant, new_bytes = owner.tenant, 0
        now_ns, coming = self._state.clock.now_ns(), set[bytes]()
        # New blocks are counted before any is made, so that a long list is refused as a whole.
        new_count = 0
        for i, request in enumerate(wanted):
            if request.key in coming:
                raise InvalidArgument(field=f"blocks[{i}].key", problem="is named twice")
            block = self._there(tenant, space, request.key, now_ns)
            # A parent in the same list has to come before its child.
            is_parent_known = request.parent is None or request.parent in coming
            if not is_parent_known and self._there(tenant, space, request.parent or b"", now_ns) is None:
                raise InvalidArgument(field=f"blocks[{i}].parent_key", problem="is not there")
            if block is None:
                new_count += 1
                new_bytes += block_layout(request.part_bytes).size_bytes
            sizes = _sizes(block) if block is not None and not block.token_count else request.part_bytes
            if sizes != request.part_bytes:
                problem = f"others write this block with parts of {list(sizes)} B"
                raise InvalidArgument(field=f"blocks[{i}].part_bytes", problem=problem)
            coming.add(request.key)
        self._check_count(new_count)
        # The new blocks are held together until they are committed: one of them would wait for those before
        # it.
        self._appends.pins.check_ever(owner, new_bytes)

    def _check_count(self, new_count: int) -> None:
        limit = self._state.limits.session_count
        # Blocks have a bound of their own, as large as that of sessions: neither can take the other's places.
        if len(self._ledger.blocks()) + new_count > limit:
            raise TooManyRequests(what="blocks", limit=limit)

    async def _reserve(
        self,
        tenant: str,
        space: bytes,
        request: Wanted,
        client: int | None,
        writer: int,
        model: str,
        expiration: Expiration | None,
    ) -> Room:
        name = block_id(space, request.key)
        block = self._ledger.named(tenant, name)
        if block is not None:
            put = self._puts.get(block.uid)
            if put is None:
                return Room(BlockState.HIT if block.token_count else BlockState.PENDING)
            is_taken = any(part in put.claims or part in put.sums for part in request.parts)
            # Another call still makes room for this block: its places are not known yet.
            if put.reservation is None or is_taken:
                return Room(BlockState.PENDING)
            return self._claim(put, request, writer)
        # Other calls may have made blocks while this call made room for those before.
        self._check_count(1)
        block = self._blank(tenant, name, space, request, model, expiration or self._default())
        # The put is known before anything awaits: a second writer of the same key waits instead of beginning
        # another.
        put = self._puts[block.uid] = Put(block)
        self._ledger.opened(block)
        try:
            put.reservation = await self._appends.reserve(
                tenant,
                name,
                fingerprint=space,
                write_offset=0,
                generation=None,
                token_count=1,
                client=client,
            )
        except BaseException:
            self._puts.pop(block.uid, None)
            if not block.is_gone:
                self._ledger.ended(block)
            raise
        self._put_numbers[put.reservation.reservation_id] = block.uid
        return self._claim(put, request, writer)

    def _claim(self, put: Put, request: Wanted, writer: int) -> Room:
        reservation = put.reservation
        if reservation is None:
            raise RuntimeError("it has no room yet")
        put.claims.update(dict.fromkeys(request.parts, writer))
        [run] = reservation.runs
        slot, offsets = run.segment.memory, put.session.layout.offsets
        if slot is None:
            raise RuntimeError("a reserved segment is not in memory")
        places = tuple([slot.offset_bytes + offsets[part] for part in request.parts])
        return Room(BlockState.MISS, reservation.reservation_id, places)

    def _blank(
        self, tenant: str, name: str, space: bytes, request: Wanted, model: str, expiration: Expiration
    ) -> Session:
        now_ns = self._state.clock.now_ns()
        return Session(
            uid=uuid.uuid4().bytes,
            tenant=tenant,
            session_id=name,
            model_id=model,
            model_fingerprint=space,
            layout=block_layout(request.part_bytes),
            expiration=expiration,
            create_time_ns=now_ns,
            access_time_ns=now_ns,
            expire_time_ns=expiration.after_access(now_ns),
            parent_id=block_id(space, request.parent) if request.parent is not None else "",
            copies=self._state.copies,
        )

    def _own(self, part: WrittenPart, writer: int) -> Put:
        put = self._puts.get(self._put_numbers.get(part.reservation_id, b""))
        if put is None or put.claims.get(part.part) != writer:
            raise ReservationNotFound(reservation_id=part.reservation_id)
        return put

    def _forget(self, put: Put) -> None:
        self._puts.pop(put.session.uid, None)
        if put.reservation is not None:
            self._put_numbers.pop(put.reservation.reservation_id, None)

    # Called by the appends, whatever ended the reservation: release, deadline or a vanished client.
    def _gave_up(self, session: Session) -> None:
        """A reservation of this block ended with nothing committed: it never was."""
        put = self._puts.get(session.uid)
        if put is not None:
            self._forget(put)
        if not session.is_gone:
            self._ledger.ended(session)

    def _is_left(self, block: Session) -> bool:
        """Whether a block lies on SSD alone, and no reader left it there before."""
        if block.withheld or any(segment.memory for segment in block.segments):
            return False
        # A block that is read again belongs into DRAM, whatever cache its reader has.
        if self._left.pop(block.uid, False):
            return False
        if len(self._left) >= LEFT_KEPT:
            del self._left[next(iter(self._left))]
        self._left[block.uid] = True
        return True

    def _hold_at_once(self, request: ReadRequest, held: dict[int, Held], number: int) -> bool:
        """As `_hold`, without waiting; False, and nothing is done, where it would have to wait."""
        try:
            lease = self._leases.acquire_at_once(request)
        except SessionNotFound:
            return True
        if lease is not None:
            self._keep(lease, held, number)
        return lease is not None

    async def _hold(self, request: ReadRequest, held: dict[int, Held], number: int) -> None:
        """Lease a block, and put the lease under that number, unless the block is gone, or bad."""
        try:
            lease = await self._leases.acquire(request)
        except (SessionNotFound, CorruptSegment):
            return
        self._keep(lease, held, number)

    def _keep(self, lease: Lease, held: dict[int, Held], number: int) -> None:
        if lease.pieces:
            held[number] = Held(lease, lease.pieces[0].segment)
        else:
            # The block was cut while its bytes were brought.
            self._leases.release(lease.lease_id)


def _at_hand(blocks: Iterable[Session | None]) -> dict[Session, Segment]:
    """The blocks that lie in DRAM, each once, with their segments."""
    return {
        block: block.segments[0]
        for block in blocks
        if block is not None
        and not block.withheld
        and block.segments[0].memory is not None
        and block.segments[0].is_settled(1)
    }


def _sizes(block: Session) -> tuple[int, ...]:
    """Sizes of a block's parts, in bytes."""
    return tuple([spec.row_bytes for spec in block.layout.specs])


def _raise_first(results: Iterable[BaseException | None]) -> None:
    """Raise the first failure."""
    failure = next((result for result in results if result is not None), None)
    if failure is not None:
        raise failure
