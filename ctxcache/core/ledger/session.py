"""Session: one conversation's state as the cache holds it, and the arithmetic over it.

The log holds every position ever appended; `live` says which are still there; `segments` hold the
rows:

    position   0 ........ durable_end ........ recorded_end ........ log_end
               synced below        written, sync under way   committed in memory

When a session expires is its `Expiration`: sliding or absolute. `ExpiryQueue` says which are due. The queue
is lazy: an access only moves the session's own `expire_time_ns`, and the queue learns of it when the old time
comes up. An access costs nothing, and a due session is found within the resolution of the caller of `due`.

`places.py` has the steps of its use and of its backlog. Only the ledger takes them.
"""

import heapq
import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ctxcache.core import ranges
from ctxcache.core.ledger.places import (
    BACKLOG_TABLE,
    USE_TABLE,
    Backlog,
    BacklogEvent,
    Use,
    UseEvent,
    illegal,
)
from ctxcache.core.ledger.residence import Amounts, Residence
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ranges import Ranges
from ctxcache.errors import (
    GenerationMismatch,
    ModelFingerprintMismatch,
    TokenRangeOutOfBounds,
)
from ctxcache.format.ids import Labels
from ctxcache.format.layout import BLOCK_ROWS, SegmentLayout
from ctxcache.format.streams import Content, contents_within

DEFAULT_TTL_NS = 3600 * 10**9
SLACK = 64
"""Fewer outdated entries of a queue are not worth a pass."""

_SLOT_BYTES: Callable[[Segment], int] = attrgetter("layout.size_bytes")


@dataclass(frozen=True, slots=True)
class Expiration:
    """When a session ends: `ttl_ns` after each access, or (ttl_ns None) at `expire_time_ns`."""

    ttl_ns: int | None
    expire_time_ns: int = 0

    def after_access(self, now_ns: int) -> int:
        """The instant of expiry, were the session accessed now."""
        return self.expire_time_ns if self.ttl_ns is None else now_ns + self.ttl_ns


# The heap holds outdated times as well, and `_earliest` says which entry of a session counts:
#
#     heap       (t1, a) (t2, b) (t4, a) ...        _earliest    a: t1    b: t2
#     at t1      a was accessed since, and expires at t9 ──► (t9, a) is pushed, nothing ends
#
# So an access is an assignment. Only an expiry that became earlier than the entry needs a push.
class ExpiryQueue:
    """Sessions by the earliest time at which they may expire. Owned by the ledger."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes]] = []
        self._earliest: dict[bytes, int] = {}

    def schedule(self, uid: bytes, expire_time_ns: int) -> None:
        """Look at the session at that time, or earlier if it is scheduled earlier.

        Call it at every change.
        """
        known = self._earliest.get(uid)
        if known is not None and known <= expire_time_ns:
            return
        self._earliest[uid] = expire_time_ns
        heapq.heappush(self._heap, (expire_time_ns, uid))
        self._tidy()

    def forget(self, uid: bytes) -> None:
        """Forget a session that is gone."""
        self._earliest.pop(uid, None)
        self._tidy()

    @property
    def entry_count(self) -> int:
        """Entries that take room, outdated ones included."""
        return len(self._heap)

    def due(
        self, now_ns: int, expire_time_of: Callable[[bytes], int | None], *, limit: int | None = None
    ) -> list[bytes]:
        """Sessions whose expiry has come, at most `limit`. Each is told once.

        `expire_time_of` gives the present time of expiry, None for a session that is gone.
        """
        due: list[bytes] = []
        while self._heap and self._heap[0][0] <= now_ns and len(due) != limit:
            time_ns, uid = heapq.heappop(self._heap)
            # The entry is outdated: the session is scheduled at another time, or is gone.
            if self._earliest.get(uid) != time_ns:
                continue
            del self._earliest[uid]
            actual = expire_time_of(uid)
            # The session was used since: it is scheduled at its new time.
            if actual is not None and actual > now_ns:
                self.schedule(uid, actual)
            elif actual is not None:
                due.append(uid)
        return due

    def _tidy(self) -> None:
        """Drop outdated entries once they are the larger part."""
        # Sessions whose expiry is shortened again and again would fill the heap. A pass costs as much as the
        # pushes that made it necessary.
        if len(self._heap) > 2 * len(self._earliest) + SLACK:
            self._heap = [(time_ns, uid) for uid, time_ns in self._earliest.items()]
            heapq.heapify(self._heap)


# A client cannot ask for an id with a slash: blocks and sessions share one name space of the ledger and never
# meet.
BLOCKS = "blocks/"
"""The beginning of blocks' ids: no session's id has a slash."""
HIDDEN = "~"
"""The beginning of ids that no client can ask for. They sort behind all others."""
GUESTS = HIDDEN
"""The beginning of a guest's id, which goes on with the session's uid."""
FORMERS = HIDDEN + HIDDEN
"""The beginning of the ids of former renderings, see `former_id`."""
NAMELESS_TTL_NS = 3600 * 10**9
"""How long a former rendering, or a prefix that lost its name, is kept after its last use, at most."""
HEAT_HALF_LIFE_NS = 600 * 10**9
BEGIN = attrgetter("begin")


def block_id(space: bytes, key: bytes) -> str:
    """A block's id in the ledger, made of its space's fingerprint and its key, 32 bytes each."""
    return f"{space_prefix(space)}{key.hex()}"


def block_model(fingerprint: bytes) -> str:
    """The text in place of a block's model id. The model need not be registered."""
    # All blocks of a model, of which there may be a million, share one text.
    return sys.intern(fingerprint.hex())


