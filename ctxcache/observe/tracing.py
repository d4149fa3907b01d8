"""Tracing with OpenTelemetry: spans of rpcs, promotions and flushes, sent to a collector over OTLP.

Imports what `ctxcache[otel]` installs, only when it is set up. Callers decide what is traced: what they
sample is, and `ratio` of what comes without a trace. Worst case: a collector that is away; spans wait in a
bounded queue and are dropped then, and nobody else waits but the end of the server, END_TIMEOUT_S at most.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from ctxcache.errors import CacheError, InvalidConfiguration
from ctxcache.runtime.spans import Metadata

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

END_TIMEOUT_S = 3.0


class OtelSpans:
    """Spans of one provider."""

    is_on = True

    def __init__(self, provider: "TracerProvider") -> None:
        import opentelemetry.trace.propagation.tracecontext  # noqa: PLC0415  see the module's docstring

        self._trace = opentelemetry.trace
        self._tracer = provider.get_tracer("ctxcache")
        self._propagator = self._trace.propagation.tracecontext.TraceContextTextMapPropagator()

    def rpc(self, method: str, metadata: Metadata) -> AbstractContextManager[object]:
        """See Spans."""
        carrier = {
            key: value
            for key, value in metadata
            if isinstance(value, str) and key in ("traceparent", "tracestate")
        }
        name = method.lstrip("/")
        service, _, rpc = name.rpartition("/")
        return self._span(name, carrier, {"rpc.system": "grpc", "rpc.service": service, "rpc.method": rpc})

    def span(self, name: str, **facts: str | int) -> AbstractContextManager[object]:
        """See Spans."""
        return self._span(f"ctxcache.{name}", None, {f"ctxcache.{key}": fact for key, fact in facts.items()})

    def local(self, trace_parent: str, operation_count: int) -> AbstractContextManager[object]:
        """See Spans."""
        facts: dict[str, str | int] = {"ctxcache.operation_count": operation_count}
        return self._span("ctxcache.local_batch", {"traceparent": trace_parent}, facts)

    @contextmanager
    def _span(self, name: str, carrier: dict[str, str] | None, facts: dict[str, str | int]) -> Iterator[None]:
        context = None if carrier is None else self._propagator.extract(carrier)
        kind = self._trace.SpanKind.INTERNAL if carrier is None else self._trace.SpanKind.SERVER
        # Told below by hand: a refusal is an answer with a reason, and has no traceback.
        with self._tracer.start_as_current_span(
            name, context, kind, facts, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield
            except CacheError as error:
                span.set_attribute("ctxcache.reason", error.reason)
                span.set_status(self._trace.StatusCode.ERROR, str(error))
                raise
            except Exception as error:
                span.record_exception(error)
                span.set_status(self._trace.StatusCode.ERROR)
                raise


def check_installed() -> None:
    """Raise InvalidConfiguration where what tracing needs does not import."""
    try:
        import opentelemetry.exporter.otlp.proto.grpc.trace_exporter  # noqa: PLC0415
        import opentelemetry.sdk.trace.export  # noqa: F401, PLC0415
    except ImportError as error:
        problem = f"tracing needs what pip install 'ctxcache[otel]' installs ({error})"
        raise InvalidConfiguration(source="trace_endpoint", problem=problem) from error


def open_spans(
    endpoint: str, ratio: float, version: str, *, service: str = "ctxcache"
) -> tuple[OtelSpans, Callable[[], None]]:
    """Spans that go to the collector at `endpoint`, and what ends that. Raises InvalidConfiguration.

    `ratio`: of what comes without a trace, the share that is traced. `service`: who they are of.
    """
    check_installed()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider, export, sampling  # noqa: PLC0415

    provider = TracerProvider(
        sampling.ParentBased(sampling.TraceIdRatioBased(ratio)),
        Resource.create({"service.name": service, "service.version": version}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(export.BatchSpanProcessor(OTLPSpanExporter(endpoint)))

    def close() -> None:
        # Its own wait for a collector that is away is longer than ours.
        ending = threading.Thread(target=provider.shutdown, name="tracing-end", daemon=True)
        ending.start()
        ending.join(END_TIMEOUT_S)

    return OtelSpans(provider), close
