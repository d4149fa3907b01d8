"""Health: grpc.health.v1, whether the server takes work, told to whoever asks or watches. Owned by the event loop.

A change waits for no watcher: each is told the newest when it takes something. Worst case: a watcher that takes
nothing, which keeps one message.
"""

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from ctxcache.service.rpc import Context


class Health(HealthServicer):
    """Serves nothing at first."""

    def __init__(self, services: Iterable[str]) -> None:
        """`services`: whose health is told, beside the server's."""
        self._names = frozenset(("", *services))
        self._is_serving = False
        self._changed = asyncio.Event()

    def tell(self, *, is_serving: bool) -> None:
        """Whether it takes work."""
        self._is_serving = is_serving
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:  # noqa: N802
        """See grpc.health.v1."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return self._answer(request.service)

    async def Watch(self, request: HealthCheckRequest, context: Context) -> None:  # noqa: N802
        """See grpc.health.v1; it ends with the client, or with the server."""
        told = None
        while True:
            changed, answer = self._changed, self._answer(request.service)
            if answer != told:
                await context.write(answer)
                told = answer
            await changed.wait()

    def _answer(self, service: str) -> HealthCheckResponse:
        if service not in self._names:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if self._is_serving else HealthCheckResponse.NOT_SERVING
        )
