"""Models: what must be equal for saved state to be usable, and the fingerprint that says so.

State saved under one fingerprint is never handed out for another. The encoding below is
length-prefixed and tagged, so that no two different models share an encoding.
"""

import hashlib
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from math import isfinite
from statistics import median
from typing import NamedTuple

from ctxcache.errors import ModelFingerprintMismatch
from ctxcache.format.packing import PACKINGS
from ctxcache.format.streams import OPAQUE, TOKENS, TOKENS_SPEC, DType, StateKind, Stream, StreamSpec

FINGERPRINT_BYTES = 32
_DOMAIN = b"ctxcache.model.v1"
_ITEM, _SPEC = struct.Struct("<HI"), struct.Struct("<iiii")
STREAMS_PER_PART = 256
"""Streams that are encoded at a time: a fifth of a millisecond."""
_NUMBERS = ("layer_count", "hidden_size", "kv_head_count", "head_size")
_FACTS = {"True": True, "False": False}
_NUMBER_LIMIT = 1 << 31
_SHOWN = 24
"""Characters of a field that an error shows: a digest's scheme and enough to tell it from another."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's identity and the streams it can save.

    `model_id` is the caller's name for it and is no part of the fingerprint; everything else is. `rope`,
    `norm` and `settings` (everything else that changes what the layers compute) are canonical strings: the
    same settings give the same string. `is_relocatable` is false where state depends on absolute positions
    (learned embeddings), so that tokens before kept ones cannot be dropped.
    """

    model_id: str
    architecture: str
    revision: str
    weights_digest: str
    tokenizer_digest: str
    dtype: DType
    layer_count: int
    hidden_size: int
    kv_head_count: int
    head_size: int
    rope: str
    norm: str
    is_relocatable: bool
    streams: tuple[StreamSpec, ...]
    settings: str = ""

    @classmethod
    def opaque(cls, model_id: str, *, row_bytes: int, is_relocatable: bool = True) -> "ModelSpec":
        """A model whose rows only the caller understands: for each token `row_bytes` bytes of `OPAQUE`.

        Its fingerprint follows from these three: rows of one id are never found as another's. Give rows that
        mean something else another id. `is_relocatable`: a row stays right when tokens before it are dropped.
        """
        return cls(
            model_id=model_id,
            architecture="opaque",
            revision="",
            # No part of a fingerprint but this one tells the caller's kinds of rows apart.
            weights_digest=f"opaque:{model_id}",
            tokenizer_digest="",
            dtype=DType.PACKED,
            layer_count=1,
            hidden_size=1,
            kv_head_count=0,
            head_size=0,
            rope="",
            norm="",
            is_relocatable=is_relocatable,
            streams=(StreamSpec(OPAQUE, row_bytes, DType.PACKED),),
        )

    def fingerprint(self) -> bytes:
        """SHA-256 of the encoding, 32 bytes."""
        return hashlib.sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Every field but `model_id`, each as tag, length, value. No two models have the same."""
        return b"".join(self.encoded_parts())

    def encoded_parts(self) -> Iterator[bytes]:
        """The bytes of `encode`, some streams at a time: a model may have thousands."""
        # Fields are named and in their order: a new field changes every fingerprint, as it must.
        names = (item.name for item in fields(self) if item.name not in ("model_id", "streams"))
        yield b"".join((_DOMAIN, *(_item(name, str(getattr(self, name)).encode()) for name in names)))
        # Streams are sorted: a model that names them in another order is the same model.
        streams = sorted(self.streams)
        for begin in range(0, len(streams), STREAMS_PER_PART):
            some = streams[begin : begin + STREAMS_PER_PART]
            yield b"".join([_STREAM_ITEM + _pack_spec(spec) for spec in some])

    def resolve(self, layout: Iterable[Stream]) -> tuple[StreamSpec, ...]:
        """Specs of `layout` in storage order (token ids first, then by layer and kind).

        Token ids are always part of it. Raises KeyError(stream) for a stream that the model does not have.
        """
        # A session without token ids could not be looked up by tokens.
        known = {spec.stream: spec for spec in self.streams}
        known[TOKENS] = TOKENS_SPEC
        # The given order mostly is almost that of storage: to sort it takes a tenth of the time.
        return tuple(sorted(known[stream] for stream in dict.fromkeys((TOKENS, *layout))))


# Weights that are not those of their files, or that have a name:
#
#     weights_digest   files:0f3a…                       as the files have them
#                      files:0f3a… version step-100      the same engine's after a change: as its caller says
#                      files:0f3a… version epoch-9c1b…   and where nobody says anything: of this engine alone
#     model_id         llama, llama.w5e884898, llama.w03ac6742
_VERSION = " version "
_PLAIN = re.compile(r"[!-~]{1,128}")


def with_version(spec: ModelSpec, version: str) -> ModelSpec:
    """The same model with weights of that version; of the same weights where the version is empty."""
    if not version:
        return spec
    return replace(
        spec,
        model_id=id_of_version(spec.model_id, version),
        weights_digest=digest_of_version(spec.weights_digest, version),
    )


def id_of_version(model_id: str, version: str) -> str:
    """The id of a model with weights of that version, which is not empty."""
    return f"{model_id}.w{hashlib.sha256(_written(version).encode()).hexdigest()[:8]}"


def digest_of_version(digest: str, version: str) -> str:
    """The digest of weights that began as those of `digest` and have that version now, if any."""
    return f"{digest}{_VERSION}{_written(version)}" if version else digest


def has_version(digest: str, version: str) -> bool:
    """Whether a digest's weights have that version, or are named by that digest itself."""
    return version == digest or digest.endswith(f"{_VERSION}{_written(version)}")


