"""The cost of a recording: operations a second of a local client, with and without one, in turn, in one run.

    python -m lab.studies.recording [--pairs 8] [--slice-s 0.5]

The recorder is `ctxcache trace record` in a process of its own. For reads (a lease and its end, two calls
recorded) and look-ups (100 to a request, each recorded): the median without, with, and of each pair's ratio.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ctxcache
from ctxcache.client import Client
from ctxcache.simulate.recorded import Layout
from lab.bench.server import serving
from lab.replay.player import MadeUp

SESSIONS, TOKENS, LOOKUPS = 8, 256, 100


def main() -> None:
    """Print a line of JSON for each kind of operation."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--slice-s", type=float, default=0.5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
        place = Path(directory)
        with serving(place / "data", arena_bytes=64 << 20, ssd_bytes=64 << 20) as server:
            target = server.target("tcp")
            with ctxcache.connect(target, access="local") as client:
                for name, operate in _operations(client).items():
                    print(json.dumps({"operation": name} | _pairs(operate, target, place, chosen)))


def _operations(client: Client) -> dict[str, Callable[[], int]]:
    """Each does some and returns how many."""
    made_up = MadeUp(Layout(((32, 1),), 12288, 64))
    model = client.models.register(made_up.model.spec)
    names = []
    for number in range(SESSIONS):
        session = client.sessions.create(model, id=f"s{number}", layout=made_up.streams)
        session.append(made_up.rows(session.name, 0, TOKENS))
        names.append(session.name)

    def read() -> int:
        for name in names:
            client.sessions.open(name, model).read().close()
        return len(names)

    def look_up() -> int:
        return len(client.sessions.lookup([(names[i % SESSIONS], model.fingerprint) for i in range(LOOKUPS)]))

    return {"read": read, "lookup": look_up}


def _pairs(
    operate: Callable[[], int], target: str, place: Path, chosen: argparse.Namespace
) -> dict[str, float]:
    _rate(operate, chosen.slice_s)
    pairs = []
    for _ in range(chosen.pairs):
        without = _rate(operate, chosen.slice_s)
        with _recording(target, place / f"{time.monotonic_ns()}.jsonl"):
            pairs.append((without, _rate(operate, chosen.slice_s)))
    return {
        "per_s_without": round(statistics.median(pair[0] for pair in pairs)),
        "per_s_with": round(statistics.median(pair[1] for pair in pairs)),
        "ratio": round(statistics.median(pair[1] / pair[0] for pair in pairs), 3),
    }


def _rate(operate: Callable[[], int], span_s: float) -> float:
    count, begun_s = 0, time.perf_counter()
    while time.perf_counter() < begun_s + span_s:
        count += operate()
    return count / (time.perf_counter() - begun_s)


@contextmanager
def _recording(target: str, path: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "ctxcache.cli.main", "--target", target, "trace", "record", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:  # noqa: S603  our own command
        while not path.exists() or not path.stat().st_size:
            time.sleep(0.005)
        yield
        process.send_signal(signal.SIGINT)


if __name__ == "__main__":
    main()
