"""The trace that an rpc belongs to, by W3C's `traceparent` as its caller sent it. Leaf; knows no OpenTelemetry.

Said once for each rpc, and read only where something is to be remembered. Worst case: a trace that cannot be read,
which is none.
"""

import re
from collections.abc import Callable
from contextvars import ContextVar

HEADER = "traceparent"
_TRACE_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")


def _none() -> str:
    return ""


_NAMED: ContextVar[Callable[[], str]] = ContextVar("trace_parent", default=_none)


def named_by(find: Callable[[], str]) -> None:
    """Let `find` say the `traceparent` of whatever this task does from here on; it is asked late, or never."""
    _NAMED.set(find)


def current_trace_id() -> str:
    """In whose trace this task works: 32 hex digits; empty where its caller named none."""
    return trace_id_of(_NAMED.get()())


def trace_id_of(text: str) -> str:
    """The trace's id in a `traceparent`, or in itself; empty where it is neither."""
    if _TRACE_ID.fullmatch(text):
        return text
    found = _TRACE_PARENT.fullmatch(text)
    return found[1] if found else ""
