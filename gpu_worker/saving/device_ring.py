"""The ring on the device: a pass's rows of all layers wait in it for one copy to the host.

```
   a pass, or the replay of a graph that was captured of one            copies' stream
   layer 0 ─► kept ┐
   layer 1 ─► kept ┼─ stack ─► rows[streams, index] ──────► rows[:, run] ─► staging ─► mark: run is free
   layer 2 ─► kept ┘                    ▲
                            index: the pass's run, set before it;
                                   else the last row, which is nobody's
```

No tensor has another address in the next pass, and nothing waits for the device: a captured graph writes to
other rows at each replay, because it reads `index`. The last row takes what pads a captured pass, and what is
replayed without being saved.

Plain torch on any device. Owned by the engine's thread, which issues passes to one stream. Worst case: copies
that do not end, with which the ring stays full: `take` says so after a bounded wait.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ctxcache.errors import InvalidArgument
from ctxcache.format.streams import Stream, StreamSpec
from gpu_worker.forms.rows import stored_dtype
from gpu_worker.saving.staging import RingRun, RowRing, RowRun

RING_BYTES = 256 << 20
"""64 steps of 16 sequences of a model with 32 layers of 4,096 channels in 16 bits."""
RING_WAIT_S = 0.01
"""Longest wait of a pass for the copies of earlier ones: about one step of decoding."""
KEPT_BYTES = 32 << 20
"""Most bytes of rows that are kept before they are written: activations, which a pass could free else."""
_POLL_S = 0.0002
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(slots=True)
class _Group:
    """Streams whose rows are alike, and their rows in the ring."""

    rows: Tensor
    """[S, R + 1, words of a row]; the last row is nobody's."""
    dtype: torch.dtype
    kept: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """Rows [T, row] of this pass by the stream's place, with their version when they came."""


