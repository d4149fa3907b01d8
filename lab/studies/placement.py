#!/usr/bin/env python3
"""Every policy over every trace with sessions: runs `python -m lab.placement`, and prints the tables.

    python -m lab.studies.placement ../shared/data lab/results/DATE-placement.jsonl
    python -m lab.studies.placement --tables lab/results/DATE-placement.jsonl

Each line has its trace, setting, command, commit and date. Cells that the file has already are not run again,
so that a run may be done in pieces (`--only`, `--policies`). About half an hour on one core; two replays at
once (`--jobs`).
"""

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

CAPACITIES = (0.25, 0.5, 1.0)
BASELINES = ("lru", "fifo", "s3-fifo", "arc", "t-lru", "look-ahead")
OURS, BOUND = "value", "belady"
ALL = (*BASELINES, OURS, BOUND)
TRACES = {
    "mooncake": "mooncake_conv_sessions_A.csv.gz",
    "mooncake-synthetic": "mooncake_synthetic_A.jsonl.gz",
    "sharegpt-ca": "sharegptlike_ca_A.csv.gz",
    "sharegpt-hcache": "sharegptlike_hcache_A.csv.gz",
}
SERVER = "--open-loop --segment 1 --ssd-read 20GB"
"""A store as the server is, which waits little for SSD: what differs is what was kept."""
TIMED = f"--decode 60 {SERVER}"
"""At that rate LRU hits on Mooncake what it does in an independent simulation."""
SLOTS = {"mooncake": 20, "mooncake-synthetic": 20, "sharegpt-ca": 40, "sharegpt-hcache": 40}
HINTS = "--hints ends,returns"
LIES = {"order": "queue", "phantom": "queue", "missing": "queue", "false hints": "no queue"}
"""Kinds, and the settings in which the baselines that hear nothing were run."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One trace, told one way."""

    trace: str
    name: str
    options: str
    policies: Sequence[str] = ALL

    def command(self, traces: str, policy: str) -> list[str]:
        """The command of a cell."""
        multiples = ",".join(f"{multiple:g}" for multiple in CAPACITIES)
        chosen = f"--footprint {multiples} --policies {policy} {self.options} -o json"
        return ["python", "-m", "lab.placement", f"{traces}/{TRACES[self.trace]}", *chosen.split()]


def settings() -> Iterator[Setting]:
    """Each trace without a queue and with one; hints, and lies of each kind."""
    for trace in TRACES:
        yield Setting(trace, "no queue", TIMED)
        yield Setting(trace, "queue", f"--slots {SLOTS[trace]} {SERVER}")
    yield Setting("mooncake", "turns of no length", "--instant --exclusive --segment 1")
    hearers = ("look-ahead", OURS)
    for trace in TRACES:
        yield Setting(trace, "hints", f"{TIMED} {HINTS}", (OURS,))
        # The bound hears no client: it knows the future.
        yield Setting(trace, "hints", TIMED, (BOUND,))
        for share in (0.3, 1.0):
            lies = f"--wrong-hints {share:g}"
            yield Setting(trace, f"{share:.0%} false hints", f"{TIMED} {HINTS} {lies}", (OURS,))
            for kind in ("order", "phantom", "missing"):
                options = f"--slots {SLOTS[trace]} {SERVER} {lies} --lies {kind}"
                yield Setting(trace, f"{share:.0%} {kind}", options, hearers)


