"""A restore under way, as its engine's stream hears of it. Owned by the event loop.

Worst case: a store that does not answer; the stream hears of the end at once, the thread comes to its own later.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from traceback import clear_frames

from ctxcache.errors import CacheError
from gpu_worker.errors import RestoreTooLate
from gpu_worker.sidecar.control import Control


@dataclass(frozen=True, slots=True)
class End:
    """How it ended: whole, or why not."""

    error: CacheError | None


class Running:
    """One restore: what is told of it, and who ends it."""

    def __init__(self, control: Control, block_ids: Sequence[int]) -> None:
        self.control = control
        self.block_ids = frozenset(block_ids)
        """Those that it may write to."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when its thread has ended."""
        self._events: asyncio.Queue[int | End] = asyncio.Queue()

    def layer(self, layer: int) -> None:
        """A layer is usable."""
        self._events.put_nowait(layer)

    def over(self, error: CacheError | None) -> None:
        """Its thread has ended; nothing is written any more."""
        _forget_frames(error)
        self._events.put_nowait(End(error))
        self.ended.set_result(None)

    def stop(self, error: CacheError) -> bool:
        """End it. True: nothing was written, nor will be; else it is cancelled, and `ended` says when that is so."""
        if not self.control.end(error):
            return False
        self._events.put_nowait(End(error))
        return True

    async def next(self) -> int | End:
        """The next layer, or the end. What is not there by the deadline ends it."""
        try:
            async with asyncio.timeout(self.control.deadline.left_s):
                return await self._events.get()
        except TimeoutError:
            # Once it writes, the pipeline itself ends it by its deadline, and says so when it has come to rest.
            self.stop(RestoreTooLate(what="the session"))
            return await self._events.get()


def _forget_frames(error: BaseException | None) -> None:
    """What an error has passed shows the engine's memory, which is unmapped when nothing does."""
    while error is not None:
        clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
