#!/usr/bin/env python3
"""Run what real engines do on a real store, each in an environment of its own, and print one table.

    python scripts/run_engines.py [llamacpp lmcache sglang vllm | vllm-ci] [-- pytest arguments]

Environments are made first, see setup.py. Each file of tests is a run of its own: one that fails, or ends
its process, is a line of the table, and the others run. Exit codes: 0 when all passed, 1 otherwise, 2 usage.
Worst case: a test that hangs, which pytest ends after its timeout.
"""

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = Path("tests/engines")
PARTS = {
    "llamacpp": ("llamacpp_*.py",),
    "lmcache": ("lmcache_*.py",),
    "sglang": ("sglang_*.py",),
    "vllm": ("vllm_*.py",),
    "vllm-ci": ("vllm_in_ci.py", "vllm_waits.py"),
}
"""Files of tests by part, in the order in which they run; what is before a hyphen is the environment."""
NOTHING_SELECTED = 5
"""pytest's exit code where its arguments leave no test."""


@dataclass(frozen=True, slots=True)
class Row:
    """What became of a step. `outcome` is short: passed, failed, or how it ended."""

    name: str
    passed: int
    failed: int
    skipped: int
    outcome: str
    took_s: float

    def __str__(self) -> str:
        counts = f"{self.passed:>7}{self.failed:>7}{self.skipped:>8}"
        return f"{self.name:<32}{counts}{self.took_s:>9.0f}  {self.outcome}"


def main(words: Sequence[str]) -> int:
    """Run the parts that are named, or all but CI's, and print the table."""
    parts, arguments = list(words), list[str]()
    if "--" in parts:
        at = parts.index("--")
        parts, arguments = parts[:at], parts[at + 1 :]
    if unknown := set(parts) - set(PARTS):
        sys.stderr.write(f"run_engines.py: {min(unknown)} is not one of {', '.join(PARTS)}\n")
        return 2
    rows: list[Row] = []
    for part in parts or [part for part in PARTS if "-" not in part]:
        rows += _run(part, arguments)
    heading = f"\n{'':<32}{'passed':>7}{'failed':>7}{'skipped':>8}{'seconds':>9}\n"
    sys.stdout.write(heading + "".join(f"{row}\n" for row in rows))
    has_run = any(row.passed for row in rows)
    return 0 if has_run and all(row.outcome in ("ready", "passed", "none selected") for row in rows) else 1


def _run(part: str, arguments: Sequence[str]) -> Iterator[Row]:
    environment = part.partition("-")[0]
    begun_s = time.monotonic()
    command = (sys.executable, "scripts/setup.py", environment)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603
    took_s = time.monotonic() - begun_s
    yield Row(f"environment of {environment}", 0, 0, 0, "not made" if code else "ready", took_s)
    if code:
        return
    for pattern in PARTS[part]:
        for path in sorted((ROOT / TESTS).glob(pattern)):
            yield _run_file(environment, TESTS / path.name, arguments)


def _run_file(environment: str, path: Path, arguments: Sequence[str]) -> Row:
    with tempfile.TemporaryDirectory(prefix="ctxcache-engines-") as directory:
        report = Path(directory) / "report.xml"
        options = ("-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}")
        command = (f".venv-{environment}/bin/python", "-m", "pytest", *options, str(path), *arguments)
        sys.stdout.write(f"\n{environment}: {path}\n")
        sys.stdout.flush()
        begun_s = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603
        took_s = time.monotonic() - begun_s
        total, failed, skipped = _counts(report)
    outcomes = {0: "passed", 1: "failed", NOTHING_SELECTED: "none selected"}
    return Row(
        path.stem, total - failed - skipped, failed, skipped, outcomes.get(code, f"ended by {code}"), took_s
    )


def _counts(report: Path) -> tuple[int, int, int]:
    """Tests, those that failed, and those that were passed over; zeros where pytest wrote no report."""
    if not report.exists():
        return 0, 0, 0
    suites = list(ET.parse(report).getroot().iter("testsuite"))  # noqa: S314  pytest wrote it

    def total(*names: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites for name in names)

    return total("tests"), total("failures", "errors"), total("skipped")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
