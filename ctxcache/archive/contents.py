"""The contents of an archive, origin, models and sessions: as facts, as bytes and back.

The module also has an import's options, and the outcome of each session. It knows no file and no store. Worst
case: bytes that describe none of these, which is a ValueError that says why.
"""

import enum
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from ctxcache import errors
from ctxcache.archive.frames import PAYLOAD_LIMIT_BYTES
from ctxcache.core import ranges
from ctxcache.errors import CacheError
from ctxcache.format.ids import MODEL_ID, SESSION_ID, Labels, pack_labels, parse_labels
from ctxcache.format.model import ModelProbe, ModelSpec, decode_model, decode_probe
from ctxcache.format.streams import (
    CONTENTS_LIMIT,
    DIGEST_BYTES,
    SALT_LIMIT_BYTES,
    TOKENS,
    Content,
    StateKind,
    Stream,
    StreamSpec,
    contents_within,
)

# The payloads, all numbers little endian:
#
#     MADE   | crash count 8 | created by … |
#     MODL   | created 8 | 4 sizes 2+2+4+4 | tenant | model id | spec | probe |
#     SESS   | uid 16 | 6 numbers 8 | model 4 | flags 2 | 5 counts 2+4+4+4+4 | …
#            … id | streams | live ranges | salt | contents | labels |
#     ROWS   | first position 8 | tokens 8 | rows of stream 0 | rows of stream 1 | … |
#     SAME   | first position 8 | tokens 8 | number of an earlier ROWS 8 |
#     VOID   empty
#     END    | whole sessions 8 | their tokens 8 |
STRETCH = struct.Struct("<qq")
"""First position and token count of ROWS and SAME. Rows follow, or the number of a frame."""
FRAME_NUMBER = struct.Struct("<Q")
TOTALS = struct.Struct("<qq")
"""Whole sessions in the file, and their tokens."""
_ORIGIN = struct.Struct("<q")
_MODEL = struct.Struct("<qHHII")
_SESSION = struct.Struct("<16sqqqqqqIHHIIII")
_STREAM = struct.Struct("<ii")
_RANGE = struct.Struct("<qq")
_CONTENT = struct.Struct(f"<qq{DIGEST_BYTES}s")
_PINNED, _HAS_COPIES, _HAS_LABELS = 1, 2, 4
_TENANT_LIMIT_BYTES = 128
_LAYER_LIMIT = _STREAM_LIMIT = 1 << 16
_ROW_LIMIT_BYTES = 2 << 20


class Origin(NamedTuple):
    """The store that wrote an archive.

    `crash_count` is that of the store; 0 where the writer does not know it.
    """

    created_by: str
    crash_count: int = 0

    def encode(self) -> bytes:
        """The payload of MADE."""
        return _ORIGIN.pack(self.crash_count) + self.created_by.encode()


@dataclass(frozen=True)
class ArchivedModel:
    """A model of a tenant. Times are Unix times in nanoseconds."""

    tenant: str
    spec: ModelSpec
    create_time_ns: int
    probe: ModelProbe | None = None

    def encode(self) -> bytes:
        """The payload of MODL."""
        tenant, model_id = self.tenant.encode(), self.spec.model_id.encode()
        spec, probe = self.spec.encode(), b"" if self.probe is None else self.probe.encode()
        sizes = len(tenant), len(model_id), len(spec), len(probe)
        return b"".join((_MODEL.pack(self.create_time_ns, *sizes), tenant, model_id, spec, probe))

    @cached_property
    def fingerprint(self) -> bytes:
        """The model's fingerprint, 32 bytes."""
        return self.spec.fingerprint()


