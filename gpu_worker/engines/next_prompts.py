"""The beginning of a conversation's next prompt, before anybody has written the next message.

```
   a reply          │ who writes next        │ two messages that could come
   an answer        │ a user                 │ user: a              user: b
   calls of tools   │ each tool, in order    │ tool: a, tool: a     tool: b, tool: b
```

A conversation is rendered with both; what both renderings begin with is known. No template is known by name.
Needs no engine and no torch. Worst case: a client that sends something else, and the pass was for nothing.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

# Any: what a chat template takes.
Message = Mapping[str, Any]
Way = TypeVar("Way")

_ASKED = 5
"""The last requests of a conversation by which its usual way is known."""
_MOST_KNOWN = 4096
"""Conversations whose requests are remembered."""


def possible_nexts(reply: Message) -> tuple[list[Message], list[Message]]:
    """Two continuations behind a reply, which differ in their contents alone: of a user, or of tools."""
    first, second = ([_next_of(reply, text, i) for i in range(_call_count(reply) or 1)] for text in "ab")
    return first, second


def _call_count(reply: Message) -> int:
    return len(reply.get("tool_calls") or ())


def _next_of(reply: Message, text: str, number: int) -> Message:
    if not _call_count(reply):
        return {"role": "user", "content": text}
    call = reply["tool_calls"][number]
    named = {"tool_call_id": call["id"]} if isinstance(call, Mapping) and call.get("id") else {}
    return {"role": "tool", "content": text, **named}


def next_history(render: Callable[[list[Message]], Sequence[int]], messages: Sequence[Message]) -> list[int]:
    """The tokens that the next prompt begins with, whatever its next message says.

    `render` gives a conversation's token ids, as a chat template has them; the last of `messages` is the
    reply as the client will send it.
    """
    first, second = (render([*messages, *following]) for following in possible_nexts(messages[-1]))
    return list(first[: common_count(first, second)])


def stated_history(
    render: Callable[[list[Message]], Sequence[int]], messages: Sequence[Message]
) -> list[int]:
    """The tokens of messages that a client says it will send: all of a prompt, or what a reply leaves known.

    Behind a reply stands a message that is not known yet, and before that a template may strip the reply.
    """
    if ends_with_reply(messages):
        return next_history(render, messages)
    return list(render(list(messages)))


def ends_with_reply(messages: Sequence[Message]) -> bool:
    """Whether another message follows before anything is asked."""
    return bool(messages) and messages[-1].get("role") == "assistant"


def common_count(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class UsualWays(Generic[Way]):
    """In which way each conversation is asked as a rule: its effort level, its tools. Not thread-safe.

    An effort level that is switched for one question renders all of the history otherwise, and so does the
    switch back.
    """

    def __init__(self) -> None:
        self._recent: OrderedDict[str, list[Way]] = OrderedDict()

    def asked(self, session_id: str, way: Way) -> Way:
        """A conversation was asked in this way. Returns the commonest of late; of equals the latest."""
        recent: list[Way] = [*self._recent.pop(session_id, ()), way][-_ASKED:]
        self._recent[session_id] = recent
        if len(self._recent) > _MOST_KNOWN:
            self._recent.popitem(last=False)
        usual = max(range(len(recent)), key=lambda i: (recent.count(recent[i]), i))
        return recent[usual]
