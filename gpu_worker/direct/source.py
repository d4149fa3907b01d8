"""Direct sources: rows out of the SSD tier's files, read straight onto the device where that works.

Whole chunks land in memory of the device, and are verified there. Parts of chunks, and rows in the arena,
come by way of the host and are verified there. The store's own reads take over where a file
fails. This is the only module that imports kvikio, and only when it is first used.

`land` begins reads, of as many batches as the device has buffers for. Only the copying lane waits for them.
Worst case: rows that turn out wrong on the device are a miss, and the store looks at them next; or a device
does not answer, and its read never ends.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from ctxcache.client import SessionRows
from ctxcache.client.arena import Bytes
from ctxcache.client.rows import FiledRows, FileRun, SsdSlot, StoredChunk
from ctxcache.errors import CacheError, CorruptSegment, TierFailure
from ctxcache.format.checksums import bound_checksum
from ctxcache.format.streams import Stream
from gpu_worker.kernels.chunk_checksum.reference import WORD_BYTES, ChunkPiece
from gpu_worker.pipeline.sources import BatchLanding, Cuts, LeasedSource, SumsChunks

# A restore from files, and what takes over where one fails:
#
#     land     begin reads ──┐                                   a read cannot begin: the store, this batch on
#     bring                  └► wait for them ──┐                a read ends short: the store, this batch on
#     sum up                                    └► sums ──┐
#     check                                               └► compare with the lease's: wrong is a miss
#
# A miss and not a second read: rows were projected already, and the layer is never announced.
THREADS = 32
"""Reads of kvikio under way at a time: fewer leave an NVMe device idle between them."""
TASK_BYTES = 1 << 20
"""Longer reads are cut into tasks of so much, each a thread's: a buffer of 8 MiB is eight of them."""


class DeviceRead(Protocol):
    """A read under way."""

    def get(self) -> int:
        """Wait for its end; how many bytes came. Raises whatever the driver does."""
        ...


class DeviceFiles(Protocol):
    """Files that can be read into a device's memory, by their place in the server's list."""

    def begin(self, path_index: int, offset_bytes: int, into: Tensor) -> DeviceRead:
        """Begin to fill `into`, contiguous bytes on the device. Raises TierFailure."""
        ...


class KvikioFiles:
    """See DeviceFiles."""

    def __init__(self, paths: Sequence[str], *, is_gds: bool) -> None:
        """Open the files. Raises TierFailure."""
        self._paths = tuple(paths)
        self._files: list[Any] = []  # Any: kvikio has no types
        try:
            import kvikio.defaults  # type: ignore[import-not-found]  # noqa: PLC0415  # only with a GPU

            # Never OFF: without GPUDirect Storage opening a file does not return then.
            mode = kvikio.CompatMode.AUTO if is_gds else kvikio.CompatMode.ON
            # The server writes around the page cache: what lies in it may be older.
            kvikio.defaults.set(
                {
                    "compat_mode": mode,
                    "num_threads": THREADS,
                    "task_size": TASK_BYTES,
                    "auto_direct_io_read": True,
                }
            )
            for path in self._paths:
                self._files.append(kvikio.CuFile(path, "r"))
        except Exception as error:
            # Libraries that are missing or too old show as errors of every class.
            problem = f"kvikio: {type(error).__name__}: {error}"
            raise TierFailure(path=", ".join(self._paths), problem=problem) from error

    def begin(self, path_index: int, offset_bytes: int, into: Tensor) -> DeviceRead:
        """See DeviceFiles."""
        try:
            reading: DeviceRead = self._files[path_index].pread(into, into.nbytes, offset_bytes)
        except Exception as error:
            problem = f"kvikio: {type(error).__name__}: {error}"
            raise TierFailure(path=self._paths[path_index], problem=problem) from error
        return reading


_FAILED = (TierFailure, CorruptSegment)


