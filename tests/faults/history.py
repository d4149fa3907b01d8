"""History: several processes change the same few sessions at once, and one order must explain all answers.

    python -m tests.faults.history --acts 200 [--power]

An act: clients in processes of their own, local and remote, write, fork, truncate, expire, delete, read and
look up three sessions, while the server is killed, or stands still, or clients do; with `--power` every blow
is a power cut, metadata and each SSD directory on disks of their own. Each call is logged outside the victim,
with its times, and the history of each name is checked (`history_check`). Worst case: a history too tangled
to decide, which is a finding.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import ctxcache
from ctxcache.errors import SessionNotFound, Unavailable
from lab.routes import Route
from tests.faults import planted
from tests.faults.crash import ProcessGround
from tests.faults.harness import Harness, Report, progress
from tests.faults.history_check import NEVER_NS, Op, Outcome, Runs, check, joined
from tests.faults.history_client import MODEL, SHAPE, Log, Worker, lineage_of, work
from tests.faults.plants.crash import JOINED
from tests.faults.power import PowerGround, check_supported
from tests.faults.rounds import Ground
from tests.nursery import Nursery
from tests.server_process import ServerDidNotStart, ServerProcess

CONTROLS = {
    "fork_leaves_tail_open": "a fork and its source go on in the same segment",
    "truncation_not_recorded": "a truncation is acknowledged and not written down",
    "offset_not_compared": "an append begins wherever the session ends by then",
    "acknowledged_before_record": "a flush returns while its record is still to be written",
    "deleted_record_stays": "the record of a deleted session is not removed",
}
POWER_CONTROLS = {
    "slots_not_synced": "SSD files are never synced (with --power)",
    "durable_wish_forgotten": "a durable commit is not synced where another follows (with --power)",
}
ACCESSES: tuple[Route, ...] = ("local-grpc", "local-socket", "grpc", "bulk")
NAMES_PER_ACT = 3
OPERATIONS_PER_CLIENT = 20
ACTS_PER_GROUND = 12
PAUSE_S = 0.3
ACT_TIMEOUT_S = 120.0
END_TIMEOUT_S = 60.0
POLL_S = 0.005
BLOWS = {"kill": 5, "stop the server": 2, "stop a client": 2, "kill a client": 2, "end": 1, "nothing": 1}
POWER_BLOWS = {"kill": 6, "stop the server": 1, "nothing": 1}
REFUSED = {
    "WriteInProgress",
    "TooManyRequests",
    "ReservationNotFound",
    "LeaseNotFound",
    "Draining",
    "SessionTooFragmented",
}
"""Answers that say of a session nothing that could be compared, and have changed nothing."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.faults.history_client"])


@dataclass(slots=True)
class Hand:
    """A client's process, and what leads there."""

    process: BaseProcess
    orders: Connection
    log: Path
    is_busy: bool = False


@dataclass(slots=True)
class Stage:
    """A data directory, its server and its clients, for some acts."""

    ground: Ground
    server: ServerProcess
    hands: list[Hand] = field(default_factory=list)
    crashes: list[Op] = field(default_factory=list)


