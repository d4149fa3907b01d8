"""Progress: how far one session's saves are. State of the board, which says who may touch it when."""

from collections.abc import Sequence
from dataclasses import dataclass

from ctxcache.errors import CacheError
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.v1.session_pb2 import DURABILITY_MEMORY, Durability
from gpu_worker.saving.lane import Lane
from gpu_worker.saving.slices import Run
from gpu_worker.saving.staging import Frame

Part = tuple[Frame, Run]
"""A session's rows of one pass."""


class Progress:
    """A session that is being saved: what of it is in staging, who works on it, what stopped it."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.name = lane.session.name
        self.token_count = lane.session.token_count
        """Where its next row belongs: everything before it is in the store, in staging or under way."""
        self.parts: list[Part] = []
        self.failure: CacheError | None = None
        """Why it takes no more rows."""
        self.durability: Durability.ValueType = DURABILITY_MEMORY
        self.is_finished = False
        """No more rows come."""
        self.is_closed = False
        """Finished, and all that was to be done for it is done."""
        self.is_due = False
        self.is_busy = False
        self.is_hurried = False
        """What is in staging goes next, however little it is."""

    @property
    def has_work(self) -> bool:
        """Whether a thread would find something to do."""
        return bool(self.parts) or (self.is_finished and not self.is_closed)

    @property
    def is_ripe(self) -> bool:
        """Whether it is time: rows reach the end of a segment, or somebody waits for them."""
        waiting = sum(len(run) for _, run in self.parts)
        begin = self.token_count - waiting
        return (
            self.is_finished
            or self.is_hurried
            or self.token_count // SEGMENT_TOKENS > begin // SEGMENT_TOKENS
        )

    @property
    def is_under_way(self) -> bool:
        """Whether rows are not in the store yet that may come to be there."""
        return bool(self.parts) or self.is_busy

    def add(self, frame: Frame, run: Run) -> None:
        """Rows of a pass are its next tokens."""
        self.parts.append((frame, run))
        frame.holder_count += 1
        self.token_count += len(run)

    def take(self) -> list[Part]:
        """Hand over what is in staging; it stays there until `let_go`."""
        parts, self.parts = self.parts, []
        self.is_hurried = False
        return parts

    def let_go(self, parts: Sequence[Part]) -> int:
        """Staging may have these rows back; how many they are."""
        for frame, _ in parts:
            frame.holder_count -= 1
        return sum(len(run) for _, run in parts)


@dataclass(frozen=True, slots=True)
class Job:
    """What one thread has of a session, alone until it is settled. `is_last`: nothing comes behind it."""

    progress: Progress
    parts: Sequence[Part]
    is_last: bool
