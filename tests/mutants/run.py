"""Mutation testing as a gate: every mutant of the tables must be noticed by the tests.

    python -m tests.mutants.run [NAME ...] [--jobs 2] [--output json] [--first-only]

Each job has a copy of the tree that no one else sees, and changes one line in it at a time: the tests named
for the mutant run first, a wider list where they pass. Before that all named tests must pass unchanged.
Worst case: tests that hang, which end after a time-out and count as noticed, marked as such.
Exit codes: 0 all are noticed, 1 some survived, 2 usage or tables that do not apply, 3 tests fail unchanged.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.mutants.table import ROOT, Mutant, TableError, check, load

GOOD, SURVIVED, UNUSABLE, UNCHANGED_FAILS = 0, 1, 2, 3
JOBS = 2
TEST_TIMEOUT_S = 60
"""Limit for one test. The longest takes a few seconds."""
RUN_TIMEOUT_S = 600
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "hypothesis", "grpc.aio", "numpy", "pydantic_settings", "rocksdict", "typer"]
)
_PASSED, _FAILED, _COLLECTION_FAILED = 0, 1, 2
_TIMED_OUT = "+ Timeout +"
"""The line that pytest-timeout writes above its stacks."""
_FIRST_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fate of a mutant. `by`: the first test that noticed it."""

    name: str
    file: str
    outcome: str
    by: str
    duration_s: float

    @property
    def is_noticed(self) -> bool:
        """Whether a test failed because of it."""
        return self.outcome in ("first", "wider", "time-out")


class Tree:
    """A private copy of the working tree's tracked and new files."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split("\0")
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)
        # Bytecode is kept by time and size, and a mutant may have both of what it was made of: each gets
        # a second of its own.
        self._times_s = itertools.count(1)

    def test(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """Run tests until the first one fails; pytest's exit code (None: out of time) and what it printed."""
        said = self.root / ".pytest.out"
        run = _CONTEXT.Process(target=_run_tests, args=(self.root, said, list(tests)))
        run.start()
        run.join(RUN_TIMEOUT_S)
        code = run.exitcode
        if run.pid is not None:
            # With all that the tests have started: it leads their group.
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.join()
        return code, said.read_text()

    def judge(self, mutant: Mutant, *, is_first_only: bool) -> Verdict:
        """Make the mutant, test it and unmake it. Raises TableError for one that does not even import."""
        path = self.root / mutant.file
        source, began_s = path.read_text(), time.monotonic()
        self._write(path, mutant.apply(source))
        try:
            outcome, by = self._look(mutant, is_first_only=is_first_only)
        finally:
            self._write(path, source)
        return Verdict(mutant.name, mutant.file, outcome, by, round(time.monotonic() - began_s, 1))

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source)
        time_s = next(self._times_s)
        os.utime(path, (time_s, time_s))

    def _look(self, mutant: Mutant, *, is_first_only: bool) -> tuple[str, str]:
        lists = {"first": mutant.tests} if is_first_only else {"first": mutant.tests, "wider": mutant.wider}
        for outcome, tests in lists.items():
            code, output = self.test(tests)
            found = _FIRST_FAILURE.search(output)
            by = found[1] if found else ""
            if code is None or _TIMED_OUT in output:
                return "time-out", by
            if code == _COLLECTION_FAILED:
                raise TableError(
                    mutant.name, f"its tests cannot be collected, so that they test nothing: {by}"
                )
            if code == _FAILED:
                return outcome, by
            if code != _PASSED:
                raise TableError(mutant.name, f"pytest ended with {code}: {output[-500:]}")
        return "survived", ""


def _run_tests(root: Path, said: Path, tests: Sequence[str]) -> None:
    """Run pytest in the tree at `root`, forked from a process that has imported what no mutant changes."""
    os.setsid()
    fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path[:] = [str(root), *(p for p in sys.path if p and Path(p).resolve() != ROOT)]
    for name in [n for n in sys.modules if n.partition(".")[0] in ("ctxcache", "gpu_worker", "tests")]:
        del sys.modules[name]
    plugins = ("no:cacheprovider", "no:xdist", "no:cov", "no:randomly")
    options = ["-q", "--no-header", "--tb=no", *(word for name in plugins for word in ("-p", name))]
    # A timer in a thread: an exception out of a signal handler is swallowed by a callback of asyncio.
    options += [f"--timeout={TEST_TIMEOUT_S}", "--timeout-method=thread", "--hypothesis-seed=0"]
    sys.exit(pytest.main([*options, *tests], plugins=[FirstFailure()]))


