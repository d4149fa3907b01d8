"""Neighbour: one tenant sends the most expensive requests it may; another one's small calls hardly wait.

One real server that tells tenants apart by their tokens. For each attack in turns: *idle*, the neighbour asks
GetSession of its own session in a closed loop, and nobody else is there; *busy*, the same beside as many
processes as attack, which compute and send nothing; and *attack*, the same while processes of another tenant
send prepared requests in closed loops, without a pause. Every answer that the attacker gets must fit into
what a stock client takes, and every refusal must have a reason.

Two figures of each call are compared, p99 of the attack beside the lesser p99 of the others, seconds apart.
*Work*: the processor time that the server had between the call's sending and its answer.
That is what a call waits for on a machine of the server's own, and other work here does not change it. It is
what is judged. *Wall*: the time on the clock, told beside it. Calls in which the neighbour itself waited for
a processor are left out of either.

In service attackers are on machines of their own. So the server has one processor to itself, and the rest are
the clients'; the neighbour's process is real-time (SCHED_FIFO) there: it waits for no attacker's computing.
Server and attackers go before other work of this machine. The report says what lacks: priorities, a second
processor, or the kernel's counters, without which wall time is judged.
The server's share of its processor is told: an attack that leaves it idle proves little.

Worst case: other work keeps the server from its processor, and attacks have fewer turns; --rounds makes them
more, and the median of their ratios counts.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import platform
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, ClassVar

import grpc
import numpy as np

from ctxcache.identity import ArenaGrant, Token, digest_of
from ctxcache.v1 import model_pb2, model_pb2_grpc, session_pb2, session_pb2_grpc
from ctxcache.wire.status import from_rpc_error
from tests import expensive_calls as calls
from tests.faults.harness import Harness, Report, progress
from tests.faults.planted import command
from tests.server_process import COMMAND_LINE, ServerProcess

RATIO = 3.0
"""The most by which another's calls may multiply the p99 of a small call."""
SESSIONS, LISTED, LONG_TOKENS = 1200, 30, 1 << 17
ATTACKERS, CALL_TIMEOUT_S, PAUSE_S = 3, 60.0, 0.003
"""Processes that attack at once; how long the neighbour waits between two calls."""
NICENESS = -15
"""Priorities of the server and of attackers, where this user may set them."""
WAITED_S = 0.0001
"""Calls in which the neighbour waited longer for a processor are not judged."""


@dataclass(slots=True)
class Sent:
    """One attacker's calls, and their outcomes."""

    call_count: int = 0
    largest_bytes: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


def attack(target: str, name: str, facts: calls.Facts, begun: Event, ended: Event) -> Sent:
    """Send an attack's requests over and over, one at a time, until `ended`."""
    requests, sent = calls.ATTACKS[name](facts), Sent()
    metadata = (("authorization", "Bearer attacker"),)
    with grpc.insecure_channel(target) as channel:
        for method, request in cycle(requests):
            if ended.is_set():
                return sent
            try:
                for answer in _answers(channel, method, request, metadata):
                    sent.largest_bytes = max(sent.largest_bytes, len(answer))
                    if ended.is_set():
                        break
            except grpc.RpcError as error:
                reason = _reason(error)
                sent.reasons[reason] = sent.reasons.get(reason, 0) + 1
            sent.call_count += 1
            begun.set()
    return sent


def _answers(channel: Any, method: str, request: bytes, metadata: Any) -> Iterator[bytes]:
    if method.endswith(("/Access", "/Schedule")):
        requests = [bytes.fromhex(each) for each in json.loads(request)] if request[:1] == b"[" else [request]
        yield from channel.stream_stream(method)(iter(requests), metadata=metadata, timeout=CALL_TIMEOUT_S)
    elif method.endswith("/ReadSession"):
        yield from channel.unary_stream(method)(request, metadata=metadata, timeout=CALL_TIMEOUT_S)
    else:
        yield channel.unary_unary(method)(request, metadata=metadata, timeout=CALL_TIMEOUT_S)


def _reason(error: Any) -> str:
    return f"{error.code().name} {from_rpc_error(error, 'attacked').reason}"


def _attacker(
    target: str,
    name: str,
    facts: calls.Facts,
    begun: Event,
    ended: Event,
    results: "multiprocessing.Queue[Sent]",
) -> None:
    _as_client()
    results.put(attack(target, name, facts, begun, ended))


