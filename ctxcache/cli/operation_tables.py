"""What operators see of what runs, as tables for people."""

import errno
from collections.abc import Sequence

from rich.console import RenderableType

from ctxcache.cli.tables import duration, grid, table, when
from ctxcache.cli.units import human_size
from ctxcache.v1.admin_pb2 import PathState, TierStats
from ctxcache.v1.faults_pb2 import Fault, FaultKind
from ctxcache.v1.hints_pb2 import HintOutcome, HintResult
from ctxcache.v1.operations_pb2 import DrainStatus, EngineUse, HeldLease
from ctxcache.v1.session_pb2 import Tier


def paths_table(tiers: Sequence[TierStats]) -> RenderableType:
    """Where bytes lie, one place per line."""
    rows = table("TIER", ">USED", ">CAPACITY", ">FULL", ">FRAGMENTED", ">SEGMENTS", "STATE", "PATH", "WHY")
    for tier in tiers:
        rows.add_row(
            Tier.Name(tier.tier).removeprefix("TIER_"), human_size(tier.used_bytes), human_size(tier.capacity_bytes),
            f"{tier.used_bytes / max(tier.capacity_bytes, 1):.0%}", f"{fragmented(tier):.0%}", str(tier.segment_count),
            PathState.Name(tier.state).removeprefix("PATH_STATE_").lower(), tier.path, tier.problem or "-",
        )  # fmt: skip
    return rows


def fragmented(tier: TierStats) -> float:
    """Which part of what is free is not in the largest run of it."""
    free_bytes = tier.capacity_bytes - tier.used_bytes
    return 1 - tier.largest_free_bytes / free_bytes if free_bytes > 0 else 0.0


def leases_table(leases: Sequence[HeldLease]) -> RenderableType:
    """Leases, one per line."""
    rows = table(">LEASE", "TENANT", "SESSION", "TOKENS", ">HOLDS", "READER", ">AGE", "EXPIRES")
    for lease in leases:
        rows.add_row(
            str(lease.lease_id), lease.tenant, lease.session, f"{lease.token_begin}:{lease.token_end}",
            human_size(lease.pinned_bytes), _reader(lease), duration(lease.age), _expires(lease),
        )  # fmt: skip
    return rows


def lease_grid(lease: HeldLease) -> RenderableType:
    """One lease, a line per fact."""
    return grid(
        ("lease", str(lease.lease_id)),
        ("tenant", lease.tenant),
        ("session", lease.session),
        ("tokens", f"{lease.token_begin} to {lease.token_end}, the end excluded"),
        ("holds", f"{human_size(lease.pinned_bytes)} in DRAM"),
        ("reader", _reader(lease)),
        ("age", duration(lease.age)),
        ("expires", _expires(lease)),
    )


def engines_table(engines: Sequence[EngineUse]) -> RenderableType:
    """Engines' queues, one per line."""
    rows = table("ENGINE", "TENANT", ">WAITING", ">SESSIONS", "CONNECTED")
    for engine in engines:
        connected = "yes" if engine.is_connected else "no"
        rows.add_row(
            engine.engine, engine.tenant, str(engine.waiting_count), str(engine.session_count), connected
        )
    return rows


def hints_table(results: Sequence[HintResult]) -> RenderableType:
    """What came of hints."""
    rows = table("OUTCOME", ">BYTES", "UNTIL", "WHY")
    for result in results:
        until = when(result.valid_until) if result.HasField("valid_until") else "-"
        outcome = HintOutcome.Name(result.outcome).removeprefix("HINT_OUTCOME_").lower()
        rows.add_row(outcome, human_size(result.granted_bytes), until, result.reason or "-")
    return rows


def faults_table(faults: Sequence[Fault]) -> RenderableType:
    """Faults that may strike yet, one per line."""
    rows = table(">FAULT", "KIND", "PATH", "HOW", ">TIMES", ">FOR")
    for fault in faults:
        kind = FaultKind.Name(fault.kind).removeprefix("FAULT_KIND_").lower()
        rows.add_row(
            str(fault.fault_id), kind, fault.path or "-", _how(fault), str(fault.left_count),
            duration(fault.left_duration),
        )  # fmt: skip
    return rows


def drain_line(status: DrainStatus) -> str:
    """How far a drain is, in a sentence."""
    if status.is_done:
        return f"drained: no client is left, everything is on SSD{_spared(status)}"
    left = (
        f"{status.running_rpc_count} rpcs, {status.local_client_count} local clients, {status.lease_count} leases,"
        f" {status.reservation_count} reservations, {human_size(status.dirty_bytes)} to be written"
    )
    return f"draining: {left}" + (f"; {status.problem}" if status.problem else "")


def _spared(status: DrainStatus) -> str:
    return (
        f", but {human_size(status.spared_bytes)} not worth their place there" if status.spared_bytes else ""
    )


def _how(fault: Fault) -> str:
    if fault.HasField("delay"):
        return f"{fault.delay.ToNanoseconds() / 10**9:g} s"
    return errno.errorcode.get(fault.error_number, "-")


def _reader(lease: HeldLease) -> str:
    return f"local client {lease.client}" if lease.HasField("client") else "stream"


def _expires(lease: HeldLease) -> str:
    return when(lease.expire_time) if lease.HasField("expire_time") else "on its way"
