"""Threads for blocking calls, all of them begun at once.

Whoever starts a thread waits until it says that it runs. One that finds no memory dies before that, and
the event loop would wait for it for ever: so none is begun later, in service. Worst case: a start that fails.
"""

import threading
from concurrent.futures import ThreadPoolExecutor


def started_pool(count: int, name: str) -> ThreadPoolExecutor:
    """A pool whose `count` threads run. Raises RuntimeError when they cannot be had."""
    pool = ThreadPoolExecutor(count, name)
    all_run = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(all_run.wait)
    except BaseException:
        all_run.abort()
        pool.shutdown()
        raise
    all_run.wait()
    return pool
