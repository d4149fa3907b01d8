"""The server: builds everything, listens, and on a signal lets go of it in the reverse order.

The only place that knows concrete tiers and stores. Order of the end: health says no, new rpcs are
refused, running ones finish by a deadline, dirty state is flushed, files are closed.
"""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ctxcache import __version__, sizes
from ctxcache.cache import Cache
from ctxcache.clock import Clock, SystemClock
from ctxcache.config import Settings
from ctxcache.core.eviction import LeastRecentlyUsed
from ctxcache.core.expiry import Expiration
from ctxcache.data_directory import DataDirectory
from ctxcache.errors import AddressUnusable, DataDirectoryUnusable, InvalidConfiguration, TierFailure
from ctxcache.format.layout import align
from ctxcache.metadata.rocksdb import RocksDbMetadata
from ctxcache.service.admin import About, AdminService
from ctxcache.service.arena import ArenaService
from ctxcache.service.edge import Admission, Edge
from ctxcache.service.models import ModelService
from ctxcache.service.sessions import SessionService
from ctxcache.tiers.dram import ARENA_FILE_NAME, DramArena, remove_abandoned
from ctxcache.tiers.ssd import FILE_NAME, SsdFiles, SsdPath
from ctxcache.upkeep import Upkeep
from ctxcache.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    arena_pb2,
    arena_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)

log = logging.getLogger(__name__)

SOCKET_PATH_LIMIT = 100
"""Longest Unix socket path, in bytes; the kernel's own limit is 107."""
MESSAGE_LIMIT_BYTES = 4 << 20
"""Largest message taken: twice the largest chunk. Times the number of rpcs, what clients can make us hold."""
# Two servers must not share a port without knowing.
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES))
SERVICES = (
    session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    arena_pb2.DESCRIPTOR.services_by_name["ArenaService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)


@dataclass(frozen=True, slots=True)
class Storage:
    """The places where bytes and records lie, open."""

    directory: DataDirectory
    arena: DramArena
    ssd: SsdFiles
    metadata: RocksDbMetadata


class Server:
    """A running server. Use `start`, then `stop`."""

    def __init__(self, settings: Settings, storage: Storage, cache: Cache, files: ExitStack) -> None:
        self.settings = settings
        self.storage = storage
        self.addresses: tuple[str, ...] = ()
        self._cache = cache
        self._files = files
        self._calls = Admission("concurrent rpcs", settings.max_concurrent_rpcs)
        self._kept_open = Admission("local clients", settings.max_local_clients)
        self._health = health.aio.HealthServicer()
        self._grpc = grpc.aio.server(interceptors=[Edge(self._calls, self._kept_open)], options=OPTIONS)
        self._upkeep: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, settings: Settings, clock: Clock | None = None) -> "Server":
        """Open the data, load it, listen.

        Raises DataDirectoryUnusable, FormatTooNew, CorruptMetadata, InvalidConfiguration,
        CapacityExceeded, AddressUnusable; nothing stays open then.
        """
        with ExitStack() as files:
            storage = _open(settings, files)
            cache = Cache(
                arena=storage.arena, ssd=storage.ssd, metadata=storage.metadata,
                clock=clock or SystemClock(), policy=LeastRecentlyUsed(),
                default_expiration=Expiration(int(settings.default_ttl_s * 10**9)),
                crash_count=storage.directory.crash_count,
            )  # fmt: skip
            await cache.open()
            server = cls(settings, storage, cache, files)
            await server._listen()
            server._files = files.pop_all()
        return server

    async def stop(self) -> None:
        """Finish what runs, flush, close. Raises the first failure to flush, with everything closed."""
        with self._files:
            for service in ("", *SERVICES):
                await self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
            self._calls.drain()
            self._kept_open.drain()
            await self._grpc.stop(self.settings.drain_timeout_s)
            if self._upkeep:
                self._upkeep.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._upkeep
            await self._cache.close()
            self.storage.directory.end_run()

    async def _listen(self) -> None:
        try:
            self.addresses = tuple(self._bind(address) for address in _targets(self.settings))
        except AddressUnusable:
            # One of two may be bound by now: grpc lets go of it at the end of a server, once it has begun.
            await self._grpc.start()
            await self._grpc.stop(None)
            raise
        if not self.addresses:
            raise InvalidConfiguration(
                source="listen", problem="neither a TCP address nor a Unix socket is set"
            )
        self._add_services()
        # From here on something may be acknowledged that a crash would take back.
        self.storage.directory.begin_run()
        await self._grpc.start()
        for service in ("", *SERVICES):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._upkeep = asyncio.get_running_loop().create_task(Upkeep(self._cache).run())

    def _bind(self, target: str) -> str:
        try:
            port = self._grpc.add_insecure_port(target)
        except RuntimeError as error:
            raise AddressUnusable(address=target, problem="it is in use or not ours to use") from error
        return target if target.startswith("unix:") else f"{target.rpartition(':')[0]}:{port}"

    def _add_services(self) -> None:
        about = About(
            __version__, self._cache.state.clock.now_ns(), str(self.storage.directory.path), self.addresses
        )
        session_pb2_grpc.add_SessionServiceServicer_to_server(SessionService(self._cache), self._grpc)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(self._cache), self._grpc)
        arena_service = ArenaService(self._cache, self.storage.arena.arena_id, self._kept_open)
        arena_pb2_grpc.add_ArenaServiceServicer_to_server(arena_service, self._grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(self._cache, about), self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._grpc)


