"""The RPC edge: callers, admission, the arrival of requests, errors as statuses, and the audit log.

Wraps all four kinds of rpc. To gRPC each of them takes a stream of messages, so that nothing of a request
is received before its caller is let in:

    headers ──► caller let in ──► request arrives whole ──► counted ──► behaviour ──► answer
       └ full or draining: refused here     └ cut off when it takes too long        error: status ┘

No error passes the edge unmapped: each has its status and its reason. Health and reflection are anybody's,
and answer also when draining.

`arrivals.py` has the requests that are not whole yet, and `audit.py` the audit log.
"""

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from ctxcache.core.ledger.work import Work, at_work
from ctxcache.errors import CacheError, DeadlineExceeded, Draining, InvalidArgument
from ctxcache.runtime.memory import refused_memory
from ctxcache.runtime.spans import Spans
from ctxcache.service.admission import (
    CANCELLED,
    FOLLOWED,
    KEPT_OPEN,
    OK,
    STREAMS,
    Admission,
    Admissions,
    Handler,
    RpcTimes,
    Timer,
)
from ctxcache.service.arrivals import SMALL_BYTES, Arrivals, Incoming
from ctxcache.service.audit import audited_call, audited_for_others, audited_stream, is_audited
from ctxcache.service.callers import (
    FOR_OTHERS,
    Caller,
    Context,
    Identification,
    current,
    let_in_anybody,
)
from ctxcache.service.fairness import Newcomers, Turns, Usage
from ctxcache.wire.status import code_of, message_of, trailing_metadata

# The payer of each part of a request that is not whole. Bytes that a stranger can make the store hold are
# bounded at each step:
#
#     connection    gRPC's limit, and one per host          `Connections`
#     headers       an admission for each sort of rpc       refused without reading on
#     message       ARRIVALS_LIMIT at a time, 256 KiB each  `Arrivals`; slow ones give way to others
#     answer        the stall timeout                       a reader that takes nothing is cut off
OWN_SERVICES = "/ctxcache."
HEALTH = "grpc.health.v1.Health"
HEALTH_WATCH = f"/{HEALTH}/Watch"
WATCH_GRACE_S = 0.2
"""How long a watcher of health has to be told of the drain before its stream ends."""
PUBLIC_LIMIT = 256
"""Rpcs of health and reflection at a time: nobody is asked who they are."""
PUBLIC_ARRIVALS_LIMIT = 8
NOTHING = nullcontext()
Decoder: TypeAlias = Callable[[bytes], Any]


