"""Retrieval: whether a model still finds what its context says when its cache comes back from fewer bits.

Two trials. Needle: sentences that name a number stand at even depths of a text. Recall: a list of keys with
numbers, and nothing else. Each fact is asked for behind the context. It is found if every token of its answer
is the likeliest one, the tokens before it given. Without a tokenizer, spans of the text itself are asked for:
how it went on behind a dozen tokens.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import Cache, PreTrainedTokenizerBase

from gpu_worker.families import Adapter
from lab.quality.divergence import logits_of

NAMES = (
    "Amsterdam",
    "Berlin",
    "Cairo",
    "Dublin",
    "Edinburgh",
    "Florence",
    "Geneva",
    "Hamburg",
    "Istanbul",
    "Jakarta",
    "Kyoto",
    "Lisbon",
    "Madrid",
    "Nairobi",
    "Oslo",
    "Paris",
    "Quito",
    "Rome",
    "Stockholm",
    "Tokyo",
    "Utrecht",
    "Vienna",
    "Warsaw",
    "Zurich",
)

ASKED, ANSWERED = 12, 3
"""Tokens of a span that is asked for, and of its answer."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A question, and the tokens that answer it."""

    asked: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """A context, and what is asked for behind it."""

    token_ids: tuple[int, ...]
    facts: tuple[Fact, ...]


def trials(
    text_ids: Sequence[int],
    context_count: int,
    fact_count: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> dict[str, Trial]:
    """The trials, with needles in `context_count` tokens. Raises ValueError for more facts than names."""
    if not 0 < fact_count <= len(NAMES):
        raise ValueError(f"{fact_count} facts are not within [1, {len(NAMES)}]")
    if tokenizer is None:
        text = tuple(text_ids[:context_count])
        begins = [(len(text) - ASKED - ANSWERED) * number // fact_count for number in range(fact_count)]
        spans = [Fact(text[at : at + ASKED], text[at + ASKED :][:ANSWERED]) for at in begins]
        return {"needle": Trial(text, tuple(spans))}
    dice = random.Random(7)  # noqa: S311
    told = [(name, f"{dice.randrange(100, 1000)}") for name in dice.sample(NAMES, fact_count)]

    def fact(question: str, answer: str) -> Fact:
        asked, found = (tokenizer.encode(part, add_special_tokens=False) for part in (question, answer))
        return Fact(tuple(asked), tuple(found))

    needles = [fact(f" The secret number of {name} is", f" {number}.") for name, number in told]
    pairs = [fact(f"\n{name}:", f" {number}") for name, number in told]
    room = context_count - sum(len(one.asked) + len(one.answer) for one in needles)
    hay: list[int] = []
    for number, one in enumerate(needles):
        hay += text_ids[room * number // fact_count : room * (number + 1) // fact_count]
        hay += [*one.asked, *one.answer]
    listed = [token for one in pairs for token in (*one.asked, *one.answer)]
    return {"needle": Trial(tuple(hay), tuple(needles)), "recall": Trial(tuple(listed), tuple(pairs))}


def recalled(adapter: Adapter, cache: Cache, trial: Trial) -> float:
    """The share of a trial's facts that are found behind a cache of its context, which is left as it is."""
    found = 0
    for fact in trial.facts:
        logits = logits_of(adapter, copy.deepcopy(cache), [*fact.asked, *fact.answer])
        begin = len(fact.asked) - 1
        guesses = logits[begin : begin + len(fact.answer)].argmax(-1).tolist()
        found += guesses == list(fact.answer)
    return found / len(trial.facts)
