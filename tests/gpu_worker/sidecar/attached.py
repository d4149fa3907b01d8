"""An attached engine with a saved session, for tests of what happens to it then."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic

from paged_engine import PROMPT_TOKENS, PagedEngine, conversation, running_engine, write_weights
from server_process import ServerProcess

import ctxcache
from ctxcache.client.types import Durability
from ctxcache.errors import CacheError
from ctxcache.format.streams import StateKind
from gpu_worker.sidecar.client import AttachedEngine, WorkerClient
from gpu_worker.v1 import worker_pb2

BLOCKS = [7, 2, 19, 4, 11, 0]
PATIENCE_S = 30
RESTORE_LIMIT = 2
"""Restores at a time that the tests' worker takes."""


@dataclass(frozen=True)
class Case:
    """An engine, its attachment, and a session that was saved through it."""

    engine: PagedEngine
    attached: AttachedEngine
    session: str
    token_ids: list[int]

    def restore(self, restore_id: str = "", timeout_s: float = 20.0) -> worker_pb2.RestoreResult:
        """All of the session into `BLOCKS`."""
        return self.attached.restore(
            self.session, BLOCKS, token_end=PROMPT_TOKENS, token_ids=self.token_ids, restore_id=restore_id,
            timeout_s=timeout_s,
        )  # fmt: skip

    def is_as_saved(self) -> bool:
        """Whether the blocks hold what the engine's own cache did."""
        held = conversation(self.engine.family)[2]
        mine = self.engine.rows(BLOCKS, PROMPT_TOKENS)
        self.engine.put(held, BLOCKS, PROMPT_TOKENS)
        theirs = self.engine.rows(BLOCKS, PROMPT_TOKENS)
        pairs = zip(mine, theirs, strict=True)
        return all((one - other).abs().max() <= 1e-5 * other.abs().max() for one, other in pairs)

    def is_untouched(self) -> bool:
        """Whether nothing was written since the cache was lost."""
        return bool((self.engine.cache.data == 0xFF).all())


@contextmanager
def saved_case(
    client: WorkerClient, weights: Path, session_id: str, *, engine_name: str = "engine"
) -> Iterator[Case]:
    """An engine that has saved a session of K/V and lost its cache."""
    token_ids, rows, _, _ = conversation("llama")
    with running_engine("llama") as engine:
        hello = engine.hello(write_weights("llama", weights), engine=engine_name)
        with client.attach(hello) as attached:
            kept = {stream: part for stream, part in rows.items() if stream.kind is StateKind.KV}
            session = attached.save(
                f"sessions/{session_id}", engine.stage(kept, token_ids), write_offset=0,
                token_count=PROMPT_TOKENS, durability=Durability.DISK,
            )  # fmt: skip
            engine.poison()
            yield Case(engine, attached, session.name, token_ids)


def leave(store: ServerProcess, name: str) -> None:
    """Have a session on SSD only."""
    end_s = monotonic() + PATIENCE_S
    with ctxcache.connect(store.target) as client:
        while client.sessions.get(name).dram_bytes:
            assert monotonic() < end_s
            client.hints.demote(name)


@contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """Within it the store does nothing: whoever asks it waits."""
    server.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.signal(signal.SIGCONT)


def until(is_so: Callable[[], bool]) -> None:
    """Ask again until it is so."""
    end = monotonic() + PATIENCE_S
    while not is_so():
        assert monotonic() < end, "it never came to be so"


def under_way(client: WorkerClient) -> int:
    """Restores that the worker has under way."""
    return sum(each.restore_count for each in client.stats().attachments)


class Later:
    """A restore in a thread of its own: what it gave, or raised."""

    def __init__(self, restore: Callable[[], worker_pb2.RestoreResult]) -> None:
        self._restore = restore
        self._result: worker_pb2.RestoreResult | None = None
        self._error: CacheError | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> worker_pb2.RestoreResult:
        """Wait for it. Raises what it raised."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._restore()
        except CacheError as error:
            self._error = error
