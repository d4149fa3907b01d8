"""Workers and engines that die while a restore holds its lease and writes.

The store has its room back, the worker its memory.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from attached import Later, saved_case, until
from paged_engine import PROMPT_TOKENS, PagedEngine, running_engine, write_weights
from server_process import ServerProcess
from worker_process import WorkerProcess, mortal_engine

import ctxcache
from ctxcache.errors import Unavailable
from gpu_worker.sidecar.client import WorkerClient
from tests.nursery import Entry


class _HeldWorker(WorkerProcess):
    def __init__(self, directory: Path, store: str) -> None:
        self.may_go_on = directory / "go on"
        """Restores read their second layer when this file is there."""
        entry = Entry("tests.gpu_worker.sidecar.held_worker:run", (str(self.may_go_on), "serve"))
        super().__init__(directory, store, "--directory", "/nonexistent", entry=entry)
        self.is_held = directory / "go on held"
        """There once a restore is held up: a lease alone may be given back before a row is written."""


@pytest.fixture
def held(store: ServerProcess, tmp_path: Path) -> Iterator[_HeldWorker]:
    """One beside the store."""
    with _HeldWorker(tmp_path, store.target) as running:
        yield running


def _is_mapped(worker: WorkerProcess, engine: PagedEngine) -> bool:
    return engine.save_area.name in Path(f"/proc/{worker.process.pid}/maps").read_text()


def test_what_is_killed_while_a_restore_is_held_up_is_let_go_of(
    held: _HeldWorker, store: ServerProcess, weights: Path, session_id: str, tmp_path: Path
) -> None:
    """An engine: its attachment at once, its memory and lease when nothing uses them any more.

    Then the worker: all that it had.
    """
    with (
        ctxcache.connect(store.target) as admin,
        WorkerClient(held.path) as client,
        saved_case(client, weights, session_id) as case,
        running_engine("llama") as other,
    ):
        until(lambda: not list(admin.admin.list_leases()))
        hello = other.hello(write_weights("llama", weights), engine="mortal")
        (tmp_path / "hello").write_bytes(hello.SerializeToString())
        with mortal_engine(held.path, tmp_path / "hello", case.session, PROMPT_TOKENS) as mortal:
            assert mortal.stdin is not None
            assert mortal.stdout is not None
            assert mortal.stdout.readline() == "attached\n"
            mortal.stdin.write("go on\n")
            mortal.stdin.flush()
            until(held.is_held.exists)
            assert len(list(admin.admin.list_leases())) == 1
            mortal.kill()
            mortal.wait()
        until(lambda: [each.engine for each in client.stats().attachments] == ["engine"])
        assert _is_mapped(held, other)
        held.may_go_on.touch()
        until(lambda: not _is_mapped(held, other) and not list(admin.admin.list_leases()))
        held.may_go_on.unlink()
        held.is_held.unlink()

        later = Later(case.restore)
        until(held.is_held.exists)
        assert len(list(admin.admin.list_leases())) == 1
        held.signal(signal.SIGKILL)

        with pytest.raises(Unavailable):
            later.result()
        until(lambda: not list(admin.admin.list_leases()))
        assert case.attached.ended.wait(30)
