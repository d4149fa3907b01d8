"""Tracing on the client's side: the caller's trace goes with its calls.

Nothing unless it uses OpenTelemetry itself.

OpenTelemetry is not imported here: a process that has not done so has no trace to pass on.
"""

import sys
from contextlib import AbstractContextManager, nullcontext

API = "opentelemetry.trace"
_NOTHING = nullcontext()


def trace_parent() -> str:
    """The current span as W3C's `traceparent`; empty where there is none."""
    api = sys.modules.get(API)
    if api is None:
        return ""
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def trace_metadata() -> tuple[tuple[str, str], ...] | None:
    """What goes with an rpc: `traceparent` and, where there is one, `tracestate`."""
    parent = trace_parent()
    if not parent:
        return None
    state = sys.modules[API].get_current_span().get_span_context().trace_state.to_header()
    return (("traceparent", parent), ("tracestate", state)) if state else (("traceparent", parent),)


def span(name: str, **facts: str | int) -> AbstractContextManager[object]:
    """A span of the caller's own tracer, current in the block; nothing where it has none."""
    api = sys.modules.get(API)
    if api is None:
        return _NOTHING
    made: AbstractContextManager[object] = api.get_tracer("ctxcache.client").start_as_current_span(
        f"ctxcache.{name}", attributes={f"ctxcache.{key}": fact for key, fact in facts.items()}
    )
    return made
