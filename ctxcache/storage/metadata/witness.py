"""The witness: how far commits were on disk, said by files that the metadata store does not write.

One small file lies in each SSD directory. A store that ends before its witness has lost acknowledged commits,
whatever the store thinks: a log file deleted, a manifest damaged, an older copy put back. The witness is
written in place behind each sync, and is synced only at the end. After the death of the process it is exact.
After a power cut it may lag by what the kernel had not written back, half a minute, and never runs ahead. A
file on another device than the store is written by a thread of its own: a device that hangs delays one
commit, and then only its own file lags. Worst case: the witness is gone or damaged itself, which is logged.

    two places, at bytes 0 and 4096, written in turn:
    magic 8 | store id u64 | sequence u64 | XXH3-64 of what is before it u64
"""

import contextlib
import logging
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from xxhash import xxh3_64_intdigest

from ctxcache.errors import DataDirectoryUnusable
from ctxcache.runtime.files import open_private

NAME = "WITNESS"
_MAGIC = b"CTXCWIT\0"
_BODY = struct.Struct("<8sQQ")
_CHECKSUM = struct.Struct("<Q")
_PLACES = (0, 4096)
PATIENCE_S = 2.0
"""How long a commit waits for a file whose last write came back."""
log = logging.getLogger(__name__)


class Witness:
    """The witnesses of one store. Owned by the thread that syncs the store."""

    def __init__(
        self,
        directories: Sequence[str | Path],
        instance_id: str,
        *,
        beside: str | Path | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Read the present files. No file is written until `begin`.

        `beside`: the store, or None where all files count as on other devices. Raises DataDirectoryUnusable.
        """
        self._paths = [Path(directory) / NAME for directory in directories]
        self._device = None if beside is None else Path(beside).stat().st_dev
        self._store_id = xxh3_64_intdigest(instance_id.encode())
        self._files: list[_File] = []
        self._patience_s = patience_s
        self.sequence = 0
        """The last commit that is known to have been on disk."""
        for path in self._paths:
            self._look_at(path)

    def begin(self) -> None:
        """Open or create a file in each directory. Raises DataDirectoryUnusable."""
        for path in self._paths:
            try:
                fd = open_private(path, os.O_RDWR | os.O_CREAT)
            except OSError as error:
                raise DataDirectoryUnusable(path=str(path), problem=error.strerror or str(error)) from error
            self._files.append(_File(fd, path, is_beside=os.fstat(fd).st_dev == self._device))

    def note(self, sequence: int) -> None:
        """Every commit up to this one is on disk now. Costs a write to the page cache per file.

        A file whose earlier write is late is left out.
        """
        body = _BODY.pack(_MAGIC, self._store_id, sequence)
        # The two places take turns: a torn write leaves the number before it whole.
        place = _PLACES[sequence % len(_PLACES)]
        raw = body + _CHECKSUM.pack(xxh3_64_intdigest(body))
        # All writes begin before any is waited for: devices write side by side.
        for file in [file for file in self._files if file.begin(raw, place)]:
            file.wait(self._patience_s)
        # The number rises behind the writes: a file may not have a number that is not known here.
        self.sequence = sequence

    def close(self) -> None:
        """Sync and give up the files."""
        for file in self._files:
            file.close(self._patience_s)
        self._files.clear()

    def _look_at(self, path: Path) -> None:
        try:
            fd = open_private(path, os.O_RDONLY)
        except FileNotFoundError:
            return
        except OSError as error:
            raise DataDirectoryUnusable(path=str(path), problem=error.strerror or str(error)) from error
        try:
            sequences = [self._read(fd, place) for place in _PLACES]
        finally:
            os.close(fd)
        if None in sequences:
            log.error("witness_damaged path=%s", path)
        # The greatest number of all files counts: a file that lagged takes nothing back.
        self.sequence = max(self.sequence, *(sequence or 0 for sequence in sequences))

    def _read(self, fd: int, place: int) -> int | None:
        """The number at one place; 0 where nothing was ever written, None where it cannot be read."""
        try:
            raw = os.pread(fd, _BODY.size + _CHECKSUM.size, place)
        except OSError:
            return None
        # The file was just made, or its second place was never written.
        if not any(raw):
            return 0
        if len(raw) < _BODY.size + _CHECKSUM.size:
            return None
        magic, store_id, sequence = _BODY.unpack_from(raw)
        is_whole = xxh3_64_intdigest(raw[: _BODY.size]) == _CHECKSUM.unpack_from(raw, _BODY.size)[0]
        return int(sequence) if is_whole and magic == _MAGIC and store_id == self._store_id else None


class _File:
    """One file and the thread that writes it, one write at a time.

    The caller, who has just synced there, writes a file on the store's device itself. The thread ends it.
    """

    def __init__(self, fd: int, path: Path, *, is_beside: bool) -> None:
        self._fd, self._path, self._is_beside = fd, path, is_beside
        self._is_free = threading.Event()
        self._is_free.set()
        self._writes: SimpleQueue[tuple[bytes, int] | None] = SimpleQueue()
        # The thread is a daemon: the end of the process waits for no device.
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)
        self._thread.start()

    def begin(self, raw: bytes, place: int) -> bool:
        """Write the number, unless an earlier write is not back. Returns whether to wait for the write."""
        if self._is_beside:
            self._write(raw, place)
            return False
        # The last write has not come back. This one is left out, so that no queue grows behind a hanging
        # device.
        if not self._is_free.is_set():
            return False
        self._is_free.clear()
        self._writes.put((raw, place))
        return True

    def wait(self, patience_s: float) -> None:
        """Wait for the write, at most so long."""
        if not self._is_free.wait(patience_s):
            log.error("witness_late path=%s", self._path)

    def close(self, patience_s: float) -> None:
        """Sync the file and close it. A hanging device is left to the end of the process."""
        if not self._is_free.is_set():
            return
        self._writes.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            log.error("witness_late path=%s", self._path)

    def _write(self, raw: bytes, place: int) -> None:
        # An error loses no data: the store itself has the number.
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, raw, place)

    def _run(self) -> None:
        while (write := self._writes.get()) is not None:
            self._write(*write)
            self._is_free.set()
        with contextlib.suppress(OSError):
            # The thread closes the descriptor: nobody else knows when the last write is over.
            os.fdatasync(self._fd)
        os.close(self._fd)