# Positions are those of the session's log, which has gaps where tokens were dropped:
#
#     position   0 1 2 3 4 5 6 7 8 9
#     live       ▓ ▓ ▓ · · ▓ ▓ ▓ ▓ ▓        live = ((0, 3), (5, 10)), log_end = 10
#                └ whole_token_count = 3    tokens behind the gap were computed with the dropped ones
@dataclass(frozen=True)
class ArchivedSession:
    """A session as it was exported.

    `live` are the positions of its tokens in its log, which ends at `log_end`. `ttl_ns` is 0 where the expiry
    is absolute.
    """

    session_id: str
    model: ArchivedModel
    layout: tuple[Stream, ...]
    uid: bytes
    generation: int
    live: ranges.Ranges
    log_end: int
    create_time_ns: int
    access_time_ns: int
    expire_time_ns: int
    ttl_ns: int
    is_pinned: bool
    salt: bytes = b""
    copies: int = 1
    """Copies of each segment on SSD."""
    labels: Labels = ()
    contents: tuple[Content, ...] = ()
    """The contents behind its tokens, in order, up to the first token that was dropped."""

    def encode(self, model_number: int) -> bytes:
        """The payload of SESS. `model_number` counts the MODL of the file from 0."""
        session_id = self.session_id.encode()
        fixed = _SESSION.pack(
            self.uid,
            self.generation,
            self.log_end,
            self.create_time_ns,
            self.access_time_ns,
            self.expire_time_ns,
            self.ttl_ns,
            model_number,
            _PINNED * self.is_pinned | _HAS_COPIES * (self.copies > 1) | _HAS_LABELS * bool(self.labels),
            len(session_id),
            len(self.layout),
            len(self.live),
            len(self.salt),
            len(self.contents),
        )
        streams = (_STREAM.pack(*stream) for stream in self.layout)
        live = (_RANGE.pack(*found) for found in self.live)
        contents = (_CONTENT.pack(*found) for found in self.contents)
        labels = pack_labels(self.labels)
        return b"".join((fixed, session_id, *streams, *live, self.salt, *contents, labels))

    @cached_property
    def specs(self) -> tuple[StreamSpec, ...]:
        """The session's streams, in storage order."""
        return self.model.spec.resolve(self.layout)

    @property
    def whole_token_count(self) -> int:
        """How many of the first tokens were computed with all tokens before them."""
        return ranges.whole_count(self.live)

    @property
    def is_cut(self) -> bool:
        """Whether some tokens were computed with tokens that were dropped."""
        return self.whole_token_count < self.token_count

    @cached_property
    def token_count(self) -> int:
        """The number of live tokens."""
        return ranges.count(self.live)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's rows over all streams."""
        return sum(spec.row_bytes for spec in self.specs)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows of the live tokens."""
        return self.token_count * self.token_bytes


def decode_origin(payload: bytes) -> Origin:
    """Read the payload of MADE. Raises ValueError."""
    (crash_count,) = _ORIGIN.unpack(_head(payload, _ORIGIN))
    if crash_count < 0:
        raise ValueError("a count is negative")
    return Origin(payload[_ORIGIN.size :].decode(), crash_count)


def decode_archived_model(payload: bytes) -> ArchivedModel:
    """Read the payload of MODL. Raises ValueError."""
    create_time_ns, *sizes = _MODEL.unpack(_head(payload, _MODEL))
    # The sizes must make up the payload to the byte: a rest is damage.
    tenant, model_id, encoded, probe = _split(payload, _MODEL.size, sizes)
    if create_time_ns < 0 or not len(tenant) <= _TENANT_LIMIT_BYTES:
        raise ValueError("its time or its tenant is none of a model")
    spec = decode_model(_matching(MODEL_ID, model_id), encoded)
    if len(spec.streams) > _STREAM_LIMIT:
        raise ValueError(f"it has {len(spec.streams)} streams")
    for stream, row_bytes, _ in spec.streams:
        if not 0 <= stream.layer < _LAYER_LIMIT or stream.kind is StateKind.TOKENS:
            raise ValueError(f"it has a stream of layer {stream.layer}, kind {int(stream.kind)}")
        if not 1 <= row_bytes <= _ROW_LIMIT_BYTES:
            raise ValueError(f"it has rows of {row_bytes} B")
    return ArchivedModel(tenant.decode(), spec, create_time_ns, decode_probe(probe) if probe else None)


def decode_session(payload: bytes, models: list[ArchivedModel]) -> ArchivedSession:
    """Read the payload of SESS; `models` are those of the MODL before it. Raises ValueError."""
    uid, generation, log_end, create_ns, access_ns, expire_ns, ttl_ns, *rest = _SESSION.unpack(
        _head(payload, _SESSION)
    )
    model_number, flags, name_bytes, stream_count, range_count, salt_bytes, content_count = rest
    # Flags of a later version are refused: what they mean would be lost by an import.
    if flags & ~(_PINNED | _HAS_COPIES | _HAS_LABELS) or model_number >= len(models):
        raise ValueError("its flags or its model are none of this file")
    sizes = [
        name_bytes,
        stream_count * _STREAM.size,
        range_count * _RANGE.size,
        salt_bytes,
        content_count * _CONTENT.size,
    ]
    # Labels are what is left, where there are any.
    sizes.append(max(len(payload) - _SESSION.size - sum(sizes), 0) if flags & _HAS_LABELS else 0)
    name, streams, live, salt, contents, labels = _split(payload, _SESSION.size, sizes)
    if flags & _HAS_LABELS and not labels:
        raise ValueError("its labels are missing")
    session = ArchivedSession(
        session_id=_matching(SESSION_ID, name),
        # Models come before sessions: a number that is not there yet is no model of this file.
        model=models[model_number],
        layout=tuple(Stream(layer, StateKind(kind)) for layer, kind in _STREAM.iter_unpack(streams)),
        uid=uid,
        generation=generation,
        live=tuple(_RANGE.iter_unpack(live)),
        log_end=log_end,
        create_time_ns=create_ns,
        access_time_ns=access_ns,
        expire_time_ns=expire_ns,
        ttl_ns=ttl_ns,
        is_pinned=bool(flags & _PINNED),
        salt=salt,
        copies=2 if flags & _HAS_COPIES else 1,
        labels=parse_labels(labels),
        contents=tuple(Content(*content) for content in _CONTENT.iter_unpack(contents)),
    )
    if min(generation, log_end, create_ns, access_ns, expire_ns, ttl_ns) < 0:
        raise ValueError("a count or a time is negative")
    _check_live(session)
    _check_contents(session)
    _check_streams(session)
    return session


def _check_live(found: ArchivedSession) -> None:
    ends = [0, *chain.from_iterable(found.live), found.log_end]
    is_ascending = all(low <= high for low, high in pairwise(ends))
    # Touching ranges would be one range: the same tokens are written in one way only.
    if not is_ascending or any(low == high for low, high in pairwise(ends[1:-1])):
        raise ValueError("its tokens are not in order")


def _check_contents(session: ArchivedSession) -> None:
    if len(session.salt) > SALT_LIMIT_BYTES:
        raise ValueError(f"its salt has {len(session.salt)} bytes")
    # Contents have the one form that `contents_within` gives: nothing behind the first drop.
    is_canonical = contents_within(session.contents, 0, session.whole_token_count) == session.contents
    is_apart = all(one.end <= other.begin for one, other in pairwise(session.contents))
    if not (is_canonical and is_apart) or len(session.contents) > CONTENTS_LIMIT:
        raise ValueError("what lies behind its tokens is not in order, or too much")


def _check_streams(session: ArchivedSession) -> None:
    spec = session.model.spec
    if unknown := {*session.layout} - {TOKENS, *(known.stream for known in spec.streams)}:
        raise ValueError(f"its model has no {next(iter(unknown))}")
    if tuple(known.stream for known in session.specs) != session.layout:
        raise ValueError("its streams are not in storage order, each once, token ids first")
    if session.token_bytes > PAYLOAD_LIMIT_BYTES - STRETCH.size:
        raise ValueError(f"a token of {session.token_bytes} B is wider than any store takes")


def _head(payload: bytes, fixed: struct.Struct) -> bytes:
    if len(payload) < fixed.size:
        raise ValueError("it is too short")
    return payload[: fixed.size]


def _split(payload: bytes, begin: int, sizes: list[int]) -> list[bytes]:
    """The parts of a payload from `begin` to its end."""
    if len(payload) != begin + sum(sizes):
        raise ValueError("its parts do not fit together")
    parts = []
    for size_bytes in sizes:
        parts.append(payload[begin : begin + size_bytes])
        begin += size_bytes
    return parts


def _matching(pattern: re.Pattern[str], name: bytes) -> str:
    text = name.decode("ascii")
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} is not allowed as a name")
    return text


Step = Callable[[str, int, int], None]
"""Called with progress: the session's name, how many tokens more, how many bytes more."""
ENDS_ALL = (
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.Draining,
    errors.TooManyRequests,
    errors.Unauthenticated,
    errors.PermissionDenied,
    errors.FileUnusable,
    errors.FileDamaged,
    errors.FormatTooNew,
)
"""Errors after which the next session would fare no better."""


