"""Direct sources: rows out of the SSD tier's files, read straight onto the device where that works.

Whole chunks land in memory of the device, and are verified there. Parts of chunks, and rows in the arena,
come by way of the host and are verified there. The store's own reads take over where a file
fails. This is the only module that imports kvikio, and only when it is first used.

`fill` and `land` are the reading lane's; the check that `land` returns is the copying lane's. Worst case:
rows that turn out wrong on the device are a miss, and the store looks at them next; or a device that does
not answer, whose read never ends.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ctxcache.client import SessionRows
from ctxcache.client.arena import Bytes
from ctxcache.client.rows import FiledRows, FileRun, StoredChunk
from ctxcache.errors import CacheError, CorruptSegment, TierFailure
from ctxcache.format.checksums import bound_checksum
from ctxcache.format.streams import Stream
from gpu_worker.kernels.chunk_checksum import reference
from gpu_worker.pipeline.pipeline import LeasedSource, Verify

THREADS = 16


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
        """Open them. Raises TierFailure."""
        self._paths = tuple(paths)
        self._files: list[Any] = []  # Any: kvikio has no types
        try:
            import kvikio.defaults  # type: ignore[import-not-found]  # noqa: PLC0415  # only with a GPU

            # Never OFF: without GPUDirect Storage opening a file does not return then.
            mode = kvikio.CompatMode.AUTO if is_gds else kvikio.CompatMode.ON
            # The server writes around the page cache: what lies in it may be older.
            kvikio.defaults.set({"compat_mode": mode, "num_threads": THREADS, "auto_direct_io_read": True})
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


Checksums = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""See kernels/chunk_checksum/reference.py."""
WORD_BYTES = 8


class _Landing(NamedTuple):
    """A chunk on its way to `offset_bytes` of the buffer."""

    run: FileRun
    chunk: StoredChunk
    offset_bytes: int
    reading: DeviceRead


class Landed:
    """Rows of one stream that lie on the device. `verify` is called once, on a lane of the device."""

    def __init__(self, data: Tensor, stream: Stream, chunks: list[_Landing], checksums: Checksums) -> None:
        self._data, self._stream, self._chunks, self._checksums = data, stream, chunks, checksums

    def verify(self) -> None:
        """Raise CorruptSegment, or LeaseNotFound, unless all chunks are what their headers say.

        Waits for the device.
        """
        if not self._chunks:
            return
        rows = [(each.offset_bytes, each.chunk.size_bytes, 0) for each in self._chunks]
        offsets, sizes, seeds = torch.tensor(rows, dtype=torch.int64, device=self._data.device).unbind(1)
        found = self._checksums(self._data, offsets.contiguous(), sizes.contiguous(), seeds.contiguous())
        for each, checksum in zip(self._chunks, found.tolist(), strict=True):
            bound = bound_checksum(each.chunk.seed, self._stream, reference.unsigned(checksum))
            if bound != each.chunk.checksum and each.run.slot is not None:
                raise each.run.slot.differs(self._stream)


def land(
    rows: FiledRows,
    files: DeviceFiles,
    stream: Stream,
    tokens: tuple[int, int],
    into: Tensor,
    checksums: Checksums,
) -> Landed:
    """Bring rows of tokens [begin, end) into [end - begin, row_bytes] on the device, and wait for them.

    Not verified yet, but for what came by way of the host. Raises TierFailure, CorruptSegment, LeaseNotFound.
    """
    begun: list[_Landing] = []
    failures: list[Exception] = []
    try:
        for run in rows.runs(*tokens):
            place = into[run.token_begin - tokens[0] : run.token_end - tokens[0]]
            offset_bytes = (run.token_begin - tokens[0]) * into.shape[1]
            if run.slot is None or not run.is_whole or offset_bytes % WORD_BYTES:
                _by_host(rows, stream, run, place)
                continue
            chunk = run.slot.chunk(stream)
            reading = files.begin(chunk.path_index, chunk.offset_bytes, place.reshape(-1))
            begun.append(_Landing(run, chunk, offset_bytes, reading))
    finally:
        # Also behind a failure: nothing may come into this memory later.
        for each in begun:
            failures += _failure(rows, each)
    if failures:
        raise failures[0]
    return Landed(into.reshape(-1), stream, begun, checksums)


