"""The RPC edge: admission, and every error turned into a status with its reason. Never lets one through.

Wraps all four kinds of rpc. Health and reflection pass untouched: they answer also when draining.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from ctxcache.errors import CacheError, Draining, InvalidArgument, TooManyRequests
from ctxcache.status import code_of, message_of, trailing_metadata

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
OWN_SERVICES = "/ctxcache."
_MAKERS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
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
        # Requests are decoded here: grpc would answer one that cannot be read with UNKNOWN.
        decode = partial(_each if handler.request_streaming else _one, handler.request_deserializer)
        is_single = not handler.response_streaming
        behaviour = (
            handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        )
        call = (_single if is_single else _many)(behaviour, decode, admission)
        make = _MAKERS[handler.request_streaming, handler.response_streaming]
        return make(call, None, handler.response_serializer)


def _single(
    behaviour: Callable[..., Awaitable[Any]], decode: Callable[..., Any], admission: Admission
) -> Callable[..., Awaitable[Any]]:
    async def call(request: object, context: Context) -> Any:
        try:
            with admission.enter():
                return await behaviour(decode(request), context)
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            await _abort(context, error)

    return call


def _many(
    behaviour: Callable[..., AsyncGenerator[Any]], decode: Callable[..., Any], admission: Admission
) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: object, context: Context) -> AsyncIterator[Any]:
        try:
            # Closed here and now when the client goes away: what the rpc holds ends with it.
            with admission.enter():
                async with aclosing(behaviour(decode(request), context)) as responses:
                    async for response in responses:
                        yield response
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            await _abort(context, error)

    return call


def _one(read: Callable[[bytes], Any], encoded: bytes) -> Any:
    try:
        return read(encoded)
    except DecodeError as error:
        raise InvalidArgument(field="request", problem="is not a message of this rpc") from error


async def _each(read: Callable[[bytes], Any], encoded: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for item in encoded:
        yield _one(read, item)


async def _abort(context: Context, error: Exception) -> None:
    known = error if isinstance(error, CacheError) else CacheError()
    if known is not error:
        log.error("internal_error", exc_info=error)
    await context.abort(code_of(known), message_of(known), trailing_metadata(known))
