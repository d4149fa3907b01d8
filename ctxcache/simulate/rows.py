"""Rows of a trace before they are turns: lines of CSV or JSON, their fields, and a turn.

Worst case: a line is wrong; the error names file, line and field.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn

from ctxcache.errors import FileUnusable, InvalidArgument


class TraceTurn(NamedTuple):
    """One request. `history_tokens` and `number` are None where the trace does not say.

    `blocks` are the prefix blocks of the prompt by name, the last one perhaps not full; None where the trace
    names none. `think_s` passed between the answer before and this request, None where that is not said.
    """

    session: bytes
    arrival_s: float
    input_tokens: int
    output_tokens: int
    history_tokens: int | None
    number: int | None
    blocks: tuple[bytes, ...] | None = None
    think_s: float | None = None


MOST_TOKENS = 1 << 40
MOST_MS = 1 << 53
PLAIN_DIGITS = 12
"""A number of so many digits is within both."""


class InvalidTrace(InvalidArgument):
    """A trace cannot be read; facts: field (file, line and field) and problem."""

    @classmethod
    def at(cls, path: Path, line: int, field: str | None, problem: str) -> "InvalidTrace":
        """Raise this: what is wrong with a field of a line, or with the line."""
        return cls(field=f"{path}, line {line}" + (f", {field}" if field else ""), problem=problem)


# Not frozen, which would take three times as long to make: there is one of each line.
@dataclass(slots=True)
class Row:
    """`values` are text from CSV, anything from JSON. Not changed."""

    path: Path
    line: int
    values: Mapping[str, object]

    def time_ms(self, field: str) -> float:
        """A time, fractions allowed."""
        value = self.values[field]
        # The common form, without the questions about every other.
        if type(value) is str and len(value) <= PLAIN_DIGITS and value.isdecimal():
            return float(value)
        return self._number(field, MOST_MS)

    def count(self, field: str) -> int:
        """A whole number of tokens."""
        value = self.values[field]
        if type(value) is str and len(value) <= PLAIN_DIGITS and value.isdecimal():
            return int(value)
        return int(self._number(field, MOST_TOKENS))

    def optional(self, field: str, least: int) -> int | None:
        """A whole number, None where there is none."""
        if self.values.get(field) in (None, ""):
            return None
        value = self.count(field)
        if value < least:
            self.refuse(field, f"{value} is less than {least}")
        return value

    def optional_ms(self, field: str) -> float | None:
        """A time, None where there is none."""
        return None if self.values.get(field) in (None, "") else self.time_ms(field)

    def name(self, field: str) -> bytes:
        """Text that is not empty."""
        value = self.values[field]
        text = str(value).encode()
        if not text or value is None:
            self.refuse(field, "empty")
        return text

    def whole_numbers(self, field: str) -> list[int]:
        """A list of whole numbers, from JSON only."""
        value = self.values[field]
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            self.refuse(field, "not a list of whole numbers")
        return value

    def refuse(self, field: str | None, problem: str) -> NoReturn:
        """Raise InvalidTrace."""
        raise InvalidTrace.at(self.path, self.line, field, problem)

    def _number(self, field: str, limit: int) -> float:
        """Return a number of 0 to `limit`; times may have fractions, counts may not."""
        value = self.values[field]
        try:
            if not isinstance(value, (str, int, float)) or isinstance(value, bool):
                raise TypeError  # noqa: TRY301  one answer for all that is no number
            number = float(value) if limit == MOST_MS else int(value)
            if number != (value if isinstance(value, float) else number):
                raise ValueError  # noqa: TRY301  as above
        except (TypeError, ValueError, OverflowError):
            kind = "number" if limit == MOST_MS else "whole number"
            self.refuse(field, f"{value!r} is not a {kind}")
        if not 0 <= number <= limit:
            self.refuse(field, f"{value!r} is not within 0 to {limit}")
        return number


def rows_of(path: Path, check_header: Callable[[Row], object] = lambda _: None) -> Iterator[Row]:
    """Every line; the header of CSV is checked by itself, too. Raises FileUnusable, InvalidTrace."""
    is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    line = 0
    try:
        with _opened(path) as raw, _text_of(path, raw) as lines:
            for row in _json_rows(path, lines) if is_json else _csv_rows(path, lines, check_header):
                line = row.line
                yield row
    # With the line behind the last whole one: what is wrong lies there.
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        problem = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidTrace.at(path, line + 1, None, problem) from error


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise FileUnusable(path=str(path), problem=error.strerror or str(error)) from error


def _text_of(path: Path, raw: BinaryIO) -> io.TextIOBase:
    data = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
    return io.TextIOWrapper(data, encoding="utf-8", newline="")


def _csv_rows(path: Path, lines: Iterable[str], check_header: Callable[[Row], object]) -> Iterator[Row]:
    reader = csv.reader(lines)
    names = next(reader, [])
    check_header(Row(path, 1, dict.fromkeys(names)))
    for row in reader:
        if len(row) != len(names):
            problem = f"{len(row)} fields where the header has {len(names)}"
            raise InvalidTrace.at(path, reader.line_num, None, problem)
        yield Row(path, reader.line_num, dict(zip(names, row, strict=True)))


def _json_rows(path: Path, lines: Iterable[str]) -> Iterator[Row]:
    for line, text in enumerate(lines, 1):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidTrace.at(path, line, None, f"not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidTrace.at(path, line, None, "not a JSON object")
        yield Row(path, line, values)
