"""Sources: where a restore's rows come from, and how they come onto a device by themselves.

```
   arena, pinned ──copied by the device──►┐                        ┌─► project, on the device behind the sums
   files         ──read by the driver────►│ landing buffer ──sums──┤
   host memory   ──the rest, verified────►┘                        └─► check, on the host, when all has passed
```

`fill` copies rows into a buffer of the host. `land` says where rows lie and begins reads, on the reading
lane; `bring` has them come, on the copying lane; `sum_up` begins their checksums, on the verifying lane;
`check` compares them on the host, before the layer is announced. Nothing waits for the device between these.
Chunks lie alike in all streams: how a batch comes is worked out once for all layers (`BatchPlan`).
The lease is the caller's, who keeps it until the restore is drained: no copy is under way then.

A chunk may be longer than a buffer: its pieces are summed up as they come. Chunks that are cut by the
session, or by batches in the middle of a block, are copied by the host, which verifies them. Worst case: a
chunk that is wrong, found when its rows were computed with already; its layer is never announced.
"""

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ctxcache.client import SessionRows
from ctxcache.client.arena import Bytes, PlacedSegment, Span
from ctxcache.client.rows import LeasedRows
from ctxcache.errors import CacheError
from ctxcache.format.streams import Stream
from gpu_worker.errors import RestoreFailed, ShapeMismatch
from gpu_worker.kernels.chunk_checksum import reference
from gpu_worker.kernels.chunk_checksum.reference import ChunkPiece, Sums, is_fit
from gpu_worker.kernels.libcuda import MOST_PITCH_BYTES, Libcuda

log = logging.getLogger(__name__)


class RowSource(Protocol):
    """Rows of one session. Tokens are counted from the session's first one."""

    def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """Copy rows [begin, end) of a stream into [end - begin, row_bytes]. Raises what reading raises."""
        ...

    def row_bytes(self, stream: Stream) -> int:
        """Bytes of one row. Raises KeyError."""
        ...

    def check(self) -> None:
        """Raise LeaseNotFound unless all that was filled so far was the session's while it was copied."""
        ...

    def abort(self) -> None:
        """Have a read that waits for the store end soon; from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class Cuts:
    """The token ranges of a layer's part, `[begin, end)` in batches of `step`."""

    begin: int
    end: int
    step: int

    def pieces(self, first: int, last: int, row_bytes: int) -> bool:
        """Whether a chunk of tokens `[first, last)` comes in pieces that a device can sum up."""
        # Some bytes of such a chunk never come to the device: the part does not have all of it.
        if not self.begin <= first < last <= self.end:
            return False
        total = (last - first) * row_bytes
        if (first - self.begin) // self.step == (last - 1 - self.begin) // self.step:
            return is_fit(0, total, total)
        # Batches of 100 tokens from `begin`, and a chunk of 64 that lies across the border between two:
        #
        #     batches   begin         begin + 100        begin + 200
        #               ├─────────────┼──────────────────┼──
        #     chunk            [ 64 tokens )
        #     pieces           [ 36 )[ 28 )                   each must be one that the device can go on from
        #
        # A piece ends at a batch's end; all but the last must be whole blocks of 1,024 bytes (`is_fit`).
        to_next = self.step - (first - self.begin) % self.step
        ends = [*range(first + to_next, last, self.step), last]
        begins = [first, *ends[:-1]]
        return all(
            is_fit((begin - first) * row_bytes, (end - begin) * row_bytes, total)
            for begin, end in zip(begins, ends, strict=True)
        )


class Arrival(Protocol):
    """A batch of rows on its way onto the device."""

    @property
    def is_awaited(self) -> bool:
        """Whether `bring` waits for reads that are under way."""
        ...

    @property
    def is_verified(self) -> bool:
        """Whether there is anything to sum up."""
        ...

    def bring(self) -> None:
        """Have all rows come, in the copying lane's order. Raises what reading raises; none come then."""
        ...

    def settle(self) -> None:
        """Wait until nothing but the copying lane's own copies comes into the memory, well or not."""
        ...

    def sum_up(self) -> None:
        """Begin to verify what came, on the verifying lane, behind `bring`."""
        ...

    def check(self) -> None:
        """Raise unless what came is right; on the host, once `sum_up` has passed on the device."""
        ...


