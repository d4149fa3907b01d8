"""Crash: a server is killed at random moments and at every durable step, and keeps what it acknowledged.

    python -m tests.faults.crash --cycles 1000 --aborts 10000

Clients append, truncate, fork, delete, flush, demote, expire and read, through the arena and by stream, until
the server dies; the next start is compared with a model kept here. Settings change every few cycles.
Worst case: what only a power cut loses, which no kill can show; see `powercut`.
"""

import argparse
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ctxcache
from tests.faults import planted
from tests.faults.aborts import KEPT_TOKENS, abort_saves
from tests.faults.blows import Blows, Kind
from tests.faults.harness import Harness, Report, progress
from tests.faults.ledger import Shape
from tests.faults.plants import steps
from tests.faults.rounds import Rounds, Times
from tests.server_process import ServerProcess

CONTROLS = {
    "acknowledged_before_record": "a flush returns while its record is still to be written",
    "record_before_bytes": "a slot is written after the record that points at it",
    "deleted_record_stays": "the record of a deleted session is not removed",
    "tail_rewritten_in_place": "a slot is given back before the record names another",
    "generation_reused": "generations go on after a crash where records ended",
    "recorded_end_off_by_one": "records leave out the last token",
    "abandoned_save_shows": "a writer that gives up leaves its rows visible",
    "second_writer_is_not_flushed_for": "a durable put of a block that is there is acknowledged as it is",
    "sleepers_record_is_old": "a session falls asleep with a record that lacks its last token",
    "slot_leaked": "every tenth slot is not given back",
}
KINDS = {Kind.KILL: 4, Kind.STEP: 6, Kind.START_STEP: 2, Kind.DRAIN: 1, Kind.DRAIN_STEP: 2, Kind.END: 1}
COMPLETE_CYCLES = 300
"""From this many on, a step that never killed anything is a finding."""


class ProcessGround:
    """Directories on an ordinary disk; a blow kills the process and nothing else."""

    may_fail = False
    shapes: Sequence[Shape] = (Shape(1, 32), Shape(3, 160), Shape(2, 1000))

    def __init__(self, directory: Path, rng: random.Random) -> None:
        self._directory, self._random = directory, rng
        self._count = 0

    def renew(self) -> tuple[Path, list[Path]]:
        """See Ground."""
        shutil.rmtree(self._directory / str(self._count), ignore_errors=True)
        self._count += 1
        home = self._directory / str(self._count)
        home.mkdir()
        return home / "data", [home / f"ssd{i}" for i in range(self._random.choice((1, 2)))]

    def strike(self, server: ServerProcess | None) -> None:
        """See Ground."""
        if server is not None:
            server.kill9()


def run(options: argparse.Namespace, report: Report) -> None:
    """Play the cycles and fill the report."""
    directory = Path(tempfile.mkdtemp(prefix="ctxcache-crash-"))
    plants = [options.control] if options.control else []
    try:
        if options.aborts:
            _abort(options, report, directory, plants)
        if options.cycles and not (options.control and report.findings):
            _crash(options, report, directory, plants)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _abort(options: argparse.Namespace, report: Report, directory: Path, plants: list[str]) -> None:
    program = planted.command(plants)
    with ServerProcess(directory / "aborts", program=program) as server:
        abort_saves(server, report, options.aborts, seed=options.seed)
        server.kill9()
        server.start()
        with ctxcache.connect(server.target) as client:
            counts = {session.token_count for session in client.sessions.list()}
    if counts != {KEPT_TOKENS}:
        report.find(
            f"sessions of {sorted(counts)} tokens after aborted saves and a restart, not of {KEPT_TOKENS}"
        )


def _crash(options: argparse.Namespace, report: Report, directory: Path, plants: list[str]) -> None:
    rng = random.Random(options.seed)
    rounds = Rounds(ProcessGround(directory, rng), report, _blows(rng, options.control), rng, plants=plants)
    try:
        for cycle in range(options.cycles):
            rounds.play()
            progress(cycle + 1, options.cycles, "cycles")
            if options.control and report.findings:
                break
        else:
            rounds.finish()
    finally:
        rounds.close()
    report.figures["cycle_count"] = options.cycles
    report_times(report, "start", rounds.fresh_times)
    report_times(report, "forked_start", rounds.forked_times)
    _report_steps(report, rounds.steps_hit, is_complete=options.cycles >= COMPLETE_CYCLES)


def _blows(rng: random.Random, control: str | None) -> Blows:
    if control == "tail_rewritten_in_place":
        # Between the bytes in an old place and the record of the new one, when there are tails to write anew.
        return Blows(rng, {Kind.STEP: 1}, working=("slot_sync",), least_nth=8)
    if control == "second_writer_is_not_flushed_for":
        return Blows(rng, {Kind.ANSWER: 1})
    return Blows(rng, KINDS)


def report_times(report: Report, start: str, times: Times) -> None:
    """Add how long starts took, in milliseconds of wall time."""
    for name, values in (("ready", sorted(times.ready_s)), ("first_answer", sorted(times.answer_s))):
        for percent in (50, 99):
            index = min(len(values) - 1, len(values) * percent // 100)
            report.figures[f"{start}_to_{name}_p{percent}_ms"] = (
                round(values[index] * 1000) if values else None
            )


def _report_steps(report: Report, hit: dict[str, int], *, is_complete: bool) -> None:
    every = steps.steps_of((*steps.WORKING, *steps.STARTING, *steps.DRAINING))
    report.figures["step_kill_count"] = sum(hit.values())
    report.figures["steps"] = f"{len(hit)} of {len(every)} killed"
    missed = sorted(set(every) - set(hit))
    if is_complete and missed:
        report.find(f"no server was ever killed at {', '.join(missed)}")
    elif missed:
        report.figures["steps_missed"] = ", ".join(missed)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cycles", type=int, default=30, help="starts, each ended by a kill (default 30)")
    parser.add_argument("--aborts", type=int, default=300, help="saves begun and not committed (default 300)")


HARNESS = Harness("crash", "Kill a server again and again.", run, CONTROLS, _options)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
