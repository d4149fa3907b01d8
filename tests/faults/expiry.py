"""Expiry: many sessions end at the same moment, and nobody else notices.

Sessions with rows in them expire at one instant. From then on none of them can be read, looked up
or found in a listing, whatever upkeep has come to; their space is back within seconds; and what
others read meanwhile takes hardly longer than before. Worst case: a busy machine, which makes the
reads before the instant slow as well; --untimed leaves them out.
"""

import argparse
import asyncio
import random
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.convert import ranges_to_wire
from ctxcache.errors import CacheError, SessionNotFound
from ctxcache.v1 import session_pb2, session_pb2_grpc
from tests.faults.harness import Harness, Report, Unsupported, progress
from tests.faults.planted import forked
from tests.faults.rows import rows_of
from tests.faults.soak import STORED, model
from tests.server_process import ServerProcess

M = TypeVar("M")
STAYS, STAYS_TOKENS = "sessions/stays", 1000
WITH_ROWS, AT_A_TIME, SAMPLED = 50, 64, 100
LEAD_S, CALM_S, GONE_S, BACK_S = 3.0, 3.0, 60.0, 10.0
ATTEMPTS, REST_S, SLOWEST_RATE_HZ = 5, 0.05, 10.0
P99_LIMIT_S, STALL_LIMIT_S = 0.05, 0.25
"""The longest times of a small call and of a resident read of 3 MB while sessions expire.

P99, and the longest.
"""


