"""Doors: whether the server takes work, as health says it and as rpcs meet it. Owned by the event loop.

Worst case: they are opened while the server ends, which nothing does any more.
"""

from collections.abc import Sequence

from grpc_health.v1 import health, health_pb2

from ctxcache.service.admission import Admissions


class Doors:
    """Closed at first."""

    def __init__(
        self, admissions: Admissions, health_service: health.aio.HealthServicer, services: Sequence[str]
    ) -> None:
        """`services`: whose health is told, beside the server's."""
        self.admissions = admissions
        self._health, self._services = health_service, services
        self._is_over = False

    async def open(self) -> None:
        """Take work."""
        if not self._is_over:
            for admission in self.admissions.of_clients:
                admission.resume()
            await self._tell(health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """Take no more of clients; operators are answered."""
        await self._tell(health_pb2.HealthCheckResponse.NOT_SERVING)
        for admission in self.admissions.of_clients:
            admission.drain()

    async def close_for_good(self) -> None:
        """Take no more of anybody."""
        self._is_over = True
        await self._tell(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.admissions.drain()

    async def _tell(self, status: int) -> None:
        for service in ("", *self._services):
            await self._health.set(service, status)
