"""Rpc times: how long rpcs took and how they ended, by method. Kept on the path of every call: nothing is formatted here.

Memory: an entry per method of ours and way of ending, both closed sets.
"""

from collections.abc import Iterator

from ctxcache.core.observations import QUICK_S, Histogram

OK, CANCELLED = "OK", "CANCELLED"
"""Ends that are no error of ours: an answer, and a caller that went away."""


class Timer:
    """Of one method. Owned by the event loop."""

    def __init__(self) -> None:
        self.by_end: dict[str, Histogram] = {}
        """Seconds, by OK, CANCELLED or an error's reason."""

    def ended(self, took_s: float, end: str) -> None:
        """One is over."""
        histogram = self.by_end.get(end)
        if histogram is None:
            histogram = self.by_end[end] = Histogram(QUICK_S)
        histogram.observe(took_s)


class RpcTimes:
    """Of all methods. Owned by the event loop."""

    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def of(self, method: str) -> Timer:
        """A method's, `/package.Service/Method`."""
        return self._timers.setdefault(method.rpartition(".")[2], Timer())

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        """Methods as `Service/Method`, each with its own."""
        return iter(self._timers.items())
