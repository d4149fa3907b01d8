"""LoRA adapters in a real vLLM with a store: an adapter gets no rows of its model, and the model none of it.

Run by `make engines`. Two adapters change K and V of every layer. Each reply is compared with that of an
engine that has the same adapters, and neither a store nor a cache.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lab.engines.families import SHAPE
from lab.engines.vllm_process import Reply, VllmEngine
from tests.engines.vllm_small import model
from tests.engines.vllm_weights import COUNT, opening, settled
from tests.server_process import ServerProcess

__all__ = ["model"]

RANK = 8
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
ONE_BY_ONE: dict[str, Any] = {"max_num_seqs": 1}
CONFIG = """{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
 "target_modules": ["q_proj", "k_proj", "v_proj"]}"""


def write_adapter(directory: Path, seed: int) -> None:
    """The files of an adapter with random weights, as PEFT writes them."""
    random = torch.Generator().manual_seed(seed)
    width, head = SHAPE["hidden_size"], SHAPE["head_dim"]
    sizes = {
        "q_proj": SHAPE["num_attention_heads"] * head,
        "k_proj": SHAPE["num_key_value_heads"] * head,
        "v_proj": SHAPE["num_key_value_heads"] * head,
    }
    weights = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, size in sizes.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, width, generator=random) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(size, RANK, generator=random) * 0.2
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(CONFIG)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Two adapters, and none, by name."""
    place = tmp_path_factory.mktemp("adapters")
    return {"none": {}, "first": adapter(place, "first", 1), "second": adapter(place, "second", 2)}


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """An engine that takes adapters, has no store and keeps nothing between requests."""
    with VllmEngine(model, None, tmp_path_factory.mktemp("plain") / "log", **LORA) as engine:
        yield engine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store of the test's own."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


def adapter(place: Path, name: str, number: int) -> dict[str, Any]:
    """A new adapter, as a request names it."""
    write_adapter(place / name, number)
    return {"lora_name": name, "lora_int_id": number, "lora_path": str(place / name)}


def turn(engine: VllmEngine, prompt: list[int], session: str | None, by: Mapping[str, Any]) -> Reply:
    """One request by an adapter, or by the model where that is empty."""
    return engine.ask({"prompt": prompt, "session": session, "count": COUNT, "adapter": by})[0]


def test_adapters_and_their_model_share_no_rows(
    model: Path,
    plain: VllmEngine,
    adapters: dict[str, dict[str, Any]],
    store: ServerProcess,
    tmp_path: Path,
) -> None:
    """With a name and without, whichever came first; adapters neither restore nor save.

    An adapter that is replaced under its name is no exception.
    """
    asked: list[tuple[str | None, tuple[str, ...]]] = [
        ("alice", ("none", "first", "second", "none")),
        ("bob", ("first", "second", "none", "first", "none")),
        (None, ("none", "second", "first", "none")),
        (None, ("second", "none", "second", "none")),
    ]
    with VllmEngine(model, store.target, tmp_path / "log", **LORA, **ONE_BY_ONE) as engine:
        for number, (session, order) in enumerate(asked):
            prompt = opening(number)
            right = {name: turn(plain, prompt, None, one).token_ids for name, one in adapters.items()}
            assert len(set(right.values())) == len(adapters)
            for place, name in enumerate(order):
                reply = turn(engine, prompt, session, adapters[name])
                assert reply.token_ids == right[name], (session, order, place)
                is_again = name == "none" and "none" in order[:place]
                assert (reply.cached_count > 0) == is_again, engine.log
                settled(store)

        replaced = adapter(tmp_path, "third", 3)
        turn(engine, prompt, "carol", replaced)
        settled(store)
        write_adapter(tmp_path / "third", 7)
        reply = turn(engine, prompt, "carol", replaced | {"load_inplace": True})
        assert reply.cached_count == 0
        assert reply.token_ids == turn(plain, prompt, None, replaced).token_ids


def test_a_cpu_that_would_mix_adapters_into_the_models_rows_is_refused(
    model: Path,
    plain: VllmEngine,
    adapters: dict[str, dict[str, Any]],
    store: ServerProcess,
    tmp_path: Path,
) -> None:
    """In a batch with an adapter vLLM by itself answers otherwise; the refusal may go where it does not."""
    requests = [
        {"prompt": opening(9), "session": None, "count": COUNT, "adapter": adapters[name]}
        for name in ("none", "first")
    ]
    alone = plain.ask(requests[0])[0]
    assert plain.ask(*requests)[0].token_ids != alone.token_ids
    with (
        pytest.raises(RuntimeError, match="by an adapter, where a batch has both"),
        VllmEngine(model, store.target, tmp_path / "log", **LORA),
    ):
        pass


@pytest.mark.parametrize("state", ["kv", "hidden"])
def test_states_that_are_proved_by_a_pass_are_refused(state: str, model: Path, tmp_path: Path) -> None:
    """With a sentence, where layers that take adapters would end the proof by an error of their own."""
    with (
        pytest.raises(RuntimeError, match=f"state={state} cannot be proved on layers that take LoRA"),
        VllmEngine(model, "127.0.0.1:1", tmp_path / "log", extra={"state": state}, **LORA, **ONE_BY_ONE),
    ):
        pass
