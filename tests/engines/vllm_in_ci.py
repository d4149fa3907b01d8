"""The part of the vLLM tests that fits into CI: one small model, one engine, one store that has to bear much.

Run by `make engines-ci`. Each reply is compared with one that the same engine computes from nothing: nothing
is found under a salt that no request had before. Tests run in their order, each on the store as the one
before it left it.
"""

import itertools
import signal
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import ctxcache.engines.vllm
from gpu_worker.engines.vllm.plugin import CONNECTORS
from lab.engines.families import SHAPE
from lab.engines.vllm_process import Reply, VllmEngine
from tests.engines.engine_names import check_names
from tests.server_process import ServerProcess

BLOCK_TOKENS = 32
COUNT = 24
QUESTION = 20
_salts = itertools.count()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The store of all tests."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def engine(store: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine whose own cache has room for three conversations."""
    place = tmp_path_factory.mktemp("engine")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(place / "tiny")
    options: dict[str, Any] = {
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 20,
        "max_model_len": 512,
    }
    with VllmEngine(place / "tiny", store.target, place / "log", **options) as running:
        yield running


def opening(number: int) -> list[int]:
    """The first prompt of a conversation: another one for each."""
    return [(11 * number + 5 * i * i) % 500 + 3 for i in range(97)]


def turn(engine: VllmEngine, prompt: Sequence[int], session: str | None) -> Reply:
    """One turn, compared with the reply that is computed."""
    reply = engine.turn(prompt, session, COUNT)
    request = {"prompt": prompt, "session": None, "count": COUNT, "salt": f"nobody's {next(_salts)}"}
    (computed,) = engine.ask(request)
    assert computed.cached_count == 0
    assert reply.token_ids == computed.token_ids
    assert reply.finish_reason == "length"
    return reply


def after(prompt: Sequence[int], reply: Reply, number: int) -> list[int]:
    """The prompt of the next turn."""
    return [*prompt, *reply.token_ids, *((7 * number + 3 * i) % 500 + 3 for i in range(QUESTION))]


def push_out(engine: VllmEngine) -> None:
    """Fill the engine's own cache with what nobody asks for again."""
    for _ in range(2):
        prompt = [(next(_salts) + 3 * i) % 500 + 3 for i in range(400)]
        engine.ask({"prompt": prompt, "session": None, "count": 1, "salt": f"nobody's {next(_salts)}"})


def restored(engine: VllmEngine, prompt: Sequence[int], session: str | None) -> Reply:
    """A turn whose prompt the engine has no block of, and which the store gives back but for its question."""
    push_out(engine)
    reply = turn(engine, prompt, session)
    assert reply.cached_count >= len(prompt) - QUESTION - 1 - (BLOCK_TOKENS if session else 64), engine.log
    return reply


def until_restored(engine: VllmEngine, prompt: Sequence[int], session: str) -> None:
    """Turns, each compared, until the store is used again."""
    deadline_s = time.monotonic() + 30
    while True:
        push_out(engine)
        if turn(engine, prompt, session).cached_count:
            return
        assert time.monotonic() < deadline_s, engine.log
        time.sleep(0.1)


def test_the_names_that_users_import_are_the_connectors() -> None:
    """By vLLM's own factory too, where plugins are off."""
    check_names("vllm")
    for name in CONNECTORS:
        named = KVTransferConfig(
            kv_connector=name, kv_role="kv_both", kv_connector_module_path="ctxcache.engines.vllm"
        )
        assert KVConnectorFactory.get_connector_class(named) is getattr(ctxcache.engines.vllm, name)
    (entry,) = [one for one in entry_points(group="vllm.general_plugins") if one.name == "ctxcache"]
    assert entry.load() is ctxcache.engines.vllm.register


@pytest.mark.parametrize("session", ["alice", None], ids=["session", "prefix"])
def test_a_conversation_that_the_engine_evicted_comes_from_the_store(
    engine: VllmEngine, session: str | None
) -> None:
    """By its session's name, and by its tokens."""
    prompt = opening(0 if session else 1)
    reply = turn(engine, prompt, session)
    assert reply.cached_count == 0
    for number in range(2):
        prompt = after(prompt, reply, number)
        reply = restored(engine, prompt, session)


def test_a_turn_that_is_asked_again_cuts_nothing(engine: VllmEngine) -> None:
    """A conversation begins again from its first turn: its later turns come from the store all the same.

    Where the user then says something else, it goes on from there, and that is what is kept.
    """
    prompts, replies = [opening(2)], []
    for number in range(3):
        replies.append(turn(engine, prompts[-1], "retry"))
        prompts.append(after(prompts[-1], replies[-1], number))
    for prompt, reply in zip(prompts, replies, strict=False):
        again = restored(engine, prompt, "retry")
        assert again.token_ids == reply.token_ids
        # All but the last token was there: nothing of it was saved by this one.
        assert again.cached_count == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    other = after(prompts[0], replies[0], 9)
    reply = restored(engine, other, "retry")
    following = after(other, reply, 10)
    restored(engine, following, "retry")


def test_conversations_that_evict_each_other_are_restored(engine: VllmEngine) -> None:
    """Five of them, in an engine that has room for three."""
    prompts = {f"user-{number}": opening(10 + number) for number in range(5)}
    for number in range(3):
        for name, prompt in prompts.items():
            reply = turn(engine, prompt, name)
            if number:
                assert reply.cached_count >= len(prompt) - QUESTION - BLOCK_TOKENS - 1, engine.log
            prompts[name] = after(prompt, reply, number)


def test_a_store_that_is_stopped_costs_a_computed_prompt(engine: VllmEngine, store: ServerProcess) -> None:
    """It answers nothing, and no request fails; when it goes on, so do its sessions."""
    prompt = opening(20)
    prompt = after(prompt, turn(engine, prompt, "bob"), 0)
    store.signal(signal.SIGSTOP)
    try:
        push_out(engine)
        reply = turn(engine, prompt, "bob")
    finally:
        store.signal(signal.SIGCONT)
    assert reply.cached_count == 0
    until_restored(engine, after(prompt, reply, 1), "bob")


def test_a_store_that_is_killed_costs_a_computed_prompt(engine: VllmEngine, store: ServerProcess) -> None:
    """Without it nothing is restored and nothing fails; started again it has what it had."""
    prompt = opening(21)
    prompt = after(prompt, turn(engine, prompt, "carol"), 0)
    prompt = after(prompt, restored(engine, prompt, "carol"), 1)
    store.kill9()
    push_out(engine)
    reply = turn(engine, prompt, "carol")
    assert reply.cached_count == 0
    store.start()
    until_restored(engine, after(prompt, reply, 2), "carol")
