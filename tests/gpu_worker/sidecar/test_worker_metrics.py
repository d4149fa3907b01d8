"""A worker's metrics: what Prometheus reads of a worker that has restored, missed and refused."""

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from attached import saved_case
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess
from worker_process import WorkerProcess

from ctxcache.errors import AddressUnusable, CacheError, InvalidConfiguration, TooManyRequests
from gpu_worker.sidecar.client import WorkerClient
from gpu_worker.sidecar.counts import Counts
from gpu_worker.sidecar.edge import Room
from gpu_worker.sidecar.metrics import MetricsServer, WorkerCollector

DOCUMENT = Path(__file__).parents[3] / "docs" / "sidecar.md"


@pytest.fixture
def measured(store: ServerProcess, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A worker that shows its metrics."""
    options = ("--metrics-listen", "127.0.0.1:0", "--directory", "/nonexistent", "--max-attachments", "1")
    with WorkerProcess(tmp_path, store.target, *options) as running:
        yield running


def _values(address: str) -> dict[tuple[str, ...], float]:
    """By name and labels, these in the order of their names."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (
            sample.name.removeprefix("ctxcache_worker_"),
            *(text for _, text in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_a_worker_did_is_there_to_read(measured: WorkerProcess, weights: Path, session_id: str) -> None:
    """Restores by result and reason, stages against plans, what is under way, what was refused."""
    address = measured.ready["metrics_address"]
    with WorkerClient(measured.path) as client, saved_case(client, weights, session_id) as case:
        assert case.restore().is_restored
        assert not case.attached.restore("sessions/never", [0], token_end=1).is_restored
        with pytest.raises((CacheError, grpc.RpcError)):
            client.attach(case.engine.hello(weights, engine="other")).__enter__()
        values = _values(address)

    assert values["restores_total", "", "restored"] == 1
    assert values["restores_total", "SESSION_NOT_FOUND", "missed"] == 1
    assert values["saves_total", "", "saved"] == 1
    assert values["restored_tokens_total",] == values["saved_tokens_total",] > 0
    assert values["read_bytes_total",] > 0
    assert values["refused_total", "TOO_MANY_REQUESTS", "attachments"] == 1
    assert (values["running", "attachments"], values["limit", "attachments"]) == (1, 1)
    assert values["running", "restores"] == 0
    assert values["attached_bytes",] > 0
    stages = {key[2] for key in values if key[0] == "stage_seconds_total"}
    assert "copy" in stages
    for stage in stages:
        assert values["stage_seconds_total", "observed", stage] > 0
        assert ("stage_seconds_total", "predicted", stage) in values


def test_by_default_nobody_listens(worker: WorkerProcess) -> None:
    """The metrics have no login."""
    assert worker.ready["metrics_address"] == ""


def _collector() -> WorkerCollector:
    return WorkerCollector(Counts(), [("restores", Room("restores", 1))], lambda: 0)


def test_it_listens_no_more_when_it_is_stopped() -> None:
    """And its address can be had again."""
    server = MetricsServer("127.0.0.1:0", _collector())
    assert _values(server.address)
    server.stop()
    with pytest.raises(urllib.error.URLError):
        _values(server.address)
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


def test_every_metric_is_in_the_document_and_no_other() -> None:
    """The table of docs/sidecar.md."""
    room = Room("restores", 0)
    with pytest.raises(TooManyRequests):
        room.take()
    families = WorkerCollector(Counts(), [("restores", room)], lambda: 0).collect()
    shown = {family.name + ("_total" if family.type == "counter" else "") for family in families}

    assert set(re.findall(r"^\| `(ctxcache_worker_\w+)`", DOCUMENT.read_text(), re.MULTILINE)) == shown