# -- the neighbour ---------------------------------------------------------------------------------


class Work:
    """The processor time of a process with all its threads, as the kernel counts it (perf_event_open).

    /proc tells it too, but up to 4 ms late while a thread computes.
    """

    _NUMBER: ClassVar = {"x86_64": 298, "aarch64": 241}
    _SOFTWARE, _TASK_CLOCK, _SIZE, _FLAGS_AT, _INHERIT = 1, 1, 128, 40, 2

    def __init__(self, pid: int) -> None:
        """Threads that begin later count too. Raises OSError where this user may not."""
        attributes = bytearray(self._SIZE)
        struct.pack_into("=IIQ", attributes, 0, self._SOFTWARE, self._SIZE, self._TASK_CLOCK)
        struct.pack_into("=Q", attributes, self._FLAGS_AT, self._INHERIT)
        event = (ctypes.c_char * self._SIZE).from_buffer(attributes)
        syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._counters: list[int] = []
        for thread in Path(f"/proc/{pid}/task").iterdir():
            counter = syscall(self._NUMBER.get(platform.machine(), -1), event, int(thread.name), -1, -1, 0)
            if counter < 0:
                self.close()
                raise OSError(ctypes.get_errno(), "perf_event_open")
            self._counters.append(counter)

    def now_s(self) -> float:
        """All of it until now, in seconds."""
        return sum(int.from_bytes(os.read(counter, 8), "little") for counter in self._counters) / 1e9

    def close(self) -> None:
        """Count no more."""
        for counter in self._counters:
            os.close(counter)
        self._counters.clear()


@dataclass(frozen=True, slots=True)
class Calls:
    """The times of calls, in seconds each: on the clock, and of the server's processor."""

    wall_s: list[float] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)


class Neighbour:
    """Small calls of another tenant, one after the other."""

    def __init__(self, target: str, work: Work | None) -> None:
        """`work`: the server's."""
        self._work = work
        self._channel: Any = grpc.insecure_channel(target)
        self._get: Any = self._channel.unary_unary(f"{calls.SESSION}GetSession")
        self._request = session_pb2.GetSessionRequest(name="sessions/mine").SerializeToString()
        self._metadata = (("authorization", "Bearer neighbour"),)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def ask(self, seconds: float) -> Calls:
        """Ask so long."""
        found = Calls()
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s or not found.wall_s:
            waited_s, work_s = _waited_s(), self._work.now_s() if self._work else 0.0
            began_s = time.monotonic()
            self._get(self._request, metadata=self._metadata, timeout=CALL_TIMEOUT_S)
            took_s = time.monotonic() - began_s
            work_s = self._work.now_s() - work_s if self._work else took_s
            if _waited_s() - waited_s <= WAITED_S:
                found.wall_s.append(took_s)
                found.work_s.append(work_s)
            time.sleep(PAUSE_S)
        return found


def _waited_s() -> float:
    """How long this process's threads have been ready and had no processor."""
    threads = (Path(thread.path, "schedstat") for thread in os.scandir("/proc/self/task"))
    return sum(int(each.read_text().split()[1]) for each in threads) / 1e9


def _as_client() -> None:
    """Take turns on the clients' processors: children have what the neighbour has."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    _hasten()


@contextmanager
def _first_of_all() -> Iterator[None]:
    """This session's processes go before those of others, where this user may: niceness counts within one."""
    group = Path("/proc/self/autogroup")
    with contextlib.suppress(OSError):
        before = group.read_text().rpartition(" ")[2]
        group.write_text(str(NICENESS))
    try:
        yield
    finally:
        with contextlib.suppress(OSError, UnboundLocalError):
            group.write_text(before)


