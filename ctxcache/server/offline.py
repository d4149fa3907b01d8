"""Verifying a data directory that no server holds: the server's own parts, without rpcs.

Worst case: a server holds it, or it cannot be opened, which is refused as `serve` would refuse it.
"""

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing

from ctxcache.cache import Cache
from ctxcache.cache.scrubbing import Scrubbed
from ctxcache.core.ledger.expiry import Expiration
from ctxcache.core.placement.recency import LeastRecentlyUsed
from ctxcache.errors import DataDirectoryUnusable
from ctxcache.runtime.store_clock import StoreClock
from ctxcache.settings.config import Settings
from ctxcache.storage.data_directory import check_not_restoring
from ctxcache.storage.opening import open_storage, ssd_directories_of
from ctxcache.storage.ssd_directories import check_not_orphaned

ARENA_BYTES = 1 << 20
"""Nothing is brought into it."""


async def verify_directory(settings: Settings, *, bytes_per_second: int) -> AsyncGenerator[Scrubbed, None]:
    """Verify everything, as the server's Verify does. Raises as `Server.start` and `Scrubbing.run` do.

    Nothing is created where nothing is.
    """
    check_not_restoring(settings.data_directory)
    check_not_orphaned(settings.data_directory, ssd_directories_of(settings))
    if not (settings.data_directory / "FORMAT").exists():
        problem = "there is no data directory to verify"
        raise DataDirectoryUnusable(path=str(settings.data_directory), problem=problem)
    with ExitStack() as files:
        small = settings.model_copy(update={"arena_size_bytes": ARENA_BYTES, "arena_huge_pages": "off"})
        storage = open_storage(small, files)
        cache = Cache(
            arena=storage.arena, ssd=storage.ssd, metadata=storage.metadata, clock=StoreClock.open(storage.directory.path),
            policy=LeastRecentlyUsed(), default_expiration=Expiration(int(settings.default_ttl_s * 10**9)),
            crash_count=storage.directory.crash_count,
        )  # fmt: skip
        await cache.open()
        async with aclosing(cache.scrubbing.run(bytes_per_second=bytes_per_second)) as reports:
            async for report in reports:
                yield report
        await cache.close()
