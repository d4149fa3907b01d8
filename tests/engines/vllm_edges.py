"""Conversations that were damaged or emptied, that have odd names, and engines that only save or only load.

Run by `make engines`. Each reply is compared with that of an engine that has no store.
"""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

import ctxcache
from ctxcache.client import Client
from gpu_worker.engines.names import session_id
from lab.engines.vllm_process import VllmEngine
from tests.engines.vllm_matrix import damage
from tests.engines.vllm_sessions import (
    COUNT,
    QUESTION,
    asked,
    compare,
    converse,
    opening,
    wait_for,
    wait_for_all,
    whole_blocks,
)
from tests.engines.vllm_small import model, plain, store
from tests.server_process import ServerProcess

__all__ = ["model", "plain", "store"]

NAMES = (
    "alice@example.com",
    "my first chat",
    "/home/alice/notes.md",
    "_",
    "x" * 129,
    "x" * 5000,
    "会話 🙂",
    "Ame\u0301lie",
    "Am\u00e9lie",
    "alice.rank1",
    session_id("alice@example.com"),
)
"""What people use, and what would be somebody else's."""


def three_turns_more(engine: VllmEngine, plain: VllmEngine, session: str, prompt: list[int]) -> list[int]:
    """Turns of a conversation that lost its state, compared; the third one is restored from the second."""
    saved_count = 0
    for turn in range(3):
        reply = engine.turn(prompt, session, COUNT)
        compare(reply, prompt, plain)
        if turn == 2:
            assert reply.cached_count == saved_count, engine.log
        saved_count = whole_blocks(len(prompt) + COUNT)
        prompt = [*prompt, *reply.token_ids, *asked(turn)]
    return prompt


def until_used(engine: VllmEngine) -> None:
    """Wait until the engine uses a store that has restarted: an engine that met its absence rests first."""
    deadline_s = time.monotonic() + 60
    while not engine.turn(opening(5), "another", COUNT).cached_count:
        assert time.monotonic() < deadline_s, engine.log


