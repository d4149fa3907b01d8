"""The worker's process: listens for engines, and at the end closes everything in the reverse order.

Order of the end: health says no, nothing new is taken, restores and saves under way end by a deadline,
engines' streams end, sockets are removed. Worst case: another worker listens at the path, and this one does
not start.
"""

import asyncio
import fcntl
import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path

import grpc
import torch
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ctxcache.client.client import connect
from ctxcache.client.credentials import ClientTls
from ctxcache.errors import AddressUnusable, Draining, InvalidConfiguration
from ctxcache.observe.tracing import open_spans
from ctxcache.runtime.spans import NO_SPANS, Spans
from gpu_worker.direct.storage import DirectStorage
from gpu_worker.errors import LaneStuck
from gpu_worker.sidecar.attachments import Attachments
from gpu_worker.sidecar.edge import WorkerEdge
from gpu_worker.sidecar.handles.host import DescriptorSocket
from gpu_worker.sidecar.metrics import MetricsGuard, MetricsServer, WorkerCollector
from gpu_worker.sidecar.model import AttachedModels
from gpu_worker.sidecar.regions import Opener
from gpu_worker.sidecar.restoring import Pipelines
from gpu_worker.sidecar.service import WorkerService
from gpu_worker.sidecar.settings import MIB, WorkerSettings
from gpu_worker.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
STREAMS_END_S = 2.0
"""How long engines' streams have to be told of the end."""
OPTIONS = (("grpc.max_concurrent_streams", 1024),)


class Worker:
    """A running worker. Use `start`, then `stop`."""

    def __init__(
        self, settings: WorkerSettings, on_stuck: Callable[[LaneStuck], None], *, spans: Spans = NO_SPANS
    ) -> None:
        self.settings = settings
        # The life of a worker, and the end in reverse:
        #
        #     start   metrics ─ lock on the path ─ descriptor socket ─ gRPC ─ health: SERVING
        #     stop    health: NOT_SERVING ─ take no more ─ wait ─ engines' streams end ─ gRPC
        #             ─ sockets ─ threads ─ pipelines ─ arena ─ store ─ lock
        #
        # Engines' memory is unmapped in `settle`, when their threads are at rest; lanes end only then.
        self._files = ExitStack()
        device = _device(settings.device)
        self._client = connect(
            settings.store,
            timeout_s=settings.store_timeout_s,
            tls=ClientTls.of(
                settings.store_ca, settings.store_certificate, settings.store_key, settings.store_server_name
            ),
            token_file=settings.store_token_file,
        )
        self._pipelines = Pipelines(device, settings.ring_mib * MIB)
        self._descriptors = DescriptorSocket(str(settings.descriptor_socket))
        models = AttachedModels(device, settings.directory)
        self._attachments = Attachments(settings, self._client, models, Opener(device, self._descriptors))
        self._direct = DirectStorage(self._client, device, settings.direct)
        self._service = WorkerService(
            settings, self._client, self._direct, self._pipelines, self._attachments, on_stuck, spans=spans
        )
        self._metrics: MetricsServer | None = None
        self._health = health.aio.HealthServicer()
        self._grpc = grpc.aio.server(interceptors=[WorkerEdge(spans)], options=OPTIONS)

    @property
    def metrics_address(self) -> str:
        """Where metrics are served, `host:port`; empty where they are not."""
        return self._metrics.address if self._metrics else ""

    @property
    def direct_path(self) -> str:
        """How what lies on SSD is read."""
        return self._direct.live.path

    async def start(self) -> None:
        """Listen. Raises AddressUnusable, InvalidConfiguration."""
        if self.settings.metrics_listen:
            guard = MetricsGuard(
                self.settings.metrics_tls_certificate,
                self.settings.metrics_tls_key,
                self.settings.metrics_token_file,
            )
            self._metrics = MetricsServer(self.settings.metrics_listen, self._collector(), guard)
        path = self.settings.socket
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.enter_context(_Claimed(path))
            self._descriptors.open()
            self._grpc.add_insecure_port(f"unix:{path}")
        except (OSError, RuntimeError) as error:
            await self._descriptors.close()
            self._files.close()
            self._stop_metrics()
            problem = getattr(error, "strerror", None) or str(error)
            raise AddressUnusable(address=f"unix:{path}", problem=problem) from error
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._service, self._grpc)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc
        )
        await self._grpc.start()
        # gRPC makes the socket's file by the umask.
        path.chmod(0o600)
        await self._say_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        """Finish what runs by the deadline, end the rest, close."""
        await self._say_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        rooms = (self._service.restores, self._service.saves)
        for room in (*rooms, self._attachments.room):
            room.drain()
        # Restores that have not ended by then are cancelled below, and their blocks are named as invalid.
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await asyncio.gather(*(room.empty() for room in rooms))
        await asyncio.gather(*(self._attachments.evict(each, Draining()) for each in self._attachments))
        await self._attachments.settle()
        await self._grpc.stop(STREAMS_END_S)
        await self._descriptors.close()
        self._service.close()
        self._pipelines.close()
        self._direct.close()
        self._client.close()
        self._files.close()
        self._stop_metrics()

    def _collector(self) -> WorkerCollector:
        rooms = (
            ("restores", self._service.restores),
            ("saves", self._service.saves),
            ("attachments", self._attachments.room),
        )
        return WorkerCollector(self._service.counts, rooms, self._attachments.seen, self._direct)

    def _stop_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.stop()

    async def _say_health(self, status: int) -> None:
        for service in ("", SERVICE):
            await self._health.set(service, status)


class _Claimed:
    """A claim to a socket's path, by a lock on a file beside it; removes what a dead worker left there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def __enter__(self) -> None:
        fd = os.open(
            self._path.with_name(f"{self._path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink(missing_ok=True)
        except BlockingIOError as error:
            os.close(fd)
            raise OSError(error.errno, "another worker listens there") from error
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        # The lock's file stays: if it were removed, a third worker could lock a new file of that name.
        os.close(self._fd)


async def serve(
    settings: WorkerSettings, on_ready: Callable[[str, str], None], on_stuck: Callable[[LaneStuck], None]
) -> None:
    """Run until SIGTERM or SIGINT; `on_ready` is told the metrics' address and how SSD is read.

    Raises as `Worker.start` does.
    """
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # In the loop and not in a handler: restores under way end in order.
        loop.add_signal_handler(number, ended.set)
    with ExitStack() as files:
        worker = Worker(settings, on_stuck, spans=_spans(settings, files))
        await worker.start()
        try:
            on_ready(worker.metrics_address, worker.direct_path)
            await ended.wait()
        finally:
            await worker.stop()


def _spans(settings: WorkerSettings, files: ExitStack) -> Spans:
    if not settings.trace_endpoint:
        return NO_SPANS
    spans, close = open_spans(
        settings.trace_endpoint, settings.trace_ratio, version("ctxcache"), service="ctxcache-worker"
    )
    files.callback(close)
    return spans


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        # The device is tried now: a wrong name should end the start, and not the first restore.
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidConfiguration(
            source="device", problem=f"{name}: {str(error).splitlines()[0]}"
        ) from error
    return device
