"""What people type, as what the server takes. Raises typer's usage error, which exits with 2."""

from collections.abc import Callable
from typing import TypeVar

import typer

from ctxcache.runtime.spans import trace_id_of

Value = TypeVar("Value")


def session_name(text: str) -> str:
    """`sessions/ID` for `ID` or `sessions/ID`."""
    return text if text.startswith("sessions/") else f"sessions/{text}"


def model_name(text: str) -> str:
    """`models/ID` for `ID` or `models/ID`."""
    return text if text.startswith("models/") else f"models/{text}"


def parsed(parse: Callable[[str], Value], text: str, option: str) -> Value:
    """Parse an option's text. A ValueError's sentence becomes the usage error's."""
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from error


def parse_trace(text: str) -> str:
    """The trace's id in a `traceparent`, or in itself. Raises ValueError."""
    found = trace_id_of(text.lower())
    if not found:
        raise ValueError(f"{text!r} is neither a trace's id, 32 hex digits, nor a traceparent")
    return found


def parse_size_bytes(text: str) -> int:
    """Bytes in `100MiB`. Raises ValueError."""
    from ctxcache.settings.config import parse_size  # noqa: PLC0415  pydantic is slow to import

    return int(str(parse_size(text)))


def check_one_of(**given: bool) -> None:
    """Refuse none and several of the options that exclude each other."""
    if sum(given.values()) != 1:
        flags = [f"--{name.replace('_', '-')}" for name in given]
        raise typer.BadParameter(f"give one of {', '.join(flags)}")
