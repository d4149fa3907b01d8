"""The RPC edge: callers, admission, the arrival of requests, errors as statuses, and the audit log.

Wraps all four kinds of rpc. To gRPC each of them takes a stream of messages, so that nothing of a request
is received before its caller is let in:

    headers ──► caller let in ──► request arrives whole ──► counted ──► behaviour ──► answer
       └ full or draining: refused here     └ cut off when it takes too long        error: status ┘

No error passes the edge unmapped: each has its status and its reason. Health and reflection are anybody's,
and answer also when draining.

The audit log says who asked what of the whole server, and what came of it: one line of `key=value` for
each, values in JSON so that none can forge another; logger `ctxcache.audit`. Callers that were refused are
logged there too, by `callers.py`.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
)
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict, SerializeToJsonError
from google.protobuf.message import DecodeError, Message

from ctxcache.errors import CacheError, DeadlineExceeded, Draining, InvalidArgument, TooManyRequests
from ctxcache.runtime.memory import refused_memory
from ctxcache.runtime.spans import Spans
from ctxcache.service.admission import (
    CANCELLED,
    KEPT_OPEN,
    OK,
    STREAMS,
    Admission,
    Admissions,
    Handler,
    RpcTimes,
    Timer,
)
from ctxcache.service.callers import (
    FOR_OTHERS,
    OPERATORS_ONLY,
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
        newcomers: Newcomers,
        line: Line,
    ) -> None:
        """`begins_whole`: an rpc with a stream of requests is not counted before the first of them is there.

        `is_anybodys`: callers are not asked who they are; each message of a stream has to come in time.
        """
        self._behaviour, self._read, self._admission = behaviour, read, admission
        self._let_in, self._timer, self._arrivals = let_in, timer, arrivals
        self._stall_timeout_s = stall_timeout_s
        self._newcomers, self._line, self._usage = newcomers, line, line.usage
        self._is_stream, self._begins_whole, self._is_anybodys = is_stream, begins_whole, is_anybodys

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
                response = await self._usage.metered(tenant, self._carry_out(request, context))
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
            with admission.enter(tenant):
                await self._line.stand(tenant)
                asked = request if self._is_stream else _one(self._read, request)
                async with aclosing(self._behaviour(asked, context)) as responses:
                    while (response := await self._usage.metered(tenant, anext(responses, None))) is not None:
                        # A stream lasts: the caller may have been revoked since its last message.
                        caller.check()
                        await _send(context, response, self._stall_timeout_s)
                        # Before the next one is made.
                        if admission.turns:
                            await admission.turns.take()
                        else:
                            await self._line.stand(tenant)
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


# -- requests before they are whole ---------------------------------------------------------------------

# How a message arrives:
#
#     _arriving < limit ──► arrives ──► whole
#                             │ PATIENCE_S over, and others wait ──► cut off: DEADLINE_EXCEEDED
#     else ──► _waiting, in order of coming ──► promised ──► arrives
#                │ 1,024 wait, or 512 of one host ──► refused
SMALL_BYTES = 256 << 10
"""Largest request of an rpc that takes one message."""
ARRIVALS_LIMIT = 16
"""Messages that arrive at a time."""
WAITING_LIMIT = 1024
"""Messages that wait to arrive; nothing of them past the first window was taken."""
PATIENCE_S = 0.25
"""How long a message may arrive while others wait to."""
ARRIVAL_TIMEOUT_S = 10.0
"""How long a message may arrive."""
DISCARD_BYTES = 64 << 20
"""How much of a refused request is read on."""
DISCARD_TIMEOUT_S = 5.0
"""How long it is read on at most."""
SILENCE_S = 0.2
"""A refused caller that sends nothing for so long waits for its answer."""


class Incoming:
    """The raw messages of one rpc, in their order, from a caller that may never finish them.

    A read that was begun is never cancelled: gRPC writes to it until the rpc is over.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._read: asyncio.Task[Any] | None = None
        """The read of the next message, which outlives whoever waits for it."""
        self._patience: asyncio.Timeout | None = None
        """Over the wait for that read."""
        self._returned: list[bytes] = []
        self._is_over = False

    def __aiter__(self) -> "Incoming":
        return self

    async def __anext__(self) -> bytes:
        message = await self.next()
        if message is None:
            raise StopAsyncIteration
        return message

    async def next(self) -> bytes | None:
        """The next message; None when the caller has said all.

        Raises TimeoutError where it has to give way; the next call goes on then, as after a cancellation.
        """
        if self._returned:
            return self._returned.pop()
        if self._is_over:
            return None
        if self._read is None:
            self._read = asyncio.create_task(self._context.read())
            # A read whose rpc has ended meanwhile fails, and nobody waits for it any more.
            self._read.add_done_callback(lambda read: read.cancelled() or read.exception())
        try:
            # `wait` leaves the read alone when this task is cancelled or has to give way.
            async with asyncio.timeout(None) as self._patience:
                await asyncio.wait([self._read])
        except TimeoutError:
            # The message may have come in the same turn of the loop.
            if not self._read.done():
                raise
        finally:
            self._patience = None
        read, self._read = self._read, None
        message = read.result()
        if message is grpc.aio.EOF:
            self._is_over = True
            return None
        assert isinstance(message, bytes)  # noqa: S101  # nothing decodes it before
        return message

    def give_way(self) -> None:
        """End the wait for the next message, if it has not come."""
        if self._patience is not None:
            self._patience.reschedule(asyncio.get_running_loop().time())

    def give_back(self, message: bytes | None) -> None:
        """Let it be the next one again."""
        if message is not None:
            self._returned.append(message)

    async def discard(self) -> None:
        """Read on until the caller has said all, or falls silent; bounded in bytes and in time.

        A client that is answered while it sends may lose the answer: gRPC tells some clients of the
        failure to send first (grpc.aio: INTERNAL without a reason).
        """
        loop, left_bytes = asyncio.get_running_loop(), DISCARD_BYTES
        end_s = loop.time() + DISCARD_TIMEOUT_S
        # Bounded both ways: by bytes for those who send much, by time for those who send little.
        while left_bytes > 0 and (left_s := end_s - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(SILENCE_S, left_s)):
                    message = await self.next()
            except TimeoutError:
                return
            if message is None:
                return
            left_bytes -= len(message)


