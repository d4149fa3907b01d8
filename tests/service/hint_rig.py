"""An engine's scheduler by bare stubs."""

import asyncio
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from ctxcache.v1 import hints_pb2, hints_pb2_grpc


def job(number: int, name: str = "a", **changes: Any) -> hints_pb2.Job:
    """A job that waits at a position."""
    facts: dict[str, Any] = {
        "job_id": f"job-{number}", "session": f"sessions/{name}", "new_token_count": 10, "position": number,
    }  # fmt: skip
    if {"start_in"} & changes.keys():
        del facts["position"]
    return hints_pb2.Job(**(facts | changes))


def seconds(count: float) -> Duration:
    """A span."""
    whole = Duration()
    whole.FromNanoseconds(round(count * 1e9))
    return whole


class Engine:
    """One stream of Schedule."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call: Any = hints_pb2_grpc.HintServiceStub(channel).Schedule()
        self.sequence = 0
        self.events: list[hints_pb2.SessionEvent] = []
        """Those that came before what was waited for."""

    async def write(self, **message: Any) -> None:
        """Send a request."""
        self.sequence += 1
        await self.call.write(hints_pb2.ScheduleRequest(**({"sequence": self.sequence} | message)))

    async def read(self) -> hints_pb2.ScheduleResponse | None:
        """The next response; None at the end."""
        async with asyncio.timeout(10):
            response = await self.call.read()
        return None if response == grpc.aio.EOF else response

    async def acknowledged(self) -> hints_pb2.Acknowledgement:
        """The next acknowledgement."""
        while True:
            response = await self.read()
            assert response is not None
            if response.HasField("acknowledgement"):
                return response.acknowledgement
            self.events += response.events.events

    async def hello(self, engine: str = "engine", **facts: Any) -> hints_pb2.Acknowledgement:
        """Begin."""
        await self.write(hello=hints_pb2.ScheduleHello(engine=engine, **facts))
        return await self.acknowledged()

    async def put(self, *jobs: hints_pb2.Job) -> hints_pb2.Acknowledgement:
        """Let jobs wait."""
        await self.write(delta=hints_pb2.QueueDelta(put=jobs))
        answer = await self.acknowledged()
        assert answer.sequence == self.sequence
        return answer

    async def gone(self, *numbers: int, end: Any = hints_pb2.JOB_END_STARTED) -> hints_pb2.Acknowledgement:
        """Jobs wait no longer."""
        ends = [hints_pb2.JobGone(job_id=f"job-{number}", end=end) for number in numbers]
        await self.write(delta=hints_pb2.QueueDelta(gone=ends))
        return await self.acknowledged()

    async def snapshot(self, *jobs: hints_pb2.Job) -> hints_pb2.Acknowledgement:
        """The whole queue."""
        await self.write(snapshot=hints_pb2.QueueSnapshot(jobs=jobs))
        return await self.acknowledged()

    async def event(self, session: str = "a") -> hints_pb2.SessionEvent:
        """The next event of a session, one that came already included."""
        while True:
            for i, event in enumerate(self.events):
                if event.session == f"sessions/{session}":
                    return self.events.pop(i)
            response = await self.read()
            assert response is not None
            assert response.HasField("events")
            self.events += response.events.events

    async def drain(self) -> None:
        """Read to the end. Raises what the stream ends with."""
        while (response := await self.read()) is not None:
            self.events += response.events.events

    async def finish(self) -> int:
        """Half-close; returns how many jobs were withdrawn."""
        await self.call.done_writing()
        while True:
            response = await self.read()
            assert response is not None
            if response.HasField("withdrawn"):
                assert await self.read() is None
                assert await self.call.code() is grpc.StatusCode.OK
                return response.withdrawn.job_count
            self.events += response.events.events
