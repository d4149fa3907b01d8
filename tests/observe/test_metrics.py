"""Metrics: what is in the table is exposed, and says what has happened."""

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from observed import fetch, fleet_of_one, load, observed, value, values_of
from service_rig import GrpcWay

from ctxcache.observe.exposition import OTHER, TENANTS_SHOWN, shown_tenants
from ctxcache.observe.metric import MetricKind
from ctxcache.observe.table import METRICS, TABLE
from ctxcache.settings.knobs import KNOBS
from ctxcache.v1 import arena_pb2

ONLY_WHEN_IT_FAILS = {"ctxcache_upkeep_failures_total"}
"""Labels that nobody can list ahead: no sample before it happens."""
WITHOUT_A_METRIC = {
    *("listen", "unix_socket", "control_socket", "bulk_listen", "trace_endpoint", "arena_directory"),
    *("tls_certificate", "tls_key", "tls_client_ca", "insecure_listen", "identities", "token_hashes"),
    *("metrics_tls_certificate", "metrics_tls_key", "metrics_token_file", "status_names"),
    *("arena_huge_pages", "arena_sealed", "rebuild_metadata", "fault_injection"),
    *("fleet_secret_file", "fleet_address", "fleet_server_name", "fleet_token_file", "fleet_beat_s"),
    *("log_level", "log_format", "trace_ratio", "max_retention_s", "prefill_tokens_per_s"),
}
"""Settings whose right value no figure tells."""
ONLY_WITH_A_LIMIT = {"ctxcache_tenant_limit_bytes"}


async def test_every_metric_of_the_table_is_exposed_and_no_other(tmp_path: Path) -> None:
    """After some load each has a sample, with the labels and the type that the table says."""
    fleet = fleet_of_one(tmp_path)
    async with observed(tmp_path, tenant_shares="default=0.5:0.9", **fleet) as (server, client, clock):
        await load(client, clock)
        await client.get("s23")
        values = await values_of(server)
        _, text = await fetch(server, "/metrics")

    found = set()
    for metric in METRICS.values():
        names = (
            [f"{metric.name}{end}" for end in ("_bucket", "_sum", "_count")]
            if metric.kind is MetricKind.HISTOGRAM
            else [metric.name]
        )
        found |= set(names)
        assert f"# TYPE {metric.name} {metric.kind.value}\n" in text
        if metric.name not in ONLY_WHEN_IT_FAILS:
            labels = {name for sample in values[names[-1]] for name, _ in sample}
            assert labels == set(metric.labels), metric.name
    assert set(values) <= found


async def test_hits_and_misses_are_told_apart(tmp_path: Path) -> None:
    """Tokens count in the tier in which they lay, and every miss has its reason."""
    async with observed(tmp_path) as (server, client, clock):
        await load(client, clock)
        values = await values_of(server)

    assert value(values, "ctxcache_read_tokens_total", tier="ssd") >= 130
    assert value(values, "ctxcache_read_tokens_total", tier="dram") >= 130
    lookups = {
        dict(labels)["result"]: count
        for labels, count in values["ctxcache_accesses_total"].items()
        if ("by", "lookup") in labels
    }
    evicted = value(values, "ctxcache_ended_sessions_total", cause="evicted")
    assert evicted > 0
    assert lookups["evicted"] == evicted
    assert lookups["expired"] == lookups["never_stored"] == lookups["fingerprint_mismatch"] == 1
    assert lookups["hit"] == 24 - evicted


async def test_a_session_that_was_evicted_and_comes_back_is_regretted(tmp_path: Path) -> None:
    """Its tokens are counted, and the time that it was gone."""
    async with observed(tmp_path) as (server, client, clock):
        deleted = await load(client, clock)
        missing = [i for i in range(24) if i != deleted and not await _is_there(client, f"s{i}")]
        clock.advance(seconds=100)
        await client.create(f"s{missing[0]}")
        values = await values_of(server)

    assert value(values, "ctxcache_regretted_sessions_total") == 1
    assert value(values, "ctxcache_regretted_tokens_total") == 130
    assert 100 <= value(values, "ctxcache_evict_to_reuse_seconds_sum") <= 200
    assert value(values, "ctxcache_evicted_session_idle_seconds_count") == len(missing)


