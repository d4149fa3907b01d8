"""HintService: hints about sessions, and the stream of an engine's waiting queue.

Requests change the queue in their order. News stands in the queue, once per session, until the client takes
it: a slow reader finds the newest state, and a reader that takes nothing is not read from. Worst case: the
edge cuts such a reader off after the stall timeout, and its jobs stay for the grace period.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import aclosing

from ctxcache.cache import Cache, hints
from ctxcache.cache.queues import Queue, readiness_of
from ctxcache.errors import CacheError, DeadlineExceeded, Draining, InvalidArgument
from ctxcache.service import convert
from ctxcache.service.admission import Admission
from ctxcache.service.callers import Context, current
from ctxcache.service.convert import EncodedAnswer
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.v1 import hints_pb2, hints_pb2_grpc

HELLO_TIMEOUT_S = 10.0
EVENTS_PER_MESSAGE = 256
RUNS_PER_MESSAGE = 4096
"""Runs of layers, which bound a message's size together with the one session whose runs go beyond."""

Requests = AsyncIterator[hints_pb2.ScheduleRequest]


class Scheduling:
    """One stream of HintService.Schedule."""

    def __init__(self, cache: Cache, tenant: str, turns: Turns, admission: Admission) -> None:
        self._cache = cache
        self._queues = cache.queues
        self._tenant = tenant
        self._turns = turns
        self._admission = admission
        self._sequence = 0

    async def answers(self, requests: Requests) -> AsyncGenerator[hints_pb2.ScheduleResponse]:
        """Everything that is to be sent. See the proto for what it raises."""
        hello = await self._hello(requests)
        queue = self._queues.join(
            self._tenant, hello.engine, grace_ns=hello.grace_ns, fingerprint=hello.fingerprint
        )
        # The event is this stream's right to the queue: another stream that takes over sets it.
        stream = queue.taken_over
        try:
            yield self._welcome(queue)
            async with aclosing(self._conversation(requests, queue, stream)) as conversation:
                async for response in conversation:
                    yield response
            count = self._queues.job_count(queue)
            # A client that was killed looks like one that has said all, but for this.
            yield hints_pb2.ScheduleResponse(withdrawn=hints_pb2.Withdrawn(job_count=count))
            self._queues.check(queue, stream)
            await self._queues.withdraw(queue, LoopSlice(self._turns))
        finally:
            # Does nothing where it was withdrawn, or taken over.
            self._queues.lose(queue, stream)

    async def _hello(self, requests: Requests) -> convert.Hello:
        drained = asyncio.ensure_future(self._admission.drained())
        first = asyncio.ensure_future(anext(requests, None))
        try:
            await asyncio.wait({first, drained}, timeout=HELLO_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not first.done():
                raise (
                    Draining
                    if drained.done()
                    else DeadlineExceeded("no hello came", target="client", timeout_s=f"{HELLO_TIMEOUT_S:g}")
                )
            request = first.result()
        finally:
            first.cancel()
            drained.cancel()
        if request is None or request.WhichOneof("message") != "hello":
            raise InvalidArgument(field="hello", problem="the first message must be the hello")
        self._count(request)
        return convert.hello(request.hello)

    async def _conversation(
        self, requests: Requests, queue: Queue, stream: asyncio.Event
    ) -> AsyncGenerator[hints_pb2.ScheduleResponse]:
        """Answers and events until the requests end. Raises Draining, EngineTakenOver."""
        # Four things to wait for, and each is begun anew when it has come. `FIRST_COMPLETED` looks at all of
        # them, so that news does not wait for requests, nor requests for news.
        drained = asyncio.ensure_future(self._admission.drained())
        taken_over = asyncio.ensure_future(stream.wait())
        coming = asyncio.ensure_future(anext(requests, None))
        news = asyncio.ensure_future(queue.has_news.wait())
        try:
            while True:
                await asyncio.wait({drained, taken_over, coming, news}, return_when=asyncio.FIRST_COMPLETED)
                # After every wait: the queue may be another stream's.
                self._queues.check(queue, stream)
                if drained.done():
                    raise Draining
                if coming.done():
                    request = coming.result()
                    if request is None:
                        return
                    yield await self._carry_out(request, queue, stream)
                    coming = asyncio.ensure_future(anext(requests, None))
                if news.done():
                    if events := self._events(queue):
                        yield hints_pb2.ScheduleResponse(events=events)
                    news = asyncio.ensure_future(queue.has_news.wait())
        finally:
            for waited in (drained, taken_over, coming, news):
                waited.cancel()

    async def _carry_out(
        self, request: hints_pb2.ScheduleRequest, queue: Queue, stream: asyncio.Event
    ) -> hints_pb2.ScheduleResponse:
        self._count(request)
        response = hints_pb2.ScheduleResponse()
        answer = response.acknowledgement
        answer.sequence = request.sequence
        try:
            deltas = await LoopSlice(self._turns).work(self._deltas(request))
            self._queues.check(queue, stream)
            gone = deltas.gone
            # A snapshot is a delta: what it does not name is gone.
            if deltas.is_whole:
                gone = dict.fromkeys(self._queues.job_ids(queue) - deltas.put.keys(), False)
            # Checked before anything is changed: a request is taken whole or refused.
            self._queues.check_room(queue, deltas.put.keys(), gone.keys())
        except CacheError as error:
            if request.WhichOneof("message") in ("hello", None):
                raise
            convert.fill_error(answer.error, error)
        else:
            part = LoopSlice(self._turns)
            # Leaving sessions before those that come: the limit holds at every moment.
            for job_id, is_started in gone.items():
                self._queues.gone(queue, job_id, is_started=is_started)
                await self._rest(part, queue, stream)
            for job_id, (session_id, job) in deltas.put.items():
                if reason := self._queues.put(queue, session_id, job):
                    answer.missing.add(job_id=job_id, reason=reason)
                await self._rest(part, queue, stream)
        answer.job_count = self._queues.job_count(queue)
        return response

    async def _rest(self, part: LoopSlice, queue: Queue, stream: asyncio.Event) -> None:
        if part.is_over:
            await part.rest()
            self._queues.check(queue, stream)

    def _deltas(self, request: hints_pb2.ScheduleRequest) -> Generator[None, None, convert.Deltas]:
        now_s = self._cache.state.clock.monotonic_ns() / 10**9
        match request.WhichOneof("message"):
            case "delta":
                return convert.delta(request.delta, now_s)
            case "snapshot":
                return convert.snapshot(request.snapshot, now_s)
            case other:
                raise InvalidArgument(field="message", problem=f"{other or 'nothing'} is not expected here")

    def _count(self, request: hints_pb2.ScheduleRequest) -> None:
        # Strictly ascending: a repeated or reordered message would change the queue twice.
        if request.sequence <= self._sequence:
            problem = f"{request.sequence} does not follow {self._sequence}"
            raise InvalidArgument(field="sequence", problem=problem)
        self._sequence = request.sequence

    def _welcome(self, queue: Queue) -> hints_pb2.ScheduleResponse:
        return hints_pb2.ScheduleResponse(
            acknowledgement=hints_pb2.Acknowledgement(
                sequence=self._sequence,
                job_count=self._queues.job_count(queue),
                grace=convert.duration(queue.grace_ns),
                job_limit=self._queues.limits.job_count,
            )
        )

    def _events(self, queue: Queue) -> hints_pb2.SessionEvents | None:
        """The news, or None where the queue has no reader any more."""
        events = hints_pb2.SessionEvents()
        run_count, part = 0, LoopSlice(self._turns)
        while len(events.events) < EVENTS_PER_MESSAGE and run_count < RUNS_PER_MESSAGE:
            news = queue.take_news()
            if news is None:
                # Where it stands is looked up now: several changes of a session are one event.
                break
            uid, name, changes = news
            session = self._cache.ledger.get(uid)
            stands = None
            if session is not None:
                stands = readiness_of(session, self._cache.state, self._cache.promotions.throughput)
            run_count += len(stands.runs) if stands else 0
            convert.fill_event(events.events.add(), name, changes, stands)
            if part.is_over:
                # The rest comes in the next message.
                break
        return events if events.events else None


class HintService(hints_pb2_grpc.HintServiceServicer):
    """See proto/ctxcache/v1/hints.proto."""

    def __init__(self, cache: Cache, admission: Admission, turns: Turns) -> None:
        """`turns`: in which work is done that takes long."""
        self._cache = cache
        self._admission = admission
        self._turns = turns

    async def Schedule(
        self, request_iterator: AsyncIterator[hints_pb2.ScheduleRequest], context: Context
    ) -> AsyncIterator[hints_pb2.ScheduleResponse]:
        """See the proto."""
        stream = Scheduling(self._cache, current().tenant, self._turns, self._admission)
        async with aclosing(stream.answers(request_iterator)) as answers:
            async for answer in answers:
                yield answer

    async def Hint(  # type: ignore[override]  # it is encoded already
        self, request: hints_pb2.HintRequest, context: Context
    ) -> bytes:
        """See the proto."""
        answer, part = EncodedAnswer(), LoopSlice(self._turns)
        asked = await part.work(convert.hints(request, current().tenant))
        answer.add(hints_pb2.HintResponse(message_id=request.message_id))
        deadline_s = asyncio.get_running_loop().time() + hints.PATIENCE_S
        clock = self._cache.state.clock
        for action, hint in zip(request.actions, asked, strict=True):
            found = await self._cache.hints.carry_out(hint, deadline_s)
            offset_ns = clock.wall_ns() - clock.monotonic_ns()
            result = convert.hint_result(action.action_id, found, wall_offset_ns=offset_ns)
            answer.add(hints_pb2.HintResponse(results=[result]))
            if part.is_over:
                await part.rest()
        return answer.encoded()
