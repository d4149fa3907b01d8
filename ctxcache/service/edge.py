"""The RPC edge: who calls, admission, and every error turned into a status with its reason. Never lets one through.

Wraps all four kinds of rpc. To gRPC each of them takes a stream of messages, so that nothing of a request is received
before its caller is let in. Health and reflection are anybody's, and answer also when draining.
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
from ctxcache.runtime.memory import refused_memory
from ctxcache.runtime.spans import NO_SPANS, Spans
from ctxcache.service import caller as callers
from ctxcache.service.admission import KEPT_OPEN, STREAMS, Admission, Admissions
from ctxcache.service.arrivals import SMALL_BYTES, Arrivals, Incoming
from ctxcache.service.audit import audited_call, audited_for_others, audited_stream, is_audited
from ctxcache.service.caller import ANYBODY, Caller, current
from ctxcache.service.guard import FOR_OTHERS, Guard
from ctxcache.service.rpc import Context, Handler
from ctxcache.service.rpc_times import CANCELLED, OK, RpcTimes, Timer
from ctxcache.service.traced import traced_call, traced_stream
from ctxcache.service.turns import Newcomers, Turns
from ctxcache.wire.status import code_of, message_of, trailing_metadata

log = logging.getLogger(__name__)

OWN_SERVICES = "/ctxcache."
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
WATCH_GRACE_S = 0.2
"""How long a watcher of health has to be told of the drain before its stream ends."""
PUBLIC_LIMIT = 256
"""Rpcs of health and reflection at a time: nobody is asked who they are."""
PUBLIC_ARRIVALS_LIMIT = 8
Decoder: TypeAlias = Callable[[bytes], Any]


class Edge(grpc.aio.ServerInterceptor):
    """Puts admission and error mapping around each of our rpcs.

    Streams that move rows, and those that local clients keep open, are counted apart: they must not
    use up the room for small calls, nor these theirs.
    """

    def __init__(
        self, admissions: Admissions, guard: Guard, *, stall_timeout_s: float,
        decoders: Mapping[str, Decoder] | None = None, times: RpcTimes | None = None,
        spans: Spans = NO_SPANS, newcomers: Newcomers | None = None,
    ) -> None:  # fmt: skip
        """`decoders`, by method, read what the generated code would copy; `times` are told of every rpc's end.

        `newcomers`: among them calls of one message count, that bulk work lets them go first.

        `stall_timeout_s`: how long a client may take none of a response that waits for it.
        """
        self._admissions = admissions
        self._guard = guard
        self._stall_timeout_s = stall_timeout_s
        self._decoders = decoders or {}
        self._times = times or RpcTimes()
        self._newcomers = newcomers or Newcomers()
        self._spans = spans
        self._public = Admission("watches of health", PUBLIC_LIMIT)
        self._arrivals, self._public_arrivals = Arrivals(), Arrivals(PUBLIC_ARRIVALS_LIMIT)
        self._wrapped: dict[str, Handler] = {}
        """By method; the server's own methods only, so that it stays small."""
        self._answered_once: set[str] = set()
        """Those of one message each way: a refusal cannot be lost by a client that still sends."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """See grpc.aio.ServerInterceptor."""
        method = handler_call_details.method
        if method.startswith(OWN_SERVICES) and method in self._answered_once:
            refusal = self._admissions.of(method).refusal()
            if refusal:
                return refusal.handler
        wrapped = self._wrapped.get(method)
        if wrapped is None and (handler := await continuation(handler_call_details)):
            wrapped = self._wrapped[method] = self._wrap(handler, method)
        return wrapped

    # grpc's handlers are untyped tuples
    def _wrap(self, handler: Any, method: str) -> Handler:
        is_own = method.startswith(OWN_SERVICES)
        is_single = not handler.response_streaming
        behaviour = (
            handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        )
        if is_single and not handler.request_streaming:
            self._answered_once.add(method)
        if method == HEALTH_WATCH:
            behaviour = _until_drained(behaviour, self._admissions.operators)
        if self._spans.is_on and is_own and method not in KEPT_OPEN:
            behaviour = (traced_call if is_single else traced_stream)(behaviour, self._spans, method)
        if is_audited(method):
            behaviour = (audited_call if is_single else audited_stream)(behaviour, method)
        elif method in FOR_OTHERS:
            behaviour = audited_for_others(behaviour, method)
        # Requests are decoded here: grpc would answer one that cannot be read with UNKNOWN.
        read = self._decoders.get(method) or handler.request_deserializer
        let_in: Callable[[Context], Caller]
        if is_own:
            admission = self._admissions.of(method)
            let_in, timer = partial(self._guard.let_in, method=method), self._times.of(method)
        else:
            admission, let_in, timer = self._public, _let_in_anybody, Timer()
        rpc = _Rpc(
            behaviour, read, admission, let_in, timer, self._arrivals if is_own else self._public_arrivals,
            self._stall_timeout_s, is_stream=handler.request_streaming, begins_whole=method in STREAMS,
            is_anybodys=not is_own, newcomers=self._newcomers,
        )  # fmt: skip
        if is_single:
            encode = partial(_encoded, handler.response_serializer)
            return grpc.stream_unary_rpc_method_handler(rpc.answer_once, None, encode)
        encode = partial(_encoded, handler.response_serializer)
        return grpc.stream_stream_rpc_method_handler(rpc.answer, None, encode)


def _until_drained(
    behaviour: Callable[..., Awaitable[None]], admission: Admission
) -> Callable[..., AsyncGenerator[Any]]:
    """A watch ends with the drain, which would otherwise wait for it: nobody ends one of their own accord."""

    async def watch(request: object, context: Context) -> AsyncGenerator[Any]:
        watching = asyncio.ensure_future(behaviour(request, context))
        drained = asyncio.ensure_future(admission.drained())
        try:
            await asyncio.wait({watching, drained}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({watching}, timeout=WATCH_GRACE_S)
        finally:
            watching.cancel()
            drained.cancel()
        # It writes its answers itself: one that is not taken must not hold up the drain.
        nothing: tuple[object, ...] = ()
        for answer in nothing:
            yield answer
        raise Draining

    return watch


def _let_in_anybody(context: Context) -> Caller:
    del context
    callers.let_in(ANYBODY)
    return ANYBODY


class _Rpc:
    """One method: from its headers to its status."""

    def __init__(
        self, behaviour: Callable[..., Any], read: Decoder, admission: Admission,
        let_in: Callable[[Context], Caller], timer: Timer, arrivals: Arrivals, stall_timeout_s: float, *,
        is_stream: bool, begins_whole: bool, is_anybodys: bool, newcomers: Newcomers,
    ) -> None:  # fmt: skip
        """`begins_whole`: an rpc with a stream of requests is not counted before the first of them is there.

        `is_anybodys`: nobody is asked who calls; each message of a stream has to come in time.
        """
        self._behaviour, self._read, self._admission = behaviour, read, admission
        self._let_in, self._timer, self._arrivals = let_in, timer, arrivals
        self._stall_timeout_s = stall_timeout_s
        self._newcomers = newcomers
        self._is_stream, self._begins_whole, self._is_anybodys = is_stream, begins_whole, is_anybodys

    async def answer_once(self, request: object, context: Context) -> Any:
        """With one response."""
        if self._is_stream:
            return await self._answer_once(request, context)
        with self._newcomers.coming():
            return await self._answer_once(request, context)

    async def _answer_once(self, _: object, context: Context) -> Any:
        begun_s, end, incoming = perf_counter(), CANCELLED, Incoming(context)
        try:
            caller = self._let_in(context)
            request = await self._request(incoming, context)
            with self._admission.enter(caller.tenant):
                response = await self._behaviour(request, context)
            end = OK
            return response  # noqa: TRY300  # what follows the try is for failures
        except grpc.aio.BaseError:
            # It was ended within, or the client is gone.
            raise
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            known = known_error(error)
            end = known.reason
            await self._arrivals.discard(incoming)
            await _abort(context, known)
        finally:
            self._timer.ended(perf_counter() - begun_s, end)

    async def answer(self, _: object, context: Context) -> None:
        """With a stream of responses."""
        begun_s, end, incoming = perf_counter(), CANCELLED, Incoming(context)
        admission = self._admission
        try:
            caller = self._let_in(context)
            request = await self._request(incoming, context)
            # Closed here and now when the client goes away: what the rpc holds ends with it.
            with admission.enter(caller.tenant):
                async with aclosing(self._behaviour(request, context)) as responses:
                    async for response in responses:
                        caller.check()
                        await _send(context, response, self._stall_timeout_s)
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
            await self._arrivals.discard(incoming)
            await _abort(context, known)
        finally:
            self._timer.ended(perf_counter() - begun_s, end)

    async def _request(self, incoming: Incoming, context: Context) -> Any:
        """The one request, or the stream of them. Raises as `Arrivals.receive`."""
        refusal = self._admission.refusal()
        if refusal:
            raise refusal.again()
        if self._is_stream and self._is_anybodys:
            arriving = self._arrivals.receive_all(incoming, context.peer())
            return _each(self._read, None, arriving)
        if self._is_stream and not self._begins_whole:
            return _each(self._read, self._admission.turns, incoming)
        encoded = await self._arrivals.receive(incoming, context.peer())
        if self._is_stream:
            incoming.give_back(encoded)
            return _each(self._read, self._admission.turns, incoming)
        if encoded is None:
            raise InvalidArgument(field="request", problem="is missing")
        if len(encoded) > SMALL_BYTES:
            raise InvalidArgument(field="request", problem=f"is larger than {SMALL_BYTES} bytes")
        return _one(self._read, encoded)


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
