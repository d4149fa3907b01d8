"""What each version of vLLM must do with a store: one test for each column of the table in docs/vllm.md.

Run by `make engines`, and of each version by `make engines-versions`, in an environment that has vLLM. Each
reply is compared with one that is computed. Tests run in their order, each on the store as the one before it
left it.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import ctxcache
from gpu_worker.engines.vllm.versions import has
from lab.engines.vllm_process import VllmEngine
from tests.engines.vllm_in_ci import (
    BLOCK_TOKENS,
    COUNT,
    QUESTION,
    after,
    engine,
    opening,
    push_out,
    restored,
    store,
    turn,
    until_restored,
)
from tests.engines.vllm_matrix import damage
from tests.engines.vllm_tier import offloading
from tests.engines.vllm_windows import MODELS
from tests.server_process import ServerProcess

__all__ = ["engine", "store"]

SETTLE_S = 30.0


@pytest.fixture(scope="module")
def model(engine: VllmEngine) -> Path:
    """The files of the engine's model."""
    return Path(engine._arguments[0])


def saved_count(store: ServerProcess, name: str, least: int) -> int:
    """A session's tokens in the store, once they are so many."""
    end_s = time.monotonic() + SETTLE_S
    with ctxcache.connect(store.target) as cache:
        while True:
            count: int = cache.sessions.get(f"sessions/{name}").token_count
            if count >= least or time.monotonic() > end_s:
                return count
            time.sleep(0.05)


@pytest.mark.parametrize("session", ["alice", None], ids=["session", "prefix"])
def test_replies(engine: VllmEngine, store: ServerProcess, session: str | None) -> None:
    """A conversation that the engine evicted is saved, found and right, by its name and by its tokens."""
    prompt = opening(0 if session else 1)
    reply = turn(engine, prompt, session)
    assert reply.cached_count == 0
    for number in range(2):
        prompt = after(prompt, reply, number)
        reply = restored(engine, prompt, session)
    if session:
        whole = (len(prompt) + COUNT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert saved_count(store, session, whole) == whole


def test_hints(engine: VllmEngine) -> None:
    """They reach the store by every way that this version has."""
    prompt = opening(2)
    turn(engine, prompt, "hinted")
    action = {"action_id": "1", "action_type": "retain", "action_version": "1", "payload": {"ttl_s": 60.0}}
    hints = {"protocol_version": "1", "message_id": "m", "actions": [action]}
    ways: list[dict[str, Any]] = [
        {"says": {"kv_hints": hints}},
        *([{"hints": hints}] if has("hints") else []),
    ]
    for way in ways:
        engine.ask({"prompt": prompt, "session": "hinted", "count": 1, **way})
    end_s = time.monotonic() + SETTLE_S
    while engine.metrics("vllm:ctxcache_hints").get("retain/accepted", 0) != len(ways):
        assert time.monotonic() < end_s, engine.metrics("vllm:ctxcache_hints")
        engine.ask({"prompt": [5, 6, 7], "session": None, "count": 1})


def aborted(llm: Any, prompt: list[int], session: str, step_count: int) -> float:
    """Abort a request after so many steps; the part of the engine's blocks that is in use afterwards."""
    from vllm import SamplingParams  # noqa: PLC0415  in the engine's process

    said = {"kv_transfer_params": {"session_id": session}}
    words = SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False, extra_args=said)
    llm.llm_engine.add_request("gone", {"prompt_token_ids": prompt}, words)
    for _ in range(step_count):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(["gone"])
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    end_s = time.monotonic() + SETTLE_S
    while manager.usage and time.monotonic() < end_s:
        llm.llm_engine.step()
    return float(manager.usage)


def test_aborts(engine: VllmEngine) -> None:
    """Callers go away while rows are looked up, loaded and computed: no block is lost, turns are right."""
    prompt = opening(3)
    reply = turn(engine, prompt, "gone")
    prompt = after(prompt, reply, 0)
    for step_count in (0, 1, 2, 3, 6, 20):
        push_out(engine)
        assert engine.call(aborted, prompt, "gone", step_count) == 0
    until_restored(engine, prompt, "gone")


