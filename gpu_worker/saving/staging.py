"""Staging: the rows of passes on the host, between the copy off the device and the sessions they belong to.

One buffer per stream, and a row has the same number in each. Bounded; pinned where rows come from a GPU.
Knows no session and no store. Worst case: full, which `take` says at once.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctxcache.errors import IncompleteAppend
from ctxcache.format.streams import TOKENS, Stream, StreamSpec
from gpu_worker.errors import DeviceFailed
from gpu_worker.rows import as_stored
from gpu_worker.saving.copies import Copies, Mark, wait_done
from gpu_worker.saving.ring import Ring
from gpu_worker.saving.slices import Rows, Run

Bytes = npt.NDArray[np.uint8]
ROWS_LIMIT = 1 << 16
"""Most rows, where they are so small that their bytes do not bound them."""


class Frame:
    """A pass in staging: its rows, the streams that are still to come, how many sessions still need rows."""

    def __init__(self, rows: Run, streams: Iterable[Stream]) -> None:
        self.rows = rows
        self.missing = set(streams)
        self.holder_count = 0
        self.mark: Mark | None = None
        """Behind its copies; None while it is under way, and where the device failed then."""

    @property
    def is_free(self) -> bool:
        """Whether nobody writes or reads its rows any more; never again where that cannot be known."""
        try:
            return self.mark is not None and not self.holder_count and self.mark.is_done()
        except DeviceFailed:
            return False

    def wait(self, timeout_s: float) -> None:
        """Wait until its rows are on the host. Raises DeviceFailed, DeadlineExceeded."""
        if self.mark is not None:
            wait_done(self.mark, timeout_s)


class Staging:
    """Buffers for `size_bytes` of rows, or ROWS_LIMIT of them. `specs` in storage order, token ids included.

    `put` by the engine's thread, `view` by any; whoever takes and frees does so under one lock.
    """

    def __init__(
        self, specs: Sequence[StreamSpec], copies: Copies, *, size_bytes: int, is_pinned: bool
    ) -> None:
        self.specs = {spec.stream: spec for spec in specs}
        self._copies = copies
        row_count = max(min(size_bytes // sum(spec.row_bytes for spec in specs), ROWS_LIMIT), 1)
        self.ring = Ring(row_count)
        self._tensors = {
            spec.stream: torch.empty(row_count, spec.row_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            for spec in specs
        }
        self._arrays: dict[Stream, Bytes] = {
            stream: tensor.numpy() for stream, tensor in self._tensors.items()
        }

    @property
    def widest_bytes(self) -> int:
        """Bytes of the longest row."""
        return max(spec.row_bytes for spec in self.specs.values())

    def take(self, token_ids: npt.NDArray[np.int32]) -> Frame | None:
        """Room for a pass of these tokens; None where there is none now."""
        rows = self.ring.take(len(token_ids))
        if rows is None:
            return None
        self._arrays[TOKENS][rows.begin : rows.end] = token_ids.view(np.uint8).reshape(-1, 4)
        return Frame(rows, (stream for stream in self.specs if stream != TOKENS))

    def put(self, frame: Frame, stream: Stream, rows: Tensor) -> None:
        """Begin to copy a pass's rows [T, row] of one stream.

        Raises ShapeMismatch, UnsupportedDtype, RowNotRepresentable, RuntimeError for a device that failed.
        """
        stored = as_stored(rows, self.specs[stream], token_count=len(frame.rows))
        target = self._tensors[stream][frame.rows.begin : frame.rows.end]
        self._copies.copy(target.view(stored.dtype), stored)
        frame.missing.discard(stream)

    def seal(self, frame: Frame) -> None:
        """Nothing comes any more. Raises IncompleteAppend where a stream is missing, RuntimeError for a device that failed."""
        frame.mark = self._copies.mark()
        if frame.missing:
            raise IncompleteAppend(stream=str(min(frame.missing)), row_count=0, token_count=len(frame.rows))

    def view(self, stream: Stream, rows: Rows, scratch: Bytes) -> Bytes:
        """Rows of one stream, [n, row_bytes]: where they lie, or put together in `scratch`."""
        array = self._arrays[stream]
        if isinstance(rows, slice):
            return array[rows]
        together = scratch[: len(rows) * array.shape[1]].reshape(len(rows), array.shape[1])
        # In the default mode numpy would fill a buffer first, in case an index is out of bounds.
        return np.take(array, rows, axis=0, out=together, mode="clip")
