"""Collecting: rows as they come out of forward passes, put together into whole tokens.

Knows rows and token ids, neither model nor store. Worst case in memory: what was captured and not
yet taken, bounded by whoever takes.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctxcache.format.streams import TOKENS, StateKind, Stream, StreamSpec
from gpu_worker.rows import pack_rows

ByteRows = dict[Stream, npt.NDArray[np.uint8]]


class Collector:
    """A capture sink for one turn: `specs` are the streams to save, token ids apart."""

    def __init__(self, specs: Iterable[StreamSpec]) -> None:
        self._specs = {spec.stream: spec for spec in specs if spec.stream != TOKENS}
        self._parts: dict[Stream, list[Tensor]] = {stream: [] for stream in self._specs}
        self._token_ids: list[int] = []
        self._ready_count = 0

    def __call__(self, layer: int, kind: StateKind, rows: Tensor) -> None:
        """Take the rows [t, row] of one layer of one pass."""
        self._parts[Stream(layer, kind)].append(rows)

    def passed(self, token_ids: Sequence[int]) -> None:
        """These tokens have gone through the whole model."""
        self._token_ids += token_ids
        self._ready_count += len(token_ids)

    @property
    def token_count(self) -> int:
        """Tokens that can be taken."""
        return self._ready_count

    def take(self) -> ByteRows:
        """Every row of every whole token so far, as bytes [T, row_bytes] per stream, token ids among them."""
        rows: ByteRows = {TOKENS: _token_rows(self._token_ids)}
        for stream, parts in self._parts.items():
            packed = pack_rows(torch.cat(parts), self._specs[stream])
            rows[stream] = np.frombuffer(packed, np.uint8).reshape(len(self._token_ids), -1)
            parts.clear()
        self._token_ids, self._ready_count = [], 0
        return rows


def token_ids_of(rows: Mapping[Stream, npt.NDArray[np.uint8]]) -> list[int]:
    """The token ids among rows."""
    return rows[TOKENS].reshape(-1).view("<i4").tolist()


def _token_rows(token_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
    return np.array(token_ids, "<i4").view(np.uint8).reshape(len(token_ids), 4)