def _written(version: str) -> str:
    """A version as a digest has it. A long version, or one that is not plain ASCII, is digested."""
    if _PLAIN.fullmatch(version):
        return version
    return f"sha256:{hashlib.sha256(version.encode(errors='surrogatepass')).hexdigest()}"


_FIELDS = tuple(field.name for field in fields(ModelSpec) if field.name != "model_id")


def decode_model(model_id: str, encoded: bytes) -> ModelSpec:
    """The model that `encode` made the bytes of. Raises ValueError for bytes that it never makes."""
    items = list(_items(encoded))
    texts = {tag: value.decode() for tag, value in items if tag != "stream"}
    try:
        model = ModelSpec(
            model_id=model_id,
            architecture=texts["architecture"],
            revision=texts["revision"],
            weights_digest=texts["weights_digest"],
            tokenizer_digest=texts["tokenizer_digest"],
            dtype=DType(int(texts["dtype"])),
            rope=texts["rope"],
            norm=texts["norm"],
            is_relocatable=_FACTS[texts["is_relocatable"]],
            streams=tuple(_spec(value) for tag, value in items if tag == "stream"),
            settings=texts["settings"],
            **{name: _number(texts[name]) for name in _NUMBERS},
        )
    except KeyError as error:
        raise ValueError(f"the model has no {error}") from error
    # There is one encoding of a model: a second one would have another fingerprint. The model is encoded
    # again and compared, so that a field left out, doubled, in another order or written in another way is
    # refused.
    if model.encode() != encoded or len({spec.stream for spec in model.streams}) < len(model.streams):
        raise ValueError("the model is not written as models are")
    return model


def mismatch(actual: ModelSpec, expected: ModelSpec, problem: str) -> ModelFingerprintMismatch:
    """The error for two models that were to be one: `problem`, and the fields in which they differ."""
    names = [name for name in _FIELDS if getattr(actual, name) != getattr(expected, name)]
    details = [_difference(name, actual, expected) for name in names]
    return ModelFingerprintMismatch(
        f"{problem}; they differ in {', '.join(details)}",
        model=f"models/{expected.model_id}",
        fields=",".join(names),
        actual=actual.fingerprint().hex(),
        expected=expected.fingerprint().hex(),
    )


def _difference(name: str, actual: ModelSpec, expected: ModelSpec) -> str:
    """A field's name and its value in both models.

    For streams: the kinds, or else the rows, that only one of them has.
    """
    if name != "streams":
        one, other = (str(getattr(spec, name))[:_SHOWN] for spec in (actual, expected))
        return f"{name} ({one!r}, not {other!r})" if one != other else name
    sides = {spec.stream.kind for spec in actual.streams}, {spec.stream.kind for spec in expected.streams}
    # A difference of kinds says more than a list of thousands of streams.
    if sides[0] == sides[1]:
        return "streams (the same state kinds, of other layers, row sizes or types)"
    kinds = [
        ", ".join(sorted(kind.name for kind in kinds)) or "none"
        for kinds in (sides[0] - sides[1], sides[1] - sides[0])
    ]
    sort = "packed kinds" if all(kind in PACKINGS for kind in sides[0] ^ sides[1]) else "state kinds"
    return f"streams ({sort}: only registered {kinds[0]}; only asked for {kinds[1]})"


def _item(tag: str, value: bytes) -> bytes:
    return _ITEM.pack(len(tag), len(value)) + tag.encode() + value


_STREAM_ITEM = _item("stream", bytes(_SPEC.size))[: -_SPEC.size]
"""The bytes before the value of each stream."""


def _items(encoded: bytes) -> Iterator[tuple[str, bytes]]:
    at = len(_DOMAIN)
    if encoded[:at] != _DOMAIN:
        raise ValueError("it is no model")
    while at < len(encoded):
        begin = at + _ITEM.size
        tag_bytes, value_bytes = _ITEM.unpack(_exactly(encoded, at, _ITEM.size))
        tag = _exactly(encoded, begin, tag_bytes).decode()
        yield tag, _exactly(encoded, begin + tag_bytes, value_bytes)
        at = begin + tag_bytes + value_bytes


