"""Every control of every fault harness, once: a table of planted bugs, each found or not.

    python -m tests.faults.controls [--harness NAME ...] [--control NAME ...]

Each runs as its harness's own command does, in a process of its own, with the smallest arguments that find
it: tests of the harnesses take theirs from here, too. Exit codes: 0 every bug is found, 1 one is not, or its
harness broke, or ran for longer than ten minutes. A control that this machine cannot run is said to be
skipped. Worst case: a harness that hangs, which is ended and counts as not found.
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.harness import SKIPPED, Harness

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0
_DAMAGES = ("flips", "misplacements", "metadata-faults", "refusals")
FLIPS, MISPLACEMENTS, METADATA, REFUSALS = (
    [part for name in _DAMAGES for part in (f"--{name}", count if name == tried else "0")]
    for tried, count in zip(_DAMAGES, ("200", "100", "60", "1000"), strict=True)
)
ARGUMENTS: dict[str, Sequence[str]] = {
    "clients": ("--stalled", "20", "--cancels", "40"),
    "crash": ("--cycles", "40", "--aborts", "0"),
    "devices": ("--sessions", "6"),
    "drain": ("--cycles", "1"),
    "expiry": ("--sessions", "400", "--rate", "200", "--untimed"),
    "fuzz": ("--requests", "600", "--connections", "0"),
    "history": ("--acts", "60"),
    "overload": ("--rounds", "1", "--seconds", "1", "--untimed"),
    "powercut": ("--cuts", "20"),
    "soak": ("--operations", "400", "--rounds", "2", "--settle-s", "2"),
}
"""Options of each harness that is not run as it is by default."""
OWN: dict[tuple[str, str], Sequence[str]] = {
    ("clients", "append_outlives_stream"): ("--scenarios", "cancelled_appends"),
    ("clients", "lease_believed"): ("--scenarios", "thawed_clients"),
    ("clients", "lease_outlives_stream"): ("--scenarios", "dead_clients"),
    ("clients", "readers_unbounded"): ("--scenarios", "stalled_readers"),
    ("clients", "rows_before_commit"): ("--scenarios", "out_of_turn"),
    ("corrupt", "first_chunk_only"): FLIPS,
    ("corrupt", "header_believed"): MISPLACEMENTS,
    ("corrupt", "rebuild_mends_first"): REFUSALS,
    ("corrupt", "sessions_uncounted"): METADATA,
    ("corrupt", "tidied_first"): REFUSALS,
    ("corrupt", "verification_off"): FLIPS,
    ("corrupt", "verify_begins"): REFUSALS,
    ("corrupt", "witness_ignored"): METADATA,
    ("crash", "abandoned_save_shows"): ("--aborts", "50"),
    ("crash", "second_writer_is_not_flushed_for"): ("--seed", "3"),
    ("crash", "tail_rewritten_in_place"): ("--seed", "3"),
    ("expiry", "all_at_once"): ("--sessions", "100000", "--rate", "1000"),
    ("history", "deleted_record_stays"): ("--acts", "300"),
    ("history", "durable_wish_forgotten"): ("--acts", "100", "--power"),
    ("history", "slots_not_synced"): ("--acts", "30", "--power"),
    ("history", "truncation_not_recorded"): ("--acts", "300"),
    ("powercut", "durable_wish_forgotten"): ("--cuts", "40"),
    ("soak", "reads_remembered"): ("--operations", "1200"),
}
"""Options that single controls need besides, or instead."""
QUICK = {
    "clients": "append_outlives_stream",
    "clock": "forgets_time",
    "corrupt": "first_chunk_only",
    "crash": "sleepers_record_is_old",
    "devices": "paths_in_turn",
    "drain": "cut_at_once",
    "expiry": "seen_until_removed",
    "fuzz": "unmapped_error",
    "history": "acknowledged_before_record",
    "overload": "refusal_leaks",
    "powercut": "slots_not_synced",
    "soak": "lease_kept_on_cancel",
    "syscalls": "short_write_is_whole",
}
"""A control of a harness that is found within seconds: the one that tests try."""
TIMED = (("expiry", "all_at_once"),)
"""Found by how long calls take: nothing else may run meanwhile."""


def arguments(harness: str, control: str) -> list[str]:
    """The command line on which the harness finds the control."""
    given = [*ARGUMENTS.get(harness, ()), *OWN.get((harness, control), ())]
    return [word for word in given if (harness, control) not in TIMED or word != "--untimed"] + [
        "--control",
        control,
    ]


def harnesses() -> Iterator[Harness]:
    """Every fault harness, by name."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if re.search(r"^HARNESS = ", path.read_text(), re.MULTILINE):
            yield importlib.import_module(f"tests.faults.{path.stem}").HARNESS


def _try(harness: str, control: str) -> tuple[str, str]:
    """The verdict on one control, and the first thing that was found, or what went wrong."""
    command = [sys.executable, "-m", f"tests.faults.{harness}", "--json", *arguments(harness, control)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "NOT FOUND", f"it ran for more than {LIMIT_S:.0f} s"
    if done.returncode == SKIPPED:
        return "skipped", done.stderr.strip().rpartition("\n")[2]
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        return "BROKEN", f"exit code {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}"
    first = (report["findings"] or ["nothing"])[0]
    return "BROKEN" if report["is_broken"] else "found" if report["is_good"] else "NOT FOUND", first


def main() -> int:
    """Try them all, a line each as soon as it is known; returns the exit code."""
    known = list(harnesses())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--harness", nargs="+", choices=[each.name for each in known], help="these alone")
    parser.add_argument("--control", nargs="+", help="these alone")
    options = parser.parse_args()
    chosen = [
        (harness.name, control)
        for harness in known
        for control in harness.controls
        if (not options.harness or harness.name in options.harness)
        and (not options.control or control in options.control)
    ]
    verdicts: list[str] = []
    for number, (harness, control) in enumerate(chosen, 1):
        began_s = time.monotonic()
        verdict, first = _try(harness, control)
        verdicts.append(verdict)
        name, took_s = f"{harness} {control}", time.monotonic() - began_s
        sys.stdout.write(f"{number:3}/{len(chosen)} {name:44} {verdict:9} {took_s:5.0f} s  {first[:120]}\n")
        sys.stdout.flush()
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in sorted(set(verdicts)))
    sys.stdout.write(f"{len(verdicts)} controls: {counts}\n")
    return 0 if set(verdicts) <= {"found", "skipped"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
