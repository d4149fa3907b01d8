"""A server's life in its process, from start to signal; and a directory verified without a server.

Worst case: the signal comes while the server starts, or the end takes too long. Either way the caller ends
the process, and the next start finds what was durable. `verify_directory` refuses what `serve` would refuse.
"""

import asyncio
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing

from ctxcache.cache import Cache
from ctxcache.cache.scrubbing import Scrubbed
from ctxcache.core.ledger.session import Expiration
from ctxcache.core.ledger.work import at_work
from ctxcache.core.placement.baselines import LeastRecentlyUsed
from ctxcache.errors import DataDirectoryUnusable
from ctxcache.runtime.clock import StoreClock
from ctxcache.server.server import Server
from ctxcache.settings.config import Settings
from ctxcache.storage.data_directory import check_not_restoring
from ctxcache.storage.opening import open_untouched, ssd_directories_of
from ctxcache.storage.ssd_directories import check_not_orphaned
from ctxcache.storage.tiers.shared_memory import unlink_all

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a server."""


async def serve(
    settings: Settings,
    on_ready: Callable[[Server], None],
    on_overdue: Callable[[Server], None],
    on_early_end: Callable[[], None],
    read_again: Callable[[], Settings],
) -> None:
    """Run until SIGTERM or SIGINT; at SIGHUP take over what `read_again` finds.

    Raises as `Server.start`, `Server.until` and `Server.stop` do.

    A SIGHUP that comes before it is ready is obeyed when it is. `on_early_end` ends the process: it is called
    when the signal comes while data are opened, loaded or made anew. No client was answered by then, and a
    start may be cut off anywhere; it may take long, and cannot be interrupted otherwise. `on_overdue` ends
    the process: it is called, in a thread of its own, when the end has taken as long as settings allow.
    Nothing else would: a device that hangs never answers those who wait for it.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    # A signal, by when it comes:
    #
    #     while data are opened or loaded   `end_start`: the process ends at once, from the handler
    #     later                             `ended` is set: what runs is finished, and all is flushed
    #     the end takes too long            `on_overdue`, in a timer's thread: the loop may hang for good
    def end_start(*_: object) -> None:
        # Names of shared memory outlive the process: nobody else would remove them.
        unlink_all()
        on_early_end()

    # From here on the loop handles them: what is being served is finished first.
    def end_in_order() -> None:
        for number in SIGNALS:
            loop.add_signal_handler(number, ended.set)

    for number in SIGNALS:
        # The loop's handler is set for its wakeup descriptor, to which Python writes for any signal. One that
        # comes right before the loop waits would be noticed only when something else wakes it.
        loop.add_signal_handler(number, end_start)
        signal.signal(number, end_start)
    # By itself it would end a process that opens its data, or makes them anew.
    is_asked = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: is_asked.set())
    server = await Server.start(settings, on_loaded=end_in_order, read_again=read_again)
    loop.add_signal_handler(signal.SIGHUP, server.reload_or_log)
    if is_asked.is_set():
        server.reload_or_log()
    try:
        on_ready(server)
        await server.until(ended)
    finally:
        # A thread, not a timer of the loop: what hangs may be the loop.
        limit = threading.Timer(settings.drain_timeout_s + settings.flush_timeout_s, on_overdue, (server,))
        limit.daemon = True
        limit.start()
        try:
            await server.stop()
        finally:
            limit.cancel()


# -- a data directory that no server holds -----------------------------------------------------------

ARENA_BYTES = 1 << 20
"""Nothing is brought into it."""


async def verify_directory(settings: Settings, *, bytes_per_second: int) -> AsyncGenerator[Scrubbed, None]:
    """Verify everything, as the server's Verify does. Raises as `Server.start` and `Scrubbing.run` do.

    Nothing is changed: sessions end before what is bad, as a server has it, for as long as this looks.
    """
    # Before anything is locked: a missing directory is not created.
    check_not_restoring(settings.data_directory)
    check_not_orphaned(settings.data_directory, ssd_directories_of(settings))
    if not (settings.data_directory / "FORMAT").exists():
        problem = "there is no data directory to verify"
        raise DataDirectoryUnusable(path=str(settings.data_directory), problem=problem)
    with ExitStack() as files:
        small = settings.model_copy(update={"arena_size_bytes": ARENA_BYTES, "arena_huge_pages": "off"})
        storage = open_untouched(small, files)
        cache = Cache(
            arena=storage.arena,
            ssd=storage.ssd,
            metadata=storage.metadata,
            clock=StoreClock.open(storage.directory.path),
            policy=LeastRecentlyUsed(),
            default_expiration=Expiration(int(settings.default_ttl_s * 10**9)),
            crash_count=storage.directory.crash_count,
        )
        await at_work(cache.open())
        async with aclosing(cache.scrubbing.run(bytes_per_second=bytes_per_second)) as reports:
            # Each step is a work of its own: its caller may take every step in another task.
            while (report := await at_work(anext(reports, None))) is not None:
                yield report
        await at_work(cache.close())
