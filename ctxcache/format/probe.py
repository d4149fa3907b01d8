"""Probes of models: what a model computed of a few tokens, kept with it, to be compared by all that attach.

A fingerprint says what a model consists of; a probe says what comes out. It is no part of the fingerprint,
for devices and element types round differently. Knows numbers, no model. Worst case: a difference that 16
tokens do not show.
"""

import struct
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import NamedTuple

from ctxcache.format.streams import DType

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
    """What a model that computes in `dtype` made of `token_ids`.

    Groups of `group_size` float32 values, little endian.
    """

    dtype: DType
    token_ids: tuple[int, ...]
    group_size: int
    values: bytes

    def problem(self) -> str:
        """What is wrong with it; empty where nothing is."""
        if self.dtype not in ALLOWED:
            return f"dtype {self.dtype.name} is not one of {', '.join(dtype.name for dtype in ALLOWED)}"
        if not 1 <= len(self.token_ids) <= TOKEN_LIMIT or min(self.token_ids) < 0:
            return f"token_ids are not 1 to {TOKEN_LIMIT} ids"
        if not 4 <= len(self.values) <= 4 * VALUE_LIMIT or len(self.values) % 4:
            return f"values are not 1 to {VALUE_LIMIT} float32"
        if self.group_size < 1 or len(self.values) % (4 * self.group_size):
            return f"values are not groups of {self.group_size}"
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
        apart = [_apart(one, another) for one, another in zip(mine, theirs, strict=True)]
        measured = max(apart)
        return Difference(apart.index(measured), measured, max(ALLOWED[self.dtype], ALLOWED[other.dtype]))

    def encode(self) -> bytes:
        """As bytes, as records and exports have it."""
        head = _HEAD.pack(self.dtype, self.group_size, len(self.token_ids))
        return head + struct.pack(f"<{len(self.token_ids)}i", *self.token_ids) + self.values

    def _groups(self) -> list[tuple[float, ...]]:
        return list(struct.iter_unpack(f"<{self.group_size}f", self.values))


def _apart(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    sizes = [abs(value) for value in other]
    return median(abs(a - b) for a, b in zip(one, other, strict=True)) / (median(sizes) or max(sizes))


def decode_probe(encoded: bytes) -> ModelProbe:
    """The probe that `encode` made the bytes of. Raises ValueError for bytes that are none."""
    try:
        dtype, group_size, token_count = _HEAD.unpack_from(encoded)
        token_ids = struct.unpack_from(f"<{max(token_count, 0)}i", encoded, _HEAD.size)
    except struct.error as error:
        raise ValueError("the probe is cut short") from error
    found = ModelProbe(DType(dtype), token_ids, group_size, encoded[_HEAD.size + 4 * len(token_ids) :])
    if problem := found.problem():
        raise ValueError(f"the probe's {problem}")
    return found
