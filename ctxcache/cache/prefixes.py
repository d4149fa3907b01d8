"""Prefixes: find by its tokens what some session has, and let another session begin with it.

    token ids ──► keys ──► the longest run of them that a session holds ──► adopted: listed by both

An adoption copies nothing, and is a fork under another name: what it shares is durable first, grows no more,
and goes when the last session that lists it goes. The session that has it may be written meanwhile. Nothing
awaits between a match and the change that it allows. Worst case: what was found is gone at every look, and
nothing is adopted.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import nlargest
from itertools import takewhile
from operator import attrgetter

from ctxcache.cache.eviction import Departures
from ctxcache.cache.flushing import Flushing
from ctxcache.cache.leases import Leases, ReadRequest
from ctxcache.cache.state import STEP_BY_STEP, Call, Pace, State
from ctxcache.cache.token_leases import TokenLease, TokenLeases
from ctxcache.core.ledger.session import HIDDEN, Piece, Session, SessionView
from ctxcache.core.prefix.keys import BLOCK_BYTES, BLOCK_TOKENS, NO_PARENT, Scope, scope_of
from ctxcache.errors import (
    CorruptSegment,
    GenerationMismatch,
    InvalidArgument,
    SessionNotFound,
    TierFailure,
    WriteInProgress,
)
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import Content, StreamRange
from ctxcache.storage.metadata.base import MetadataStore

LOOKS = 8
"""How often an adoption looks for what it is to adopt: each time it may be gone, or not be durable."""
KEYS_PER_LOOK = 64
"""Keys that are made or looked for before others may have their turn."""
SEGMENTS_PER_LOOK = 64
SESSIONS_PER_LOOK = 64


class Found(Enum):
    """The outcome of a match."""

    MISS = "miss"
    HIT = "hit"
    """It can be adopted at once."""
    PENDING = "pending"
    """Memory alone has some of it: an adoption writes it to SSD first."""


class Shortfall(Enum):
    """Why a match found no more."""

    NOT_STORED = "not stored"
    """No session has the next 64 tokens."""
    CUT = "cut"
    """A session has them, and lost tokens before them."""
    SHORT = "short"
    """Fewer than 64 tokens are left."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix that is there. `dram_token_count`: of its tokens, those in memory."""

    found: Found = Found.MISS
    token_count: int = 0
    dram_token_count: int = 0
    shortfall: Shortfall | None = Shortfall.NOT_STORED
    """None where all tokens were found."""
    lease: TokenLease | None = None
    """The lease that holds the tokens, where one was asked for."""
    missing_bytes: int = 0
    """Slots of these tokens that are on SSD alone."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of several sessions, one of which is named."""

    session_name: str
    key: bytes
    token_count: int
    session_count: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """A session after an adoption, and how many tokens the adoption gave it."""

    view: SessionView
    token_count: int


@dataclass(frozen=True, slots=True)
class Held:
    """How much of a prompt is here, for whoever might bring more of it.

    `salt`, `expire_time_ns`: of the session that has it.
    """

    scope: Scope
    layout: SegmentLayout
    token_count: int
    salt: bytes
    expire_time_ns: int


@dataclass(slots=True)
class PrefixCounts:
    """Since the start."""

    asked_token_count: int = 0
    """Tokens that matches and adoptions were asked for."""
    found_token_count: int = 0
    adopted_token_count: int = 0
    adopted_bytes: int = 0
    """Bytes of slots that adoptions did not have to take, in one tier."""


