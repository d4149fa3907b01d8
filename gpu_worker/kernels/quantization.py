"""Quantization: rows in 8 or 4 bits with a least value and a step per token and group, and back.

Plain torch: saving is off the critical path, and restoring dequantizes inside the kernels. Single
dimensions of a residual stream are a thousand times the others and would drown their group: the few largest
of each token are kept beside the steps, in 32 bits, which on SmolLM2 makes the divergence 16 times smaller
(docs/worker.md). Steps begin at the group's least value, for its values seldom lie around 0. Worst case:
rows with an infinity, refused.
"""

import torch
from torch import Tensor

from gpu_worker.kernels.operands import MOST_BITS, NIBBLE, Quantized

OUTLIERS = 4
"""Outliers of each token; more hardly make the divergence smaller."""
MARGIN = 2.0**-10
"""How far below the least value a group begins, relative to it: no rounding to 16 bits puts it above."""
MOST_MAGNITUDE = 65_000.0
"""The bound of elements that are no outliers.

Above its largest step nothing passes what float16 holds, 65,504.
"""
MOST_SIZE = 1 << 15
"""Elements of a row: places are signed 16-bit numbers."""
_ELEMENTS_AT_ONCE = 1 << 20
"""Elements that are made wide at a time: what comes between stays in the cache of a CPU."""


class NotRepresentable(ValueError):
    """A row that few bits cannot hold: `row` is its number, the message says why."""

    def __init__(self, row: int, problem: str) -> None:
        super().__init__(f"row {row} {problem}")
        self.row, self.problem = row, problem


def quantize(
    rows: Tensor,
    *,
    bits: int,
    group_size: int = 32,
    outlier_count: int = OUTLIERS,
) -> Quantized:
    """Rows [T, D] -> the nearest of 2^bits steps per group, and each token's outliers. D even for 4 bits.

    Elements that span less than 1e-5 in their group become one value: a step below the least of float16 is
    none. Raises NotRepresentable for rows that are not finite, or whose values beside the outliers are beyond
    65,000, ValueError for rows of more than 32,768 elements.
    """
    most = (1 << bits) - 1
    token_count, size = rows.shape
    if size > MOST_SIZE:
        raise ValueError(f"rows of {size} elements are longer than {MOST_SIZE}")
    # Compared in the rows' own type: the order is the same in float32, which takes twice the memory.
    places = rows.abs().topk(min(outlier_count, size), dim=1).indices
    outliers = rows.gather(1, places).float()
    # Outliers are taken out, so that none stretches the steps of its group.
    rows = rows.scatter(1, places, 0.0)
    # The last group is filled up with what is in it already.
    filled = torch.cat((rows, rows[:, -1:].expand(-1, -size % group_size)), dim=1).float()
    groups = filled.reshape(token_count, -1, group_size)
    least, greatest = groups.aminmax(dim=-1)
    check_held(outliers, least, greatest)
    # float16 has 11 bits, so that rounding moves a number by 2^-11 of it at most. Twice as much is taken off:
    #
    #     zero    least                               greatest
    #     ├───────┼──────┬──────┬──────  ...  ─┬───────┤
    #     code 0         1      2              most - 1  most
    #
    # Without the margin a zero that was rounded up would cut off the least value.
    zeros = (least - least.abs() * MARGIN).half()
    # Steps begin at the zero as it is stored, not at the least value: the last code must reach the greatest.
    scales = ((greatest - zeros.float()) / most).half()
    # A step that float16 cannot hold is stored as 0. Divided by infinity, all codes of its group become 0; by
    # 0 they would be no numbers.
    steps = torch.where(scales > 0, scales.float(), torch.inf).unsqueeze(-1)
    # Divided by the step as it is stored, by which the reader multiplies.
    values = ((groups - zeros.float().unsqueeze(-1)) / steps).round_().clamp_(0, most).to(torch.uint8)
    values = values.view(token_count, -1)[:, :size]
    return Quantized(
        _pack(values) if bits == NIBBLE else values.contiguous(),
        scales,
        zeros,
        outliers,
        places.to(torch.int16),
        group_size,
        bits,
    )


def dequantize(rows: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows [T, D], computed in float32, rounded once to `dtype`."""
    out = torch.empty(len(rows), rows.row_size, dtype=dtype, device=rows.values.device)
    at_once = max(1, _ELEMENTS_AT_ONCE // max(rows.row_size, 1))
    for begin in range(0, len(rows), at_once):
        _dequantize(rows, slice(begin, begin + at_once), out[begin : begin + at_once])
    return out


def _dequantize(rows: Quantized, part: slice, out: Tensor) -> None:
    values = rows.values[part] if rows.bits == MOST_BITS else _unpack(rows.values[part])
    size, whole = rows.row_size, rows.row_size // rows.group_size
    scales, zeros = rows.scales[part].float().unsqueeze(-1), rows.zeros[part].float().unsqueeze(-1)
    wide = values.float()
    # In place, in `wide`: whole groups as one view [t, groups, G], then what is left of the last one.
    middle = wide[:, : whole * rows.group_size].view(len(wide), whole, rows.group_size)
    middle.mul_(scales[:, :whole]).add_(zeros[:, :whole])
    if size % rows.group_size:
        wide[:, whole * rows.group_size :].mul_(scales[:, -1]).add_(zeros[:, -1])
    # Outliers last: what their codes came to is written over.
    out.copy_(wide.scatter_(1, rows.places[part].long(), rows.outliers[part].float()))


def check_held(outliers: Tensor, least: Tensor, greatest: Tensor) -> None:
    """Raise NotRepresentable for the first row that is not finite or too large."""
    # Least and greatest stand for all elements of a group: torch passes a NaN on to both.
    is_finite = torch.isfinite(torch.cat((outliers, least, greatest), dim=1)).all(1)
    is_held = is_finite & (torch.maximum(-least, greatest).amax(1) <= MOST_MAGNITUDE)
    # On a GPU this waits for the device, once for each layer that is saved (lab/notes/saving.md).
    if not bool(is_held.all()):
        row = int((~is_held).int().argmax())
        problem = (
            f"has more than {outliers.shape[1]} values beyond {MOST_MAGNITUDE:,.0f}"
            if bool(is_finite[row])
            else "has an infinity, or what is no number"
        )
        raise NotRepresentable(row, problem)


def _pack(values: Tensor) -> Tensor:
    return (values[:, 0::2] | (values[:, 1::2] << NIBBLE)).contiguous()


def _unpack(packed: Tensor) -> Tensor:
    return torch.stack((packed & 0xF, packed >> NIBBLE), dim=-1).flatten(1)
