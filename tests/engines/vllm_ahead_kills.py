"""Kills, stops, full stores and returning users while vLLM computes an edited conversation ahead.

Run by `make engines`. Whatever happens in a pass, every reply is that of a server that has nothing of the
conversation, and the conversation's session is a beginning of the one rendering or of the other.
"""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ctxcache
from lab.engines.vllm_server import VllmServer
from tests.engines.vllm_ahead import (
    chain,
    chat,
    expected,
    passes,
    rendered,
    save_model,
    served,
    wait_until_used,
)
from tests.server_process import ServerProcess

CONTEXT = 8192
RESULT_TOKENS = 5000
"""Of the tool, behind the thought: a pass takes a while."""
LONG = ("--max-model-len", str(CONTEXT), "--max-num-batched-tokens", "512")
"""In steps of 512 tokens, so that a pass has many moments to be stopped at."""
DELAYS_S = (0.0, 0.1, 0.3, 0.8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of a long context."""
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_model(directory, CONTEXT)
    return directory


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A store that a test may do anything to."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


def _following(messages: list[dict[str, Any]], reply: str) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "t11 t12"}]


def _session(store: ServerProcess, name: str) -> int:
    """How many tokens the conversation's session has; 0 where it is not there."""
    with ctxcache.connect(store.target) as client:
        found = {session.name: session.token_count for session in client.sessions.list()}
    return found.get(f"sessions/{name}", 0)


@pytest.mark.parametrize("delay_s", DELAYS_S[1::2])
def test_an_engine_that_is_killed_in_a_pass(
    model: Path, store: ServerProcess, tmp_path: Path, delay_s: float
) -> None:
    """Another one goes on with what the store has."""
    name, messages = f"killed-{delay_s}", chain(500, RESULT_TOKENS)
    with served(model, tmp_path / "log", store, *LONG) as server:
        wait_until_used(server)
        reply = chat(server, messages, session_id=name)["text"]
        time.sleep(delay_s)
        server._kill()
    with served(model, tmp_path / "log", store, *LONG) as server:
        wait_until_used(server, 2)
        following = _following(messages, reply)
        answer = chat(server, following, session_id=name)
        assert answer["text"] == expected(server, following)
        # The question, at least, is of both renderings.
        assert answer["cached"] >= 32
        assert _session(store, name) <= len(rendered(server, following)) + 64


@pytest.fixture(scope="module")
def server(
    model: Path, store: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmServer]:
    """A server that outlives its store."""
    log = tmp_path_factory.mktemp("server") / "log"
    with served(model, log, store, *LONG, timeout_s=2) as running:
        wait_until_used(running)
        yield running


@pytest.mark.parametrize("delay_s", DELAYS_S)
@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_a_store_that_goes_in_a_pass(
    server: VllmServer, store: ServerProcess, what: str, delay_s: float
) -> None:
    """Replies go on without it, and with it when it is back."""
    name, messages = f"store-{what}-{delay_s}", chain(600 + len(what), RESULT_TOKENS)
    used = server.log.count("the context store is used")
    reply = chat(server, messages, session_id=name)["text"]
    time.sleep(delay_s)
    if what == "killed":
        store.kill9()
    else:
        store.signal(signal.SIGSTOP)
    try:
        following = _following(messages, reply)
        answer = chat(server, following, session_id=name)["text"]
    finally:
        if what == "killed":
            store.start()
        else:
            store.signal(signal.SIGCONT)
    if what == "killed":
        wait_until_used(server, used + 1)
    assert answer == expected(server, following)
    then = _following(following, answer)
    assert chat(server, then, session_id=name)["text"] == expected(server, then)


def test_a_user_who_returns_while_it_runs(server: VllmServer) -> None:
    """The pass is aborted, the reply is right, and what the pass had computed is not computed again."""
    messages = chain(700, RESULT_TOKENS)
    for number, delay_s in enumerate((0.0, 0.2, 0.5)):
        name = f"returns-{number}"
        reply = chat(server, messages, session_id=name)["text"]
        time.sleep(delay_s)
        following = _following(messages, reply)
        answer = chat(server, following, session_id=name)
        assert answer["text"] == expected(server, following)


def test_two_at_once(server: VllmServer) -> None:
    """Two users in threads, each with edits behind each reply; every reply is right."""
    wrong: list[BaseException] = []

    def user(number: int) -> None:
        try:
            messages = chain(800 + 10 * number, 600)
            for _ in range(3):
                reply = chat(server, messages, session_id=f"both-{number}")["text"]
                right = expected(server, messages)
                assert reply == right
                messages = [*_following(messages, reply)[:-1], *chain(850 + number, 300)]
        except BaseException as error:
            wrong.append(error)
            raise

    threads = [threading.Thread(target=user, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert passes(server, "broken") == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--arena-size-bytes", "16MiB", "--ssd-size-bytes", "16MiB"),
        ("--max-sessions", "2"),
    ],
    ids=["full", "no session more"],
)
def test_a_store_without_room(model: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Passes end, or find less; no reply is wrong, and none fails."""
    with (
        ServerProcess(tmp_path / "data", *options) as store,
        served(model, tmp_path / "log", store, *LONG) as server,
    ):
        wait_until_used(server)
        for number in range(4):
            messages = chain(900 + number, 3000)
            reply = chat(server, messages, session_id=f"full-{number}")["text"]
            assert reply == expected(server, messages)
            time.sleep(0.5)
            following = _following(messages, reply)
            assert chat(server, following, session_id=f"full-{number}")["text"] == expected(server, following)
        assert passes(server, "broken") == 0
