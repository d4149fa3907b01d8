"""Weights changed in place in a real vLLM: nothing of the old ones is restored, nothing wrong is left behind.

Run by `make engines`. Two models have one configuration and other weights. An engine that began with the
files of one computes by those of the other, as reinforcement learning has it. Each reply is compared with
that of an engine that has the same weights and no store; then a healthy engine on the old files is asked.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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


def sleep(llm: Any, level: str, path: str) -> None:
    """Put the engine to sleep, and give it other weights before it wakes up."""
    llm.sleep(level=int(level))
    reload(llm, path)
    llm.wake_up()


def linked(llm: Any) -> None:
    """Wait until both sides of the connector can use the store again."""
    # Imported where vLLM is: this module is also imported where it must not print.
    from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

    for connector in (llm.llm_engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()):
        assert connector.wait_until_linked(30)


def name(llm: Any, version: str) -> None:
    """Say which version the weights are."""
    llm.update_weight_version(version)


def within(llm: Any, step_count: int, function: str, *arguments: str) -> None:
    """Call a function of these behind so many steps of the next request, between two passes."""
    engine, left = llm.llm_engine, [step_count]
    step = engine.step

    def stepping() -> Any:
        left[0] -= 1
        if not left[0]:
            globals()[function](llm, *arguments)
        return step()

    engine.step = stepping


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
    with ExitStack() as engines:
        engine = engines.enter_context(engine_of(kind, models["old"], store, tmp_path / "log"))
        for number, name in enumerate(NAMES):
            reply = engine.turn(prompts[number], name, COUNT)
            prompts[number] = after(prompts[number], reply, number)
        assert settled(store)
        if kind == "offloading" and not is_told:
            # vLLM's own caches, of blocks and of chunks, would give what the old weights computed.
            engines.close()
            engine = engines.enter_context(engine_of(kind, models["old"], store, tmp_path / "log"))
        engine.call(reload, str(models["new"]))
        if is_told:
            assert engine.call(reset)
        assert wrong_count(engine, plain["new"], prompts) == (0, 0), engine.log
        settled(store)
        others = [opening(10 + number) for number in range(3)]
        assert wrong_count(engine, plain["new"], others) == (0, 0), engine.log
        settled(store)
        wrong, cached = wrong_count(engine, plain["new"], prompts)
        assert wrong == 0
        # vLLM's own caches have what was computed meanwhile, behind whatever connector.
        assert (cached > 0) == (is_told or kind == "offloading")
    with engine_of(kind, models["old"], store, tmp_path / "healthy") as engine:
        wrong, cached = wrong_count(engine, plain["old"], prompts)
        assert wrong == 0
        assert cached > 0
        assert wrong_count(engine, plain["old"], others) == (0, 0)


# vLLM for CPUs gives no memory back, and does all else of a sleep: it pauses, and empties its caches.
@pytest.mark.parametrize("kind", ["blocks", "offloading"])
@pytest.mark.parametrize("level", ["1", "2"])
def test_what_wakes_up_with_other_weights_is_served_nothing_old(
    kind: str,
    level: str,
    models: dict[str, Path],
    plain: dict[str, VllmEngine],
    store: ServerProcess,
    tmp_path: Path,
) -> None:
    """Nor is what it saves from then on found by an engine on the old files."""
    prompts = [opening(80 + number) for number in range(3)]
    with engine_of(kind, models["old"], store, tmp_path / "log") as engine:
        assert wrong_count(engine, plain["old"], prompts) == (0, 0)
        assert settled(store)
        engine.call(sleep, level, str(models["new"]))
        until_named(engine)
        assert wrong_count(engine, plain["new"], prompts) == (0, 0), engine.log
        settled(store)
        wrong, cached = wrong_count(engine, plain["new"], prompts)
        assert wrong == 0
        assert cached > 0, engine.log
    with engine_of(kind, models["old"], store, tmp_path / "healthy") as engine:
        wrong, cached = wrong_count(engine, plain["old"], prompts)
        assert wrong == 0
        assert cached > 0


def conversed(engine: VllmEngine, right: VllmEngine, session: str, turn_count: int) -> tuple[list[int], int]:
    """Turns of a conversation, each reply compared: the next prompt, and tokens that were not computed."""
    prompt, cached = opening(40 + len(session)), 0
    for number in range(turn_count):
        reply = engine.turn(prompt, session, COUNT)
        assert reply.token_ids == right.turn(prompt, None, COUNT).token_ids
        cached += reply.cached_count
        prompt = after(prompt, reply, number)
    return prompt, cached


def until_named(engine: VllmEngine) -> None:
    """Let the worker hear which weights it has, by a step, and wait until what comes can be saved."""
    engine.turn(opening(99), "nobody", 1)
    engine.call(linked)


def asked(engine: VllmEngine, right: VllmEngine, prompt: Sequence[int], session: str) -> int:
    """A turn, its reply compared; tokens that were not computed."""
    reply = engine.turn(prompt, session, COUNT)
    assert reply.token_ids == right.turn(prompt, None, COUNT).token_ids, engine.log
    return reply.cached_count


@pytest.mark.parametrize("state", ["blocks", "kv"])
def test_engines_that_say_the_same_version_share(
    state: str,
    models: dict[str, Path],
    plain: dict[str, VllmEngine],
    store: ServerProcess,
    tmp_path: Path,
) -> None:
    """Whether they say it before the reset or behind it; another version finds nothing, nor do the files."""
    with engine_of(state, models["old"], store, tmp_path / "first") as engine:
        engine.call(reload, str(models["new"]))
        engine.call(name, "step-1")
        assert engine.call(reset)
        until_named(engine)
        prompt, _ = conversed(engine, plain["new"], "shared", 2)
        settled(store)
    with engine_of(state, models["old"], store, tmp_path / "second") as engine:
        assert asked(engine, plain["old"], prompt, "mine") == 0
        # As vLLM does it around a pause: emptied, changed, named.
        assert engine.call(reset)
        engine.call(reload, str(models["new"]))
        engine.call(name, "step-1")
        until_named(engine)
        assert asked(engine, plain["new"], prompt, "shared") > 0
        # A version that comes behind what was computed waits for a reset.
        engine.call(name, "step-2")
        assert asked(engine, plain["new"], prompt, "shared") == 0
        assert engine.call(reset)
        until_named(engine)
        assert asked(engine, plain["new"], prompt, "shared") == 0
        settled(store)
        assert asked(engine, plain["new"], prompt, "shared") > 0
    given = {"weights_version": "step-1"}
    with engine_of(state, models["old"], store, tmp_path / "third", extra=given) as engine:
        # It has the old files, and claims to have what the others had: that is the claim that counts.
        engine.call(reload, str(models["new"]))
        assert asked(engine, plain["new"], prompt, "shared") == 0
    with ctxcache.connect(store.target) as cache:
        forgotten = cache.models.forget("models/tiny", "step-1")
        assert forgotten.session_count


@pytest.mark.parametrize("state", ["blocks", "kv", "hidden"])
def test_a_change_within_a_request_publishes_nothing_mixed(
    state: str,
    models: dict[str, Path],
    plain: dict[str, VllmEngine],
    store: ServerProcess,
    tmp_path: Path,
) -> None:
    """What was computed before it stays, and is right for a healthy engine; what came behind it is gone."""
    prompt = opening(50)
    with engine_of(state, models["old"], store, tmp_path / "log") as engine:
        engine.call(within, 12, "reload", str(models["new"]))
        mixed = after(prompt, engine.turn(prompt, "torn", 3 * BLOCK_TOKENS), 1)
        settled(store)
        assert engine.call(reset)
        until_named(engine)
        assert asked(engine, plain["new"], mixed, "torn") == 0
        settled(store)
        assert asked(engine, plain["new"], mixed, "torn") > 0
    with engine_of(state, models["old"], store, tmp_path / "healthy") as engine:
        asked(engine, plain["old"], mixed, "torn")
        asked(engine, plain["old"], mixed, "other")


def test_a_reset_that_vllm_refuses_names_nothing(
    models: dict[str, Path], plain: dict[str, VllmEngine], store: ServerProcess, tmp_path: Path
) -> None:
    """A request runs: vLLM keeps its blocks, so that nothing is restored or saved until it resets."""
    with engine_of("blocks", models["old"], store, tmp_path / "log") as engine:
        prompt, _ = conversed(engine, plain["old"], "some", 2)
        settled(store)
        engine.call(within, 12, "reset")
        engine.turn(opening(60), "running", COUNT)
        assert "still has what the old weights computed" in engine.log
        assert asked(engine, plain["old"], prompt, "some") == 0
        before = settled(store)
        assert asked(engine, plain["old"], prompt, "some") == 0
        assert settled(store) == before
        assert engine.call(reset)
        until_named(engine)
        asked(engine, plain["old"], prompt, "some")
        settled(store)
        assert asked(engine, plain["old"], prompt, "some") > 0


@pytest.mark.parametrize("kind", ["blocks", "offloading"])
def test_weights_that_are_not_loaded_have_no_name(
    kind: str, models: dict[str, Path], plain: dict[str, VllmEngine], store: ServerProcess, tmp_path: Path
) -> None:
    """An engine that is to be given its weights starts with random ones: they are not those of its files."""
    prompt = opening(70)
    with engine_of(kind, models["old"], store, tmp_path / "log", load_format="dummy") as engine:
        engine.turn(prompt, "early", COUNT)
        assert settled(store) == 0
        engine.call(name, "step-7")
        assert engine.call(reset)
        until_named(engine)
        engine.turn(prompt, "early", COUNT)
        assert settled(store) > 0
    with engine_of(kind, models["old"], store, tmp_path / "healthy") as engine:
        assert asked(engine, plain["old"], prompt, "early") == 0
