"""The status page's facts, made of a moment's metrics, and the few sessions and engines that the page names.

A status is pure. The list looks at SESSIONS_LIMIT sessions at most, the newest ones, SLICE before others have
their turn. Worst case: sessions come and go meanwhile, and some are left out.
"""

import asyncio
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ctxcache.cache import Cache
from ctxcache.core.ledger.session import Session
from ctxcache.observe.alerts import HeldAlert, holding
from ctxcache.observe.moment import MINUTES, Moment, Ring, quantile

SHOWN = 20
SESSIONS_LIMIT = 1 << 16
SLICE = 256


@dataclass(frozen=True, slots=True)
class SessionLine:
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
class SessionList:
    """Those used most these minutes, and those that take most."""

    hottest: tuple[SessionLine, ...]
    largest: tuple[SessionLine, ...]
    seen_count: int


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's queue; lost: it has not come back yet."""

    tenant: str
    name: str
    job_count: int
    is_lost: bool


async def listed_sessions(cache: Cache) -> SessionList:
    """Look through the sessions, taking turns with everybody else."""
    now_ns = cache.state.clock.now_ns()
    hottest: list[tuple[float, int, Session]] = []
    largest: list[tuple[float, int, Session]] = []
    sessions = cache.ledger.newest(SESSIONS_LIMIT)
    for begin in range(0, len(sessions), SLICE):
        for i, session in enumerate(sessions[begin : begin + SLICE], begin):
            # Segments that forks share count for each of them, as their reading does.
            if session.is_hidden:
                continue
            _keep(largest, (session.size_bytes, i, session))
            _keep(hottest, (session.heat_at(now_ns), i, session))
        await asyncio.sleep(0)
    return SessionList(_listed(hottest, now_ns), _listed(largest, now_ns), len(sessions))


# The least of those kept is at the root: of most sessions one comparison is all. The number in the middle
# decides between equals, since sessions have no order.
def _keep(kept: list[tuple[float, int, Session]], found: tuple[float, int, Session]) -> None:
    if len(kept) < SHOWN:
        heapq.heappush(kept, found)
    elif found[0] > kept[0][0]:
        heapq.heapreplace(kept, found)


def _listed(kept: Iterable[tuple[float, int, Session]], now_ns: int) -> tuple[SessionLine, ...]:
    # It may have gone while others had their turn.
    found = (session for size, _, session in sorted(kept, key=lambda k: (-k[0], k[1])) if size > 0)
    return tuple(_facts(session, now_ns) for session in found if not session.is_gone)


def _facts(session: Session, now_ns: int) -> SessionLine:
    amounts = session.amounts()
    return SessionLine(
        session.tenant,
        session.session_id,
        session.model_id,
        session.token_count,
        session.heat_at(now_ns),
        max(now_ns - session.access_time_ns, 0) / 10**9,
        amounts.memory_bytes,
        amounts.durable_bytes,
        session.durable_token_count == session.token_count,
    )


def listed_engines(cache: Cache) -> tuple[Engine, ...]:
    """Those with most jobs."""
    queues = cache.queues
    found = (
        Engine(queue.tenant, queue.engine, queues.job_count(queue), queue.lost_until_ns is not None)
        for queue in queues.by_name().values()
    )
    return tuple(heapq.nlargest(SHOWN, found, key=lambda engine: engine.job_count))


TENANTS_SHOWN = 10
HIT, EMPTY = "hit", "empty"


@dataclass(frozen=True, slots=True)
class Path:
    """A path of a tier. `problem`: why it takes no writes; empty while it does.

    `problem_time_s`: since when, as Unix time; None where the problem passes by itself.
    """

    tier: str
    path: str
    state: str
    problem: str
    problem_time_s: float | None
    used_bytes: int
    capacity_bytes: int
    largest_free_bytes: int
    segment_count: int


@dataclass(frozen=True, slots=True)
class PathProblem:
    """Why a path takes no writes, and since when, as Unix time; None: it passes by itself."""

    text: str
    time_s: float | None


def problems_of_paths(cache: Cache) -> dict[str, PathProblem]:
    """Those of the SSD paths, by path."""
    return {
        cache.ssd.paths[i]: PathProblem(
            refusal.problem, None if refusal.since_ns is None else refusal.since_ns / 10**9
        )
        for i, refusal in cache.devices.refusals.items()
    }


NO_PROBLEM = PathProblem("", None)


@dataclass(frozen=True, slots=True)
class Hits:
    """The results of accesses; the tokens they were given lay in DRAM or on SSD."""

    access_count: int
    hit_count: int
    dram_token_count: int
    ssd_token_count: int
    appended_token_count: int

    @property
    def hit_share(self) -> float:
        """Hits, of all accesses."""
        return self.hit_count / self.access_count if self.access_count else 0.0

    @property
    def dram_share(self) -> float:
        """Hits in DRAM, of all accesses, by tokens read. All hits count where no token was read yet."""
        tokens = self.dram_token_count + self.ssd_token_count
        return self.hit_share * (self.dram_token_count / tokens if tokens else 1)


