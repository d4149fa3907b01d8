"""AdminService."""

from collections.abc import Sequence
from dataclasses import dataclass

from ctxcache.cache import Cache
from ctxcache.service import convert, validate
from ctxcache.service.edge import Context
from ctxcache.service.tenant import tenant_of
from ctxcache.v1 import admin_pb2, admin_pb2_grpc, session_pb2


@dataclass(frozen=True, slots=True)
class About:
    """What the server knows of itself."""

    version: str
    start_time_ns: int
    data_directory: str
    listen_addresses: tuple[str, ...]


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """See proto/ctxcache/v1/admin.proto."""

    def __init__(self, cache: Cache, about: About) -> None:
        self._cache = cache
        self._about = about

    async def GetStats(self, request: admin_pb2.GetStatsRequest, context: Context) -> admin_pb2.Stats:  # noqa: ARG002, N802
        """See the proto."""
        state, counters = self._cache.state, self._cache.state.counters
        return admin_pb2.Stats(
            version=self._about.version,
            start_time=convert.timestamp(self._about.start_time_ns),
            data_directory=self._about.data_directory,
            listen_addresses=self._about.listen_addresses,
            session_count=len(state.sessions),
            model_count=len(state.models),
            segment_count=len(state.segments),
            lease_count=self._cache.reading.lease_count,
            reservation_count=self._cache.writing.reservation_count,
            tiers=self._tiers(),
            **{name: getattr(counters, name) for name in counters.__slots__},
        )

    async def DemoteSession(  # noqa: N802
        self, request: admin_pb2.DemoteSessionRequest, context: Context
    ) -> session_pb2.Session:
        """See the proto."""
        view = await self._cache.sessions.demote(tenant_of(context), validate.session_id(request.name))
        return convert.session_message(view)

    def _tiers(self) -> list[admin_pb2.TierStats]:
        cache, segments = self._cache, self._cache.state.segments.values()
        dram = [0 for s in segments if s.dram]
        ssd = [s.ssd.path_index for s in segments if s.ssd]
        return [
            *_tier(session_pb2.TIER_DRAM, cache.arena.paths, cache.arena.capacities_bytes,
                   cache.residency.dram.used_bytes_by_path, dram),
            *_tier(session_pb2.TIER_SSD, cache.ssd.paths, cache.ssd.capacities_bytes,
                   cache.residency.ssd.used_bytes_by_path, ssd),
        ]  # fmt: skip


def _tier(
    tier: session_pb2.Tier.ValueType,
    paths: Sequence[str],
    capacities: Sequence[int],
    used: Sequence[int],
    segment_paths: Sequence[int],
) -> list[admin_pb2.TierStats]:
    return [
        admin_pb2.TierStats(
            tier=tier,
            path=path,
            capacity_bytes=capacity,
            used_bytes=used_bytes,
            segment_count=segment_paths.count(index),
        )
        for index, (path, capacity, used_bytes) in enumerate(zip(paths, capacities, used, strict=True))
    ]
