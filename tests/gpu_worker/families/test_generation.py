"""Greedy continuation: the engine's own text, step by step and in bounded pieces."""

import itertools
from typing import Any

import pytest
import torch
from tiny_models import CONFIGS, build
from transformers import DynamicCache, PreTrainedModel

from ctxcache.errors import InvalidArgument
from gpu_worker.families.generation import continue_greedy, prefill, stream_greedy

PROMPT = list(range(3, 60))


def _cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


@pytest.mark.parametrize("name", CONFIGS)
def test_text_is_that_of_generate(name: str) -> None:
    """Stepping by hand gives the tokens that the engine's own greedy generate gives."""
    model = build(name)
    # Any: transformers types `generate` as a tensor.
    engine: Any = model
    expected = engine.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False)

    turn = continue_greedy(model, _cache(model), PROMPT, max_new_tokens=8)

    assert turn.token_ids == expected[0, len(PROMPT) :].tolist()
    assert turn.first_token_ns > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "deepseek"])
def test_prefill_in_pieces_is_the_same_prefill(name: str) -> None:
    """Prefilling 57 tokens 16 at a time gives the logits of one pass, to rounding."""
    model = build(name)

    whole = prefill(model, _cache(model), PROMPT)
    pieces = prefill(model, _cache(model), PROMPT, piece_tokens=16)

    assert float((whole - pieces).abs().max() / whole.abs().max()) < 1e-4


def test_generation_ends_at_an_end_token() -> None:
    """The end token is the last one yielded, and the model's own is used by default."""
    model = build("llama")
    text = continue_greedy(model, _cache(model), PROMPT, max_new_tokens=8).token_ids
    assert model.generation_config is not None
    model.generation_config.eos_token_id = [text[3]]

    by_default = continue_greedy(model, _cache(model), PROMPT, max_new_tokens=8).token_ids
    overruled = continue_greedy(model, _cache(model), PROMPT, max_new_tokens=8, eos_token_ids=()).token_ids

    assert by_default == text[: text.index(text[3]) + 1]
    assert overruled == text


def test_tokens_stream_one_pass_at_a_time() -> None:
    """A reader that stops after three tokens has run no pass for a fourth."""
    model = build("llama")
    cache = _cache(model)

    tokens = list(itertools.islice(stream_greedy(model, cache, PROMPT, max_new_tokens=8), 3))

    assert len(tokens) == 3
    assert cache.get_seq_length() == len(PROMPT) + 2


def test_nothing_to_continue_from_is_refused() -> None:
    """A turn of no tokens has no logits to choose from."""
    model = build("llama")

    with pytest.raises(InvalidArgument, match="token_ids"):
        prefill(model, _cache(model), [])
