"""Overload: at ten times what the server can do, it goes on doing that, and refuses the rest at once.

One server, which has a core to itself, and generators on another one. In turns: *saturation*, a closed loop
of exactly as many streams as are admitted, whose rate is the sustainable one and its peak; and *overload*, an
open loop of ten times that rate with ten times the small calls and local leases. Compared figures come from
the same run, a minute apart at most:

    goodput     streams that ended well per second, overload beside saturation
    admitted    p99 of those streams' latency, overload beside saturation: both wait for their turn on
                the core behind as many others, so that what is compared is what refusing costs
    refusals    from the moment at which a call should have begun, told by a process of its own, whose
                own work does not delay it
    memory      anonymous memory, beside what it was idle plus what admitted streams may keep

Worst case: the machine is busy with other work, which shows in both turns; --rounds makes them more.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.errors import CacheError, TooManyRequests
from ctxcache.format.checksums import wire_checksum
from ctxcache.format.streams import TOKENS_SPEC, DType, StateKind, Stream, StreamSpec
from ctxcache.v1 import model_pb2, session_pb2
from tests.faults.harness import Harness, Report, Unsupported, progress
from tests.faults.load_generator import OK, REFUSED, Outcome, Plan
from tests.faults.planted import command
from tests.faults.rows import rows_of
from tests.model_specs import small_model
from tests.server_process import COMMAND_LINE, ServerProcess

STREAMS_ADMITTED = 8
STREAM_BYTES_LIMIT = 8 << 20
"""The memory that one admitted stream may keep: two messages, one in the making and one on its way."""
ARENA_BYTES = 384 << 20
SSD_BYTES = 512 << 20
CONTEXTS, CONTEXT_TOKENS, WRITE_TOKENS, WRITERS = 4, 2048, 64, 16
PROBE_TOKENS = 64
ROW_BYTES, LAYERS = 4096, 8
FACTOR = 10
SMALL_RATE_HZ, PROBE_RATE_HZ, LOCAL_RATE_HZ = 10.0, 20.0, 5.0
LEAST_HZ = 4.0
"""Taken as the sustainable rate where less ended in time: ten times that is still more than is admitted."""
RECOVERY_S = 2.0
GOODPUT_RATIO, LATENCY_RATIO, REFUSAL_S, MEMORY_RATIO = 0.9, 2.0, 0.05, 1.05
SPEC = small_model(
    *[StreamSpec(Stream(i, StateKind.KV), ROW_BYTES, DType.FLOAT16) for i in range(LAYERS)],
    model_id="load",
    architecture="Load",
    layer_count=LAYERS,
    hidden_size=64,
    head_size=64,
)
OWN = CallerModel(SPEC)
STORED = (TOKENS_SPEC, *SPEC.streams)


@dataclass(slots=True)
class Phase:
    """The figures of one turn: outcomes of the load and of the probe, latencies of local leases."""

    seconds: float
    load: list[Outcome] = field(default_factory=list)
    probe: list[Outcome] = field(default_factory=list)
    leases_s: list[float] = field(default_factory=list)

    @property
    def goodput_hz(self) -> float:
        """Streams that ended well within the time, per second."""
        ended = [o for o in self.streams(OK) if o.begin_s + o.latency_s <= self.seconds]
        return len(ended) / self.seconds

    def streams(self, result: str) -> list[Outcome]:
        """Streams of the load, with that result."""
        return [o for o in self.load if o.kind != "small" and o.result == result]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many are not above; 0 of none."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else 0.0


class Memory(threading.Thread):
    """Watches the anonymous memory of a process."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._ended = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        """Look every 50 ms."""
        while not self._ended.wait(0.05):
            self.peak_bytes = max(self.peak_bytes, rss_bytes(self._pid))

    def end(self) -> int:
        """Stop; the most that there was."""
        self._ended.set()
        self.join()
        return self.peak_bytes


class LocalClient(threading.Thread):
    """Takes and gives back leases at a rate; refusals are answers, anything else is an error."""

    def __init__(self, target: str, rate_hz: float, seconds: float, report: Report) -> None:
        super().__init__(daemon=True)
        self._target, self._rate_hz, self._seconds, self._report = target, rate_hz, seconds, report
        self.latencies_s: list[float] = []

    def run(self) -> None:
        """Until the time is over."""
        with ctxcache.connect(self._target, access="local") as client:
            until_s = time.monotonic() + self._seconds
            while time.monotonic() < until_s:
                began_s = time.monotonic()
                try:
                    client.sessions.open("sessions/context-0", OWN).read().close()
                    self.latencies_s.append(time.monotonic() - began_s)
                except TooManyRequests:
                    self._report.count("refused_lease_count")
                except CacheError as error:
                    self._report.find(f"a local lease: {error}")
                time.sleep(max(0.0, 1 / self._rate_hz - (time.monotonic() - began_s)))


def rss_bytes(pid: int) -> int:
    """Anonymous memory of a process: not the arena, which is shared memory."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0  # it has ended
    for line in lines:
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    return 0


