"""Watches: work that goes on for as long as the process, and that nobody waits for.

Worst case: one breaks at each try, for want of a descriptor or a thread. It is tried again each second, and
the log has a line a minute.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Before a watch that broke begins anew."""
TOLD_AGAIN_S = 60.0


async def kept_up(watch: Callable[[], Awaitable[None]]) -> None:
    """Run a watch until it ends by itself or is cancelled; one that breaks begins anew."""
    # A task that died would be noticed by nobody: neither what it no longer does, nor its error.
    tell_from_s = 0.0
    while True:
        try:
            await watch()
        except Exception:  # the supervisor
            if (now_s := time.monotonic()) >= tell_from_s:
                tell_from_s = now_s + TOLD_AGAIN_S
                log.exception("watch_broken watch=%s", watch.__qualname__)
        else:
            return
        await asyncio.sleep(PAUSE_S)
