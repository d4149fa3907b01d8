"""The RPC edge of a worker: admission, and every error turned into a status with its reason.

Wraps the worker's own rpcs; health and reflection pass untouched. Worst case: an unknown error, which is
logged and answered as INTERNAL.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from ctxcache.errors import CacheError, Draining, InvalidArgument, TooManyRequests
from ctxcache.runtime.spans import NO_SPANS, Spans
from ctxcache.wire.status import code_of, message_of, trailing_metadata

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
# One rpc through the edge:
#
#     bytes ──► decode ──► handler ──► messages ──► bytes
#       │          │          │
#       │          │          └ CacheError: its code, reason and retry advice; others: INTERNAL, and a log
#       │          └ no message: INVALID_ARGUMENT
#       └ a span around all of it, with the caller's trace
OWN_SERVICES = "/gpu_worker."


class AdmissionLimit:
    """How much of one sort is under way, and whether more is taken. Owned by the event loop."""

    def __init__(self, what: str, limit: int) -> None:
        self._what, self.limit = what, limit
        self.taken = 0
        self.refused: Counter[str] = Counter()
        """By reason."""
        self._is_draining = False
        self._emptied = asyncio.Event()
        self._emptied.set()

    def drain(self) -> None:
        """Take no more."""
        self._is_draining = True

    async def empty(self) -> None:
        """Wait until nothing is under way."""
        await self._emptied.wait()

    def take(self, count: int = 1) -> None:
        """Take `count` more. Raises Draining, TooManyRequests."""
        # Draining comes before the limit: a caller that hears TOO_MANY_REQUESTS would try again here.
        if self._is_draining:
            self.refused[Draining.reason] += 1
            raise Draining
        if self.taken + count > self.limit:
            self.refused[TooManyRequests.reason] += 1
            raise TooManyRequests(what=self._what, limit=self.limit)
        self.taken += count
        self._emptied.clear()

    def give_back(self, count: int = 1) -> None:
        """Give back what was taken."""
        self.taken -= count
        if not self.taken:
            self._emptied.set()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Take one while a block runs. Raises as `take` does."""
        self.take()
        try:
            yield
        finally:
            self.give_back()


class WorkerEdge(grpc.aio.ServerInterceptor):
    """Puts decoding, error mapping and a span around each of the worker's rpcs."""

    def __init__(self, spans: Spans = NO_SPANS) -> None:
        self._spans = spans
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """See grpc.aio.ServerInterceptor."""
        method = handler_call_details.method
        # A handler is wrapped once: grpc asks for it at every call.
        if method.startswith(OWN_SERVICES) and method not in self._wrapped:
            handler = await continuation(handler_call_details)
            if handler is not None:
                self._wrapped[method] = _wrap(handler, self._spans, method)
        return self._wrapped.get(method) or await continuation(handler_call_details)


# grpc's handlers are untyped tuples
def _wrap(handler: Any, spans: Spans, method: str) -> Handler:
    # grpc answers bytes that it cannot decode with INTERNAL and no reason: decoding is done here instead.
    read, write = handler.request_deserializer, handler.response_serializer
    if handler.unary_unary:

        async def one(encoded: bytes, context: Context) -> Any:
            async with _answered(context):
                with spans.rpc(method, context.invocation_metadata() or ()):
                    return await handler.unary_unary(_decoded(read, encoded), context)

        return grpc.unary_unary_rpc_method_handler(one, None, write)
    behaviour = handler.unary_stream or handler.stream_stream

    async def many(encoded: Any, context: Context) -> None:
        async with _answered(context):
            with spans.rpc(method, context.invocation_metadata() or ()):
                request = _each(read, encoded) if handler.request_streaming else _decoded(read, encoded)
                # The rpc is closed at once when the engine goes, and what it holds with it.
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        await context.write(response)

    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.request_streaming
        else grpc.unary_stream_rpc_method_handler
    )
    return make(many, None, write)


@asynccontextmanager
async def _answered(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.BaseError:
        # The engine is gone, which gRPC finds out for itself.
        raise
    except CacheError as error:
        await context.abort(code_of(error), message_of(error), trailing_metadata(error))
    except Exception:
        log.exception("internal_error")
        unknown = CacheError()
        await context.abort(code_of(unknown), message_of(unknown), trailing_metadata(unknown))


def _decoded(read: Callable[[bytes], Any], encoded: bytes) -> Any:
    try:
        return read(encoded)
    except DecodeError as error:
        raise InvalidArgument(field="request", problem="is not a message of this rpc") from error


async def _each(read: Callable[[bytes], Any], encoded: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for item in encoded:
        yield _decoded(read, item)
