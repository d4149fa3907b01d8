"""The RPC edge: admission, and every error turned into a status with its reason. Never lets one through.

Wraps all four kinds of rpc. Health and reflection pass untouched: they answer also when draining.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc

from ctxcache.errors import CacheError, Draining, TooManyRequests
from ctxcache.status import code_of, message_of, trailing_metadata

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
OWN_SERVICES = "/ctxcache."


class Admission:
    """How many rpcs run, and whether new ones are taken. Owned by the event loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._running = 0
        self.is_draining = False

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count one rpc while it runs. Raises Draining, TooManyRequests."""
        if self.is_draining:
            raise Draining
        if self._running >= self._limit:
            raise TooManyRequests(what="concurrent rpcs", limit=self._limit)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


class Edge(grpc.aio.ServerInterceptor):
    """Puts admission and error mapping around each of our rpcs."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OWN_SERVICES):
            return handler
        return self._wrap(handler)

    def _wrap(self, handler: Any) -> Handler:  # noqa: ANN401  # grpc's handlers are untyped tuples
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._single(handler.unary_unary), *codecs)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(self._single(handler.stream_unary), *codecs)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._many(handler.unary_stream), *codecs)
        return grpc.stream_stream_rpc_method_handler(self._many(handler.stream_stream), *codecs)

    def _single(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(request: object, context: Context) -> Any:  # noqa: ANN401
            try:
                with self._admission.enter():
                    return await behaviour(request, context)
            except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
                await _abort(context, error)

        return call

    def _many(self, behaviour: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: object, context: Context) -> AsyncIterator[Any]:
            try:
                with self._admission.enter():
                    async for response in behaviour(request, context):
                        yield response
            except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
                await _abort(context, error)

        return call


async def _abort(context: Context, error: Exception) -> None:
    known = error if isinstance(error, CacheError) else CacheError()
    if known is not error:
        log.error("internal_error", exc_info=error)
    await context.abort(code_of(known), message_of(known), trailing_metadata(known))
