#!/usr/bin/env python3
"""Run the whole test command many times, some runs beside busy loops.

A test that fails now and then is a defect.

    python scripts/repeat_tests.py [--runs 20] [--busy-runs 10] [--logs DIRECTORY] [--resume] [--output json]
                                   [-- COMMAND ...]

The command is `make test` unless one is given. Every run's output is kept, and a line of JSON about it: after
an interruption `--resume` goes on behind the runs that ended, on the same commit. Exit codes: 0 when every
run ended with 0, 1 otherwise, 2 usage, 130 interrupted. Worst case: a run that hangs, which is ended after
--timeout-s and counts as failed.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
BUSY_LOOPS = 2
POLL_S = 0.1
_interrupts: list[bool] = []
"""Signals that asked for an end: looked at between two looks at a run, never while one is being started."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command. `failed`: tests that pytest names; a run can fail without one.

    `last_line`: of its output, which says why then.
    """

    number: int
    is_busy: bool
    exit_code: int
    duration_s: float
    failed: tuple[str, ...]
    log: str
    last_line: str
    commit: str
    command: tuple[str, ...]


def main() -> int:
    """Run, print a table or JSON, and return the exit code."""
    options = _options()
    logs: Path = options.logs
    logs.mkdir(parents=True, exist_ok=True)
    kept, commit, command = logs / "runs.jsonl", _commit(), tuple(options.command)
    runs = _read(kept) if options.resume else []
    if any((run.commit, run.command) != (commit, command) for run in runs):
        sys.stderr.write(f"{kept} is of another commit or command: nothing to go on with\n")
        return 2
    kept.write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs))
    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, lambda *_: _interrupts.append(True))
    try:
        for number in range(len(runs) + 1, options.runs + 1):
            # Quiet and busy runs alternate while there are some of both.
            is_busy = number % 2 == 0 and number // 2 <= options.busy_runs
            is_busy = is_busy or options.runs - number < options.busy_runs - sum(run.is_busy for run in runs)
            _say(f"{number}/{options.runs}{' beside busy loops' if is_busy else ''} began at {time.ctime()}")
            log = logs / f"run-{number:02}.log"
            runs.append(_run(number, command, log, options.timeout_s, commit, is_busy))
            with kept.open("a") as file:
                file.write(json.dumps(asdict(runs[-1])) + "\n")
            _say(f"{number}/{options.runs}: {_verdict(runs[-1])} in {runs[-1].duration_s:.0f} s")
    except KeyboardInterrupt:
        _say(f"interrupted after {len(runs)} of {options.runs} runs: --resume goes on")
        _report(runs, options.runs, as_json=options.output == "json")
        return 128 + signal.SIGINT
    _report(runs, options.runs, as_json=options.output == "json")
    return 0 if all(run.exit_code == 0 for run in runs) else 1


def _commit() -> str:
    """The tested commit: the commit, and whether files differ from it; "" outside a repository."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip()


def _read(kept: Path) -> list[Run]:
    """The runs that ended before."""
    lines = kept.read_text().splitlines() if kept.exists() else []
    facts = [json.loads(line) for line in lines]
    return [
        Run(**{**each, "failed": tuple(each["failed"]), "command": tuple(each["command"])}) for each in facts
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20, help="how many in all (default 20)")
    parser.add_argument(
        "--busy-runs", type=int, default=10, help="of these, beside two busy loops (default 10)"
    )
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="longest run (default 3600)")
    parser.add_argument("--logs", type=Path, default=Path(".test-runs"), help="where output is kept")
    parser.add_argument("--resume", action="store_true", help="go on behind the runs that have ended")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("command", nargs="*", default=["make", "test"], help="default: make test")
    options = parser.parse_args()
    if not 0 <= options.busy_runs <= options.runs:
        parser.error("--busy-runs is not within [0, --runs]")
    return options


def _run(
    number: int,
    command: tuple[str, ...],
    log: Path,
    timeout_s: float,
    commit: str,
    is_busy: bool,  # noqa: FBT001
) -> Run:
    began_s = time.monotonic()
    with log.open("wb") as output, _busy(BUSY_LOOPS if is_busy else 0):
        process = subprocess.Popen(  # noqa: S603  the developer's own command
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        while (exit_code := process.poll()) is None and not _interrupts:
            if time.monotonic() - began_s > timeout_s:
                exit_code = 124
                break
            time.sleep(POLL_S)
        _end(process)
        if exit_code is None:
            raise KeyboardInterrupt
    text = log.read_text(errors="replace")
    failed = tuple(sorted(set(FAILED.findall(text))))
    last_line = text.rstrip().rpartition("\n")[2]
    duration_s = round(time.monotonic() - began_s, 1)
    return Run(number, is_busy, exit_code, duration_s, failed, str(log), last_line, commit, command)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the command and what it started, if any of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _verdict(run: Run) -> str:
    if run.exit_code == 0:
        return "green"
    return f"FAILED ({run.exit_code}) {' '.join(run.failed) or run.last_line}"


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _report(runs: Sequence[Run], run_count: int, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps([asdict(run) for run in runs]) + "\n")
        return
    for is_busy in (False, True):
        kind = [run for run in runs if run.is_busy is is_busy]
        green = sum(run.exit_code == 0 for run in kind)
        sys.stdout.write(f"{'busy' if is_busy else 'quiet'}: {green} of {len(kind)} runs green\n")
    for name, count in Counter(name for run in runs for name in run.failed).most_common():
        sys.stdout.write(f"  {count}x {name}\n")
    for run in runs:
        if run.exit_code and not run.failed:
            sys.stdout.write(f"  run {run.number} named no test: {run.last_line} ({run.log})\n")
    green = sum(run.exit_code == 0 for run in runs)
    verdict = "NOT green" if green < len(runs) else "green" if len(runs) == run_count else "green so far"
    sys.stdout.write(f"{verdict}: {green} of {len(runs)} runs, {run_count} wanted\n")


if __name__ == "__main__":
    raise SystemExit(main())
