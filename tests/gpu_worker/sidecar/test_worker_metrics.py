"""A worker's metrics: what Prometheus reads of a worker that has restored, missed and refused."""

import re
import shlex
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from alert_worker import WORKER_ALERTS
from attached import saved_case, until
from dashboard_json import names_in, queries
from dashboard_table import WORKER
from paged_engine import running_engine, write_weights
from pki import Pki
from prometheus_client.parser import text_string_to_metric_families
from promtool import answered, needs_promtool, series_of
from scraped import parsed
from server_process import ServerProcess
from worker_process import WorkerProcess, examples_of, mortal_engine

from ctxcache.errors import (
    AddressUnusable,
    CacheError,
    InvalidArgument,
    InvalidConfiguration,
    TooManyRequests,
)
from gpu_worker.direct.storage import DirectStorage
from gpu_worker.sidecar.client import WorkerClient
from gpu_worker.sidecar.edge import AdmissionLimit
from gpu_worker.sidecar.metrics import METRICS, Attached, Counts, MetricsGuard, MetricsServer, WorkerCollector
from gpu_worker.v1 import worker_pb2


@pytest.fixture(scope="module")
def measured(store: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that shows its metrics, of one engine at a time, begun as the example in its help is."""
    (example,) = examples_of("serve")
    said = shlex.split(
        example.replace("127.0.0.1:7420", store.target).replace("127.0.0.1:7423", "127.0.0.1:0")
    )
    options = (*said[3:], "--directory", "/nonexistent", "--max-attachments", "1")
    with WorkerProcess(tmp_path_factory.mktemp("measured"), store.target, *options) as running:
        yield running


@pytest.fixture(scope="module")
def shown(measured: WorkerProcess, weights: Path) -> tuple[str, str]:
    """The metrics before and after a restore, a miss and a refusal."""
    address = measured.ready["metrics_address"]
    before = _text(address)
    with WorkerClient(measured.path) as client, saved_case(client, weights, "measured") as case:
        assert case.restore().is_restored
        assert not case.attached.restore("sessions/never", [0], token_end=1).is_restored
        with pytest.raises((CacheError, grpc.RpcError)):
            client.attach(case.engine.hello(weights, engine="other")).__enter__()
        return before, _text(address)


def _text(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def _values(text: str) -> dict[tuple[str, ...], float]:
    """By name and labels, these in the order of their names."""
    return {
        (
            sample.name.removeprefix("ctxcache_worker_"),
            *(text for _, text in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_a_worker_did_is_there_to_read(shown: tuple[str, str]) -> None:
    """Restores by result and reason, stages against plans, what is under way, what was refused."""
    before, values = map(_values, shown)

    assert before["restores_total", "", "restored"] == before["saves_total", "", "saved"] == 0
    assert values["restores_total", "", "restored"] == 1
    assert values["restores_total", "SESSION_NOT_FOUND", "missed"] == 1
    assert values["saves_total", "", "saved"] == 1
    assert values["restored_tokens_total",] == values["saved_tokens_total",] > 0
    assert values["read_bytes_total",] > 0
    assert values["refused_total", "TOO_MANY_REQUESTS", "attachments"] == 1
    assert (values["running", "attachments"], values["limit", "attachments"]) == (1, 1)
    assert values["running", "restores"] == 0
    assert values["attached_bytes",] > before["attached_bytes",] == 0
    assert values["longest_idle_seconds",] > before["longest_idle_seconds",] == 0
    stages = {key[2] for key in values if key[0] == "stage_seconds_total"}
    assert "copy" in stages
    for stage in stages:
        assert values["stage_seconds_total", "observed", stage] > 0
        assert ("stage_seconds_total", "predicted", stage) in values


def test_by_default_nobody_listens(worker: WorkerProcess) -> None:
    """The metrics have no login."""
    assert worker.ready["metrics_address"] == ""


def _collector() -> WorkerCollector:
    return _collector_of(Counts(), AdmissionLimit("restores", 1))


def _collector_of(counts: Counts, room: AdmissionLimit) -> WorkerCollector:
    store: Any = None  # nobody asks it
    direct = DirectStorage(store, torch.device("cpu"))
    return WorkerCollector(counts, [("restores", room)], lambda: Attached(0, 0.0), direct)


def test_it_listens_no_more_when_it_is_stopped() -> None:
    """And its address can be had again."""
    server = MetricsServer("127.0.0.1:0", _collector())
    assert _values(_text(server.address))
    server.stop()
    with pytest.raises(urllib.error.URLError):
        _text(server.address)
    MetricsServer(server.address, _collector()).stop()


@pytest.mark.parametrize("address", ["9000", ":9000", "127.0.0.1:x"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    """With the setting's name."""
    with pytest.raises(InvalidConfiguration, match="metrics_listen"):
        MetricsServer(address, _collector())


def test_an_address_that_is_taken_is_refused() -> None:
    """As every other address is."""
    server = MetricsServer("127.0.0.1:0", _collector())
    try:
        with pytest.raises(AddressUnusable):
            MetricsServer(server.address, _collector())
    finally:
        server.stop()


def test_a_sample_is_of_a_metric_of_the_table() -> None:
    """Each has the labels that the table gives it, those that only a refusal brings too."""
    room = AdmissionLimit("restores", 0)
    with pytest.raises(TooManyRequests):
        room.take()
    counts = Counts()
    counts.missed["X"] = counts.failed_saves["X"] = 1
    counts.predicted_s["copy"] = 1.0

    seen = set()
    for family in _collector_of(counts, room).collect():
        for sample in family.samples:
            seen.add(sample.name)
            assert tuple(sample.labels) == METRICS[sample.name].labels

    assert seen == set(METRICS)


def test_engines_that_leave_are_told_from_those_that_are_lost(
    measured: WorkerProcess, weights: Path, session_id: str, tmp_path: Path
) -> None:
    """One detaches, one is killed, and each counts once."""
    with WorkerClient(measured.path) as client, running_engine("llama") as engine:
        hello = engine.hello(write_weights("llama", weights), engine="mortal")
        left, lost = _ended(measured)
        with client.attach(hello):
            assert _ended(measured) == (left, lost)
        assert _ended(measured) == (left + 1, lost)
        (tmp_path / "hello").write_bytes(hello.SerializeToString())
        with mortal_engine(measured.path, tmp_path / "hello", f"sessions/{session_id}", 1) as mortal:
            assert mortal.stdout is not None
            assert mortal.stdout.readline() == "attached\n"
            mortal.kill()
        until(lambda: _ended(measured) == (left + 1, lost + 1))


@pytest.mark.parametrize("last", [[], [worker_pb2.AttachRequest()]], ids=["nothing", "an empty request"])
def test_requests_that_end_without_a_farewell_are_of_an_engine_that_is_lost(
    measured: WorkerProcess, weights: Path, last: list[worker_pb2.AttachRequest]
) -> None:
    """A broken connection may look like this to the worker; the reason names the field."""
    with WorkerClient(measured.path) as client, running_engine("llama") as engine:
        hello = engine.hello(write_weights("llama", weights), engine="terse")
        left, lost = _ended(measured)

        answers = client.stub.Attach(iter([worker_pb2.AttachRequest(hello=hello), *last]), timeout=30)

        assert next(answers).attachment_id
        with pytest.raises(InvalidArgument, match="farewell"), client.errors():
            next(answers)
        assert _ended(measured) == (left, lost + 1)


def test_a_farewell_is_answered_when_the_attachment_is_gone(measured: WorkerProcess, weights: Path) -> None:
    """By one message with nothing else in it, and the stream ends well; what comes behind is not read."""
    with WorkerClient(measured.path) as client, running_engine("llama") as engine:
        hello = worker_pb2.AttachRequest(hello=engine.hello(write_weights("llama", weights), engine="polite"))
        farewell = worker_pb2.AttachRequest(farewell=worker_pb2.Farewell())
        left, lost = _ended(measured)

        answers = client.stub.Attach(iter([hello, farewell, hello]), timeout=30)

        welcome, answer = next(answers), next(answers)
        assert answer == worker_pb2.AttachResponse(farewell=worker_pb2.Farewell())
        assert welcome.attachment_id not in {each.attachment_id for each in client.stats().attachments}
        assert list(answers) == []
        assert _ended(measured) == (left + 1, lost)


def _ended(worker: WorkerProcess) -> tuple[float, float]:
    """Attachments whose engine left, and those whose engine was lost."""
    values = _values(_text(worker.ready["metrics_address"]))
    return values["ended_attachments_total", "left"], values["ended_attachments_total", "lost"]


@needs_promtool
def test_no_panel_of_the_workers_dashboard_is_empty(shown: tuple[str, str], tmp_path: Path) -> None:
    """Every query, as Prometheus evaluates it over two scrapes of a worker."""
    asked = {f"{i} {title}": query for i, (title, query) in enumerate(queries(WORKER))}
    asked["nothing"] = "ctxcache_worker_limit > 1e9"

    found = answered(asked, series_of(*map(parsed, shown)), tmp_path)

    assert set(asked) - found == {"nothing"}


def test_every_metric_of_a_workers_alert_is_exposed(shown: tuple[str, str]) -> None:
    """Names, and the labels that the rules choose by."""
    for alert in WORKER_ALERTS:
        for name in names_in(alert.expression):
            asked = re.findall(rf"{name}{{([^}}]*)}}", alert.expression)
            labels = {label for selector in asked for label in re.findall(r"(\w+)[!=]", selector)}
            assert name in parsed(shown[1])
            assert labels <= set(METRICS[name].labels), alert.name


def test_with_a_token_and_tls_it_answers_who_shows_the_one_and_knows_the_other(tmp_path: Path) -> None:
    """Anybody else is refused; a certificate that is renewed is taken over.

    A silent handshake holds nobody up.
    """
    pki = Pki(tmp_path)
    old = ssl.create_default_context(cafile=str(pki.authority("old")))
    new = ssl.create_default_context(cafile=str(pki.authority("new")))
    certificate, key = pki.issue("worker", "old")
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    server = MetricsServer("127.0.0.1:0", _collector(), MetricsGuard(certificate, key, token))
    host, _, port = server.address.rpartition(":")
    url = f"https://{server.address}/metrics"
    asked = urllib.request.Request(url, headers={"Authorization": "Bearer 0123456789abcdef"})
    try:
        with socket.create_connection((host, int(port))):
            with _opened(asked, old) as answer:
                assert _values(answer.read().decode())
            with pytest.raises(urllib.error.HTTPError, match="401"):
                _opened(urllib.request.Request(url), old)
        with pytest.raises(urllib.error.URLError):
            _opened(asked, new)
        pki.issue("worker", "new")
        with _opened(asked, new) as answer:
            assert answer.status == 200
    finally:
        server.stop()


def _opened(request: urllib.request.Request, context: ssl.SSLContext) -> Any:
    return urllib.request.build_opener(urllib.request.HTTPSHandler(context=context)).open(request, timeout=10)


def test_half_of_a_certificate_is_refused(tmp_path: Path) -> None:
    """By the name of what is missing."""
    with pytest.raises(InvalidConfiguration, match="metrics_tls_key"):
        MetricsServer("127.0.0.1:0", _collector(), MetricsGuard(certificate=tmp_path))