class Arrivals:
    """How many messages arrive at a time, and which ones give way. Owned by the event loop.

    gRPC takes no byte of a message past a stream's first window until the message is asked for. This class
    asks for a bounded number of messages at a time. Worst case: a crowd of callers that never finish. Each
    is cut off when others wait.
    """

    def __init__(self, limit: int = ARRIVALS_LIMIT) -> None:
        self._limit = limit
        self._arriving: dict[Incoming, float] = {}
        """Since when, the oldest first; those that were told to give way are not in it any more."""
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._waiting_of: Counter[str] = Counter()
        self._promised_count = 0
        """Turns that were given and not taken up yet."""
        self._look: asyncio.TimerHandle | None = None
        """One timer for all that arrive, set while there are any."""
        self._discarding_count = 0
        self.cut_off_count = 0
        """How many were refused because they did not become whole."""

    async def receive(self, incoming: Incoming, peer: Callable[[], str]) -> bytes | None:
        """A caller's next message, whole; None when it has said all. `peer` is asked where it has to wait.

        Raises DeadlineExceeded, TooManyRequests.
        """
        # Those that wait go first, also if a place is free at this moment.
        if self._waiting or len(self._arriving) + self._promised_count >= self._limit:
            await self._wait(peer().rpartition(":")[0])
        loop = asyncio.get_running_loop()
        self._arriving[incoming] = begun_s = loop.time()
        if self._look is None:
            patience_s = PATIENCE_S if self._waiting else ARRIVAL_TIMEOUT_S
            self._look = loop.call_at(begun_s + patience_s, self._make_way)
        try:
            return await incoming.next()
        except TimeoutError:
            self.cut_off_count += 1
            took_s = f"{loop.time() - begun_s:.2g}"
            raise DeadlineExceeded(target="the rest of the request", timeout_s=took_s) from None
        finally:
            self._arriving.pop(incoming, None)
            if self._waiting:
                self._admit()

    async def receive_all(self, incoming: Incoming, peer: Callable[[], str]) -> AsyncGenerator[bytes]:
        """Every message; one that does not come in time is the last one. Raises TooManyRequests."""
        with contextlib.suppress(DeadlineExceeded):
            while (message := await self.receive(incoming, peer)) is not None:
                yield message

    async def discard(self, incoming: Incoming) -> None:
        """As `Incoming.discard`, for as many at a time as may arrive: of more, nothing is read on."""
        # Nothing is read on of more than that: they may lose their answer, and cost nothing.
        if self._discarding_count < self._limit:
            self._discarding_count += 1
            try:
                await incoming.discard()
            finally:
                self._discarding_count -= 1

    async def _wait(self, host: str) -> None:
        """Until it is this caller's turn to send. No host has more than half of the places."""
        # By host: one machine with a thousand connections must not keep others from waiting.
        is_too_much = self._waiting_of[host] >= WAITING_LIMIT // 2
        if is_too_much or len(self._waiting) >= WAITING_LIMIT:
            self.cut_off_count += 1
            raise TooManyRequests(what="requests that are not whole", limit=self._limit)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = host, turn
        self._waiting.append(place)
        self._waiting_of[host] += 1
        self._make_way()
        try:
            await turn
            # Taken up by what follows, without a wait in between.
            self._promised_count -= 1
        except asyncio.CancelledError:
            # Cancelled while it waited, or after its turn had been given: then the turn goes on to the next.
            if turn.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiting.remove(place)
            else:
                self._promised_count -= 1
                self._admit()
            raise
        finally:
            self._waiting_of[host] -= 1
            if not self._waiting_of[host]:
                del self._waiting_of[host]

    def _admit(self) -> None:
        while self._waiting and len(self._arriving) + self._promised_count < self._limit:
            _, turn = self._waiting.popleft()
            # One that was cancelled takes no turn.
            if not turn.done():
                self._promised_count += 1
                turn.set_result(None)

    def _make_way(self) -> None:
        """Cut off those that have had their time, which is short while others wait; look again in time."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        loop = asyncio.get_running_loop()
        patience_s = PATIENCE_S if self._waiting else ARRIVAL_TIMEOUT_S
        while self._arriving:
            oldest, since_s = next(iter(self._arriving.items()))
            if since_s + patience_s > loop.time():
                self._look = loop.call_at(since_s + patience_s, self._make_way)
                return
            # Told once: what is out of the table is not told again.
            del self._arriving[oldest]
            oldest.give_way()


# -- the audit log: operators' calls, and what came of them ------------------------------------------

audit_log = logging.getLogger("ctxcache.audit")

UNCHANGING = (
    "/ctxcache.v1.AdminService/GetStats",
    "/ctxcache.v1.AdminService/ListTenants",
    "/ctxcache.v1.AdminService/WhyMiss",
    "/ctxcache.v1.AdminService/GetSettings",
    "/ctxcache.v1.AdminService/GetActivity",
    "/ctxcache.v1.AdminService/ListLeases",
    "/ctxcache.v1.AdminService/ListEngines",
    "/ctxcache.v1.AdminService/ListFaults",
)
REQUEST_CHARACTERS = 512
# Building JSON of a large message takes milliseconds of the loop.
WHOLE_REQUEST_BYTES = 16 << 10
"""Largest request that is written out. The log has only names and size of a larger one.

