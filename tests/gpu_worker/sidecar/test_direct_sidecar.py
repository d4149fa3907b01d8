"""The sidecar on sessions that lie only on SSD.

A worker that reads the store's files. test_ranked_engine.py has ranks.
"""

from pathlib import Path

import pytest
from attached import Case, leave, saved_case
from paged_engine import WORKER_DEVICE
from server_process import ServerProcess
from worker_process import WorkerProcess

import ctxcache
from gpu_worker.sidecar.client import WorkerClient


def dram_bytes(store: ServerProcess, case: Case) -> int:
    """The bytes of the session that the store has in memory."""
    with ctxcache.connect(store.target) as client:
        return client.sessions.get(case.session).dram_bytes


def test_an_engine_is_restored_from_the_stores_files(
    store: ServerProcess, direct_client: tuple[WorkerProcess, WorkerClient], weights: Path, session_id: str
) -> None:
    """As from its memory, which stays as it is; the worker says by which path, and counts."""
    running, client = direct_client
    with saved_case(client, weights, session_id) as case:
        leave(store, case.session)
        before = client.stats().direct_read_bytes
        result = case.restore()

        assert result.is_restored, result
        assert case.is_as_saved()
        assert dram_bytes(store, case) == 0
        stats = client.stats()
        assert stats.direct_path == "posix" == running.ready["direct_path"]
        assert stats.direct_reason == "asked for"
        assert stats.direct_read_bytes - before == result.read_bytes > 0
        assert not stats.direct_failed_counts
    assert "direct_storage path=posix" in running.stderr_path.read_text()


@pytest.mark.skipif(WORKER_DEVICE != "cpu", reason="with a GPU kvikio may read")
def test_by_default_a_worker_without_a_gpu_reads_through_the_store(
    store: ServerProcess, client: WorkerClient, weights: Path, session_id: str
) -> None:
    """Where it stays for the next one."""
    with saved_case(client, weights, session_id) as case:
        leave(store, case.session)

        assert case.restore().is_restored
        assert case.is_as_saved()
        assert dram_bytes(store, case) > 0
        assert client.stats().direct_path == "off"
        assert client.stats().direct_read_bytes == 0
        assert client.stats().arena_pinned_bytes == 0
        assert client.stats().arena_reason == "the device reads the host's memory in place"
