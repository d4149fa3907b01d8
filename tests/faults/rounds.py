"""Rounds: start a server, compare it with the ledger, let clients work, take it down; again and again.

Knows neither how it is taken down for real (a `Ground` does) nor what is planted. Worst case: a server
that does not start, which is a finding and ends the epoch.
"""

import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import ctxcache
from ctxcache.errors import DeadlineExceeded, Unavailable
from lab.routes import Route
from tests.faults import afterwards, planted
from tests.faults.blows import Blow, Blows, Kind
from tests.faults.expected import Expected
from tests.faults.harness import Report
from tests.faults.ledger import Ledger, Shape
from tests.faults.plants.crash import ASLEEP, JOINED
from tests.faults.workload import Terms, Worker
from tests.nursery import Nursery
from tests.server_process import ServerDidNotStart, ServerProcess

ACCESSES: tuple[Route, ...] = ("local-grpc", "local-socket", "grpc", "bulk")
FRESH_RATIO = 0.1
"""Share of starts by a new interpreter, as an operator starts one; the others are forked, which is faster."""
POLL_S = 0.002
WORK_TIMEOUT_S = 30.0
DRAIN_TIMEOUT_S = END_TIMEOUT_S = 60.0
SIGKILL_CODE = -signal.SIGKILL
TOLD = {"join_count": JOINED, "asleep_count": ASLEEP}
"""Lines that servers write to standard error, by the figure that counts them."""


class Ground(Protocol):
    """Where data directories lie, and what takes everything down at once."""

    may_fail: bool
    """Whether devices fail too, at every end, in whatever way the server has ended."""
    shapes: Sequence[Shape]

    def renew(self) -> tuple[Path, list[Path]]:
        """An empty data directory, and directories for SSD files."""

    def strike(self, server: ServerProcess | None) -> None:
        """Take the server down where it stands, if it still does, with what it did not make sure of."""


@dataclass(slots=True)
class Epoch:
    """One data directory's life: its settings and what is in it."""

    data_directory: Path
    options: list[str]
    ledger: Ledger
    terms: Terms
    rounds_left: int
    plants: Sequence[str] = ()
    told_counts: Counter[str] = field(default_factory=Counter)
    """How many of TOLD's lines were counted already."""


@dataclass(slots=True)
class Times:
    """Seconds from the start of a process to its ready line, and to its first answer."""

    ready_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)


