"""Results: what every row found, as it is kept in JSON. Fields are only ever added. Worst case: ValueError."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from ctxcache.bench.row import Row
from ctxcache.bench.statistics import Spread, in_round

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
            Result(**{
                **row, "ratio": Spread(**row["ratio"]) if row["ratio"] else None,
                "ours": tuple(row["ours"]), "beside": tuple(row["beside"]),
            })
            for row in facts.pop("rows")
        )  # fmt: skip
        return cls(**facts, rows=rows)

    @property
    def is_good(self) -> bool:
        """Whether every row that has a peer was measured, and met its goal."""
        return all(row.status == NO_PEER or row.is_met is True for row in self.rows)


def measured(
    row: Row, ours: Sequence[float], beside: Sequence[float], *, bytes_a_round: int, foreign_cores: float,
    notes: dict[str, object],
) -> Result:  # fmt: skip
    """What the rounds of a row come to. Without anything beside, ours is the figure itself."""
    ratio = in_round(row.goal, ours, beside) if beside else Spread.of(ours)
    return Result(
        row.name, row.path, row.beside, str(row.goal), row.unit, MEASURED, ratio=ratio,
        is_met=row.goal.is_met(ratio.median), bytes_a_round=bytes_a_round, ours=tuple(ours), beside=tuple(beside),
        foreign_cores=round(foreign_cores, 2), notes=notes,
    )  # fmt: skip


def unmeasured(row: Row, status: str, problem: str) -> Result:
    """A row without a figure, and why."""
    return Result(row.name, row.path, row.beside, str(row.goal), row.unit, status, problem)
