"""Deltas between layers: a layer's input less that of the layer below, in few bits, and back.

```
   layer   0          1                  2                      the store has
           x0         x1 - y0            x2 - y1                in 8, 4 and 4 bits
           │          │                  │
           y0 ──────► y1 = y0 + delta ──► y2 = y1 + delta       what comes back
```

A delta is taken from the layer below *as it comes back*, so errors do not add up. Each row carries the
mark of the stored row that it is added to: another layer's, token's or session's base is refused.
A layer that comes back by other means than its inputs ends a chain; the next one is a base. Where nothing is
stored of layer 0, the base of layer 1 is layer 0's input, which the model's embedding gives of token ids.

Plain torch on any device. Worst case: a mark that two rows share by chance, 1 in 2^32.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from ctxcache.errors import InvalidArgument
from ctxcache.format.packing import CHAIN_KINDS, DELTAS, FAR_OUTLIER, PACKINGS, DeltaPacking, is_on_tokens
from ctxcache.format.streams import StateKind, Stream, StreamSpec
from gpu_worker.errors import BaseMismatch, RowNotRepresentable, ShapeMismatch, UnsupportedDtype
from gpu_worker.forms.rounding import rounded
from gpu_worker.forms.rows import as_stored, widen
from gpu_worker.kernels.quantization import MOST_MAGNITUDE, NotRepresentable, check_held

ZERO_STEPS = 16
"""A group's zero is stored in so many parts of its step."""
_MOST_ZERO = _MOST_SHARE = 255
_FAR = -(1 << 15)
"""Added to the place of an outlier that counts FAR_OUTLIER times."""
# One row of D elements in b bits, groups of G, 4 outliers (docs/chunk_format.md):
#
#     codes      D * b / 8 bytes        4 bits: halves of bytes; 2 bits: quarters; 3 bits: see `_put_codes`
#     outliers   4 float32              differences, exact
#     base       uint32                 the mark of the stored row below
#     scales     D / G float16
#     places     4 uint16
#     zeros      D / G uint8            sixteenths of a step
#
# An element is what is below, and (code - zero / 16) * scale.
_WORD = 0xFFFF_FFFF
_WORD_FACTOR, _LAYER_FACTOR = 0x9E37_79B1, 0x85EB_CA6B
_HALF = 1 << 31


def chained_layers(streams: Collection[Stream]) -> frozenset[int]:
    """Layers whose rows the layer above is a delta to.

    Raises InvalidArgument(field="streams") for a delta whose layer below is held by no kind of its input,
    or by more than one: then it could be added to either.
    """
    chained = {0} if is_on_tokens(streams) else set()
    for stream in streams:
        if stream.kind in DELTAS and stream.layer - 1 not in chained:
            below = [kind for kind in CHAIN_KINDS if Stream(stream.layer - 1, kind) in streams]
            if len(below) != 1:
                needed = f"one kind of the inputs of layer {stream.layer - 1}"
                problem = f"{stream} needs {needed}, not {len(below)}"
                raise InvalidArgument(field="streams", problem=problem)
            chained.add(stream.layer - 1)
    return frozenset(chained)


def marks_of(stored: Tensor, layer: int) -> Tensor:
    """Stored rows [T, any] of a layer -> [T] int32: a sum over their words of 32 bits, modulo 2^32."""
    words = stored.contiguous().view(torch.int32).long()
    # Odd factors are invertible modulo 2^32: a change of any one word changes the sum.
    odd = torch.arange(1, 2 * words.shape[1], 2, device=stored.device)
    # Products wrap in 64 bits, which leaves their low 32 bits right; the sum of 2^15 of those fits.
    sums = ((words * (odd * _WORD_FACTOR & _WORD)) & _WORD).sum(1) + (layer + 1) * _LAYER_FACTOR
    return (((sums & _WORD) ^ _HALF) - _HALF).to(torch.int32)


