"""The server: builds everything, listens, and at the end lets go of it in the reverse order.

Order of the end: health says no, new rpcs are refused, running ones finish by a deadline, dirty state
is flushed, files are closed.
"""

import asyncio
import contextlib
import gc
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import cast

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME

from ctxcache import __version__
from ctxcache.cache import Cache
from ctxcache.core.ledger.session import Expiration
from ctxcache.core.placement.policy import Capacities, Ranked
from ctxcache.core.placement.served import ranked_policy
from ctxcache.core.placement.shares import Shares
from ctxcache.core.placement.value import MissCost, Objective
from ctxcache.core.savings import HOUR_S, Savings
from ctxcache.errors import (
    AddressUnusable,
    CacheError,
    CorruptMetadata,
    DataDirectoryUnusable,
    InvalidConfiguration,
)
from ctxcache.fleet import Fleet
from ctxcache.fleet.opening import credentials_of, own_address, price_of, register_of, secret_of
from ctxcache.fleet.peers import PeerService
from ctxcache.observe.bearer import Bearer
from ctxcache.observe.endpoint import Endpoint
from ctxcache.observe.exposition import LoopLag, Sources, read
from ctxcache.observe.moment import Moment, Recording
from ctxcache.observe.status_page import pages_of
from ctxcache.observe.tracing import open_spans
from ctxcache.runtime.clock import Clock, StoreClock
from ctxcache.runtime.memory import give_back_unused
from ctxcache.runtime.sockets import connection_limit
from ctxcache.runtime.spans import NO_SPANS, Spans
from ctxcache.runtime.watches import kept_up
from ctxcache.server.listening import (
    Ports,
    bulk_places,
    control_path,
    metrics_place,
    targets,
)
from ctxcache.server.reload import Reloaded, Reloading
from ctxcache.server.starting import check_start
from ctxcache.server.upkeep import Lessons, Upkeep
from ctxcache.service.admin import About, AdminService, Controls
from ctxcache.service.admission import Admission, Admissions, Connections, Doors, RpcTimes
from ctxcache.service.blocks import BlockService
from ctxcache.service.bulk import BulkListener, BulkService
from ctxcache.service.callers import Identification, identified_by
from ctxcache.service.control_socket import ControlSocket
from ctxcache.service.edge import Edge
from ctxcache.service.fairness import Newcomers, Turns
from ctxcache.service.health import Health, Reflection
from ctxcache.service.hints import HintService
from ctxcache.service.local_client import ArenaService
from ctxcache.service.models import ModelService
from ctxcache.service.prefixes import PrefixService
from ctxcache.service.sessions import DECODERS, SessionService
from ctxcache.service.tls import load_tls
from ctxcache.service.whereabouts import ALONE, Whereabouts
from ctxcache.settings.config import Settings, differing, limits_of, queue_limits_of, watermarks_of
from ctxcache.storage.objects import open_objects
from ctxcache.storage.opening import Storage, open_storage, ssd_directories_of
from ctxcache.storage.rebuild import rebuild
from ctxcache.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    arena_pb2,
    arena_pb2_grpc,
    block_pb2,
    block_pb2_grpc,
    bulk_pb2,
    bulk_pb2_grpc,
    hints_pb2,
    hints_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    peer_pb2_grpc,
    prefix_pb2,
    prefix_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from ctxcache.wire.address import Address

log = logging.getLogger(__name__)

