"""Staging: the rows of passes on the host, between the copy off the device and their sessions.

```
   a pass       ┌── rows of one ring: a row has one number, the same in every buffer ──┐
   [a|b|c]  ──► │  free  │ pass 7 │ pass 8 │ pass 9 │  free                             │
                └────────▲─────────────────▲──────────────────────────────────────────┘
                  oldest: freed first     newest: handed out last
```

Streams whose rows are alike share one buffer. The ring hands rows out in runs, and takes them back in the
same order. Buffers are bounded, and pinned where rows come from a GPU. Knows no session and no store.

On a GPU, a pass's rows wait in the device's ring and leave it in one copy for all streams of one size; a
pass longer than the ring leaves layer by layer. Copies go over a stream of their own: it waits for what
computed the rows, and nothing waits for it. Three rules keep them in order:

1. A row's memory is not given to another tensor before its copy has ended (`record_stream`).
2. The host reads no row before the mark behind its copy is done.
3. A row of a staging buffer is not handed out again before that mark.

An engine that overwrites rows in place (a fused add and norm) hands over copies. Worst case: staging is
full, which `take` says at once; or the device fails, and no mark behind that is ever done.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ctxcache.errors import DeadlineExceeded, IncompleteAppend, InvalidArgument
from ctxcache.format.packing import CHAIN_KINDS, DELTAS, is_on_tokens
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from gpu_worker.errors import DeviceFailed
from gpu_worker.forms.deltas import Chain, chained_layers
from gpu_worker.forms.rows import as_stored, stored_dtype
from gpu_worker.kernels.libcuda import Libcuda

_INPUTS = Stream(0, StateKind.HIDDEN)
Rows = slice | npt.NDArray[np.int64]
"""Rows of a staging buffer: one run, or their numbers."""


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` rows of a pass: tokens `[token_begin, token_begin + count)` of a session.

    Slices follow one another as the engine packs them. Slices of a session that is not saved are passed over.
    """

    session_name: str
    token_begin: int
    count: int


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows `[begin, end)` of a ring's buffers."""

    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


def rows_of(runs: Iterable[RowRun]) -> Rows:
    """The rows of runs in order: a slice where they follow one another, else their numbers."""
    joined: list[RowRun] = []
    for run in runs:
        # Runs that touch are one slice: numpy then shows rows where they lie, instead of gathering them.
        if joined and joined[-1].end == run.begin:
            joined[-1] = RowRun(joined[-1].begin, run.end)
        else:
            joined.append(run)
    if len(joined) == 1:
        return slice(joined[0].begin, joined[0].end)
    return np.concatenate([np.arange(run.begin, run.end) for run in joined] or [np.zeros(0, np.int64)])


def cut(runs: Sequence[RowRun], count: int) -> tuple[list[RowRun], list[RowRun]]:
    """The first `count` rows of runs, and the rest."""
    first, rest = [], []
    for run in runs:
        middle = min(run.end, run.begin + count)
        count -= middle - run.begin
        first += [RowRun(run.begin, middle)] if middle > run.begin else []
        rest += [RowRun(middle, run.end)] if run.end > middle else []
    return first, rest


_POLL_S = 0.0002


class Mark(Protocol):
    """A point behind all copies so far."""

    def is_done(self) -> bool:
        """Whether these copies have ended. Raises DeviceFailed."""
        ...


class Copies(Protocol):
    """The way of rows to the host. Used by one thread; marks from any."""

    def copy(self, target: Tensor, rows: Tensor) -> None:
        """Begin to copy rows into `target` on the host. Raises RuntimeError for a device that failed."""
        ...

    def mark(self) -> Mark:
        """A mark behind all copies that were begun."""
        ...


class HostCopies:
    """Rows that are on the host: copied at once."""

    def copy(self, target: Tensor, rows: Tensor) -> None:
        """See Copies."""
        if target.dtype is torch.uint8:
            # An engine's blocks, large and copied beside its passes: torch would start threads for them.
            np.copyto(target.numpy(), rows.numpy())
        else:
            target.copy_(rows)

    def mark(self) -> Mark:
        """See Copies."""
        return _DONE


class PlaneCopier(Protocol):
    """The driver's copy of planes, see Libcuda."""

    def use(self, device: int) -> None:
        """Direct this thread's calls to a device."""

    def copy_planes(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        *,
        plane_bytes: int,
        plane_count: int,
        stream: int,
    ) -> None:
        """Begin to copy planes from the device into the host's pinned memory."""