def pack_delta(delta: Tensor, kind: StateKind, base_marks: Tensor, upper: Tensor | None = None) -> Tensor:
    """Differences [T, D] float32 to rows of these marks [T] int32 -> [T, row_bytes] uint8.

    `upper`: how errors are made up for, see `rounding`; without it each element gets its nearest code. Raises
    RowNotRepresentable, ShapeMismatch for a D that is not packed.
    """
    packing = DELTAS[kind]
    try:
        at = packing.layout(delta.shape[1])
    except ValueError as error:
        raise ShapeMismatch(
            what=kind.name.lower(), expected="a multiple of 8", actual=str(list(delta.shape))
        ) from error
    packed = torch.zeros(len(delta), at.row_bytes, dtype=torch.uint8, device=delta.device)
    if not len(delta):
        return packed
    # The largest differences, not the largest inputs: those
    # of a residual stream hardly change between layers.
    places = delta.abs().topk(at.outlier_count, dim=1).indices
    outliers = delta.gather(1, places)
    rest = delta.scatter(1, places, 0.0)
    filled = torch.cat((rest, rest[:, -1:].expand(-1, -delta.shape[1] % packing.group_size)), dim=1)
    groups = filled.reshape(len(delta), -1, packing.group_size)
    least, greatest = groups.aminmax(dim=-1)
    try:
        check_held(outliers, least, greatest)
    except NotRepresentable as error:
        raise RowNotRepresentable(what=kind.name.lower(), row=error.row, problem=error.problem) from error
    is_far = outliers.abs() > MOST_MAGNITUDE
    near = torch.where(is_far, outliers / FAR_OUTLIER, outliers).half()
    is_beyond = torch.isinf(near).any(1)
    if bool(is_beyond.any()):
        problem = f"differs from the layer below by more than {FAR_OUTLIER * MOST_MAGNITUDE:,.0f}"
        raise RowNotRepresentable(what=kind.name.lower(), row=int(is_beyond.int().argmax()), problem=problem)
    # Zero is always within the range, so that a byte holds where it begins.
    least, greatest = least.clamp(max=0.0), greatest.clamp(min=0.0)
    most = (1 << packing.bits) - 1
    scales = (greatest - least) / most
    step = scales.amax(1, keepdim=True).half()
    # Rounded up: what is beyond a group's last code would be cut off. A row without a step has no shares.
    shares = (scales / step.float() * _MOST_SHARE).nan_to_num_(0.0, 0.0).ceil_().clamp_(0, _MOST_SHARE)
    steps = _scales(step, shares)
    steps = torch.where(steps > 0, steps, torch.inf)
    # In steps from the group's begin: at most 15.9 of them fit into a byte, and 4 bits have 15 steps.
    zeros = (-least / steps * ZERO_STEPS).round_().clamp_(0, _MOST_ZERO)
    # Nearest codes, for saving beside a request; with `upper`, an element at a time (`rounding.py`).
    if upper is None:
        codes = (groups / steps.unsqueeze(-1) + (zeros / ZERO_STEPS).unsqueeze(-1)).round_().clamp_(0, most)
        codes = codes.view(len(delta), -1)[:, : delta.shape[1]]
    else:
        wide = steps.repeat_interleave(packing.group_size, 1)[:, : delta.shape[1]]
        begins = (zeros / ZERO_STEPS).repeat_interleave(packing.group_size, 1)[:, : delta.shape[1]]
        codes = rounded(delta, wide, begins, most, places, upper)
    _put_codes(codes.to(torch.uint8), packing.bits, packed)
    _part(packed, at.outliers, 2 * at.outlier_count, torch.float16).copy_(near)
    _part(packed, at.base, 4, torch.int32).copy_(base_marks.unsqueeze(1))
    _part(packed, at.step, 2, torch.float16).copy_(step)
    _part(packed, at.shares, at.group_count, torch.uint8).copy_(shares)
    marked = torch.where(is_far, places + _FAR, places)
    _part(packed, at.places, 2 * at.outlier_count, torch.int16).copy_(marked)
    _part(packed, at.zeros, at.group_count, torch.uint8).copy_(zeros)
    return packed


