"""The two standard services: grpc.health.v1, and grpc.reflection.v1 with its alias v1alpha.

Owned by the event loop. Where writes alone are refused, services that write are not serving, and reads are. A
change waits for no watcher: each is told the newest state when it takes a message. Worst case: a watcher that
takes nothing, which keeps one message; a name that reflection does not know, answered with NOT_FOUND in the
stream.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import (
    DESCRIPTOR,
    ErrorResponse,
    ServerReflectionRequest,
    ServerReflectionResponse,
)

from ctxcache.service.callers import Context

LOOK_INTERVAL_S = 0.5
"""How soon a watcher hears that writes are refused."""
READS, WRITES = "ctxcache.v1.reads", "ctxcache.v1.writes"
"""Names beside those of services."""
WRITING = frozenset(
    ("", WRITES, "ctxcache.v1.SessionService", "ctxcache.v1.ModelService", "ctxcache.v1.ArenaService")
)
"""Services that are not serving while writes are refused."""
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
        # The old event wakes those that wait, and a new one is there before they wait again.
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
            # Taken before the answer is made: a change in between wakes this watcher at once.
            changed, answer = self._changed, self._answer(request.service)
            if answer != told:
                await context.write(answer)
                told = answer
            await changed.wait()

    def _answer(self, service: str) -> HealthCheckResponse:
        if service not in self._names:
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        # Reads go on while writes are refused: a balancer may send readers here.
        is_refused = service in WRITING and self._problem_of_writes()
        is_serving = self._is_serving and not is_refused
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING
        )


_OLD, _NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
SERVICE_NAMES = (f"{_NEW}.ServerReflection", f"{_OLD}.ServerReflection")


class Reflection:
    """Tells of the services named, and of itself."""

    def __init__(self, service_names: Iterable[str]) -> None:
        """`service_names`: what is listed beside it."""
        _add_new_descriptor()
        # The library's types say that it is a coroutine, and it is a generator.
        servicer: Any = reflection.aio.ReflectionServicer((*service_names, *SERVICE_NAMES))
        self._answers: Callable[..., AsyncGenerator[ServerReflectionResponse]] = servicer.ServerReflectionInfo

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it under both names."""
        handler = grpc.stream_stream_rpc_method_handler(
            self._tell,
            request_deserializer=ServerReflectionRequest.FromString,
            response_serializer=ServerReflectionResponse.SerializeToString,
        )
        handlers = {"ServerReflectionInfo": handler}
        for name in SERVICE_NAMES:
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    async def _tell(
        self, requests: AsyncIterator[ServerReflectionRequest], context: Context
    ) -> AsyncGenerator[ServerReflectionResponse]:
        async for request in requests:
            try:
                async for response in self._answers(_once(request), context):
                    yield response
            except (TypeError, ValueError) as error:
                # The pool's errors for a number or a name that no descriptor can have.
                problem = ErrorResponse(
                    error_code=grpc.StatusCode.INVALID_ARGUMENT.value[0], error_message=str(error)
                )
                yield ServerReflectionResponse(original_request=request, error_response=problem)


async def _once(request: ServerReflectionRequest) -> AsyncGenerator[ServerReflectionRequest]:
    yield request


def _add_new_descriptor() -> None:
    """Let v1's file be found: it is v1alpha's under another name."""
    file = descriptor_pb2.FileDescriptorProto()
    DESCRIPTOR.CopyToProto(file)
    text = text_format.MessageToString(file).replace("grpc_reflection/v1alpha", "grpc/reflection/v1")
    renamed = text_format.Parse(text.replace(_OLD, _NEW), descriptor_pb2.FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(renamed.SerializeToString())
