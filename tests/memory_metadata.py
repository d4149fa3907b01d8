"""Metadata in memory, for tests.

Knows no bytes: records are kept as they are. Worst case: it is gone with the process; `crash` shows
what a power cut would leave of a store that syncs like this one is asked to.
"""

from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from ctxcache.errors import CapacityExceeded, TierFailure
from ctxcache.format.layout import Slot
from ctxcache.storage.metadata.base import (
    Changes,
    KeptSegments,
    KeptSessions,
    KeyedSegment,
    Kind,
    ModelRecord,
    SegmentRecord,
    SessionRecord,
)

AT_ONCE = 3
"""Records of one look, so that tests have several."""


@dataclass(slots=True)
class _State:
    models: dict[tuple[str, str], ModelRecord] = field(default_factory=dict)
    sessions: dict[bytes, SessionRecord] = field(default_factory=dict)
    segments: dict[int, SegmentRecord] = field(default_factory=dict)
    quarantined: set[Slot] = field(default_factory=set)

    def apply(self, changes: Changes) -> None:
        """Make `changes` true; deletions last, so that they win."""
        self.models |= {(model.tenant, model.spec.model_id): model for model in changes.models}
        self.sessions |= {session.uid: session for session in changes.sessions}
        self.segments |= {segment.segment_id: segment for segment in changes.segments}
        for key in changes.deleted_models:
            self.models.pop(key, None)
        for uid in changes.deleted_session_uids:
            self.sessions.pop(uid, None)
        for segment_id in changes.deleted_segment_ids:
            self.segments.pop(segment_id, None)
        self.quarantined |= set(changes.quarantined)
        self.quarantined -= set(changes.released)


class MemoryMetadata:
    """See MetadataStore. Owned by the event loop."""

    def __init__(self) -> None:
        self.current = _State()
        self.durable = _State()
        self._unsynced: list[Changes] = []
        self._failure: str | None = None
        self.is_full = False
        """Set by a test: there is no room for what grows."""

    def check(self, *, is_growing: bool = True) -> None:
        """See MetadataStore."""
        if self._failure is not None:
            raise TierFailure(path="memory", problem=self._failure)
        if self.is_full and is_growing:
            raise CapacityExceeded(tier="metadata memory", needed_bytes=1, free_bytes=0, limit_bytes=0)

    def models(self) -> Iterator[ModelRecord]:
        """See MetadataStore."""
        return iter(list(self.current.models.values()))

    def sessions(self) -> Iterator[SessionRecord]:
        """See MetadataStore."""
        return iter(list(self.current.sessions.values()))

    def segments(self) -> Iterator[SegmentRecord]:
        """See MetadataStore. Ascending by id."""
        return iter([segment for _, segment in sorted(self.current.segments.items())])

    def kept_sessions(self) -> Iterator[KeptSessions]:
        """See MetadataStore."""
        records = [record for _, record in sorted(self.current.sessions.items())]
        for begin in range(0, len(records), AT_ONCE):
            yield _looked_at(records[begin : begin + AT_ONCE])

    def kept_segments(self) -> Iterator[KeptSegments]:
        """See MetadataStore."""
        records = list(self.segments())
        for begin in range(0, len(records), AT_ONCE):
            found = records[begin : begin + AT_ONCE]
            keyed = [
                KeyedSegment(i, record.identity.tenant, record.identity.model_fingerprint, record.keys)
                for i, record in enumerate(found)
                if record.keys
            ]
            yield KeptSegments(
                np.array([record.segment_id for record in found], np.uint64),
                _numbers(record.identity.begin for record in found),
                _numbers(record.identity.token_count for record in found),
                _numbers(record.slot.path_index for record in found),
                _numbers(record.slot.offset_bytes for record in found),
                _numbers(record.slot.size_bytes for record in found),
                _numbers(record.segment_tokens for record in found),
                np.array([record.copy is None for record in found]),
                keyed,
                [*found],
            )

    def session(self, uid: bytes, kept: object) -> SessionRecord:
        """See MetadataStore."""
        assert isinstance(kept, SessionRecord)
        assert kept.uid == uid
        return kept

    def segment(self, segment_id: int, kept: object) -> SegmentRecord:
        """See MetadataStore."""
        assert isinstance(kept, SegmentRecord)
        assert kept.segment_id == segment_id
        return kept

    def kept(self, record: SessionRecord | SegmentRecord) -> object:
        """See MetadataStore."""
        return record

    def quarantined(self) -> Iterator[Slot]:
        """See MetadataStore."""
        return iter(sorted(self.current.quarantined))

    def begin(self) -> None:
        """See MetadataStore. It takes commits at once."""

    def commit(self, changes: Changes, *, is_durable: bool) -> Coroutine[Any, Any, None]:
        """See MetadataStore."""
        self.check(is_growing=False)
        kept = _copy(changes)
        self.current.apply(kept)
        self._unsynced.append(kept)
        if is_durable:
            self.sync()
        return _there()

    def fail(self, problem: str) -> None:
        """From now on every commit raises TierFailure, as after a device has refused one."""
        self._failure = problem

    async def reopen(self) -> bool:
        """See MetadataStore. Nothing that a test breaks is mended by waiting."""
        return False

    async def recorded_slots(self) -> set[Slot]:
        """See MetadataStore."""
        named = {slot for segment in self.current.segments.values() for slot in segment.places}
        return named | self.current.quarantined

    def crash(self) -> "MemoryMetadata":
        """Return what a power cut leaves: a store with the durable commits and those before them."""
        survivor = MemoryMetadata()
        survivor.current = _copy_state(self.durable)
        survivor.durable = _copy_state(self.durable)
        return survivor

    def close(self) -> None:
        """See MetadataStore. Commits are kept, so that the same object can be read again."""
        self.sync()

    def sync(self) -> None:
        """Let every commit so far outlive a power cut."""
        for changes in self._unsynced:
            self.durable.apply(changes)
        self._unsynced.clear()


async def _there() -> None:
    """Nothing to wait for."""


def _looked_at(records: list[SessionRecord]) -> KeptSessions:
    is_plain = [not (record.block or record.is_pinned or record.copies > 1) for record in records]
    plain = list(compress(records, is_plain))
    kinds = [Kind(record.tenant, record.model_id, record.layout) for record in plain]
    return KeptSessions(
        b"".join(record.uid for record in plain),
        [record.session_id for record in plain],
        kinds,
        np.arange(len(plain)),
        _numbers(len(record.segment_ids) for record in plain),
        np.array([each for record in plain for each in record.segment_ids], np.uint64),
        _numbers(record.live[0][0] if record.live else 0 for record in plain),
        _numbers(record.live[-1][1] if record.live else 0 for record in plain),
        _numbers(record.access_time_ns for record in plain),
        _numbers(record.expire_time_ns for record in plain),
        [*plain],
        [(record.uid, record) for record, is_usual in zip(records, is_plain, strict=True) if not is_usual],
    )


def _numbers(values: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(values), np.int64)


def _copy(changes: Changes) -> Changes:
    return Changes(**{name: list(getattr(changes, name)) for name in changes.__slots__})


def _copy_state(state: _State) -> _State:
    return _State(dict(state.models), dict(state.sessions), dict(state.segments), set(state.quarantined))
