"""One line of a trace: its fields by name, checked as they are asked for. Knows no format.

Worst case: InvalidTrace, which names file, line and field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ctxcache.errors import InvalidArgument

MOST_TOKENS = 1 << 40
MOST_MS = 1 << 53


class InvalidTrace(InvalidArgument):
    """A trace cannot be read; facts: field (file, line and field) and problem."""

    @classmethod
    def at(cls, path: Path, line: int, field: str | None, problem: str) -> "InvalidTrace":
        """Raise this: what is wrong with a field of a line, or with the line."""
        return cls(field=f"{path}, line {line}" + (f", {field}" if field else ""), problem=problem)


@dataclass(frozen=True, slots=True)
class Row:
    """`values` are text from CSV, anything from JSON."""

    path: Path
    line: int
    values: Mapping[str, object]

    def time_ms(self, field: str) -> float:
        """A time, fractions allowed."""
        return self._number(field, MOST_MS)

    def count(self, field: str) -> int:
        """A whole number of tokens."""
        return int(self._number(field, MOST_TOKENS))

    def optional(self, field: str, least: int) -> int | None:
        """A whole number, None where there is none."""
        if self.values.get(field) in (None, ""):
            return None
        value = self.count(field)
        if value < least:
            self.refuse(field, f"{value} is less than {least}")
        return value

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
