"""Loading: the records of a metadata store become the cache's state, as they fit together.

A segment nobody lists is dropped, and a session's tokens from the first segment that is missing. What would
be made anew for every session or segment and is the same, layouts, names and identities, is made once.

    the last LAST_USED sessions, blocks, and what is pinned, shared, copied or does not fit ──► known
    all others, whose records fit together ──► dormant

A million sessions take seconds. Of a dormant one some fields are looked at; the rest of its record is read
when it comes to be known.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ctxcache.cache.eviction import record_of
from ctxcache.cache.scrubbing import Bad
from ctxcache.cache.state import State
from ctxcache.core.ledger.dormant import UID_BYTES, Dormant, Line
from ctxcache.core.ledger.ledger import SECOND_NS
from ctxcache.core.ledger.segment import Segment
from ctxcache.core.ledger.session import Expiration, Session
from ctxcache.core.ledger.usage import TenantUse
from ctxcache.core.placement.shares import EVERYONE
from ctxcache.core.prefix.keys import scope_of
from ctxcache.format.layout import SegmentLayout, block_layout
from ctxcache.format.streams import Stream, ranges_of
from ctxcache.storage.metadata.base import (
    Changes,
    KeptSegments,
    KeptSessions,
    KeyedSegment,
    Kind,
    MetadataStore,
    ModelRecord,
    SegmentRecord,
    SessionRecord,
)

LAST_USED = 1 << 10
"""The number of sessions, the last used ones, that are known from the start: the policy hears of them."""
log = logging.getLogger(__name__)


class DormantSlots(Collection[tuple[int, int, int]]):
    """The slots of dormant segments: path number, offset, size; and the segments' ids in the same order."""

    def __init__(self, ids: "array[int]", *columns: "array[int]") -> None:
        self.segment_ids, self._columns = ids, columns

    def __len__(self) -> int:
        """How many slots there are."""
        return len(self.segment_ids)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Each slot."""
        paths, offsets, sizes = self._columns
        return zip(paths, offsets, sizes, strict=True)

    def __contains__(self, slot: object) -> bool:
        """Whether a dormant segment has this slot."""
        return any(each == slot for each in self)


class Loaded(NamedTuple):
    """The repairs that make the records whole again, and the slots of dormant segments, to be taken."""

    repairs: Changes
    dormant: DormantSlots
    losses: Sequence[Bad]
    """The sessions that were cut or removed."""


def load(state: State, metadata: MetadataStore, last_used: int = LAST_USED) -> Loaded:
    """Fill an empty state. Raises CorruptMetadata."""
    return _Loader(state, metadata).load(last_used)


class Reviver:
    """Makes sessions of records."""

    def __init__(self, state: State, metadata: MetadataStore) -> None:
        self._state, self._metadata = state, metadata
        self._layouts: dict[tuple[bytes, tuple[Stream, ...]], SegmentLayout] = {}

    def revive(
        self, uid: bytes, kept: object, kept_segment: Callable[[int], object], use: TenantUse | None
    ) -> Session:
        """See Revive."""
        record = self._metadata.session(uid, kept)
        session = self.session(record, self._state.models[record.tenant, record.model_id])
        if use is not None:
            session.segments = [
                segment_of(self._metadata.segment(segment_id, kept_segment(segment_id)), session, use)
                for segment_id in record.segment_ids
            ]
        return session

    def session(self, record: SessionRecord, model: ModelRecord) -> Session:
        """A session without segments."""
        return self.made(record, model.tenant, model.fingerprint, self.layout(record.layout, model))

    def made(self, record: SessionRecord, tenant: str, fingerprint: bytes, layout: SegmentLayout) -> Session:
        """A session or a block without segments."""
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
            labels=record.labels,
            live=record.live,
            # The generation is at least this run's first: what the crash took back had generations too.
            generation=max(record.generation, self._state.least_generation),
            # All three ends are one: what a record says is durable.
            log_end=record.log_end,
            recorded_end=record.log_end,
            durable_end=record.log_end,
        )

    def layout(self, streams: tuple[Stream, ...], model: ModelRecord) -> SegmentLayout:
        """The layout of a session's segments."""
        # Records share the streams, and making ranges of them takes a while.
        key = (model.fingerprint, streams)
        if key not in self._layouts:
            self._layouts[key] = self._state.layout(model, ranges_of(streams))
        return self._layouts[key]


