"""The table of docs/capacity.md: what a capacity keeps of each trace, by prefix blocks and by sessions.

    python -m lab.studies.capacity FOLDER --results lab/results/DATE-capacity.jsonl --write docs/capacity.md

Every trace in FOLDER whose sessions return is replayed as `ctxcache simulate` does. By blocks: the share of
all prompt tokens found under `value`, `value` with truthful hints, and block LRU. By sessions, in a closed
loop with an SSD that is fast enough: the share of later turns that find their history, under `value` and LRU.
Capacities are multiples of the trace's live footprint. Results that are there are not made again. `--write`
puts the table between the two marks of a page.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ctxcache.core.placement.value import Objective
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.simulate.load import Load, TraceHint
from ctxcache.simulate.study import Capacity, study
from lab.studies.margin import folder, trace_of

MULTIPLES = (0.25, 0.5, 1.0)
HINTS = frozenset({TraceHint.ENDS, TraceHint.RETURNS})
BLOCKS = replace(Load(), objective=Objective.TOKENS)
SESSIONS = Load(
    is_inclusive=True,
    segment_tokens=SEGMENT_TOKENS,
    is_timed=True,
    is_closed=True,
    # Reads take no time: behind a slow SSD more sessions are open at once than the footprint counts.
    ssd_read_bytes_per_s=900e12,
)
SERIES: dict[str, tuple[Load, str, bool]] = {
    "blocks, value": (BLOCKS, "value", True),
    "blocks, value, hints": (replace(BLOCKS, hints=HINTS), "value", True),
    "blocks, LRU": (BLOCKS, "lru", True),
    "sessions, value": (SESSIONS, "value", False),
    "sessions, LRU": (SESSIONS, "lru", False),
}
"""The columns: the load, the policy, and whether blocks are placed."""
BEGIN, END = "<!-- python -m lab.studies.capacity -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Kept:
    """The share that one column has of one trace."""

    trace: str
    series: str
    multiple: float
    block_tokens: int
    share: float


def run(path: Path, series: str, block_tokens: int) -> list[Kept]:
    """Replay one trace for one column, at each capacity."""
    trace, (load, policy, is_by_blocks) = trace_of(path), SERIES[series]
    if trace is None:
        return []
    outcomes = study(
        list(trace),
        load,
        [policy],
        [Capacity(multiple) for multiple in MULTIPLES],
        step=lambda _what, _done: None,
        block_tokens=block_tokens if is_by_blocks else None,
    )
    figure = "prompt_hit_rate" if is_by_blocks else "hit_rate"
    return [
        Kept(path.name, series, one.multiple or 0.0, block_tokens, one.tally.figures()[figure])
        for one in outcomes
    ]


def read(path: Path | None) -> list[Kept]:
    """The results of earlier runs."""
    if path is None or not path.exists():
        return []
    return [Kept(**json.loads(line)) for line in path.read_text().splitlines()]


def table(found: Sequence[Kept]) -> Iterator[str]:
    """The lines of the table: a trace a row, its three capacities in each cell."""
    yield "| trace | " + " | ".join(SERIES) + " |"
    yield "|---|" + "---|" * len(SERIES)
    shares = {(one.trace, one.series, one.multiple): one.share for one in found}
    for trace in sorted({one.trace for one in found}):
        cells = [
            "/".join(
                f"{100 * shares[trace, series, multiple]:.1f}" if (trace, series, multiple) in shares else "-"
                for multiple in MULTIPLES
            )
            for series in SERIES
        ]
        yield f"| `{trace.partition('.')[0]}` | " + " | ".join(cells) + " |"


def written(page: str, lines: Sequence[str]) -> str:
    """The page with these lines between its marks. Raises ValueError where it has no marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} and {END}")
    return "\n".join([before + begin, "", *lines, "", end + after])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=folder)
    parser.add_argument("--block-tokens", type=int, default=512, help="tokens of a block")
    parser.add_argument("--results", type=Path, help="JSON lines: what is there is not run again")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="a page with the marks, to be changed")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    size = arguments.block_tokens
    found = [one for one in read(arguments.results) if one.block_tokens == size]
    done = {(one.trace, one.series) for one in found}
    paths = [path for path in sorted(arguments.folder.iterdir()) if path.is_file() and trace_of(path)]
    if not paths:
        parser.exit(1, f"{arguments.folder} has no trace whose sessions return\n")
    todo = [(path, series, size) for path in paths for series in SERIES if (path.name, series) not in done]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for more in pool.map(run, *zip(*todo, strict=True)) if todo else ():
            found += more
            sys.stderr.writelines(f"{one}\n" for one in more)
            if arguments.results is not None:
                with arguments.results.open("a") as out:
                    out.writelines(json.dumps(asdict(one)) + "\n" for one in more)
    lines = list(table([one for one in found if one.trace in {path.name for path in paths}]))
    print("\n".join(lines))
    if arguments.write is not None:
        arguments.write.write_text(written(arguments.write.read_text(), lines))
    sys.exit(not found)


if __name__ == "__main__":
    main()