@dataclass(frozen=True, slots=True)
class Sharing:
    """The share of prompts found by their tokens, in the last hour; `block_count`: engines' blocks, now."""

    asked_token_count: int
    found_token_count: int
    adopted_bytes: int
    block_count: int

    @property
    def found_share(self) -> float:
        """Tokens found, of those asked for."""
        return self.found_token_count / self.asked_token_count if self.asked_token_count else 0.0


@dataclass(frozen=True, slots=True)
class Saved:
    """What engines did not have to compute, in a time: tokens of prompts, their seconds, and US dollars.

    `dollars` None: no price is set.
    """

    token_count: int
    prefill_s: float
    dollars: float | None


@dataclass(frozen=True, slots=True)
class StatusBound:
    """How much there is of what may be; `limit` 0: no bound."""

    name: str
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class BacklogStatus:
    """The bytes that SSD does not have yet."""

    dirty_bytes: int
    claimed_bytes: int
    watermark_bytes: int
    limit_bytes: int
    spared_bytes: int
    session_count: int
    flush_count: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant's sessions and bytes, and tokens computed ahead of turns; `limit_bytes` 0: none."""

    name: str
    session_count: int
    dram_bytes: int
    ssd_bytes: int
    kept_bytes: int
    limit_bytes: int
    ahead_token_count: int
    ahead_used_token_count: int


