"""Recording: a moment a minute into the ring, on the running loop. Costs what a scrape does."""

import asyncio
from collections.abc import Callable

from ctxcache.observe.moment import Moment, Ring

INTERVAL_S = 60.0


class Recording:
    """What fills the ring. Owned by the event loop."""

    def __init__(self, read: Callable[[], Moment]) -> None:
        self.read = read
        self.ring = Ring()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Record now, and each minute from now on."""
        self._record(asyncio.get_running_loop())

    def stop(self) -> None:
        """Record no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _record(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ring.add(self.read())
        self._timer = loop.call_later(INTERVAL_S, self._record, loop)
