"""Watermarks: when rows are written behind, when room is made, and when writers wait. Decisions only.

Shares are of the arena. `free` is what no segment has; `dirty` is what only memory has; `claimed` is
what is dirty, or may become so without asking again.
"""

from dataclasses import dataclass

SECOND_NS = 10**9


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The bounds between which the arena is kept.

    Once less than `low` is free, clean segments leave until `high` is. Above `dirty` rows are written
    behind at once, tails too; above `dirty_limit` writers wait, `writer_wait_s` at most, and so long
    does whoever needs room that has to be written first. A tail is written `tail_age_ns` after its first row that is not (0: never because of its age).
    `write_behind_bytes_per_s`: see Allowance.
    """

    low: float = 1 / 16
    high: float = 1 / 8
    dirty: float = 0.25
    dirty_limit: float = 0.75
    tail_age_ns: int = 30 * SECOND_NS
    write_behind_bytes_per_s: int = 0
    writer_wait_s: float = 5

    def is_low(self, free_bytes: int, capacity_bytes: int) -> bool:
        """Whether so little is free that clean segments have to leave."""
        return free_bytes < self.low * capacity_bytes

    def filled_bytes(self, capacity_bytes: int) -> int:
        """What segments may take while as much is free as shall be."""
        return capacity_bytes - int(self.high * capacity_bytes)

    def missing_bytes(self, free_bytes: int, capacity_bytes: int) -> int:
        """What has to leave until enough is free again; not positive when enough is."""
        return int(self.high * capacity_bytes) - free_bytes

    def excess_dirty_bytes(self, dirty_bytes: int, capacity_bytes: int) -> int:
        """What has to be written at once; not positive when nothing has to."""
        return dirty_bytes - int(self.dirty * capacity_bytes)

    def limit_bytes(self, capacity_bytes: int) -> int:
        """The most that may be claimed."""
        return int(self.dirty_limit * capacity_bytes)

    def admits(self, needed_bytes: int, claimed_bytes: int, own_bytes: int, capacity_bytes: int) -> bool:
        """Whether a writer may claim so much more. What is larger than the bound goes when it is alone.

        `own_bytes` of `claimed_bytes` are the writer's own.
        """
        is_alone = claimed_bytes <= own_bytes
        return is_alone or claimed_bytes + needed_bytes <= self.limit_bytes(capacity_bytes)


DEFAULT_WATERMARKS = Watermarks()


class Allowance:
    """How many bytes may be written behind: so many per second, saved up for one second at most.

    Something is written whole or not at all, so what is spent may be more than there is; then nothing
    is written until it is made up for. 0 bytes per second: no bound.
    """

    def __init__(self, bytes_per_s: int, now_ns: int) -> None:
        self.bytes_per_s = bytes_per_s
        self._balance_bytes = float(bytes_per_s)
        self._then_ns = now_ns

    def is_left(self, now_ns: int) -> bool:
        """Whether anything may be written now."""
        earned = (now_ns - self._then_ns) * self.bytes_per_s / SECOND_NS
        self._balance_bytes = min(self._balance_bytes + earned, self.bytes_per_s)
        self._then_ns = now_ns
        return not self.bytes_per_s or self._balance_bytes > 0

    def spend(self, size_bytes: int) -> None:
        """So much is written."""
        self._balance_bytes -= size_bytes
