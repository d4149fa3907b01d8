"""A process that offers load to a server and says what came of it: one line of JSON.

    python -m tests.faults.load_generator PLAN

PLAN is JSON, see `Plan`. Requests are made once and sent as they are, answers are not decoded: what
the generator does must cost little beside what the server does. Open loop: each call begins at its
time, whatever came of those before it. Closed loop: `concurrency` calls at a time, one after another.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc

READ = "/ctxcache.v1.SessionService/ReadSession"
APPEND = "/ctxcache.v1.SessionService/AppendSession"
GET = "/ctxcache.v1.SessionService/GetSession"
TRUNCATE = "/ctxcache.v1.SessionService/TruncateSession"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
OK, REFUSED = "ok", "refused"


@dataclass(frozen=True, slots=True)
class Plan:
    """The load to offer. Requests are hex; a write is an append's messages and the truncation that undoes it.

    `stream_rate_hz` 0 means a closed loop of `concurrency`. `seconds` counts from the first call;
    calls under way then are waited for.
    """

    target: str
    seconds: float
    reads: list[str]
    writes: list[tuple[list[str], str]] = field(default_factory=list)
    small: str = ""
    stream_rate_hz: float = 0.0
    small_rate_hz: float = 0.0
    concurrency: int = 0
    write_share: float = 0.1
    channel_count: int = 4
    seed: int = 1


@dataclass(slots=True)
class Outcome:
    """One call: when it should have begun, how long it took, and what came of it."""

    kind: str
    begin_s: float
    latency_s: float
    result: str
    has_delay: bool = False


class Generator:
    """Calls over a few channels. Owned by its event loop."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._draw = random.Random(plan.seed)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channels = [
            grpc.aio.insecure_channel(plan.target, options=options) for _ in range(plan.channel_count)
        ]
        # grpc.aio loses the status of a call that is refused while it sends.
        self._writing = grpc.insecure_channel(plan.target, options=options)
        self._reads = [bytes.fromhex(request) for request in plan.reads]
        self._free = [([bytes.fromhex(m) for m in ms], bytes.fromhex(undo)) for ms, undo in plan.writes]
        self._small = bytes.fromhex(plan.small)
        self._outcomes: list[Outcome] = []
        self._began_s = 0.0

    async def run(self) -> list[Outcome]:
        """Offer everything and wait for the last answer."""
        for channel in self._channels:
            await channel.channel_ready()
        self._began_s = time.monotonic()
        plan = self._plan
        async with asyncio.TaskGroup() as tasks:
            if plan.small_rate_hz:
                tasks.create_task(self._open_loop(tasks, plan.small_rate_hz, self._get))
            if plan.stream_rate_hz:
                tasks.create_task(self._open_loop(tasks, plan.stream_rate_hz, self._stream))
            for _ in range(plan.concurrency):
                tasks.create_task(self._closed_loop())
        self._writing.close()
        for channel in self._channels:
            await channel.close()
        return self._outcomes

    async def _open_loop(
        self, tasks: asyncio.TaskGroup, rate_hz: float, call: Callable[[float], Awaitable[None]]
    ) -> None:
        at_s = self._began_s
        while at_s < self._began_s + self._plan.seconds:
            await asyncio.sleep(at_s - time.monotonic())
            tasks.create_task(call(at_s))  # type: ignore[arg-type]  # coroutine functions, all of them
            at_s += self._draw.expovariate(rate_hz)

    async def _closed_loop(self) -> None:
        while time.monotonic() < self._began_s + self._plan.seconds:
            await self._stream(time.monotonic())

    async def _stream(self, at_s: float) -> None:
        if self._free and self._draw.random() < self._plan.write_share:
            write = self._free.pop()
            try:
                await self._note("write", at_s, lambda _: asyncio.to_thread(_append, self._writing, *write))
            finally:
                self._free.append(write)
        else:
            request = self._draw.choice(self._reads)
            await self._note("read", at_s, lambda channel: _drain(channel.unary_stream(READ)(request)))

    async def _get(self, at_s: float) -> None:
        await self._note("small", at_s, lambda channel: channel.unary_unary(GET)(self._small))

    async def _note(self, kind: str, at_s: float, call: Callable[[Any], Awaitable[object]]) -> None:
        result, has_delay = OK, False
        try:
            await call(self._draw.choice(self._channels))
        except grpc.RpcError as caught:
            error: Any = caught  # a call too, in both kinds of client
            is_refusal = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            result = REFUSED if is_refusal else f"{error.code().name}: {error.details()}"
            has_delay = any(key == PUSHBACK_KEY for key, _ in error.trailing_metadata() or ())
        latency_s = time.monotonic() - at_s
        self._outcomes.append(Outcome(kind, at_s - self._began_s, latency_s, result, has_delay))


async def _drain(call: AsyncIterator[bytes]) -> None:
    async for _ in call:
        pass


# grpc's own calls of raw bytes are untyped
def _append(channel: Any, messages: list[bytes], undo: bytes) -> None:
    channel.stream_unary(APPEND)(iter(messages))
    channel.unary_unary(TRUNCATE)(undo)


async def _generate(plan: Plan) -> list[Outcome]:
    # Channels belong to the loop that they are made on.
    return await Generator(plan).run()


def main() -> None:
    """Run the plan given on the command line."""
    plan = Plan(**json.loads(sys.stdin.read() if sys.argv[1] == "-" else sys.argv[1]))
    outcomes = asyncio.run(_generate(plan))
    sys.stdout.write(json.dumps([asdict(outcome) for outcome in outcomes]) + "\n")


if __name__ == "__main__":
    main()
