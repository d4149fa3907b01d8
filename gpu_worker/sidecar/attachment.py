"""An attachment: one engine's model and memory, and the restores under way for it.

```
   attached ──► serving ── its stream ends, or another engine takes the name ──► ending ──► closed
                  │                                     restores come to rest ────┘  memory unmapped
                  ▼
   a restore:   BEGUN ────── write ──────► WRITING ─────────────────────────────► ENDED
                  └─ stopped: nothing is      └─ stopped: cancelled; its blocks are invalid,
                     written, ever               and ENDED is when the pipeline is at rest
```

A `RestoreControl` is asked by the restore's thread and by the event loop; everything else is the event
loop's. Worst case: an engine that goes while restores run for it, or a store that does not answer. The
stream hears of the end at once; the memory stays mapped until the threads have ended.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ctxcache.errors import CacheError, InvalidArgument
from ctxcache.format.streams import Stream
from gpu_worker.errors import RestoreTooLate
from gpu_worker.parallel.ranks import EngineRanks
from gpu_worker.pipeline.lane import Deadline
from gpu_worker.pipeline.target import PagedTarget
from gpu_worker.sidecar.cache_layout import CacheLayout, overlap
from gpu_worker.sidecar.errors import BlockInUse, RestoreAlreadyExists
from gpu_worker.sidecar.regions import Regions


class RestoreControl:
    """One restore. Thread-safe."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self._lock = threading.Lock()
        self._error: CacheError | None = None
        self._cancel: Callable[[], None] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether anything may have been written."""
        return self._cancel is not None

    def check(self) -> None:
        """Raise the error with which the restore has ended, or RestoreTooLate."""
        if self._error is not None:
            raise self._error
        self.deadline.check("the restore")

    def write(self, begin: Callable[[], Callable[[], None]]) -> None:
        """Begin to write, unless the restore has ended. `begin` returns how to cancel. Raises as `check`."""
        # Checking and beginning are one step: an end that comes between them would find nothing to cancel.
        with self._lock:
            self.check()
            self._cancel = begin()

    def end(self, error: CacheError | None = None) -> bool:
        """End the restore.

        True: nothing was written, and nothing will be. Else the restore is cancelled, and ends by itself.
        """
        with self._lock:
            if self._cancel is None:
                self._error = self._error or error or RestoreTooLate(what="the session")
                return True
        self._cancel()
        return False


@dataclass(frozen=True, slots=True)
class End:
    """The end of a restore: whole, or why not."""

    error: CacheError | None


class Running:
    """One restore under way: its events, and its end."""

    def __init__(self, control: RestoreControl, block_ids: Sequence[int]) -> None:
        self.control = control
        self.block_ids = frozenset(block_ids)
        """The blocks that the restore may write to."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the restore's thread has ended."""
        # Without a bound of its own: an event for each layer, and one for the end.
        self._events: asyncio.Queue[int | End] = asyncio.Queue()

    def layer(self, layer: int) -> None:
        """A layer is usable."""
        self._events.put_nowait(layer)

    def over(self, error: CacheError | None) -> None:
        """The restore's thread has ended; nothing is written any more."""
        # Frames are cleared before the error is told, since it may then be kept for long.
        _forget_frames(error)
        self._events.put_nowait(End(error))
        self.ended.set_result(None)

    def stop(self, error: CacheError) -> bool:
        """End the restore.

        True: nothing was written, nor will be. Else the restore is cancelled, and `ended` tells of its end.
        """
        # The restore writes: its pipeline is cancelled, and its thread tells the end when lanes are at rest.
        if not self.control.end(error):
            return False
        self._events.put_nowait(End(error))
        return True

    async def next(self) -> int | End:
        """The next layer, or the end. The restore ends if neither comes by the deadline."""
        try:
            async with asyncio.timeout(self.control.deadline.left_s):
                return await self._events.get()
        except TimeoutError:
            # Once the restore writes, the pipeline ends it by the deadline, and says so when it is at rest.
            self.stop(RestoreTooLate(what="the session"))
            return await self._events.get()


def _forget_frames(error: BaseException | None) -> None:
    """Clear an error's frames: they refer to the engine's memory, which could not be unmapped."""
    while error is not None:
        clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


if TYPE_CHECKING:
    from gpu_worker.sidecar.model import AttachedModel


