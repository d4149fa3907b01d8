"""Drain: SIGTERM under load, again and again, and nothing that was begun or acknowledged is lost.

Each cycle starts the server, has clients append as fast as they can, and has slow work of every kind under
way: a read over gRPC, a lease, room that is being written into. Then SIGTERM. Calls under way end well; what
comes later is refused with an error that says to come again; the health service says no; the exit code is 0
within the bound; and the next start has every token that was ever acknowledged, durable or not, with its
bytes. Worst case: a disk so slow that the flush takes longer than the bound, which is a finding.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

import ctxcache
from ctxcache.client import CallerModel
from ctxcache.errors import CacheError, CapacityExceeded, Draining, TooManyRequests, Unavailable
from lab.routes import route_options
from tests.faults.harness import Harness, Report, progress
from tests.faults.planted import forked
from tests.faults.rows import first_difference, rows_of
from tests.faults.soak import STORED, model
from tests.server_process import ServerProcess

WRITERS, SESSIONS_EACH, SLOW_TOKENS = 3, 4, 900
DRAIN_TIMEOUT_S, FLUSH_S = 10.0, 15.0
SLOW_S = 1.0
"""How long slow work goes on after the drain has begun: well within its timeout."""
SLOW_WRITE_TOKENS = 20
"""Less than a segment: nothing but the end in order writes them."""


class Writer(threading.Thread):
    """Appends until it is told that the server drains; `acknowledged` tokens by session."""

    def __init__(self, target: str, owner: int, acknowledged: dict[str, int], report: Report) -> None:
        super().__init__(daemon=True)
        self._target, self._owner, self._report = target, owner, report
        self.acknowledged = acknowledged

    def run(self) -> None:
        """Until it is refused."""
        draw = random.Random(self._owner)
        with ctxcache.connect(
            self._target, **route_options(draw.choice(("remote", "local", "grpc"))), timeout_s=20.0
        ) as client:
            sessions = {}
            while True:
                name = f"sessions/w{self._owner}-{draw.randrange(SESSIONS_EACH)}"
                begin, count = self.acknowledged.get(name, 0), draw.choice((1, 20, 64, 150))
                rows = {
                    s.stream: rows_of(self._owner, s.stream, begin, begin + count, s.row_bytes)
                    for s in STORED
                }
                try:
                    if name not in sessions:
                        sessions[name] = client.sessions.get(name)
                    sessions[name] = client.sessions.open(sessions[name], CallerModel(model(0))).append(rows)
                    self.acknowledged[name] = begin + count
                except (TooManyRequests, CapacityExceeded):
                    continue
                except (Draining, Unavailable):
                    return
                except CacheError as error:
                    self._report.find(f"an append was refused with {error.reason}: {error}")
                    return


class Slow(threading.Thread):
    """One piece of slow work that is under way when the signal comes; it must end well."""

    def __init__(self, what: str, work: Callable[["Slow"], None], report: Report) -> None:
        super().__init__(daemon=True)
        self._what, self._work, self._report = what, work, report
        self.is_under_way = threading.Event()
        self.is_draining = threading.Event()

    def run(self) -> None:
        """Do it."""
        try:
            self._work(self)
        except CacheError as error:
            self._report.find(f"{self._what} that was under way ended with {error.reason}: {error}")
        finally:
            self.is_under_way.set()

    def wait_past_signal(self) -> None:
        """It has begun; go on some time after the drain has."""
        self.is_under_way.set()
        self.is_draining.wait()
        time.sleep(SLOW_S)


def _slow_work(server: ServerProcess, acknowledged: dict[str, int], report: Report) -> list[Slow]:
    def read(slow: Slow, access: str) -> None:
        with (
            ctxcache.connect(server.unix_target, **route_options(access)) as client,
            client.sessions.open("sessions/slow", CallerModel(model(0))).read() as rows,
        ):
            slow.wait_past_signal()
            for spec in STORED:
                found = np.asarray(rows.array(spec.stream)).view(np.uint8).reshape(SLOW_TOKENS, -1)
                if first_difference(found, 99, spec.stream, 0) is not None:
                    report.find(f"rows read by {access} are not the session's own")

    def write(slow: Slow) -> None:
        with ctxcache.connect(server.unix_target, access="local") as client:
            begin = acknowledged.get("sessions/slow-writer", 0)
            end = begin + SLOW_WRITE_TOKENS
            with client.sessions.open("sessions/slow-writer", CallerModel(model(0))).writer(
                SLOW_WRITE_TOKENS
            ) as writer:
                for spec in STORED:
                    writer.write(spec.stream, 0, rows_of(98, spec.stream, begin, end, spec.row_bytes))
                slow.wait_past_signal()
                writer.commit()
                acknowledged["sessions/slow-writer"] = end

    return [
        Slow("a lease", lambda slow: read(slow, "local"), report),
        Slow("a lease over gRPC", lambda slow: read(slow, "local-grpc"), report),
        Slow("a read over gRPC", lambda slow: read(slow, "grpc"), report),
        Slow("a read over the bulk channel", lambda slow: read(slow, "bulk"), report),
        Slow("a reservation", write, report),
    ]


# -- the run ---------------------------------------------------------------------------------------


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    program = forked([options.control] if options.control else [])
    with tempfile.TemporaryDirectory(prefix="ctxcache-drain-") as folder:
        server = ServerProcess(
            Path(folder) / "data", "--arena-size-bytes", str(96 << 20), "--ssd-size-bytes", str(256 << 20),
            "--drain-timeout-s", str(DRAIN_TIMEOUT_S), program=program,
        )  # fmt: skip
        acknowledged: dict[str, int] = {}
        longest_s = 0.0
        with server:
            _prepare(server)
            for cycle in range(options.cycles):
                longest_s = max(longest_s, _cycle(options, report, server, acknowledged, cycle))
                server.start()
                _verify(report, server, acknowledged)
                report.count("drain_count")
                progress(cycle + 1, options.cycles, "drains")
                if report.findings:
                    break
        report.figures["longest_drain_s"] = round(longest_s, 2)


def _prepare(server: ServerProcess) -> None:
    with ctxcache.connect(server.target, access="remote") as client:
        client.models.register(model(0))
        names = [f"w{owner}-{i}" for owner in range(WRITERS) for i in range(SESSIONS_EACH)]
        for name in ("slow", "slow-writer", *names):
            layout = [spec.stream for spec in STORED[1:]]
            client.sessions.create(CallerModel(model(0)), id=name, layout=layout)
        rows = {s.stream: rows_of(99, s.stream, 0, SLOW_TOKENS, s.row_bytes) for s in STORED}
        client.sessions.open("sessions/slow", CallerModel(model(0))).append(rows)


def _cycle(
    options: argparse.Namespace,
    report: Report,
    server: ServerProcess,
    acknowledged: dict[str, int],
    cycle: int,
) -> float:
    """Load, a signal, and the end; returns how long that took."""
    draw = random.Random(options.seed * 1000 + cycle)
    writers = [Writer(server.unix_target, owner, acknowledged, report) for owner in range(WRITERS)]
    slow = _slow_work(server, acknowledged, report)
    watch = HealthWatch(server.target, [work.is_draining for work in slow])
    for thread in (*writers, *slow, watch):
        thread.start()
    for is_under_way in (*(work.is_under_way for work in slow), watch.is_under_way):
        is_under_way.wait()
    time.sleep(draw.uniform(0.0, options.load_s))
    began_s = time.monotonic()
    code = server.terminate()
    took_s = time.monotonic() - began_s
    for thread in (*writers, *slow, watch):
        thread.join()
    if watch.seen[-1:] != [health_pb2.HealthCheckResponse.NOT_SERVING]:
        report.find(f"the health service said {watch.seen}")
    if code:
        report.find(f"exit code {code}: {server.stderr[-500:]}")
    if took_s > DRAIN_TIMEOUT_S + FLUSH_S:
        report.find(f"the drain took {took_s:.1f} s")
    return took_s


class HealthWatch(threading.Thread):
    """Watches the server's health from before the signal until the stream ends, and tells when it drains."""

    def __init__(self, target: str, draining: Sequence[threading.Event]) -> None:
        super().__init__(daemon=True)
        self._target, self._draining = target, draining
        self.is_under_way = threading.Event()
        self.seen: list[int] = []

    def run(self) -> None:
        """Note every state that is told."""
        with grpc.insecure_channel(self._target) as channel, suppress(grpc.RpcError):
            request = health_pb2.HealthCheckRequest(service="")
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for response in stub.Watch(request):
                self.seen.append(response.status)
                self.is_under_way.set()
                if response.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    self._tell()
        # A server that says nothing lets its watchers go all the same.
        self._tell()
        self.is_under_way.set()

    def _tell(self) -> None:
        for event in self._draining:
            event.set()