@dataclass(slots=True)
class Watch:
    """Repeats a call in a thread of its own, and notes when each began and how long it took."""

    target: str
    is_read: bool
    latencies: list[tuple[float, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> threading.Thread:
        """Begin."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def end(self) -> None:
        """No more."""
        self._ended.set()

    def between(self, begin_s: float, end_s: float) -> list[float]:
        """Latencies of calls that were under way within the time, ascending."""
        return sorted(took for began, took in self.latencies if began + took > begin_s and began < end_s)

    def _run(self) -> None:
        with ctxcache.connect(self.target, access="local" if self.is_read else "remote") as client:
            while not self._ended.wait(0.005):
                began_s = time.monotonic()
                try:
                    self._once(client)
                except CacheError as error:
                    self.failures.append(str(error))
                self.latencies.append((began_s, time.monotonic() - began_s))

    def _once(self, client: Client) -> None:
        if not self.is_read:
            client.sessions.get(STAYS)
            return
        with client.sessions.open(STAYS, CallerModel(model(0))).read() as rows:
            rows.array(STORED[1].stream)


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    program = forked([options.control] if options.control else [])
    with tempfile.TemporaryDirectory(prefix="ctxcache-expiry-") as folder:
        server = ServerProcess(Path(folder) / "data", "--max-concurrent-rpcs", "256", program=program)
        with server, ctxcache.connect(server.target) as client:
            client.models.register(model(0))
            _fill(client, STAYS, STAYS_TOKENS)
            used_bytes = _used_bytes(client)
            for number in range(min(WITH_ROWS, options.sessions)):
                _fill(client, f"sessions/ends-{number}", 64)
            at = _date(server.target, options.sessions, options.rate)
            _expire(options, report, server, client, at, used_bytes)


def _used_bytes(client: Client) -> list[int]:
    return [tier.used_bytes for tier in client.admin.stats().tiers]


def _date(target: str, count: int, rate_hz: float) -> datetime:
    """Make sessions that expire together, and return when.

    Later where the machine is too busy for the rate.
    """
    while rate_hz >= SLOWEST_RATE_HZ:
        at = datetime.now(UTC) + timedelta(seconds=LEAD_S + CALM_S + count / rate_hz)
        asyncio.run(_date_many(target, count, at))
        if (at - datetime.now(UTC)).total_seconds() >= CALM_S:
            return at
        rate_hz /= 2
    raise Unsupported(f"fewer than {SLOWEST_RATE_HZ:g} sessions a second are created here")


def _fill(client: Client, name: str, token_count: int) -> None:
    layout = [spec.stream for spec in STORED[1:]]
    client.sessions.create(CallerModel(model(0)), id=name.removeprefix("sessions/"), layout=layout)
    client.sessions.open(name, CallerModel(model(0))).append(
        {s.stream: rows_of(1, s.stream, 0, token_count, s.row_bytes) for s in STORED},
    )
    client.sessions.open(name).flush()


async def _date_many(target: str, count: int, at: datetime) -> None:
    """Let sessions expire at `at`, and create those that are not there. Raises CacheError."""
    expire_time = Timestamp()
    expire_time.FromDatetime(at)
    async with grpc.aio.insecure_channel(target) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)

        async def date_every(first: int) -> None:
            for number in range(first, count, AT_A_TIME):
                # The time has come before all are made: they get a later one.
                if datetime.now(UTC) >= at:
                    return
                await _date_one(stub, f"ends-{number}", expire_time)
                if number % 5000 == 0:
                    progress(number, count, "sessions created")

        await asyncio.gather(*(date_every(first) for first in range(AT_A_TIME)))


async def _date_one(
    stub: "session_pb2_grpc.SessionServiceAsyncStub", session_id: str, expire_time: Timestamp
) -> None:
    layout = ranges_to_wire(spec.stream for spec in STORED)
    create = session_pb2.CreateSessionRequest(
        session_id=session_id, model="models/soak-0", layout=layout, expire_time=expire_time
    )
    update = session_pb2.UpdateSessionRequest(name=f"sessions/{session_id}", expire_time=expire_time)
    # On a slow machine a session of an earlier round may expire between the two calls.
    for _ in range(ATTEMPTS):
        if (created := await _ask(stub.CreateSession, create)) is grpc.StatusCode.OK:
            return
        if datetime.now(UTC) >= expire_time.ToDatetime(UTC):
            return
        if created is not grpc.StatusCode.ALREADY_EXISTS:
            raise CacheError(f"{session_id} cannot be created: {created.name}")
        if await _ask(stub.UpdateSession, update) is grpc.StatusCode.OK:
            return
    raise CacheError(f"{session_id} is neither there nor can it be created")


async def _ask(call: Callable[[M], Awaitable[object]], request: M) -> grpc.StatusCode:
    """The status of a call; asked again where the server has too much to do."""
    while True:
        try:
            await call(request)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                return error.code()
            await asyncio.sleep(REST_S)
        else:
            return grpc.StatusCode.OK


def _expire(
    options: argparse.Namespace,
    report: Report,
    server: ServerProcess,
    client: Client,
    at: datetime,
    used_bytes: Sequence[int],
) -> None:
    time.sleep(max(0.0, (at - datetime.now(UTC)).total_seconds() - CALM_S))
    watches = {"get": Watch(server.target, is_read=False), "read": Watch(server.unix_target, is_read=True)}
    threads = [watch.start() for watch in watches.values()]
    calm_s = time.monotonic()
    time.sleep(max(0.0, (at - datetime.now(UTC)).total_seconds()))
    instant_s = time.monotonic()
    _check_gone(options, report, client)
    report.end_if_found()
    gone_s = _wait_until_gone(report, client, used_bytes)
    for watch in watches.values():
        watch.end()
    for thread in threads:
        thread.join()
    report.figures |= {"session_count": options.sessions, "removed_after_s": round(gone_s - instant_s, 2)}
    for name, watch in watches.items():
        report.findings += [f"{name} of a session that stays: {failure}" for failure in watch.failures[:3]]
        _judge(options, report, name, watch.between(calm_s, instant_s), watch.between(instant_s, gone_s))


def _check_gone(options: argparse.Namespace, report: Report, client: Client) -> None:
    """From the instant on, at once."""
    for number in random.Random(options.seed).sample(range(options.sessions), min(SAMPLED, options.sessions)):
        try:
            client.sessions.get(f"sessions/ends-{number}")
        except SessionNotFound:
            continue
        report.find(f"sessions/ends-{number} is there after its time")
    listed = [session.name for session in client.sessions.list(page_size=100)]
    if listed != [STAYS]:
        report.find(f"{len(listed) - 1} sessions are listed after their time")


def _wait_until_gone(report: Report, client: Client, used_bytes: Sequence[int]) -> float:
    """When all are removed and their space is back, which it is behind their records."""
    if not _until(lambda: client.admin.stats().session_count == 1, report.patience_s(GONE_S)):
        report.find(f"{client.admin.stats().session_count - 1} sessions are not removed after {GONE_S} s")
    if not _until(lambda: _is_back(client, used_bytes), report.patience_s(BACK_S)):
        report.find(f"space is not back: {used_bytes} B before, {_used_bytes(client)} B {BACK_S} s after")
    return time.monotonic()


def _until(is_so: Callable[[], bool], within_s: float) -> bool:
    deadline_s = time.monotonic() + within_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def _is_back(client: Client, used_bytes: Sequence[int]) -> bool:
    return all(now <= before for now, before in zip(_used_bytes(client), used_bytes, strict=True))


def _judge(
    options: argparse.Namespace, report: Report, name: str, calm_s: list[float], during_s: list[float]
) -> None:
    if not calm_s or not during_s:
        report.find(f"no {name} was measured")
        return
    p99_s = during_s[int(len(during_s) * 0.99)]
    report.figures |= {
        f"{name}_p99_before_ms": round(1e3 * calm_s[int(len(calm_s) * 0.99)], 1),
        f"{name}_p99_during_ms": round(1e3 * p99_s, 1),
        f"{name}_longest_during_ms": round(1e3 * during_s[-1], 1),
    }
    if not options.untimed and p99_s > P99_LIMIT_S:
        report.find(f"the p99 of a {name} was {1e3 * p99_s:.0f} ms while sessions expired")
    if not options.untimed and during_s[-1] > STALL_LIMIT_S:
        report.find(f"a {name} took {1e3 * during_s[-1]:.0f} ms while sessions expired")


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sessions", type=int, default=5000, help="that expire at one moment; long run 100000"
    )
    parser.add_argument("--rate", type=int, default=500, help="at least so many are created per second")
    parser.add_argument("--untimed", action="store_true", help="do not judge how long calls took")


HARNESS = Harness(
    "expiry",
    "Lets many sessions expire at the same moment, and looks at who notices.",
    run,
    {
        "seen_until_removed": "a session is there until upkeep comes to it",
        "space_kept": "what expires keeps its slots",
        "all_at_once": "every session that is due is removed in one step (found with --sessions 100000)",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
