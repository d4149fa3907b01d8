"""Conversations as servers of OpenAI's API are told them: what was asked, what was said, what comes next.

```
   /v1/chat/completions   messages         ─┐                    ┌─ choices[0].message, or its deltas
                                            ├─► fields of a chat │
   /v1/responses          items of `input` ─┘                    └─ items of `output`, or the last event's
```

Items become messages as vLLM's own server makes them. Callers write all of this: what has another shape is no
conversation here, and its request is served as without this. Worst case: a conversation that a server renders
otherwise, which the count of its prompt's tokens shows.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from typing import Any

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PATHS = (CHAT, RESPONSES)
MOST_BODY_BYTES = 16 << 20
"""A larger request or reply is passed on, and nothing is computed ahead for it."""

# Any: what callers put into JSON.
Fields = dict[str, Any]

THOUGHTS = ("reasoning", "reasoning_content")
"""Names of a message's thought."""
WAYS = ("tools", "chat_template_kwargs", "reasoning_effort")
"""Fields that change how a history is rendered, and may be others in the next request."""
_TAKEN_OVER = (
    *("model", "session_id", "cache_salt", "kv_transfer_params", "chat_template_kwargs"),
    *("mm_processor_kwargs", "media_io_kwargs"),
)
_TEXTS = ("text", "input_text", "output_text")


class _Unknown(Exception):
    """A shape that is not told of here."""


def chat_fields(data: bytes) -> Fields | None:
    """The fields of a chat request, out of the body of either sort; None where it is neither."""
    if len(data) > MOST_BODY_BYTES:
        return None
    try:
        return chat_of(json.loads(data))
    except (ValueError, RecursionError):
        return None


def chat_of(body: Any) -> Fields | None:
    """As `chat_fields`, of a body that was read."""
    if not isinstance(body, dict):
        return None
    if "input" in body:
        with suppress(_Unknown, KeyError, TypeError, AttributeError):
            return _of_responses(body)
        return None
    messages = body.get("messages")
    is_chat = isinstance(messages, list) and messages and all(isinstance(one, dict) for one in messages)
    return body if is_chat else None


def goes_on(body: Fields) -> bool:
    """Whether there is one reply, behind which the client may write."""
    given = body.get("kv_transfer_params")
    is_over = isinstance(given, dict) and bool(given.get("ends") or given.get("do_remote_decode"))
    is_continued = body.get("continue_final_message") or body["messages"][-1].get("role") == "assistant"
    return not is_over and not is_continued and body.get("n") in (None, 1)


def as_sent(reply: Fields, messages: Sequence[Fields]) -> Fields:
    """The message of a reply as its client sends it: without a thought, where it sent none before."""
    spoken = [message for message in messages if message.get("role") == "assistant"]
    if not spoken or any(message.get(name) for message in spoken for name in THOUGHTS):
        return reply
    return {name: value for name, value in reply.items() if name not in THOUGHTS}


def way_of(body: Fields) -> Fields:
    """The fields by which this request renders its history."""
    return {name: body[name] for name in WAYS if body.get(name) is not None}


class Reply:
    """The reply of a request, put together from what is sent to its client."""

    def __init__(self) -> None:
        self._is_right = self._is_stream = self._is_over = False
        self._data = bytearray()
        self.prompt_count: int | None = None
        """Tokens of the prompt, where the reply says it; known behind `message`."""

    def begin(self, status: int, content_type: str) -> None:
        """The reply begins."""
        self._is_right, self._is_stream = status == HTTPStatus.OK, "event-stream" in content_type

    def add(self, data: bytes) -> None:
        """These bytes of it were sent."""
        if len(self._data) <= MOST_BODY_BYTES:
            self._data += data

    def end(self) -> None:
        """All of it was sent."""
        self._is_over = True

    def message(self) -> Fields | None:
        """The assistant's message; None where there is none or several, or where it broke off."""
        if not self._is_right or not self._is_over or len(self._data) > MOST_BODY_BYTES:
            return None
        with suppress(_Unknown, ValueError, KeyError, TypeError, AttributeError, IndexError):
            parts = self._events() if self._is_stream else [json.loads(bytes(self._data))]
            responses = [found for part in parts if (found := _response_in(part)) is not None]
            usages = [part["usage"] for part in (*parts, *responses) if part.get("usage")]
            for usage in usages[-1:]:
                self.prompt_count = usage.get("prompt_tokens", usage.get("input_tokens"))
            if responses:
                return _said_in(responses[-1])
            return _said(parts, "delta" if self._is_stream else "message")
        return None

    def _events(self) -> list[Fields]:
        lines = bytes(self._data).decode().splitlines()
        events = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
        return [json.loads(event) for event in events if event != "[DONE]"]


