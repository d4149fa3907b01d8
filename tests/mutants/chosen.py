"""Mutants that a seed chooses: places and kinds of change that nobody picked, judged by the tests nearby.

    python -m tests.mutants.chosen --seed 7 --count 16 [--room wire ...] [--output json]

`count` of each room (`places.ROOMS`). Which tests run which line is measured first, and kept in build/mutants
beside the verdicts: whatever was interrupted goes on there; `--again` judges anew those that survived. Tests
that run in other processes alone are not known. A survivor is a missing test, or the same program: that a
person says, see lab/notes/mutants.md. Exit codes: 0 all are noticed, 1 some survived.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.mutants.places import ROOMS, Change, choose
from tests.mutants.reached import Reached, measured
from tests.mutants.run import GOOD, SURVIVED, Tree, Verdict
from tests.mutants.table import ROOT, Mutant

STATE = ROOT / "build" / "mutants"
MOST_S = 60.0
"""How long the tests of one mutant take together where none notices it."""
TESTS = {
    "cache": ("tests/cache", "tests/core", "tests/service"),
    "core/ledger": ("tests/core", "tests/cache"),
    "storage": ("tests/metadata", "tests/tiers", "tests/format", "tests/test_ssd_directories.py"),
    "service": ("tests/service", "tests/client"),
    "wire": (
        "tests/service",
        "tests/client",
        "tests/test_framed_socket.py",
        "tests/test_address.py",
        "tests/test_status.py",
    ),
    "client": ("tests/client", "tests/clients"),
    "engines": ("tests/gpu_worker/engines", "tests/gpu_worker/cli"),
}
"""Where the tests of a room are."""
Judged = dict[str, dict[str, object]]


def name_of(change: Change, source: str) -> str:
    """The change in a line: its place, its kind, what was there and what is there now."""
    old, new = (" ".join(text.split()) for text in (source[change.begin : change.end], change.new))
    return f"{change.file}:{change.line} {change.kind}: {old} → {new}"


def judge(tree: Tree, change: Change, reached: Reached) -> Verdict:
    """Have the tests that run the changed lines judge it; "unreached" where none does."""
    source = (ROOT / change.file).read_text()
    tests = reached.of(change.file, range(change.line, change.last_line + 1), MOST_S)
    name = name_of(change, source)
    if not tests:
        return Verdict(name, change.file, "unreached", "", 0.0)
    mutant = Mutant(name, change.file, source, change.apply(source), change.kind, tuple(tests))
    return tree.judge(mutant, is_first_only=True)


def table_of(judged: Judged) -> str:
    """How many of how many, by room, in Markdown."""
    lines = ["| room | noticed | survived | unreached |", "|---|---|---|---|"]
    for room in ROOMS:
        outcomes = [str(one["outcome"]) for one in judged.values() if one["room"] == room]
        counts = [sum(o == outcome for o in outcomes) for outcome in ("survived", "unreached")]
        lines.append(
            f"| {room} | {len(outcomes) - sum(counts)} of {len(outcomes)} | {counts[0]} | {counts[1]} |"
        )
    return "\n".join(lines)


def _test_files(rooms: Iterable[str]) -> list[str]:
    paths = {ROOT / place for room in rooms for place in TESTS[room]}
    found = {path for place in paths for path in ([place] if place.is_file() else place.rglob("test_*.py"))}
    return sorted(str(path.relative_to(ROOT)) for path in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.chosen", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seed", type=int, default=1, help="what chooses the places (default 1)")
    parser.add_argument("--count", type=int, default=16, help="mutants of each room (default 16)")
    parser.add_argument("--room", nargs="+", choices=list(ROOMS), default=list(ROOMS), help="these alone")
    parser.add_argument("--again", action="store_true", help="judge anew those that survived")
    parser.add_argument("--output", choices=("text", "json"), default="text", help="of standard output")
    options = parser.parse_args(arguments)
    STATE.mkdir(parents=True, exist_ok=True)
    state = STATE / f"verdicts-{options.seed}.json"
    judged: Judged = json.loads(state.read_text()) if state.exists() else {}
    chosen = {room: choose(options.seed, room, options.count) for room in options.room}
    reached = measured(_test_files(options.room), STATE / "reached")
    with tempfile.TemporaryDirectory(prefix="ctxcache-mutants-") as directory:
        tree = Tree(Path(directory))
        for room, changes in chosen.items():
            for change in changes:
                name = name_of(change, (ROOT / change.file).read_text())
                before = judged.get(name)
                if before and not (options.again and before["outcome"] in ("survived", "unreached")):
                    continue
                verdict = judge(tree, change, reached)
                judged[name] = {"room": room, **asdict(verdict)}
                state.write_text(json.dumps(judged, indent=1))
                sys.stderr.write(f"{verdict.outcome:9} {verdict.duration_s:6.1f} s  {verdict.name}\n")
    if options.output == "json":
        sys.stdout.write(json.dumps(judged, indent=1) + "\n")
    else:
        left = [str(one["name"]) for one in judged.values() if one["outcome"] in ("survived", "unreached")]
        sys.stdout.write("\n".join([table_of(judged), "", *left]) + "\n")
    return SURVIVED if any(one["outcome"] == "survived" for one in judged.values()) else GOOD


if __name__ == "__main__":
    raise SystemExit(main())
