"""kvikio at its edge: reads from files into memory of a GPU. The only module that imports it, and when it is first used.

Thread-safe as kvikio is. Worst case: a device that does not answer; a read then never ends, and neither does who waits for it.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from ctxcache.errors import TierFailure

THREADS = 16


class Reading(Protocol):
    """A read under way."""

    def get(self) -> int:
        """Wait for its end; how many bytes came. Raises whatever the driver does."""
        ...


class DeviceFiles(Protocol):
    """Files that can be read into a device's memory, by their place in the server's list."""

    def begin(self, path_index: int, offset_bytes: int, into: Tensor) -> Reading:
        """Begin to fill `into`, contiguous bytes on the device. Raises TierFailure."""
        ...


class KvikioFiles:
    """See DeviceFiles."""

    def __init__(self, paths: Sequence[str], *, is_gds: bool) -> None:
        """Open them. Raises TierFailure."""
        self._paths = tuple(paths)
        self._files: list[Any] = []  # Any: kvikio has no types
        try:
            import kvikio  # type: ignore[import-not-found]  # noqa: PLC0415  # only where there is a GPU
            import kvikio.defaults  # type: ignore[import-not-found]  # noqa: PLC0415

            # Never OFF: without GPUDirect Storage opening a file does not return then.
            mode = kvikio.CompatMode.AUTO if is_gds else kvikio.CompatMode.ON
            # The server writes around the page cache: what lies in it may be older.
            kvikio.defaults.set({"compat_mode": mode, "num_threads": THREADS, "auto_direct_io_read": True})
            for path in self._paths:
                self._files.append(kvikio.CuFile(path, "r"))
        except Exception as error:
            # Whatever it is: libraries that are missing or too old show as errors of every class.
            problem = f"kvikio: {type(error).__name__}: {error}"
            raise TierFailure(path=", ".join(self._paths), problem=problem) from error

    def begin(self, path_index: int, offset_bytes: int, into: Tensor) -> Reading:
        """See DeviceFiles."""
        try:
            reading: Reading = self._files[path_index].pread(into, into.nbytes, offset_bytes)
        except Exception as error:
            problem = f"kvikio: {type(error).__name__}: {error}"
            raise TierFailure(path=self._paths[path_index], problem=problem) from error
        return reading
