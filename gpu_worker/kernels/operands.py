"""Operands: what the kernels are given, beside rows. Tensors and shapes, checked when they are made.

T tokens, D hidden size, H heads, C dimensions per head, R of them rotated.
"""

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_BITS = 8
NIBBLE = 4


class NormKind(enum.Enum):
    """How a layer norms its input before the projection."""

    NONE = 0
    RMS = 1
    LAYER = 2


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer's input norm: `weight` [D], `bias` [D] or None (LayerNorm only).

    The weight is what the input is multiplied with: models that store w of 1 + w pass 1 + w. A normed row is
    rounded to the weight's type before that: a float32 weight is of norms that round once, behind it.
    """

    kind: NormKind
    epsilon: float = 0.0
    weight: Tensor | None = None
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.bias is not None and self.kind is not NormKind.LAYER:
            raise ValueError("only a layer norm has a bias")
        if self.kind is NormKind.NONE and self.weight is not None:
            raise ValueError("no norm has no weight")


NO_NORM = Norm(NormKind.NONE)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each head of K over its C dimensions (Qwen3, Gemma3): `weight` [C], as in Norm.weight."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class ProjectionWeights:
    """Heads from normed input: `weight` [H * C, D] as nn.Linear has it, `bias` [H * C] or None."""

    weight: Tensor
    head_count: int
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.weight.shape[0] % self.head_count:
            raise ValueError(
                f"a weight of shape {list(self.weight.shape)} is not [H * C, D] of {self.head_count} heads"
            )

    @property
    def head_size(self) -> int:
        """Dimensions per head, C."""
        return self.weight.shape[0] // self.head_count


class Pairing(enum.Enum):
    """Which dimensions rotate together, and where they are laid.

    HALVES: i with i + R/2 (Llama, NeoX). NEIGHBOURS: 2i with 2i + 1, left in place (GPT-J).
    NEIGHBOURS_TO_HALVES: 2i with 2i + 1, laid out as halves (DeepSeek-V3).
    """

    HALVES = 0
    NEIGHBOURS = 1
    NEIGHBOURS_TO_HALVES = 2


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary tables of the tokens at hand: `cos`, `sin` [T, R/2] of each pair, scaling included.

    R <= C: dimensions from R on pass. Positions may be any: they are in the tables alone. Products are
    rounded to the tables' type: an engine's own, or float32 where the engine turns in that.
    """

    cos: Tensor
    sin: Tensor
    pairing: Pairing = Pairing.HALVES

    def __post_init__(self) -> None:
        if self.cos.shape != self.sin.shape or self.cos.ndim != 2:
            raise ValueError(
                f"tables of shapes {list(self.cos.shape)}, {list(self.sin.shape)} are not both [T, R/2]"
            )

    @property
    def pair_count(self) -> int:
        """Pairs that rotate, R/2."""
        return self.cos.shape[1]


@dataclass(frozen=True, slots=True)
class Pages:
    """The engine's cache of one layer, and where the tokens at hand go in it.

    `keys` [pages, page_tokens, H, C], `values` [pages, page_tokens, H, C_v]: any strides, so that any order
    of axes is a `permute` of the engine's tensor, and a contiguous cache is one page. `slots` [T] int64:
    page * page_tokens + row; a negative one is left out. Slots are not checked against the cache: that
    would wait for the device.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor

    def __post_init__(self) -> None:
        if self.keys.ndim != 4 or self.values.ndim != 4 or self.keys.shape[:2] != self.values.shape[:2]:
            raise ValueError(
                f"caches of shapes {list(self.keys.shape)}, {list(self.values.shape)} are not [pages,"
                " page_tokens, H, C]"
            )
        if self.slots.dtype is not torch.int64 or self.slots.ndim != 1:
            raise ValueError("slots are [T] int64")

    @property
    def page_tokens(self) -> int:
        """Tokens per page."""
        return self.keys.shape[1]


@dataclass(frozen=True, slots=True)
# One token's row, D elements in groups of G, with 8 bits and with 4:
#
#     values    ┌ q0 ┬ q1 ┬ ... ┬ qG-1 ┬ qG ┬ ...          8 bits: D bytes
#               ┌ q1|q0 ┬ q3|q2 ┬ ...                      4 bits: D / 2 bytes, even elements in low halves
#     scales    ┌ s0 ──────────────── ┬ s1 ── ...          the step of each group
#     zeros     ┌ z0 ──────────────── ┬ z1 ── ...          the value of code 0 of each group
#     outliers  ┌ x[p0] ┬ x[p1] ┬ x[p2] ┬ x[p3]            K elements, as they were
#     places    ┌ p0    ┬ p1    ┬ p2    ┬ p3
class Quantized:
    """Rows in 8 or 4 bits with a least value and a step per token and group: x = zero + q * scale.

    `values` [T, D] uint8, or [T, D/2] with element 2i in the low bits of byte i; `scales`, `zeros`
    [T, D / group_size] of one floating type. In the place of K elements of each token, `places` [T, K] int16,
    stand `outliers` [T, K]. Columns are contiguous, rows need not be; scales and zeros lie equally far apart.
    """

    values: Tensor
    scales: Tensor
    zeros: Tensor
    outliers: Tensor
    places: Tensor
    group_size: int
    bits: int

    def __post_init__(self) -> None:
        if self.bits not in (NIBBLE, MOST_BITS):
            raise ValueError(f"{self.bits} bits are neither 4 nor 8")
        # Kernels divide columns by the group's size, which is a shift for powers of two.
        if self.group_size < 2 or self.group_size & (self.group_size - 1):
            raise ValueError(f"a group of {self.group_size} is no power of two")
        groups = (len(self.values), -(-self.row_size // self.group_size))
        if self.values.dtype is not torch.uint8 or not self.scales.shape == self.zeros.shape == groups:
            raise ValueError("values, scales and zeros do not belong together")
        # Kernels are given one stride for both.
        if self.scales.stride() != self.zeros.stride():
            raise ValueError("rows of scales and of zeros do not lie equally far apart")
        if self.outliers.shape != self.places.shape or len(self.places) != len(self.values):
            raise ValueError("outliers and places do not belong together")

    @property
    def row_size(self) -> int:
        """Elements of a row, D."""
        return self.values.shape[1] * (MOST_BITS // self.bits)

    @property
    def size_bytes(self) -> int:
        """Bytes that the rows take."""
        return sum(part.nbytes for part in (self.values, self.scales, self.zeros, self.outliers, self.places))

    def __len__(self) -> int:
        return len(self.values)


Rows = Tensor | Quantized
"""[T, D], as they are or quantized."""
