"""Traces: a caller's trace goes through a real client and a real server, and comes out in spans."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from observed import small_settings
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.wire import trace_metadata, trace_parent
from ctxcache.errors import InvalidConfiguration, SessionNotFound
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from ctxcache.observe import tracing
from ctxcache.observe.tracing import OtelSpans, open_spans
from ctxcache.server.server import Server
from lab.routes import Route, route_options
from tests.model_specs import small_model

HIDDEN = Stream(0, StateKind.HIDDEN)
MODEL = small_model(
    StreamSpec(HIDDEN, 96, DType.FLOAT16),
    architecture="Tiny",
    weights_digest="w",
    tokenizer_digest="t",
    hidden_size=48,
    head_size=40,
)


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Where spans go."""
    kept = InMemorySpanExporter()
    yield kept
    kept.shutdown()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    """The provider of the application and of the server: both are in this process."""
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made


@asynccontextmanager
async def served(directory: Path, provider: TracerProvider, access: Route) -> AsyncIterator[Client]:
    """A server that traces, and a client of it."""
    server = await Server.start(small_settings(directory), spans=OtelSpans(provider))
    try:
        client = await asyncio.to_thread(ctxcache.connect, server.addresses[0], **route_options(access))
        try:
            yield client
        finally:
            await asyncio.to_thread(client.close)
    finally:
        await server.stop()


def _turn(client: Client, provider: TracerProvider) -> str:
    """Save, make durable, leave memory, restore: as an engine does within a request.

    Returns its trace's id.
    """
    rows = {Stream(-1, StateKind.TOKENS): np.zeros((64, 4), np.uint8), HIDDEN: np.zeros((64, 96), np.uint8)}
    with provider.get_tracer("engine").start_as_current_span("request") as request:
        client.models.register(MODEL)
        session = client.sessions.create(CallerModel(MODEL), id="one", layout=[HIDDEN]).info
        session = client.sessions.open(session, CallerModel(MODEL)).append(rows)
        client.sessions.open(session.name).flush()
        client.admin.demote_session(session.name)
        with client.sessions.open(session, CallerModel(MODEL)).read() as read:
            read.array(HIDDEN)
        with pytest.raises(SessionNotFound):
            client.sessions.get("sessions/none")
    return f"{request.get_span_context().trace_id:032x}"


def _by_name(exporter: InMemorySpanExporter, trace_id: str) -> dict[str, ReadableSpan]:
    spans = exporter.get_finished_spans()
    return {span.name: span for span in spans if f"{span.context.trace_id:032x}" == trace_id}


@pytest.mark.parametrize("access", ["grpc", "local-socket", "local-grpc"])
async def test_a_request_is_one_trace(
    tmp_path: Path,
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
    access: Route,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its calls, what they wait for, and what failed, on each way to the store."""
    async with served(tmp_path, provider, access) as client:
        trace_id = await asyncio.to_thread(_turn, client, provider)

    assert "Failed to detach context" not in caplog.text
    spans = _by_name(exporter, trace_id)
    service = "ctxcache.v1.SessionService"
    reads = f"{service}/ReadSession" if access == "grpc" else "ctxcache.local_batch"
    by_id = {span.context.span_id: span.name for span in exporter.get_finished_spans()}
    parents = {name: by_id.get(span.parent.span_id) if span.parent else None for name, span in spans.items()}
    assert parents["ctxcache.promotion"] == reads
    assert parents["ctxcache.flush"] == f"{service}/FlushSession"
    assert parents[f"{service}/CreateSession"] == "request"
    failed = spans[f"{service}/GetSession"]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert (failed.attributes or {})["ctxcache.reason"] == "SESSION_NOT_FOUND"
    assert (spans["ctxcache.promotion"].attributes or {})["ctxcache.segment_count"] == 1


async def test_what_comes_without_a_trace_has_one_of_its_own(
    tmp_path: Path, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """Unless it is a local client's batch, which is asked for too often."""
    async with served(tmp_path, provider, "local-socket") as client:
        await asyncio.to_thread(client.models.register, MODEL)

    assert [span.name for span in exporter.get_finished_spans()] == ["ctxcache.v1.ModelService/RegisterModel"]


def test_a_span_of_the_application_is_passed_on(provider: TracerProvider) -> None:
    """In W3C's form, its state with it."""
    with provider.get_tracer("x").start_as_current_span("x") as span:
        context = span.get_span_context()
        assert (
            trace_parent()
            == f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
        )
        assert trace_metadata() == (("traceparent", trace_parent()),)


@pytest.mark.parametrize("wrong", ["x", "00-0-0-00", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x00" * 900])
def test_a_trace_that_cannot_be_read_is_none(
    provider: TracerProvider, exporter: InMemorySpanExporter, wrong: str
) -> None:
    """The call goes on, with a trace of its own."""
    spans = OtelSpans(provider)
    with spans.local(wrong, 1), spans.rpc("/a.B/C", (("traceparent", wrong), ("traceparent-bin", b"x"))):
        pass

    assert all(span.parent is None for span in exporter.get_finished_spans())


def test_without_a_span_nothing_is_sent() -> None:
    """No metadata, and no field."""
    assert trace_parent() == ""
    assert trace_metadata() is None


def test_what_is_not_used_is_not_imported() -> None:
    """Neither a server without an endpoint nor a client imports OpenTelemetry."""
    code = "import sys, ctxcache.server.server, ctxcache.client; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"


def test_an_endpoint_without_the_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the sentence that says what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)

    with pytest.raises(InvalidConfiguration, match=r"pip install 'ctxcache\[otel\]'"):
        open_spans("http://127.0.0.1:4317", 0.0, "1")


def test_a_collector_that_is_away_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are dropped, and the end is bounded."""
    monkeypatch.setattr(tracing, "END_TIMEOUT_S", 0.05)
    spans, close = open_spans("http://127.0.0.1:1", 1.0, "1")
    with spans.span("flush", segment_count=1):
        pass
    close()