class ArchiveStatus(enum.StrEnum):
    """The status of a session after the export or import."""

    EXPORTED = "exported"
    IMPORTED = "imported"
    SKIPPED = "skipped"
    """The session was passed over as asked: `error` says what was there."""
    FAILED = "failed"
    """The session was not imported; `error` says why."""
    WHOLE = "whole"
    """The session is in the file, and was not to be imported."""
    UNTRIED = "untried"
    """An error before this session ended all."""


@dataclass(frozen=True, slots=True)
class ArchiveOutcome:
    """The outcome of one session. `target` is its name at the destination; counts are of what is there."""

    session: str
    target: str
    status: ArchiveStatus
    token_count: int = 0
    size_bytes: int = 0
    error: CacheError | None = None


class OnConflict(enum.StrEnum):
    """The choice where a session of that name exists."""

    FAIL = "fail"
    SKIP = "skip"
    REPLACE = "replace"


@dataclass(frozen=True, slots=True)
class ImportWishes:
    """The sessions to import, and how. `names` maps ids in the file to new ids.

    Only sessions of the ids in `only` are imported, all where it is empty.
    """

    on_conflict: OnConflict = OnConflict.FAIL
    names: Mapping[str, str] = field(default_factory=dict)
    only: frozenset[str] = frozenset()
    tenant: str | None = None
    """The tenant whose sessions are read from the file; None where the file has those of one tenant alone."""
    ttl_s: float | None = None
    """The expiry for all sessions, in the place of their own."""
    keeps_pins: bool = False

    def target(self, session_id: str) -> str:
        """The id under which a session is imported."""
        return self.names.get(session_id, session_id)

    def wants(self, tenant: str, session_id: str) -> bool:
        """Whether a session is to be imported."""
        return self.tenant in (None, tenant) and (not self.only or session_id in self.only)
