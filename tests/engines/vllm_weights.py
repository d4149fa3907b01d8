"""Weights changed in place in a real vLLM: nothing of the old ones is restored, nothing wrong is left behind.

Run by `make engines`. Two models have one configuration and other weights. An engine that began with the
files of one computes by those of the other, as reinforcement learning has it. Each reply is compared with
that of an engine that has the same weights and no store; then a healthy engine on the old files is asked.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxcache
from lab.engines.families import SHAPE
from lab.engines.vllm_process import Reply, VllmEngine
from tests.server_process import ServerProcess

BLOCK_TOKENS = 32
COUNT = 24
QUESTION = 20
NAMES = ("agent 7", "rollout", "x")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files that engines begin with, and those whose weights they get."""
    place = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("old", "new")):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(place / name)
    return {name: place / name for name in ("old", "new")}


@pytest.fixture(scope="module")
def plain(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, VllmEngine]]:
    """Engines that have either weights, and no store."""
    place = tmp_path_factory.mktemp("plain")
    with (
        VllmEngine(models["old"], None, place / "old") as old,
        VllmEngine(models["new"], None, place / "new") as new,
    ):
        yield {"old": old, "new": new}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store of the test's own."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


@pytest.fixture(params=["blocks", "kv", "hidden", "offloading"])
def kind(request: pytest.FixtureRequest) -> str:
    """What is saved: by which connector, and which state."""
    return str(request.param)


def engine_of(kind: str, model: Path, store: ServerProcess, log: Path, **options: Any) -> VllmEngine:
    """An engine on that store."""
    extra = options.pop("extra", {})
    if kind != "offloading":
        return VllmEngine(model, store.target, log, extra={"state": kind} | extra, **options)
    transfer = {
        "kv_connector": "CtxcacheOffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOnCpu",
            "spec_module_path": "lab.engines.offload_on_cpu",
            "cpu_bytes_to_use": 1 << 24,
            "target": store.target,
        }
        | extra,
    }
    options = {"enable_prefix_caching": True, "num_gpu_blocks_override": 48} | options
    return VllmEngine(model, None, log, kv_transfer_config=transfer, **options)


# -- called in the engine's process ---------------------------------------------------------------------


def reload(llm: Any, path: str) -> None:
    """Give the engine other weights, as a trainer does, and say nothing."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})


def reset(llm: Any) -> bool:
    """Say that what was computed is of no use any more."""
    return bool(llm.reset_prefix_cache(reset_connector=True))


# -- what users do --------------------------------------------------------------------------------------


def opening(number: int) -> list[int]:
    """The first prompt of a conversation: another one for each."""
    return [(11 * number + 5 * i * i) % 500 + 3 for i in range(161)]


def after(prompt: Sequence[int], reply: Reply, number: int) -> list[int]:
    """The prompt of the next turn."""
    return [*prompt, *reply.token_ids, *((7 * number + 3 * i) % 500 + 3 for i in range(QUESTION))]


def wrong_count(engine: VllmEngine, right: VllmEngine, prompts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Of these prompts asked for, how many have a wrong reply, and how many tokens were not computed."""
    wrong = cached = 0
    for name, prompt in zip(NAMES, prompts, strict=True):
        reply = engine.turn(prompt, name, COUNT)
        wrong += reply.token_ids != right.turn(prompt, None, COUNT).token_ids
        cached += reply.cached_count
    return wrong, cached


def settled(store: ServerProcess) -> int:
    """Wait until the store gets nothing more; tokens and blocks that it holds."""
    with ctxcache.connect(store.target) as cache:
        before, since_s = -1, time.monotonic()
        deadline_s = since_s + 30
        while time.monotonic() < deadline_s:
            stats = cache.admin.stats()
            now = stats.segment_count + sum(one.durable_token_count for one in cache.sessions.list())
            if now != before:
                before, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > 1:
                return now
            time.sleep(0.05)
    raise TimeoutError("the store gets more and more")


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "untold"])
def test_other_weights_in_place_are_another_model(
    kind: str,
    is_told: bool,  # noqa: FBT001  a parameter of the test
    models: dict[str, Path],
    plain: dict[str, VllmEngine],
    store: ServerProcess,
    tmp_path: Path,
) -> None:
    """Nothing of the old weights is restored, and nothing of the new ones is found under the old name."""
    prompts = [opening(number) for number in range(3)]
    with engine_of(kind, models["old"], store, tmp_path / "log") as engine:
        for number, name in enumerate(NAMES):
            reply = engine.turn(prompts[number], name, COUNT)
            prompts[number] = after(prompts[number], reply, number)
        assert settled(store)
        engine.call(reload, str(models["new"]))
        if is_told:
            assert engine.call(reset)
        elif kind == "offloading":
            # vLLM's own caches, of blocks and of chunks, are not ours to empty.
            pass
        assert wrong_count(engine, plain["new"], prompts) == (0, 0), engine.log
        settled(store)
        others = [opening(10 + number) for number in range(3)]
        assert wrong_count(engine, plain["new"], others) == (0, 0), engine.log
        settled(store)
        wrong, cached = wrong_count(engine, plain["new"], prompts)
        assert wrong == 0
        assert (cached > 0) == is_told
    with engine_of(kind, models["old"], store, tmp_path / "healthy") as engine:
        wrong, cached = wrong_count(engine, plain["old"], prompts)
        assert wrong == 0
        assert cached > 0
        assert wrong_count(engine, plain["old"], others) == (0, 0)