class Play:
    """Plays acts and judges them."""

    def __init__(self, options: argparse.Namespace, report: Report, directory: Path, ground: Ground) -> None:
        self._report, self._directory, self._ground = report, directory, ground
        self._random = random.Random(options.seed)
        self._plants = ["checked_opening", *([options.control] if options.control else [])]
        self._is_shown = options.show
        self._blows = POWER_BLOWS if options.power else BLOWS
        self._nursery = Nursery(planted.MODULES)
        self._stage: Stage | None = None
        self._writer_count = 0

    def act(self, number: int) -> None:
        """One act: names that nobody has used, some work and blows, and the verdict."""
        stage = self._stage or self._begin()
        names = [f"sessions/a{number}s{i}" for i in range(NAMES_PER_ACT)]
        try:
            self._perform(stage, names)
            self._look(stage, names)
        except (ServerDidNotStart, Unavailable) as error:
            self._report.find(f"act {number}: {type(error).__name__}: {error}")
            # Without a server each client would wait for its deadline, and nobody asks what it has seen.
            for hand in stage.hands:
                hand.process.kill()
            self.end_stage()
            return
        history = History(names, stage.crashes)
        for log in self._directory.glob("*.jsonl"):
            history.add(log)
            os.truncate(log, 0)
        history.judge(self._report, f"act {number}", is_shown=self._is_shown)
        stage.crashes.clear()
        if number % ACTS_PER_GROUND == ACTS_PER_GROUND - 1:
            self.end_stage()

    def end_stage(self) -> None:
        """Let go of server and clients."""
        stage, self._stage = self._stage, None
        if stage is None:
            return
        for hand in stage.hands:
            with suppress(OSError):
                hand.orders.send(None)
            hand.process.join(END_TIMEOUT_S)
            if hand.process.is_alive():
                hand.process.kill()
        self._report.count("join_count", stage.server.stderr.count(JOINED))
        stage.server.close()

    def close(self) -> None:
        """End everything."""
        self.end_stage()
        self._nursery.close()

    # -- an act ------------------------------------------------------------------------------------

    def _begin(self) -> Stage:
        data_directory, ssd_directories = self._ground.renew()
        options = [part for path in ssd_directories for part in ("--ssd-directories", str(path))]
        options += ["--arena-size-bytes", str(400 * SHAPE.slot_bytes)]
        options += ["--ssd-size-bytes", str(600 * SHAPE.slot_bytes), "--log-level", "error"]
        plants = self._plants
        if isinstance(self._ground, PowerGround) and self._random.random() < 0.5:
            # Clients alone hardly ever make both kinds of commits meet in one write of the log.
            plants = [*plants, "commits_have_company"]
        if self._random.random() < 0.5:
            # Sessions are too short to be joined otherwise.
            plants = [*plants, "joins_early"]
        if len(ssd_directories) > 1 and self._random.random() < 0.5:
            options += ["--ssd-copies", "2"]
            self._report.count("stages_with_two_copies")
        server = ServerProcess(
            data_directory, *options, program=planted.forked(plants), nursery=self._nursery
        )
        self._stage = stage = Stage(self._ground, server)
        server.start()
        with ctxcache.connect(server.target, access="remote") as client:
            client.models.register(MODEL)
        for access in ACCESSES:
            stage.hands.append(self._hire(server, access))
        self._report.count("data_directory_count")
        return stage

    def _hire(self, server: ServerProcess, access: Route) -> Hand:
        self._writer_count += 1
        ours, theirs = _CONTEXT.Pipe()
        log = self._directory / f"client-{self._writer_count}.jsonl"
        log.touch()
        process = _CONTEXT.Process(
            target=work,
            daemon=True,
            args=(theirs, server.target, access, str(log), self._writer_count, self._random.getrandbits(32)),
        )
        process.start()
        theirs.close()
        return Hand(process, ours, log)

    def _perform(self, stage: Stage, names: Sequence[str]) -> None:
        for i, hand in enumerate(stage.hands):
            if not hand.process.is_alive():
                self._report.find(f"a client ended with exit code {hand.process.exitcode}")
                stage.hands[i] = hand = self._hire(stage.server, ACCESSES[i])  # noqa: PLW2901
            hand.orders.send((names, OPERATIONS_PER_CLIENT))
            hand.is_busy = True
        total = OPERATIONS_PER_CLIENT * len(stage.hands)
        (blow,) = self._random.choices([*self._blows], [*self._blows.values()])
        count = self._random.choice((1, 1, 2)) if blow == "kill" else 1
        for at in sorted(self._random.uniform(0.1, 1.0) for _ in range(count)):
            self._wait(stage, int(at * total))
            if blow != "end":
                self._strike(stage, blow)
        self._wait(stage, None)
        if blow == "end":
            self._end_in_order(stage)
        self._report.count(f"blow: {blow}")

    def _wait(self, stage: Stage, operation_count: int | None) -> None:
        """Wait until so many operations have begun, or until every client is done."""
        deadline_s = time.monotonic() + ACT_TIMEOUT_S
        while any(hand.is_busy for hand in stage.hands):
            for hand in stage.hands:
                if hand.is_busy and hand.orders.poll():
                    self._hear(hand)
            if operation_count is not None and _begun_count(stage.hands) >= operation_count:
                return
            if time.monotonic() > deadline_s:
                self._report.find(f"clients were not done after {ACT_TIMEOUT_S:.0f} s")
                return
            time.sleep(POLL_S)

    def _hear(self, hand: Hand) -> None:
        hand.is_busy = False
        with suppress(EOFError, ConnectionResetError):
            if problem := hand.orders.recv():
                self._report.find(problem)

    def _strike(self, stage: Stage, blow: str) -> None:
        server = stage.server
        if blow == "kill":
            began_ns = time.monotonic_ns()
            self._ground.strike(server)
            stage.crashes.append(Op("crash", began_ns, time.monotonic_ns(), is_known=True, text="the crash"))
            server.start()
        elif blow == "stop the server":
            server.signal(signal.SIGSTOP)
            time.sleep(PAUSE_S)
            server.signal(signal.SIGCONT)
        elif blow == "stop a client":
            self._stop_client(self._random.choice(stage.hands))
        elif blow == "kill a client":
            i = self._random.randrange(len(stage.hands))
            stage.hands[i].process.kill()
            stage.hands[i].process.join(END_TIMEOUT_S)
            stage.hands[i] = self._hire(server, ACCESSES[i])

    def _stop_client(self, hand: Hand) -> None:
        pid = hand.process.pid
        if pid is not None and hand.process.is_alive():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            os.kill(pid, signal.SIGCONT)

    def _end_in_order(self, stage: Stage) -> None:
        began_ns = time.monotonic_ns()
        code = stage.server.terminate()
        if code != 0:
            self._report.find(f"an end in order had exit code {code}: {stage.server.stderr[-500:]}")
        if isinstance(self._ground, PowerGround):
            self._ground.strike(None)
        stage.crashes.append(Op("ended", began_ns, time.monotonic_ns(), is_known=True, text="the end"))
        stage.server.start()

    def _look(self, stage: Stage, names: Sequence[str]) -> None:
        """Read every session by two ways, as one more client."""
        log = Log(self._directory / "looks.jsonl", 0)
        for access in self._random.sample(ACCESSES, 2):
            Worker(stage.server.target, access, log, 0, 0).look_at_all(names)
        log.close()
        with ctxcache.connect(stage.server.target, access="remote") as client:
            for session in client.sessions.list():
                with suppress(SessionNotFound):
                    client.sessions.open(session.name).delete()


