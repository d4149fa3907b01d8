"""Time until something happens for the first time. Knows the monotonic clock alone."""

import time


class Stopwatch:
    """Runs from its creation until `stop_once`."""

    def __init__(self) -> None:
        self._begin_ns = time.perf_counter_ns()
        self.elapsed_ns = 0

    def stop_once(self) -> None:
        """Stop it; later calls change nothing."""
        self.elapsed_ns = self.elapsed_ns or time.perf_counter_ns() - self._begin_ns