def _hasten() -> bool:
    """Go before other work of this machine. False where this user may not."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    except PermissionError:
        return False
    return True


def _server_processor() -> int:
    return min(os.sched_getaffinity(0))


def _as_neighbour() -> str:
    """Leave the server its processor, and wait for no other process on the rest; what of it lacks here."""
    if not (others := os.sched_getaffinity(0) - {_server_processor()}):
        return "no second processor: clients compute on the server's"
    os.sched_setaffinity(0, others)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return "no right to real-time priority: attackers' computing delays the neighbour"
    return "server and clients apart, the neighbour in real time"


def _compute(begun: Event, ended: Event) -> None:
    _as_client()
    begun.set()
    while not ended.is_set():
        sum(range(10_000))


@contextmanager
def _busy() -> Iterator[None]:
    """As many processes as attack compute meanwhile."""
    context = multiprocessing.get_context("spawn")
    begun, ended = [context.Event() for _ in range(ATTACKERS)], context.Event()
    processes = [context.Process(target=_compute, args=(each, ended), daemon=True) for each in begun]
    for process in processes:
        process.start()
    try:
        for each in begun:
            each.wait(CALL_TIMEOUT_S)
        yield
    finally:
        ended.set()
        for process in processes:
            process.join()


@contextmanager
def _attacked(target: str, name: str, facts: calls.Facts, report: Report) -> Iterator[None]:
    """Attackers are at it meanwhile."""
    context = multiprocessing.get_context("spawn")
    ended, results = context.Event(), context.Queue()
    begun = [context.Event() for _ in range(ATTACKERS)]
    attackers = [
        context.Process(target=_attacker, args=(target, name, facts, each, ended, results), daemon=True)
        for each in begun
    ]
    for process in attackers:
        process.start()
    try:
        for each in begun:
            if not each.wait(CALL_TIMEOUT_S):
                report.find(f"{name}: an attacker was not answered within {CALL_TIMEOUT_S:g} s")
        yield
    finally:
        ended.set()
        sent = [results.get(timeout=2 * CALL_TIMEOUT_S) for _ in attackers]
        for process in attackers:
            process.join()
    _judge_answers(report, name, sent)


def _judge_answers(report: Report, name: str, sent: Sequence[Sent]) -> None:
    largest_bytes = max(each.largest_bytes for each in sent)
    reasons: dict[str, int] = {}
    for each in sent:
        for reason, count in each.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    report.figures[f"{name}_calls"] = sum(each.call_count for each in sent)
    report.figures[f"{name}_largest_answer_bytes"] = largest_bytes
    if reasons:
        report.figures[f"{name}_refusals"] = reasons
    if largest_bytes > calls.ANSWER_BYTES:
        report.find(f"{name}: an answer of {largest_bytes} B, stock clients take 4 MiB")
    for reason in reasons:
        if reason.startswith(("UNKNOWN", "INTERNAL")):
            report.find(f"{name}: {reason}")


def _alone() -> tuple[str, ...]:
    """The command that starts a server: one processor, and first there."""
    pinned = ("taskset", "-c", str(_server_processor()))
    return (*pinned, "nice", "-n", str(NICENESS)) if os.geteuid() == 0 else pinned


# -- the run ---------------------------------------------------------------------------------------


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    program = command([options.control]) if options.control else COMMAND_LINE
    with tempfile.TemporaryDirectory(prefix="ctxcache-neighbour-") as folder, ExitStack() as stack:
        stack.enter_context(_first_of_all())
        hashes = Path(folder) / "hashes"
        names = ("attacker", "neighbour")
        lines = (Token(n, digest_of(n), ArenaGrant(n, has_shared_memory=True)).line() for n in names)
        hashes.write_text("\n".join(lines))
        hashes.chmod(0o600)
        server = ServerProcess(
            Path(folder) / "data",
            "--token-hashes",
            str(hashes),
            "--arena-size-bytes",
            "256MiB",
            "--ssd-size-bytes",
            "512MiB",
            program=program,
            wrapper=_alone(),
        )
        stack.enter_context(server)
        facts = _prepare(server.target)
        # Before the connection, whose threads have what this one has.
        report.figures["processors"] = _as_neighbour()
        try:
            work: Work | None = Work(server.pid)
        except OSError as error:
            work, report.figures["judged"] = None, f"by wall time: {error}"
        neighbour = Neighbour(server.target, work)
        stack.callback(neighbour.close)
        neighbour.ask(0.2)
        chosen = options.attack or list(calls.ATTACKS)
        for done, name in enumerate(chosen):
            _judge(options, report, server, neighbour, facts, name)
            report.end_if_found()
            progress(done + 1, len(chosen), "attacks")


def _judge(
    options: argparse.Namespace,
    report: Report,
    server: ServerProcess,
    neighbour: Neighbour,
    facts: calls.Facts,
    name: str,
) -> None:
    rounds: list[tuple[Calls, Calls, Calls]] = []
    shares: list[float] = []
    for _ in range(options.rounds):
        idle = neighbour.ask(options.seconds)
        with _busy():
            busy = neighbour.ask(options.seconds)
        with _attacked(server.target, name, facts, report):
            begun_s = _processor_s(server.pid)
            attacked = neighbour.ask(options.seconds)
            shares.append((_processor_s(server.pid) - begun_s) / options.seconds)
        rounds.append((idle, busy, attacked))
    (work_told, work_ratio), (wall_told, wall_ratio) = (
        _compared([[getattr(calls, which) for calls in each] for each in rounds])
        for which in ("work_s", "wall_s")
    )
    share = float(np.median(shares))
    report.figures[name] = (
        f"work {work_told}, ratio {work_ratio:.2f}; wall {wall_told}, ratio {wall_ratio:.2f}; "
        f"server {share:.0%} of its processor"
    )
    if work_ratio > RATIO and not options.untimed:
        report.find(f"{name}: p99 of a neighbour's call rose {work_ratio:.1f} times: {work_told}")


def _compared(rounds: Sequence[Sequence[Sequence[float]]]) -> tuple[str, float]:
    """Quantiles of idle, busy and attack, medians of all rounds; and what the attack made of p99."""
    ms = np.array([[1e3 * np.quantile(each, (0.5, 0.99)) for each in turns] for turns in rounds])
    ratio = float(np.median(ms[:, 2, 1] / ms[:, :2, 1].min(axis=1)))
    turns = zip(("idle", "busy", "attack"), np.median(ms, axis=0), strict=True)
    return ", ".join(f"{turn} p50 {p50:.2f} p99 {p99:.2f} ms" for turn, (p50, p99) in turns), ratio


def _processor_s(pid: int) -> float:
    """The processor time that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _prepare(target: str) -> calls.Facts:
    """Make each tenant's sessions before the attacks."""
    with grpc.insecure_channel(target) as channel:
        mine = _Tenant(channel, "neighbour")
        mine.register(calls.small_model())
        mine.create("mine", "small", [])
        theirs = _Tenant(channel, "attacker")
        small, large = theirs.register(calls.small_model()), theirs.register(calls.large_model("large"))
        for number in range(LISTED):
            theirs.register(calls.large_model(f"listed{number}", number))
        for number in range(SESSIONS):
            theirs.create(f"s{number}", "large", calls.layout(calls.RANGES, number % 64))
        theirs.create("all", "large", calls.everything())
        theirs.create("long", "small", [])
        theirs.append("long", small, LONG_TOKENS)
    return calls.Facts(large, small)