@runtime_checkable
class LandingRows(RowSource, Protocol):
    """A source whose rows need no buffer of the host."""

    def land(self, stream: Stream, begin: int, end: int, into: Tensor, cuts: Cuts) -> Arrival:
        """Begin to bring rows [begin, end), one of the batches of `cuts`, into [end - begin, row_bytes].

        Raises what reading raises; then nothing comes into that memory any more.
        """
        ...


class LeasedSource:
    """Rows that the store's client reads: under a lease in place, or by stream as they arrive."""

    def __init__(self, rows: SessionRows) -> None:
        """`rows` begin at the session's first token, and belong to this source while it restores."""
        self._rows = rows
        self._stream: Stream | None = None
        self._pieces: list[Bytes] = []
        self._begins: list[int] = []

    def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """See RowSource. Rows that the client verifies again are verified as they are copied."""
        # Verified in the copy, while the processor has the bytes at hand: +4.0 % of a restore of K and V,
        # where verifying before the copy took +6.1 % (lab/notes/pipeline.md).
        if isinstance(self._rows, LeasedRows) and self._rows.is_verified:
            _check_range(stream, begin, end, self._rows.token_count)
            self._rows.copy_verified(stream, begin, end, into)
            return
        if stream != self._stream:
            # Asked once for each stream: a schedule reads a layer's batches one behind the other.
            self._pieces = list(self._rows.pieces(stream))
            self._begins = [0, *accumulate(map(len, self._pieces))]
            self._stream = stream
        _check_range(stream, begin, end, self._begins[-1])
        at = begin
        index = bisect_right(self._begins, begin) - 1
        while at < end:
            piece, piece_begin = self._pieces[index], self._begins[index]
            until = min(end, self._begins[index + 1])
            # Not by slice assignment of memoryviews, which would hold the GIL.
            np.copyto(into[at - begin : until - begin], piece[at - piece_begin : until - piece_begin])
            at, index = until, index + 1

    def row_bytes(self, stream: Stream) -> int:
        """See RowSource."""
        return self._rows.row_bytes(stream)

    def check(self) -> None:
        """See RowSource."""
        self._rows.check()

    def abort(self) -> None:
        """See RowSource. A lease is kept until the copies under it have ended: its owner gives it back."""
        # Closing ends a stream that waits for the store. A local lease waits for nothing.
        if not self._rows.is_local:
            self._rows.close()


def _check_range(stream: Stream, begin: int, end: int, count: int) -> None:
    if not 0 <= begin <= end <= count:
        raise ShapeMismatch(what=f"{stream} rows", expected=f"up to {count}", actual=f"[{begin}, {end})")


# -- onto the device -------------------------------------------------------------------------------


class SumsChunks(Protocol):
    """See kernels/chunk_checksum/reference.py."""

    def add(self, data: Tensor, pieces: Sequence[ChunkPiece]) -> Sums:
        """Take pieces of chunks, in order."""
        ...


def chunk_sums(device: torch.device) -> SumsChunks:
    """Checksums by a device, or by the host where that is the device."""
    if device.type != "cuda":
        return reference.ChunkSums()
    from gpu_worker.kernels.chunk_checksum import fused  # noqa: PLC0415  needs Triton

    return fused.ChunkSums(device)


class PlaneBringer(Protocol):
    """The driver's copy of planes onto a device. Raises OSError with the driver's message."""

    def use(self, device: int) -> None:
        """Direct this thread's calls to a device."""

    def bring_planes(
        self, target: int, source: int, source_pitch: int, *, plane_bytes: int, plane_count: int, stream: int
    ) -> None:
        """Begin to copy planes of pinned memory, `source_pitch` bytes apart, onto the device."""


Judge = Callable[[Sequence[int]], CacheError | None]
"""The checksums of the chunks that ended with a batch -> why one of them is not its chunk's."""