async def _is_there(client: object, session_id: str) -> bool:
    try:
        await client.get(session_id)  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError:
        return False
    return True


async def test_rpcs_count_by_method_code_and_reason(tmp_path: Path) -> None:
    """Also those that are refused before they are decoded."""
    async with observed(tmp_path, max_concurrent_rpcs=1) as (server, client, _):
        await client.create("one")
        assert not await _is_there(client, "two")
        server.admissions.calls.running_count += 1
        with pytest.raises(grpc.aio.AioRpcError):
            await client.get("one")
        server.admissions.calls.running_count -= 1
        values = await values_of(server)

    of_get = {"method": "SessionService/GetSession", "code": "NOT_FOUND", "reason": "SESSION_NOT_FOUND"}
    assert value(values, "ctxcache_rpc_seconds_count", **of_get) == 1
    assert value(values, "ctxcache_rpc_seconds_bucket", **of_get, le="+Inf") == 1
    assert value(values, "ctxcache_refused_rpcs_total", sort="calls", reason="TOO_MANY_REQUESTS") == 1


async def test_a_stall_of_the_event_loop_is_seen(tmp_path: Path) -> None:
    """A stall counts by the time for which it keeps the loop from its timers."""
    async with observed(tmp_path) as (server, _, _):
        time.sleep(0.4)  # noqa: ASYNC251  # the very thing
        await asyncio.sleep(0)
        values = await values_of(server)

    total = value(values, "ctxcache_event_loop_lag_seconds_count")
    assert value(values, "ctxcache_event_loop_lag_seconds_bucket", le="0.1") < total


async def test_the_lease_that_is_held_longest_is_seen(tmp_path: Path) -> None:
    """Its age is told while it is held, and counted when it ends."""
    async with observed(tmp_path) as (server, client, clock):
        await client.create("one")
        await client.append("one", 1, 0, 64)
        way = GrpcWay(client.arena.Access())
        acquire = arena_pb2.AcquireLease(session="sessions/one", model_fingerprint=client.fingerprint)
        held = await way.one(acquire_lease=acquire)
        clock.advance(seconds=30)
        values = await values_of(server)
        assert value(values, "ctxcache_leases") == 1
        assert value(values, "ctxcache_oldest_lease_seconds") == 30
        await way.one(release_lease=arena_pb2.ReleaseLease(lease_id=held.lease.lease_id))
        values = await values_of(server)
        way.die()

    assert value(values, "ctxcache_oldest_lease_seconds") == 0
    assert value(values, "ctxcache_lease_seconds_sum") == 30
    assert value(values, "ctxcache_local_operations_total", operation="acquire_lease", end="OK") == 1


def test_tenants_beyond_the_bound_are_not_shown_by_name() -> None:
    """Those with a share are, then those that have most."""
    names = {f"t{i:04}" for i in range(300)}
    kept = {name: int(name[1:]) for name in names}

    shown = shown_tenants(names, kept, {"t0000"})

    assert len(shown) == TENANTS_SHOWN
    assert {"t0000", "t0299"} <= shown
    assert "t0001" not in shown
    assert OTHER not in shown


def test_the_table_has_no_name_twice_and_every_metric_says_what_to_do() -> None:
    """Counters end in _total, seconds and bytes are in the name."""
    metrics = [metric for group in TABLE for metric in group.metrics]

    assert len(METRICS) == len(metrics)
    for metric in metrics:
        assert metric.meaning.endswith(".")
        assert metric.when_bad.endswith((".", "?"))
        assert metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER)
        if metric.kind is MetricKind.HISTOGRAM:
            assert metric.name.endswith(f"_{metric.unit}")


def test_every_setting_has_advice_and_a_metric_that_is_there() -> None:
    """Which tells whether its value is right. Addresses, files and operators' choices have no such metric."""
    assert {knob.name for knob in KNOBS.values() if not knob.advice} == set()
    assert {knob.name for knob in KNOBS.values() if not knob.watch} == WITHOUT_A_METRIC
    assert {knob.watch for knob in KNOBS.values()} - {""} <= set(METRICS)
