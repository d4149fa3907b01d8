"""Direct storage of a worker: which path is live, and sources by it.

Thread-safe. Worst case: a path that fails is given up for a restore, counted, and the store reads for it.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ctxcache.client import CallerModel, Client, SessionRows
from ctxcache.client.filed_rows import FiledRows
from ctxcache.client.ssd_files import SsdFiles
from ctxcache.errors import CacheError, CorruptSegment, TierFailure
from ctxcache.format.streams import Stream
from ctxcache.v1.session_pb2 import Session
from gpu_worker.direct.kvikio_files import DeviceFiles, KvikioFiles
from gpu_worker.direct.landing import Checksums
from gpu_worker.direct.path import DirectPath, Live, Wanted, choose
from gpu_worker.direct.probe import probe_kvikio
from gpu_worker.direct.source import DirectSource, LandingSource
from gpu_worker.kernels.chunk_checksum import reference
from gpu_worker.pipeline.source import LeasedSource, Source

log = logging.getLogger(__name__)

SUSPECTS_LIMIT = 1024


class DirectStorage:
    """How one worker reads what lies only on SSD."""

    def __init__(self, client: Client, device: torch.device, wanted: Wanted = Wanted.AUTO) -> None:
        """Probe the machine, which takes seconds where there is a GPU."""
        self._client, self._device = client, device
        self._lock = threading.Lock()
        self._machine = self._live = choose(wanted, None if wanted is Wanted.OFF else probe_kvikio(device))
        self._suspects: set[str] = set()
        """Sessions whose files gave other rows: the store is to read them next, which ends them before their damage."""
        self._opened: tuple[SsdFiles, DeviceFiles] | None = None
        self.failures: Counter[str] = Counter()
        """Restores that gave files up, by reason."""
        self.read_bytes = 0
        """Bytes that restores took from files."""
        log.info("direct_storage path=%s reason=%r", self._live.path, self._live.reason)

    @property
    def live(self) -> Live:
        """The path by which the last read went, or the next one will."""
        return self._live

    def read(
        self,
        session: Session,
        model: CallerModel,
        *,
        streams: Iterable[Stream],
        end: int | None = None,
        if_generation_match: int | None = None,
    ) -> SessionRows:
        """Rows of tokens [0, end), by default of all, left on SSD where a path is live. Raises as Client.read."""
        if self._machine.path is DirectPath.OFF:
            return self._client.read(
                session, model, streams=streams, end=end, if_generation_match=if_generation_match
            )
        self._look(self._client.ssd_files())
        is_suspect = session.name in self._suspects
        rows = self._client.read(
            session,
            model,
            streams=streams,
            end=end,
            if_generation_match=if_generation_match,
            leave_on_ssd=not is_suspect,
        )
        if is_suspect:
            self._suspects.discard(session.name)
        return rows

    @contextmanager
    def source(self, rows: SessionRows, model: CallerModel) -> Iterator[Source]:
        """The source of what `read` returned, for one restore, which is drained when it is left."""
        if not isinstance(rows, FiledRows):
            yield LeasedSource(rows)
            return
        source = self._direct(rows, model)
        try:
            yield source
        finally:
            source.close()
            with self._lock:
                self.read_bytes += source.read_bytes

    def _direct(self, rows: FiledRows, model: CallerModel) -> DirectSource:

        def again() -> SessionRows:
            session = rows.session
            return self._client.read(
                session, model, streams=rows.streams, end=rows.end, if_generation_match=session.generation
            )

        def failed(error: CacheError) -> None:
            self._failed(error)
            if isinstance(error, CorruptSegment):
                if len(self._suspects) >= SUSPECTS_LIMIT:
                    self._suspects.clear()
                self._suspects.add(rows.session.name)

        files = self._device_files(rows.files)
        if files is None:
            return DirectSource(rows, again, failed)
        return LandingSource(rows, files, self._checksums(), again, failed)

    def _failed(self, error: CacheError) -> None:
        with self._lock:
            self.failures[error.reason] += 1
        log.warning("direct_read_failed reason=%s problem=%r", error.reason, str(error))

    def _look(self, files: SsdFiles | None) -> None:
        """Say what these files mean for the path."""
        if files is not None and files.is_open:
            return self._say(self._machine)
        problem = "the store is not on this host" if files is None else files.problem
        return self._say(Live(DirectPath.OFF, problem))

    def _say(self, live: Live) -> None:
        with self._lock:
            is_new, self._live = live != self._live, live
        if is_new:
            log.info("direct_storage path=%s reason=%r", live.path, live.reason)

    def _device_files(self, files: SsdFiles) -> DeviceFiles | None:
        """The files as the device reads them; None where the host does."""
        if self._machine.path not in (DirectPath.GDS, DirectPath.COMPAT):
            return None
        with self._lock:
            if self._opened is not None and self._opened[0] is files:
                return self._opened[1]
        try:
            opened = self._open(files)
        except TierFailure as error:
            self._failed(error)
            self._machine = Live(DirectPath.POSIX, str(error))
            self._say(self._machine)
            return None
        with self._lock:
            self._opened = files, opened
        return opened

    def _open(self, files: SsdFiles) -> DeviceFiles:
        return KvikioFiles(files.paths, is_gds=self._machine.path is DirectPath.GDS)

    def _checksums(self) -> Checksums:
        if self._device.type != "cuda":
            return reference.chunk_checksum
        from gpu_worker.kernels.chunk_checksum.fused import chunk_checksum  # noqa: PLC0415  needs Triton

        return chunk_checksum