# The records' possible claims, and what is made of each:
#
#     session, its segments all there      recalled, or dormant
#     session, a segment missing           cut before the missing one, and recorded anew
#     session of a model that is gone      removed
#     segment that no session lists        removed, its slot free
#     block, not whole                     removed
class _Loader:
    def __init__(self, state: State, metadata: MetadataStore) -> None:
        self._state = state
        self._ledger = state.ledger
        self._metadata = metadata
        self._reviver = Reviver(state, metadata)
        self._repairs = Changes()
        self._losses: list[Bad] = []
        self._listings: list[tuple[Session, tuple[int, ...]]] = []
        """The sessions that are to be known, without segments, and the ids of those that each lists."""
        self._listed_by: dict[int, Session] = {}
        dormant = Dormant(self._reviver.revive, is_by_tenant=bool(self._ledger.usage.shares))
        self._plain = _Plain(dormant, state.clock.now_ns())
        self._layouts: dict[Kind, SegmentLayout | None] = {}
        """None where the model is missing."""

    def load(self, last_used: int) -> Loaded:
        """See the module's."""
        for model in self._metadata.models():
            self._state.add_model(model)
        # All sessions come before the segments: a segment's record is only of use with a session that lists
        # it.
        for found in self._metadata.kept_sessions():
            self._look_at(found)
        # Sessions with segments on a lost path are reckoned at once, so that all are known then.
        self._set_apart(
            self._plain.set_apart(self._listed_by, None if self._ledger.lost.paths else last_used)
        )
        self._load_segments()
        self._set_apart(self._plain.unfit())
        # Policies hear of sessions in the order of their accesses.
        for session, segment_ids in sorted(self._listings, key=lambda listing: listing[0].access_time_ns):
            segments = [self._ledger.segment(segment_id) for segment_id in segment_ids]
            session.segments = [segment for segment in segments if segment]
            self._add(session, _first_gap(session, segments))
        if self._repairs.sessions:
            self._forget_unlisted()
        self._plain.settle(is_by_tenant=bool(self._ledger.usage.shares))
        self._ledger.slept_before(self._plain.dormant, self._plain.models)
        return Loaded(self._repairs, self._plain.slots(), self._losses)

    def _look_at(self, sessions: KeptSessions) -> None:
        for uid, kept in sessions.others:
            self._read(self._metadata.session(uid, kept))
        kinds, firsts = np.unique(sessions.kind_numbers, return_index=True)
        for number, i in zip(kinds.tolist(), firsts.tolist(), strict=True):
            if (kind := sessions.kinds[number]) not in self._layouts:
                record = self._metadata.session(_uid(sessions, i), sessions.kept[i])
                model = self._state.models.get((record.tenant, record.model_id))
                self._layouts[kind] = self._reviver.layout(record.layout, model) if model else None
        layouts = [self._layouts[kind] for kind in sessions.kinds]
        if None in layouts:
            has_model = np.array([layout is not None for layout in layouts])[sessions.kind_numbers]
            for i in np.flatnonzero(~has_model).tolist():
                # `_read` logs each session without a model, and removes it.
                self._read(self._metadata.session(_uid(sessions, i), sessions.kept[i]))
            sessions = _only(sessions, has_model)
        self._plain.add(sessions, layouts)

    def _model_of(self, record: SessionRecord) -> ModelRecord | None:
        model = self._state.models.get((record.tenant, record.model_id))
        if model is None:
            problem = f"the record of its model {record.model_id} is gone"
            name = f"sessions/{record.session_id}"
            self._losses.append(Bad(0, record.tenant, (name,), 0, record.log_end, "", 0, problem))
            self._repairs.deleted_session_uids.append(record.uid)
        return model

    def _read(self, record: SessionRecord) -> None:
        """Make the session of a record known."""
        if record.block is not None:
            layout = block_layout(record.block.part_bytes)
            session = self._reviver.made(record, record.tenant, record.block.space, layout)
            session.parent_id = record.block.parent_id
        else:
            model = self._model_of(record)
            if model is None:
                return
            session = self._reviver.session(record, model)
        self._listings.append((session, record.segment_ids))
        self._listed_by.update(dict.fromkeys(record.segment_ids, session))

    def _set_apart(self, numbers: Iterable[int]) -> None:
        """Take these sessions from the dormant ones, so that they are known."""
        dormant = self._plain.dormant
        for number in numbers:
            record = self._metadata.session(dormant.uid(number), dormant.kept(number))
            kept = {i: dormant.kept_segment(i) for i in record.segment_ids if dormant.lister(i) is not None}
            dormant.left(number, record.session_id, record.access_time_ns, record.expire_time_ns, kept)
            self._plain.models[record.tenant, record.model_id] -= 1
            self._read(record)
            for segment_id, found in kept.items():
                self._load_segment(self._metadata.segment(segment_id, found))

    def _load_segments(self) -> None:
        last, plain = 0, self._plain
        for segments in self._metadata.kept_segments():
            # Segment ids ascend: the last one read is the largest.
            last = int(segments.segment_ids[-1])
            numbers = plain.add_segments(segments)
            for i in np.flatnonzero(numbers < 0).tolist():
                segment_id = int(segments.segment_ids[i])
                if segment_id in self._listed_by:
                    self._load_segment(self._metadata.segment(segment_id, segments.kept[i]))
                else:
                    self._repairs.deleted_segment_ids.append(segment_id)
            for keyed in segments.keyed:
                segment_id, number = int(segments.segment_ids[keyed.place]), int(numbers[keyed.place])
                begin = int(segments.begins[keyed.place])
                if number >= 0:
                    self._find_by(keyed, segment_id, begin, plain.layout(number))
                elif segment_id in self._listed_by:
                    self._find_by(keyed, segment_id, begin, self._listed_by[segment_id].layout)
        if self._repairs.deleted_segment_ids:
            # One commit records or removes a session and its segments together: this is damage.
            log.error("segments_without_session count=%d", len(self._repairs.deleted_segment_ids))
        self._ledger.skip_segment_ids(last)

    def _load_segment(self, record: SegmentRecord) -> None:
        session = self._listed_by[record.segment_id]
        segment = segment_of(record, session, self._ledger.usage.of(session.tenant))
        self._ledger.recorded_segment(segment)

    def _find_by(self, keyed: KeyedSegment, segment_id: int, begin: int, layout: SegmentLayout) -> None:
        """Let the segment be found by the keys of its tokens."""
        scope = scope_of(keyed.tenant, keyed.model_fingerprint, layout.outline.ranges)
        self._ledger.keyed.recalled(scope, segment_id, begin, keyed.keys)

    def _add(self, session: Session, gap: int | None) -> None:
        if gap is not None:
            self._cut(session, gap)
        if session.is_block and not session.live:
            # A block is there whole or not at all.
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
        problem = "no segment holds these tokens"
        self._losses.append(Bad(0, session.tenant, (session.name,), gap, session.log_end, "", 0, problem))
        self._state.counters.corrupt_segment_count += 1
        session.drop_positions(((gap, session.log_end),))
        self._repairs.sessions.append(record_of(session))


