"""Running rows: both sides of each, interleaved, in one process. Worst case of a row is its own: an error in its place.

Garbage collection is off inside a round and runs between rounds.
"""

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ctxcache.bench.machine import load, machine, versions
from ctxcache.bench.noise import usage
from ctxcache.bench.results import FAILED, NO_PEER, Result, Run, measured, unmeasured
from ctxcache.bench.row import FULL, QUICK, NoPeer, Place, Row, Sides, WrongBytes
from ctxcache.bench.server import ServerDidNotStart
from ctxcache.errors import CacheError
from ctxcache.malloc import keep_freed_memory

GARBAGE_COLLECTION = "off inside rounds, run between them"
Step = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Options:
    """How to run. `directory` is on the disk to measure."""

    round_count: int
    is_quick: bool
    directory: Path
    transport: str = "tcp"


def run_row(row: Row, place: Place, round_count: int, step: Step) -> Result:
    """Measure one row. Its failures become results; everything it made is gone after.

    `step` is told the row's name, and which of how many rounds is done.
    """
    try:
        with _own(place) as own, row.open(own) as sides:
            return _measure(row, sides, own, round_count, step)
    except NoPeer as reason:
        return unmeasured(row, NO_PEER, str(reason))
    except (WrongBytes, ServerDidNotStart, CacheError, OSError, EOFError, RuntimeError, ValueError) as error:
        return unmeasured(row, FAILED, f"{type(error).__name__}: {error}")


def _measure(row: Row, sides: Sides, place: Place, round_count: int, step: Step) -> Result:
    ours: list[float] = []
    beside: list[float] = []
    # A round that is not counted: it warms what is cold.
    _round(sides, -1, [], [])
    before = usage()
    for number in range(round_count):
        _round(sides, number, ours, beside)
        step(row.name, number + 1, round_count)
    foreign = usage().foreign_cores(before)
    size_bytes = _bytes_a_round(row, sides, place)
    return measured(row, ours, beside, bytes_a_round=size_bytes, foreign_cores=foreign, notes=sides.notes)


def _round(sides: Sides, number: int, ours: list[float], beside: list[float]) -> None:
    gc.collect()
    gc.disable()
    try:
        ours.append(sides.ours(number))
        if sides.beside is not None:
            beside.append(sides.beside(number))
    finally:
        gc.enable()


def _bytes_a_round(row: Row, sides: Sides, place: Place) -> int:
    noted = sides.notes.get("bytes a round")
    if isinstance(noted, int):
        return noted
    return place.scale.walk_bytes if row.is_moving and row.unit == "s" else 0


@contextmanager
def _own(place: Place) -> Iterator[Place]:
    directory = Path(tempfile.mkdtemp(prefix="ctxcache-bench-", dir=place.directory))
    try:
        yield replace(place, directory=directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run_all(rows: Sequence[Row], options: Options, *, command: str, date: str, step: Step) -> Run:
    """Measure one row after the other."""
    keep_freed_memory()
    load_at_start = load()
    options.directory.mkdir(parents=True, exist_ok=True)
    place = Place(
        options.directory, QUICK if options.is_quick else FULL,
        transport=options.transport,
    )  # fmt: skip
    return Run(
        command=command, date=date, round_count=options.round_count, is_quick=options.is_quick,
        garbage_collection=GARBAGE_COLLECTION, load_at_start=load_at_start, machine=machine(options.directory),
        versions=versions(), rows=tuple(run_row(row, place, options.round_count, step) for row in rows),
    )  # fmt: skip
