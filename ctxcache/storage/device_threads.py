"""Transfers: many device operations in a few threads, and one answer to the event loop.

Knows no file. A transfer costs the loop one wake-up, however many pieces it has; a thread takes the
next piece of whatever transfer as soon as it has done one, so that a device never waits for a barrier.
Worst case: a piece that the device never answers. `give_up` then answers the callers with an error; the
piece keeps its thread and its buffer until the device returns it.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from ctxcache.errors import TierFailure
from ctxcache.runtime.clock import Clock

Piece = Callable[[int, int], None]
"""Moves bytes `[begin, end)` of a transfer's buffer, in a thread."""


class DeviceJob(Protocol):
    """Device operations that one caller waits for."""

    is_given_up: bool
    """Whether the caller was answered without the device."""

    def do(self, begin: int, end: int) -> None:
        """Carry out one operation, in a thread."""

    def skip(self) -> None:
        """Leave out one operation that no thread has begun."""

    def give_up(self, failure: TierFailure) -> None:
        """Answer the caller with this failure. Called on the event loop."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One operation of a job, as it is queued."""

    job: DeviceJob
    begin: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """An operation that a thread has begun, and when."""

    job: DeviceJob
    begun_ns: int


# One queue, several threads, and what becomes of a job when the device hangs:
#
#     queued ──► under way ──► returned ──► answered
#        │           │ give up
#        │           └──► answered with a failure ──► owed ──► returned late: the buffer is free
#        │ give up
#        └──► answered with a failure, skipped
class Threads:
    """A fixed number of threads over one queue, in the order of asking. They end with `close`."""

    def __init__(self, count: int, name: str, clock: Clock) -> None:
        self._clock = clock
        # Two parts: a thread waits at `_calls` without a lock, then takes a step and notes it in one go. So
        # `give_up` finds each step in one of two places.
        self._calls: SimpleQueue[bool] = SimpleQueue()
        """True: look for a step. False: end. A step that was given up leaves its call behind."""
        self._queued: deque[_Step] = deque()
        self._under_way: list[_UnderWay | None] = [None] * count
        """By the thread's number; each thread writes its own entry."""
        self._taking = threading.Lock()
        """Held where a step goes from `_queued` to `_under_way`."""
        # Daemons: the end of the process waits for no device.
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"{name}-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def oldest_ns(self) -> int | None:
        """When the oldest operation under way began; None when the device owes none."""
        return min((found.begun_ns for found in self._under_way if found), default=None)

    @property
    def is_busy(self) -> bool:
        """Whether an operation is queued or under way."""
        with self._taking:
            return bool(self._queued) or any(self._under_way)

    @property
    def is_owed(self) -> bool:
        """Whether the device has not returned an operation whose caller was answered without it."""
        return any(found.job.is_given_up for found in self._under_way if found)

    async def transfer(self, piece: Piece, ranges: Sequence[tuple[int, int]]) -> None:
        """Call `piece` for every range; raises what the first failing one raised.

        After a failure or a cancellation no further piece begins, and this returns when those under way
        have ended: until then the device owns the buffer. The exception is `give_up`: its failure comes at
        once, and the failure's `returned` says when the device has let go of the buffer.
        """
        if ranges:
            transfer = _Transfer(piece, len(ranges))
            # All pieces at once: a thread goes on with the next piece of any transfer, and no barrier is
            # between them.
            for begin, end in ranges:
                self._put(_Step(transfer, begin, end))
            await transfer.wait()

    def submit(self, work: Callable[[], None]) -> "Future[None]":
        """Queue one operation that has no buffer; its future may be waited for by several."""
        call = _Call(work)
        self._put(_Step(call))
        return call.future

    def give_up(self, failure: Callable[[], TierFailure]) -> None:
        """Answer every caller with a failure of its own.

        A call under way keeps its thread until it returns.
        """
        # Each job is answered once, however many of its pieces are where.
        with self._taking:
            jobs = {found.job for found in self._under_way if found}
            queued = list(self._queued)
            self._queued.clear()
        jobs.update(step.job for step in queued)
        for job in jobs:
            job.give_up(failure())
        # Skipped pieces are counted as ended, so that the last one under way lets go of the buffer.
        for step in queued:
            step.job.skip()

    def close(self, patience_s: float | None = None) -> None:
        """Finish what was asked for, then end the threads.

        Those that the device owes are left to the process's end, and so is a thread that has not ended
        within `patience_s`. None waits for ever.
        """
        for _ in self._threads:
            self._calls.put(item=False)
        end_s = None if patience_s is None else time.monotonic() + patience_s
        for i, thread in enumerate(self._threads):
            found = self._under_way[i]
            # A thread in a call that never returns cannot be joined.
            if not (found and found.job.is_given_up):
                thread.join(None if end_s is None else max(end_s - time.monotonic(), 0))
        self._threads = []

    def _put(self, step: _Step) -> None:
        # The step first: a thread that hears the call finds it.
        self._queued.append(step)
        self._calls.put(item=True)

    def _run(self, number: int) -> None:
        while self._calls.get():
            now_ns = self._clock.monotonic_ns()
            with self._taking:
                step = self._queued.popleft() if self._queued else None
                # Noted before it begins: an operation that never returns is found by its age.
                self._under_way[number] = _UnderWay(step.job, now_ns) if step else None
            if step:
                step.job.do(step.begin, step.end)
            # Its own entry, so that no lock is needed.
            self._under_way[number] = None
            # Or the last one's buffer would live until the next comes.
            del step


