"""A conversation as one token sequence that only ever grows.

A chat template renders a whole conversation anew, and what it makes of an old answer need not be
the tokens that the model produced. A cache needs the opposite: each turn adds ids after those
there are. So the template is taken apart once, into what stands around a user's text.
Worst case: a template that treats later turns differently from the second is not followed there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_USER = "USERTEXT"
_ASSISTANT = "ASSISTANTTEXT"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What stands before the first user's text, between an answer and the next, and after each."""

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
