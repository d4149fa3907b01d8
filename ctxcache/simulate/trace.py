"""Traces: turns of sessions in order of arrival, from CSV or JSON lines, gzipped or not. Streams.

Fields, by name: session_id, arrival_ms, new_input_tokens, output_tokens; optional history_tokens (what the
session held before the turn, else what its turns add up to) and turn (from 1). Or those of requests without
sessions (Azure: t_ms, ContextTokens, GeneratedTokens), of `prefixes` (Mooncake), of `lengths` (L-Eval), or those of a
recording of a live store (`recorded`). Others are ignored. Worst case: InvalidTrace, which names file, line and field.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ctxcache.simulate import lengths, prefixes, recorded
from ctxcache.simulate.lengths import Pace
from ctxcache.simulate.lines import rows_of
from ctxcache.simulate.prefixes import Conversations
from ctxcache.simulate.row import InvalidTrace, Row
from ctxcache.simulate.turn import Turn

__all__ = ["InvalidTrace", "Pace", "Trace", "Turn"]

_SESSIONS = ("session_id", "arrival_ms", "new_input_tokens", "output_tokens")
_REQUESTS = ("t_ms", "ContextTokens", "GeneratedTokens")
_TIMES = ("arrival_ms", "t_ms", "timestamp")


class Trace:
    """A file of turns; each iteration reads it anew. `arrivals_times` packs arrivals that much closer.

    `pace` is for traces that say no arrivals, and only for them.
    """

    def __init__(self, path: Path, *, arrivals_times: float = 1.0, pace: Pace | None = None) -> None:
        self.path = path
        self._arrivals_times = arrivals_times
        self._pace = pace

    def __iter__(self) -> Iterator[Turn]:
        """Every turn, in order of arrival. Raises InvalidTrace."""
        count = 0
        for turn in self._turns(self._rows()):
            count += 1
            yield turn._replace(arrival_s=turn.arrival_s / self._arrivals_times)
        if not count:
            raise InvalidTrace.at(self.path, 1, None, "no turn in it")

    def _turns(self, rows: Iterator[Row]) -> Iterator[Turn]:
        first = next(rows, None)
        if first is None:
            return
        if not _has(first, lengths.FIELDS):
            if self._pace is not None:
                first.refuse(None, "arrivals are in it; a rate of sessions is for traces without")
            yield from (
                self._recorded(first, rows) if _has(first, recorded.FIELDS) else self._arriving(first, rows)
            )
            return
        if self._pace is None:
            first.refuse(None, "lengths without arrivals: say how many sessions begin a second")
        yield from lengths.asked(_chained(first, rows, lengths.FIELDS), self._pace)

    def _recorded(self, first: Row, rows: Iterator[Row]) -> Iterator[Turn]:
        recorded.check_header(first)
        yield from recorded.turns(rows)

    def _arriving(self, first: Row, rows: Iterator[Row]) -> Iterator[Turn]:
        """Turns of a format that says when they come, which must be in order."""
        fields, read = _format(first)
        time = next(field for field in _TIMES if field in fields)
        latest_s = 0.0
        for row in _chained(first, rows, fields):
            turn = read(row)
            if turn.arrival_s < latest_s:
                problem = f"{turn.arrival_s * 1000:g} comes after {latest_s * 1000:g}: sort by arrival"
                row.refuse(time, problem)
            latest_s = turn.arrival_s
            yield turn

    def _rows(self) -> Iterator[Row]:
        return rows_of(self.path, _format)


def _format(row: Row) -> tuple[tuple[str, ...], Callable[[Row], Turn]]:
    """The fields that every row of the trace must have, and what reads one."""
    if _has(row, prefixes.FIELDS):
        return prefixes.FIELDS, Conversations().turn
    if _has(row, _REQUESTS):
        return _REQUESTS, _request
    if not _has(row, lengths.FIELDS):
        _check(row, _SESSIONS)
    return _SESSIONS, _session_turn


def _has(row: Row, fields: Iterable[str]) -> bool:
    return all(field in row.values for field in fields)


def _check(row: Row, fields: tuple[str, ...]) -> None:
    for field in fields:
        if field not in row.values:
            row.refuse(field, f"missing; needed: {', '.join(fields)}")


def _chained(first: Row, rows: Iterable[Row], fields: tuple[str, ...]) -> Iterator[Row]:
    yield first
    for row in rows:
        _check(row, fields)
        yield row


def _request(row: Row) -> Turn:
    arrival_s = row.time_ms("t_ms") / 1000
    input_tokens, output_tokens = row.count("ContextTokens"), row.count("GeneratedTokens")
    return Turn(b"line %d" % row.line, arrival_s, input_tokens, output_tokens, None, None)


def _session_turn(row: Row) -> Turn:
    return Turn(
        row.name("session_id"), row.time_ms("arrival_ms") / 1000, row.count("new_input_tokens"),
        row.count("output_tokens"), row.optional("history_tokens", 0), row.optional("turn", 1),
    )  # fmt: skip
