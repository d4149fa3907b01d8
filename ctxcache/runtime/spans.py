"""Spans: what a tracer is told, and the one that is told nothing. Leaf; knows no OpenTelemetry.

Where tracing is off nobody asks for a span of an rpc, and the others cost a function call.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Metadata = Iterable[tuple[str, str | bytes]]


class Spans(Protocol):
    """Makes spans. What a block raises ends its span with the error's reason."""

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
        return _NOTHING

    def span(self, name: str, **facts: str | int) -> AbstractContextManager[object]:  # noqa: ARG002
        """See Spans."""
        return _NOTHING

    def local(self, trace_parent: str, operation_count: int) -> AbstractContextManager[object]:  # noqa: ARG002
        """See Spans."""
        return _NOTHING


_NOTHING = nullcontext()
NO_SPANS = NoSpans()