async def serve(settings: Settings, on_ready: Callable[[Server], None]) -> None:
    """Run until SIGTERM or SIGINT. Raises as `Server.start` and `Server.stop` do."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    server = await Server.start(settings)
    try:
        on_ready(server)
        await ended.wait()
    finally:
        await server.stop()


def _open(settings: Settings, files: ExitStack) -> Storage:
    directory = DataDirectory.open(settings.data_directory, created_by=f"ctxcache {__version__}")
    files.callback(directory.close)
    metadata = RocksDbMetadata(directory.metadata_path)
    files.callback(metadata.close)
    # The arena first: what it refuses leaves no large file behind.
    for path in remove_abandoned(settings.arena_directory):
        log.warning("abandoned_arena_removed path=%s", path)
    arena_path = settings.arena_directory / ARENA_FILE_NAME.format(directory.instance_id)
    arena = DramArena(arena_path, _arena_bytes(settings))
    files.callback(arena.close)
    ssd = SsdFiles(_ssd_paths(settings))
    files.callback(ssd.close)
    return Storage(directory, arena, ssd, metadata)


def _arena_bytes(settings: Settings) -> int:
    try:
        return align(settings.arena_size_bytes) or sizes.arena_bytes(settings.arena_directory)
    except OSError as error:
        problem = f"cannot create the arena: {error.strerror}"
        raise TierFailure(path=str(settings.arena_directory), problem=problem) from error


def _ssd_paths(settings: Settings) -> list[SsdPath]:
    paths = []
    for directory in settings.ssd_directories or (settings.data_directory / "ssd",):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            size_bytes = align(settings.ssd_size_bytes) or sizes.ssd_bytes(directory, FILE_NAME)
        except OSError as error:
            raise DataDirectoryUnusable(path=str(directory), problem=error.strerror or str(error)) from error
        paths.append(SsdPath(str(directory), size_bytes))
    return paths


def _targets(settings: Settings) -> list[str]:
    targets = [settings.listen] if settings.listen else []
    path = settings.unix_socket
    if path == "auto":
        path = str(Path(settings.data_directory).absolute() / "ctxcache.sock")
        if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            log.warning("unix_socket_off path=%s reason=path_too_long", path)
            path = ""
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise AddressUnusable(
            address=f"unix:{path}", problem=f"the path is longer than {SOCKET_PATH_LIMIT} bytes"
        )
    return [*targets, f"unix:{path}"] if path else targets
