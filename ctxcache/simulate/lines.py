"""Lines of a file as rows, from CSV with a header or JSON, gzipped or not. Knows no format. Streams.

Worst case: FileUnusable, or InvalidTrace, which names file, line and field.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ctxcache.errors import FileUnusable
from ctxcache.simulate.row import InvalidTrace, Row


def rows_of(path: Path, check_header: Callable[[Row], object] = lambda _: None) -> Iterator[Row]:
    """Every line; the header of CSV is checked by itself, too. Raises FileUnusable, InvalidTrace."""
    is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    line = 0
    try:
        with _opened(path) as raw, _text_of(path, raw) as lines:
            for row in _json_rows(path, lines) if is_json else _csv_rows(path, lines, check_header):
                line = row.line
                yield row
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