class DirectSource:
    """Rows of files, read into memory of the host and verified there.

    Close it when the restore is drained.
    """

    def __init__(
        self, rows: FiledRows, again: Callable[[], SessionRows], on_failure: Callable[[CacheError], None]
    ) -> None:
        """`again`: reads the same rows through the store.

        `on_failure` hears why files were given up for this restore.
        """
        self._rows, self._again, self._on_failure = rows, again, on_failure
        # Both lanes may give files up: the reading lane, and the copying lane where a read fails there.
        self._lock = threading.Lock()
        # None while files serve. Once they are given up, the store serves for the rest of this restore.
        self._instead: LeasedSource | None = None
        self._others: SessionRows | None = None
        self.read_bytes = 0
        """Bytes of rows that came from files."""

    def fill(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        """See Source."""
        if self._instead is None:
            try:
                self._rows.copy_rows(stream, begin, end, into)
            except _FAILED as error:
                self._give_up(error)
            else:
                self._count(stream, begin, end)
                return
        self._by_store(stream, begin, end, into)

    def row_bytes(self, stream: Stream) -> int:
        """See Source."""
        return self._rows.row_bytes(stream)

    def check(self) -> None:
        """See Source. Also where the store took over: earlier rows are of the first lease."""
        self._rows.check()
        # Rows of both leases are in the target: either one that ended makes them doubtful.
        if self._others is not None:
            self._others.check()

    def abort(self) -> None:
        """See Source. A read of a file runs to its end; its memory is used for nothing else before."""
        others = self._others
        if others is not None and not others.is_local:
            others.close()

    def close(self) -> None:
        """Close the rows that the store gave in the place of files."""
        if self._others is not None:
            self._others.close()

    def _count(self, stream: Stream, begin: int, end: int) -> None:
        # A run without a slot lies in the arena already, and is not read from a file.
        runs = (run for run in self._rows.runs(begin, end) if run.slot is not None)
        self.read_bytes += sum(run.row_end - run.row_begin for run in runs) * self.row_bytes(stream)

    def _give_up(self, error: CacheError) -> None:
        with self._lock:
            self._on_failure(error)
            if self._instead is None:
                self._others = self._again()
                self._instead = LeasedSource(self._others)

    def _by_store(self, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        with self._lock:
            if self._instead is None:
                raise RuntimeError("nothing was given up")
            self._instead.fill(stream, begin, end, into)


class Expected(NamedTuple):
    """The checksum that ends with a batch: whether a number is it, and the error where it is not."""

    is_right: Callable[[int], bool]
    wrong: Callable[[], CacheError]


class _Reading(NamedTuple):
    """A piece of a chunk on its way."""

    chunk: StoredChunk
    size_bytes: int
    reading: DeviceRead


@dataclass(slots=True, kw_only=True)
class FileLanding(BatchLanding):
    """A batch that comes, wholly or in part, from files. See Arrival."""

    path_of: Callable[[int], str]
    instead: Callable[[CacheError], Bytes]
    """The batch's rows through the store, when a read failed."""
    reads: list[_Reading] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)

    @property
    def is_awaited(self) -> bool:
        """See Arrival."""
        return bool(self.reads)

    def bring(self) -> None:
        """See Arrival."""
        failures = self._ended()
        if failures:
            rows = self.instead(failures[0])
            # A chunk whose first piece came from the file before, and whose rest came another way:
            #
            #     on the device   [ piece 0: from the file, summed up ][ piece 1: through the store ]
            #
            # Its checksum needs the device's sums of both pieces,
            # and what the store reads is verified by other sums.
            if any(piece.begin or not piece.is_last for piece in self.pieces):
                raise failures[0]
            # The whole batch comes through the store, which verifies it: nothing is left to be summed up.
            self.pieces, self.judge = (), None
            self.copies = [(0, rows)]
        BatchLanding.bring(self)

    def settle(self) -> None:
        """See Arrival."""
        self._ended()

    def first_wrong(self, checksums: Sequence[int]) -> CacheError | None:
        """See Judge."""
        for expected, checksum in zip(self.expected, checksums, strict=True):
            if not expected.is_right(checksum):
                return expected.wrong()
        return None

    def _ended(self) -> list[CacheError]:
        """Wait for all reads. Returns the failures."""
        reads, self.reads = self.reads, []
        return [failure for each in reads if (failure := self._failure(each)) is not None]

    def _failure(self, reading: _Reading) -> TierFailure | None:
        path = self.path_of(reading.chunk.path_index)
        try:
            # kvikio's threads read; only this call waits, on the copying lane.
            count = reading.reading.get()
        except Exception as error:  # noqa: BLE001  # a driver's own, of whatever class
            return TierFailure(path=path, problem=f"kvikio: {type(error).__name__}: {error}")
        if count != reading.size_bytes:
            problem = f"{count} of {reading.size_bytes} B of the chunk at byte {reading.chunk.offset_bytes}"
            return TierFailure(path=path, problem=f"kvikio read {problem}")
        return None


class LandingSource(DirectSource):
    """Rows of files, read into memory of the device and verified there. See LandingRows."""

    def __init__(
        self,
        rows: FiledRows,
        files: DeviceFiles,
        sums: SumsChunks,
        again: Callable[[], SessionRows],
        on_failure: Callable[[CacheError], None],
    ) -> None:
        super().__init__(rows, again, on_failure)
        self._files, self._sums = files, sums
        self._open: set[Stream] = set()
        """Streams of which the last batch ended within a chunk that the device sums up."""

    def land(self, stream: Stream, begin: int, end: int, into: Tensor, cuts: Cuts) -> BatchLanding:
        """See LandingRows."""
        landing = FileLanding(
            into,
            self._sums,
            path_of=self._rows.files.paths.__getitem__,
            instead=lambda error: self._other_rows(error, stream, (begin, end), into.shape[1]),
        )
        # Taken before `_begin`, which changes it: it says whether
        # the batch before this one left a chunk unfinished.
        is_open = stream in self._open
        if self._instead is None:
            try:
                self._begin(landing, stream, (begin, end), cuts)
            except _FAILED as error:
                # Wait for the reads: nothing may come into this memory later.
                landing.settle()
                self._give_up(error)
            else:
                self._count(stream, begin, end)
                return landing
        # The store could bring the rows, but the chunk's first
        # piece is on the device and could never be verified.
        if is_open:
            problem = f"rows of {stream} from token {begin} on could not be read behind those of their chunk"
            raise TierFailure(path=self._rows.files.paths[0], problem=problem)
        instead = BatchLanding(into, self._sums)
        self._by_store(stream, begin, end, instead.host_room(0, end - begin))
        return instead

    def _begin(self, landing: FileLanding, stream: Stream, tokens: tuple[int, int], cuts: Cuts) -> None:
        row_bytes = landing.into.shape[1]
        landing.judge = landing.first_wrong
        for run in self._rows.runs(*tokens):
            first, count = run.token_begin - tokens[0], run.row_end - run.row_begin
            if not self._read(landing, stream, run, first * row_bytes, cuts):
                self._rows.copy(stream, run, landing.host_room(first, count))

    def _read(self, landing: FileLanding, stream: Stream, run: FileRun, offset: int, cuts: Cuts) -> bool:
        """Begin to read a piece of a chunk; False where the device cannot verify it."""
        row_bytes = landing.into.shape[1]
        chunk_begin = run.token_begin - run.row_begin
        # A run of a part of a chunk has no checksum of its own: the host reads and verifies the whole chunk.
        if run.slot is None or not run.is_of_whole or offset % WORD_BYTES:
            return False
        if not cuts.pieces(chunk_begin, chunk_begin + run.slot.token_count, row_bytes):
            return False
        slot, chunk = run.slot, run.slot.chunk(stream)
        at, size = run.row_begin * row_bytes, (run.row_end - run.row_begin) * row_bytes
        key = stream, chunk.path_index, chunk.offset_bytes
        piece = ChunkPiece(key, offset, size, at, chunk.size_bytes)
        place = landing.into.reshape(-1)[offset : offset + size]
        reading = self._files.begin(chunk.path_index, chunk.offset_bytes + at, place)
        landing.reads.append(_Reading(chunk, size, reading))
        landing.pieces = [*landing.pieces, piece]
        self._open.add(stream)
        if piece.is_last:
            self._open.discard(stream)
            landing.expected.append(
                Expected(
                    # Sums on SSD are bound to their segment and
                    # stream: right bytes of another chunk do not pass.
                    lambda found: bound_checksum(chunk.seed, stream, found) == chunk.checksum,
                    lambda: self._differs(slot, stream),
                )
            )
        return True

    def _other_rows(
        self, error: CacheError, stream: Stream, tokens: tuple[int, int], row_bytes: int
    ) -> Bytes:
        """A batch through the store, on the copying lane."""
        self._give_up(error)
        rows: Bytes = np.empty((tokens[1] - tokens[0], row_bytes), np.uint8)
        self._by_store(stream, *tokens, rows)
        return rows

    def _differs(self, slot: SsdSlot, stream: Stream) -> CacheError:
        try:
            error: CacheError = slot.differs(stream)
        except CacheError as ended:
            return ended
        self._on_failure(error)
        return error