@dataclass(frozen=True, slots=True)
class Status:
    """Everything. `by_minute` ends with the minute that runs; `sessions` None: not to be shown.

    `withheld_token_count`: tokens that sessions do not show while a path is lost.
    """

    version: str
    data_directory: str
    addresses: tuple[str, ...]
    placement_policy: str
    start_time_s: float
    up_s: float
    is_ready: bool
    alerts: tuple[HeldAlert, ...]
    session_count: int
    model_count: int
    loop_lag_p99_s: float
    calls_per_s: float
    last_hour: Hits
    by_minute: tuple[Hits, ...]
    saved_last_hour: Saved
    saved_since_start: Saved
    sharing: Sharing
    misses: Mapping[str, int]
    regretted_token_count: int
    paths: tuple[Path, ...]
    withheld_session_count: int
    withheld_token_count: int
    watermarks_bytes: Mapping[str, int]
    backlog: BacklogStatus
    running: tuple[StatusBound, ...]
    engine_count: int
    job_count: int
    engines: tuple[Engine, ...] | None
    tenants: tuple[Tenant, ...]
    tenant_count: int
    sessions: SessionList | None
    settings: Mapping[str, str]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is stored, and nothing was asked for or written in the last hour."""
        hour = self.last_hour
        is_idle = not hour.access_count and not hour.appended_token_count
        return is_idle and not self.session_count and not self.sharing.block_count


def status_of(
    now: Moment,
    ring: Ring,
    *,
    now_s: float,
    data_directory: str,
    addresses: tuple[str, ...],
    path_problems: Mapping[str, PathProblem],
    promotion_count: int,
    settings: Mapping[str, str],
    sessions: SessionList | None,
    engines: tuple[Engine, ...] | None,
) -> Status:
    """The status now. `settings`: those that differ from their default."""
    ((version, policy),) = now.of("ctxcache_info")
    hour, minutes5 = ring.last(now, MINUTES), ring.last(now, 5)
    # A server that began less than five minutes ago is measured by the time since.
    start_s = now.one("ctxcache_start_time_seconds")
    up_s = max(now_s - start_s, 0)
    calls = sum(sum(value.counts) for value in minutes5.distributions("ctxcache_rpc_seconds").values())
    return Status(
        version,
        data_directory,
        addresses,
        policy,
        start_s,
        up_s,
        bool(now.one("ctxcache_ready")),
        tuple(holding(now, ring)),
        int(now.one("ctxcache_sessions")),
        int(now.one("ctxcache_models")),
        quantile(minutes5.distributions("ctxcache_event_loop_lag_seconds").values(), 0.99),
        calls / max(min(up_s, 300), 1),
        _hits(hour),
        tuple(map(_hits, ring.by_minute(now))),
        _saved(hour, has_price="engine_cents_per_hour" in settings),
        _saved(now, has_price="engine_cents_per_hour" in settings),
        Sharing(
            int(hour.one("ctxcache_prefix_asked_tokens_total")),
            int(hour.one("ctxcache_prefix_found_tokens_total")),
            int(hour.one("ctxcache_prefix_adopted_bytes_total")),
            int(now.one("ctxcache_blocks")),
        ),
        _misses(hour),
        int(hour.one("ctxcache_regretted_tokens_total")),
        tuple(_paths(now, path_problems)),
        int(now.one("ctxcache_withheld_sessions")),
        int(now.one("ctxcache_withheld_tokens")),
        {labels[0]: int(value) for labels, value in now.of("ctxcache_watermark_bytes").items()},
        _backlog(now),
        _running(now, promotion_count),
        int(now.one("ctxcache_engines")),
        int(now.one("ctxcache_waiting_jobs")),
        engines,
        _tenants(now),
        int(now.one("ctxcache_tenants")),
        sessions,
        settings,
    )


def _saved(of: Moment, *, has_price: bool) -> Saved:
    tokens = sum(of.of("ctxcache_read_tokens_total").values())
    dollars = of.one("ctxcache_saved_dollars_total") if has_price else None
    return Saved(int(tokens), of.one("ctxcache_saved_prefill_seconds_total"), dollars)


def _hits(grown: Moment) -> Hits:
    by_result: Counter[str] = Counter()
    for (_, result), value in grown.of("ctxcache_accesses_total").items():
        by_result[result] += int(value)
    tokens = "ctxcache_read_tokens_total"
    # A session without tokens is there as its creator left it: neither a hit nor a miss.
    return Hits(
        by_result.total() - by_result[EMPTY],
        by_result[HIT],
        int(grown.one(tokens, "dram")),
        int(grown.one(tokens, "ssd")),
        int(grown.one("ctxcache_appended_tokens_total")),
    )


def _misses(grown: Moment) -> Mapping[str, int]:
    counts: Counter[str] = Counter()
    for (_, result), value in grown.of("ctxcache_accesses_total").items():
        if result not in (HIT, EMPTY):
            counts[result] += int(value)
    return {reason: count for reason, count in counts.most_common() if count}


def _paths(now: Moment, problems: Mapping[str, PathProblem]) -> list[Path]:
    states = {labels[:2]: labels[2] for labels, value in now.of("ctxcache_path_state").items() if value}
    return [
        Path(
            tier,
            path,
            states.get((tier, path), "open"),
            problems.get(path, NO_PROBLEM).text,
            problems.get(path, NO_PROBLEM).time_s,
            int(now.one("ctxcache_tier_used_bytes", tier, path)),
            int(capacity),
            int(now.one("ctxcache_tier_largest_free_bytes", tier, path)),
            int(now.one("ctxcache_tier_segments", tier, path)),
        )
        for (tier, path), capacity in now.of("ctxcache_tier_capacity_bytes").items()
    ]


def _backlog(now: Moment) -> BacklogStatus:
    marks = "ctxcache_watermark_bytes"
    return BacklogStatus(
        int(now.one("ctxcache_dirty_bytes")),
        int(now.one("ctxcache_claimed_bytes")),
        int(now.one(marks, "dirty")),
        int(now.one(marks, "dirty_limit")),
        int(now.one("ctxcache_spared_bytes")),
        int(now.one("ctxcache_unwritten_sessions")),
        int(now.one("ctxcache_flushes")),
        now.one("ctxcache_flush_lag_seconds"),
    )


def _running(now: Moment, promotion_count: int) -> tuple[StatusBound, ...]:
    def calls(name: str, sort: str) -> StatusBound:
        return StatusBound(name, now.one("ctxcache_rpcs", sort), now.one("ctxcache_rpc_limit", sort))

    def pinned(name: str, by: str) -> StatusBound:
        share = now.one("ctxcache_pinned_bytes", by), now.one("ctxcache_pinned_limit_bytes", by)
        return StatusBound(name, *share)

    return (
        calls("Calls", "calls"),
        calls("Streams of rows", "streams"),
        calls("Local clients", "local_clients"),
        StatusBound("Leases", now.one("ctxcache_leases"), 0),
        pinned("Held by leases", "leases"),
        StatusBound("Reservations", now.one("ctxcache_reservations"), 0),
        pinned("Held by reservations", "reservations"),
        StatusBound("Waiting for room", sum(now.of("ctxcache_pin_waiters").values()), 0),
        StatusBound("Promotions", promotion_count, 0),
        StatusBound("Promoted ahead, not read yet", now.one("ctxcache_prefetch_waiting_segments"), 0),
        StatusBound("Oldest lease, s", now.one("ctxcache_oldest_lease_seconds"), 300),
    )


def _tenants(now: Moment) -> tuple[Tenant, ...]:
    name, limits = "ctxcache_tenant_bytes", now.of("ctxcache_tenant_limit_bytes")
    found = [
        Tenant(
            who,
            int(count),
            int(now.one(name, who, "dram")),
            int(now.one(name, who, "ssd")),
            int(now.one(name, who, "kept")),
            int(limits.get((who,), 0)),
            int(now.one("ctxcache_tenant_ahead_tokens_total", who, "computed")),
            int(now.one("ctxcache_tenant_ahead_tokens_total", who, "used")),
        )
        for (who,), count in now.of("ctxcache_tenant_sessions").items()
    ]
    found.sort(key=lambda tenant: (-tenant.kept_bytes, tenant.name))
    return tuple(found[:TENANTS_SHOWN])