class _Tenant:
    """Stubs of one tenant."""

    def __init__(self, channel: grpc.Channel, token: str) -> None:
        self._sessions = session_pb2_grpc.SessionServiceStub(channel)
        self._models = model_pb2_grpc.ModelServiceStub(channel)
        self._facts: Any = {"metadata": (("authorization", f"Bearer {token}"),), "timeout": CALL_TIMEOUT_S}

    def register(self, model: model_pb2.Model) -> bytes:
        """The model's fingerprint."""
        request = model_pb2.RegisterModelRequest(model=model)
        return self._models.RegisterModel(request, **self._facts).fingerprint

    def create(self, name: str, model: str, layout: Sequence[model_pb2.StreamRange]) -> None:
        """An empty session."""
        request = session_pb2.CreateSessionRequest(session_id=name, model=f"models/{model}", layout=layout)
        self._sessions.CreateSession(request, **self._facts)

    def append(self, name: str, fingerprint: bytes, token_count: int) -> None:
        """Token ids, all of them zero."""
        self._sessions.AppendSession(
            iter(calls.append_messages(name, fingerprint, token_count)), **self._facts
        )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn (default 2)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of idle and attack; the median counts (default 3)"
    )
    parser.add_argument(
        "--attack", action="append", choices=sorted(calls.ATTACKS), help="this one only; may be repeated"
    )
    parser.add_argument("--untimed", action="store_true", help="judge answers, not times")


HARNESS = Harness(
    "neighbour",
    "One tenant sends the most expensive requests that it may, and another one's small calls hardly wait.",
    run,
    {
        "never_rests": "large requests are carried out in one go, without a turn for others",
        "greedy_tenants_never_wait": "every call begins at once, however much its tenant has had",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
