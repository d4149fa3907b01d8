"""The common part of all fault harnesses: a command line, a report, and controls that it must catch.

    python -m tests.faults.NAME [--seed N] [--json] [--control BUG]

A harness provokes one class of faults on real parts and lists what broke a promise: its findings.
A control is a bug planted on purpose; with `--control` the run is good when it finds something.
A harness that breaks has a verdict too: what it raised is a finding, and no control counts as found by it.
Exit codes: 0 good, 1 not good, 2 usage, 77 skipped because the machine lacks what it needs.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

GOOD, NOT_GOOD, SKIPPED = 0, 1, 77
FINDINGS_SHOWN = 20
PROGRESS_S = 30.0
_shown_s = [time.monotonic()]
"""When progress was last shown where nobody is looking."""


class Unsupported(Exception):
    """This machine lacks what the harness needs; the sentence says what, and how to get it."""


class Found(Exception):
    """The planted bug was found: what comes after it would only take time."""


@dataclass(slots=True)
class Report:
    """The work and the findings of a run. `figures` have units in their names."""

    harness: str
    seed: int
    control: str | None = None
    figures: dict[str, object] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    is_broken: bool = False
    """Whether the harness itself raised: then it proves nothing, whatever it had found."""
    duration_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """No findings; with a control, at least one, by a harness that is whole."""
        return not self.is_broken and bool(self.findings) == (self.control is not None)

    def patience_s(self, whole_s: float) -> float:
        """How long to wait for what a whole server does within `whole_s`.

        With a control less: what never comes is waited for.
        """
        return whole_s if self.control is None else whole_s / 4

    def count(self, figure: str, by: int = 1) -> None:
        """Add to a figure that counts."""
        before = self.figures.get(figure, 0)
        if not isinstance(before, int):
            raise TypeError(f"{figure} is no count")
        self.figures[figure] = before + by

    def find(self, finding: str) -> None:
        """Note a broken promise."""
        self.findings.append(finding)

    def find_broken(self, error: Exception) -> None:
        """Note what the harness raised, and where."""
        self.is_broken = True
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"
        self.find(f"the harness broke: {type(error).__name__}: {error} ({place})")
        sys.stderr.write("".join(traceback.format_exception(error)))

    def end_if_found(self) -> None:
        """Raises Found, which ends the run, when there is a control and a finding.

        For the run's own thread.
        """
        if self.control and self.findings:
            raise Found


@dataclass(frozen=True, slots=True)
class Harness:
    """A harness as its module declares it.

    `run` gets the options and a fresh report to fill. `controls`: name to what is planted. `options`
    adds the harness's own arguments; every one has a default that ends within a minute. `package` is where
    the module is.
    """

    name: str
    description: str
    run: Callable[[argparse.Namespace, Report], None]
    controls: dict[str, str]
    options: Callable[[argparse.ArgumentParser], None] = lambda _: None
    package: str = "tests.faults"

    def execute(self, arguments: Sequence[str]) -> Report:
        """Run as the command line says. Raises Unsupported, SystemExit for arguments it does not take."""
        chosen = self._parser().parse_args(arguments)
        report = Report(self.name, chosen.seed, chosen.control)
        began_s = time.monotonic()
        try:
            self.run(chosen, report)
        except Found:
            pass
        except Unsupported:
            raise
        except Exception as error:  # noqa: BLE001  a broken harness is a finding
            report.find_broken(error)
        report.duration_s = round(time.monotonic() - began_s, 2)
        return report

    def main(self) -> int:
        """Run from the command line and print the report; returns the exit code."""
        try:
            report = self.execute(sys.argv[1:])
        except Unsupported as reason:
            sys.stderr.write(f"SKIPPED {self.name}: {reason}\n")
            return SKIPPED
        as_json = "--json" in sys.argv[1:]
        sys.stdout.write((_json(report) if as_json else _text(report)) + "\n")
        return GOOD if report.is_good else NOT_GOOD

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.package}.{self.name}",
            description=self.description,
            epilog="controls: " + "; ".join(f"{name}: {bug}" for name, bug in self.controls.items()),
        )
        parser.add_argument("--seed", type=int, default=1, help="what random choices begin with (default 1)")
        parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")
        parser.add_argument(
            "--control", choices=sorted(self.controls), help="plant this bug: it must be found"
        )
        self.options(parser)
        return parser


def progress(done: int, total: int, what: str) -> None:
    """Show how far a long run is: always where a person is looking, else a line every half minute."""
    if sys.stderr.isatty():
        end = "\n" if done >= total else ""
        sys.stderr.write(f"\r{done}/{total} {what}{end}")
        sys.stderr.flush()
    elif time.monotonic() - _shown_s[-1] >= PROGRESS_S:
        _shown_s[:] = [time.monotonic()]
        sys.stderr.write(f"{done}/{total} {what}\n")
        sys.stderr.flush()


def _json(report: Report) -> str:
    return json.dumps(asdict(report) | {"is_good": report.is_good})


def _text(report: Report) -> str:
    verdict = "BROKEN" if report.is_broken else "good" if report.is_good else "NOT GOOD"
    planted = f", planted: {report.control}" if report.control else ""
    lines = [f"{report.harness}: {verdict} in {report.duration_s:.1f} s (seed {report.seed}{planted})"]
    lines += [f"  {name:<32} {value}" for name, value in report.figures.items()]
    lines += [f"  found: {finding}" for finding in report.findings[:FINDINGS_SHOWN]]
    if len(report.findings) > FINDINGS_SHOWN:
        lines.append(f"  ... and {len(report.findings) - FINDINGS_SHOWN} more")
    return "\n".join(lines)
