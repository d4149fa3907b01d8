"""Records, and the interface of a metadata store.

Records are facts as they are durable; the cache's own state (leases, tails in DRAM) is not in
them. Every implementation passes `MetadataContract` of `tests/metadata_contract.py`.
"""

import json
from collections.abc import Coroutine, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ctxcache.format.ids import Labels
from ctxcache.format.layout import SEGMENT_TOKENS, SegmentIdentity, Slot
from ctxcache.format.model import ModelProbe, ModelSpec
from ctxcache.format.streams import Content, Stream

STREAMS_PER_TEXT = 256


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A registered model. Key: tenant and model id. Times are nanoseconds since the epoch."""

    tenant: str
    spec: ModelSpec
    create_time_ns: int
    probe: ModelProbe | None = None
    """The probe of the first engine that sent one; never replaced."""
    _fingerprint: bytes = field(init=False, compare=False, repr=False, default=b"")
    streams_text: str = field(init=False, compare=False, repr=False, default="")

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of `spec`, made when first needed: hashing takes a while."""
        if not self._fingerprint:
            self.keep_fingerprint(self.spec.fingerprint())
        return self._fingerprint

    # The two fields below are of use for others' time only: made early or late, they are the same.
    def keep_fingerprint(self, fingerprint: bytes) -> None:
        """`spec` has this one, which was made a part at a time."""
        object.__setattr__(self, "_fingerprint", fingerprint)

    def keep_streams_text(self, text: str) -> None:
        """The streams as they are written down, made a part at a time; empty: made when they are needed."""
        object.__setattr__(self, "streams_text", text)


def streams_texts(spec: ModelSpec) -> Iterator[str]:
    """The longest part of a model's record, in pieces that take a fraction of a millisecond each."""
    for begin in range(0, len(spec.streams), STREAMS_PER_TEXT):
        # Plain numbers: the encoder takes ten times as long for each that is a member of an enumeration.
        # Brackets off: parts are joined into one list.
        yield as_json(
            [
                (layer, int(kind), row_bytes, int(dtype))
                for (layer, kind), row_bytes, dtype in spec.streams[begin : begin + STREAMS_PER_TEXT]
            ]
        )[1:-1]


def as_json(value: object) -> str:
    """Text as short as can be."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class SegmentRecord(NamedTuple):
    """A durable segment. Key: segment id, never reused.

    `header_checksum` is that of the header in the slot, which in turn holds every chunk's: bytes of
    another time or place cannot pass for this segment's.
    """

    segment_id: int
    identity: SegmentIdentity
    slot: Slot
    header_checksum: int
    keys: tuple[bytes, ...] = ()
    """Keys of its tokens, 32 bytes each (docs/prefixes.md)."""
    segment_tokens: int = SEGMENT_TOKENS
    """Rows that its slot has room for; 1 for a block."""
    copy: Slot | None = None
    """The slot on another path that has the same bytes."""

    @property
    def places(self) -> tuple[Slot, ...]:
        """All its slots."""
        return (self.slot,) if self.copy is None else (self.slot, self.copy)


class BlockRecord(NamedTuple):
    """The further fields of a block's record: its space's fingerprint, 32 bytes, and its parts' sizes.

    `parent_id`: of the block that it continues, empty for none.
    """

    space: bytes
    parent_id: str
    part_bytes: tuple[int, ...]


# A session's log, and what its record says of it:
#
#     position      0             64            128       150
#     segment_ids   | s1          | s2          | s3      |      in the order of the log
#     live          ▓▓▓▓▓▓▓▓······▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓       ((0, 40), (64, 150)): the rest was truncated
#     log_end       150: the next row's position, which none ever had before
@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session's durable state, or a block's. Key: uid (16 bytes), never reused.

    `segment_ids` in log order; `live` are position ranges `[begin, end)` of the log, ascending and
    disjoint; `log_end` is one past the last position ever used by a durable row. Exactly one of
    `ttl_ns` (sliding) and an absolute `expire_time_ns` applies: `ttl_ns` is None for the latter.
    """

    uid: bytes
    tenant: str
    session_id: str
    model_id: str
    layout: tuple[Stream, ...]
    generation: int
    segment_ids: tuple[int, ...]
    live: tuple[tuple[int, int], ...]
    log_end: int
    create_time_ns: int
    access_time_ns: int
    expire_time_ns: int
    ttl_ns: int | None
    is_pinned: bool
    block: BlockRecord | None = None
    salt: bytes = b""
    """The salt in its keys, up to 64 bytes."""
    contents: tuple[Content, ...] = ()
    """The contents behind its tokens, in order; none behind the first token that was dropped."""
    copies: int = 1
    """How many SSD paths each of its segments shall be on, 1 or 2."""
    labels: Labels = ()
    """What its creator says of it."""


class Kind(NamedTuple):
    """The facts that many sessions share. `layout` is equal for the same streams."""

    tenant: str
    model_id: str
    layout: Hashable