def _begun_count(hands: Iterable[Hand]) -> int:
    return sum(hand.log.read_bytes().count(b'"kind"') for hand in hands)


class History:
    """The calls and answers of one act, by session name."""

    def __init__(self, names: Sequence[str], crashes: Sequence[Op]) -> None:
        self._ops: dict[str, list[Op]] = {name: list(crashes) for name in names}
        self._findings: list[str] = []
        self._calls: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._forks: list[tuple[int, Op]] = []
        self._unknown_tag = 0

    def add(self, log: Path) -> None:
        """Take what a client has logged."""
        calls: dict[int, dict[str, Any]] = {}
        ends: dict[int, dict[str, Any]] = {}
        for text in log.read_text().splitlines():
            line = json.loads(text)
            (calls if "kind" in line else ends)[line["op"]] = line
        self._calls += [(call, ends.get(number, {"unknown": "no answer"})) for number, call in calls.items()]

    def judge(self, report: Report, where: str, *, is_shown: bool) -> None:
        """Check every name's history; `is_shown`: write those that no order explains to standard error."""
        self._attribute([call for call, _ in self._calls if call["kind"] == "append"])
        for call, end in self._calls:
            self._take(call, end)
        report.count("operation_count", len(self._calls))
        durable_count = sum(c["kind"] == "append" and c["is_durable"] and "uid" in e for c, e in self._calls)
        report.count("durable_append_count", durable_count)
        outcomes = {name: check(ops) for name, ops in self._ops.items()}
        # Once more, now that it is known what forks were found to begin with.
        self._know_sources([bound for outcome in outcomes.values() for bound in outcome.bound])
        for name, ops in self._ops.items():
            first = outcomes[name]
            outcome = check(ops) if first.is_linearizable else first
            if first.is_linearizable and not outcome.is_linearizable and self._fits(first.lent):
                outcome = first
            self._tell(name, outcome)
            if not outcome.is_linearizable and is_shown:
                sys.stderr.write("\n".join([name, *_lines(ops)]) + "\n")
            report.count("history_count")
            report.count("checked_operation_count", len(ops))
            report.count("search_step_count", outcome.step_count)
        for finding in self._findings:
            report.find(f"{where}: {finding}")

    def _tell(self, name: str, outcome: Outcome) -> None:
        if not outcome.is_decided:
            self._findings.append(f"{name}: undecided after {outcome.step_count} steps")
        elif not outcome.is_linearizable:
            self._findings.append(f"{name}: {outcome.problem}")

    def _know_sources(self, bound: Sequence[tuple[int, int, int]]) -> None:
        for made_tag, source in self._forks:
            count = source.count
            source.known = tuple(
                (unknown - made_tag, tag, length)
                for unknown, tag, length in bound
                if made_tag <= unknown < made_tag + count
            )

    def _fits(self, lent: Sequence[tuple[int, Runs]]) -> bool:
        """Whether forks have an order when they begin with just what an order of their source says.

        Tokens that nobody knows may be read as one of several truncations: then what was read says too much.
        """
        for tag, runs in lent:
            for ops in self._ops.values():
                for op in ops:
                    if op.kind == "create" and op.tag == tag:
                        unknown, op.runs = op.runs, runs
                        is_linearizable = check(ops).is_linearizable
                        op.runs = unknown
                        if not is_linearizable:
                            return False
        return True

    # -- rows --------------------------------------------------------------------------------------

    def _attribute(self, appends: Sequence[Mapping[str, Any]]) -> None:
        """Every row that was read was appended by a client, to that session and at that position."""
        made = sorted((a["first"], a["count"], a["begin"], a["name"]) for a in appends)
        for call, end in self._calls:
            if "damage" in end:
                self._findings.append(f"{call['name']}: {end['damage']}, read by client {call['writer']}")
            for first, count, lineage, position in end.get("runs", ()):
                self._attribute_run(call["name"], first, count, lineage, position, made)

    def _attribute_run(
        self,
        name: str,
        first: int,
        count: int,
        lineage: int,
        position: int,
        made: Sequence[tuple[int, int, int, str]],
    ) -> None:
        while count > 0:
            found = next((m for m in made if m[0] <= first < m[0] + m[1]), None)
            if found is None:
                self._findings.append(f"{name}: token {first} was read, and nobody has committed it")
                return
            begin, length, at, writer_of = found
            if lineage != lineage_of(writer_of) or position != at + first - begin:
                self._findings.append(
                    f"{name}: token {first} says that it is of another place than it was written to"
                )
                return
            step = min(count, begin + length - first)
            first, count, position = first + step, count - step, position + step

    # -- operations --------------------------------------------------------------------------------

    def _take(self, call: Mapping[str, Any], end: Mapping[str, Any]) -> None:
        """Make operations of a call and its answer."""
        name, kind = call["name"], call["kind"]
        if name not in self._ops:
            return
        text = f"{kind} by client {call['writer']} ({_said(call)} -> {_said(end)})"
        times = {
            "called_ns": call["ns"],
            "returned_ns": end.get("ns", NEVER_NS),
            "is_known": True,
            "text": text,
        }
        if "error" in end:
            self._take_error(call, end, times)
        elif "unknown" in end:
            self._take_unknown(call, text)
        elif kind in ("get", "lookup"):
            self._add(name, Op("seen", **_view(end), **times))
        elif kind == "read":
            runs = joined([(first, count) for first, count, _, _ in end.get("runs", ())])
            if "damage" not in end:
                self._add(name, Op("read", runs=runs, **_view(end), **times))
        elif kind == "fork":
            made = self._forked(call, uid=end["uid"], **times)
            source = Op("source", count=call["count"], tag=made.tag, **times)
            self._add(name, source)
            self._forks.append((made.tag, source))
            self._add(call["target"], made)
            self._add(call["target"], Op("told", after=made, **_view(end), **times))
        else:
            change = _change(call, **times)
            if kind == "create":
                change.uid = end["uid"]
            self._add(name, change)
            if kind not in ("delete", "flush"):
                self._add(name, Op("told", after=change, **_view(end), **times))

    def _take_error(self, call: Mapping[str, Any], end: Mapping[str, Any], times: Mapping[str, Any]) -> None:
        name, kind, error = call["name"], call["kind"], end["error"]
        if error == "SessionNotFound" and kind == "append" and call["is_durable"]:
            # Committed, and gone when it was to be made durable: or never there.
            self._add(name, _change(call, called_ns=call["ns"], text=str(times["text"])))
        elif error == "SessionNotFound":
            self._add(name, Op("absent", **times))
        elif error == "SessionAlreadyExists":
            self._add(call.get("target", name), Op("present", **times))
        elif error == "WriteOffsetMismatch":
            self._add(name, Op("seen", count=end.get("token_count", -1), **times))
        elif error == "GenerationMismatch":
            self._add(name, Op("seen", generation=end.get("actual", -1), **times))
        elif error == "TokenRangeOutOfBounds":
            self._add(name, Op("out_of_bounds", count=call["count"], **times))
        elif error not in REFUSED:
            self._findings.append(f"{name}: {times['text']}")

    def _take_unknown(self, call: Mapping[str, Any], text: str) -> None:
        """An operation that may have taken effect, or may do so yet."""
        if call["kind"] == "fork":
            self._add(call["target"], self._forked(call, called_ns=call["ns"], text=text))
        elif call["kind"] not in ("get", "lookup", "read", "flush"):
            self._add(call["name"], _change(call, called_ns=call["ns"], text=text))

    def _forked(self, call: Mapping[str, Any], **facts: Any) -> Op:
        """The creation of a fork: of its tokens only the number is known."""
        self._unknown_tag -= call["count"] + 1
        tag = self._unknown_tag
        return Op("create", runs=joined([(tag, call["count"])]), tag=tag, **facts)

    def _add(self, name: str, op: Op) -> None:
        self._ops[name].append(op)