class Edge(grpc.GenericRpcHandler):
    """Puts admission and error mapping around each of our rpcs.

    Services are added to it as to a server, and it to the server as the handler of all methods.
    """

    def __init__(
        self,
        admissions: Admissions,
        identification: Identification,
        *,
        stall_timeout_s: float,
        decoders: Mapping[str, Decoder],
        times: RpcTimes,
        spans: Spans,
        newcomers: Newcomers,
        turns: Turns,
    ) -> None:
        """`decoders`, by method, read what generated code would copy; `times` are told of every rpc's end.

        `newcomers`: calls of one message count as such, that bulk work lets them go first. `turns`: in which
        greedy tenants' calls begin.

        `stall_timeout_s`: how long a client may take none of a response that waits for it.
        """
        self._admissions = admissions
        self._identification = identification
        self._stall_timeout_s = stall_timeout_s
        self._decoders = decoders
        self._times = times
        self._newcomers, self._line = newcomers, Line(Usage(), turns)
        self._spans = spans
        self._public = Admission("watches of health", PUBLIC_LIMIT)
        self._arrivals, self._public_arrivals = Arrivals(), Arrivals(PUBLIC_ARRIVALS_LIMIT)
        self._services: list[grpc.GenericRpcHandler] = []
        self._probed: dict[str, Handler] = {}
        self._wrapped: dict[str, Handler] = {}
        """By method; the server's own methods only, so that it stays small."""
        self._answered_once: dict[str, Admission] = {}
        """Our methods with one message each way: a client that still sends cannot lose a refusal of
        those."""

    # gRPC waits for a call of each registered method by itself, so that no crowd of other calls is before it.
    # But it looks at all those waits whenever a call comes: half a microsecond for each method.
    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Let probes' methods be found by themselves; the others are found as `service` finds them."""
        if service == HEALTH:
            self._probed = {
                method: self._wrap(handlers[method], f"/{HEALTH}/{method}") for method in handlers
            }

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Add a service, as generated code does."""
        self._services += handlers

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have a server that was not started serve what was added."""
        server.add_generic_rpc_handlers((self,))
        server.add_registered_method_handlers(HEALTH, self._probed)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "Handler | None":
        """See grpc.GenericRpcHandler."""
        method = handler_call_details.method
        # Refused before anything of the request is read: no message is lost by that.
        admission = self._answered_once.get(method)
        if admission is not None and (refusal := admission.refusal()):
            return refusal.handler
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            for service in self._services:
                if handler := service.service(handler_call_details):
                    # By method: handlers are wrapped once, whatever number of calls comes.
                    wrapped = self._wrapped[method] = self._wrap(handler, method)
                    break
        return wrapped

    # grpc's handlers are untyped tuples
    def _wrap(self, handler: Any, method: str) -> Handler:
        is_own = method.startswith(OWN_SERVICES)
        is_single = not handler.response_streaming
        behaviour = (
            handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        )
        # A watch of health has no end of its own, and would hold up the end of the server.
        if method == HEALTH_WATCH:
            behaviour = _until_drained(behaviour, self._admissions.operators)
        # Streams that are kept open would be one span of days.
        if self._spans.is_on and is_own and method not in KEPT_OPEN:
            behaviour = (_traced_call if is_single else _traced_stream)(behaviour, self._spans, method)
        if is_audited(method):
            behaviour = (audited_call if is_single else audited_stream)(behaviour, method)
        elif method in FOR_OTHERS:
            behaviour = audited_for_others(behaviour, method)
        # Requests are decoded here: grpc would answer one that cannot be read with UNKNOWN.
        read = self._decoders.get(method) or handler.request_deserializer
        let_in: Callable[[Context], Caller]
        # Everybody's methods and ours have admissions and arrivals of their own: strangers cannot take our
        # places.
        if is_own:
            admission, timer = self._admissions.of(method), self._times.of(method)
            let_in, arrivals = partial(self._identification.let_in, method=method), self._arrivals
            if is_single and not handler.request_streaming:
                self._answered_once[method] = admission
        else:
            admission, timer = self._public, Timer()
            let_in, arrivals = let_in_anybody, self._public_arrivals
        rpc = _Rpc(
            behaviour,
            read,
            admission,
            let_in,
            timer,
            arrivals,
            self._stall_timeout_s,
            is_stream=handler.request_streaming,
            begins_whole=method in STREAMS,
            is_anybodys=not is_own,
            is_lasting=method in (*KEPT_OPEN, *FOLLOWED),
            newcomers=self._newcomers,
            line=self._line,
        )
        encode = partial(_encoded, handler.response_serializer)
        if is_single:
            # To gRPC every method takes a stream: otherwise it would read the request before we see its
            # caller.
            return grpc.stream_unary_rpc_method_handler(rpc.answer_once, None, encode)
        return grpc.stream_stream_rpc_method_handler(rpc.answer, None, encode)


def _until_drained(
    behaviour: Callable[..., Awaitable[None]], admission: Admission
) -> Callable[..., AsyncGenerator[Any]]:
    """Let a watch end with the drain, which would wait for it: no client ends one of its own accord."""

    async def watch(request: object, context: Context) -> AsyncGenerator[Any]:
        watching = asyncio.ensure_future(behaviour(request, context))
        # Both are waited for and cancelled: neither may be left behind.
        drained = asyncio.ensure_future(admission.drained())
        try:
            await asyncio.wait({watching, drained}, return_when=asyncio.FIRST_COMPLETED)
            # The watcher is told of the drain before its stream ends, if it takes the message.
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


class Line:
    """Where calls of greedy tenants wait before their messages are read."""

    def __init__(self, usage: Usage, turns: Turns) -> None:
        self.usage, self._turns = usage, turns

    async def stand(self, tenant: str) -> None:
        """Wait until this tenant may begin something: at once, but for greedy ones."""
        # Only tenants that had more than their part wait here; others do not see a line.
        if self.usage.is_greedy(tenant):
            await self._turns.take()


