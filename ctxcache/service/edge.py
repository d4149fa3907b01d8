"""The RPC edge: who calls, admission, and every error turned into a status with its reason. Never lets one through.

Wraps all four kinds of rpc. Health and reflection pass untouched: they answer also when draining.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from ctxcache.errors import CacheError, DeadlineExceeded, Draining, InvalidArgument
from ctxcache.process_memory import refused_memory
from ctxcache.service.admission import KEPT_OPEN, Admission, Admissions
from ctxcache.service.audit import audited_call, audited_for_others, audited_stream, is_audited
from ctxcache.service.caller import Caller, current
from ctxcache.service.guard import FOR_OTHERS, Guard
from ctxcache.service.rpc import Context, Handler
from ctxcache.service.rpc_times import CANCELLED, OK, RpcTimes, Timer
from ctxcache.service.traced import traced_call, traced_stream
from ctxcache.service.turns import Turns
from ctxcache.spans import NO_SPANS, Spans
from ctxcache.status import code_of, message_of, trailing_metadata

log = logging.getLogger(__name__)

OWN_SERVICES = "/ctxcache."
_MAKERS: dict[tuple[bool, bool], Callable[..., Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
WATCH_GRACE_S = 0.2
"""How long a watcher of health has to be told of the drain before its stream ends."""
Decoder: TypeAlias = Callable[[bytes], Any]


class Edge(grpc.aio.ServerInterceptor):
    """Puts admission and error mapping around each of our rpcs.

    Streams that move rows, and those that local clients keep open, are counted apart: they must not
    use up the room for small calls, nor these theirs.
    """

    def __init__(
        self, admissions: Admissions, guard: Guard, *, stall_timeout_s: float,
        decoders: Mapping[str, Decoder] | None = None, times: RpcTimes | None = None,
        spans: Spans = NO_SPANS,
    ) -> None:  # fmt: skip
        """`decoders`, by method, read what the generated code would copy; `times` are told of every rpc's end.

        `stall_timeout_s`: how long a client may take none of a response that waits for it.
        """
        self._admissions = admissions
        self._guard = guard
        self._stall_timeout_s = stall_timeout_s
        self._decoders = decoders or {}
        self._times = times or RpcTimes()
        self._spans = spans
        self._wrapped: dict[str, Handler] = {}
        """By method; the server's own methods only, so that it stays small."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """See grpc.aio.ServerInterceptor."""
        method = handler_call_details.method
        if not method.startswith(OWN_SERVICES):
            handler = await continuation(handler_call_details)
            return _until_drained(handler, self._admissions.operators) if method == HEALTH_WATCH else handler
        admission = self._admissions.of(method)
        refusal = admission.refusal()
        if refusal:
            return refusal.handler
        wrapped = self._wrapped.get(method)
        if wrapped is None and (handler := await continuation(handler_call_details)):
            wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped

    # grpc's handlers are untyped tuples
    def _wrap(self, handler: Any, method: str) -> Handler:
        admission = self._admissions.of(method)
        # Requests are decoded here: grpc would answer one that cannot be read with UNKNOWN.
        read = self._decoders.get(method) or handler.request_deserializer
        decode = partial(_each, read, admission.turns) if handler.request_streaming else partial(_one, read)
        is_single = not handler.response_streaming
        behaviour = (
            handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        )
        if self._spans.is_on and method not in KEPT_OPEN:
            behaviour = (traced_call if is_single else traced_stream)(behaviour, self._spans, method)
        if is_audited(method):
            behaviour = (audited_call if is_single else audited_stream)(behaviour, method)
        elif method in FOR_OTHERS:
            behaviour = audited_for_others(behaviour, method)
        let_in, timer = partial(self._guard.let_in, method=method), self._times.of(method)
        call = (
            _single(behaviour, decode, admission, let_in, timer)
            if is_single
            else _many(behaviour, decode, admission, let_in, self._stall_timeout_s, timer)
        )
        make = _MAKERS[handler.request_streaming, handler.response_streaming]
        return make(call, None, partial(_encoded, handler.response_serializer))