def _first_gap(session: Session, segments: Sequence[Segment | None]) -> int | None:
    """The first live position whose row may not be there; None where all are. A missing segment is None."""
    missing = segments.index(None) if None in segments else 0
    before = segments[missing - 1] if missing else None
    # Another session's segment may have rows of its own where the missing one had this session's.
    if before is not None and before.writer_uid != session.uid:
        return before.begin
    return session.first_gap()


class _Plain:
    """Sessions that may be dormant, in a column for each fact that is looked at."""

    def __init__(self, dormant: Dormant, opened_ns: int) -> None:
        self.dormant, self._opened_ns = dormant, opened_ns
        self.models: Counter[tuple[str, str]] = Counter()
        """How many of each tenant's model are dormant."""
        self._layouts: list[SegmentLayout] = []
        """Each once; the sessions' are named by their places here."""
        self._places: dict[int, int] = {}
        """The place of a layout, by what it is known by in memory."""
        self._layout_of = array("q")
        self._access, self._expire = array("q"), array("q")
        self._live_begins, self._live_ends = array("q"), array("q")
        self._listed, self._listers = array("Q"), array("q")
        """Ids of segments that are listed, and the numbers of the sessions; ascending from `set_apart` on."""
        self._is_found: npt.NDArray[np.bool_] = np.zeros(0, bool)
        """Whether the record of each listed segment was read."""
        self._ids, self._owners = array("Q"), array("q")
        self._begins, self._ends = array("q"), array("q")
        self._paths, self._offsets, self._sizes = array("q"), array("q"), array("q")
        self._sizes_of: dict[tuple[int, int], int] = {}
        self._misfits: set[int] = set()

    def add(self, sessions: KeptSessions, layouts: Sequence[SegmentLayout | None]) -> None:
        """Sessions, and the layout of each kind."""
        # Clocks may have been set back between the runs.
        idle_s = np.maximum(self._opened_ns - sessions.access_times_ns, 0) / SECOND_NS
        kinds = sessions.kind_numbers.tolist()
        numbers = self.dormant.add_read(
            sessions.uids,
            [sessions.kinds[kind].tenant for kind in kinds],
            sessions.session_ids,
            sessions.kept,
            array("d", idle_s.tobytes()),
        )
        for kind, count in Counter(kinds).items():
            self.models[sessions.kinds[kind].tenant, sessions.kinds[kind].model_id] += count
        places = np.array([-1 if layout is None else self._place(layout) for layout in layouts], np.int64)
        for column, values in (
            (self._layout_of, places[sessions.kind_numbers]),
            (self._access, sessions.access_times_ns),
            (self._expire, sessions.expire_times_ns),
            (self._live_begins, sessions.live_begins),
            (self._live_ends, sessions.live_ends),
            (self._listed, sessions.segment_ids),
            (self._listers, np.repeat(np.arange(numbers.start, numbers.stop), sessions.segment_counts)),
        ):
            column.frombytes(values.tobytes())

    def _place(self, layout: SegmentLayout) -> int:
        place = self._places.setdefault(id(layout), len(self._layouts))
        if place == len(self._layouts):
            self._layouts.append(layout)
        return place

    def layout(self, number: int) -> SegmentLayout:
        """The layout of a session."""
        return self._layouts[self._layout_of[number]]

    def set_apart(self, listed_by: "dict[int, Session]", last_used: int | None) -> list[int]:
        """The sessions that share segments with others, and the last used ones; None: all."""
        listed, listers = np.array(self._listed, np.uint64), np.array(self._listers, np.int64)
        if last_used is None:
            apart = np.arange(len(self._access))
        else:
            order = np.argsort(listed, kind="stable")
            listed, listers = listed[order], listers[order]
            is_shared = np.isin(listed, np.array(list(listed_by), np.uint64))
            is_repeated = listed[1:] == listed[:-1]
            is_shared[1:] |= is_repeated
            is_shared[:-1] |= is_repeated
            by_use = np.argsort(np.array(self._access, np.int64), kind="stable")
            apart = np.union1d(listers[is_shared], by_use[max(len(by_use) - last_used, 0) :])
        is_left = ~np.isin(listers, apart)
        self._listed = array("Q", listed[is_left].tobytes())
        self._listers = array("q", listers[is_left].tobytes())
        self._is_found = np.zeros(len(self._listed), bool)
        found: list[int] = apart.tolist()
        return found

    def add_segments(self, segments: KeptSegments) -> "npt.NDArray[np.int64]":
        """Add those of the segments that sessions list. Returns each one's session number, -1 for none."""
        listed = np.frombuffer(self._listed, np.uint64)
        at = np.searchsorted(listed, segments.segment_ids)
        is_listed = at < len(listed)
        is_listed[is_listed] = listed[at[is_listed]] == segments.segment_ids[is_listed]
        at = at[is_listed]
        self._is_found[at] = True
        numbers = np.full(len(segments.segment_ids), -1, np.int64)
        numbers[is_listed] = owners = np.frombuffer(self._listers, np.int64)[at]
        ids, paths = segments.segment_ids[is_listed], segments.path_indexes[is_listed]
        begins, sizes = segments.begins[is_listed], segments.sizes_bytes[is_listed]
        self.dormant.add_segments_read(
            _packed("Q", ids),
            _packed("I", owners.astype(np.uint32)),
            _packed("I", paths.astype(np.uint32)),
            list(compress(segments.kept, is_listed.tolist())),
        )
        for column, values in (
            (self._ids, ids),
            (self._owners, owners),
            (self._begins, begins),
            (self._ends, begins + segments.token_counts[is_listed]),
            (self._paths, paths),
            (self._offsets, segments.offsets_bytes[is_listed]),
            (self._sizes, sizes),
        ):
            column.frombytes(values.tobytes())
        is_fit = segments.is_plain[is_listed] & (
            sizes == self._right_sizes(owners, segments.segment_tokens[is_listed])
        )
        self._misfits.update(owners[~is_fit].tolist())
        return numbers

    def _right_sizes(
        self, owners: "npt.NDArray[np.int64]", segment_tokens: "npt.NDArray[np.int64]"
    ) -> "npt.NDArray[np.int64]":
        """The sizes of slots that these sessions' segments of so many rows have."""
        places = np.frombuffer(self._layout_of, np.int64)[owners]
        kinds, which = np.unique(np.stack((places, segment_tokens)), axis=1, return_inverse=True)
        sizes = [self._size_of(place, tokens) for place, tokens in kinds.T.tolist()]
        return np.array(sizes, np.int64)[which.reshape(-1)]

    def _size_of(self, place: int, segment_tokens: int) -> int:
        size_bytes = self._sizes_of.get((place, segment_tokens))
        if size_bytes is None:
            size_bytes = self._layouts[place].of(segment_tokens).size_bytes
            self._sizes_of[place, segment_tokens] = size_bytes
        return size_bytes

    def unfit(self) -> list[int]:
        """Sessions to be known, and cut or mended: segments of them are missing, or not as they should be."""
        # The records of some segments are missing.
        self._misfits.update(np.frombuffer(self._listers, np.int64)[~self._is_found].tolist())
        owners, begins, ends = (np.array(each, np.int64) for each in (self._owners, self._begins, self._ends))
        order = np.lexsort((begins, owners))
        owners, begins, ends = owners[order], begins[order], ends[order]
        is_next = owners[1:] == owners[:-1]
        # A segment that ends before the next begins may leave a gap: a full look tells.
        gaps = owners[1:][is_next & (begins[1:] != ends[:-1])]
        count = len(self._access)
        firsts, lasts = np.zeros(count, np.int64), np.zeros(count, np.int64)
        is_first = np.concatenate(([True], ~is_next))[: len(owners)]
        is_last = np.concatenate((~is_next, [True]))[: len(owners)]
        firsts[owners[is_first]], lasts[owners[is_last]] = begins[is_first], ends[is_last]
        is_short = (np.array(self._live_begins) < firsts) | (np.array(self._live_ends) > lasts)
        is_short &= np.array(self._live_ends) > 0
        found = {*self._misfits, *gaps.tolist(), *np.flatnonzero(is_short).tolist()}
        return [number for number in sorted(found) if self.dormant.kept(number) is not None]

    def settle(self, *, is_by_tenant: bool) -> None:
        """Put the dormant sessions in order."""
        numbers = np.array(list(self.dormant), np.uint32)
        access, expire = (np.array(each, np.int64)[numbers] for each in (self._access, self._expire))
        by_use, by_expiry = (np.argsort(each, kind="stable") for each in (access, expire))
        accounts = {EVERYONE: by_use}
        if is_by_tenant:
            tenants = np.array([self.dormant.tenant(number) for number in numbers[by_use].tolist()], object)
            accounts = {tenant: by_use[tenants == tenant] for tenant in self.dormant.names}
        slot_bytes = np.zeros(len(self._access), np.int64)
        np.add.at(slot_bytes, np.frombuffer(self._owners, np.int64), np.frombuffer(self._sizes, np.int64))
        self.dormant.order(
            {account: _line(access, numbers, order) for account, order in accounts.items()},
            _line(expire, numbers, by_expiry),
            _packed("q", slot_bytes),
        )

    def slots(self) -> DormantSlots:
        """The slots of the sessions that are dormant now."""
        is_dormant = np.zeros(len(self._access), bool)
        is_dormant[list(self.dormant)] = True
        is_left = is_dormant[np.array(self._owners, np.int64)]
        columns = (self._ids, self._paths, self._offsets, self._sizes)
        return DormantSlots(*(_packed(each.typecode, np.array(each)[is_left]) for each in columns))


