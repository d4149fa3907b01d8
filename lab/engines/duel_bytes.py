#!/usr/bin/env python3
"""The faults of the duel against LMCache's file adapter and the store: how many blocks have wrong bytes.

    .venv/bin/python -m lab.engines.duel_bytes --lmcache PYTHON
    .venv/bin/python -m lab.engines.duel_bytes --lmcache PYTHON --write lab/notes/duel.md

PYTHON is that of an environment with LMCache. No engine runs: blocks of random bytes are saved, damaged where
they lie on disk, and loaded by a new process.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ctxcache
from ctxcache.client import BlockSpace
from ctxcache.client.types import Durability
from lab.bench.server import ServerDidNotStart, serving
from lab.engines.duel import FAULTS, STOP_S, Extent, StoreTier
from lab.engines.lmcache_files import objects_of

SPACE = BlockSpace(bytes(32), layout_tag="duel")
SCRIPT = Path(__file__).with_name("lmcache_files.py")
TIMEOUT_S = 300
TRIED = ("restart", "flipped", "exponents", "swapped", "cleared", "truncated")
BEGIN, END = "<!-- duel of bytes -->\n", "<!-- end of duel of bytes -->"


class Given(NamedTuple):
    """Blocks that were loaded after a fault, and how many of them had other bytes than were saved."""

    given: int
    wrong: int

    def __str__(self) -> str:
        wrong = f"**{self.wrong} wrong**" if self.wrong else "0 wrong"
        return f"{wrong}, {self.given} given"


class LmcacheFiles:
    """LMCache's adapter for file systems, in processes of its own."""

    name = "LMCache's file adapter"

    def __init__(self, python: str) -> None:
        self._python = python

    def save(self, place: Path, count: int, size_bytes: int) -> None:
        """Save the objects."""
        self._run("save", place, count, size_bytes)

    def load(self, place: Path, count: int, size_bytes: int) -> Given:
        """Load them in a new process."""
        return Given(**json.loads(self._run("load", place, count, size_bytes).splitlines()[-1]))

    def extents(self, place: Path) -> list[Extent]:
        """Each object's file."""
        return [Extent(path, 0, path.stat().st_size) for path in sorted((place / "state").glob("*.data"))]

    def _run(self, what: str, place: Path, count: int, size_bytes: int) -> str:
        # Beside its own package: a module of it would hide one of Python's.
        command = [self._python, str(SCRIPT), what, str(place / "state"), str(count), str(size_bytes)]
        done = subprocess.run(  # noqa: S603  the user's own Python
            command, cwd=place, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return done.stdout


class Store:
    """The store's blocks, by a new server each time."""

    name = "ctxcache"

    def save(self, place: Path, count: int, size_bytes: int) -> None:
        """Save the objects."""
        with serving(place / "state", arena_bytes=1 << 28, ssd_bytes=1 << 29) as server:
            with ctxcache.connect(server.target("tcp")) as cache:
                cache.blocks.put(SPACE, dict(objects_of(count, size_bytes)), durability=Durability.DISK)
            server.process.terminate()
            server.process.wait(STOP_S)

    def load(self, place: Path, count: int, size_bytes: int) -> Given:
        """Load them from a new server; one that refuses to start gives nothing."""
        objects = objects_of(count, size_bytes)
        try:
            with (
                serving(place / "state", arena_bytes=1 << 28, ssd_bytes=1 << 29) as server,
                ctxcache.connect(server.target("tcp")) as cache,
            ):
                loaded = cache.blocks.load(SPACE, [key for key, _ in objects])
        except ServerDidNotStart:
            return Given(0, 0)
        found = [
            (one[0].tobytes(), content)
            for one, (_, content) in zip(loaded, objects, strict=True)
            if one is not None
        ]
        return Given(len(found), sum(one != content for one, content in found))

    def extents(self, place: Path) -> list[Extent]:
        """Each block's slot."""
        return StoreTier().extents(place)


def fight(
    contender: LmcacheFiles | Store, place: Path, faults: Sequence[str], count: int, size_bytes: int
) -> dict[str, Given]:
    """A contender's bytes after each fault."""
    saved = place / "saved"
    saved.mkdir(parents=True)
    contender.save(saved, count, size_bytes)
    given = {}
    for fault in faults:
        damaged = place / "damaged"
        shutil.copytree(saved, damaged)
        FAULTS[fault][1](contender.extents(damaged), random.Random(5))  # noqa: S311  the same for each
        given[fault] = contender.load(damaged, count, size_bytes)
        sys.stderr.write(f"{contender.name}: {fault}: {given[fault]}\n")
        shutil.rmtree(damaged)
    return given


def main() -> int:
    """Run the faults; exits with 1 where the store gives a wrong byte."""
    parser = argparse.ArgumentParser(prog="lab.engines.duel_bytes", description=__doc__.partition("\n")[0])
    parser.add_argument("--lmcache", required=True, help="a Python that has LMCache", metavar="PYTHON")
    parser.add_argument("--blocks", type=int, default=500, help="blocks per fault and contender")
    parser.add_argument("--size-bytes", type=int, default=256 << 10, help="of a block")
    parser.add_argument("--write", type=Path, help="a page of Markdown whose table is to be replaced")
    options = parser.parse_args()
    given = {}
    with tempfile.TemporaryDirectory(prefix="ctxcache-duel-") as directory:
        contenders: tuple[LmcacheFiles | Store, ...] = (LmcacheFiles(options.lmcache), Store())
        for number, contender in enumerate(contenders):
            place = Path(directory) / str(number)
            given[contender.name] = fight(contender, place, TRIED, options.blocks, options.size_bytes)
    cells = {fault: " | ".join(str(found[fault]) for found in given.values()) for fault in TRIED}
    lines = [f"| fault | {' | '.join(given)} |", "|---|" + "---|" * len(given)]
    lines += [f"| {FAULTS[fault][0]} | {cells[fault]} |" for fault in TRIED]
    totals = [f"{sum(one.wrong for one in found.values()):,} wrong" for found in given.values()]
    table = "\n".join([*lines, f"| **all** | {' | '.join(totals)} |"])
    sys.stdout.write(table + "\n")
    if options.write:
        head, _, rest = options.write.read_text().partition(BEGIN)
        options.write.write_text(f"{head}{BEGIN}{table}\n{END}{rest.partition(END)[2]}")
    return 1 if any(one.wrong for one in given[Store.name].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