def _verify(report: Report, server: ServerProcess, acknowledged: dict[str, int]) -> None:
    with ctxcache.connect(server.target, access="remote") as client:
        for name, token_count in acknowledged.items():
            session = client.sessions.get(name)
            if session.token_count != token_count:
                # A commit without an answer may be there; an answered one must be.
                if session.token_count < token_count:
                    report.find(f"{name}: {session.token_count} tokens of {token_count} acknowledged")
                acknowledged[name] = session.token_count
            owner = 98 if "slow" in name else int(name.removeprefix("sessions/w").split("-")[0])
            with client.sessions.open(name, CallerModel(model(0))).read(streams=[STORED[1].stream]) as rows:
                found = np.asarray(rows.array(STORED[1].stream)).view(np.uint8)
                wrong = first_difference(found.reshape(-1, STORED[1].row_bytes), owner, STORED[1].stream, 0)
            if wrong is not None:
                report.find(f"{name}: row {wrong} is not its own")
            if session.token_count > SLOW_TOKENS * 2:
                client.sessions.open(name).keep_first(0)
                acknowledged[name] = 0


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cycles", type=int, default=6, help="drains; the long run takes 200")
    parser.add_argument("--load-s", type=float, default=0.5, help="most seconds of load before the signal")


HARNESS = Harness(
    "drain",
    "Ends a server under load, again and again, and looks for what was lost.",
    run,
    {
        "flush_left_out": "the end does not wait for what is dirty",
        "cut_at_once": "what is under way is cut off at the signal",
        "serving_to_the_end": "health goes on saying yes",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
