"""Limits: how much of everything the cache takes on at a time. Facts; who checks them is elsewhere."""

from dataclasses import dataclass

SECOND_NS = 10**9
OWN_PER_FREE = 2
"""A tenant may have at most so many times what it leaves free: alone 2/3 of all, N at a time 2/(2N+1) each."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The most there may be of something at a time. `is_divided`: no tenant may take so many that none is left."""

    limit: int
    is_divided: bool = False

    def is_reached(self, taken: int, own: int) -> bool:
        """Whether one more is too many for somebody who has `own` of the `taken`."""
        free = self.limit - taken
        return free <= 0 or (self.is_divided and own >= OWN_PER_FREE * free)


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, and shares of the arena in (0, 1]. What goes beyond is refused, with a delay to retry after.

    `model_stream_count`: streams of all models together; each takes some hundred bytes.
    `lease_share`, `reservation_share`: of the arena's bytes that all readers, or all writers, may keep
    from being evicted; `client_share`: that one local client may, as a reader and again as a writer.
    `fragment_count`: runs of tokens that truncation may leave of one session; there is no use in a retry.
    `retention_share`: of the tier below that may be retained on request, `pin_share`: of the arena that may be kept
    there so, both for `retention_ns` at most and divided among tenants by their shares.
    `room_wait_ns`: how long a caller waits for others to let go before it is refused.
    `are_divided`: whether one tenant's counts are bound to leave some for others.
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
