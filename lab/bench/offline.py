"""`ctxcache verify` and `ctxcache rebuild` without a server, beside reading the file with O_DIRECT.

    python -m lab.bench.offline --directory DIR --make --gib 3
    python -m lab.bench.offline --directory DIR --rounds 5

Rounds are interleaved, whole commands are timed, and the page cache has nothing of the file before each of
them. Worst case: a command that fails, which ends the run.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import ctxcache
from lab.bench.contexts import by_stream, content, model_of, slots_bytes
from lab.bench.row import Scale
from lab.bench.server import serving

GIB, MIB = 1 << 30, 1 << 20
DEPTH = 4
SCALE = Scale(
    context_count=1, layer_count=16, token_count=2048, row_bytes=2048, call_count=1, segment_count=1
)
"""A context of 64 MiB, in segments of 2 MiB."""


def make(data: Path, size_bytes: int) -> None:
    """A data directory with so many bytes of rows, ended in order."""
    count = -(-size_bytes // SCALE.context_bytes)
    with serving(data, arena_bytes=GIB, ssd_bytes=slots_bytes(SCALE, count + 1)) as server:
        with ctxcache.connect(server.target("unix"), access="local") as client:
            model = client.models.register(model_of(SCALE))
            for owner in range(count):
                rows = by_stream(SCALE, content(owner, SCALE.context_bytes))
                empty = client.sessions.create(model, id=f"context{owner}", layout=rows, is_pinned=True)
                empty.append(rows)
        server.process.terminate()
        if server.process.wait():
            raise RuntimeError(f"the server ended with {server.process.returncode}")


def read(data: Path) -> int:
    """Read the SSD file with O_DIRECT, a few MiB at a time; bytes read."""
    fd = os.open(data / "ssd" / "segments.dat", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    pages = [mmap.mmap(-1, MIB) for _ in range(DEPTH)]
    offsets = range(0, os.fstat(fd).st_size, MIB)

    def reader(number: int) -> int:
        return sum(os.preadv(fd, [pages[number]], offset) for offset in offsets[number::DEPTH])

    try:
        with ThreadPoolExecutor(DEPTH) as threads:
            return sum(threads.map(reader, range(DEPTH)))
    finally:
        os.close(fd)


def command(data: Path, *words: str) -> int:
    """Run a command over the directory; bytes it says it has read. Raises CalledProcessError."""
    run = [
        sys.executable,
        "-m",
        "ctxcache.cli.main",
        *words,
        "--output",
        "json",
        "--data-directory",
        str(data),
    ]
    facts = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)  # noqa: S603  ours
    return int(facts.get("checked_bytes") or facts["scanned_bytes"])


def measure(data: Path, round_count: int) -> None:
    """Print what each way takes."""
    ways: dict[str, Callable[[], int]] = {
        "O_DIRECT read": lambda: read(data),
        "ctxcache verify": lambda: command(data, "verify"),
        "ctxcache rebuild --dry-run": lambda: command(data, "rebuild", "--dry-run"),
    }
    taken: dict[str, list[float]] = {way: [] for way in ways}
    moved: dict[str, int] = {}
    for _ in range(round_count):
        for way, step in ways.items():
            _forget(data / "ssd" / "segments.dat")
            begin = time.perf_counter()
            moved[way] = step()
            taken[way].append(time.perf_counter() - begin)
    for way, times in taken.items():
        size, middle = moved[way] / GIB, median(times)
        span = f"{middle:.2f} s ({min(times):.2f} to {max(times):.2f})"
        sys.stdout.write(f"{way:28} {size:.2f} GiB in {span}, {size / middle:.2f} GiB/s\n")


def _forget(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--make", action="store_true", help="make it, and measure nothing")
    parser.add_argument("--gib", type=float, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    data = options.directory / "data"
    if options.make:
        make(data, int(options.gib * GIB))
    else:
        measure(data, options.rounds)


if __name__ == "__main__":
    main()
