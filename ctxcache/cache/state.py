"""State: every model, session and segment the cache knows, in dictionaries. Owned by the event loop.

Nothing here awaits or does I/O. Loading joins the records and drops what does not fit together:
a segment nobody lists, and a session's tokens from the first segment that is missing.
"""

import logging
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from ctxcache.clock import Clock
from ctxcache.core import ranges
from ctxcache.core.eviction import EvictionPolicy
from ctxcache.core.expiry import Expiration, ExpiryQueue
from ctxcache.core.segment import Segment
from ctxcache.core.session import Session
from ctxcache.errors import ModelNotFound, SessionNotFound
from ctxcache.format.layout import SegmentLayout
from ctxcache.metadata.base import Changes, MetadataStore, ModelRecord, SegmentRecord, SessionRecord

log = logging.getLogger(__name__)

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
    corrupt_segment_count: int = 0
    flushed_segment_count: int = 0
    promoted_segment_count: int = 0


class State:
    """The cache's dictionaries, and the rules that keep them consistent."""

    def __init__(self, clock: Clock, policy: EvictionPolicy, *, crash_count: int = 0) -> None:
        """`crash_count`: how many runs over these records were cut off before this one."""
        self.clock = clock
        # Commits that a crash took back had generations too: none of them may come again.
        self._least_generation = crash_count << GENERATION_BITS
        self.policy = policy
        self.expiry = ExpiryQueue()
        self.counters = Counters()
        self.models: dict[tuple[str, str], ModelRecord] = {}
        self.sessions: dict[tuple[str, str], Session] = {}
        self.by_uid: dict[bytes, Session] = {}
        self.segments: dict[int, Segment] = {}
        self.names: dict[str, list[str]] = {}
        """Session ids of each tenant, in order."""
        self.touched: set[bytes] = set()
        self.resident: set[bytes] = set()
        """Sessions that may have segments in DRAM: all that have, and some that have no more."""
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
        return session

    # -- changes -------------------------------------------------------------------------------

    def add(self, session: Session) -> None:
        """Make a session known, and its segments referenced."""
        self.sessions[session.tenant, session.session_id] = session
        self.by_uid[session.uid] = session
        insort(self.names.setdefault(session.tenant, []), session.session_id)
        self.resident.add(session.uid)
        for segment in session.segments:
            segment.reference_count += 1
        self.policy.touch(session.uid)
        self.expiry.schedule(session.uid, session.expire_time_ns)

    def forget(self, session: Session) -> list[Segment]:
        """Make a session unknown; returns the segments that nobody references any more."""
        session.is_gone = True
        del self.sessions[session.tenant, session.session_id]
        del self.by_uid[session.uid]
        names = self.names[session.tenant]
        del names[bisect_left(names, session.session_id)]
        self.touched.discard(session.uid)
        self.resident.discard(session.uid)
        self.policy.forget(session.uid)
        self.expiry.forget(session.uid)
        return self.unreference(session.segments)

    def touch(self, session: Session) -> None:
        """Count an access."""
        session.touch(self.clock.now_ns())
        self.policy.touch(session.uid)
        # Earlier than before when the clock was set back, or an expiry was shortened.
        self.expiry.schedule(session.uid, session.expire_time_ns)
        self.touched.add(session.uid)

    def new_segment_id(self) -> int:
        """A number no segment ever had in this data directory, as far as records tell."""
        self._last_segment_id += 1
        return self._last_segment_id

    def attach(self, session: Session, segment: Segment) -> None:
        """List a segment at the end of a session."""
        session.segments.append(segment)
        segment.reference_count += 1
        self.segments[segment.segment_id] = segment
        self.resident.add(session.uid)

    def promoted(self, segment: Segment, uid: bytes) -> None:
        """A segment came into DRAM for that session."""
        # Who shares it is written down nowhere: all are looked at once, when room is needed.
        self.resident |= self.by_uid.keys() if segment.reference_count > 1 else {uid} & self.by_uid.keys()

    def unreference(self, segments: Iterable[Segment]) -> list[Segment]:
        """Drop one reference of each; returns those that have none left, forgotten."""
        dead = []
        for segment in segments:
            segment.reference_count -= 1
            if not segment.reference_count:
                self.segments.pop(segment.segment_id, None)
                dead.append(segment)
        return dead

    # -- loading -------------------------------------------------------------------------------

    def load(self, metadata: MetadataStore) -> Changes:
        """Read every record; returns the changes that make the records whole again, to be committed."""
        self.models = {(m.tenant, m.spec.model_id): m for m in metadata.models()}
        records = {r.segment_id: r for r in metadata.segments()}
        self._last_segment_id = max(records, default=0)
        repairs = Changes()
        for record in list(metadata.sessions()):
            self._load_session(record, records, repairs)
        repairs.deleted_segment_ids = [i for i in records if i not in self.segments]
        return repairs

    def _load_session(
        self, record: SessionRecord, records: dict[int, SegmentRecord], repairs: Changes
    ) -> None:
        model = self.models.get((record.tenant, record.model_id))
        if model is None:
            log.error("session_without_model session=%s model=%s", record.session_id, record.model_id)
            repairs.deleted_session_uids.append(record.uid)
            return
        session = _session(record, model)
        session.generation = max(session.generation, self._least_generation)
        for segment_id in record.segment_ids:
            if segment_id in records:
                known = self.segments.get(segment_id)
                session.segments.append(known or _segment(records[segment_id], session.layout))
        gap = session.first_gap()
        if gap is not None:
            self._cut(session, gap, repairs)
        self.segments |= {segment.segment_id: segment for segment in session.segments}
        self.add(session)

    def _cut(self, session: Session, gap: int, repairs: Changes) -> None:
        log.error("tokens_without_segment session=%s position=%d", session.name, gap)
        self.counters.corrupt_segment_count += 1
        session.drop_positions(((gap, session.log_end),))
        repairs.sessions.append(record_of(session))


