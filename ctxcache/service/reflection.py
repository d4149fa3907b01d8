"""Reflection: which services there are, by grpc.reflection.v1 and v1alpha, which are one protocol.

Worst case: a request for what is not known, which is answered with NOT_FOUND within the stream.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import (
    DESCRIPTOR,
    ErrorResponse,
    ServerReflectionRequest,
    ServerReflectionResponse,
)

from ctxcache.service.callers import Context

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
                # What the pool says of a number or a name that no descriptor can have.
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
