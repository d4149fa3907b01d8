"""Whether `value` is ever more than 2 points below the best baseline, or below block LRU, on any load.

    python -m lab.studies.margin FOLDER --regimes --results lab/results/DATE-margin.jsonl

Every trace in FOLDER, and with --regimes each of the nine that are generated, is replayed by prefix blocks at
some multiples of its live footprint, under `value` and under each baseline; `belady` is the bound, which no
policy can be above. The compared figure is the share of all prompt tokens found. The table is printed; the
command ends with 1 where the promise is broken. Traces whose sessions never return, and files that are no
traces, are named and left out. Cells that the results have already are not run again, and are in the table: a
run may be done in pieces, by --only and --block-tokens. `--before` has the results of an earlier `value`, for
a column of its own.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ctxcache.core.placement.value import Objective
from ctxcache.simulate.load import Load
from ctxcache.simulate.rows import TraceTurn
from ctxcache.simulate.study import BELADY, Capacity, study
from ctxcache.simulate.trace import BLOCK_TOKENS, ArrivalPace, InvalidTrace, Trace
from lab.placement.policies import policy_of
from lab.placement.regimes import REGIMES

OURS, BLOCK_LRU = "value", "lru"
BASELINES = (BLOCK_LRU, "lru-2", "lfu", "gdsf", "lhd", "arc", "s3-fifo", "sieve", "w-tinylfu")
MOST_BELOW, MOST_BELOW_LRU = 0.02, 0.0001
REGIME_SEED = 1
HEAD = """# `value` beside baselines, by prefix blocks

