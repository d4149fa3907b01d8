"""Models whose layers keep different tokens, in a real vLLM: some a window, some all, some a chunk.

Run by `make engines`, in an environment that has vLLM. vLLM keeps their caches in groups, and frees blocks
that a window leaves behind while a prompt is still computed. Each reply is compared token for token with that
of the same model in an engine that computes every prompt.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from gpu_worker.engines.vllm.versions import has
from lab.engines.families import SHAPE
from lab.engines.vllm_process import VllmEngine
from tests.engines.vllm_matrix import damage
from tests.engines.vllm_small import plain, store
from tests.server_process import ServerProcess

__all__ = ["plain", "store"]

pytestmark = pytest.mark.skipif(
    not has("transfer results"), reason="two kinds of cache are refused, see tests/engines/vllm_core.py"
)

BLOCK_TOKENS = 32
COUNT = 16
WINDOW = 48
"""Less than two blocks, so that a window's first block is cut in any prompt."""
FAR = 305
"""Tokens of a first prompt: several windows. With its reply, but for the last token, they are whole blocks.

Where as few tokens as can be are computed behind what is restored, a row that lacks shows most.
"""
KINDS = ["sliding_attention", "full_attention"] * 2
MIXED: dict[str, Any] = {**SHAPE, "num_hidden_layers": 4, "layer_types": KINDS, "sliding_window": WINDOW}
GEMMA: dict[str, Any] = {
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
    # Small beside what layers add to them, so that a reply is more than an echo of its last word.
    "initializer_range": 0.02,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Any] = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, MIXED | GEMMA),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, MIXED | GEMMA),
    "gpt-oss": (GptOssConfig, GptOssForCausalLM, MIXED | EXPERTS),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM, MIXED),
    # All layers have the window: one group, of which no layer keeps every token.
    "mistral": (MistralConfig, MistralForCausalLM, {**SHAPE, "sliding_window": WINDOW}),
}