OPERATORS_LIMIT = 64
TB = 1e12
"""Operators' calls that run at a time."""
SERVICES = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    arena_pb2.DESCRIPTOR.services_by_name["ArenaService"].full_name,
    bulk_pb2.DESCRIPTOR.services_by_name["BulkService"].full_name,
    hints_pb2.DESCRIPTOR.services_by_name["HintService"].full_name,
    prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"].full_name,
    block_pb2.DESCRIPTOR.services_by_name["BlockService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)


# From nothing to serving and back. A failure on the way up closes all below it, in reverse:
#
#     up                                           down (`stop`)
#     ──────────────────────────────────────────   ─────────────────────────────────────────────────────
#     data directory locked, arena, SSD, metadata  `_files`: closed in reverse, the lock last
#     time, what the policy learned                lessons and clock kept, then RUNS clean
#     records loaded, collector frozen             everything dirty is flushed
#     addresses bound, RUNS not clean              metrics, lag and recording stopped
#     gRPC serves, doors open, upkeep begins       doors close, what runs ends by a deadline, upkeep ends
class Server:
    """A running server. Use `start`, then `stop`."""

    def __init__(
        self,
        reloading: Reloading,
        storage: Storage,
        cache: Cache,
        files: ExitStack,
        identification: Identification,
        lessons: Lessons,
    ) -> None:
        settings = reloading.settings
        self._reloading = reloading
        self.storage = storage
        self.addresses: tuple[str, ...] = ()
        self.cache = cache
        """To be looked at, not changed."""
        self._files = files
        self._savings = Savings(settings.prefill_tokens_per_s, settings.engine_cents_per_hour)
        self._identification, self._lessons = identification, lessons
        is_divided = not identification.is_open
        self.admissions = Admissions(
            Admission("concurrent rpcs", settings.max_concurrent_rpcs, is_divided=is_divided),
            Admission(
                "concurrent streams", settings.max_concurrent_streams, turns=Turns(), is_divided=is_divided
            ),
            Admission("local clients", settings.max_local_clients, is_divided=is_divided),
            # An engine that reconnects may still have a dead stream.
            Admission("engines' streams", 2 * settings.max_engines, is_divided=is_divided),
            Admission("operators' calls", OPERATORS_LIMIT),
        )
        self.fleet = _fleet(settings, cache, storage)
        self.whereabouts: Whereabouts = self.fleet or ALONE
        self._tls = load_tls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
        self._metrics_tls = load_tls(
            settings.metrics_tls_certificate, settings.metrics_tls_key, None, prefix="metrics_"
        )
        self.bulk = BulkListener(
            cache,
            self.admissions.streams,
            identification,
            connection_limit=settings.max_bulk_connections,
            tls=self._tls,
            whereabouts=self.whereabouts,
        )
        # Each health check asks for the problem: metadata that takes no changes says why.
        self._health = Health(SERVICES, lambda: storage.metadata.problem)
        self._doors = Doors(self.admissions, self._health)
        self._lag, self._rpc_times = LoopLag(), RpcTimes()
        sources = self._sources(self._rpc_times)
        self.recording = Recording(lambda: Moment(read(sources)))
        token = settings.metrics_token_file
        metrics_tls = self._metrics_tls
        self.metrics = Endpoint(
            pages_of(sources, self.recording, lambda: self.addresses),
            bearer=None if token is None else Bearer(token, source="metrics_token_file"),
            tls=None if metrics_tls is None else lambda: metrics_tls.context,
        )
        newcomers = Newcomers()
        # gRPC and local clients share one order of turns: neither way gets ahead of the other.
        self.local_turns = Turns(newcomers)
        self._edge = Edge(
            self.admissions,
            identification,
            stall_timeout_s=settings.stall_timeout_s,
            decoders=DECODERS,
            times=self._rpc_times,
            spans=cache.state.spans,
            newcomers=newcomers,
            turns=self.local_turns,
        )
        self.connections = Connections(_connection_limit(settings), settings.max_connections_per_host)
        self._ports = Ports(
            self._tls, silence_s=settings.keepalive_s, connection_limit=self.connections.limit
        )
        self._upkeep: asyncio.Task[None] | None = None
        self._watches: list[asyncio.Task[None]] = []
        path = control_path(settings)
        self._arena = _arena_message(storage, path)
        self.control = ControlSocket(
            cache,
            self._arena,
            storage.arena.read_fd,
            storage.arena.write_fd,
            self.admissions.local_clients,
            self.local_turns,
            identification,
            self.whereabouts,
        )

    @property
    def control_socket(self) -> str:
        """Path of the local clients' socket; empty where there is none."""
        return self._arena.control_socket

    @property
    def metrics_address(self) -> str:
        """The address of the metrics, `host:port`; empty where they are not served."""
        return self.metrics.address

    @property
    def bulk_addresses(self) -> tuple[str, ...]:
        """Addresses on which the bulk channel listens."""
        return self.bulk.addresses

    @classmethod
    async def start(
        cls,
        settings: Settings,
        clock: Clock | None = None,
        on_loaded: Callable[[], None] = lambda: None,
        *,
        spans: Spans | None = None,
        read_again: Callable[[], Settings] | None = None,
    ) -> "Server":
        """Open the data, load it and listen. Where settings say so, damaged metadata is made anew first.

        `on_loaded` is called before the first address is bound; `read_again` reads settings anew for
        `reload`; `spans` are told instead of whom settings name. Raises DataDirectoryUnusable, FormatTooNew,
        CorruptMetadata, InvalidConfiguration, CapacityExceeded, AddressUnusable; nothing stays open then.
        """
        try:
            return await cls._start(settings, clock, on_loaded, spans, read_again)
        except CorruptMetadata as error:
            if not settings.rebuild_metadata:
                raise
            log.error("metadata_rebuild_begins error=%s", error)  # noqa: TRY400  the sentence says all
        await asyncio.to_thread(_rebuild, settings)
        # This happens once: a rebuilt store that does not load either is beyond this.
        return await cls._start(settings, clock, on_loaded, spans, read_again)

    @classmethod
    async def _start(
        cls,
        settings: Settings,
        clock: Clock | None,
        on_loaded: Callable[[], None],
        spans: Spans | None,
        read_again: Callable[[], Settings] | None,
    ) -> "Server":
        # Tenants are told apart only where callers are. Else everybody is one tenant.
        await asyncio.to_thread(check_start, settings)
        identification = identified_by(settings.identities, settings.token_hashes)
        is_divided = not identification.is_open
        with ExitStack() as files:
            if spans is None:
                spans = _spans(settings, files)
            storage = open_storage(settings, files)
            clock = clock or StoreClock.open(storage.directory.path)
            policy = _policy(settings, storage)
            lessons = Lessons(storage.directory.path, settings.placement_policy, policy, clock.now_ns)
            files.callback(lessons.close)
            lessons.recall()
            cache = Cache(
                arena=storage.arena,
                ssd=storage.ssd,
                metadata=storage.metadata,
                clock=clock,
                policy=policy,
                default_expiration=Expiration(int(settings.default_ttl_s * 10**9)),
                crash_count=storage.directory.crash_count,
                limits=limits_of(settings, are_divided=is_divided),
                watermarks=watermarks_of(settings),
                shares=Shares(settings.tenant_shares, are_tenants_known=is_divided),
                queue_limits=queue_limits_of(settings, are_divided=is_divided),
                spans=spans,
                copies=settings.ssd_copies,
            )
            await _load(cache)
            on_loaded()
            reloading = Reloading(settings, cache, read_again or (lambda: settings))
            server = cls(reloading, storage, cache, files, identification, lessons)
            await server._listen()
            # The server closes the files from here on; before, any error does.
            server._files = files.pop_all()
        return server

    @property
    def session_count(self) -> int:
        """Sessions in the store."""
        return self.cache.ledger.session_count

    @property
    def settings(self) -> Settings:
        """The settings that hold now."""
        return self._reloading.settings

    def reload(self) -> Reloaded:
        """Read the reloadable settings and the token file again.

        Raises InvalidConfiguration.
        """
        self._identification.reload()
        return self._reloading.run()

    def reload_or_log(self) -> None:
        """As `reload`, where no caller waits for the answer."""
        try:
            self.reload()
        except InvalidConfiguration as error:
            log.error("settings_refused error=%s", error)  # noqa: TRY400  the sentence says all

    async def until(self, ended: asyncio.Event) -> None:
        """Wait until then. Raises DataDirectoryUnusable when another process has this store's place."""
        if self.fleet is None:
            await ended.wait()
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (ended, self.fleet.superseded)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if self.fleet.superseded.is_set():
            problem = "another process serves a copy of it in the same fleet: each store needs its own"
            raise DataDirectoryUnusable(path=str(self.storage.directory.path), problem=problem)

    async def stop(self) -> None:
        """Finish what runs, flush, close. Raises the first failure to flush, with everything closed."""
        with self._files:
            # The doors close first, so that a new call is told to go elsewhere instead of running into the
            # deadline.
            self._doors.close_for_good()
            patience_s = self.settings.drain_timeout_s
            await asyncio.gather(
                self._ports.server.stop(patience_s),
                self.control.stop(patience_s),
                self.bulk.drain(patience_s),
            )
            # Upkeep ends behind the last call: running calls may have waited for room that upkeep makes.
            for task in filter(None, (self._upkeep, *self._watches)):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            if self.fleet is not None:
                await self.fleet.close()
            # Dirty state has no writer any more, so that this flush writes all there is.
            try:
                await self.cache.close()
            finally:
                self._lag.stop()
                self.recording.stop()
                await self.metrics.stop()
            await self._lessons.keep()
            if isinstance(clock := self.cache.state.clock, StoreClock):
                await clock.keep()
            # This is the last of all writes: a run that fails before it counts as a crash.
            self.storage.directory.end_run()

    async def _listen(self) -> None:
        try:
            await self._open_doors()
            self._add_services()
            # Behind the addresses, which others are told, and before anybody asks for a session.
            if self.fleet is not None:
                await self.fleet.open(own_address(self.settings, self.addresses[0]))
            # From here on the server may acknowledge changes that a crash would take back.
            self.storage.directory.begin_run()
        except CacheError:
            await self.metrics.stop()
            self.bulk.close()
            await self.control.stop(0)
            if self.fleet is not None:
                await self.fleet.close()
            # Some addresses may be bound by now.
            await self._ports.give_up()
            raise
        await self._ports.server.start()
        self._lag.start()
        self.recording.start()
        # The doors open last: a health check that says yes is a promise.
        self._doors.open()
        loop = asyncio.get_running_loop()
        self._upkeep = loop.create_task(Upkeep(self.cache).run())
        watches = [
            self._identification.watch,
            self._lessons.run,
            self._health.watch_writes,
            self.connections.watch,
            give_back_unused,
            *(tls.watch for tls in (self._tls, self._metrics_tls) if tls is not None),
        ]
        if isinstance(clock := self.cache.state.clock, StoreClock):
            watches.append(clock.run)
        if self.fleet is not None:
            watches.append(self.fleet.run)
        self._watches = [loop.create_task(kept_up(watch)) for watch in watches]
        # The pages are touched in the background: a large arena takes long.
        if self.settings.arena_prefault:
            self.storage.arena.prefault()

    async def _open_doors(self) -> None:
        # TCP comes first: the port that was chosen for `:0` is the first address that is told.
        self.addresses = tuple(self._ports.bind(address) for address in targets(self.settings))
        for address in self.addresses:
            self.connections.add(address)
        if not self.addresses:
            raise InvalidConfiguration(
                source="listen", problem="neither a TCP address nor a Unix socket is set"
            )
        if self._arena.control_socket:
            await self.control.start(self._arena.control_socket)
        self.bulk.open(bulk_places(self.settings, self.addresses))
        place = metrics_place(self.settings, self.addresses)
        if place:
            await self._open_metrics(*place)

    async def _open_metrics(self, host: str, port: int) -> None:
        try:
            await self.metrics.start(host, port)
        except AddressUnusable as error:
            # The default port beside the server's may be another's, which is no reason not to serve.
            if self.settings.metrics_listen != "auto":
                raise
            log.warning("metrics_off error=%s", error)

    def _sources(self, rpc_times: RpcTimes) -> Sources:
        arena, metadata = self.storage.arena, self.storage.metadata
        return Sources(
            self.cache,
            self.admissions,
            rpc_times,
            __version__,
            self.settings.placement_policy,
            self.cache.state.clock.wall_ns() / 10**9,
            connections=lambda: self.connections,
            bulk_connection_count=lambda: self.bulk.connection_count,
            arena_prefaulted_bytes=lambda: arena.prefaulted_bytes,
            metadata_commit_count=lambda: metadata.commit_count,
            metadata_problem=lambda: metadata.problem,
            metadata_reopened_count=lambda: metadata.reopened_count,
            metadata_properties=metadata.properties,
            data_directory=str(self.storage.directory.path),
            loop_lag_s=self._lag.lag_s,
            settings=lambda: differing(self.settings),
            shows_names=self._shows_names,
            savings=self._savings,
            fleet=self.fleet.facts if self.fleet is not None else None,
        )

    def _shows_names(self) -> bool:
        """Whether the status page, which has no callers, shows names."""
        wanted = self.settings.status_names
        if wanted != "auto":
            return wanted == "on"
        address = self.metrics_address
        return self._identification.is_open and bool(address) and Address.of(address).is_loopback

    def _add_services(self) -> None:
        about = About(
            __version__,
            self.cache.state.clock.wall_ns(),
            str(self.storage.directory.path),
            self.addresses,
            lambda: self.storage.arena.prefaulted_bytes,
            self.settings.placement_policy,
            self._savings,
        )
        served = cast("grpc.aio.Server", self._edge)
        session_pb2_grpc.add_SessionServiceServicer_to_server(
            SessionService(self.cache, self.local_turns, self.whereabouts), served
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self.cache, self.local_turns), served)
        local_clients = self.admissions.local_clients
        arena_service = ArenaService(
            self.cache,
            self._arena,
            local_clients,
            self.local_turns,
            is_sealed=self.settings.arena_sealed,
            whereabouts=self.whereabouts,
        )
        arena_pb2_grpc.add_ArenaServiceServicer_to_server(arena_service, served)
        bulk_service = BulkService(self.bulk, self.cache.state.clock)
        bulk_pb2_grpc.add_BulkServiceServicer_to_server(bulk_service, served)
        hint_service = HintService(self.cache, self.admissions.engines, self.local_turns)
        hints_pb2_grpc.add_HintServiceServicer_to_server(hint_service, served)
        prefix_service = PrefixService(self.cache, self.local_turns, self.whereabouts)
        prefix_pb2_grpc.add_PrefixServiceServicer_to_server(prefix_service, served)
        block_service = BlockService(self.cache, self.local_turns, self.admissions.engines)
        block_pb2_grpc.add_BlockServiceServicer_to_server(block_service, served)
        give_up = self.fleet.give_up if self.fleet is not None else None
        counts = self.fleet.claims.counts if self.fleet is not None else None
        ended = self.fleet.ended if self.fleet is not None else None
        peer_service = PeerService(self.cache, self.bulk, self.local_turns, give_up, counts, ended)
        peer_pb2_grpc.add_PeerServiceServicer_to_server(peer_service, served)
        controls = Controls(
            self._doors,
            self._rpc_times,
            self.control.cut_off,
            self.storage.ssd.hold,
            self.storage.faults,
            self.fleet,
        )
        admin_service = AdminService(self.cache, about, self._reloading.shown, self.reload, controls)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin_service, served)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, served)
        Reflection((*SERVICES, SERVICE_NAME)).add_to(served)
        self._edge.add_to(self._ports.server)


