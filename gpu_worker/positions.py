"""Positions of restored tokens: 0..n-1 over what is left, whatever was dropped before.

Knows token ranges and whether a model's state can be moved. Worst case: kept tokens that attended
to dropped ones; their state is approximate by nature, which only recomputing them would change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ctxcache.errors import InvalidArgument, PositionsNotRelocatable
from gpu_worker.families import Adapter

TokenRange = tuple[int, int]
"""[begin, end) in the numbering that the session had when the rows were saved."""


def positions_after_truncation(adapter: Adapter, live_ranges: Sequence[TokenRange]) -> Tensor:
    """Positions [T] int64 for the rows of `live_ranges`, in order: 0..T-1.

    Raises PositionsNotRelocatable where tokens before kept ones are gone and the model learned
    absolute positions; InvalidArgument(field="live_ranges") unless they ascend and do not overlap.
    Source: decoupled truncation, CachedAttention, USENIX ATC '24, section 3.4.
    """
    _check(live_ranges)
    token_count = sum(end - begin for begin, end in live_ranges)
    is_prefix = not live_ranges or live_ranges[-1][1] == token_count
    if not is_prefix and not adapter.is_relocatable:
        raise PositionsNotRelocatable(model=adapter.architecture)
    return torch.arange(token_count)


def _check(live_ranges: Sequence[TokenRange]) -> None:
    last_end = 0
    for begin, end in live_ranges:
        if begin < last_end or end <= begin:
            raise InvalidArgument(field="live_ranges", problem=f"[{begin}, {end}) after token {last_end}")
        last_end = end
