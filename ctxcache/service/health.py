"""Health: grpc.health.v1, whether the server takes work. Owned by the event loop.

Where writes alone are refused, what writes is not serving, and reads are. A change waits for no watcher: each
is told the newest when it takes something. Worst case: a watcher that takes nothing, which keeps one message.
"""

import asyncio
from collections.abc import Callable, Iterable

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer

from ctxcache.service.callers import Context

LOOK_INTERVAL_S = 0.5
"""How soon a watcher hears that writes are refused."""
READS, WRITES = "ctxcache.v1.reads", "ctxcache.v1.writes"
"""Names beside those of services."""
WRITING = frozenset(
    ("", WRITES, "ctxcache.v1.SessionService", "ctxcache.v1.ModelService", "ctxcache.v1.ArenaService")
)
"""What is not serving while writes are refused."""
PROBLEM_KEY = "ctxcache-problem"


class Health(HealthServicer):
    """Serves nothing at first."""

    def __init__(self, services: Iterable[str], problem_of_writes: Callable[[], str]) -> None:
        """`services`: whose health is told, beside the server's.

        `problem_of_writes`: empty while they are taken.
        """
        self._names = frozenset(("", READS, WRITES, *services))
        self._problem_of_writes = problem_of_writes
        self._is_serving = False
        self._changed = asyncio.Event()

    def tell(self, *, is_serving: bool) -> None:
        """Whether it takes work."""
        self._is_serving = is_serving
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch_writes(self) -> None:
        """Let watchers hear of writes; ends by cancellation."""
        told = ""
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            problem = self._problem_of_writes()
            if bool(problem) != bool(told):
                self.tell(is_serving=self._is_serving)
            told = problem

    async def Check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:  # noqa: N802
        """See grpc.health.v1."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        if request.service in WRITING and (problem := self._problem_of_writes()):
            context.set_trailing_metadata(((PROBLEM_KEY, problem.encode("ascii", "replace").decode()),))
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
        is_refused = service in WRITING and self._problem_of_writes()
        is_serving = self._is_serving and not is_refused
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
        )