def _connection_limit(settings: Settings) -> int:
    others = settings.max_bulk_connections + settings.max_local_clients
    return connection_limit(
        settings.max_connections, listener_count=max(len(targets(settings)), 1), others=others
    )


def _fleet(settings: Settings, cache: Cache, storage: Storage) -> Fleet | None:
    if not settings.fleet_bucket:
        return None
    tls, token = credentials_of(settings)
    return Fleet(
        cache,
        register_of(settings),
        secret_of(settings),
        bucket=settings.fleet_bucket,
        node=storage.directory.instance_id,
        beat_s=settings.fleet_beat_s,
        tls=tls,
        token=token,
        objects=open_objects(settings.fleet_bucket),
        is_sharing=settings.fleet_share in ("all", "worth"),
        share_price=price_of(settings),
        share_bytes_per_s=settings.fleet_share_bytes_per_s,
        is_telling=settings.fleet_prefixes,
        prefill_tokens_per_s=settings.prefill_tokens_per_s,
    )


async def _load(cache: Cache) -> None:
    # The collector would walk the growing heap again and again during the load, a third of the time.
    # Afterwards each full collection would stop everything for a second.
    gc.disable()
    try:
        await cache.open()
        gc.freeze()
    finally:
        gc.enable()


def miss_cost(settings: Settings) -> MissCost:
    """The cost of a miss, and of a byte that is written, by these settings."""
    # In cents: a second of the engine, and a byte.
    engine_s, written = settings.engine_cents_per_hour / HOUR_S, settings.write_cents_per_tb / TB
    return MissCost(
        Objective(settings.placement_objective),
        settings.prefill_tokens_per_s,
        # Without a price of either kind there is nothing to compare.
        write_s_per_byte=written / engine_s if engine_s else 0.0,
    )


