"""State: every model, session and segment the cache knows, in dictionaries. Owned by the event loop.

Nothing here awaits or does I/O. `loading.py` fills it from the records.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from ctxcache.cache.accesses import Accesses
from ctxcache.cache.placement import Placement
from ctxcache.cache.retaining import Retaining
from ctxcache.clock import Clock
from ctxcache.core import ranges
from ctxcache.core.busiest import Busiest
from ctxcache.core.evictable import Evictable
from ctxcache.core.expiry import ExpiryQueue
from ctxcache.core.history import Event
from ctxcache.core.limits import DEFAULT_LIMITS, Limits
from ctxcache.core.observations import Observations
from ctxcache.core.placement.policy import Capacities
from ctxcache.core.placement.ranked import Ranked
from ctxcache.core.placement.shares import EVERYONE, NO_SHARES, Shares
from ctxcache.core.residence import Kin
from ctxcache.core.resident import Resident
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session
from ctxcache.core.unwritten import Unwritten
from ctxcache.core.usage import Usage
from ctxcache.errors import ModelNotFound, SessionNotFound
from ctxcache.format.layout import SegmentLayout
from ctxcache.format.streams import TOKENS_RANGE, StreamRange
from ctxcache.metadata.base import ModelRecord, SessionRecord
from ctxcache.spans import NO_SPANS, Spans

GENERATION_BITS = 32
"""Changes that one session can see in one run before its generations reach those after the next crash."""


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    appended_token_count: int = 0
    read_token_count: int = 0
    dram_hit_token_count: int = 0
    expired_session_count: int = 0
    evicted_session_count: int = 0
    unadmitted_session_count: int = 0
    corrupt_segment_count: int = 0
    mended_segment_count: int = 0
    flushed_segment_count: int = 0
    promoted_segment_count: int = 0
    delayed_write_count: int = 0


class State:
    """The cache's dictionaries, and the rules that keep them consistent."""

    def __init__(
        self, clock: Clock, policy: Ranked, capacities: Capacities, *, crash_count: int = 0,
        limits: Limits = DEFAULT_LIMITS, shares: Shares = NO_SHARES,
        spans: Spans = NO_SPANS,
    ) -> None:  # fmt: skip
        """`crash_count`: how many runs over these records were cut off before this one."""
        self.clock = clock
        self.spans = spans
        self.limits = limits
        self.least_generation = crash_count << GENERATION_BITS
        """Where generations begin: commits that a crash took back had some too, and none may come again."""
        self.usage = Usage(shares)
        self.expiry = ExpiryQueue()
        self.counters, self.seen = Counters(), Observations()
        self.models: dict[tuple[str, str], ModelRecord] = {}
        self.model_ids: dict[str, list[str]] = {}
        """Model ids of each tenant, in order."""
        self.model_streams: Counter[str] = Counter()
        """Streams of each tenant's models."""
        self._layouts: WeakValueDictionary[tuple[bytes, tuple[StreamRange, ...]], SegmentLayout] = (
            WeakValueDictionary()
        )
        self.sessions: dict[tuple[str, str], Session] = {}
        self.accesses = Accesses(clock, self.sessions)
        self.by_uid: dict[bytes, Session] = {}
        self.segments: dict[int, Segment] = {}
        self.names: dict[str, list[str]] = {}
        """Session ids of each tenant, in order."""
        self.touched: set[bytes] = set()
        self.model_sessions: Counter[tuple[str, str]] = Counter()
        """Sessions of each tenant's models."""
        self.lost: Mapping[int, str] = {}
        """The files of SSD paths of which nothing can be had now, by path number."""
        self.reckoning = 0
        """How often paths were lost or came back."""
        self.withheld: dict[bytes, int] = {}
        """Tokens that sessions do not show for that, by uid."""
        self.exposed: dict[bytes, None] = {}
        """Sessions of which DRAM has what lies on a lost path."""
        self.busiest, self.accesses_by_tenant = Busiest(), Counter[str]()
        retention = Retaining(clock, self.by_uid, capacities, limits, shares, self._fell)
        self.placement = Placement(policy, clock, self.by_uid, self._fell, retention, self.seen)
        account = self._account if shares else None
        self.resident = Resident(self.placement.dram_rank, self.by_uid, account)
        self.evictable = Evictable(self.placement.rank, account)
        self.unwritten = Unwritten(self.placement.rank, account)
        self._last_segment_id = 0

    # -- look-ups ------------------------------------------------------------------------------

    def model(self, tenant: str, model_id: str) -> ModelRecord:
        """A tenant's model. Raises ModelNotFound."""
        try:
            return self.models[tenant, model_id]
        except KeyError:
            raise ModelNotFound(model=f"models/{model_id}") from None

    def session(self, tenant: str, session_id: str) -> Session:
        """A tenant's session that has not expired. Raises SessionNotFound."""
        session = self.sessions.get((tenant, session_id))
        if session is None or session.expire_time_ns <= self.clock.now_ns():
            raise SessionNotFound(session=f"sessions/{session_id}")
        self.reckon(session)
        return session

    def listers(self, segment: Segment) -> list[Session]:
        """The sessions that list a segment. Looks at all that are kin to them."""
        home = segment.home
        if not isinstance(home, Kin):
            return [self.by_uid[home.uid]] if home else []
        kin = (self.by_uid[uid] for uid in home.uids)
        return [session for session in kin if session.lists(segment)]

    def layout(self, model: ModelRecord, ranges: Sequence[StreamRange]) -> SegmentLayout:
        """Where these of a model's streams lie in a slot, and token ids: one object for all sessions that store the same.

        Raises KeyError(stream) for one that the model does not have.
        """
        key = model.fingerprint, tuple(sorted({TOKENS_RANGE, *ranges}))
        found = self._layouts.get(key)
        if found is None:
            streams = (stream for item in ranges for stream in item.streams())
            found = self._layouts[key] = SegmentLayout(model.spec.resolve(streams))
        return found

    # -- SSD paths that are lost ---------------------------------------------------------------

    def lose(self, lost: Mapping[int, str]) -> None:
        """These paths are lost, and no other. Sessions are reckoned when they are next looked at."""
        self.lost = lost
        self.reckoning += 1

    def reckon(self, session: Session) -> None:
        """Show of the session what can be had. Takes a time that grows with its segments, once for each loss."""
        if session.reckoned == self.reckoning:
            return
        session.reckoned = self.reckoning
        fewer_count = session.reckon(self.lost)
        if session.exposed_begin is None:
            self.exposed.pop(session.uid, None)
        else:
            self.exposed[session.uid] = None
        if not fewer_count:
            return
        self._note_withheld(session)
        # Of its generation a restart is to know.
        self.touched.add(session.uid)
        if fewer_count > 0:
            on_lost = {s.ssd.path_index for s in session.segments if s.ssd} & set(self.lost)
            self.accesses.happened(
                session, Event.DEVICE_LOST, detail=", ".join(self.lost[i] for i in sorted(on_lost)),
                token_count=fewer_count,
            )  # fmt: skip
        self.placement.settled(session)

    def is_on_lost_path(self, segment: Segment) -> bool:
        """Whether what SSD has of the segment cannot be had."""
        return bool(self.lost) and segment.ssd is not None and segment.ssd.path_index in self.lost

    def reckon_again(self, segment: Segment) -> None:
        """A segment that lies on a lost path left DRAM, or lies elsewhere now: its sessions are looked at anew."""
        for session in self.listers(segment):
            session.reckoned = -1
            self.exposed[session.uid] = None

    def _note_withheld(self, session: Session) -> None:
        if session.withheld:
            self.withheld[session.uid] = ranges.count(session.withheld)
        else:
            self.withheld.pop(session.uid, None)

    # -- changes -------------------------------------------------------------------------------

    def add_model(self, model: ModelRecord) -> None:
        """Make a model known."""
        self.models[model.tenant, model.spec.model_id] = model
        insort(self.model_ids.setdefault(model.tenant, []), model.spec.model_id)
        self.model_streams[model.tenant] += len(model.spec.streams)

    def remove_model(self, tenant: str, model_id: str) -> None:
        """Make a model unknown that no session is of."""
        self.model_streams[tenant] -= len(self.models.pop((tenant, model_id)).spec.streams)
        self.model_ids[tenant].remove(model_id)

    def add(self, session: Session, *, idle_s: float | None = None) -> None:
        """Make a session known, and its segments referenced; `idle_s`: it was there before, idle for so long."""
        self.sessions[session.tenant, session.session_id] = session
        self.by_uid[session.uid] = session
        self.model_sessions[session.tenant, session.model_id] += 1
        insort(self.names.setdefault(session.tenant, []), session.session_id)
        for segment in session.segments:
            segment.list_in(session.residence)
        if idle_s is None:
            self.placement.appeared(session)
        else:
            self.placement.recalled(session, idle_s)
        if session.segments and not session.is_pinned:
            self.evictable.add(session.uid)
        for segment in session.segments:
            if segment.dram:
                self.resident.add(segment)
        self.expiry.schedule(session.uid, session.expire_time_ns)
        session.reckoned = -1 if self.lost else self.reckoning
        self.reckon(session)

    def forget(self, session: Session) -> list[Segment]:
        """Make a session unknown; returns the segments that nobody references any more."""
        session.is_gone = True
        del self.sessions[session.tenant, session.session_id]
        del self.by_uid[session.uid]
        self.model_sessions[session.tenant, session.model_id] -= 1
        self.busiest.forget(session.uid)
        names = self.names[session.tenant]
        del names[bisect_left(names, session.session_id)]
        self.touched.discard(session.uid)
        self.unwritten.forget(session.uid)
        self.evictable.discard(session.uid)
        self.placement.ended(session)
        self.expiry.forget(session.uid)
        self.exposed.pop(session.uid, None)
        session.withheld = ()
        dead = self.unlist(session, session.segments)
        self.resident.forget_session(session)
        return dead

    def touch(self, session: Session) -> None:
        """Count an access."""
        session.touch(self.clock.now_ns())
        self.busiest.count(session.uid)
        self.accesses_by_tenant[session.tenant] += 1
        # Earlier than before when the clock was set back, or an expiry was shortened.
        self.expiry.schedule(session.uid, session.expire_time_ns)
        self.touched.add(session.uid)

    def skip_segment_ids(self, last: int) -> None:
        """Numbers up to `last` are taken, whoever has them."""
        self._last_segment_id = max(self._last_segment_id, last)

    def new_segment_id(self) -> int:
        """A number no segment ever had in this data directory, as far as records tell."""
        self._last_segment_id += 1
        return self._last_segment_id

    def attach(self, session: Session, segment: Segment) -> None:
        """List a segment at the end of a session."""
        session.segments.append(segment)
        segment.list_in(session.residence)
        self.segments[segment.segment_id] = segment

    def unlist(self, session: Session, segments: Iterable[Segment]) -> list[Segment]:
        """The session lists these no more; returns those that no session lists, forgotten."""
        dead = []
        for segment in segments:
            segment.unlist()
            self.unwritten.drop(session.uid, segment)
            if not segment.session_count:
                self.segments.pop(segment.segment_id, None)
                self.resident.discard(segment, session)
                dead.append(segment)
        self._note_withheld(session)
        # What was its growing tail may be none any more.
        self.unwritten.look_again(session)
        return dead

    def _account(self, uid: bytes) -> str:
        session = self.by_uid.get(uid)
        return session.tenant if session else EVERYONE

    def _fell(self, session: Session) -> None:
        """A session's rank may be lower than it was."""
        rank, dram_rank = self.placement.ranks(session.uid)
        self.resident.fell(session, dram_rank)
        self.evictable.fell(session.uid, rank)
        self.unwritten.fell(session.uid, rank)


def record_of(session: Session) -> SessionRecord:
    """What of a session is written down: positions below `recorded_end` and the segments that hold them.

    What is withheld is written down as well, with the generation that the session has when it is shown again:
    its path may be back after a restart.
    """
    end = session.recorded_end
    live = ranges.normalise([*session.live, *session.withheld]) if session.withheld else session.live
    return SessionRecord(
        uid=session.uid, tenant=session.tenant, session_id=session.session_id, model_id=session.model_id,
        layout=tuple(session.layout.index), generation=session.generation + bool(session.withheld),
        segment_ids=tuple(s.segment_id for s in session.segments if s.begin < end),
        live=ranges.clip(live, 0, end), log_end=end,
        create_time_ns=session.create_time_ns, access_time_ns=session.access_time_ns,
        expire_time_ns=session.expire_time_ns, ttl_ns=session.expiration.ttl_ns, is_pinned=session.is_pinned,
    )  # fmt: skip