Shares of all prompt tokens found, by multiples of the live footprint by blocks.
`before` is `value` before it remembered what was given up; `belady (bound)` knows the future and may refuse.
Made by `python -m lab.studies.margin`; lab/README.md has the whole command.
"""
PACE = ArrivalPace(sessions_per_s=0.1)
"""For traces that say no arrivals."""


@dataclass(frozen=True, slots=True)
class Found:
    """The share of all prompt tokens that one policy found on one trace, at a multiple of its footprint."""

    trace: str
    multiple: float
    policy: str
    share: float
    block_tokens: int = BLOCK_TOKENS


def trace_of(path: Path) -> Trace | None:
    """The trace in a file; None where it is none, or nothing in it can return."""
    for pace in (None, PACE):
        trace = Trace(path, pace=pace)
        try:
            seen: set[bytes] = set()
            for turn in trace:
                if turn.session in seen or turn.blocks is not None:
                    return trace
                seen.add(turn.session)
        except (InvalidTrace, UnicodeDecodeError):
            continue
        return None
    return None


def turns_of(path: Path) -> list[TraceTurn]:
    """Of a trace, or of a regime by its name; none for a file that says nothing."""
    if path.name in REGIMES and not path.exists():
        return list(REGIMES[path.name](REGIME_SEED))
    return list(trace_of(path) or ())


def run(
    path: Path, multiples: Sequence[float], policy: str, block_tokens: int, results: Path | None
) -> list[Found]:
    """Replay one trace under one policy; nothing for a file that says nothing.

    Each result is written at once: a run that is cut off loses one.
    """
    turns = turns_of(path)
    if not turns:
        return []
    load = replace(Load(), objective=Objective.TOKENS)
    capacities = [Capacity(multiple) for multiple in multiples]
    found = []
    for outcome in study(
        turns,
        load,
        [policy],
        capacities,
        step=lambda _what, _done: None,
        block_tokens=block_tokens,
        policy_of=policy_of,
    ):
        tally, multiple = outcome.tally, outcome.multiple or 0.0
        share = 1 - tally.computed_tokens / tally.prompt_tokens
        found.append(Found(path.name, multiple, policy, share, block_tokens))
        sys.stderr.write(f"{found[-1]}\n")
        if results is not None:
            with results.open("a") as out:
                out.write(json.dumps({name: getattr(found[-1], name) for name in Found.__slots__}) + "\n")
    return found


def read(path: Path | None) -> list[Found]:
    """The findings of an earlier run."""
    if path is None or not path.exists():
        return []
    return [Found(**json.loads(line)) for line in path.read_text().splitlines()]


def broken(shares: dict[str, float]) -> Iterator[str]:
    """The breaches of the promise by these shares of one trace and capacity, by policy."""
    ours = shares[OURS]
    known = {policy: share for policy, share in shares.items() if policy not in (OURS, BELADY)}
    if known:
        best = max(known, key=lambda policy: known[policy])
        if ours < known[best] - MOST_BELOW:
            yield f"{known[best] - ours:.4f} below {best}"
    if ours < known.get(BLOCK_LRU, 0.0) - MOST_BELOW_LRU:
        yield f"{known[BLOCK_LRU] - ours:.4f} below block LRU"


def report(found: Sequence[Found], before: Sequence[Found] = ()) -> tuple[str, bool]:
    """The table, and whether the promise holds, on some trace at least."""
    old = {(one.trace, one.multiple, one.block_tokens): one.share for one in before if one.policy == OURS}
    policies = (*BASELINES, BELADY)
    ours = ["before", OURS] if old else [OURS]
    heads = ("trace", "x footprint", *ours, *policies[:-1], f"{BELADY} (bound)", "")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    rows: dict[tuple[str, float, int], dict[str, float]] = {}
    for one in found:
        rows.setdefault((one.trace, one.multiple, one.block_tokens), {})[one.policy] = one.share
    is_kept, row_count = True, 0
    for key, shares in sorted(rows.items()):
        if OURS not in shares:
            continue
        row_count += 1
        reasons = "; ".join(broken(shares))
        is_kept = is_kept and not reasons
        cells = [f"{shares[each]:.4f}" if each in shares else "-" for each in (OURS, *policies)]
        if old:
            cells.insert(0, f"{old[key]:.4f}" if key in old else "-")
        trace, multiple, size = key
        trace += "" if size == BLOCK_TOKENS else f", blocks of {size:,}"
        lines.append(f"| {' | '.join((trace, f'{multiple:g}', *cells))} | {reasons.upper()} |")
    return "\n".join(lines) + "\n", is_kept and row_count > 0


def folder(given: str) -> Path:
    """A folder named on the command line. Raises ArgumentTypeError where there is none."""
    path = Path(given)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{given} is no folder")
    return path


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=folder)
    parser.add_argument("--regimes", action="store_true", help="also the nine that are generated")
    parser.add_argument("--footprint", default="0.1,0.25,0.5,1", help="multiples of the live footprint")
    parser.add_argument("--policies", default=",".join((*BASELINES, BELADY)), help="baselines to run")
    parser.add_argument("--only", default="", help="traces whose names begin so")
    parser.add_argument("--but", default="-", help="leave out traces whose names begin so")
    parser.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS, help="tokens of a block")
    parser.add_argument("--results", type=Path, help="JSON lines: what is there is not run again")
    parser.add_argument("--before", type=Path, help="results of an earlier value, for a column")
    parser.add_argument("--write", type=Path, help="a page that gets the table")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    files = [
        path
        for path in sorted(arguments.folder.iterdir())
        if path.name.startswith(arguments.only) and not path.name.startswith(arguments.but)
    ]
    paths = [path for path in files if path.is_file() and trace_of(path) is not None]
    if not paths:
        parser.exit(1, f"{arguments.folder} has no trace whose sessions return\n")
    if arguments.regimes:
        paths += [Path(name) for name in REGIMES]
    print(f"left out: {', '.join(path.name for path in files if path not in paths) or 'none'}\n")
    policies = [OURS, *arguments.policies.split(",")]
    multiples = [float(each) for each in arguments.footprint.split(",")]
    found = read(arguments.results)
    size = arguments.block_tokens
    done = {(one.trace, one.multiple, one.policy, one.block_tokens) for one in found}
    todo = [
        (path, missing, policy, size, arguments.results)
        for policy, path in product(policies, paths)
        if (missing := [each for each in multiples if (path.name, each, policy, size) not in done])
    ]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for more in pool.map(run, *zip(*todo, strict=True)) if todo else ():
            found += more
    chosen = [one for one in found if one.multiple in multiples]
    table, is_kept = report(chosen, read(arguments.before))
    print(table, end="")
    if arguments.write:
        arguments.write.write_text(f"{HEAD}\n{table}")
    sys.exit(not is_kept)


if __name__ == "__main__":
    main()
