"""The ring: rows of a staging buffer, handed out in runs and free again in the order they were handed out.

Knows no bytes. Worst case: the oldest run stays, and all behind it is kept from others.
"""

from collections import deque

from gpu_worker.saving.slices import Run


class Ring:
    """Rows `[0, row_count)`. Empty, it begins at 0 again, where memory is warm."""

    def __init__(self, row_count: int) -> None:
        self.row_count = row_count
        self._runs: deque[Run] = deque()

    @property
    def used_count(self) -> int:
        """Rows from the oldest run's begin to the newest one's end, what no run could use included."""
        if not self._runs:
            return 0
        span = self._runs[-1].end - self._runs[0].begin
        return span if span > 0 else span + self.row_count

    def take(self, count: int) -> Run | None:
        """Hand out `count` rows that follow one another; None where there is no such room now."""
        begin = self._place(count)
        if begin is None:
            return None
        run = Run(begin, begin + count)
        self._runs.append(run)
        return run

    def free_oldest(self) -> None:
        """The oldest run is not used any more."""
        self._runs.popleft()

    def _place(self, count: int) -> int | None:
        if not self._runs:
            return 0 if count <= self.row_count else None
        tail, head = self._runs[0].begin, self._runs[-1].end
        if head <= tail:
            return head if head + count <= tail else None
        if head + count <= self.row_count:
            return head
        return 0 if count <= tail else None