def _uid(found: KeptSessions, i: int) -> bytes:
    return found.uids[i * UID_BYTES : (i + 1) * UID_BYTES]


def _only(sessions: KeptSessions, is_wanted: "npt.NDArray[np.bool_]") -> KeptSessions:
    wanted = is_wanted.tolist()
    return sessions._replace(
        uids=b"".join([_uid(sessions, i) for i in np.flatnonzero(is_wanted).tolist()]),
        session_ids=list(compress(sessions.session_ids, wanted)),
        kind_numbers=sessions.kind_numbers[is_wanted],
        segment_counts=sessions.segment_counts[is_wanted],
        segment_ids=sessions.segment_ids[np.repeat(is_wanted, sessions.segment_counts)],
        live_begins=sessions.live_begins[is_wanted],
        live_ends=sessions.live_ends[is_wanted],
        access_times_ns=sessions.access_times_ns[is_wanted],
        expire_times_ns=sessions.expire_times_ns[is_wanted],
        kept=list(compress(sessions.kept, wanted)),
    )


def _line(
    times: "npt.NDArray[np.int64]", numbers: "npt.NDArray[np.uint32]", order: "npt.NDArray[np.int64]"
) -> Line:
    return Line.of("q", _packed("q", times[order]), _packed("I", numbers[order]))


def _packed(kind: str, numbers: "npt.NDArray[Any]") -> "array[int]":
    return array(kind, numbers.tobytes())


def segment_of(record: SegmentRecord, session: Session, use: TenantUse) -> Segment:
    """A segment of the session, counted as `use`."""
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
