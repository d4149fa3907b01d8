"""Power cut: what was not synced is dropped, torn and reordered; acknowledged durable rows must be there.

    python -m tests.faults.powercut --cuts 200

The data directory and the SSD files lie on ext4 over loop devices over disks with a volatile cache
(`cut_disk`), on one disk, two or three; clients work as in `crash`, every round ends by a cut, also one whose
server ended in order. SIGKILL alone proves nothing about syncs. Worst case: a machine without FUSE, loop
devices or root, where this is skipped (exit code 77).
"""

import argparse
import random
import shutil
import tempfile
from pathlib import Path

from tests.faults.blows import Blows, Kind
from tests.faults.crash import report_times
from tests.faults.harness import Harness, Report, progress
from tests.faults.power import PowerGround, check_supported
from tests.faults.rounds import Rounds

CONTROLS = {
    "slots_not_synced": "SSD files are never synced",
    "records_not_synced": "the metadata's log is never synced",
    "durable_wish_forgotten": "a durable commit is not synced where another one is written behind it",
    "facts_not_synced": "FORMAT and RUNS are named before their bytes are synced",
}
KINDS = {
    Kind.KILL: 3,
    Kind.ANSWER: 4,
    Kind.STEP: 7,
    Kind.START_STEP: 2,
    Kind.DRAIN: 1,
    Kind.DRAIN_STEP: 1,
    Kind.END: 1,
}


def run(options: argparse.Namespace, report: Report) -> None:
    """Cut the power again and again and fill the report. Raises Unsupported."""
    check_supported()
    rng = random.Random(options.seed)
    directory = Path(tempfile.mkdtemp(prefix="ctxcache-power-"))
    plants = [options.control] if options.control else []
    # On one disk the log's sync makes the slots durable too: only a second one tells. A third has copies.
    ground = PowerGround(directory, rng, disk_counts=(2,) if options.control else (1, 2, 3))
    rounds = Rounds(ground, report, Blows(rng, KINDS), rng, plants=plants)
    try:
        while ground.cut_count < options.cuts and not (options.control and report.findings):
            rounds.play()
            progress(ground.cut_count, options.cuts, "cuts")
        if not options.control:
            rounds.finish()
    finally:
        rounds.close()
        ground.close()
        shutil.rmtree(directory, ignore_errors=True)
    report.figures["cut_count"] = ground.cut_count
    report.figures |= {f"unsynced_writes_{fate}": count for fate, count in ground.fates.items()}
    report_times(report, "start", rounds.fresh_times)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cuts", type=int, default=10, help="power cuts (default 10)")


HARNESS = Harness("powercut", "Cut the power again and again.", run, CONTROLS, _options)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