def _lines(ops: Sequence[Op]) -> Iterator[str]:
    """A history for people: when each was called and returned, in milliseconds, and what it was."""
    begin_ns = min(op.called_ns for op in ops)
    for op in sorted(ops, key=lambda op: op.called_ns):
        ends = f"{(op.returned_ns - begin_ns) / 10**6:10.2f}" if op.returned_ns < NEVER_NS else " " * 10
        yield f"{(op.called_ns - begin_ns) / 10**6:10.2f} {ends} {op.kind:<11} {op.text}"


def _view(end: Mapping[str, Any]) -> dict[str, Any]:
    return {"uid": end.get("uid", ""), "generation": end.get("generation", -1), "count": end.get("count", -1)}


def _change(call: Mapping[str, Any], **times: Any) -> Op:
    op = Op(call["kind"], count=call.get("count", -1), **times)
    if call["kind"] == "append":
        op.begin, op.is_durable = call["begin"], call["is_durable"]
        op.runs = ((call["first"], call["count"]),)
        op.generation = -1 if call["matches"] is None else call["matches"]
    op.sinks, op.ttl_ns = call.get("sinks", 0), call.get("ttl_ns", 0)
    if "due_ns" in call:
        op.due = call["due_ns"], call["due_ns"]
    return op


def _said(line: Mapping[str, Any]) -> str:
    hidden = ("kind", "name", "writer", "ns", "op", "uid", "says")
    return ", ".join(f"{name} {value}" for name, value in line.items() if name not in hidden)


def run(options: argparse.Namespace, report: Report) -> None:
    """Play the acts and fill the report. Raises Unsupported."""
    if options.power:
        check_supported()
    directory = Path(tempfile.mkdtemp(prefix="ctxcache-history-"))
    rng = random.Random(options.seed)
    power = PowerGround(directory, rng, disk_counts=(3,)) if options.power else None
    play = Play(options, report, directory, power or ProcessGround(directory, rng))
    try:
        for number in range(options.acts):
            play.act(number)
            progress(number + 1, options.acts, "acts")
            if options.control and report.findings:
                break
    finally:
        play.close()
        if power:
            power.close()
            report.figures["cut_count"] = power.cut_count
        shutil.rmtree(directory, ignore_errors=True)
    report.figures["act_count"] = options.acts


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--acts", type=int, default=12, help="times that clients meet on new sessions (default 12)"
    )
    parser.add_argument(
        "--show", action="store_true", help="write histories that no order explains to stderr"
    )
    parser.add_argument("--power", action="store_true", help="cut the power where a server would be killed")


HARNESS = Harness(
    "history",
    "Many clients, the same sessions: one order must explain it.",
    run,
    CONTROLS | POWER_CONTROLS,
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