# grpc's handlers are untyped tuples
def _until_drained(handler: Any, admission: Admission) -> Handler:
    """A watch ends with the drain, which would otherwise wait for it: nobody ends one of their own accord."""

    async def watch(request: object, context: Context) -> None:
        watching = asyncio.ensure_future(handler.unary_stream(request, context))
        drained = asyncio.ensure_future(admission.drained())
        try:
            await asyncio.wait({watching, drained}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({watching}, timeout=WATCH_GRACE_S)
        finally:
            watching.cancel()
            drained.cancel()
        await _abort(context, Draining())

    return grpc.unary_stream_rpc_method_handler(
        watch, handler.request_deserializer, handler.response_serializer
    )


def _single(
    behaviour: Callable[..., Awaitable[Any]],
    decode: Callable[..., Any],
    admission: Admission,
    let_in: Callable[[Context], Caller],
    timer: Timer,
) -> Callable[..., Awaitable[Any]]:
    async def call(request: object, context: Context) -> Any:
        begun_s, end = perf_counter(), CANCELLED
        try:
            with admission.enter(let_in(context).tenant):
                response = await behaviour(decode(request), context)
            end = OK
            return response  # noqa: TRY300  # what follows the try is for failures
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            known = known_error(error)
            end = known.reason
            await _abort(context, known)
        finally:
            timer.ended(perf_counter() - begun_s, end)

    return call


def _many(
    behaviour: Callable[..., AsyncGenerator[Any]],
    decode: Callable[..., Any],
    admission: Admission,
    let_in: Callable[[Context], Caller],
    stall_timeout_s: float,
    timer: Timer,
) -> Callable[..., Awaitable[None]]:
    async def call(request: object, context: Context) -> None:
        begun_s, end = perf_counter(), CANCELLED
        try:
            caller = let_in(context)
            # Closed here and now when the client goes away: what the rpc holds ends with it.
            with admission.enter(caller.tenant):
                async with aclosing(behaviour(decode(request), context)) as responses:
                    async for response in responses:
                        caller.check()
                        await _send(context, response, stall_timeout_s)
                        # Before the next one is made.
                        if admission.turns:
                            await admission.turns.take()
            end = OK
        except grpc.aio.BaseError:
            # The client is gone, which gRPC finds out for itself.
            raise
        except DeadlineExceeded as error:
            end = error.reason
            # The refusal waits behind the message that is not taken.
            with admission.linger():
                await _abort(context, error)
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            known = known_error(error)
            end = known.reason
            await _abort(context, known)
        finally:
            timer.ended(perf_counter() - begun_s, end)

    return call


async def _send(context: Context, response: object, stall_timeout_s: float) -> None:
    try:
        async with asyncio.timeout(stall_timeout_s):
            await context.write(response)
    except TimeoutError:
        raise DeadlineExceeded(target="reader", timeout_s=f"{stall_timeout_s:g}") from None


def _encoded(serialise: Callable[[Any], bytes], response: Any) -> bytes:
    """A response that moves rows is encoded where the rows are at hand."""
    return response if isinstance(response, bytes) else serialise(response)


def _one(read: Callable[[bytes], Any], encoded: bytes) -> Any:
    try:
        return read(encoded)
    except DecodeError as error:
        raise InvalidArgument(field="request", problem="is not a message of this rpc") from error


async def _each(
    read: Callable[[bytes], Any], turns: Turns | None, encoded: AsyncIterator[bytes]
) -> AsyncIterator[Any]:
    caller = current()
    async for item in encoded:
        caller.check()
        if turns:
            await turns.take()
        yield _one(read, item)


def known_error(error: Exception) -> CacheError:
    """An error as the caller may see it; one that is none of ours is logged, with its traceback."""
    if isinstance(error, CacheError):
        return error
    if refusal := refused_memory(error):
        log.warning("memory_refused error=%r", error)
        return refusal
    log.error("internal_error", exc_info=error)
    return CacheError()


async def _abort(context: Context, known: CacheError) -> None:
    await context.abort(code_of(known), message_of(known), trailing_metadata(known))
