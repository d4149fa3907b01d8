"""A store that stands still, dies or comes back under a restore.

The reply is right, and what follows is a miss or a hit.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from server_process import ServerProcess
from sessions import Conversation

import ctxcache
from ctxcache.client import Client
from ctxcache.client.arena import Bytes
from ctxcache.client.routes import Access
from ctxcache.errors import CacheError, Unavailable
from ctxcache.format.streams import Stream
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.pipeline.pipeline import PipelineSettings
from gpu_worker.pipeline.sources import LeasedSource
from gpu_worker.planning.plan import RestorePlan

REPLY_TOKENS = 3
TURNS = [list(range(5, 75)), [3, 4, 5] * 9, [9, 8, 7, 60] * 5]
SAID = Conversation("failing-stores", TURNS, REPLY_TOKENS)
SMALL = PipelineSettings(slot_bytes=8192, slot_count=2, batch_tokens=16, is_poisoned=True)
MISSES = ("", "RESTORE_TOO_LATE", "UNAVAILABLE", "LEASE_NOT_FOUND", "DEADLINE_EXCEEDED")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A store that these tests stop, kill, and start again."""
    torch.set_num_threads(1)
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as running:
        yield running


def _turn(engine: TransformersEngine, session_id: str, index: int) -> Turn:
    return engine.turn(
        session_id, TURNS[index], max_new_tokens=REPLY_TOKENS, history=SAID.history(index), eos_token_ids=()
    )


def _wait_until_back(client: Client) -> None:
    """A connection that broke is made again after a while; until then calls are refused at once."""
    end_s = time.monotonic() + 30
    while time.monotonic() < end_s:
        with suppress(Unavailable):
            client.admin.stats()
            return
        threading.Event().wait(0.02)
    pytest.fail("the store did not come back")


def _at(piece: int, action: Callable[[], object]) -> Callable[[LeasedSource, Stream, int, int, Bytes], None]:
    """Reading that does something first at one piece, counted from 0."""
    left, fill = [piece], LeasedSource.fill

    def acting(source: LeasedSource, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        left[0] -= 1
        if left[0] == -1:
            action()
        fill(source, stream, begin, end, into)

    return acting


def _engine(client: Client, *, restore_timeout_s: float = 20.0) -> TransformersEngine:
    plan = RestorePlan.parse("hidden:0,kv:1-2")
    return TransformersEngine(
        SAID.adapter, client, SAID.spec, plan, restore_timeout_s=restore_timeout_s, settings=SMALL
    )


@pytest.mark.parametrize("access", ["local", "remote"])
@pytest.mark.parametrize("piece", [0, 9])
def test_a_store_that_stands_still_under_a_restore_costs_its_deadline(
    server: ServerProcess, session_id: str, monkeypatch: pytest.MonkeyPatch, access: Access, piece: int
) -> None:
    """The turn ends while the store still stands, from what was read by then or from nothing.

    It is saved when the store goes on.
    """
    with (
        ctxcache.connect(server.target, access=access) as client,
        _engine(client, restore_timeout_s=0.5) as engine,
    ):
        _turn(engine, session_id, 0)
        assert engine.wait(session_id) is None
        with monkeypatch.context() as patch:
            patch.setattr(LeasedSource, "fill", _at(piece, lambda: os.kill(server.pid, signal.SIGSTOP)))
            try:
                turn = _turn(engine, session_id, 1)
            finally:
                os.kill(server.pid, signal.SIGCONT)
        failure = engine.wait(session_id)
        # A store that answers may take longer than that on a busy machine.
        with _engine(client) as patient:
            last = _turn(patient, session_id, 2)

    assert [turn.token_ids, last.token_ids] == SAID.replies[1:]
    assert turn.miss_reason in MISSES
    assert failure is None
    assert (last.miss_reason, last.reused_token_count) == ("", len(SAID.history(2)))


@pytest.mark.parametrize("access", ["local", "remote"])
@pytest.mark.parametrize("piece", [0, 9])
def test_a_store_that_dies_under_a_restore_and_comes_back(
    server: ServerProcess, session_id: str, monkeypatch: pytest.MonkeyPatch, access: Access, piece: int
) -> None:
    """The reply is right without it; a store that was started again has what it had, and sessions go on."""
    with ctxcache.connect(server.target, access=access) as client, _engine(client) as engine:
        _turn(engine, session_id, 0)
        assert engine.wait(session_id) is None
        with monkeypatch.context() as patch:
            patch.setattr(LeasedSource, "fill", _at(piece, server.kill9))
            turn = _turn(engine, session_id, 1)
        failure = engine.wait(session_id)
        server.start()
        _wait_until_back(client)
        last = _turn(engine, session_id, 2)
        end = engine.wait(session_id)
        held = client.sessions.get(f"sessions/{session_id}").token_count

    assert [turn.token_ids, last.token_ids] == SAID.replies[1:]
    assert turn.miss_reason in MISSES
    assert isinstance(failure, CacheError)
    assert last.reused_token_count == len(SAID.history(1))
    assert (end, held) == (None, len(SAID.history(3)))


@pytest.mark.parametrize("access", ["local", "remote"])
def test_a_store_that_is_started_again_between_turns_is_a_hit(
    server: ServerProcess, session_id: str, access: Access
) -> None:
    """Durable rows come back through the same client."""
    with ctxcache.connect(server.target, access=access) as client, _engine(client) as engine:
        first = _turn(engine, session_id, 0)
        assert engine.wait(session_id) is None
        server.kill9()
        server.start()
        _wait_until_back(client)
        second = _turn(engine, session_id, 1)

    assert [first.token_ids, second.token_ids] == SAID.replies[:2]
    assert (second.miss_reason, second.reused_token_count) == ("", len(SAID.history(1)))
