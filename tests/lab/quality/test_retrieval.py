"""Retrieval: what a context says is found behind its own cache, and not behind another's."""

import pytest
import torch
from tiny_models import VOCABULARY_SIZE, build
from transformers import DynamicCache

from gpu_worker.model.proof import adapt
from lab.quality.divergence import logits_of
from lab.quality.retrieval import Fact, Trial, recalled, trials


def test_facts_are_found_where_the_cache_knows_them() -> None:
    """Answers are what the model says behind the context; behind another context it says others."""
    adapter = adapt(build("llama", layer_count=2))
    ids = torch.randint(VOCABULARY_SIZE, (2, 40), generator=torch.Generator().manual_seed(5)).tolist()
    caches = [DynamicCache(config=adapter.model.config) for _ in ids]
    for cache, some in zip(caches, ids, strict=True):
        logits_of(adapter, cache, some)
    facts = []
    for asked in ids[1]:
        fresh = DynamicCache(config=adapter.model.config)
        answer = int(logits_of(adapter, fresh, [*ids[0], asked])[-1].argmax())
        facts.append(Fact((asked,), (answer,)))
    trial = Trial(tuple(ids[0]), tuple(facts))

    assert recalled(adapter, caches[0], trial) == 1
    assert recalled(adapter, caches[1], trial) < 1
    assert caches[0].get_seq_length() == 40


def test_a_text_without_a_tokenizer_is_asked_for_itself() -> None:
    """Spans at even depths, each with how it went on; more facts than there are names are refused."""
    (trial,) = trials(list(range(200)), 150, 5, None).values()

    assert trial.token_ids == tuple(range(150))
    assert [fact.asked[0] for fact in trial.facts] == [0, 27, 54, 81, 108]
    assert all(fact.answer[0] == fact.asked[-1] + 1 and len(fact.answer) == 3 for fact in trial.facts)
    with pytest.raises(ValueError, match="25 facts"):
        trials(list(range(200)), 150, 25, None)