def space_prefix(space: bytes) -> str:
    """The beginning of the ids of a space's blocks, all of one length."""
    return f"{BLOCKS}{space.hex()}/"


PREFIX_LENGTH = len(space_prefix(bytes(32)))


def block_key(session_id: str) -> bytes:
    """The key of a block with this id."""
    return bytes.fromhex(session_id.rpartition("/")[2])


# A former rendering belongs to a name. Its id says to which, so that a record needs no field for it. Those of
# a name follow one another in the order of ids:
#
#     alice               the conversation
#     ~~alice~<uid>       what alice was before an edit
def former_id(session_id: str, uid: bytes) -> str:
    """The id of what a session of this id was before its edit, and whose uid this is."""
    return f"{former_prefix(session_id)}{uid.hex()}"


def former_prefix(session_id: str) -> str:
    """The beginning of the ids of a session's former renderings alone: clients' ids have no `~`."""
    return f"{FORMERS}{session_id}{HIDDEN}"


def lies_on(segment: Segment, paths: Collection[int]) -> bool:
    """Whether all slots of the segment below lie on these paths."""
    # Both copies have to be gone: else the other one is read.
    durable, copy = segment.durable, segment.copy
    if durable is None or durable.path_index not in paths:
        return False
    return copy is None or copy.path_index in paths


@dataclass(frozen=True, slots=True)
class Piece:
    """Live rows `[row_begin, row_end)` of a segment; the first one's token has index `token_begin`."""

    segment: Segment
    row_begin: int
    row_end: int
    token_begin: int


ANSWERED = -1
"""The size of the last commit, once the answer has begun."""


