"""Layouts that engines have, and ones that nobody may have."""

from collections.abc import Callable

import pytest

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import DType
from gpu_worker.sidecar.cache_layout import CacheLayout, HeadShape, parse_layout
from gpu_worker.v1.attachment_pb2 import (
    CacheStrides,
    CacheTensor,
    KvCache,
    LayerCache,
    MemoryRegion,
)

HEADS = HeadShape(head_count=2, key_size=16, value_size=16)
Place = Callable[[int, int], tuple[int, tuple[int, int, int]]]
"""(layer, half) -> offset and strides of block, token and head, in bytes."""
ELEMENT, BLOCKS, TOKENS, LAYERS = 2, 10, 16, 3
HEAD = 16 * ELEMENT
LAYER = 2 * BLOCKS * TOKENS * 2 * HEAD


def _parse(place: Place, size_bytes: int = LAYERS * LAYER) -> CacheLayout:
    """The layout of what lies where `place` says."""
    layers = []
    for layer in range(LAYERS):
        halves = []
        for half in range(2):
            offset, (block, token, head) = place(layer, half)
            strides = CacheStrides(block_bytes=block, token_bytes=token, head_bytes=head)
            halves.append(CacheTensor(offset_bytes=offset, strides=strides))
        layers.append(LayerCache(keys=halves[0], values=halves[1]))
    cache = KvCache(
        regions=[MemoryRegion(size_bytes=size_bytes)],
        dtype=int(DType.BFLOAT16),  # type: ignore[arg-type]
        block_count=BLOCKS,
        block_tokens=TOKENS,
        head_count=2,
        key_size=16,
        value_size=16,
        layers=layers,
    )
    return parse_layout(cache, heads=HEADS, dtype=DType.BFLOAT16, layer_count=LAYERS)


PAGE = TOKENS * 2 * HEAD
ENGINES: dict[str, Place] = {
    "2 B P H C": lambda i, half: (i * LAYER + half * LAYER // 2, (PAGE, 2 * HEAD, HEAD)),
    "2 B H P C": lambda i, half: (i * LAYER + half * LAYER // 2, (PAGE, HEAD, TOKENS * HEAD)),
    "B 2 P H C": lambda i, half: (i * LAYER + half * PAGE, (2 * PAGE, 2 * HEAD, HEAD)),
    "B H P 2C": lambda i, half: (i * LAYER + half * HEAD, (2 * PAGE, 2 * HEAD, TOKENS * 2 * HEAD)),
    "B L 2 P H C": lambda i, half: ((2 * i + half) * PAGE, (2 * LAYERS * PAGE, 2 * HEAD, HEAD)),
    "B P L H 2C": lambda i, half: (
        i * 4 * HEAD + half * HEAD,
        (TOKENS * LAYERS * 4 * HEAD, LAYERS * 4 * HEAD, 2 * HEAD),
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_layouts_that_engines_have_are_taken(engine: str) -> None:
    """Split or interleaved, layer by layer or block by block.

    One element less room, or more overlap, is refused.
    """
    place = ENGINES[engine]

    assert len(_parse(place).layers) == LAYERS

    with pytest.raises(InvalidArgument, match="ends at byte"):
        _parse(place, LAYERS * LAYER - ELEMENT)

    def shifted(layer: int, half: int) -> tuple[int, tuple[int, int, int]]:
        offset, strides = place(layer, half)
        return offset + (ELEMENT if (layer, half) == (1, 0) else 0), strides

    with pytest.raises(InvalidArgument, match=r"overlaps|ends at byte"):
        _parse(shifted)


def test_elements_that_overlap_one_another_are_refused() -> None:
    """A token's stride that is less than its heads take."""
    with pytest.raises(InvalidArgument, match="overlap one another"):
        _parse(lambda i, half: (i * LAYER + half * LAYER // 2, (PAGE, HEAD, HEAD)))
