"""User messages of a wanted size: each quotes the Python reference and asks about the quote.

Worst case: where not even one sentence fits, its head is quoted; after some 20,000 tokens the
quotes repeat.
"""

from collections.abc import Iterator
from itertools import cycle, islice

from transformers import PreTrainedTokenizerBase

from gpu_worker.demo.text import passages, sentences

_QUESTIONS = (
    "What is the main point of this text?",
    "Explain this text to a beginner in one sentence.",
    "Which rule does this text state?",
    "Which term in this text matters most, and what does it mean?",
    "Give a short example of what this text describes.",
)


def user_turns(tokenizer: PreTrainedTokenizerBase, *, token_count: int, first_turn: int = 0) -> Iterator[str]:
    """Yield user texts of about `token_count` tokens, without end and without randomness.

    A text is at most one sentence short; the chat format around it comes on top. Conversations
    that differ in `first_turn` quote different places.
    """
    return islice(_all_turns(tokenizer, token_count), first_turn, None)


def _all_turns(tokenizer: PreTrainedTokenizerBase, token_count: int) -> Iterator[str]:
    supply = cycle([line for passage in passages() for line in sentences(passage)])
    sentence = next(supply)
    for question in cycle(_QUESTIONS):
        left = token_count - _size(tokenizer, _message("", question))
        quote: list[str] = []
        while (size := _size(tokenizer, f" {sentence}")) <= left:
            quote.append(sentence)
            left -= size
            sentence = next(supply)
        if not quote:
            quote.append(_head(tokenizer, sentence, max(1, left)))
            sentence = next(supply)
        yield _message(" ".join(quote), question)


def _message(quote: str, question: str) -> str:
    return f"The Python reference says:\n\n{quote}\n\n{question}"


def _head(tokenizer: PreTrainedTokenizerBase, sentence: str, token_count: int) -> str:
    ids = tokenizer.encode(sentence, add_special_tokens=False)
    return str(tokenizer.decode(ids[:token_count]))


def _size(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False))
