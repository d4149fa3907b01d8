"""Overlap of strided boxes, beside every byte marked one by one."""

from collections.abc import Iterator
from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from gpu_worker.sidecar.cache_layout import Axis, Box, overlap

AXES = st.lists(st.builds(Axis, st.integers(1, 4), st.integers(1, 24)), max_size=3)
BOXES = st.builds(
    lambda offset, axes, size: Box.of(offset, tuple(axes), size), st.integers(0, 40), AXES, st.integers(1, 4)
)


def _bytes(box: Box) -> Iterator[int]:
    for indexes in product(*(range(axis.count) for axis in box.axes)):
        begin = box.offset + sum(i * axis.stride for i, axis in zip(indexes, box.axes, strict=True))
        yield from range(begin, begin + box.element_bytes)


@given(BOXES)
def test_a_box_that_covers_itself_once_has_no_byte_twice(box: Box) -> None:
    """An accepted box never writes one byte for two indexes."""
    marked = list(_bytes(box))

    assert max(marked) + 1 == box.end
    if box.covers_itself_once():
        assert len(set(marked)) == len(marked)


@given(BOXES.filter(Box.covers_itself_once), BOXES.filter(Box.covers_itself_once))
def test_boxes_apart_share_no_byte(one: Box, other: Box) -> None:
    """Boxes that count as apart are apart, in either order."""
    shared = set(_bytes(one)) & set(_bytes(other))

    if shared:
        assert overlap(one, other)
        assert overlap(other, one)


@given(BOXES.filter(Box.covers_itself_once), st.integers(-60, 60))
@example(Box.of(0, (Axis(4, 16), Axis(2, 8)), 4), 4)
def test_alike_boxes_are_told_apart_exactly(box: Box, shift: int) -> None:
    """Keys and values of one cache have the same strides, however they interleave.

    The answer is exact there.
    """
    other = Box(box.offset + shift, box.axes, box.element_bytes)

    assert overlap(box, other) == bool(set(_bytes(box)) & set(_bytes(other)))
