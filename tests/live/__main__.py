"""The running store beside the simulator, in figures.

    python -m tests.live [--policies lru,value] [--sessions N] [--slots K] [--seed N] [--json]
    python -m tests.live --ahead [--policies look-ahead,value] [--turns N] [--seed N] [--json]
    python -m tests.live --prefixes rag,shared,TRACE [--policies value] [--turns N] [--ends] [--json]

For each policy and capacity one load, generated, through a server in this process and through the simulator:
turns by what they found, and those that found something else. With `--slots` turns wait in a queue, which is
published. Good when no more than 1 % of turns differ. With `--ahead`: a server process in real time, and an
engine that publishes its next jobs. Good when 99 % of hits are in DRAM, and all that were announced early
enough. With `--prefixes`: sessions that begin alike, of regimes (lab/placement/regimes.py) and of traces that
name their blocks. Good when the store finds as many of the blocks as the simulator, within one point of all.
Exit code 0 when all is good.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ctxcache.simulate.load import TraceHint
from ctxcache.simulate.trace import Trace
from lab.placement.regimes import REGIMES
from tests.live import prefixes
from tests.live.ahead import run
from tests.live.compare import Setting, Sizes, differences, live_here, simulated
from tests.live.load import Shape, make_turns
from tests.live.prefixes import named_blocks, scaled

SIZES = (Sizes(64, 256), Sizes(128, 512), Sizes(256, 1024))
"""1 to 4 MiB of DRAM, four times as much SSD."""
LIMIT_SHARE = 0.01


def main() -> int:
    """Run what the command line says."""
    chosen = _arguments()
    is_good = True
    run_chosen = _alike if chosen.prefixes else _ahead if chosen.ahead else _compared
    for figures in run_chosen(chosen):
        is_good &= bool(figures["is_good"])
        sys.stdout.write((json.dumps(figures) if chosen.json else _text(figures)) + "\n")
        sys.stdout.flush()
    return int(not is_good)


def _compared(chosen: argparse.Namespace) -> Iterator[dict[str, object]]:
    shape = Shape(
        session_count=chosen.sessions,
        most_turns=6,
        most_segments=3,
        spacing_s=chosen.spacing,
        seed=chosen.seed,
    )
    turns = make_turns(shape)
    for policy in chosen.policies.split(","):
        for sizes in SIZES:
            setting = Setting(sizes, policy, chosen.slots)
            with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
                began_s = time.monotonic()
                running = live_here(turns, setting, Path(directory) / "data")
                duration_s = time.monotonic() - began_s
            expected = simulated(turns, setting)
            found = differences(running, expected)
            yield {
                "policy": policy,
                "dram_segments": sizes.dram_segments,
                "ssd_segments": sizes.ssd_segments,
                "slots": chosen.slots,
                "spacing_s": chosen.spacing,
                "seed": chosen.seed,
                "live": running.counts(),
                "simulated": expected.counts(),
                "differing_turns": len(found),
                "duration_s": round(duration_s, 1),
                "is_good": len(found) <= LIMIT_SHARE * len(turns),
            }


def _ahead(chosen: argparse.Namespace) -> Iterator[dict[str, object]]:
    for policy in chosen.policies.split(","):
        with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
            outcome = run(policy, Path(directory) / "data", turn_count=chosen.turns, seed=chosen.seed)
        yield outcome.to_dict() | {"seed": chosen.seed, "is_good": outcome.is_good}


def _alike(chosen: argparse.Namespace) -> Iterator[dict[str, object]]:
    hints = frozenset((TraceHint.ENDS,)) if chosen.ends else frozenset[TraceHint]()
    for name in chosen.prefixes.split(","):
        if name in REGIMES:
            turns = scaled(REGIMES[name](chosen.seed, chosen.turns))
        else:
            turns = scaled(islice(named_blocks(Trace(Path(name))), chosen.turns))
        asked_count = sum(len(turn.blocks or ()) for turn in turns)
        for policy in chosen.policies.split(","):
            setting = prefixes.Setting(policy, chosen.dram_segments, chosen.ssd_segments, hints)
            with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
                running = sum(prefixes.live(turns, setting, Path(directory) / "data"))
            expected = sum(prefixes.simulated(turns, setting))
            yield {
                "load": Path(name).name,
                "turns": len(turns),
                "policy": policy,
                "ends": chosen.ends,
                "dram_segments": chosen.dram_segments,
                "ssd_segments": chosen.ssd_segments,
                "live": round(running / asked_count, 4),
                "simulated": round(expected / asked_count, 4),
                "is_good": abs(running - expected) <= LIMIT_SHARE * asked_count,
            }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.live", description=__doc__.partition("\n")[0])
    parser.add_argument("--policies", default="lru,look-ahead,value")
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--spacing", type=float, default=2.0, help="seconds between two new sessions")
    parser.add_argument("--ahead", action="store_true", help="jobs known ahead, in real time")
    parser.add_argument("--turns", type=int, default=400, help="of --ahead and --prefixes")
    parser.add_argument("--prefixes", default="", help="regimes and traces with sessions that begin alike")
    parser.add_argument("--ends", action="store_true", help="--prefixes: the store hears when sessions end")
    parser.add_argument("--dram-segments", type=int, default=128, help="of --prefixes, as the next one")
    parser.add_argument("--ssd-segments", type=int, default=2048, help="slots of 64 tokens, a block each")
    parser.add_argument("--slots", type=int, help="turns at a time; without, turns take no time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default="/var/tmp", help="where SSD files are made")  # noqa: S108
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    return parser.parse_args()


def _text(figures: dict[str, object]) -> str:
    return "  ".join(f"{name} {value}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
