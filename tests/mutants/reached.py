"""Which tests run which lines of the product: the map by which a mutant finds its tests.

    python -m tests.mutants.reached TEST_FILE MAP

runs one test file and writes its map, JSON: its `tests`, the `seconds` of each, and by source file and line
the numbers of those that run it. Lines that only another process runs are not in it. Worst case: tests that
fail, or hang for longer than the limit; the map is then of those before.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import coverage
import pytest

from tests.mutants.table import ROOT

SOURCES = ("ctxcache", "gpu_worker")
LIMIT_S = 120.0


@dataclass(slots=True)
class Reached:
    """The map. `tests`: by file and line; `seconds`: that each took, with its fixtures."""

    seconds: dict[str, float] = field(default_factory=dict)
    tests: dict[str, dict[int, set[str]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )

    def add(self, path: Path) -> None:
        """Take one test file's map."""
        told = json.loads(path.read_text())
        names: list[str] = told["tests"]
        self.seconds |= zip(names, told["seconds"], strict=True)
        for file, lines in told["lines"].items():
            for line, numbers in lines.items():
                self.tests[file][int(line)].update(names[number] for number in numbers)

    def of(self, file: str, lines: Iterable[int], most_s: float) -> list[str]:
        """The tests that run one of these lines, the shortest first, as many as take so long together."""
        found = set().union(*(self.tests[file][line] for line in lines))
        chosen: list[str] = []
        left_s = most_s
        for test in sorted(found, key=lambda test: self.seconds.get(test, 0.0)):
            left_s -= self.seconds.get(test, 0.0)
            if chosen and left_s < 0:
                break
            chosen.append(test)
        return chosen


def measured(test_files: Sequence[str], directory: Path) -> Reached:
    """The map of these, each measured once in a process of its own and kept in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    reached = Reached()
    for number, file in enumerate(test_files, 1):
        path = directory / f"{file.replace('/', '.')}.json"
        if not path.exists():
            command = [sys.executable, "-m", "tests.mutants.reached", file, str(path)]
            subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
            sys.stderr.write(f"{number}/{len(test_files)} {file}\n")
        if path.exists():
            reached.add(path)
    return reached


class _Contexts:
    """A plugin that tells coverage which test is running, and notes how long each takes."""

    def __init__(self, cover: coverage.Coverage) -> None:
        self._cover = cover
        self.seconds: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """A test begins, with its fixtures."""
        self._cover.switch_context(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A part of a test has ended."""
        self.seconds[report.nodeid] += report.duration


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one test file."""
    file, path = sys.argv[1:] if arguments is None else arguments
    cover = coverage.Coverage(data_file=None, source=[str(ROOT / s) for s in SOURCES], config_file=False)
    contexts = _Contexts(cover)
    plugins = ("no:cacheprovider", "no:xdist", "no:cov", "no:randomly")
    options = ["-q", "--no-header", "--tb=no", *(word for name in plugins for word in ("-p", name))]
    options += ["--hypothesis-seed=0", f"--session-timeout={LIMIT_S:.0f}"]
    cover.start()
    pytest.main([*options, file], plugins=[contexts])
    cover.stop()
    data = cover.get_data()
    numbers = {test: number for number, test in enumerate(contexts.seconds)}
    lines: dict[str, dict[int, list[int]]] = {}
    for name in data.measured_files():
        by_line = data.contexts_by_lineno(name)
        told = {line: [numbers[test] for test in tests if test in numbers] for line, tests in by_line.items()}
        if any(told.values()):
            lines[str(Path(name).relative_to(ROOT))] = {line: tests for line, tests in told.items() if tests}
    answer = {"tests": list(numbers), "seconds": list(contexts.seconds.values()), "lines": lines}
    Path(path).write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