def record_of(session: Session) -> SessionRecord:
    """What of a session is written down: positions below `recorded_end` and the segments that hold them."""
    end = session.recorded_end
    return SessionRecord(
        uid=session.uid, tenant=session.tenant, session_id=session.session_id, model_id=session.model_id,
        layout=tuple(spec.stream for spec in session.layout.specs), generation=session.generation,
        segment_ids=tuple(s.segment_id for s in session.segments if s.begin < end),
        live=ranges.clip(session.live, 0, end), log_end=end,
        create_time_ns=session.create_time_ns, access_time_ns=session.access_time_ns,
        expire_time_ns=session.expire_time_ns, ttl_ns=session.expiration.ttl_ns, is_pinned=session.is_pinned,
    )  # fmt: skip


def _session(record: SessionRecord, model: ModelRecord) -> Session:
    return Session(
        uid=record.uid, tenant=record.tenant, session_id=record.session_id, model_id=record.model_id,
        model_fingerprint=model.spec.fingerprint(),
        layout=SegmentLayout(model.spec.resolve(record.layout)),
        expiration=Expiration(record.ttl_ns, record.expire_time_ns),
        create_time_ns=record.create_time_ns, access_time_ns=record.access_time_ns,
        expire_time_ns=record.expire_time_ns, generation=record.generation, is_pinned=record.is_pinned,
        live=record.live, log_end=record.log_end, recorded_end=record.log_end, durable_end=record.log_end,
    )  # fmt: skip


def _segment(record: SegmentRecord, layout: SegmentLayout) -> Segment:
    identity = record.identity
    return Segment(
        segment_id=record.segment_id, tenant=identity.tenant, writer_uid=identity.session_uid,
        generation=identity.generation, begin=identity.begin, model_fingerprint=identity.model_fingerprint,
        layout=layout, row_count=identity.token_count, is_open=False, ssd=record.slot,
        ssd_row_count=identity.token_count, header_checksum=record.header_checksum,
    )  # fmt: skip
