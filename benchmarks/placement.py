#!/usr/bin/env python3
"""Every policy over every trace with sessions: runs `ctxcache simulate`, keeps its lines, and prints the tables.

    python benchmarks/placement.py ../shared/data benchmarks/results/DATE-placement.jsonl
    python benchmarks/placement.py --tables benchmarks/results/DATE-placement.jsonl

Each line has its trace, setting, command, commit and date. What the file has already is not run again, so that a run
may be done in pieces (`--only`, `--policies`). About half an hour on one core; two replays at once (`--jobs`).
"""

import argparse
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
SERVER = "--inclusive --ssd-read 20GB"
"""A store as the server is, which waits little for SSD: what differs is what was kept."""
TIMED = f"--timed --decode 60 {SERVER}"
"""At that rate LRU hits on Mooncake what it does in an independent simulation."""
SLOTS = {"mooncake": 20, "mooncake-synthetic": 20, "sharegpt-ca": 40, "sharegpt-hcache": 40}
HINTS = "--hints ends,returns"


@dataclass(frozen=True, slots=True)
class Setting:
    """One trace, told one way."""

    trace: str
    name: str
    options: str
    policies: Sequence[str] = ALL

    def command(self, traces: str, policy: str) -> list[str]:
        """What is run."""
        multiples = ",".join(f"{multiple:g}" for multiple in CAPACITIES)
        chosen = f"--footprint {multiples} --policies {policy} {self.options} --json"
        return ["ctxcache", "simulate", f"{traces}/{TRACES[self.trace]}", *chosen.split()]


def settings() -> Iterator[Setting]:
    """Each trace without a queue and with one; hints, and lies of each kind."""
    for trace in TRACES:
        yield Setting(trace, "no queue", TIMED)
        yield Setting(trace, "queue", f"--slots {SLOTS[trace]} {SERVER}")
    yield Setting("mooncake", "turns of no length", "")
    hearers, told = ("look-ahead", OURS), (OURS, BOUND)
    for trace in TRACES:
        yield Setting(trace, "hints", f"{TIMED} {HINTS}", told)
        for share in (0.3, 1.0):
            lies = f"--wrong-hints {share:g}"
            yield Setting(trace, f"{share:.0%} false hints", f"{TIMED} {HINTS} {lies}", (OURS,))
            for kind in ("order", "phantom", "missing"):
                options = f"--slots {SLOTS[trace]} {SERVER} {lies} --lies {kind}"
                yield Setting(trace, f"{share:.0%} {kind}", options, hearers)


def run(setting: Setting, policy: str, traces: str) -> list[dict[str, object]]:
    """Lines of one policy, one per capacity."""
    command = setting.command(traces, policy)
    program = [sys.executable, "-m", "ctxcache.cli.main", *command[1:]]
    out = subprocess.run(program, check=True, capture_output=True, text=True).stdout  # noqa: S603  this command
    said = {
        "trace": setting.trace, "setting": setting.name, "command": " ".join(command), "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip
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


def print_tables(rows: Sequence[dict[str, object]]) -> None:
    """Markdown, one table per trace and setting: hits by turns / by tokens, and GPU seconds saved."""
    groups: dict[tuple[object, object], dict[str, dict[float, dict[str, float]]]] = {}
    for row in rows:
        group = groups.setdefault((row["trace"], row["setting"]), {})
        group.setdefault(str(row["policy"]), {})[row["footprint_multiple"]] = row  # type: ignore[index,assignment]
    for (trace, name), policies in groups.items():
        print(f"\n**{trace}, {name}**\n\n| policy |" + "".join(f" {each:g}x |" for each in CAPACITIES))
        print("|---|" + "---|" * len(CAPACITIES))
        for policy in sorted(policies, key=ALL.index):
            print(f"| `{policy}` |" + "".join(f" {cell(policies[policy][each])} |" for each in CAPACITIES))


def cell(row: dict[str, float]) -> str:
    """Turns / tokens in per cent; GPU seconds saved."""
    return f"{row['hit_rate']:.1%} / {row['token_hit_rate']:.1%}; {row['gpu_saved_s']:.0f}".replace("%", "")


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
        print_tables(read(arguments.results))
    else:
        run_all(arguments)


if __name__ == "__main__":
    main()