def _exactly(encoded: bytes, begin: int, size_bytes: int) -> bytes:
    part = encoded[begin : begin + size_bytes]
    if len(part) != size_bytes:
        raise ValueError("the model is cut short")
    return part


def _number(text: str) -> int:
    number = int(text)
    if not 0 <= number < _NUMBER_LIMIT:
        raise ValueError(f"{number} is no count or size of a model")
    return number


def _pack_spec(spec: StreamSpec) -> bytes:
    return _SPEC.pack(spec.stream.layer, spec.stream.kind, spec.row_bytes, spec.dtype)


def _spec(value: bytes) -> StreamSpec:
    if len(value) != _SPEC.size:
        raise ValueError("a stream of the model is cut short")
    layer, kind, row_bytes, dtype = _SPEC.unpack(value)
    return StreamSpec(Stream(layer, StateKind(kind)), row_bytes, DType(dtype))


TOKEN_LIMIT = 64
VALUE_LIMIT = 8192
_HEAD = struct.Struct("<iii")
ALLOWED = {DType.FLOAT32: 0.001, DType.FLOAT16: 0.015, DType.BFLOAT16: 0.1}
"""How far values may lie apart, by the coarser type of the two: see docs/models.md for what was measured."""


class Difference(NamedTuple):
    """How far two probes lie apart in the group where they do so most, and how far they may."""

    group: int
    measured: float
    allowed: float


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """The output for `token_ids` of a model that computes in `dtype`.

    Groups of `group_size` float32 values, little endian.
    """

    dtype: DType
    token_ids: tuple[int, ...]
    group_size: int
    values: bytes

    def problem(self) -> str:
        """The fault of the probe; empty where there is none."""
        if self.dtype not in ALLOWED:
            return f"dtype {self.dtype.name} is not one of {', '.join(dtype.name for dtype in ALLOWED)}"
        if not 1 <= len(self.token_ids) <= TOKEN_LIMIT or min(self.token_ids) < 0:
            return f"token_ids are not 1 to {TOKEN_LIMIT} ids"
        if not 4 <= len(self.values) <= 4 * VALUE_LIMIT or len(self.values) % 4:
            return f"values are not 1 to {VALUE_LIMIT} float32"
        if self.group_size < 1 or len(self.values) % (4 * self.group_size):
            return f"values are not groups of {self.group_size}"
        # A group of zeros has no size to compare with.
        if not all(isfinite(sum(group)) and any(group) for group in self._groups()):
            return "values are not finite, or a group is zero"
        return ""

    def difference(self, other: "ModelProbe") -> Difference | None:
        """Compare with `other`, relative to its values. None where the two used other tokens or groups.

        The difference of a group is the median of absolute differences over the median of the other's
        absolute values. So neither a few values that rounding moves far (tokens that go to other experts) nor
        a few huge ones count.
        """
        mine, theirs = self._groups(), other._groups()  # noqa: SLF001  its own class's
        sizes = (len(self.values), self.group_size), (len(other.values), other.group_size)
        if self.token_ids != other.token_ids or sizes[0] != sizes[1]:
            return None
        # The worst group decides: an average would hide a layer that is computed in another way.
        apart = [_apart(one, another) for one, another in zip(mine, theirs, strict=True)]
        measured = max(apart)
        return Difference(apart.index(measured), measured, max(ALLOWED[self.dtype], ALLOWED[other.dtype]))

    def encode(self) -> bytes:
        """The probe's bytes, as records and exports have them."""
        head = _HEAD.pack(self.dtype, self.group_size, len(self.token_ids))
        return head + struct.pack(f"<{len(self.token_ids)}i", *self.token_ids) + self.values

    def _groups(self) -> list[tuple[float, ...]]:
        return list(struct.iter_unpack(f"<{self.group_size}f", self.values))


def _apart(measured: tuple[float, ...], other: tuple[float, ...]) -> float:
    sizes = [abs(value) for value in other]
    # Values are relative to the median of absolute values: the mean is that of a few huge ones.
    return median(abs(a - b) for a, b in zip(measured, other, strict=True)) / (median(sizes) or max(sizes))


def decode_probe(encoded: bytes) -> ModelProbe:
    """The probe that `encode` made the bytes of. Raises ValueError for bytes that encode no model."""
    try:
        dtype, group_size, token_count = _HEAD.unpack_from(encoded)
        token_ids = struct.unpack_from(f"<{max(token_count, 0)}i", encoded, _HEAD.size)
    except struct.error as error:
        raise ValueError("the probe is cut short") from error
    probe = ModelProbe(DType(dtype), token_ids, group_size, encoded[_HEAD.size + 4 * len(token_ids) :])
    if problem := probe.problem():
        raise ValueError(f"the probe's {problem}")
    return probe
