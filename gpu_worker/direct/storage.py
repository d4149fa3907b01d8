"""Direct storage of a worker: the path that is live, and sources by it.

kvikio is probed by a read into the GPU in a process of its own, with a time limit: where a driver is half
there it may fail, hang or end its process. Thread-safe. Worst case: a path that fails is given up for a
restore, counted, and the store reads for it; a probe that fails leaves POSIX.
"""

import json
import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch

from ctxcache.client import CallerModel, Client, SessionRows
from ctxcache.client.rows import FiledRows
from ctxcache.client.ssd_files import SsdReader
from ctxcache.client.types import SessionInfo
from ctxcache.errors import CacheError, CorruptSegment, TierFailure
from ctxcache.format.streams import Stream
from gpu_worker.direct import DirectPath, KvikioFound, Live, Wanted, choose
from gpu_worker.direct.source import DeviceFiles, DirectSource, KvikioFiles, LandingSource
from gpu_worker.pipeline.sources import ArenaPins, RowSource, chunk_sums

PROBE_TIMEOUT_S = 60.0
_PROGRAM = r"""
import json, os, sys, tempfile
import torch
import kvikio, kvikio.cufile_driver, kvikio.defaults
is_gds = bool(kvikio.cufile_driver.get("is_gds_available"))
kvikio.defaults.set("compat_mode", kvikio.CompatMode.AUTO if is_gds else kvikio.CompatMode.ON)
data = os.urandom(8192)
with tempfile.NamedTemporaryFile() as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    into = torch.zeros(len(data), dtype=torch.uint8, device=sys.argv[1])
    torch.cuda.synchronize()
    with kvikio.CuFile(file.name, "r") as handle:
        count = handle.pread(into, len(data), 0).get()
if count != len(data) or bytes(into.cpu().tolist()) != data:
    raise SystemExit("a read into the GPU gave other bytes")
print(json.dumps({"version": kvikio.__version__, "is_gds": is_gds}))
"""


def probe_kvikio(device: torch.device, *, timeout_s: float = PROBE_TIMEOUT_S) -> KvikioFound | None:
    """Whether kvikio reads into a device; None for one that is no GPU. Takes seconds where there is one."""
    if device.type != "cuda":
        return None
    if find_spec("kvikio") is None:
        return KvikioFound("not installed: pip install 'ctxcache[direct]'")
    # A process of its own: a driver that crashes takes that
    # one down, and one that hangs is killed by the time limit.
    command = (sys.executable, "-c", _PROGRAM, str(device))
    try:
        ran = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return KvikioFound(f"did not answer within {timeout_s:g} s")
    except OSError as error:
        return KvikioFound(f"cannot be tried: {error.strerror}")
    return read_answer(ran.returncode, ran.stdout, ran.stderr)


def read_answer(status: int, said: str, complained: str) -> KvikioFound:
    """Read what a probe's process said."""
    lines = said.strip().splitlines()
    # The last line of a traceback says what is wrong; the rest is where.
    if status or not lines:
        last = (complained.strip().splitlines() or [f"ended with status {status}"])[-1]
        return KvikioFound(last[:200])
    try:
        facts = json.loads(lines[-1])
        return KvikioFound("", is_gds=bool(facts["is_gds"]), version=str(facts["version"]))
    except (ValueError, KeyError, TypeError):
        return KvikioFound(f"said {lines[-1][:100]!r}")


log = logging.getLogger(__name__)

SUSPECTS_LIMIT = 1024


