"""Transfers: many device operations in a few threads, and one answer to the event loop.

Knows no file. A transfer costs the loop one wake-up, however many pieces it has; a thread takes the
next piece of whatever transfer as soon as it has done one, so that a device never waits for a barrier.
Worst case: a piece that the device never answers, which its transfer and `close` wait for.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

Piece = Callable[[int, int], None]
"""Moves bytes `[begin, end)` of a transfer's buffer, in a thread."""


class Threads:
    """A fixed number of threads over one queue, in the order of asking. They end with `close`."""

    def __init__(self, count: int, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    async def transfer(self, piece: Piece, ranges: Sequence[tuple[int, int]]) -> None:
        """Call `piece` for every range; raises what the first failing one raised.

        After a failure or a cancellation no further piece begins, and this returns when those under way
        have ended: until then the device owns the buffer.
        """
        if ranges:
            transfer = _Transfer(piece, len(ranges))
            for begin, end in ranges:
                self._work.put(transfer.step(begin, end))
            await transfer.wait()

    def close(self) -> None:
        """Finish what was asked for, then end the threads."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self) -> None:
        while (step := self._work.get()) is not None:
            step()
            # Or the last one's buffer would live until the next comes.
            del step


class _Transfer:
    """Pieces left to do, counted by the threads. `_lock` guards the count and the failure."""

    def __init__(self, piece: Piece, count: int) -> None:
        self._piece = piece
        self._left = count
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()

    def step(self, begin: int, end: int) -> Callable[[], None]:
        """One piece's work for a thread."""
        return lambda: self._do(begin, end)

    async def wait(self) -> None:
        """Wait for the last piece, also when cancelled."""
        while not self._done.done():
            try:
                await asyncio.wait([self._done])
            except asyncio.CancelledError:
                self._is_cancelled = True
        if self._is_cancelled:
            raise asyncio.CancelledError
        if self._failure is not None:
            raise self._failure

    def _do(self, begin: int, end: int) -> None:
        failure = None
        if not self._is_cancelled and self._failure is None:
            try:
                self._piece(begin, end)
            except BaseException as error:  # noqa: BLE001  # raised where the transfer is waited for
                failure = error
        with self._lock:
            self._failure = self._failure or failure
            self._left -= 1
            is_last = not self._left
        if is_last:
            # Nobody waits any more when the loop is closed.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._done.set_result, None)