class _Call:
    """One operation and its future. The late result of one that was given up is dropped."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.is_given_up = False
        self.future: Future[None] = Future()
        self._work = work
        self._lock = threading.Lock()

    def do(self, begin: int, end: int) -> None:  # noqa: ARG002  there is nothing to cut
        """See Job."""
        with self._lock:
            # A call that was cancelled before it began is not begun.
            if self.is_given_up or not self.future.set_running_or_notify_cancel():
                return
        failure: BaseException | None = None
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  # raised where the future is waited for
            failure = error
        with self._lock:
            # The caller has its failure. This result comes too late for anybody.
            if self.is_given_up:
                return
            if failure is None:
                self.future.set_result(None)
            else:
                self.future.set_exception(failure)

    def skip(self) -> None:
        """See Job. The future has its failure already."""

    def give_up(self, failure: TierFailure) -> None:
        """See Job."""
        with self._lock:
            if self.future.done():
                return
            self.is_given_up = True
            self.future.set_exception(failure)


class _Transfer:
    """Pieces left to do, counted by the threads. `_lock` guards the count and the failure."""

    def __init__(self, piece: Piece, count: int) -> None:
        self.is_given_up = False
        self._piece = piece
        self._left = count
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._answered = self._loop.create_future()
        self._returned = self._loop.create_future()

    async def wait(self) -> None:
        """Wait for the last piece, also when cancelled, or until the transfer is given up."""
        # Two ends, and two futures: `_answered` for the caller, `_returned` for the buffer.
        while not self._answered.done():
            try:
                await asyncio.wait([self._answered])
            except asyncio.CancelledError:
                self._is_cancelled = True
        # The slot's owner must learn that the device has the buffer yet, cancelled or not.
        # A cancellation is raised only when the device has let go; given up, the failure is raised, for it
        # carries `returned`.
        if self._is_cancelled and not self.is_given_up:
            raise asyncio.CancelledError
        if self._failure is not None:
            raise self._failure

    def do(self, begin: int, end: int) -> None:
        """See Job."""
        failure = None
        # After the first failure the other pieces are only counted.
        if not self._is_cancelled and self._failure is None:
            try:
                self._piece(begin, end)
            except BaseException as error:  # noqa: BLE001  # raised where the transfer is waited for
                failure = error
        self._end(failure)

    def skip(self) -> None:
        """See Job."""
        self._end(None)

    def give_up(self, failure: TierFailure) -> None:
        """See Job."""
        with self._lock:
            # Everything is back already: the answer is on its way.
            if not self._left or self.is_given_up:
                return
            self.is_given_up = True
            failure.returned = self._returned
            # An earlier failure says less: its transfer may be answered only when the device has let go.
            self._failure = failure
        if not self._answered.done():
            self._answered.set_result(None)

    def _end(self, failure: BaseException | None) -> None:
        with self._lock:
            self._failure = self._failure or failure
            self._left -= 1
            is_last = not self._left
        # The last piece, from any thread: one wake-up of the loop for all of them.
        if is_last:
            # No caller waits any more when the loop is closed.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._let_go)

    def _let_go(self) -> None:
        self._returned.set_result(None)
        # The caller was answered before where the transfer was given up.
        if not self._answered.done():
            self._answered.set_result(None)
