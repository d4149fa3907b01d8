"""A conversation whose turns land at engines of two hosts, each beside a store of its own.

Every reply is that of a conversation that was never dropped, whatever moved, died or was written meanwhile.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from server_process import ServerProcess, write_secret
from sessions import Conversation

import ctxcache
from ctxcache.client import Client, Durability
from ctxcache.client.routes import Access
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.planning.plan import RestorePlan

REPLY_TOKENS = 3
TURNS = [list(range(5, 75)), [3, 4, 5] * 9, [9, 8, 7, 60] * 5, [11] * 12]
SAID = Conversation("fleet-turns", TURNS, REPLY_TOKENS)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two stores of one fleet."""
    directory = tmp_path_factory.mktemp("fleet")
    secret = directory / "secret"
    write_secret(secret, "a secret of this fleet of stores")
    options = (
        *("--fleet-bucket", f"file://{directory}/bucket", "--fleet-secret-file", str(secret)),
        *("--fleet-beat-s", "0.5"),
    )
    with ExitStack() as held:
        yield [held.enter_context(ServerProcess(directory / name, *options)) for name in ("a", "b")]


@pytest.fixture(params=["local", "remote"])
def clients(servers: list[ServerProcess], request: pytest.FixtureRequest) -> Iterator[list[Client]]:
    """A client of each, over shared memory or over TCP."""
    access: Access = request.param
    with ExitStack() as held:
        yield [
            held.enter_context(
                ctxcache.connect(server.unix_target if access == "local" else server.target, access=access)
            )
            for server in servers
        ]


def _engine(client: Client) -> TransformersEngine:
    return TransformersEngine(SAID.adapter, client, SAID.spec, RestorePlan.parse("hidden:0,kv:1-2"))


def _turn(engine: TransformersEngine, session_id: str, index: int) -> int:
    """A turn, whose reply is compared and whose rows are saved; how many tokens it found."""
    turn = engine.turn(
        session_id, TURNS[index], max_new_tokens=REPLY_TOKENS, history=SAID.history(index), eos_token_ids=()
    )
    assert turn.token_ids == SAID.replies[index]
    engine.wait(session_id)  # saving goes on behind the reply: a turn elsewhere finds what is saved by then
    return turn.reused_token_count


def _await_heads(client: Client) -> None:
    """Wait until the bucket knows of every session of a store."""
    deadline = time.monotonic() + 20
    while client.admin.fleet().private_session_count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_turn_finds_what_the_last_one_saved_elsewhere(clients: list[Client], session_id: str) -> None:
    """Hidden states, K/V and token ids come from the other host; nothing is computed twice."""
    with _engine(clients[0]) as first, _engine(clients[1]) as second:
        found = [_turn(first, session_id, 0)]
        _await_heads(clients[0])
        found += [_turn((first, second)[index % 2], session_id, index) for index in range(1, len(TURNS))]
    assert found == [0, *(len(SAID.history(index)) for index in range(1, len(TURNS)))]


def test_a_session_that_is_written_elsewhere_is_computed_and_not_saved(
    servers: list[ServerProcess], clients: list[Client], session_id: str
) -> None:
    """The reply is right, and the other host's session is as it was."""
    with (
        ctxcache.connect(servers[0].unix_target) as writing,
        _engine(clients[0]) as first,
        _engine(clients[1]) as second,
    ):
        _turn(first, session_id, 0)
        _await_heads(writing)
        handle = writing.sessions.open(f"sessions/{session_id}", writing.models.register(SAID.spec))
        before = handle.refresh()
        with handle.writer(8):
            assert _turn(second, session_id, 1) == 0
        assert handle.refresh().generation == before.generation


def test_a_store_that_is_gone_costs_nothing_where_the_bucket_has_it(
    servers: list[ServerProcess], session_id: str
) -> None:
    """Hidden states, K/V and token ids come out of the bucket, and the reply is the same."""
    with ctxcache.connect(servers[0].target) as one, ctxcache.connect(servers[1].target) as other:
        with TransformersEngine(
            SAID.adapter, one, SAID.spec, RestorePlan.parse("hidden:0,kv:1-2"), durability=Durability.SHARED
        ) as first:
            _turn(first, session_id, 0)
        servers[0].kill9()
        with _engine(other) as second:
            assert _turn(second, session_id, 1) == len(SAID.history(1))
    servers[0].start()


def test_a_store_that_is_gone_costs_a_prefill(servers: list[ServerProcess], session_id: str) -> None:
    """No turn waits for it, and the conversation goes on at the other host."""
    with ctxcache.connect(servers[0].target) as one, ctxcache.connect(servers[1].target) as other:
        with _engine(one) as first:
            _turn(first, session_id, 0)
        servers[0].kill9()
        with _engine(other) as second:
            begun = time.monotonic()
            assert _turn(second, session_id, 1) == 0
            assert time.monotonic() - begun < 10
            assert _turn(second, session_id, 2) == len(SAID.history(2))
    servers[0].start()
    with ctxcache.connect(servers[0].target) as one, _engine(one) as first:
        assert _turn(first, session_id, 3) == len(SAID.history(3))
