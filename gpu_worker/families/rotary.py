"""Rotary position embedding exactly as transformers applies it, on K alone.

Knows tensors only; the angles come from the model's own rotary module. Worst case: another order
of operations than the model's, which breaks bit equality and is what the tests compare.
"""

from dataclasses import dataclass

from torch import Tensor, cat, mul


@dataclass(frozen=True, slots=True)
class Rope:
    """Cosine and sine of each position: [1, T, R] in the model's element type, R rotated dimensions."""

    cos: Tensor
    sin: Tensor

    def at(self, begin: int, end: int) -> "Rope":
        """The positions of rows [begin, end)."""
        return Rope(self.cos[:, begin:end], self.sin[:, begin:end])

    def to(self, device: object) -> "Rope":
        """The same on `device`."""
        return Rope(self.cos.to(device), self.sin.to(device))  # type: ignore[call-overload]


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the first R of C dimensions of x, pairing i with i + R/2.

    Shapes: x [1, H, T, C] -> the same. Source: RoFormer, arXiv:2104.09864, in the half-split form
    of `apply_rotary_pos_emb`; dimensions from R on pass unchanged (GPT-NeoX, Phi-3).
    """
    cos, sin = rope.cos.unsqueeze(1), rope.sin.unsqueeze(1)
    size = cos.shape[-1]
    turned = _turn(x[..., :size], cos, sin)
    return turned if size == x.shape[-1] else cat((turned, x[..., size:]), dim=-1)


def rotate_interleaved(x: Tensor, rope: Rope) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of x and lay the result out half-split.

    Shapes: x [1, H, T, R] -> the same. Source: `apply_rotary_pos_emb_interleave` of DeepSeek-V3.
    """
    half = rope.cos.shape[-1] // 2
    cos, sin = rope.cos[..., :half].unsqueeze(1), rope.sin[..., :half].unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn by the angles: x * cos + (-second half, first half) * sin, rounded after the same steps, with half the passes over fresh memory."""
    half = x.shape[-1] // 2
    out = x * cos
    crossed = x[..., half:] * sin[..., :half]
    out[..., :half].sub_(crossed)
    mul(x[..., :half], sin[..., half:], out=crossed)
    out[..., half:].add_(crossed)
    return out
