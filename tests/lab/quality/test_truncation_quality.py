"""The quality harness: where the truth is known it says it, and where a cut is wrong it shows."""

import pytest
import torch
from tiny_models import VOCABULARY_SIZE, build

from gpu_worker.model.proof import adapt
from lab.quality.truncation import Context, Cut, accuracies, perplexities

WINDOW, SINKS = 48, 4


def _ids(count: int, seed: int = 3) -> list[int]:
    return torch.randint(VOCABULARY_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_one_layer_is_cut_exactly_and_naively_is_not() -> None:
    """A layer whose input knows no other token.

    Decoupled truncation is recomputation, the naive one is not.
    """
    adapter = adapt(build("llama", layer_count=1))
    found = perplexities(adapter, _ids(120), list(Cut), window=WINDOW, sink_count=SINKS)
    standard = found[Cut.RECOMPUTE].perplexity
    assert found[Cut.DECOUPLED].perplexity == pytest.approx(standard, rel=1e-6)
    assert found[Cut.FRESH_START].perplexity == pytest.approx(standard, rel=1e-6)
    assert abs(found[Cut.NAIVE].perplexity / standard - 1) > 1e-3
    assert {predicted.token_count for predicted in found.values()} == {3 * (WINDOW // 2 - 1)}


def test_more_layers_are_cut_approximately() -> None:
    """The remaining tokens have attended to the dropped ones: close to recomputation, but not equal."""
    adapter = adapt(build("llama", layer_count=3))
    found = perplexities(adapter, _ids(72), [Cut.RECOMPUTE, Cut.DECOUPLED], window=WINDOW, sink_count=SINKS)
    assert found[Cut.DECOUPLED].perplexity != found[Cut.RECOMPUTE].perplexity
    assert found[Cut.DECOUPLED].perplexity == pytest.approx(found[Cut.RECOMPUTE].perplexity, rel=0.2)


def test_every_cut_keeps_half_a_window_and_the_sinks_cut_the_first_tokens() -> None:
    """Token ids, rows and cache agree on what is there."""
    adapter, ids = adapt(build("llama", layer_count=2)), _ids(WINDOW)
    begun = Context.empty(adapter, Cut.NONE, sink_count=SINKS)
    begun.feed(ids)
    for cut in set(Cut) - {Cut.NONE}:
        context = begun.fork(cut)
        context.halve()
        kept = ids[:SINKS] + ids[WINDOW // 2 + SINKS :] if cut is Cut.SINKS else ids[WINDOW // 2 :]
        assert context.token_ids == kept
        assert {len(rows) for rows in context.rows.values()} == {len(kept)}
        assert context.cache.get_seq_length() == len(kept)
    assert begun.token_ids == ids
    assert begun.cache.get_seq_length() == WINDOW


def test_too_little_text_is_refused() -> None:
    """Before anything is run."""
    adapter = adapt(build("llama", layer_count=1))
    with pytest.raises(ValueError, match="leave nothing to score"):
        perplexities(adapter, _ids(WINDOW), [Cut.NAIVE], window=WINDOW, sink_count=SINKS)
    with pytest.raises(ValueError, match="tokens of facts"):
        accuracies(
            adapter, _ids(10), lambda text: [1] * len(text), [Cut.NAIVE], window=WINDOW, sink_count=SINKS
        )


def test_a_model_that_knows_nothing_retrieves_nothing() -> None:
    """The control of the retrieval task: random weights do not guess three digits."""
    adapter = adapt(build("llama", layer_count=1))

    def encode(text: str) -> list[int]:
        return [sum(word.encode()) % VOCABULARY_SIZE for word in text.split()]

    found = accuracies(adapter, _ids(400), encode, [Cut.SINKS], window=440, sink_count=SINKS)
    assert found[Cut.SINKS] <= 0.1
