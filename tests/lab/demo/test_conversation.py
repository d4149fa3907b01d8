"""Conversations of real text are append-only token sequences of the wanted size."""

from itertools import islice

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lab.demo.text import PLAIN_FORMAT, chat_format, passages, sentences, turn_ids, user_turns

_CHATML = (
    "{% for message in messages %}{% if loop.first %}{{ '<|im_start|>system\\nBe brief<|im_end|>\\n' }}{%"
    " endif %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}{% endfor"
    " %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes, and two special ones; no chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: token_id for token_id, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)  # type: ignore[no-untyped-call]
    tokenizer.add_special_tokens({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    return tokenizer


@pytest.mark.parametrize("answer_ends", ["<|im_end|>", ""])
def test_turns_add_up_to_what_the_template_renders(
    tokenizer: PreTrainedTokenizerFast, answer_ends: str
) -> None:
    """Turn by turn gives the ids of the whole conversation, whether or not the model closed its answer."""
    tokenizer.chat_template = _CHATML
    chat = chat_format(tokenizer)

    ids = turn_ids(tokenizer, chat, "one?", previous=[])
    ids += tokenizer.encode(f"1{answer_ends}")
    ids += turn_ids(tokenizer, chat, "two?", previous=ids)

    conversation = [
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two?"},
    ]
    rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert ids == tokenizer.encode(str(rendered), add_special_tokens=False)


def test_without_a_template_turns_are_plain_text(tokenizer: PreTrainedTokenizerFast) -> None:
    """A base model gets User and Assistant lines."""
    chat = chat_format(tokenizer)

    first = turn_ids(tokenizer, chat, "one?", previous=[])
    second = turn_ids(tokenizer, chat, "two?", previous=[*first, 50])

    assert chat == PLAIN_FORMAT
    assert tokenizer.decode(first) == "User: one?\nAssistant:"
    assert tokenizer.decode(second) == "\nUser: two?\nAssistant:"


def test_passages_are_prose() -> None:
    """Enough sentences of letters, without headings, listings, grammar or emphasis marks."""
    text = [sentence for passage in passages() for sentence in sentences(passage)]

    assert len(text) > 300
    assert all(10 <= len(sentence) < 2_000 for sentence in text)
    assert not any("::=" in sentence or "\n" in sentence or "====" in sentence for sentence in text)


@pytest.mark.parametrize("token_count", [100, 600, 3_000])
def test_turns_are_of_the_wanted_size(tokenizer: PreTrainedTokenizerFast, token_count: int) -> None:
    """No turn is over the size by more than the joins, and on average they are near it."""
    sizes = [
        len(tokenizer.encode(turn)) for turn in islice(user_turns(tokenizer, token_count=token_count), 30)
    ]

    assert max(sizes) <= token_count + 4
    assert sum(sizes) / len(sizes) >= 0.7 * token_count


def test_conversations_that_start_at_other_turns_differ(tokenizer: PreTrainedTokenizerFast) -> None:
    """The same arguments give the same text, another first turn gives other text."""
    first, again, other = (
        list(islice(user_turns(tokenizer, token_count=300, first_turn=begin), 4)) for begin in (0, 0, 4)
    )

    assert first == again
    assert not set(first) & set(other)
