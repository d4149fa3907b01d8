"""The running store beside the simulator, in figures.

    python -m tests.live [--policies lru,value] [--sessions N] [--slots K] [--seed N] [--json]

For each policy and capacity one load, generated, through a server in this process and through the simulator:
turns by what they found, and those that found something else. Exit code 0 when no more than 1 % did.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.live.compare import Setting, Sizes, differences, live_here, simulated
from tests.live.load import Shape, make_turns

SIZES = (Sizes(64, 256), Sizes(128, 512), Sizes(256, 1024))
"""1 to 4 MiB of DRAM, four times as much SSD."""
LIMIT_SHARE = 0.01


def main() -> int:
    """Run what the command line says."""
    chosen = _arguments()
    shape = Shape(
        session_count=chosen.sessions, most_turns=6, most_segments=3, spacing_s=2.0, seed=chosen.seed
    )
    turns, most_share = make_turns(shape), 0.0
    for policy in chosen.policies.split(","):
        for sizes in SIZES:
            setting = Setting(sizes, policy, chosen.slots)
            with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
                began_s = time.monotonic()
                running = live_here(turns, setting, Path(directory) / "data")
                duration_s = time.monotonic() - began_s
            expected = simulated(turns, setting)
            found = differences(running, expected)
            most_share = max(most_share, len(found) / len(turns))
            figures = {
                "policy": policy, "dram_segments": sizes.dram_segments, "ssd_segments": sizes.ssd_segments,
                "slots": chosen.slots, "seed": chosen.seed, "live": running.counts(), "simulated": expected.counts(),
                "differing_turns": len(found), "duration_s": round(duration_s, 1),
            }  # fmt: skip
            sys.stdout.write((json.dumps(figures) if chosen.json else _text(figures)) + "\n")
            sys.stdout.flush()
    return int(most_share > LIMIT_SHARE)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.live", description=__doc__.partition("\n")[0])
    parser.add_argument("--policies", default="lru")
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--slots", type=int, help="turns at a time; without, turns take no time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", default="/var/tmp", help="where SSD files are made")  # noqa: S108
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    return parser.parse_args()


def _text(figures: dict[str, object]) -> str:
    return "  ".join(f"{name} {value}" for name, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