@dataclass(slots=True, eq=False)
class Session:
    """State of one session, or of one block. Owned by the ledger.

    A block is a session that no list of sessions shows, with one segment of one row. Its `session_id` is
    `block_id`, its `model_fingerprint` that of its space, its `model_id` what `block_model` gives.
    """

    uid: bytes
    tenant: str
    session_id: str
    model_id: str
    model_fingerprint: bytes
    layout: SegmentLayout
    expiration: Expiration
    create_time_ns: int
    access_time_ns: int
    expire_time_ns: int
    generation: int = 1
    is_pinned: bool = False
    segments: list[Segment] = field(default_factory=list)
    live: Ranges = ()
    log_end: int = 0
    # A conversation turn, as its commits tell:
    #
    #     commits   |--512--|--512--|--512--|-90-|1|1|1|1|1|...
    #                input in equal pieces   rest  answer
    #                                            ▲ input_end: the first commit smaller than the one before
    #
    # The policy learns how soon sessions return by the sizes of their answers and inputs: a short answer has
    # called a tool, and its session is back at once.
    input_end: int = 0
    """The end of the last turn's input, as far as the commits tell.

    An engine commits an input in pieces of one size and a rest, and then its answer, in smaller ones.
    """
    least_commit: int = 0
    """Tokens of the last commit of the turn's input; 0 before the first one, ANSWERED behind the input."""
    recorded_end: int = 0
    durable_end: int = 0
    use: Use = Use.FRESH
    use_count: int = 0
    """Reads and writes that are open."""
    worker_count: int = 0
    """See Work."""
    backlog: Backlog = Backlog.DURABLE
    is_tail_apart: bool = False
    """Whether a commit ended where the last segment begins.

    Then the earlier segments are whole without the last one.
    """
    path: int | None = None
    """The path below for the session's next segments, as long as that path has room.

    It is that of its last segments.
    """
    copies: int = 1
    """How many paths below each of the segments shall be on, 1 or 2."""
    copy_path: int | None = None
    """The path for second copies of the next segments, as `path`."""
    withheld: Ranges = ()
    """Positions that are live and not shown.

    These tokens lie on a lost path, or behind a segment that does.
    """
    parent_id: str = ""
    """The id of the block that this block continues; empty for none, and for a session."""
    salt: bytes = b""
    """The salt in the tokens' keys. It never changes."""
    labels: Labels = ()
    """What its creator says of it. They never change."""
    contents: tuple[Content, ...] = ()
    """The contents behind the first tokens, in order, up to the first token that was dropped."""
    exposed_begin: int | None = None
    """The begin of the first segment that lies on a lost path and in memory; None when there is none."""
    reckoned: int = 0
    """The loss or return of a path that was last taken into account."""
    heat: float = 0.0
    """Accesses up to the last one, half as many for each HEAT_HALF_LIFE_NS that has passed since."""
    token_count: int = field(init=False)
    """Live tokens."""
    residence: Residence = field(init=False)
    """The counts of the session's segments."""

    name: str = field(init=False)
    """Resource name, as clients know it. A hidden session keeps the name of the session that it was."""
    is_block: bool = field(init=False)
    """Whether this is a block."""

    def __post_init__(self) -> None:
        self.is_block = self.layout.segment_tokens == BLOCK_ROWS
        self.name = self.session_id if self.is_block else f"sessions/{self.session_id}"
        self.token_count = ranges.count(self.live)
        self.residence = Residence(self.uid)

    @property
    def is_writing(self) -> bool:
        """Whether the session has a writer."""
        return self.use is Use.WRITTEN

    @property
    def is_guest(self) -> bool:
        """Whether it goes on at another host, and is kept here for whoever finds its tokens."""
        return self.is_hidden and not self.is_former

    @property
    def is_hidden(self) -> bool:
        """Whether no client can ask for it: a guest, or a former rendering."""
        return self.session_id.startswith(HIDDEN)

    @property
    def is_former(self) -> bool:
        """Whether it is what its owner was before an edit. It ends with the owner at the latest."""
        return self.session_id.startswith(FORMERS)

    @property
    def owner_id(self) -> str:
        """The id of the session whose former rendering it is."""
        return self.session_id[len(FORMERS) :].partition(HIDDEN)[0]

    @property
    def is_idle(self) -> bool:
        """Whether no read or write of the session is open."""
        return self.use in (Use.IDLE, Use.FRESH)

    @property
    def is_gone(self) -> bool:
        """Whether it was deleted, has expired or was evicted, or is asleep and to be asked for again."""
        return self.use in (Use.GONE, Use.DORMANT)

    def has_expired(self, now_ns: int) -> bool:
        """Whether its time is over, whether it has been ended since or not: every look-up refuses it."""
        return self.expire_time_ns <= now_ns

    @property
    def size_bytes(self) -> int:
        """Bytes of slots that hold the whole session once."""
        # No call is made for each segment: a fork asks for this in one turn of the loop, and may have
        # thousands.
        return sum(map(_SLOT_BYTES, self.segments))

    def used(self, event: UseEvent) -> None:
        """Take a step of its use. The ledger's alone. Raises IllegalStepError."""
        use = USE_TABLE.get((self.use, event))
        if use is None:
            raise illegal(self.name, self.use, event)
        self.use = use

    def owed(self, event: BacklogEvent) -> None:
        """Take a step of its backlog. The ledger's alone. Raises IllegalStepError."""
        backlog = BACKLOG_TABLE.get((self.backlog, event))
        if backlog is None:
            raise illegal(self.name, self.backlog, event)
        self.backlog = backlog

    @property
    def durable_token_count(self) -> int:
        """Live tokens that are below and recorded."""
        # This is the usual case, and asked at each commit: no range is walked.
        if self.exposed_begin is None and self.durable_end >= self.log_end:
            return self.token_count
        end = self.durable_end if self.exposed_begin is None else min(self.durable_end, self.exposed_begin)
        return self.token_count - ranges.count_from(self.live, end) if end else 0

    @property
    def memory_token_count(self) -> int:
        """Live tokens that are in memory."""
        segments = self.segments
        if len(segments) == 1:
            return self.token_count if segments[0].memory is not None else 0
        in_memory = self.amounts().memory_count
        # Usually all segments are in memory, or none. Only a session half in memory walks its pieces.
        if in_memory in (0, len(self.segments)):
            return self.token_count if in_memory else 0
        pieces = self.pieces(0, self.token_count)
        return sum(p.row_end - p.row_begin for p in pieces if p.segment.memory)

    @property
    def growing_tail(self) -> Segment | None:
        """The last segment while rows may still be appended to it."""
        tail = self.segments[-1] if self.segments else None
        # After a drop of the newest tokens the log ends later than the tail: positions are never used twice.
        if tail is None or not tail.is_growing or tail.end != self.log_end:
            return None
        return None if tail.is_full else tail

    @property
    def whole_token_count(self) -> int:
        """How many of the first tokens were computed with all tokens before them, and are shown."""
        live = self.live
        return live[0][1] if live and not live[0][0] else 0

    def describe(self, contents: Sequence[Content], begin: int) -> None:
        """Keep the committed contents behind tokens from index `begin` on.

        Contents behind a dropped token are not kept: tokens there have no keys.
        """
        if self.log_end == self.whole_token_count:
            told = contents_within(contents, begin, self.log_end)
            self.contents = contents_within((*self.contents, *told), 0, self.log_end)

    @property
    def shown(self) -> list[Segment]:
        """The segments that hold the session's shown tokens."""
        return self.segments_of(self.live) if self.withheld else self.segments

    @property
    def is_in_memory(self) -> bool:
        """Whether every segment of the shown tokens is in memory."""
        if self.withheld:
            return all(segment.memory for segment in self.shown)
        # A block is one segment: its residence need not be asked, and a look-up has thousands of blocks.
        if len(self.segments) == 1:
            return self.segments[0].memory is not None
        return self.residence.memory_count(self.segments) == len(self.segments)

    def amounts(self) -> Amounts:
        """How much of the session lies in each tier, shared segments included."""
        return self.residence.amounts(self.segments)

    def lists(self, segment: Segment) -> bool:
        """Whether the session lists the segment."""
        i = bisect_left(self.segments, segment.begin, key=BEGIN)
        return i < len(self.segments) and self.segments[i] is segment

    def touch(self, now_ns: int) -> None:
        """Count an access."""
        idle_ns = now_ns - self.access_time_ns
        # This is an exponential average: `heat` is 1 + its last value, halved for each half life of idleness.
        # Only positive idleness counts: a clock that was set back must not make a session hotter.
        self.heat = 1 + (self.heat * math.exp2(-idle_ns / HEAT_HALF_LIFE_NS) if idle_ns > 0 else self.heat)
        self.access_time_ns = now_ns
        if self.expiration.ttl_ns is None:
            self.expire_time_ns = self.expiration.expire_time_ns
        else:
            self.expire_time_ns = now_ns + self.expiration.ttl_ns

    def heat_at(self, now_ns: int) -> float:
        """The session's use in these minutes."""
        return self.heat * math.exp2(-max(now_ns - self.access_time_ns, 0) / HEAT_HALF_LIFE_NS)

    def check_caller(self, fingerprint: bytes, generation: int | None) -> None:
        """Raise as `check_fingerprint` and `check_generation` do.

        Every caller that moves rows is checked so.
        """
        # The comparison is here, since every lease and append would make a call for each check.
        if fingerprint != self.model_fingerprint:
            self.check_fingerprint(fingerprint)
        if generation is not None and generation != self.generation:
            self.check_generation(generation)

    def check_generation(self, expected: int | None) -> None:
        """Raise GenerationMismatch unless `expected` is None or holds."""
        if expected is not None and expected != self.generation:
            raise GenerationMismatch(session=self.name, expected=expected, actual=self.generation)

    def check_fingerprint(self, expected: bytes) -> None:
        """Raise ModelFingerprintMismatch unless the session's state was computed by that model."""
        if expected != self.model_fingerprint:
            raise ModelFingerprintMismatch(
                subject=self.name,
                model=f"models/{self.model_id}",
                wanted="the caller's model",
                actual=self.model_fingerprint.hex(),
                expected=expected.hex(),
            )

    def check_range(self, begin: int, end: int) -> None:
        """Raise TokenRangeOutOfBounds unless `[begin, end)` are live tokens."""
        if not 0 <= begin <= end <= self.token_count:
            raise TokenRangeOutOfBounds(begin=begin, end=end, token_count=self.token_count)

    def pieces(self, begin: int, end: int) -> list[Piece]:
        """The places of the tokens `[begin, end)`, in order."""
        index = begin
        pieces: list[Piece] = []
        segments = self.segments
        if len(self.live) == 1 and begin < end:
            # As in most sessions, tokens were dropped at the front alone: indexes are positions from there.
            first = self.live[0][0]
            positions: Ranges = ((first + begin, first + end),)
        else:
            positions = ranges.select(self.live, begin, end)
        for low, high in positions:
            position = low
            i = bisect_right(segments, position, key=BEGIN) - 1
            while position < high:
                segment = segments[i]
                i += 1
                # Where two segments hold a position, the later one has its row. Only an adoption makes such
                # segments: the source's last segment has more rows than were adopted, and the session's own
                # first one begins inside it.
                #
                #     segment 1   [0 ......... 63]               the source's, of which 40 tokens were adopted
                #     segment 2            [40 ......... 103]    the session's own
                #     pieces      [0 .. 39][40 ......... 103]
                stop = min(high, segment.begin + segment.row_count)
                if i < len(segments) and segments[i].begin < stop:
                    stop = segments[i].begin
                pieces.append(Piece(segment, position - segment.begin, stop - segment.begin, index))
                index += stop - position
                position = stop
        return pieces

    def first_gap(self) -> int | None:
        """The first live position that no segment holds; None when there is none."""
        held = ranges.normalise([(s.begin, s.end) for s in self.segments])
        missing = ranges.subtract(self.live, held)
        return missing[0][0] if missing else None

    def drop_positions(self, dropped: Ranges) -> list[Segment]:
        """Make these positions dead; returns segments that hold no live token any more, unlisted."""
        return self.keep_positions(ranges.subtract(self.live, dropped))

    def keep_positions(self, live: Ranges) -> list[Segment]:
        """Make every shown position dead but these. See `drop_positions`."""
        self.live, self.withheld = live, ()
        self.token_count = ranges.count(live)
        if self.contents:
            self.contents = contents_within(self.contents, 0, self.whole_token_count)
        # Another content is another generation: a conditional append or a lease by generation must not go on.
        self.generation += 1
        kept = set(self.segments_of(self.live))
        # A segment with one live token stays whole: rows are never moved within a slot.
        dead = [segment for segment in self.segments if segment not in kept]
        self.segments = [segment for segment in self.segments if segment in kept]
        return dead

    def reckon(self, lost: Collection[int]) -> int:
        """Show the tokens that can be read while these paths are lost, and withhold the rest.

        Returns how many tokens fewer are shown.
        """
        on_lost = [s for s in self.segments if lies_on(s, lost)]
        # Rows on a lost path that memory still has are shown, and are lost with the process. They are to be
        # written elsewhere at once.
        self.exposed_begin = next((s.begin for s in on_lost if s.memory), None)
        end = next((s.begin for s in on_lost if not s.memory), None)
        # Reckoning begins from all positions, so that a path that came back shows its tokens again.
        whole = ranges.normalise([*self.live, *self.withheld])
        live = whole if end is None else ranges.clip(whole, 0, end)
        fewer_count = self.token_count - ranges.count(live)
        if fewer_count:
            self.live, self.withheld = live, ranges.subtract(whole, live)
            self.token_count -= fewer_count
            # Fewer tokens are another content, and so are more: a reader that goes by generation must learn
            # of both.
            self.generation += 1
        return fewer_count

    def segments_of(self, positions: Ranges) -> list[Segment]:
        """The segments that hold these live positions, in order."""
        begin_of = attrgetter("begin")
        segments: list[Segment] = []
        first = 0
        for begin, end in positions:
            low = max(bisect_right(self.segments, begin, key=begin_of) - 1, first)
            first = max(bisect_left(self.segments, end, key=begin_of), low)
            segments += self.segments[low:first]
        return segments

    def append_rows(self, end: int) -> None:
        """Make the positions from the log's end up to `end` live; their rows are in the segments."""
        # One live, dropped and withheld picture of a session:
        #
        #     log        0 ......... 64 ......... 128 ......... 192 ......... 256
        #     segments    s0 ........ s1 ......... s2 .......... s3 ........
        #     live       [0..4)          [100 ........... 192)
        #     withheld                                          [192 ....... 256)     s3 lies on a lost path
        self.live = ranges.extend(self.live, self.log_end, end)
        count = end - self.log_end
        self.token_count += count
        # Every commit is another content: a writer that missed one fails its next conditional call.
        self.log_end = end
        self.generation += 1
        if self.least_commit != ANSWERED:
            # The first commit that is smaller than the one before is the rest of the input.
            self.least_commit, self.input_end = (count if count >= self.least_commit else ANSWERED), end

    def adopt(self, source: "Session", token_count: int) -> None:
        """Begin with the source's first tokens, which are durable. The session never had any."""
        self.live, self.token_count = ((0, token_count),), token_count
        self.segments = source.segments_of(self.live)
        # The session's next segment begins here, inside the source's last one: see `pieces`.
        self.log_end = self.recorded_end = self.durable_end = token_count
        self.contents = contents_within(source.contents, 0, token_count)
        self.path, self.copy_path = source.path, source.copy_path
        self.generation += 1

    def view(self) -> "SessionView":
        """The session's facts as they are now."""
        durable_token_count, amounts = self.durable_token_count, self.amounts()
        return SessionView(
            name=self.name,
            uid=self.uid,
            tenant=self.tenant,
            model_id=self.model_id,
            model_fingerprint=self.model_fingerprint,
            layout=self.layout,
            generation=self.generation,
            token_count=self.token_count,
            durable_token_count=durable_token_count,
            create_time_ns=self.create_time_ns,
            access_time_ns=self.access_time_ns,
            expire_time_ns=self.expire_time_ns,
            ttl_ns=self.expiration.ttl_ns,
            is_pinned=self.is_pinned,
            copies=self.copies,
            memory_bytes=amounts.memory_bytes,
            durable_bytes=amounts.durable_bytes,
            live=self.live,
            salt=self.salt,
            labels=self.labels,
            contents=self.contents,
            is_writing=self.is_writing,
        )


