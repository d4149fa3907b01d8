"""Background: tasks that end although their caller may be gone, and turns for others in long work.

A move between tiers must not stop half-way: a device may still write to its slot. So a caller waits for a
move with `asyncio.shield`, and a cancelled caller leaves the move running. Worst case: a move that a device
never answers, for which `drain` waits.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Background:
    """The moves under way."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, move: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin a move; its failure is for whoever waits for it, and for nobody else."""
        task = asyncio.get_running_loop().create_task(move)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def drain(self) -> None:
        """Wait for every move under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, move: "asyncio.Task[Any]") -> None:
        self._tasks.discard(move)
        # Looked at, so that asyncio does not complain when whoever wanted it has stopped waiting.
        if not move.cancelled():
            move.exception()


async def in_window(moves: Iterable[Callable[[], "asyncio.Task[None]"]], count: int) -> None:
    """Start moves in order, never more than `count` under way, and raise the first failure.

    After a failure none is started any more; those under way end first. A cancellation leaves them to it.
    """
    pending: set[asyncio.Task[None]] = set()
    failure: BaseException | None = None
    waiting = iter(moves)
    while True:
        if len(pending) >= count:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            failure = _failure(done)
        # The next one is asked for when it can start: what it rests on may have changed in the meantime.
        move = next(waiting, None) if failure is None else None
        if move is None:
            break
        pending.add(move())
    if pending:
        done, _ = await asyncio.wait(pending)
        failure = failure or _failure(done)
    if failure is not None:
        raise failure


def _failure(done: Iterable["asyncio.Task[None]"]) -> BaseException | None:
    return next(filter(None, (task.exception() for task in done)), None)


class Pace(Protocol):
    """When it is time to rest."""

    @property
    def is_over(self) -> bool:
        """Whether others should have their turn now."""

    async def rest(self) -> None:
        """Let others have their turn."""


class StepByStep:
    """Rests whenever it is asked, for one turn of the loop: for work that nobody waits for."""

    is_over = True

    async def rest(self) -> None:
        """See Pace."""
        await asyncio.sleep(0)


STEP_BY_STEP = StepByStep()