class Rig:
    """A filled server, and generators aimed at it."""

    def __init__(self, server: ServerProcess, core: int, report: Report) -> None:
        self.server, self._core, self._report = server, core, report
        with ctxcache.connect(server.target) as client:
            client.models.register(SPEC)
            for owner in range(CONTEXTS):
                _fill(client, f"context-{owner}", owner)
            for owner in range(WRITERS):
                _create(client, f"writer-{owner}")
        reads = [_read(f"context-{owner}") for owner in range(CONTEXTS)]
        writes = [_write(f"writer-{owner}") for owner in range(WRITERS)]
        small = session_pb2.GetSessionRequest(name="sessions/context-0").SerializeToString().hex()
        self._plan = Plan(server.target, 1.0, reads, writes, small)

    def saturate(self, seconds: float) -> Phase:
        """As many streams as are admitted, less one for the probe."""
        load = replace(
            self._plan, seconds=seconds, concurrency=STREAMS_ADMITTED - 1, small_rate_hz=SMALL_RATE_HZ
        )
        return self._run(load, seconds, LOCAL_RATE_HZ)

    def overload(self, seconds: float, rate_hz: float) -> Phase:
        """Everything, tenfold; the probe goes on after the end."""
        load = replace(
            self._plan, seconds=seconds, stream_rate_hz=FACTOR * rate_hz, small_rate_hz=FACTOR * SMALL_RATE_HZ
        )
        return self._run(load, seconds + RECOVERY_S + 1, FACTOR * LOCAL_RATE_HZ)

    def _run(self, load: Plan, probe_seconds: float, local_rate_hz: float) -> Phase:
        probe = replace(
            self._plan,
            seconds=probe_seconds,
            stream_rate_hz=PROBE_RATE_HZ,
            small_rate_hz=PROBE_RATE_HZ,
            reads=[_read("context-0", PROBE_TOKENS)],
            writes=[],
            channel_count=1,
        )
        local = LocalClient(self.server.unix_target, local_rate_hz, load.seconds, self._report)
        processes = [self._start(load), self._start(probe)]
        local.start()
        of_load, of_probe = (_outcomes(process) for process in processes)
        local.join()
        return Phase(load.seconds, of_load, of_probe, local.latencies_s)

    def _start(self, plan: Plan) -> "subprocess.Popen[str]":
        module = ("taskset", "-c", str(self._core), sys.executable, "-m", "tests.faults.load_generator", "-")
        process = subprocess.Popen(module, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write(json.dumps(asdict(plan)))
        process.stdin.close()
        return process


def _outcomes(process: "subprocess.Popen[str]") -> list[Outcome]:
    assert process.stdout is not None
    with process.stdout as out:
        text = out.read()
    if process.wait():
        raise RuntimeError(f"a generator ended with {process.returncode}")
    return [Outcome(**item) for item in json.loads(text)]


def _create(client: Client, name: str) -> None:
    client.sessions.create(OWN, id=name, layout=[s.stream for s in SPEC.streams])


def _fill(client: Client, name: str, owner: int) -> None:
    _create(client, name)
    rows = {s.stream: rows_of(owner, s.stream, 0, CONTEXT_TOKENS, s.row_bytes) for s in STORED}
    client.sessions.open(f"sessions/{name}", OWN).append(rows)


def _read(name: str, token_count: int = CONTEXT_TOKENS) -> str:
    request = session_pb2.ReadSessionRequest(
        name=f"sessions/{name}",
        model_fingerprint=SPEC.fingerprint(),
        range=session_pb2.TokenRange(begin=0, end=token_count),
    )
    return request.SerializeToString().hex()


def _write(name: str) -> tuple[list[str], str]:
    header = session_pb2.AppendHeader(
        name=f"sessions/{name}", model_fingerprint=SPEC.fingerprint(), write_offset=0
    )
    messages = [session_pb2.AppendSessionRequest(header=header)]
    for spec in STORED:
        data = rows_of(0, spec.stream, 0, WRITE_TOKENS, spec.row_bytes).tobytes()
        kind = model_pb2.StateKind.ValueType(spec.stream.kind)
        stream = model_pb2.StreamName(layer=spec.stream.layer, kind=kind)
        chunk = session_pb2.Chunk(stream=stream, token_begin=0, data=data, checksum=wire_checksum(data))
        messages.append(session_pb2.AppendSessionRequest(chunk=chunk))
    commit = session_pb2.AppendCommit(token_count=WRITE_TOKENS)
    messages.append(session_pb2.AppendSessionRequest(commit=commit))
    undo = session_pb2.TruncateSessionRequest(name=f"sessions/{name}", keep_first=0)
    return [m.SerializeToString().hex() for m in messages], undo.SerializeToString().hex()


# -- the run ---------------------------------------------------------------------------------------


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise Unsupported("server and clients need a core each; this process may use one")
    program = command([options.control]) if options.control else COMMAND_LINE
    with tempfile.TemporaryDirectory(prefix="ctxcache-overload-") as folder:
        server = ServerProcess(
            Path(folder) / "data",
            "--arena-size-bytes",
            str(ARENA_BYTES),
            "--ssd-size-bytes",
            str(SSD_BYTES),
            "--max-concurrent-streams",
            str(STREAMS_ADMITTED),
            program=program,
            wrapper=("taskset", "-c", str(cores[0])),
        )
        with server, _pinned(cores[-1]):
            _run(options, report, Rig(server, cores[-1], report))


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """This process stays away from the server's core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _run(options: argparse.Namespace, report: Report, rig: Rig) -> None:
    rig.saturate(1.0)
    idle_bytes = rss_bytes(rig.server.pid)
    memory = Memory(rig.server.pid)
    memory.start()
    calm: list[Phase] = []
    heavy: list[Phase] = []
    for turn in range(options.rounds):
        calm.append(rig.saturate(options.seconds))
        heavy.append(rig.overload(options.seconds, max(calm[-1].goodput_hz, LEAST_HZ)))
        progress(turn + 1, options.rounds, "rounds")
    budget_bytes = idle_bytes + STREAMS_ADMITTED * STREAM_BYTES_LIMIT
    report.figures |= {"idle_bytes": idle_bytes, "budget_bytes": budget_bytes, "peak_bytes": memory.end()}
    if memory.peak_bytes > MEMORY_RATIO * budget_bytes:
        report.find(f"memory rose to {memory.peak_bytes} B, the budget is {budget_bytes} B")
    timed = replace(report, findings=[]) if options.untimed else report
    _judge_goodput(timed, calm, heavy)
    _judge_refusals(timed, heavy)
    _judge_small_calls(timed, calm, heavy)
    for phase in heavy:
        _judge_outcomes(report, phase)
        _judge_recovery(timed, phase)


def _judge_goodput(report: Report, calm: Sequence[Phase], heavy: Sequence[Phase]) -> None:
    peak_hz, goodput_hz = (median(p.goodput_hz for p in phases) for phases in (calm, heavy))
    calm_s, heavy_s = (_latencies(phases, lambda p: p.streams(OK)) for phases in (calm, heavy))
    before_s, after_s = percentile(calm_s, 0.99), percentile(heavy_s, 0.99)
    offered = sum(o.kind != "small" for p in heavy for o in p.load)
    report.figures |= {
        "sustainable_streams_per_s": round(peak_hz, 1),
        "offered_streams_per_s": round(offered / sum(p.seconds for p in heavy), 1),
        "goodput_ratio": round(goodput_hz / peak_hz, 3) if peak_hz else None,
        "saturated_p99_ms": round(1e3 * before_s, 1),
        "admitted_p99_ms": round(1e3 * after_s, 1),
    }
    if goodput_hz < GOODPUT_RATIO * peak_hz:
        report.find(f"goodput fell to {goodput_hz:.1f} of {peak_hz:.1f} streams per second")
    if after_s > LATENCY_RATIO * before_s:
        report.find(f"the p99 of what was admitted rose from {before_s:.3f} s to {after_s:.3f} s")


def _judge_refusals(report: Report, heavy: Sequence[Phase]) -> None:
    refused = [o for p in heavy for o in p.probe if o.result == REFUSED]
    report.figures["refused_count"] = sum(len(p.streams(REFUSED)) for p in heavy)
    report.figures["refusal_p50_ms"] = round(1e3 * percentile([o.latency_s for o in refused], 0.5), 1)
    report.figures["refusal_p99_ms"] = round(1e3 * percentile([o.latency_s for o in refused], 0.99), 1)
    if percentile([o.latency_s for o in refused], 0.99) > REFUSAL_S:
        report.find(f"one refusal in a hundred took {report.figures['refusal_p99_ms']} ms or more")


def _judge_outcomes(report: Report, phase: Phase) -> None:
    everything = [*phase.load, *phase.probe]
    if not phase.streams(REFUSED):
        report.find("nothing was refused")
    for outcome in everything:
        if outcome.result not in (OK, REFUSED):
            report.find(f"a {outcome.kind} ended with {outcome.result}")
        elif outcome.result == REFUSED and not outcome.has_delay:
            report.find(f"a {outcome.kind} was refused without a delay")
    if not phase.streams(OK):
        report.find("nothing was served")


def _judge_recovery(report: Report, phase: Phase) -> None:
    late = [o for o in phase.probe if o.begin_s > phase.seconds + RECOVERY_S and o.result != OK]
    if late:
        report.find(f"{len(late)} calls were refused more than {RECOVERY_S} s after the load was gone")


def _judge_small_calls(report: Report, calm: Sequence[Phase], heavy: Sequence[Phase]) -> None:
    before_s, after_s = (_latencies(ps, _small) for ps in (calm, heavy))
    report.figures["small_p99_saturated_ms"] = round(1e3 * percentile(before_s, 0.99), 1)
    report.figures["small_p99_overload_ms"] = round(1e3 * percentile(after_s, 0.99), 1)
    leases = [percentile([s for p in ps for s in p.leases_s], 0.99) for ps in (calm, heavy)]
    report.figures["lease_p99_saturated_ms"], report.figures["lease_p99_overload_ms"] = (
        round(1e3 * value, 1) for value in leases
    )
    if percentile(after_s, 0.99) > max(LATENCY_RATIO * percentile(before_s, 0.99), REFUSAL_S):
        report.find("small calls waited behind what was refused")


def _small(phase: Phase) -> list[Outcome]:
    return [o for o in phase.probe if o.kind == "small" and o.begin_s <= phase.seconds]


def _latencies(phases: Sequence[Phase], of: Callable[[Phase], list[Outcome]]) -> list[float]:
    return [outcome.latency_s for phase in phases for outcome in of(phase)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=2, help="saturation and overload, in turns; long run 6")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each; long run 15")
    parser.add_argument(
        "--untimed", action="store_true", help="find what is wrong whatever the machine is busy with"
    )


HARNESS = Harness(
    "overload",
    "Offers ten times what a server can do, and sees whether it goes on doing it.",
    run,
    {
        "admission_off": "everything is taken on at once",
        "refusal_leaks": "refusals keep some memory",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
