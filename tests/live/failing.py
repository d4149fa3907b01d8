"""A server whose first SSD path fails for good: its writes at one turn, its reads at a later one.

The descriptor is put in the place of another that refuses, so that it is the kernel that says no.
"""

import os

from ctxcache.settings.config import Settings
from tests.live.running import RunningServer


class FailingServer(RunningServer):
    """Fails after so many turns."""

    def __init__(self, settings: Settings, *, no_writes_after: int, no_reads_after: int) -> None:
        super().__init__(settings)
        self._flags = {no_writes_after: os.O_RDONLY, no_reads_after: os.O_WRONLY}
        self._turn_count = 0

    def rest(self) -> None:
        """A turn is over."""
        super().rest()
        self._turn_count += 1
        if self._turn_count in self._flags:
            self._refuse(self._flags[self._turn_count])

    def _refuse(self, flags: int) -> None:
        file = self._server.storage.ssd.files[0]
        refusing = os.open(file.path, flags | os.O_DIRECT)
        os.dup2(refusing, file.fd)
        os.close(refusing)