def _policy(settings: Settings, storage: Storage) -> Ranked:
    # Segments in DRAM are on SSD too: to a policy both together hold what SSD holds.
    dram_bytes, ssd_bytes = sum(storage.arena.capacities_bytes), sum(storage.ssd.capacities_bytes)
    capacities = Capacities(dram_bytes, max(ssd_bytes - dram_bytes, 0))
    return ranked_policy(settings.placement_policy, capacities, miss_cost(settings))


def _spans(settings: Settings, files: ExitStack) -> Spans:
    if not settings.trace_endpoint:
        return NO_SPANS
    spans, close = open_spans(settings.trace_endpoint, settings.trace_ratio, __version__)
    files.callback(close)
    return spans


def _rebuild(settings: Settings) -> None:
    rebuilt = rebuild(
        settings.data_directory,
        ssd_directories_of(settings),
        created_by=f"ctxcache {__version__}",
        is_dry_run=False,
    )
    log.error("metadata_rebuilt found=%s", json.dumps(asdict(rebuilt)))


def _arena_message(storage: Storage, control_socket: str) -> arena_pb2.Arena:
    arena, ssd = storage.arena, storage.ssd
    return arena_pb2.Arena(
        arena_id=arena.arena_id,
        path=arena.shared_path,
        size_bytes=arena.capacities_bytes[0],
        control_socket=control_socket,
        page_bytes=arena.page_bytes,
        ssd_files=[
            arena_pb2.SsdFile(path=str(Path(path).absolute()), size_bytes=size_bytes)
            for path, size_bytes in zip(ssd.paths, ssd.capacities_bytes, strict=True)
        ],
    )
