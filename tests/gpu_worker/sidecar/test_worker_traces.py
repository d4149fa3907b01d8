"""Traces of a worker: an engine's trace goes through its restores and saves, and on to the store."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from attached import BLOCKS, saved_case
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from paged_engine import PROMPT_TOKENS
from server_process import ServerProcess

from ctxcache.client.wire import trace_parent
from ctxcache.errors import InvalidConfiguration
from ctxcache.observe.tracing import OtelSpans
from gpu_worker.sidecar.client import WorkerClient
from gpu_worker.sidecar.server import Worker
from gpu_worker.sidecar.settings import WorkerSettings

SERVICE = "gpu_worker.v1.WorkerService"


def _requests(worker: Path, weights: Path, session_id: str, provider: TracerProvider) -> str:
    """A save, a restore and a miss within one request of an engine; its trace's id."""
    tracer = provider.get_tracer("engine")
    with WorkerClient(worker) as client, tracer.start_as_current_span("request") as request:
        with saved_case(client, weights, session_id) as case:
            assert case.restore().is_restored
            missed = case.attached.restore("sessions/none", BLOCKS, token_end=PROMPT_TOKENS)
            assert missed.reason == "SESSION_NOT_FOUND"
        return f"{request.get_span_context().trace_id:032x}"


async def test_an_engines_trace_goes_through_its_worker(
    store: ServerProcess, weights: Path, session_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rpc is a part of the engine's span, its work a part of the rpc, the store's part of that."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = WorkerSettings(store=store.target, listen=tmp_path / "worker.sock")
    worker = Worker(settings, on_stuck=lambda error: pytest.fail(str(error)), spans=OtelSpans(provider))
    asked_by: list[str] = []
    get_session = worker._client.sessions.get

    def asked(*arguments: Any) -> Any:  # as get_session
        asked_by.append(trace_parent().split("-")[2])
        return get_session(*arguments)

    monkeypatch.setattr(worker._client.sessions, "get", asked)
    await worker.start()
    try:
        trace_id = await asyncio.to_thread(_requests, settings.socket, weights, session_id, provider)
    finally:
        await worker.stop()

    spans = [span for span in exporter.get_finished_spans() if f"{span.context.trace_id:032x}" == trace_id]
    names = {span.context.span_id: span.name for span in spans}
    parents = {(span.name, names.get(span.parent.span_id) if span.parent else None) for span in spans}
    assert parents >= {
        ("request", None),
        (f"{SERVICE}/Restore", "request"),
        ("ctxcache.restore", f"{SERVICE}/Restore"),
        (f"{SERVICE}/Save", "request"),
        ("ctxcache.save", f"{SERVICE}/Save"),
    }
    assert [names[int(span_id, 16)] for span_id in asked_by] == [
        "ctxcache.save",
        "ctxcache.restore",
        "ctxcache.restore",
    ]
    restored, missed = (span for span in spans if span.name == "ctxcache.restore")
    assert _facts(restored) == {"ctxcache.token_count": PROMPT_TOKENS}
    assert _facts(missed)["ctxcache.reason"] == "SESSION_NOT_FOUND"
    assert missed.status.status_code is trace.StatusCode.ERROR


def _facts(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan")])
def test_a_ratio_that_is_none_is_refused(ratio: float) -> None:
    """Before anything listens."""
    with pytest.raises(InvalidConfiguration, match="trace_ratio"):
        WorkerSettings(trace_ratio=ratio)
