"""A worker beside a store, for all tests that leave both as they found them: running."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attached import RESTORE_LIMIT
from paged_engine import WORKER_DEVICE
from server_process import ServerProcess
from worker_process import WorkerProcess

from gpu_worker.sidecar.client import WorkerClient

# A worker's metrics are asked what its alerts and panels ask.
ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests" / "observe"), str(ROOT / "scripts")]


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where checkpoints lie."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A store that only these tests stop, kill, and start again."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as running:
        yield running


@pytest.fixture(scope="session")
def worker(store: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """Its worker."""
    options = ("--device", WORKER_DEVICE, "--max-concurrent-restores", str(RESTORE_LIMIT))
    options += ("--directory", "/nonexistent")
    with WorkerProcess(tmp_path_factory.mktemp("worker"), store.target, *options) as running:
        yield running


@pytest.fixture(scope="session")
def direct_client(
    store: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[WorkerProcess, WorkerClient]]:
    """A worker that was told to read the store's files, and a connection to it."""
    options = ("--device", WORKER_DEVICE, "--direct", "posix", "--directory", "/nonexistent")
    with (
        WorkerProcess(tmp_path_factory.mktemp("direct"), store.target, *options) as running,
        WorkerClient(running.path) as connected,
    ):
        yield running, connected


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[WorkerClient]:
    """An engine's connection to it; whoever ended it leaves it to be started again."""
    if worker.process.poll() is not None:
        worker.start()
    with WorkerClient(worker.path) as connected:
        yield connected
