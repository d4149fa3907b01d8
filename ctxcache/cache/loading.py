"""Loading: the records of a metadata store become the cache's state, as they fit together.

A segment nobody lists is dropped, and a session's tokens from the first segment that is missing.
A million segments take some seconds; what would be made anew for every session or segment and is the
same, layouts, names and identities, is made once.
"""

import logging
from collections.abc import Iterator, Mapping

from ctxcache.cache.eviction import record_of
from ctxcache.cache.state import State
from ctxcache.core.ledger.ledger import SECOND_NS
from ctxcache.core.ledger.segment import Segment, TenantUse
from ctxcache.core.ledger.session import Expiration, Session
from ctxcache.format.layout import SegmentLayout, block_layout
from ctxcache.format.streams import Stream, ranges_of
from ctxcache.storage.metadata.base import Changes, MetadataStore, ModelRecord, SegmentRecord, SessionRecord

log = logging.getLogger(__name__)


def load(state: State, metadata: MetadataStore) -> Changes:
    """Fill an empty state; returns the changes that make the records whole again, to be committed.

    Raises CorruptMetadata.
    """
    return _Loader(state, metadata).load()


# What the records may say, and what is made of it:
#
#     session, its segments all there      recalled
#     session, a segment missing           cut before the missing one, and recorded anew
#     session of a model that is gone      removed
#     segment that no session lists        removed, its slot free
#     block, not whole                     removed
class _Loader:
    def __init__(self, state: State, metadata: MetadataStore) -> None:
        self._state = state
        self._ledger = state.ledger
        self._metadata = metadata
        self._repairs = Changes()
        self._layouts: dict[tuple[bytes, tuple[Stream, ...]], SegmentLayout] = {}

    def load(self) -> Changes:
        """See the module's."""
        state = self._state
        for model in self._metadata.models():
            state.add_model(model)
        # All sessions before the segments: a segment's record is only of use with a session that lists it.
        listings = list(self._sessions())
        self._load_segments({i: session for session, segment_ids in listings for i in segment_ids})
        # In the order of their accesses, as policies hear of them.
        for session, segment_ids in sorted(listings, key=lambda listing: listing[0].access_time_ns):
            segments = map(self._ledger.segment, segment_ids)
            session.segments = [segment for segment in segments if segment]
            self._add(session)
        if self._repairs.sessions:
            self._forget_unlisted()
        return self._repairs

    def _sessions(self) -> Iterator[tuple[Session, tuple[int, ...]]]:
        """The sessions, without segments, and the ids of those that each lists."""
        for record in self._metadata.sessions():
            if record.block is not None:
                layout = block_layout(record.block.part_bytes)
                session = self._made(record, record.tenant, record.block.space, layout)
                session.parent_id = record.block.parent_id
                yield session, record.segment_ids
                continue
            model = self._state.models.get((record.tenant, record.model_id))
            if model is None:
                log.error("session_without_model session=%s model=%s", record.session_id, record.model_id)
                self._repairs.deleted_session_uids.append(record.uid)
            else:
                yield self._session(record, model), record.segment_ids

    def _load_segments(self, listed_by: Mapping[int, Session]) -> None:
        last = 0
        for record in self._metadata.segments():
            # Ids ascend: the last one read is the largest.
            last = record.segment_id
            session = listed_by.get(last)
            if session is None:
                self._repairs.deleted_segment_ids.append(last)
            else:
                use = self._ledger.usage.of(session.tenant)
                # Names and identities are shared with the session's, for a million segments would repeat them
                # a million times.
                segment = _segment(record, session, use)
                self._ledger.recorded_segment(segment)
                if record.keys:
                    self._ledger.keyed.recalled(segment, record.keys)
        if self._repairs.deleted_segment_ids:
            # A session and its segments are recorded and removed in one commit.
            log.error("segments_without_session count=%d", len(self._repairs.deleted_segment_ids))
        self._ledger.skip_segment_ids(last)

    def _add(self, session: Session) -> None:
        gap = session.first_gap()
        if gap is not None:
            self._cut(session, gap)
        if session.is_block and not session.live:
            # It is there whole or not at all.
            self._repairs.deleted_session_uids.append(session.uid)
            return
        # Clocks may have been set back between the runs.
        idle_ns = max(self._state.clock.now_ns() - session.access_time_ns, 0)
        self._ledger.recalled(session, idle_ns / SECOND_NS)

    def _forget_unlisted(self) -> None:
        # Cutting sessions may leave segments that only the cut part listed.
        unlisted = [segment for segment in self._ledger.segments() if not segment.reference_count]
        for segment in unlisted:
            self._ledger.unrecorded_segment(segment)
        self._repairs.deleted_segment_ids += [segment.segment_id for segment in unlisted]

    def _cut(self, session: Session, gap: int) -> None:
        log.error("tokens_without_segment session=%s position=%d", session.name, gap)
        self._state.counters.corrupt_segment_count += 1
        session.drop_positions(((gap, session.log_end),))
        self._repairs.sessions.append(record_of(session))

    def _session(self, record: SessionRecord, model: ModelRecord) -> Session:
        return self._made(record, model.tenant, model.fingerprint, self._layout(record, model))

    def _made(self, record: SessionRecord, tenant: str, fingerprint: bytes, layout: SegmentLayout) -> Session:
        return Session(
            uid=record.uid,
            tenant=tenant,
            session_id=record.session_id,
            model_id=record.model_id,
            model_fingerprint=fingerprint,
            layout=layout,
            expiration=Expiration(record.ttl_ns, record.expire_time_ns),
            create_time_ns=record.create_time_ns,
            access_time_ns=record.access_time_ns,
            expire_time_ns=record.expire_time_ns,
            is_pinned=record.is_pinned,
            salt=record.salt,
            contents=record.contents,
            copies=record.copies,
            live=record.live,
            # At least this run's first: what the crash took back had generations too.
            generation=max(record.generation, self._state.least_generation),
            # All three ends are one: what a record says is durable.
            log_end=record.log_end,
            recorded_end=record.log_end,
            durable_end=record.log_end,
        )

    def _layout(self, record: SessionRecord, model: ModelRecord) -> SegmentLayout:
        # By its streams, which records share: making ranges of them takes a while.
        key = (model.fingerprint, record.layout)
        if key not in self._layouts:
            self._layouts[key] = self._state.layout(model, ranges_of(record.layout))
        return self._layouts[key]


def _segment(record: SegmentRecord, session: Session, use: TenantUse) -> Segment:
    identity = record.identity
    is_writer = identity.session_uid == session.uid
    is_same_model = identity.model_fingerprint == session.model_fingerprint
    segment = Segment(
        segment_id=record.segment_id,
        tenant=session.tenant if identity.tenant == session.tenant else identity.tenant,
        writer_uid=session.uid if is_writer else identity.session_uid,
        generation=identity.generation,
        begin=identity.begin,
        model_fingerprint=session.model_fingerprint if is_same_model else identity.model_fingerprint,
        layout=session.layout.of(record.segment_tokens),
        use=use,
    )
    segment.recorded(record.slot, identity.token_count, record.header_checksum, record.copy)
    return segment
