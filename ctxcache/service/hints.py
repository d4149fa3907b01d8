"""HintService: engines' waiting queues, and hints about sessions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from ctxcache.cache import Cache, hints
from ctxcache.service import convert
from ctxcache.service.admission import Admission
from ctxcache.service.callers import Context, current
from ctxcache.service.convert import EncodedAnswer
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.service.queue_stream import Scheduling
from ctxcache.v1 import hints_pb2, hints_pb2_grpc


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
