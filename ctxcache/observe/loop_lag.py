"""Loop lag: how late the event loop comes to a timer. What stalls it stalls every call."""

import asyncio

from ctxcache.core.observations import QUICK_S, Histogram

INTERVAL_S = 0.1


class LoopLag:
    """Ten timers a second, each measured. Owned by the event loop."""

    def __init__(self) -> None:
        self.lag_s = Histogram(QUICK_S)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to measure, on the running loop."""
        self._begin(asyncio.get_running_loop())

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(INTERVAL_S, self._fire, loop, loop.time() + INTERVAL_S)

    def _fire(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self.lag_s.observe(loop.time() - due_s)
        self._begin(loop)
