"""Cache layouts: where an engine's keys and values lie, checked before a byte is written.

Pure: knows messages, sizes and strides, no memory. A box is the set of bytes that a tensor covers. Worst
case: a layout that cannot be right is refused with the field that is wrong. Tensors that interleave in a way
that no cache has count as overlapping.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import DType
from gpu_worker.v1 import attachment_pb2


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
        """The box of axes in any order; axes of one index are left out."""
        kept = (axis for axis in axes if axis.count > 1)
        return cls(offset, tuple(sorted(kept, key=lambda axis: axis.stride, reverse=True)), element_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes from the first one to the last one, gaps included."""
        return self.element_bytes + sum((axis.count - 1) * axis.stride for axis in self.axes)

    @property
    def end(self) -> int:
        """The offset behind the last byte."""
        return self.offset + self.size_bytes

    def covers_itself_once(self) -> bool:
        """Whether no byte belongs to two indexes: along each axis, what it repeats fits into its stride."""
        return all(
            Box(0, self.axes[i + 1 :], self.element_bytes).size_bytes <= axis.stride
            for i, axis in enumerate(self.axes)
        )


# Keys and values of one layer, side by side in each block (vLLM) and apart:
#
#     interleaved   |K0 V0|K1 V1|K2 V2|        boxes of one stride, shifted by half of it: no byte shared
#     apart         |K0 K1 K2|V0 V1 V2|
#
# Boxes are compared from the longest stride inward. Where both have it, repetitions that come near are
# compared by their insides; where one has it, each of its repetitions is compared with the other box.
def overlap(box: Box, other: Box) -> bool:
    """Whether two boxes, each of which covers itself once, share a byte.

    True also where that is not known.
    """
    # Most pairs are far apart: the first bytes and the last decide.
    if box.end <= other.offset or other.end <= box.offset:
        return False
    # Two plain runs of bytes that come together share one.
    if not box.axes and not other.axes:
        return True
    outer, which = _outermost(box, other)
    if which is None:
        inner, against = _inside(box), _inside(other)
        shift = other.offset - box.offset
        return any(
            overlap(Box(0, inner.axes, inner.element_bytes), Box(gap, against.axes, against.element_bytes))
            for gap in _gaps(shift, outer.stride, box.axes[0].count, other.axes[0].count, inner, against)
        )
    # One box has an axis more: each of its repetitions near the other box is looked at.
    longer, shorter = (box, other) if which == 0 else (other, box)
    inner = _inside(longer)
    first = (shorter.offset - longer.offset - inner.size_bytes) // outer.stride + 1
    last = (shorter.end - longer.offset - 1) // outer.stride
    near = range(max(first, 0), min(last, outer.count - 1) + 1)
    if len(near) > 1 and shorter.axes:
        # The other box spans several repetitions by strides of its own.
        return True
    return any(
        overlap(Box(longer.offset + i * outer.stride, inner.axes, inner.element_bytes), shorter) for i in near
    )


def _outermost(first: Box, other: Box) -> tuple[Axis, int | None]:
    """The longest axis of both, and whose it is; None where both have it."""
    if first.axes and other.axes and first.axes[0].stride == other.axes[0].stride:
        return first.axes[0], None
    strides = [box.axes[0].stride if box.axes else 0 for box in (first, other)]
    which = 0 if strides[0] > strides[1] else 1
    return (first, other)[which].axes[0], which


def _inside(box: Box) -> Box:
    return Box(box.offset, box.axes[1:], box.element_bytes)