def run(setting: Setting, policy: str, traces: str) -> list[dict[str, object]]:
    """Lines of one policy, one per capacity."""
    command = setting.command(traces, policy)
    out = subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True, text=True).stdout  # noqa: S603  this command
    said = {
        "trace": setting.trace,
        "setting": setting.name,
        "command": " ".join(command),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    return [said | json.loads(line) for line in out.splitlines()]


def commit() -> str:
    """The last change of what is measured."""
    command = ["git", "log", "-1", "--format=%h", "--", "ctxcache/core/placement", "ctxcache/simulate"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603  as above


def read(path: Path) -> list[dict[str, object]]:
    """Lines that are there; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_all(arguments: argparse.Namespace) -> None:
    """Append what the file lacks, as replays end."""
    done = {(row["trace"], row["setting"], row["policy"]) for row in read(arguments.results)}
    todo = [
        (setting, policy)
        for setting in settings()
        for policy in setting.policies
        if (setting.trace, setting.name, policy) not in done
        and (not arguments.only or f"{setting.trace}/{setting.name}".startswith(arguments.only))
        and (not arguments.policies or policy in arguments.policies.split(","))
    ]
    todo = todo[: arguments.most]
    with ThreadPoolExecutor(arguments.jobs) as pool, arguments.results.open("a") as out:
        for rows in pool.map(lambda each: run(each[0], each[1], arguments.traces), todo):
            for row in rows:
                out.write(json.dumps(row) + "\n")
            out.flush()


class Results:
    """Lines of results by trace, setting, policy and capacity."""

    def __init__(self, rows: Sequence[dict[str, object]]) -> None:
        self._rows = {
            (row["trace"], row["setting"], row["policy"], row["footprint_multiple"]): row for row in rows
        }

    def rate(self, trace: str, setting: str, policy: str, multiple: float, figure: str) -> float | None:
        """One figure in per cent; None where it was not run."""
        row = self._rows.get((trace, setting, policy, multiple))
        value = row and row[figure]
        return 100 * value if isinstance(value, float) else None

    def row(self, trace: str, setting: str, policy: str, figure: str) -> str:
        """One figure at every capacity."""
        rates = (self.rate(trace, setting, policy, multiple, figure) for multiple in CAPACITIES)
        return ", ".join("-" if rate is None else f"{rate:.1f}" for rate in rates)

    def cell(self, trace: str, setting: str, policy: str, multiple: float) -> str:
        """Turns / tokens."""
        rates = [self.rate(trace, setting, policy, multiple, figure) for figure in FIGURES]
        return " / ".join("-" if rate is None else f"{rate:.1f}" for rate in rates)

    def lead(self, trace: str, setting: str, usual: str, multiple: float, figure: str) -> float | None:
        """By how many points ours is ahead of the best baseline.

        Policies that hear nothing are compared as they are `usual`ly.
        """
        ours = self.rate(trace, setting, OURS, multiple, figure)
        heard = self.rate(trace, setting, "look-ahead", multiple, figure)
        others = [
            self.rate(trace, usual, each, multiple, figure) for each in BASELINES if each != "look-ahead"
        ]
        known = [rate for rate in (heard, *others) if rate is not None]
        return None if ours is None or not known else ours - max(known)

    def least_lead(self, trace: str, setting: str, usual: str) -> str:
        """Turns / tokens, where they are least of all capacities."""
        cells = []
        for figure in FIGURES:
            leads = [self.lead(trace, setting, usual, multiple, figure) for multiple in CAPACITIES]
            known = [lead for lead in leads if lead is not None]
            cells.append(f"{min(known):+.1f}" if known else "-")
        return " / ".join(cells)


FIGURES = ("hit_rate", "token_hit_rate")


def print_tables(results: Results) -> None:
    """Markdown: every policy; truthful hints; and by how much ours is ahead at least, lied to."""
    for figure in FIGURES:
        print(f"| {figure} |" + "".join(f" `{policy}` |" for policy in ALL) + "\n|---|" + "---|" * len(ALL))
        for trace, name in itertools.product(TRACES, ("no queue", "queue")):
            cells = " | ".join(results.row(trace, name, policy, figure) for policy in ALL)
            print(f"| {trace}, {name} | {cells} |")
        print()
    header = "".join(f" {each:g}x: `{OURS}` | `{BOUND}` |" for each in CAPACITIES)
    print(f"| hints |{header}\n|---|" + "---|---|" * len(CAPACITIES))
    for trace in TRACES:
        pairs = itertools.product(CAPACITIES, (OURS, BOUND))
        cells = " | ".join(results.cell(trace, "hints", policy, multiple) for multiple, policy in pairs)
        print(f"| {trace} | {cells} |")
    print("\n| false |" + "".join(f" {trace} |" for trace in TRACES) + "\n|---|" + "---|" * len(TRACES))
    for kind, usual in LIES.items():
        lies = []
        for trace in TRACES:
            least = (results.least_lead(trace, f"{share}% {kind}", usual) for share in (30, 100))
            lies.append("; ".join(least))
        print(f"| {kind} | " + " | ".join(lies) + " |")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", help="directory with the traces; with --tables none", nargs="?")
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", help="settings that begin so, such as 'mooncake/queue'")
    parser.add_argument("--policies", help="NAME,...")
    parser.add_argument("--most", type=int, help="end after so many replays")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--tables", action="store_true", help="print the tables of the results")
    arguments = parser.parse_args()
    if arguments.tables:
        print_tables(Results(read(arguments.results)))
    else:
        run_all(arguments)


if __name__ == "__main__":
    main()
