"""The ring: a fixed number of fixed-size buffers, each used again only when what consumed it has passed.

Owned by one lane's thread. Back-pressure is that `take` waits for the oldest consumer. Worst case: a
consumer that never ends, and `take` raises at its deadline; the buffer is not handed out.
"""

from collections import deque

from torch import Tensor

from ctxcache.errors import InvalidArgument
from gpu_worker.errors import RestoreTooLate
from gpu_worker.pipeline.deadline import Deadline
from gpu_worker.pipeline.lane import Event

POISON = 0xFF
"""Byte of poisoned buffers: NaN in every floating type."""


class Ring:
    """Buffers [size_bytes] uint8, all alike."""

    def __init__(self, buffers: list[Tensor], *, is_poisoned: bool = False) -> None:
        """`is_poisoned`: a buffer is filled with POISON whenever it is free."""
        if not buffers:
            raise InvalidArgument(field="slot_count", problem="a ring has at least one buffer")
        self.size_bytes = int(buffers[0].nbytes)
        self._free = deque(buffers)
        self._in_use: deque[tuple[Tensor, Event]] = deque()
        self._is_poisoned = is_poisoned
        self._count = len(buffers)
        for buffer in buffers:
            self._poison(buffer)

    @property
    def free_count(self) -> int:
        """Buffers that nobody uses, as far as `take` and `sweep` looked."""
        return len(self._free)

    @property
    def count(self) -> int:
        """All buffers."""
        return self._count

    def take(self, deadline: Deadline) -> Tensor:
        """A buffer that nothing reads or writes; pass it to `bind`, or `drop`. Raises RestoreTooLate."""
        if not self._free:
            self._reclaim(deadline)
        return self._free.popleft()

    def bind(self, buffer: Tensor, consumer: Event) -> None:
        """The buffer belongs to `consumer`'s work until that has passed."""
        self._in_use.append((buffer, consumer))

    def drop(self, buffer: Tensor) -> None:
        """A taken buffer that nobody got to see is free again."""
        self._poison(buffer)
        self._free.append(buffer)

    def sweep(self, deadline: Deadline) -> None:
        """Wait until all buffers are free. Raises RestoreTooLate."""
        while self._in_use:
            self._reclaim(deadline)

    def _reclaim(self, deadline: Deadline) -> None:
        # Consumers are of one lane and end in the order in which they were bound.
        if not self._in_use:
            raise RestoreTooLate(what="a staging buffer")
        buffer, consumer = self._in_use[0]
        if not consumer.settle_by(deadline):
            raise RestoreTooLate(what="a staging buffer")
        self._in_use.popleft()
        self.drop(buffer)

    def _poison(self, buffer: Tensor) -> None:
        if self._is_poisoned:
            buffer.fill_(POISON)
