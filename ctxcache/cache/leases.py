"""Leases: rows held in the arena for a reader, and rows in layer order for readers elsewhere.

    ReadRequest ──► ReadPlan: pieces of segments ──► pinned, held ──► promoted ──► Lease ──► released

A lease holds its segments: neither eviction nor truncation nor deletion takes the bytes away before the lease
ends. A session that does not fit into DRAM can still be read as a stream, chunk by chunk.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from ctxcache.cache.budgets import Pins
from ctxcache.cache.held_rows import Bounce, HeldRows, Lent, Rows, Summed, settled_sums
from ctxcache.cache.promotion import Promotions
from ctxcache.cache.scrubbing import Mending
from ctxcache.cache.state import READ, Call, State
from ctxcache.core.history import Event
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Piece, Session, SessionView
from ctxcache.core.limits import Bound, Budget, Pinner
from ctxcache.errors import (
    CacheError,
    CapacityExceeded,
    CorruptSegment,
    DeadlineExceeded,
    InvalidArgument,
    LeaseNotFound,
    TierFailure,
    TooManyRequests,
)
from ctxcache.format.layout import Slot
from ctxcache.format.streams import StateKind, Stream, StreamRange


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The request of a reader: tokens `[begin, end)` of a session of that model; `end` None for all.

    The rows count in `client`'s share of the arena. `leaves_on_ssd`: segments that are not in DRAM are read
    where they lie. `is_summed`: the answer has the rows' checksums. `is_rechecked`: segments in DRAM are
    verified before the answer. `streams_else`: the reader takes by a stream what the arena has no room for.
    """

    tenant: str
    session_id: str
    fingerprint: bytes
    generation: int | None
    begin: int = 0
    end: int | None = None
    client: int | None = None
    leaves_on_ssd: bool = False
    is_summed: bool = False
    is_rechecked: bool = False
    streams_else: bool = False
    is_quiet: bool = False
    """A stream then counts as no access, and is read past DRAM."""


# A session may be cut, deleted or moved between two looks. Only a look and the holds that follow it without
# an await belong together.
class ReadPlan:
    """A request, resolved against the session as it is now. `look` again after every await."""

    now_ns: int
    """When `look` ran, in the store's time."""
    session: Session
    end: int
    pieces: tuple[Piece, ...]
    sizes_bytes: dict[int, int]
    """Bytes to be pinned, by segment id."""
    on_ssd: dict[int, Slot]
    """Where the segments lie that are left on SSD, by segment id."""
    dram_token_count: int
    is_ready: bool
    """Whether no segment is to be promoted, and no checksum to be computed."""

    def __init__(self, state: State, request: ReadRequest) -> None:
        self.request, self.owner = request, Pinner(request.tenant, request.client)
        self._clock, self._ledger = state.clock, state.ledger

    def look(self) -> dict[int, int]:
        """Resolve the request; returns `sizes_bytes`. Raises what is wrong with the request."""
        request = self.request
        self.now_ns = self._clock.now_ns()
        session = self.session = self._ledger.find_at(request.tenant, request.session_id, self.now_ns)
        session.check_caller(request.fingerprint, request.generation)
        end = self.end = session.token_count if request.end is None else request.end
        # One comparison in the usual case; the error is made in the method.
        if not 0 <= request.begin <= end <= session.token_count:
            session.check_range(request.begin, end)
        self.pieces = tuple(session.pieces(request.begin, end))
        self.sizes_bytes, self.on_ssd = {}, {}
        self.dram_token_count, self.is_ready = 0, True
        for piece in self.pieces:
            segment = piece.segment
            if segment.memory is not None:
                self.dram_token_count += piece.row_end - piece.row_begin
                if request.is_summed and not segment.is_settled(piece.row_end):
                    # The stored sum is of more rows than the reader gets. A sum of the reader's rows is
                    # computed off the fast path.
                    self.is_ready = False
            elif request.leaves_on_ssd and segment.durable is not None:
                self.on_ssd[segment.segment_id] = self._ledger.best_place(segment) or segment.durable
                # The client reads these segments from the file itself, as GPU direct reads do. They take no
                # room in DRAM, and do not count in the budget.
                continue
            else:
                self.is_ready = False
            self.sizes_bytes[segment.segment_id] = segment.layout.size_bytes
        return self.sizes_bytes

    @property
    def sum_count(self) -> int:
        """How many checksums an answer with these pieces has."""
        return len(self.pieces) * len(self.session.layout.specs)

    def look_for_stream(self, budget: Budget) -> dict[int, int]:
        """As `look`, and never refused: where the budget lacks room for all, only some are to be pinned.

        Those are the first segments in DRAM, as many as the budget has room for.
        """
        sizes_bytes = self.look()
        if self.request.is_quiet:
            # A quiet read pins nothing and counts as no use: export and copying must not warm up what they
            # read.
            self.sizes_bytes = {}
        elif not budget.fits(self.owner, sizes_bytes):
            resident = {p.segment.segment_id: p.segment.size_bytes for p in self.pieces if p.segment.memory}
            left_bytes, self.sizes_bytes = budget.limit_of(self.owner), {}
            for segment_id, size_bytes in resident.items():
                # Segments are taken in token order up to the first that does not fit. The rest is read past
                # DRAM.
                left_bytes -= size_bytes
                if left_bytes < 0:
                    break
                self.sizes_bytes[segment_id] = size_bytes
        return self.sizes_bytes