class FirstFailure:
    """A plugin of pytest that ends the process at the first failure: its fixtures may never end."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Take what pytest itself prints by: it captures everything else."""
        self._writer = session.config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say which test failed as pytest's summary does, and end."""
        if report.failed:
            self._writer.line(f"\n{'FAILED' if report.when == 'call' else 'ERROR'} {report.nodeid}")
            self._writer.flush()
            os._exit(_FAILED)


def judge_all(
    mutants: Sequence[Mutant], *, job_count: int, is_first_only: bool
) -> tuple[list[Verdict], list[str]]:
    """Judge the mutants side by side; verdicts in the tables' order, and what could not be judged."""
    verdicts: dict[str, Verdict] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ctxcache-mutants-") as directory:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for i in range(job_count):
            trees.put(Tree(Path(directory) / str(i)))
        if failure := _unchanged(trees, mutants, job_count):
            return [], [failure]

        def judge(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return tree.judge(mutant, is_first_only=is_first_only)
            finally:
                trees.put(tree)

        progress = Progress(len(mutants))
        with ThreadPoolExecutor(job_count) as pool:
            jobs = [pool.submit(judge, mutant) for mutant in mutants]
            for job in as_completed(jobs):
                try:
                    verdict = job.result()
                except TableError as error:
                    problems.append(str(error))
                    continue
                verdicts[verdict.name] = verdict
                progress.show(verdict)
    return [verdicts[mutant.name] for mutant in mutants if mutant.name in verdicts], problems


def _unchanged(trees: "SimpleQueue[Tree]", mutants: Iterable[Mutant], job_count: int) -> str | None:
    """Run every named test without a mutant, side by side: one that fails anyway would notice everything."""
    named = {test for mutant in mutants for test in mutant.tests}
    tests = sorted(t for t in named if "::" not in t or t.partition("::")[0] not in named)

    def run(some: Sequence[str]) -> str | None:
        tree = trees.get()
        try:
            code, output = tree.test(some) if some else (_PASSED, "")
        finally:
            trees.put(tree)
        return None if code == _PASSED else f"tests fail without any mutant: {output[-2000:]}"

    with ThreadPoolExecutor(job_count) as pool:
        failures = pool.map(run, [tests[i::job_count] for i in range(job_count)])
    return next(filter(None, failures), None)


class Progress:
    """How far it is and when it will be done: a bar where a person is looking, else a line per mutant."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._began_s = time.monotonic()

    def show(self, verdict: Verdict) -> None:
        """One more is judged."""
        self._done += 1
        left_s = (time.monotonic() - self._began_s) / self._done * (self._total - self._done)
        line = f"{self._done}/{self._total} {verdict.name}: {verdict.outcome}, {left_s:.0f} s to go"
        if sys.stderr.isatty():
            filled = 30 * self._done // self._total
            end = "\n" if self._done == self._total else ""
            sys.stderr.write(f"\r\x1b[K[{'#' * filled}{'.' * (30 - filled)}] {line}{end}")
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def table_of(verdicts: Sequence[Verdict]) -> str:
    """One line per mutant and a sum, for people."""
    width = max(len(verdict.name) for verdict in verdicts)
    lines = [f"{v.name:<{width}}  {v.outcome:<9} {v.duration_s:>6.1f} s  {v.by}" for v in verdicts]
    counts = {o: sum(v.outcome == o for v in verdicts) for o in ("first", "wider", "time-out", "survived")}
    lines.append(f"{len(verdicts)} mutants: " + ", ".join(f"{count} {o}" for o, count in counts.items()))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.run", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("names", nargs="*", help="mutants to judge; all by default")
    parser.add_argument("--table", action="append", type=Path, help="a table of mutants; all by default")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"side by side (default {JOBS})")
    parser.add_argument(
        "--first-only", action="store_true", help="run no wider list: who survives is not lost yet"
    )
    parser.add_argument("--output", choices=("text", "json"), default="text", help="of standard output")
    options = parser.parse_args(arguments)
    try:
        mutants = load(options.table)
    except (TableError, OSError) as error:
        parser.error(str(error))
    if unknown := set(options.names) - {mutant.name for mutant in mutants}:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    mutants = [mutant for mutant in mutants if not options.names or mutant.name in options.names]
    if problems := check(mutants):
        sys.stderr.write("\n".join(problems) + "\n")
        return UNUSABLE
    verdicts, problems = judge_all(mutants, job_count=options.jobs, is_first_only=options.first_only)
    if options.output == "json":
        document = {"verdicts": [asdict(verdict) for verdict in verdicts], "problems": problems}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    elif verdicts:
        sys.stdout.write(table_of(verdicts) + "\n")
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    if problems:
        return UNUSABLE if verdicts else UNCHANGED_FAILS
    return GOOD if all(verdict.is_noticed for verdict in verdicts) else SURVIVED


if __name__ == "__main__":
    raise SystemExit(main())
