"""Names, sizes and times as people read and write them. Pure: the present is an argument.

`parsed` turns the ValueError of a text that cannot be read into typer's usage error, which exits with 2.
"""

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import typer

from ctxcache.format.ids import checked_labels
from ctxcache.runtime.spans import trace_id_of
from ctxcache.settings.knobs.knob import parse_duration_s

Given = TypeVar("Given")
Value = TypeVar("Value")

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STEPS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def human_size(size_bytes: float) -> str:
    """`1.2 GiB`; whole bytes below 1 KiB."""
    for unit in _BINARY[:-1]:
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} {_BINARY[-1]}"


def counted(count: int, noun: str) -> str:
    """`1 session`, `2,000 sessions`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def human_duration(seconds: float) -> str:
    """`59 min`: the largest unit of which there is at least one, cut down to whole ones."""
    whole = int(abs(seconds))
    size, unit = next(((size, unit) for size, unit in _STEPS if whole >= size), _STEPS[-1])
    return f"{whole // size} {unit}"


def human_time(instant: datetime, now: datetime) -> str:
    """`in 59 min` or `3 min ago`."""
    seconds = (instant - now).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"in {human_duration(seconds)}" if seconds > 0 else f"{human_duration(seconds)} ago"


def parse_span(text: str) -> timedelta:
    """The span of time in `90`, `90s`, `15min`, `1h30m` or `7d`. Raises ValueError."""
    try:
        return timedelta(seconds=parse_duration_s(text))
    except OverflowError:
        raise ValueError(f"{text!r} is longer than any time") from None


def parse_instant(text: str) -> datetime:
    """An RFC 3339 time with its offset. Raises ValueError."""
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time such as 2030-01-31T12:00:00Z") from None
    if instant.tzinfo is None:
        raise ValueError(f"{text!r} does not say its offset: append Z for UTC")
    return instant.astimezone(UTC)


def parse_range(text: str) -> tuple[int, int]:
    """`[begin, end)` in `BEGIN:END`. Raises ValueError."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) > int(match[2]):
        raise ValueError(f"{text!r} is not a token range such as 10:20, its end excluded")
    return int(match[1]), int(match[2])


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """The labels in `KEY=VALUE`, each key once. Raises ValueError."""
    labels: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ValueError(f"{text!r} is not KEY=VALUE")
        if labels.setdefault(key, value) != value:
            raise ValueError(f"{key!r} is given twice, with different values")
    # As the server will see them: refused here, before anything is looked at or printed.
    checked_labels(labels.items())
    return labels


def session_name(text: str) -> str:
    """`sessions/ID` for `ID` or `sessions/ID`."""
    return text if text.startswith("sessions/") else f"sessions/{text}"


def model_name(text: str) -> str:
    """`models/ID` for `ID` or `models/ID`."""
    return text if text.startswith("models/") else f"models/{text}"


def parsed(parse: Callable[[Given], Value], text: Given, option: str) -> Value:
    """Parse an option's text, or its texts. A ValueError's sentence becomes the usage error's."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def parse_trace(text: str) -> str:
    """The trace's id in a `traceparent`, or in itself. Raises ValueError."""
    trace_id = trace_id_of(text.lower())
    if not trace_id:
        raise ValueError(f"{text!r} is neither a trace's id, 32 hex digits, nor a traceparent")
    return trace_id


def check_one_of(**given: bool) -> None:
    """Refuse none and several of the options that exclude each other."""
    if sum(given.values()) != 1:
        flags = [f"--{name.replace('_', '-')}" for name in given]
        raise typer.BadParameter(f"give one of {', '.join(flags)}")