# The view is a tuple, for each lease, commit and answer makes one. A frozen dataclass takes twice as long.
class SessionView(NamedTuple):
    """A session's facts at one moment; stays true of a lease's rows when the session goes on."""

    name: str
    uid: bytes
    tenant: str
    model_id: str
    model_fingerprint: bytes
    layout: SegmentLayout
    generation: int
    token_count: int
    durable_token_count: int
    create_time_ns: int
    access_time_ns: int
    expire_time_ns: int
    ttl_ns: int | None
    is_pinned: bool
    copies: int
    memory_bytes: int
    durable_bytes: int
    live: Ranges = ()
    salt: bytes = b""
    labels: Labels = ()
    contents: tuple[Content, ...] = ()
    is_writing: bool = False

    @property
    def whole_token_count(self) -> int:
        """How many of the first tokens were computed with all tokens before them, and are shown."""
        return ranges.whole_count(self.live)


class BlockIndex(Collection[Session]):
    """Blocks by tenant, space and key: a look-up of many keys makes no id. Owned by the ledger."""

    def __init__(self) -> None:
        self._spaces: dict[tuple[str, str], dict[bytes, Session]] = {}
        """By tenant and how a space's ids begin, then by key. No space is empty."""

    def put(self, block: Session) -> None:
        """Add a block to the index."""
        self._spaces.setdefault(_space_of(block), {})[block_key(block.session_id)] = block

    def drop(self, block: Session) -> None:
        """Take a block out of the index."""
        place = _space_of(block)
        del self._spaces[place][block_key(block.session_id)]
        if not self._spaces[place]:
            del self._spaces[place]

    def named(self, tenant: str, session_id: str) -> Session | None:
        """The block of that id."""
        found = self._spaces.get((tenant, session_id[:PREFIX_LENGTH]))
        return None if found is None else found.get(block_key(session_id))

    def under(self, tenant: str, space: bytes, keys: Iterable[bytes]) -> list[Session | None]:
        """The blocks of a space under these keys, in their order."""
        return list(map(self._spaces.get((tenant, space_prefix(space)), _NO_BLOCKS).get, keys))

    def __iter__(self) -> Iterator[Session]:
        """Every block."""
        return chain.from_iterable(found.values() for found in self._spaces.values())

    def __len__(self) -> int:
        """How many blocks there are."""
        return sum(map(len, self._spaces.values()))

    def __contains__(self, block: object) -> bool:
        """Whether the block is in the index."""
        return isinstance(block, Session) and self.named(block.tenant, block.session_id) is block


_NO_BLOCKS: dict[bytes, Session] = {}


def _space_of(block: Session) -> tuple[str, str]:
    return block.tenant, block.session_id[:PREFIX_LENGTH]