@dataclass(slots=True, eq=False)
class Attachment:
    """One attached engine."""

    attachment_id: str
    engine: str
    model: "AttachedModel"
    layout: CacheLayout
    memory: Regions
    save_area: Regions | None
    evicted: "asyncio.Future[CacheError]"
    """Why the worker ended the attachment; not done while it lasts."""
    ranks: EngineRanks | None = None
    """The engine's other ranks; None where it has all of the model."""
    running: dict[str, Running] = field(default_factory=dict)
    threads: "set[asyncio.Future[None]]" = field(default_factory=set)
    """Ends of threads that use the memory. A restore that is over for the engine may still have one."""
    used_s: float = field(default_factory=time.monotonic)
    """When the engine last attached, restored or saved, by the monotonic clock."""
    is_closed: bool = False
    """Whether its memory was unmapped."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the engine's memory that are mapped."""
        return self.memory.size_bytes + (self.save_area.size_bytes if self.save_area else 0)

    def shares_memory(self, other: "Attachment") -> bool:
        """Whether a byte of its keys and values may be one of another's."""
        # Exports of VMM memory have no identity: two exports may be the same memory, and count as such.
        if self.memory.kin & other.memory.kin:
            return True
        mine, theirs = (list(each.memory.covered(each.layout)) for each in (self, other))
        return any(
            identity == their_identity and overlap(box, their_box)
            for identity, box in mine
            for their_identity, their_box in theirs
        )

    def begin(self, restore_id: str, running: Running) -> None:
        """Take a restore on. Raises RestoreAlreadyExists, BlockInUse."""
        if restore_id in self.running:
            raise RestoreAlreadyExists(restore_id=restore_id)
        # Other engines' blocks are in other memory (`shares_memory`).
        for other_id, other in self.running.items():
            if shared := running.block_ids & other.block_ids:
                raise BlockInUse(block_id=min(shared), restore_id=other_id)
        self.running[restore_id] = running
        # `running` forgets a restore when nothing is written for it, `threads` when its thread has ended.
        self.threads.add(running.ended)
        running.ended.add_done_callback(self.threads.discard)

    def over(self, restore_id: str, running: Running) -> None:
        """Nothing is written for a restore any more: its name and blocks are free."""
        if self.running.get(restore_id) is running:
            del self.running[restore_id]

    async def end_all(self, error: CacheError) -> None:
        """End the restores under way, and wait until no thread uses the memory any more."""
        for running in list(self.running.values()):
            running.stop(error)
        # Cancelled restores have threads too: unmapping under a thread that writes would kill the process.
        await asyncio.gather(*self.threads)

    def close(self) -> None:
        """Unmap the memory."""
        self.memory.close()
        if self.save_area is not None:
            self.save_area.close()

    def rows_in_save_area(self, stream: Stream, offset: int, size_bytes: int) -> Tensor:
        """Bytes of the save area. Raises InvalidArgument."""
        if self.save_area is None:
            raise InvalidArgument(field="attachment_id", problem="was attached without a save area")
        # Checked before each use: an engine may have shrunk its shared memory, and a touch is then SIGBUS.
        self.save_area.check()
        if not 0 <= offset <= self.save_area.size_bytes - size_bytes:
            problem = f"{stream}: bytes [{offset}, {offset + size_bytes}) are not within the save area"
            raise InvalidArgument(field="streams", problem=problem)
        return self.save_area.bytes_of(0)[offset : offset + size_bytes]


class BlocksTarget(PagedTarget):
    """Blocks of an attached cache, restored from some token on."""

    def __init__(
        self,
        layers: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        *,
        begin: int,
        windows: Sequence[int | None],
    ) -> None:
        super().__init__(layers, slots, windows=windows)
        self._begin = begin

    def first_token(self, layer: int) -> int:
        """See Target: tokens before `begin` are in the engine's cache already."""
        return max(self._begin, super().first_token(layer))


def slots_of(block_ids: Sequence[int], block_tokens: int, token_end: int) -> Tensor:
    """Where tokens [0, token_end) go: [T] int64, block * block_tokens + row."""
    # block_ids [7, 2], blocks of 4, 6 tokens:  [28 29 30 31 | 8 9 10 11] cut to 6 slots.
    starts = torch.tensor(block_ids, dtype=torch.int64) * block_tokens
    return (starts[:, None] + torch.arange(block_tokens)).flatten()[:token_end]