class _Rpc:
    """One method: from its headers to its status."""

    def __init__(
        self,
        behaviour: Callable[..., Any],
        read: Decoder,
        admission: Admission,
        let_in: Callable[[Context], Caller],
        timer: Timer,
        arrivals: "Arrivals",
        stall_timeout_s: float,
        *,
        is_stream: bool,
        begins_whole: bool,
        is_anybodys: bool,
        is_lasting: bool,
        newcomers: Newcomers,
        line: Line,
    ) -> None:
        """`begins_whole`: an rpc with a stream of requests is not counted before the first of them is there.

        `is_anybodys`: callers are not asked who they are; each message of a stream has to come in time.
        `is_lasting`: a stream that lasts as long as an engine.
        """
        self._behaviour, self._read, self._admission = behaviour, read, admission
        self._let_in, self._timer, self._arrivals = let_in, timer, arrivals
        self._stall_timeout_s = stall_timeout_s
        self._newcomers, self._line, self._usage = newcomers, line, line.usage
        self._is_stream, self._begins_whole, self._is_anybodys = is_stream, begins_whole, is_anybodys
        self._is_lasting = is_lasting

    async def answer_once(self, _: object, context: Context) -> Any:
        """With one response."""
        begun_ns, end, incoming = time.monotonic_ns(), CANCELLED, Incoming(context)
        admission, newcomer = self._admission, None
        # The caller first, then the line, then the message: a stranger costs no byte.
        try:
            tenant = self._tenant(context, begun_ns)
            # A call of one message counts as a newcomer, for which bulk work waits. Not of a greedy tenant,
            # or a flood of small calls would stop all bulk work.
            if not (self._is_stream or self._usage.is_greedy(tenant)):
                newcomer = self._newcomers.come(begun_ns)
            # Before it is counted: a caller that never finishes takes no place among calls.
            request = await self._request(incoming, context)
            admission.begin(tenant)
            try:
                await self._line.stand(tenant)
                # Charged by what it takes of the loop, step by step.
                response = await self._usage.metered(tenant, at_work(self._carry_out(request, context)))
                if isinstance(response, bytes):
                    # Bytes of an answer cost gRPC's threads processor time.
                    self._usage.charge(tenant, len(response))
            finally:
                admission.end(tenant)
            end = OK
            return response  # noqa: TRY300  # what follows the try is for failures
        except grpc.aio.BaseError:
            # It was ended within, or the client is gone.
            raise
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            known = known_error(error)
            end = known.reason
            # Read on a little: a client that is answered while it sends may lose the answer.
            await self._arrivals.discard(incoming)
            await _abort(context, known)
        finally:
            if newcomer is not None:
                self._newcomers.leave(newcomer)
            self._timer.ended((time.monotonic_ns() - begun_ns) / 1e9, end)

    async def answer(self, _: object, context: Context) -> None:
        """With a stream of responses."""
        begun_ns, end, incoming = time.monotonic_ns(), CANCELLED, Incoming(context)
        admission = self._admission
        try:
            tenant, caller = self._tenant(context, begun_ns), current()
            request = await self._request(incoming, context)
            # Closed here and now when the client goes away: what the rpc holds ends with it.
            with admission.enter(tenant), self._work():
                await self._line.stand(tenant)
                asked = request if self._is_stream else _one(self._read, request)
                responses = self._behaviour(asked, context)
                try:
                    while (response := await self._usage.metered(tenant, self._next(responses))) is not None:
                        # A stream lasts: the caller may have been revoked since its last message.
                        caller.check()
                        await _send(context, response, self._stall_timeout_s)
                        # Before the next one is made.
                        if admission.turns:
                            await admission.turns.take()
                        else:
                            await self._line.stand(tenant)
                finally:
                    await at_work(responses.aclose())
            end = OK
        except grpc.aio.BaseError:
            # The client is gone, which gRPC finds out for itself.
            raise
        except DeadlineExceeded as error:
            end = error.reason
            # The refusal waits behind the message that is not taken.
            # It still holds its message in memory, and is counted among those.
            with admission.linger():
                await _abort(context, error)
        except Exception as error:  # noqa: BLE001  # the edge: nothing may pass it unmapped
            known = known_error(error)
            end = known.reason
            await self._arrivals.discard(incoming)
            await _abort(context, known)
        finally:
            self._timer.ended((time.monotonic_ns() - begun_ns) / 1e9, end)

    def _tenant(self, context: Context, begun_ns: int) -> str:
        # Also of callers that are refused: bulk work has to know that gRPC is busy.
        self._newcomers.called_ns = begun_ns
        tenant = self._let_in(context).tenant
        self._usage.come(tenant)
        return tenant

    def _work(self) -> AbstractContextManager[object]:
        return NOTHING if self._is_lasting else Work()

    def _next(self, responses: AsyncGenerator[Any]) -> Awaitable[Any]:
        response = anext(responses, None)
        # What lasts as long as an engine is at work anew for each message.
        return at_work(response) if self._is_lasting else response

    async def _carry_out(self, request: Any, context: Context) -> Any:
        # One request is not read before it is its turn; a stream of them goes on as it is.
        return await self._behaviour(request if self._is_stream else _one(self._read, request), context)

    async def _request(self, incoming: "Incoming", context: Context) -> Any:
        """The one request as it came, or the stream of them. Raises as `Arrivals.receive`."""
        # Asked again when it is known whose call it is, and still before its message is read.
        refusal = self._admission.refusal()
        if refusal:
            raise refusal.again()
        # Each message of such a stream has its own time.
        if self._is_stream and self._is_anybodys:
            arriving = self._arrivals.receive_all(incoming, context.peer)
            return _each(self._read, None, arriving, self._line)
        # An append's first message is its header: counted when it is there.
        if self._is_stream and not self._begins_whole:
            return _each(self._read, self._admission.turns, incoming, self._line)
        encoded = await self._arrivals.receive(incoming, context.peer)
        if self._is_stream:
            incoming.give_back(encoded)
            return _each(self._read, self._admission.turns, incoming, self._line)
        if encoded is None:
            raise InvalidArgument(field="request", problem="is missing")
        # Rpcs that take one message take small ones: rows come by streams.
        if len(encoded) > SMALL_BYTES:
            raise InvalidArgument(field="request", problem=f"is larger than {SMALL_BYTES} bytes")
        return encoded