class DeviceRing:
    """Rows of all streams on `device`, for as many tokens as `size_bytes` hold."""

    def __init__(
        self,
        groups: Sequence[Sequence[StreamSpec]],
        device: torch.device,
        *,
        size_bytes: int = RING_BYTES,
        wait_s: float = RING_WAIT_S,
    ) -> None:
        """`groups`: streams whose rows are alike, token ids left out; in each the order of a copy."""
        token_bytes = sum(spec.row_bytes for group in groups for spec in group)
        self.row_count = max(size_bytes // max(token_bytes, 1), 1)
        self._wait_s = wait_s
        self._ring = RowRing(self.row_count)
        self._runs: deque[RingRun] = deque()
        self._open: RingRun | None = None
        """The run of the pass under way. A pass that no `leave` ended was ended by a signal."""
        self._groups: list[_Group] = []
        self._places: dict[Stream, tuple[_Group, int]] = {}
        self._kept_bytes = 0
        # An engine makes a saver within inference mode, and may run passes outside of it.
        with torch.inference_mode(mode=False):
            self._index = torch.full((self.row_count,), self.row_count, dtype=torch.int64, device=device)
            for specs in groups:
                size = specs[0].row_bytes
                # Rows are moved as integers, the widest that divide them, whatever their own type is.
                word = next(each for each in _WORDS if size % each.itemsize == 0)
                shape = (len(specs), self.row_count + 1, size // word.itemsize)
                group = _Group(torch.zeros(shape, dtype=word, device=device), stored_dtype(specs[0]))
                self._groups.append(group)
                self._places |= {spec.stream: (group, place) for place, spec in enumerate(specs)}

    # -- passes ------------------------------------------------------------------------------------------

    def take(self, count: int) -> RingRun | None:
        """Rows for a pass of `count` tokens, which `put` writes to until `leave`.

        Waits for copies out of the ring, for a bounded time; None where there is no room then, or never is.
        Raises DeviceFailed.
        """
        self._recover()
        rows = self._take(count)
        deadline_s = time.monotonic() + self._wait_s
        while rows is None and self.is_emptying and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            rows = self._take(count)
        if rows is None:
            return None
        run = self._open = RingRun(rows)
        self._runs.append(run)
        self._point_to(rows)
        return run

    def holds(self, count: int) -> bool:
        """Whether a pass of so many tokens ever has room; a longer one goes layer by layer."""
        return count <= self.row_count

    def put(self, stream: Stream, rows: Tensor, *, count: int) -> None:
        """Take `count` rows [T, row] as they are stored, which stay as they are until `leave`.

        Raises InvalidArgument as `write` does.
        """
        group, place = self._places[stream]
        group.kept[place] = rows, _version(rows)
        self._kept_bytes += rows.nbytes
        if self._kept_bytes >= KEPT_BYTES:
            self.write(count)

    def write(self, count: int) -> None:
        """Write kept rows to the rows of the pass. A graph does so at each replay, for its pass.

        Raises InvalidArgument(field="rows") for rows that were written to since they came.
        """
        self._kept_bytes = 0
        # All groups are emptied at once: rows that a refused pass kept must not reach a later pass.
        kept_rows = [group.kept for group in self._groups]
        for group in self._groups:
            group.kept = {}
        for group, kept in zip(self._groups, kept_rows, strict=True):
            for begin, rows in _in_a_row(kept):
                # [n, T, words] to rows `index[:T]` of n planes that follow one another: one kernel.
                block = torch.stack(rows).view(group.rows.dtype)
                group.rows[begin : begin + len(rows)].index_copy_(1, self._index[:count], block)

    def leave(self, run: RingRun) -> list[Tensor]:
        """The pass is over: its rows [S, T, row] of each group, to be copied; `run.mark` is to be set then.

        Raises InvalidArgument as `write` does.
        """
        self._open = None
        try:
            self.write(len(run.rows))
        finally:
            # A replay without a pass must not write to the rows of this pass.
            self._index[: len(run.rows)].fill_(self.row_count)
        begin, end = run.rows.begin, run.rows.end
        return [group.rows[:, begin:end].view(group.dtype) for group in self._groups]

    @property
    def is_emptying(self) -> bool:
        """Whether a copy is under way that will free rows."""
        # The oldest decides: the ring takes rows back in the order in which it handed them out.
        return bool(self._runs) and self._runs[0].mark is not None

    @property
    def memory(self) -> list[Tensor]:
        """What operations of a pass write to. It never moves, so that a graph may capture them."""
        return [self._index, *(group.rows for group in self._groups)]

    # -- captured passes ---------------------------------------------------------------------------------

    @contextmanager
    def capturing(self, count: int) -> Iterator[None]:
        """Enclose a pass of `count` rows, padding included, that a graph captures.

        Raises InvalidArgument for more rows than the ring has, and as `write` does.
        """
        if not 0 < count <= self.row_count:
            problem = f"the ring on the device has {self.row_count} rows, a captured pass {count}"
            raise InvalidArgument(field="row_count", problem=problem)
        try:
            yield
            self.write(count)
        finally:
            for group in self._groups:
                group.kept.clear()
            self._kept_bytes = 0

    # -- inside ------------------------------------------------------------------------------------------

    def _point_to(self, rows: RowRun) -> None:
        # A kernel makes the numbers: a copy to the device would need a source that stays.
        torch.arange(rows.begin, rows.end, out=self._index[: len(rows)])

    def _recover(self) -> None:
        """Take back what a signal has left of the pass before: rows of no copy, and kept ones."""
        # Writes to these rows were issued before this pass's own, and nothing copies them.
        if self._runs and self._runs[-1] is self._open and self._open.mark is None:
            self._runs.pop()
        self._ring.recover(self._runs[-1].rows if self._runs else None)
        self._kept_bytes = 0
        for group in self._groups:
            group.kept = {}

    def _take(self, count: int) -> RowRun | None:
        while self._runs and (mark := self._runs[0].mark) is not None and mark.is_done():
            self._ring.free(self._runs[0].rows)
            self._runs.popleft()
        return self._ring.take(count)


def _in_a_row(kept: Mapping[int, tuple[Tensor, int]]) -> Iterator[tuple[int, list[Tensor]]]:
    """Places that follow one another, as the first and the rows of each."""
    places = sorted(kept)
    for place in places:
        rows, version = kept[place]
        if _version(rows) != version:
            problem = "an engine wrote to them before the pass ended: hand over copies"
            raise InvalidArgument(field="rows", problem=problem)
    while places:
        count = next((i for i, place in enumerate(places) if place != places[0] + i), len(places))
        yield places[0], [kept[place][0] for place in places[:count]]
        places = places[count:]


def _version(rows: Tensor) -> int:
    """How often a tensor was written to, as far as torch counts it."""
    return 0 if rows.is_inference() else rows._version  # noqa: SLF001  torch has no other name for it