def add_delta(packed: Tensor, kind: StateKind, base: Tensor) -> Tensor:
    """Rows [T, row_bytes] uint8 onto those of the layer below [T, D] float32 -> [T, D] float32.

    Raises ShapeMismatch, for places outside a row too. Marks are not looked at: `Chain` does.
    """
    packing, size = DELTAS[kind], base.shape[1]
    at = packing.layout(size)
    if packed.shape != (len(base), at.row_bytes) or packed.dtype is not torch.uint8:
        raise ShapeMismatch(
            what=f"{kind.name.lower()} rows of {size} elements",
            expected=f"[{len(base)}, {at.row_bytes}] bytes",
            actual=f"{list(packed.shape)} {packed.dtype}",
        )
    marked = _part(packed, at.places, 2 * at.outlier_count, torch.int16).long()
    places = torch.where(marked < 0, marked - _FAR, marked)
    # A GPU answers a place outside a row by an assertion, after which this process cannot use it any more.
    if len(packed) and not bool((places < size).all()):
        raise ShapeMismatch(
            what=f"outliers of {kind.name.lower()} rows",
            expected=f"places in [0, {size})",
            actual=f"[{int(places.min())}, {int(places.max())}]",
        )
    codes = _codes(packed, packing, size).float()
    zeros = _part(packed, at.zeros, at.group_count, torch.uint8).float() / ZERO_STEPS
    shares = _part(packed, at.shares, at.group_count, torch.uint8).float()
    scales = _scales(_part(packed, at.step, 2, torch.float16), shares)
    spread = [each.repeat_interleave(packing.group_size, 1)[:, :size] for each in (zeros, scales)]
    delta = codes.sub_(spread[0]).mul_(spread[1])
    near = _part(packed, at.outliers, 2 * at.outlier_count, torch.float16).float()
    outliers = torch.where(marked < 0, near * FAR_OUTLIER, near)
    # Outliers are differences too, so that both kinds of elements are added in float32.
    return base + delta.scatter_(1, places, outliers)


def _scales(step: Tensor, shares: Tensor) -> Tensor:
    """A row's step [T, 1] float16 and shares [T, G] of it -> the scale of each group [T, G] float32."""
    return shares * step.float() / _MOST_SHARE


