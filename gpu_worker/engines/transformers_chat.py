"""Conversations as messages: an engine that renders them, answers, and computes their next rendering ahead.

```
   messages ──template──► prompt ──► engine.turn ──► reply ──parse──► message
                                                                         │
   Ahead ◄── what the next prompt begins with ◄──template── messages and message
```

A tokenizer's chat template is all that it knows of a model. Worst case: a template that refuses the next
rendering; then nothing is computed ahead, and the turn is as without this.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from transformers import PreTrainedTokenizerBase

from ctxcache.client.wire import Closing
from gpu_worker.engines.ahead import Ahead
from gpu_worker.engines.next_prompts import Message, UsualWays, next_history, stated_history
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn

log = logging.getLogger(__name__)

# Any: what templates and parsers take and give.
Template = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """A reply: its `message`, as it is to be sent back, and the engine's `turn`."""

    message: dict[str, Any]
    turn: Turn


class Chat(Closing):
    """An engine's conversations, told by messages, in any threads. Close it before the engine."""

    def __init__(
        self,
        engine: TransformersEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        parse: Callable[[str], Message] | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """`parse` makes the message of a reply's text, special tokens included.

        By default the tokenizer's `response_template` does, and where it has none the text is the content.
        `ahead`: the engine's, where its settings are other ones; whoever made it closes it.
        """
        self._engine, self._tokenizer, self._parse = engine, tokenizer, parse
        self._owns_ahead = ahead is None
        self.ahead = ahead or Ahead(engine)
        """What computes the next renderings."""
        self._usual: UsualWays[Template] = UsualWays()
        self._lock = threading.Lock()
        """Over the tokenizer, which no two threads may use at once, and the usual ways."""

    def close(self) -> None:
        """End the thread of passes ahead, where it is this one's."""
        if self._owns_ahead:
            self.ahead.close()

    def turn(
        self,
        session_id: str,
        messages: Sequence[Message],
        *,
        max_new_tokens: int,
        template: Template | None = None,
        eos_token_ids: Collection[int] | None = None,
        on_token: Callable[[int], None] = lambda _token: None,
        labels: Mapping[str, str] | None = None,
        return_in: timedelta | None = None,
    ) -> ChatTurn:
        """Reply to messages; then have computed ahead what the next prompt begins with.

        `template`: arguments of the chat template, as `tools` or an effort level. The next rendering is that
        of the arguments by which the conversation was asked most of late. `return_in`: see `Ahead.offer`.
        Others are those of `TransformersEngine.turn`, and so are the errors.
        """
        template = dict(template or {})
        prompt = self._rendered(messages, template)
        turn = self._engine.turn(
            session_id,
            prompt[-1:],
            history=prompt[:-1],
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            on_token=on_token,
            labels=labels,
        )
        with self._lock:
            message = {"role": "assistant", **self._parsed(turn.token_ids, prompt, template)}
            usual = self._usual.asked(session_id, template)
        # One that outgrew the context is cut by the engine, and begins otherwise than its messages.
        if not turn.dropped_token_count:
            self._offer_next(session_id, [*messages, message], usual, return_in)
        return ChatTurn(message, turn)

    def offer(
        self,
        session_id: str,
        messages: Sequence[Message],
        *,
        template: Template | None = None,
        return_in: timedelta | None = None,
    ) -> None:
        """Have computed ahead what a client will send that prunes or compacts. Returns at once.

        The last of `messages` is the next one, or the reply before that.
        """
        history = stated_history(lambda told: self._rendered(told, template or {}), messages)
        self.ahead.offer(session_id, history, return_in=return_in)

    def _offer_next(
        self, session_id: str, messages: Sequence[Message], template: Template, return_in: timedelta | None
    ) -> None:
        try:
            history = next_history(lambda following: self._rendered(following, template), messages)
        # The reply is there. A template raises whatever it likes at messages that it does not take.
        except Exception as error:  # noqa: BLE001
            log.info("next_not_rendered session=%a error=%s", session_id, error)
            return
        self.ahead.offer(session_id, history, return_in=return_in)

    def _rendered(self, messages: Sequence[Message], template: Template) -> list[int]:
        given: dict[str, Any] = {"add_generation_prompt": True, **template}
        with self._lock:
            text = self._tokenizer.apply_chat_template(list(map(dict, messages)), tokenize=False, **given)
            return list(self._tokenizer.encode(str(text), add_special_tokens=False))

    def _parsed(self, token_ids: Sequence[int], prompt: Sequence[int], template: Template) -> Message:
        if self._parse is not None:
            return self._parse(str(self._tokenizer.decode(list(token_ids))))
        if getattr(self._tokenizer, "response_template", None) is not None:
            parsed: Message = self._tokenizer.parse_response(
                list(token_ids), prefix=list(prompt), tools=template.get("tools")
            )
            return parsed
        return {"content": str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))}