def _failure(rows: FiledRows, landing: _Landing) -> list[Exception]:
    path = rows.files.paths[landing.chunk.path_index]
    try:
        count = landing.reading.get()
    except Exception as error:  # noqa: BLE001  # a driver's own, of whatever class
        return [TierFailure(path=path, problem=f"kvikio: {type(error).__name__}: {error}")]
    if count != landing.chunk.size_bytes:
        problem = f"{count} of {landing.chunk.size_bytes} B at byte {landing.chunk.offset_bytes}"
        return [TierFailure(path=path, problem=f"kvikio read {problem}")]
    return []


def _by_host(rows: FiledRows, stream: Stream, run: FileRun, place: Tensor) -> None:
    host = torch.empty(place.shape, dtype=torch.uint8)
    rows.copy(stream, run, host.numpy())
    # Waits for the device: the memory is nobody else's then.
    place.copy_(host)
    if place.is_cuda:
        torch.cuda.current_stream(place.device).synchronize()


_FAILED = (TierFailure, CorruptSegment)


class DirectSource:
    """Rows of files, read into memory of the host and verified there.

    Close it when the restore is drained.
    """

    def __init__(
        self, rows: FiledRows, again: Callable[[], SessionRows], on_failure: Callable[[CacheError], None]
    ) -> None:
        """`again`: the same rows through the store.

        `on_failure` hears why files were given up for this restore.
        """
        self._rows, self._again, self._on_failure = rows, again, on_failure
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
        self._by_store().fill(stream, begin, end, into)

    def row_bytes(self, stream: Stream) -> int:
        """See Source."""
        return self._rows.row_bytes(stream)

    def check(self) -> None:
        """See Source. Also where the store took over: earlier rows are of the first lease."""
        self._rows.check()
        if self._others is not None:
            self._others.check()

    def abort(self) -> None:
        """See Source. A read of a file runs to its end: its memory is used by nobody else before."""
        others = self._others
        if others is not None and not others.is_local:
            others.close()

    def close(self) -> None:
        """Give back what was taken besides the rows."""
        if self._others is not None:
            self._others.close()

    def _count(self, stream: Stream, begin: int, end: int) -> None:
        runs = (run for run in self._rows.runs(begin, end) if run.slot is not None)
        self.read_bytes += sum(run.row_end - run.row_begin for run in runs) * self.row_bytes(stream)

    def _give_up(self, error: CacheError) -> None:
        self._on_failure(error)
        self._others = self._again()
        self._instead = LeasedSource(self._others)

    def _by_store(self) -> LeasedSource:
        if self._instead is None:
            raise RuntimeError("nothing was given up")
        return self._instead


class LandingSource(DirectSource):
    """Rows of files, read into memory of the device and verified there. See LandingRows."""

    def __init__(
        self,
        rows: FiledRows,
        files: DeviceFiles,
        checksums: Checksums,
        again: Callable[[], SessionRows],
        on_failure: Callable[[CacheError], None],
    ) -> None:
        super().__init__(rows, again, on_failure)
        self._files, self._checksums = files, checksums

    def land(self, stream: Stream, begin: int, end: int, into: Tensor) -> Verify:
        """See LandingRows."""
        if self._instead is None:
            try:
                landed = land(self._rows, self._files, stream, (begin, end), into, self._checksums)
            except _FAILED as error:
                self._give_up(error)
            else:
                self._count(stream, begin, end)
                return lambda: self._verified(landed.verify)
        host = torch.empty(into.shape, dtype=torch.uint8)
        self._by_store().fill(stream, begin, end, host.numpy())
        into.copy_(host)
        if into.is_cuda:
            torch.cuda.current_stream(into.device).synchronize()
        return _nothing

    def _verified(self, verify: Verify) -> None:
        try:
            verify()
        except CorruptSegment as error:
            self._on_failure(error)
            raise


def _nothing() -> None:
    return