def _said(parts: Sequence[Fields], where: str) -> Fields | None:
    """The one choice of a chat reply, as its client sends it back."""
    texts: Fields = {}
    calls: dict[int, Fields] = {}
    ended = ""
    for part in parts:
        for choice in part.get("choices", ()):
            if choice.get("index", 0):
                return None
            given = choice.get(where) or {}
            for key in ("content", *THOUGHTS):
                if isinstance(given.get(key), str):
                    texts[key] = texts.get(key, "") + given[key]
            for number, call in enumerate(given.get("tool_calls") or ()):
                _add_call(calls.setdefault(call.get("index", number), {}), call)
            ended = choice.get("finish_reason") or ended
    # A call that broke off is none that a client could answer.
    if ended not in ("stop", "tool_calls", *(() if calls else ("length",))):
        return None
    told = {"tool_calls": [calls[index] for index in sorted(calls)]} if calls else {}
    return {"role": "assistant", "content": "", **texts, **told}


def _add_call(call: Fields, given: Fields) -> None:
    """Add a delta to a call, or all of it: the arguments come in pieces."""
    function = call.setdefault("function", {"name": "", "arguments": ""})
    call["type"] = "function"
    if given.get("id"):
        call["id"] = given["id"]
    for name in ("name", "arguments"):
        function[name] += (given.get("function") or {}).get(name) or ""


def _response_in(part: Fields) -> Fields | None:
    """The response that has ended, in a whole reply or in the event that says so."""
    is_end = part.get("type") in ("response.completed", "response.incomplete")
    found = part.get("response") if is_end else part
    return found if isinstance(found, dict) and found.get("object") == "response" else None


def _said_in(response: Fields) -> Fields | None:
    if response.get("status") not in ("completed", "incomplete"):
        return None
    messages = _messages(response["output"], [])
    # Of several messages the server has called tools itself in between.
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        return None
    if response["status"] == "incomplete" and messages[0].get("tool_calls"):
        return None
    return {"content": "", **messages[0]}


def _of_responses(body: Fields) -> Fields:
    """The chat request of the same prompt. Raises _Unknown, and what a wrong shape raises."""
    # The server has the history, and renders it otherwise than from items.
    for name in ("previous_response_id", "previous_input_messages", "prompt", "background"):
        if body.get(name):
            raise _Unknown(name)
    given = body["input"]
    messages: list[Fields] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        _messages(given, messages)
    if not given:
        raise _Unknown("input")
    chat = {name: body[name] for name in _TAKEN_OVER if body.get(name) is not None}
    tools = [_tool(tool) for tool in body.get("tools") or ()]
    if tools:
        chat["tools"] = tools
    effort = (body.get("reasoning") or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    return chat | {"messages": messages}


def _tool(tool: Fields) -> Fields:
    if tool.get("type") != "function":
        raise _Unknown(tool.get("type"))
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


def _messages(items: Sequence[Fields], messages: list[Fields]) -> list[Fields]:
    """Add items to messages. A thought, a text and calls that follow each other are one message."""
    for item in items:
        kind = item.get("type") or "message"
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if kind == "function_call" and not item.get("namespace"):
            called = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": called}
            if last is None:
                messages.append({"role": "assistant", "tool_calls": [call]})
            else:
                last.setdefault("tool_calls", []).append(call)
        elif kind == "reasoning" and not item.get("encrypted_content"):
            _add_text("reasoning", _first_text(item.get("content") or item["summary"]), last, messages)
        elif kind == "message" and item["role"] == "assistant":
            _add_text("content", _first_text(item["content"]), last, messages)
        elif kind == "message":
            messages.append({"role": item["role"], "content": _text(item["content"])})
        elif kind == "function_call_output":
            said = {"role": "tool", "content": _text(item["output"]), "tool_call_id": item["call_id"]}
            messages.append(said)
        else:
            raise _Unknown(kind)
    return messages


def _add_text(name: str, text: str, last: Fields | None, messages: list[Fields]) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _first_text(content: Any) -> str:
    """What vLLM takes of a reply's parts."""
    return content if isinstance(content, str) else str(content[0]["text"])


def _text(content: Any) -> Any:
    """A text, or its parts as chat requests have them. Raises _Unknown for a picture."""
    if isinstance(content, str):
        return content
    if any(part["type"] not in _TEXTS for part in content):
        raise _Unknown("content")
    return [{"type": "text", "text": part["text"]} for part in content]
