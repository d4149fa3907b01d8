"""Direct sources: rows out of the SSD tier's files for the pipeline, and the store's own where a file fails.

Used by the reading lane, what `land` returns by the copying one. Worst case: rows that turn out wrong on the device are a
miss; whoever made the source hears of it, so that the store looks at them next.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ctxcache.client import SessionRows
from ctxcache.client.arena import Bytes
from ctxcache.client.filed_rows import FiledRows
from ctxcache.errors import CacheError, CorruptSegment, TierFailure
from ctxcache.format.streams import Stream
from gpu_worker.direct.kvikio_files import DeviceFiles
from gpu_worker.direct.landing import Checksums, land
from gpu_worker.pipeline.source import LeasedSource, Verify

_FAILED = (TierFailure, CorruptSegment)


class DirectSource:
    """Rows of files, read into memory of the host and verified there. Close it when the restore is drained."""

    def __init__(
        self, rows: FiledRows, again: Callable[[], SessionRows], on_failure: Callable[[CacheError], None]
    ) -> None:
        """`again`: the same rows through the store. `on_failure` hears why files were given up for this restore."""
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
    """Rows of files, read into memory of the device and verified there. See pipeline.source.Landing."""

    def __init__(
        self, rows: FiledRows, files: DeviceFiles, checksums: Checksums,
        again: Callable[[], SessionRows], on_failure: Callable[[CacheError], None],
    ) -> None:  # fmt: skip
        super().__init__(rows, again, on_failure)
        self._files, self._checksums = files, checksums

    def land(self, stream: Stream, begin: int, end: int, into: Tensor) -> Verify:
        """See pipeline.source.Landing."""
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
