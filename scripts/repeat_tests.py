#!/usr/bin/env python3
"""Run the whole test command many times, some runs beside busy loops.

A test that fails now and then is a defect.

    python scripts/repeat_tests.py [--runs 20] [--busy-runs 10] [--logs DIRECTORY] [--output json]
                                   [-- COMMAND ...]

The command is `make test` unless one is given. Every run's output is kept. Exit codes: 0 when every run ended
with 0, 1 otherwise. Worst case: a run that hangs, which is ended after --timeout-s and counts as failed.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
BUSY_LOOPS = 2


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command. `failed`: tests that pytest names; a run can fail without one."""

    number: int
    is_busy: bool
    exit_code: int
    duration_s: float
    failed: tuple[str, ...]
    log: str


def main() -> int:
    """Run, print a table or JSON, and return the exit code."""
    options = _options()
    logs: Path = options.logs
    logs.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    for number in range(1, options.runs + 1):
        # Quiet and busy runs alternate while there are some of both.
        is_busy = number % 2 == 0 and number // 2 <= options.busy_runs
        is_busy = is_busy or options.runs - number < options.busy_runs - sum(run.is_busy for run in runs)
        runs.append(_run(number, options.command, logs / f"run-{number:02}.log", options.timeout_s, is_busy))
        _say(options.runs, runs[-1])
    _report(runs, as_json=options.output == "json")
    return 0 if all(run.exit_code == 0 for run in runs) else 1


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
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("command", nargs="*", default=["make", "test"], help="default: make test")
    options = parser.parse_args()
    if not 0 <= options.busy_runs <= options.runs:
        parser.error("--busy-runs is not within [0, --runs]")
    return options


def _run(number: int, command: Sequence[str], log: Path, timeout_s: float, is_busy: bool) -> Run:  # noqa: FBT001
    began_s = time.monotonic()
    with log.open("wb") as output, _busy(BUSY_LOOPS if is_busy else 0):
        process = subprocess.Popen(  # noqa: S603  the developer's own command
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            exit_code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            exit_code = 124
        finally:
            _end(process)
    failed = tuple(sorted(set(FAILED.findall(log.read_text(errors="replace")))))
    return Run(number, is_busy, exit_code, round(time.monotonic() - began_s, 1), failed, str(log))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the command and what it started, if any of it is left."""
    if process.poll() is None:
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


def _say(run_count: int, run: Run) -> None:
    verdict = "green" if run.exit_code == 0 else f"FAILED ({run.exit_code}) {' '.join(run.failed)}"
    beside = " beside busy loops" if run.is_busy else ""
    sys.stderr.write(f"{run.number}/{run_count}{beside}: {verdict} in {run.duration_s:.0f} s\n")
    sys.stderr.flush()


def _report(runs: Sequence[Run], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps([asdict(run) for run in runs]) + "\n")
        return
    for is_busy in (False, True):
        kind = [run for run in runs if run.is_busy is is_busy]
        green = sum(run.exit_code == 0 for run in kind)
        sys.stdout.write(f"{'busy' if is_busy else 'quiet'}: {green} of {len(kind)} runs green\n")
    for name, count in Counter(name for run in runs for name in run.failed).most_common():
        sys.stdout.write(f"  {count}x {name}\n")


if __name__ == "__main__":
    raise SystemExit(main())
