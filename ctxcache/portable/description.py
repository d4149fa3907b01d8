"""What an export says of a session before its rows: whose model, which streams, when it expires. Bytes and back.

Worst case: bytes that no session is described by, which is a ValueError with what is wrong.
"""

import re
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ctxcache.format.model import ModelSpec, decode_model
from ctxcache.format.probe import ModelProbe, decode_probe
from ctxcache.format.streams import TOKENS, StateKind, Stream, StreamSpec
from ctxcache.portable.layout import BLOCK_HEAD, PAYLOAD_LIMIT_BYTES

_FIXED = struct.Struct("<16sqqqqHHHHII")
_STREAM = struct.Struct("<ii")
_PINNED = 1
_SESSION_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._:-]{0,127}")
_MODEL_ID = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,127}")
_LAYER_LIMIT = _STREAM_LIMIT = 1 << 16
_ROW_LIMIT_BYTES = 2 << 20


@dataclass(frozen=True)
class Description:
    """A session as it was exported. `ttl_ns` is 0 where its expiry was absolute: at `expire_time_ns`, Unix time."""

    session_id: str
    uid: bytes
    generation: int
    token_count: int
    ttl_ns: int
    expire_time_ns: int
    is_pinned: bool
    model: ModelSpec
    layout: tuple[Stream, ...]
    probe: ModelProbe | None = None
    """The model's, where the store had one."""

    @cached_property
    def specs(self) -> tuple[StreamSpec, ...]:
        """Its streams in storage order."""
        return self.model.resolve(self.layout)

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token's rows."""
        return sum(spec.row_bytes for spec in self.specs)

    def encode(self) -> bytes:
        """As a payload."""
        names = self.session_id.encode(), self.model.model_id.encode()
        model, probe = self.model.encode(), b"" if self.probe is None else self.probe.encode()
        fixed = _FIXED.pack(
            self.uid, self.generation, self.token_count, self.ttl_ns, self.expire_time_ns,
            _PINNED * self.is_pinned, len(names[0]), len(names[1]), len(probe), len(self.specs), len(model),
        )  # fmt: skip
        streams = (_STREAM.pack(spec.stream.layer, spec.stream.kind) for spec in self.specs)
        return b"".join((fixed, *names, *streams, model, probe))


def decode(payload: bytes) -> Description:
    """Read a payload. Raises ValueError."""
    if len(payload) < _FIXED.size:
        raise ValueError("it is too short")
    uid, generation, token_count, ttl_ns, expire_time_ns, flags, *sizes = _FIXED.unpack_from(payload)
    session_bytes, model_id_bytes, probe_bytes, stream_count, model_bytes = sizes
    lengths = (session_bytes, model_id_bytes, stream_count * _STREAM.size, model_bytes, probe_bytes)
    if flags not in (0, _PINNED) or len(payload) != _FIXED.size + sum(lengths):
        raise ValueError("its parts do not fit together")
    parts, at = [], _FIXED.size
    for length in lengths:
        parts.append(payload[at : at + length])
        at += length
    session_id, model_id, streams, model, probe = parts
    found = Description(
        session_id=_matching(_SESSION_ID, session_id), uid=uid, generation=generation, token_count=token_count,
        ttl_ns=ttl_ns, expire_time_ns=expire_time_ns, is_pinned=bool(flags),
        model=_model(_matching(_MODEL_ID, model_id), model),
        layout=tuple(Stream(layer, StateKind(kind)) for layer, kind in _STREAM.iter_unpack(streams)),
        probe=decode_probe(probe) if probe else None,
    )  # fmt: skip
    if min(generation, token_count, ttl_ns, expire_time_ns) < 0:
        raise ValueError("a count or a time is negative")
    _check_streams(found)
    return found


@lru_cache(2)
def _model(model_id: str, encoded: bytes) -> ModelSpec:
    """The same for many sessions, mostly."""
    found = decode_model(model_id, encoded)
    if len(found.streams) > _STREAM_LIMIT:
        raise ValueError(f"its model has {len(found.streams)} streams")
    for stream, row_bytes, _ in found.streams:
        if not 0 <= stream.layer < _LAYER_LIMIT or stream.kind is StateKind.TOKENS:
            raise ValueError(f"its model has a stream of layer {stream.layer}, kind {int(stream.kind)}")
        if not 1 <= row_bytes <= _ROW_LIMIT_BYTES:
            raise ValueError(f"its model has rows of {row_bytes} B")
    return found


def _check_streams(found: Description) -> None:
    if unknown := {*found.layout} - {TOKENS, *(spec.stream for spec in found.model.streams)}:
        raise ValueError(f"its model has no {next(iter(unknown))}")
    if tuple(spec.stream for spec in found.specs) != found.layout:
        raise ValueError("its streams are not in storage order, each once, token ids first")
    if found.token_bytes > PAYLOAD_LIMIT_BYTES - BLOCK_HEAD.size:
        raise ValueError(f"a token of {found.token_bytes} B is wider than any store takes")


def _matching(pattern: re.Pattern[str], name: bytes) -> str:
    text = name.decode("ascii")
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} is no name")
    return text
