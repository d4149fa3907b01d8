"""The text of a conversation: real English in a user's messages, as a token sequence that only grows.

The text is the Python language reference, which every CPython ships: `pydoc_data.topics`, shown by
`help("NAMESPACES")`. The licence is Python's own, and nothing is copied into this project. The wording
differs between Python versions, so a figure measured on it names the version. A message quotes the reference
and asks about the quote; where not even one sentence fits, its head is quoted, and after some 20,000 tokens
the quotes repeat.

A chat template renders a whole conversation anew. The tokens of an old answer need not be those that the
model produced, while a cache needs each turn to add ids after those there are. So the template is taken apart
once, into the ids around a user's text. Worst case: a template that treats later turns differently from the
second is not followed.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pydoc_data.topics import topics

from transformers import PreTrainedTokenizerBase

# Chapters that are mostly sentences; the rest is tables, grammar and listings.
_TOPICS = (
    "objects",
    "execmodel",
    "naming",
    "exceptions",
    "attribute-access",
    "import",
    "typesmethods",
    "customization",
    "id-classes",
    "identifiers",
    "class",
    "function",
    "assignment",
    "comparisons",
    "try",
    "with",
    "raise",
    "global",
    "calls",
    "strings",
    "types",
    "numeric-types",
    "sequence-types",
    "context-managers",
    "typesmapping",
    "formatstrings",
    "debugger",
)

_SHORTEST_PARAGRAPH_CHARS = 80
_EMPHASIS = re.compile(r"\*{1,2}(\S(?:[^*\n]*\S)?)\*{1,2}")
_SENTENCE_END = re.compile(r"(?<=[a-z)\"]\.)\s+(?=[A-Z\"])")


@dataclass(frozen=True, slots=True)
class Passage:
    """Some prose on one subject, as paragraphs of whole sentences without line breaks."""

    title: str
    paragraphs: tuple[str, ...]


def passages() -> list[Passage]:
    """Return every chapter used, in a fixed order; one that this Python does not have is left out."""
    found = (_passage(topics[topic]) for topic in _TOPICS if topic in topics)
    return [passage for passage in found if passage.paragraphs]


def sentences(passage: Passage) -> Iterator[str]:
    """Split a passage where a full stop is followed by a capital; close enough to grammar here."""
    for paragraph in passage.paragraphs:
        yield from _SENTENCE_END.split(paragraph)


def _passage(topic: str) -> Passage:
    title = topic.strip().partition("\n")[0]
    blocks = re.split(r"\n\s*\n", topic)
    return Passage(title, tuple(_unwrap(block) for block in blocks if _is_prose(block)))


def _is_prose(block: str) -> bool:
    # Listings and grammar are indented, headings and lists are short or begin with a mark.
    return (
        len(block) >= _SHORTEST_PARAGRAPH_CHARS
        and (block[0].isupper() or block[0] == '"')
        and block.rstrip().endswith(".")
        and "\n   " not in block
        and "::=" not in block
    )


def _unwrap(block: str) -> str:
    return re.sub(r"\s+", " ", _EMPHASIS.sub(r"\1", block)).strip()


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


_USER = "USERTEXT"
_ASSISTANT = "ASSISTANTTEXT"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The template's parts before the first user's text, between an answer and the next, and after each."""

    opening: str
    between: str
    closing: str


PLAIN_FORMAT = ChatFormat(opening="User: ", between="\nUser: ", closing="\nAssistant:")


def chat_format(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """Take the tokenizer's chat template apart; without a template it is PLAIN_FORMAT."""
    if not tokenizer.chat_template:
        return PLAIN_FORMAT
    user, assistant = {"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}
    rendered = str(
        tokenizer.apply_chat_template([user, assistant, user], tokenize=False, add_generation_prompt=True)
    )
    opening, _, rest = rendered.partition(_USER)
    _, _, rest = rest.partition(_ASSISTANT)
    between, _, closing = rest.partition(_USER)
    return ChatFormat(opening=opening, between=between, closing=closing)


def turn_ids(
    tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, text: str, *, previous: Sequence[int]
) -> list[int]:
    """Return the ids to append so that the model answers `text` next.

    `previous` is everything so far, prompts and generated ids, or empty. If the last answer ended
    with the token that also begins `chat.between`, that token is not repeated.
    """
    if not previous:
        return _encode(tokenizer, chat.opening + text + chat.closing, is_first=True)
    ids = _encode(tokenizer, chat.between + text + chat.closing, is_first=False)
    answer_is_closed = ids[0] == previous[-1] and ids[0] in tokenizer.all_special_ids
    return ids[1:] if answer_is_closed else ids


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, is_first: bool) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    # A template writes its own begin token; the plain format leaves it to the tokenizer.
    begins_itself = bool(tokenizer.chat_template)
    if is_first and not begins_itself:
        return [*_begin_ids(tokenizer), *ids]
    return ids


def _begin_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that the tokenizer puts before any text, mostly one or none."""
    with_text: list[int] = tokenizer.encode("a")
    begin_id = tokenizer.bos_token_id
    return [begin_id] if with_text and with_text[0] == begin_id else []