class Rounds:
    """Plays rounds and reports. `plants` are in every server."""

    def __init__(
        self, ground: Ground, report: Report, blows: Blows, rng: random.Random, *, plants: Sequence[str] = ()
    ) -> None:
        self.fresh_times, self.forked_times = Times(), Times()
        self._nursery = Nursery(planted.MODULES)
        self._ground, self._report, self._blows, self._random = ground, report, blows, rng
        self._plants, self._is_sound = ("checked_opening", *plants), not plants
        self._epoch: Epoch | None = None
        self._epoch_count = 0
        self._last_blow = "nothing"
        self._steps_hit: dict[str, int] = {}

    @property
    def steps_hit(self) -> dict[str, int]:
        """How often each step was the one that killed."""
        return self._steps_hit

    def play(self) -> None:
        """One round: a start, a look, some work and a blow."""
        is_first = self._epoch is None
        epoch = self._epoch or self._begin()
        blow = self._blows.draw(is_first=is_first)
        is_last = epoch.rounds_left == 0
        try:
            server = self._start(epoch, () if is_last else blow.plants)
            self._collect(epoch, f"after {self._last_blow}")
            self._last_blow = blow.name
            try:
                if is_last:
                    self._end(epoch, server)
                else:
                    self._work(epoch, server, blow)
            finally:
                server.close()
        except (ServerDidNotStart, Unavailable, DeadlineExceeded) as error:
            self._report.find(f"after {self._last_blow}, with {blow.name}: {type(error).__name__}: {error}")
            self._epoch = None
        self._collect(epoch, f"before {blow.name}")

    def finish(self) -> None:
        """A last look at what the last blow left."""
        if self._epoch is not None:
            self._epoch.rounds_left = 0
            self.play()

    def close(self) -> None:
        """End what is not a server's."""
        self._nursery.close()

    # -- a round -----------------------------------------------------------------------------------

    def _begin(self) -> Epoch:
        data_directory, ssd_directories = self._ground.renew()
        shape = self._random.choice(self._ground.shapes)
        may_evict = self._random.random() < 0.25
        arena_slots = self._random.choice((40, 100))
        ssd_slots = 60 if may_evict else 600
        options = [part for path in ssd_directories for part in ("--ssd-directories", str(path))]
        options += ["--arena-size-bytes", str(arena_slots * shape.slot_bytes)]
        options += ["--ssd-size-bytes", str(ssd_slots // len(ssd_directories) * shape.slot_bytes)]
        options += ["--log-level", "error"]
        has_copies = len(ssd_directories) > 1 and self._random.random() < 0.5
        if has_copies:
            options += ["--ssd-copies", "2"]
            self._report.count("epochs_with_two_copies")
        # Sessions are too short to be joined otherwise.
        plants = ["joins_early"] if self._random.random() < 0.5 else []
        if self._ground.may_fail and self._random.random() < 0.5:
            # Clients alone hardly ever make both kinds of commits meet in one write of the log.
            plants.append("commits_have_company")
        self._epoch_count += 1
        if self._is_sound and self._epoch_count % 2 == 0:
            # Sessions are not idle for minutes here. Controls are found sooner without it.
            plants.append("sleeps_early")
        terms = Terms(may_evict=may_evict, may_fail=self._ground.may_fail, copies=2 if has_copies else 1)
        self._epoch = Epoch(
            data_directory, options, Ledger(shape), terms, self._random.randint(4, 14), plants
        )
        self._report.count("epoch_count")
        return self._epoch

    def _start(self, epoch: Epoch, plants: Sequence[str]) -> ServerProcess:
        """Start the server; when it is to die on its way or soon after, once more without that."""
        try:
            return self._start_once(epoch, plants)
        except ServerDidNotStart as error:
            if error.returncode != SIGKILL_CODE or not plants:
                raise
            self._hit(plants)
            self._fell(None)
            return self._start_once(epoch, ())

    def _start_once(self, epoch: Epoch, plants: Sequence[str]) -> ServerProcess:
        server, times = self._server(epoch, [*self._plants, *epoch.plants, *plants])
        try:
            began_s = time.monotonic()
            server.start()
            times.ready_s.append(time.monotonic() - began_s)
            with ctxcache.connect(server.target, access="remote") as client:
                client.admin.stats()
                times.answer_s.append(time.monotonic() - began_s)
                if not epoch.ledger.sessions:
                    client.models.register(epoch.ledger.shape.model)
                afterwards.compare(client, epoch.ledger, epoch.terms)
        except Unavailable as error:
            code = server.wait(END_TIMEOUT_S)
            server.close()
            raise ServerDidNotStart(code, str(error)) from error
        except BaseException:
            server.close()
            raise
        return server

    def _server(self, epoch: Epoch, plants: Sequence[str]) -> tuple[ServerProcess, Times]:
        if self._random.random() < FRESH_RATIO:
            program = planted.command(plants)
            return ServerProcess(epoch.data_directory, *epoch.options, program=program), self.fresh_times
        server = ServerProcess(
            epoch.data_directory, *epoch.options, program=planted.forked(plants), nursery=self._nursery
        )
        return server, self.forked_times

    def _work(self, epoch: Epoch, server: ServerProcess, blow: Blow) -> None:
        workers = self._workers(epoch, server)
        if blow.kind in (Kind.STEP, Kind.DRAIN_STEP):
            server.signal(signal.SIGUSR1)
        for worker in workers:
            worker.start()
        self._take_down(epoch, server, blow, workers)
        code = server.wait(END_TIMEOUT_S)
        for worker in workers:
            worker.stop()
            worker.join()
        if code == SIGKILL_CODE:
            self._report.count("kill_count")
        elif code == 0:
            self._report.count("ended_in_order_count")
            for session in epoch.ledger.sessions.values():
                session.flushed()
            epoch.ledger.blocks.flushed()
        elif not epoch.terms.may_evict and not epoch.terms.may_fail:
            self._report.find(f"a drain ended with exit code {code}: {server.stderr[-500:]}")
        epoch.rounds_left -= 1
        for figure, line in TOLD.items():
            count = server.stderr.count(line)
            self._report.count(figure, count - epoch.told_counts[figure])
            epoch.told_counts[figure] = count

    def _take_down(self, epoch: Epoch, server: ServerProcess, blow: Blow, workers: Sequence[Worker]) -> None:
        """Let clients work, and the blow fall."""
        has_ended = _work_until(epoch.ledger, server, workers, blow.operations)
        if has_ended:
            self._hit(blow.plants)
            self._fell(server)
        elif blow.kind is Kind.ANSWER:
            epoch.ledger.told_durable.clear()
            epoch.ledger.told_durable.wait(WORK_TIMEOUT_S)
            self._ground.strike(server)
        elif blow.kind in (Kind.KILL, Kind.STEP, Kind.START_STEP):
            self._ground.strike(server)
        else:
            for worker in workers:
                worker.stop()
            server.signal(signal.SIGTERM)
            patience_s = self._random.uniform(0, 0.1) if blow.kind is Kind.DRAIN else DRAIN_TIMEOUT_S
            if server.wait(patience_s) is None:
                self._ground.strike(server)
                return
            if blow.kind is Kind.DRAIN_STEP and server.wait(0) == SIGKILL_CODE:
                self._hit(blow.plants)
            self._fell(server)

    def _fell(self, server: ServerProcess | None) -> None:
        """The server has ended by itself; devices that fail do so now."""
        if self._ground.may_fail:
            self._ground.strike(server)

    def _end(self, epoch: Epoch, server: ServerProcess) -> None:
        with ctxcache.connect(server.target, access="remote") as client:
            afterwards.empty(client, epoch.ledger)
        self._epoch = None

    # -- parts -------------------------------------------------------------------------------------

    def _workers(self, epoch: Epoch, server: ServerProcess) -> list[Worker]:
        shares: list[list[Expected]] = [[] for _ in ACCESSES]
        for i, session in enumerate(epoch.ledger.sessions.values()):
            shares[i % len(shares)].append(session)
        return [
            Worker(server.target, access, epoch.ledger, share, epoch.terms, seed=self._random.getrandbits(32))
            for access, share in zip(ACCESSES, shares, strict=True)
        ]

    def _hit(self, plants: Sequence[str]) -> None:
        step = plants[0].removeprefix("kill_at_start_").removeprefix("kill_").partition(":")[0]
        self._steps_hit[step] = self._steps_hit.get(step, 0) + 1

    def _collect(self, epoch: Epoch, when: str) -> None:
        ledger = epoch.ledger
        for finding in ledger.findings:
            self._report.find(f"{finding} ({when})")
        ledger.findings.clear()
        for name, count in ledger.counts.items():
            self._report.count(name, count)
        ledger.counts.clear()


def _work_until(ledger: Ledger, server: ServerProcess, workers: Sequence[Worker], operations: int) -> bool:
    """Wait until that many operations more were begun, nobody begins any, or the server has ended.

    Then True.
    """
    goal, deadline_s = ledger.operation_count + operations, time.monotonic() + WORK_TIMEOUT_S
    while ledger.operation_count < goal and time.monotonic() < deadline_s:
        if not any(worker.is_alive() for worker in workers):
            break
        if server.wait(POLL_S) is not None:
            return True
    return False