Spelling it out would hold up the event loop.
"""


def is_audited(method: str) -> bool:
    """Whether it is an operator's and changes something."""
    # Operators' calls that change nothing are too many for a log that people read.
    return method.startswith(OPERATORS_ONLY) and method not in UNCHANGING


def audited_call(behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    """An rpc with one answer, which is written down when it ends."""

    async def call(request: Any, context: Any) -> Any:
        try:
            answer = await behaviour(request, context)
        except BaseException as error:
            _write(method, request, _result(error))
            raise
        _write(method, request, "OK")
        return answer

    return call


def audited_for_others(
    behaviour: Callable[..., Awaitable[Any]], method: str
) -> Callable[..., Awaitable[Any]]:
    """An rpc with one answer, which is written down where an operator makes it for another tenant."""
    audited = audited_call(behaviour, method)

    async def call(request: Any, context: Any) -> Any:
        return await (audited if current().acts_for else behaviour)(request, context)

    return call


def audited_stream(
    behaviour: Callable[..., AsyncGenerator[Any]], method: str
) -> Callable[..., AsyncGenerator[Any]]:
    """An rpc with many answers, which is written down when it begins and when it ends."""

    async def call(request: Any, context: Any) -> AsyncGenerator[Any]:
        _write(method, request, "BEGUN")
        try:
            async with aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer
        except BaseException as error:
            _write(method, request, _result(error))
            raise
        _write(method, request, "OK")

    return call


def _write(method: str, request: Any, result: str) -> None:
    caller = current()
    # JSON strings: a name with a line break or an equals sign cannot forge a line.
    asked = json.dumps(_plain(request), separators=(",", ":"))
    audit_log.info(
        "audit subject=%s tenant=%s role=%s method=%s request=%s result=%s",
        json.dumps(caller.subject),
        caller.tenant,
        caller.grant.role.value,
        method.rpartition("/")[2],
        asked[:REQUEST_CHARACTERS],
        result,
    )


def _plain(request: Message) -> Any:
    """The request as JSON. An invalid Duration, which protobuf refuses to encode, is written as text."""
    size_bytes = request.ByteSize()
    if size_bytes > WHOLE_REQUEST_BYTES:
        names = {
            field.name: value[:REQUEST_CHARACTERS]
            for field, value in request.ListFields()
            if isinstance(value, str)
        }
        return names | {"size_bytes": size_bytes}
    try:
        return MessageToDict(request, preserving_proto_field_name=True)
    except SerializeToJsonError:
        return text_format.MessageToString(request, as_one_line=True)


def _result(error: BaseException) -> str:
    if isinstance(error, CacheError):
        return error.reason
    # A client that ends the call ends a pass in order.
    return "ENDED" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else "INTERNAL"


log = logging.getLogger(__name__)
