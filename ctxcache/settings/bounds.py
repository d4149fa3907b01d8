"""Bounds: what settings say of how much there may be, as the facts that the cache is given. Pure."""

from ctxcache.core.limits import Limits, QueueLimits, Watermarks
from ctxcache.settings.config import Settings


def limits_of(settings: Settings, *, are_divided: bool) -> Limits:
    """Limits of everything but queues. `are_divided`: no tenant may take all of a count."""
    return Limits(
        session_count=settings.max_sessions,
        lease_count=settings.max_leases,
        lease_share=settings.lease_share,
        reservation_share=settings.reservation_share,
        client_share=settings.client_share,
        retention_share=settings.retention_share,
        pin_share=settings.pin_share,
        retention_ns=int(settings.max_retention_s * 10**9),
        room_wait_ns=int(settings.room_wait_s * 10**9),
        scrub_bytes_per_s=settings.scrub_bytes_per_s,
        are_divided=are_divided,
    )


def queue_limits_of(settings: Settings, *, are_divided: bool) -> QueueLimits:
    """Limits of engines' queues."""
    return QueueLimits(
        engine_count=settings.max_engines,
        job_count=settings.max_engine_jobs,
        grace_ns=int(settings.engine_grace_s * 10**9),
        are_divided=are_divided,
    )


def watermarks_of(settings: Settings) -> Watermarks:
    """Watermarks of the arena."""
    return Watermarks(
        low=settings.dram_low_watermark,
        high=settings.dram_high_watermark,
        dirty=settings.dirty_watermark,
        dirty_limit=settings.dirty_limit,
        tail_age_ns=int(settings.tail_age_s * 10**9),
        write_behind_bytes_per_s=settings.write_behind_bytes_per_s,
    )
