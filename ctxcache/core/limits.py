"""Limits: how much of everything the cache takes on at a time. Watermarks: how full the arena is kept.

Facts and comparisons only. `cache/` asks them and acts.
"""

from dataclasses import dataclass

SECOND_NS = 10**9
OWN_PER_FREE = 2
"""A tenant may have at most so many times what it leaves free.

Alone 2/3 of all, N at a time 2/(2N+1) each.
"""


@dataclass(frozen=True, slots=True)
class Bound:
    """The most there may be of something at a time.

    `is_divided`: no tenant may take so many that none is left.
    """

    limit: int
    is_divided: bool = False

    def is_reached(self, taken: int, own: int) -> bool:
        """Whether one more is too many for somebody who has `own` of the `taken`."""
        free = self.limit - taken
        return free <= 0 or (self.is_divided and own >= OWN_PER_FREE * free)


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, and shares of the arena in (0, 1]. What goes beyond is refused, with a delay to retry after.

    `model_stream_count`: streams of all models together; each takes some hundred bytes. `lease_share`,
    `reservation_share`: of the arena's bytes that all readers, or all writers, may keep from being evicted;
    `client_share`: that one local client may, as a reader and again as a writer. `fragment_count`: runs of
    tokens that truncation may leave of one session; there is no use in a retry. `retention_share`: of the
    tier below that may be retained on request, `pin_share`: of the arena that may be kept there so, both for
    `retention_ns` at most and divided among tenants by their shares. `room_wait_ns`: how long a caller waits
    for others to let go before it is refused. `are_divided`: whether one tenant's counts are bound to leave
    some for others.
    """

    session_count: int = 1 << 20
    model_count: int = 1 << 12
    model_stream_count: int = 1 << 18
    lease_count: int = 1 << 16
    fragment_count: int = 1 << 12
    lease_share: float = 0.75
    reservation_share: float = 0.75
    client_share: float = 0.5
    retention_share: float = 0.25
    pin_share: float = 0.25
    retention_ns: int = 3600 * SECOND_NS
    room_wait_ns: int = SECOND_NS // 4
    are_divided: bool = False

    def bound(self, limit: int) -> Bound:
        """One of the counts, as it is to be kept."""
        return Bound(limit, self.are_divided)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Engines that publish their queue, jobs of each, and how long those stay when its stream breaks."""

    engine_count: int = 64
    job_count: int = 4096
    grace_ns: int = 10 * SECOND_NS
    are_divided: bool = False


DEFAULT_LIMITS = Limits()
DEFAULT_QUEUE_LIMITS = QueueLimits()


# Watermarks. Shares are of the arena. `free`: bytes of no segment. `dirty`: bytes that only memory has.
# `claimed`: bytes that are dirty, or that a writer may make dirty without asking again.


@dataclass(frozen=True, slots=True)
class Watermarks:
    """The bounds between which the arena is kept.

    Once less than `low` is free, clean segments leave until `high` is. Above `dirty` rows are written behind
    at once, tails too; above `dirty_limit` writers wait, `writer_wait_s` at most, and so long does whoever
    needs room that has to be written first. A tail is written `tail_age_ns` after its first row that is not
    (0: never because of its age). `write_behind_bytes_per_s`: see Allowance.
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
