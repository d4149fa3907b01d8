"""A run: rows measured one after the other, both sides of each interleaved in one process, and their results.

Garbage collection is off inside a round and runs between rounds. A row that fails has an error in its place.
Results are kept as JSON, whose fields are only ever added. Worst case: another schema is read, a ValueError.
"""

import gc
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from ctxcache.errors import CacheError
from ctxcache.runtime.memory import keep_freed_memory
from lab.bench.machine import load, machine, usage, versions
from lab.bench.row import FULL, QUICK, NoPeer, Place, Row, Sides, Spread, WrongBytes, in_round
from lab.bench.server import ServerDidNotStart

SCHEMA = 1
MEASURED, NO_PEER, FAILED = "measured", "no peer", "error"


@dataclass(frozen=True, slots=True)
class Result:
    """One row's. `ours` and `beside` have a value per round, in `unit`; `ratio` is null unless measured."""

    name: str
    path: str
    beside_what: str
    goal: str
    unit: str
    status: str
    problem: str = ""
    ratio: Spread | None = None
    is_met: bool | None = None
    bytes_a_round: int = 0
    ours: tuple[float, ...] = ()
    beside: tuple[float, ...] = ()
    foreign_cores: float = 0.0
    notes: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """A whole run."""

    command: str
    date: str
    round_count: int
    is_quick: bool
    garbage_collection: str
    load_at_start: list[float]
    machine: dict[str, object]
    versions: dict[str, str]
    rows: tuple[Result, ...]
    schema: int = SCHEMA

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read it back. Raises ValueError for another schema."""
        facts: dict[str, Any] = json.loads(text)
        if facts.get("schema") != SCHEMA:
            raise ValueError(f"schema {facts.get('schema')}, this version reads {SCHEMA}")
        rows = tuple(
            Result(
                **{
                    **row,
                    "ratio": Spread(**row["ratio"]) if row["ratio"] else None,
                    "ours": tuple(row["ours"]),
                    "beside": tuple(row["beside"]),
                }
            )
            for row in facts.pop("rows")
        )
        return cls(**facts, rows=rows)

    @property
    def is_good(self) -> bool:
        """Whether every row that has a peer was measured, and met its goal."""
        return all(row.status == NO_PEER or row.is_met is True for row in self.rows)


def measured(
    row: Row,
    ours: Sequence[float],
    beside: Sequence[float],
    *,
    bytes_a_round: int,
    foreign_cores: float,
    notes: dict[str, object],
) -> Result:
    """The figures of a row's rounds. Without anything beside, ours is the figure itself."""
    ratio = in_round(row.goal, ours, beside) if beside else Spread.of(ours)
    return Result(
        row.name,
        row.path,
        row.beside,
        str(row.goal),
        row.unit,
        MEASURED,
        ratio=ratio,
        is_met=row.goal.is_met(ratio.median),
        bytes_a_round=bytes_a_round,
        ours=tuple(ours),
        beside=tuple(beside),
        foreign_cores=round(foreign_cores, 2),
        notes=notes,
    )


def unmeasured(row: Row, status: str, problem: str) -> Result:
    """A row without a figure, and why."""
    return Result(row.name, row.path, row.beside, str(row.goal), row.unit, status, problem)


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
        options.directory,
        QUICK if options.is_quick else FULL,
        transport=options.transport,
    )
    return Run(
        command=command,
        date=date,
        round_count=options.round_count,
        is_quick=options.is_quick,
        garbage_collection=GARBAGE_COLLECTION,
        load_at_start=load_at_start,
        machine=machine(options.directory),
        versions=versions(),
        rows=tuple(run_row(row, place, options.round_count, step) for row in rows),
    )
