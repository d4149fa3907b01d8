"""Listed: the few sessions and engines that the status page names, of all that there are.

Looks at SESSIONS_LIMIT sessions at most, the newest ones, SLICE before others have their turn. Worst case:
sessions that come and go meanwhile, of which some are left out.
"""

import asyncio
import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from ctxcache.cache import Cache
from ctxcache.core.ledger.session import Session

SHOWN = 20
SESSIONS_LIMIT = 1 << 16
SLICE = 256


@dataclass(frozen=True, slots=True)
class Listed:
    """A session. `heat`: accesses, half as much for every ten minutes since."""

    tenant: str
    session_id: str
    model: str
    tokens: int
    heat: float
    idle_s: float
    dram_bytes: int
    ssd_bytes: int
    is_durable: bool


@dataclass(frozen=True, slots=True)
class Sessions:
    """Those used most these minutes, and those that take most."""

    hottest: tuple[Listed, ...]
    largest: tuple[Listed, ...]
    seen_count: int


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's queue; lost: it has not come back yet."""

    tenant: str
    name: str
    job_count: int
    is_lost: bool


async def listed_sessions(cache: Cache) -> Sessions:
    """Look through the sessions, taking turns with everybody else."""
    now_ns = cache.state.clock.now_ns()
    hottest: list[tuple[float, int, Session]] = []
    largest: list[tuple[float, int, Session]] = []
    sessions = cache.ledger.newest(SESSIONS_LIMIT)
    for begin in range(0, len(sessions), SLICE):
        for i, session in enumerate(sessions[begin : begin + SLICE], begin):
            # What forks share counts for each of them, as what it takes to read it does.
            _keep(largest, (session.size_bytes, i, session))
            _keep(hottest, (session.heat_at(now_ns), i, session))
        await asyncio.sleep(0)
    return Sessions(_listed(hottest, now_ns), _listed(largest, now_ns), len(sessions))


def _keep(kept: list[tuple[float, int, Session]], found: tuple[float, int, Session]) -> None:
    if len(kept) < SHOWN:
        heapq.heappush(kept, found)
    elif found[0] > kept[0][0]:
        heapq.heapreplace(kept, found)


def _listed(kept: Iterable[tuple[float, int, Session]], now_ns: int) -> tuple[Listed, ...]:
    found = (session for size, _, session in sorted(kept, key=lambda k: (-k[0], k[1])) if size > 0)
    return tuple(_facts(session, now_ns) for session in found if not session.is_gone)


def _facts(session: Session, now_ns: int) -> Listed:
    amounts = session.amounts()
    return Listed(
        session.tenant, session.session_id, session.model_id, session.token_count, session.heat_at(now_ns),
        max(now_ns - session.access_time_ns, 0) / 10**9, amounts.memory_bytes, amounts.durable_bytes,
        session.durable_token_count == session.token_count,
    )  # fmt: skip


def listed_engines(cache: Cache) -> tuple[Engine, ...]:
    """Those with most jobs."""
    queues = cache.queues
    found = (
        Engine(queue.tenant, queue.engine, queues.job_count(queue), queue.lost_until_ns is not None)
        for queue in queues.by_name().values()
    )
    return tuple(heapq.nlargest(SHOWN, found, key=lambda engine: engine.job_count))
