"""The RPC edge: admission, and every error turned into a status with its reason. Never lets one through.

Wraps all four kinds of rpc. Health and reflection pass untouched: they answer also when draining.
"""

import asyncio
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
KEPT_OPEN = ("/ctxcache.v1.ArenaService/Access",)


class Admission:
    """How many rpcs of one sort run, and whether new ones are taken. Owned by the event loop."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self._limit = limit
        self._running = 0
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Take no more."""
        self._draining.set()

    async def drained(self) -> None:
        """Wait until no more are taken."""
        await self._draining.wait()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Count one rpc while it runs. Raises Draining, TooManyRequests."""
        if self._draining.is_set():
            raise Draining
        if self._running >= self._limit:
            raise TooManyRequests(what=self._what, limit=self._limit)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


class Edge(grpc.aio.ServerInterceptor):
    """Puts admission and error mapping around each of our rpcs.

    Streams that local clients keep open are counted apart: they must not use up the room for calls.
    """

    def __init__(self, calls: Admission, kept_open: Admission) -> None:
        self._calls = calls
        self._kept_open = kept_open

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(OWN_SERVICES):
            return handler
        is_kept_open = handler_call_details.method in KEPT_OPEN
        return self._wrap(handler, self._kept_open if is_kept_open else self._calls)

    def _wrap(self, handler: Any, admission: Admission) -> Handler:  # grpc's handlers are untyped tuples
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._single(handler.unary_unary, admission), *codecs)
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                self._single(handler.stream_unary, admission), *codecs
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._many(handler.unary_stream, admission), *codecs)
        return grpc.stream_stream_rpc_method_handler(self._many(handler.stream_stream, admission), *codecs)

    def _single(
        self, behaviour: Callable[..., Awaitable[Any]], admission: Admission
    ) -> Callable[..., Awaitable[Any]]:
        async def call(request: object, context: Context) -> Any:
            try:
                with admission.enter():
                    return await behaviour(request, context)
            except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
                await _abort(context, error)

        return call

    def _many(
        self, behaviour: Callable[..., AsyncIterator[Any]], admission: Admission
    ) -> Callable[..., AsyncIterator[Any]]:
        async def call(request: object, context: Context) -> AsyncIterator[Any]:
            try:
                with admission.enter():
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
