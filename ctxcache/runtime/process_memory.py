"""Memory that the system refuses to this process: by a bound on its address space (RLIMIT_AS, `ulimit -v`), or else.

gRPC's C core and RocksDB end the process when an allocation is refused, without a sentence: a bound that
is too low is refused before they are loaded. Worst case: a higher one is reached by one of them, which
ends the process like a kill, and what was durable is there after the next start.
"""

import errno
import resource

from ctxcache.errors import CapacityExceeded, TooManyRequests

NEEDED_BYTES = 4 << 30
"""Beside the arena: libraries, and what 64 threads' stacks and heaps reserve; little of it is ever used."""
_NO_THREAD = "can't start new thread"


def check_address_space(arena_size_bytes: int) -> None:
    """Raise CapacityExceeded when the bound leaves a server no room."""
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    needed_bytes = NEEDED_BYTES + arena_size_bytes
    if limit_bytes != resource.RLIM_INFINITY and limit_bytes < needed_bytes:
        raise CapacityExceeded(
            tier="address space (RLIMIT_AS)",
            needed_bytes=needed_bytes, free_bytes=limit_bytes, limit_bytes=limit_bytes,
        )  # fmt: skip


def refused_memory(error: BaseException) -> TooManyRequests | None:
    """What a caller is told of an error that means refused memory, a thread's included; None for any other."""
    is_no_thread = isinstance(error, RuntimeError) and str(error) == _NO_THREAD
    is_no_mapping = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if not (isinstance(error, MemoryError) or is_no_thread or is_no_mapping):
        return None
    return TooManyRequests(what="memory of the server's process", limit="what the system gives it")
