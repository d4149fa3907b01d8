"""Spans, as a tracer is told of them, and the trace that a request belongs to. Leaf; knows no OpenTelemetry.

Where tracing is off no span is made for an rpc, and the others cost a function call.

A request's trace is W3C's `traceparent` as its caller sent it: kept for each rpc, read only where something
is to be remembered. Worst case: a `traceparent` that cannot be read, which counts as none.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Protocol

Metadata = Iterable[tuple[str, str | bytes]]


class Spans(Protocol):
    """Makes spans. An error raised in a block ends its span with the error's reason."""

    @property
    def is_on(self) -> bool:
        """Whether anybody is told."""

    def rpc(self, method: str, metadata: Metadata) -> AbstractContextManager[object]:
        """A caller's rpc, within the trace that its metadata name."""

    def span(self, name: str, **facts: str | int) -> AbstractContextManager[object]:
        """A part of what runs now, or something of its own where nothing does."""

    def local(self, trace_parent: str, operation_count: int) -> AbstractContextManager[object]:
        """A local client's batch, within the trace that it names."""


class NoSpans:
    """Tells nobody."""

    is_on = False

    def rpc(self, method: str, metadata: Metadata) -> AbstractContextManager[object]:  # noqa: ARG002
        """See Spans."""
        return NOTHING

    def span(self, name: str, **facts: str | int) -> AbstractContextManager[object]:  # noqa: ARG002
        """See Spans."""
        return NOTHING

    def local(
        self,
        trace_parent: str,  # noqa: ARG002
        operation_count: int,  # noqa: ARG002
    ) -> AbstractContextManager[object]:
        """See Spans."""
        return NOTHING


NOTHING = nullcontext()
"""A span that nobody hears of."""
NO_SPANS = NoSpans()


# -- the trace that a request belongs to -------------------------------------------------------------

HEADER = "traceparent"
# Version ff is invalid by the standard, as are ids of zeros alone. A later version may append fields.
_TRACE_PARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?"
)
_TRACE_ID = re.compile(r"(?!0{32})[0-9a-f]{32}")


TRACE_PARENT: ContextVar[Callable[[], str] | str] = ContextVar("trace_parent", default="")
"""The `traceparent` of what this task does, or what finds it: asked late, or never."""


def current_trace_id() -> str:
    """In whose trace this task works: 32 hex digits; empty where its caller named none."""
    found = TRACE_PARENT.get()
    return trace_id_of(found if isinstance(found, str) else found())


def trace_id_of(text: str) -> str:
    """The trace's id in a `traceparent`, or in itself; empty where it is neither."""
    if _TRACE_ID.fullmatch(text):
        return text
    found = _TRACE_PARENT.fullmatch(text)
    return found[1] if found else ""
