"""The RPC edge: who calls, admission, and every error turned into a status with its reason. Never lets one through.

Wraps all four kinds of rpc. Health and reflection pass untouched: they answer also when draining.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from ctxcache.core.limits import Bound
from ctxcache.errors import CacheError, DeadlineExceeded, Draining, InvalidArgument, TooManyRequests
from ctxcache.process_memory import refused_memory
from ctxcache.service.audit import audited_call, audited_stream, is_audited
from ctxcache.service.caller import Caller, current
from ctxcache.service.guard import Guard
from ctxcache.service.rpc_times import CANCELLED, OK, RpcTimes, Timer
from ctxcache.service.traced import traced_call, traced_stream
from ctxcache.service.turns import Turns
from ctxcache.spans import NO_SPANS, Spans
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
SCHEDULES = ("/ctxcache.v1.HintService/Schedule",)
STREAMS = ("/ctxcache.v1.SessionService/AppendSession", "/ctxcache.v1.SessionService/ReadSession")
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
WATCH_GRACE_S = 0.2
"""How long a watcher of health has to be told of the drain before its stream ends."""
Decoder: TypeAlias = Callable[[bytes], Any]


class Admission:
    """How many rpcs of one sort run, and whether new ones are taken. Owned by the event loop.

    Nothing queues here: what runs shares the machine already, and a queue would only add to the wait
    of all. A refusal says when to come again.
    """

    def __init__(
        self, what: str, limit: int, *, turns: Turns | None = None, is_divided: bool = False
    ) -> None:
        """`turns`: in which its rpcs move their messages. `is_divided`: no tenant takes all of it."""
        self.turns = turns
        self.limit = limit
        self._bound = Bound(limit, is_divided)
        self._running = 0
        self._own: Counter[str] = Counter()
        self._lingering = 0
        self._draining = asyncio.Event()
        self.when_full = Refusal(TooManyRequests(what=what, limit=limit))
        self.when_draining = Refusal(Draining())

    @property
    def running_count(self) -> int:
        """Those that run."""
        return self._running

    @property
    def is_draining(self) -> bool:
        """Whether no more are taken."""
        return self._draining.is_set()

    def drain(self) -> None:
        """Take no more."""
        self._draining.set()

    async def drained(self) -> None:
        """Wait until no more are taken."""
        await self._draining.wait()

    def refusal(self) -> "Refusal | None":
        """Why a new rpc would be refused now; None when it would not be."""
        if self._draining.is_set():
            return self.when_draining
        is_full = self._running >= self.limit or self._lingering >= self.limit
        return self.when_full if is_full else None

    @contextmanager
    def enter(self, tenant: str) -> Iterator[None]:
        """Count one rpc of that tenant while it runs. Raises Draining, TooManyRequests."""
        refusal = self.refusal()
        if refusal is None and self._bound.is_divided and self._is_too_much_of(tenant):
            refusal = self.when_full
        if refusal:
            raise refusal.again()
        self._running += 1
        self._own[tenant] += 1
        try:
            yield
        finally:
            self._running -= 1
            self._own[tenant] -= 1
            if not self._own[tenant]:
                del self._own[tenant]

    def _is_too_much_of(self, tenant: str) -> bool:
        return self._bound.is_reached(self._running, self._own[tenant])

    @contextmanager
    def linger(self) -> Iterator[None]:
        """Count an rpc that is over, while its client does not take notice: it keeps a message in memory."""
        self._lingering += 1
        try:
            yield
        finally:
            self._lingering -= 1


class Refusal:
    """An error that is told often, made once: telling it must cost much less than the work refused."""

    def __init__(self, error: CacheError) -> None:
        self._error = error
        self.count = 0
        """How often it was told."""
        self._said = code_of(error), message_of(error), trailing_metadata(error)
        # As a stream, whatever the rpc is: the request is not even received.
        self.handler: Handler = grpc.stream_stream_rpc_method_handler(self._tell)

    def again(self) -> CacheError:
        """The error as a new exception."""
        self.count += 1
        return type(self._error)(**self._error.facts)

    async def _tell(self, _: object, context: Context) -> None:
        self.count += 1
        await context.abort(*self._said)


@dataclass(frozen=True, slots=True)
class Admissions:
    """The sorts of rpcs: small calls, streams that move rows, those that local clients and engines keep open."""

    calls: Admission
    streams: Admission
    local_clients: Admission
    engines: Admission

    def of(self, method: str) -> Admission:
        """Where an rpc is counted."""
        if method in STREAMS:
            return self.streams
        if method in SCHEDULES:
            return self.engines
        return self.local_clients if method in KEPT_OPEN else self.calls

    def by_sort(self) -> Mapping[str, Admission]:
        """Each sort's, by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def drain(self) -> None:
        """Take no more of any sort."""
        for admission in self.by_sort().values():
            admission.drain()


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
            return _until_drained(handler, self._admissions.calls) if method == HEALTH_WATCH else handler
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
