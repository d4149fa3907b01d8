"""Rows on real servers, in tiny sizes: both sides move the right bytes, and wrong bytes are no figure."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest
from command_line import ctxcache

from lab.bench import server
from lab.bench.contexts import Contexts, contexts
from lab.bench.row import QUICK, Place, Row, Sides, at_least
from lab.bench.rows import ROWS
from lab.bench.rows.local import copying, reading
from lab.bench.run import FAILED, MEASURED, NO_PEER, Run, run_row
from lab.routes import Route
from tests.nursery import Entry, Forked, shared

SMALL = replace(QUICK, segment_count=128, call_count=5)
# Sizes and percentiles are arguments: one of each stands for the others, which the command runs.
OTHER_SIZES = ("redis-4", "redis-16", "p99", "-64", "sessions-10k", "sessions-100k")
OTHER_CALLS = ("request-append-1", "request-create-8", "request-get-8", "request-look-up-1", "long-part")
SAME = tuple(name for name in ROWS if name.endswith(OTHER_SIZES) or name in OTHER_CALLS)
MAY_LACK_PEER = ("redis", "ssd-", "lmcache", "huge")
STARTED_ANEW = "lookup-128k"


def _fork(arguments: Sequence[str], stderr: IO[str]) -> Forked:
    """A server that costs no imports."""
    return shared().start(Entry(), ["serve", *arguments], server.environment(), stderr=stderr.fileno())


def run_tiny(row: Row, directory: Path) -> tuple[str, str]:
    """Status and problem of one round."""
    result = run_row(row, Place(directory, SMALL), 1, lambda *_: None)
    return result.status, result.problem


@pytest.mark.parametrize("name", [name for name in ROWS if name not in SAME])
def test_a_row_measures_and_checks_its_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row gives a figure; those whose peer is missing say how to get it. Nothing is left behind."""
    if name != STARTED_ANEW:
        monkeypatch.setattr(server, "start", _fork)
    status, problem = run_tiny(ROWS[name], tmp_path)

    if status == NO_PEER and any(part in name for part in MAY_LACK_PEER):
        assert problem
    else:
        assert (status, problem) == (MEASURED, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["local-grpc", "grpc"])
def test_a_byte_that_is_not_the_saved_one_is_no_figure(way: Route, tmp_path: Path) -> None:
    """Control: what a reader gets is compared with what was saved, all of it."""

    @contextmanager
    def corrupted(place: Place) -> Iterator[Sides]:
        with contexts(place, way) as c:
            expect_another_byte(c)
            yield Sides(reading(c), copying(c))

    status, problem = run_tiny(Row("bad", "a read", "a copy", at_least(0.1), corrupted), tmp_path)

    assert status == FAILED
    assert problem.startswith("WrongBytes: what was read: byte ")


def expect_another_byte(c: Contexts) -> None:
    """Change one byte of what the last context is compared with; what was saved stays as it is."""
    c.data[-1][-1] ^= 1


def test_the_command_prints_what_can_be_read_back(tmp_path: Path) -> None:
    """One line of JSON with every round, and an exit code that does not speak of goals."""
    ran = ctxcache(
        "bench", "--rows", "lookup", "--quick", "--rounds", "3", "--json", "--directory", str(tmp_path)
    )
    run = Run.from_json(ran.stdout)

    assert ran.exit_code == 0
    assert [(row.name, len(row.ours), len(row.beside)) for row in run.rows] == [("lookup-128k", 3, 3)]


def test_the_command_lists_rows() -> None:
    """By name, with what they are measured beside."""
    ran = ctxcache("bench", "--list", "--rows", "bulk-read")

    assert [line.split()[0] for line in ran.stdout.splitlines()] == [
        "bulk-read-socket",
        "bulk-read-redis-1",
        "bulk-read-redis-4",
        "bulk-read-redis-16",
    ]


def test_an_unknown_row_is_a_usage_error() -> None:
    """Before anything is measured."""
    ran = ctxcache("bench", "--rows", "teleport")

    assert ran.exit_code == 2
    assert "teleport" in ran.stderr
