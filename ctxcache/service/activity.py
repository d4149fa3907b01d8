"""Activity: what goes on, for operators who look now and again. Reads, changes nothing.

Takes a time that grows with tenants and methods, not with sessions or segments.
"""

from collections.abc import Iterator
from heapq import nlargest

from ctxcache.cache import Cache
from ctxcache.cache.state import EMPTY, HIT
from ctxcache.service import convert
from ctxcache.service.admission import CANCELLED, OK, Admissions, RpcTimes
from ctxcache.v1.operations_pb2 import Activity, MethodActivity, SessionActivity, TenantActivity

SECOND_NS = 10**9
LONG_LEASE_S = 60


def activity(cache: Cache, admissions: Admissions, times: RpcTimes, limit: int) -> Activity:
    """At most `limit` sessions and as many tenants."""
    state, reading = cache.state, cache.leases
    counts = state.journal.counts
    # A session without tokens was found as its creator left it.
    hit_count = sum(count for (_, result), count in counts.items() if result in (HIT, EMPTY))
    budget, dirty_limit = reading.pins, cache.ledger.watermarks.dirty_limit
    answer = Activity(
        time=convert.timestamp(state.clock.wall_ns()),
        is_ready=not admissions.calls.is_draining,
        methods=[*_methods(times), *_operations(cache)],
        sessions=_sessions(cache, limit),
        tenants=_tenants(cache, limit),
        leased_bytes=budget.used_bytes,
        leased_limit_bytes=budget.limit_bytes,
        dirty_limit_bytes=int(dirty_limit * cache.ledger.memory.capacity_bytes),
        hit_count=hit_count,
        miss_count=counts.total() - hit_count,
        refused_rpc_count=sum(
            one.when_full.count + one.when_draining.count for one in admissions.by_sort().values()
        ),
        problems=_problems(cache, admissions),
    )
    if reading.lease_count:
        answer.oldest_lease_age.FromNanoseconds(int(reading.oldest_lease_s * SECOND_NS))
    since_ns = cache.ledger.unwritten.oldest_ns()
    if since_ns is not None:
        answer.oldest_dirty_age.FromNanoseconds(max(state.clock.monotonic_ns() - since_ns, 0))
    return answer


def _methods(times: RpcTimes) -> Iterator[MethodActivity]:
    for method, timer in times:
        histograms = timer.by_end.values()
        if histograms:
            bounds = next(iter(histograms)).bounds
            yield MethodActivity(
                method=method,
                count=sum(histogram.count for histogram in histograms),
                # A caller that went away is no failure of the server's.
                failed_count=sum(h.count for end, h in timer.by_end.items() if end not in (OK, CANCELLED)),
                total_seconds=sum(histogram.total for histogram in histograms),
                bounds_seconds=bounds,
                bucket_counts=[
                    sum(column)
                    for column in zip(*(histogram.counts for histogram in histograms), strict=True)
                ],
            )


def _operations(cache: Cache) -> Iterator[MethodActivity]:
    operations = cache.state.seen.operations
    for kind in sorted({kind for kind, _ in operations}):
        ends = {end: count for (one, end), count in operations.items() if one == kind}
        count = sum(ends.values())
        yield MethodActivity(method=f"local/{kind}", count=count, failed_count=count - ends.get(OK, 0))


def _sessions(cache: Cache, limit: int) -> Iterator[SessionActivity]:
    # Few are counted, see `Busiest`: no walk over all sessions is needed.
    for uid, count in cache.ledger.busiest.first(limit):
        session = cache.ledger.get(uid)
        if session is not None:
            view = session.view()
            yield SessionActivity(
                name=session.name,
                tenant=session.tenant,
                access_count=count,
                token_count=view.token_count,
                dram_bytes=view.memory_bytes,
                ssd_bytes=view.durable_bytes,
            )


def _tenants(cache: Cache, limit: int) -> Iterator[TenantActivity]:
    ledger = cache.ledger
    for tenant, count in nlargest(limit, ledger.accesses_by_tenant.items(), key=lambda item: item[1]):
        use = ledger.usage.of(tenant)
        yield TenantActivity(
            tenant=tenant,
            access_count=count,
            session_count=len(ledger.names.ids(tenant)),
            dram_bytes=use.memory_bytes,
            ssd_bytes=use.durable_bytes,
        )


def _problems(cache: Cache, admissions: Admissions) -> Iterator[str]:
    for path, refusal in ((cache.ssd.paths[i], refusal) for i, refusal in cache.devices.refusals.items()):
        yield f"{path} takes no writes: {refusal}"
    if cache.ledger.below.quarantined:
        yield f"{len(cache.ledger.below.quarantined)} places on SSD gave back other bytes than were written"
    if admissions.calls.is_draining:
        yield "no new work is taken: it drains"
    ledger = cache.ledger
    if ledger.unwritten.claimed_bytes > ledger.watermarks.dirty_limit * ledger.memory.capacity_bytes:
        yield "writers wait: too much is not on SSD yet"
    if cache.leases.pins.waiting_count or cache.appends.pins.waiting_count:
        yield "readers or writers wait for room in DRAM"
    if cache.leases.oldest_lease_s > LONG_LEASE_S:
        yield f"a lease is held for {cache.leases.oldest_lease_s:.0f} s: `ctxcache lease list` says whose"