@pytest.fixture(scope="module", params=[*MODELS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, in files."""
    torch.manual_seed(0)
    config, build, shape = MODELS[request.param]
    directory: Path = tmp_path_factory.mktemp("models") / request.param
    build(config(**shape)).save_pretrained(directory)
    return directory


def opening(number: int, count: int = FAR) -> list[int]:
    """The first prompt of a conversation: another one for each."""
    return [(11 * number + 5 * i * i + i) % 500 + 3 for i in range(count)]


def whole_blocks(token_count: int) -> int:
    """Tokens of a prompt that whole blocks hold, its last one left to be computed."""
    return (token_count - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def compare(
    engine: VllmEngine, plain: VllmEngine, prompt: list[int], name: str | None
) -> tuple[int, list[int]]:
    """Ask, and compare; tokens that were not computed, and the conversation with its reply."""
    reply, expected = engine.turn(prompt, name, COUNT), plain.turn(prompt, None, COUNT)
    assert reply.token_ids == expected.token_ids, engine.log[-2000:]
    return reply.cached_count, [*prompt, *reply.token_ids]


def test_a_conversation_returns(model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path) -> None:
    """To the same process, to another one, and after a restart of the store."""
    prompt = opening(1)
    with VllmEngine(model, store.target, tmp_path / "log") as engine:
        for turn in range(3):
            known = whole_blocks(len(prompt) - 1) if turn else 0
            found, prompt = compare(engine, plain, prompt, "alice")
            assert found == known
            prompt += opening(turn, 1)
    store.terminate()
    store.start()
    with VllmEngine(model, store.target, tmp_path / "log2") as engine:
        found, _ = compare(engine, plain, prompt, "alice")
        assert found == whole_blocks(len(prompt) - 1)


def test_a_prompt_is_computed_in_parts_shorter_than_its_window(
    model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """Blocks that the window leaves behind are freed, and another's, before the prompt is computed."""
    options: dict[str, Any] = {"max_num_batched_tokens": BLOCK_TOKENS, "enable_chunked_prefill": True}
    with VllmEngine(model, store.target, tmp_path / "log", **options) as engine:
        _, first = compare(engine, plain, opening(1), "alice")
        _, second = compare(engine, plain, opening(2), "bob")
        for prompt, name in ((first, "alice"), (second, "bob")):
            found, _ = compare(engine, plain, [*prompt, 7], name)
            assert found == whole_blocks(len(prompt))


def test_a_conversation_goes_back(
    model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """It is cut where its window has to reach back to tokens that no window kept."""
    with VllmEngine(model, store.target, tmp_path / "log") as engine:
        compare(engine, plain, opening(1), "alice")
        for count in (257, 129, 65):
            again = [*opening(1, count), *opening(count, 2)]
            found, _ = compare(engine, plain, again, "alice")
            assert found == count // BLOCK_TOKENS * BLOCK_TOKENS


def test_another_conversation_begins_alike(
    model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """A prefix that the store finds is restored from the first token that a window needs."""
    with VllmEngine(model, store.target, tmp_path / "log") as engine:
        compare(engine, plain, opening(1), None)
        for number in range(2, 6):
            found, _ = compare(engine, plain, [*opening(1, 194), number], None)
            assert found == 192


def test_beside_the_engines_own_cache(
    model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """It has all of some prompts, of others the end of a window, and too little room for most."""
    options: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks_override": 80}
    conversations = {f"user-{number}": opening(number) for number in range(5)}
    with VllmEngine(model, store.target, tmp_path / "log", **options) as engine:
        for turn in range(4):
            for number, name in enumerate(conversations):
                # Some come twice in a row, others after all have been evicted.
                for _ in range(1 + (number + turn) % 2):
                    _, prompt = compare(engine, plain, conversations[name], name)
                conversations[name] = [*prompt, *opening(turn + number, 7 + number)]
        # Prompts without a session, of which the engine has the beginning.
        for number in range(5):
            compare(engine, plain, [*opening(number, 150), *opening(9, 40)], None)
    with VllmEngine(model, store.target, tmp_path / "log2") as engine:
        found = [compare(engine, plain, prompt, name)[0] for name, prompt in conversations.items()]
        # Back to where windows once were, in what was saved beside that cache.
        for name, prompt in conversations.items():
            compare(engine, plain, [*prompt[:130], *opening(3, 20)], name)
    assert min(found) > FAR // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS


def test_what_the_engines_own_cache_had_of_a_prompt_is_not_saved_in_part(
    model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path
) -> None:
    """Of a window it keeps the last tokens alone, and a session that goes back needs others."""
    options: dict[str, Any] = {"enable_prefix_caching": True, "extra": {"prefixes": False}}
    with VllmEngine(model, store.target, tmp_path / "log", **options) as engine:
        compare(engine, plain, opening(1), "alice")
        found, _ = compare(engine, plain, [*opening(1), 3, 4], "bob")
        assert found >= 288
    with VllmEngine(model, store.target, tmp_path / "log2", extra={"prefixes": False}) as engine:
        for count in (257, 129, 65):
            compare(engine, plain, [*opening(1, count), 5], "bob")


def test_sessions_are_damaged(model: Path, plain: VllmEngine, store: ServerProcess, tmp_path: Path) -> None:
    """A load that fails behind the first of its two reads leaves a prompt that is computed."""
    with VllmEngine(model, store.target, tmp_path / "log") as engine:
        _, prompt = compare(engine, plain, opening(1), "alice")
    damage(store)
    with VllmEngine(model, store.target, tmp_path / "log2") as engine:
        compare(engine, plain, [*prompt, *opening(2, 10)], "alice")


def test_rows_of_such_a_model_are_refused_where_it_has_groups(
    model: Path, store: ServerProcess, tmp_path: Path
) -> None:
    """The line says what helps."""
    if model.name == "mistral":
        pytest.skip("one group")
    refused = VllmEngine(model, store.target, tmp_path / "log", extra={"state": "kv"})
    with pytest.raises(RuntimeError, match="--disable-hybrid-kv-cache-manager"), refused:
        pass
