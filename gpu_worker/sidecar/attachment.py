"""An attachment: one engine's model and memory, and what is under way for it.

Owned by the event loop. Worst case: an engine that goes while restores run for it; its memory stays mapped
until they have ended.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ctxcache.errors import CacheError, InvalidArgument
from ctxcache.format.streams import Stream
from gpu_worker.parallel.ranks import Ranks
from gpu_worker.pipeline.target import PagedTarget
from gpu_worker.sidecar.cache_layout import CacheLayout
from gpu_worker.sidecar.errors import BlockInUse, RestoreAlreadyExists
from gpu_worker.sidecar.regions import Regions
from gpu_worker.sidecar.running import Running
from gpu_worker.sidecar.strided import overlap

if TYPE_CHECKING:
    from gpu_worker.sidecar.model import AttachedModel


@dataclass(slots=True, eq=False)
class Attachment:
    """One engine."""

    attachment_id: str
    engine: str
    model: "AttachedModel"
    layout: CacheLayout
    memory: Regions
    save_area: Regions | None
    evicted: "asyncio.Future[CacheError]"
    """Why the worker ended it; not done while it lasts."""
    ranks: Ranks | None = None
    """The engine's other ranks; None where it has all of the model."""
    running: dict[str, Running] = field(default_factory=dict)
    threads: "set[asyncio.Future[None]]" = field(default_factory=set)
    """The ends of threads that use the memory, those of restores that are over for the engine too."""
    used_s: float = field(default_factory=time.monotonic)
    """When it was last asked to restore or to save, or attached: of the monotonic clock."""
    is_closed: bool = False
    """Whether its memory was let go of."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are mapped for it."""
        return self.memory.size_bytes + (self.save_area.size_bytes if self.save_area else 0)

    def shares_memory(self, other: "Attachment") -> bool:
        """Whether a byte of its keys and values may be one of another's."""
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
        for other_id, other in self.running.items():
            if shared := running.block_ids & other.block_ids:
                raise BlockInUse(block_id=min(shared), restore_id=other_id)
        self.running[restore_id] = running
        self.threads.add(running.ended)
        running.ended.add_done_callback(self.threads.discard)

    def over(self, restore_id: str, running: Running) -> None:
        """Nothing is written for a restore any more: its name and blocks are free."""
        if self.running.get(restore_id) is running:
            del self.running[restore_id]

    async def end_all(self, error: CacheError) -> None:
        """End what is under way, and wait until nobody uses the memory any more."""
        for running in list(self.running.values()):
            running.stop(error)
        await asyncio.gather(*self.threads)

    def close(self) -> None:
        """Let go of the memory."""
        self.memory.close()
        if self.save_area is not None:
            self.save_area.close()

    def rows_in_save_area(self, stream: Stream, offset: int, size_bytes: int) -> Tensor:
        """Bytes of the save area. Raises InvalidArgument."""
        if self.save_area is None:
            raise InvalidArgument(field="attachment_id", problem="was attached without a save area")
        self.save_area.check()
        if not 0 <= offset <= self.save_area.size_bytes - size_bytes:
            problem = f"{stream}: bytes [{offset}, {offset + size_bytes}) are not within the save area"
            raise InvalidArgument(field="streams", problem=problem)
        return self.save_area.bytes_of(0)[offset : offset + size_bytes]


class BlocksTarget(PagedTarget):
    """Blocks of an attached cache, restored from some token on."""

    def __init__(
        self, layers: Sequence[tuple[Tensor, Tensor]], slots: Tensor, *,
        begin: int, windows: Sequence[int | None],
    ) -> None:  # fmt: skip
        super().__init__(layers, slots, windows=windows)
        self._begin = begin

    def first_token(self, layer: int) -> int:
        """See Target: those before are in the engine's cache already."""
        return max(self._begin, super().first_token(layer))


def slots_of(block_ids: Sequence[int], block_tokens: int, token_end: int) -> Tensor:
    """Where tokens [0, token_end) go: [T] int64, block * block_tokens + row."""
    starts = torch.tensor(block_ids, dtype=torch.int64) * block_tokens
    return (starts[:, None] + torch.arange(block_tokens)).flatten()[:token_end]