def test_bad_loads(engine: VllmEngine, store: ServerProcess) -> None:
    """Rows that SSD has changed fail their load, and are computed: the replies are right, then and later."""
    prompt = opening(4)
    prompt = after(prompt, turn(engine, prompt, "damaged"), 0)
    reply = restored(engine, prompt, "damaged")
    prompt = after(prompt, reply, 1)
    store.terminate()
    damage(store)
    store.start()
    end_s = time.monotonic() + SETTLE_S
    while "conversation 'sessions/damaged' is not restored" not in engine.log:
        assert time.monotonic() < end_s, engine.log
        push_out(engine)
        turn(engine, prompt, "damaged")
    until_restored(engine, prompt, "damaged")


@pytest.mark.parametrize("prompt_tokens", [97, 70])
def test_hand_over(
    engine: VllmEngine,
    store: ServerProcess,
    model: Path,
    tmp_path: Path,
    prompt_tokens: int,
) -> None:
    """One engine computes a prompt, and another goes on with all of it but the last token."""
    prompt = opening(5)[:prompt_tokens]
    # As long as the other engine's: blocks of another length are another model's.
    with VllmEngine(model, store.target, tmp_path / "log", max_model_len=512) as first:
        (said,) = first.ask(
            {"prompt": prompt, "session": f"p{prompt_tokens}", "count": 1, "says": {"do_remote_decode": True}}
        )
        assert said.says is not None
        assert said.says["do_remote_prefill"]
        says = {key: value for key, value in said.says.items() if key.startswith("ctxcache@")}
        (reply,) = engine.ask({"prompt": prompt, "session": None, "count": COUNT, "says": says})
        assert reply.cached_count == prompt_tokens - 1
        (computed,) = first.ask(
            {"prompt": prompt, "session": None, "count": COUNT, "salt": f"new {prompt_tokens}"}
        )
        assert computed.cached_count == 0
        assert reply.token_ids == computed.token_ids


def test_windows(store: ServerProcess, tmp_path: Path) -> None:
    """A model with windows returns; vLLM that cannot take back loads of two kinds of cache is refused."""
    torch.manual_seed(0)
    config, build, shape = MODELS["gemma2"]
    build(config(**shape)).save_pretrained(tmp_path / "gemma")
    if not has("transfer results"):
        refused = VllmEngine(tmp_path / "gemma", store.target, tmp_path / "refused")
        with pytest.raises(RuntimeError, match=r"take CtxcacheOffloadingConnector, or vLLM 0\.30"), refused:
            pass
        return
    with VllmEngine(tmp_path / "gemma", store.target, tmp_path / "log") as engine:
        prompt = [*opening(7), *opening(17)]
        reply = turn(engine, prompt, "windows")
        prompt = after(prompt, reply, 0)
        assert (
            turn(engine, prompt, "windows").cached_count
            == (len(prompt) - QUESTION - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        )


def test_offloading(store: ServerProcess, model: Path, tmp_path: Path) -> None:
    """What one engine offloaded another finds; a chunk that SSD has changed is computed."""
    prompts = [[*opening(6 + number), *opening(16 + number)] for number in range(3)]
    found = (len(prompts[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    with ctxcache.connect(store.target) as cache:
        before = cache.admin.stats().segment_count
        with offloading(model, store.target, tmp_path / "log") as first:
            replies = [first.turn(prompt, None, COUNT) for prompt in prompts]
            end_s = time.monotonic() + SETTLE_S
            while cache.admin.stats().segment_count < before + len(prompts) * found // BLOCK_TOKENS:
                assert time.monotonic() < end_s, first.log
                time.sleep(0.05)
    assert [reply.cached_count for reply in replies] == [0, 0, 0]
    with offloading(model, store.target, tmp_path / "log") as second:
        again = [second.turn(prompt, None, COUNT) for prompt in prompts[:2]]
        assert [reply.cached_count for reply in again] == [found, found]
        store.terminate()
        damage(store)
        store.start()
        again.append(second.turn(prompts[2], None, COUNT))
    assert [reply.token_ids for reply in again] == [reply.token_ids for reply in replies]
    assert again[2].cached_count < found