class DirectStorage:
    """How one worker reads what lies only on SSD."""

    def __init__(self, client: Client, device: torch.device, wanted: Wanted = Wanted.AUTO) -> None:
        """Probe the machine, which takes seconds where there is a GPU."""
        self._client, self._device = client, device
        self.pins = ArenaPins(device)
        self._lock = threading.Lock()
        self._machine = self._live = choose(wanted, None if wanted is Wanted.OFF else probe_kvikio(device))
        self._suspects: set[str] = set()
        """Sessions whose files gave other rows, or none.

        The store reads them next, and cuts them before the damage.
        """
        self._opened: tuple[SsdReader, DeviceFiles] | None = None
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
        session: SessionInfo,
        model: CallerModel,
        *,
        streams: Iterable[Stream],
        end: int | None = None,
        if_generation_match: int | None = None,
    ) -> SessionRows:
        """Rows of tokens [0, end), by default of all, left on SSD where a path is live.

        Raises as Client.read.
        """
        # Ask the store in the usual way: it reads into the arena, and promotes the session.
        if self._machine.path is DirectPath.OFF:
            return self._client.sessions.open(session, model).read(
                streams=streams, end=end, if_generation_match=if_generation_match
            )
        self._look(self._client.ssd_files())
        # A suspect is read through the store once, which verifies what it reads, and cuts or mends the rest.
        is_suspect = session.name in self._suspects
        rows = self._client.sessions.open(session, model).read(
            streams=streams,
            end=end,
            if_generation_match=if_generation_match,
            leave_on_ssd=not is_suspect,
        )
        # Cleared behind the read: a read that raises leaves the session suspect.
        if is_suspect:
            self._suspects.discard(session.name)
        return rows

    @contextmanager
    def source(self, rows: SessionRows, model: CallerModel) -> Iterator[RowSource]:
        """The source of what `read` returned, for one restore, which is drained when it is left."""
        if not isinstance(rows, FiledRows):
            with self.pins.source(rows) as leased:
                yield leased
            return
        source = self._direct(rows, model)
        try:
            yield source
        finally:
            source.close()
            with self._lock:
                self.read_bytes += source.read_bytes

    def close(self) -> None:
        """Unpin the arena, behind the last restore."""
        self.pins.close()

    def _direct(self, rows: FiledRows, model: CallerModel) -> DirectSource:

        def again() -> SessionRows:
            session = rows.session
            return self._client.sessions.open(session, model).read(
                streams=rows.streams, end=rows.end, if_generation_match=session.generation
            )

        def failed(error: CacheError) -> None:
            self._failed(error)
            if isinstance(error, (CorruptSegment, TierFailure)):
                # Forgetting costs a further miss at most; the set
                # must not grow with every session of a broken disk.
                if len(self._suspects) >= SUSPECTS_LIMIT:
                    self._suspects.clear()
                self._suspects.add(rows.session.name)

        files = self._device_files(rows.files)
        if files is None:
            return DirectSource(rows, again, failed)
        return LandingSource(rows, files, chunk_sums(self._device), again, failed)

    def _failed(self, error: CacheError) -> None:
        with self._lock:
            self.failures[error.reason] += 1
        log.warning("direct_read_failed reason=%s problem=%r", error.reason, str(error))

    def _look(self, files: SsdReader | None) -> None:
        """Set the path, by whether these files can be read."""
        if files is not None and files.is_open:
            return self._say(self._machine)
        problem = "the store is not on this host" if files is None else files.problem
        return self._say(Live(DirectPath.OFF, problem))

    def _say(self, live: Live) -> None:
        with self._lock:
            is_new, self._live = live != self._live, live
        if is_new:
            log.info("direct_storage path=%s reason=%r", live.path, live.reason)

    def _device_files(self, files: SsdReader) -> DeviceFiles | None:
        """The files as the device reads them; None where the host does."""
        if self._machine.path not in (DirectPath.GDS, DirectPath.COMPAT):
            return None
        with self._lock:
            # A store that was started again has other files, which are opened anew.
            if self._opened is not None and self._opened[0] is files:
                return self._opened[1]
        try:
            opened = self._open(files)
        except TierFailure as error:
            self._failed(error)
            # Given up for good: a file that kvikio cannot open now would fail at every restore.
            self._machine = Live(DirectPath.POSIX, str(error))
            self._say(self._machine)
            return None
        with self._lock:
            self._opened = files, opened
        return opened

    def _open(self, files: SsdReader) -> DeviceFiles:
        return KvikioFiles(files.paths, is_gds=self._machine.path is DirectPath.GDS)
