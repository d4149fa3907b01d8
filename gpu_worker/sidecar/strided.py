"""Strided boxes: which bytes a tensor covers, and whether two tensors share one. Pure arithmetic.

Worst case: two tensors that interleave in a way that no cache has; they count as overlapping.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """`count` indexes, `stride` bytes from one to the next."""

    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class Box:
    """`element_bytes` at `offset`, repeated along each axis. Axes lie outermost (longest stride) first."""

    offset: int
    axes: tuple[Axis, ...]
    element_bytes: int

    @classmethod
    def of(cls, offset: int, axes: tuple[Axis, ...], element_bytes: int) -> "Box":
        """The box of axes in any order; those of one index are left out."""
        kept = (axis for axis in axes if axis.count > 1)
        return cls(offset, tuple(sorted(kept, key=lambda axis: axis.stride, reverse=True)), element_bytes)

    @property
    def size_bytes(self) -> int:
        """From its first byte to behind its last."""
        return self.element_bytes + sum((axis.count - 1) * axis.stride for axis in self.axes)

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.offset + self.size_bytes

    def covers_itself_once(self) -> bool:
        """Whether no byte belongs to two indexes: along each axis, what it repeats fits into its stride."""
        return all(
            Box(0, self.axes[i + 1 :], self.element_bytes).size_bytes <= axis.stride
            for i, axis in enumerate(self.axes)
        )


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes, each of which covers itself once, share a byte; True also where that is not known."""
    if one.end <= other.offset or other.end <= one.offset:
        return False
    if not one.axes and not other.axes:
        return True
    outer, which = _outermost(one, other)
    if which is None:
        inner, against = _inside(one), _inside(other)
        shift = other.offset - one.offset
        return any(
            overlap(Box(0, inner.axes, inner.element_bytes), Box(gap, against.axes, against.element_bytes))
            for gap in _gaps(shift, outer.stride, one.axes[0].count, other.axes[0].count, inner, against)
        )
    # One of them has an axis more: each of its repetitions near the other one is looked at.
    longer, shorter = (one, other) if which == 0 else (other, one)
    inner = _inside(longer)
    first = (shorter.offset - longer.offset - inner.size_bytes) // outer.stride + 1
    last = (shorter.end - longer.offset - 1) // outer.stride
    near = range(max(first, 0), min(last, outer.count - 1) + 1)
    if len(near) > 1 and shorter.axes:
        # The other one spans several repetitions by strides of its own.
        return True
    return any(
        overlap(Box(longer.offset + i * outer.stride, inner.axes, inner.element_bytes), shorter) for i in near
    )


def _outermost(one: Box, other: Box) -> tuple[Axis, int | None]:
    """The longest axis of both, and whose it is; None where both have it."""
    if one.axes and other.axes and one.axes[0].stride == other.axes[0].stride:
        return one.axes[0], None
    strides = [box.axes[0].stride if box.axes else 0 for box in (one, other)]
    which = 0 if strides[0] > strides[1] else 1
    return (one, other)[which].axes[0], which


def _inside(box: Box) -> Box:
    return Box(box.offset, box.axes[1:], box.element_bytes)


def _gaps(shift: int, stride: int, count: int, other_count: int, inner: Box, against: Box) -> Iterator[int]:
    """Distances at which repetitions of the one come near those of the other."""
    first = -((shift + against.size_bytes - 1) // stride)
    last = (inner.size_bytes - shift - 1) // stride
    for i in range(max(first, 1 - count), min(last, other_count - 1) + 1):
        yield shift + i * stride