def _part(packed: Tensor, begin: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
    return packed[:, begin : begin + size_bytes].view(dtype)


def _put_codes(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Put codes [T, D]: as halves of bytes, or as pairs of bits with the third bits behind them."""
    size = codes.shape[1]
    if bits == 4:
        packed[:, : size // 2] = codes[:, 0::2] | (codes[:, 1::2] << 4)
        return
    # 3 bits a code: the low two in quarters of a byte, the high one in a plane of bits behind them.
    #
    #     codes c0 ... c7     [c3c2c1c0 low pairs][c7c6c5c4 low pairs] ... [high bits of c7 ... c0]
    for place in range(4):
        packed[:, : size // 4] |= (codes[:, place::4] & 3) << (2 * place)
    for place in range(8 if bits > 2 else 0):
        packed[:, size // 4 : size // 4 + size // 8] |= (codes[:, place::8] >> 2) << place


def _codes(packed: Tensor, packing: DeltaPacking, size: int) -> Tensor:
    if packing.bits == 4:
        halves = packed[:, : size // 2]
        return torch.stack((halves & 0xF, halves >> 4), dim=-1).flatten(1)
    pairs = packed[:, : size // 4]
    codes = torch.stack([(pairs >> (2 * place)) & 3 for place in range(4)], dim=-1).flatten(1)
    if packing.bits > 2:
        high = packed[:, size // 4 : size // 4 + size // 8]
        codes |= torch.stack([(high >> place) & 1 for place in range(8)], dim=-1).flatten(1) << 2
    return codes


class Chain:
    """The wide rows of one layer at a time, for the deltas of the layer above. One thread at a time.

    Layers come in order, each whole before the next, tokens of a layer in any order.
    """

    def __init__(
        self,
        layers: frozenset[int],
        token_count: int,
        size: int,
        *,
        rounding: Callable[[int], Tensor | None] = lambda _layer: None,
    ) -> None:
        """`layers`: those whose rows are kept for the one above; rows of `size` elements.

        `rounding`: how errors of a layer's deltas are made up for when they are packed.
        """
        self.layers, self._rounding = layers, rounding
        self._shape = (token_count, size)
        self._kept: tuple[Tensor, Tensor] | None = None

    def wide(self, layer: int, kind: StateKind, stored: Tensor, begin: int) -> Tensor:
        """Stored rows of tokens from `begin` on -> [t, D] float32.

        Raises ShapeMismatch, and BaseMismatch for a delta to other rows than those that were kept last.
        """
        tokens = slice(begin, begin + len(stored))
        if kind in DELTAS:
            base = self._base(layer, kind, stored, tokens)
            rows = add_delta(stored, kind, base)
        elif kind in PACKINGS:
            rows = widen(stored, kind, self._shape[1], torch.float32)
        else:
            rows = stored.float()
        # The mark is of the stored bytes, not of the wide rows: it
        # finds a base of the same values that was packed otherwise.
        if layer in self.layers:
            kept, marks = self._room(stored.device)
            kept[tokens], marks[tokens] = rows, marks_of(stored, layer)
        return rows

    def take_inputs(self, token_ids: Tensor, rows: Tensor, begin: int) -> None:
        """Keep layer 0's inputs [t, D] of tokens [t] from `begin` on as the base of layer 1.

        Nothing of them is stored but the ids, which deltas are marked with.
        """
        kept, marks = self._room(rows.device)
        tokens = slice(begin, begin + len(rows))
        ids = token_ids.to(device=rows.device, dtype=torch.int32).unsqueeze(1)
        kept[tokens], marks[tokens] = rows.float(), marks_of(ids, 0)

    def packed(self, spec: StreamSpec, rows: Tensor) -> Tensor:
        """All rows [T, D] of a layer's stream as they are stored; the layer above may then be packed.

        Raises ShapeMismatch, UnsupportedDtype, RowNotRepresentable, BaseMismatch.
        """
        layer, kind = spec.stream
        if rows.shape != self._shape:
            raise ShapeMismatch(
                what=str(spec.stream), expected=str(list(self._shape)), actual=str(list(rows.shape))
            )
        if not rows.is_floating_point():
            raise UnsupportedDtype(what=str(spec.stream), expected="wide rows", actual=str(rows.dtype))
        if kind in DELTAS:
            if self._kept is None:
                raise BaseMismatch(stream=str(spec.stream), below=layer - 1, token=0)
            base, marks = self._kept
            # The delta is to the base as it comes back, so that a layer's error is that of its codes alone.
            stored = pack_delta(rows.float() - base, kind, marks, self._rounding(layer))
        else:
            stored = as_stored(rows, spec)
        if layer in self.layers:
            # Widened as a restore will do it, so that both keep the same base for the layer above.
            self.wide(layer, kind, stored, 0)
        return stored

    def _room(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._kept is None:
            rows = torch.zeros(self._shape, dtype=torch.float32, device=device)
            self._kept = rows, torch.zeros(self._shape[0], dtype=torch.int32, device=device)
        return self._kept

    def _base(self, layer: int, kind: StateKind, stored: Tensor, tokens: slice) -> Tensor:
        stream, at = Stream(layer, kind), DELTAS[kind].layout(self._shape[1])
        if self._kept is None:
            raise BaseMismatch(stream=str(stream), below=layer - 1, token=tokens.start)
        rows, marks = (each[tokens] for each in self._kept)
        # Marks are compared before the sum: a delta on a wrong base gives rows that look like any other.
        is_wrong = _part(stored, at.base, 4, torch.int32)[:, 0] != marks
        if bool(is_wrong.any()):
            token = tokens.start + int(is_wrong.int().argmax())
            raise BaseMismatch(stream=str(stream), below=layer - 1, token=token)
        return rows