class CudaCopies:
    """Rows on a GPU: copied into pinned memory over a stream of their own."""

    def __init__(self, device: torch.device, driver: PlaneCopier | None = None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._driver = driver or Libcuda()

    def copy(self, target: Tensor, rows: Tensor) -> None:
        """See Copies."""
        # The copy runs behind what computes the rows, which was issued to the engine's stream.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if target.is_contiguous():
                target.copy_(rows, non_blocking=True)
            else:
                self._copy_planes(target, rows)
        # Rule 1: the allocator hands the memory of these rows on behind the copy alone.
        rows.record_stream(self._stream)

    def _copy_planes(self, target: Tensor, rows: Tensor) -> None:
        """Planes [S, T, row] that lie apart by one call: torch would copy each by itself, and wait."""
        try:
            self._driver.use(self._stream.device_index)
            self._driver.copy_planes(
                target.data_ptr(),
                target.stride(0) * target.itemsize,
                rows.data_ptr(),
                rows.stride(0) * rows.itemsize,
                plane_bytes=rows[0].nbytes,
                plane_count=len(rows),
                stream=self._stream.cuda_stream,
            )
        except OSError as error:
            raise RuntimeError(str(error)) from error

    def mark(self) -> Mark:
        """See Copies."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaMark(event)


def copies_from(device: torch.device) -> Copies:
    """The way of rows from a device."""
    return CudaCopies(device) if device.type == "cuda" else HostCopies()


def wait_done(mark: Mark, timeout_s: float) -> None:
    """Wait until a mark is done. Raises DeviceFailed, DeadlineExceeded."""
    deadline_s = time.monotonic() + timeout_s
    while not mark.is_done():
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(target="a copy from the device", timeout_s=str(timeout_s))
        # An event's own wait has no deadline.
        time.sleep(_POLL_S)


class _Done:
    def is_done(self) -> bool:
        return True


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise DeviceFailed(problem=str(error)) from error


_DONE = _Done()


class RowRing:
    """A ring of rows `[0, row_count)`. When it is empty it begins at 0 again, where memory is warm."""

    def __init__(self, row_count: int) -> None:
        self.row_count = row_count
        self._runs: deque[RowRun] = deque()

    @property
    def used_count(self) -> int:
        """Rows from the oldest run's begin to the newest one's end, what no run could use included."""
        if not self._runs:
            return 0
        span = self._runs[-1].end - self._runs[0].begin
        # Not above 0 where the runs reach around the end.
        return span if span > 0 else span + self.row_count

    def take(self, count: int) -> RowRun | None:
        """Hand out `count` rows that follow one another; None where there is no such room now."""
        begin = self._place(count)
        if begin is None:
            return None
        run = RowRun(begin, begin + count)
        self._runs.append(run)
        return run

    def free(self, run: RowRun) -> None:
        """The oldest run is not used any more. A second call for the same run changes nothing."""
        if self._runs and self._runs[0] is run:
            self._runs.popleft()

    def recover(self, newest: RowRun | None) -> None:
        """No run behind this one is used: a signal came before the taker had that run."""
        while self._runs and self._runs[-1] is not newest:
            self._runs.pop()

    def _place(self, count: int) -> int | None:
        if not self._runs:
            return 0 if count <= self.row_count else None
        tail, head = self._runs[0].begin, self._runs[-1].end
        #     head <= tail     [ used ──► head │ free │ tail ──► used ]
        #     otherwise        [ free │ tail ──► used ──► head │ free ]
        #
        # The runs reach around the end: what is free lies in one piece between the newest and the oldest.
        if head <= tail:
            return head if head + count <= tail else None
        if head + count <= self.row_count:
            return head
        # Behind the newest there is too little; what is left there stays unused until the ring has come
        # round.
        return 0 if count <= tail else None


@dataclass(slots=True)
class RingRun:
    """A pass's rows in the ring."""

    rows: RowRun
    mark: Mark | None = None
    """Behind the copy out of the ring; None while the pass is under way, and where the device failed then."""


class DeviceRows(Protocol):
    """Rows of a pass on the device, see DeviceRing."""

    row_count: int

    def holds(self, count: int) -> bool:
        """Whether a pass of so many tokens ever has room."""
        ...

    def take(self, count: int) -> RingRun | None:
        """Rows for a pass; None where there is no room. Raises DeviceFailed."""
        ...

    def put(self, stream: Stream, rows: Tensor, *, count: int) -> None:
        """Take a stream's rows of the pass. Raises InvalidArgument."""

    def leave(self, run: RingRun) -> Sequence[Tensor]:
        """The pass's rows, by groups of alike streams. Raises InvalidArgument."""
        ...

    def capturing(self, count: int) -> AbstractContextManager[None]:
        """Enclose a pass that a graph captures. Raises InvalidArgument."""
        ...


Bytes = npt.NDArray[np.uint8]
ROWS_LIMIT = 1 << 16
"""Most rows, where they are so small that their bytes do not bound them."""


class StagedPass:
    """A pass in staging: its rows, the targets of rows still to come, and how many sessions need it."""

    def __init__(self, rows: RowRun, targets: dict[Stream, Tensor]) -> None:
        self.rows = rows
        self.targets = targets
        """[T, row] for each stream."""
        self.in_ring: RingRun | None = None
        """Its rows on the device, where they wait for the copy."""
        self.is_captured = False
        """Whether a graph captures the pass, which then has no rows of its own."""
        self.chain: Chain | None = None
        """The chain of the sessions' deltas, where there are any."""
        self.holder_count = 0
        """Sessions that still need rows of it."""
        self.mark: Mark | None = None
        """Behind its copies; None while it is under way, and where the device failed then."""
        self.check: Callable[[], None] = _nothing
        """Raises why its rows are not of the model that they are saved for."""

    @property
    def is_free(self) -> bool:
        """Whether nobody uses the pass's rows any more; False for good where that cannot be known."""
        try:
            return self.mark is not None and not self.holder_count and self.mark.is_done()
        except DeviceFailed:
            return False

    def wait(self, timeout_s: float) -> None:
        """Wait until its rows are on the host, and may be saved.

        Raises DeviceFailed, DeadlineExceeded, and what `check` raises.
        """
        if self.mark is not None:
            wait_done(self.mark, timeout_s)
        self.check()


def _nothing() -> None:
    """No objection."""


class StagingBuffers:
    """Buffers for `size_bytes` of rows, or ROWS_LIMIT of them. `specs` in storage order, token ids included.

    The engine's thread calls `put`, any thread `view`. Rows are taken and freed under one lock.
    """

    def __init__(
        self,
        specs: Sequence[StreamSpec],
        copies: Copies,
        *,
        size_bytes: int,
        is_pinned: bool,
        rounding: Callable[[int], Tensor | None] = lambda _layer: None,
        make_ring: Callable[[Sequence[Sequence[StreamSpec]]], DeviceRows] | None = None,
    ) -> None:
        """`rounding`: see Chain. `make_ring` makes the ring on the device, of groups of alike streams."""
        self._rounding = rounding
        self.specs = {spec.stream: spec for spec in specs}
        self._chained, self._is_on_tokens = chained_layers(self.specs), is_on_tokens(self.specs)
        self._copies = copies
        # One row at least: a model whose row is larger than all of staging is shed, not refused.
        row_count = max(min(size_bytes // sum(spec.row_bytes for spec in specs), ROWS_LIMIT), 1)
        self.ring = RowRing(row_count)
        self._arrays: dict[Stream, Bytes] = {TOKENS: np.empty((row_count, 4), np.uint8)}
        self._groups: list[tuple[list[Stream], Tensor]] = []
        groups = _alike([spec for spec in specs if spec.stream != TOKENS])
        for alike in groups:
            first = alike[0]
            dtype = stored_dtype(first)
            # A plane of rows for each stream. A pass is one run in all planes, for one copy off a GPU:
            #
            #     layer 0   │ pass 7 │ pass 8 │  free  │     plane 0
            #     layer 1   │ pass 7 │ pass 8 │  free  │     plane 1, row_count rows behind plane 0
            shape = len(alike), row_count, first.row_bytes // dtype.itemsize
            tensor = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_pinned)
            arrays = tensor.view(torch.uint8).numpy()
            self._arrays |= {spec.stream: array for spec, array in zip(alike, arrays, strict=True)}
            self._groups.append(([spec.stream for spec in alike], tensor))
        self.device_ring = None if make_ring is None else make_ring(groups)
        """Where rows wait on the device; None where they come from the host."""

    @property
    def widest_bytes(self) -> int:
        """Bytes of the longest row."""
        return max(spec.row_bytes for spec in self.specs.values())

    def take(self, token_ids: npt.NDArray[np.int32]) -> StagedPass | None:
        """Room for a pass of these tokens; None where there is none now."""
        rows = self.ring.take(len(token_ids))
        if rows is None:
            return None
        self._arrays[TOKENS][rows.begin : rows.end] = token_ids.view(np.uint8).reshape(-1, 4)
        targets: dict[Stream, Tensor] = {}
        for streams, tensor in self._groups:
            # All targets are made at once: between two layers nothing is in a cache, and a call costs what
            # ten do elsewhere.
            targets.update(zip(streams, tensor[:, rows.begin : rows.end].unbind(), strict=True))
        return StagedPass(rows, targets)

    def recover(self, newest: StagedPass | None) -> None:
        """Take back between passes what a signal has left: the newest pass unsealed, or rows of no pass."""
        self.ring.recover(None if newest is None else newest.rows)
        if newest is not None and newest.mark is None:
            # A device that has failed leaves the pass as it is.
            with suppress(RuntimeError):
                self._mark_end(newest)

    @contextmanager
    def capturing(self, row_count: int) -> Iterator[StagedPass]:
        """A pass that a graph captures: its rows go to those of each replay's pass. See Saver.

        Raises InvalidArgument, and IncompleteAppend where a stream is missing.
        """
        ring = self.device_ring
        if ring is None:
            problem = "rows of a captured pass need a GPU, or a ring that is asked for"
            raise InvalidArgument(field="ring_bytes", problem=problem)
        packed = [str(spec.stream) for spec in self.specs.values() if spec.dtype is DType.PACKED]
        if packed:
            problem = f"{packed[0]} is packed, for which the host looks at rows: not in a captured pass"
            raise InvalidArgument(field="streams", problem=problem)
        with ring.capturing(row_count):
            # The shape and type alone, for the checks of `put`: a captured pass writes to the ring.
            targets = {
                stream: tensor[0, :1].expand(row_count, -1)
                for streams, tensor in self._groups
                for stream in streams
            }
            frame = StagedPass(RowRun(0, row_count), targets)
            frame.is_captured = True
            yield frame
            if frame.targets:
                raise _missing(frame)

    def put(self, frame: StagedPass, stream: Stream, rows: Tensor) -> None:
        """Begin to copy a pass's rows [T, row] of one stream, which stay as they are until it ends.

        Rows of a stream that is not expected are passed over.

        Raises ShapeMismatch, UnsupportedDtype, RowNotRepresentable, InvalidArgument for rows that did not
        stay, RuntimeError for a device that failed.
        """
        if self._is_on_tokens and stream == _INPUTS:
            ids = self._arrays[TOKENS][frame.rows.begin : frame.rows.end].view("<i4")[:, 0]
            self._chain_of(frame, rows).take_inputs(torch.from_numpy(ids), rows, 0)
            return
        target = frame.targets.get(stream)
        if target is None:
            return
        if stream.kind in DELTAS or (stream.layer in self._chained and stream.kind in CHAIN_KINDS):
            rows = self._chain_of(frame, rows).packed(self.specs[stream], rows)
        # The common case is two comparisons: rows of the stream's own type are copied as they are.
        if rows.shape != target.shape or rows.dtype is not target.dtype:
            rows = as_stored(rows, self.specs[stream], token_count=len(frame.rows))
        if self.device_ring is not None and (frame.in_ring is not None or frame.is_captured):
            self.device_ring.put(stream, rows, count=len(frame.rows))
        else:
            self._copies.copy(target, rows)
        # Behind the copy's begin: a stream that raised is missing, and the pass is a gap.
        del frame.targets[stream]

    def _chain_of(self, frame: StagedPass, rows: Tensor) -> Chain:
        if frame.chain is None:
            frame.chain = Chain(self._chained, len(frame.rows), rows.shape[1], rounding=self._rounding)
        return frame.chain

    def seal(self, frame: StagedPass) -> None:
        """Close the pass: no more rows come.

        Raises IncompleteAppend where a stream is missing, InvalidArgument for rows that did not stay,
        RuntimeError for a device that failed.
        """
        # The chain holds the rows of the last layer, and the pass may lie in staging for long.
        frame.chain = None
        try:
            if self.device_ring is not None and frame.in_ring is not None:
                run = slice(frame.rows.begin, frame.rows.end)
                groups = self.device_ring.leave(frame.in_ring)
                for (_, tensor), rows in zip(self._groups, groups, strict=True):
                    self._copies.copy(tensor[:, run], rows)
        finally:
            self._mark_end(frame)
        if frame.targets:
            raise _missing(frame)

    def _mark_end(self, frame: StagedPass) -> None:
        """Mark the end of a pass's copies. Raises RuntimeError."""
        mark = self._copies.mark()
        if frame.in_ring is not None:
            frame.in_ring.mark = mark
        frame.mark = mark

    def view(self, stream: Stream, rows: Rows, scratch: Bytes) -> Bytes:
        """Rows of one stream, [n, row_bytes]: where they lie, or put together in `scratch`."""
        array = self._arrays[stream]
        if isinstance(rows, slice):
            return array[rows]
        together = scratch[: len(rows) * array.shape[1]].reshape(len(rows), array.shape[1])
        # In the default mode numpy would fill a buffer first, in case an index is out of bounds.
        return np.take(array, rows, axis=0, out=together, mode="clip")


def _missing(frame: StagedPass) -> IncompleteAppend:
    return IncompleteAppend(stream=str(min(frame.targets)), row_count=0, token_count=len(frame.rows))


def _alike(specs: Sequence[StreamSpec]) -> list[list[StreamSpec]]:
    """Streams by the size and type of their rows."""
    groups: dict[tuple[int, DType], list[StreamSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.row_bytes, spec.dtype), []).append(spec)
    return list(groups.values())
