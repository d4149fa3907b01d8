"""Traces: turns of sessions in order of arrival, from CSV or JSON lines, gzipped or not. Streams.

Fields, by name: session_id, arrival_ms, new_input_tokens, output_tokens; optional history_tokens (what the
session held before the turn, else what its turns add up to) and turn (from 1). Without sessions:
t_ms, ContextTokens, GeneratedTokens, each request a session of its own. Others are ignored.
Worst case: InvalidTrace, which names file, line and field.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ctxcache.errors import InvalidArgument

MOST_TOKENS = 1 << 40
MOST_MS = 1 << 53
_SESSIONS = ("session_id", "arrival_ms", "new_input_tokens", "output_tokens")
_REQUESTS = ("t_ms", "ContextTokens", "GeneratedTokens")


class Turn(NamedTuple):
    """One request. `history_tokens` and `number` are None where the trace does not say."""

    session: bytes
    arrival_s: float
    input_tokens: int
    output_tokens: int
    history_tokens: int | None
    number: int | None


class InvalidTrace(InvalidArgument):
    """A trace cannot be read; facts: field (file, line and field) and problem."""


class Trace:
    """A file of turns; each iteration reads it anew. `arrivals_times` packs arrivals that much closer."""

    def __init__(self, path: Path, *, arrivals_times: float = 1.0) -> None:
        self.path = path
        self._arrivals_times = arrivals_times

    def __iter__(self) -> Iterator[Turn]:
        """Every turn, in order of arrival. Raises InvalidTrace."""
        line = 0
        try:
            with self._open() as lines:
                for number, turn in self._turns(lines):
                    line = number
                    yield turn
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
            problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise self._invalid(line + 1, None, problem) from error
        if not line:
            raise self._invalid(1, None, "no turn in it")

    def _open(self) -> io.TextIOBase:
        if self.path.suffix == ".gz":
            return io.TextIOWrapper(gzip.open(self.path), encoding="utf-8", newline="")
        return self.path.open(encoding="utf-8", newline="")

    def _turns(self, lines: Iterable[str]) -> Iterator[tuple[int, Turn]]:
        is_json = self.path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
        latest_ms = 0.0
        for line, row in self._json_rows(lines) if is_json else self._csv_rows(lines):
            turn, arrival_ms = self._turn(line, row)
            if arrival_ms < latest_ms:
                field = "t_ms" if "t_ms" in row else "arrival_ms"
                raise self._invalid(line, field, f"{arrival_ms:g} comes after {latest_ms:g}: sort by arrival")
            latest_ms = arrival_ms
            yield line, turn

    def _csv_rows(self, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
        reader = csv.reader(lines)
        names = next(reader, [])
        self._check_names(names, 1)
        for row in reader:
            if len(row) != len(names):
                problem = f"{len(row)} fields where the header has {len(names)}"
                raise self._invalid(reader.line_num, None, problem)
            yield reader.line_num, dict(zip(names, row, strict=True))

    def _json_rows(self, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, object]]]:
        for line, text in enumerate(lines, 1):
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise self._invalid(line, None, f"not JSON: {error}") from error
            if not isinstance(row, dict):
                raise self._invalid(line, None, "not a JSON object")
            self._check_names(row, line)
            yield line, row

    def _check_names(self, names: Iterable[str], line: int) -> None:
        known = set(names)
        if not (known.issuperset(_SESSIONS) or known.issuperset(_REQUESTS)):
            missing = next(name for name in _SESSIONS if name not in known)
            raise self._invalid(line, missing, f"missing; needed: {', '.join(_SESSIONS)}")

    def _turn(self, line: int, row: Mapping[str, object]) -> tuple[Turn, float]:
        if "session_id" not in row:
            arrival_ms = self._number(line, row, "t_ms", MOST_MS)
            input_tokens = int(self._number(line, row, "ContextTokens", MOST_TOKENS))
            output_tokens = int(self._number(line, row, "GeneratedTokens", MOST_TOKENS))
            session, history_tokens, number = b"line %d" % line, None, None
        else:
            session = str(row["session_id"]).encode()
            if not session or row["session_id"] is None:
                raise self._invalid(line, "session_id", "empty")
            arrival_ms = self._number(line, row, "arrival_ms", MOST_MS)
            input_tokens = int(self._number(line, row, "new_input_tokens", MOST_TOKENS))
            output_tokens = int(self._number(line, row, "output_tokens", MOST_TOKENS))
            history_tokens = self._optional(line, row, "history_tokens", 0)
            number = self._optional(line, row, "turn", 1)
        arrival_s = arrival_ms / 1000 / self._arrivals_times
        return Turn(session, arrival_s, input_tokens, output_tokens, history_tokens, number), arrival_ms

    def _optional(self, line: int, row: Mapping[str, object], field: str, least: int) -> int | None:
        if row.get(field) in (None, ""):
            return None
        value = int(self._number(line, row, field, MOST_TOKENS))
        if value < least:
            raise self._invalid(line, field, f"{value} is less than {least}")
        return value

    def _number(self, line: int, row: Mapping[str, object], field: str, limit: int) -> float:
        """Return a number of 0 to `limit`; times may have fractions, counts may not."""
        value = row[field]
        try:
            if not isinstance(value, (str, int, float)) or isinstance(value, bool):
                raise TypeError  # noqa: TRY301  one answer for all that is no number
            number = float(value) if limit == MOST_MS else int(value)
            if number != (value if isinstance(value, float) else number):
                raise ValueError  # noqa: TRY301  as above
        except (TypeError, ValueError, OverflowError):
            kind = "number" if limit == MOST_MS else "whole number"
            raise self._invalid(line, field, f"{value!r} is not a {kind}") from None
        if not 0 <= number <= limit:
            raise self._invalid(line, field, f"{value!r} is not within 0 to {limit}")
        return number

    def _invalid(self, line: int, field: str | None, problem: str) -> InvalidTrace:
        where = f"{self.path}, line {line}" + (f", {field}" if field else "")
        return InvalidTrace(field=where, problem=problem)