class Prefixes:
    """The use cases over prefixes. Owned by the event loop."""

    def __init__(
        self,
        state: State,
        metadata: MetadataStore,
        departures: Departures,
        flushing: Flushing,
        leases: Leases,
        tokens: TokenLeases,
    ) -> None:
        self._state, self._ledger, self._leases, self._tokens = state, state.ledger, leases, tokens
        self._metadata, self._departures, self._flushing = metadata, departures, flushing
        self.counts = PrefixCounts()

    async def held(
        self,
        tenant: str,
        model_id: str,
        layout: Sequence[StreamRange],
        asked: bytes | Sequence[bytes],
        *,
        salt: bytes = b"",
        contents: Sequence[Content] = (),
        pace: Pace = STEP_BY_STEP,
    ) -> Held:
        """As `match`; it is counted as no question."""
        scope, made = self._scope(tenant, model_id, layout, salt)
        keys = await self._known(scope, asked, contents, pace)
        holder = self._holder(scope, keys, is_proven=isinstance(asked, bytes))
        if holder is None:
            return Held(scope, made, 0, salt, 0)
        source, count = holder
        return Held(scope, made, count, source.salt, source.expire_time_ns)

    def _scope(
        self, tenant: str, model_id: str, layout: Sequence[StreamRange], salt: bytes
    ) -> tuple[Scope, SegmentLayout]:
        model = self._state.model(tenant, model_id)
        try:
            made = self._state.layout(model, layout)
        except KeyError as error:
            raise InvalidArgument(field="layout", problem=f"the model has no {error.args[0]}") from error
        return scope_of(tenant, model.fingerprint, made.outline.ranges, salt), made

    async def match(
        self,
        tenant: str,
        model_id: str,
        layout: Sequence[StreamRange],
        asked: bytes | Sequence[bytes],
        *,
        token_count: int | None = None,
        salt: bytes = b"",
        contents: Sequence[Content] = (),
        offered: Sequence[bytes] = (),
        lease_ttl_ns: int = 0,
        pace: Pace = STEP_BY_STEP,
    ) -> Match:
        """The longest prefix of these token ids (int32, little endian), or keys, that sessions have.

        The sessions have that model, layout and salt. `contents`: what lies behind the token ids; keys are
        made with salt and contents already. `token_count`: how many tokens are asked for where there are keys
        alone; 64 for each key by default. `offered`: keys that the caller made of the token ids.
        `lease_ttl_ns`: the prefix is brought to memory and held for so long, for all who have the token; that
        counts as an access. Raises ModelNotFound, InvalidArgument (a stream that the model does not have,
        keys of other tokens), and with a lease CapacityExceeded, TooManyRequests, TierFailure.
        """
        scope, _ = self._scope(tenant, model_id, layout, salt)
        if isinstance(asked, bytes):
            await _check_offered(scope, asked, contents, offered, pace)
        keys = await self._known(scope, asked, contents, pace)
        asked_count, known_count = token_count or _token_count(asked), len(keys) * BLOCK_TOKENS
        self.counts.asked_token_count += asked_count
        holder = self._holder(scope, keys, is_proven=isinstance(asked, bytes))
        lease: TokenLease | None = None
        # The lease names the generation: a session that changes between the look and the lease is looked for
        # again.
        for _ in range(LOOKS if lease_ttl_ns else 0):
            if holder is None or lease is not None:
                break
            lease = await self._held(*holder, ttl_ns=lease_ttl_ns)
            # Other calls may have changed the session during the attempts.
            holder = holder if lease else self._holder(scope, keys, is_proven=isinstance(asked, bytes))
        if holder is None:
            return Match(shortfall=_shortfall(asked_count, known_count, 0))
        source, token_count = holder
        self.counts.found_token_count += token_count
        missing: list[Piece] = []
        if not source.is_in_memory:
            missing = [piece for piece in source.pieces(0, token_count) if not piece.segment.memory]
        is_durable = source.durable_end >= token_count
        return Match(
            # Rows that memory alone has can be adopted after a flush.
            Found.HIT if is_durable else Found.PENDING,
            token_count,
            token_count - sum(piece.row_end - piece.row_begin for piece in missing),
            _shortfall(asked_count, known_count, token_count),
            lease,
            sum(piece.segment.layout.size_bytes for piece in missing),
        )

    async def _held(self, source: Session, token_count: int, *, ttl_ns: int) -> TokenLease | None:
        """A lease of the source's first tokens; None where it changes before they are held."""
        request = ReadRequest(
            source.tenant,
            source.session_id,
            source.model_fingerprint,
            source.generation,
            end=token_count,
            is_summed=True,
        )
        try:
            lease = await self._leases.acquire(request)
        except (SessionNotFound, GenerationMismatch, CorruptSegment):
            return None
        return self._tokens.hold_prefix(source.tenant, lease, ttl_ns=ttl_ns)

    async def adopt(
        self,
        tenant: str,
        session_id: str,
        fingerprint: bytes,
        generation: int | None,
        asked: bytes | Sequence[bytes],
        *,
        contents: Sequence[Content] = (),
        offered: Sequence[bytes] = (),
        pace: Pace = STEP_BY_STEP,
    ) -> Adopted:
        """Let a session that never had a token begin with the longest prefix that another one has.

        The other session has the same salt. `contents` as in `match`. Without such a session this one stays
        as it is. Raises SessionNotFound, ModelFingerprintMismatch, GenerationMismatch, WriteInProgress,
        InvalidArgument (it has, or had, tokens; keys of other tokens), CapacityExceeded, TierFailure.
        """
        session = self._adopter(tenant, session_id, fingerprint, generation)
        self._metadata.check()
        scope = scope_of(tenant, fingerprint, session.layout.outline.ranges, session.salt)
        if isinstance(asked, bytes):
            await _check_offered(scope, asked, contents, offered, pace)
        keys = await self._known(scope, asked, contents, pace)
        self.counts.asked_token_count += _token_count(asked)
        # The state of one adoption, over its looks:
        #
        #     found, not durable        flush it, look again
        #     durable, not counted      count its segments with the kin, look again
        #     counted, still there      adopt: no await since the last look
        shared: tuple[bytes, int] | None = None
        for _ in range(LOOKS):
            session = self._adopter(tenant, session_id, fingerprint, generation)
            holder = self._holder(scope, keys, is_proven=isinstance(asked, bytes))
            if holder is None:
                break
            source, token_count = holder
            if source.salt != session.salt:
                # The keys may be of another salt, while tokens appended behind them would be of this
                # session's.
                break
            if source.durable_end < token_count:
                await self._flush(source)
            # A run longer than the counted one is fine. A shorter one was never prepared.
            elif shared is None or shared[0] != source.uid or shared[1] > token_count:
                shared = source.uid, token_count
                await self._share(source, token_count, pace)
            else:
                # A writer may have added to the source meanwhile: the next adoption takes that.
                await self._adopt(session, source, shared[1])
                return Adopted(session.view(), shared[1])
        # No session had a prefix, or each of LOOKS looks met another state: the caller computes the tokens.
        return Adopted(session.view(), 0)

    async def most_shared(self, tenant: str, limit: int, *, pace: Pace = STEP_BY_STEP) -> list[SharedPrefix]:
        """At most so many prefixes that several of a tenant's sessions list, what saves most first.

        Several forks of forks have one entry: the prefix that all of them share.
        """
        shared: dict[int, SharedPrefix] = {}
        for i, session_id in enumerate(list(self._ledger.names.ids(tenant)), 1):
            # A dormant session shares nothing.
            is_dormant = self._ledger.sleep.dormant.named(tenant, session_id) is not None
            is_hidden = is_dormant or session_id.startswith(HIDDEN)
            session = None if is_hidden else self._ledger.glance(tenant, session_id)
            first = session.segments[0] if session and session.segments else None
            if session and first and first.reference_count > 1 and first.segment_id not in shared:
                shared[first.segment_id] = self._shared_prefix(session)
            # There may be thousands of sessions, and each is one step.
            if i % SESSIONS_PER_LOOK == 0 and pace.is_over:
                await pace.rest()
        return nlargest(limit, shared.values(), key=attrgetter("saved_bytes"))

    async def forget_gone(self) -> None:
        """Take the keys of what is gone out of the index."""
        while self._ledger.keyed.tidy(KEYS_PER_LOOK):  # noqa: ASYNC110  # it is work, and no waiting
            await asyncio.sleep(0)

    # -- parts -------------------------------------------------------------------------------------

    def _shared_prefix(self, session: Session) -> SharedPrefix:
        count = session.segments[0].reference_count
        # The prefix is the first run of segments that the same number of sessions lists.
        shared = list(takewhile(lambda segment: segment.reference_count == count, session.segments))
        keys = self._ledger.keyed.keys_of(shared[-1], shared[-1].row_count)
        return SharedPrefix(
            session.name,
            keys[-1] if keys else b"",
            shared[-1].end - shared[0].begin,
            count,
            (count - 1) * sum(segment.size_bytes for segment in shared),
        )

    def _adopter(self, tenant: str, session_id: str, fingerprint: bytes, generation: int | None) -> Session:
        session = self._ledger.find(tenant, session_id)
        session.check_caller(fingerprint, generation)
        if session.is_writing:
            raise WriteInProgress(session=session.name)
        if session.log_end or session.segments:
            raise InvalidArgument(field="session", problem=f"{session.name} has or had tokens of its own")
        return session

    async def _known(
        self, scope: Scope, asked: bytes | Sequence[bytes], contents: Sequence[Content], pace: Pace
    ) -> list[bytes]:
        """The keys that are in the index, from the first one on.

        For a few keys at a time the last one is looked for, and the others only where it is missing: a key
        stands for all before it. The session that holds its tokens is looked for afterwards.
        """
        keyed, known = self._ledger.keyed, list[bytes]()
        count = len(asked) // BLOCK_BYTES if isinstance(asked, bytes) else len(asked)
        # Keys that are made here take a slice of time by the 64. Keys that came are only looked for.
        most = KEYS_PER_LOOK if isinstance(asked, bytes) else count
        # Steps double: a miss costs one key, and a hit of a million tokens some hundred looks.
        begin, some = 0, 1
        while begin < count:
            if begin and pace.is_over:
                await pace.rest()
            end = min(begin + some, count)
            if isinstance(asked, bytes):
                token_ids = memoryview(asked)[begin * BLOCK_BYTES : end * BLOCK_BYTES]
                # Each key is made with the one before, so that what was found is the parent of the next.
                parent = known[-1] if known else NO_PARENT
                keys = list(scope.keys(token_ids, parent, contents, begin * BLOCK_TOKENS))
            else:
                keys = list(asked[begin:end])
            if next(keyed.found(scope, keys[-1]), None) is None:
                # Keys are all there up to some point and none behind it: bisection finds the point.
                known_count = bisect_left(
                    keys, 1, key=lambda key: next(keyed.found(scope, key), None) is None
                )
                return known + keys[:known_count]
            known += keys
            begin, some = end, min(2 * some, most)
        return known

    def _holder(self, scope: Scope, keys: Sequence[bytes], *, is_proven: bool) -> tuple[Session, int] | None:
        """A session that has the longest run of these keys, and how many tokens of it others may list.

        `is_proven`: the keys were made here, of tokens, so that each continues the one before. A segment that
        a writer still fills grows, so a session that is being written shares whole segments alone.
        """
        holder = self._ledger.holder(scope, keys)
        if holder is None:
            return None
        source, key_count = holder
        # A client's key proves nothing about the keys before it: the keys are compared one by one with the
        # session's own.
        if not is_proven:
            key_count = self._ledger.keyed.agreeing_count(source, keys[:key_count])
        token_count = key_count * BLOCK_TOKENS
        tail = source.growing_tail
        # A segment that a writer is filling would have to be closed for a fork, under its writer.
        if source.is_writing and tail is not None and tail.begin < token_count:
            token_count = tail.begin - tail.begin % BLOCK_TOKENS
        return (source, token_count) if token_count else None

    async def _flush(self, source: Session) -> None:
        try:
            await self._flushing.flush(source)
        except (SessionNotFound, CorruptSegment):
            # The source is gone, or has been cut. Another session may have the prefix: the next look tells.
            return

    async def _share(self, source: Session, token_count: int, pace: Pace) -> None:
        """Count the source's first segments with its kin, so that a later listing is cheap."""
        segments = source.segments_of(((0, token_count),))
        for begin in range(0, len(segments), SEGMENTS_PER_LOOK):
            if source.is_gone:
                return
            self._ledger.shared(source, segments[begin : begin + SEGMENTS_PER_LOOK])
            if pace.is_over:
                await pace.rest()

    async def _adopt(self, session: Session, source: Session, token_count: int) -> None:
        self._ledger.adopted(source, session, token_count)
        self._ledger.touched(session, self._state.clock.now_ns())
        self.counts.found_token_count += token_count
        self.counts.adopted_token_count += token_count
        self.counts.adopted_bytes += session.size_bytes
        ttl_ns = session.expire_time_ns - session.access_time_ns
        self._state.journal.did(
            Call.FORK,
            session,
            source=source.name,
            tokens=token_count,
            ttl_ms=ttl_ns // 10**6,
            is_pinned=session.is_pinned,
        )
        try:
            await self._departures.write_down([session])
        except TierFailure:
            if not session.is_gone and session.token_count == token_count:
                # The record may be there, or be owed. The session is as it was before, or has these tokens.
                self._departures.strand(self._ledger.truncated(session, ()))
            raise


async def _check_offered(
    scope: Scope, token_ids: bytes, contents: Sequence[Content], offered: Sequence[bytes], pace: Pace
) -> None:
    """Raise InvalidArgument unless these are keys of the first tokens."""
    made = scope.keys(token_ids, contents=contents)
    for i, given in enumerate(offered):
        if next(made, b"") != given:
            raise InvalidArgument(field=f"prefix.keys[{i}]", problem="is not the key of these tokens")
        if i % KEYS_PER_LOOK == KEYS_PER_LOOK - 1 and pace.is_over:
            await pace.rest()


def _shortfall(asked_count: int, known_count: int, found_count: int) -> Shortfall | None:
    """Why fewer tokens were found than asked for; None if all were. `known_count`: tokens with known keys."""
    if found_count == asked_count:
        return None
    if found_count < known_count:
        return Shortfall.CUT
    return Shortfall.SHORT if asked_count - found_count < BLOCK_TOKENS else Shortfall.NOT_STORED


def _token_count(asked: bytes | Sequence[bytes]) -> int:
    return (
        len(asked) // (BLOCK_BYTES // BLOCK_TOKENS) if isinstance(asked, bytes) else len(asked) * BLOCK_TOKENS
    )