def _gaps(shift: int, stride: int, count: int, other_count: int, inner: Box, against: Box) -> Iterator[int]:
    """Distances at which repetitions of the one come near those of the other."""
    first = -((shift + against.size_bytes - 1) // stride)
    last = (inner.size_bytes - shift - 1) // stride
    for i in range(max(first, 1 - count), min(last, other_count - 1) + 1):
        yield shift + i * stride


BLOCK_TOKENS_LIMIT = 1 << 16
BLOCK_COUNT_LIMIT = 1 << 31
LAYER_LIMIT = 4096
_ORDERS = {
    attachment_pb2.CACHE_ORDER_TOKENS_FIRST: ("block", "token", "head"),
    attachment_pb2.CACHE_ORDER_HEADS_FIRST: ("block", "head", "token"),
}


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads that an engine caches per token and layer, as its model demands."""

    head_count: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor [blocks, tokens, heads, elements] in a region: byte offset, byte strides but the last."""

    region: int
    offset_bytes: int
    shape: tuple[int, int, int, int]
    stride_bytes: tuple[int, int, int]
    element_bytes: int

    @property
    def box(self) -> Box:
        """The bytes that it covers."""
        axes = tuple(
            Axis(count, stride) for count, stride in zip(self.shape, self.stride_bytes, strict=False)
        )
        return Box.of(self.offset_bytes, axes, self.shape[3] * self.element_bytes)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A paged cache: where the keys and values of each layer lie."""

    dtype: DType
    block_count: int
    block_tokens: int
    layers: tuple[tuple[TensorPlace, TensorPlace], ...]

    def check_blocks(self, block_ids: Sequence[int], token_end: int) -> None:
        """Raise InvalidArgument(field="block_ids") unless blocks hold `token_end` tokens, each once."""
        needed = -(-token_end // self.block_tokens)
        if len(block_ids) != needed:
            problem = f"{len(block_ids)} blocks, {token_end} tokens lie in {needed}"
            raise InvalidArgument(field="block_ids", problem=problem)
        stray = next((block for block in block_ids if not 0 <= block < self.block_count), None)
        if stray is not None:
            problem = f"block {stray} is not within [0, {self.block_count})"
            raise InvalidArgument(field="block_ids", problem=problem)
        if len(set(block_ids)) < len(block_ids):
            raise InvalidArgument(field="block_ids", problem="a block is named twice")


def parse_layout(
    cache: attachment_pb2.KvCache, *, heads: HeadShape, dtype: DType, layer_count: int
) -> CacheLayout:
    """Read and check a layout against what the model demands and how large the regions are said to be.

    Raises InvalidArgument that names the field.
    """
    _check_model(cache, heads, dtype, layer_count)
    _check_range("block_count", cache.block_count, BLOCK_COUNT_LIMIT)
    _check_range("block_tokens", cache.block_tokens, BLOCK_TOKENS_LIMIT)
    layers = tuple(
        (
            _place(cache, layer.keys, heads.key_size, dtype, f"layers[{i}].keys"),
            _place(cache, layer.values, heads.value_size, dtype, f"layers[{i}].values"),
        )
        for i, layer in enumerate(cache.layers)
    )
    _check_apart(layers)
    return CacheLayout(dtype, cache.block_count, cache.block_tokens, layers)


def _check_model(cache: attachment_pb2.KvCache, heads: HeadShape, dtype: DType, layer_count: int) -> None:
    if cache.dtype != dtype.value:
        name = next((known.name for known in DType if known.value == cache.dtype), str(cache.dtype))
        raise InvalidArgument(field="kv_cache.dtype", problem=f"{name}, the model's is {dtype.name}")
    for field in ("head_count", "key_size", "value_size"):
        given, expected = getattr(cache, field), getattr(heads, field)
        if given != expected:
            raise InvalidArgument(field=f"kv_cache.{field}", problem=f"{given}, the model's is {expected}")
    if len(cache.layers) != layer_count:
        problem = f"{len(cache.layers)}, the model has {layer_count}"
        raise InvalidArgument(field="kv_cache.layers", problem=problem)
    if layer_count > LAYER_LIMIT:
        raise InvalidArgument(field="kv_cache.layers", problem=f"more than {LAYER_LIMIT}")
    if cache.order not in (attachment_pb2.CACHE_ORDER_UNSPECIFIED, *_ORDERS):
        raise InvalidArgument(field="kv_cache.order", problem=f"{cache.order} is not known")


def _check_range(field: str, value: int, limit: int) -> None:
    if not 1 <= value <= limit:
        raise InvalidArgument(field=f"kv_cache.{field}", problem=f"{value} is not within [1, {limit}]")


def _place(
    cache: attachment_pb2.KvCache, tensor: attachment_pb2.CacheTensor, size: int, dtype: DType, field: str
) -> TensorPlace:
    field = f"kv_cache.{field}"
    if not 0 <= tensor.region < len(cache.regions):
        problem = f"{tensor.region} is not one of {len(cache.regions)} regions"
        raise InvalidArgument(field=f"{field}.region", problem=problem)
    strides = _strides(cache, tensor, size * dtype.size_bytes, field)
    if tensor.offset_bytes < 0 or any(value % dtype.size_bytes for value in (tensor.offset_bytes, *strides)):
        problem = f"offset and strides are no multiples of {dtype.size_bytes} bytes"
        raise InvalidArgument(field=field, problem=problem)
    shape = (cache.block_count, cache.block_tokens, cache.head_count, size)
    # The product of the sizes is bounded by the region below: a layout cannot reach beyond what is mapped.
    place = TensorPlace(tensor.region, tensor.offset_bytes, shape, strides, dtype.size_bytes)
    if not place.box.covers_itself_once():
        raise InvalidArgument(field=f"{field}.strides", problem="elements overlap one another")
    room = cache.regions[tensor.region].size_bytes
    if place.box.end > room:
        problem = f"ends at byte {place.box.end:,}, region {tensor.region} has {room:,}"
        raise InvalidArgument(field=field, problem=problem)
    return place


def _strides(
    cache: attachment_pb2.KvCache, tensor: attachment_pb2.CacheTensor, head_bytes: int, field: str
) -> tuple[int, int, int]:
    if tensor.HasField("strides"):
        given = tensor.strides
        strides = {"block": given.block_bytes, "token": given.token_bytes, "head": given.head_bytes}
        if min(strides.values()) < 1:
            raise InvalidArgument(field=f"{field}.strides", problem="one is less than 1")
    elif cache.order in _ORDERS:
        counts = {"block": cache.block_count, "token": cache.block_tokens, "head": cache.head_count}
        strides = dict(_without_gaps(_ORDERS[cache.order], counts, head_bytes))
    else:
        raise InvalidArgument(field=f"{field}.strides", problem="missing, and the cache has no order")
    return strides["block"], strides["token"], strides["head"]


def _without_gaps(order: Sequence[str], counts: dict[str, int], stride: int) -> Iterator[tuple[str, int]]:
    for axis in reversed(order):
        yield axis, stride
        stride *= counts[axis]


def _check_apart(layers: Sequence[tuple[TensorPlace, TensorPlace]]) -> None:
    """Tensors that come near one another are compared; those of a region in the order of their offsets."""
    named = [
        (f"layers[{i}].{half}", place)
        for i, places in enumerate(layers)
        for half, place in zip(("keys", "values"), places, strict=True)
    ]
    # Sorted, so that a tensor is compared with others only where one before it reaches so far.
    named.sort(key=lambda item: (item[1].region, item[1].offset_bytes))
    boxes = [place.box for _, place in named]
    reach = 0
    for i, ((_, before), (_, after)) in enumerate(pairwise(named), 1):
        reach = max(reach, boxes[i - 1].end) if before.region == after.region else 0
        if boxes[i].offset >= reach or before.region != after.region:
            continue
        for j in range(i):
            if named[j][1].region == after.region and overlap(boxes[j], boxes[i]):
                problem = f"overlaps {named[j][0]}"
                raise InvalidArgument(field=f"kv_cache.{named[i][0]}", problem=problem)