class KeptSessions(NamedTuple):
    """The part of sessions' records that opening looks at, in columns, by uid.

    The store reads a whole record from its `kept`. The columns leave out blocks, pinned sessions and sessions
    with copies, which never sleep: `others` are the uid and the kept of each of those.
    """

    uids: bytes
    """16 each."""
    session_ids: list[str]
    kinds: list[Kind]
    kind_numbers: "npt.NDArray[np.intp]"
    """Which of the kinds each has."""
    segment_counts: "npt.NDArray[np.int64]"
    segment_ids: "npt.NDArray[np.uint64]"
    """Those of all sessions, in their order."""
    live_begins: "npt.NDArray[np.int64]"
    live_ends: "npt.NDArray[np.int64]"
    """Live tokens lie between them; a session whose end is 0 has none."""
    access_times_ns: "npt.NDArray[np.int64]"
    expire_times_ns: "npt.NDArray[np.int64]"
    kept: list[object]
    others: list[tuple[bytes, object]]


class KeyedSegment(NamedTuple):
    """A segment that has keys of its tokens: its place among those found, and what makes its scope."""

    place: int
    tenant: str
    model_fingerprint: bytes
    keys: tuple[bytes, ...]


class KeptSegments(NamedTuple):
    """As `KeptSessions`, of segments' records, ascending by id. Not `is_plain`: one with a copy."""

    segment_ids: "npt.NDArray[np.uint64]"
    begins: "npt.NDArray[np.int64]"
    token_counts: "npt.NDArray[np.int64]"
    path_indexes: "npt.NDArray[np.int64]"
    offsets_bytes: "npt.NDArray[np.int64]"
    sizes_bytes: "npt.NDArray[np.int64]"
    segment_tokens: "npt.NDArray[np.int64]"
    is_plain: "npt.NDArray[np.bool_]"
    keyed: list[KeyedSegment]
    kept: list[object]


@dataclass(slots=True)
class Changes:
    """Changes that become true at once: all of it or, after a crash, none of it."""

    models: list[ModelRecord] = field(default_factory=list)
    sessions: list[SessionRecord] = field(default_factory=list)
    segments: list[SegmentRecord] = field(default_factory=list)
    deleted_session_uids: list[bytes] = field(default_factory=list)
    deleted_segment_ids: list[int] = field(default_factory=list)
    deleted_models: list[tuple[str, str]] = field(default_factory=list)
    """Tenants and model ids."""
    quarantined: list[Slot] = field(default_factory=list)
    """SSD slots that are kept from use: what was read there was not what had been written."""
    released: list[Slot] = field(default_factory=list)
    """Quarantined slots that may be used again."""


class MetadataStore(Protocol):
    """Keeps records. Owned by the event loop; reads happen once, at start."""

    def check(self, *, is_growing: bool = True) -> None:
        """Raise, before anybody changes anything, what a commit would meet now.

        TierFailure once a device has refused one; CapacityExceeded, for what `is_growing`, when the room
        around the records is short. A commit may still fail after it.
        """

    def models(self) -> Iterator[ModelRecord]:
        """Every model. Raises CorruptMetadata."""

    def sessions(self) -> Iterator[SessionRecord]:
        """Every session. Raises CorruptMetadata."""

    def segments(self) -> Iterator[SegmentRecord]:
        """Every segment. Raises CorruptMetadata."""

    def kept_sessions(self) -> Iterator[KeptSessions]:
        """Every session, some at a time, by uid, verified and not read in full. Raises CorruptMetadata."""

    def kept_segments(self) -> Iterator[KeptSegments]:
        """Every segment, some at a time, ascending by id, verified and not read in full.

        Raises CorruptMetadata.
        """

    def session(self, uid: bytes, kept: object) -> SessionRecord:
        """The whole record of a session that `kept_sessions` gave. Does no I/O. Raises CorruptMetadata."""

    def segment(self, segment_id: int, kept: object) -> SegmentRecord:
        """The whole record of a segment that `kept_segments` gave. Does no I/O. Raises CorruptMetadata."""

    def kept(self, record: SessionRecord | SegmentRecord) -> object:
        """Pack a record as `session`, or `segment`, reads it. Does no I/O."""

    def quarantined(self) -> Iterator[Slot]:
        """Every SSD slot that is kept from use. Raises CorruptMetadata."""

    def begin(self) -> None:
        """Take commits from here on. Before it nothing is written, and a refusal leaves all as it was.

        Whoever reads everything first has it compared once, on that way. A commit begins by itself. Raises
        CorruptMetadata, CapacityExceeded, DataDirectoryUnusable.
        """

    def commit(self, changes: Changes, *, is_durable: bool) -> Coroutine[Any, Any, None]:
        """Give `changes` their place behind those of every call before, at once; they are applied atomically.

        Await the result to know that these changes, and all before them, are stored: with `is_durable` synced
        (many callers share one sync). Without it they survive the death of the process and not of the
        machine. Close it to let them go on unobserved. The event loop is never blocked by a sync. Raises
        TierFailure: here where no changes are taken, else where it is awaited.
        """
        ...

    async def reopen(self) -> bool:
        """Accept changes again after a refusal whose cause is gone; returns whether it did.

        The store's records are compared with those that were acknowledged. Changes of commits that were
        refused meanwhile are committed now, durably. Raises TierFailure. Costs nothing where nothing is
        refused.
        """

    async def recorded_slots(self) -> set[Slot]:
        """The SSD slots that records name. Raises CorruptMetadata."""

    def close(self) -> None:
        """Give up the files. Nothing may be in flight."""
