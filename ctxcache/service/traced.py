"""Traced: rpcs with a span around each, where tracing is on."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from ctxcache.runtime.spans import Spans


def traced_call(
    behaviour: Callable[..., Awaitable[Any]], spans: Spans, method: str
) -> Callable[..., Awaitable[Any]]:
    """An rpc with one response."""

    async def call(request: object, context: Any) -> Any:
        with spans.rpc(method, context.invocation_metadata() or ()):
            return await behaviour(request, context)

    return call


def traced_stream(
    behaviour: Callable[..., AsyncGenerator[Any]], spans: Spans, method: str
) -> Callable[..., AsyncGenerator[Any]]:
    """An rpc with a stream of them."""

    async def call(request: object, context: Any) -> AsyncGenerator[Any]:
        with spans.rpc(method, context.invocation_metadata() or ()):
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

    return call