SECOND_NS = 10**9
LEASE_LIFETIME_NS = 300 * SECOND_NS
NEVER_NS = 1 << 62
NOTHING: Mapping[int, Slot] = MappingProxyType({})


# Two ways in, and one way out:
#
#     acquire_at_once   all is in DRAM, nothing to wait for       no task, no await
#     acquire           holds first, then promotes, then settles  the holds keep the plan true while it waits
#                       release, end_overdue, end of its client
@dataclass(slots=True, eq=False)
class Lease:
    """Pieces held for a reader, in token order. All are in DRAM, but for those that the request left on SSD.

    The deadline begins when the rows are there. That of a stream moves on with every piece that it reads.
    """

    lease_id: int
    view: SessionView
    begin: int
    end: int
    pieces: tuple[Piece, ...]
    client: Pinner
    pinned: dict[int, int]
    """Bytes by segment id, as they count in the budget. Pieces of other segments may leave DRAM."""
    dram_token_count: int
    """Tokens that were in DRAM when the lease was asked for."""
    deadline_ns: int = NEVER_NS
    begun_ns: int = 0
    on_ssd: Mapping[int, Slot] = field(default_factory=dict)
    """Slots of segments that the reader reads from the SSD file itself, by segment id."""
    is_quiet: bool = False
    """Whether the lease is neither an access nor a use of its session."""
    is_taken: bool = False
    """Whether a reader has leased the rows once more, see `again`."""
    is_same_read: bool = False
    """Whether it is the read that the lease it was made of has counted."""
    others: tuple[bytes, ...] = ()
    """Uids of the other blocks of a lease of several; `view` is of the first."""

    def is_past(self, segment: Segment) -> bool:
        """Whether a segment may leave DRAM during the lease: it is not pinned, and is read past DRAM."""
        return segment.segment_id not in self.pinned