async def _send(context: Context, response: object, stall_timeout_s: float) -> None:
    try:
        async with asyncio.timeout(stall_timeout_s):
            await context.write(response)
    except TimeoutError:
        raise DeadlineExceeded(target="reader", timeout_s=f"{stall_timeout_s:g}") from None


def _encoded(serialise: Callable[[Any], bytes], response: Any) -> bytes:
    """A response that moves rows is encoded where the rows are at hand."""
    return response if isinstance(response, bytes) else serialise(response)


# gRPC's own decoder would answer UNKNOWN, without a reason.
def _one(read: Callable[[bytes], Any], encoded: bytes) -> Any:
    try:
        return read(encoded)
    except DecodeError as error:
        raise InvalidArgument(field="request", problem="is not a message of this rpc") from error


async def _each(
    read: Callable[[bytes], Any], turns: Turns | None, encoded: AsyncIterator[bytes], line: Line
) -> AsyncIterator[Any]:
    caller = current()
    async for item in encoded:
        caller.check()
        if turns:
            await turns.take()
        else:
            await line.stand(caller.tenant)
        yield _one(read, item)


def known_error(error: Exception) -> CacheError:
    """An error as the caller may see it; an unknown one is logged, with its traceback."""
    if isinstance(error, CacheError):
        return error
    # Memory that the system refuses is a shortage, and no fault of the program.
    if refusal := refused_memory(error):
        log.warning("memory_refused error=%r", error)
        return refusal
    log.error("internal_error", exc_info=error)
    return CacheError()


async def _abort(context: Context, known: CacheError) -> None:
    await context.abort(code_of(known), message_of(known), trailing_metadata(known))


def _traced_call(
    behaviour: Callable[..., Awaitable[Any]], spans: Spans, method: str
) -> Callable[..., Awaitable[Any]]:
    """An rpc with one response."""

    async def call(request: object, context: Any) -> Any:
        with spans.rpc(method, context.invocation_metadata() or ()):
            return await behaviour(request, context)

    return call


def _traced_stream(
    behaviour: Callable[..., AsyncGenerator[Any]], spans: Spans, method: str
) -> Callable[..., AsyncGenerator[Any]]:
    """An rpc with a stream of them."""

    async def call(request: object, context: Any) -> AsyncGenerator[Any]:
        with spans.rpc(method, context.invocation_metadata() or ()):
            async with aclosing(behaviour(request, context)) as responses:
                async for response in responses:
                    yield response

    return call


log = logging.getLogger(__name__)