@dataclass(slots=True)
class BatchLanding:
    """One batch on its way: an Arrival. Filled by the source, on the reading lane."""

    into: Tensor
    """[n, row_bytes] on the device, contiguous."""
    sums: SumsChunks
    copies: list[tuple[int, Bytes]] = field(default_factory=list)
    """The batch's first row, and rows [n, row_bytes] or [runs, n, row_bytes], to be copied there."""
    planes: list[tuple[int, Bytes]] = field(default_factory=list)
    """The same of pinned rows, which `bringer` copies."""
    bringer: PlaneBringer | None = None
    pieces: Sequence[ChunkPiece] = ()
    judge: Judge | None = None
    checksums: Sums | None = None

    @property
    def is_awaited(self) -> bool:
        """See Arrival."""
        return False

    @property
    def is_verified(self) -> bool:
        """See Arrival."""
        return bool(self.pieces)

    def host_room(self, first: int, count: int) -> Bytes:
        """Memory of the host to be filled with rows, which are copied then."""
        # Not from the ring: few rows take this way, and the
        # copy that follows keeps the memory alive by `copies`.
        # Pinned: a copy from other memory would hold the thread up that issues all that comes behind it.
        shape, is_pinned = (count, self.into.shape[1]), self.into.is_cuda
        room = torch.empty(shape, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        rows: Bytes = room.numpy()
        self.copies.append((first, rows))
        return rows

    def bring(self) -> None:
        """See Arrival."""
        if self.planes:
            self.copies += _bring_planes(self.bringer, self.into, self.planes)
        if self.copies:
            _transfer(self.into, self.copies)

    def settle(self) -> None:
        """See Arrival. Copies are in the order of the copying lane."""

    def sum_up(self) -> None:
        """See Arrival."""
        self.checksums = self.sums.add(self.into.reshape(-1), self.pieces)

    def check(self) -> None:
        """See Arrival."""
        if self.checksums is None or self.judge is None:
            return
        error = self.judge(self.checksums())
        if error is not None:
            raise error


def _transfer(into: Tensor, copies: Sequence[tuple[int, Bytes]]) -> None:
    _copy_all(into, copies)


def _copy_all(into: Tensor, copies: Sequence[tuple[int, Bytes]]) -> None:
    targets, sources = list[Tensor](), list[Tensor]()
    flat, row_bytes = into.view(-1), into.shape[1]
    for first, rows in copies:
        at = first * row_bytes
        # A run at a time: rows that do not follow one another
        # would be gathered in the host's memory before the copy.
        for run in rows if rows.ndim > 2 else (rows,):
            targets.append(flat[at : at + run.nbytes])
            sources.append(torch.from_numpy(run.reshape(-1)))
            at += run.nbytes
    # One call: the interpreter is left once, however many pieces there are.
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _bring_planes(
    bringer: PlaneBringer | None, into: Tensor, planes: Sequence[tuple[int, Bytes]]
) -> list[tuple[int, Bytes]]:
    """Copy runs of rows that lie at equal distances by one call each; returns those that cannot be."""
    if bringer is None:
        return list(planes)
    left, done = list[tuple[int, Bytes]](), 0
    row_bytes, begin = into.shape[1], into.data_ptr()
    stream = torch.cuda.current_stream(into.device).cuda_stream
    try:
        bringer.use(into.device.index or 0)
        for first, rows in planes:
            run_count, run_rows, _ = rows.shape
            # A single run has no pitch.
            pitch = rows.strides[0] if run_count > 1 else run_rows * row_bytes
            if pitch > MOST_PITCH_BYTES:
                left.append((first, rows))
            else:
                bringer.bring_planes(
                    begin + first * row_bytes,
                    rows.__array_interface__["data"][0],
                    pitch,
                    plane_bytes=run_rows * row_bytes,
                    plane_count=run_count,
                    stream=stream,
                )
            done += 1
    except OSError as error:
        # The call that failed began nothing; torch says what is wrong with a device that has failed.
        log.warning("planes_not_brought problem=%r", str(error))
        left += planes[done:]
    return left


# -- from the arena ----------------------------------------------------------------------------------


class BatchPlan(NamedTuple):
    """How a batch of rows of one length comes, whichever stream's they are."""

    firsts: tuple[int, ...]
    """The batch's row that each of `spans` begins with."""
    spans: tuple[Span, ...]
    """Rows that the device copies."""
    by_host: tuple[Span, ...]
    """Rows that the host copies and verifies."""
    pieces: tuple[ChunkPiece, ...]
    """Pieces of the chunks in `spans`, by segments."""
    are_whole: bool
    """Whether each piece is a whole chunk, so that nothing of it is kept until a later batch."""
    ended: tuple[PlacedSegment, ...]
    """Segments whose chunk ends with the batch."""


class ArenaSource(LeasedSource):
    """Rows under a lease, in an arena that the device copies from by itself. See LandingRows."""

    def __init__(self, rows: LeasedRows, sums: SumsChunks, bringer: PlaneBringer | None = None) -> None:
        """`rows` belong to this source while it restores; their arena is pinned."""
        super().__init__(rows)
        self._leased, self._sums, self._bringer = rows, sums, bringer
        # As many plans as a layer has batches, for each length of rows.
        self._plans: dict[tuple[int, int, int, Cuts], BatchPlan] = {}

    def land(self, stream: Stream, begin: int, end: int, into: Tensor, cuts: Cuts) -> BatchLanding:
        """See LandingRows."""
        row_bytes = into.shape[1]
        plan = self._plans.get((row_bytes, begin, end, cuts))
        if plan is None:
            plan = self._plans[row_bytes, begin, end, cuts] = self._plan(row_bytes, begin, end, cuts)
        landing = BatchLanding(into, self._sums, bringer=self._bringer)
        views = self._leased.views(stream, plan.spans)
        landing.planes = list(zip(plan.firsts, views, strict=True))
        for span in plan.by_host:
            room = landing.host_room(span.token_begin - begin, span.token_end - span.token_begin)
            self._leased.copy_verified(stream, span.token_begin, span.token_end, room)
        landing.pieces = plan.pieces
        if not plan.are_whole:
            # Each stream's chunk of a segment goes on by itself. Each source
            # has sums of its own, so that restores do not mix.
            landing.pieces = [piece._replace(chunk=(stream, piece.chunk)) for piece in plan.pieces]
        if plan.ended:
            index = self._leased.chunk_index(stream)
            # The sums that the chunks' writer made: the server hands them on,
            # and makes none from stored bytes.
            sums = [segment.checksums[index] for segment in plan.ended]
            landing.judge = partial(self._judge, stream, plan.ended, sums)
        return landing

    def _plan(self, row_bytes: int, begin: int, end: int, cuts: Cuts) -> BatchPlan:
        firsts, spans, by_host, pieces, ended = [], list[Span](), list[Span](), [], []
        # How rows of one segment come:
        #
        #     nothing to verify                    the device copies
        #     a whole chunk, in pieces that fit    the device copies and sums up
        #     a part of one, or other pieces       the host copies and verifies, then the device copies
        for placed in self._leased.placed(begin, end):
            runs = list(placed.span.runs()) if self._leased.is_verified else []
            known = [
                self._piece(segment, run, begin, row_bytes, cuts)
                for segment, run in zip(placed.segments, runs, strict=True)
            ]
            if None in known:
                # Run by run: some of them may be the host's.
                whole = [piece is not None for piece in known]
                by_host += [run for run, is_whole in zip(runs, whole, strict=True) if not is_whole]
                runs = [run for run, is_whole in zip(runs, whole, strict=True) if is_whole]
            else:
                runs = [placed.span]
            firsts += [run.token_begin - begin for run in runs]
            spans += runs
            for segment, piece in zip(placed.segments, known, strict=True):
                if piece is not None:
                    pieces.append(piece)
                    ended += [segment] if segment is not None and piece.is_last else []
        are_whole = all(piece.begin == 0 and piece.is_last for piece in pieces)
        return BatchPlan(tuple(firsts), tuple(spans), tuple(by_host), tuple(pieces), are_whole, tuple(ended))

    def _piece(
        self, segment: PlacedSegment | None, run: Span, begin: int, row_bytes: int, cuts: Cuts
    ) -> ChunkPiece | None:
        """A run of rows as a piece of their chunk; None where the device cannot sum that up."""
        offset = (run.token_begin - begin) * row_bytes
        # The kernel reads words of 8 bytes: a piece that begins between two of them is the host's to verify.
        if segment is None or offset % reference.WORD_BYTES:
            return None
        if not cuts.pieces(segment.token_begin, segment.token_end, row_bytes):
            return None
        size, at = (run.token_end - run.token_begin) * row_bytes, run.token_begin - segment.token_begin
        total = (segment.token_end - segment.token_begin) * row_bytes
        return ChunkPiece(segment.segment_id, offset, size, at * row_bytes, total)

    def _judge(
        self, stream: Stream, ended: Sequence[PlacedSegment], sums: Sequence[int], checksums: Sequence[int]
    ) -> CacheError | None:
        """See Judge."""
        for segment, expected, checksum in zip(ended, sums, checksums, strict=True):
            if expected != checksum:
                return self._differs(stream, segment.segment_id)
        return None

    def _differs(self, stream: Stream, segment_id: int) -> CacheError:
        try:
            # The server verifies by itself, cuts or mends the segment, and says what it found.
            self._leased.look_again(stream, segment_id)
        except CacheError as error:
            return error
        # The server has mended it, or it changed under the copy: the next restore has it right.
        return RestoreFailed(problem=f"{stream} of {segment_id} was mended while it was copied")


class HostPins(PlaneBringer, Protocol):
    """The calls of a driver that pin memory. Each raises OSError with the driver's message."""

    def register_host(self, address: int, size_bytes: int) -> None:
        """Pin memory that is mapped to be read."""

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""


@dataclass(slots=True)
class _Pinned:
    arena: Bytes
    user_count: int = 0


class ArenaPins:
    """The arena, pinned once for one device. Thread-safe. Close it behind the last restore.

    A store that was started again has another arena: the former one is unpinned when no restore uses it.
    """

    def __init__(self, device: torch.device, driver: HostPins | None = None) -> None:
        """Raises nothing: without a driver `problem` says so, and rows come by way of staging."""
        self._device, self._driver = device, driver
        self._lock = threading.Lock()
        self._pinned: dict[int, _Pinned] = {}
        self._refused = 0
        self.problem = "the device reads the host's memory in place"
        """Why rows come by way of staging; empty where the arena is pinned."""
        if device.type == "cuda" or driver is not None:
            self.problem = "no arena was read yet"
            self._open_driver()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the host that are pinned now."""
        with self._lock:
            return sum(one.arena.nbytes for one in self._pinned.values())

    @contextmanager
    def source(self, rows: SessionRows) -> Iterator[LeasedSource]:
        """The source of rows for one restore, which is drained when it is left."""
        begun = self._begin(rows) if isinstance(rows, LeasedRows) else None
        if begun is None or not isinstance(rows, LeasedRows):
            yield LeasedSource(rows)
            return
        try:
            bringer = self._driver if self._device.type == "cuda" else None
            yield ArenaSource(rows, chunk_sums(self._device), bringer)
        finally:
            with self._lock:
                # The restore is drained here: no copy from the arena is under way.
                self._pinned[begun].user_count -= 1

    def close(self) -> None:
        """Unpin the arena."""
        with self._lock:
            for address in list(self._pinned):
                self._drop(address)

    def _begin(self, rows: LeasedRows) -> int | None:
        """Pin the arena of these rows for one more restore; None where it cannot be."""
        if self._driver is None:
            return None
        arena = rows.arena
        address = arena.ctypes.data
        with self._lock:
            held = self._pinned.get(address)
            # A mapping that is gone may have left its address to another one.
            if held is not None and held.arena is not arena:
                held = None if self._drop(address) else held
            if held is None:
                held = self._pin(address, arena)
            # A restore still copies from the former mapping: this one takes the way by staging.
            if held is None or held.arena is not arena:
                return None
            held.user_count += 1
            return address

    def _open_driver(self) -> None:
        try:
            self._driver = self._driver or Libcuda()
        except CacheError as error:
            self.problem = str(error)

    def _pin(self, address: int, arena: Bytes) -> _Pinned | None:
        """Pin an arena, and unpin others. A refused arena is not tried again at every restore."""
        if self._driver is None or self._refused == address:
            return None
        # One arena at a time: pinned memory counts against a limit of the process.
        for other in list(self._pinned):
            self._drop(other)
        try:
            # Driver calls go to the context that is current in
            # the calling thread, and any thread may restore.
            self._driver.use(self._device.index or 0)
            self._driver.register_host(address, arena.nbytes)
        except OSError as error:
            self._refused = address
            self.problem = (
                f"{arena.nbytes:,} B cannot be pinned: {error.strerror}; "
                "see `ulimit -l`, and cudaDevAttrHostRegisterReadOnlySupported"
            )
            log.warning("arena_not_pinned reason=%r", self.problem)
            return None
        self.problem = ""
        log.info("arena_pinned size_bytes=%d", arena.nbytes)
        self._pinned[address] = _Pinned(arena)
        return self._pinned[address]

    def _drop(self, address: int) -> bool:
        """Unpin an arena; False while a restore uses it."""
        held = self._pinned[address]
        if held.user_count or self._driver is None:
            return False
        del self._pinned[address]
        try:
            self._driver.use(self._device.index or 0)
            self._driver.unregister_host(address)
        except OSError as error:
            # A device that has failed: its context goes with the process.
            log.warning("arena_not_unpinned problem=%r", str(error))
        return True