@pytest.mark.parametrize("state", ["blocks", "kv", "hidden"])
def test_a_session_that_lost_its_state_is_saved_again(
    state: str, store: ServerProcess, plain: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """Damaged, or cut to nothing by somebody else: the second turn behind that is saved, the third restored.

    Others have the same first tokens: such a session does not begin with theirs, and its turns are none the
    worse for it. What went wrong is said once, and counted each time.
    """
    users = [f"user-{number}" for number in range(4)]
    with VllmEngine(model, store.target, tmp_path / "log", extra={"state": state}) as engine:
        prompts = {user: converse(engine, plain, user, opening(4), range(2)) for user in users}
        with ctxcache.connect(store.target) as cache:
            wait_for_all(cache)
            for user in users[:2]:
                cache.sessions.open(f"sessions/{user}").keep_first(0)
        for user in users[:2]:
            prompts[user] = three_turns_more(engine, plain, user, prompts[user])
        with ctxcache.connect(store.target) as cache:
            wait_for_all(cache)
        store.terminate()
        damage(store)
        store.start()
        until_used(engine)
        for user in users:
            prompts[user] = three_turns_more(engine, plain, user, prompts[user])
        lines = [line for line in engine.log.splitlines() if "conversation 'sessions/user-3' is " in line]
        assert len(lines) == len({line.partition(" is ")[2].partition(":")[0] for line in lines}) <= 3, lines
        assert sum(engine.metrics("vllm:ctxcache_misses").values()) >= 1


def test_names_of_all_sorts_are_conversations_of_their_own(
    store: ServerProcess, plain: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """Each is restored from what it has itself, by a new engine too."""
    prompts = {name: opening(30 + number) for number, name in enumerate(NAMES)}
    with VllmEngine(model, store.target, tmp_path / "log") as engine:
        prompts = {name: converse(engine, plain, name, prompt, [0]) for name, prompt in prompts.items()}
    with VllmEngine(model, store.target, tmp_path / "log") as engine:
        for name, prompt in prompts.items():
            reply = engine.turn(prompt, name, COUNT)
            compare(reply, prompt, plain)
            assert reply.cached_count == whole_blocks(len(prompt) - QUESTION)
    with ctxcache.connect(store.target) as cache:
        assert {one.name for one in cache.sessions.list()} == {
            f"sessions/{session_id(name)}" for name in NAMES
        }


def test_conversations_have_labels(
    store: ServerProcess, model: Path, tmp_path: Path, plain: VllmEngine
) -> None:
    """Of the setting and of the request, which wins; with labels that are none a request is not saved."""
    say: dict[str, Any] = {"prompt": opening(70), "count": COUNT}
    asked_for = [
        say | {"session": "of-setting"},
        say | {"session": "of-both", "says": {"labels": {"user": 4711, "app": "mail"}}},
        say | {"session": None, "prompt": opening(71), "says": {"labels": {"user": "2"}}},
        *(
            say | {"session": f"bad-{number}", "says": {"labels": labels}}
            for number, labels in enumerate((["user"], {"user": "a b"}, {"user": None}, "user=1"))
        ),
    ]
    with VllmEngine(
        model, store.target, tmp_path / "log", extra={"labels": {"app": "chat", "team": "a"}}
    ) as engine:
        for request in asked_for:
            compare(engine.ask(request)[0], request["prompt"], plain)
        assert engine.log.count("a request goes without the store") == 4
        assert "does not match" in engine.log
    with ctxcache.connect(store.target) as cache:
        labels = {one.name.removeprefix("sessions/"): dict(one.labels) for one in cache.sessions.list()}
    assert labels.pop("of-setting") == {"app": "chat", "team": "a"}
    assert labels.pop("of-both") == {"app": "mail", "team": "a", "user": "4711"}
    assert list(labels.values()) == [{"app": "chat", "team": "a", "user": "2"}]


def test_two_ranks_have_parts_of_conversations_of_all_names(
    store: ServerProcess, plain: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """A name that is another one's rank's is none of it."""
    options: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    names = ["alice", "alice.rank1", "x" * 128, "alice@example.com"]
    prompts = [opening(50 + number) for number in range(len(names))]
    for expected in (False, True):
        with VllmEngine(model, store.target, tmp_path / "log", **options) as engine:
            for number, name in enumerate(names):
                reply = engine.turn(prompts[number], name, COUNT)
                compare(reply, prompts[number], plain)
                assert (reply.cached_count > 0) is expected
    with ctxcache.connect(store.target) as cache:
        assert len([*cache.sessions.list()]) == 2 * len(names)


def of_role(model: Path, store: ServerProcess, role: str, log: Path, state: str) -> VllmEngine:
    """An engine that schedules a step while another one runs, as vLLM does by itself where it can."""
    transfer = {
        "kv_connector": "CtxcacheConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"target": store.target, "state": state, "model_id": "tiny"},
    }
    return VllmEngine(model, None, log, kv_transfer_config=transfer, async_scheduling=True)


@pytest.mark.parametrize("state", ["blocks", "kv"])
def test_a_producer_saves_and_a_consumer_loads(
    state: str, store: ServerProcess, plain: VllmEngine, model: Path, tmp_path: Path
) -> None:
    """And neither does the other: with names and without, under asynchronous scheduling."""
    sessions = ["alice", "bob@example.com", None]
    prompts = [opening(60 + number) for number in range(3)]

    def turn(engine: VllmEngine) -> list[int]:
        found = []
        requests = [
            {"prompt": p, "session": s, "count": COUNT} for p, s in zip(prompts, sessions, strict=True)
        ]
        for number, reply in enumerate(engine.ask(*requests)):
            compare(reply, prompts[number], plain)
            found.append(reply.cached_count)
            prompts[number] = [*prompts[number], *reply.token_ids, *asked(number)]
        return found

    def counts(cache: Client) -> dict[str, int]:
        return {one.name: one.token_count for one in cache.sessions.list() if one.token_count}

    with ctxcache.connect(store.target) as cache:
        with of_role(model, store, "kv_producer", tmp_path / "log", state) as engine:
            # Asked again from its first turn, and going on: nothing of it is loaded.
            assert [turn(engine) for _ in range(2)] == [[0] * 3] * 2
            wait_for(cache, "sessions/alice", whole_blocks(len(prompts[0]) - QUESTION))
        saved = counts(cache)
        assert len(saved) == 4
        with of_role(model, store, "kv_consumer", tmp_path / "log", state) as engine:
            lengths = [len(prompt) - QUESTION for prompt in prompts]
            found = turn(engine)
            assert all(0 < count <= length for count, length in zip(found, lengths, strict=True))
            # What the first turn computed was saved nowhere.
            assert turn(engine) == found
        after = counts(cache)
        assert {name: after[name] for name in saved} == saved
        # Sessions that stand in for those of others have no name of a caller's, and go soon.
        stand_ins = [one for one in cache.sessions.list() if one.name not in saved]
        assert not {one.name for one in stand_ins} & {
            "sessions/alice",
            f"sessions/{session_id('bob@example.com')}",
        }
        assert all(one.ttl is not None and one.ttl.total_seconds() <= 60 for one in stand_ins)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"model_id": "my/model"}, "kv_connector_extra_config.model_id: String should match pattern"),
        ({"model_id": "my model"}, "kv_connector_extra_config.model_id: String should match pattern"),
        ({"model_id": "x" * 128}, "kv_connector_extra_config.model_id: 'xxx"),
        ({"labels": {"user": "a b"}}, "config.labels: Value error, the value 'a b' of user"),
        ({"target": "http://127.0.0.1:7420"}, "config.target: 'http://127.0.0.1:7420' begins with"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_settings_that_no_store_takes_are_refused(
    extra: dict[str, str], told: str, model: Path, store: ServerProcess, tmp_path: Path
) -> None:
    """At the start of the engine, by name, and not in the background for ever."""
    engine = VllmEngine(model, store.target, tmp_path / "log", extra=extra)
    with pytest.raises(RuntimeError, match="vLLM ended"), engine:
        pass
    assert told in engine.log


def test_a_directory_whose_name_is_no_id_is_refused(
    model: Path, store: ServerProcess, tmp_path: Path
) -> None:
    """With the setting that says another name."""
    (tmp_path / "my model").symlink_to(model)
    place = tmp_path / "my model 2"
    place.mkdir()
    for file in model.iterdir():
        (place / file.name).symlink_to(file)
    engine = VllmEngine(place, None, tmp_path / "log", kv_transfer_config=_session_at(store))
    with pytest.raises(RuntimeError, match="vLLM ended"), engine:
        pass
    assert "kv_connector_extra_config.model_id: 'my model 2' does not match" in engine.log


def _session_at(store: ServerProcess) -> dict[str, Any]:
    return {
        "kv_connector": "CtxcacheConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"target": store.target},
    }