class Leases:
    """The use cases of a reader."""

    def __init__(
        self, state: State, held_rows: HeldRows, promotions: Promotions, mending: Mending, pins: Pins
    ) -> None:
        self._state = state
        self._ledger = state.ledger
        self._held_rows = held_rows
        self._promotions, self._mending = promotions, mending
        self.pins = pins
        self._leases: dict[int, Lease] = {}
        self._counts: Counter[str] = Counter()
        """Leases by tenant."""
        self._last_id = 0

    @property
    def lease_count(self) -> int:
        """Leases held now."""
        return len(self._leases)

    @property
    def oldest_lease_s(self) -> float:
        """Age of the lease that was acquired first, of those held now; 0 when there is none."""
        lease = next(iter(self._leases.values()), None)
        return 0.0 if lease is None else self.age_s(lease)

    def leases(self) -> Iterable[Lease]:
        """Leases held now."""
        return self._leases.values()

    def lease(self, lease_id: int) -> Lease:
        """A lease that is held now. Raises LeaseNotFound."""
        try:
            return self._leases[lease_id]
        except KeyError:
            raise LeaseNotFound(lease_id=lease_id) from None

    def age_s(self, lease: Lease) -> float:
        """For how many seconds a lease is held."""
        return (self._state.clock.monotonic_ns() - lease.begun_ns) / SECOND_NS

    def held(self) -> Iterator[Segment]:
        """Segments held by leases, once per hold."""
        return (piece.segment for lease in self._leases.values() for piece in lease.pieces)

    async def acquire(self, request: ReadRequest) -> Lease:
        """Bring tokens into DRAM and hold them there. Pieces left on SSD are held, not verified.

        Raises SessionNotFound, ModelFingerprintMismatch, GenerationMismatch, TokenRangeOutOfBounds,
        CapacityExceeded, TooManyRequests, CorruptSegment, TierFailure.
        """
        lease = self.acquire_at_once(request)
        if lease is not None:
            return lease
        # The lease holds its segments before the promotion: other readers must not evict segments on their
        # way.
        lease = await self._hold(request)
        try:
            await self._promote(lease)
            await self._prepare(lease, request)
        except BaseException as error:
            # On cancellation too: a lease that its caller never hears of would hold its rows for five
            # minutes.
            self.release(lease.lease_id)
            if isinstance(error, CacheError):
                self._missed(request, error)
            raise
        # The deadline begins now: the time that SSD took is not counted against the reader.
        self._renew(lease)
        self._found(lease)
        return lease

    async def again(self, held: Callable[[], Lease], tenant: str, client: int | None) -> Lease:
        """Another lease, of this client, on the rows of a lease that is held.

        The first one is the read that the held lease has counted; each further one is a read of its own.
        Moves nothing. The rows are those of the lease, also when the session has changed meanwhile. Raises
        what `held` raises, CapacityExceeded, TooManyRequests.
        """
        owner = Pinner(tenant, client)
        # A call that is refused anyway takes no place in the line.
        self._check_count(tenant)
        await self.pins.wait_for_room(owner, lambda: held().pinned)
        # The lease may have ended while this call waited for room, and others may have begun.
        self._check_count(tenant)
        source, now_ns = held(), self._state.clock.monotonic_ns()
        # A copy of the lease with its own number and deadline. Its rows are those of the source, held once
        # more.
        lease = replace(
            source,
            lease_id=self._new_id(),
            client=owner,
            begun_ns=now_ns,
            deadline_ns=now_ns + LEASE_LIFETIME_NS,
            is_same_read=not source.is_taken,
        )
        source.is_taken = True
        self._enter(lease)
        # The session may be gone while its rows are still held by the source.
        session = self._ledger.get(lease.view.uid)
        if session is not None:
            # A use in any case: it ends with the lease.
            self._ledger.read_began(session, lease.pieces, now_ns / SECOND_NS)
        if lease.is_same_read:
            return lease
        if session is not None:
            self._ledger.touched(session, self._state.clock.now_ns())
        self._state.counters.read_token_count += lease.end - lease.begin
        self._state.read_tokens[tenant] += lease.end - lease.begin
        self._state.counters.dram_hit_token_count += lease.end - lease.begin
        self._found(lease)
        return lease

    def let_go(self, leases: Iterable[Lease]) -> None:
        """End these leases. Ignores those that have ended."""
        for lease in leases:
            if lease.lease_id in self._leases:
                self.release(lease.lease_id)

    def acquire_at_once(self, request: ReadRequest, *, sum_limit: int | None = None) -> Lease | None:
        """Acquire without waiting: all rows are in DRAM, or left on SSD, and there is room.

        Returns None and changes nothing otherwise, and where the answer would have more checksums than
        `sum_limit`. Raises as `acquire`, except CorruptSegment and TierFailure.
        """
        # A recheck reads every byte, and belongs on the way that may wait.
        if request.is_rechecked:
            return None
        try:
            self._check_count(request.tenant)
            plan = ReadPlan(self._state, request)
            sizes_bytes = plan.look()
            # `has_room` pins nothing. Nothing awaits until `_begin` does.
            if not plan.is_ready or not self.pins.has_room(plan.owner, sizes_bytes):
                return None
            if sum_limit is not None and request.is_summed and plan.sum_count > sum_limit:
                return None
        except CacheError as error:
            self._missed(request, error)
            raise
        # The deadline begins now, for no time was spent on a device.
        lease = self._begin_plan(plan)
        lease.deadline_ns = lease.begun_ns + LEASE_LIFETIME_NS
        self._found(lease)
        return lease

    # The blocks of one look-up or load share one lease: the work per lease, and not per block, is a third of
    # the whole for sixteen blocks.
    def has_room_for_blocks(self, blocks: Mapping[Session, Segment], owner: Pinner) -> bool:
        """Whether `acquire_blocks` may be called now, without a wait and a refusal.

        Raises CapacityExceeded where the blocks are more than may ever be held.
        """
        return not self._is_full(owner.tenant) and self.pins.has_room(owner, _sizes_bytes(blocks))

    def acquire_blocks(self, blocks: Mapping[Session, Segment], owner: Pinner, now_ns: int) -> Lease:
        """One lease of all these blocks of the owner's tenant, at `now_ns` of the store's time.

        The caller has seen them in DRAM, and has not awaited since. Each block counts as accessed.
        """
        first, *others = blocks
        lease = self._begin(
            first,
            # A block is one token.
            tuple([Piece(segment, 0, 1, i) for i, segment in enumerate(blocks.values())]),
            _sizes_bytes(blocks),
            owner,
            now_ns,
            span=(0, len(blocks)),
            dram_token_count=len(blocks),
            others=others,
        )
        lease.deadline_ns = lease.begun_ns + LEASE_LIFETIME_NS
        self._found(lease)
        return lease

    async def recheck(self, lease_id: int) -> None:
        """Verify the rows that a lease holds in DRAM, since its reader found other bytes.

        Raises LeaseNotFound, CorruptSegment, TierFailure.
        """
        lease = self.lease(lease_id)
        try:
            for piece in lease.pieces:
                # Rows left on SSD are the reader's to verify.
                if piece.segment.memory and not lease.is_past(piece.segment):
                    await self._mending.verify(piece.segment)
                settled_sums(piece)
        except CorruptSegment as error:
            self._state.journal.missed(
                READ, lease.view.tenant, lease.view.name.removeprefix("sessions/"), error
            )
            raise

    def is_held(self, lease_id: int) -> bool:
        """Whether a lease has not ended yet."""
        return lease_id in self._leases

    def check(self, lease: Lease, ttl_ns: int = LEASE_LIFETIME_NS) -> None:
        """Raise DeadlineExceeded unless a stream's lease, given for `ttl_ns`, still holds its rows."""
        if lease.lease_id not in self._leases:
            raise DeadlineExceeded(target="reader", timeout_s=f"{ttl_ns / SECOND_NS:g}")

    def release(self, lease_id: int) -> None:
        """End a lease. Raises LeaseNotFound."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            raise LeaseNotFound(lease_id=lease_id)
        now_ns, tenant = self._state.clock.monotonic_ns(), lease.view.tenant
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]
        self._state.seen.lease_s.observe((now_ns - lease.begun_ns) / SECOND_NS)
        if not lease.is_quiet:
            # The session's use ends before the holds do: the policy ranks the session before its segments
            # may leave.
            self._ledger.read_ended(lease.view.uid, now_ns / SECOND_NS)
            for uid in lease.others:
                self._ledger.read_ended(uid, now_ns / SECOND_NS)
        self._release_pieces(lease)
        self.pins.unpin(lease.client, lease.pinned)
        if self._state.journal.listening is not None and not lease.is_same_read:
            self._state.journal.did(Call.RELEASE, lease.view, lease=lease_id)

    def end_overdue(self) -> None:
        """End leases past their deadline."""
        now_ns = self._state.clock.monotonic_ns()
        # A list is made first, since `release` changes the table.
        for lease in [held for held in self._leases.values() if held.deadline_ns <= now_ns]:
            self.release(lease.lease_id)
            session = self._ledger.names.by_uid.get(lease.view.uid)
            if session is not None:
                detail = f"read: a lease was not released within {LEASE_LIFETIME_NS // SECOND_NS} s"
                self._state.journal.happened(session, Event.TIMEOUT, detail=detail)

    @asynccontextmanager
    async def stream(
        self, request: ReadRequest, streams: Sequence[StreamRange]
    ) -> AsyncIterator[tuple[Lease, Sequence[Stream], AsyncIterator[Rows]]]:
        """Read streams one after the other, tokens ascending; no ranges mean all.

        Raises as `acquire` does, InvalidArgument (a stream the session does not store), but never
        CapacityExceeded: what does not fit into DRAM is read past it. The rows raise
        DeadlineExceeded when nobody asked for the next ones for longer than a lease lasts.
        """
        lease = await self._hold(request, is_stream=True)
        try:
            chosen = _chosen(lease.view, streams)
            # Beyond the readers' share the stream reads only segments that are in DRAM already.
            if len(lease.pinned) == len({piece.segment.segment_id for piece in lease.pieces}):
                # A segment that cannot be promoted is read past memory. A lack of room is no error of the
                # read, and a device's failure is raised there.
                with suppress(CapacityExceeded, TierFailure):
                    try:
                        await self._promote(lease)
                        await self._prepare(lease, request)
                    except CorruptSegment as error:
                        self._missed(request, error)
                        # Damaged rows cannot be read past memory either.
                        raise
            self._renew(lease)
            self._found(lease)
            yield lease, chosen, self._rows(lease, chosen)
        finally:
            # The lease may have expired while rows were streamed.
            with suppress(LeaseNotFound):
                self.release(lease.lease_id)

    @contextmanager
    def lend(self, lease: Lease) -> Iterator[tuple[Lent, ...]]:
        """Hold a stream's pieces for another thread, even past the lease's end."""
        # The pieces are held once more, since the lease may end while the other thread still reads.
        self._hold_pieces(lease)
        try:
            yield tuple(
                self._held_rows.lent(piece, is_kept=not lease.is_past(piece.segment))
                for piece in lease.pieces
            )
        finally:
            self._release_pieces(lease)

    def renew(self, lease: Lease) -> None:
        """Move a lease's deadline on, for its reader takes rows. Raises DeadlineExceeded."""
        self.check(lease)
        self._renew(lease)

    async def mend(self, segment: Segment) -> None:
        """Verify a held segment in DRAM whose reader found other rows.

        Raises CorruptSegment, TierFailure.
        """
        await self._mending.verify(segment)

    async def read_past(self, lease: Lease, piece: Piece, stream: Stream, bounce: Bounce) -> Summed:
        """One stream's rows of a piece that is not kept in DRAM; they lie in `bounce`.

        Raises CorruptSegment, TierFailure, DeadlineExceeded.
        """
        self.renew(lease)
        return await self._held_rows.copied(piece, stream, bounce)

    # -- parts -----------------------------------------------------------------------------------------

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _enter(self, lease: Lease) -> None:
        """Pin and hold a lease's pieces, and keep the lease until `release`. The budget has room for it."""
        self.pins.pin(lease.client, lease.pinned)
        self._hold_pieces(lease)
        self._leases[lease.lease_id] = lease
        self._counts[lease.view.tenant] += 1

    def _hold_pieces(self, lease: Lease) -> None:
        for piece in lease.pieces:
            self._ledger.held(piece.segment, is_past=lease.is_past(piece.segment))

    def _release_pieces(self, lease: Lease) -> None:
        for piece in lease.pieces:
            self._ledger.released(piece.segment, is_past=lease.is_past(piece.segment))

    async def _hold(self, request: ReadRequest, *, is_stream: bool = False) -> Lease:
        try:
            return await self._hold_what_is_there(request, is_stream=is_stream)
        except CacheError as error:
            self._missed(request, error)
            raise

    def _missed(self, request: ReadRequest, error: CacheError) -> None:
        # The stream that follows a lack of room is the read, and has its own result.
        goes_on = request.streams_else and isinstance(error, CapacityExceeded)
        if not request.is_quiet and not goes_on:
            self._state.journal.missed(READ, request.tenant, request.session_id, error)

    async def _hold_what_is_there(self, request: ReadRequest, *, is_stream: bool) -> Lease:
        self._check_count(request.tenant)
        plan = ReadPlan(self._state, request)
        look = partial(plan.look_for_stream, self.pins) if is_stream else plan.look
        await self.pins.wait_for_room(plan.owner, look)
        # Other calls waited as well: the bound is checked again for all that passed the first check.
        self._check_count(request.tenant)
        # Room and plan are those of the last look: no await follows.
        return self._begin_plan(plan)

    def _check_count(self, tenant: str) -> None:
        if self._is_full(tenant):
            raise TooManyRequests(what="leases", limit=self._state.limits.lease_count)

    def _is_full(self, tenant: str) -> bool:
        limits = self._state.limits
        bound = Bound(limits.lease_count, limits.are_divided)
        return bound.is_reached(len(self._leases), self._counts[tenant])

    def _begin_plan(self, plan: ReadPlan) -> Lease:
        """Hold what the plan asks for. The budget has room for it."""
        request = plan.request
        return self._begin(
            plan.session,
            plan.pieces,
            plan.sizes_bytes,
            plan.owner,
            plan.now_ns,
            span=(request.begin, plan.end),
            dram_token_count=plan.dram_token_count,
            on_ssd=plan.on_ssd,
            is_quiet=request.is_quiet,
        )

    def _begin(
        self,
        session: Session,
        pieces: tuple[Piece, ...],
        sizes_bytes: dict[int, int],
        owner: Pinner,
        looked_ns: int,
        *,
        span: tuple[int, int],
        dram_token_count: int,
        on_ssd: Mapping[int, Slot] = NOTHING,
        is_quiet: bool = False,
        others: Sequence[Session] = (),
    ) -> Lease:
        """Hold pieces of a session, tokens `span`, that were seen at `looked_ns` of the store's time.

        Nothing was awaited since. `others`: further blocks to which some of the pieces belong.
        """
        now_ns = self._state.clock.monotonic_ns()
        if not is_quiet:
            for leased in (session, *others):
                self._ledger.touched(leased, looked_ns)
            self._state.counters.read_token_count += span[1] - span[0]
            self._state.read_tokens[session.tenant] += span[1] - span[0]
            self._state.counters.dram_hit_token_count += dram_token_count
        lease = Lease(
            self._new_id(),
            # The view is of this moment: it stays true of the lease's rows when the session goes on.
            session.view(),
            *span,
            pieces,
            owner,
            sizes_bytes,
            dram_token_count,
            begun_ns=now_ns,
            on_ssd=on_ssd,
            is_quiet=is_quiet,
            others=tuple([leased.uid for leased in others]) if others else (),
        )
        # Nothing awaits between the look and these holds: the segments are where the look saw them.
        self._enter(lease)
        if not is_quiet:
            for leased in others:
                self._ledger.read_began(leased, (), now_ns / SECOND_NS)
            # The policy hears of all pieces: segments that were promoted ahead of need count as read.
            self._ledger.read_began(session, pieces, now_ns / SECOND_NS)
        return lease

    def _renew(self, lease: Lease) -> None:
        lease.deadline_ns = self._state.clock.monotonic_ns() + LEASE_LIFETIME_NS

    def _found(self, lease: Lease) -> None:
        if lease.is_quiet:
            return
        took_ns = lease.deadline_ns - LEASE_LIFETIME_NS - lease.begun_ns
        self._state.journal.found(
            READ,
            lease.view,
            lease=lease.lease_id,
            begin=lease.begin,
            tokens=lease.end - lease.begin,
            dram_tokens=lease.dram_token_count,
            took_us=took_ns // 1000,
            count=1 + len(lease.others),
        )

    async def _promote(self, lease: Lease) -> None:
        # Two pieces of one segment are promoted together.
        unique = {p.segment.segment_id: p.segment for p in lease.pieces if not lease.is_past(p.segment)}
        try:
            await self._promotions.promote(list(unique.values()))
        except CorruptSegment as error:
            await self._mending.quarantine_named(error)
            raise

    async def _prepare(self, lease: Lease, request: ReadRequest) -> None:
        """Verify a lease's pieces in DRAM and sum the reader's rows, each where the request asks for it."""
        for piece in lease.pieces:
            segment = piece.segment
            if not segment.memory or lease.is_past(segment):
                continue
            if request.is_rechecked:
                await self._mending.verify(segment)
            if request.is_summed:
                await self._mending.settle(segment, piece.row_end)

    async def _rows(self, lease: Lease, streams: Sequence[Stream]) -> AsyncIterator[Rows]:
        bounce = Bounce()
        for stream in streams:
            for piece in lease.pieces:
                # A reader that takes rows keeps its lease alive; one that stops loses it after
                # LEASE_LIFETIME_NS.
                self.renew(lease)
                segment = piece.segment
                if segment.memory and not lease.is_past(segment):
                    # A segment in DRAM stays in its slot as long as the lease holds it.
                    data, checksum = await self._held_rows.in_place(piece, stream)
                    yield Rows(stream, piece.token_begin, data, checksum, segment)
                else:
                    data, checksum = await self._held_rows.copied(piece, stream, bounce)
                    yield Rows(stream, piece.token_begin, data, checksum)


def _sizes_bytes(blocks: Mapping[Session, Segment]) -> dict[int, int]:
    return {segment.segment_id: segment.layout.size_bytes for segment in blocks.values()}


def _chosen(view: SessionView, ranges: Sequence[StreamRange]) -> Sequence[Stream]:
    """The streams in these ranges, in storage order."""
    if not ranges:
        return tuple(view.layout.index)
    layers: dict[StateKind, set[int]] = {}
    for kind, begin, end in ranges:
        layers.setdefault(kind, set()).update(range(begin, end))
    chosen = [stream for stream in view.layout.index if stream.layer in layers.get(stream.kind, ())]
    if len(chosen) < sum(map(len, layers.values())):
        missing = next(s for item in ranges for s in item.streams() if s not in view.layout.index)
        raise InvalidArgument(field="streams", problem=f"{view.name} does not store {missing}")
    return chosen
